//! [`Node`]: one daemon as a peer of others, composed of its roles.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::{Answers, BackendError, ChunkRun, Host, LoadItem, Loaded, LocateHint, Located};
use lmc_key::ChunkKey;
use lmc_transfer::PeerId;

use crate::config::NodeConfig;
use crate::directory::DirectoryClient;
use crate::exchange::Exchange;
use crate::link::{Link, Session};
use crate::owner::{LentChunks, Owner};
use crate::peers::PeerCounters;
use crate::pushing::{CopyError, Pusher};
use crate::reader::Reader;
use crate::session::{HelloError, Sessions};
use crate::status::NodeStatus;

/// One daemon as a peer of others: it lends them the chunks of its engine, and reads theirs.
pub struct Node<L: Link> {
    pub(crate) sessions: Arc<Sessions<L>>,
    pub(crate) exchange: Arc<Exchange<L>>,
    pub(crate) directories: Arc<DirectoryClient<L>>,
    pub(crate) pusher: Pusher<L>,
    reader: Arc<Reader<L>>,
    owner: Owner<L>,
}

impl<L: Link> Node<L> {
    /// Makes a node without peers.
    pub fn new(config: NodeConfig, link: L, host: Arc<dyn Host>) -> Arc<Self> {
        let lent = Arc::new(LentChunks::<L::Grant>::new(config.limits.clone()));
        let of_session = Arc::clone(&lent);
        let on_end = move |session: &Session| of_session.end(session);
        let sessions = Arc::new(Sessions::new(config, link, host, on_end));
        let of = || Arc::clone(&sessions);
        let exchange = Arc::new(Exchange { sessions: of() });
        let directories = Arc::new(DirectoryClient::new(of()));
        let changed = Arc::clone(&directories.changed);
        Arc::new(Self {
            reader: Arc::new(Reader {
                sessions: of(),
                directories: Arc::clone(&directories),
            }),
            owner: Owner::new(of(), Arc::clone(&exchange), lent, changed),
            pusher: Pusher::new(of()),
            exchange,
            directories,
            sessions,
        })
    }

    /// Records that an incarnation of a peer is connected, and exchanges hellos and clears with it. Returns
    /// when the peer has answered, or failed to.
    ///
    /// # Errors
    /// [`HelloError`].
    pub async fn connected(&self, session: &Session) -> Result<(), HelloError> {
        self.exchange.connected(session).await
    }

    /// Records that an incarnation of a peer is gone, with the reason: its leases end.
    pub fn disconnected(&self, session: &Session, reason: &str) {
        self.sessions.disconnected(session, reason);
    }

    /// Answers a request of a connected peer.
    pub async fn serve(&self, session: &Session, request: &[u8]) -> Vec<u8> {
        self.owner.serve(session, request).await
    }

    /// Asks peers which chunks they have: all peers at once, or those that a directory names. The peers in
    /// the hint are asked first. The other peers are asked only if these do not have every chunk or after
    /// half of the time; they are not asked if the lookup is a repeated one or is for the hinted peers only.
    ///
    /// A chunk that no peer has is absent only if every asked peer answered. A chunk is expected if the
    /// prompt waits for a connected peer of the hint, unless that peer answers that the request has ended, or
    /// its clears differ.
    ///
    /// # Errors
    /// [`BackendError`] for chunks that a peer may have which did not answer, or which is not asked because
    /// it failed a moment ago.
    pub async fn locate(
        &self,
        keys: &[ChunkKey],
        hint: &LocateHint,
        deadline: Instant,
    ) -> Vec<Result<Located, BackendError>> {
        self.reader.locate(keys, hint, deadline).await
    }

    /// Reads chunks into the slots given, from the peers at which `locate` found them according to the
    /// handles. A chunk that was not located is a miss.
    pub fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'static, Loaded> {
        self.reader.load(items, deadline)
    }

    /// Pushes chunks to the peer with this name, address or name on the channel. Returns false if no such
    /// peer is connected. A daemon pushes nothing to itself.
    pub fn push(&self, run: ChunkRun, to: &str) -> bool {
        self.pusher.push(run, to)
    }

    /// Returns the connected peers with this name, address or name on the channel.
    pub fn peers_named(&self, name: &str) -> Vec<PeerId> {
        self.sessions.peers.lock().named(name)
    }

    /// Orders a peer to read chunks of one prompt from this daemon. The chunks, with key and payload bytes,
    /// must be in prompt order. Returns how many of them the peer then has in memory; fewer if the peer's
    /// limits or this daemon's lease limits do not allow more.
    ///
    /// # Errors
    /// [`CopyError`].
    pub async fn copy_to(
        &self,
        peer: &PeerId,
        chunks: &[(ChunkKey, u64)],
    ) -> Result<u64, CopyError> {
        self.pusher.copy_to(peer, chunks).await
    }

    /// Sets which of the connected peers are configured: those that are asked for every prompt, and the
    /// directories, the first one at the front.
    pub fn set_contacts(&self, named: HashSet<PeerId>, directories: Vec<PeerId>) {
        self.directories.set_contacts(named, directories);
    }

    /// Announces to the directories the chunks that this daemon can lend. Runs until it is dropped.
    pub async fn announce_chunks(self: Arc<Self>, seed: u64) {
        self.directories.announce_chunks(seed).await;
    }

    /// Ends leases when they expire. Runs until it is dropped.
    pub async fn expire_leases(&self) {
        self.owner.expire_leases().await;
    }

    /// Pushes the waiting chunks. Runs until it is dropped.
    pub async fn push_waiting(&self) {
        self.pusher.push_waiting().await;
    }

    /// Exchanges clears with the connected peers that are not known to have carried out the same clears,
    /// except those for which an exchange failed a moment ago.
    pub async fn exchange_clears(&self, deadline: Instant) {
        self.exchange.exchange_clears(deadline).await;
    }

    /// Exchanges clears with peers at another digest, and sends another hello to peers without one: from time
    /// to time, and as soon as a message shows the need. Also asks peers for descriptions, and reports new
    /// spaces and a drain to them. Runs until it is dropped.
    pub async fn stay_in_step(&self) {
        tokio::join!(self.exchange.stay_in_step(), self.exchange.tell_of_host());
    }

    /// Returns the state of this daemon and its peers.
    pub fn status(&self) -> NodeStatus {
        NodeStatus::of(&self.sessions, &self.owner, &self.directories)
    }

    /// Returns the sums of all peers' counters.
    pub fn counters(&self) -> PeerCounters {
        let mut counters = self.sessions.peers.lock().counters();
        counters.push_dropped += self.pusher.dropped();
        counters
    }

    /// Returns the number of leases that peers have here, and their bytes.
    pub fn leased(&self) -> (usize, u64) {
        self.owner.leased()
    }
}

impl<L: Link> fmt::Debug for Node<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").finish_non_exhaustive()
    }
}
