//! Moving chunks between engines and the pool, in both modes.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use lmc_engine::{Inserted, Leases, OwnerId, StoreRequest, StoreStart, TenantId};
use lmc_key::{ChunkHash, LayoutFingerprint, ModelName, SpaceId};
use lmc_memory::{CopyError, CopyPlan, PlanRequest};

use crate::protocol::{CacheKey, Reply, SlotDescriptor};
use crate::service::events::StoredChunk;
use crate::service::gate::{Copying, Entrance};
use crate::service::handle::{Service, refuse};
use crate::service::instance::{GroupCopy, Transport};
use crate::service::job::{Job, Lane};
use crate::service::lookup::Hashed;
use crate::service::prepared::{
    Direction, Pending, PendingChunk, Transfer, TransferId, TransferKey,
};
use crate::service::stats::add;
use crate::service::{ClientId, Outcome};

/// KV ranks that are remembered of one worker. An engine's worker has one.
const MAX_RANKS_OF_A_WORKER: usize = 16;

/// What a transfer needs to know of its worker.
struct Worker {
    owner: OwnerId,
    space: SpaceId,
    model: ModelName,
    /// Layout in the keys of its chunks.
    layout: LayoutFingerprint,
    kv_rank: u16,
    /// True if the space is of a generation that ends with its workers.
    is_opaque: bool,
    chunk_bytes: u64,
    shape: Vec<u64>,
    dtype: &'static str,
    copies: Option<Arc<[GroupCopy]>>,
    entrance: Entrance,
}

/// The right to copy in a worker's memory, and when the worker asked for the copy.
struct Granted {
    copying: Copying,
    asked: Instant,
    /// How often everything had been forgotten by then.
    clears: u64,
}

/// Why a transfer does not take place.
enum Declined {
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
        worker_id: key.worker_id,
        start: key.start,
        end: key.end,
        tail: hashed.parent(hashed.chunks.end),
    }
}

impl Service {
    /// Finds the worker of a transfer and hashes its range.
    fn worker(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Result<(Worker, Hashed), Declined> {
        let Some(worker_id) = key.worker_id else {
            return Err(Declined::Refused(refuse(
                "worker_id is missing: whose piece is it?",
            )));
        };
        if !self.shared.pulse.is_steady(now) {
            add(&self.shared.stats.service.copies_too_late, 1);
            return Err(Declined::NotServed);
        }
        let hashed = self.hash(key).map_err(Declined::Refused)?;
        let mut state = self.shared.state.lock();
        let instance = state
            .instances
            .get_mut(&instance_id)
            .ok_or(Declined::NotServed)?;
        if instance.model.as_str() != key.model_name || instance.world_size != key.world_size {
            return Err(Declined::Refused(refuse(&format!(
                "worker {instance_id} registered model {} with world size {}, \
                 the request names {} with {}",
                instance.model, instance.world_size, key.model_name, key.world_size
            ))));
        }
        if !instance.belongs_to(client) {
            return Err(Declined::NotServed);
        }
        instance.seen(client, now);
        let rank = worker_id as u16;
        let is_opaque = instance.opaque.is_some();
        let is_new = instance.ranks.len() < MAX_RANKS_OF_A_WORKER && instance.ranks.insert(rank);
        let shows_rank = is_new && is_opaque && key.num_kv_readers > 0;
        let fingerprint = instance.fingerprint;
        let worker = Worker {
            owner: instance.owner,
            space: instance.space(&self.shared.config, &hashed.salt),
            model: instance.model.clone(),
            layout: fingerprint,
            kv_rank: rank,
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
        let of_rank = shows_rank.then_some((rank, key.num_kv_readers));
        let two_engines = of_rank.and_then(|rank| state.two_engines(instance_id, Some(rank)));
        state.bind(client, &key.request_id, fingerprint);
        for session in state.sessions.named(&key.request_id) {
            session.last_used = now;
        }
        drop(state);
        if let Some(two) = two_engines {
            self.warn_of_two_engines(&two);
        }
        Ok((worker, hashed))
    }

    /// Reserves slots for those chunks of a range that are neither there nor under way, at most
    /// `most`.
    fn reserve(
        &self,
        worker: &Worker,
        hashed: &Hashed,
        wanted: impl Fn(usize) -> bool,
        most: usize,
    ) -> Vec<PendingChunk> {
        let shared = &self.shared;
        let counters = &shared.stats.service;
        let tenant = shared.spaces.tenant(&hashed.salt, &shared.engine);
        shared.spaces.name(worker.space, worker.model.as_str());
        if worker.is_opaque {
            shared.spaces.set_generation(worker.space, worker.layout);
        }
        let requests = self.write_requests(worker, hashed, tenant, wanted);
        let indices: Vec<usize> = requests.iter().map(|(index, _)| *index).collect();
        let requests: Vec<StoreRequest> =
            requests.into_iter().map(|(_, request)| request).collect();
        let mut chunks = Vec::with_capacity(requests.len().min(most));
        let mut asked = 0;
        // Once, but where chunks that are there left some of the share.
        while asked < requests.len() && chunks.len() < most {
            let left = most - chunks.len();
            let end = requests.len().min(asked.saturating_add(left));
            let reservations = shared.engine.store(worker.owner, &requests[asked..end]);
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
        let request = |(index, key): (usize, lmc_key::ChunkKey)| {
            let parent = hashed.parent(hashed.chunks.start + index);
            let parent = parent.map(|hash| lmc_key::ChunkKey { hash, ..key });
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
        let wanted = |(index, _): &(usize, lmc_key::ChunkKey)| wanted(*index);
        keys.into_iter()
            .enumerate()
            .filter(wanted)
            .map(request)
            .collect()
    }

    /// Makes written chunks findable and announces them.
    fn commit(&self, space: SpaceId, key: &CacheKey, chunks: Vec<PendingChunk>) {
        let shared = &self.shared;
        let counters = &shared.stats.service;
        let (mut tickets, mut events) = (Vec::new(), Vec::new());
        let mut bytes = 0;
        for chunk in chunks {
            bytes += chunk.ticket.len();
            events.push(StoredChunk {
                hash: chunk.hash,
                parent: chunk.parent,
                tokens: self.chunk_tokens(key, chunk.index),
            });
            tickets.push(chunk.ticket);
        }
        add(&counters.stored_chunks, tickets.len() as u64);
        add(&counters.stored_bytes, bytes);
        let model = shared.spaces.name(space, &key.model_name);
        let hashes: Vec<ChunkHash> = events.iter().map(|event| event.hash).collect();
        // Announced first, so that no removal is told before it.
        shared.events.stored(&model, events);
        let inserted = shared.engine.commit(tickets);
        for (hash, inserted) in hashes.into_iter().zip(inserted) {
            if inserted == Inserted::Cleared {
                shared.events.removed(&model, hash);
            }
        }
    }

    /// Tokens of a chunk, for the event that announces it.
    pub(super) fn chunk_tokens(&self, key: &CacheKey, index: usize) -> Box<[u32]> {
        if !self.shared.events.enabled() {
            return Box::default();
        }
        let chunk = self.shared.config.hasher.chunk_size() as usize;
        let from = key.start as usize + index * chunk;
        key.token_ids
            .get(from..from + chunk)
            .unwrap_or_default()
            .into()
    }

    fn descriptor(worker: &Worker, offset: u64, length: u64) -> SlotDescriptor {
        SlotDescriptor {
            offset,
            length,
            shape: worker.shape.clone(),
            dtype: worker.dtype.to_owned(),
        }
    }

    pub(super) fn prepare_store(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let counters = &self.shared.stats.service;
        let nothing = Reply::StoreSlots {
            slots: Vec::new(),
            chunk_indices: Vec::new(),
        };
        let (worker, hashed) = match self.worker(client, key, instance_id, now) {
            Ok(found) => found,
            // "Nothing to write": the worker goes on, and nothing was promised.
            Err(Declined::NotServed) => {
                add(&counters.stores_failed, 1);
                return nothing;
            }
            Err(Declined::Refused(reply)) => return reply,
        };
        let id = TransferId::new(transfer_key(key, &hashed), Direction::Store);
        if let Some(asked_before) = self.held(instance_id, &id, client, &worker) {
            return asked_before.unwrap_or_else(|| {
                add(&counters.stores_failed, 1);
                nothing
            });
        }
        let most = self.writable(client, worker.chunk_bytes, hashed.chunks.len());
        let chunks = self.reserve(&worker, &hashed, |_| true, most);
        if chunks.is_empty() {
            return nothing;
        }
        let space = worker.space;
        let transfer = self.transfer(client, now, Pending::Store { space, chunks });
        self.hold(instance_id, id, transfer, &worker)
            .unwrap_or(nothing)
    }

    /// The answer to a worker that asks again for what it has prepared, or that may not prepare
    /// more: none inside when it gets nothing.
    fn held(
        &self,
        instance_id: u64,
        id: &TransferId,
        client: ClientId,
        worker: &Worker,
    ) -> Option<Option<Reply>> {
        let mut state = self.shared.state.lock();
        let transfers = &mut state.transfers;
        transfers.detach_ended(instance_id, id);
        if let Some(transfer) = transfers.get(instance_id, id) {
            return Some(transfer.again(client, worker));
        }
        let over = transfers.len_of(instance_id) >= self.shared.config.max_transfers;
        over.then(|| {
            add(&self.shared.stats.service.over_limit, 1);
            None
        })
    }

    fn transfer(&self, client: ClientId, now: Instant, pending: Pending) -> Transfer {
        let align = self.shared.engine.align();
        Transfer::new(client, now, pending, align)
    }

    /// Keeps a prepared transfer until its worker commits it, or is known to be done. Returns its
    /// slots, or those of the first where the worker has prepared it twice at the same time, on two
    /// connections.
    fn hold(
        &self,
        instance_id: u64,
        id: TransferId,
        transfer: Transfer,
        worker: &Worker,
    ) -> Option<Reply> {
        let mut state = self.shared.state.lock();
        let second = match state.transfers.insert(instance_id, id.clone(), transfer) {
            Ok(transfer) => return Some(slots(worker, &transfer.pending)),
            Err(second) => second,
        };
        let first = state.transfers.get(instance_id, &id);
        let reply = first.and_then(|first| first.again(second.client, worker));
        drop(state);
        // Gives back slots that no answer named, which takes other locks.
        drop(second);
        reply
    }

    /// Takes out the transfer that a worker has prepared and now commits. `None` when there is
    /// none, or when it belongs to another connection that is open.
    ///
    /// The layout is that of the preparation, whatever the worker registered since; a worker that
    /// was removed for its silence may still commit, too.
    fn take_prepared(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        direction: Direction,
        now: Instant,
    ) -> Option<Transfer> {
        let counters = &self.shared.stats.service;
        let Ok(hashed) = self.hash(key) else {
            add(&counters.commits_unknown, 1);
            return None;
        };
        let id = TransferId::new(transfer_key(key, &hashed), direction);
        let mut state = self.shared.state.lock();
        if let Some(instance) = state.instances.get_mut(&instance_id)
            && instance.belongs_to(client)
        {
            instance.last_seen = now;
        }
        match state.transfers.get(instance_id, &id) {
            Some(transfer) if state.may_commit(client, transfer) => {
                state.transfers.take(instance_id, &id)
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

    pub(super) fn commit_store(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        pickled: usize,
        now: Instant,
    ) -> Reply {
        let counters = &self.shared.stats.service;
        if pickled > 0 {
            // Loading it would run whatever the sender put in. The worker could not map the
            // pool, or it would not have sent bytes.
            add(&counters.pickles_refused, 1);
            add(&counters.stores_failed, 1);
            self.warn_throttled(
                "a worker sent a pickled payload, which is never loaded: it cannot map the \
                 shared pool; let engine and server share /dev/shm (containers: --ipc=host)",
            );
            return Reply::Bool(false);
        }
        let transfer = self.take_prepared(client, key, instance_id, Direction::Store, now);
        let Some(Transfer {
            pending: Pending::Store { space, chunks },
            ..
        }) = transfer
        else {
            return Reply::Bool(false);
        };
        self.commit(space, key, chunks);
        add(&counters.stores, 1);
        Reply::Bool(true)
    }

    /// Leases all chunks of a range, or none.
    fn acquire(&self, client: ClientId, worker: &Worker, hashed: &Hashed) -> Option<Leases> {
        let keys = hashed.keys(worker.space, worker.kv_rank);
        if keys.is_empty() {
            return None;
        }
        let leases = self.shared.engine.acquire(worker.owner, &keys)?;
        if self.leases_too_much(client, &leases) {
            add(&self.shared.stats.service.over_limit, 1);
            return None;
        }
        // Identity says the same; a chunk of another size must never reach an engine.
        let sized = leases.iter().all(|slot| slot.len() == worker.chunk_bytes);
        sized.then_some(leases)
    }

    /// One worker is done with a range that its request's lookup held for it.
    fn reader_done(
        &self,
        client: ClientId,
        key: &CacheKey,
        space: SpaceId,
        kv_rank: u16,
        chunks: &Range<usize>,
    ) {
        let mut state = self.shared.state.lock();
        let named = state.sessions.named(&key.request_id);
        // Where several looked up under one name, and none of them on the worker's connection, it
        // is not known whose chunks these are: they are held until the request ends.
        let session = match named {
            [only] => Some(only),
            _ => named.iter_mut().find(|session| session.client == client),
        };
        let released = session.map(|session| session.reader_done(space, kv_rank, chunks));
        // The leases go back here, without the state being locked.
        drop(state);
        drop(released);
    }

    pub(super) fn prepare_retrieve(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        now: Instant,
    ) -> Reply {
        let counters = &self.shared.stats.service;
        let (worker, hashed) = match self.worker(client, key, instance_id, now) {
            Ok(found) => found,
            Err(Declined::NotServed) => {
                add(&counters.retrieves_missed, 1);
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
            add(&counters.retrieves_missed, 1);
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
        let counters = &self.shared.stats.service;
        let transfer = self.take_prepared(client, key, instance_id, Direction::Retrieve, now);
        let Some(Transfer {
            client, pending, ..
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
        add(&counters.retrieves, 1);
        add(&counters.retrieved_chunks, leases.len() as u64);
        add(
            &counters.retrieved_bytes,
            leases.iter().map(|slot| slot.len()).sum(),
        );
        let chunks = first_chunk..first_chunk + leases.len();
        self.reader_done(client, key, space, kv_rank, &chunks);
        Reply::Bool(true)
    }

    /// The right to copy in a worker's memory. None when its registration is over, or when it
    /// was asked for so long ago that the worker may have given the blocks away.
    fn may_copy(&self, worker: &Worker, asked: Instant, clears: u64) -> Option<Granted> {
        let patience = self.shared.config.copy_deadline / 2;
        let Some(copying) = worker.entrance.enter(asked, patience) else {
            add(&self.shared.stats.service.copies_too_late, 1);
            return None;
        };
        Some(Granted {
            copying,
            asked,
            clears,
        })
    }

    /// Returns false when a running copy must stop: its worker's registration is over, the
    /// worker may have given the blocks away, this process stood still, or the pool was lost.
    ///
    /// The last quarter of the deadline is left for the bytes that are being copied meanwhile.
    fn may_go_on(&self, granted: &Granted) -> bool {
        let patience = self.shared.config.copy_deadline / 4 * 3;
        granted.copying.may_go_on(granted.asked, patience)
            && self.shared.pulse.is_steady(Instant::now())
            && !self.shared.engine.pool_is_lost()
    }

    /// Counts a copy that was stopped, and returns the reason why a copy failed.
    fn copy_failed(&self, error: &CopyError) -> String {
        if matches!(error, CopyError::Stopped) {
            add(&self.shared.stats.service.copies_too_late, 1);
        }
        error.to_string()
    }

    /// The worker of a request that asks the server to copy, and what is copied.
    fn copied_worker(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        asks: &str,
        now: Instant,
    ) -> Result<(Worker, Hashed, Arc<[GroupCopy]>), Declined> {
        let (worker, hashed) = self.worker(client, key, instance_id, now)?;
        let copies = worker.copies.clone().ok_or_else(|| {
            Declined::Refused(refuse(&format!(
                "worker registered as engine_driven cannot ask to {asks}"
            )))
        })?;
        Ok((worker, hashed, copies))
    }

    pub(super) fn store(
        &self,
        client: ClientId,
        key: CacheKey,
        instance_id: u64,
        block_ids: Vec<Vec<u32>>,
        now: Instant,
    ) -> Outcome {
        let (worker, hashed, copies) =
            match self.copied_worker(client, &key, instance_id, "store", now) {
                Ok(found) => found,
                Err(Declined::NotServed) => {
                    add(&self.shared.stats.service.stores_failed, 1);
                    return Outcome::Reply(Reply::Transferred(false));
                }
                Err(Declined::Refused(reply)) => return Outcome::Reply(reply),
            };
        let service = self.clone();
        let clears = self.shared.engine.clears();
        Outcome::Job(Job::new(Lane::Store, move || {
            let granted = service.may_copy(&worker, now, clears);
            let stored = granted.is_some_and(|granted| {
                service.store_now(&key, &worker, &hashed, &copies, &block_ids, &granted)
            });
            let counters = &service.shared.stats.service;
            add(
                if stored {
                    &counters.stores
                } else {
                    &counters.stores_failed
                },
                1,
            );
            Reply::Transferred(stored)
        }))
    }

    fn store_now(
        &self,
        key: &CacheKey,
        worker: &Worker,
        hashed: &Hashed,
        copies: &[GroupCopy],
        block_ids: &[Vec<u32>],
        granted: &Granted,
    ) -> bool {
        let counters = &self.shared.stats.service;
        if let Err(text) = covers(copies, block_ids, hashed.chunks.len()) {
            self.warn_throttled(&format!("store of {}: {text}", key.request_id));
            return false;
        }
        // A chunk of which the engine has dropped a block has no bytes to store.
        let null = self.shared.config.null_block_id;
        let whole = |index: usize| {
            copies.iter().zip(block_ids).all(|(copy, ids)| {
                let blocks = copy.blocks_per_chunk as usize;
                let of_chunk = &ids[index * blocks..(index + 1) * blocks];
                null.is_none_or(|null| !of_chunk.contains(&null))
            })
        };
        let absent = (0..hashed.chunks.len())
            .filter(|&index| !whole(index))
            .count();
        add(&counters.chunks_null, absent as u64);
        // The server ends these writes itself, so no share limits them.
        let mut chunks = self.reserve(worker, hashed, whole, usize::MAX);
        if self.shared.engine.clears() != granted.clears {
            // The blocks are of before the clear, and the slots may not be.
            return false;
        }
        if chunks.is_empty() {
            return true;
        }
        let started = Instant::now();
        let indices: Vec<usize> = chunks.iter().map(|chunk| chunk.index).collect();
        for (copy, ids) in copies.iter().zip(block_ids) {
            let plan = match plan(copy, ids, &indices, 0, None) {
                Ok(plan) => plan,
                Err(text) => {
                    self.warn_throttled(&format!("store of {}: {text}", key.request_id));
                    return false;
                }
            };
            let mut slots: Vec<&mut [u8]> = chunks
                .iter_mut()
                .map(|chunk| &mut chunk.ticket.bytes_mut()[copy.range.clone()])
                .collect();
            let proceed = || self.may_go_on(granted);
            let gathered = self.shared.copies.gather_while(&plan, &mut slots, &proceed);
            if let Err(error) = gathered {
                let why = self.copy_failed(&error);
                self.warn_throttled(&format!("store of {}: {why}", key.request_id));
                return false;
            }
        }
        add(&counters.gather_nanos, started.elapsed().as_nanos() as u64);
        add(
            &counters.gather_bytes,
            worker.chunk_bytes * chunks.len() as u64,
        );
        if !self.may_go_on(granted) {
            // The blocks may have been given away while the last of them were read.
            add(&counters.copies_too_late, 1);
            return false;
        }
        self.commit(worker.space, key, chunks);
        true
    }

    pub(super) fn retrieve(
        &self,
        client: ClientId,
        key: CacheKey,
        instance_id: u64,
        block_ids: Vec<Vec<u32>>,
        skip_first_n_tokens: u64,
        now: Instant,
    ) -> Outcome {
        let (worker, hashed, copies) =
            match self.copied_worker(client, &key, instance_id, "retrieve", now) {
                Ok(found) => found,
                Err(Declined::NotServed) => {
                    add(&self.shared.stats.service.retrieves_missed, 1);
                    return Outcome::Reply(Reply::Transferred(false));
                }
                Err(Declined::Refused(reply)) => return Outcome::Reply(reply),
            };
        let leases = self.acquire(client, &worker, &hashed);
        let clears = self.shared.engine.clears();
        let service = self.clone();
        Outcome::Job(Job::new(Lane::Retrieve, move || {
            let counters = &service.shared.stats.service;
            let granted = service.may_copy(&worker, now, clears);
            let copied = match (&leases, &granted) {
                (Some(leases), Some(granted)) => {
                    let skip = skip_first_n_tokens;
                    service.scatter(&worker, leases, &copies, &block_ids, skip, granted)
                }
                (None, _) => Err("a chunk is missing".to_owned()),
                (_, None) => Err("its worker does not wait for it any more".to_owned()),
            };
            drop(granted);
            match (&copied, &leases) {
                (Ok(()), Some(leases)) => {
                    add(&counters.retrieves, 1);
                    add(&counters.retrieved_chunks, leases.len() as u64);
                    add(
                        &counters.retrieved_bytes,
                        worker.chunk_bytes * leases.len() as u64,
                    );
                }
                _ => add(&counters.retrieves_missed, 1),
            }
            if let (Err(text), Some(_)) = (&copied, &leases) {
                service.warn_throttled(&format!("retrieve of {}: {text}", key.request_id));
            }
            let space = worker.space;
            service.reader_done(client, &key, space, worker.kv_rank, &hashed.chunks);
            Reply::Transferred(copied.is_ok())
        }))
    }

    fn scatter(
        &self,
        worker: &Worker,
        leases: &Leases,
        copies: &[GroupCopy],
        block_ids: &[Vec<u32>],
        skip_first_n_tokens: u64,
        granted: &Granted,
    ) -> Result<(), String> {
        let counters = &self.shared.stats.service;
        covers(copies, block_ids, leases.len())?;
        let started = Instant::now();
        let indices: Vec<usize> = (0..leases.len()).collect();
        let chunks: Vec<&[u8]> = leases.iter().map(|slot| slot.bytes()).collect();
        let mut plans = Vec::with_capacity(copies.len());
        for (copy, ids) in copies.iter().zip(block_ids) {
            // Blocks that the engine shares with its own prefix cache are whole, so whole
            // blocks are skipped.
            let skip = skip_first_n_tokens / copy.tokens_per_block;
            plans.push(plan(
                copy,
                ids,
                &indices,
                skip,
                self.shared.config.null_block_id,
            )?);
        }
        // Everything is checked by now: an engine's memory is written wholly, unless the worker
        // stops waiting meanwhile.
        let proceed = || self.may_go_on(granted);
        for (copy, plan) in copies.iter().zip(&plans) {
            let chunks: Vec<&[u8]> = chunks
                .iter()
                .map(|chunk| &chunk[copy.range.clone()])
                .collect();
            let copied = self.shared.copies.scatter_while(plan, &chunks, &proceed);
            copied.map_err(|error| self.copy_failed(&error))?;
        }
        if self.shared.engine.pool_is_lost() {
            return Err("the pool's memory was lost".to_owned());
        }
        add(&counters.scatter_nanos, started.elapsed().as_nanos() as u64);
        add(
            &counters.scatter_bytes,
            worker.chunk_bytes * leases.len() as u64,
        );
        Ok(())
    }
}

impl Transfer {
    /// The slots once more, so that none is held twice. `None` when the worker has registered
    /// another layout since, or when they belong to another connection.
    fn again(&self, client: ClientId, worker: &Worker) -> Option<Reply> {
        let is_same = self.pending.space() == worker.space && self.client == client;
        is_same.then(|| slots(worker, &self.pending))
    }
}

/// Where a worker finds the slots of a prepared transfer.
fn slots(worker: &Worker, pending: &Pending) -> Reply {
    let at = |offset, len| Service::descriptor(worker, offset, len);
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

/// Checks that there are block ids for each group and chunk.
fn covers(copies: &[GroupCopy], block_ids: &[Vec<u32>], chunks: usize) -> Result<(), String> {
    if copies.len() != block_ids.len() {
        return Err(format!(
            "block ids for {} KV groups, {} are registered",
            block_ids.len(),
            copies.len()
        ));
    }
    for (copy, ids) in copies.iter().zip(block_ids) {
        let needed = copy.blocks_per_chunk * chunks as u64;
        if (ids.len() as u64) < needed {
            return Err(format!(
                "{} block ids for {chunks} chunks, {needed} needed",
                ids.len()
            ));
        }
    }
    Ok(())
}

/// The copies of one group between its blocks and the chunks at `indices` of the range.
pub(super) fn plan(
    copy: &GroupCopy,
    block_ids: &[u32],
    indices: &[usize],
    skip_blocks: u64,
    null_block: Option<u32>,
) -> Result<CopyPlan, String> {
    let starts: Vec<u64> = indices
        .iter()
        .map(|&index| index as u64 * copy.blocks_per_chunk)
        .collect();
    let request = PlanRequest {
        block_ids,
        first_blocks: &starts,
        skip_blocks,
        null_block,
    };
    CopyPlan::new(&copy.paged, &request).map_err(|error| error.to_string())
}
