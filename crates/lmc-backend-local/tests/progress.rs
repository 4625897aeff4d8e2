//! Checks what users of other caches reported first: a tier full of leased chunks must refuse at once,
//! not wait, and work again as soon as something goes.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use lmc_backend::conformance::{check_value, fill_value, test_key};
use lmc_backend_local::{
    Clear, Inserted, LocalConfig, LocalTier, OwnerId, PolicyKind, ReserveError, TenantId, Write,
    WriteGrant, WriteStart,
};
use lmc_key::ChunkKey;
use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_testkit::{cpu_time, rounds};

/// Bytes of a chunk: a page of the pool.
const UNIT: u64 = 4096;
const COMMON: TenantId = TenantId(0);

fn tier(policy: PolicyKind, units: u64) -> LocalTier {
    let arena = ArenaConfig::anonymous((units * UNIT) as usize)
        .build()
        .unwrap();
    let pool = Pool::new(Arc::new(arena), PoolConfig::default()).unwrap();
    assert_eq!(pool.usage().capacity, units * UNIT);
    LocalConfig::default()
        .with_policy(policy)
        .build(pool, None)
        .unwrap()
}

/// Begins a write of a key that no other write names.
fn reserve(tier: &LocalTier, len: u64, tenant: TenantId) -> Result<WriteGrant, ReserveError> {
    static NEXT: AtomicU64 = AtomicU64::new(1 << 40);
    let key = test_key(NEXT.fetch_add(1, Ordering::Relaxed));
    match tier.begin_write(OwnerId(9), tenant, key, len)? {
        WriteStart::Reserved(grant) => Ok(grant),
        other => panic!("a new key is neither present nor being written: {other:?}"),
    }
}

fn chunk(tier: &LocalTier, n: u64, parent: Option<u64>, tenant: TenantId) -> Write {
    let started = tier.begin_write(OwnerId(9), tenant, test_key(n), UNIT);
    let Ok(WriteStart::Reserved(mut grant)) = started else {
        panic!("chunk {n}: {started:?}");
    };
    fill_value(&test_key(n), grant.slot.bytes_mut());
    grant.written(parent.map(test_key))
}

/// A prompt of chunks `from..to`.
fn store(tier: &LocalTier, from: u64, to: u64) {
    let chunk = |n: u64| chunk(tier, n, n.checked_sub(1).filter(|n| *n >= from), COMMON);
    let inserted = tier.commit((from..to).map(chunk).collect());
    assert!(inserted.iter().all(|inserted| *inserted == Inserted::New));
}

fn keys(from: u64, to: u64) -> Vec<ChunkKey> {
    (from..to).map(test_key).collect()
}

const EVICTING: [PolicyKind; 3] = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Arc];

#[test]
fn a_tier_full_of_leases_refuses_at_once_and_recovers() {
    let chunks = rounds(3000, 10_000) as u64;
    for policy in EVICTING {
        let tier = tier(policy, chunks);
        for start in (0..chunks).step_by(500) {
            store(&tier, start, start + 500);
        }
        let all = keys(0, chunks);
        let mut leases = tier.lease_leading(OwnerId(1), &all);
        assert_eq!(leases.len() as u64, chunks);
        let start = cpu_time();
        for _ in 0..1000 {
            let refused = reserve(&tier, UNIT, COMMON).map(drop).unwrap_err();
            assert_eq!(
                refused,
                ReserveError::NoSpace {
                    len: UNIT,
                    evicted: 0
                }
            );
        }
        // The first of them sets all chunks aside once; the others look at nothing.
        let took = cpu_time() - start;
        assert!(took < Duration::from_secs(1), "{policy}: {took:?}");
        assert_eq!(tier.maintain(usize::MAX).evicted, 0);

        leases.truncate(chunks as usize - 10);
        let slots: Vec<_> = (0..10)
            .map(|_| reserve(&tier, UNIT, COMMON).unwrap())
            .collect();
        assert!(
            reserve(&tier, UNIT, COMMON).is_err(),
            "{policy}: the rest is leased"
        );
        drop((slots, leases));
        assert_eq!(tier.usage().leases, 0);
        assert_eq!(tier.maintain(usize::MAX).evicted, chunks / 10 - 10);
        for n in 0..chunks {
            drop(chunk(&tier, chunks + n, None, COMMON));
        }
    }
}

#[test]
fn a_tier_full_of_pins_refuses_and_recovers() {
    for policy in EVICTING {
        let tier = tier(policy, 16);
        store(&tier, 0, 16);
        let all = keys(0, 16);
        assert_eq!(tier.pin(&all), [true; 16]);
        assert_eq!(tier.pin(&all[..1]), [true]);
        assert!(reserve(&tier, UNIT, COMMON).is_err(), "{policy}");
        assert_eq!(tier.clear(Clear::Idle).removed, 0);
        assert_eq!(tier.unpin(&all[..1]), [true]);
        assert!(
            reserve(&tier, UNIT, COMMON).is_err(),
            "{policy}: pinned twice"
        );
        assert_eq!(tier.unpin(&all[..1]), [true]);
        assert_eq!(tier.unpin(&all[..1]), [false]);
        assert!(reserve(&tier, UNIT, COMMON).is_ok(), "{policy}");
        assert_eq!(tier.contains(&all[..2]), [None, Some(UNIT)]);
    }
}

#[test]
fn no_eviction_means_none() {
    let tier = tier(PolicyKind::None, 4);
    store(&tier, 0, 4);
    let refused = reserve(&tier, UNIT, COMMON).map(drop).unwrap_err();
    assert_eq!(
        refused,
        ReserveError::NoSpace {
            len: UNIT,
            evicted: 0
        }
    );
    assert_eq!(tier.maintain(9).evicted, 0);
    assert_eq!(tier.remove(&keys(3, 4)), [true]);
    assert!(reserve(&tier, UNIT, COMMON).is_ok());
}

#[test]
fn a_request_that_cannot_ever_fit_says_so() {
    let tier = tier(PolicyKind::Lru, 4);
    assert_eq!(
        reserve(&tier, 0, COMMON).map(drop).unwrap_err(),
        ReserveError::Empty
    );
    let (len, max) = (5 * UNIT, 4 * UNIT);
    assert_eq!(
        reserve(&tier, len, COMMON).map(drop).unwrap_err(),
        ReserveError::TooLarge { len, max }
    );
}

#[test]
fn the_tail_of_a_prefix_goes_before_its_head() {
    for policy in EVICTING {
        // Stored in one batch, in two, and chunk by chunk; then used, or not.
        for batch in [12, 5, 1] {
            for used in [false, true] {
                let tier = tier(policy, 24);
                for start in (0..12).step_by(batch) {
                    let end = (start + batch as u64).min(12);
                    let one = |n: u64| chunk(&tier, n, n.checked_sub(1), COMMON);
                    tier.commit((start..end).map(one).collect());
                }
                if used {
                    drop(tier.lease_leading(OwnerId(1), &keys(0, 12)));
                }
                let mut evictions = 0;
                for n in 100..160 {
                    tier.commit(vec![chunk(&tier, n, None, COMMON)]);
                    let left = tier.contains(&keys(0, 12));
                    let leading = left.iter().take_while(|found| found.is_some()).count();
                    let there = left.iter().flatten().count();
                    assert_eq!(leading, there, "{policy}, {batch} at once: {left:?}");
                    evictions += 1;
                }
                assert_eq!(tier.stats().evicted(), evictions - 12);
                assert_eq!(tier.stats().evicted_parents, 0);
            }
        }
    }
}

/// A leased leaf keeps its ancestors while anything else can go, but not for ever.
#[test]
fn parents_of_leased_chunks_go_last() {
    for policy in EVICTING {
        let tier = tier(policy, 8);
        store(&tier, 0, 4);
        let mut held = tier.lease(OwnerId(1), &keys(3, 4));
        store(&tier, 10, 14);
        for n in 20..24 {
            tier.commit(vec![chunk(&tier, n, None, COMMON)]);
        }
        assert_eq!(tier.lookup_leading(&keys(0, 4)), 4, "{policy}");
        let unleased = tier.lease(OwnerId(2), &keys(20, 24));
        // Left are three parents: the deepest goes first.
        let slot = reserve(&tier, UNIT, COMMON).unwrap();
        assert_eq!(tier.lookup_leading(&keys(0, 4)), 2, "{policy}");
        assert_eq!(tier.stats().evicted_parents, 1);
        drop((slot, unleased, held.pop()));
        assert_eq!(tier.usage().leases, 0);
    }
}

#[test]
fn a_removed_chunk_is_read_to_the_end() {
    let tier = tier(PolicyKind::Lru, 4);
    store(&tier, 0, 4);
    let leases = tier.lease_leading(OwnerId(1), &keys(0, 4));
    assert_eq!(tier.remove(&keys(0, 1)), [true]);
    assert_eq!(tier.clear(Clear::All).removed, 3);
    assert_eq!(tier.usage().chunks, 0);
    assert_eq!(tier.contains(&keys(0, 4)), [None; 4]);
    assert!(
        reserve(&tier, UNIT, COMMON).is_err(),
        "the bytes are still read"
    );
    for (n, slot) in leases.iter().enumerate() {
        check_value(&test_key(n as u64), slot.bytes()).unwrap();
    }
    drop(leases);
    assert_eq!(tier.usage().pool.used, 0);
    assert_eq!(tier.leases_of(OwnerId(1)), 0);
}

#[test]
fn one_key_has_one_writer() {
    let tier = tier(PolicyKind::Lru, 4);
    let key = test_key(1);
    let begin = |owner| tier.begin_write(OwnerId(owner), COMMON, key, UNIT).unwrap();
    let WriteStart::Reserved(first) = begin(1) else {
        panic!("no other writes it");
    };
    assert!(matches!(begin(2), WriteStart::Busy));
    assert_eq!(
        (tier.writes_of(OwnerId(1)), tier.writes_of(OwnerId(2))),
        (1, 0)
    );
    drop(first);
    assert_eq!(tier.usage().pool.used, 0);
    let WriteStart::Reserved(mut second) = begin(2) else {
        panic!("the first gave up");
    };
    fill_value(&key, second.slot.bytes_mut());
    assert_eq!(tier.contains(&[key]), [None]);
    let (inserted, leases) = tier.commit_leased(OwnerId(3), vec![second.written(None)]);
    assert_eq!((inserted, leases.len()), (vec![Inserted::New], 1));
    assert!(matches!(begin(1), WriteStart::Present));
    assert!(!tier.is_writing(&key));
    assert_eq!(tier.usage().writing, 0);
}

/// A writer of whom no commit is expected soon (its connection was cut, its transfer is overdue)
/// keeps its slot, and others may write the same chunk. The first commit counts.
#[test]
fn a_shared_mark_lets_others_write_and_the_first_commit_counts() {
    let tier = tier(PolicyKind::Lru, 8);
    let key = test_key(1);
    let begin = |owner| match tier.begin_write(OwnerId(owner), COMMON, key, UNIT) {
        Ok(WriteStart::Reserved(mut reservation)) => {
            fill_value(&key, reservation.slot.bytes_mut());
            Some(reservation)
        }
        _ => None,
    };
    let late = begin(1).expect("no other writes it");
    assert!(begin(2).is_none());
    tier.share_writes(&[late.mark.id()]);
    assert!(!tier.is_writing(&key));
    let first = begin(2).expect("the mark is shared");
    assert!(begin(3).is_none(), "one mark is exclusive again");
    let beside = tier.begin_shared_write(OwnerId(3), COMMON, key, UNIT);
    let Ok(WriteStart::Reserved(beside)) = beside else {
        panic!("a shared mark waits for none");
    };
    assert_ne!(late.slot.offset(), first.slot.offset());
    assert_eq!(tier.commit(vec![first.written(None)]), [Inserted::New]);
    assert_eq!(tier.commit(vec![late.written(None)]), [Inserted::Present]);
    drop(beside);
    assert_eq!(tier.usage().pool.used, UNIT, "the others' slots are back");
    assert_eq!(tier.usage().writing, 0);
    // What was begun before a clear or a removal is never found, whatever the mark.
    let clear = || tier.clear(Clear::All).removed > 0;
    let remove = || tier.remove(&[key])[0];
    let forget: [&dyn Fn() -> bool; 2] = [&clear, &remove];
    for forget in forget {
        tier.remove(&[key]);
        let late = begin(1).expect("it is not there");
        tier.share_writes(&[late.mark.id()]);
        let other = begin(2).expect("the mark is shared");
        assert!(!forget(), "nothing is findable yet");
        let writes = vec![late.written(None), other.written(None)];
        assert_eq!(tier.commit(writes), [Inserted::Cleared; 2]);
        assert_eq!(tier.contains(&[key]), [None]);
    }
}

/// A writer that died may still write: its memory is set aside, and the key is free again.
#[test]
fn a_dead_writers_slot_goes_to_quarantine() {
    let tier = tier(PolicyKind::Lru, 4);
    let key = test_key(1);
    let started = tier.begin_write(OwnerId(1), COMMON, key, UNIT).unwrap();
    let WriteStart::Reserved(reservation) = started else {
        panic!("no other writes it");
    };
    let quarantined = reservation.slot.quarantine();
    drop(reservation.mark);
    assert_eq!(tier.writes_of(OwnerId(1)), 0);
    assert_eq!(tier.usage().pool.quarantined_bytes, UNIT);
    let again = tier.begin_write(OwnerId(2), COMMON, key, UNIT).unwrap();
    let WriteStart::Reserved(again) = again else {
        panic!("the key is free");
    };
    assert_ne!(again.slot.offset(), quarantined.offset());
    quarantined.release_proven_quiet();
}

#[test]
fn a_tenant_keeps_to_its_quota_and_keeps_its_quota() {
    for policy in EVICTING {
        let tier = tier(policy, 20);
        let (big, small, other) = (TenantId(1), TenantId(2), TenantId(3));
        tier.set_quota(small, Some(6 * UNIT));
        let put = |n: u64, tenant| tier.commit(vec![chunk(&tier, n, None, tenant)]);
        (0..10).for_each(|n| drop(put(n, small)));
        assert_eq!(tier.tenant_usage(small).bytes, 6 * UNIT, "{policy}");
        assert_eq!(tier.stats().evicted_quota, 4, "{policy}: of its own");
        // The others share 14 units, whatever they store.
        (100..200).for_each(|n| drop(put(n, if n % 2 == 0 { big } else { other })));
        assert_eq!(tier.tenant_usage(small).bytes, 6 * UNIT, "{policy}");
        let rest = tier.tenant_usage(big).bytes + tier.tenant_usage(other).bytes;
        assert_eq!(rest, 14 * UNIT, "{policy}");
        // Another tenant that is promised something gets it from those who share.
        tier.set_quota(big, Some(10 * UNIT));
        (200..220).for_each(|n| drop(put(n, big)));
        assert_eq!(tier.tenant_usage(big).bytes, 10 * UNIT, "{policy}");
        assert_eq!(tier.tenant_usage(other).bytes, 4 * UNIT, "{policy}");
        assert_eq!(tier.tenant_usage(small).bytes, 6 * UNIT, "{policy}");
        // Less quota takes effect with the next chunk; none means sharing.
        tier.set_quota(small, Some(2 * UNIT));
        put(300, other);
        assert_eq!(
            tier.tenant_usage(small).bytes,
            5 * UNIT,
            "{policy}: it has too much"
        );
        put(301, small);
        assert_eq!(tier.tenant_usage(small).bytes, 2 * UNIT, "{policy}");
        tier.set_quota(small, None);
        (400..420).for_each(|n| drop(put(n, other)));
        assert_eq!(tier.tenant_usage(small).bytes, 0, "{policy}");
        let refused = reserve(&tier, 11 * UNIT, big).map(drop).unwrap_err();
        assert!(
            matches!(refused, ReserveError::Quota { tenant: 1, .. }),
            "{refused}"
        );
    }
}

/// Memory is short although no tenant has more than its due: memory is also reserved. The tenant
/// that asks gives, not the one that is closest to its quota.
#[test]
fn a_tenant_within_its_quota_is_left_alone() {
    for policy in EVICTING {
        let tier = tier(policy, 20);
        tier.set_quota(TenantId(1), Some(10 * UNIT));
        let put = |n: u64, tenant| tier.commit(vec![chunk(&tier, n, None, tenant)]);
        (0..9).for_each(|n| drop(put(n, TenantId(1))));
        (100..105).for_each(|n| drop(put(n, COMMON)));
        let slots: Vec<_> = (0..11).map(|_| reserve(&tier, UNIT, COMMON)).collect();
        assert_eq!(slots.iter().flatten().count(), 11, "{policy}");
        assert_eq!(tier.tenant_usage(TenantId(1)).bytes, 9 * UNIT, "{policy}");
        assert_eq!(tier.tenant_usage(COMMON).bytes, 0, "{policy}");
        assert!(
            reserve(&tier, UNIT, COMMON).is_err(),
            "{policy}: the rest is promised"
        );
        // The tenant itself may still have its tenth unit, at the cost of its own.
        assert!(reserve(&tier, UNIT, TenantId(1)).is_ok(), "{policy}");
        assert_eq!(tier.tenant_usage(TenantId(1)).bytes, 8 * UNIT, "{policy}");
    }
}

/// A quota given late does not make the old young.
#[test]
fn a_change_of_quota_keeps_the_order_of_age() {
    let tier = tier(PolicyKind::Lru, 40);
    (0..40).for_each(|n| drop(tier.commit(vec![chunk(&tier, n, None, TenantId(1))])));
    // The odd ones are younger now, the lowest last.
    (0..40)
        .rev()
        .filter(|n| n % 2 == 1)
        .for_each(|n| tier.touch(&[(test_key(n), None)]));
    tier.set_quota(TenantId(1), Some(30 * UNIT));
    tier.commit(vec![chunk(&tier, 50, None, TenantId(1))]);
    let gone = |n: &u64| tier.contains(&keys(*n, n + 1)) == [None];
    let expected: Vec<u64> = (0..40).filter(|n| n % 2 == 0).take(11).collect();
    assert_eq!((0..40).filter(gone).collect::<Vec<_>>(), expected);
    tier.set_quota(TenantId(1), None);
    for n in 60..80 {
        tier.commit(vec![chunk(&tier, n, None, COMMON)]);
    }
    // Ten fit; of the other ten, nine were even and one is the oldest odd one.
    let left = (0..40).filter(|n| n % 2 == 1 && *n != 39);
    assert_eq!(
        (0..40).filter(|n| !gone(n)).collect::<Vec<_>>(),
        left.collect::<Vec<_>>()
    );
}

#[test]
fn watermarks_are_reached_over_several_calls() {
    let tier = tier(PolicyKind::Lru, 100);
    store(&tier, 0, 95);
    assert_eq!(
        tier.maintain(9).evicted,
        0,
        "at the high watermark, not above"
    );
    store(&tier, 100, 102);
    let steps: Vec<_> = (0..4).map(|_| tier.maintain(3)).collect();
    let done = |done: &lmc_backend_local::Maintained| (done.evicted, done.more);
    let expected = [(3, true), (3, true), (1, false), (0, false)];
    assert_eq!(steps.iter().map(done).collect::<Vec<_>>(), expected);
    assert_eq!(tier.usage().chunks, 90);
    assert_eq!(tier.stats().evicted_watermark, 7);
    assert_eq!(tier.lookup_leading(&keys(0, 95)), 88, "the tail went");
}

/// Threads that write, read, remove and clear the same keys: every byte read is the key's.
#[test]
fn threads_never_see_a_wrong_byte() {
    const KEYS: u64 = 400;
    let steps = rounds(300, 3000) as u64;
    for policy in EVICTING {
        let tier = tier(policy, 200);
        tier.set_quota(TenantId(2), Some(60 * UNIT));
        let worker = |seed: u64| {
            let tier = tier.clone();
            move || {
                let mut rng = lmc_backend::conformance::Rng::new(seed);
                let owner = OwnerId(seed);
                let mut read = 0_u64;
                for _ in 0..steps {
                    let from = rng.below(KEYS);
                    let run: Vec<u64> = (from..(from + 1 + rng.below(12)).min(KEYS)).collect();
                    let keys: Vec<ChunkKey> = run.iter().copied().map(test_key).collect();
                    let leases = tier.lease_leading(owner, &keys);
                    for (slot, key) in leases.iter().zip(&keys) {
                        check_value(key, slot.bytes()).unwrap();
                        read += 1;
                    }
                    let tenant = TenantId((from % 3) as u32);
                    let mut writes = Vec::new();
                    for &n in &run[leases.len()..] {
                        let begun = tier.begin_write(owner, tenant, test_key(n), UNIT);
                        if let Ok(WriteStart::Reserved(mut reservation)) = begun {
                            fill_value(&test_key(n), reservation.slot.bytes_mut());
                            let parent = n.checked_sub(1).map(test_key);
                            writes.push(reservation.written(parent));
                        }
                    }
                    if rng.chance(100) {
                        writes.pop();
                    }
                    let (_, new) = tier.commit_leased(owner, writes);
                    if rng.chance(20) {
                        tier.remove(&keys[..1]);
                    }
                    if rng.chance(5) {
                        tier.clear(Clear::All);
                    }
                    if rng.chance(50) {
                        tier.maintain(20);
                        let quota = rng.chance(500).then_some(40 * UNIT);
                        tier.set_quota(TenantId(1), quota);
                    }
                    if rng.chance(100) && tier.pin(&keys[..1]) == [true] {
                        tier.unpin(&keys[..1]);
                    }
                    // Removed and evicted meanwhile or not: what is leased stays.
                    for (slot, key) in leases.iter().zip(&keys) {
                        check_value(key, slot.bytes()).unwrap();
                    }
                    drop((new, leases));
                }
                read
            }
        };
        let threads: Vec<_> = (1..=4).map(|seed| thread::spawn(worker(seed))).collect();
        let read: u64 = threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .sum();
        assert!(read > steps / 3, "{policy}: only {read} chunks were read");
        let usage = tier.usage();
        assert_eq!((usage.leases, usage.writing), (0, 0), "{policy}");
        assert_eq!(
            usage.pool.slots, usage.chunks,
            "{policy}: every slot is a chunk"
        );
        let bytes: u64 = tier.tenants().iter().map(|(_, usage)| usage.bytes).sum();
        assert_eq!(usage.bytes, bytes, "{policy}");
        tier.clear(Clear::All);
        assert_eq!(tier.usage().pool.used, 0, "{policy}");
        assert_eq!(tier.usage().bytes, 0, "{policy}");
    }
}

#[test]
fn tenants_that_use_nothing_are_forgotten() {
    let tier = tier(PolicyKind::Lru, 4);
    let kept = TenantId(7);
    tier.commit(vec![chunk(&tier, 1, None, kept)]);
    tier.set_quota(TenantId(8), Some(UNIT));
    for id in 10..20_000 {
        let key = test_key(u64::from(id));
        drop(
            tier.begin_write(OwnerId(1), TenantId(id), key, UNIT)
                .unwrap(),
        );
    }
    let known = tier.tenants();
    assert!(known.len() < 2_100, "{} are known", known.len());
    let there = |id| known.iter().any(|&(known, _)| known == id);
    assert!(there(kept) && there(TenantId(8)));
}

/// Bytes that cannot be evicted are counted: each chunk once, however often it is held, and
/// each owner's leases by themselves.
#[test]
fn held_bytes_count_each_chunk_once() {
    let tier = tier(PolicyKind::Lru, 8);
    let keys: Vec<_> = (1..=4).map(test_key).collect();
    for &key in &keys {
        let Ok(WriteStart::Reserved(mut new)) = tier.begin_write(OwnerId(9), COMMON, key, UNIT)
        else {
            panic!("there is space");
        };
        fill_value(&key, new.slot.bytes_mut());
        tier.commit(vec![new.written(None)]);
    }
    assert_eq!(tier.held_bytes(), 0);
    let first = tier.lease_leading(OwnerId(1), &keys[..3]);
    let second = tier.lease_leading(OwnerId(2), &keys);
    assert_eq!(
        (first.fresh_bytes(), second.fresh_bytes()),
        (3 * UNIT, UNIT)
    );
    assert_eq!(tier.held_bytes(), 4 * UNIT);
    assert_eq!(tier.lease_bytes_of(OwnerId(1)), 3 * UNIT);
    assert_eq!(tier.lease_bytes_of(OwnerId(2)), 4 * UNIT);
    tier.pin(&keys[..1]);
    drop(second);
    assert_eq!(tier.held_bytes(), 3 * UNIT);
    drop(first);
    assert_eq!(tier.held_bytes(), UNIT);
    tier.remove(&keys[..1]);
    assert_eq!(tier.held_bytes(), 0);
    let third = tier.lease_leading(OwnerId(1), &keys[1..]);
    tier.remove(&keys);
    assert_eq!(tier.held_bytes(), 0, "what was removed counts for no owner");
    drop(third);
    assert_eq!(tier.lease_bytes_of(OwnerId(1)), 0);
}
