//! Offers whose objects are inlined.

use super::*;
use crate::Sent;
use crate::socket::frame::MAX_INLINED;
use crate::socket::offers::INLINED_OFFERS;

fn offer(id: u64, lens: Vec<u64>) -> Frame {
    Frame::Offer {
        id,
        tag: 1,
        lens,
        inlined: true,
    }
}

impl Raw {
    /// Takes an offer that must have come with one object; its id.
    fn inlined(&mut self, byte: u8, len: usize) -> u64 {
        let frame = self.frame();
        let Frame::Offer {
            id, inlined: true, ..
        } = frame
        else {
            panic!("{frame:?}");
        };
        let head = self.bytes(PieceHead::LEN).try_into().expect("a head");
        let bytes = self.bytes(len);
        let (len, sum) = (len as u32, checksum(&bytes));
        assert_eq!(PieceHead::decode(head), PieceHead { len, sum });
        assert!(bytes.iter().all(|found| *found == byte));
        id
    }
}

/// Receives two objects under tag 1 from the raw peer.
fn receiving(victim: &Victim, lens: [u64; 2]) -> Filled {
    let slots = lens.map(|len| victim.slot(1, len)).into();
    block_on(victim.channel.receive(slots, &name("raw"), 1, soon()))
}

fn check(filled: &Filled, byte: u8) {
    assert_eq!(filled.error, None);
    for slot in &filled.slots {
        let Slot::Written(slot) = slot else {
            panic!("{slot:?}");
        };
        assert!(slot.bytes().iter().all(|found| *found == byte));
    }
}

#[test]
fn inlined_objects_are_received_at_once() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    for (id, lens) in (0..).zip([[5, 3], [40_000, 20_000], [1, MAX_INLINED - 1]]) {
        raw.send(&offer(id, lens.into()));
        for len in lens {
            let bytes = vec![7; len as usize];
            raw.pay(&bytes, checksum(&bytes));
        }
        check(&receiving(&victim, lens), 7);
        let (done, outcome) = (2, FrameOutcome::Done);
        assert_eq!(raw.frame(), Frame::Finish { id, done, outcome });
    }
    drop(raw);
    victim.ends();
}

#[test]
fn inlined_objects_with_a_wrong_checksum_are_read_again() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    raw.send(&offer(9, vec![5, 3]));
    raw.pay(&[7; 5], checksum(&[7; 5]));
    raw.pay(&[7; 3], 0);
    thread::scope(|scope| {
        let receiving = scope.spawn(|| receiving(&victim, [5, 3]));
        let Frame::Read { id, ranges } = raw.frame() else {
            panic!("a read is next");
        };
        let offered = |(slot, len)| Range {
            region: Region::Offer(9),
            slot,
            offset: 0,
            len,
        };
        assert_eq!(ranges, [(0, 5), (1, 3)].map(offered));
        raw.send(&Frame::Data { id });
        raw.pay(&[8; 5], checksum(&[8; 5]));
        raw.pay(&[8; 3], checksum(&[8; 3]));
        check(&receiving.join().expect("no panic"), 8);
        let (id, done, outcome) = (9, 2, FrameOutcome::Done);
        assert_eq!(raw.frame(), Frame::Finish { id, done, outcome });
    });
    assert_eq!(victim.channel.stats().corrupt, 1);
    drop(raw);
    victim.ends();
}

/// The peer has the bytes when the deadline passes, and only it knows what became of them.
#[test]
fn a_late_send_is_idle_once_the_peer_says_so() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    let to = name("raw");
    let send = |raw: &mut Raw, finish: Option<(u64, FrameOutcome)>| -> Sent {
        thread::scope(|scope| {
            let object = vec![victim.object(6, 100)];
            let sending = scope.spawn(|| {
                let send = victim.channel.send(object, &to, 1, after(200));
                block_on(send)
            });
            let id = raw.inlined(6, 100);
            assert_eq!(raw.frame(), Frame::Withdraw { id });
            if let Some((done, outcome)) = finish {
                raw.send(&Frame::Finish { id, done, outcome });
            }
            sending.join().expect("a send does not panic")
        })
    };
    let late = || Some(TransferError::Deadline);
    let sent = send(&mut raw, None);
    assert_eq!((sent.error, sent.idle), (late(), false));
    assert_eq!(victim.pool.usage().slots, 0);
    // On a busy machine the peer may say so too late.
    let mut answered = |done, outcome: FrameOutcome| {
        let answers = (0..50).map(|_| send(&mut raw, Some((done, outcome.clone()))));
        let mut in_time = answers.filter(|sent| sent.idle);
        in_time.next().expect("an answer in time")
    };
    let withdrawn = answered(0, FrameOutcome::Withdrawn);
    assert_eq!((withdrawn.done, withdrawn.error), (0, late()));
    let received = answered(1, FrameOutcome::Done);
    assert_eq!((received.done, received.error), (1, None));
    drop(raw);
    victim.ends();
}

/// An offer that is withdrawn is never received, also where no receive waited when it came.
#[test]
fn an_offer_that_is_withdrawn_is_answered() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    for id in 0..200 {
        raw.send(&offer(id, vec![8]));
        raw.pay(&[3; 8], checksum(&[3; 8]));
        raw.send(&Frame::Withdraw { id });
        let (done, outcome) = (0, FrameOutcome::Withdrawn);
        assert_eq!(raw.frame(), Frame::Finish { id, done, outcome });
    }
    let slots = vec![victim.slot(1, 8)];
    let filled = block_on(victim.channel.receive(slots, &name("raw"), 1, after(100)));
    assert_eq!(filled.error, Some(TransferError::Deadline));
    drop((raw, filled));
    victim.ends();
}

/// Inlined offers that wait for receives are bounded, on both sides.
#[test]
fn inlined_offers_are_bounded() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    let to = name("raw");
    let send = || {
        victim
            .channel
            .send(vec![victim.object(6, 8)], &to, 1, soon())
    };
    let mut sends: Vec<_> = (0..=INLINED_OFFERS).map(|_| send()).collect();
    let mut context = Context::from_waker(Waker::noop());
    for send in &mut sends {
        assert!(send.as_mut().poll(&mut context).is_pending());
    }
    let first = raw.inlined(6, 8);
    for _ in 1..INLINED_OFFERS {
        raw.inlined(6, 8);
    }
    let last = raw.frame();
    assert!(matches!(last, Frame::Offer { inlined: false, .. }));
    // Withdrawing them frees no capacity, but the answer to that does.
    drop(sends);
    (0..=INLINED_OFFERS).for_each(|_| assert!(matches!(raw.frame(), Frame::Withdraw { .. })));
    assert_eq!(victim.pool.usage().slots, 0);
    let mut none = send();
    assert!(none.as_mut().poll(&mut context).is_pending());
    drop(none);
    let plain = raw.frame();
    assert!(matches!(plain, Frame::Offer { inlined: false, .. }));
    assert!(matches!(raw.frame(), Frame::Withdraw { .. }));
    let connection = victim.channel.shared.connection(&to).expect("connected");
    raw.send(&Frame::Finish {
        id: first,
        done: 0,
        outcome: FrameOutcome::Withdrawn,
    });
    victim.eventually("there is capacity", |_| {
        connection.inline_capacity.available_permits() == 1
    });
    let mut again = send();
    assert!(again.as_mut().poll(&mut context).is_pending());
    raw.inlined(6, 8);
    drop((again, connection));

    let head = PieceHead {
        len: 8,
        sum: checksum(&[3; 8]),
    };
    for id in 0..=INLINED_OFFERS as u64 {
        let offer = raw.bytes_of(&offer(id, vec![8]));
        let bytes = [&offer[..], &head.encode(), &[3; 8]].concat();
        // It may have been hung up on.
        let _ = raw.stream.write_all(&bytes);
    }
    assert!(raw.finds_it_closed());
    assert_eq!(victim.channel.stats().broken, 1);
    victim.ends();
}
