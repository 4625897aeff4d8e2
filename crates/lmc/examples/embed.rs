//! A KV cache in memory and on disk inside another program: `cargo run -p lmc --example embed`.

use std::time::{Duration, Instant};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let cache = lmc::CacheBuilder::new(
        "meta-llama/Llama-3.1-8B",
        "[2, 32, 256, 1024] bf16",
        1 << 20,
    )
    .dram(64 << 20)
    .disk(std::env::temp_dir().join("lmc-embed"), 256 << 20)
    .build()?;
    let prompt: Vec<u32> = (0..1000).collect();
    let found = cache.lookup(&prompt).wait_blocking();
    println!(
        "found {} chunks, {} of them in memory",
        found.hits, found.resident
    );
    // What the engine computed goes where 42 stands.
    let stored = cache.store(&prompt, |_chunk, bytes| bytes.fill(42));
    println!("stored {stored} chunks: run it again");
    let closed = cache.close(Instant::now() + Duration::from_secs(10));
    println!("closed: {closed:?}");
    Ok(())
}
