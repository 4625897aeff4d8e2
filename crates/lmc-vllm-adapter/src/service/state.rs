//! What the service remembers between requests.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use lmc_engine::{Leases, MarkId, OwnerId, WriteTicket};
use lmc_key::{ChunkHash, LayoutFingerprint, SpaceId};

use crate::service::ClientId;
use crate::service::instance::Instance;
use crate::service::peer::{Life, Peer, Witness};
use crate::service::session::Sessions;

/// A transfer of one worker: its range of one request, with what the range holds.
///
/// An engine may use a request's name again, for other tokens or another tenant, before it has
/// committed the first; the two must not be taken for one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TransferKey {
    pub(crate) request_id: String,
    pub(crate) model_name: String,
    pub(crate) cache_salt: String,
    pub(crate) worker_id: Option<u32>,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Hash of the range's last chunk, which stands for all tokens up to its end.
    pub(crate) tail: Option<ChunkHash>,
}

/// A chunk that a worker is writing.
#[derive(Debug)]
pub(crate) struct PendingChunk {
    /// Position in the range.
    pub(crate) index: usize,
    pub(crate) hash: ChunkHash,
    pub(crate) parent: Option<ChunkHash>,
    pub(crate) ticket: WriteTicket,
}

/// Slots that a worker is copying into or out of. Dropping it gives them back, so it is
/// dropped only when the worker is known to be done with them.
#[derive(Debug)]
pub(crate) enum Pending {
    Store {
        space: SpaceId,
        chunks: Vec<PendingChunk>,
    },
    Retrieve {
        space: SpaceId,
        kv_rank: u16,
        first_chunk: usize,
        leases: Leases,
    },
}

impl Pending {
    /// The space that its chunks belong to.
    pub(crate) fn space(&self) -> SpaceId {
        match self {
            Self::Store { space, .. } | Self::Retrieve { space, .. } => *space,
        }
    }

    /// Slots that its worker may be copying into or out of.
    pub(crate) fn slots(&self) -> usize {
        match self {
            Self::Store { chunks, .. } => chunks.len(),
            Self::Retrieve { leases, .. } => leases.len(),
        }
    }
}

/// A prepared transfer.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// Connection that prepared it, and that alone may commit it while it is open.
    pub(crate) client: ClientId,
    pub(crate) since: Instant,
    pub(crate) pending: Pending,
    /// Whether the connection has ended: any may commit it.
    pub(crate) orphaned: bool,
    /// Whether others may write its chunks.
    shared: bool,
}

impl Transfer {
    pub(crate) fn new(client: ClientId, since: Instant, pending: Pending) -> Self {
        Self {
            client,
            since,
            pending,
            orphaned: false,
            shared: false,
        }
    }

    /// Whether a request on this connection may commit it or ask for its slots again.
    pub(crate) fn belongs_to(&self, client: ClientId) -> bool {
        self.client == client || self.orphaned
    }

    /// Notes that others may write its chunks. Their marks, the first time.
    #[must_use = "the marks are to be shared where nothing is locked"]
    pub(crate) fn share(&mut self) -> Vec<MarkId> {
        match &self.pending {
            Pending::Store { chunks, .. } if !self.shared => {
                self.shared = true;
                chunks.iter().map(|chunk| chunk.ticket.mark()).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Which layout the engine behind a scheduler's connection has, as far as its requests showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    One(LayoutFingerprint),
    /// Requests of this connection were served by workers of several layouts.
    Several,
}

/// A connection that is open, or that has ended and whose slots are still held.
#[derive(Debug, Default)]
pub(crate) struct Connection {
    pub(crate) peer: Peer,
    pub(crate) witness: Option<Arc<dyn Witness>>,
    pub(crate) ended: Option<Ended>,
}

/// The end of a connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ended {
    at: Instant,
    /// When the grace time began: at the end, or when its process was last seen stopped.
    pub(crate) grace_from: Instant,
    /// Last answer of the connection's witness.
    pub(crate) life: Option<Life>,
}

impl Ended {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            at: now,
            grace_from: now,
            life: None,
        }
    }

    pub(crate) fn seconds(&self, now: Instant) -> f64 {
        now.saturating_duration_since(self.at).as_secs_f64()
    }
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) connections: HashMap<ClientId, Connection>,
    pub(crate) instances: HashMap<u64, Instance>,
    pub(crate) sessions: Sessions,
    /// Of each worker, also of one that is not registered any more. None is empty.
    pub(crate) transfers: HashMap<u64, HashMap<(TransferKey, Direction), Transfer>>,
    pub(crate) bindings: HashMap<ClientId, Binding>,
    /// Workers whose first sign of life after a loss was answered with "no", so that they
    /// register again.
    pub(crate) told_to_register: HashMap<u64, Instant>,
    next_owner: u64,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Store,
    Retrieve,
}

impl State {
    /// A number that no other session or worker has or had.
    pub(crate) fn new_owner(&mut self) -> OwnerId {
        self.next_owner += 1;
        OwnerId(self.next_owner)
    }

    /// The layouts that workers of this model have, each once. One whose workers' connections all
    /// ended counts only when there is no other: the engine behind it is most likely dead, and
    /// what it lacked or had says nothing about the living.
    pub(crate) fn layouts(&self, model: &str, world_size: u32) -> Vec<LayoutOf<'_>> {
        let of_model = |i: &&Instance| i.model.as_str() == model && i.world_size == world_size;
        let mut found: Vec<LayoutOf<'_>> = Vec::new();
        let mut places: HashMap<LayoutFingerprint, usize> = HashMap::new();
        for instance in self.instances.values().filter(of_model) {
            let place = *places.entry(instance.fingerprint).or_insert(found.len());
            if place == found.len() {
                found.push(LayoutOf::new(instance));
            }
            found[place].add(instance);
        }
        if found.iter().any(|layout| layout.connected) {
            found.retain(|layout| layout.connected);
        }
        found
    }

    /// Learns from a worker's transfer which layout the request's scheduler stands for.
    pub(crate) fn bind(
        &mut self,
        client: ClientId,
        request_id: &str,
        fingerprint: LayoutFingerprint,
    ) {
        let named = self.sessions.named(request_id);
        let scheduler = match named {
            // Of several requests under one name that of the worker's own connection is meant,
            // where the worker is the scheduler too; else it is not known which.
            [_, _, ..] => named.iter().find(|session| session.client == client),
            _ => named.first(),
        };
        let Some(scheduler) = scheduler else {
            return;
        };
        let binding = self
            .bindings
            .entry(scheduler.client)
            .or_insert(Binding::One(fingerprint));
        if *binding != Binding::One(fingerprint) {
            // A layout without workers is that of an engine before its restart.
            let is_registered = |bound| {
                let mut registered = self.instances.values();
                registered.any(|instance| instance.fingerprint == bound)
            };
            *binding = match *binding {
                Binding::One(bound) if !is_registered(bound) => Binding::One(fingerprint),
                _ => Binding::Several,
            };
        }
    }

    /// Processes that are known to be behind a connection.
    pub(crate) fn pids_of(&self, client: ClientId) -> Vec<u32> {
        let connection = self.connections.get(&client);
        let witness = connection.and_then(|connection| connection.witness.as_ref());
        witness.map(|witness| witness.pids()).unwrap_or_default()
    }

    /// Transfers of one worker.
    pub(crate) fn transfers_of(&self, instance_id: u64) -> usize {
        self.transfers.get(&instance_id).map_or(0, HashMap::len)
    }

    /// All prepared transfers.
    pub(crate) fn transfers_mut(&mut self) -> impl Iterator<Item = &mut Transfer> {
        self.transfers.values_mut().flat_map(HashMap::values_mut)
    }

    /// Ended connections that hold slots.
    pub(crate) fn orphans(&self) -> HashSet<ClientId> {
        let transfers = self.transfers.values().flat_map(HashMap::values);
        let orphaned = transfers.filter(|transfer| transfer.orphaned);
        orphaned.map(|transfer| transfer.client).collect()
    }

    /// Takes the transfers that a condition picks.
    pub(crate) fn take_transfers(
        &mut self,
        mut pick: impl FnMut(&Transfer) -> bool,
    ) -> Vec<Transfer> {
        let mut taken = Vec::new();
        self.transfers.retain(|_, transfers| {
            let picked = transfers.extract_if(|_, transfer| pick(transfer));
            taken.extend(picked.map(|(_, transfer)| transfer));
            !transfers.is_empty()
        });
        taken
    }

    /// Takes one transfer.
    pub(crate) fn take_transfer(
        &mut self,
        instance_id: u64,
        id: &(TransferKey, Direction),
    ) -> Option<Transfer> {
        let transfers = self.transfers.get_mut(&instance_id)?;
        let taken = transfers.remove(id);
        if transfers.is_empty() {
            self.transfers.remove(&instance_id);
        }
        taken
    }
}

/// A layout, with what is known of the workers that have it.
#[derive(Debug)]
pub(crate) struct LayoutOf<'a> {
    /// One of them.
    pub(crate) instance: &'a Instance,
    /// Ranks that they are known to be of.
    pub(crate) ranks: RankSet,
    /// Whether one of them has yet to show its rank.
    pub(crate) unknown_rank: bool,
    /// Whether one of them is connected.
    connected: bool,
}

impl<'a> LayoutOf<'a> {
    fn new(instance: &'a Instance) -> Self {
        Self {
            instance,
            ranks: RankSet::default(),
            unknown_rank: false,
            connected: false,
        }
    }

    fn add(&mut self, worker: &Instance) {
        for &rank in &worker.ranks {
            self.ranks.insert(rank);
        }
        self.unknown_rank |= worker.ranks.is_empty();
        self.connected |= worker.orphaned.is_none();
    }
}

/// A set of KV ranks.
#[derive(Debug, Clone, Default)]
pub(crate) struct RankSet(Vec<u64>);

impl RankSet {
    fn insert(&mut self, rank: u16) {
        let word = usize::from(rank / 64);
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        self.0[word] |= 1 << (rank % 64);
    }

    /// Adds the ranks of another set.
    pub(crate) fn add(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (word, other) in self.0.iter_mut().zip(&other.0) {
            *word |= other;
        }
    }

    pub(crate) fn has(&self, rank: u16) -> bool {
        let word = self.0.get(usize::from(rank / 64));
        word.is_some_and(|word| word & 1 << (rank % 64) != 0)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }
}
