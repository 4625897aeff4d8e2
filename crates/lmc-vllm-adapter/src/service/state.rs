//! What the service remembers between requests.

use std::collections::HashMap;
use std::time::Instant;

use lmc_engine::{Leases, OwnerId, WriteTicket};
use lmc_key::{ChunkHash, LayoutFingerprint, SpaceId};

use crate::service::ClientId;
use crate::service::instance::Instance;
use crate::service::session::Session;

/// A transfer of one worker: its range of one request, with what the range holds.
///
/// An engine may use a request's name again, for other tokens or another tenant, before it has
/// committed the first; the two must not be taken for one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TransferKey {
    pub(crate) instance_id: u64,
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
}

/// A prepared transfer.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) client: ClientId,
    pub(crate) since: Instant,
    pub(crate) pending: Pending,
}

/// Which layout the engine behind a scheduler's connection has, as far as its requests showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Binding {
    One(LayoutFingerprint),
    /// Requests of this connection were served by workers of several layouts.
    Several,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) instances: HashMap<u64, Instance>,
    pub(crate) sessions: HashMap<String, Session>,
    pub(crate) transfers: HashMap<(TransferKey, Direction), Transfer>,
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

    /// The layouts that workers of this model have, each once. A worker whose connection ended
    /// counts only when no other does: the engine behind it is most likely dead, and what it
    /// lacked or had says nothing about the living.
    pub(crate) fn layouts(&self, model: &str, world_size: u32) -> Vec<&Instance> {
        let of_model = |i: &&Instance| i.model.as_str() == model && i.world_size == world_size;
        let (orphaned, connected): (Vec<_>, Vec<_>) = self
            .instances
            .values()
            .filter(of_model)
            .partition(|instance| instance.orphaned.is_some());
        let candidates = if connected.is_empty() {
            orphaned
        } else {
            connected
        };
        let mut found: Vec<&Instance> = Vec::new();
        for instance in candidates {
            if found
                .iter()
                .all(|known| known.fingerprint != instance.fingerprint)
            {
                found.push(instance);
            }
        }
        found
    }

    /// Learns from a worker's transfer which layout the request's scheduler stands for.
    pub(crate) fn bind(&mut self, request_id: &str, fingerprint: LayoutFingerprint) {
        let Some(session) = self.sessions.get(request_id) else {
            return;
        };
        let binding = self
            .bindings
            .entry(session.client)
            .or_insert(Binding::One(fingerprint));
        if *binding != Binding::One(fingerprint) {
            *binding = Binding::Several;
        }
    }

    /// Transfers of one worker.
    pub(crate) fn transfers_of(&self, instance_id: u64) -> usize {
        self.transfers
            .keys()
            .filter(|(key, _)| key.instance_id == instance_id)
            .count()
    }
}
