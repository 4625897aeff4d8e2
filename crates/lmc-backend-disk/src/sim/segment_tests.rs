//! Segments: how many there are, which is used next, and what is left when they are emptied.

use std::sync::Arc;

use lmc_backend::conformance::{block_on, fill_value, test_key};
use lmc_backend::{Backend, StoreItem, Stored};
use lmc_memory::Pool;

use super::SimVolume;
use super::crash_tests::{SETTINGS, pool, soon};
use crate::backend::DiskBackend;
use crate::config::open_drive;
use crate::drive::DriveSettings;
use crate::volume::BLOCK;

/// Stores a chunk that takes so many blocks with its header.
fn store(tier: &DiskBackend, pool: &Pool, number: u64, blocks: u64) {
    let key = test_key(number);
    let mut slot = pool.reserve((blocks - 1) * BLOCK).expect("room");
    fill_value(&key, slot.bytes_mut());
    let item = StoreItem::new(key, slot.written().seal());
    let stored = block_on(tier.store(vec![item], soon()));
    assert!(
        matches!(stored[..], [Ok(Stored::Written)]),
        "{number}: {stored:?}"
    );
}

/// How many of these chunks the index knows.
fn known(tier: &DiskBackend, numbers: impl Iterator<Item = u64>) -> u64 {
    let keys: Vec<_> = numbers.map(test_key).collect();
    let found = block_on(tier.contains(&keys, soon()));
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
        let tier = DiskBackend::new(vec![drive], None).expect("a timer");
        (tier, notes)
    };
    let pool = pool();
    let (tier, _) = open();
    for number in 0..1100 {
        store(&tier, &pool, number, 4);
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
