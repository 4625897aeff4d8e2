//! Chunks that were stored before a clear are not found after it, however late it ends.

use std::time::{Duration, Instant};

use lmc_backend::conformance::{block_on, clear_all, load_batch, store_batch, test_key};
use lmc_backend::{Backend, BackendError, LoadItem, Stored, WriteBackend};
use lmc_key::ClearsId;
use lmc_testkit::{cpu_time, rounds};

use super::crash_tests::{SETTINGS, clear, is_there, item, len, open, pool, soon};
use super::{Fault, SimVolume};
use crate::format::{Location, PutRecord, Record};
use crate::index::Index;
use crate::volume::Kind;

#[test]
fn a_store_that_was_late_does_not_undo_a_clear() {
    let late = || Instant::now() + Duration::from_millis(50);
    // It waits for a file, for its bytes, for their sync, or for the log.
    for (prefix, kind) in [
        ("", None),
        ("segment-", Some(Kind::Write)),
        ("segment-", Some(Kind::Sync)),
        ("log-", Some(Kind::WriteDurably)),
    ] {
        let volume = SimVolume::new(u64::MAX);
        let pool = pool();
        let tier = open(&volume, SETTINGS).expect("a new drive");
        let held = kind.is_none().then(|| volume.hold_names());
        if let Some(kind) = kind {
            let stored = store_batch(&tier, vec![item(&pool, 0)], soon());
            assert!(matches!(stored[..], [Ok(Stored::Written)]));
            volume.fault_in(prefix, kind, Fault::Stall);
        }
        let stored = store_batch(&tier, vec![item(&pool, 1)], late());
        assert!(
            matches!(stored[..], [Err(BackendError::Deadline)]),
            "{kind:?}"
        );
        // Removed and stored once more, which begins when the first is over.
        drop(block_on(tier.remove(&[test_key(1)], late())));
        let stored = store_batch(&tier, vec![item(&pool, 1)], late());
        assert!(
            matches!(stored[..], [Err(BackendError::Deadline)]),
            "{kind:?}"
        );
        // Nor does one that was not removed.
        drop(store_batch(&tier, vec![item(&pool, 3)], late()));
        let cleared = clear(&tier, late());
        assert!(cleared.removed <= 1, "{cleared:?}");
        assert!(prefix != "log-" || !cleared.is_durable, "{cleared:?}");
        assert!(!is_there(&tier, &pool, 0), "it is forgotten at once");
        drop(held);
        volume.thaw();
        let again = block_on(tier.clear(tier.clears(), soon())).expect("it is open");
        assert_eq!((again.removed, again.is_durable), (0, true), "{kind:?}");
        block_on(tier.close(soon())).expect("closed in order");
        drop(tier);
        assert_eq!(pool.usage().used, 0);
        let tier = open(&volume, SETTINGS).expect("as it was closed");
        let stored = store_batch(&tier, vec![item(&pool, 2)], soon());
        assert!(matches!(stored[..], [Ok(Stored::Written)]));
        let late = [0, 1, 3].map(|number| is_there(&tier, &pool, number));
        assert_eq!(late, [false; 3], "{kind:?}");
        assert!(is_there(&tier, &pool, 2));
    }
}

#[test]
fn a_cleared_drive_is_written_from_its_start() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    for round in 0..4 {
        let numbers = round * 100..round * 100 + 40;
        for number in numbers.clone() {
            let stored = store_batch(&tier, vec![item(&pool, number)], soon());
            assert!(matches!(stored[..], [Ok(Stored::Written)]));
        }
        assert!(numbers.clone().all(|number| is_there(&tier, &pool, number)));
        assert_eq!(clear_all(&tier, soon()).expect("a drive that works"), 40);
        assert_eq!((tier.held().chunks, tier.held().bytes), (0, 0));
        assert!(!numbers.clone().any(|number| is_there(&tier, &pool, number)));
    }
    // Forty chunks take some five segments.
    assert!(volume.names("segment-").len() < 8);
    let stats = tier.stats();
    assert_eq!((stats.removed, stats.evicted), (160, 0));
}

#[test]
fn a_million_chunks_are_forgotten_at_once() {
    let mut index = Index::new(1 << 30);
    let (chunks, of_segment) = (rounds(100_000, 1_000_000) as u64, 1_000);
    let begun = cpu_time();
    for number in 0..chunks {
        let segment = (number / of_segment) as u32;
        let generation = u64::from(segment) + 1;
        if number % of_segment == 0 {
            index.apply(&Record::Begin {
                segment,
                generation,
            });
        }
        let location = Location {
            segment,
            block: (number % of_segment) as u32 * 2,
            generation,
        };
        let put = PutRecord {
            key: test_key(number),
            location,
            len: 100,
            payload_sum: 0,
        };
        assert!(index.apply(&Record::Put(put)));
    }
    let built = cpu_time() - begun;
    let begun = cpu_time();
    let (gone, _) = index.clear(ClearsId::new([1; 16]));
    let took = cpu_time() - begun;
    assert_eq!(gone, chunks);
    assert!(
        took < built / 10,
        "{took:?} with the lock held, {built:?} to store them"
    );
    assert!((0..chunks).all(|number| index.find(&test_key(number)).is_none()));
    assert_eq!(index.usage().chunks, 0);
}

#[test]
fn what_was_cleared_while_it_was_read_is_used_again_before_more_is_made() {
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    for round in 0..6 {
        for number in 0..40 {
            let stored = store_batch(&tier, vec![item(&pool, number)], soon());
            assert!(matches!(stored[..], [Ok(Stored::Written)]));
        }
        // Each segment is being read.
        volume.fault_in("segment-", Kind::Read, Fault::Stall);
        for number in 0..40 {
            let slot = pool.reserve(len(number)).expect("space");
            let late = Instant::now() + Duration::from_millis(1);
            let load = LoadItem::new(test_key(number), slot);
            drop(load_batch(&tier, vec![load], late));
        }
        clear_all(&tier, soon()).expect("a drive that works");
        volume.thaw();
        let made = volume.names("segment-").len();
        assert!(made < 10, "{made} segments for forty chunks, round {round}");
    }
}

/// A store that waits for the end of one that was removed is removed, too.
#[test]
fn a_store_that_waits_for_another_does_not_undo_a_removal() {
    let late = || Instant::now() + Duration::from_millis(50);
    let volume = SimVolume::new(u64::MAX);
    let pool = pool();
    let tier = open(&volume, SETTINGS).expect("a new drive");
    let stored = store_batch(&tier, vec![item(&pool, 0)], soon());
    assert!(matches!(stored[..], [Ok(Stored::Written)]));
    volume.fault_in("segment-", Kind::Write, Fault::Stall);
    for _ in 0..2 {
        drop(store_batch(&tier, vec![item(&pool, 1)], late()));
        let removed = block_on(tier.remove(&[test_key(1)], soon()));
        assert!(matches!(removed[..], [Ok(_)]), "{removed:?}");
    }
    volume.thaw();
    block_on(tier.close(soon())).expect("all is over then");
    drop(tier);
    let tier = open(&volume, SETTINGS).expect("as it was closed");
    assert!(is_there(&tier, &pool, 0) && !is_there(&tier, &pool, 1));
}
