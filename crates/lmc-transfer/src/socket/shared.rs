//! What all parts of a channel share: the arena, the counters, and the table of peers.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use parking_lot::Mutex;
use thiserror::Error;
use tokio::io::Interest;
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::config::SocketConfig;
use super::connection::{Connection, Outgoing, Remote, supervise};
use super::endpoint::{Socket, Sockets};
use super::greet::Session;
use super::rendezvous::Rendezvous;
use super::stats::Counters;
use super::threads::Threads;
use super::timer::Timer;
use super::window::Window;
use crate::{PeerId, TransferError};

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: SocketConfig,
    pub(super) incarnation: u64,
    /// Connects so far.
    pub(super) attempts: AtomicU64,
    pub(super) window: Window,
    pub(super) counters: Arc<Counters>,
    pub(super) timer: Timer,
    pub(super) threads: Threads,
    /// Handshakes that wait for their other streams.
    pub(super) sessions: Mutex<HashMap<[u8; 16], Session>>,
    /// One connect to a peer at a time.
    pub(super) turns: Mutex<HashMap<PeerId, Arc<tokio::sync::Mutex<()>>>>,
    /// None after closing.
    peers: Mutex<Option<HashMap<PeerId, Peer>>>,
    closed: watch::Sender<bool>,
}

/// One incarnation of a peer.
#[derive(Debug)]
struct Peer {
    incarnation: u64,
    rendezvous: Arc<Rendezvous>,
    /// The oldest comes first, and is used: so that the order of offers is kept. There are two
    /// when both sides connected at the same time.
    connections: Vec<Arc<Connection>>,
}

/// Why a connection is not taken into the table.
#[derive(Debug, Error)]
pub(super) enum NotInstalled {
    #[error("the channel is closed")]
    Closed,
    #[error("the channel has as many peers as it may")]
    Full,
    #[error("a later connection stands already")]
    Overtaken,
    #[error("the other side has given up")]
    GivenUp,
    #[error("its streams cannot be watched: {0}")]
    Unwatched(#[source] io::Error),
}

/// Why a wait ended before what it waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    Deadline,
    Closed,
}

impl Stop {
    pub(super) fn error(self, quiet: bool) -> TransferError {
        match self {
            Self::Deadline => TransferError::Deadline { quiet },
            Self::Closed => TransferError::Closed,
        }
    }
}

impl Shared {
    pub(super) fn new(
        config: SocketConfig,
        incarnation: u64,
        timer: Timer,
        threads: Threads,
    ) -> Self {
        Self {
            window: Window::new(Arc::clone(&config.channel.arena)),
            config,
            incarnation,
            attempts: AtomicU64::new(0),
            counters: Arc::default(),
            timer,
            threads,
            sessions: Mutex::default(),
            turns: Mutex::default(),
            peers: Mutex::new(Some(HashMap::new())),
            closed: watch::Sender::new(false),
        }
    }

    /// The connection to a peer, and the place where its offers are met.
    ///
    /// # Errors
    /// Also when the channel is closed.
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

    /// Waits, until the deadline or the channel's end.
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

    fn has_room(&self, peers: &HashMap<PeerId, Peer>, peer: &PeerId) -> bool {
        peers.contains_key(peer) || peers.len() < self.config.channel.max_peers
    }

    /// Whether a connection to this peer would be taken into the table now.
    pub(super) fn would_install(&self, peer: &PeerId) -> Result<(), NotInstalled> {
        match self.peers.lock().as_ref() {
            None => Err(NotInstalled::Closed),
            Some(peers) if self.has_room(peers, peer) => Ok(()),
            Some(_) => Err(NotInstalled::Full),
        }
    }

    /// Takes a connection into the table and starts it; `first` goes ahead of all frames. What
    /// there was of another incarnation, or by the same direction, has ended before. The sockets
    /// stay where it is not taken, unless another thread cannot have them.
    pub(super) async fn install(
        self: &Arc<Self>,
        remote: Remote,
        sockets: &mut Vec<Socket>,
        first: Option<Vec<u8>>,
    ) -> Result<(), NotInstalled> {
        let threads: Vec<Handle> = self.threads.for_streams(sockets.len()).cloned().collect();
        let both = std::mem::take(sockets).into_iter().zip(&threads);
        let watched: io::Result<_> = both.map(|(socket, by)| socket.watched_by(by)).collect();
        *sockets = watched.map_err(NotInstalled::Unwatched)?;
        for socket in &*sockets {
            // Until its thread has seen this, nothing goes at once.
            let seen = socket.ready(Interest::WRITABLE).await;
            seen.map_err(NotInstalled::Unwatched)?;
        }
        loop {
            let stale = {
                let mut peers = self.peers.lock();
                let peers = peers.as_mut().ok_or(NotInstalled::Closed)?;
                if is_overtaken(peers, &remote) {
                    return Err(NotInstalled::Overtaken);
                }
                // It may have begun anew since: what it has now stays.
                if remote.incoming && sockets.iter().any(Socket::is_closed) {
                    return Err(NotInstalled::GivenUp);
                }
                if !self.has_room(peers, &remote.id) {
                    return Err(NotInstalled::Full);
                }
                let stale = take_stale(peers, &remote);
                if stale.is_empty() {
                    let peer = peers.entry(remote.id.clone()).or_insert_with(|| Peer {
                        incarnation: remote.incarnation,
                        rendezvous: Arc::new(Rendezvous::new()),
                        connections: Vec::new(),
                    });
                    let rendezvous = Arc::clone(&peer.rendezvous);
                    let sockets = Arc::new(Sockets(std::mem::take(sockets)));
                    let (connection, queues) = Connection::new(self, remote, &sockets, rendezvous);
                    if let Some(bytes) = first {
                        connection.lanes[0].push(Outgoing::of(bytes));
                    }
                    peer.connections.push(Arc::clone(&connection));
                    let lanes = threads.iter().cloned().zip(queues).collect();
                    let supervise = supervise(Arc::clone(self), connection, sockets, lanes);
                    // Not beside the first stream, where most small frames are.
                    let thread = threads.last().unwrap_or(self.threads.first());
                    thread.spawn(supervise);
                    return Ok(());
                }
                stale
            };
            // All of them first: they are no longer in the table, and whoever waits here may be
            // dropped.
            stale.iter().for_each(|connection| connection.stop());
            for connection in stale {
                connection.ended().await;
            }
        }
    }

    /// A connection has ended.
    pub(super) fn forget(&self, connection: &Arc<Connection>) {
        let mut peers = self.peers.lock();
        let Some(peers) = peers.as_mut() else { return };
        let id = &connection.remote.id;
        let Some(peer) = peers.get_mut(id) else {
            return;
        };
        peer.connections.retain(|c| !Arc::ptr_eq(c, connection));
        if peer.connections.is_empty() {
            peer.rendezvous.end();
            peers.remove(id);
        }
    }

    /// Ends all calls, and lets none begin.
    pub(super) fn close(&self) {
        self.closed.send_replace(true);
        let peers = self.peers.lock().take();
        for peer in peers.into_iter().flat_map(HashMap::into_values) {
            peer.rendezvous.end();
            for connection in peer.connections {
                connection.stop();
            }
        }
        let sessions = std::mem::take(&mut *self.sessions.lock());
        drop(sessions);
    }
}

/// Whether the initiator has given this attempt up and made another since.
fn is_overtaken(peers: &HashMap<PeerId, Peer>, new: &Remote) -> bool {
    let peer = peers.get(&new.id);
    let peer = peer.filter(|peer| peer.incarnation == new.incarnation);
    peer.into_iter()
        .flat_map(|peer| &peer.connections)
        .any(|c| c.remote.incoming == new.incoming && c.remote.attempt > new.attempt)
}

/// Connections that a new one takes the place of.
fn take_stale(peers: &mut HashMap<PeerId, Peer>, new: &Remote) -> Vec<Arc<Connection>> {
    let Some(peer) = peers.get_mut(&new.id) else {
        return Vec::new();
    };
    if peer.incarnation != new.incarnation {
        peer.rendezvous.end();
        let peer = peers.remove(&new.id);
        return peer.map(|peer| peer.connections).unwrap_or_default();
    }
    // While there is another connection the entry stays, and with it what waits there.
    let same = |c: &Arc<Connection>| c.remote.incoming == new.incoming;
    let (stale, kept) = peer.connections.drain(..).partition(same);
    peer.connections = kept;
    stale
}
