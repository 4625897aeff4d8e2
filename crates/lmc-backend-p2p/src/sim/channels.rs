//! Two daemons over real channels: sockets, and a second channel of sockets in place of NIXL,
//! which takes one peer at a time.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use lmc_backend::{Backend, Clears, LoadItem, Loaded, LocateHint};
use lmc_key::ClearsId;
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerId, SocketChannel, SocketConfig, TransferChannel,
};
use tokio::runtime::{Handle, Runtime};

use super::chunks::{SimChunks, StateFile};
use super::net::Memory;
use super::schedules::found;
use super::{LEN, bytes, key};
use crate::backend::{P2pBackend, P2pConfig, new_peer_id};
use crate::dial::Dialer;
use crate::message::{
    ChunkLease, ChunkState, ClearsPage, Leased, Located as LocatedMessage, Released, Reply,
    Request, Stamped, Transport,
};
use crate::node::NodeConfig;

const DEADLINE: Duration = Duration::from_secs(60);
const CHUNKS: u64 = 8;

struct Daemon {
    tier: P2pBackend,
    chunks: SimChunks,
    id: PeerId,
    nixl: Option<Arc<SocketChannel>>,
}

fn loopback() -> Address {
    "tcp://127.0.0.1:0".parse().expect("an address")
}

fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    runtime.expect("threads")
}

/// Starts a daemon that connects to the peer at an address.
fn daemon(name: &str, peer: Option<&Address>, has_nixl: bool) -> Daemon {
    daemon_of(name, peer.map_or(&[], std::slice::from_ref), has_nixl)
}

/// Starts a daemon that connects to the peers at these addresses.
fn daemon_of(name: &str, peers: &[Address], has_nixl: bool) -> Daemon {
    let chunks = SimChunks::new(64, Memory::default(), 1, StateFile::default());
    let id = new_peer_id(name).expect("random bytes");
    let channel = ChannelConfig::new(id.clone(), Arc::clone(chunks.pool.arena()));
    let mut nixl = channel.clone();
    nixl.max_peers = 1;
    let nixl = has_nixl.then(|| {
        let nixl = SocketConfig::new(nixl, loopback()).build();
        Arc::new(nixl.expect("a port"))
    });
    let node = NodeConfig::new(name, "", 64 * 4096);
    let mut config = P2pConfig::new(node, SocketConfig::new(channel, loopback()));
    let at = |peer: &Address| peer.to_string().replace("tcp://", "");
    config.peers = peers.iter().map(at).collect();
    config.nixl = nixl.clone().map(|nixl| nixl as Arc<dyn TransferChannel>);
    let tier = P2pBackend::start(config, Arc::new(chunks.clone()), Handle::current());
    Daemon {
        tier: tier.expect("a port"),
        chunks,
        id,
        nixl,
    }
}

impl Daemon {
    fn nixl(&self) -> &SocketChannel {
        self.nixl.as_ref().expect("it has one")
    }

    fn store(&self) {
        (0..CHUNKS).for_each(|chunk| self.chunks.store(key(0, chunk), 0));
    }

    /// Reads the prompt from a peer, and compares every byte. Returns the bytes that came over
    /// NIXL, and those that came over sockets.
    async fn read(&self) -> (u64, u64) {
        let before = self.tier.node().counters();
        assert_eq!(self.misses().await, [0; 0]);
        let after = self.tier.node().counters();
        let by_nixl = after.read_nixl_bytes - before.read_nixl_bytes;
        (by_nixl, after.read_bytes - before.read_bytes - by_nixl)
    }

    /// Reads the prompt from a peer, and compares every byte of what is a hit. Returns the chunks
    /// that are misses.
    async fn misses(&self) -> Vec<usize> {
        let node = self.tier.node();
        let keys: Vec<_> = (0..CHUNKS).map(|chunk| key(0, chunk)).collect();
        let deadline = Instant::now() + DEADLINE;
        let located = node.locate(&keys, LocateHint::none(), deadline).await;
        let found = found(&keys, located);
        assert_eq!(found.len(), keys.len());
        let slot = || self.chunks.pool.reserve(LEN).expect("a slot");
        let item = |(key, handle)| LoadItem::new(key, slot()).with_handle(handle);
        let items = found.into_iter().map(item).collect();
        let mut answers = node.load(items, deadline);
        let mut misses = Vec::new();
        while let Some((index, loaded)) = answers.next().await {
            match loaded {
                Loaded::Hit(slot) => assert_eq!(slot.bytes(), bytes(&keys[index])),
                Loaded::Miss(_) => misses.push(index),
                Loaded::Failed { .. } => panic!("chunk {index}: {loaded:?}"),
            }
        }
        misses
    }

    /// Waits until a peer's hello was accepted, and it is read by this transport.
    async fn until_read_by(&self, peer: &PeerId, by: Transport) {
        self.until_known(peer).await;
        let reads = || self.tier.node().transport(peer) == Some(by);
        until(reads, &format!("not read by {by:?}")).await;
    }

    /// Waits until a peer's hello was accepted: before that, its questions are refused.
    async fn until_known(&self, peer: &PeerId) {
        let knows = || self.tier.node().peers.lock().with_hello().contains(peer);
        until(knows, "no hello").await;
    }
}

async fn until(holds: impl Fn() -> bool, otherwise: &str) {
    let waits = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let waited = tokio::time::timeout(DEADLINE, waits).await;
    waited.unwrap_or_else(|_| panic!("{otherwise}"));
}

/// The name of a headless service has an address for each of its daemons, this one included.
#[test]
fn each_address_of_a_name_is_a_peer_and_this_daemon_is_none() {
    runtime().block_on(async {
        let owners = ["one", "two"].map(|name| daemon(name, None, false));
        let reader = daemon("reader", None, false);
        let address = |daemon: &Daemon| {
            let text = daemon.tier.address().to_string();
            let at: SocketAddr = text.trim_start_matches("tcp://").parse().expect("numbers");
            at
        };
        let service = [&owners[0], &reader, &owners[1]].map(address).to_vec();
        let mut dialer = Dialer::new([&"service:7700".to_owned()]);
        dialer
            .resolve(|_| std::future::ready(Ok(service.clone())))
            .await;
        dialer.connect(reader.tier.node()).await;
        for owner in &owners {
            reader.until_known(&owner.id).await;
            owner.until_known(&reader.id).await;
        }
        let named = dialer.named(&reader.id);
        let found = named.iter().map(|one| {
            assert!(one.failure.is_none(), "{one:?}");
            (one.id.clone().expect("connected"), one.itself)
        });
        let found: BTreeSet<(String, bool)> = found.collect();
        let expected = [&owners[0], &owners[1], &reader].map(|daemon| {
            let id = daemon.id.to_string();
            (id, daemon.id == reader.id)
        });
        assert_eq!(found, BTreeSet::from(expected));
        assert_eq!(reader.tier.node().peers.lock().iter().count(), 2);
        // Each has a half of the prompt.
        let half = CHUNKS / 2;
        (0..half).for_each(|chunk| owners[0].chunks.store(key(0, chunk), 0));
        (half..CHUNKS).for_each(|chunk| owners[1].chunks.store(key(0, chunk), 0));
        assert_eq!(reader.read().await, (0, CHUNKS * LEN));
        let served = owners.each_ref().map(|one| one.tier.node().counters());
        assert_eq!(served.map(|counters| counters.served), [half, half]);
    });
}

/// The only peer that a NIXL channel takes, while it is connected.
struct Stranger(SocketChannel);

impl Stranger {
    /// Connects to the NIXL channel of a daemon, in the stead of a peer.
    async fn connect(to: &Daemon, instead_of: Option<&PeerId>) -> Self {
        let chunks = SimChunks::new(1, Memory::default(), 1, StateFile::default());
        let id = "stranger".parse().expect("a name");
        let channel = ChannelConfig::new(id, Arc::clone(chunks.pool.arena()));
        let channel = SocketConfig::new(channel, loopback()).build();
        let stranger = Self(channel.expect("a port"));
        let nixl = to.nixl();
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(peer) = instead_of {
                nixl.disconnect(peer, deadline).await.expect("in time");
            }
            let at = nixl.address();
            match TransferChannel::connect(&stranger.0, &to.id, at, None, deadline).await {
                Ok(_) => return stranger,
                // That peer may have come back first.
                Err(error) => assert!(Instant::now() < deadline, "{error}"),
            }
        }
    }

    async fn leave(self, from: &Daemon) {
        let left = self.0.disconnect(&from.id, Instant::now() + DEADLINE);
        left.await.expect("in time");
    }
}

const ALL: u64 = CHUNKS * LEN;

#[test]
fn bytes_go_over_sockets_until_both_sides_are_connected_over_nixl() {
    runtime().block_on(async {
        let owner = daemon("owner", None, true);
        owner.store();
        let stranger = Stranger::connect(&owner, None).await;
        let reader = daemon("reader", Some(owner.tier.address()), true);
        reader.until_read_by(&owner.id, Transport::Sockets).await;
        owner.until_known(&reader.id).await;
        assert_eq!(reader.read().await, (0, ALL));
        stranger.leave(&owner).await;
        reader.until_read_by(&owner.id, Transport::Nixl).await;
        // The owner may learn of it a moment later.
        owner.until_read_by(&reader.id, Transport::Nixl).await;
        assert_eq!(reader.read().await, (ALL, 0));
    });
}

#[test]
fn bytes_go_over_sockets_while_the_nixl_session_is_gone() {
    runtime().block_on(async {
        let owner = daemon("owner", None, true);
        owner.store();
        let reader = daemon("reader", Some(owner.tier.address()), true);
        reader.until_read_by(&owner.id, Transport::Nixl).await;
        owner.until_read_by(&reader.id, Transport::Nixl).await;
        assert_eq!(reader.read().await, (ALL, 0));
        let stranger = Stranger::connect(&owner, Some(&reader.id)).await;
        reader.until_read_by(&owner.id, Transport::Sockets).await;
        assert_eq!(reader.read().await, (0, ALL));
        stranger.leave(&owner).await;
        reader.until_read_by(&owner.id, Transport::Nixl).await;
        owner.until_read_by(&reader.id, Transport::Nixl).await;
        assert_eq!(reader.read().await, (ALL, 0));
    });
}

#[test]
fn a_peer_without_nixl_is_read_over_sockets() {
    runtime().block_on(async {
        for (owner_has, reader_has) in [(false, true), (true, false)] {
            let owner = daemon("owner", None, owner_has);
            owner.store();
            let reader = daemon("reader", Some(owner.tier.address()), reader_has);
            reader.until_read_by(&owner.id, Transport::Sockets).await;
            owner.until_known(&reader.id).await;
            assert_eq!(reader.read().await, (0, ALL));
        }
    });
}

#[test]
fn a_chunk_whose_bytes_do_not_give_its_digest_is_a_miss() {
    runtime().block_on(async {
        // Over the sockets of a tier, pieces have no checksum, and the sums come with the slots.
        for by in [Transport::Sockets, Transport::Nixl] {
            let has_nixl = by == Transport::Nixl;
            let owner = daemon("owner", None, has_nixl);
            owner.store();
            owner.chunks.spoil(&key(0, 3));
            let reader = daemon("reader", Some(owner.tier.address()), has_nixl);
            reader.until_read_by(&owner.id, by).await;
            owner.until_read_by(&reader.id, by).await;
            assert_eq!(reader.misses().await, [3], "{by:?}");
            let counters = reader.tier.node().counters();
            assert_eq!((counters.corrupt, counters.read), (1, CHUNKS - 1), "{by:?}");
        }
    });
}

#[test]
fn the_nixl_session_ends_with_that_over_sockets() {
    runtime().block_on(async {
        let (owner, reader) = (daemon("owner", None, true), daemon("reader", None, true));
        let deadline = Instant::now() + DEADLINE;
        let link = &reader.tier.node().link;
        let at = owner.tier.address();
        let connected = TransferChannel::connect(&link.sockets, &owner.id, at, None, deadline);
        connected.await.expect("it listens");
        reader.until_read_by(&owner.id, Transport::Sockets).await;
        let nixl = reader.tier.node().nixl_of(&owner.id).expect("its hello");
        let at = owner.nixl().address();
        let connected = link.connect_nixl(&owner.id, nixl, at, deadline);
        connected.await.expect("it listens");
        reader.until_read_by(&owner.id, Transport::Nixl).await;
        owner.until_read_by(&reader.id, Transport::Nixl).await;
        let ended = link.sockets.disconnect(&owner.id, deadline);
        ended.await.expect("in time");
        let gone = async {
            while owner.nixl().is_connected(&reader.id) || reader.nixl().is_connected(&owner.id) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DEADLINE, gone)
            .await
            .expect("both end");
    });
}

/// Starts a channel that answers as a daemon does, and leases every chunk over NIXL, also to a
/// peer that cannot read by it. Counts the leases.
fn one_who_insists_on_nixl(leases: &Arc<AtomicUsize>) -> SocketChannel {
    let chunks = SimChunks::new(1, Memory::default(), 1, StateFile::default());
    let id = "insists".parse().expect("a name");
    let mut channel = ChannelConfig::new(id, Arc::clone(chunks.pool.arena()));
    let leases = Arc::clone(leases);
    let answer = move |question: &[u8]| match Request::from_bytes(question) {
        Ok(Request::Hello(hello)) => Reply::Hello(hello),
        Ok(Request::Locate(Stamped { clears, message })) => {
            let states = vec![ChunkState::Memory { len: LEN }; message.len()];
            Reply::Located(Stamped::new(
                clears,
                LocatedMessage {
                    states,
                    ..LocatedMessage::default()
                },
            ))
        }
        Ok(Request::Lease(Stamped { clears, message })) => {
            leases.fetch_add(1, Ordering::Relaxed);
            let granted = ChunkLease::Granted {
                index: Index::arena(1, 1),
                len: LEN,
                digest: 0,
            };
            let leased = Leased {
                lease: 1,
                duration_ms: 1000,
                chunks: vec![granted; message.keys.len()],
                holders: Vec::new(),
                transport: Transport::Nixl,
            };
            Reply::Leased(Stamped::new(clears, leased))
        }
        Ok(Request::Release(_)) => Reply::Released(Released::default()),
        _ => Reply::Cleared(ClearsPage::of(&Clears::default(), ClearsId::NONE, 0)),
    };
    channel.on_ask = Some(Arc::new(move |_, _, question| {
        let reply = answer(&question).to_bytes().expect("it fits");
        Box::pin(std::future::ready(reply.into()))
    }));
    let channel = SocketConfig::new(channel, loopback()).build();
    channel.expect("a port")
}

#[test]
fn a_lease_for_a_transport_that_was_not_asked_for_is_not_asked_for_again() {
    runtime().block_on(async {
        let leases = Arc::default();
        let owner = one_who_insists_on_nixl(&leases);
        let reader = daemon("reader", Some(owner.address()), false);
        reader.until_read_by(owner.id(), Transport::Sockets).await;
        let node = reader.tier.node();
        let located = node
            .locate(&[key(0, 0)], LocateHint::none(), Instant::now() + DEADLINE)
            .await;
        let (key, handle) = found(&[key(0, 0)], located).remove(0);
        let slot = reader.chunks.pool.reserve(LEN).expect("a slot");
        let items = vec![LoadItem::new(key, slot).with_handle(handle)];
        let mut answers = node.load(items, Instant::now() + DEADLINE);
        let answer = answers.next().await;
        assert!(
            matches!(answer, Some((0, Loaded::Failed { .. }))),
            "{answer:?}"
        );
        assert_eq!(leases.load(Ordering::Relaxed), 1);
    });
}

/// Such a clear was once confirmed by all, since no name was resolved yet.
#[test]
fn a_clear_right_after_the_start_names_the_peers_of_the_settings() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    // Its tasks are not run.
    let runtime = runtime.expect("a runtime");
    let _entered = runtime.enter();
    let peer = "tcp://peer.invalid:7700".parse().expect("an address");
    let this = daemon_of("this", &[peer], false);
    let clears = this.chunks.carried_out();
    let cleared = this.tier.clear(clears, Instant::now() + DEADLINE);
    let cleared = cleared.now_or_never().expect("no peer is known");
    assert_eq!(
        cleared.expect("it is not closed").unconfirmed,
        ["peer.invalid:7700"]
    );
}

#[test]
fn a_clear_names_the_peers_that_have_not_confirmed_it() {
    runtime().block_on(async {
        let other = daemon("other", None, false);
        // Nothing listens at the second address.
        let peers = [
            other.tier.address().clone(),
            "tcp://127.0.0.1:1".parse().expect("an address"),
        ];
        let this = daemon_of("this", &peers, false);
        this.until_known(&other.id).await;
        this.chunks.clear();
        let clears = this.chunks.carried_out();
        let deadline = Instant::now() + DEADLINE;
        let clear = || this.tier.clear(Arc::clone(&clears), deadline);
        // The other daemon is named, too, until it has accepted the hello of this one, and where its
        // answer takes longer than a clear waits.
        loop {
            let cleared = clear().await.expect("it is not closed");
            assert!(!cleared.is_durable);
            if cleared.unconfirmed == ["127.0.0.1:1"] {
                break;
            }
            let named = &cleared.unconfirmed;
            assert!(Instant::now() < deadline, "{named:?} are unconfirmed");
            assert!(named.contains(&"127.0.0.1:1".to_owned()), "{named:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(other.chunks.carried_out(), clears);
        other.tier.close(deadline).await.expect("in time");
        until(
            || this.tier.node().peers.lock().iter().count() == 0,
            "still there",
        )
        .await;
        let mut expected = peers.map(|at| at.to_string().replace("tcp://", ""));
        let mut unconfirmed = clear().await.expect("it is not closed").unconfirmed;
        expected.sort();
        unconfirmed.sort();
        assert_eq!(unconfirmed, expected);
    });
}
