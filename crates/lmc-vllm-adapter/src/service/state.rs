//! What the service remembers between requests.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use lmc_engine::OwnerId;
use lmc_key::LayoutFingerprint;

use crate::service::ClientId;
use crate::service::instance::Instance;
use crate::service::peer::{Life, Peer, Witness};
use crate::service::prepared::{Transfer, Transfers};
use crate::service::session::Sessions;

/// The layout of the engine behind a scheduler's connection, as far as its requests showed.
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
    /// Start of the grace time: the end of the connection, or when its process was last seen
    /// stopped.
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
    pub(crate) transfers: Transfers,
    pub(crate) bindings: HashMap<ClientId, Binding>,
    /// Workers whose first sign of life after a loss was answered with "no", so that they
    /// register again.
    pub(crate) told_to_register: HashMap<u64, Instant>,
    next_owner: u64,
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

    /// Returns true for the connection that prepared a transfer. Once that has ended, for every
    /// other, unless its process is known to be another one.
    pub(crate) fn may_commit(&self, client: ClientId, transfer: &Transfer) -> bool {
        if transfer.client == client {
            return true;
        }
        let (before, now) = (self.pids_of(transfer.client), self.pids_of(client));
        let is_other =
            !before.is_empty() && !now.is_empty() && !before.iter().any(|p| now.contains(p));
        transfer.orphaned && !is_other
    }

    /// Processes that are known to be behind a connection.
    pub(crate) fn pids_of(&self, client: ClientId) -> Vec<u32> {
        let connection = self.connections.get(&client);
        let witness = connection.and_then(|connection| connection.witness.as_ref());
        witness.map(|witness| witness.pids()).unwrap_or_default()
    }
}

/// A layout, with what is known of the workers that have it.
#[derive(Debug)]
pub(crate) struct LayoutOf<'a> {
    /// One of them.
    pub(crate) instance: &'a Instance,
    /// Ranks that they are known to be of.
    pub(crate) ranks: RankSet,
    /// True if the rank of one of them is not known yet.
    pub(crate) unknown_rank: bool,
    /// True if one of them is connected.
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
