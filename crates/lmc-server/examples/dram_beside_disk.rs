//! What a lookup in DRAM costs while the disk below is saturated, for `cargo xtask bench disk`.
//!
//! `dram_beside_disk FOLDER SECONDS`: looks up a prompt of 256 chunks in DRAM over and over, first
//! with an idle disk, then while other prompts come up from it as fast as it gives them, each
//! making the one before leave memory. Prints one line of JSON.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use lmc_backend::conformance::test_key;
use lmc_backend_disk::DiskConfig;
use lmc_engine::{CacheEngine, EngineConfig, OwnerId, Reservation, TenantId, WriteRequest};
use lmc_key::ChunkKey;
use lmc_memory::{ArenaConfig, Demand, Prefault};

const CHUNK: u64 = 1 << 20;
const HOT: u64 = 256;
/// Prompts on disk, and chunks of each.
const COLD: u64 = 16;
const LEN: u64 = 64;
const NOBODY: TenantId = TenantId(0);

fn prompt(first: u64, len: u64) -> Vec<ChunkKey> {
    (first..first + len).map(test_key).collect()
}

fn store(engine: &CacheEngine, keys: &[ChunkKey]) -> Result<()> {
    let request = |place: usize| WriteRequest {
        key: keys[place],
        parent: place.checked_sub(1).map(|before| keys[before]),
        tenant: NOBODY,
        len: CHUNK,
    };
    let requests: Vec<_> = (0..keys.len()).map(request).collect();
    let mut tickets = Vec::new();
    for reservation in engine.reserve(OwnerId(1), &requests) {
        if let Reservation::Reserved(ticket) = reservation {
            tickets.push(ticket);
        }
    }
    engine.commit(tickets);
    let deadline = Instant::now() + Duration::from_secs(60);
    while engine.lower()[0].queued_bytes > 0 {
        ensure!(Instant::now() < deadline, "copies do not go down");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Seconds of each lookup, sorted.
fn lookups(engine: &CacheEngine, keys: &[ChunkKey], time: Duration) -> Result<Vec<f64>> {
    let (mut seconds, begun) = (Vec::new(), Instant::now());
    while begun.elapsed() < time {
        let started = Instant::now();
        let leases = engine.lookup(OwnerId(2), keys);
        seconds.push(started.elapsed().as_secs_f64());
        ensure!(leases.len() == keys.len(), "a chunk left memory");
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
    let mut config = EngineConfig::default();
    config.copy_queue_bytes = Some(LEN * CHUNK);
    let engine = CacheEngine::with_tiers(config, arena, vec![Arc::new(disk.open()?)])?;
    let hot = prompt(0, HOT);
    hot.chunks(LEN as usize)
        .try_for_each(|part| store(&engine, part))?;
    engine.pin(&hot);
    for n in 1..=COLD {
        store(&engine, &prompt(n * 1000, LEN))?;
    }

    let idle = lookups(&engine, &hot, time)?;
    let stop = AtomicBool::new(false);
    let before = engine.lower()[0].fetched_bytes;
    let (busy, took) = thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|reader| {
                let (engine, stop) = (&engine, &stop);
                scope.spawn(move || {
                    let mut n = reader * COLD / 2;
                    while !stop.load(Ordering::Relaxed) {
                        n = n % COLD + 1;
                        let keys = prompt(n * 1000, LEN);
                        let held = engine.lookup(OwnerId(3 + reader), &keys);
                        let below = engine.below(&keys[held.len()..]);
                        let (sender, receiver) = mpsc::channel();
                        engine.fetch(NOBODY, keys, held, below, move |leases| {
                            // The reader may have given up.
                            let _ = sender.send(leases.len());
                        });
                        let _ = receiver.recv_timeout(Duration::from_secs(30));
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
    let read = (engine.lower()[0].fetched_bytes - before) as f64 / took / 1e9;
    println!(
        "{{\"idle_p50\": {}, \"idle_p99\": {}, \"busy_p50\": {}, \"busy_p99\": {}, \"gb_per_s\": {read}}}",
        at(&idle, 0.5),
        at(&idle, 0.99),
        at(&busy, 0.5),
        at(&busy, 0.99),
    );
    let failed = engine.close(Instant::now() + Duration::from_secs(30));
    ensure!(failed.is_empty(), "{failed:?}");
    std::fs::remove_dir_all(folder)?;
    Ok(())
}
