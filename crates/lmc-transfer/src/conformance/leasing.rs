//! Leases, rights, and incarnations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use lmc_memory::ReservedSlot;
use parking_lot::Mutex;

use super::side::{Still, check_all, check_filled, eventually, pair, soon, stamp_all};
use super::{Rig, Side, check_value};
use crate::{
    Index, OnPeer, PeerEvent, PeerId, Rights, Slot, TransferChannel, TransferError, block_on,
};

const LENS: [u64; 4] = [1, 5000, 4096, 300_000];

#[track_caller]
fn not_leased(error: Option<TransferError>, object: usize) {
    assert_eq!(error, Some(TransferError::NotLeased { object }));
}

/// A leased slot is read, whole or from its start, by the peer that it was granted to.
pub fn a_lease_is_for_its_slots_and_its_peer<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let c = Side::new(rig, "c");
    c.connect(&b);
    let lease = b.lets_read(&a, b.objects(1, &LENS));
    assert_eq!((lease.peer(), lease.indices().len()), (&a.id, LENS.len()));
    let all = lease.indices();
    check_filled(a.read(&LENS, &b, all), 1, LENS.len());
    check_filled(a.read(&LENS[..2], &b, &all[..2]), 1, 2);
    let start = a.read(&[4000], &b, &all[1..2]).into_result();
    let start = start.expect("the first bytes of a slot");
    let mut whole = vec![0; 5000];
    super::fill_value(1, 1, &mut whole);
    assert!(start[0].bytes() == &whole[..4000]);
    drop(start);
    // Beyond a slot, of no slot, of no lease, and by another peer.
    not_leased(a.read(&[1, 5001], &b, &all[..2]).error, 1);
    let mut none = all[0];
    none.slot = LENS.len() as u64;
    not_leased(a.read(&[1], &b, &[none]).error, 0);
    let mut other = all[0];
    other.lease += 1;
    not_leased(a.read(&[1], &b, &[other]).error, 0);
    not_leased(c.read(&[1], &b, &all[..1]).error, 0);
    // For reading only, and for writing only.
    let sent = a.write(2, &LENS[..1], &b, &all[..1]);
    assert_eq!((sent.done, sent.error), (0, Some(TransferError::ReadOnly)));
    block_on(lease.revoke());
    let lease = b.lets_write(&a, b.slots(&LENS));
    let filled = a.read(&LENS[..1], &b, &lease.indices()[..1]);
    assert!(filled.error.is_some() && filled.done() == 0, "{filled:?}");
    let sent = a.write(3, &LENS, &b, lease.indices());
    assert_eq!(sent.into_result(), Ok(LENS.len()));
    let slots = block_on(lease.revoke());
    let slots: Vec<_> = slots.into_iter().map(ReservedSlot::written).collect();
    check_all(3, &slots);
    drop((slots, filled.slots));
    for side in [a, b, c] {
        side.ends();
    }
}

/// A lease pins its slots; revoked or dropped, it gives them back and serves no peer, also where
/// the same slots are granted again.
pub fn a_revoked_lease_serves_no_peer<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let kept = b.objects(1, &LENS);
    let lease = b.lets_read(&a, kept.clone());
    let old = lease.indices().to_vec();
    check_filled(a.read(&LENS, &b, &old), 1, LENS.len());
    assert!(lease.stands());
    block_on(lease.revoke());
    not_leased(a.read(&LENS, &b, &old).error, 0);
    drop(kept);
    b.slots_come_back();
    // The next object lies at the same number.
    let lease = b.lets_read(&a, b.objects(2, &LENS));
    not_leased(a.read(&LENS, &b, &old).error, 0);
    check_filled(a.read(&LENS, &b, lease.indices()), 2, LENS.len());
    drop(lease);
    b.slots_come_back();
    let lease = b.lets_write(&a, b.slots(&LENS));
    let old = lease.indices().to_vec();
    drop(lease);
    b.slots_come_back();
    let kept = b.objects(3, &LENS);
    let sent = a.write(4, &LENS, &b, &old);
    not_leased(sent.error, 0);
    for (object, slot) in kept.iter().enumerate() {
        check_value(3, object, slot.bytes()).expect("nothing wrote to what lies there now");
    }
    drop(kept);
    a.ends();
    b.ends();
}

/// Slots are reused while they are read: a read brings the bytes of its lease, whole, or fails.
/// (Torn objects came with right checksums before there were leases.)
pub fn reads_of_revoked_leases_are_never_torn<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let lens = [4 << 20];
    let whole = AtomicU64::new(0);
    let failed = AtomicU64::new(0);
    for round in 0..24 {
        let lease = b.lets_read(&a, b.objects(round, &lens));
        let index = lease.indices().to_vec();
        thread::scope(|scope| {
            scope.spawn(|| {
                let filled = a.read(&lens, &b, &index);
                if let Some(error) = &filled.error {
                    not_leased(Some(error.clone()), 0);
                    failed.fetch_add(1, Ordering::Relaxed);
                }
                match &filled.slots[0] {
                    Slot::Written(slot) => {
                        check_value(round, 0, slot.bytes()).expect("the bytes of the lease");
                        whole.fetch_add(1, Ordering::Relaxed);
                    }
                    Slot::Idle(_) | Slot::Quarantined => assert!(filled.error.is_some()),
                }
            });
            // At any point of the read, and after it.
            thread::sleep(Duration::from_micros(round * 150));
            block_on(lease.revoke());
            // Nothing reads it any more, so it is overwritten.
            b.slots_come_back();
            let mut slot = b.slot(lens[0]);
            stamp_all(1000, std::slice::from_mut(&mut slot));
        });
    }
    let (whole, failed) = (whole.into_inner(), failed.into_inner());
    assert_eq!(whole + failed, 24);
    a.slots_come_back();
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// Slots are reused while they are written to: once a lease is revoked, no byte written under it
/// lands.
pub fn writes_under_revoked_leases_never_land<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let lens = [4 << 20, 1, 70_000];
    for round in 0..16 {
        let lease = b.lets_write(&a, b.slots(&lens));
        let indices = lease.indices().to_vec();
        thread::scope(|scope| {
            scope.spawn(|| {
                let sent = a.write(1, &lens, &b, &indices);
                match sent.error {
                    None => assert_eq!(sent.done, lens.len()),
                    Some(error) => {
                        let fits = matches!(error, TransferError::NotLeased { .. });
                        assert!(fits && sent.done < lens.len(), "{error}");
                    }
                }
            });
            thread::sleep(Duration::from_micros(round * 200));
            let slots = block_on(lease.revoke());
            assert_eq!(slots.len(), lens.len());
            let mut still = Still::default();
            slots.into_iter().for_each(|slot| still.keep(slot));
            thread::sleep(Duration::from_millis(10));
            still.check();
        });
    }
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// A lease ends when its peer dies; the owner is notified, and the slots come back.
pub fn a_lease_ends_with_its_peer<R: Rig>(rig: &R) {
    type Events = Arc<Mutex<Vec<(PeerId, PeerEvent)>>>;
    let events = Events::default();
    let notes = Arc::clone(&events);
    let on_peer: OnPeer = Arc::new(move |peer, event| notes.lock().push((peer.clone(), event)));
    let a = Side::new(rig, "a");
    let b = Side::with(rig, "b", 4096, |config| config.on_peer = Some(on_peer));
    let unknown = b.channel.grant_read(&a.id, b.objects(1, &LENS));
    let unknown = unknown.map(drop);
    let id = a.id.clone();
    assert_eq!(
        unknown,
        Err(TransferError::UnknownPeer { peer: id.clone() })
    );
    a.connect(&b);
    let reads = b.lets_read(&a, b.objects(1, &LENS));
    let writes = b.lets_write(&a, b.slots(&LENS));
    let incarnation = a.channel.incarnation();
    rig.kill(&a.channel);
    a.goes();
    eventually("the leases end", || !reads.stands() && !writes.stands());
    assert_eq!(block_on(writes.revoke()).len(), LENS.len());
    block_on(reads.revoke());
    b.slots_come_back();
    let is_notified = || {
        let events = events.lock();
        let gone = |event: &PeerEvent| matches!(event, PeerEvent::Gone { incarnation: found, .. } if *found == incarnation);
        let connected = PeerEvent::Connected { incarnation };
        assert!(events.iter().all(|(peer, _)| *peer == id));
        assert!(events.iter().any(|(_, event)| *event == connected));
        events.iter().any(|(_, event)| gone(event))
    };
    eventually("the owner is notified", is_notified);
    b.ends();
}

/// Indices of a peer that has started again since are refused, whatever lies there now.
pub fn indices_of_an_earlier_incarnation_are_stale<R: Rig>(rig: &R) {
    let (a, mut b) = pair(rig);
    for round in 1..4 {
        let kept = b.objects(round, &LENS);
        let old = b.indices(&kept);
        let lease = b.lets_read(&a, kept.clone());
        let leased = lease.indices().to_vec();
        check_filled(a.read(&LENS, &b, &leased), round, LENS.len());
        rig.kill(&b.channel);
        drop((kept, lease));
        b.goes();
        b = Side::new(rig, "b");
        // It has other objects there, and connects by itself: a never sees a gap.
        let kept = b.objects(100 + round, &LENS);
        b.connect(&a);
        a.knows(&b);
        for indices in [old, leased] {
            let stale = |object: usize, indices: &[Index]| {
                let index = indices[object];
                Some(TransferError::Stale { object, index })
            };
            let filled = a.read(&LENS, &b, &indices);
            assert_eq!(filled.error, stale(0, &indices));
            drop(filled);
            let sent = a.write(7, &LENS, &b, &indices);
            assert_eq!((sent.done, sent.error), (0, stale(0, &indices)));
        }
        for (object, slot) in kept.iter().enumerate() {
            check_value(100 + round, object, slot.bytes()).expect("nothing wrote there");
        }
        drop(kept);
        a.works_with(10 * round, &b);
    }
    a.ends();
    b.ends();
}

/// A channel that allows only reading refuses writes; a channel whose arena is not open has indices
/// of leases only.
pub fn rights_are_kept<R: Rig>(rig: &R) {
    let a = Side::new(rig, "a");
    let b = Side::with(rig, "b", 4096, |config| {
        config.rights = Rights::Read;
        config.open_arena = false;
    });
    a.connect(&b);
    let kept = b.objects(1, &LENS);
    let slots: Vec<&dyn crate::InArena> = kept.iter().map(|slot| slot as _).collect();
    assert_eq!(b.channel.arena_indices(&slots), Err(TransferError::NotOpen));
    let filled = a.read(&[1], &b, &[b.at(kept[0].offset() / 4096)]);
    not_leased(filled.error, 0);
    drop(filled.slots);
    let granted = b.channel.grant_write(&a.id, b.slots(&LENS)).map(drop);
    assert_eq!(granted, Err(TransferError::ReadOnly));
    let lease = b.lets_read(&a, kept.clone());
    check_filled(a.read(&LENS, &b, lease.indices()), 1, LENS.len());
    for index in [lease.indices()[0], b.at(kept[0].offset() / 4096)] {
        let sent = a.write(2, &LENS[..1], &b, &[index]);
        assert_eq!((sent.done, sent.error), (0, Some(TransferError::ReadOnly)));
    }
    for (object, slot) in kept.iter().enumerate() {
        check_value(1, object, slot.bytes()).expect("nothing wrote there");
    }
    // The other direction has rights of its own, and what both sides call needs none.
    b.writes(3, &LENS, &a);
    thread::scope(|scope| {
        scope.spawn(|| {
            let sent = block_on(a.channel.send(a.objects(4, &LENS), &b.id, 1, soon()));
            assert_eq!(sent.into_result(), Ok(LENS.len()));
        });
        let received = b.channel.receive(b.slots(&LENS), &a.id, 1, soon());
        check_filled(block_on(received), 4, LENS.len());
    });
    drop((kept, lease));
    a.ends();
    b.ends();
}

/// A peer that is disconnected knows it, has no lease any more, and may connect again.
pub fn a_peer_is_disconnected<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let lens = [2 << 20, 1];
    for round in 0..3 {
        let lease = b.lets_read(&a, b.objects(1, &lens));
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let disconnected = over.load(Ordering::Acquire);
                    let filled = a.read(&lens, &b, lease.indices());
                    let error = filled.error.clone();
                    Still::default().watch(filled.slots, 1);
                    match error {
                        None => assert!(!disconnected),
                        Some(
                            TransferError::PeerGone { .. }
                            | TransferError::UnknownPeer { .. }
                            | TransferError::NotLeased { .. },
                        ) => break,
                        Some(error) => panic!("{error}"),
                    }
                }
            });
            thread::sleep(Duration::from_millis(2 * round));
            assert_eq!(block_on(b.channel.disconnect(&a.id, soon())), Ok(()));
            over.store(true, Ordering::Release);
        });
        assert!(!b.channel.is_connected(&a.id) && !lease.stands());
        drop(lease);
        b.slots_come_back();
        eventually("the peer knows", || !a.channel.is_connected(&b.id));
        // A peer that is not connected is disconnected at once.
        assert_eq!(block_on(b.channel.disconnect(&a.id, soon())), Ok(()));
        a.connect(&b);
        a.works_with(round, &b);
    }
    a.ends();
    b.ends();
}
