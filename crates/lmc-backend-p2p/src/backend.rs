//! [`P2pBackend`]: the peers as a tier of the engine.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, ChunkRun, Cleared, Clears, Health, Host, LoadItem,
    Loaded, LocateHint, Located, Sharing, Usage, now, ready,
};
use lmc_key::{ChunkKey, LayoutFingerprint};
use lmc_transfer::{Address, PeerEvent, PeerId, SocketConfig, SocketError, TransferChannel};
use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use crate::config::NodeConfig;
use crate::daemon_link::{DaemonLink, answer_on, random};
use crate::dial::{Dialer, Named};
use crate::link::{Link, Session};
use crate::node::Node;
use crate::peers::{GonePeer, Peers};
use crate::reader::ASKED_AT_ONCE;
use crate::status::{NamedPeer, PeersStatus};

/// Time that a clear waits for peers. Slower peers are named as unconfirmed; they are sent the clear again
/// afterwards.
const CLEAR_TIMEOUT: Duration = Duration::from_millis(500);

/// Settings of a [`P2pBackend`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct P2pConfig {
    /// Settings of this daemon as a peer. An empty address is replaced by that of the channel.
    pub node: NodeConfig,
    /// Settings of the channel. The tier sets the handlers that answer peers.
    pub channel: SocketConfig,
    /// Peers to connect to: `HOST:PORT`, `[IPv6]:PORT`. A name may have several addresses, each of which is a
    /// peer; names are resolved again every 30 s.
    pub peers: Vec<String>,
    /// Directories: `HOST:PORT`, the one to ask first at the front. Chunks are announced to all of them.
    pub directories: Vec<String>,
}

impl P2pConfig {
    /// Returns the settings of a tier without peers.
    pub fn new(node: NodeConfig, channel: SocketConfig) -> Self {
        Self {
            node,
            channel,
            peers: Vec::new(),
            directories: Vec::new(),
        }
    }
}

/// Returns the name on the channel for a daemon that starts. The name differs at each start, so that a daemon
/// is never taken for its predecessor.
///
/// # Errors
/// The system has no random numbers, or the name is not valid in a [`PeerId`].
pub fn new_peer_id(name: &str) -> std::io::Result<PeerId> {
    let id = format!("{name}-{:016x}", random()?);
    id.parse().map_err(std::io::Error::other)
}

type DaemonNode = Node<DaemonLink>;

/// The tier of peers' chunks.
///
/// Read only: peers read what this daemon computes from its memory.
pub struct P2pBackend {
    node: Arc<DaemonNode>,
    runtime: Handle,
    /// Tasks that end with the tier.
    tasks: Mutex<Option<JoinSet<()>>>,
    named: Named,
}

impl P2pConfig {
    /// Starts to listen for peers, and to connect to the configured peers. Lends the host's chunks.
    ///
    /// # Errors
    /// [`SocketError`].
    pub fn start(self, host: Arc<dyn Host>, runtime: Handle) -> Result<P2pBackend, SocketError> {
        let Self {
            mut node,
            mut channel,
            peers,
            directories,
        } = self;
        node.uses_directories = !directories.is_empty();
        node.salt_keys = channel.channel.keys.clone();
        // The channel's handlers reach the node through this, once there is a node.
        let shared: Arc<Mutex<Weak<DaemonNode>>> = Arc::new(Mutex::new(Weak::new()));
        let (at, on) = (Arc::clone(&shared), runtime.clone());
        channel.channel.on_ask = Some(Arc::new(move |peer, incarnation, question| {
            let session = Session {
                peer: peer.clone(),
                incarnation,
            };
            let node = at.lock().upgrade();
            answer_on(&on, async move {
                match node {
                    Some(node) => node.serve(&session, &question).await,
                    None => Vec::new(),
                }
            })
        }));
        let (at, on) = (Arc::clone(&shared), runtime.clone());
        channel.channel.on_peer = Some(Arc::new(move |peer, event| {
            if let Some(node) = at.lock().upgrade() {
                note(node, peer, &event, &on);
            }
        }));
        // A reader compares each chunk with the digest that came with its lease.
        channel.channel.object_checksums = false;
        let channel = channel.build()?;
        if node.address.is_empty() {
            // In the form in which settings name peers.
            let address = channel.address().to_string();
            node.address = address.trim_start_matches("tcp://").to_owned();
        }
        let node = Node::new(node, DaemonLink { channel }, host);
        *shared.lock() = Arc::downgrade(&node);
        let mut tasks = JoinSet::new();
        let expiring = Arc::clone(&node);
        tasks.spawn_on(async move { expiring.expire_leases().await }, &runtime);
        let in_step = Arc::clone(&node);
        tasks.spawn_on(async move { in_step.stay_in_step().await }, &runtime);
        let pushing = Arc::clone(&node);
        tasks.spawn_on(async move { pushing.push_waiting().await }, &runtime);
        let has_names = !(peers.is_empty() && directories.is_empty());
        if node.sessions.config.uses_directories {
            let seed = random()?;
            let announcing = Arc::clone(&node).announce_chunks(seed);
            tasks.spawn_on(announcing, &runtime);
        }
        let dialer = Dialer::new(peers.iter().chain(&directories));
        // So that a clear before they are resolved names these peers too.
        let named = Arc::new(Mutex::new(dialer.named(node.sessions.link.channel.id())));
        if has_names {
            let (dialing, shown) = (Arc::clone(&node), Arc::clone(&named));
            let dialing = dialer.stay_connected(dialing, peers, directories, shown);
            tasks.spawn_on(dialing, &runtime);
        }
        Ok(P2pBackend {
            node,
            runtime,
            tasks: Mutex::new(Some(tasks)),
            named,
        })
    }
}

impl P2pBackend {
    /// Returns the node of this daemon.
    pub fn node(&self) -> &Arc<DaemonNode> {
        &self.node
    }

    /// Returns the address that peers connect to.
    pub fn address(&self) -> &Address {
        self.node.sessions.link.channel.address()
    }

    /// Returns the state of every known peer, for an operator.
    pub fn status(&self) -> PeersStatus {
        PeersStatus {
            id: self.node.sessions.link.channel.id().to_string(),
            node: self.node.status(),
            named: self.named.lock().clone(),
        }
    }

    /// Returns the number of connected peers, and the number of configured peers and directories that are not
    /// connected.
    pub fn connections(&self) -> (usize, usize) {
        let peers = self.node.sessions.peers.lock();
        let named = self.named.lock();
        (peers.with_hello().len(), missing(&named, &peers).count())
    }

    /// Returns the peers and directories that are not connected: the configured ones, and remembered ones that
    /// were connected before.
    fn not_connected(&self, peers: &Peers) -> Vec<String> {
        let named = self.named.lock();
        let mut missing: Vec<String> = missing(&named, peers).map(NamedPeer::describe).collect();
        // A peer that was restarted is connected under another id.
        let is_back = |gone: &GonePeer| {
            peers.iter().any(|peer| {
                let hello = peer.hello.as_ref();
                hello.is_some_and(|hello| Some(&hello.address) == gone.address.as_ref())
            })
        };
        let is_named = |gone: &GonePeer| {
            gone.address.is_some() && named.iter().any(|one| one.address == gone.address)
        };
        let gone = peers
            .gone()
            .filter(|gone| !is_back(gone) && !is_named(gone));
        missing.extend(gone.map(|gone| gone.name.clone().unwrap_or_else(|| gone.id.clone())));
        missing
    }

    fn closed(&self) -> Option<BackendError> {
        let closed = self.tasks.lock().is_none();
        closed.then_some(BackendError::Closed)
    }
}

/// Returns the configured peers and directories that are not connected.
fn missing<'a>(named: &'a [NamedPeer], peers: &'a Peers) -> impl Iterator<Item = &'a NamedPeer> {
    let is_connected = |named: &NamedPeer| {
        peers.iter().any(|peer| {
            // The list of named peers is updated a little later.
            let listens_at = peer.hello.as_ref().map(|hello| &hello.address);
            named.id.as_deref() == Some(peer.session.peer.as_str())
                || (listens_at.is_some() && listens_at == named.address.as_ref())
        })
    };
    named
        .iter()
        .filter(move |one| !one.itself && !is_connected(one))
}

/// Handles the connect or disconnect of a peer.
fn note(node: Arc<DaemonNode>, peer: &PeerId, event: &PeerEvent, on: &Handle) {
    let session = |incarnation: u64| Session {
        peer: peer.clone(),
        incarnation,
    };
    match event {
        PeerEvent::Connected { incarnation } => {
            let session = session(*incarnation);
            on.spawn(async move {
                let peer = &session.peer;
                match node.connected(&session).await {
                    Ok(()) => tracing::info!(%peer, "peer connected"),
                    Err(error) => tracing::warn!(%peer, %error, "peer not used; start both servers with the same settings and of the same release"),
                }
            });
        }
        PeerEvent::Gone {
            incarnation,
            reason,
        } => {
            let session = session(*incarnation);
            // The same incarnation may have connected again.
            if !node.sessions.link.is_current(&session) {
                tracing::info!(%peer, %reason, "peer disconnected; its chunks are misses until it is back");
                node.disconnected(&session, &reason.to_string());
            }
        }
        _ => {}
    }
}

impl fmt::Debug for P2pBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("P2pBackend")
            .field("address", self.address())
            .finish_non_exhaustive()
    }
}

impl Backend for P2pBackend {
    fn name(&self) -> &str {
        "peers"
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn asks_at_once(&self) -> usize {
        ASKED_AT_ONCE
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            if self.closed().is_some() {
                return keys.iter().map(|_| Err(BackendError::Closed)).collect();
            }
            self.node.locate(keys, hint, deadline).await
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        if self.closed().is_some() {
            let closed = |item: LoadItem| Loaded::Failed {
                error: BackendError::Closed,
                slot: lmc_backend::FailedSlot::Released(item.slot),
            };
            return ready(items.into_iter().map(closed).collect::<Vec<_>>());
        }
        self.node.load(items, deadline)
    }

    fn has_layouts(&self, layouts: &[(LayoutFingerprint, u32)], sources: &[String]) -> Vec<bool> {
        self.node
            .sessions
            .peers
            .lock()
            .have_layouts(layouts, sources)
    }

    fn push(&self, run: ChunkRun, to: &str) -> bool {
        self.node.push(run, to)
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(async move {
            if let Some(closed) = self.closed() {
                return Err(closed);
            }
            // A peer that does not answer is sent the clears again within seconds.
            let deadline = deadline.min(now() + CLEAR_TIMEOUT);
            let missing = |peers: &Peers| self.not_connected(peers);
            let unconfirmed = self.node.exchange.pass_on(&clears, deadline, missing).await;
            Ok(Cleared::new(0).with_unconfirmed(unconfirmed))
        })
    }

    fn usage(&self) -> Option<Usage> {
        None
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let channel = self.node.sessions.link.channel.stats();
        let mut counters = self.node.counters().named();
        counters.push(("refused_handshakes", channel.refused_handshakes));
        counters.push(("broken", channel.broken));
        counters.push(("nixl_failed", channel.nixl_failed));
        if self.node.sessions.config.uses_directories {
            counters.extend(self.node.directories.counters());
        }
        counters
    }

    fn health(&self) -> Health {
        let connected = self.node.sessions.peers.lock().with_hello().len();
        let named = self.named.lock();
        match connected == 0 && named.iter().any(|peer| !peer.itself) {
            true => Health::Degraded {
                reason:
                    "no peer is connected: run `lmc peers`, which names the reason for each peer"
                        .to_owned(),
            },
            false => Health::Ready,
        }
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        Box::pin(async move {
            let Some(mut tasks) = self.tasks.lock().take() else {
                return Ok(());
            };
            tasks.abort_all();
            let closed = self.node.sessions.link.channel.close(deadline).await;
            closed.map_err(|_| BackendError::Deadline)
        })
    }
}

impl Drop for P2pBackend {
    fn drop(&mut self) {
        if let Some(tasks) = self.tasks.get_mut().take() {
            // Tasks must be dropped on their runtime.
            let _entered = self.runtime.enter();
            drop(tasks);
        }
    }
}
