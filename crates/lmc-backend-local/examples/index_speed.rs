//! How fast the index answers and what it costs, at 10 thousand to 10 million chunks.
//!
//! `cargo run --release -p lmc-backend-local --example index_speed [CHUNKS…]`

#[path = "../tests/support/counting_alloc.rs"]
mod counting_alloc;
#[path = "../tests/support/filled.rs"]
mod filled;

use std::env;
use std::time::Instant;

use filled::{PROMPT, filled, key, prompt};
use lmc_backend::conformance::Rng;
use lmc_backend_local::{LocalTier, OwnerId, PolicyKind};
use lmc_key::ChunkKey;

/// Nanoseconds of the median and the 99th percentile.
struct Times {
    p50: f64,
    p99: f64,
}

fn time(rounds: usize, mut each: impl FnMut(usize)) -> Times {
    let mut times: Vec<f64> = (0..rounds)
        .map(|round| {
            let start = Instant::now();
            each(round);
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
    let one = |what: &str, keys: u64, each: &mut dyn FnMut(usize)| {
        line(what, keys, &time(2000, each));
    };
    one("look up 512, any prompt", PROMPT, &mut |n| {
        assert_eq!(tier.lookup_leading(&keys[n % keys.len()]), PROMPT as usize);
    });
    one("look up 512, same prompt", PROMPT, &mut |_| {
        assert_eq!(tier.lookup_leading(&keys[0]), PROMPT as usize);
    });
    one("look up 512, none there", PROMPT, &mut |_| {
        assert_eq!(tier.lookup_leading(&absent), 0);
    });
    let mut held = Vec::new();
    one("lease 512, any prompt", PROMPT, &mut |n| {
        held.push(tier.lease_leading(owner, &keys[n % keys.len()]));
    });
    one("release 512, any prompt", PROMPT, &mut |_| drop(held.pop()));
    one("lease and release 512, same prompt", PROMPT, &mut |_| {
        drop(tier.lease_leading(owner, &keys[0]));
    });
    one("lease and release 8, any prompt", 8, &mut |n| {
        drop(tier.lease_leading(owner, &keys[n % keys.len()][..8]));
    });
    assert_eq!(tier.leases_of(owner), 0);
}

fn main() {
    let asked: Vec<u64> = env::args().skip(1).filter_map(|n| n.parse().ok()).collect();
    let sizes = match asked.is_empty() {
        true => vec![10_240, 1_000_000, 10_000_000],
        false => asked,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("one thread of {cores} cores, prompts of 512 chunks, LRU, default shards");
    for chunks in sizes {
        let start = Instant::now();
        let (tier, cost) = filled(PolicyKind::Lru, chunks);
        let each = start.elapsed().as_nanos() as f64 / chunks as f64;
        println!("{chunks} chunks: {cost:.1} bytes of heap each, filled at {each:.0} ns each");
        measure(&tier, chunks);
    }
}
