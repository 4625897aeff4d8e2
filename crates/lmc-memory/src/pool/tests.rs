use std::sync::Arc;
use std::thread;

use super::*;
use crate::{ArenaConfig, checksum};

fn pool(bytes: usize) -> Pool {
    let arena = ArenaConfig::anonymous(bytes)
        .build()
        .expect("anonymous memory");
    Pool::new(Arc::new(arena), PoolConfig::default()).expect("a valid pool")
}

#[test]
fn slots_are_aligned_exact_and_apart() {
    let pool = pool(1 << 20);
    let mut slots: Vec<_> = [1, 4096, 4097, 5000]
        .into_iter()
        .map(|len| pool.reserve(len).unwrap())
        .collect();
    for (i, slot) in slots.iter_mut().enumerate() {
        assert_eq!(slot.offset() % 4096, 0);
        assert_eq!(slot.as_mut_ptr() as usize % 4096, 0);
        slot.bytes_mut().fill(i as u8 + 1);
    }
    assert_eq!(pool.usage().used, 4096 * (1 + 1 + 2 + 2));
    assert_eq!(
        slots.iter().map(ReservedSlot::len).collect::<Vec<_>>(),
        [1, 4096, 4097, 5000]
    );
    for (i, slot) in slots.into_iter().enumerate() {
        let written = slot.written();
        assert!(written.bytes().iter().all(|&b| b == i as u8 + 1));
        let sealed = written.seal();
        assert!(sealed.bytes().iter().all(|&b| b == i as u8 + 1));
    }
    assert_eq!(
        pool.usage(),
        PoolUsage {
            capacity: 1 << 20,
            largest_free: 1 << 20,
            ..PoolUsage::default()
        }
    );
}

#[test]
fn a_slot_returns_in_every_state() {
    let pool = pool(8192);
    let full = || pool.reserve(8192).expect("the pool is empty");
    drop(full());
    drop(full().written());
    drop(full().written().seal());
    let sealed = full().written().seal();
    let reader = sealed.clone();
    assert_eq!(reader.owners(), 2);
    drop(sealed);
    assert!(pool.reserve(1).is_none());
    assert_eq!(pool.usage().slots, 1);
    drop(reader);
    assert_eq!(pool.usage().slots, 0);
}

#[test]
fn quarantine_is_counted_and_ends_only_by_proof() {
    let pool = pool(16384);
    let first = pool.reserve(5000).unwrap().quarantine();
    let second = pool.reserve(100).unwrap().written().quarantine();
    let usage = pool.usage();
    assert_eq!(
        (usage.quarantined_bytes, usage.quarantined_slots),
        (8192 + 4096, 2)
    );
    assert_eq!((usage.used, usage.slots), (8192 + 4096, 2));
    second.release_proven_quiet();
    assert_eq!(pool.usage().quarantined_bytes, 8192);
    assert_eq!(pool.usage().slots, 1);
    // Dropped without proof: lost for good, and still counted.
    drop(first);
    let usage = pool.usage();
    assert_eq!(
        (usage.quarantined_bytes, usage.quarantined_slots, usage.used),
        (8192, 1, 8192)
    );
    assert_eq!(usage.largest_free, 8192);
}

#[test]
fn slots_outlive_the_pool_that_made_them() {
    let pool = pool(8192);
    let mut slot = pool.reserve(3).unwrap();
    slot.bytes_mut().copy_from_slice(b"abc");
    drop(pool);
    assert_eq!(slot.written().seal().bytes(), b"abc");
}

#[test]
fn impossible_lengths_and_configs_are_refused() {
    let pool = pool(8192);
    for len in [0, 8193, 1 << 40, u64::MAX] {
        assert!(pool.reserve(len).is_none(), "{len}");
    }
    let arena = Arc::clone(pool.arena());
    for align in [0, 1, 63, 4095, 4 << 20] {
        let config = PoolConfig::default().with_align(align);
        assert!(
            matches!(
                Pool::new(Arc::clone(&arena), config),
                Err(PoolError::Align { .. })
            ),
            "{align}"
        );
    }
    let config = PoolConfig::default().with_align(2 << 20);
    assert!(matches!(
        Pool::new(arena, config),
        Err(PoolError::Size { .. })
    ));
}

#[test]
fn an_index_can_hold_millions() {
    assert_eq!(size_of::<SealedSlot>(), 24);
    assert_eq!(size_of::<Option<SealedSlot>>(), 24);
    let mut fit = SegregatedFit::new(1 << 20);
    let slots = if cfg!(miri) { 5_000 } else { 200_000 };
    for _ in 0..slots {
        fit.take(5).unwrap();
    }
    // The owners' counter adds at most 8 bytes to these 24, and the checksum, once one is known, at
    // most 16.
    assert!(
        fit.heap_bytes() <= slots * 24 + 40_000,
        "{}",
        fit.heap_bytes()
    );
}

#[test]
fn threads_share_a_pool() {
    let pool = pool(1 << 20);
    let rounds = if cfg!(miri) { 10 } else { 2_000 };
    thread::scope(|scope| {
        for seed in 1..=4u64 {
            let pool = &pool;
            scope.spawn(move || {
                let mut held: Vec<(SealedSlot, u8)> = Vec::new();
                for round in 0..rounds {
                    let tag = (seed * 50 + round % 50) as u8;
                    if let Some(mut slot) = pool.reserve(1 + (seed * round * 7919) % 30_000) {
                        slot.bytes_mut().fill(tag);
                        held.push((slot.written().seal(), tag));
                    }
                    if held.len() > 5 {
                        let (slot, tag) = held.remove((round % 5) as usize);
                        let clone = slot.clone();
                        drop(slot);
                        assert!(clone.bytes().iter().all(|&b| b == tag));
                    }
                }
            });
        }
    });
    assert_eq!((pool.usage().used, pool.usage().slots), (0, 0));
}

#[test]
fn a_checksum_is_computed_once_and_ends_with_the_bytes() {
    let pool = pool(1 << 20);
    let filled = |byte: u8| {
        let mut slot = pool.reserve(4096).expect("it is free");
        slot.bytes_mut().fill(byte);
        slot.written()
    };
    let slot = filled(1).seal();
    let clone = slot.clone();
    assert_eq!(clone.known_checksum(), None);
    assert_eq!(slot.checksum(), checksum(slot.bytes()));
    assert_eq!(clone.known_checksum(), Some(slot.checksum()));
    let offset = slot.offset();
    drop((slot, clone));
    // The next chunk at the same index of the pool.
    let next = filled(2).seal();
    assert_eq!((next.offset(), next.known_checksum()), (offset, None));
    assert_eq!(next.checksum(), checksum(next.bytes()));
    // A sum that was noted is not computed again.
    let noted = filled(3).with_checksum(77);
    assert_eq!(noted.checksum(), 77);
    let again = noted.into_reserved().written();
    assert_eq!(again.known_checksum(), None, "its bytes may be others");
    assert_eq!(again.with_checksum(78).seal().checksum(), 78);
}
