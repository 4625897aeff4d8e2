//! Drives of a set: what was cleared stays cleared, also on a drive that was absent, and wherever
//! the machine dies.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{block_on, store_batch};
use lmc_backend::{Backend, Clears, Health, StartId, Stored};
use lmc_memory::Pool;
use lmc_testkit::until;

use super::crash_tests::{SEGMENT, SETTINGS, clear, is_there, item, one_more, pool, soon};
use super::{Fault, SimVolume};
use crate::backend::DiskBackend;
use crate::config::open_drive;
use crate::drive_set::DriveSet;
use crate::error::DiskError;
use crate::volume::{Kind, Volume};

const CHUNKS: u64 = 20;

/// Opens drives as one set.
fn open_set(volumes: &[&Arc<SimVolume>]) -> Result<DiskBackend, DiskError> {
    open_after(volumes, &Clears::default())
}

/// Opens drives as one set of a process that knows of these clears.
fn open_after(volumes: &[&Arc<SimVolume>], clears: &Clears) -> Result<DiskBackend, DiskError> {
    let paths: Vec<PathBuf> = (0..volumes.len()).map(|n| format!("/{n}").into()).collect();
    let io = DiskError::io(&paths[0]);
    let mut drives = Vec::new();
    for volume in volumes {
        let volume = Arc::clone(volume) as Arc<dyn Volume>;
        drives.push(open_drive(volume, SEGMENT, SETTINGS, None).map_err(io)?.0);
    }
    let set = DriveSet::join(&drives, &paths, clears)?;
    DiskBackend::new(drives, set).map_err(io)
}

fn fill(tier: &DiskBackend, pool: &Pool, numbers: std::ops::Range<u64>) {
    let items = numbers.map(|number| item(pool, number)).collect();
    for stored in store_batch(tier, items, soon()) {
        assert_eq!(stored.expect("a drive that works"), Stored::Written);
    }
}

fn count(tier: &DiskBackend, pool: &Pool, numbers: std::ops::Range<u64>) -> usize {
    numbers.filter(|&n| is_there(tier, pool, n)).count()
}

fn close(tier: DiskBackend) {
    block_on(tier.close(soon())).expect("closed in order");
}

/// Two drives that were cleared and have chunks since, closed in order, and their clears.
fn filled(pool: &Pool) -> (Arc<SimVolume>, Arc<SimVolume>, Arc<Clears>) {
    let (a, b) = (SimVolume::new(u64::MAX), SimVolume::new(u64::MAX));
    let tier = open_set(&[&a, &b]).expect("new drives");
    assert!(clear(&tier, soon()).is_durable);
    fill(&tier, pool, 0..CHUNKS);
    let drives = tier.inspect();
    assert!(drives.iter().all(|drive| drive.chunks > 0));
    let clears = tier.clears();
    assert!(drives.iter().all(|drive| drive.clears == clears));
    close(tier);
    (a, b, clears)
}

/// Chunks on each drive.
fn chunks(tier: &DiskBackend) -> Vec<u64> {
    tier.inspect().iter().map(|drive| drive.chunks).collect()
}

/// A drive was not mounted while all was cleared. Its chunks were found again with it.
#[test]
fn a_drive_that_was_absent_from_a_clear_comes_back_empty() {
    let pool = pool();
    let (a, b, _) = filled(&pool);
    let tier = open_set(&[&a]).expect("without the other");
    assert_eq!(tier.missing().len(), 1);
    assert!(clear(&tier, soon()).is_durable);
    let clears = tier.clears();
    fill(&tier, &pool, 100..104);
    close(tier);
    let tier = open_set(&[&b, &a]).expect("both");
    assert_eq!(count(&tier, &pool, 0..CHUNKS), 0);
    assert_eq!(count(&tier, &pool, 100..104), 4, "stored after the clear");
    assert!(tier.missing().is_empty());
    fill(&tier, &pool, 0..CHUNKS);
    close(tier);
    // No clear since: nothing goes.
    for volumes in [&[&b][..], &[&a, &b]] {
        let tier = open_set(volumes).expect("as it was closed");
        assert!(count(&tier, &pool, 0..CHUNKS) > 0);
        assert_eq!(tier.clears(), clears);
    }
}

#[test]
fn drives_that_cleared_apart_are_both_emptied_and_are_at_both_clears() {
    let pool = pool();
    let (a, b, before) = filled(&pool);
    let mut both = Clears::clone(&before);
    for (volume, number) in [(&a, 200), (&b, 201)] {
        let tier = open_set(&[volume]).expect("one of them");
        let clears = one_more(&before, number as u8);
        both.join(&clears).expect("three");
        let cleared = block_on(tier.clear(clears, soon())).expect("a drive that works");
        assert!(cleared.is_durable && cleared.removed > 0);
        fill(&tier, &pool, number..number + 1);
        close(tier);
    }
    // What each holds was stored before the clear of the other, as far as anything knows.
    let tier = open_set(&[&a, &b]).expect("both");
    assert_eq!(chunks(&tier), [0, 0]);
    assert_eq!(*tier.clears(), both);
    fill(&tier, &pool, 0..CHUNKS);
    close(tier);
    for volume in [&a, &b] {
        let tier = open_set(&[volume]).expect("one of them");
        assert!(chunks(&tier)[0] > 0);
        assert_eq!(*tier.clears(), both);
    }
}

/// The machine dies at every point of a clear and of the start that follows. Either the clear
/// happened on every drive, or on none. A clear that was durable is known afterwards, also the one
/// before.
#[test]
fn a_clear_that_a_crash_cuts_off_is_over_on_all_drives_or_none() {
    let pool = pool();
    let (mut events, mut cut_off) = (0, 0);
    loop {
        let (a, b, before) = filled(&pool);
        let tier = open_set(&[&a, &b]).expect("both");
        assert_eq!(count(&tier, &pool, 0..CHUNKS), CHUNKS as usize);
        // They come to their ends at different times.
        a.crash_after(events);
        b.crash_after(events / 2);
        let after = one_more(&before, 2);
        let late = Instant::now() + Duration::from_millis(20);
        let cleared = block_on(tier.clear(Arc::clone(&after), late)).expect("it is open");
        drop(tier);
        let (a, b) = (a.after_crash(events), b.after_crash(!events));
        // A second crash, while the start after the first repairs it.
        a.crash_after(events);
        b.crash_after(2 * events);
        drop(open_set(&[&a, &b]));
        let (a, b) = (a.after_crash(events + 1), b.after_crash(events));
        let tier = open_set(&[&a, &b]).expect("a crash leaves what can be opened");
        let there = count(&tier, &pool, 0..CHUNKS);
        let known = tier.clears();
        match there {
            0 => assert_eq!(known, after, "after {events} events"),
            all if all == CHUNKS as usize => assert_eq!(known, before, "after {events} events"),
            some => panic!("{some} chunks after {events} events"),
        }
        assert!(
            there == 0 || !cleared.is_durable,
            "what was cleared is back after {events} events"
        );
        cut_off += u64::from(there == 0 && !cleared.is_durable);
        fill(&tier, &pool, 50..55);
        drop(tier);
        let tier = open_set(&[&a, &b]).expect("it opens again");
        assert_eq!(count(&tier, &pool, 50..55), 5);
        assert_eq!(count(&tier, &pool, 0..CHUNKS), there);
        assert_eq!(tier.clears(), known);
        if cleared.is_durable && events > 8 {
            break;
        }
        events += 1;
    }
    assert!(
        cut_off > 0,
        "no crash came between the first drive and the last"
    );
}

/// The process is killed at every point of a clear: what it wrote is there. A drive alone is at the
/// clears before with its chunks, or at the clears after without them.
#[test]
fn a_kill_during_a_clear_leaves_all_chunks_or_none() {
    let pool = pool();
    for events in 0.. {
        let (a, _, before) = filled(&pool);
        let tier = open_set(&[&a]).expect("one of them");
        let full = chunks(&tier);
        a.crash_after(events);
        let after = one_more(&before, 2);
        let late = Instant::now() + Duration::from_millis(20);
        let cleared = block_on(tier.clear(Arc::clone(&after), late)).expect("it is open");
        drop(tier);
        a.revive();
        let tier = open_set(&[&a]).expect("a kill leaves what can be opened");
        match chunks(&tier) {
            there if there == full => assert_eq!(tier.clears(), before, "{events} events"),
            there => {
                assert_eq!(there, [0], "{events} events");
                assert_eq!(tier.clears(), after, "{events} events");
            }
        }
        assert!(!cleared.is_durable || tier.clears() == after);
        if cleared.is_durable {
            assert!(events > 4, "the clear has {events} events");
            return;
        }
    }
}

/// A drive was replaced by a copy of itself from before a clear, and served what was cleared.
#[test]
fn an_older_copy_of_a_drive_is_emptied_by_what_the_state_file_knows() {
    let pool = pool();
    let (a, b, _) = filled(&pool);
    let old = a.after_crash(1);
    let tier = open_set(&[&a, &b]).expect("both");
    assert!(clear(&tier, soon()).is_durable);
    let clears = tier.clears();
    fill(&tier, &pool, 0..CHUNKS);
    close(tier);
    // Alone with the state file, and beside a drive that was there.
    let tier = open_after(&[&old.after_crash(1)], &clears).expect("the copy");
    assert_eq!(
        (chunks(&tier), tier.clears()),
        (vec![0], Arc::clone(&clears))
    );
    close(tier);
    let tier = open_set(&[&old, &b]).expect("the copy and the other");
    let held = chunks(&tier);
    assert!(held[0] == 0 && held[1] > 0, "{held:?}");
    close(tier);
    // The state file has the same clears: nothing goes.
    let tier = open_after(&[&b], &clears).expect("the other");
    assert_eq!((chunks(&tier), tier.clears()), (vec![held[1]], clears));
}

#[test]
fn a_drive_whose_map_is_damaged_or_lost_is_emptied_alone() {
    let pool = pool();
    let damages: [fn(&SimVolume); 5] = [
        |volume| volume.alter("clears", |bytes| bytes[10] ^= 1),
        |volume| volume.alter("clears", |bytes| bytes[30] ^= 1),
        |volume| volume.alter("clears", |bytes| bytes.clear()),
        |volume| volume.alter("clears", |bytes| bytes.fill(0)),
        |volume| volume.lose("clears"),
    ];
    for damage in damages {
        let (a, b, clears) = filled(&pool);
        damage(&a);
        let tier = open_set(&[&a, &b]).expect("both");
        let held = chunks(&tier);
        assert!(held[0] == 0 && held[1] > 0, "{held:?}");
        assert_eq!(tier.clears(), clears, "those of the other");
        fill(&tier, &pool, 300..320);
        close(tier);
        // The map was written again.
        let tier = open_set(&[&a]).expect("the one that was damaged");
        assert!(chunks(&tier)[0] > 0);
        assert_eq!(tier.clears(), clears);
        close(tier);
        // Alone it is at no clears.
        damage(&a);
        let tier = open_set(&[&a]).expect("the one that was damaged");
        assert_eq!(chunks(&tier), [0]);
        assert!(tier.clears().is_empty());
        fill(&tier, &pool, 0..1);
        close(tier);
        let tier = open_set(&[&a]).expect("as it was closed");
        assert_eq!(chunks(&tier), [1]);
    }
}

/// A drive cannot write its log, or its map, while all is cleared. What it holds is gone from then
/// on. Once it can write again it is at these clears, whether it is cleared once more or not.
#[test]
fn a_drive_that_cannot_be_written_during_a_clear_gets_it_later() {
    let pool = pool();
    for (prefix, again) in [
        ("log-", true),
        ("log-", false),
        ("clears", true),
        ("clears", false),
    ] {
        let (a, b, before) = filled(&pool);
        let tier = open_set(&[&a, &b]).expect("both");
        a.fault_in(prefix, Kind::Write, Fault::Error(libc::EIO));
        let after = one_more(&before, 2);
        let cleared = block_on(tier.clear(Arc::clone(&after), soon())).expect("it is open");
        assert_eq!((cleared.removed, cleared.is_durable), (CHUNKS, false));
        assert_eq!(count(&tier, &pool, 0..CHUNKS), 0);
        a.revive();
        until("the drive is written again", || {
            if !again {
                return tier.health() == Health::Ready;
            }
            let again = block_on(tier.clear(Arc::clone(&after), soon())).expect("it is open");
            assert_eq!(again.removed, 0);
            again.is_durable
        });
        fill(&tier, &pool, 0..CHUNKS);
        let held = chunks(&tier)[0];
        drop(tier);
        let tier = open_set(&[&a]).expect("one of them");
        assert_eq!((chunks(&tier), tier.clears()), (vec![held], after));
    }
}

#[test]
fn more_clears_than_a_map_holds_are_refused() {
    let pool = pool();
    let (a, ..) = filled(&pool);
    let entry = |number: usize| (StartId::new((number as u128).to_le_bytes()), 1);
    let clears = (0..Clears::MAX_STARTS).map(entry);
    let clears = Clears::from_entries(clears).expect("as many as a map holds");
    let refused = open_after(&[&a], &clears).expect_err("one more is on the drive");
    assert!(matches!(refused, DiskError::TooManyClears(_)), "{refused}");
    let tier = open_set(&[&a]).expect("nothing was changed");
    assert!(chunks(&tier)[0] > 0);
    // An older map than the drive's changes nothing.
    let older = block_on(tier.clear(Arc::default(), soon())).expect("it is open");
    assert_eq!((older.removed, tier.clears().is_empty()), (0, false));
}

/// The record of a clear is written once more when a caller asks once more, after chunks that were
/// stored since.
#[test]
fn the_same_clears_once_more_remove_nothing() {
    let pool = pool();
    let (a, _, clears) = filled(&pool);
    let tier = open_set(&[&a]).expect("one of them");
    let held = chunks(&tier);
    let again = block_on(tier.clear(Arc::clone(&clears), soon())).expect("it is open");
    assert_eq!((again.removed, again.is_durable), (0, true));
    assert_eq!(chunks(&tier), held);
    drop(tier);
    let tier = open_set(&[&a]).expect("after a kill");
    assert_eq!((chunks(&tier), tier.clears()), (held, clears));
}
