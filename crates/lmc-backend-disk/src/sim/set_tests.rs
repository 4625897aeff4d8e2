//! Drives of a set: what was cleared stays cleared, also on a drive that was absent, and wherever
//! the machine dies.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{block_on, clear_all, store_batch, test_key};
use lmc_backend::{Backend, Clear, ClearEpoch, Stored};
use lmc_memory::Pool;

use super::SimVolume;
use super::crash_tests::{SEGMENT, SETTINGS, is_there, item, pool, soon};
use crate::backend::DiskBackend;
use crate::config::open_drive;
use crate::drive_set::DriveSet;
use crate::volume::Volume;

const CHUNKS: u64 = 20;

/// Opens drives as one set.
fn open_set(volumes: &[&Arc<SimVolume>]) -> std::io::Result<DiskBackend> {
    let mut drives = Vec::new();
    for volume in volumes {
        let volume = Arc::clone(volume) as Arc<dyn Volume>;
        drives.push(open_drive(volume, SEGMENT, SETTINGS, None)?.0);
    }
    let paths: Vec<PathBuf> = (0..drives.len()).map(|n| format!("/{n}").into()).collect();
    let set = DriveSet::join(&drives, &paths, None).map_err(std::io::Error::other)?;
    DiskBackend::new(drives, set)
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

/// Two drives with chunks on both, closed in order.
fn filled(pool: &Pool) -> (Arc<SimVolume>, Arc<SimVolume>) {
    let (a, b) = (SimVolume::new(u64::MAX), SimVolume::new(u64::MAX));
    let tier = open_set(&[&a, &b]).expect("new drives");
    fill(&tier, pool, 0..CHUNKS);
    assert!(tier.inspect().iter().all(|drive| drive.chunks > 0));
    close(tier);
    (a, b)
}

/// A drive was not mounted while all was cleared. Its chunks were found again with it.
#[test]
fn a_drive_that_was_absent_from_a_clear_comes_back_empty() {
    let pool = pool();
    let (a, b) = filled(&pool);
    let tier = open_set(&[&a]).expect("without the other");
    assert_eq!(tier.missing().len(), 1);
    clear_all(&tier, soon()).expect("a drive that works");
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
    }
}

#[test]
fn clears_of_each_drive_alone_clear_both() {
    let pool = pool();
    let (a, b) = filled(&pool);
    for (volume, number) in [(&a, 200), (&b, 201)] {
        let tier = open_set(&[volume]).expect("one of them");
        clear_all(&tier, soon()).expect("a drive that works");
        fill(&tier, &pool, number..number + 1);
        close(tier);
    }
    // What each holds was stored before the clear of the other, as far as anything knows.
    let tier = open_set(&[&a, &b]).expect("both");
    assert_eq!(count(&tier, &pool, 0..CHUNKS), 0);
    assert_eq!(count(&tier, &pool, 200..202), 0);
}

/// The machine dies at every point of a clear and of the start that follows. Either the clear
/// happened on every drive, or on none, and one that was acknowledged did.
#[test]
fn a_clear_that_a_crash_cuts_off_is_over_on_all_drives_or_none() {
    let pool = pool();
    let (mut events, mut cut_off) = (0, 0);
    loop {
        let (a, b) = filled(&pool);
        let tier = open_set(&[&a, &b]).expect("both");
        assert_eq!(count(&tier, &pool, 0..CHUNKS), CHUNKS as usize);
        // They come to their ends at different times.
        a.crash_after(events);
        b.crash_after(events / 2);
        let cleared = clear_all(&tier, Instant::now() + Duration::from_millis(20));
        drop(tier);
        let (a, b) = (a.after_crash(events), b.after_crash(!events));
        // A second crash, while the start after the first repairs it.
        a.crash_after(events);
        b.crash_after(2 * events);
        drop(open_set(&[&a, &b]));
        let (a, b) = (a.after_crash(events + 1), b.after_crash(events));
        let tier = open_set(&[&a, &b]).expect("a crash leaves what can be opened");
        let there = count(&tier, &pool, 0..CHUNKS);
        match cleared {
            Ok(_) => assert_eq!(there, 0, "after {events} events"),
            Err(_) => {
                let whole = there == 0 || there == CHUNKS as usize;
                assert!(whole, "{there} chunks after {events} events");
                cut_off += u64::from(there == 0);
            }
        }
        fill(&tier, &pool, 50..55);
        drop(tier);
        let tier = open_set(&[&a, &b]).expect("it opens again");
        assert_eq!(count(&tier, &pool, 50..55), 5);
        assert_eq!(count(&tier, &pool, 0..CHUNKS), there);
        if cleared.is_ok() && events > 8 {
            break;
        }
        events += 1;
    }
    assert!(
        cut_off > 0,
        "no crash came between the first drive and the last"
    );
}

/// The new lmc writes what the one before refuses only where anything was cleared.
#[test]
fn a_drive_that_was_never_cleared_has_the_first_version() {
    let pool = pool();
    let volume = SimVolume::new(u64::MAX);
    let tier = open_set(&[&volume]).expect("a new drive");
    fill(&tier, &pool, 0..3);
    assert_eq!(tier.inspect()[0].version, 1);
    clear_all(&tier, soon()).expect("a drive that works");
    assert_eq!(tier.inspect()[0].version, 2);
    close(tier);
    assert_eq!(open_set(&[&volume]).expect("again").inspect()[0].version, 2);
}

/// A drive was not mounted while one space was cleared, because of what a peer said.
#[test]
fn a_drive_that_was_absent_from_the_clear_of_a_space_comes_back_without_it() {
    let pool = pool();
    let (a, b) = filled(&pool);
    let tier = open_set(&[&a]).expect("without the other");
    let space = test_key(0).space;
    let clear = Clear::space(space, ClearEpoch::default().next());
    block_on(tier.clear(clear, soon())).expect("a drive that works");
    close(tier);
    let tier = open_set(&[&b, &a]).expect("both");
    for number in 0..CHUNKS {
        let is_cleared = test_key(number).space == space;
        assert_eq!(is_there(&tier, &pool, number), !is_cleared, "{number}");
    }
    close(tier);
    let tier = open_set(&[&b]).expect("the one that was absent");
    assert!(tier.clears().contains(&clear));
}
