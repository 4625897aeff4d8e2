//! Paired transfers.

use std::thread;
use std::time::{Duration, Instant};

use super::side::{
    LATE, check_all, check_filled, check_untouched, eventually, pair, shortly, soon,
};
use super::{Rig, Rng, Side};
use crate::{Filled, MAX_BATCH, Sent, Slot, TransferChannel, TransferError, block_on};

/// Sends and receives under one tag; one side begins earlier.
fn both<C: TransferChannel>(
    (from, objects): (&Side<C>, &[u64]),
    (to, capacity): (&Side<C>, &[u64]),
    tag: u64,
    sender_first: bool,
) -> (Sent, Filled) {
    let pause = |first: bool| {
        if !first {
            thread::sleep(Duration::from_millis(10));
        }
    };
    thread::scope(|scope| {
        let sent = scope.spawn(|| {
            pause(sender_first);
            let objects = from.objects(tag, objects);
            block_on(from.channel.send(objects, &to.id, tag, soon()))
        });
        pause(!sender_first);
        let filled = block_on(
            to.channel
                .receive(to.slots(capacity), &from.id, tag, soon()),
        );
        (sent.join().expect("a sender does not panic"), filled)
    })
}

/// Small, large and many objects; the sender or the receiver comes first; in both directions.
pub fn sends_and_receives_of_all_sizes<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    let batches = [
        vec![1],
        vec![6 << 20],
        vec![5000, 1, 4096, 4097, 1 << 20, 63],
        vec![1500; 2500],
    ];
    let mut tag = 0;
    for lens in &batches {
        for sender_first in [true, false] {
            for (from, to) in [(&a, &b), (&b, &a)] {
                tag += 1;
                let (sent, filled) = both((from, lens), (to, lens), tag, sender_first);
                assert_eq!(sent.into_result(), Ok(lens.len()));
                check_filled(filled, tag, lens.len());
            }
        }
    }
    a.ends();
    b.ends();
}

/// As many objects as a batch may have.
pub fn sends_and_receives_of_full_batches<R: Rig>(rig: &R) {
    let small = |id| Side::with(rig, id, 64, |config| config.unit = 64);
    let (a, b) = (small("a"), small("b"));
    a.connect(&b);
    let mut rng = Rng::new(4);
    let lens: Vec<_> = (0..MAX_BATCH).map(|_| 1 + rng.below(64)).collect();
    let (sent, filled) = both((&a, &lens), (&b, &lens), 1, true);
    assert_eq!(sent.into_result(), Ok(MAX_BATCH));
    check_filled(filled, 1, MAX_BATCH);
    a.ends();
    b.ends();
}

/// Receivers get what was sent under their tag by their peer, in whatever order they come.
pub fn tags_are_kept_apart<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let c = Side::new(rig, "c");
    c.connect(&b);
    eventually("the other side knows too", || {
        b.channel.is_connected(&a.id) && b.channel.is_connected(&c.id)
    });
    let tags = [0, 1, u64::MAX, 1 << 40, 7];
    let lens = [4096, 100];
    thread::scope(|scope| {
        for (from, side) in [(&a, 1000), (&c, 2000)] {
            for (n, &tag) in tags.iter().enumerate() {
                let to = &b;
                scope.spawn(move || {
                    let objects = from.objects(side + n as u64, &lens);
                    let sent = block_on(from.channel.send(objects, &to.id, tag, soon()));
                    assert_eq!(sent.into_result(), Ok(2));
                });
            }
        }
        for (from, side) in [(&c, 2000), (&a, 1000)] {
            for (n, &tag) in tags.iter().enumerate().rev() {
                let slots = b.slots(&lens);
                let filled = block_on(b.channel.receive(slots, &from.id, tag, soon()));
                check_filled(filled, side + n as u64, 2);
            }
        }
    });
    for side in [a, b, c] {
        side.ends();
    }
}

/// A sender may have fewer objects than the receiver has slots.
pub fn fewer_objects_than_slots<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    for sender_first in [true, false] {
        let capacity = [100, 5000, 64, 4096];
        let (sent, filled) = both((&a, &capacity[..2]), (&b, &capacity), 5, sender_first);
        assert_eq!(sent.into_result(), Ok(2));
        assert_eq!((filled.done(), &filled.error), (2, &None));
        let mut slots = filled.slots;
        check_untouched(slots.split_off(2), 2);
        let written: Vec<_> = slots
            .into_iter()
            .map(|slot| match slot {
                Slot::Written(slot) => slot,
                other => panic!("{other:?}"),
            })
            .collect();
        check_all(5, &written);
    }
    a.ends();
    b.ends();
}

/// Objects that do not fit their slots, or have none: both sides learn which.
pub fn lengths_must_agree<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let cases: [(&[u64], &[u64], usize); 4] = [
        (&[100, 200], &[100, 199], 1),
        (&[100, 200], &[101, 200], 0),
        (&[100, 200, 300], &[100, 200], 2),
        (&[1 << 20, 1], &[1 << 20, 1 << 20], 1),
    ];
    for ((objects, slots, number), tag) in cases.into_iter().zip(1..) {
        for sender_first in [true, false] {
            let (sent, filled) = both((&a, objects), (&b, slots), tag, sender_first);
            let wrong = TransferError::Length {
                object: number,
                sent: objects[number],
                capacity: slots.get(number).copied().unwrap_or(0),
            };
            assert!(sent.done <= number);
            assert_eq!(sent.error.as_ref(), Some(&wrong));
            assert!(filled.done() <= number && filled.slots.len() == slots.len());
            assert_eq!(filled.error.as_ref(), Some(&wrong));
            for (at, slot) in filled.slots.into_iter().enumerate() {
                if let Slot::Written(slot) = slot {
                    let checked = super::check_value(tag, at, slot.bytes());
                    checked.expect("a slot that is said to be written");
                }
            }
        }
    }
    // The connection is as good as before.
    let (sent, filled) = both((&a, &[5000]), (&b, &[5000]), 1, true);
    assert_eq!(sent.into_result(), Ok(1));
    check_filled(filled, 1, 1);
    for side in [&a, &b] {
        side.memory_is_still();
    }
    a.ends();
    b.ends();
}

/// No peer receives, or none sends, until the deadline: no slot is touched, and nothing is left.
pub fn no_peer_at_the_other_end<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    // Small objects may be inlined in their offer.
    let both_ways = |lens| [(&a, &b, lens), (&b, &a, lens)];
    for (from, to, lens) in [[4096, 3 << 20], [100, 5]].into_iter().flat_map(both_ways) {
        let mut began = Instant::now();
        for attempt in 1.. {
            let objects = from.objects(1, &lens);
            let sent = block_on(from.channel.send(objects, &to.id, 1, shortly()));
            assert_eq!(sent.done, 0);
            assert_eq!(sent.error, Some(TransferError::Deadline));

            // Too late for the objects that were sent before.
            let filled = block_on(to.channel.receive(to.slots(&lens), &from.id, 1, shortly()));
            if filled.error.is_none() {
                // On a busy machine: what is not idle may still arrive.
                assert!(!sent.idle && attempt < 10, "attempt {attempt}");
                began = Instant::now();
                continue;
            }
            assert_eq!(filled.error, Some(TransferError::Deadline));
            check_untouched(filled.slots, 2);
            break;
        }

        // And too late for the receiver whose deadline has passed.
        let objects = from.objects(2, &lens);
        let sent = block_on(from.channel.send(objects, &to.id, 1, shortly()));
        assert_eq!(sent.done, 0);
        assert_eq!(sent.error, Some(TransferError::Deadline));
        assert!(began.elapsed() < LATE, "three calls of 50 ms each");
    }
    for side in [&a, &b] {
        side.memory_is_still();
    }
    a.ends();
    b.ends();
}

/// A tag may be used for one transfer after another.
pub fn a_tag_is_used_again<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    thread::scope(|scope| {
        scope.spawn(|| {
            for stamp in 0..50 {
                let objects = a.objects(stamp, &[1 + stamp * 300]);
                let sent = block_on(a.channel.send(objects, &b.id, 3, soon()));
                assert_eq!(sent.into_result(), Ok(1));
            }
        });
        for stamp in 0..50 {
            let slots = b.slots(&[1 + stamp * 300]);
            let filled = block_on(b.channel.receive(slots, &a.id, 3, soon()));
            check_filled(filled, stamp, 1);
        }
    });
    a.ends();
    b.ends();
}
