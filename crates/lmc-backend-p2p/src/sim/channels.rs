//! Two daemons over real channels of sockets.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{FutureExt, StreamExt};
use lmc_backend::{Backend, LoadItem, Loaded, LocateHint};
use lmc_transfer::{Address, ChannelConfig, PeerId, SocketConfig};
use tokio::runtime::{Handle, Runtime};

use super::chunks::{SimChunks, StateFile};
use super::net::Memory;
use super::schedules::found;
use super::{LEN, bytes, key};
use crate::backend::{P2pBackend, P2pConfig, new_peer_id};
use crate::config::NodeConfig;
use crate::dial::Dialer;

const DEADLINE: Duration = Duration::from_secs(60);
const CHUNKS: u64 = 8;

struct Daemon {
    tier: P2pBackend,
    chunks: SimChunks,
    id: PeerId,
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
fn daemon(name: &str, peer: Option<&Address>) -> Daemon {
    daemon_of(name, peer.map_or(&[], std::slice::from_ref))
}

/// Starts a daemon that connects to the peers at these addresses.
fn daemon_of(name: &str, peers: &[Address]) -> Daemon {
    let chunks = SimChunks::new(64, Memory::default(), 1, StateFile::default());
    let id = new_peer_id(name).expect("random bytes");
    let channel = ChannelConfig::new(id.clone(), Arc::clone(chunks.pool.arena()));
    let node = NodeConfig::new(name, "", 64 * 4096);
    let mut config = P2pConfig::new(node, SocketConfig::new(channel, loopback()));
    let at = |peer: &Address| peer.to_string().replace("tcp://", "");
    config.peers = peers.iter().map(at).collect();
    let tier = config.start(Arc::new(chunks.clone()), Handle::current());
    Daemon {
        tier: tier.expect("a port"),
        chunks,
        id,
    }
}

impl Daemon {
    fn store(&self) {
        (0..CHUNKS).for_each(|chunk| self.chunks.store(key(0, chunk), 0));
    }

    /// Reads the prompt from a peer, and compares every byte. Returns the bytes that came.
    async fn read(&self) -> u64 {
        let before = self.tier.node().counters();
        assert_eq!(self.misses().await, [0; 0]);
        let after = self.tier.node().counters();
        after.read_bytes - before.read_bytes
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

    /// Waits until a peer's hello was accepted: before that, its questions are refused.
    async fn until_known(&self, peer: &PeerId) {
        let knows = || {
            self.tier
                .node()
                .sessions
                .peers
                .lock()
                .with_hello()
                .contains(peer)
        };
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
        let owners = ["one", "two"].map(|name| daemon(name, None));
        let reader = daemon("reader", None);
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
        assert_eq!(reader.tier.node().sessions.peers.lock().iter().count(), 2);
        // Each has a half of the prompt.
        let half = CHUNKS / 2;
        (0..half).for_each(|chunk| owners[0].chunks.store(key(0, chunk), 0));
        (half..CHUNKS).for_each(|chunk| owners[1].chunks.store(key(0, chunk), 0));
        assert_eq!(reader.read().await, CHUNKS * LEN);
        let served = owners.each_ref().map(|one| one.tier.node().counters());
        assert_eq!(served.map(|counters| counters.served), [half, half]);
    });
}

#[test]
fn a_chunk_whose_bytes_do_not_give_its_digest_is_a_miss() {
    runtime().block_on(async {
        // Over the sockets of a tier, pieces have no checksum, and the sums come with the slots.
        let owner = daemon("owner", None);
        owner.store();
        owner.chunks.spoil(&key(0, 3));
        let reader = daemon("reader", Some(owner.tier.address()));
        reader.until_known(&owner.id).await;
        owner.until_known(&reader.id).await;
        assert_eq!(reader.misses().await, [3]);
        let counters = reader.tier.node().counters();
        assert_eq!((counters.corrupt, counters.read), (1, CHUNKS - 1));
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
    let this = daemon_of("this", &[peer]);
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
        let other = daemon("other", None);
        // Nothing listens at the second address.
        let peers = [
            other.tier.address().clone(),
            "tcp://127.0.0.1:1".parse().expect("an address"),
        ];
        let this = daemon_of("this", &peers);
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
            || this.tier.node().sessions.peers.lock().iter().count() == 0,
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
