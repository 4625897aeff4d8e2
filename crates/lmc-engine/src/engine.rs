//! `CacheEngine`: one object over all tiers.

pub(crate) mod context;
mod drain;
pub(crate) mod host;
pub(crate) mod lookup;
pub(crate) mod merge;

use std::collections::HashSet;
use std::future::Future;
use std::hash::{BuildHasher as _, RandomState};
use std::iter;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use lmc_backend::{BackendError, ChunkRun, DRAM, Host, now};
use lmc_backend_local::{
    Clear, Inserted, Leases, LocalConfig, LocalTier, MarkId, Origin, OwnerId, TenantId, WriteStart,
};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, LayoutFingerprint, SpaceId};
use lmc_memory::{Arena, Pool, PoolConfig, SealedSlot, SharedName};
use parking_lot::{Condvar, Mutex};
use tokio::task::AbortHandle;

use crate::clears::{ClearError, ClearLog};
use crate::config::{EngineConfig, EngineError};
use crate::demand::{Demand, DemandCurve};
use crate::engine::context::EngineContext;
use crate::engine::host::EngineHost;
use crate::events::{Lives, Relay};
use crate::ghosts::Ghosts;
use crate::lower::{LowerStatus, LowerTiers, Offer, OfferReason, Tiers};
use crate::policy::WritePolicy;
use crate::pushed::PushedChunks;
use crate::request::Rank;
use crate::status::{EngineStats, EngineTimes, EngineUsage, TenantStatus, TierHealth};
use crate::store::{StoreRequest, StoreStart, StoreTicket, UnderWay};

/// Chunks evicted under one lock above the high watermark; other threads can take the lock in between.
const EVICT_AT_ONCE: usize = 256;
/// Longest time at the end of a close in which no more chunks are offered to lower tiers.
const CLOSE_MARGIN: Duration = Duration::from_secs(2);
/// Value of [`Inner::unoffered`] before DRAM is written back.
const NOT_BEGUN: u64 = u64::MAX;

/// Owner of the leases that the engine takes while it offers chunks to lower tiers for writing.
pub(crate) const WRITER: OwnerId = OwnerId(u64::MAX - 1);
/// Timeout of lower tiers for a clear or a removal.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Treatment of chunks that are in use during a clear.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// The chunks stay in DRAM for their lease holders.
    Keep,
    /// The chunks are removed as well; their memory is released with the last lease.
    Remove,
}

impl InUse {
    /// Returns the treatment for a request with or without force.
    pub fn of_force(force: bool) -> Self {
        match force {
            true => Self::Remove,
            false => Self::Keep,
        }
    }
}

/// Outcome of [`CacheEngine::clear`]. In any case this engine no longer finds chunks that were computed
/// before the clear.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleared {
    /// Number of chunks removed from DRAM.
    pub dram: u64,
    /// Number of chunks that stay in DRAM until their last lease ends. Only holders of earlier leases can
    /// read them.
    pub leased: u64,
    /// Number of chunks removed from lower tiers.
    pub lower: u64,
    /// Names of the media from which a restart learns of the clear: `state file`, and tiers. If the list is
    /// empty and no other process knows of the clear, a restart undoes it.
    pub durable: Vec<String>,
    /// Tiers, peers and stores that have not confirmed the clear, with the reason if known. They may still
    /// have chunks from before the clear, and serve them to other processes.
    pub unconfirmed: Vec<String>,
}

impl Cleared {
    /// Returns true if a restart finds the clear, and every tier, peer and store has confirmed it.
    pub fn is_complete(&self) -> bool {
        !self.durable.is_empty() && self.unconfirmed.is_empty()
    }
}

/// Outcome of [`CacheEngine::remove`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// True for each chunk that was present, in order.
    pub found: Vec<bool>,
    /// True if no tier has any of the chunks now. Otherwise a lower tier is faulty or too slow, and may still
    /// have some of them.
    pub complete: bool,
}

/// A task on the runtime of the lower tiers, aborted when this handle is dropped.
#[derive(Debug)]
pub struct EngineTask(AbortHandle);

impl Drop for EngineTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Outcome of [`CacheEngine::close`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct CloseReport {
    /// Names of the tiers that could not be closed, each with the reason.
    pub failed: Vec<(String, BackendError)>,
    /// Number of chunks that were not written to a tier for lack of time.
    pub late: u64,
    /// Number of chunks that a tier declined.
    pub declined: u64,
    /// Number of chunks whose write failed.
    pub write_failed: u64,
}

impl CloseReport {
    /// Returns true if every tier was closed and every chunk was written.
    pub fn is_complete(&self) -> bool {
        self.failed.is_empty() && self.late + self.declined + self.write_failed == 0
    }
}

/// A KV cache over DRAM and lower tiers.
///
/// A handle: clones share one engine. Safe to use from any number of threads.
#[derive(Clone, Debug)]
pub struct CacheEngine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tier: LocalTier,
    host: EngineHost,
    /// Chunks that clears have left in DRAM because they were leased; removed when their last lease ends.
    left: Mutex<Vec<ChunkKey>>,
    lower: Option<LowerTiers>,
    pushed: Arc<PushedChunks>,
    /// Number of chunks that were merged from those of several ranks.
    merged: AtomicU64,
    /// Number of watermark checks. `watermark_evictions` counts the checks that evicted chunks.
    watermark_checks: AtomicU64,
    watermark_evictions: AtomicU64,
    ghosts: Arc<Ghosts>,
    demand: Demand,
    lives: Arc<Lives>,
    /// Bytes that a drain or a close still has to offer to lower tiers, or [`NOT_BEGUN`].
    unoffered: AtomicU64,
    /// True while the engine accepts no chunks.
    is_draining: AtomicBool,
    /// Number of stores that have begun and are neither committed nor dropped.
    storing: Arc<AtomicU64>,
    stop: Arc<Stop>,
}

impl Inner {
    /// Empties DRAM, and remembers the chunks that have to stay for now. Returns the number of chunks
    /// removed, and of chunks that stay.
    fn empty(&self, which: Clear) -> (u64, u64) {
        // The latest clear decides.
        let mut left = self.left.lock();
        let cleared = self.tier.clear(which);
        *left = cleared.left;
        let spaces = left.iter().map(|key| key.space).collect();
        self.host.clear_log().forget_names(&spaces);
        (cleared.removed, left.len() as u64)
    }

    /// Empties DRAM and the write queues after clears that were made elsewhere.
    fn empty_after_learning(&self) {
        match &self.lower {
            Some(lower) => lower.tiers().empty(|| self.empty(Clear::Unleased)),
            None => self.empty(Clear::Unleased),
        };
        if let Some(lower) = &self.lower {
            lower.tiers().pass_on_clears();
        }
    }

    /// Removes chunks that clears have left, once they are not leased any more.
    fn remove_left(&self) {
        let mut left = self.left.lock();
        if !left.is_empty() {
            *left = self.tier.remove_unleased(&left);
        }
    }

    /// Returns the lower tiers if chunks are written back to at least one of them.
    fn written_back(&self) -> Option<&LowerTiers> {
        self.lower.as_ref().filter(is_written_back)
    }
}

fn is_written_back(lower: &&LowerTiers) -> bool {
    lower.tiers().has_written(WritePolicy::Back)
}

/// Converts the keys of a request to names. A prompt has one space, so its name is computed once.
struct Namer<F> {
    name: F,
    last: Option<(SpaceId, SpaceId)>,
}

impl<F: Fn(SpaceId) -> SpaceId> Namer<F> {
    fn new(name: F) -> Self {
        Self { name, last: None }
    }

    fn key(&mut self, key: ChunkKey) -> ChunkKey {
        let (_, space) = match self.last {
            Some(last) if last.0 == key.space => last,
            _ => *self.last.insert((key.space, (self.name)(key.space))),
        };
        ChunkKey { space, ..key }
    }
}

/// Signal that ends the maintenance thread.
#[derive(Debug, Default)]
struct Stop {
    stopped: Mutex<bool>,
    wake: Condvar,
}

impl Drop for Inner {
    fn drop(&mut self) {
        *self.stop.stopped.lock() = true;
        self.stop.wake.notify_all();
    }
}

/// A handle that does not keep the engine alive.
#[derive(Clone, Debug)]
pub(crate) struct WeakEngine(Weak<Inner>);

impl WeakEngine {
    /// Returns the engine; `None` once it is gone.
    pub(crate) fn upgrade(&self) -> Option<CacheEngine> {
        self.0.upgrade().map(CacheEngine)
    }
}

impl EngineConfig {
    /// Starts an engine.
    ///
    /// # Errors
    /// [`EngineError`] names the setting that is invalid.
    pub fn start(self, context: EngineContext) -> Result<CacheEngine, EngineError> {
        let EngineContext {
            arena,
            tiers: lower,
            host,
            runtime,
        } = context;
        let pool = Pool::new(arena, PoolConfig::default().with_align(self.align))?;
        if host.is_taken() {
            return Err(EngineError::Host);
        }
        for tier in &lower {
            host.learn_of(&*tier.backend)?;
        }
        let clears = host.clear_log();
        let pushed = Arc::new(PushedChunks::new(pool.usage().capacity / 4));
        let ghosts = Arc::new(Ghosts::new(pool.arena().len() as u64));
        host.events().listen(Arc::clone(&ghosts) as _);
        let lives = Arc::<Lives>::default();
        let relay = Relay::new(
            clears.clone(),
            host.events().clone(),
            Arc::clone(&pushed),
            Arc::clone(&lives),
        );
        let relay = Arc::new(relay);
        let mut local = LocalConfig::default()
            .with_policy(self.policy)
            .with_watermarks(self.high_watermark, self.low_watermark);
        if let Some(shards) = self.shards {
            local = local.with_shards(shards);
        }
        let tier = local.build(pool, Some(Arc::clone(&relay) as _))?;
        let lower = match lower.is_empty() {
            true => None,
            false => Some(LowerTiers::start(
                tier.clone(),
                lower,
                clears.clone(),
                Arc::clone(&pushed),
                runtime,
                &self,
            )?),
        };
        if let Some(lower) = lower.as_ref().filter(is_written_back) {
            relay.offer_evicted(lower.tiers().downgrade());
        }
        let stop = Arc::new(Stop::default());
        let inner = Arc::new(Inner {
            tier,
            host,
            left: Mutex::default(),
            lower,
            pushed,
            merged: AtomicU64::new(0),
            watermark_checks: AtomicU64::new(0),
            watermark_evictions: AtomicU64::new(0),
            ghosts,
            demand: Demand::new(RandomState::new().hash_one(())),
            lives,
            unoffered: AtomicU64::new(NOT_BEGUN),
            is_draining: AtomicBool::new(false),
            storing: Arc::default(),
            stop: Arc::clone(&stop),
        });
        let weak = Arc::downgrade(&inner);
        if !inner.host.set_engine(WeakEngine(Weak::clone(&weak))) {
            return Err(EngineError::Host);
        }
        // Until now the host had no chunks, not even those on drives.
        inner.host.events().report_any(DRAM);
        let learned = Weak::clone(&weak);
        inner.host.clear_log().on_learned(move || {
            if let Some(inner) = learned.upgrade() {
                inner.empty_after_learning();
            }
        });
        thread::Builder::new()
            .name("lmc-evict".to_owned())
            .spawn(move || maintain(&weak, &stop, self.maintain_every))?;
        Ok(CacheEngine(inner))
    }
}

impl CacheEngine {
    /// Leases the leading chunks that are in DRAM, and offers them to lower tiers that store chunks on reuse.
    pub(crate) fn lease_and_offer(&self, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
        let lower = self.lower();
        let Some(lower) = lower.filter(|lower| lower.tiers().counts_uses()) else {
            return self.0.tier.lease_leading(owner, keys);
        };
        // No chunk is removed between the lease and the offer.
        let _held = lower.tiers().block_removal();
        let leases = self.0.tier.lease_leading(owner, keys);
        let found = leases.iter().zip(leases.origins()).enumerate();
        let offer = |(index, (slot, origin)): (usize, (&SealedSlot, Origin))| Offer {
            key: keys[index],
            parent: index.checked_sub(1).map(|before| keys[before]),
            origin,
            slot: slot.clone(),
        };
        let offers: Vec<Offer> = found.map(offer).collect();
        lower.tiers().offer(&offers, OfferReason::Found);
        leases
    }

    pub(crate) fn lower(&self) -> Option<&LowerTiers> {
        self.0.lower.as_ref()
    }

    pub(crate) fn pushed(&self) -> &Arc<PushedChunks> {
        &self.0.pushed
    }

    pub(crate) fn ghosts(&self) -> &Ghosts {
        &self.0.ghosts
    }

    pub(crate) fn local(&self) -> &LocalTier {
        &self.0.tier
    }

    /// Returns true if there are lower tiers.
    pub fn has_lower_tiers(&self) -> bool {
        self.0.lower.is_some()
    }

    /// Returns the name of the lower tier with this index.
    pub fn tier_name(&self, index: usize) -> Option<&str> {
        let lower = self.0.lower.as_ref()?;
        lower.tiers().name(index)
    }

    /// Counts the tokens of chunks that a lookup found, by the lower tier that the chunks were read from.
    /// `chunk_tokens` is the number of tokens of a chunk.
    pub fn count_hits(&self, runs: &[crate::TierRun], chunk_tokens: u64) {
        let Some(lower) = self.0.lower.as_ref() else {
            return;
        };
        for run in runs {
            if let Some(tier) = run.tier {
                lower.count_hits(tier, run.chunks as u64 * chunk_tokens);
            }
        }
    }

    /// Returns true if a lower tier has chunks that were stored under other settings than this process has
    /// ([`Backend::has_unreachable`](lmc_backend::Backend::has_unreachable)).
    pub fn has_unreachable(&self) -> bool {
        let lower = self.0.lower.as_ref();
        lower.is_some_and(|lower| lower.tiers().has_unreachable())
    }

    /// Returns true if a lower tier is shared with other processes, so that they can read chunks of this
    /// process and this process theirs.
    pub fn has_shared_tiers(&self) -> bool {
        let lower = self.0.lower.as_ref();
        lower.is_some_and(|lower| lower.tiers().has_shared())
    }

    /// Returns the longest time that [`Lookup::wait`](crate::Lookup::wait) takes; zero without
    /// lower tiers.
    pub fn lookup_timeout(&self) -> Duration {
        let lower = self.0.lower.as_ref();
        lower.map_or(Duration::ZERO, |lower| lower.tiers().lookup_timeout())
    }

    pub(crate) fn count_merged(&self) {
        self.0.merged.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the longest time for which a lookup waits for a chunk that is being written.
    pub(crate) fn pending_timeout(&self) -> Duration {
        let lower = self.lower();
        lower.map_or(Duration::ZERO, |lower| lower.tiers().pending_timeout())
    }

    /// Returns a handle that does not keep the engine alive.
    pub(crate) fn downgrade(&self) -> WeakEngine {
        WeakEngine(Arc::downgrade(&self.0))
    }

    /// Runs a task on the runtime of the lower tiers. The task ends with the engine, or when the handle is
    /// dropped. `None` without lower tiers: then no lookup ever has to be awaited.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Option<EngineTask> {
        let lower = self.0.lower.as_ref()?;
        Some(EngineTask(lower.spawn(task)))
    }

    /// Returns for each layout, given with its number of KV ranks, whether engines of other processes that a
    /// lower tier reaches use it. Where `sources` are named, only these processes count.
    pub fn has_layouts(
        &self,
        layouts: &[(LayoutFingerprint, u32)],
        sources: &[String],
    ) -> Vec<bool> {
        match self.lower() {
            Some(lower) => lower.tiers().have_layouts(layouts, sources),
            None => vec![false; layouts.len()],
        }
    }

    /// Returns the digest of the clears that were carried out so far. A request reads the digest once, when
    /// it begins. With it the request stores the chunks that it computes and reads the chunks that it found.
    pub fn clears_id(&self) -> ClearsId {
        self.0.host.clear_log().id()
    }

    /// Returns the host, through which the tiers reach the engine.
    pub fn host(&self) -> &EngineHost {
        &self.0.host
    }

    /// Returns the log of clears.
    pub fn clear_log(&self) -> &ClearLog {
        self.0.host.clear_log()
    }

    /// Returns the space that a name in a key stands for ([`SpaceId::after`]).
    pub fn space_of(&self, name: SpaceId) -> SpaceId {
        self.0.host.clear_log().space_of(name)
    }

    /// Returns the keys with their names after these clears.
    fn named(&self, clears: ClearsId, keys: &[ChunkKey]) -> Vec<ChunkKey> {
        let mut namer = Namer::new(|space: SpaceId| space.after(clears));
        keys.iter().map(|key| namer.key(*key)).collect()
    }

    /// Leases all of these chunks, computed after these clears, or none. Finds only chunks in DRAM.
    pub fn acquire(&self, owner: OwnerId, clears: ClearsId, keys: &[ChunkKey]) -> Option<Leases> {
        if self.pool_is_lost() {
            return None;
        }
        let keys = &self.named(clears, keys);
        let leases = self.lease_and_offer(owner, keys);
        let has_all = leases.len() == keys.len();
        if has_all {
            self.0.pushed.remove(keys);
        }
        has_all.then_some(leases)
    }

    /// Reserves slots for chunks; returns one answer for each, in order. Evicts other chunks if necessary and
    /// allowed; never waits. A batch should be in the order of the prompt: chunks of it that are present
    /// count as used. After writing the chunks, [`Self::commit`] makes them findable.
    ///
    /// `clears` is [`Self::clears_id`] from before the chunks were computed. If the cache was cleared since
    /// then, the answers are [`StoreStart::Cleared`].
    pub fn store(
        &self,
        owner: OwnerId,
        clears: ClearsId,
        requests: &[StoreRequest],
    ) -> Vec<StoreStart> {
        let _under_way = UnderWay::new(&self.0.storing);
        if self.is_draining() {
            return requests.iter().map(|_| StoreStart::Draining).collect();
        }
        let starts = self.reserve(owner, clears, requests);
        for (request, start) in requests.iter().zip(&starts) {
            if request.key.kv_rank == 0 && matches!(start, StoreStart::Reserved(_)) {
                let StoreRequest { key, len, .. } = request;
                self.0.demand.stored(key.space, &key.hash, *len);
            }
        }
        starts
    }

    /// Reserves memory as [`Self::store`] does, even while the engine drains: for chunks that a lookup merges
    /// from other chunks.
    pub(crate) fn reserve(
        &self,
        owner: OwnerId,
        clears: ClearsId,
        requests: &[StoreRequest],
    ) -> Vec<StoreStart> {
        if self.pool_is_lost() {
            return requests.iter().map(|_| StoreStart::NoMemory).collect();
        }
        if clears != self.clears_id() {
            return requests.iter().map(|_| StoreStart::Cleared).collect();
        }
        let mut namer = Namer::new(|space| self.0.host.clear_log().name(space, clears));
        let named = |r: &StoreRequest| (namer.key(r.key), r.parent.map(|parent| namer.key(parent)));
        let prompt: Vec<_> = requests.iter().map(named).collect();
        self.0.tier.touch(&prompt);
        let reserve = |(request, (key, parent)): (&StoreRequest, &(_, _))| {
            let StoreRequest { tenant, len, .. } = *request;
            let (key, parent) = (*key, *parent);
            match self.0.tier.begin_write(owner, tenant, key, len) {
                Ok(WriteStart::Reserved(new)) => {
                    let under_way = UnderWay::new(&self.0.storing);
                    StoreStart::Reserved(StoreTicket::new(new, parent, under_way))
                }
                Ok(WriteStart::Present) => StoreStart::Present,
                Ok(WriteStart::Busy) => StoreStart::Busy,
                Err(_) => StoreStart::NoMemory,
            }
        };
        requests.iter().zip(&prompt).map(reserve).collect()
    }

    /// Makes written chunks findable at once. Returns one answer for each, in order. In a lost pool no chunk
    /// becomes findable: the answers are [`Inserted::Cleared`].
    ///
    /// # Panics
    /// If a ticket belongs to another engine.
    pub fn commit(&self, tickets: Vec<StoreTicket>) -> Vec<Inserted> {
        if self.pool_is_lost() {
            return tickets.iter().map(|_| Inserted::Cleared).collect();
        }
        // Stores count as in progress until the tiers have been offered the chunks.
        let (writes, _under_way): (Vec<_>, Vec<UnderWay>) =
            tickets.into_iter().map(StoreTicket::written).unzip();
        let tiers = self.lower().map(LowerTiers::tiers);
        let is_offered =
            |tiers: &&Arc<Tiers>| tiers.has_written(WritePolicy::Through) || tiers.counts_uses();
        let Some(tiers) = tiers.filter(is_offered) else {
            return self.0.tier.commit(writes);
        };
        // Blocked, so that these leases do not keep a chunk from a clear.
        let _held = tiers.block_removal();
        let (inserted, leases) = tiers.commit_and_offer(WRITER, writes, OfferReason::Computed);
        drop(leases);
        inserted
    }

    /// Returns for each chunk, computed after these clears, whether it is in DRAM. Does not count as a use.
    pub fn are_in_dram(&self, clears: ClearsId, keys: &[ChunkKey]) -> Vec<bool> {
        if self.pool_is_lost() {
            return vec![false; keys.len()];
        }
        let found = self.0.tier.contains(&self.named(clears, keys));
        found.into_iter().map(|len| len.is_some()).collect()
    }

    /// Returns true while a worker writes this chunk, computed after these clears.
    pub fn is_writing(&self, clears: ClearsId, key: ChunkKey) -> bool {
        let key = Namer::new(|space: SpaceId| space.after(clears)).key(key);
        self.0.tier.is_writing(&key)
    }

    /// Pushes chunks that are in DRAM to another process, so that the process has the chunks before a request asks there.
    /// `to` is the process's name or an address, as a tier knows it. Each chunk is given with the chunk
    /// before it in its prompt. Returns at once; false if no tier reaches the process.
    pub fn push(&self, chunks: &[(ChunkKey, Option<ChunkKey>)], to: &str) -> bool {
        let Some(lower) = self.lower().filter(|_| !self.pool_is_lost()) else {
            return false;
        };
        let mut namer = Namer::new(|space: SpaceId| space.after(self.clears_id()));
        let mut named = |key| namer.key(key);
        let keys: Vec<ChunkKey> = chunks.iter().map(|(key, _)| named(*key)).collect();
        let parents = chunks.iter().map(|(_, parent)| parent.map(&mut named));
        let chunks = keys.iter().zip(parents).zip(self.0.tier.contains(&keys));
        let mut runs: Vec<ChunkRun> = Vec::new();
        for ((&key, parent), len) in chunks {
            let Some(chunk_bytes) = len else {
                continue;
            };
            match runs.last_mut() {
                Some(run)
                    if run.chunk_bytes == chunk_bytes && run.keys.last() == parent.as_ref() =>
                {
                    run.keys.push(key);
                }
                _ => runs.push(ChunkRun {
                    keys: vec![key],
                    chunk_bytes,
                    parent,
                }),
            }
        }
        // Without chunks to push, an empty run finds out whether a tier reaches the process.
        let none = runs.is_empty().then(|| ChunkRun {
            keys: Vec::new(),
            chunk_bytes: 0,
            parent: None,
        });
        let mut pushed = runs
            .into_iter()
            .chain(none)
            .map(|run| lower.tiers().push(run, to));
        pushed.all(|reached| reached)
    }

    /// Lets other callers reserve the chunks of these tickets too, each in memory of its own. The first
    /// commit makes a chunk findable; a later one is answered with [`Inserted::Present`]. For writers that
    /// are not expected to commit soon.
    pub fn share_writes(&self, marks: &[MarkId]) {
        self.0.tier.share_writes(marks);
    }

    /// Pins chunks: they are not evicted until they are unpinned. Returns true for each chunk in DRAM.
    ///
    /// For embedding programs, for example to keep a system prompt in DRAM; the server does not call it.
    pub fn pin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.pin(&self.named(self.clears_id(), keys))
    }

    /// Ends pins, one for each call of [`Self::pin`]. Returns true for each chunk that was pinned.
    pub fn unpin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.unpin(&self.named(self.clears_id(), keys))
    }

    /// Removes chunks from all tiers. A leased chunk becomes unfindable at once, and its memory is released
    /// with the last lease. Waits for lower tiers, at most eleven seconds.
    pub fn remove(&self, keys: &[ChunkKey]) -> Removed {
        let keys = &self.named(self.clears_id(), keys);
        let above = || self.0.tier.remove(keys);
        let Some(lower) = &self.0.lower else {
            return Removed {
                found: above(),
                complete: true,
            };
        };
        let deadline = now() + REMOVE_TIMEOUT;
        let (mut found, below, complete) = lower.remove(keys, deadline, above);
        found.iter_mut().zip(below).for_each(|(a, b)| *a |= b);
        Removed { found, complete }
    }

    /// Removes from DRAM the chunks of spaces that no key will name again, and drops their queued writes to
    /// lower tiers. Returns the number of chunks removed. Chunks of these spaces in lower tiers stay until
    /// they are evicted there; so do chunks that are being written or promoted.
    pub fn end_spaces(&self, spaces: &HashSet<SpaceId>) -> u64 {
        let spaces = &self.0.host.clear_log().names_of(spaces);
        if let Some(lower) = &self.0.lower {
            lower.drop_writes_of(spaces);
        }
        self.0.tier.remove_spaces(spaces)
    }

    /// Removes every chunk in DRAM that is neither leased nor pinned. Returns the number of chunks removed.
    /// Lower tiers keep their chunks, and these are still found.
    pub fn clear_dram(&self, in_use: InUse) -> u64 {
        let which = match in_use {
            InUse::Keep => Clear::Idle,
            InUse::Remove => Clear::All,
        };
        self.0.tier.clear(which).removed
    }

    /// Makes all chunks that were computed before now unfindable, in all tiers, permanently. This includes
    /// chunks that are being written or promoted, and chunks that an engine computes now and stores later.
    /// Leased chunks stay in memory for requests that looked them up before, until the last lease ends; with
    /// [`InUse::Remove`] these requests no longer find them either. Pins end. A shared tier removes nothing:
    /// its chunks from before the clear have names that are not looked up any more. Waits for the state file
    /// and for lower tiers, at most 16 seconds.
    ///
    /// # Errors
    /// [`ClearError`]; nothing is cleared then.
    pub fn clear(&self, in_use: InUse) -> Result<Cleared, ClearError> {
        let (clears, is_durable) = self.0.host.clear_log().count()?;
        let which = match in_use {
            InUse::Keep => Clear::Unleased,
            InUse::Remove => Clear::All,
        };
        let empty = || self.0.empty(which);
        let state_file = is_durable.then(|| "state file".to_owned());
        let mut cleared = Cleared {
            durable: Vec::from_iter(state_file),
            ..Cleared::default()
        };
        let Some(lower) = &self.0.lower else {
            (cleared.dram, cleared.leased) = empty();
            return Ok(cleared);
        };
        (cleared.dram, cleared.leased) = lower.tiers().empty(empty);
        let deadline = now() + REMOVE_TIMEOUT;
        for (tier, answer) in lower.clear(clears, deadline) {
            match answer {
                Ok(answer) => {
                    cleared.lower += answer.removed;
                    let others = answer.unconfirmed.iter();
                    let others = others.map(|other| format!("{tier}: {other}"));
                    cleared.unconfirmed.extend(others);
                    cleared.durable.extend(answer.is_durable.then_some(tier));
                }
                Err(error) => cleared.unconfirmed.push(format!("{tier}: {error}")),
            }
        }
        Ok(cleared)
    }

    /// Returns an estimate of the hit ratio that other cache sizes would have had.
    pub fn demand(&self) -> DemandCurve {
        self.0.demand.curve()
    }

    /// Records the chunks that a prompt looks up.
    pub(crate) fn note_demand(&self, hashes: &[ChunkHash], ranks: &[Rank]) {
        let bytes: Option<u64> = ranks.iter().map(|rank| rank.chunk_bytes).sum();
        if let (Some(first), Some(bytes)) = (ranks.first(), bytes) {
            (self.0.demand).asked(first.space, hashes, bytes, ranks.len());
        }
    }

    /// Sets the quota of a tenant in bytes. With `None` the tenant shares the memory outside all quotas.
    pub fn set_quota(&self, tenant: TenantId, quota: Option<u64>) {
        self.0.tier.set_quota(tenant, quota);
    }

    /// Returns the usage and quota of each tenant. A tenant without either may be missing.
    pub fn tenants(&self) -> Vec<TenantStatus> {
        self.0
            .tier
            .tenants()
            .into_iter()
            .map(|(id, usage)| TenantStatus::new(id, usage))
            .collect()
    }

    /// Returns the usage and quota of one tenant; zeroes for an unknown tenant.
    pub fn tenant(&self, tenant: TenantId) -> TenantStatus {
        TenantStatus::new(tenant, self.0.tier.tenant_usage(tenant))
    }

    /// Returns the name of the pool if it is shared memory.
    pub fn shared_name(&self) -> Option<&SharedName> {
        self.arena().shared_name()
    }

    /// Returns the bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.arena().len() as u64
    }

    /// Returns true once the pool's memory was lost ([`Arena::is_lost`]): no chunk is found or committed any
    /// more, and the result of a running copy must be discarded. This is permanent.
    pub fn pool_is_lost(&self) -> bool {
        self.arena().is_lost()
    }

    /// Returns the memory of the pool.
    pub fn arena(&self) -> &Arc<Arena> {
        self.0.tier.pool().arena()
    }

    /// Returns the state of each tier, the fastest first.
    pub fn health(&self) -> Vec<TierHealth> {
        let dram = TierHealth {
            tier: DRAM.to_owned(),
            fault: self.0.tier.pool().fault(),
        };
        let lower = self.0.lower.iter().flat_map(LowerTiers::health);
        iter::once(dram).chain(lower).collect()
    }

    /// Returns the alignment of slots in bytes: a slot takes a multiple of it.
    pub fn align(&self) -> u64 {
        self.0.tier.pool().align()
    }

    /// Returns the number of leases of an owner.
    pub fn leases_of(&self, owner: OwnerId) -> u64 {
        self.0.tier.leases_of(owner)
    }

    /// Returns the bytes of the pool used by the chunks that an owner leases, counted once for each lease.
    pub fn lease_bytes_of(&self, owner: OwnerId) -> u64 {
        self.0.tier.lease_bytes_of(owner)
    }

    /// Returns the owners of leases, each with the number of its leases.
    pub fn lease_owners(&self) -> Vec<(OwnerId, u64)> {
        self.0.tier.lease_owners()
    }

    /// Returns the bytes of the pool used by chunks that are leased or pinned and cannot be evicted, each
    /// chunk counted once.
    pub fn held_bytes(&self) -> u64 {
        self.0.tier.held_bytes()
    }

    /// Returns the number of chunks that are leased now, counted once for each lease.
    pub fn leases(&self) -> u64 {
        self.0.tier.leases()
    }

    /// Returns the current usage of the DRAM tier.
    pub fn usage(&self) -> EngineUsage {
        let prefaulted = self.arena().prefault_progress().done;
        EngineUsage::new(&self.0.tier.usage(), self.pool_bytes(), prefaulted)
    }

    /// Returns the content and counters of each lower tier.
    pub fn lower_status(&self) -> Vec<LowerStatus> {
        self.0
            .lower
            .as_ref()
            .map_or_else(Vec::new, LowerTiers::status)
    }

    /// Returns the times measured since the engine was made.
    pub fn times(&self) -> EngineTimes {
        let lives = &self.0.lives;
        let lower = self.0.lower.as_ref().map(|lower| lower.tiers().times());
        let (promotion, first_chunk) = lower.unwrap_or_default();
        EngineTimes {
            evicted_age_seconds: lives.age_seconds.snapshot(),
            evicted_uses: lives.uses.snapshot(),
            promotion,
            first_chunk,
        }
    }

    /// Returns the counters of the DRAM tier since the engine was made.
    pub fn stats(&self) -> EngineStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let lower = self.lower().map(|lower| lower.tiers().lookups());
        let (lower_lookups, lower_lookup_chunks) = lower.unwrap_or_default();
        EngineStats {
            merged: read(&self.0.merged),
            watermark_checks: read(&self.0.watermark_checks),
            watermark_evictions: read(&self.0.watermark_evictions),
            lower_lookups,
            lower_lookup_chunks,
            ..EngineStats::new(self.0.tier.stats(), self.0.host.clear_log())
        }
    }
}

/// Keeps the pool below its high watermark until the engine is dropped.
fn maintain(engine: &Weak<Inner>, stop: &Stop, every: Duration) {
    let begun = now();
    loop {
        {
            let mut stopped = stop.stopped.lock();
            if !*stopped {
                stop.wake.wait_for(&mut stopped, every);
            }
            if *stopped {
                return;
            }
        }
        let Some(inner) = engine.upgrade() else {
            return;
        };
        let seconds = now().saturating_duration_since(begun).as_secs();
        inner.tier.set_seconds(seconds as u32);
        inner.tier.pool().recover();
        inner.pushed.expire(now());
        inner.remove_left();
        let mut evicted = 0;
        let mut more = || {
            let lower = inner.lower.as_ref();
            let _held = lower.map(|lower| lower.tiers().block_removal());
            let leaving = inner.written_back().map_or(0, LowerTiers::queued);
            let maintained = inner.tier.maintain_besides(EVICT_AT_ONCE, leaving);
            evicted += maintained.evicted;
            maintained.more
        };
        while more() {
            thread::yield_now();
        }
        inner.watermark_checks.fetch_add(1, Ordering::Relaxed);
        let is_evicting = u64::from(evicted > 0);
        (inner.watermark_evictions).fetch_add(is_evicting, Ordering::Relaxed);
    }
}
