//! State of a channel: the table of peers, and the handshakes under way.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use thiserror::Error;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};

use super::channel_core::ChannelCore;
use super::config::SocketConfig;
use super::connection::{Connection, End, Remote};
use super::offers::Offers;
use super::supervise::{Begin, SILENT_INTERVALS, supervise};
use super::threads::Threads;
use crate::config::PeerEvent;
use crate::connect_once::ConnectOnce;
use crate::net::Sockets;
#[cfg(feature = "nixl")]
use crate::nixl::{NixlPlane, Plane};
use crate::session::{Local, SecureStream};
use crate::timer::Timer;
use crate::{PeerId, PublicIdentity, TransferError};

/// Time between two pings of a connection whose name another peer claims.
const ASK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(super) struct ChannelState {
    pub(super) core: Arc<ChannelCore>,
    pub(super) local: Local,
    /// Connects begun so far.
    pub(super) attempts: AtomicU64,
    pub(super) timer: Timer,
    pub(super) threads: Threads,
    /// Handshakes that wait for their other streams.
    pub(super) joining: Mutex<HashMap<[u8; 16], Joining>>,
    pub(super) connects: ConnectOnce,
    /// `None` after closing.
    peers: Mutex<Option<HashMap<PeerId, PeerEntry>>>,
    closed: watch::Sender<bool>,
}

/// One incarnation of a peer.
#[derive(Debug)]
struct PeerEntry {
    incarnation: u64,
    identity: PublicIdentity,
    offers: Arc<Offers<Connection>>,
    /// The oldest connection comes first, and is the one in use, so that the order of offers is
    /// kept. There are two when both sides connected at the same time.
    connections: Vec<Arc<Connection>>,
}

/// A handshake that waits for its other streams.
#[derive(Debug)]
pub(super) struct Joining {
    pub(super) secret: [u8; 32],
    /// The streams that are still to come.
    pub(super) missing: Vec<bool>,
    pub(super) joined: mpsc::UnboundedSender<(usize, SecureStream)>,
}

/// The reason why a connection is not added to the table.
#[derive(Debug, Error)]
pub(super) enum NotInstalled {
    #[error("the channel is closed")]
    Closed,
    #[error("the channel has as many peers as it may")]
    Full,
    #[error("superseded by a newer connection")]
    Superseded,
    #[error("the name is in use by another identity, whose connection is alive")]
    NameInUse,
    #[error("the other side has closed the connection")]
    GivenUp,
    #[error("its streams cannot be watched: {0}")]
    Unwatched(#[source] io::Error),
}

/// The reason why a wait ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    Deadline,
    Closed,
}

impl From<Stop> for TransferError {
    fn from(stop: Stop) -> Self {
        match stop {
            Stop::Deadline => Self::Deadline,
            Stop::Closed => Self::Closed,
        }
    }
}

/// An obstacle for a new connection.
enum Obstacle {
    /// Connections that the new one replaces.
    Stale(Vec<Arc<Connection>>),
    /// A connection that the new one may replace only if it is dead.
    Alive(Arc<Connection>),
}

impl ChannelState {
    pub(super) fn new(config: SocketConfig, local: Local, timer: Timer, threads: Threads) -> Self {
        Self {
            core: Arc::new(ChannelCore::new(config, local.incarnation)),
            local,
            attempts: AtomicU64::new(0),
            timer,
            threads,
            joining: Mutex::default(),
            connects: ConnectOnce::default(),
            peers: Mutex::new(Some(HashMap::new())),
            closed: watch::Sender::new(false),
        }
    }

    /// Returns the live connection to a peer.
    ///
    /// # Errors
    /// [`TransferError::UnknownPeer`]; [`TransferError::Closed`] when the channel is closed.
    pub(super) fn connection(&self, peer: &PeerId) -> Result<Arc<Connection>, TransferError> {
        let peers = self.peers.lock();
        let Some(peers) = peers.as_ref() else {
            return Err(TransferError::Closed);
        };
        let entry = peers.get(peer);
        let mut live = entry.into_iter().flat_map(|peer| &peer.connections);
        let live = live.find(|connection| connection.end().is_none());
        live.cloned()
            .ok_or_else(|| TransferError::UnknownPeer { peer: peer.clone() })
    }

    pub(super) fn is_closed(&self) -> bool {
        *self.closed.borrow()
    }

    /// Waits for a future, until the deadline or the channel's end.
    pub(super) async fn within<T>(
        &self,
        deadline: Instant,
        what: impl Future<Output = T>,
    ) -> Result<T, Stop> {
        let mut closed = self.closed.subscribe();
        tokio::select! {
            biased;
            _ = closed.wait_for(|closed| *closed) => Err(Stop::Closed),
            done = what => Ok(done),
            () = self.timer.at(deadline) => Err(Stop::Deadline),
        }
    }

    /// Waits for the end of a connection. Returns the error of a call that the end interrupted, and
    /// whether the peer closed the connection.
    pub(super) async fn gone(
        &self,
        connection: &Connection,
        deadline: Instant,
    ) -> (TransferError, bool) {
        match self.within(deadline, connection.ended()).await {
            Ok(end) => {
                let peer = connection.remote.id.clone();
                let reason = end.reason;
                (TransferError::PeerGone { peer, reason }, end.by_peer)
            }
            Err(stop) => (stop.into(), false),
        }
    }

    /// The other plane of its sessions.
    #[cfg(feature = "nixl")]
    pub(super) fn plane(&self) -> Option<&Arc<Plane>> {
        self.core.config.nixl.as_ref().map(NixlPlane::plane)
    }

    fn has_capacity(&self, peers: &HashMap<PeerId, PeerEntry>, peer: &PeerId) -> bool {
        peers.contains_key(peer) || peers.len() < self.core.config.channel.max_peers
    }

    /// Returns whether a connection to this peer would be added to the table now.
    pub(super) fn would_install(&self, peer: &PeerId) -> Result<(), NotInstalled> {
        match self.peers.lock().as_ref() {
            None => Err(NotInstalled::Closed),
            Some(peers) if self.has_capacity(peers, peer) => Ok(()),
            Some(_) => Err(NotInstalled::Full),
        }
    }

    /// Adds a connection to the table and starts it; `first` is sent before all frames. Connections
    /// that it replaces have ended before. If the connection is not added, `streams` keeps its
    /// streams, unless they could not be moved to other threads.
    pub(super) async fn install(
        self: &Arc<Self>,
        remote: Remote,
        streams: &mut Vec<SecureStream>,
        first: Option<Vec<u8>>,
    ) -> Result<(), NotInstalled> {
        let threads: Vec<Handle> = self.threads.for_streams(streams.len()).cloned().collect();
        let dead_after = remote.keepalive * (SILENT_INTERVALS + 1);
        let moved = |(stream, thread): (SecureStream, &Handle)| {
            stream.socket.set_dead_after(dead_after);
            let socket = stream.socket.watched_by(thread)?;
            Ok(SecureStream { socket, ..stream })
        };
        let moved: io::Result<_> = std::mem::take(streams)
            .into_iter()
            .zip(&threads)
            .map(moved)
            .collect();
        *streams = moved.map_err(NotInstalled::Unwatched)?;
        for stream in &*streams {
            // Until its thread has seen the stream writable, nothing is sent directly.
            let seen = stream.socket.ready(Interest::WRITABLE).await;
            seen.map_err(NotInstalled::Unwatched)?;
        }
        loop {
            let obstacle = {
                let mut table = self.peers.lock();
                let peers = table.as_mut().ok_or(NotInstalled::Closed)?;
                if is_superseded(peers, &remote) {
                    return Err(NotInstalled::Superseded);
                }
                // The peer may have started again since: then its newer connection stays.
                if remote.incoming && streams.iter().any(|stream| stream.socket.is_closed()) {
                    return Err(NotInstalled::GivenUp);
                }
                if !self.has_capacity(peers, &remote.id) {
                    return Err(NotInstalled::Full);
                }
                match obstacle(peers, &remote) {
                    None => {
                        let (id, incarnation) = (remote.id.clone(), remote.incarnation);
                        let new = self.add(peers, remote, std::mem::take(streams), first, &threads);
                        drop(table);
                        if new {
                            let event = PeerEvent::Connected { incarnation };
                            self.core.config.channel.tell(&id, event);
                        }
                        return Ok(());
                    }
                    Some(obstacle) => obstacle,
                }
            };
            match obstacle {
                Obstacle::Stale(stale) => {
                    // All of them are stopped first: they are no longer in the table, and this
                    // future may be dropped.
                    stale.iter().for_each(|connection| connection.stop());
                    for connection in stale {
                        connection.ended().await;
                    }
                }
                Obstacle::Alive(connection) => {
                    if connection.is_alive(ASK_AGAIN).await {
                        return Err(NotInstalled::NameInUse);
                    }
                }
            }
        }
    }

    /// Starts a connection. Returns whether its peer is new.
    fn add(
        self: &Arc<Self>,
        peers: &mut HashMap<PeerId, PeerEntry>,
        remote: Remote,
        streams: Vec<SecureStream>,
        first: Option<Vec<u8>>,
        threads: &[Handle],
    ) -> bool {
        let mut new = false;
        let peer = peers.entry(remote.id.clone()).or_insert_with(|| {
            new = true;
            PeerEntry {
                incarnation: remote.incarnation,
                identity: remote.identity,
                offers: Arc::new(Offers::new()),
                connections: Vec::new(),
            }
        });
        let offers = Arc::clone(&peer.offers);
        let (mut sockets, mut sealers, mut openers) = (Vec::new(), Vec::new(), Vec::new());
        for stream in streams {
            sockets.push(stream.socket);
            sealers.push(stream.sealer);
            openers.push(stream.opener);
        }
        let sockets = Arc::new(Sockets(sockets));
        let home = threads.first().unwrap_or(self.threads.first()).clone();
        let (connection, queues) =
            Connection::new(&self.core, remote, &sockets, sealers, home, offers);
        if let Some(bytes) = first {
            connection.streams[0].queue.push_raw(bytes);
        }
        peer.connections.push(Arc::clone(&connection));
        let begin = |((thread, opener), queue): ((&Handle, _), _)| Begin {
            thread: thread.clone(),
            opener,
            queue,
        };
        let begin = threads.iter().zip(openers).zip(queues).map(begin).collect();
        let shared = Arc::clone(self);
        let remove = move |connection: &Arc<Connection>, end: &End| shared.remove(connection, end);
        let core = Arc::clone(&self.core);
        let supervise = supervise(core, connection, sockets, begin, remove);
        // Not on the first stream's thread, where most small frames are.
        let thread = threads.last().unwrap_or(self.threads.first());
        thread.spawn(supervise);
        new
    }

    /// Removes a connection that has ended.
    pub(super) fn remove(&self, connection: &Arc<Connection>, end: &End) {
        let remote = &connection.remote;
        {
            let mut peers = self.peers.lock();
            let entry = peers.as_mut().and_then(|peers| peers.get_mut(&remote.id));
            let entry = entry.filter(|peer| peer.incarnation == remote.incarnation);
            if let Some(peer) = entry {
                peer.connections.retain(|c| !Arc::ptr_eq(c, connection));
                if !peer.connections.is_empty() {
                    return;
                }
                peer.offers.end();
                if let Some(peers) = peers.as_mut() {
                    peers.remove(&remote.id);
                }
            }
        }
        self.core.leases.end(remote.incarnation);
        let event = PeerEvent::Gone {
            incarnation: remote.incarnation,
            reason: end.reason.clone(),
        };
        self.core.config.channel.tell(&remote.id, event);
    }

    /// Returns all connections to a peer.
    pub(super) fn connections(&self, peer: &PeerId) -> Vec<Arc<Connection>> {
        let peers = self.peers.lock();
        let entry = peers.as_ref().and_then(|peers| peers.get(peer));
        entry.map_or_else(Vec::new, |peer| peer.connections.clone())
    }

    /// Ends all calls, and lets none begin.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
        self.core.leases.end_all();
        let peers = self.peers.lock().take();
        for peer in peers.into_iter().flat_map(HashMap::into_values) {
            peer.offers.end();
            for connection in peer.connections {
                connection.stop();
            }
        }
        let joining = std::mem::take(&mut *self.joining.lock());
        drop(joining);
    }
}

/// Returns whether the initiator has abandoned this attempt and made another since.
fn is_superseded(peers: &HashMap<PeerId, PeerEntry>, new: &Remote) -> bool {
    let peer = peers.get(&new.id);
    let peer = peer.filter(|p| p.incarnation == new.incarnation && p.identity == new.identity);
    peer.into_iter()
        .flat_map(|peer| &peer.connections)
        .any(|c| c.remote.incoming == new.incoming && c.remote.attempt > new.attempt)
}

/// Finds what a new connection would replace. A newer incarnation replaces an older one of the
/// same identity. Nothing else replaces a connection that is alive.
fn obstacle(peers: &mut HashMap<PeerId, PeerEntry>, new: &Remote) -> Option<Obstacle> {
    let peer = peers.get_mut(&new.id)?;
    let same = peer.identity == new.identity;
    if same && peer.incarnation == new.incarnation {
        // While there is another connection the entry stays, with the offers and receives that
        // wait.
        let replaced = |c: &Arc<Connection>| c.remote.incoming == new.incoming;
        let (stale, kept) = peer.connections.drain(..).partition(replaced);
        peer.connections = kept;
        let stale: Vec<_> = stale;
        return (!stale.is_empty()).then_some(Obstacle::Stale(stale));
    }
    if same && peer.incarnation < new.incarnation {
        return Some(Obstacle::Stale(peer.connections.clone()));
    }
    let alive = peer.connections.first()?;
    Some(Obstacle::Alive(Arc::clone(alive)))
}
