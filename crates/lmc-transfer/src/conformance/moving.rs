//! One-sided transfers that go well.

use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Instant;

use super::side::{check_filled, eventually, pair, soon, stamp_all};
use super::{Rig, Rng, Side};
use crate::{BoxFuture, MAX_BATCH, TransferChannel, TransferError, block_on};

/// Lengths around every boundary that a transport may have.
fn mixed() -> Vec<u64> {
    let mut lens = vec![3 << 20, 1, 2 << 20];
    for power in [6, 9, 12, 13, 16, 18, 20] {
        lens.extend([(1 << power) - 1, 1 << power, (1 << power) + 1]);
    }
    lens
}

/// Lengths from a seed.
fn random(seed: u64, count: usize, bound: u64) -> Vec<u64> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| 1 + rng.below(bound)).collect()
}

/// One object, mixed sizes, thousands of objects; from the side that connected and from the other.
pub fn writes_and_reads_of_all_sizes<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    let batches = [
        vec![1],
        vec![4096],
        vec![8 << 20],
        mixed(),
        random(1, 100, 60_000),
        random(2, 3000, 4096),
    ];
    for (lens, stamp) in batches.iter().zip(1..) {
        a.writes(stamp, lens, &b);
        a.reads(100 + stamp, lens, &b);
        b.writes(200 + stamp, lens, &a);
        b.reads(300 + stamp, lens, &a);
    }
    // The neighbours of what is written stay as they are.
    let mut targets = b.slots(&[4096; 9]);
    stamp_all(400, &mut targets);
    let (targets, others): (Vec<_>, Vec<_>) = targets
        .into_iter()
        .enumerate()
        .partition(|(number, _)| number % 2 == 0);
    let others: Vec<_> = others.into_iter().map(|(_, slot)| slot).collect();
    let sent = a.write(401, &[1, 100, 4000, 4096], &b, &b.indices(&others));
    assert_eq!(sent.into_result(), Ok(4));
    for (number, slot) in targets {
        let kept = super::check_value(400, number, slot.written().bytes());
        kept.expect("nothing wrote to this slot");
    }
    for ((number, slot), len) in others.into_iter().enumerate().zip([1, 100, 4000, 4096]) {
        let slot = slot.written();
        let written = super::check_value(401, number, &slot.bytes()[..len]);
        written.expect("the object is written");
        let mut rest = vec![0; 4096];
        super::fill_value(400, 2 * number + 1, &mut rest);
        assert_eq!(slot.bytes()[len..], rest[len..], "beyond the object");
    }
    a.ends();
    b.ends();
}

/// As many objects as a batch may have.
pub fn writes_and_reads_of_full_batches<R: Rig>(rig: &R) {
    let small = |id| Side::with(rig, id, 64, |config| config.unit = 64);
    let (a, b) = (small("a"), small("b"));
    a.connect(&b);
    let lens = random(3, MAX_BATCH, 64);
    a.writes(1, &lens, &b);
    a.reads(2, &lens, &b);
    a.ends();
    b.ends();
}

/// A batch may name a range more than once, and ranges that overlap.
pub fn a_range_is_read_more_than_once<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let kept = b.objects(1, &[3 * 4096 + 5]);
    let start = kept[0].offset() / 4096;
    let parts = [
        (0, 3 * 4096 + 5),
        (0, 4096),
        (1, 5000),
        (0, 1),
        (2, 4096),
        (1, 5000),
    ];
    let lens = parts.map(|(_, len)| len);
    let from = parts.map(|(unit, _)| b.at(start + unit));
    let filled = a.read(&lens, &b, &from);
    assert_eq!((filled.done(), &filled.error), (parts.len(), &None));
    let read = filled.into_result().expect("all went well");
    for (slot, (unit, len)) in read.iter().zip(parts) {
        let part = &kept[0].bytes()[unit as usize * 4096..][..len as usize];
        assert!(slot.bytes() == part, "{len} bytes from unit {unit}");
    }
    drop((read, kept));
    a.ends();
    b.ends();
}

/// A call that was first polled on one thread continues on another.
pub fn calls_change_hands<R: Rig>(rig: &R) {
    /// Polls a call once here, and waits for it on another thread.
    fn elsewhere<T: Send>(mut call: BoxFuture<'_, T>) -> T {
        let mut here = Context::from_waker(Waker::noop());
        if let Poll::Ready(value) = call.as_mut().poll(&mut here) {
            return value;
        }
        let waiting = thread::scope(|scope| scope.spawn(|| block_on(call)).join());
        waiting.expect("a call does not panic")
    }
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    let connecting = a.channel.connect(&b.id, b.channel.address(), None, soon());
    elsewhere(connecting).expect("a peer that is there");
    let lens = [1, 70_000, 2 << 20];
    for stamp in 0..5 {
        let targets = b.slots(&lens);
        let indices = b.indices(&targets);
        let objects = a.objects(stamp, &lens);
        let sent = elsewhere(a.channel.write(objects, &b.id, &indices, soon()));
        assert_eq!(sent.into_result(), Ok(3));
        let read = elsewhere(a.channel.read(a.slots(&lens), &b.id, &indices, soon()));
        check_filled(read, stamp, 3);
        thread::scope(|scope| {
            scope.spawn(|| {
                let objects = a.objects(stamp, &lens);
                let sent = elsewhere(a.channel.send(objects, &b.id, stamp, soon()));
                assert_eq!(sent.into_result(), Ok(3));
            });
            let received = b.channel.receive(b.slots(&lens), &a.id, stamp, soon());
            check_filled(elsewhere(received), stamp, 3);
        });
    }
    assert_eq!(elsewhere(a.channel.close(soon())), Ok(()));
    a.goes();
    b.ends();
}

/// Batches without objects, with a connected peer and with a peer that is gone.
pub fn empty_batches_are_done_at_once<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let id = b.id.clone();
    let nothing = || {
        let deadline = soon();
        let sent = block_on(a.channel.write(vec![], &id, &[], deadline));
        assert_eq!(sent.into_result(), Ok(0));
        let sent = block_on(a.channel.send(vec![], &id, 1, deadline));
        assert_eq!(sent.into_result(), Ok(0));
        let filled = block_on(a.channel.read(vec![], &id, &[], deadline));
        assert!(filled.slots.is_empty() && filled.error.is_none());
        let filled = block_on(a.channel.receive(vec![], &id, 1, deadline));
        assert!(filled.slots.is_empty() && filled.error.is_none());
        assert!(Instant::now() < deadline);
    };
    nothing();
    a.works_with(1, &b);
    b.ends();
    eventually("the peer is gone", || !a.channel.is_connected(&id));
    nothing();
    a.ends();
}

/// Sides whose units differ.
pub fn indices_count_in_units_of_the_peer<R: Rig>(rig: &R) {
    let a = Side::new(rig, "a");
    let b = Side::with(rig, "b", 64, |config| config.unit = 64);
    assert_eq!((a.channel.unit(), b.channel.unit()), (4096, 64));
    let slots = b.slots(&[64, 1, 200]);
    let indices = b.indices(&slots);
    let targets: Vec<_> = slots.iter().map(|slot| b.at(slot.offset() / 64)).collect();
    assert_eq!(indices, targets);
    drop(slots);
    a.connect(&b);
    a.works_with(1, &b);
    // Where each arena ends.
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (arena, unit) = (to.arena().len() as u64, to.channel.unit());
        let last = from.read(&[unit], to, &[to.at(arena / unit - 1)]);
        assert_eq!((last.done(), last.error), (1, None));
        drop(last.slots);
        let index = to.at(arena / unit);
        let beyond = from.read(&[1], to, &[index]);
        let error = TransferError::OutOfRange {
            object: 0,
            index,
            len: 1,
            arena,
        };
        assert_eq!(beyond.error, Some(error));
    }
    a.ends();
    b.ends();
}

/// Several threads on each side, all operations at once.
pub fn both_directions_from_several_threads<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    thread::scope(|scope| {
        for (from, to, side) in [(&a, &b, 0), (&b, &a, 1 << 32)] {
            for thread in 0..3 {
                scope.spawn(move || {
                    for round in 0..15 {
                        let stamp = side + thread * 1000 + round * 10;
                        let lens = random(stamp, 1 + round as usize, 50_000);
                        from.writes(stamp, &lens, to);
                        from.reads(stamp + 1, &lens, to);
                    }
                });
                scope.spawn(move || {
                    for round in 0..15 {
                        let tag = side + thread * 100 + round;
                        let lens = random(tag, 1 + round as usize, 50_000);
                        let objects = from.objects(tag, &lens);
                        let sent = block_on(from.channel.send(objects, &to.id, tag, soon()));
                        assert_eq!(sent.into_result(), Ok(lens.len()));
                    }
                });
                scope.spawn(move || {
                    for round in 0..15 {
                        let tag = side + thread * 100 + round;
                        let lens = random(tag, 1 + round as usize, 50_000);
                        let slots = to.slots(&lens);
                        let filled = block_on(to.channel.receive(slots, &from.id, tag, soon()));
                        check_filled(filled, tag, lens.len());
                    }
                });
            }
        }
    });
    a.ends();
    b.ends();
}
