//! Copies that the server makes in the memory of workers: server-driven transfers, and blocks for
//! diagnostics.

use std::sync::Arc;
use std::time::Instant;

use lmc_engine::Leases;
use lmc_memory::{CopyError, CopyPlan, CopyPool, PlanRequest};

use crate::protocol::{CacheKey, GpuEvent, Reply};
use crate::service::context::{Context, Hashed, refuse};
use crate::service::gate::Copying;
use crate::service::jobs::{Job, Lane};
use crate::service::opened::{GroupCopy, ServerCopies};
use crate::service::registry::Registry;
use crate::service::stats::add;
use crate::service::transfers::{Declined, Transfers, Worker};
use crate::service::{ClientId, InspectError, RequestOutcome};

/// The blocks that a request names.
pub(super) struct Blocks {
    /// Ids of the blocks, for each KV group.
    pub(super) ids: Vec<Vec<u32>>,
    /// Handle of the event after which the blocks' memory is ready, where it lies on a GPU.
    pub(super) event: Vec<u8>,
}

/// The right to copy in a worker's memory, and the time at which the worker asked for the copy.
struct Granted {
    copying: Copying,
    asked: Instant,
}

/// The copies that the server makes.
#[derive(Debug)]
pub(super) struct Copies {
    context: Arc<Context>,
    registry: Arc<Registry>,
    transfers: Arc<Transfers>,
    pool: CopyPool,
}

impl Copies {
    pub(super) fn new(
        context: Arc<Context>,
        registry: Arc<Registry>,
        transfers: Arc<Transfers>,
        pool: CopyPool,
    ) -> Self {
        Self {
            context,
            registry,
            transfers,
            pool,
        }
    }

    /// Returns the right to copy in a worker's memory. `None` if its registration is over, or if
    /// the copy was requested too long ago: the worker may have reused the blocks.
    fn may_copy(&self, worker: &Worker, asked: Instant) -> Option<Granted> {
        let tolerance = self.context.config.copy_deadline / 2;
        let Some(copying) = worker.entrance.enter(asked, tolerance) else {
            add(&self.context.stats.service.copies_too_late, 1);
            return None;
        };
        Some(Granted { copying, asked })
    }

    /// Returns false when a running copy must stop: its worker's registration is over, the worker
    /// may have reused the blocks, this process stood still, or the pool was lost.
    ///
    /// The last quarter of the deadline is left for the bytes that are still being copied.
    fn may_go_on(&self, granted: &Granted) -> bool {
        let tolerance = self.context.config.copy_deadline / 4 * 3;
        granted.copying.may_go_on(granted.asked, tolerance)
            && self.context.pulse.is_steady(Instant::now())
            && !self.context.engine.pool_is_lost()
    }

    /// Waits until the GPU has done the work that the engine gave it before it asked for this copy,
    /// if the engine's memory lies on a GPU.
    fn wait_for_engine(
        &self,
        copies: &ServerCopies,
        blocks: &Blocks,
        granted: &Granted,
    ) -> Result<(), String> {
        let Some(gpu) = copies.gpu() else {
            return Ok(());
        };
        let event = GpuEvent::decode(&blocks.event).map_err(|error| error.to_string())?;
        // An engine that answers pings, and whose work never ends, keeps this thread no longer than
        // that.
        let deadline = self.context.config.copy_deadline;
        let proceed = || granted.asked.elapsed() < deadline && self.may_go_on(granted);
        match copies.wait_for(gpu, event, &proceed) {
            Ok(true) => Ok(()),
            Ok(false) => {
                add(&self.context.stats.service.copies_too_late, 1);
                Err("the engine's work on the GPU did not end in time".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Counts a copy that was stopped, and returns the reason why a copy failed.
    fn copy_failed(&self, error: &CopyError) -> String {
        if matches!(error, CopyError::Stopped) {
            add(&self.context.stats.service.copies_too_late, 1);
        }
        error.to_string()
    }

    /// Returns the worker of a request that asks the server to copy, and its memory.
    fn copied_worker(
        &self,
        client: ClientId,
        key: &CacheKey,
        instance_id: u64,
        asks: &str,
        now: Instant,
    ) -> Result<(Worker, Hashed, Arc<ServerCopies>), Declined> {
        let (worker, hashed) = self.transfers.worker(client, key, instance_id, now)?;
        let copies = worker.copies.clone().ok_or_else(|| {
            Declined::Refused(refuse(&format!(
                "worker registered as engine_driven cannot ask to {asks}"
            )))
        })?;
        Ok((worker, hashed, copies))
    }

    pub(super) fn store(
        self: &Arc<Self>,
        client: ClientId,
        key: CacheKey,
        instance_id: u64,
        blocks: Blocks,
        now: Instant,
    ) -> RequestOutcome {
        if key.configs.skip_save {
            add(&self.context.counters().stores_skipped, 1);
            return RequestOutcome::Reply(Reply::Transferred(true));
        }
        let (worker, hashed, copies) =
            match self.copied_worker(client, &key, instance_id, "store", now) {
                Ok(found) => found,
                Err(Declined::NotServed) => {
                    self.context.store_failed(&key, now);
                    return RequestOutcome::Reply(Reply::Transferred(false));
                }
                Err(Declined::Refused(reply)) => return RequestOutcome::Reply(reply),
            };
        if copies.frees_early {
            add(&self.context.counters().stores_skipped, 1);
            return RequestOutcome::Reply(Reply::Transferred(true));
        }
        let lane = match copies.gpu() {
            Some(_) => Lane::GpuStore,
            None => Lane::Store,
        };
        let server = Arc::clone(self);
        let notices = self.context.notices.as_ref();
        let count = notices.map(|notices| notices.count_store(&key.request_id));
        RequestOutcome::Job(Job::new(lane, move || {
            let _count = count;
            let granted = server.may_copy(&worker, now);
            let stored = granted.is_some_and(|granted| {
                match server.wait_for_engine(&copies, &blocks, &granted) {
                    Ok(()) => {
                        server.store_now(&key, &worker, &hashed, &copies, &blocks.ids, &granted)
                    }
                    Err(text) => {
                        let text = format!("store of {}: {text}", key.request_id);
                        server.context.warn_throttled(&text);
                        false
                    }
                }
            });
            match stored {
                true => add(&server.context.stats.service.stores, 1),
                false => server.context.store_failed(&key, now),
            }
            Reply::Transferred(stored)
        }))
    }

    fn store_now(
        &self,
        key: &CacheKey,
        worker: &Worker,
        hashed: &Hashed,
        copies: &ServerCopies,
        block_ids: &[Vec<u32>],
        granted: &Granted,
    ) -> bool {
        let counters = &self.context.stats.service;
        if let Err(text) = covers(&copies.groups, block_ids, hashed.chunks.len()) {
            self.context
                .warn_throttled(&format!("store of {}: {text}", key.request_id));
            return false;
        }
        // A chunk of which the engine has dropped a block has no bytes to store.
        let null = self.context.config.null_block_id;
        let whole = |index: usize| {
            copies.groups.iter().zip(block_ids).all(|(copy, ids)| {
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
        let mut chunks = self.transfers.reserve(worker, hashed, whole, usize::MAX);
        self.transfers.push_present(key, worker, hashed);
        if worker.stores_after != Some(self.context.engine.clears_id()) {
            return false;
        }
        if chunks.is_empty() {
            return true;
        }
        let started = Instant::now();
        let indices: Vec<usize> = chunks.iter().map(|chunk| chunk.index).collect();
        for (copy, ids) in copies.groups.iter().zip(block_ids) {
            let plan = match plan(copy, ids, &indices, 0, None) {
                Ok(plan) => plan,
                Err(text) => {
                    self.context
                        .warn_throttled(&format!("store of {}: {text}", key.request_id));
                    return false;
                }
            };
            let mut slots: Vec<&mut [u8]> = chunks
                .iter_mut()
                .map(|chunk| &mut chunk.ticket.bytes_mut()[copy.range.clone()])
                .collect();
            let proceed = || self.may_go_on(granted);
            let gathered = self.pool.gather_while(&plan, &mut slots, &proceed);
            if let Err(error) = gathered {
                let why = self.copy_failed(&error);
                self.context
                    .warn_throttled(&format!("store of {}: {why}", key.request_id));
                return false;
            }
        }
        add(&counters.gather_nanos, started.elapsed().as_nanos() as u64);
        add(
            &counters.gather_bytes,
            worker.chunk_bytes * chunks.len() as u64,
        );
        if !self.may_go_on(granted) {
            // The worker may have reused the blocks while the last of them were read.
            add(&counters.copies_too_late, 1);
            return false;
        }
        let begun = granted.asked;
        self.transfers.commit(worker.space, key, chunks, begun);
        true
    }

    pub(super) fn retrieve(
        self: &Arc<Self>,
        client: ClientId,
        key: CacheKey,
        instance_id: u64,
        blocks: Blocks,
        skip_first_n_tokens: u64,
        now: Instant,
    ) -> RequestOutcome {
        let (worker, hashed, copies) =
            match self.copied_worker(client, &key, instance_id, "retrieve", now) {
                Ok(found) => found,
                Err(Declined::NotServed) => {
                    self.context.retrieve_failed(&key, now);
                    return RequestOutcome::Reply(Reply::Transferred(false));
                }
                Err(Declined::Refused(reply)) => return RequestOutcome::Reply(reply),
            };
        let leases = self.transfers.acquire(client, &worker, &hashed);
        let lane = match copies.gpu() {
            Some(_) => Lane::GpuRetrieve,
            None => Lane::Retrieve,
        };
        let server = Arc::clone(self);
        RequestOutcome::Job(Job::new(lane, move || {
            let granted = server.may_copy(&worker, now);
            let copied = match (&leases, &granted) {
                (Some(leases), Some(granted)) => {
                    let skip = skip_first_n_tokens;
                    let ready = server.wait_for_engine(&copies, &blocks, granted);
                    ready.and_then(|()| {
                        server.scatter(&worker, leases, &copies, &blocks.ids, skip, granted)
                    })
                }
                (None, _) => Err("a chunk is missing".to_owned()),
                (_, None) => Err("its worker no longer waits for it".to_owned()),
            };
            drop(granted);
            let (space, rank, chunks) = (worker.space, worker.kv_rank, &hashed.chunks);
            match (&copied, &leases) {
                (Ok(()), Some(leases)) => {
                    let bytes = worker.chunk_bytes * leases.len() as u64;
                    let of_rank = (space, rank);
                    (server.transfers).retrieved(client, &key, of_rank, chunks, (bytes, now));
                }
                _ => {
                    server.context.retrieve_failed(&key, now);
                    (server.transfers).reader_done(client, &key, space, rank, chunks);
                }
            }
            if let (Err(text), Some(_)) = (&copied, &leases) {
                server
                    .context
                    .warn_throttled(&format!("retrieve of {}: {text}", key.request_id));
            }
            Reply::Transferred(copied.is_ok())
        }))
    }

    fn scatter(
        &self,
        worker: &Worker,
        leases: &Leases,
        copies: &ServerCopies,
        block_ids: &[Vec<u32>],
        skip_first_n_tokens: u64,
        granted: &Granted,
    ) -> Result<(), String> {
        let counters = &self.context.stats.service;
        covers(&copies.groups, block_ids, leases.len())?;
        let started = Instant::now();
        let indices: Vec<usize> = (0..leases.len()).collect();
        let chunks: Vec<&[u8]> = leases.iter().map(|slot| slot.bytes()).collect();
        let mut plans = Vec::with_capacity(copies.groups.len());
        for (copy, ids) in copies.groups.iter().zip(block_ids) {
            // Blocks that the engine shares with its own prefix cache are whole, so whole
            // blocks are skipped.
            let skip = skip_first_n_tokens / copy.tokens_per_block;
            plans.push(plan(
                copy,
                ids,
                &indices,
                skip,
                self.context.config.null_block_id,
            )?);
        }
        // Everything is checked by now: an engine's memory is written completely, unless the worker
        // stops waiting meanwhile.
        let proceed = || self.may_go_on(granted);
        for (copy, plan) in copies.groups.iter().zip(&plans) {
            let chunks: Vec<&[u8]> = chunks
                .iter()
                .map(|chunk| &chunk[copy.range.clone()])
                .collect();
            let copied = self.pool.scatter_while(plan, &chunks, &proceed);
            copied.map_err(|error| self.copy_failed(&error))?;
        }
        if self.context.engine.pool_is_lost() {
            return Err("the pool's memory was lost".to_owned());
        }
        add(&counters.scatter_nanos, started.elapsed().as_nanos() as u64);
        add(
            &counters.scatter_bytes,
            worker.chunk_bytes * leases.len() as u64,
        );
        Ok(())
    }

    /// Gathers each chunk of a server-driven worker's blocks as a store would, but into a buffer of
    /// its own, and returns the results of `digest`. `blocks_per_chunk` must be that of the
    /// worker's layout. For diagnostics: copies all the bytes, each block at most once. Ends early
    /// when `digest` returns `None`.
    ///
    /// # Errors
    /// [`InspectError`].
    pub(super) fn inspect_blocks<T>(
        &self,
        instance_id: u64,
        block_ids: &[u32],
        blocks_per_chunk: u64,
        mut digest: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, InspectError> {
        let (copies, chunk_bytes) = self.registry.copies_of(instance_id)?;
        let blocks = |text: String| InspectError::Blocks(text);
        if let Some(copy) = copies
            .groups
            .iter()
            .find(|copy| copy.blocks_per_chunk != blocks_per_chunk)
        {
            return Err(blocks(format!(
                "a chunk of this worker has {} blocks, not {blocks_per_chunk}",
                copy.blocks_per_chunk
            )));
        }
        let per_chunk = usize::try_from(blocks_per_chunk).unwrap_or(usize::MAX);
        if block_ids.is_empty() || !block_ids.len().is_multiple_of(per_chunk.max(1)) {
            return Err(blocks(format!(
                "{} block ids are not whole chunks of {blocks_per_chunk}",
                block_ids.len()
            )));
        }
        let blocks_there = copies.groups.iter().map(|copy| copy.paged.blocks());
        let blocks_there = blocks_there.min().unwrap_or_default();
        if block_ids.len() > blocks_there as usize {
            return Err(blocks(format!(
                "{} block ids, and the worker has {blocks_there} blocks",
                block_ids.len()
            )));
        }
        let mut chunk = vec![0; usize::try_from(chunk_bytes).expect("a chunk lies in memory")];
        block_ids
            .chunks(per_chunk)
            .map(|ids| {
                for copy in copies.groups.iter() {
                    let plan = plan(copy, ids, &[0], 0, None).map_err(blocks)?;
                    let into = &mut [&mut chunk[copy.range.clone()]];
                    let gathered = self.pool.gather(&plan, into);
                    gathered.map_err(|error| blocks(error.to_string()))?;
                }
                digest(&chunk).ok_or(InspectError::Cancelled)
            })
            .collect()
    }
}

/// Checks that there are block ids for each group and chunk.
fn covers(groups: &[GroupCopy], block_ids: &[Vec<u32>], chunks: usize) -> Result<(), String> {
    if groups.len() != block_ids.len() {
        return Err(format!(
            "block ids for {} KV groups, {} are registered",
            block_ids.len(),
            groups.len()
        ));
    }
    for (copy, ids) in groups.iter().zip(block_ids) {
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

/// Returns the copies of one group between its blocks and the chunks at `indices` of the range.
fn plan(
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
