//! Transfers that workers have prepared and not yet committed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Instant;

use lmc_engine::{Leases, MarkId, StoreTicket};
use lmc_key::{ChunkHash, SpaceId, TagsId};

use crate::service::ClientId;

/// A transfer of one worker: its range of one request, and what identifies the range's contents.
///
/// An engine may use a request's id again, for other tokens, another tenant or other tags, before
/// it has committed the first transfer; the two must not be confused.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TransferKey {
    pub(crate) request_id: String,
    pub(crate) model_name: String,
    pub(crate) cache_salt: String,
    pub(crate) tags: Option<TagsId>,
    pub(crate) worker_id: Option<u32>,
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Hash of the range's last chunk, which stands for all tokens up to its end.
    pub(crate) tail: Option<ChunkHash>,
}

/// A chunk that a worker is writing.
#[derive(Debug)]
pub(crate) struct PendingChunk {
    /// Index in the range.
    pub(crate) index: usize,
    pub(crate) hash: ChunkHash,
    pub(crate) parent: Option<ChunkHash>,
    pub(crate) ticket: StoreTicket,
}

/// Slots that a worker is copying into or out of. Dropping it releases them, so it is dropped only
/// when the worker is known to be done with them.
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
    /// Returns the space that the transfer's chunks belong to.
    pub(crate) fn space(&self) -> SpaceId {
        match self {
            Self::Store { space, .. } | Self::Retrieve { space, .. } => *space,
        }
    }

    /// Returns the number of slots that the worker may be copying into or out of.
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
    /// Connection that prepared the transfer. While it is open, it alone may commit the transfer.
    pub(crate) client: ClientId,
    pub(crate) since: Instant,
    pub(crate) pending: Pending,
    /// Bytes of the pool that the transfer's slots take.
    bytes: u64,
    /// True once the connection has ended: then any connection may commit the transfer.
    pub(crate) orphaned: bool,
    /// True once other workers may write the transfer's chunks.
    shared: bool,
}

impl Transfer {
    /// Returns a transfer. `align` is the alignment of the pool's slots.
    pub(crate) fn new(client: ClientId, since: Instant, pending: Pending, align: u64) -> Self {
        let bytes = match &pending {
            Pending::Store { chunks, .. } => chunks
                .iter()
                .map(|chunk| chunk.ticket.len().next_multiple_of(align))
                .sum(),
            Pending::Retrieve { leases, .. } => leases
                .iter()
                .map(|slot| slot.len().next_multiple_of(align))
                .sum(),
        };
        Self {
            client,
            since,
            pending,
            bytes,
            orphaned: false,
            shared: false,
        }
    }

    /// Lets other workers write its chunks. The first call returns the marks of the chunks.
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

/// Direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Direction {
    Store,
    Retrieve,
}

/// Name of a transfer among its worker's transfers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TransferId {
    pub(crate) key: TransferKey,
    pub(crate) direction: Direction,
    /// Zero while a worker can name the transfer, else a number of its own.
    detached: u64,
}

impl TransferId {
    pub(crate) fn new(key: TransferKey, direction: Direction) -> Self {
        Self {
            key,
            direction,
            detached: 0,
        }
    }
}

/// Transfers of one connection.
#[derive(Debug, Default)]
struct OfClient {
    /// Transfers of each worker. None is zero.
    workers: HashMap<u64, usize>,
    /// Bytes of their slots.
    bytes: u64,
}

/// All prepared transfers.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    /// Transfers of each worker, also of one that is not registered any more. No map is empty.
    by_worker: HashMap<u64, HashMap<TransferId, Transfer>>,
    /// Transfers of each connection. None is empty.
    by_client: HashMap<ClientId, OfClient>,
    /// Bytes of slots that workers may be writing to.
    store_bytes: u64,
    detached: u64,
}

impl Prepared {
    /// Transfers of one worker.
    pub(crate) fn len_of(&self, instance_id: u64) -> usize {
        self.by_worker.get(&instance_id).map_or(0, HashMap::len)
    }

    pub(crate) fn get(&self, instance_id: u64, id: &TransferId) -> Option<&Transfer> {
        self.by_worker.get(&instance_id)?.get(id)
    }

    /// Keeps a transfer, or returns it if its worker has one of this name.
    pub(crate) fn insert(
        &mut self,
        instance_id: u64,
        id: TransferId,
        transfer: Transfer,
    ) -> Result<&Transfer, Transfer> {
        match self.by_worker.entry(instance_id).or_default().entry(id) {
            Entry::Occupied(_) => Err(transfer),
            Entry::Vacant(entry) => {
                let of_client = self.by_client.entry(transfer.client).or_default();
                *of_client.workers.entry(instance_id).or_default() += 1;
                of_client.bytes += transfer.bytes;
                if entry.key().direction == Direction::Store {
                    self.store_bytes += transfer.bytes;
                }
                Ok(entry.insert(transfer))
            }
        }
    }

    /// Removes the name of a transfer whose connection has ended, so that its worker can prepare
    /// the same transfer again on another connection, in other slots: the process behind the first
    /// connection may still be copying.
    pub(crate) fn detach_ended(&mut self, instance_id: u64, id: &TransferId) {
        let Some(of_worker) = self.by_worker.get_mut(&instance_id) else {
            return;
        };
        if of_worker.get(id).is_some_and(|transfer| transfer.orphaned)
            && let Some(transfer) = of_worker.remove(id)
        {
            self.detached += 1;
            let id = TransferId {
                detached: self.detached,
                ..id.clone()
            };
            of_worker.insert(id, transfer);
        }
    }

    /// Takes one transfer.
    pub(crate) fn take(&mut self, instance_id: u64, id: &TransferId) -> Option<Transfer> {
        let transfers = self.by_worker.get_mut(&instance_id)?;
        let taken = transfers.remove(id);
        if transfers.is_empty() {
            self.by_worker.remove(&instance_id);
        }
        if let Some(taken) = &taken {
            self.uncount(instance_id, id.direction, taken);
        }
        taken
    }

    fn uncount(&mut self, instance_id: u64, direction: Direction, taken: &Transfer) {
        let bytes = taken.bytes;
        if direction == Direction::Store {
            self.store_bytes -= bytes;
        }
        let Some(of_client) = self.by_client.get_mut(&taken.client) else {
            return;
        };
        of_client.bytes -= bytes;
        if let Entry::Occupied(mut count) = of_client.workers.entry(instance_id) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        if of_client.workers.is_empty() {
            self.by_client.remove(&taken.client);
        }
    }

    /// Takes the transfers of a connection.
    pub(crate) fn take_of(&mut self, client: ClientId) -> Vec<Transfer> {
        let of_client = self.by_client.remove(&client).unwrap_or_default();
        let mut taken = Vec::new();
        for instance_id in of_client.workers.into_keys() {
            let Some(transfers) = self.by_worker.get_mut(&instance_id) else {
                continue;
            };
            for (id, transfer) in transfers.extract_if(|_, transfer| transfer.client == client) {
                if id.direction == Direction::Store {
                    self.store_bytes -= transfer.bytes;
                }
                taken.push(transfer);
            }
            if transfers.is_empty() {
                self.by_worker.remove(&instance_id);
            }
        }
        taken
    }

    /// Takes the transfers of a worker that match.
    pub(crate) fn take_where(
        &mut self,
        instance_id: u64,
        fits: impl Fn(&Transfer) -> bool,
    ) -> Vec<(Direction, Transfer)> {
        let Some(transfers) = self.by_worker.get_mut(&instance_id) else {
            return Vec::new();
        };
        let taken = transfers.extract_if(|_, transfer| fits(transfer));
        let taken: Vec<(Direction, Transfer)> = taken
            .map(|(id, transfer)| (id.direction, transfer))
            .collect();
        if transfers.is_empty() {
            self.by_worker.remove(&instance_id);
        }
        for (direction, transfer) in &taken {
            self.uncount(instance_id, *direction, transfer);
        }
        taken
    }

    /// Bytes of the slots of a connection's transfers.
    pub(crate) fn bytes_of(&self, client: ClientId) -> u64 {
        self.by_client.get(&client).map_or(0, |of| of.bytes)
    }

    /// Bytes of slots that workers may be writing to.
    pub(crate) fn store_bytes(&self) -> u64 {
        self.store_bytes
    }

    /// Returns true while a connection has transfers.
    pub(crate) fn has(&self, client: ClientId) -> bool {
        self.by_client.contains_key(&client)
    }

    /// The connections that have transfers.
    pub(crate) fn clients(&self) -> impl Iterator<Item = ClientId> {
        self.by_client.keys().copied()
    }

    /// The transfers of a connection.
    pub(crate) fn of_mut(&mut self, client: ClientId) -> impl Iterator<Item = &mut Transfer> {
        let workers = self.by_client.get(&client).map(|of| &of.workers);
        let of_client =
            move |instance_id: &u64| workers.is_some_and(|w| w.contains_key(instance_id));
        let of_workers = self
            .by_worker
            .iter_mut()
            .filter(move |(instance_id, _)| of_client(instance_id));
        of_workers
            .flat_map(|(_, transfers)| transfers.values_mut())
            .filter(move |transfer| transfer.client == client)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Direction, &Transfer)> {
        let all = self.by_worker.values().flatten();
        all.map(|(id, transfer)| (id.direction, transfer))
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Transfer> {
        self.by_worker.values_mut().flat_map(HashMap::values_mut)
    }
}
