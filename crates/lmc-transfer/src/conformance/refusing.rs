//! Calls that are refused before a byte moves.

use super::side::{check_untouched, eventually, pair, peer, soon};
use super::{Rig, Side};
use crate::{Filled, InArena, MAX_BATCH, Sent, TransferChannel, TransferError, block_on};

#[track_caller]
fn not_sent(sent: Sent, error: &TransferError) {
    assert_eq!((sent.done, sent.error.as_ref()), (0, Some(error)));
    assert!(sent.idle);
}

#[track_caller]
fn not_filled(filled: Filled, count: usize, error: &TransferError) {
    assert_eq!(filled.error.as_ref(), Some(error));
    check_untouched(filled.slots, count);
}

/// Every operation names the object that lies in another arena.
pub fn slots_of_another_arena<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let lens = [100, 200, 300];
    let targets = b.slots(&lens);
    let indices = b.indices(&targets);
    let error = TransferError::NotRegistered { object: 1 };
    let objects = || {
        let mut objects = a.objects(1, &lens);
        objects[1] = b.objects(1, &lens).remove(1);
        objects
    };
    let slots = || {
        let mut slots = a.slots(&lens);
        slots[1] = b.slots(&lens).remove(1);
        slots
    };
    let refused = slots();
    let named: Vec<_> = refused.iter().map(|slot| slot as &dyn InArena).collect();
    assert_eq!(a.channel.arena_indices(&named), Err(error.clone()));
    drop(refused);
    let channel = &a.channel;
    let sent = block_on(channel.write(objects(), &b.id, &indices, soon()));
    not_sent(sent, &error);
    let sent = block_on(channel.send(objects(), &b.id, 1, soon()));
    not_sent(sent, &error);
    let filled = block_on(channel.read(slots(), &b.id, &indices, soon()));
    not_filled(filled, 3, &error);
    let filled = block_on(channel.receive(slots(), &b.id, 1, soon()));
    not_filled(filled, 3, &error);
    check_untouched(targets.into_iter().map(crate::Slot::Idle).collect(), 3);
    a.works_with(2, &b);
    a.ends();
    b.ends();
}

/// A slot that begins between two units has no index.
pub fn slots_between_units<R: Rig>(rig: &R) {
    let side = Side::with(rig, "a", 64, |config| config.unit = 4096);
    let slots = side.slots(&[64, 64]);
    let (even, odd): (Vec<_>, Vec<_>) = slots
        .iter()
        .map(|slot| slot as &dyn InArena)
        .partition(|slot| slot.offset().is_multiple_of(4096));
    let (&even, &odd) = (
        even.first().expect("the first slot of an arena"),
        odd.first().expect("the second slot of an arena"),
    );
    assert_eq!(
        side.channel.arena_indices(&[even]),
        Ok(vec![side.at(even.offset() / 4096)])
    );
    assert_eq!(
        side.channel.arena_indices(&[even, odd]),
        Err(TransferError::Unaligned {
            object: 1,
            unit: 4096
        })
    );
    drop(slots);
    side.ends();
}

/// One index for each object.
pub fn numbers_that_do_not_go_together<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let targets = b.slots(&[64; 3]);
    let indices = b.indices(&targets);
    for (objects, count) in [(3, 2), (2, 3), (1, 0), (0, 1)] {
        let error = TransferError::Indices {
            objects,
            indices: count,
        };
        let lens = vec![64; objects];
        not_sent(a.write(1, &lens, &b, &indices[..count]), &error);
        not_filled(a.read(&lens, &b, &indices[..count]), objects, &error);
    }
    check_untouched(targets.into_iter().map(crate::Slot::Idle).collect(), 3);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// Ranges outside the peer's arena, also where the sum overflows.
pub fn ranges_outside_the_arena<R: Rig>(rig: &R) {
    let (a, b) = pair(rig);
    let arena = b.arena().len() as u64;
    let units = arena / 4096;
    let slot = b.slot(4096);
    let inside = b.indices(std::slice::from_ref(&slot))[0];
    let outside = [
        (units, 1),
        (units - 1, 4097),
        (units - 2, 3 * 4096),
        (u64::MAX, 1),
        (u64::MAX / 4096, 4096),
        (u64::MAX / 4096 + 1, 1),
        (1 << 52, 1),
        (1 << 63, 4096),
    ];
    for (index, len) in outside {
        let error = TransferError::OutOfRange {
            object: 1,
            index: b.at(index),
            len,
            arena,
        };
        let (lens, indices) = ([4096, len], [inside, b.at(index)]);
        not_sent(a.write(1, &lens, &b, &indices), &error);
        not_filled(a.read(&lens, &b, &indices), 2, &error);
    }
    check_untouched(vec![crate::Slot::Idle(slot)], 1);
    // The last byte is inside.
    let filled = a.read(&[4096], &b, &[b.at(units - 1)]);
    assert_eq!((filled.done(), filled.error), (1, None));
    drop(filled.slots);
    a.ends();
    b.ends();
}

/// Unknown peers, and peers that have gone.
pub fn peers_that_are_not_known<R: Rig>(rig: &R) {
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    let indices = [b.at(0), b.at(1)];
    let unknown = |side: &Side<R::Channel>, id: &str| {
        let peer = peer(id);
        let error = TransferError::UnknownPeer { peer: peer.clone() };
        let (lens, indices) = ([64, 64], indices);
        let channel = &side.channel;
        let objects = || side.objects(1, &lens);
        let slots = || side.slots(&lens);
        not_sent(
            block_on(channel.write(objects(), &peer, &indices, soon())),
            &error,
        );
        not_sent(block_on(channel.send(objects(), &peer, 1, soon())), &error);
        not_filled(
            block_on(channel.read(slots(), &peer, &indices, soon())),
            2,
            &error,
        );
        not_filled(
            block_on(channel.receive(slots(), &peer, 1, soon())),
            2,
            &error,
        );
    };
    unknown(&a, "b");
    a.connect(&b);
    unknown(&a, "c");
    a.works_with(1, &b);
    b.ends();
    let id = peer("b");
    eventually("the peer is gone", || !a.channel.is_connected(&id));
    unknown(&a, "b");
    a.ends();
}

/// One object more than a batch may have.
pub fn batches_that_are_too_large<R: Rig>(rig: &R) {
    let small = |id| Side::with(rig, id, 64, |config| config.unit = 64);
    let (a, b) = (small("a"), small("b"));
    a.connect(&b);
    let objects = MAX_BATCH + 1;
    let error = TransferError::TooMany { objects };
    let lens = vec![1; objects];
    let indices: Vec<_> = (0..objects as u64).map(|unit| b.at(unit)).collect();
    not_sent(a.write(1, &lens, &b, &indices), &error);
    not_filled(a.read(&lens, &b, &indices), objects, &error);
    let sent = block_on(a.channel.send(a.objects(1, &lens), &b.id, 1, soon()));
    not_sent(sent, &error);
    let filled = block_on(a.channel.receive(a.slots(&lens), &b.id, 1, soon()));
    not_filled(filled, objects, &error);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}
