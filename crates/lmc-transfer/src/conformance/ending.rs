//! Closing, dropping, deadlines.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::ReservedSlot;

use super::side::{
    LATE, POISON, Still, TIMEOUT, check_all, check_filled, check_untouched, eventually, later,
    pair, peer, shortly, soon,
};
use super::{Rig, Rng, Side, check_value};
use crate::{ConnectError, TransferChannel, TransferError, block_on};

/// Calls on a closed channel begin with the error; peers notice.
pub fn a_closed_channel<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    let slots = a.slots(&[64]);
    assert_eq!(block_on(a.channel.close(soon())), Ok(()));
    assert!(!a.channel.is_connected(&b.id));
    eventually("the peer notices", || !b.channel.is_connected(&a.id));
    let channel = &a.channel;
    let refused = block_on(channel.connect(&b.id, b.channel.address(), None, soon()));
    assert!(matches!(refused, Err(ConnectError::Closed)), "{refused:?}");
    let closed = Some(TransferError::Closed);
    let sent = a.write(1, &[64], &b, &[b.at(0)]);
    assert_eq!((sent.done, sent.error), (0, closed.clone()));
    let sent = block_on(channel.send(a.objects(1, &[64]), &b.id, 1, soon()));
    assert_eq!((sent.done, sent.error), (0, closed.clone()));
    let filled = a.read(&[64], &b, &[b.at(0)]);
    assert_eq!(filled.error, closed);
    check_untouched(filled.slots, 1);
    let filled = block_on(channel.receive(slots, &b.id, 1, soon()));
    assert_eq!(filled.error, closed);
    check_untouched(filled.slots, 1);
    let again = block_on(channel.close(soon()));
    assert!(
        matches!(again, Ok(()) | Err(TransferError::Closed)),
        "{again:?}"
    );
    // A connect to it finds no listener.
    assert!(b.try_connect(&a, shortly()).is_err());
    a.goes();
    b.ends();
}

/// Calls that wait for a peer end when the channel is closed, on both sides.
pub fn closing_ends_what_is_under_way<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    let began = Instant::now();
    thread::scope(|scope| {
        for (tag, end) in [(1, &a), (2, &b)] {
            let other = if tag == 1 { &b } else { &a };
            scope.spawn(move || {
                let sent = end.objects(1, &[4096]);
                let sent = block_on(end.channel.send(sent, &other.id, tag, soon()));
                ended(&sent.error, tag == 1);
                assert_eq!(sent.done, 0);
            });
            scope.spawn(move || {
                let slots = end.slots(&[4096]);
                let filled = block_on(end.channel.receive(slots, &other.id, 10 + tag, soon()));
                ended(&filled.error, tag == 1);
                check_untouched(filled.slots, 1);
            });
        }
        thread::sleep(Duration::from_millis(100));
        assert_eq!(block_on(a.channel.close(soon())), Ok(()));
    });
    assert!(began.elapsed() < TIMEOUT / 2, "they waited for deadlines");
    a.goes();
    b.ends();
}

/// A channel's own reads and writes end when it is closed, with slots that stay as they are.
pub fn closing_ends_its_own_reads_and_writes<R: Rig>(rig: &R) {
    for round in 0..6 {
        let (a, b) = pair(rig);
        let lens = [2 << 20, 1, 70_000];
        let kept = b.objects(1, &lens);
        let from = b.indices(&kept);
        let targets = b.slots(&lens);
        let to = b.indices(&targets);
        let rounds = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                loop {
                    let sent = a.write_by(2, &lens, &b, &to, later());
                    rounds.fetch_add(1, Ordering::Relaxed);
                    match sent.error {
                        None => assert_eq!(sent.done, lens.len()),
                        Some(error) => break assert_eq!(error, TransferError::Closed),
                    }
                }
            });
            scope.spawn(|| {
                let mut still = Still::default();
                loop {
                    let reading = a.channel.read(a.slots(&lens), &b.id, &from, later());
                    let filled = block_on(reading);
                    let error = filled.error.clone();
                    let done = still.watch(filled.slots, 1);
                    rounds.fetch_add(1, Ordering::Relaxed);
                    match error {
                        None => assert_eq!(done, lens.len()),
                        Some(error) => break assert_eq!(error, TransferError::Closed),
                    }
                }
                thread::sleep(Duration::from_millis(20));
                still.check();
            });
            eventually("calls are under way", || {
                rounds.load(Ordering::Relaxed) > round
            });
            assert_eq!(block_on(a.channel.close(soon())), Ok(()));
        });
        a.goes();
        for (number, object) in kept.iter().enumerate() {
            let checked = check_value(1, number, object.bytes());
            checked.expect("nothing writes to what is read");
        }
        drop((kept, targets));
        b.ends();
    }
}

/// A close that has no time left loses nothing: the slots of calls that it could not end come back
/// later.
pub fn a_close_without_time<R: Rig>(rig: &R) {
    let mut rng = Rng::new(14);
    for _ in 0..4 {
        let (a, b) = pair(rig);
        let lens = [2 << 20, 1, 70_000];
        let kept = b.objects(1, &lens);
        let from = b.indices(&kept);
        let targets = b.slots(&lens);
        let to = b.indices(&targets);
        for _ in 0..2 {
            let reading = a.channel.read(a.slots(&lens), &b.id, &from, later());
            drop_half_way(reading, &mut rng);
            let objects = a.objects(2, &lens);
            let writing = a.channel.write(objects, &b.id, &to, later());
            drop_half_way(writing, &mut rng);
        }
        let closed = block_on(a.channel.close(Instant::now()));
        assert!(
            matches!(closed, Ok(()) | Err(TransferError::Deadline)),
            "{closed:?}"
        );
        assert!(!a.channel.is_connected(&b.id));
        let filled = a.read(&[64], &b, &[b.at(0)]);
        assert_eq!(filled.error, Some(TransferError::Closed));
        drop(filled);
        let again = block_on(a.channel.close(soon()));
        assert!(
            matches!(again, Ok(()) | Err(TransferError::Closed)),
            "{again:?}"
        );
        a.goes();
        drop((kept, targets));
        b.ends();
    }
}

/// After a close nothing reads or writes the memory any more, whatever peers do.
pub fn a_close_ends_all_writing<R: Rig>(rig: &R) {
    for round in 0..8 {
        let (a, b) = pair(rig);
        let lens = [2 << 20, 1, 70_000];
        let mut targets = a.slots(&lens);
        let indices = a.indices(&targets);
        let rounds = AtomicU64::new(0);
        thread::scope(|scope| {
            eventually("the other side knows too", || b.channel.is_connected(&a.id));
            for _ in 0..2 {
                scope.spawn(|| {
                    loop {
                        let sent = b.write(1, &lens, &a, &indices);
                        rounds.fetch_add(1, Ordering::Relaxed);
                        match sent.error {
                            None => assert_eq!(sent.done, lens.len()),
                            Some(error) => break assert!(sent.idle, "{error}"),
                        }
                    }
                });
            }
            eventually("writes are under way", || {
                rounds.load(Ordering::Relaxed) > round % 4
            });
            assert_eq!(block_on(a.channel.close(soon())), Ok(()));
            let mut still = Still::default();
            targets.drain(..).for_each(|slot| still.keep(slot));
            thread::sleep(Duration::from_millis(20));
            still.check();
        });
        a.ends();
        b.ends();
    }
}

#[track_caller]
fn ended(error: &Option<TransferError>, closed_here: bool) {
    let fits = match error {
        Some(TransferError::Closed) => closed_here,
        Some(TransferError::PeerGone { .. }) => !closed_here,
        // A slow machine: the call began after the end.
        Some(TransferError::UnknownPeer { .. }) => !closed_here,
        _ => false,
    };
    assert!(fits, "closed here: {closed_here}; {error:?}");
}

/// A channel that was closed may begin again under its name and address.
pub fn a_closed_channel_begins_again<R: Rig>(rig: &R) {
    let b = Side::new(rig, "b");
    for round in 0..3 {
        let a = Side::new(rig, "a");
        match round {
            1 => b.connect(&a),
            _ => a.connect(&b),
        }
        a.works_with(round * 10, &b);
        a.ends();
        let id = peer("a");
        eventually("the peer notices", || !b.channel.is_connected(&id));
    }
    b.ends();
}

/// A channel that is dropped without being closed ends as well.
pub fn a_dropped_channel_leaves_nothing<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    a.works_with(1, &b);
    let id = a.id.clone();
    a.goes();
    eventually("the peer notices", || !b.channel.is_connected(&id));
    let a = Side::new(rig, "a");
    b.connect(&a);
    a.works_with(2, &b);
    a.goes();
    b.goes();
}

/// Deadlines that have passed already, and deadlines that pass during a call.
pub fn deadlines_that_pass<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let lens = [4 << 20, 100, 4096, 1 << 20];
    let kept = b.objects(1, &lens);
    let from = b.indices(&kept);
    let mut still = Still::default();
    // Slots that may still be written to: the peer keeps them until the connection ends.
    let mut unsure = Vec::new();
    let mut missed = 0;
    for micros in [0, 1, 100, 300, 1000, 2000, 4000, 8000] {
        let deadline = || Instant::now() + Duration::from_micros(micros);
        let began = Instant::now();
        let slots = a.slots(&lens);
        let filled = block_on(a.channel.read(slots, &b.id, &from, deadline()));
        let error = filled.error.clone();
        assert!(
            matches!(error, None | Some(TransferError::Deadline)),
            "{error:?}"
        );
        missed += usize::from(error.is_some());
        let done = still.watch(filled.slots, 1);
        assert!(error.is_some() || done == lens.len());

        let targets = b.slots(&lens);
        let sent = a.write_by(2, &lens, &b, &b.indices(&targets), deadline());
        let error = sent.error;
        assert!(
            matches!(error, None | Some(TransferError::Deadline)),
            "{error:?}"
        );
        let mut targets = targets;
        let rest = targets.split_off(sent.done);
        let targets: Vec<_> = targets.into_iter().map(ReservedSlot::written).collect();
        check_all(2, &targets);
        match error {
            None => assert!(rest.is_empty()),
            Some(_) if sent.idle => rest.into_iter().for_each(|slot| still.keep(slot)),
            Some(_) => unsure.extend(rest),
        }
        assert!(began.elapsed() < LATE, "a deadline of {micros} µs");
        thread::sleep(Duration::from_millis(20));
        still.check();
    }
    assert!(
        missed >= 1,
        "nothing is done before a deadline that has passed"
    );
    drop(kept);
    a.memory_is_still();
    a.works_with(5, &b);
    a.ends();
    drop(unsure);
    b.memory_is_still();
    b.ends();
}

/// Deadlines that are not meant to pass in a lifetime.
pub fn deadlines_far_away<R: Rig>(rig: &R) {
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    let far = Instant::now() + Duration::from_secs(100 * 365 * 86_400);
    a.try_connect(&b, far).expect("a peer that is there");
    let lens = [5000, 1];
    let kept = b.objects(1, &lens);
    let indices = b.indices(&kept);
    let read = block_on(a.channel.read(a.slots(&lens), &b.id, &indices, far));
    check_filled(read, 1, 2);
    thread::scope(|scope| {
        scope.spawn(|| {
            let sent = block_on(a.channel.send(a.objects(2, &lens), &b.id, 1, far));
            assert_eq!(sent.into_result(), Ok(2));
        });
        let received = b.channel.receive(b.slots(&lens), &a.id, 1, far);
        check_filled(block_on(received), 2, 2);
    });
    drop(kept);
    assert_eq!(block_on(a.channel.close(far)), Ok(()));
    a.goes();
    b.ends();
}

/// A connect that is dropped at any point is no hindrance to the next.
pub fn dropped_connects<R: Rig>(rig: &R) {
    let mut rng = Rng::new(13);
    let b = Side::with(rig, "b", 4096, |config| {
        config.on_connect = Some(Arc::new(|_, _| {
            thread::sleep(Duration::from_millis(1));
            None
        }));
    });
    for round in 0..15 {
        let a = Side::new(rig, "a");
        for _ in 0..3 {
            let connecting = a.channel.connect(&b.id, b.channel.address(), None, later());
            drop_half_way(connecting, &mut rng);
        }
        a.connect(&b);
        a.works_with(10 * round, &b);
        a.ends();
    }
    b.ends();
}

/// Polls a future once, or not at all, waits a little, and drops it.
fn drop_half_way<F: Future + ?Sized>(mut future: Pin<Box<F>>, rng: &mut Rng) {
    if rng.chance(50) {
        return;
    }
    let mut context = Context::from_waker(Waker::noop());
    let ready = future.as_mut().poll(&mut context).is_ready();
    if !ready && rng.chance(800) {
        thread::sleep(Duration::from_micros(rng.below(2000)));
    }
}

/// One-sided calls that are dropped at any point give their slots back when nothing moves any
/// more, and harm no other call.
pub fn dropped_reads_and_writes<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let mut rng = Rng::new(11);
    let lens = [2 << 20, 1, 70_000];
    let kept = b.objects(1, &lens);
    let from = b.indices(&kept);
    let targets = b.slots(&lens);
    let to = b.indices(&targets);
    for round in 0..24 {
        let deadline = later();
        drop_half_way(
            a.channel.read(a.slots(&lens), &b.id, &from, deadline),
            &mut rng,
        );
        drop_half_way(
            a.channel.write(a.objects(2, &lens), &b.id, &to, deadline),
            &mut rng,
        );
        // Slots of dropped calls come back when the channel gets to them: they take at most half of
        // the memory.
        if round % 4 == 3 {
            a.memory_is_still();
        }
    }
    a.memory_is_still();
    check_filled(a.read(&lens, &b, &from), 1, lens.len());
    a.works_with(3, &b);
    // Nothing touched what lies between.
    for (number, object) in kept.iter().enumerate() {
        let checked = check_value(1, number, object.bytes());
        checked.expect("nothing writes to what is read");
    }
    drop((kept, targets));
    a.ends();
    b.ends();
}

/// Paired calls that are dropped at any point: as above, and the tag can be used again.
pub fn dropped_sends_and_receives<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    let mut rng = Rng::new(12);
    let lens = [1 << 20, 1, 70_000];
    for tag in 0..12 {
        // Both calls are under way; one of them is dropped, at some point.
        let limit = Instant::now() + Duration::from_millis(50);
        thread::scope(|scope| {
            if tag % 2 == 0 {
                scope.spawn(|| {
                    let slots = b.slots(&lens);
                    let filled = block_on(b.channel.receive(slots, &a.id, tag, limit));
                    Still::default().watch(filled.slots, tag);
                });
                let objects = a.objects(tag, &lens);
                drop_half_way(a.channel.send(objects, &b.id, tag, later()), &mut rng);
            } else {
                scope.spawn(|| {
                    let objects = a.objects(tag, &lens);
                    let sent = block_on(a.channel.send(objects, &b.id, tag, limit));
                    assert!(sent.done == lens.len() || sent.error.is_some());
                });
                let slots = b.slots(&lens);
                drop_half_way(b.channel.receive(slots, &a.id, tag, later()), &mut rng);
            }
        });
    }
    // No receiver is left: one that was dropped receives nothing.
    let receiving = b.channel.receive(b.slots(&lens), &a.id, 100, later());
    drop_half_way(receiving, &mut rng);
    let sent = block_on(a.channel.send(a.objects(3, &lens), &b.id, 100, shortly()));
    assert_eq!(sent.done, 0);
    assert_eq!(sent.error, Some(TransferError::Deadline));
    for side in [&a, &b] {
        side.memory_is_still();
    }
    // The tags are free again.
    thread::scope(|scope| {
        scope.spawn(|| {
            let sent = block_on(a.channel.send(a.objects(4, &lens), &b.id, 100, soon()));
            assert_eq!(sent.into_result(), Ok(3));
        });
        let filled = block_on(b.channel.receive(b.slots(&lens), &a.id, 100, soon()));
        check_filled(filled, 4, 3);
    });
    let untouched = a.slot(100).written();
    check_value(POISON, 0, untouched.bytes()).expect("a fresh slot holds poison");
    drop(untouched);
    a.ends();
    b.ends();
}
