//! A KV cache inside another program, without a server: `cargo run -p lmc-engine --example embed`.

use std::sync::Arc;

use lmc_engine::{CacheEngine, EngineConfig, OwnerId, Reservation, WriteRequest};
use lmc_key::{ChunkHasher, ChunkKey, HashAlgorithm, KeySpace, LayoutFingerprint};
use lmc_memory::ArenaConfig;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arena = Arc::new(ArenaConfig::anonymous(64 << 20).build()?);
    let engine = CacheEngine::new(EngineConfig::default(), arena)?;
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256)?;
    let space = KeySpace {
        algorithm: hasher.algorithm(),
        chunk_size: hasher.chunk_size(),
        model: "meta-llama/Llama-3.1-8B".parse()?,
        world_size: 1,
        layout: LayoutFingerprint::of(b"[2, 32, 256, 1024] bfloat16"),
        dtype: "bfloat16".parse()?,
        salt: "tenant-a".parse()?,
        identity: "".parse()?,
    };
    let prompt: Vec<u32> = (0..1000).collect();
    let key = |hash| ChunkKey {
        space: space.id(),
        kv_rank: 0,
        group: 0,
        hash,
    };
    let keys: Vec<_> = hasher.hash_prompt(&prompt).into_iter().map(key).collect();

    let (request, len) = (OwnerId(1), 1 << 20);
    let missing = &keys[engine.leading(&keys)..];
    let wanted: Vec<_> = missing
        .iter()
        .map(|&key| WriteRequest {
            key,
            parent: None,
            tenant: Default::default(),
            len,
        })
        .collect();
    let mut tickets = Vec::new();
    for reservation in engine.reserve(request, &wanted) {
        if let Reservation::Reserved(mut ticket) = reservation {
            ticket.bytes_mut().fill(42); // The engine's KV bytes go here.
            tickets.push(ticket);
        }
    }
    println!("stored {} chunks", engine.commit(tickets).len());
    let found = engine.lookup(OwnerId(2), &keys);
    println!(
        "found {} of {} chunks, {} bytes each",
        found.len(),
        keys.len(),
        len
    );
    Ok(())
}
