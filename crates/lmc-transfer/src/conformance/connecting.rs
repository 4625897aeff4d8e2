//! Handshakes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::Mutex;

use super::side::{LATE, TIMEOUT, eventually, later, peer, shortly, soon};
use super::{Rig, Side};
use crate::{
    ChannelConfig, ConnectError, Key, Keys, MAX_MESSAGE, OnConnect, PeerId, TransferChannel,
    block_on,
};

/// Messages that a side has received, each with the name of its sender.
type Heard = Arc<Mutex<Vec<(PeerId, Option<Bytes>)>>>;

fn listener(heard: &Heard) -> OnConnect {
    let heard = Arc::clone(heard);
    Arc::new(move |peer, message| {
        let mut heard = heard.lock();
        heard.push((peer.clone(), message));
        Some(format!("{peer} was number {}", heard.len()).into())
    })
}

/// Returns a side that keeps the messages it receives, and answers with the sender's name and their
/// number.
fn listening<R: Rig>(rig: &R, id: &str) -> (Side<R::Channel>, Heard) {
    let heard = Heard::default();
    let answer = listener(&heard);
    let side = Side::with(rig, id, 4096, |config| config.on_connect = Some(answer));
    (side, heard)
}

fn text(text: &'static str) -> Option<Bytes> {
    Some(Bytes::from_static(text.as_bytes()))
}

/// The first connect carries a message each way, and both sides know each other; another connect
/// does nothing.
pub fn connects_once_with_messages_each_way<R: Rig>(rig: &R) {
    let (a, heard_by_a) = listening(rig, "a");
    let (b, heard_by_b) = listening(rig, "b");
    assert!(!a.channel.is_connected(&b.id) && !b.channel.is_connected(&a.id));
    let connect = |from: &Side<R::Channel>, to: &Side<R::Channel>, message| {
        let connecting = from
            .channel
            .connect(&to.id, to.channel.address(), message, soon());
        block_on(connecting).expect("connecting to a peer that is there")
    };
    assert_eq!(connect(&a, &b, text("first")), text("a was number 1"));
    assert!(a.channel.is_connected(&b.id));
    eventually("the other side knows too", || b.channel.is_connected(&a.id));
    assert_eq!(connect(&a, &b, text("second")), None);
    assert_eq!(connect(&b, &a, text("third")), None);
    assert_eq!(*heard_by_b.lock(), [(a.id.clone(), text("first"))]);
    assert!(heard_by_a.lock().is_empty());
    b.works_with(10, &a);

    // No message, and an empty one, are two things.
    let (c, d) = (Side::new(rig, "c"), Side::new(rig, "d"));
    assert_eq!(connect(&c, &b, None), text("c was number 2"));
    assert_eq!(connect(&d, &b, text("")), text("d was number 3"));
    let heard = [(c.id.clone(), None), (d.id.clone(), text(""))];
    assert_eq!(heard_by_b.lock()[1..], heard);
    // A side that has nothing to answer.
    let nothing = d
        .channel
        .connect(&c.id, c.channel.address(), text("?"), soon());
    assert_eq!(block_on(nothing).expect("connecting"), None);
    for side in [a, b, c, d] {
        side.ends();
    }
}

/// Many concurrent calls for the same peer make one connection.
pub fn calls_for_the_same_peer_connect_once<R: Rig>(rig: &R) {
    let (b, heard) = listening(rig, "b");
    let a = Side::new(rig, "a");
    let answers = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let connecting = a
                    .channel
                    .connect(&b.id, b.channel.address(), text("m"), soon());
                let answer = block_on(connecting).expect("connecting to a peer that is there");
                answers.fetch_add(usize::from(answer.is_some()), Ordering::Relaxed);
                assert!(a.channel.is_connected(&b.id));
            });
        }
    });
    assert_eq!(heard.lock().len(), 1);
    assert_eq!(answers.into_inner(), 1);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// Two sides that connect to each other at the same time both succeed.
pub fn both_sides_connect_at_the_same_time<R: Rig>(rig: &R) {
    for round in 0..10 {
        let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
        thread::scope(|scope| {
            scope.spawn(|| a.connect(&b));
            scope.spawn(|| b.connect(&a));
        });
        a.works_with(round, &b);
        b.works_with(round, &a);
        a.ends();
        b.ends();
    }
}

/// A channel has connections to many peers, each with its own memory.
pub fn many_peers_are_kept_apart<R: Rig>(rig: &R) {
    let hub = Side::new(rig, "hub");
    let others: Vec<_> = (0..6)
        .map(|n| Side::new(rig, &format!("other-{n}")))
        .collect();
    for (n, other) in others.iter().enumerate() {
        match n % 2 {
            0 => hub.connect(other),
            _ => other.connect(&hub),
        }
    }
    let lens = [4096; 4];
    let kept: Vec<_> = others
        .iter()
        .zip(100..)
        .map(|(other, stamp)| other.objects(stamp, &lens))
        .collect();
    for ((other, kept), stamp) in others.iter().zip(&kept).zip(100..) {
        let filled = hub.read(&lens, other, &other.indices(kept));
        super::side::check_filled(filled, stamp, lens.len());
    }
    drop(kept);
    for (other, stamp) in others.iter().zip(1000..) {
        hub.works_with(stamp * 10, other);
    }
    hub.ends();
    for other in others {
        other.ends();
    }
}

/// The longest message goes through, each way; a longer one is refused here.
pub fn messages_are_as_long_as_allowed<R: Rig>(rig: &R) {
    let echo: OnConnect = Arc::new(|_, message| message);
    let b = Side::with(rig, "b", 4096, |config| config.on_connect = Some(echo));
    let a = Side::new(rig, "a");
    let mut message = vec![0; MAX_MESSAGE + 1];
    super::fill_value(1, 1, &mut message);
    let message = Bytes::from(message);
    let long = a
        .channel
        .connect(&b.id, b.channel.address(), Some(message.clone()), soon());
    let refused = block_on(long);
    assert!(
        matches!(refused, Err(ConnectError::Message { found }) if found == MAX_MESSAGE + 1),
        "{refused:?}"
    );
    assert!(!a.channel.is_connected(&b.id) && !b.channel.is_connected(&a.id));
    let message = message.slice(1..);
    let longest = a
        .channel
        .connect(&b.id, b.channel.address(), Some(message.clone()), soon());
    assert_eq!(block_on(longest).expect("connecting"), Some(message));
    a.ends();
    b.ends();
}

/// Another peer than the expected one answers at the address.
pub fn another_peer_answers<R: Rig>(rig: &R) {
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    let c = peer("c");
    let found = block_on(a.channel.connect(&c, b.channel.address(), None, soon()));
    let Err(ConnectError::WrongPeer { expected, found }) = found else {
        panic!("connecting to c at the address of b: {found:?}");
    };
    assert_eq!((expected, found), (c.clone(), b.id.clone()));
    assert!(!a.channel.is_connected(&c) && !a.channel.is_connected(&b.id));
    eventually("b forgets", || !b.channel.is_connected(&a.id));

    a.connect(&b);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// Only peers that know the key are connected, and only their messages are delivered.
pub fn keys_are_proven<R: Rig>(rig: &R) {
    let key = |start: &str| {
        let secret = format!("{start}, and what makes it long enough");
        Key::new(secret.as_bytes()).ok().map(Keys::from)
    };
    let keyed = |keys: Option<Keys>, heard: &Heard| {
        let answer = listener(heard);
        move |config: &mut ChannelConfig| {
            config.keys = keys;
            config.on_connect = Some(answer);
        }
    };
    let heard = Heard::default();
    let b = Side::with(rig, "b", 4096, keyed(key("open"), &heard));
    let open = Side::with(rig, "open", 4096, keyed(None, &heard));
    let wrong = vec![
        (key("0pen"), &b),
        (key("ope"), &b),
        (key("open "), &b),
        (key("open"), &open),
        (None, &b),
    ];
    for (keys, to) in wrong {
        let a = Side::with(rig, "a", 4096, |config| config.keys = keys.clone());
        let refused = a.try_connect(to, soon());
        assert!(
            matches!(refused, Err(ConnectError::Key)),
            "{keys:?} to {}: {refused:?}",
            to.id
        );
        assert!(!a.channel.is_connected(&to.id));
        eventually("b forgets", || !to.channel.is_connected(&a.id));
        a.ends();
    }
    assert!(heard.lock().is_empty(), "{heard:?}");
    let a = Side::with(rig, "a", 4096, |config| config.keys = key("open"));
    a.connect(&b);
    assert_eq!(heard.lock().len(), 1);
    a.works_with(1, &b);
    for side in [a, b, open] {
        side.ends();
    }
}

/// A side with two keys connects with the first, and accepts both.
pub fn keys_are_rotated<R: Rig>(rig: &R) {
    let key = |byte: u8| Key::new(&[byte; 32]).expect("32 bytes");
    let side = |id, keys: Keys| Side::with(rig, id, 4096, |config| config.keys = Some(keys));
    let old = side("old", key(1).into());
    let both = side("both", Keys::from(key(2)).or(key(1)));
    let new = side("new", key(2).into());
    old.connect(&both);
    both.connect(&new);
    old.works_with(1, &both);
    both.works_with(10, &new);
    let refused = old.try_connect(&new, soon());
    assert!(matches!(refused, Err(ConnectError::Key)), "{refused:?}");
    for side in [old, both, new] {
        side.ends();
    }
}

/// No peer listens at the address any more.
pub fn no_peer_answers<R: Rig>(rig: &R) {
    let (a, b) = (Side::new(rig, "a"), Side::new(rig, "b"));
    let address = b.channel.address().clone();
    b.ends();
    let id = peer("b");
    for deadline in [shortly(), Instant::now()] {
        let began = Instant::now();
        let refused = block_on(a.channel.connect(&id, &address, None, deadline));
        assert!(
            matches!(
                refused,
                Err(ConnectError::Deadline { .. } | ConnectError::Io(_))
            ),
            "{refused:?}"
        );
        assert!(began.elapsed() < LATE);
        assert!(!a.channel.is_connected(&id));
    }
    let b = Side::new(rig, "b");
    assert_eq!(b.channel.address(), &address, "the rig keeps addresses");
    a.connect(&b);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// A peer that takes its time over the answer does not keep the caller beyond its deadline.
pub fn a_stalled_handshake_ends<R: Rig>(rig: &R) {
    let gate = Arc::new(Mutex::new(()));
    let closed = gate.lock();
    let stalls = Arc::clone(&gate);
    let answer: OnConnect = Arc::new(move |_, _| {
        drop(stalls.lock());
        None
    });
    let b = Side::with(rig, "b", 4096, |config| config.on_connect = Some(answer));
    let a = Side::new(rig, "a");
    let began = Instant::now();
    let late = a.try_connect(&b, shortly());
    assert!(
        matches!(late, Err(ConnectError::Deadline { .. })),
        "{late:?}"
    );
    assert!(began.elapsed() < LATE);
    assert!(!a.channel.is_connected(&b.id));
    drop(closed);
    a.connect(&b);
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// A handler that panics, and one that answers more than is allowed, fail their connect and
/// nothing else.
pub fn handlers_that_fail<R: Rig>(rig: &R) {
    let asked = AtomicUsize::new(0);
    let answer: OnConnect = Arc::new(move |_, _| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => panic!("the suite's handler panics, and that is no failure"),
        1 => Some(vec![7; MAX_MESSAGE + 1].into()),
        _ => text("well"),
    });
    let b = Side::with(rig, "b", 4096, |config| {
        config.handshake_timeout = 2 * TIMEOUT;
        config.on_connect = Some(answer);
    });
    let patient = |config: &mut ChannelConfig| config.handshake_timeout = 2 * TIMEOUT;
    let a = Side::with(rig, "a", 4096, patient);
    for fault in ["panicked", "said too much"] {
        let began = Instant::now();
        let failed = a.try_connect(&b, soon());
        assert!(failed.is_err(), "the handler {fault}");
        assert!(began.elapsed() < TIMEOUT / 2, "it waited for a deadline");
        assert!(!a.channel.is_connected(&b.id), "the handler {fault}");
        eventually("b forgets", || !b.channel.is_connected(&a.id));
    }
    let connecting = a.channel.connect(&b.id, b.channel.address(), None, soon());
    assert_eq!(
        block_on(connecting).expect("a handler that answers"),
        text("well")
    );
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// A connect that waits for its peer ends when its channel is closed.
pub fn closing_ends_a_connect<R: Rig>(rig: &R) {
    let gate = Arc::new(Mutex::new(()));
    let asked = Arc::new(AtomicBool::new(false));
    let closed = gate.lock();
    let (stalls, hears) = (Arc::clone(&gate), Arc::clone(&asked));
    let answer: OnConnect = Arc::new(move |_, _| {
        hears.store(true, Ordering::Release);
        drop(stalls.lock());
        None
    });
    let patient = |config: &mut ChannelConfig| config.handshake_timeout = 20 * TIMEOUT;
    let b = Side::with(rig, "b", 4096, |config| {
        patient(config);
        config.on_connect = Some(answer);
    });
    let a = Side::with(rig, "a", 4096, patient);
    let began = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            eventually("b is asked", || asked.load(Ordering::Acquire));
            assert_eq!(block_on(a.channel.close(soon())), Ok(()));
        });
        let ended = a.try_connect(&b, later());
        // A channel may wait until the peer confirms the end.
        drop(closed);
        assert!(matches!(ended, Err(ConnectError::Closed)), "{ended:?}");
    });
    assert!(began.elapsed() < TIMEOUT, "it waited for its deadline");
    a.goes();
    let id = peer("a");
    eventually("b forgets", || !b.channel.is_connected(&id));
    b.ends();
}

/// A peer above the limit is refused until another peer has gone; also by the side that connects.
pub fn no_more_peers_than_allowed<R: Rig>(rig: &R) {
    let b = Side::with(rig, "b", 4096, |config| config.max_peers = 1);
    let (a, c) = (Side::new(rig, "a"), Side::new(rig, "c"));
    a.connect(&b);
    let refused = c.try_connect(&b, soon());
    assert!(
        matches!(refused, Err(ConnectError::Refused(_))),
        "{refused:?}"
    );
    assert!(!c.channel.is_connected(&b.id) && !b.channel.is_connected(&c.id));
    a.works_with(1, &b);
    a.ends();
    eventually("there is capacity again", || {
        c.try_connect(&b, soon()).is_ok()
    });
    c.works_with(1, &b);
    b.ends();
    c.ends();

    let a = Side::with(rig, "a", 4096, |config| config.max_peers = 1);
    let (b, c) = (Side::new(rig, "b"), Side::new(rig, "c"));
    a.connect(&b);
    let refused = a.try_connect(&c, soon());
    assert!(
        matches!(refused, Err(ConnectError::Refused(_))),
        "{refused:?}"
    );
    assert!(!a.channel.is_connected(&c.id));
    eventually("c forgets", || !c.channel.is_connected(&a.id));
    a.works_with(1, &b);
    b.ends();
    eventually("there is capacity again", || {
        a.try_connect(&c, soon()).is_ok()
    });
    a.works_with(1, &c);
    a.ends();
    c.ends();
}
