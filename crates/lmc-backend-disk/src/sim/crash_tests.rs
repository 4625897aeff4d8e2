//! The drive dies at every point of a script; what was acknowledged is there afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Conformance, Guarantee, Rng, block_on, check_value, fill_value, load_batch, store_batch,
    test_key,
};
use lmc_backend::{
    Backend, Cleared, Clears, LoadItem, Loaded, StartId, StoreItem, Stored, WriteBackend,
};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::rounds;

use super::SimVolume;
use crate::backend::DiskBackend;
use crate::config::open_drive;
use crate::drive::{Drive, DriveSettings};
use crate::drive_set::DriveSet;

pub(super) const SETTINGS: DriveSettings = DriveSettings {
    capacity: 64 << 20,
    keep_free: 0,
    // Small, so that scripts meet its end.
    log_bytes: 16 << 10,
    max_writing: 64 << 20,
    probe_every: Duration::from_millis(1),
    stall: Duration::from_millis(500),
    leave: Duration::from_secs(2),
};
pub(super) const SEGMENT: u64 = 128 << 10;

pub(super) fn open(
    volume: &Arc<SimVolume>,
    settings: DriveSettings,
) -> std::io::Result<DiskBackend> {
    let (drive, _) = open_drive(Arc::clone(volume) as _, SEGMENT, settings, None)?;
    alone(vec![drive])
}

/// A tier of drives that are not compared.
pub(super) fn alone(drives: Vec<Drive>) -> std::io::Result<DiskBackend> {
    let set = DriveSet::of(&drives).map_err(std::io::Error::other)?;
    DiskBackend::new(drives, set)
}

/// The clears that a tier knows of, and one more.
pub(super) fn one_more(clears: &Clears, start: u8) -> Arc<Clears> {
    let mut clears = clears.clone();
    clears.count(StartId::new([start; 16])).expect("a few");
    Arc::new(clears)
}

/// Clears a tier that is open.
pub(super) fn clear(tier: &DiskBackend, deadline: Instant) -> Cleared {
    let clears = one_more(&tier.clears(), 1);
    block_on(tier.clear(clears, deadline)).expect("it is open")
}

pub(crate) fn pool() -> Pool {
    let arena = ArenaConfig::anonymous(8 << 20).build().expect("memory");
    Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool")
}

pub(super) use lmc_testkit::soon;

/// Bytes of the chunk of a number.
pub(super) fn len(number: u64) -> u64 {
    100 + number.wrapping_mul(2_654_435_761) % 20_000
}

pub(super) fn item(pool: &Pool, number: u64) -> StoreItem {
    item_of(pool, number, len(number))
}

pub(super) fn item_of(pool: &Pool, number: u64, len: u64) -> StoreItem {
    let key = test_key(number);
    let mut slot = pool.reserve(len).expect("space");
    fill_value(&key, slot.bytes_mut());
    StoreItem::new(key, slot.written().seal())
}

/// Loads a chunk. Whether it was there; its bytes are checked.
pub(super) fn is_there(tier: &DiskBackend, pool: &Pool, number: u64) -> bool {
    let key = test_key(number);
    let slot = pool.reserve(len(number)).expect("space");
    let loaded = load_batch(tier, vec![LoadItem::new(key, slot)], soon()).pop();
    match loaded.expect("one answer") {
        Loaded::Hit(slot) => {
            check_value(&key, slot.bytes()).expect("the bytes of this key");
            true
        }
        Loaded::Miss(_) => false,
        Loaded::Failed { error, .. } => panic!("{error}"),
    }
}

/// Answer that a script got for a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Stored,
    Removed,
    /// An operation on it failed.
    Unsure,
}

/// Stores, removes and clears by a seed until something fails or the script is over. Returns true
/// if something failed.
fn script(
    tier: &DiskBackend,
    pool: &Pool,
    seed: u64,
    steps: u64,
    outcomes: &mut BTreeMap<u64, Outcome>,
) -> bool {
    let mut rng = Rng::new(seed);
    for _ in 0..steps {
        if rng.below(10) == 0 {
            let timeout = Instant::now() + Duration::from_millis(50);
            let after = match clear(tier, timeout).is_durable {
                true => Outcome::Removed,
                false => Outcome::Unsure,
            };
            outcomes.values_mut().for_each(|outcome| *outcome = after);
            if after == Outcome::Unsure {
                return true;
            }
            continue;
        }
        let first = rng.below(40);
        let numbers: Vec<u64> = (first..first + 1 + rng.below(5)).collect();
        if rng.below(4) > 0 {
            let items = numbers.iter().map(|&number| item(pool, number)).collect();
            let answers = store_batch(tier, items, soon());
            for (number, answer) in numbers.iter().zip(answers) {
                match answer {
                    Ok(Stored::Written | Stored::Present) => {
                        outcomes.insert(*number, Outcome::Stored)
                    }
                    // After the crash nothing can be written.
                    Ok(_) | Err(_) => outcomes.insert(*number, Outcome::Unsure),
                };
            }
        } else {
            let keys: Vec<_> = numbers.iter().map(|&number| test_key(number)).collect();
            // A removal that cannot be made durable is not answered.
            let timeout = Instant::now() + Duration::from_millis(50);
            let answers = block_on(tier.remove(&keys, timeout));
            for (number, answer) in numbers.iter().zip(answers) {
                match answer {
                    Ok(_) => outcomes.insert(*number, Outcome::Removed),
                    Err(_) => outcomes.insert(*number, Outcome::Unsure),
                };
            }
        }
        if outcomes.values().any(|&outcome| outcome == Outcome::Unsure) {
            return true;
        }
    }
    false
}

fn check(tier: &DiskBackend, pool: &Pool, outcomes: &BTreeMap<u64, Outcome>, evicts: bool) {
    for number in 0..50 {
        let there = is_there(tier, pool, number);
        match outcomes.get(&number) {
            Some(Outcome::Stored) if !evicts => assert!(there, "chunk {number} is lost"),
            Some(Outcome::Removed) => assert!(!there, "chunk {number} is back"),
            None => assert!(!there, "chunk {number} was never stored"),
            Some(Outcome::Stored | Outcome::Unsure) => {}
        }
    }
}

/// Crashes after `events`, opens again, checks, goes on, and opens once more. False when the
/// script was over before.
fn crash(events: u64, seed: u64, steps: u64, settings: DriveSettings) -> bool {
    loop {
        match crash_once(events, seed, steps, settings) {
            End::Crashed => return true,
            End::Over => return false,
            // The machine was too busy for a timeout of the script.
            End::Late => {}
        }
    }
}

/// The end of a script.
enum End {
    Crashed,
    Over,
    /// An operation failed, and nothing had crashed.
    Late,
}

/// As [`crash`], once.
fn crash_once(events: u64, seed: u64, steps: u64, settings: DriveSettings) -> End {
    let evicts = settings.capacity < SETTINGS.capacity;
    let pool = pool();
    let volume = SimVolume::new(u64::MAX);
    volume.crash_after(events);
    let mut outcomes = BTreeMap::new();
    let mut is_whole = false;
    if let Ok(tier) = open(&volume, settings) {
        is_whole = !script(&tier, &pool, seed, steps, &mut outcomes)
            && block_on(tier.close(soon())).is_ok();
    }
    let end = match is_whole {
        true => End::Over,
        false if volume.is_dead() => End::Crashed,
        false => End::Late,
    };
    let volume = volume.after_crash(seed ^ events);
    let tier = open(&volume, settings).expect("a crash leaves nothing that cannot be opened");
    check(&tier, &pool, &outcomes, evicts);
    // Life goes on after a crash, and the next start finds all of it.
    outcomes.retain(|&number, outcome| {
        if *outcome == Outcome::Unsure {
            *outcome = match is_there(&tier, &pool, number) {
                true => Outcome::Stored,
                false => Outcome::Removed,
            };
        }
        true
    });
    script(&tier, &pool, !seed, 4, &mut outcomes);
    check(&tier, &pool, &outcomes, evicts);
    drop(tier);
    let volume = volume.after_crash(seed.wrapping_add(events));
    let tier = open(&volume, settings).expect("it opens again");
    check(&tier, &pool, &outcomes, evicts);
    drop(tier);
    assert_eq!(pool.usage().used, 0, "no slot is lost");
    end
}

/// Crashes at every point of a script, and in the gate at every `gate`th from `first` on. Returns
/// the number of points.
fn crash_at_points(first: u64, gate: usize, seed: u64, steps: u64, settings: DriveSettings) -> u64 {
    let step = rounds(gate, 1) as u64;
    let mut events = first % step;
    while crash(events, seed, steps, settings) {
        events += step;
    }
    events
}

#[test]
fn a_short_script_survives_a_crash_at_every_point() {
    for seed in 0..3 {
        let events = crash_at_points(seed, 7, seed, 12, SETTINGS);
        assert!(events > 60, "the script met {events} points to crash at");
    }
}

#[test]
fn a_drive_that_is_full_survives_a_crash_at_every_point() {
    let settings = DriveSettings {
        capacity: 3 * SEGMENT + SEGMENT / 2,
        ..SETTINGS
    };
    let events = crash_at_points(0, 6, 7, 25, settings);
    assert!(events > 100, "the script met {events} points to crash at");
}

#[test]
fn long_scripts_survive_crashes_at_random_points() {
    let seed = std::env::var("LMC_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    // The gate does the same each time.
    let seed: u64 = seed.unwrap_or_else(|| rounds(1, std::process::id() as usize) as u64);
    println!("seed {seed}: LMC_SEED={seed} runs it again");
    let mut rng = Rng::new(seed);
    for _ in 0..rounds(15, 60) {
        let (events, script) = (rng.below(1500), rng.next_u64());
        let full = DriveSettings {
            capacity: 4 * SEGMENT,
            ..SETTINGS
        };
        let settings = if rng.below(2) == 0 { SETTINGS } else { full };
        crash(events, script, 150, settings);
    }
}

#[test]
fn it_keeps_the_contract() {
    let kit = Conformance::new(Guarantee::Exact);
    let settings = DriveSettings {
        capacity: 16 * kit.bytes_needed(),
        log_bytes: 64 << 10,
        ..SETTINGS
    };
    let tier = open(&SimVolume::new(u64::MAX), settings).expect("a new drive");
    let tally = kit.run(&tier);
    assert!(tally.hits > 100 && tally.removed > 20, "{tally:?}");
}

#[test]
fn it_keeps_the_contract_when_it_is_full() {
    let settings = DriveSettings {
        capacity: 4 * SEGMENT,
        ..SETTINGS
    };
    let tier = open(&SimVolume::new(u64::MAX), settings).expect("a new drive");
    let tally = Conformance::new(Guarantee::Lossy).run(&tier);
    assert!(tally.hits > 50, "{tally:?}");
    assert!(tier.stats().evicted > 0);
}

/// A process is killed, the next goes on from its files, and then the power fails. What the first
/// had written and not made durable is what the second builds on.
#[test]
fn what_is_acknowledged_after_a_kill_survives_a_power_cut() {
    let pool = pool();
    for events in (0..200).step_by(rounds(2, 1)) {
        let volume = SimVolume::new(u64::MAX);
        volume.crash_after(events);
        let stores = |number: u64, tier: &DiskBackend| {
            let stored = store_batch(tier, vec![item(&pool, number)], soon());
            matches!(stored[..], [Ok(Stored::Written)])
        };
        if let Ok(tier) = open(&volume, SETTINGS)
            && (0..20).all(|number| stores(number, &tier))
        {
            return;
        }
        volume.revive();
        let tier = open(&volume, SETTINGS).expect("it opens after a kill");
        assert!(stores(90, &tier), "killed after {events} events");
        let seeds = rounds(2, 20) as u64;
        for seed in events * seeds..(events + 1) * seeds {
            let tier = open(&volume.after_crash(seed), SETTINGS).expect("after the power cut");
            assert!(
                is_there(&tier, &pool, 90),
                "killed after {events} events, seed {seed}"
            );
        }
    }
    panic!("the script is longer than that");
}
