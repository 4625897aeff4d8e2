//! Peers that die, and start again under the same name and address.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::side::{Still, check_filled, eventually, later, pair, soon, stamp_all};
use super::{Rig, Side, check_value};
use crate::{Index, TransferChannel, TransferError, block_on};

/// Waits until `side` knows that `other` is gone; asks by a small read as well, for transports
/// that notice nothing by themselves.
#[track_caller]
fn notices<C: TransferChannel>(side: &Side<C>, other: &crate::PeerId) {
    let index = [Index::arena(
        side.channel.peer_incarnation(other).unwrap_or(0),
        0,
    )];
    eventually("the death is noticed", || {
        let deadline = Instant::now() + Duration::from_secs(1);
        let reading = side
            .channel
            .read(side.slots(&[64]), other, &index, deadline);
        let filled = block_on(reading);
        assert!(
            filled.error.is_none() || filled.done() == 0,
            "{:?}",
            filled.error
        );
        !side.channel.is_connected(other)
    });
    let gone = block_on(side.channel.read(side.slots(&[64]), other, &index, soon()));
    assert!(
        matches!(gone.error, Some(TransferError::UnknownPeer { .. })),
        "{:?}",
        gone.error
    );
}

/// Calls that wait for a dead peer end, in both forms; the peer is no longer known.
pub fn a_dead_peer_is_noticed<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let id = b.id.clone();
    let deadline = Instant::now() + Duration::from_secs(10);
    thread::scope(|scope| {
        scope.spawn(|| {
            let sent = a.channel.send(a.objects(1, &[64]), &id, 1, deadline);
            lost(block_on(sent).error.as_ref());
        });
        scope.spawn(|| {
            let receiving = a.channel.receive(a.slots(&[64]), &id, 2, deadline);
            lost(block_on(receiving).error.as_ref());
        });
        thread::sleep(Duration::from_millis(100));
        rig.kill(&b.channel);
    });
    b.goes();
    notices(&a, &id);
    a.memory_is_still();
    a.ends();
}

#[track_caller]
fn lost(error: Option<&TransferError>) {
    assert!(
        matches!(
            error,
            Some(
                TransferError::PeerGone { .. }
                    | TransferError::Deadline
                    // A slow machine: the call began after the death.
                    | TransferError::UnknownPeer { .. }
            )
        ),
        "{error:?}"
    );
}

/// A peer dies under reads: what was read is right, and everything comes back.
pub fn a_peer_dies_while_it_is_read<R: Rig>(rig: &R) {
    for round in 0..3 {
        let (a, b) = pair(rig);
        let lens = [1 << 20, 1, 70_000, 1 << 20];
        let kept = b.objects(round, &lens);
        let indices = b.indices(&kept);
        let id = b.id.clone();
        let rounds = AtomicU64::new(0);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let mut still = Still::default();
                    loop {
                        let deadline = Instant::now() + Duration::from_secs(3);
                        let slots = a.slots(&lens);
                        let filled = block_on(a.channel.read(slots, &id, &indices, deadline));
                        let error = filled.error.clone();
                        let done = still.watch(filled.slots, round);
                        rounds.fetch_add(1, Ordering::Relaxed);
                        match error {
                            None => assert_eq!(done, lens.len()),
                            Some(error) => break gone(&error),
                        }
                    }
                    thread::sleep(Duration::from_millis(50));
                    still.check();
                });
            }
            eventually("reads are under way", || {
                rounds.load(Ordering::Relaxed) > round
            });
            rig.kill(&b.channel);
        });
        drop(kept);
        b.goes();
        notices(&a, &id);
        a.memory_is_still();
        a.ends();
    }
}

#[track_caller]
fn gone(error: &TransferError) {
    assert!(
        matches!(
            error,
            TransferError::PeerGone { .. }
                | TransferError::Deadline
                | TransferError::UnknownPeer { .. }
        ),
        "{error:?}"
    );
}

/// A peer dies under writes, and another begins at its address at once: nothing that was written
/// to the old one arrives in the memory of the new one.
pub fn a_peer_dies_while_it_is_written<R: Rig>(rig: &R) {
    for round in 0..3 {
        let (a, b) = pair(rig);
        let lens = [1 << 20, 1, 70_000, 1 << 20];
        let targets = b.slots(&lens);
        let indices = b.indices(&targets);
        let id = b.id.clone();
        let rounds = AtomicU64::new(0);
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        let deadline = Instant::now() + Duration::from_secs(3);
                        let objects = a.objects(1, &lens);
                        let sent = block_on(a.channel.write(objects, &id, &indices, deadline));
                        rounds.fetch_add(1, Ordering::Relaxed);
                        match sent.error {
                            None => assert_eq!(sent.done, lens.len()),
                            Some(error) => gone(&error),
                        }
                    }
                });
            }
            eventually("writes are under way", || {
                rounds.load(Ordering::Relaxed) > round
            });
            rig.kill(&b.channel);
            drop(targets);
            b.goes();
            let new = Side::new(rig, "b");
            let mut kept = vec![new.slot(new.pool.usage().largest_free)];
            stamp_all(9, &mut kept);
            thread::sleep(Duration::from_millis(50));
            over.store(true, Ordering::Relaxed);
            let kept = kept.remove(0).written();
            check_value(9, 0, kept.bytes()).expect("writes to the dead stay with the dead");
            drop(kept);
            new.ends();
        });
        a.memory_is_still();
        a.ends();
    }
}

/// A channel is closed at once when its peer has died under every kind of call: they all end, the
/// close is in time, and everything comes back.
pub fn a_close_with_a_dead_peer<R: Rig>(rig: &R) {
    #[track_caller]
    fn over(error: Option<&TransferError>) -> bool {
        let expected = matches!(
            error,
            None | Some(
                TransferError::PeerGone { .. }
                    | TransferError::UnknownPeer { .. }
                    | TransferError::Closed
            )
        );
        assert!(expected, "{error:?}");
        error.is_some()
    }
    for round in 0..4 {
        let (a, b) = pair(rig);
        let lens = [1 << 20, 1, 70_000];
        let kept = b.objects(1, &lens);
        let from = b.indices(&kept);
        let targets = b.slots(&lens);
        let to = b.indices(&targets);
        let (id, channel) = (b.id.clone(), &a.channel);
        let rounds = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                let sent = block_on(channel.send(a.objects(3, &lens), &id, 1, later()));
                assert!(over(sent.error.as_ref()));
            });
            scope.spawn(|| {
                let filled = block_on(channel.receive(a.slots(&lens), &id, 2, later()));
                assert!(over(filled.error.as_ref()));
            });
            scope.spawn(|| {
                loop {
                    let writing = channel.write(a.objects(2, &lens), &id, &to, later());
                    if over(block_on(writing).error.as_ref()) {
                        break;
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            scope.spawn(|| {
                loop {
                    let filled = block_on(channel.read(a.slots(&lens), &id, &from, later()));
                    let error = filled.error;
                    Still::default().watch(filled.slots, 1);
                    if over(error.as_ref()) {
                        break;
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
            eventually("calls are under way", || {
                rounds.load(Ordering::Relaxed) > round
            });
            rig.kill(&b.channel);
            assert_eq!(block_on(channel.close(soon())), Ok(()));
        });
        drop((kept, targets));
        a.goes();
        b.goes();
    }
}

/// A peer that has restarted at the old address is connected again, and the memory of its earlier
/// incarnation is gone; also where the new incarnation uses another unit.
pub fn a_peer_starts_again<R: Rig>(rig: &R) {
    let (a, mut b) = pair(rig);
    let id = b.id.clone();
    for stamp in 1..4 {
        let kept = b.objects(stamp, &[5000, 100]);
        let old = b.indices(&kept);
        check_filled(a.read(&[5000, 100], &b, &old), stamp, 2);
        rig.kill(&b.channel);
        drop(kept);
        b.goes();
        let unit = [4096, 64][stamp as usize % 2];
        b = Side::with(rig, "b", unit, |config| config.unit = unit as u64);
        notices(&a, &id);
        assert!(!b.channel.is_connected(&a.id), "no side has connected");
        a.connect(&b);
        assert!(a.channel.is_connected(&id));
        a.works_with(100 * stamp, &b);
    }
    a.ends();
    b.ends();
}

/// A peer that has restarted connects first, while the other side may still take the earlier
/// incarnation to be alive.
pub fn a_peer_that_started_again_connects<R: Rig>(rig: &R) {
    let (a, mut b) = pair(rig);
    for stamp in 1..4 {
        a.works_with(100 * stamp, &b);
        rig.kill(&b.channel);
        b.goes();
        b = Side::new(rig, "b");
        b.connect(&a);
        let kept = b.objects(stamp, &[5000, 100]);
        let indices = b.indices(&kept);
        // From now on the name means the new incarnation.
        eventually("the new one is known", || a.channel.is_connected(&b.id));
        check_filled(a.read(&[5000, 100], &b, &indices), stamp, 2);
        drop(kept);
        a.works_with(100 * stamp + 10, &b);
    }
    a.ends();
    b.ends();
}
