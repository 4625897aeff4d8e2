//! The lower tiers: writes to lower tiers, and promotion from lower tiers.
//!
//! All of this runs on a runtime in the background: a store never waits for a write to a lower tier, and a
//! lookup gets its promoted chunks later.

mod locate;
mod permits;
mod promote;
mod uses;
mod write_queue;

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use lmc_backend::{Backend, BackendError, ChunkRun, Cleared, Clears, Health, Sharing, now};
use lmc_backend_local::{LocalTier, Origin};
use lmc_key::{ChunkKey, FoldState, LayoutFingerprint, SpaceId};
use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use serde::Serialize;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};

use crate::TierHealth;
use crate::clears::ClearLog;
use crate::config::{EngineConfig, EngineError};
use crate::histogram::{Histogram, HistogramSnapshot};
use crate::policy::{LowerTier, TierPolicy, WritePolicy};
use crate::pushed::PushedChunks;
pub(crate) use locate::{ChunkSource, Sources, Waits};
use permits::Permits;
pub(crate) use promote::{Prompt, half_of};
use uses::Uses;
use write_queue::WriteQueue;
pub(crate) use write_queue::{Offer, OfferReason};

/// Longest time at the end of a close that is reserved for closing the tiers, after the writes.
const CLOSING: Duration = Duration::from_secs(1);

/// Time after a deadline in which tiers can still report their progress.
const ANSWER: Duration = Duration::from_secs(1);

/// Timeout of a tier for noting clears that the engine learned from elsewhere.
const LEARN_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the clears known to shared tiers are checked.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Content of a lower tier, and the chunks moved to and from it since the engine was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct LowerStatus {
    /// Name of the tier.
    pub tier: String,
    /// Tokens that lookups found in the tier, as counted with
    /// [`CacheEngine::count_hits`](crate::CacheEngine::count_hits).
    pub hit_tokens: u64,
    /// Number of chunks that the tier holds.
    pub chunks: u64,
    /// Payload bytes of the chunks that the tier holds.
    pub bytes: u64,
    /// Payload bytes that the tier may hold; none if there is no limit or it is unknown.
    pub capacity: Option<u64>,
    /// Payload bytes that are queued for writing to the tier or being written.
    pub queued_bytes: u64,
    /// Chunks written to the tier.
    pub written: u64,
    /// Payload bytes of the chunks written to the tier.
    pub written_bytes: u64,
    /// Chunks not written because the queue of writes was full.
    pub write_dropped: u64,
    /// Chunks that the tier declined, by its admission rule or for lack of capacity.
    pub write_declined: u64,
    /// Chunks whose write failed.
    pub write_failed: u64,
    /// Chunks promoted from the tier.
    pub promoted: u64,
    /// Payload bytes of the chunks promoted from the tier.
    pub promoted_bytes: u64,
    /// Chunks that the tier was said to have but did not have, or had with damaged bytes or another length
    /// than their space's chunks.
    pub promote_missed: u64,
    /// Chunks that could not be read, or not in time.
    pub promote_failed: u64,
    /// Chunks not read because recomputing them is faster.
    pub promote_skipped: u64,
    /// Lookups that the tier did not answer, or not in time.
    pub locate_failed: u64,
    /// Batches of chunks that the tier was given to write.
    pub write_batches: u64,
    /// Chunks that the tier was given to write.
    pub write_given: u64,
    /// Batches whose write has ended.
    pub write_batches_ended: u64,
    /// Batches of chunks that the tier was asked to read.
    pub promote_batches: u64,
    /// Chunks that the tier was asked to read.
    pub promote_asked: u64,
    /// Batches whose read has ended.
    pub promote_batches_ended: u64,
    /// Payload bytes of the chunks that are being read from the tier now.
    pub promoting_bytes: u64,
    /// Counters of the tier's own.
    pub counters: BTreeMap<&'static str, u64>,
    /// Times from asking the tier for chunks to each chunk in DRAM.
    #[serde(skip)]
    pub read_time: HistogramSnapshot,
    /// Times from giving chunks to the tier to each chunk being stored there.
    #[serde(skip)]
    pub write_time: HistogramSnapshot,
}

/// Counters of one tier.
#[derive(Debug, Default)]
struct TierCounters {
    hit_tokens: AtomicU64,
    written: AtomicU64,
    written_bytes: AtomicU64,
    write_dropped: AtomicU64,
    write_declined: AtomicU64,
    write_failed: AtomicU64,
    promoted: AtomicU64,
    promoted_bytes: AtomicU64,
    promote_missed: AtomicU64,
    promote_failed: AtomicU64,
    promote_skipped: AtomicU64,
    locate_failed: AtomicU64,
    write_batches: AtomicU64,
    write_given: AtomicU64,
    write_batches_ended: AtomicU64,
    promote_batches: AtomicU64,
    promote_asked: AtomicU64,
    promote_batches_ended: AtomicU64,
    promoting_bytes: AtomicU64,
    read_time: Histogram,
    write_time: Histogram,
}

fn count(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

#[derive(Debug)]
struct Tier {
    backend: Arc<dyn Backend>,
    policy: TierPolicy,
    /// Counts of uses, for admission; `None` if every chunk is admitted.
    uses: Option<Uses>,
    queue: WriteQueue,
    counters: TierCounters,
    /// Time until which no prompt waits for this tier if other tiers have its chunks.
    late_until: Mutex<Option<Instant>>,
    _kept: Option<Arc<dyn fmt::Debug + Send + Sync>>,
}

/// Settings of the work with lower tiers.
#[derive(Debug)]
struct Limits {
    promotion_timeout: Duration,
    pending_timeout: Duration,
    recompute_time: Option<Duration>,
}

/// The lower tiers and the state that their tasks and the engine share.
#[derive(Debug)]
pub(crate) struct Tiers {
    local: LocalTier,
    tiers: Vec<Tier>,
    clears: ClearLog,
    limits: Limits,
    permits: Permits,
    /// Chunks that prompts are promoting.
    promoting: Mutex<HashSet<ChunkKey, FoldState>>,
    /// Notified when chunks are not promoted any more.
    promoted: Notify,
    /// Chunks that peers have pushed or are pushing.
    pushed: Arc<PushedChunks>,
    /// Locked for writing while chunks are removed from DRAM and the write queues, so that no chunk is
    /// offered that DRAM no longer has.
    removal: RwLock<()>,
    /// Chunks that are being removed from all tiers, and must not be promoted meanwhile.
    removing: Mutex<Vec<Arc<HashSet<ChunkKey>>>>,
    /// Notified when clears were learned from elsewhere and have to be passed on to the tiers.
    learned: Notify,
    promotion_time: Histogram,
    first_chunk_time: Histogram,
    /// Number of lookups that continued in lower tiers. The next field counts the chunks that they looked up.
    lookups: AtomicU64,
    lookup_chunks: AtomicU64,
}

/// Chunks that were not written to a tier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unwritten {
    /// Number of chunks for which there was not enough time.
    pub(crate) late: u64,
    /// Number of chunks that a tier declined.
    pub(crate) declined: u64,
    /// Number of chunks whose write failed, or that were dropped because the queue was full.
    pub(crate) failed: u64,
}

/// The lower tiers, and the tasks that serve them. The tasks end when this is dropped.
pub(crate) struct LowerTiers {
    tiers: Arc<Tiers>,
    tasks: Mutex<JoinSet<()>>,
    handle: Handle,
    /// The runtime, if the engine started its own. `None` while this is being dropped.
    runtime: Option<Runtime>,
}

impl LowerTiers {
    pub(crate) fn start(
        local: LocalTier,
        lower: Vec<LowerTier>,
        clears: ClearLog,
        pushed: Arc<PushedChunks>,
        runtime: Option<Handle>,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let found = lower.len();
        if found > Origin::MAX_TIERS {
            return Err(EngineError::TooManyTiers { found });
        }
        let pool = local.pool().usage().capacity;
        let promotion_bytes = config.promotion_bytes.unwrap_or(u64::MAX).min(pool / 4);
        let units = promotion_bytes / promote::UNIT;
        let promotion_units = units.clamp(1, u64::from(u32::MAX >> 4)) as u32;
        let tier = |tier: LowerTier| {
            let LowerTier {
                backend,
                policy,
                kept,
            } = tier;
            Tier {
                _kept: kept,
                backend,
                uses: Uses::of_policy(policy.admit),
                queue: WriteQueue::new(policy.write_queue_bytes.unwrap_or(pool / 8)),
                counters: TierCounters::default(),
                late_until: Mutex::default(),
                policy,
            }
        };
        let tiers = Arc::new(Tiers {
            local,
            tiers: lower.into_iter().map(tier).collect(),
            clears,
            limits: Limits {
                promotion_timeout: config.promotion_timeout,
                pending_timeout: config.pending_timeout,
                recompute_time: config.recompute_time,
            },
            permits: Permits::new(promotion_units, found),
            promoting: Mutex::default(),
            promoted: Notify::new(),
            pushed,
            removal: RwLock::new(()),
            removing: Mutex::default(),
            learned: Notify::new(),
            promotion_time: Histogram::default(),
            first_chunk_time: Histogram::default(),
            lookups: AtomicU64::new(0),
            lookup_chunks: AtomicU64::new(0),
        });
        let (handle, runtime) = match runtime {
            Some(handle) => (handle, None),
            None => {
                let own = Builder::new_multi_thread()
                    .worker_threads(2)
                    .thread_name("lmc-engine")
                    .enable_time()
                    .build()?;
                (own.handle().clone(), Some(own))
            }
        };
        let this = Self {
            tasks: Mutex::default(),
            handle,
            runtime,
            tiers,
        };
        for (index, tier) in this.tiers.tiers.iter().enumerate() {
            if tier.backend.writer().is_some() {
                this.spawn(write_queue::serve(Arc::clone(&this.tiers), index));
            }
        }
        this.spawn(Arc::clone(&this.tiers).pass_clears_on());
        // A tier may not have noted all clears that the other tiers know.
        this.tiers.pass_on_clears();
        if this.tiers.has_shared() {
            this.spawn(Arc::clone(&this.tiers).follow_clears());
        }
        Ok(this)
    }

    /// Runs a task that ends when these tiers are dropped.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> AbortHandle {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn_on(task, &self.handle)
    }

    pub(crate) fn tiers(&self) -> &Arc<Tiers> {
        &self.tiers
    }

    pub(crate) fn count_hits(&self, tier: usize, tokens: u64) {
        if let Some(tier) = self.tiers.tiers.get(tier) {
            count(&tier.counters.hit_tokens, tokens);
        }
    }

    /// Returns the state of each tier.
    pub(crate) fn health(&self) -> impl Iterator<Item = TierHealth> {
        self.tiers.tiers.iter().map(|tier| TierHealth {
            tier: tier.backend.name().to_owned(),
            fault: match tier.backend.health() {
                Health::Degraded { reason } | Health::Down { reason } => Some(reason),
                _ => None,
            },
        })
    }

    pub(crate) fn status(&self) -> Vec<LowerStatus> {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let status = |tier: &Tier| {
            let usage = tier.backend.usage().unwrap_or_default();
            let counters = &tier.counters;
            LowerStatus {
                tier: tier.backend.name().to_owned(),
                hit_tokens: read(&counters.hit_tokens),
                chunks: usage.chunks,
                bytes: usage.bytes,
                capacity: usage.capacity,
                queued_bytes: tier.queue.bytes(),
                written: read(&counters.written),
                written_bytes: read(&counters.written_bytes),
                write_dropped: read(&counters.write_dropped),
                write_declined: read(&counters.write_declined),
                write_failed: read(&counters.write_failed),
                promoted: read(&counters.promoted),
                promoted_bytes: read(&counters.promoted_bytes),
                promote_missed: read(&counters.promote_missed),
                promote_failed: read(&counters.promote_failed),
                promote_skipped: read(&counters.promote_skipped),
                locate_failed: read(&counters.locate_failed),
                // Read first, so that no more batches have ended than begun.
                write_batches_ended: read(&counters.write_batches_ended),
                write_batches: read(&counters.write_batches),
                write_given: read(&counters.write_given),
                promote_batches_ended: read(&counters.promote_batches_ended),
                promote_batches: read(&counters.promote_batches),
                promote_asked: read(&counters.promote_asked),
                promoting_bytes: read(&counters.promoting_bytes),
                counters: tier.backend.counters().into_iter().collect(),
                read_time: counters.read_time.snapshot(),
                write_time: counters.write_time.snapshot(),
            }
        };
        self.tiers.tiers.iter().map(status).collect()
    }

    /// Passes clears to all tiers at the same time. Waits for their answers, at most until the deadline, and
    /// returns each answer with the tier's name.
    pub(crate) fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> Vec<(String, Result<Cleared, BackendError>)> {
        let tiers = Arc::clone(&self.tiers);
        let answers = self.wait(deadline + ANSWER, async move {
            tiers.tell(clears, deadline).await
        });
        let answers = answers.unwrap_or_else(|| {
            let late = self.tiers.tiers.iter().map(|_| Err(BackendError::Deadline));
            late.collect()
        });
        let names = self.tiers.tiers.iter().map(|tier| tier.backend.name());
        names.map(str::to_owned).zip(answers).collect()
    }

    /// Removes chunks from every tier, and from DRAM by `remove_dram`, which is called first. A chunk that is
    /// being written or read meanwhile is not found afterwards. Waits for the tiers, at most until the
    /// deadline.
    ///
    /// Returns the result of `remove_dram`, whether each chunk was in any tier, and whether every tier has
    /// removed all chunks.
    pub(crate) fn remove<T>(
        &self,
        keys: &[ChunkKey],
        deadline: Instant,
        remove_dram: impl FnOnce() -> T,
    ) -> (T, Vec<bool>, bool) {
        let removed: Arc<HashSet<ChunkKey>> = Arc::new(keys.iter().copied().collect());
        self.tiers.removing.lock().push(Arc::clone(&removed));
        let done = {
            let _alone = self.tiers.removal.write();
            let tiers = self.tiers.tiers.iter();
            tiers.for_each(|tier| tier.queue.drop_queued_of(|key| removed.contains(key)));
            remove_dram()
        };
        let tiers = Arc::clone(&self.tiers);
        let asked: Arc<[ChunkKey]> = keys.into();
        let found = self.wait(deadline + ANSWER, async move {
            let of_tiers = tiers.tiers.iter().map(|tier| tier.remove(&asked, deadline));
            let (mut any, mut all) = (vec![false; asked.len()], true);
            for (found, complete) in join_all(of_tiers).await {
                any.iter_mut()
                    .zip(found)
                    .for_each(|(any, found)| *any |= found);
                all &= complete;
            }
            (any, all)
        });
        let is_over = |set: &Arc<_>| Arc::ptr_eq(set, &removed);
        self.tiers.removing.lock().retain(|set| !is_over(set));
        let (found, all) = found.unwrap_or_else(|| (vec![false; keys.len()], false));
        (done, found, all)
    }

    /// Drops the queued writes of some spaces.
    pub(crate) fn drop_writes_of(&self, spaces: &HashSet<SpaceId>) {
        self.tiers.drop_writes_of(spaces);
    }

    /// Returns the bytes of memory held by queued writes.
    pub(crate) fn queued(&self) -> u64 {
        // One slot may be queued for several tiers.
        let queued = self.tiers.tiers.iter().map(|tier| tier.queue.bytes());
        queued.max().unwrap_or(0)
    }

    /// Waits until all writes have ended, then closes the tiers. Returns the names of tiers that could not be
    /// closed, each with the reason, and the number of chunks not written since the engine was made.
    pub(crate) fn close(&self, deadline: Instant) -> (Vec<(String, BackendError)>, Unwritten) {
        let tiers = Arc::clone(&self.tiers);
        let left = deadline.saturating_duration_since(now());
        // The rest of the time is for the tiers to make the written chunks durable.
        let writes_until = deadline - (left / 8).min(CLOSING);
        let closed = self.wait(deadline + ANSWER, async move {
            let closed = tiers.tiers.iter();
            let closed = join_all(closed.map(|tier| tier.close(writes_until, deadline)));
            let (mut failed, mut late) = (Vec::new(), 0);
            for (tier, (closed, left)) in tiers.tiers.iter().zip(closed.await) {
                late += left;
                if let Err(error) = closed {
                    failed.push((tier.backend.name().to_owned(), error));
                }
            }
            let unwritten = tiers.unwritten();
            (failed, Unwritten { late, ..unwritten })
        });
        closed.unwrap_or_else(|| {
            let tiers = &self.tiers.tiers;
            let late = tiers.iter().map(|tier| tier.queue.left()).sum();
            let unwritten = self.tiers.unwritten();
            let failed = tiers.iter().map(|tier| tier.backend.name().to_owned());
            let failed = failed.map(|name| (name, BackendError::Deadline)).collect();
            (failed, Unwritten { late, ..unwritten })
        })
    }

    /// Runs a future on the runtime and waits for it. Returns `None` if the deadline passed first.
    fn wait<T: Send + 'static>(
        &self,
        deadline: Instant,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = self.spawn(async move {
            // The caller may have stopped waiting.
            let _ = sender.send(work.await);
        });
        let left = deadline.saturating_duration_since(now());
        let done = receiver.recv_timeout(left).ok();
        if done.is_none() {
            task.abort();
        }
        done
    }
}

impl Tier {
    /// Marks the tier as late: it did not answer within the grace time although other tiers have all chunks.
    fn note_late(&self) {
        count(&self.counters.locate_failed, 1);
        *self.late_until.lock() = Some(now() + locate::LATE);
    }

    fn is_late(&self) -> bool {
        self.late_until.lock().is_some_and(|until| now() < until)
    }

    /// Removes chunks, also those that are being written. Returns for each whether it was present, and
    /// whether all of them are gone.
    async fn remove(&self, keys: &[ChunkKey], deadline: Instant) -> (Vec<bool>, bool) {
        let Some(writer) = self.backend.writer() else {
            return (vec![false; keys.len()], true);
        };
        // A tier that breaks its contract must not delay the answers of the others.
        let until = tokio::time::Instant::from_std(deadline + ANSWER / 2);
        let remove = || async {
            let removed = tokio::time::timeout_at(until, writer.remove(keys, deadline));
            let late = || keys.iter().map(|_| Err(BackendError::Deadline)).collect();
            removed.await.unwrap_or_else(|_| late())
        };
        let writes = self.queue.is_writing();
        let mut removed = remove().await;
        let is_found = |removed: &Result<bool, _>| matches!(removed, Ok(true));
        let found = removed.iter().map(is_found).collect();
        let mut all = true;
        if writes {
            // A chunk that was being written is present once its write has ended.
            all = self.queue.settled(deadline).await;
            removed = remove().await;
        }
        (found, all && removed.iter().all(Result::is_ok))
    }

    /// Waits for the writes, at most until `writes_until`, then closes the tier. Also returns the number of
    /// chunks that were not written for lack of time.
    async fn close(
        &self,
        writes_until: Instant,
        deadline: Instant,
    ) -> (Result<(), BackendError>, u64) {
        self.queue.idle(writes_until).await;
        let late = self.queue.drop_queued();
        // A tier that breaks its contract gets the same time to answer as the others.
        let until = tokio::time::Instant::from_std(deadline + ANSWER / 2);
        let closed = tokio::time::timeout_at(until, self.backend.close(deadline)).await;
        // A closed tier still answers the writes that it was given.
        self.queue.idle(now() + ANSWER / 4).await;
        let closed = closed.unwrap_or(Err(BackendError::Deadline));
        (closed, late + self.queue.left())
    }
}

impl Tiers {
    /// Counts a lookup that continues in lower tiers, with the number of chunks that DRAM lacks.
    pub(crate) fn count_lookup(&self, chunks: usize) {
        count(&self.lookups, 1);
        count(&self.lookup_chunks, chunks as u64);
    }

    /// Returns the number of lookups that continued in lower tiers, and of the chunks that they looked up.
    pub(crate) fn lookups(&self) -> (u64, u64) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (read(&self.lookups), read(&self.lookup_chunks))
    }

    /// Counts the time of a lookup that asked or read tiers.
    pub(crate) fn record_promotion(&self, took: Duration) {
        self.promotion_time.record(took);
    }

    /// Returns the times of promotions, and the times to the first chunks.
    pub(crate) fn times(&self) -> (HistogramSnapshot, HistogramSnapshot) {
        let first_chunk = self.first_chunk_time.snapshot();
        (self.promotion_time.snapshot(), first_chunk)
    }

    /// Returns the timeout of a promotion.
    pub(crate) fn promotion_timeout(&self) -> Duration {
        self.limits.promotion_timeout
    }

    /// Returns the time to wait for chunks that an engine is writing.
    pub(crate) fn pending_timeout(&self) -> Duration {
        self.limits.pending_timeout
    }

    pub(crate) fn name(&self, index: usize) -> Option<&str> {
        self.tiers.get(index).map(|tier| tier.backend.name())
    }

    /// Returns the longest time that a lookup takes.
    pub(crate) fn lookup_timeout(&self) -> Duration {
        let limits = &self.limits;
        let locate = self.tiers.iter().map(|tier| tier.policy.locate_timeout);
        let locate = locate.max().unwrap_or_default();
        // Two rounds of asking, one more for chunks that fail to load, and the wait for chunks that are being
        // written.
        3 * locate + limits.pending_timeout + limits.promotion_timeout
    }

    /// Returns the indices of the tiers that chunks are written to under this policy.
    pub(crate) fn written(&self, when: WritePolicy) -> impl Iterator<Item = usize> {
        let tiers = self.tiers.iter().enumerate();
        let is_written =
            move |tier: &Tier| tier.policy.write == when && tier.backend.writer().is_some();
        tiers
            .filter(move |(_, tier)| is_written(tier))
            .map(|(index, _)| index)
    }

    /// Returns true if there is a tier that chunks are written to under this policy.
    pub(crate) fn has_written(&self, when: WritePolicy) -> bool {
        self.written(when).next().is_some()
    }

    /// Returns true if a tier's queue of writes has capacity for a chunk.
    pub(crate) fn has_capacity(&self, tier: usize, bytes: u64) -> bool {
        self.tiers[tier].queue.has_capacity(bytes)
    }

    /// Returns true if a tier is offered promoted chunks, or counts promotions as uses.
    fn takes_promoted(&self) -> bool {
        self.counts_uses() || self.tiers.iter().any(|tier| tier.policy.fill)
    }

    /// Returns true if there is a tier that stores chunks on reuse only.
    pub(crate) fn counts_uses(&self) -> bool {
        self.tiers.iter().any(|tier| tier.uses.is_some())
    }

    /// Blocks the removal of chunks until the guard is dropped. A caller that offers chunks holds the guard
    /// from finding or committing them until the offer.
    pub(crate) fn block_removal(&self) -> RwLockReadGuard<'_, ()> {
        self.removal.read()
    }

    /// Returns a weak handle, for callers that offer chunks and must not keep the tiers alive.
    pub(crate) fn downgrade(self: &Arc<Self>) -> Weak<Self> {
        Arc::downgrade(self)
    }

    /// Returns the number of chunks not written since the engine was made.
    pub(crate) fn unwritten(&self) -> Unwritten {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut unwritten = Unwritten::default();
        for Tier { counters, .. } in &self.tiers {
            unwritten.declined += read(&counters.write_declined);
            unwritten.failed += read(&counters.write_dropped) + read(&counters.write_failed);
        }
        unwritten
    }

    fn drop_writes_of(&self, spaces: &HashSet<SpaceId>) {
        for tier in &self.tiers {
            let of_spaces = |key: &ChunkKey| spaces.contains(&key.space);
            tier.queue.drop_queued_of(of_spaces);
        }
    }

    /// Returns for each layout whether the tiers reach other processes that use it, as
    /// [`Backend::has_layouts`] does.
    pub(crate) fn have_layouts(
        &self,
        layouts: &[(LayoutFingerprint, u32)],
        sources: &[String],
    ) -> Vec<bool> {
        let mut found = vec![false; layouts.len()];
        for tier in &self.tiers {
            let of_tier = tier.backend.has_layouts(layouts, sources);
            found
                .iter_mut()
                .zip(of_tier)
                .for_each(|(found, has)| *found |= has);
        }
        found
    }

    /// Returns true if a prompt is promoting the chunk.
    pub(crate) fn is_promoting(&self, key: &ChunkKey) -> bool {
        self.promoting.lock().contains(key)
    }

    pub(crate) fn clears(&self) -> &ClearLog {
        &self.clears
    }

    pub(crate) fn push(&self, run: ChunkRun, to: &str) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|tier| tier.backend.push(run.clone(), to))
    }

    /// Returns true if there is a tier through which other processes may pass on clears.
    pub(crate) fn has_shared(&self) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|tier| tier.backend.sharing() == Sharing::Shared)
    }

    /// Empties the write queues, and DRAM by `empty_dram`. No chunk is offered in between.
    pub(crate) fn empty<T>(&self, empty_dram: impl FnOnce() -> T) -> T {
        let _alone = self.removal.write();
        for tier in &self.tiers {
            tier.queue.drop_queued();
        }
        empty_dram()
    }

    /// Passes learned clears on to all tiers, in the background.
    pub(crate) fn pass_on_clears(&self) {
        self.learned.notify_one();
    }

    /// Passes clears to all tiers at the same time.
    async fn tell(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> Vec<Result<Cleared, BackendError>> {
        // A tier that breaks its contract must not delay the answers of the others.
        let late = tokio::time::Instant::from_std(deadline + ANSWER / 2);
        let noted = self.tiers.iter().map(|tier| {
            let noted = tier.backend.clear(Arc::clone(&clears), deadline);
            tokio::time::timeout_at(late, noted)
        });
        let noted = join_all(noted).await;
        let answer = |noted: Result<_, _>| noted.unwrap_or(Err(BackendError::Deadline));
        noted.into_iter().map(answer).collect()
    }

    /// Passes learned clears on to all tiers, until the task is aborted. No lookup waits for this: a tier's
    /// chunks from before the clears have other names.
    async fn pass_clears_on(self: Arc<Self>) {
        loop {
            self.learned.notified().await;
            // An error shows in the tier's health.
            self.tell(self.clears.clears(), now() + LEARN_TIMEOUT).await;
        }
    }

    /// Carries out the clears that shared tiers learn of, until the task is aborted.
    async fn follow_clears(self: Arc<Self>) {
        loop {
            for tier in &self.tiers {
                if tier.backend.sharing() != Sharing::Shared {
                    continue;
                }
                let (clears, learned) = (self.clears.clone(), tier.backend.clears());
                if clears.clears().contains(&learned) {
                    continue;
                }
                // Blocks until the state file is written.
                let from = tier.backend.name().to_owned();
                let learning = move || clears.learn(&learned, &from);
                let learning = tokio::task::spawn_blocking(learning);
                if let Ok(Err(error)) = learning.await {
                    tracing::error!(tier = tier.backend.name(), %error, "clears of other daemons are not carried out");
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

impl fmt::Debug for LowerTiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LowerTiers").field(&self.tiers).finish()
    }
}

impl Drop for LowerTiers {
    fn drop(&mut self) {
        self.tasks.get_mut().abort_all();
        let Some(runtime) = self.runtime.take() else {
            return;
        };
        // The last handle may be dropped on one of the runtime's own threads, at the end of a promotion. Such
        // a thread cannot wait for its own runtime.
        if Handle::try_current().is_ok() {
            runtime.shutdown_background();
        } else {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}
