//! Measures the hashes of a prompt: computed, remembered, and against a bare comparison.
//!
//! `cargo xtask bench hash [chunk_size]`
//!
//! Prints the conditions, then microseconds per prompt (the median of many), nanoseconds per
//! chunk, and the ratio to the ceiling: one `memcmp` of the prompt with a copy of it, which any
//! exact memo must at least do.

use std::hint::black_box;
use std::time::{Duration, Instant};

use lmc_key::{ChunkHasher, HashAlgorithm, HashMemo, Salt, Token};

/// Distinct prompts that take turns in the "spread" rows: more than the caches hold.
const SPREAD: usize = 100;

fn main() {
    let chunk_size = std::env::args()
        .nth(1)
        .map_or(256, |arg| arg.parse().expect("a number"));
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let cpu = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name\t: "))
        .unwrap_or("unknown");
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{cpu}, {threads} CPUs; 1 thread; chunks of {chunk_size} tokens; one prompt again and"
    );
    println!("again (warm caches), or {SPREAD} prompts in turn (rows marked *)");
    println!(
        "{:<34} {:>10} {:>12} {:>10} {:>10}",
        "tokens", "µs/prompt", "ns/chunk", "GB/s", "x memcmp"
    );
    for len in [2_048, 32_768, 131_072] {
        measure(chunk_size, len);
    }
}

fn prompt(seed: u64, len: usize) -> Vec<Token> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u32 % 128_256
    };
    (0..len).map(|_| next()).collect()
}

fn measure(chunk_size: u32, len: usize) {
    let prompts: Vec<Vec<Token>> = (0..SPREAD as u64)
        .map(|seed| prompt(seed + 1, len))
        .collect();
    let copies = prompts.clone();
    let one = &prompts[0];
    let chunks = len / chunk_size as usize;
    let row = |name: &str, time: Duration, ceiling: Duration| {
        let nanos = time.as_nanos() as f64;
        println!(
            "{:<34} {:>10.2} {:>12.1} {:>10.1} {:>10.1}",
            format!("{len:>7} {name}"),
            nanos / 1e3,
            nanos / chunks as f64,
            (len * size_of::<Token>()) as f64 / nanos,
            nanos / ceiling.as_nanos() as f64,
        );
    };

    let mut target = vec![0; len];
    let memcpy = median(|_| target.copy_from_slice(black_box(one)));
    let memcmp = median(|_| {
        black_box(black_box(one) == black_box(&copies[0]));
    });
    let memcmp_spread = median(|i| {
        black_box(black_box(&prompts[i % SPREAD]) == black_box(&copies[i % SPREAD]));
    });
    row("memcpy", memcpy, memcmp);
    row("memcmp", memcmp, memcmp);
    row("memcmp *", memcmp_spread, memcmp_spread);

    let hasher = ChunkHasher::new(HashAlgorithm::Blake3, chunk_size).expect("a usual chunk size");
    let salt = Salt::default();
    for algorithm in HashAlgorithm::ALL {
        let hasher = ChunkHasher::new(algorithm, chunk_size).expect("checked above");
        let time = median(|_| {
            black_box(hasher.hash_prompt(black_box(one)));
        });
        row(&format!("{algorithm}, hashed"), time, memcmp);
    }

    // Memory for a quarter of the prompts that take turns: each is evicted before it comes again.
    let small = HashMemo::new(SPREAD / 4 * len * size_of::<Token>());
    let cold = median(|i| {
        black_box(small.hash_prompt(&hasher, &salt, &prompts[i % SPREAD]));
    });
    assert_eq!(small.stats().known, 0, "a prompt was still known");
    row("memo, hashed and evicting *", cold, memcmp_spread);
    // Memory for all of them: this is to measure memory, not eviction.
    let memo = HashMemo::new(256 << 20);
    for prompt in &prompts {
        memo.hash_prompt(&hasher, &salt, prompt);
    }
    let warm = median(|_| {
        black_box(memo.hash_prompt(&hasher, &salt, black_box(one)));
    });
    row("memo, known", warm, memcmp);
    let warm = median(|i| {
        black_box(memo.hash_prompt(&hasher, &salt, &prompts[i % SPREAD]));
    });
    row("memo, known *", warm, memcmp_spread);

    // A conversation that came in one chunk at a time.
    let memo = HashMemo::default();
    for end in (1..=chunks).map(|chunk| chunk * chunk_size as usize) {
        memo.hash_prompt(&hasher, &salt, &one[..end]);
    }
    let warm = median(|_| {
        black_box(memo.hash_prompt(&hasher, &salt, black_box(one)));
    });
    row("memo, known, grown by chunks", warm, memcmp);

    println!();
}

/// The median time of one call, over at least 200 calls and a fifth of a second.
fn median(mut call: impl FnMut(usize)) -> Duration {
    let mut times = Vec::new();
    let begin = Instant::now();
    while times.len() < 2 * SPREAD || begin.elapsed() < Duration::from_millis(200) {
        let start = Instant::now();
        call(times.len());
        times.push(start.elapsed());
    }
    times.sort_unstable();
    times[times.len() / 2]
}
