//! Measures the time and the heap of the index, at 10 thousand to 10 million chunks.
//!
//! `cargo xtask bench index [CHUNKS…]`

#[path = "../tests/support/counting_alloc.rs"]
mod counting_alloc;
#[path = "../tests/support/filled.rs"]
mod filled;

use std::env;
use std::hint::black_box;
use std::time::Instant;

use filled::{PROMPT, filled, key, prompt};
use lmc_backend::conformance::Rng;
use lmc_backend_local::{LocalTier, OwnerId, PolicyKind};
use lmc_key::{ChunkHasher, ChunkKey, HashAlgorithm};

/// Nanoseconds of the median and the 99th percentile.
struct Times {
    p50: f64,
    p99: f64,
}

/// The keys are copied before the clock starts: a caller has just made them.
fn time(rounds: usize, prompts: &[Vec<ChunkKey>], each: &mut dyn FnMut(&[ChunkKey])) -> Times {
    let mut times: Vec<f64> = (0..rounds)
        .map(|round| {
            let keys = prompts[round % prompts.len()].clone();
            let start = Instant::now();
            each(&keys);
            start.elapsed().as_nanos() as f64
        })
        .collect();
    times.sort_by(f64::total_cmp);
    Times {
        p50: times[rounds / 2],
        p99: times[rounds * 99 / 100],
    }
}

fn line(what: &str, keys: u64, times: &Times) {
    let each = times.p50 / keys as f64;
    let (p50, p99) = (times.p50 / 1000.0, times.p99 / 1000.0);
    println!("  {what:<44} {p50:>9.1} {p99:>9.1} {each:>9.1}");
}

fn measure(tier: &LocalTier, chunks: u64) {
    let owner = OwnerId(1);
    let prompts = (chunks / PROMPT).max(1);
    let mut rng = Rng::new(1);
    // More than any cache holds at 10 million, made before the clock starts.
    let keys: Vec<Vec<ChunkKey>> = (0..2000.min(prompts))
        .map(|_| prompt(rng.below(prompts)))
        .collect();
    let absent: Vec<ChunkKey> = (0..PROMPT).map(|n| key(u64::MAX / 2 + n)).collect();
    println!(
        "  {:<44} {:>9} {:>9} {:>9}",
        "", "p50 µs", "p99 µs", "ns/key"
    );
    let one = |what: &str, prompts: &[Vec<ChunkKey>], each: &mut dyn FnMut(&[ChunkKey])| {
        line(what, prompts[0].len() as u64, &time(2000, prompts, each));
    };
    let present = |keys: &[ChunkKey]| assert_eq!(tier.lookup_leading(keys), keys.len());
    one("look up 512, any prompt", &keys, &mut |keys| present(keys));
    one("look up 512, same prompt", &keys[..1], &mut |keys| {
        present(keys)
    });
    one("look up 512, none there", &[absent], &mut |keys| {
        assert_eq!(tier.lookup_leading(keys), 0);
    });
    let mut held = Vec::new();
    one("lease 512, any prompt", &keys, &mut |keys| {
        held.push(tier.lease_leading(owner, keys))
    });
    one("release 512, any prompt", &keys, &mut |_| drop(held.pop()));
    one(
        "lease and release 512, same prompt",
        &keys[..1],
        &mut |keys| {
            drop(tier.lease_leading(owner, keys));
        },
    );
    let heads: Vec<_> = keys.iter().map(|keys| keys[..8].to_vec()).collect();
    one("lease and release 8, any prompt", &heads, &mut |keys| {
        drop(tier.lease_leading(owner, keys));
    });
    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256).expect("256 tokens are a chunk");
    let tokens: Vec<u32> = (0..PROMPT as u32 * 256).collect();
    one(
        "hash 131,072 tokens, lease and release 512",
        &keys,
        &mut |keys| {
            black_box(hasher.hash_prompt(black_box(&tokens)));
            drop(tier.lease_leading(owner, keys));
        },
    );
    assert_eq!(tier.leases_of(owner), 0);
    let start = Instant::now();
    let done = tier.maintain(100_000);
    let each = start.elapsed().as_nanos() as f64 / done.evicted.max(1) as f64;
    println!(
        "  {:<44} {each:>29.1}",
        format!("evict {}, one after the other", done.evicted)
    );
}

/// Measures a random cache line out of a gigabyte, many at a time: a lookup reads two for each
/// key, so that no index can be faster cold.
fn ceiling() -> f64 {
    let memory: Vec<u64> = (0..1 << 27).collect();
    let mut rng = Rng::new(2);
    let times = (0..500).map(|_| {
        let indices: Vec<usize> = (0..1024).map(|_| rng.below(1 << 27) as usize).collect();
        let start = Instant::now();
        black_box(indices.iter().fold(0, |read, &index| read ^ memory[index]));
        start.elapsed().as_nanos() as f64 / 1024.0
    });
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let asked: Vec<u64> = env::args().skip(1).filter_map(|n| n.parse().ok()).collect();
    let sizes = match asked.is_empty() {
        true => vec![10_240, 1_000_000, 10_000_000],
        false => asked,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("one thread of {cores} cores, prompts of 512 chunks, LRU, 8 shards");
    let line = ceiling();
    let floor = line * 2.0 * PROMPT as f64 / 1000.0;
    println!("ceiling: {line:.1} ns for a random cache line, {floor:.1} µs for two of each key");
    for chunks in sizes {
        let start = Instant::now();
        let (tier, cost) = filled(PolicyKind::Lru, chunks);
        let each = start.elapsed().as_nanos() as f64 / chunks as f64;
        println!("{chunks} chunks: {cost:.1} bytes of heap each, filled at {each:.0} ns each");
        measure(&tier, chunks);
    }
}
