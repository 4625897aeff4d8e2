//! Owners under many requests, and requests at awkward moments.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use lmc_backend::ClearEpoch;
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::net::{Faults, Net};
use super::schedules::prompt;
use super::{LEN, run};
use crate::message::{
    ChunkLease, Hello, KeyBatch, Lease, Leased, Locate, Release, Renew, Reply, Request, Transport,
};
use crate::node::MAX_SERVING;

fn batch(keys: &[ChunkKey]) -> KeyBatch {
    KeyBatch::leading(keys).expect("keys").0
}

fn lease(keys: &[ChunkKey]) -> Request {
    Request::Lease(Lease {
        keys: batch(keys),
        duration_ms: 2_000,
        wait_ms: 400,
        transport: Transport::Sockets,
    })
}

/// Serves a request of host 1 or another at host 0.
async fn serve(net: Net, from: usize, request: Request) -> Reply {
    let (node, session) = (net.node(0), net.session(from));
    let request = request.to_bytes().expect("it fits");
    let reply = node.serve(&session, &request).await;
    Reply::from_bytes(&reply).expect("a reply")
}

async fn leased(net: &Net, from: usize, keys: &[ChunkKey]) -> Leased {
    match serve(net.clone(), from, lease(keys)).await {
        Reply::Leased(leased) => leased,
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
        let locate = Request::Locate(Locate {
            keys: batch(&keys),
            epoch: ClearEpoch::default().into(),
        });
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
                granted += usize::from(leased.lease != 0);
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
            oldest: 1,
            newest: 1,
            features: 0,
            name: "host-1".to_owned(),
            address: "host-1:1".to_owned(),
            chunk_size: 256,
            algorithm: "blake3".to_owned(),
            clears: crate::clears::Clears::default(),
            spaces: Vec::new(),
            nixl: None,
        });
        assert!(net.link(0, 1));
        net.0.lock().leaving = Some(1);
        serve(net.clone(), 1, hello).await;
        assert_eq!(net.node(0).peers.lock().iter().count(), 0);
    });
}

/// So did one that went before its connect was noted.
#[test]
fn a_peer_that_goes_while_its_connect_is_noted_is_forgotten() {
    run(async {
        let net = Net::new(57, Faults::none());
        (0..2).for_each(|host| net.start(host, 8, |_| ()));
        assert!(net.link(0, 1));
        net.0.lock().leaving = Some(1);
        let connected = net.node(0).connected(&net.session(1)).await;
        assert!(connected.is_err(), "{connected:?}");
        assert_eq!(net.node(0).peers.lock().iter().count(), 0);
    });
}
