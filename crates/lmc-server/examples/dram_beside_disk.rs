//! Measures a lookup in DRAM while the disk tier is saturated, for `cargo xtask bench disk`.
//!
//! `dram_beside_disk FOLDER SECONDS`: looks up a prompt of 256 chunks in DRAM over and over, first
//! with an idle disk, then while other prompts are promoted from it as fast as it delivers
//! them, each evicting the one before. Prints one line of JSON.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lmc_backend::conformance::test_key;
use lmc_backend_disk::DiskConfig;
use lmc_engine::{
    CacheEngine, EngineConfig, EngineContext, EngineHost, LookupRequest, LowerTier, OwnerId, Rank,
    StoreRequest, StoreStart, TenantId, TierPolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{ArenaConfig, Demand, Prefault};

const CHUNK: u64 = 1 << 20;
const HOT: u64 = 256;
/// Prompts on disk, and chunks of each.
const COLD: u64 = 16;
const LEN: u64 = 64;
const COMMON: TenantId = TenantId(0);
const SPACE: SpaceId = SpaceId::new([1; 16]);

fn prompt(first: u64, len: u64) -> Vec<ChunkKey> {
    // Of one space and rank.
    let key = |n| ChunkKey {
        space: SPACE,
        kv_rank: 0,
        group: 0,
        ..test_key(4 * n)
    };
    (first..first + len).map(key).collect()
}

fn store(engine: &CacheEngine, keys: &[ChunkKey]) -> Result<()> {
    let request = |index: usize| StoreRequest {
        key: keys[index],
        parent: index.checked_sub(1).map(|before| keys[before]),
        tenant: COMMON,
        len: CHUNK,
    };
    let requests: Vec<_> = (0..keys.len()).map(request).collect();
    let mut tickets = Vec::new();
    for reservation in engine.store(OwnerId(1), engine.clears_id(), &requests) {
        if let StoreStart::Reserved(ticket) = reservation {
            tickets.push(ticket);
        }
    }
    engine.commit(tickets);
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.lower_status()[0].queued_bytes > 0 {
        ensure!(
            Instant::now() < deadline,
            "the disk does not get the copies"
        );
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// A lookup of one rank.
fn request(owner: u64, keys: &[ChunkKey]) -> LookupRequest {
    let hashes = keys.iter().map(|key| key.hash).collect();
    let rank = Rank {
        space: SPACE,
        kv_rank: 0,
        chunk_bytes: None,
    };
    LookupRequest::new(OwnerId(owner), hashes, vec![rank])
}

/// Seconds of each lookup, sorted.
fn lookups(engine: &CacheEngine, keys: &[ChunkKey], time: Duration) -> Result<Vec<f64>> {
    let (mut seconds, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < time {
        let started = Instant::now();
        let found = engine.lookup(request(2, keys)).wait_blocking();
        seconds.push(started.elapsed().as_secs_f64());
        ensure!(found.hits == keys.len(), "a chunk left memory");
    }
    seconds.sort_by(f64::total_cmp);
    Ok(seconds)
}

fn at(seconds: &[f64], share: f64) -> f64 {
    seconds[((seconds.len() - 1) as f64 * share) as usize]
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let (folder, time) = (
        args.get(1).context("FOLDER")?,
        args.get(2).context("SECONDS")?,
    );
    let time = Duration::from_secs_f64(time.parse()?);
    let arena = ArenaConfig::anonymous(((HOT + 4 * LEN) * CHUNK) as usize)
        .with_huge_pages(Demand::Auto)
        .with_prefault(Prefault::Background { threads: 2 })
        .build()?;
    while arena.prefault_progress().done < arena.prefault_progress().total {
        thread::sleep(Duration::from_millis(1));
    }
    let arena = Arc::new(arena);
    let disk = DiskConfig::new([folder], 4 << 30)
        .with_keep_free(0)
        .with_new_drives()
        .with_arena(Arc::clone(&arena));
    let mut policy = TierPolicy::default();
    policy.write_queue_bytes = Some(LEN * CHUNK);
    let mut context = EngineContext::new(arena, EngineHost::default());
    let disk = disk.open(&context.host)?;
    context.tiers.push(LowerTier::new(Arc::new(disk), policy));
    let engine = EngineConfig::default().start(context)?;
    let hot = prompt(0, HOT);
    hot.chunks(LEN as usize)
        .try_for_each(|part| store(&engine, part))?;
    engine.pin(&hot);
    for n in 1..=COLD {
        store(&engine, &prompt(n * 1000, LEN))?;
    }

    let idle = lookups(&engine, &hot, time)?;
    let stop = AtomicBool::new(false);
    let before = engine.lower_status()[0].promoted_bytes;
    let (busy, took) = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|reader| {
                let (engine, stop) = (&engine, &stop);
                scope.spawn(move || {
                    let mut n = reader * COLD / 2;
                    while !stop.load(Ordering::Relaxed) {
                        n = n % COLD + 1;
                        let keys = prompt(n * 1000, LEN);
                        drop(engine.lookup(request(3 + reader, &keys)).wait_blocking());
                    }
                })
            })
            .collect();
        let begun = Instant::now();
        let busy = lookups(&engine, &hot, time);
        let took = begun.elapsed().as_secs_f64();
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            // A panic there was printed.
            let _ = reader.join();
        }
        (busy, took)
    });
    let busy = busy?;
    let read = (engine.lower_status()[0].promoted_bytes - before) as f64 / took / 1e9;
    println!(
        "{{\"idle_p50\": {}, \"idle_p99\": {}, \"busy_p50\": {}, \"busy_p99\": {}, \"gb_per_s\": {read}}}",
        at(&idle, 0.5),
        at(&idle, 0.99),
        at(&busy, 0.5),
        at(&busy, 0.99),
    );
    let closed = engine.close(Instant::now() + Duration::from_secs(30));
    ensure!(closed.is_complete(), "{closed:?}");
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
