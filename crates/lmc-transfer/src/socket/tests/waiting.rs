//! Peers that say nothing, take nothing, or take it late.

use lmc_testkit::until;

use super::*;
use crate::socket::frame::PIECE;

#[test]
fn a_silent_peer_is_taken_for_dead() {
    let victim = Victim::new(|config| config.keepalive = Duration::from_millis(200));
    let mut raw = Raw::connect(&victim, 1);
    let (slots, indices) = (vec![victim.slot(1, 4096)], [Index::arena(1, 0)]);
    let from = name("raw");
    let filled = thread::scope(|scope| {
        let read = scope.spawn(|| block_on(victim.channel.read(slots, &from, &indices, soon())));
        // It is silent from the request on, however late that comes.
        until("a request is under way", || {
            raw.send(&Frame::Ping(0));
            let connection = victim.channel.shared.connection(&from);
            connection.is_ok_and(|connection| {
                connection.streams[0].capacity.available_permits() < MAX_REQUESTS
            })
        });
        assert!(matches!(raw.frame(), Frame::Read { .. }));
        read.join().expect("a read does not panic")
    });
    let gone = matches!(filled.error, Some(TransferError::PeerGone { .. }));
    assert!(gone, "{:?}", filled.error);
    drop(filled);
    assert!(!victim.channel.is_connected(&name("raw")));
    assert!(raw.finds_it_closed());
    victim.ends();
}

/// The peer showed signs of life, so everything that was to be sent to it waited for ever.
#[test]
fn a_peer_that_takes_nothing_is_taken_for_dead() {
    let victim = Victim::new(|config| config.keepalive = Duration::from_millis(200));
    let mut raw = Raw::connect(&victim, 1);
    let (to, over) = (name("raw"), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                let ping = raw.bytes_of(&Frame::Ping(0));
                if raw.stream.write_all(&ping).is_err() {
                    break;
                }
                thread::sleep(Duration::from_millis(10));
            }
        });
        let object = vec![victim.object(4, 7 << 20)];
        let sent = block_on(
            victim
                .channel
                .write(object, &to, &[Index::arena(1, 0)], soon()),
        );
        over.store(true, Ordering::Relaxed);
        let gone = matches!(sent.error, Some(TransferError::PeerGone { .. }));
        assert!(gone, "{:?}", sent.error);
    });
    victim.ends();
}

/// Small frames go at once, until the peer's side of the stream is full in the midst of one.
#[test]
fn frames_stay_whole_where_the_peer_takes_them_late() {
    const LEN: usize = 60_000;
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    let object = victim.object(5, LEN as u64);
    let read = |id| Frame::Read {
        id,
        ranges: vec![range(object.offset(), LEN as u64)],
    };
    let connection = victim.channel.shared.connection(&name("raw"));
    let connection = connection.expect("connected");
    let mut reads = 0;
    while connection.streams[0].queue.behind().is_none() {
        raw.send(&read(1000 + reads));
        reads += 1;
        victim.eventually("it is served", |v| v.channel.stats().served == reads);
    }
    let (mut data, mut writes) = (0, 0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..10 {
                    let (to, index) = (name("raw"), [Index::arena(1, 3)]);
                    let object = vec![victim.object(6, 8)];
                    let sent = block_on(victim.channel.write(object, &to, &index, soon()));
                    assert_eq!(sent.into_result(), Ok(1));
                }
            });
        }
        while (data, writes) != (reads, 40) {
            let (byte, len) = match raw.frame() {
                Frame::Data { id } => {
                    assert_eq!(id, 1000 + data, "in order");
                    data += 1;
                    (5, LEN)
                }
                Frame::Write { id, ranges } => {
                    assert_eq!(ranges, [range(3 * 4096, 8)]);
                    writes += 1;
                    let outcome = FrameOutcome::Done;
                    raw.send(&Frame::Answer { id, outcome });
                    (6, 8)
                }
                other => panic!("{other:?}"),
            };
            let head = raw.bytes(PieceHead::LEN).try_into().expect("a head");
            assert_eq!(PieceHead::decode(head).len as usize, len);
            let bytes = raw.bytes(len);
            assert!(bytes.iter().all(|found| *found == byte));
            assert_eq!(PieceHead::decode(head).sum, checksum(&bytes));
        }
    });
    victim.eventually("all is sent", |_| {
        connection.streams[0].queue.behind().is_none()
    });
    drop((raw, connection, object));
    victim.ends();
}

/// Each side expected to hear as often as it spoke itself: the one that spoke less often was
/// given up while it was idle.
#[test]
fn the_longer_keepalive_of_two_counts() {
    let often = Victim::new(|config| config.keepalive = Duration::from_millis(10));
    let seldom = Victim::new(|config| {
        config.channel.id = name("seldom");
        config.keepalive = Duration::from_millis(400);
    });
    let (to, address) = (name("victim"), often.channel.address());
    block_on(seldom.channel.connect(&to, address, None, soon())).expect("it listens");
    let connection = often.channel.shared.connection(&name("seldom"));
    let connection = connection.expect("connected");
    // Three times as long as it would live by its own keepalive.
    thread::sleep(Duration::from_millis(100));
    assert!(connection.end().is_none(), "{:?}", connection.end());
    drop(connection);
    seldom.ends();
    often.ends();
}

/// A receiver sleeps until much of a payload is there. One that comes in drops, is broken off or
/// ends with its connection is noticed all the same.
#[test]
fn a_payload_that_comes_short_wakes_its_receiver() {
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    let slot = victim.slot(0, 12 * PIECE);
    let bytes_of = |id: u64, piece: u64| -> Vec<u8> {
        let byte = |at: u64| (at ^ (at >> 9) ^ (piece * 31) ^ (id * 101)) as u8;
        (0..PIECE).map(byte).collect()
    };
    let head_of = |bytes: &[u8]| {
        let (len, sum) = (bytes.len() as u32, checksum(bytes));
        PieceHead { len, sum }.encode()
    };
    let begin = |raw: &mut Raw, id| {
        let ranges = vec![range(slot.offset(), 12 * PIECE)];
        raw.send(&Frame::Write { id, ranges });
    };
    // In drops: after a head, within a piece, between two.
    begin(&mut raw, 1);
    for piece in 0..12 {
        let bytes = bytes_of(1, piece);
        raw.stream.write_all(&head_of(&bytes)).expect("sent");
        for part in bytes.chunks(bytes.len() / 3) {
            if piece % 5 == 0 {
                thread::sleep(Duration::from_millis(5));
            }
            raw.stream.write_all(part).expect("sent");
        }
    }
    let outcome = FrameOutcome::Done;
    assert_eq!(raw.frame(), Frame::Answer { id: 1, outcome });
    // Broken off, with little behind it.
    for (id, pieces) in [(2, 0), (3, 1), (4, 7), (5, 11)] {
        begin(&mut raw, id);
        for piece in 0..pieces {
            let bytes = bytes_of(id, piece);
            raw.stream.write_all(&head_of(&bytes)).expect("sent");
            let (one, other) = bytes.split_at(bytes.len() / 2);
            raw.stream.write_all(one).expect("sent");
            // The receiver takes this and sleeps, and still waits for more.
            thread::sleep(Duration::from_micros(300));
            raw.stream.write_all(other).expect("sent");
        }
        let end = PieceHead { len: 0, sum: 0 };
        raw.stream.write_all(&end.encode()).expect("sent");
        let outcome = FrameOutcome::Aborted;
        assert_eq!(raw.frame(), Frame::Answer { id, outcome });
    }
    // And with the connection.
    begin(&mut raw, 6);
    let bytes = bytes_of(6, 0);
    raw.pay(&bytes, checksum(&bytes));
    drop(raw);
    let gone = |victim: &Victim| !victim.channel.is_connected(&name("raw"));
    victim.eventually("the connection is forgotten", gone);
    let slot = slot.written();
    // The last that came for each piece.
    for (piece, found) in slot.bytes().chunks(PIECE as usize).enumerate() {
        let id = match piece {
            0 => 6,
            1..11 => 5,
            _ => 1,
        };
        assert!(found == bytes_of(id, piece as u64), "piece {piece}");
    }
    drop(slot);
    victim.ends();
}
