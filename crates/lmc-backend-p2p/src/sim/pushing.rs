//! Chunks that a daemon passes to a peer: by a push for a request, and on an operator's order.

use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_backend::{ChunkRun, Located, now};

use super::net::{Faults, Net};
use super::schedules::{look_up, prompt, run_of, slow};
use super::{LEN, run};
use crate::message::{KeyBatch, Push, Pushed, Reply, Request};

/// Returns two connected daemons, the first with a prompt of this number of chunks.
async fn prefilled(faults: Faults, chunks: u64) -> (Net, ChunkRun) {
    let net = Net::with_daemons(31, faults, 2).await;
    let prompt = computed(&net, 1, chunks);
    (net, prompt)
}

/// Returns a prompt that the first daemon's engine computes.
fn computed(net: &Net, number: u64, chunks: u64) -> ChunkRun {
    let keys = prompt(number, chunks);
    let host = net.chunks(0);
    keys.iter().for_each(|&key| host.store(key, 0));
    run_of(&host, &keys)
}

/// Waits until no push waits or is under way. Returns how long that took.
async fn pushes_end(net: &Net) -> Duration {
    let begun = now();
    while !net.node(0).pusher.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    now() - begun
}

/// Returns the chunks that were pushed, and those that were dropped.
fn counts(net: &Net) -> (u64, u64) {
    let counters = net.node(0).counters();
    (counters.pushed, counters.push_dropped)
}

#[test]
fn chunks_are_at_the_peer_before_it_is_asked_for_them() {
    run(async {
        let (net, whole) = prefilled(Faults::none(), 8).await;
        let node = net.node(0);
        assert!(!node.push(whole.clone(), "stranger"));
        // One after the other, as they are computed; by name, and by address.
        for at in 0..8 {
            let one = ChunkRun {
                keys: vec![whole.keys[at]],
                parent: at.checked_sub(1).map(|before| whole.keys[before]),
                ..whole
            };
            assert!(node.push(one, ["host-1", "host-1:1"][at % 2]));
        }
        // What waits already is not pushed again, nor what the peer has read again.
        assert!(node.push(whole.clone(), "host-1"));
        pushes_end(&net).await;
        assert_eq!((net.chunks(1).len(), counts(&net)), (8, (8, 0)));
        assert!(node.push(whole.clone(), "host-1"));
        pushes_end(&net).await;
        assert_eq!(net.node(1).counters().read, 8);
        // A daemon does not need its own.
        assert!(node.push(whole, "host-0"));
        assert_eq!(counts(&net), (16, 0));
    });
}

#[test]
fn a_peer_without_memory_is_pushed_to_again_for_ten_seconds() {
    run(async {
        let (net, whole) = prefilled(Faults::none(), 8).await;
        let fitting = net.chunks(1).fitting;
        fitting.store(0, Ordering::Relaxed);
        net.node(0).push(whole.clone(), "host-1");
        tokio::time::sleep(Duration::from_secs(4)).await;
        assert_eq!(counts(&net), (0, 0));
        fitting.store(3, Ordering::Relaxed);
        pushes_end(&net).await;
        // Each time three more.
        assert_eq!((net.chunks(1).len(), counts(&net)), (8, (8, 0)));
        fitting.store(0, Ordering::Relaxed);
        // What waits behind it ends no later.
        for number in 2..20 {
            net.node(0).push(computed(&net, number, 1), "host-1");
        }
        let took = pushes_end(&net).await;
        assert!(took.as_secs_f64().round() == 10.0, "{took:?}");
        assert_eq!(counts(&net), (8, 18));
    });
}

#[test]
fn a_push_ends_with_what_is_gone_at_either_side() {
    run(async {
        let net = slow(Duration::from_micros(200), Duration::from_millis(20));
        let (net, whole) = prefilled(net, 8).await;
        let node = net.node(0);
        let mut holed = whole.clone();
        holed.keys[3] = net.chunks(0).name(&prompt(2, 1)[0]);
        node.push(holed, "host-1");
        assert!(pushes_end(&net).await < Duration::from_secs(1));
        assert_eq!((net.chunks(1).len(), counts(&net)), (3, (3, 5)));
        node.push(whole.clone(), "host-1");
        tokio::time::sleep(Duration::from_millis(10)).await;
        net.kill(1, Duration::from_millis(3));
        // A lost answer is waited for to its deadline.
        assert!(pushes_end(&net).await < Duration::from_secs(23));
        assert!(!node.push(whole.clone(), "host-1"), "it is gone");
        net.start(1, 64, |_| ());
        assert!(net.connect(0, 1).await && node.push(whole, "host-1"));
        pushes_end(&net).await;
        assert_eq!(net.chunks(1).len(), 8);
        // After a clear no chunk passes until both sides know of it.
        net.chunks(0).clear();
        let later = computed(&net, 3, 8);
        node.push(later.clone(), "host-1");
        pushes_end(&net).await;
        assert_eq!(net.chunks(1).carried_out(), net.chunks(0).carried_out());
        assert!(later.keys.iter().all(|name| net.chunks(1).has_named(name)));
    });
}

/// A chunk that was leased through a clear was once sent under its old name.
#[test]
fn what_waits_through_a_clear_is_not_pushed() {
    run(async {
        let (net, whole) = prefilled(Faults::none(), 8).await;
        let (host, peer) = (net.chunks(0), net.chunks(1));
        peer.fitting.store(0, Ordering::Relaxed);
        net.node(0).push(whole.clone(), "host-1");
        tokio::time::sleep(Duration::from_millis(10)).await;
        host.clear();
        whole.keys.iter().for_each(|name| host.leave(*name));
        net.pass_on(0).await;
        peer.fitting.store(usize::MAX, Ordering::Relaxed);
        pushes_end(&net).await;
        assert_eq!((counts(&net), net.node(1).counters().read), ((0, 8), 0));
    });
}

#[test]
fn a_peer_that_stands_still_keeps_what_waits_for_it_within_its_bound() {
    run(async {
        let (net, _) = prefilled(Faults::none(), 1).await;
        let node = net.node(0);
        net.freeze(1, Duration::from_secs(30));
        for number in 0..10_000 {
            let keys = prompt(10 + number, 8);
            node.push(run_of(&net.chunks(0), &keys), "host-1");
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
        let (_, dropped) = counts(&net);
        assert_eq!(dropped, 80_000 - (1 << 16));
        assert!(pushes_end(&net).await < Duration::from_secs(31));
        assert_eq!(counts(&net), (0, 80_000));
    });
}

#[test]
fn a_daemon_reads_four_pushes_of_a_peer_at_a_time_and_refuses_others() {
    run(async {
        let (net, whole) = prefilled(slow(Duration::from_millis(1), Duration::ZERO), 8).await;
        let push = |chunks: std::ops::Range<usize>, chunk_bytes| {
            let (keys, _) = KeyBatch::leading(&whole.keys[chunks]).expect("there are some");
            let push = Push {
                keys,
                chunk_bytes,
                parent: None,
            };
            let push = Request::Push(net.node(0).sessions.stamped(push)).to_bytes();
            let push = push.expect("it fits");
            let (node, session) = (net.node(1), net.session(0));
            async move { Reply::from_bytes(&node.serve(&session, &push).await).expect("a reply") }
        };
        // Of lengths that no chunk has, none is read.
        for chunk_bytes in [0, LEN - 1, u64::MAX] {
            let reply = push(0..8, chunk_bytes).await;
            let wanted = Pushed {
                chunks: 0,
                is_wanted: chunk_bytes == LEN - 1,
            };
            assert_eq!(reply, Reply::Pushed(wanted), "{chunk_bytes}");
        }
        assert_eq!(net.chunks(1).len(), 0);
        // It lends badly for a second.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let pushes = (0..6).map(|_| push(0..8, LEN));
        let replies = futures_util::future::join_all(pushes).await;
        let refused = |reply: &&Reply| matches!(reply, Reply::Refused(_));
        assert_eq!(replies.iter().filter(refused).count(), 2, "{replies:?}");
        assert_eq!(net.chunks(1).len(), 8);
    });
}

/// The sender's word about the length once made the reader pause every honest peer that had the chunk.
#[test]
fn a_peer_that_pushes_a_wrong_length_is_the_only_one_that_is_paused_for_it() {
    run(async {
        let net = Net::new(33, Faults::none());
        (0..3).for_each(|host| net.start(host, 64, |_| ()));
        assert!(net.connect(0, 1).await && net.connect(2, 1).await);
        let keys = prompt(1, 4);
        for host in [0, 2] {
            keys.iter().for_each(|&key| net.chunks(host).store(key, 0));
        }
        let wrong = ChunkRun {
            chunk_bytes: LEN + 1,
            ..run_of(&net.chunks(0), &keys)
        };
        net.node(0).push(wrong, "host-1");
        pushes_end(&net).await;
        let node = net.node(1);
        let missed = |host| {
            let mut peers = node.sessions.peers.lock();
            let peer = peers.of_session(&net.session(host)).expect("connected");
            (peer.counters.missed > 0, peer.can_be_asked(now()))
        };
        assert_eq!((missed(0), missed(2)), ((true, false), (false, true)));
        let located = look_up(&net, 1, &keys).await;
        let present = |one: &Result<Located, _>| matches!(one, Ok(Located::Present(_)));
        assert!(located.iter().all(present), "{located:?}");
    });
}

#[test]
fn a_peer_reads_on_order_one_batch_after_the_other() {
    use crate::CopyError;
    run(async {
        let net = Net::with_daemons(27, Faults::none(), 2).await;
        let chunks: Vec<_> = prompt(0, 8).into_iter().map(|key| (key, LEN)).collect();
        let node = net.node(0);
        assert_eq!(node.peers_named("stranger"), []);
        let named = [node.peers_named("host-1"), node.peers_named("host-1:1")];
        assert_eq!(named[0], named[1]);
        let peer = &named[0][0];
        let both = tokio::join!(
            node.copy_to(peer, &chunks),
            node.copy_to(peer, &chunks[..4])
        );
        assert_eq!(both, (Ok(8), Err(CopyError::Busy)));
        assert!(chunks.iter().all(|(key, _)| net.chunks(1).has(key)));
        let round_trip = net.node(0).status().peers[0].round_trip_seconds;
        let round_trip = round_trip.expect("there were hellos");
        assert!(round_trip < 0.005, "reading is no round trip: {round_trip}");
        // A chunk of more than a batch goes alone.
        let large: Vec<_> = prompt(1, 3)
            .into_iter()
            .map(|key| (key, 40 << 20))
            .collect();
        assert_eq!(node.copy_to(peer, &large).await, Ok(3));
        net.kill(1, Duration::from_millis(1));
        let found = node.copy_to(peer, &chunks).await;
        assert!(matches!(found, Err(CopyError::NoAnswer(_))), "{found:?}");
    });
}
