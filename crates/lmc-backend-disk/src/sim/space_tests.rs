//! Free space of a drive: waiting for it, and how much of it is used.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{block_on, store_batch};
use lmc_backend::{Backend, BackendError, Health, Stored};
use lmc_testkit::until;

use super::crash_tests::{SEGMENT, SETTINGS, is_there, item, open, pool, soon};
use super::{Fault, SimVolume};
use crate::drive::DriveSettings;
use crate::volume::{BLOCK, Kind};

/// Settings of a drive that waits shortly for threads that do not end.
const LEAVES_SOON: DriveSettings = DriveSettings {
    leave: Duration::from_millis(100),
    ..SETTINGS
};

#[test]
fn a_store_is_over_at_its_deadline_when_no_file_can_be_made() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    let held = volume.hold_names();
    let timeout = Instant::now() + Duration::from_millis(50);
    let late = store_batch(&tier, vec![item(&pool, 0), item(&pool, 1)], timeout);
    let late = late
        .iter()
        .all(|late| matches!(late, Err(BackendError::Deadline)));
    // The files are still held.
    assert!(late);
    // A store with a longer timeout waits, and delays no other.
    thread::scope(|scope| {
        let waits = scope.spawn(|| store_batch(&tier, vec![item(&pool, 2)], soon()));
        assert!(!is_there(&tier, &pool, 3));
        assert_eq!(tier.health(), Health::Ready);
        drop(held);
        let stored = waits.join().expect("no panic");
        assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
    });
    block_on(tier.close(soon())).expect("closed in order");
    assert_eq!(pool.usage().used, 0);
}

#[test]
fn a_segment_is_made_before_it_is_needed() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let settings = DriveSettings {
        log_bytes: 1 << 20,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    let active = || {
        let segments = tier.inspect().remove(0).segments;
        let active = segments.into_iter().find(|segment| segment.active);
        active.expect("something was stored")
    };
    let store = |number| store_batch(&tier, vec![item(&pool, number)], soon()).remove(0);
    let mut numbers = 0..;
    for number in numbers.by_ref() {
        assert!(matches!(store(number), Ok(Stored::Written)));
        if active().used_bytes >= SEGMENT / 2 {
            break;
        }
    }
    until("the next segment is made", || {
        volume.names("segment-").len() >= 2
    });
    let held = volume.hold_names();
    for number in numbers {
        assert!(matches!(store(number), Ok(Stored::Written)));
        if active().number == 1 {
            break;
        }
    }
    drop(held);
}

#[test]
fn a_full_file_system_leaves_the_tier_space_for_its_own_log() {
    let pool = pool();
    // Header, log, checkpoint and two segments, and nothing for the next log.
    let volume = SimVolume::new(2 * SEGMENT + SETTINGS.log_bytes + 5 * BLOCK);
    let tier = open(&volume, SETTINGS).expect("a new drive");
    for number in 0..60 {
        let stored = store_batch(&tier, vec![item(&pool, number)], soon());
        let health = tier.health();
        assert!(
            matches!(stored[..], [Ok(Stored::Written)]),
            "{stored:?}, {health:?}"
        );
    }
    assert!(tier.stats().checkpoints > 3, "logs were over");
    block_on(tier.close(soon())).expect("closed in order");
}

#[test]
fn what_is_kept_free_is_kept_free() {
    let pool = pool();
    let keep_free = 64 << 10;
    let volume = SimVolume::new(3 * SEGMENT + keep_free + (32 << 10));
    let settings = DriveSettings {
        keep_free,
        ..SETTINGS
    };
    let tier = open(&volume, settings).expect("a new drive");
    for number in 0..100 {
        let stored = store_batch(&tier, vec![item(&pool, number)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]), "{stored:?}");
    }
    assert!(tier.stats().checkpoints > 3, "logs were over");
    let least = volume.least_free();
    assert!(least >= keep_free, "at times only {least} bytes were free");
    drop(tier);
    assert_eq!(Arc::strong_count(&volume), 1);
}

/// A tier that goes is like a kill, whatever a file system does.
#[test]
fn a_tier_goes_while_a_file_cannot_be_made_or_a_sync_stalls() {
    for stalls in [true, false] {
        let volume = SimVolume::new(u64::MAX);
        let pool = pool();
        let tier = open(&volume, LEAVES_SOON).expect("a new drive");
        let held = match stalls {
            true => {
                volume.fault_in("segment-", Kind::Sync, Fault::Stall);
                None
            }
            false => Some(volume.hold_names()),
        };
        let late = Instant::now() + Duration::from_millis(50);
        drop(store_batch(&tier, vec![item(&pool, 0)], late));
        let going = thread::spawn(move || drop(tier));
        until("the tier is gone", || going.is_finished());
        drop(held);
        assert_eq!(pool.usage().used, 0);
    }
}

#[test]
fn an_orderly_close_leaves_a_thread_behind_that_cannot_make_a_file() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, LEAVES_SOON).expect("a new drive");
    let held = volume.hold_names();
    let late = Instant::now() + Duration::from_millis(50);
    let many = (1..40).map(|number| item(&pool, number)).collect();
    drop(store_batch(&tier, many, late));
    let late = Instant::now() + Duration::from_millis(100);
    drop(block_on(tier.close(late)));
    drop(tier);
    until("all slots are back", || pool.usage().used == 0);
    drop(held);
}
