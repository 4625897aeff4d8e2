//! The thread that moves chunks (`lmc-worker`): asks the server for slots, copies, and commits.
//!
//! Several transfers are under way at a time: while one is copied, the requests of the others
//! travel. Retrieves go before stores. Where the engine's memory lies on a GPU, a second thread
//! (`lmc-loader`) carries out the retrieves, because stores wait there for the engine's work, and
//! the link has two directions.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{CopyPlan, CopyPool, MappedSegment, PlanRequest};

use crate::adapters::LoadStoreOp;
use crate::adapters::link::{Awaited, Link, LinkError, SessionId};
use crate::adapters::log::shown;
use crate::adapters::tensors::DescribedGroup;
use crate::adapters::work::{Direction, Transfer, Work};
use crate::adapters::worker_state::{Pool, WorkerState, add};
use crate::protocol::{CacheKey, Reply, Request, SlotDescriptor};

/// Transfers whose requests are under way at the same time.
const BATCH: usize = 16;

/// Longest wait for the engine's work on its GPU. No step of an engine takes that long.
const ENGINE_WORK: Duration = Duration::from_secs(60);

/// A transfer whose slots were requested.
struct Prepared {
    transfer: Transfer,
    key: CacheKey,
    /// Id of the worker that the key belongs to.
    instance_id: u64,
    answer: Awaited,
}

/// A transfer that was copied and whose commit was sent.
struct Committed {
    transfer: Transfer,
    /// Chunks of its range that were copied.
    chunks: Vec<u64>,
    answer: Awaited,
}

/// Reason why a transfer failed.
#[derive(Debug)]
enum Failure {
    /// No server with a pool is connected; the link logs that.
    NoServer,
    /// The prompt was named for a server that understands other names.
    OtherServer,
    /// Dropped before its copy began: the engine needs the blocks.
    Dropped,
    /// No answer to the request for slots, or a refusal.
    Slots(LinkError),
    /// The answer does not fit the request for slots.
    WrongSlots(String),
    /// The server no longer has all chunks of a retrieve.
    Gone,
    /// The copy failed.
    Copy(String),
    /// No answer to the commit, or a refusal.
    Commit(LinkError),
    /// The slots did not belong to the worker until the commit.
    NotCommitted(String),
}

impl Failure {
    /// Returns the kind and the text for the log; `None` if it is logged elsewhere.
    fn described(&self) -> Option<(&'static str, String)> {
        Some(match self {
            Self::NoServer
            | Self::Dropped
            | Self::Slots(LinkError::Down)
            | Self::Commit(LinkError::Down) => return None,
            Self::OtherServer => (
                "naming",
                "the server knows no block hashes, and the request is named by them".to_owned(),
            ),
            Self::Slots(error) => ("slots", format!("no slots: {error}")),
            Self::WrongSlots(answer) => {
                ("slots", format!("no slots: the server answered {answer}"))
            }
            Self::Gone => ("gone", "the server no longer has its chunks".to_owned()),
            Self::Copy(why) => ("copy", format!("the copy failed: {why}")),
            Self::Commit(error) => ("commit", format!("not confirmed: {error}")),
            Self::NotCommitted(answer) => (
                "commit",
                format!("not confirmed: the server answered {answer}"),
            ),
        })
    }
}

/// A thread that carries out transfers, counted in [`Work::carrying`] until this is dropped.
struct Carrying<'a>(&'a WorkerState);

impl Drop for Carrying<'_> {
    fn drop(&mut self) {
        self.0.work.lock().carrying -= 1;
        self.0.changed.notify_all();
    }
}

/// The thread that moves chunks.
pub(crate) struct Mover {
    pub(crate) shared: Arc<WorkerState>,
    pub(crate) link: Arc<Link>,
    pub(crate) copies: CopyPool,
    /// True for the second thread, which serves memory on a GPU.
    pub(crate) is_loader: bool,
}

impl Mover {
    pub(crate) fn run(&self) {
        loop {
            let batch = {
                let mut work = self.shared.work.lock();
                loop {
                    if work.stopped {
                        return;
                    }
                    self.settle(&mut work);
                    let batch = self.take_batch(&mut work);
                    if !batch.is_empty() {
                        work.carrying += 1;
                        break batch;
                    }
                    self.shared.changed.wait(&mut work);
                }
            };
            let _carrying = Carrying(&self.shared);
            self.carry_out(batch);
        }
    }

    /// Tells the server once over each new connection that nothing is copied any more for earlier
    /// connections. The end of a connection alone proves nothing to the server: it would keep their
    /// slots for its grace time.
    fn settle(&self, work: &mut Work) {
        let Some(pool) = self.shared.pool(self.link.session()) else {
            return;
        };
        if work.carrying > 0 || work.settled == pool.session || !pool.server.abandon_earlier {
            return;
        }
        work.settled = pool.session;
        let registered = 1 + usize::from(pool.server.tails);
        for instance_id in self.shared.instance_ids.into_iter().take(registered) {
            self.give_back(&pool, Request::AbandonEarlier { instance_id });
        }
    }

    /// Takes the transfers of the next batch: retrieves, or else stores.
    ///
    /// No two of them have the same range of a request: the server would give both the same slots,
    /// which belong to the worker only until the first commit.
    fn take_batch(&self, work: &mut Work) -> Vec<Transfer> {
        let loads = match work.has_loader {
            true => self.is_loader,
            false => !work.retrieves.is_empty(),
        };
        let queue = match loads {
            true => &mut work.retrieves,
            false => &mut work.stores,
        };
        let mut batch: Vec<Transfer> = Vec::new();
        while batch.len() < BATCH
            && let Some(next) = queue.pop_front()
        {
            let names_same = |other: &Transfer| {
                other.op.request_id == next.op.request_id && other.op.tokens == next.op.tokens
            };
            if batch.iter().any(names_same) {
                queue.push_front(next);
                break;
            }
            batch.push(next);
        }
        batch
    }

    /// Carries out transfers whose requests are under way at the same time.
    fn carry_out(&self, batch: Vec<Transfer>) {
        let session = self.link.session();
        let Some(pool) = self.shared.pool(session) else {
            for transfer in batch {
                self.end(&transfer, Err(Failure::NoServer));
            }
            return;
        };
        let prepare = |transfer: Transfer| {
            if !pool.server.understands(&transfer.op.prompt) {
                self.end(&transfer, Err(Failure::OtherServer));
                return None;
            }
            let (direction, op) = (transfer.direction, &transfer.op);
            let key = self.shared.key(pool.server, direction, op);
            let instance_id = self.shared.instance_id(&op.prompt);
            let request = match direction {
                Direction::Store => Request::PrepareStore {
                    key: key.clone(),
                    instance_id,
                },
                Direction::Retrieve => Request::PrepareRetrieve {
                    key: key.clone(),
                    instance_id,
                },
            };
            let shared = Arc::clone(&self.shared);
            let (request_id, number) = (op.request_id.clone(), transfer.number);
            let answer = self.ask(session, request, move || {
                if direction == Direction::Store {
                    shared.work.lock().reserved(&request_id, number);
                    shared.changed.notify_all();
                }
            });
            Some(Prepared {
                transfer,
                key,
                instance_id,
                answer,
            })
        };
        let prepared: Vec<Prepared> = batch.into_iter().filter_map(prepare).collect();
        let copy = |prepared: Prepared| {
            if prepared.transfer.direction == Direction::Store {
                self.retrieve_first();
            }
            self.copy(&pool, prepared)
        };
        let committed: Vec<Committed> = prepared.into_iter().filter_map(copy).collect();
        for Committed {
            transfer,
            chunks,
            answer,
        } in committed
        {
            let moved = match answer.wait() {
                Ok(Reply::Bool(true)) => Ok(&chunks[..]),
                Ok(other) => Err(Failure::NotCommitted(answered(&other))),
                Err(error) => Err(Failure::Commit(error)),
            };
            self.end(&transfer, moved);
        }
    }

    /// Carries out the retrieves that were queued since a batch of stores began.
    fn retrieve_first(&self) {
        loop {
            let mut work = self.shared.work.lock();
            if work.retrieves.is_empty() || work.stopped || work.has_loader {
                return;
            }
            let batch = self.take_batch(&mut work);
            drop(work);
            self.carry_out(batch);
        }
    }

    fn ask(
        &self,
        session: SessionId,
        request: Request,
        note: impl FnOnce() + Send + 'static,
    ) -> Awaited {
        let timeout = self.shared.common.timeouts.answer;
        self.link.begin_in(session, request, timeout, note)
    }

    /// Copies a prepared transfer and sends its commit. Ends the transfer here if there is nothing
    /// to copy.
    fn copy(&self, pool: &Pool, prepared: Prepared) -> Option<Committed> {
        let Prepared {
            transfer,
            key,
            instance_id,
            answer,
        } = prepared;
        let direction = transfer.direction;
        let per_chunk = pool.layouts.of(&transfer.op.prompt).blocks_per_chunk();
        let blocks = transfer.op.tokens.len() / self.shared.common.engine.block_size as usize;
        let chunks = blocks / per_chunk.max(1) as usize;
        let (slots, indices) = match (direction, answer.wait()) {
            (
                Direction::Store,
                Ok(Reply::StoreSlots {
                    slots,
                    chunk_indices,
                }),
            ) => (slots, chunk_indices),
            (Direction::Retrieve, Ok(Reply::RetrieveSlots(Some(slots))))
                if slots.len() == chunks =>
            {
                (slots, (0..chunks as u64).collect())
            }
            (_, answer) => {
                let is_refusal = matches!(
                    answer,
                    Ok(Reply::RetrieveSlots(None))
                        | Err(LinkError::Down | LinkError::Full | LinkError::Refused(_))
                );
                if !is_refusal {
                    // The server may have given slots, or may still give them.
                    self.release(pool, direction, key, instance_id);
                }
                let failure = match answer {
                    Ok(Reply::RetrieveSlots(None)) => Failure::Gone,
                    Ok(other) => Failure::WrongSlots(answered(&other)),
                    Err(error) => Failure::Slots(error),
                };
                self.end(&transfer, Err(failure));
                return None;
            }
        };
        if slots.is_empty() {
            // The server has the chunks, or accepts none now.
            self.end(&transfer, Ok(&[]));
            return None;
        }
        let copied = self.wait_for_engine(pool, &transfer).and_then(|()| {
            match self.shared.work.lock().begin_copy(&transfer) {
                true => Ok(()),
                false => Err(Failure::Dropped),
            }
        });
        let copied = copied.and_then(|()| {
            self.copy_slots(pool, direction, &transfer.op, &slots, &indices)
                .map_err(Failure::Copy)
        });
        if direction == Direction::Store {
            // The transfer's blocks may be reused, whatever happens to the commit.
            self.shared.work.lock().end_copy(&transfer);
            self.shared.changed.notify_all();
        }
        if let Err(failure) = copied {
            self.release(pool, direction, key, instance_id);
            self.end(&transfer, Err(failure));
            return None;
        }
        let request = match direction {
            Direction::Store => Request::CommitStore {
                key,
                instance_id,
                pickled: 0,
            },
            Direction::Retrieve => Request::CommitRetrieve { key, instance_id },
        };
        Some(Committed {
            transfer,
            chunks: indices,
            answer: self.ask(pool.session, request, || ()),
        })
    }

    /// Waits until the GPU has done the work that the engine gave it before the transfer, if the
    /// engine's memory lies on a GPU.
    fn wait_for_engine(&self, pool: &Pool, transfer: &Transfer) -> Result<(), Failure> {
        if !pool.layouts.of(&transfer.op.prompt).is_on_gpu() {
            return Ok(());
        }
        let failed = |why: &str| Err(Failure::Copy(why.to_owned()));
        let mark = match &transfer.after {
            Some(Ok(mark)) => mark,
            Some(Err(error)) => return failed(&error.to_string()),
            // Without a stream it is unknown when the blocks may be accessed.
            None => return failed("the engine named no stream of its work on the GPU"),
        };
        let began = Instant::now();
        let is_wanted = || self.shared.work.lock().is_wanted(transfer);
        match mark.wait(&|| began.elapsed() < ENGINE_WORK && is_wanted()) {
            Ok(true) => Ok(()),
            Ok(false) if is_wanted() => failed("the engine's work on the GPU did not end in time"),
            Ok(false) => Err(Failure::Dropped),
            Err(error) => failed(&error.to_string()),
        }
    }

    /// Releases the slots of a transfer that was not copied. A store that was not written is never
    /// committed: LMCache's server cannot release its slots otherwise, and keeps them until the
    /// connection ends.
    fn release(&self, pool: &Pool, direction: Direction, key: CacheKey, instance_id: u64) {
        let request = match direction {
            Direction::Store if !pool.server.engine_keys => return,
            Direction::Store => Request::AbandonStore { key, instance_id },
            Direction::Retrieve => Request::CommitRetrieve { key, instance_id },
        };
        self.give_back(pool, request);
    }

    /// Sends a request that releases slots. Without an answer they are released on the next
    /// connection.
    fn give_back(&self, pool: &Pool, request: Request) {
        let shared = Arc::clone(&self.shared);
        let timeout = self.shared.common.timeouts.answer;
        (self.link).ask_in(pool.session, request, timeout, move |answer| {
            if let Err(error) = answer
                && error != LinkError::Down
            {
                let text = || format!("slots were not released: {error}");
                shared
                    .common
                    .log
                    .failed(("release", ""), Instant::now(), text);
            }
        });
    }

    /// Copies between the engine's blocks and slots of the pool.
    ///
    /// # Errors
    /// The reason why the copy failed.
    fn copy_slots(
        &self,
        pool: &Pool,
        direction: Direction,
        op: &LoadStoreOp,
        slots: &[SlotDescriptor],
        indices: &[u64],
    ) -> Result<(), String> {
        let described = pool.layouts.of(&op.prompt);
        let per_chunk = described.blocks_per_chunk();
        let first_blocks: Option<Vec<u64>> = indices
            .iter()
            .map(|index| index.checked_mul(per_chunk))
            .collect();
        let Some(first_blocks) = first_blocks.filter(|first| first.len() == slots.len()) else {
            return Err("the server's chunks do not match the request".to_owned());
        };
        let block_tokens = self.shared.common.engine.block_size as usize;
        let skip_blocks = match direction {
            Direction::Store => 0,
            Direction::Retrieve => op.skip_first_n_tokens.div_ceil(block_tokens) as u64,
        };
        if op.block_ids.len() != described.groups.len() {
            return Err(
                "the request does not have one block table for each group of layers".to_owned(),
            );
        }
        let started = Instant::now();
        let plan = |(group, block_ids): (&DescribedGroup, &Vec<u32>)| {
            let request = PlanRequest {
                block_ids,
                first_blocks: &first_blocks,
                skip_blocks,
                null_block: group.null_block,
            };
            CopyPlan::new(&group.paged, &request)
        };
        let plans: Result<Vec<CopyPlan>, _> = described
            .groups
            .iter()
            .zip(&op.block_ids)
            .map(plan)
            .collect();
        let plans = plans.map_err(|error| format!("blocks and chunks do not match: {error}"))?;
        let memory = slot_memory(&pool.memory, slots, described.chunk.chunk_bytes());
        let mut memory = memory.ok_or("the server's slots are not chunks of its pool")?;
        let mut copied = Ok(());
        for (group, plan) in described.groups.iter().zip(&plans) {
            // SAFETY: the slots lie inside the mapping, which `pool` keeps, and no two overlap. The
            // server gave them to this worker alone. If another process writes there meanwhile,
            // that only garbles bytes, and the commit shows whether the slots belonged to this
            // worker until the end.
            let slots = memory.iter_mut().map(|slot| unsafe { slot.as_mut() });
            let slots = slots.map(|slot| &mut slot[group.bytes.clone()]);
            copied = match direction {
                Direction::Store => {
                    let mut slots: Vec<&mut [u8]> = slots.collect();
                    if group.paged.gpu().is_none() {
                        slots.iter().for_each(|slot| map_pages(slot));
                    }
                    self.copies.gather(plan, &mut slots)
                }
                Direction::Retrieve => {
                    let slots: Vec<&[u8]> = slots.map(|slot| &*slot).collect();
                    self.copies.scatter(plan, &slots)
                }
            };
            if copied.is_err() {
                break;
            }
        }
        add(
            &self.shared.counters.copy_nanos,
            started.elapsed().as_nanos() as u64,
        );
        // A truncated pool is noticed here.
        copied.map_err(|error| error.to_string())?;
        pool.memory.check().map_err(|error| error.to_string())
    }

    /// Ends a transfer, unless it was dropped before, and counts it: with the chunks of its range
    /// that it moved, or as failed.
    fn end(&self, transfer: &Transfer, moved: Result<&[u64], Failure>) {
        let shared = &self.shared;
        if let Err(failure) = &moved
            && let Some((kind, why)) = failure.described()
        {
            let (what, consequence) = match transfer.direction {
                Direction::Store => ("store", "its chunks are not cached"),
                Direction::Retrieve => ("load", "the load is reported as failed"),
            };
            shared.common.log.failed((what, kind), Instant::now(), || {
                let request_id = shown(&transfer.op.request_id);
                format!("{what} failed for request {request_id}: {why}; {consequence}")
            });
        }
        let counters = &shared.counters;
        let chunk_bytes = (shared.pool.lock().as_ref()).map_or(0, |pool| {
            pool.layouts.of(&transfer.op.prompt).chunk.chunk_bytes()
        });
        let (chunks, bytes, failed) = match transfer.direction {
            Direction::Store => (
                &counters.stored_chunks,
                &counters.stored_bytes,
                &counters.stores_failed,
            ),
            Direction::Retrieve => (
                &counters.retrieved_chunks,
                &counters.retrieved_bytes,
                &counters.retrieves_failed,
            ),
        };
        let mut work = shared.work.lock();
        if !work.end(transfer, moved.as_deref().unwrap_or_default()) {
            return;
        }
        match &moved {
            Ok(moved) => {
                add(chunks, moved.len() as u64);
                add(bytes, moved.len() as u64 * chunk_bytes);
            }
            Err(_) => add(failed, 1),
        }
        if moved.is_err() && transfer.direction == Direction::Retrieve {
            let op = &transfer.op;
            work.failed.insert(op.request_id.clone());
            if let [block_ids] = &op.block_ids[..] {
                // Blocks that are shared with the engine's own prefix cache were not touched.
                let skipped = op.skip_first_n_tokens / shared.common.engine.block_size as usize;
                work.failed_blocks.extend(block_ids.iter().skip(skipped));
            }
        }
        drop(work);
        shared.changed.notify_all();
    }
}

/// Returns the start of an answer that does not fit its request.
fn answered(reply: &Reply) -> String {
    shown(&format!("{reply:?}"))
}

/// Maps the pages of a slot by reads. The kernel maps 64 KiB for a read, but one page for a write,
/// and the first copy into a slot would take most of its time for that. A GPU needs no mapped
/// pages.
fn map_pages(slot: &[u8]) {
    for byte in slot.iter().step_by(64 << 10) {
        std::hint::black_box(*byte);
    }
}

/// Returns the memory of slots; `None` if a slot is not a chunk of the pool, or two slots overlap.
fn slot_memory(
    pool: &MappedSegment,
    slots: &[SlotDescriptor],
    chunk_bytes: u64,
) -> Option<Vec<NonNull<[u8]>>> {
    let mut ranges: Vec<(u64, u64)> = (slots.iter())
        .map(|slot| (slot.offset, slot.length))
        .collect();
    ranges.sort_unstable();
    let apart = (ranges.windows(2)).all(|pair| pair[0].0.saturating_add(pair[0].1) <= pair[1].0);
    let inside = |slot: &SlotDescriptor| {
        let end = slot.offset.checked_add(slot.length);
        slot.length == chunk_bytes && end.is_some_and(|end| end <= pool.len())
    };
    if !apart || !slots.iter().all(inside) {
        return None;
    }
    let memory = slots.iter().map(|slot| {
        // SAFETY: the range lies inside the mapping.
        let start = unsafe { pool.base_ptr().add(slot.offset as usize) };
        NonNull::slice_from_raw_parts(start, slot.length as usize)
    });
    Some(memory.collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lmc_memory::SharedName;

    use super::*;

    #[test]
    fn slots_that_are_no_chunks_of_the_pool_are_refused() {
        let name = format!("lmc_test_slots_{}", std::process::id());
        let name = SharedName::new(&name).expect("a name");
        fs::write(name.path(), [0; 4096]).expect("a segment");
        let pool = MappedSegment::open_pool(&name, 4096).expect("mapped");
        fs::remove_file(name.path()).expect("it is there");
        let fits = |slots: &[(u64, u64)]| {
            let slot = |&(offset, length): &(u64, u64)| SlotDescriptor {
                offset,
                length,
                ..SlotDescriptor::default()
            };
            let slots: Vec<_> = slots.iter().map(slot).collect();
            slot_memory(&pool, &slots, 1024).is_some()
        };
        assert!(fits(&[(3072, 1024), (0, 1024)]));
        for wrong in [
            &[(3073, 1024)][..],
            &[(u64::MAX, 1024)],
            &[(0, 1023)],
            &[(0, 2048)],
            &[(0, 1024), (1023, 1024)],
            &[(0, 1024), (0, 1024)],
        ] {
            assert!(!fits(wrong), "{wrong:?}");
        }
    }
}
