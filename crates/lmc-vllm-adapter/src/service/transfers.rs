//! Transfers of workers: the slots that they prepare, copy into or out of, and commit.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use lmc_engine::{Inserted, Leases, OwnerId, StoreRequest, StoreStart, TenantId};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, LayoutFingerprint, ModelName, SpaceId};
use parking_lot::Mutex;

use crate::protocol::{CacheKey, Reply, SlotDescriptor};
use crate::service::ClientId;
use crate::service::connections::Connections;
use crate::service::context::{Context, Hashed, refuse};
use crate::service::events::StoredChunk;
use crate::service::gate::Entrance;
use crate::service::instance::{Instance, Transport};
use crate::service::lookups::Lookups;
use crate::service::opened::ServerCopies;
use crate::service::prepared::{
    Direction, Pending, PendingChunk, Prepared, Transfer, TransferId, TransferKey,
};
use crate::service::registry::Registry;
use crate::service::share::Held;
use crate::service::spans::{Copied, SpanStep};
use crate::service::stats::add;

/// KV ranks of one worker that are remembered. An engine's worker has one.
const MAX_RANKS_OF_A_WORKER: usize = 16;

/// Properties of a worker that its transfers need.
pub(super) struct Worker {
    pub(super) owner: OwnerId,
    pub(super) space: SpaceId,
    pub(super) model: ModelName,
    /// Layout in the keys of the worker's chunks.
    pub(super) layout: LayoutFingerprint,
    pub(super) kv_rank: u16,
    /// Clears after which the request's computed chunks are stored; `None` if the request's begin
    /// is not known.
    pub(super) stores_after: Option<ClearsId>,
    /// Clears after which the request's found chunks are read.
    pub(super) reads_after: ClearsId,
    /// True if the space belongs to a generation, which ends with its workers.
    pub(super) is_opaque: bool,
    pub(super) chunk_bytes: u64,
    pub(super) shape: Vec<u64>,
    pub(super) dtype: &'static str,
    pub(super) copies: Option<Arc<ServerCopies>>,
    pub(super) entrance: Entrance,
}

/// Reason for refusing a transfer.
pub(super) enum Declined {
    /// The worker is not registered on its connection (it may have outlived the server), or may
    /// have given up waiting: not an error.
    NotServed,
    /// The request is wrong.
    Refused(Reply),
}

fn transfer_key(key: &CacheKey, hashed: &Hashed) -> TransferKey {
    TransferKey {
        request_id: key.request_id.clone(),
        model_name: key.model_name.clone(),
        cache_salt: key.cache_salt.clone(),
        tags: key.configs.tags,
        worker_id: key.worker_id,
        start: key.start,
        end: key.end,
        tail: hashed.parent(hashed.chunks.end),
    }
}

/// The transfers that workers have prepared, and the slots that outlive their connections.
#[derive(Debug)]
pub(super) struct Transfers {
    pub(super) context: Arc<Context>,
    pub(super) connections: Arc<Connections>,
    registry: Arc<Registry>,
    lookups: Arc<Lookups>,
    pub(super) prepared: Mutex<Prepared>,
    /// Locked by the thread that checks the processes behind ended connections.
    pub(super) looking: Mutex<()>,
}

impl Transfers {
    pub(super) fn new(
        context: Arc<Context>,
        connections: Arc<Connections>,
        registry: Arc<Registry>,
        lookups: Arc<Lookups>,
    ) -> Self {
        Self {
            context,
            connections,
            registry,
            lookups,
            prepared: Mutex::default(),
            looking: Mutex::default(),
        }
    }

    /// Finds the worker of a transfer and hashes its range.
    pub(super) fn worker(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Result<(Worker, Hashed), Declined> {
        let Some(worker_id) = key.worker_id else {
            return Err(Declined::Refused(refuse("worker_id is required")));
        };
        if !self.context.pulse.is_steady(now) {
            add(&self.context.stats.service.copies_too_late, 1);
            return Err(Declined::NotServed);
        }
        let hashed = self.context.hash(key).map_err(Declined::Refused)?;
        let served = self.registry.with(instance_id, |instance| {
            if instance.model.as_str() != key.model_name || instance.world_size != key.world_size {
                return Err(Declined::Refused(refuse(&format!(
                    "worker {instance_id} registered model {} with world size {}, \
                     the request names {} with {}",
                    instance.model, instance.world_size, key.model_name, key.world_size
                ))));
            }
            if (instance.identity, instance.unit) != (key.identity, key.unit) {
                return Err(Declined::Refused(refuse(&format!(
                    "worker {instance_id} registered another identity, or chunks of another size, \
                     than the request names"
                ))));
            }
            if !instance.belongs_to(client) {
                return Err(Declined::NotServed);
            }
            instance.seen(client, now);
            let rank = worker_id as u16;
            let is_opaque = instance.opaque.is_some();
            let is_new =
                instance.ranks.len() < MAX_RANKS_OF_A_WORKER && instance.ranks.insert(rank);
            let shows_rank = is_new && is_opaque && key.num_kv_readers > 0;
            let fingerprint = instance.fingerprint;
            let worker = Worker {
                owner: instance.owner,
                space: instance.space(&self.context, &hashed.salt, key.configs.tags),
                model: instance.model.clone(),
                layout: fingerprint,
                kv_rank: rank,
                stores_after: None,
                reads_after: ClearsId::NONE,
                is_opaque,
                chunk_bytes: instance.chunk_bytes,
                shape: instance.shape.clone(),
                dtype: instance.dtype.name(),
                copies: match &instance.transport {
                    Transport::EngineDriven => None,
                    Transport::ServerDriven(copies) => Some(Arc::clone(copies)),
                },
                entrance: instance.gate.entrance(),
            };
            Ok((worker, fingerprint, rank, shows_rank))
        });
        let (mut worker, fingerprint, rank, shows_rank) =
            served.unwrap_or(Err(Declined::NotServed))?;
        let registry = &self.registry;
        // A scheduler drives the layout of its whole chunks.
        let bind = |scheduler| {
            if key.unit.is_none() {
                registry.bind(scheduler, fingerprint);
            }
        };
        let now_cleared = self.context.engine.clears_id();
        let followed = self.lookups.served(client, &key.request_id, now, bind);
        worker.reads_after = followed.reads.unwrap_or(now_cleared);
        let is_new = || self.may_be_new(followed.knows_all, now);
        worker.stores_after = followed.stores.or_else(|| is_new().then_some(now_cleared));
        if shows_rank {
            registry.check_rank(instance_id, rank, key.num_kv_readers);
        }
        Ok((worker, hashed))
    }

    /// Returns true if a request that was not looked up here has begun after the last clear. A
    /// request may be older, and may have been looked up at an earlier server. So the answer is
    /// false for one session lifetime after a clear or a start, unless the request's connection was
    /// the only one since before the first clear: then no other connection has looked the request
    /// up.
    fn may_be_new(&self, knows_all: bool, now: Instant) -> bool {
        let context = &self.context;
        let clears = context.engine.clear_log();
        let Some((first_clear, last_clear)) = clears.first_clear().zip(clears.last_clear()) else {
            return true;
        };
        let is_over = now.saturating_duration_since(last_clear) >= context.config.session_ttl;
        let alone_since = self.connections.alone_since();
        is_over || (knows_all && alone_since.is_some_and(|since| since < first_clear))
    }

    /// Reserves slots for at most `most` chunks of a range that are neither stored nor being
    /// written.
    pub(super) fn reserve(
        &self,
        worker: &Worker,
        hashed: &Hashed,
        wanted: impl Fn(usize) -> bool,
        most: usize,
    ) -> Vec<PendingChunk> {
        let context = &self.context;
        let counters = &context.stats.service;
        let tenant = context.spaces.tenant(&hashed.salt, &context.engine);
        context.spaces.name(worker.space, worker.model.as_str());
        context.spaces.set_naming(worker.space, hashed.naming);
        if worker.is_opaque {
            context.spaces.set_generation(worker.space, worker.layout);
        }
        let requests = self.write_requests(worker, hashed, tenant, wanted);
        let indices: Vec<usize> = requests.iter().map(|(index, _)| *index).collect();
        let requests: Vec<StoreRequest> =
            requests.into_iter().map(|(_, request)| request).collect();
        let mut chunks = Vec::with_capacity(requests.len().min(most));
        let mut asked = 0;
        // Runs once, unless stored chunks left some of the share unused.
        while asked < requests.len() && chunks.len() < most {
            let left = most - chunks.len();
            let end = requests.len().min(asked.saturating_add(left));
            let requests = &requests[asked..end];
            let reservations = match worker.stores_after {
                Some(clears) => context.engine.store(worker.owner, clears, requests),
                None => requests.iter().map(|_| StoreStart::Cleared).collect(),
            };
            for (&index, reservation) in indices[asked..end].iter().zip(reservations) {
                let chunk = hashed.chunks.start + index;
                match reservation {
                    StoreStart::Reserved(ticket) => chunks.push(PendingChunk {
                        index,
                        hash: hashed.hash(chunk),
                        parent: hashed.parent(chunk),
                        ticket,
                    }),
                    StoreStart::Present | StoreStart::Busy => add(&counters.chunks_present, 1),
                    StoreStart::NoMemory => add(&counters.chunks_no_room, 1),
                    StoreStart::Cleared => add(&counters.chunks_outdated, 1),
                    StoreStart::Draining => add(&counters.chunks_drained, 1),
                }
            }
            asked = end;
        }
        if asked < requests.len() {
            add(&counters.over_limit, 1);
            add(&counters.chunks_no_room, (requests.len() - asked) as u64);
        }
        chunks
    }

    fn write_requests(
        &self,
        worker: &Worker,
        hashed: &Hashed,
        tenant: TenantId,
        wanted: impl Fn(usize) -> bool,
    ) -> Vec<(usize, StoreRequest)> {
        let keys = hashed.keys(worker.space, worker.kv_rank);
        let request = |(index, key): (usize, ChunkKey)| {
            let parent = hashed.parent(hashed.chunks.start + index);
            let parent = parent.map(|hash| ChunkKey { hash, ..key });
            (
                index,
                StoreRequest {
                    key,
                    parent,
                    tenant,
                    len: worker.chunk_bytes,
                },
            )
        };
        let wanted = |(index, _): &(usize, ChunkKey)| wanted(*index);
        keys.into_iter()
            .enumerate()
            .filter(wanted)
            .map(request)
            .collect()
    }

    /// Pushes the chunks of a range that are stored already.
    pub(super) fn push_present(&self, key: &CacheKey, worker: &Worker, hashed: &Hashed) {
        self.context.push(&key.configs.push_to, || {
            let keys = hashed.keys(worker.space, worker.kv_rank).into_iter();
            let parents = hashed.chunks.clone().map(|chunk| hashed.parent(chunk));
            keys.zip(parents)
        });
    }

    /// Makes written chunks findable and announces them. Chunks of another size than the server's
    /// are not announced, since subscribers do not know them. `begun` is the time of the worker's
    /// request.
    pub(super) fn commit(
        &self,
        space: SpaceId,
        key: &CacheKey,
        chunks: Vec<PendingChunk>,
        begun: Instant,
    ) {
        let context = &self.context;
        let counters = &context.stats.service;
        let (mut tickets, mut events) = (Vec::new(), Vec::new());
        let to = &key.configs.push_to;
        let mut stored = Vec::new();
        let mut bytes = 0;
        for chunk in chunks {
            bytes += chunk.ticket.len();
            if !to.is_empty() {
                let named = chunk.ticket.key();
                stored.push((ChunkKey { space, ..named }, chunk.parent));
            }
            if key.unit.is_none() {
                events.push(StoredChunk {
                    hash: chunk.hash,
                    parent: chunk.parent,
                    tokens: self.context.chunk_tokens(key, chunk.index),
                });
            }
            tickets.push(chunk.ticket);
        }
        add(&counters.stored_chunks, tickets.len() as u64);
        add(&counters.stored_bytes, bytes);
        let model = context.spaces.name(space, &key.model_name);
        let hashes: Vec<ChunkHash> = events.iter().map(|event| event.hash).collect();
        // Announced first, so that no removal is reported before the chunk.
        context.events.stored(&model, events);
        let count = tickets.len();
        let inserted = context.engine.commit(tickets);
        let copied = Copied::new(key, count, bytes);
        context.add_copy(key, begun.elapsed(), SpanStep::Store(copied));
        context.push(to, || stored);
        for (hash, inserted) in hashes.into_iter().zip(inserted) {
            if inserted == Inserted::Cleared {
                context.events.removed(&model, hash);
            }
        }
    }

    pub(super) fn prepare_store(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let counters = &self.context.stats.service;
        let nothing = Reply::StoreSlots {
            slots: Vec::new(),
            chunk_indices: Vec::new(),
        };
        if key.configs.skip_save {
            add(&counters.stores_skipped, 1);
            return nothing;
        }
        let (worker, hashed) = match self.worker(client, key, instance_id, now) {
            Ok(found) => found,
            // "Nothing to write": the worker goes on, and nothing was promised.
            Err(Declined::NotServed) => {
                self.context.store_failed(key, now);
                return nothing;
            }
            Err(Declined::Refused(reply)) => return reply,
        };
        let id = TransferId::new(transfer_key(key, &hashed), Direction::Store);
        if let Some(asked_before) = self.held(instance_id, &id, client, &worker) {
            return asked_before.unwrap_or_else(|| {
                self.context.store_failed(key, now);
                nothing
            });
        }
        let most = self.writable(client, worker.chunk_bytes, hashed.chunks.len());
        let chunks = self.reserve(&worker, &hashed, |_| true, most);
        self.push_present(key, &worker, &hashed);
        if chunks.is_empty() {
            return nothing;
        }
        let space = worker.space;
        let transfer = self.transfer(client, now, Pending::Store { space, chunks });
        self.hold(instance_id, id, transfer, &worker)
            .unwrap_or(nothing)
    }

    /// Returns the answer to a worker that prepares a transfer again, or that may prepare no more;
    /// the inner `None` means that the worker gets nothing.
    fn held(
        &self,
        instance_id: u64,
        id: &TransferId,
        client: ClientId,
        worker: &Worker,
    ) -> Option<Option<Reply>> {
        let mut transfers = self.prepared.lock();
        transfers.detach_ended(instance_id, id);
        if let Some(transfer) = transfers.get(instance_id, id) {
            return Some(transfer.again(client, worker));
        }
        let over = transfers.len_of(instance_id) >= self.context.config.max_transfers;
        over.then(|| {
            add(&self.context.stats.service.over_limit, 1);
            None
        })
    }

    fn transfer(&self, client: ClientId, now: Instant, pending: Pending) -> Transfer {
        let align = self.context.engine.align();
        Transfer::new(client, now, pending, align)
    }

    /// Keeps a prepared transfer until its worker commits it or is known to be done. Returns its
    /// slots. If the worker prepared it twice at the same time, on two connections, returns the
    /// slots of the first.
    fn hold(
        &self,
        instance_id: u64,
        id: TransferId,
        transfer: Transfer,
        worker: &Worker,
    ) -> Option<Reply> {
        let mut prepared = self.prepared.lock();
        let second = match prepared.insert(instance_id, id.clone(), transfer) {
            Ok(transfer) => {
                let slots = slots(worker, &transfer.pending);
                self.publish_bytes(&prepared);
                return Some(slots);
            }
            Err(second) => second,
        };
        let first = prepared.get(instance_id, &id);
        let reply = first.and_then(|first| first.again(second.client, worker));
        drop(prepared);
        // Releases slots that no answer named, which takes other locks.
        drop(second);
        reply
    }

    /// Removes the transfer that a worker has prepared and now commits. `None` if there is none, or
    /// if it belongs to another open connection.
    ///
    /// The layout is that of the preparation, whatever the worker has registered since. A worker
    /// that was removed for its silence may still commit, too.
    fn take_prepared(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        direction: Direction,
        now: Instant,
    ) -> Option<Transfer> {
        let counters = &self.context.stats.service;
        let Ok(hashed) = self.context.hash(key) else {
            add(&counters.commits_unknown, 1);
            return None;
        };
        let id = TransferId::new(transfer_key(key, &hashed), direction);
        self.registry.with(instance_id, |instance| {
            if instance.belongs_to(client) {
                instance.last_seen = now;
            }
        });
        let mut prepared = self.prepared.lock();
        match prepared.get(instance_id, &id) {
            Some(transfer) if self.may_commit(client, transfer) => {
                let taken = prepared.take(instance_id, &id);
                self.publish_bytes(&prepared);
                taken
            }
            Some(_) => {
                add(&counters.commits_foreign, 1);
                None
            }
            None => {
                add(&counters.commits_unknown, 1);
                None
            }
        }
    }

    /// Publishes the bytes of slots that workers may be writing to, for the limits of lookups.
    pub(super) fn publish_bytes(&self, prepared: &Prepared) {
        let bytes = prepared.store_bytes();
        self.context.store_bytes.store(bytes, Ordering::Relaxed);
    }

    /// Returns true for the connection that prepared a transfer. Once that connection has ended,
    /// returns true for every other one, unless it is known to belong to another process.
    fn may_commit(&self, client: ClientId, transfer: &Transfer) -> bool {
        transfer.client == client
            || (transfer.orphaned && !self.is_of_another(client, transfer.client))
    }

    /// Returns true if two connections are known to belong to different processes.
    fn is_of_another(&self, client: ClientId, before: ClientId) -> bool {
        let before = self.connections.pids_of(before);
        let now = self.connections.pids_of(client);
        !before.is_empty() && !now.is_empty() && !before.iter().any(|pid| now.contains(pid))
    }

    pub(super) fn commit_store(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        pickled: usize,
        now: Instant,
    ) -> Reply {
        let counters = &self.context.stats.service;
        if pickled > 0 {
            // Loading it would run any code of the sender. The worker could not map the pool,
            // otherwise it would not have sent bytes.
            add(&counters.pickles_refused, 1);
            self.context.store_failed(key, now);
            self.context.warn_throttled(
                "a worker sent a pickled payload, which is never loaded: it cannot map the \
                 shared pool; let engine and server share /dev/shm (containers: --ipc=host)",
            );
            return Reply::Bool(false);
        }
        let transfer = self.take_prepared(client, key, instance_id, Direction::Store, now);
        let Some(Transfer {
            pending: Pending::Store { space, chunks },
            since,
            ..
        }) = transfer
        else {
            return Reply::Bool(false);
        };
        self.commit(space, key, chunks, since);
        add(&counters.stores, 1);
        Reply::Bool(true)
    }

    /// Gives back the slots of a store that its worker will not write.
    pub(super) fn abandon_store(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let transfer = self.take_prepared(client, key, instance_id, Direction::Store, now);
        let since = transfer.as_ref().map(|transfer| transfer.since);
        // The slots are released here, where nothing is locked.
        drop(transfer);
        if let Some(since) = since {
            self.context.store_failed(key, since);
        }
        Reply::Bool(since.is_some())
    }

    /// Releases the transfers that earlier connections of a worker had prepared, because its own
    /// client says that it copies for none of them. Returns the number of slots.
    pub(super) fn abandon_earlier(&self, client: ClientId, instance_id: u64) -> Reply {
        let is_own = |instance: &mut Instance| instance.client == client;
        if !self.registry.with(instance_id, is_own).unwrap_or(false) {
            return Reply::Int(0);
        }
        let mut prepared = self.prepared.lock();
        // The worker could register here only once its earlier connection had ended, whether or not
        // the end has been noted at each of its transfers by now.
        let is_earlier = |transfer: &Transfer| {
            transfer.client < client && !self.is_of_another(client, transfer.client)
        };
        let taken = prepared.take_where(instance_id, is_earlier);
        self.publish_bytes(&prepared);
        drop(prepared);
        let slots: usize = taken.iter().map(|(_, one)| one.pending.slots()).sum();
        let stores = (taken.iter()).filter(|(direction, _)| *direction == Direction::Store);
        let counters = &self.context.stats.service;
        add(&counters.stores_abandoned, stores.count() as u64);
        add(&counters.slots_released_by_worker, slots as u64);
        if slots > 0 {
            tracing::info!(
                instance = instance_id,
                slots,
                "slots of ended connections given back by their worker"
            );
        }
        // The slots are released here, where nothing is locked.
        drop(taken);
        Reply::Int(slots as u64)
    }

    /// Leases all chunks of a range, or none.
    pub(super) fn acquire(
        &self,
        client: ClientId,
        worker: &Worker,
        hashed: &Hashed,
    ) -> Option<Leases> {
        let keys = hashed.keys(worker.space, worker.kv_rank);
        if keys.is_empty() {
            return None;
        }
        let leases = (self.context.engine).acquire(worker.owner, worker.reads_after, &keys)?;
        if self.leases_too_much(client, &leases) {
            add(&self.context.stats.service.over_limit, 1);
            return None;
        }
        // The identity implies it; a chunk of another size must never reach an engine.
        let sized = leases.iter().all(|slot| slot.len() == worker.chunk_bytes);
        sized.then_some(leases)
    }

    /// Notes that one worker is done with a range that its request's lookup held for it.
    pub(super) fn reader_done(
        &self,
        client: ClientId,
        key: &CacheKey,
        space: SpaceId,
        kv_rank: u16,
        chunks: &Range<usize>,
    ) {
        let request_id = &key.request_id;
        self.lookups
            .reader_done(client, request_id, space, kv_rank, chunks);
    }

    /// As [`Self::reader_done`], for a worker that has retrieved this many bytes of the range since its
    /// request.
    pub(super) fn retrieved(
        &self,
        client: ClientId,
        key: &CacheKey,
        (space, kv_rank): (SpaceId, u16),
        chunks: &Range<usize>,
        (bytes, begun): (u64, Instant),
    ) {
        let counters = &self.context.stats.service;
        add(&counters.retrieves, 1);
        add(&counters.retrieved_chunks, chunks.len() as u64);
        add(&counters.retrieved_bytes, bytes);
        self.lookups.retrieved(client, key, space, kv_rank, chunks);
        let copied = Copied::new(key, chunks.len(), bytes);
        let context = &self.context;
        context.add_copy(key, begun.elapsed(), SpanStep::Retrieve(copied));
    }

    pub(super) fn prepare_retrieve(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let (worker, hashed) = match self.worker(client, key, instance_id, now) {
            Ok(found) => found,
            Err(Declined::NotServed) => {
                self.context.retrieve_failed(key, now);
                return Reply::RetrieveSlots(None);
            }
            Err(Declined::Refused(reply)) => return reply,
        };
        let id = TransferId::new(transfer_key(key, &hashed), Direction::Retrieve);
        let first_chunk = hashed.chunks.start;
        let reply = self
            .held(instance_id, &id, client, &worker)
            .unwrap_or_else(|| {
                let pending = Pending::Retrieve {
                    space: worker.space,
                    kv_rank: worker.kv_rank,
                    first_chunk,
                    leases: self.acquire(client, &worker, &hashed)?,
                };
                self.hold(
                    instance_id,
                    id,
                    self.transfer(client, now, pending),
                    &worker,
                )
            });
        reply.unwrap_or_else(|| {
            self.context.retrieve_failed(key, now);
            let space = worker.space;
            self.reader_done(client, key, space, worker.kv_rank, &hashed.chunks);
            Reply::RetrieveSlots(None)
        })
    }

    pub(super) fn commit_retrieve(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let transfer = self.take_prepared(client, key, instance_id, Direction::Retrieve, now);
        let Some(Transfer {
            client,
            pending,
            since,
            ..
        }) = transfer
        else {
            return Reply::Bool(false);
        };
        let Pending::Retrieve {
            space,
            kv_rank,
            first_chunk,
            leases,
        } = pending
        else {
            return Reply::Bool(false);
        };
        let chunks = first_chunk..first_chunk + leases.len();
        let bytes = leases.iter().map(|slot| slot.len()).sum();
        self.retrieved(client, key, (space, kv_rank), &chunks, (bytes, since));
        Reply::Bool(true)
    }
}

impl Transfer {
    /// Returns the transfer's slots again, so that none is held twice. `None` if the worker has
    /// registered another layout since, or if they belong to another connection.
    fn again(&self, client: ClientId, worker: &Worker) -> Option<Reply> {
        let is_same = self.pending.space() == worker.space && self.client == client;
        is_same.then(|| slots(worker, &self.pending))
    }
}

/// Returns the locations of the slots of a prepared transfer.
fn slots(worker: &Worker, pending: &Pending) -> Reply {
    let at = |offset, len| descriptor(worker, offset, len);
    match pending {
        Pending::Store { chunks, .. } => Reply::StoreSlots {
            slots: chunks
                .iter()
                .map(|chunk| at(chunk.ticket.offset(), chunk.ticket.len()))
                .collect(),
            chunk_indices: chunks.iter().map(|chunk| chunk.index as u64).collect(),
        },
        Pending::Retrieve { leases, .. } => {
            let slots = leases.iter().map(|slot| at(slot.offset(), slot.len()));
            Reply::RetrieveSlots(Some(slots.collect()))
        }
    }
}

fn descriptor(worker: &Worker, offset: u64, length: u64) -> SlotDescriptor {
    SlotDescriptor {
        offset,
        length,
        shape: worker.shape.clone(),
        dtype: worker.dtype.to_owned(),
    }
}

impl Transfers {
    /// Returns the bytes that all connections hold, and a connection's share by transfers that its
    /// workers prepared.
    fn held_by_transfers(&self, client: ClientId) -> Held {
        let (own, others) = self.bytes_and_others(client);
        Held {
            pool: self.context.engine.pool_bytes(),
            all: self.context.held_bytes(),
            own,
            holders: others as u64 + 1,
        }
    }

    /// Returns true for leases that a worker may not take, because they exceed the share that its
    /// connection may keep from eviction.
    pub(super) fn leases_too_much(&self, client: ClientId, leases: &Leases) -> bool {
        let fresh = leases.fresh_bytes();
        let context = &self.context;
        if fresh == 0 || context.held_bytes() <= context.engine.pool_bytes() / 2 {
            return false;
        }
        let mut held = self.held_by_transfers(client);
        held.all = held.all.saturating_sub(fresh);
        fresh > held.more()
    }

    /// Returns the number of chunks of `chunk_bytes`, at most `wanted`, that a connection may begin
    /// to write.
    pub(super) fn writable(&self, client: ClientId, chunk_bytes: u64, wanted: usize) -> usize {
        let context = &self.context;
        let chunk = chunk_bytes.next_multiple_of(context.engine.align()).max(1);
        let more = chunk.saturating_mul(wanted as u64);
        if context.held_bytes() + more <= context.engine.pool_bytes() / 2 {
            return wanted;
        }
        let within = self.held_by_transfers(client).more().min(more);
        usize::try_from(within / chunk).unwrap_or(wanted)
    }
}
