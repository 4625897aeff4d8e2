//! Segments: their number, the choice of the next segment, and the chunks that stay when segments are emptied.

use std::sync::Arc;
use std::time::Duration;

use lmc_backend::conformance::{block_on, check_value, lens_of, load_batch, store_batch, test_key};
use lmc_backend::{Backend, Handle, LoadItem, Loaded, StoreItem, Stored, WriteBackend};
use lmc_key::ChunkKey;
use lmc_memory::Pool;
use lmc_testkit::rounds;

use super::SimVolume;
use super::crash_tests::{SEGMENT, SETTINGS, alone, item_of, open, pool, soon};
use crate::backend::DiskBackend;
use crate::config::open_drive;
use crate::drive::DriveSettings;
use crate::index::SEARCHES;
use crate::inspect::Compacted;
use crate::volume::BLOCK;

/// Stores a chunk that takes `blocks` blocks with its header.
fn store(tier: &DiskBackend, pool: &Pool, number: u64, blocks: u64) {
    let item = item_of(pool, number, (blocks - 1) * BLOCK);
    let stored = store_batch(tier, vec![item], soon());
    assert!(
        matches!(stored[..], [Ok(Stored::Written)]),
        "{number}: {stored:?}"
    );
}

/// Returns how many of these chunks the index knows.
fn known(tier: &DiskBackend, numbers: impl Iterator<Item = u64>) -> u64 {
    let keys: Vec<_> = numbers.map(test_key).collect();
    let found = lens_of(tier, &keys, soon());
    let found = found.iter().filter(|found| matches!(found, Ok(Some(_))));
    found.count() as u64
}

/// The index of a drive of more than a thousand segments was lost. Its next one began with the
/// highest segment, which the start after that took for damage, so that it lost it again.
#[test]
fn an_index_that_was_lost_once_is_not_lost_at_each_start() {
    let volume = SimVolume::new(u64::MAX);
    let settings = DriveSettings {
        log_bytes: 64 << 10,
        ..SETTINGS
    };
    let open = || {
        let drive = open_drive(Arc::clone(&volume) as _, 4 * BLOCK, settings, None);
        let (drive, notes) = drive.expect("it opens");
        let tier = alone(vec![drive]).expect("a timer");
        (tier, notes)
    };
    let pool = pool();
    let (tier, _) = open();
    for first in (0..1100).step_by(50) {
        let items = (first..first + 50).map(|number| item_of(&pool, number, 3 * BLOCK));
        let stored = store_batch(&tier, items.collect(), soon());
        assert!(stored.iter().all(|one| matches!(one, Ok(Stored::Written))));
    }
    block_on(tier.close(soon())).expect("closed in order");
    for checkpoint in volume.names("checkpoint-") {
        volume.alter(&checkpoint, |data| data[5000] ^= 1);
    }
    let (tier, notes) = open();
    assert!(!notes.is_empty() && known(&tier, 0..1100) == 0);
    for number in 0..20 {
        store(&tier, &pool, number, 4);
    }
    block_on(tier.close(soon())).expect("closed in order");
    let (tier, notes) = open();
    assert_eq!(known(&tier, 0..20), 20, "{notes:?}");
}

fn compact(tier: &DiskBackend, pool: &Pool) -> std::io::Result<Compacted> {
    block_on(tier.compact(pool, 0.5, Duration::from_millis(200), |_, _| {}))
}

#[test]
fn compacting_a_full_file_system_loses_nothing() {
    let pool = pool();
    // Five segments and little more.
    let volume = SimVolume::new(5 * SEGMENT + (128 << 10) - BLOCK);
    let settings = DriveSettings {
        log_bytes: 32 << 10,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    let each = SEGMENT / BLOCK / 8;
    let all = 5 * each;
    for number in 0..all {
        store(&tier, &pool, number, 8);
    }
    let gone: Vec<_> = (3 * each..4 * each - 1).map(test_key).collect();
    let removed = block_on(tier.remove(&gone, soon()));
    assert!(removed.iter().all(|removed| matches!(removed, Ok(true))));
    let (kept, segments) = (known(&tier, 0..all), volume.names("segment-").len());
    let done = compact(&tier, &pool).expect("no error");
    assert!(done.no_space && done.lost == 0, "{done:?}");
    assert_eq!(known(&tier, 0..all), kept, "{done:?}");
    assert_eq!(volume.names("segment-").len(), segments);
}

#[test]
fn a_crash_at_any_point_of_compacting_loses_nothing() {
    let pool = pool();
    let kept = |number: &u64| number.is_multiple_of(5);
    let mut events = 0;
    loop {
        let volume = SimVolume::new(u64::MAX);
        let tier = open(&volume, SETTINGS).expect("a new drive");
        for number in 0..60 {
            store(&tier, &pool, number, 8);
        }
        let gone: Vec<_> = (0..60).filter(|n| !kept(n)).map(test_key).collect();
        let removed = block_on(tier.remove(&gone, soon()));
        assert!(removed.iter().all(|removed| matches!(removed, Ok(true))));
        volume.crash_after(events);
        let done = compact(&tier, &pool);
        let whole = done.is_ok_and(|done| done.segments > 1 && done.stayed == 0);
        let volume = volume.after_crash(events);
        let tier = open(&volume, SETTINGS).expect("it opens after a crash");
        for number in (0..60).filter(kept) {
            let slot = pool.reserve(7 * BLOCK).expect("space");
            let item = LoadItem::new(test_key(number), slot);
            let loaded = load_batch(&tier, vec![item], soon()).remove(0);
            let Loaded::Hit(slot) = loaded else {
                panic!("chunk {number}, after {events} events: {loaded:?}");
            };
            check_value(&test_key(number), slot.bytes()).expect("the bytes of this key");
        }
        if whole {
            break;
        }
        events += rounds(8, 1) as u64;
    }
    assert!(events > 20, "there were {events} points to crash at");
}

/// A chunk lay on two drives, with other bytes on each: an engine had computed it twice. The one
/// that was moved was read from the other drive, and lost.
#[test]
fn compacting_reads_a_chunk_from_the_drive_that_it_moves_it_on() {
    let pool = pool();
    let volumes = [SimVolume::new(u64::MAX), SimVolume::new(u64::MAX)];
    let bytes = |volume: usize| vec![volume as u8 + 1; 5 * BLOCK as usize];
    let load = |tier: &DiskBackend| {
        let slot = pool.reserve(5 * BLOCK).expect("memory");
        let item = LoadItem::new(test_key(0), slot);
        load_batch(tier, vec![item], soon()).remove(0).hit()
    };
    for (number, volume) in volumes.iter().enumerate() {
        let tier = open(volume, SETTINGS).expect("a new drive");
        let mut slot = pool.reserve(5 * BLOCK).expect("memory");
        slot.bytes_mut().copy_from_slice(&bytes(number));
        let item = StoreItem::new(test_key(0), slot.written().seal());
        let stored = store_batch(&tier, vec![item], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
        // Alone in its segment, which is not the one that is written to.
        for other in 1..20 {
            store(&tier, &pool, other, 8);
        }
        let others: Vec<_> = (1..19).map(test_key).collect();
        block_on(tier.remove(&others, soon()));
    }
    let drives = volumes.iter().map(|volume| {
        let opened = open_drive(Arc::clone(volume) as _, SEGMENT, SETTINGS, None);
        opened.expect("it opens").0
    });
    let both = alone(drives.collect()).expect("a timer");
    let done = compact(&both, &pool).expect("no error");
    assert_eq!((done.moved, done.lost, done.stayed), (2, 0, 0), "{done:?}");
    drop(both);
    for (number, volume) in volumes.iter().enumerate() {
        let tier = open(volume, SETTINGS).expect("it opens");
        let slot = load(&tier).expect("it was moved, not lost");
        assert_eq!(slot.seal().bytes(), bytes(number));
    }
}

/// A segment's file was lost, and another made under its name, before a kill.
#[test]
fn what_went_with_a_file_does_not_come_back_with_the_next_of_its_name() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let settings = DriveSettings {
        // All since the start stays in it.
        log_bytes: 1 << 20,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    for number in 0..40 {
        store(&tier, &pool, number, 6);
    }
    let key = tier.drives()[0].chunks_of(1)[0].key;
    drop(tier);
    volume.lose("segment-00000001");
    let tier = open(&volume, settings).expect("only its chunks are gone");
    let removed = block_on(tier.remove(&[key], soon()));
    assert!(matches!(removed[..], [Ok(false)]), "{removed:?}");
    for number in 100.. {
        if !volume.names("segment-00000001").is_empty() {
            break;
        }
        store(&tier, &pool, number, 6);
    }
    drop(tier);
    let tier = open(&volume, settings).expect("after a kill");
    let found = lens_of(&tier, &[key], soon());
    assert!(matches!(found[..], [Ok(None)]), "it was removed: {found:?}");
}

/// A chunk that was located is loaded by its handle, without another search. After the chunk was moved, its
/// handle leads nowhere, and the load searches for it.
#[test]
fn a_located_chunk_is_searched_for_once() {
    let pool = pool();
    let volumes = [SimVolume::new(u64::MAX), SimVolume::new(u64::MAX)];
    let drives = volumes.iter().map(|volume| {
        let opened = open_drive(Arc::clone(volume) as _, SEGMENT, SETTINGS, None);
        opened.expect("a new drive").0
    });
    let tier = alone(drives.collect()).expect("a timer");
    for number in 0..60 {
        store(&tier, &pool, number, 8);
    }
    let kept: Vec<_> = (0..60).step_by(5).map(test_key).collect();
    let gone = (0..60).map(test_key).filter(|key| !kept.contains(key));
    block_on(tier.remove(&gone.collect::<Vec<_>>(), soon()));
    let searches = |act: &mut dyn FnMut()| {
        let before = SEARCHES.get();
        act();
        SEARCHES.get() - before
    };
    let mut handles = Vec::new();
    let mut locate = || {
        let located = tier.index().expect("it has one").locate_now(&kept);
        let located = located.into_iter().map(|found| found.expect("it answers"));
        handles = located
            .map(|found| found.present().expect("it is there").handle)
            .collect();
    };
    assert_eq!(searches(&mut locate), kept.len());
    let mut load = || {
        let item = |(key, handle): (&ChunkKey, &Option<Handle>)| {
            LoadItem::new(*key, pool.reserve(7 * BLOCK).expect("space")).with_handle(handle.clone())
        };
        let items = kept.iter().zip(&handles).map(item).collect();
        for (key, loaded) in kept.iter().zip(load_batch(&tier, items, soon())) {
            let slot = loaded.hit().expect("it is there").seal();
            check_value(key, slot.bytes()).expect("the bytes of this key");
        }
    };
    assert_eq!(searches(&mut load), 0);
    let done = compact(&tier, &pool).expect("no error");
    assert!(done.moved > 0 && done.lost == 0, "{done:?}");
    assert_eq!(searches(&mut load), done.moved as usize);
}
