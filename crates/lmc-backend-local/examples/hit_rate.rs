//! Hit ratio of each policy on real request traces, by capacity.
//!
//! `cargo xtask bench hit-rate FOLDER`, with a folder of traces such as Mooncake publishes in
//! `FAST25-release/traces` of github.com/kvcache-ai/Mooncake.
//!
//! Replays traces in Mooncake's format (one JSON object a line with `hash_ids`, one id for each
//! block of 512 tokens, equal ids for equal prefixes) through a `LocalTier`: each request leases
//! the leading blocks that are there, then inserts the others. A hit is a block that need not be
//! computed again. Beside the policies stand the ceilings: Belady's rule, which knows the future,
//! and a cache without limit.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{env, fs};

use lmc_backend_local::{LocalConfig, OwnerId, PolicyKind, TenantId, WriteStart};
use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use serde::Deserialize;

/// Tokens of a block of these traces.
const BLOCK_TOKENS: usize = 512;
/// Stands for a block's bytes; what they are does not matter here.
const BLOCK: u64 = 64;

#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u64>,
}

fn read(path: &Path) -> Vec<Vec<u64>> {
    let text = fs::read_to_string(path).expect("the trace is readable");
    let request = |line: &str| {
        let request: Request = serde_json::from_str(line).expect("one request a line");
        request.hash_ids
    };
    text.lines().map(request).collect()
}

fn key(id: u64) -> ChunkKey {
    let mut hash = [0; 32];
    // Spread, as digests are.
    let spread = (id + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash[..8].copy_from_slice(&(spread ^ (spread >> 29)).to_le_bytes());
    hash[8..16].copy_from_slice(&id.to_le_bytes());
    ChunkKey {
        space: SpaceId::new([1; 16]),
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(hash),
    }
}

/// Blocks hit, and blocks that were evicted although others continued them.
fn replay(trace: &[Vec<u64>], policy: PolicyKind, blocks: usize) -> (usize, u64) {
    let arena = ArenaConfig::anonymous(blocks * BLOCK as usize).build();
    let arena = Arc::new(arena.expect("there is memory for the trace"));
    let config = PoolConfig::default().with_align(BLOCK as usize);
    let pool = Pool::new(arena, config).expect("the alignment is a power of two");
    let tier = LocalConfig::new(pool).with_policy(policy).build();
    let tier = tier.expect("the defaults are in range");
    let mut hits = 0;
    for request in trace {
        let keys: Vec<ChunkKey> = request.iter().map(|&id| key(id)).collect();
        let leases = tier.lease_leading(OwnerId(0), &keys);
        hits += leases.len();
        let parent = |position: usize| position.checked_sub(1).map(|parent| keys[parent]);
        // As the engine does: of the rest, chunks that are present count as used, and the others
        // are stored.
        let rest = (leases.len()..keys.len()).map(|position| (keys[position], parent(position)));
        tier.touch(&rest.collect::<Vec<_>>());
        let mut writes = Vec::new();
        for (position, &key) in keys.iter().enumerate().skip(leases.len()) {
            match tier.begin_write(OwnerId(0), TenantId(0), key, BLOCK) {
                Ok(WriteStart::Reserved(grant)) => writes.push(grant.written(parent(position))),
                Ok(WriteStart::Present | WriteStart::Busy) => {}
                // A request larger than the cache stores what fits.
                Err(_) => break,
            }
        }
        tier.commit(writes);
    }
    (hits, tier.stats().evicted_parents)
}

/// Belady's rule: evicts the block whose next use is farthest, and does not store a block that
/// would be evicted at once. Only leading blocks count as hits, as above.
fn belady(trace: &[Vec<u64>], blocks: usize) -> usize {
    let mut uses: HashMap<u64, Vec<usize>> = HashMap::new();
    for (at, request) in trace.iter().enumerate() {
        for &id in request {
            uses.entry(id).or_default().push(at);
        }
    }
    let next = |id: u64, now: usize| {
        let uses = &uses[&id];
        let later = uses.partition_point(|&at| at <= now);
        uses.get(later).copied().unwrap_or(usize::MAX)
    };
    let mut resident: HashMap<u64, (usize, usize)> = HashMap::new();
    // By next use, then by depth: of a prompt's blocks the tail goes first.
    let mut order: BTreeSet<(usize, usize, u64)> = BTreeSet::new();
    let mut hits = 0;
    for (now, request) in trace.iter().enumerate() {
        hits += request
            .iter()
            .take_while(|id| resident.contains_key(id))
            .count();
        for (depth, &id) in request.iter().enumerate() {
            if let Some((before, depth)) = resident.remove(&id) {
                order.remove(&(before, depth, id));
            }
            let at = next(id, now);
            resident.insert(id, (at, depth));
            order.insert((at, depth, id));
            if resident.len() > blocks {
                let (_, _, gone) = order.pop_last().expect("it is over-full");
                resident.remove(&gone);
            }
        }
    }
    hits
}

fn main() {
    let Some(folder) = env::args().nth(1).map(PathBuf::from) else {
        eprintln!("hit_rate FOLDER: a folder of traces in Mooncake's format is required");
        std::process::exit(2);
    };
    let mut traces: Vec<PathBuf> = fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("no folder of traces at {}: {error}", folder.display()))
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "jsonl")
        })
        .collect();
    traces.sort();
    for path in traces {
        let trace = read(&path);
        let blocks: usize = trace.iter().map(Vec::len).sum();
        let different: BTreeSet<u64> = trace.iter().flatten().copied().collect();
        let unlimited = belady(&trace, usize::MAX);
        let percent = |hits: usize| 100.0 * hits as f64 / blocks as f64;
        println!(
            "{}: {} requests, {blocks} blocks of {BLOCK_TOKENS} tokens, {} different",
            path.file_name().unwrap_or_default().display(),
            trace.len(),
            different.len(),
        );
        println!(
            "hit ratio in % of blocks; ceiling without limit: {:.2}",
            percent(unlimited)
        );
        let kinds = PolicyKind::ALL;
        print!("{:>10} {:>8}", "blocks", "part");
        kinds.iter().for_each(|kind| print!(" {:>8}", kind.name()));
        println!(" {:>8} {:>8}", "belady", "orphans");
        for part in [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7] {
            let capacity = (different.len() as f64 * part) as usize;
            print!("{capacity:>10} {:>7.0}%", part * 100.0);
            let mut orphans = 0;
            for kind in kinds {
                let (hits, parents) = replay(&trace, kind, capacity);
                orphans += parents;
                print!(" {:>8.2}", percent(hits));
            }
            println!(" {:>8.2} {orphans:>8}", percent(belady(&trace, capacity)));
        }
        println!();
    }
}
