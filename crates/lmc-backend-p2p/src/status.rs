//! State of this daemon and its peers, for an operator and for programs.

use std::collections::BTreeMap;

use lmc_backend::now;
use serde::Serialize;

use crate::directory::{DirectoryClient, DirectoryUse};
use crate::link::Link;
use crate::message::SpaceNote;
use crate::owner::Owner;
use crate::peers::{ConnectedPeer, Failure, GonePeer};
use crate::session::Sessions;
use crate::spaces::{Mismatch, hex, mismatches};

/// State of a [`P2pBackend`](crate::P2pBackend) and of every peer that it knows.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PeersStatus {
    /// Name of this daemon on the channel; it differs at each start.
    pub id: String,
    /// State of the node.
    #[serde(flatten)]
    pub node: NodeStatus,
    /// The configured peers, each once for each of its addresses.
    pub named: Vec<NamedPeer>,
}

/// A configured peer, at one of its addresses.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct NamedPeer {
    /// Configured name with its port.
    pub name: String,
    /// Resolved address of this entry; none if the name is not resolved.
    pub address: Option<String>,
    /// Name of the peer on the channel; none while it is not connected.
    pub id: Option<String>,
    /// True if the address is this daemon's own, which is ignored.
    pub itself: bool,
    /// Reason why the name is not resolved, or the peer is not connected.
    pub failure: Option<Failure>,
}

impl NamedPeer {
    /// Returns the name, followed by the address if it differs.
    pub(crate) fn describe(&self) -> String {
        match &self.address {
            Some(address) if *address != self.name => format!("{} ({address})", self.name),
            _ => self.name.clone(),
        }
    }
}

/// State of a [`Node`](crate::Node).
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct NodeStatus {
    /// Name of this daemon, for an operator.
    pub name: String,
    /// Address that peers connect to.
    pub address: String,
    /// Oldest and newest protocol version that this daemon speaks.
    pub versions: (u16, u16),
    /// Number of tokens in a chunk.
    pub chunk_size: u32,
    /// Name of the algorithm of prefix hashes.
    pub algorithm: String,
    /// Leases that peers have here.
    pub leases: usize,
    /// Payload bytes leased to peers.
    pub leased_bytes: u64,
    /// Payload bytes that may be leased to all peers together.
    pub leasable_bytes: u64,
    /// This daemon's live spaces.
    pub spaces: Vec<SpaceView>,
    /// The connected peers.
    pub peers: Vec<PeerStatus>,
    /// Peers that disconnected and did not return, the latest first.
    pub gone: Vec<GonePeer>,
    /// Counters of all peers since this daemon's start.
    pub counters: BTreeMap<&'static str, u64>,
}

/// A space, with digests in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct SpaceView {
    /// The space's id.
    pub id: String,
    /// Name under which the engine serves its model.
    pub model: String,
    /// Number of KV ranks that together hold a chunk.
    pub world_size: u32,
    /// Element type.
    pub dtype: String,
    /// Fingerprint of the chunks' layout.
    pub layout: String,
    /// Text that the operator added to the identity.
    pub identity: String,
    /// Digest of the tenant's salt under the shared key; none without a salt or without a key.
    pub salt: Option<String>,
}

impl From<&SpaceNote> for SpaceView {
    fn from(note: &SpaceNote) -> Self {
        Self {
            id: hex(&note.space),
            model: note.model.clone(),
            world_size: note.world_size,
            dtype: note.dtype.clone(),
            layout: hex(&note.layout),
            identity: note.identity.clone(),
            salt: (note.salt != [0; 16]).then(|| hex(&note.salt)),
        }
    }
}

/// Content of a peer's memory, as the peer described it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Holding {
    /// Chunks in memory.
    pub chunks: u64,
    /// Payload bytes of the chunks in memory.
    pub bytes: u64,
    /// Bytes of the memory for chunks.
    pub pool: u64,
}

/// State of one connected peer. Texts are as the peer sent them: escape them before display.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct PeerStatus {
    /// Name on the channel; it differs at each start of the peer.
    pub id: String,
    /// Name for an operator; none before the hello.
    pub name: Option<String>,
    /// Address at which the peer listens; none before the hello.
    pub address: Option<String>,
    /// Protocol version that both sides use; none while no hello is accepted and the peer is not used.
    pub version: Option<u16>,
    /// True while the peer is drained: it accepts no chunks, and is to be stopped.
    pub draining: bool,
    /// Seconds since the connect.
    pub connected_seconds: f64,
    /// Plane that currently moves the bytes of reads from the peer: `sockets` or `nixl`.
    pub transport: &'static str,
    /// Last failure since the connect.
    pub last_failure: Option<Failure>,
    /// Seconds for which the peer is not asked because of failures.
    pub paused_seconds: Option<f64>,
    /// Measured time from a request to its answer; none before the first answer.
    pub round_trip_seconds: Option<f64>,
    /// Measured read rate; none before the first read.
    pub read_bytes_per_second: Option<f64>,
    /// Fraction of its lease limit that the peer had leased when it last sent this, 0 to 1.
    pub load: f64,
    /// Content of the peer's memory; none if the peer has not described it.
    pub holds: Option<Holding>,
    /// Use of the peer as a directory; none if the peer is not a directory.
    pub directory: Option<DirectoryUse>,
    /// Leases that the peer has here.
    pub leases: usize,
    /// Payload bytes leased to the peer here.
    pub leased_bytes: u64,
    /// The peer's live spaces.
    pub spaces: Vec<SpaceView>,
    /// Models that both sides serve without a common space, and of which this side merges no chunks either.
    pub mismatches: Vec<Mismatch>,
    /// Counters of the peer since the connect.
    pub counters: BTreeMap<&'static str, u64>,
}

impl NodeStatus {
    pub(crate) fn of<L: Link>(
        sessions: &Sessions<L>,
        owner: &Owner<L>,
        directories: &DirectoryClient<L>,
    ) -> Self {
        let config = &sessions.config;
        let own = sessions.spaces.notes().spaces;
        let merged = sessions.spaces.merged(&sessions.peers);
        let (leases, leased_bytes) = owner.leased();
        let (leased, uses) = (owner.leased_by_session(), directories.uses());
        let peers = sessions.peers.lock();
        let status = |peer: &ConnectedPeer| {
            let (id, hello) = (&peer.session.peer, peer.hello.as_ref());
            let (oldest, newest) = config.versions;
            let (leases, leased_bytes) = leased.get(&peer.session).copied().unwrap_or_default();
            let its_use = || uses.get(id).copied().unwrap_or_default();
            let holds = Holding {
                chunks: peer.holds.chunks,
                bytes: peer.holds.bytes,
                pool: peer.holds.pool,
            };
            PeerStatus {
                id: id.to_string(),
                name: hello.map(|hello| hello.name.clone()),
                address: hello.map(|hello| hello.address.clone()),
                version: hello.and_then(|hello| hello.common_version(oldest, newest)),
                draining: peer.is_draining(),
                connected_seconds: (now().saturating_duration_since(peer.since)).as_secs_f64(),
                transport: sessions.link.data_plane(id).name(),
                last_failure: peer.last_failure.clone(),
                paused_seconds: peer.paused(now()).map(|pause| pause.as_secs_f64()),
                round_trip_seconds: peer.round_trip(),
                read_bytes_per_second: peer.read_rate(),
                load: f64::from(peer.load) / 255.0,
                holds: (peer.holds.pool != 0).then_some(holds),
                directory: peer.is_directory().then(its_use),
                leases,
                leased_bytes,
                spaces: peer.holds.spaces.iter().map(SpaceView::from).collect(),
                mismatches: mismatches(&own, &peer.holds.spaces, &merged),
                counters: peer.counters.by_name(),
            }
        };
        let mut connected: Vec<PeerStatus> = peers.iter().map(status).collect();
        connected.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
        Self {
            name: config.name.clone(),
            address: config.address.clone(),
            versions: config.versions,
            chunk_size: config.chunk_size,
            algorithm: config.algorithm.clone(),
            leases,
            leased_bytes,
            leasable_bytes: config.limits.bytes,
            spaces: own.iter().map(SpaceView::from).collect(),
            peers: connected,
            gone: peers.gone().cloned().collect(),
            counters: peers.counters().by_name(),
        }
    }
}
