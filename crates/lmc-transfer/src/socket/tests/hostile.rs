//! Peers that know the key and mean harm, and strangers.

use lmc_testkit::rounds;

use super::*;
use crate::session::testing::{answer, read_opening};
use crate::{Key, Keys};

fn key(byte: u8) -> Key {
    Key::new(&[byte; 32]).expect("32 bytes")
}

/// The acceptor used to prove the key to every stranger, who could then guess it offline.
#[test]
fn a_stranger_learns_nothing() {
    let victim = Victim::new(|config| config.channel.keys = Some(key(1).into()));
    for key in [Some(key(2)), None] {
        let mut stream = victim.stream();
        let (_, first) = first_message(raw_identity(), key.as_ref());
        stream.write_all(&first).expect("sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("it is closed");
        // Its magic, its version, and that the key is wrong.
        assert_eq!(answer.len(), PREAMBLE + 1);
        assert_eq!(answer[..PREAMBLE], preamble(VERSION, 1));
    }
    // Who repeats what it has overheard cannot go on either: it lacks the secret behind it.
    let (_, first) = first_message(raw_identity(), Some(&key(1)));
    for _ in 0..2 {
        let mut stream = victim.stream();
        stream.write_all(&first).expect("sent");
        read_opening(&mut stream).expect("message 2, which only its initiator can read");
        stream.write_all(&out_of_order()).expect("sent");
        assert!(finds_it_closed(&mut stream));
    }
    victim.ends();
}

/// Connections that a side opened were not checked: a process that listened at the address of a peer
/// before the peer did could read the pool and write to it.
#[test]
fn a_listener_that_is_not_admitted_gets_nothing() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let victim = Victim::new(|config| {
        let admit = move |stream: &tokio::net::TcpStream| {
            let peer = stream.peer_addr().expect("it is connected");
            assert_eq!(peer.port(), port);
            Err("a stranger".to_owned())
        };
        config.channel.admit = Some(Arc::new(admit));
    });
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().expect("a connection");
            answer(&mut stream, raw_identity(), None).expect("it is answered");
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).expect("it is closed");
            assert_eq!(rest, [0; 0]);
        });
        let connected = block_on(victim.channel.identify(&local(port), soon()));
        assert!(
            matches!(&connected, Err(ConnectError::NotAdmitted(why)) if why == "a stranger"),
            "{connected:?}"
        );
    });
    victim.ends();
}

/// Another process may listen at the address by the time that the further streams are opened.
#[test]
fn each_stream_that_is_opened_must_be_admitted() {
    let victim = Victim::new(|_| {});
    let first = AtomicBool::new(true);
    let other = Victim::new(|config| {
        config.channel.id = name("other");
        config.streams = 2;
        let admit = move |_: &tokio::net::TcpStream| match first.swap(false, Ordering::Relaxed) {
            true => Ok(()),
            false => Err("a stranger".to_owned()),
        };
        config.channel.admit = Some(Arc::new(admit));
    });
    let (to, at) = (name("victim"), victim.channel.address());
    let connected = block_on(other.channel.connect(&to, at, None, soon()));
    assert!(
        matches!(&connected, Err(ConnectError::NotAdmitted(_))),
        "{connected:?}"
    );
    other.ends();
    victim.ends();
}

/// Every peer that knew the key could take over the name of any peer, and its connections with it.
#[test]
fn a_name_in_use_is_not_taken_over() {
    let keyed = |id: &'static str| {
        Victim::new(move |config| {
            config.channel.id = name(id);
            config.channel.keys = Some(Keys::from(key(1)));
        })
    };
    let (a, b, impostor) = (keyed("a"), keyed("b"), keyed("b"));
    let connect = |from: &Victim, to: &Victim| {
        let (id, address) = (to.channel.id().clone(), to.channel.address().clone());
        block_on(from.channel.connect(&id, &address, None, soon()))
    };
    connect(&a, &b).expect("it listens");
    let before = a.channel.peer_incarnation(&name("b"));
    for _ in 0..3 {
        let refused = connect(&impostor, &a);
        assert!(
            matches!(refused, Err(ConnectError::Refused(_))),
            "{refused:?}"
        );
    }
    assert_eq!(a.channel.peer_incarnation(&name("b")), before);
    // The true one is what is sent to.
    thread::scope(|scope| {
        scope.spawn(|| {
            let slots = vec![b.slot(0, 100)];
            let received = block_on(b.channel.receive(slots, &name("a"), 1, soon()));
            assert_eq!((received.done(), received.error), (1, None));
        });
        let sent = block_on(
            a.channel
                .send(vec![a.object(7, 100)], &name("b"), 1, soon()),
        );
        assert_eq!(sent.into_result(), Ok(1));
    });
    // Once it is gone, the name is free.
    b.ends();
    a.eventually("it is gone", |a| !a.channel.is_connected(&name("b")));
    connect(&impostor, &a).expect("no other peer has the name");
    impostor.ends();
    a.ends();
}

/// A name that is listed is its identity's alone, also while that is away.
#[test]
fn a_known_name_belongs_to_its_identity() {
    let identity = Identity::generate().expect("random numbers");
    let known = identity.public();
    let a = Victim::new(|config| {
        config.channel.id = name("a");
        config.channel.known_peers.insert(name("b"), known);
    });
    let impostor = Victim::new(|config| config.channel.id = name("b"));
    let connect = |from: &Victim, to: &Victim| {
        let (id, address) = (to.channel.id().clone(), to.channel.address().clone());
        block_on(from.channel.connect(&id, &address, None, soon()))
    };
    for (from, to) in [(&impostor, &a), (&a, &impostor)] {
        let refused = connect(from, to);
        assert!(
            matches!(refused, Err(ConnectError::Identity { .. })),
            "{refused:?}"
        );
    }
    let b = Victim::new(|config| {
        config.channel.id = name("b");
        config.channel.identity = Some(identity.clone());
    });
    connect(&b, &a).expect("it is the one that is known");
    // Started again, its new incarnation takes the name over at once.
    let again = Victim::new(|config| {
        config.channel.id = name("b");
        config.channel.identity = Some(identity);
    });
    connect(&again, &a).expect("a newer incarnation");
    let incarnation = again.channel.incarnation();
    assert_eq!(a.channel.peer_incarnation(&name("b")), Some(incarnation));
    let refused = connect(&b, &a);
    b.eventually("the old one is disconnected", |b| {
        !b.channel.is_connected(&name("a"))
    });
    assert!(refused.is_ok_and(|answer| answer.is_none()) || !b.channel.is_connected(&name("a")));
    for side in [a, b, again, impostor] {
        side.ends();
    }
}

/// A network without a key is refused on either side.
#[test]
fn without_a_key_only_this_host_is_served() {
    let arena = || Arc::new(ArenaConfig::anonymous(4096).build().expect("a page"));
    let listen = |host: &str, keys: Option<Keys>| {
        let mut channel = ChannelConfig::new(name("a"), arena());
        channel.keys = keys;
        let host = host.to_owned();
        SocketConfig::new(channel, Address::Tcp { host, port: 0 }).build()
    };
    let refused = listen("0.0.0.0", None)
        .map(drop)
        .expect_err("open to a network");
    assert!(refused.to_string().contains("set `keys`"), "{refused}");
    for host in ["127.0.0.1", "::1", "localhost"] {
        listen(host, None).unwrap_or_else(|error| panic!("{host}: {error}"));
    }
    listen("0.0.0.0", Some(key(1).into())).expect("it has a key");
}

/// A write was checked once, before its payload: what came later landed in a slot that had been
/// freed, reserved again, and sealed.
#[test]
fn a_late_write_lands_in_no_reused_slot() {
    const LEN: usize = 512 << 10;
    let victim = Victim::new(|_| {});
    let mut raw = Raw::connect(&victim, 1);
    let slot = victim.slot(1, LEN as u64);
    let offset = slot.offset();
    let lease = victim.channel.grant_write(&name("raw"), vec![slot]);
    let lease = lease.expect("it is connected");
    let ranges = vec![range_of(lease.indices()[0], 0, LEN as u64)];
    raw.send(&Frame::Write { id: 1, ranges });
    let piece = vec![9; LEN / 2];
    raw.pay(&piece, checksum(&piece));
    let arrived = |v: &Victim| v.channel.stats().bytes_in as usize > LEN / 2;
    victim.eventually("half of it has come", arrived);
    let slots = block_on(lease.revoke());
    assert_eq!(slots.len(), 1);
    drop(slots);
    let reused = victim.object(5, LEN as u64);
    assert_eq!(
        reused.offset(),
        offset,
        "the pool gives out the same number"
    );
    raw.pay(&piece, checksum(&piece));
    let outcome = FrameOutcome::NotLeased(0);
    assert_eq!(raw.frame(), Frame::Answer { id: 1, outcome });
    assert!(reused.bytes().iter().all(|byte| *byte == 5), "it landed");
    assert_eq!(victim.channel.stats().discarded, 1);
    drop((reused, raw));
    victim.ends();
}

/// An offer was looked up, and then any range of the arena was served.
#[test]
fn an_offer_serves_its_objects_only() {
    let victim = Victim::new(|config| config.channel.open_arena = false);
    let mut raw = Raw::connect(&victim, 1);
    let secret = victim.object(6, 200_000);
    let objects = vec![victim.object(5, 100_000), victim.object(4, 100)];
    let to = name("raw");
    let mut sending = victim.channel.send(objects, &to, 1, soon());
    let mut context = Context::from_waker(Waker::noop());
    assert!(sending.as_mut().poll(&mut context).is_pending());
    let Frame::Offer { id: offer, .. } = raw.frame() else {
        panic!("an offer is next");
    };
    let of_offer = |slot, offset, len| Range {
        region: Region::Offer(offer),
        slot,
        offset,
        len,
    };
    let wrong = [
        of_offer(0, 1, 100_000),
        of_offer(1, 100, 1),
        of_offer(2, 0, 1),
        of_offer(0, u64::MAX - 1, 1),
        range(secret.offset(), 8),
    ];
    for (id, wrong) in (0..).zip(wrong) {
        let ranges = vec![of_offer(0, 0, 1), wrong];
        raw.send(&Frame::Read { id, ranges });
        let outcome = FrameOutcome::NotLeased(1);
        assert_eq!(raw.frame(), Frame::Answer { id, outcome });
    }
    raw.send(&Frame::Write {
        id: 9,
        ranges: vec![of_offer(0, 0, 4)],
    });
    raw.pay(&[1; 4], checksum(&[1; 4]));
    let outcome = FrameOutcome::NotLeased(0);
    assert_eq!(raw.frame(), Frame::Answer { id: 9, outcome });
    drop(sending);
    drop((raw, secret));
    victim.ends();
}

/// Each withdrawal went through all offers: 320 KB of them kept a thread busy for 23 s.
#[test]
fn a_flood_of_withdrawals_keeps_no_peer_out() {
    let victim = Victim::new(|config| config.threads = 1);
    let mut raw = Raw::connect(&victim, 1);
    for id in 0..8192 {
        let offer = Frame::Offer {
            id,
            tag: id,
            lens: vec![1],
            inlined: false,
        };
        raw.send(&offer);
    }
    let mut flood = Vec::new();
    for id in 0..rounds(20_000, 60_000) as u64 {
        flood.extend(raw.bytes_of(&Frame::Withdraw { id: 100_000 + id }));
    }
    raw.stream.write_all(&flood).expect("sent");
    let object = victim.object(5, 8);
    raw.send(&Frame::Read {
        id: 1,
        ranges: vec![range(object.offset(), 8)],
    });
    assert_eq!(raw.frame(), Frame::Data { id: 1 });
    drop((object, raw));
    victim.ends();
}

/// Offers and requests held some 12 MiB for each peer, without any bound for all of them.
#[test]
fn a_peer_holds_no_more_than_its_share_of_memory() {
    const MEMORY: usize = 8 << 20;
    let victim = Victim::new(|config| config.peer_memory = MEMORY);
    let mut raw = Raw::connect(&victim, 1);
    let budget = Arc::clone(&victim.channel.shared.core.budget);
    for id in 0..64 {
        let offer = Frame::Offer {
            id,
            tag: 1,
            lens: vec![1 << 40; 30_000],
            inlined: false,
        };
        let bytes = raw.bytes_of(&offer);
        if raw.stream.write_all(&bytes).is_err() {
            break;
        }
        assert!(budget.used() <= MEMORY / 4, "{} bytes", budget.used());
    }
    assert!(raw.finds_it_closed());
    assert_eq!(victim.channel.stats().broken, 1);
    victim.eventually("all of it is free again", |_| budget.used() == 0);
    // Others are served as before.
    let object = victim.object(5, 8);
    let mut raw = Raw::connect(&victim, 2);
    raw.send(&Frame::Read {
        id: 1,
        ranges: vec![range(object.offset(), 8)],
    });
    assert_eq!(raw.frame(), Frame::Data { id: 1 });
    drop((object, raw));
    victim.ends();
}

/// An early answer to one part of a write hid that another part was still under way.
#[test]
fn an_early_error_does_not_hide_what_is_under_way() {
    let victim = Victim::new(|_| {});
    // On a busy machine the answer may come after the deadline, which is longer then.
    let (mut attempts, mut millis) = (1.., 300);
    let sent = loop {
        let attempt = attempts.next().expect("few attempts");
        let mut raw = Raw::connect(&victim, attempt);
        // 5,000 objects go in two frames.
        let (objects, to) = (vec![victim.object(3, 8); 5000], name("raw"));
        let indices = vec![Index::arena(attempt, 0); objects.len()];
        let sent = thread::scope(|scope| {
            let writing = scope.spawn(|| {
                let write = victim.channel.write(objects, &to, &indices, after(millis));
                block_on(write)
            });
            let Frame::Write { id, .. } = raw.frame() else {
                panic!("a write is next");
            };
            let outcome = FrameOutcome::Corrupt(0);
            raw.send(&Frame::Answer { id, outcome });
            writing.join().expect("a write does not panic")
        });
        if sent.error != Some(TransferError::Deadline) {
            break sent;
        }
        assert!(millis < 20_000, "{sent:?}");
        millis *= 4;
    };
    assert_eq!(sent.error, Some(TransferError::Corrupt { object: 0 }));
    assert!(!sent.idle, "the second frame is under way");
    victim.ends();
}

/// Objects are sealed where one side asks for it.
#[test]
fn objects_are_sealed_where_one_side_asks() {
    let victim = Victim::new(|_| {});
    let other = Victim::new(|config| {
        config.channel.id = name("other");
        config.channel.encrypt_objects = true;
    });
    // Between them, everything is written down.
    let proxy = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let (port, target) = (proxy.local_addr().expect("bound").port(), victim.port());
    let seen = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let notes = Arc::clone(&seen);
    thread::spawn(move || {
        for client in proxy.incoming().flatten() {
            let server = TcpStream::connect(("127.0.0.1", target)).expect("it listens");
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (
                    from.try_clone().expect("a copy"),
                    to.try_clone().expect("a copy"),
                );
                let notes = Arc::clone(&notes);
                thread::spawn(move || {
                    let mut bytes = [0; 65_536];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        notes.lock().extend_from_slice(&bytes[..n]);
                        if to.write_all(&bytes[..n]).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    let to = name("victim");
    block_on(other.channel.connect(&to, &local(port), None, soon())).expect("it listens");
    let marked = |side: &Victim, len: u64| {
        let mut slot = side.slot(0, len);
        let mark = b"the bytes of a prompt ";
        for (byte, mark) in slot.bytes_mut().iter_mut().zip(mark.iter().cycle()) {
            *byte = *mark;
        }
        slot.written().seal()
    };
    for len in [100, 70_000, (512 << 10) + 1] {
        let object = marked(&victim, len);
        let lease = victim
            .channel
            .grant_read(&name("other"), vec![object.clone()]);
        let lease = lease.expect("it is connected");
        let slots = vec![other.slot(0, len)];
        let read = block_on(other.channel.read(slots, &to, lease.indices(), soon()));
        let read = read.into_result().expect("it is read");
        assert!(read[0].bytes() == object.bytes());
        drop(read);
        let lease = victim
            .channel
            .grant_write(&name("other"), vec![victim.slot(0, len)]);
        let lease = lease.expect("it is connected");
        let written = vec![marked(&other, len)];
        let sent = block_on(other.channel.write(written, &to, lease.indices(), soon()));
        assert_eq!(sent.into_result(), Ok(1));
        let slot = block_on(lease.revoke()).remove(0).written();
        assert!(slot.bytes() == object.bytes());
        drop(slot);
        thread::scope(|scope| {
            scope.spawn(|| {
                let sent = vec![marked(&other, len)];
                let sent = block_on(other.channel.send(sent, &to, 1, soon()));
                assert_eq!(sent.into_result(), Ok(1));
            });
            let slots = vec![victim.slot(0, len)];
            let received = block_on(victim.channel.receive(slots, &name("other"), 1, soon()));
            let received = received.into_result().expect("it comes");
            assert!(received[0].bytes() == object.bytes());
        });
    }
    let seen = seen.lock();
    assert!(seen.len() > 3 << 19);
    let mark = b"bytes of a prompt";
    assert!(
        !seen.windows(mark.len()).any(|bytes| bytes == mark),
        "in clear"
    );
    drop(seen);
    other.ends();
    victim.ends();
}
