//! Owners under many requests, and requests at awkward moments.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lmc_backend::now;
use lmc_key::{ChunkKey, ClearsId};
use parking_lot::Mutex;

use super::net::{Faults, Net};
use super::schedules::{fetch, found, load, look_up, prompt, slow};
use super::{LEN, run};
use crate::message::{
    ChunkLease, Hello, KeyBatch, Lease, Leased, OLDEST_VERSION, Release, Renew, Reply, Request,
    Stamped, VERSION,
};
use crate::owner::MAX_SERVING;

fn batch(keys: &[ChunkKey]) -> KeyBatch {
    KeyBatch::leading(keys).expect("keys").0
}

fn lease(keys: &[ChunkKey]) -> Request {
    let lease = Lease {
        keys: batch(keys),
        duration_ms: 2_000,
        wait_ms: 400,
    };
    Request::Lease(Stamped::new(ClearsId::NONE, lease))
}

/// Serves a request of host 1 or another at host 0.
async fn serve(net: Net, from: usize, request: Request) -> Reply {
    serve_at(net, 0, from, request).await
}

/// Serves a request of one host at another.
async fn serve_at(net: Net, owner: usize, from: usize, request: Request) -> Reply {
    let (node, session) = (net.node(owner), net.session(from));
    let request = request.to_bytes().expect("it fits");
    let reply = node.serve(&session, &request).await;
    Reply::from_bytes(&reply).expect("a reply")
}

async fn leased(net: &Net, from: usize, keys: &[ChunkKey]) -> Leased {
    leased_at(net, 0, from, keys).await
}

async fn leased_at(net: &Net, owner: usize, from: usize, keys: &[ChunkKey]) -> Leased {
    match serve_at(net.clone(), owner, from, lease(keys)).await {
        Reply::Leased(leased) => leased.message,
        other => panic!("{other:?}"),
    }
}

/// A peer with as many leases waiting as it may have could once give none back.
#[test]
fn a_peer_with_waiting_leases_gives_others_back() {
    run(async {
        let net = Net::new(51, Faults::none());
        // It lends one chunk at a time.
        net.start(0, 8, |config| config.limits.peer_bytes = LEN);
        net.start(1, 8, |_| ());
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, 1);
        net.chunks(0).store(keys[0], 0);
        let first = leased(&net, 1, &keys).await;
        assert!(matches!(first.chunks[..], [ChunkLease::Granted { .. }]));
        let waiting: Vec<_> = (0..MAX_SERVING + 8)
            .map(|_| tokio::spawn(serve(net.clone(), 1, lease(&keys))))
            .collect();
        // Each has begun once the runtime has nothing else to do.
        tokio::time::sleep(Duration::from_millis(1)).await;
        let locate = Request::Locate(Stamped::new(ClearsId::NONE, batch(&keys)));
        let refused = serve(net.clone(), 1, locate).await;
        assert!(matches!(refused, Reply::Refused(_)), "{refused:?}");
        let (lease, duration_ms) = (first.lease, 2_000);
        let renew = Request::Renew(Renew { lease, duration_ms });
        assert_eq!(serve(net.clone(), 1, renew).await, Reply::Renewed(true));
        let release = Request::Release(Release { lease });
        let released = serve(net.clone(), 1, release).await;
        assert!(matches!(released, Reply::Released(released) if released.held == [true]));
        let mut granted = 0;
        for waiting in waiting {
            if let Reply::Leased(leased) = waiting.await.expect("no panic") {
                granted += usize::from(leased.message.lease != 0);
            }
        }
        assert_eq!(granted, 1);
    });
}

/// A request that goes on as soon as it is woken.
struct Eager<T>(Mutex<Pin<Box<dyn Future<Output = T> + Send>>>);

impl<T> Wake for Eager<T> {
    fn wake(self: Arc<Self>) {
        let waker = Waker::noop();
        let _ = self.0.lock().as_mut().poll(&mut Context::from_waker(waker));
    }
}

/// The bytes of a reservation were once free for a moment before their lease was granted.
#[test]
fn a_lease_that_waits_takes_nothing_of_one_that_is_being_granted() {
    run(async {
        let net = Net::new(53, Faults::none());
        net.start(0, 8, |config| config.limits.bytes = LEN);
        (1..3).for_each(|host| net.start(host, 8, |_| ()));
        assert!(net.connect(0, 1).await && net.connect(0, 2).await);
        let keys = prompt(0, 2);
        net.chunks(0).store_on_disk(keys[0]);
        net.chunks(0).store(keys[1], 0);
        // The first is promoted first.
        let granted = tokio::spawn(serve(net.clone(), 1, lease(&keys[..1])));
        tokio::time::sleep(Duration::from_millis(1)).await;
        let waiting = Box::pin(serve(net.clone(), 2, lease(&keys[1..])));
        let waiting = Arc::new(Eager(Mutex::new(waiting)));
        let waker = Waker::from(Arc::clone(&waiting));
        let polled = waiting
            .0
            .lock()
            .as_mut()
            .poll(&mut Context::from_waker(&waker));
        assert!(matches!(polled, Poll::Pending), "{polled:?}");
        granted.await.expect("no panic");
        assert_eq!(net.node(0).leased(), (1, LEN));
    });
}

/// A peer that went between two steps of its hello once stayed for ever.
#[test]
fn a_peer_that_goes_while_its_hello_is_served_is_forgotten() {
    run(async {
        let net = Net::new(55, Faults::none());
        (0..2).for_each(|host| net.start(host, 8, |_| ()));
        let hello = Request::Hello(Hello {
            oldest: OLDEST_VERSION,
            newest: VERSION,
            features: 0,
            name: "host-1".to_owned(),
            address: "host-1:1".to_owned(),
            chunk_size: 256,
            algorithm: "blake3".to_owned(),
            clears: ClearsId::NONE,
            spaces: Vec::new(),
            is_draining: false,
        });
        assert!(net.link(0, 1));
        net.0.lock().leaving = Some(1);
        serve(net.clone(), 1, hello).await;
        assert_eq!(net.node(0).sessions.peers.lock().iter().count(), 0);
    });
}

/// A peer that went before its connect was noted stayed known.
#[test]
fn a_peer_that_goes_while_its_connect_is_noted_is_forgotten() {
    run(async {
        let net = Net::new(57, Faults::none());
        (0..2).for_each(|host| net.start(host, 8, |_| ()));
        assert!(net.link(0, 1));
        net.0.lock().leaving = Some(1);
        let connected = net.node(0).connected(&net.session(1)).await;
        assert!(connected.is_err(), "{connected:?}");
        assert_eq!(net.node(0).sessions.peers.lock().iter().count(), 0);
    });
}

/// Returns the addresses of the holders that a busy owner names to a peer.
async fn named_holders(net: &Net, to: usize, keys: &[ChunkKey]) -> Vec<String> {
    let answer = leased(net, to, keys).await;
    assert!(
        matches!(answer.chunks[..], [ChunkLease::Busy, ..]),
        "{answer:?}"
    );
    let holders = answer.holders.into_iter();
    holders.map(|holder| holder.address).collect()
}

/// The second reader looks the prompt up before the first has read it: it knows from the busy
/// owner's answer alone who else has the chunks, and the owner from the first reader's request.
#[test]
fn a_busy_owner_names_the_peers_that_have_read_its_chunks_and_those_are_read() {
    run(async {
        let net = Net::new(59, Faults::none());
        // It lends four chunks at a time.
        net.start(0, 64, |config| config.limits.bytes = 4 * LEN);
        (1..4).for_each(|host| net.start(host, 64, |_| ()));
        for a in 0..4 {
            for b in 0..a {
                assert!(net.connect(a, b).await);
            }
        }
        let keys = prompt(0, 4);
        keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
        let found = found(&keys, look_up(&net, 2, &keys).await);
        assert_eq!(found.len(), 4);
        assert_eq!(fetch(&net, 1, &keys).await.hits, 4);
        // By then the owner has heard of it.
        tokio::time::sleep(Duration::from_millis(1)).await;
        // A third peer leases all that the owner lends.
        let all = leased(&net, 3, &keys).await;
        let granted = |chunk: &ChunkLease| matches!(chunk, ChunkLease::Granted { .. });
        assert!(all.chunks.iter().all(granted), "{all:?}");
        let tally = load(&net, 2, &found, Duration::from_secs(1)).await;
        assert_eq!(tally.hits, 4, "{tally:?}");
        assert_eq!(net.node(1).counters().served, 4);
        assert_eq!(net.node(2).counters().busy, 4);
        // No peer is sent to itself, or to one that is gone.
        assert_eq!(named_holders(&net, 2, &keys).await, ["host-1:1"]);
        assert_eq!(named_holders(&net, 1, &keys).await, [""; 0]);
        net.kill(1, Duration::ZERO);
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert_eq!(named_holders(&net, 2, &keys).await, [""; 0]);
    });
}

/// Reads from the one of two owners that has lent less, whichever it is.
#[test]
fn the_less_loaded_of_two_owners_is_read() {
    for (loaded, idle) in [(0, 1), (1, 0)] {
        run(async {
            // Both answer at once: one that is late is not compared.
            let net = Net::new(60, slow(Duration::ZERO, Duration::ZERO));
            (0..4).for_each(|host| net.start(host, 512, |_| ()));
            for (a, b) in [(2, 0), (2, 1), (3, loaded)] {
                assert!(net.connect(a, b).await);
            }
            let other = prompt(99, 8);
            other
                .iter()
                .for_each(|&key| net.chunks(loaded).store(key, 0));
            // Either owner is the first choice for some of the prompts.
            for number in 0..16 {
                let keys = prompt(number, 2);
                for owner in [loaded, idle] {
                    keys.iter().for_each(|&key| net.chunks(owner).store(key, 0));
                }
                let lent = leased_at(&net, loaded, 3, &other).await;
                let before = net.node(idle).counters().served;
                assert_eq!(fetch(&net, 2, &keys).await.hits, 2);
                assert_eq!(net.node(idle).counters().served, before + 2, "{number}");
                let release = Request::Release(Release { lease: lent.lease });
                serve_at(net.clone(), loaded, 3, release).await;
            }
        });
    }
}

/// The bound allows one second's chunks at once. A lease goes into debt for the rest of its chunk,
/// and the next one waits until that is paid. Each look at the bound once cost up to a byte.
#[test]
fn leases_wait_for_the_rate_at_which_chunks_are_served() {
    const PER_SECOND: u64 = 8;
    const SECONDS: u64 = 10;
    run(async {
        let net = Net::new(62, Faults::none());
        net.start(0, 128, |config| {
            config.limits.bytes_per_second = Some(PER_SECOND * LEN);
        });
        net.start(1, 8, |_| ());
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, PER_SECOND + 1);
        keys.iter().for_each(|&key| net.chunks(0).store(key, 0));
        let begun = now();
        let mut served = 0;
        while now() < begun + Duration::from_secs(SECONDS) {
            let leased = leased(&net, 1, &keys[..]).await;
            let granted = |chunk: &&ChunkLease| matches!(chunk, ChunkLease::Granted { .. });
            let granted = leased.chunks.iter().filter(granted).count() as u64;
            match served {
                0 => assert_eq!(granted, PER_SECOND, "one second's worth at once"),
                _ => assert!(granted <= 1, "{leased:?}"),
            }
            served += granted;
            let release = Request::Release(Release {
                lease: leased.lease,
            });
            serve(net.clone(), 1, release).await;
        }
        // The last one goes into debt.
        let most = PER_SECOND * (SECONDS + 1) + 1;
        assert!((most - 5..=most).contains(&served), "{served} of {most}");
    });
}

/// The thread at which a peer's replies arrive ends in the middle of a read.
#[test]
fn a_read_whose_thread_ends_fails_its_chunks() {
    run(async {
        let net = Net::with_daemons(57, Faults::none(), 2).await;
        let keys = prompt(0, 3);
        keys.iter().for_each(|key| net.chunks(0).store(*key, 0));
        let home = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime without IO can be built");
        net.0.lock().home = Some(home.handle().clone());
        let reading = tokio::spawn({
            let (net, keys) = (net.clone(), keys.clone());
            async move { fetch(&net, 1, &keys).await }
        });
        while home.handle().metrics().num_alive_tasks() == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        home.shutdown_background();
        let tally = reading.await.expect("no panic");
        // The first chunk is located before the others, and all are read together.
        assert_eq!((tally.hits, tally.failed, tally.quarantined), (0, 3, 3));
        net.0.lock().home = None;
        assert_eq!(fetch(&net, 1, &keys).await.hits, 3);
    });
}

/// A question that overtook the hello of its connection was refused, and the peer stayed without a
/// hello for five seconds.
#[test]
fn a_peer_that_lacks_the_hello_is_sent_it_again_at_once() {
    run(async {
        let net = Net::new(57, Faults::none());
        (0..2).for_each(|host| net.start(host, 8, |_| ()));
        assert!(net.connect(0, 1).await);
        let keys = prompt(0, 1);
        net.chunks(0).store(keys[0], 0);
        net.node(0)
            .disconnected(&net.session(1), "the hello is on its way");
        assert_eq!(fetch(&net, 1, &keys).await.hits, 0);
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(fetch(&net, 1, &keys).await.hits, 1);
    });
}

/// A prompt that asked shortly before its deadline took a peer from all others for a second and more.
#[test]
fn a_caller_without_time_says_nothing_about_the_peer() {
    run(async {
        for (millis, lends) in [(20, true), (600, false)] {
            let time = Duration::from_millis(millis);
            let net = Net::with_daemons(58, Faults::none(), 2).await;
            let keys = prompt(0, 1);
            net.chunks(0).store(keys[0], 0);
            let found = found(&keys, look_up(&net, 1, &keys).await);
            net.freeze(0, time + Duration::from_millis(20));
            assert_eq!(load(&net, 1, &found, time).await.hits, 0);
            // The pause after a question that was not answered is over, that after a lease is not.
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(fetch(&net, 1, &keys).await.hits, lends.into(), "{time:?}");
        }
    });
}
