//! Measures the lookup of prompts that one sound tier has, alone and beside tiers that are slow, give
//! no answer, or give no value while eight prompts wait for it.
//!
//! `cargo xtask bench tiers [LOOKUPS]`

use std::env;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{Delayed, Gated, block_on, test_hash};
use lmc_backend::{Backend, MemoryBackend, StoreItem, WriteBackend, in_order};
use lmc_engine::{
    EngineConfig, EngineContext, EngineHost, LookupRequest, LowerTier, OwnerId, Rank, TierPolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};

const CHUNK: u64 = 64 << 10;
/// Chunks of a prompt.
const PROMPT: u64 = 32;
const SPACE: SpaceId = SpaceId::new([7; 16]);
/// Time that the sound tier takes for an answer, as a store nearby does.
const SOUND: Duration = Duration::from_micros(300);
/// Time that a slow tier takes, within what the engine waits for.
const SLOW: Duration = Duration::from_millis(3);
/// Number of the first prompt that only the others have.
const OTHERS: u64 = 1 << 32;

fn chunks(prompt: u64) -> Range<u64> {
    prompt * PROMPT..(prompt + 1) * PROMPT
}

/// A tier that has some prompts.
fn filled(prompts: Range<u64>) -> MemoryBackend {
    let tier = MemoryBackend::shared();
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
    let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
    for number in prompts.flat_map(chunks) {
        let key = ChunkKey {
            space: SPACE,
            kv_rank: 0,
            group: 0,
            hash: test_hash(number),
        };
        let slot = pool.reserve(CHUNK).expect("an empty pool");
        let item = StoreItem::new(key, slot.written().seal());
        let until = Instant::now() + Duration::from_secs(10);
        block_on(in_order(tier.store(vec![item], until), 1));
    }
    tier
}

/// A tier beside the sound one.
#[derive(Clone, Copy, Debug)]
enum Other {
    /// Answers after 3 ms.
    Slow,
    /// Answers no question.
    Silent,
    /// Says that it has chunks, and gives none of them.
    Stuck,
}

impl Other {
    fn tier(self) -> Arc<dyn Backend> {
        match self {
            Self::Slow => Arc::new(Delayed::slow(MemoryBackend::shared(), SLOW)),
            Self::Silent => Arc::new(Delayed::slow(
                MemoryBackend::shared(),
                Duration::from_secs(3600),
            )),
            Self::Stuck => {
                let tier = Gated::new(filled(OTHERS..OTHERS + 8));
                tier.shut();
                Arc::new(tier)
            }
        }
    }
}

fn request(prompt: u64) -> LookupRequest {
    let rank = Rank {
        space: SPACE,
        kv_rank: 0,
        chunk_bytes: Some(CHUNK),
    };
    let hashes = chunks(prompt).map(test_hash).collect();
    LookupRequest::new(OwnerId(1), hashes, vec![rank])
}

/// Returns the sorted milliseconds of lookups of prompts that the sound tier has, each for the first
/// time.
fn lookups(tiers: Vec<Arc<dyn Backend>>, count: u64) -> Vec<f64> {
    let mut config = EngineConfig::default();
    config.promotion_timeout = Duration::from_secs(60);
    let arena = ArenaConfig::anonymous((256 * PROMPT * CHUNK) as usize).build();
    let tiers = tiers
        .into_iter()
        .map(|tier| LowerTier::new(tier, TierPolicy::default()));
    let engine = config.start(
        EngineContext::new(Arc::new(arena.expect("memory")), EngineHost::default())
            .with_tiers(tiers),
    );
    let engine = engine.expect("an engine");
    let waiting: Vec<_> = (OTHERS..OTHERS + 8)
        .map(|prompt| engine.lookup(request(prompt)))
        .collect();
    let time = |prompt: u64| {
        let begun = Instant::now();
        let found = engine.lookup(request(prompt)).wait_blocking();
        assert_eq!(found.hits as u64, PROMPT, "the sound tier has all");
        begun.elapsed().as_secs_f64() * 1e3
    };
    let mut times: Vec<f64> = (0..count).map(time).collect();
    drop(waiting);
    times.sort_by(f64::total_cmp);
    times
}

fn main() {
    let count = env::args()
        .nth(1)
        .map_or(100, |count| count.parse().expect("a number of lookups"));
    let sound = || -> Arc<dyn Backend> { Arc::new(Delayed::slow(filled(0..count), SOUND)) };
    let percentile = |times: &[f64], percent: usize| times[(times.len() - 1) * percent / 100];
    let line = |what: &str, times: &[f64]| {
        let (p50, p99) = (percentile(times, 50), percentile(times, 99));
        println!("  {what:<36} {p50:>8.2} {p99:>8.2}");
    };
    println!("{count} prompts of {PROMPT} chunks of {} KiB", CHUNK >> 10);
    println!("  {:<36} {:>8} {:>8}", "", "p50 ms", "p99 ms");
    line("alone", &lookups(vec![sound()], count));
    for one in [Other::Slow, Other::Silent, Other::Stuck] {
        let before = vec![one.tier(), sound()];
        line(&format!("after {one:?}"), &lookups(before, count));
        let after = vec![sound(), one.tier()];
        line(&format!("before {one:?}"), &lookups(after, count));
    }
    for (one, other) in [
        (Other::Slow, Other::Silent),
        (Other::Silent, Other::Slow),
        (Other::Slow, Other::Stuck),
        (Other::Stuck, Other::Slow),
    ] {
        for at in 0..3 {
            let mut tiers = vec![one.tier(), other.tier()];
            tiers.insert(at, sound());
            let names = ["sound first", "sound second", "sound third"];
            let what = format!("{one:?}, {other:?}, {}", names[at]);
            line(&what, &lookups(tiers, count));
        }
    }
}
