//! The engine.

use std::collections::HashSet;
use std::iter;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::Backend;
use lmc_backend_local::{
    Clear, EventSink, Inserted, Leases, LocalConfig, LocalTier, MarkId, OwnerId, TenantId,
    WriteStart,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::{Arena, Pool, PoolConfig, SealedSlot, SharedName};
use parking_lot::{Condvar, Mutex};
use serde::Serialize;

use crate::config::{CopyDown, EngineConfig, EngineError};
use crate::events::Relay;
use crate::lower::{Fetch, Lower, LowerStatus, OfferItem, Source};
use crate::status::{EngineStats, EngineUsage, TenantStatus};
use crate::write::{Reservation, WriteRequest, WriteTicket};

/// Chunks evicted in one go above the high watermark, so that others get their turn in between.
const EVICT_AT_ONCE: usize = 256;
/// Time at the end of a close in which nothing more is offered, at most.
const CLOSE_MARGIN: Duration = Duration::from_secs(2);
/// Of [`Inner::unoffered`] before a close.
const NOT_CLOSED: u64 = u64::MAX;

/// Who the engine holds chunks for while it offers them to the tiers below.
const COPIER: OwnerId = OwnerId(u64::MAX - 1);
/// Time that the tiers below have to forget what they shall forget.
const FORGET_DEADLINE: Duration = Duration::from_secs(10);

/// Where the chunks of a prompt are that are not, or not all, in DRAM.
#[derive(Debug, Clone)]
pub struct Below(Vec<Source>);

impl Below {
    /// How many of the keys asked for are somewhere, from the first on.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether not even the first is.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes that a fetch would read from the lower tiers.
    pub fn bytes(&self) -> u64 {
        let len = |source: &Source| match source {
            Source::Dram => 0,
            Source::Tier { len, .. } => *len,
        };
        self.0.iter().map(len).sum()
    }

    /// Leaves out what lies from place `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }
}

/// What [`CacheEngine::clear`] forgot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cleared {
    /// Chunks in DRAM.
    pub dram: u64,
    /// Chunks in the tiers below.
    pub below: u64,
    /// Whether every tier below forgot all it had. If not, one of them is out of order or too
    /// slow, and may still have some.
    pub complete: bool,
}

/// What [`CacheEngine::remove`] forgot.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Removed {
    /// Whether each chunk was there, in order.
    pub found: Vec<bool>,
    /// Whether no tier has any of them now. If not, one of the tiers below is out of order or too
    /// slow, and may still have some.
    pub complete: bool,
}

/// How one tier is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TierHealth {
    /// Name of the tier.
    pub tier: String,
    /// What is wrong with it, and what to do about it; none when all is well.
    pub fault: Option<String>,
}

/// A KV cache over tiers of memory.
///
/// A handle: clones share one engine. Safe to use from any number of threads.
#[derive(Clone, Debug)]
pub struct CacheEngine(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    tier: LocalTier,
    lower: Option<Lower>,
    copy_down: CopyDown,
    /// Bytes that a close has still to offer to lower tiers, or [`NOT_CLOSED`].
    unoffered: AtomicU64,
    relay: Arc<Relay>,
    stop: Arc<Stop>,
}

/// Ends the maintenance thread.
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

impl CacheEngine {
    /// Makes an engine whose DRAM tier is this arena.
    ///
    /// # Errors
    /// [`EngineError`] says which setting cannot be.
    pub fn new(config: EngineConfig, arena: Arc<Arena>) -> Result<Self, EngineError> {
        Self::with_tiers(config, arena, Vec::new())
    }

    /// Makes an engine whose DRAM tier is this arena, with slower tiers below it, the fastest
    /// first.
    ///
    /// # Errors
    /// [`EngineError`] says which setting cannot be.
    pub fn with_tiers(
        config: EngineConfig,
        arena: Arc<Arena>,
        lower: Vec<Arc<dyn Backend>>,
    ) -> Result<Self, EngineError> {
        let pool = Pool::new(arena, PoolConfig::default().with_align(config.align))?;
        let relay = Arc::new(Relay::default());
        let mut local = LocalConfig::new(pool)
            .with_policy(config.policy)
            .with_watermarks(config.high_watermark, config.low_watermark)
            .with_events(Arc::clone(&relay) as Arc<dyn EventSink>);
        if let Some(shards) = config.shards {
            local = local.with_shards(shards);
        }
        let tier = local.build()?;
        let lower = match lower.is_empty() {
            true => None,
            false => Some(Lower::start(tier.clone(), lower, &config)?),
        };
        if let (Some(lower), CopyDown::OnEviction) = (&lower, config.copy_down) {
            relay.offer_evicted(lower.downgrade());
        }
        let stop = Arc::new(Stop::default());
        let inner = Arc::new(Inner {
            tier,
            lower,
            copy_down: config.copy_down,
            unoffered: AtomicU64::new(NOT_CLOSED),
            relay,
            stop: Arc::clone(&stop),
        });
        let weak = Arc::downgrade(&inner);
        thread::Builder::new()
            .name("lmc-evict".to_owned())
            .spawn(move || maintain(&weak, &stop, config.maintain_every))?;
        Ok(Self(inner))
    }

    /// Who is told of chunks that come and go. Only the first listener is taken; false for any
    /// other.
    pub fn set_events(&self, listener: Arc<dyn EventSink>) -> bool {
        self.0.relay.set(listener)
    }

    /// Leases the leading chunks of a prompt that are in DRAM. They stay until the leases go.
    pub fn lookup(&self, owner: OwnerId, keys: &[ChunkKey]) -> Leases {
        if self.pool_is_lost() {
            return self.0.tier.lease_leading(owner, &[]);
        }
        let offered = self.0.copy_down == CopyDown::OnCommitAndHit;
        let lower = self.0.lower.as_ref().filter(|_| offered);
        // Nothing is forgotten between its finding and its offer.
        let _held = lower.map(Lower::hold);
        let leases = self.0.tier.lease_leading(owner, keys);
        if let Some(lower) = lower {
            let offer = |(place, slot): (usize, &SealedSlot)| OfferItem {
                key: keys[place],
                parent: place.checked_sub(1).map(|before| keys[before]),
                slot: slot.clone(),
            };
            let offers: Vec<_> = leases.iter().enumerate().map(offer).collect();
            lower.offer(&offers);
        }
        leases
    }

    /// Whether there are tiers below DRAM.
    pub fn has_lower(&self) -> bool {
        self.0.lower.is_some()
    }

    /// Where the chunks are that follow the leading ones in DRAM: how many more of these keys
    /// come up when they are asked for with [`Self::fetch`]. Takes a moment only: a tier that
    /// does not know at once counts as not having any.
    pub fn below(&self, keys: &[ChunkKey]) -> Below {
        let lower = self.0.lower.as_ref().filter(|_| !self.pool_is_lost());
        Below(lower.map_or_else(Vec::new, |lower| lower.locate(keys)))
    }

    /// Longest that [`Self::fetch`] takes: [`EngineConfig::fetch_deadline`]; zero without tiers
    /// below DRAM.
    pub fn fetch_deadline(&self) -> Duration {
        let lower = self.0.lower.as_ref();
        lower.map_or(Duration::ZERO, Lower::fetch_deadline)
    }

    /// Brings chunks of a prompt up from the tiers below, in its order, and then calls `done`
    /// with the leases of the leading ones that are in DRAM, on a thread of the engine's own.
    ///
    /// `keys` is the prompt from its first chunk on, `held` the leases of its leading chunks,
    /// and `below` what [`Self::below`] said of the keys after those. Over after
    /// [`EngineConfig::fetch_deadline`]: what has not come up by then is a miss. `done` is
    /// dropped without a call when the engine goes or the fetch is cancelled.
    ///
    /// A chunk that a worker writes at the same time is waited for no longer than 50 ms. Owners
    /// that fetch more than may be read at a time are served in turn.
    pub fn fetch(
        &self,
        tenant: TenantId,
        keys: Vec<ChunkKey>,
        held: Leases,
        below: Below,
        done: impl FnOnce(Leases) + Send + 'static,
    ) -> Fetch {
        match &self.0.lower {
            Some(lower) => lower.fetch(tenant, keys, held, below.0, done),
            None => {
                done(held);
                Fetch::default()
            }
        }
    }

    /// Leases all of these chunks, or none.
    pub fn acquire(&self, owner: OwnerId, keys: &[ChunkKey]) -> Option<Leases> {
        let leases = self.lookup(owner, keys);
        (leases.len() == keys.len()).then_some(leases)
    }

    /// How many leading chunks are there, without holding them.
    pub fn leading(&self, keys: &[ChunkKey]) -> usize {
        self.0.tier.lookup_leading(keys)
    }

    /// Bytes of each chunk that is there.
    pub fn contains(&self, keys: &[ChunkKey]) -> Vec<Option<u64>> {
        self.0.tier.contains(keys)
    }

    /// Reserves memory for chunks, one answer each, in order. Evicts what may go; never waits.
    /// A batch is best given in the order of the prompt: what is there of it counts as used.
    pub fn reserve(&self, owner: OwnerId, requests: &[WriteRequest]) -> Vec<Reservation> {
        if self.pool_is_lost() {
            return requests.iter().map(|_| Reservation::NoRoom).collect();
        }
        let prompt: Vec<_> = requests.iter().map(|r| (r.key, r.parent)).collect();
        self.0.tier.touch(&prompt);
        let reserve = |request: &WriteRequest| {
            let WriteRequest {
                key,
                parent,
                tenant,
                len,
            } = *request;
            match self.0.tier.begin_write(owner, tenant, key, len) {
                Ok(WriteStart::Reserved(new)) => {
                    Reservation::Reserved(WriteTicket::new(new, parent))
                }
                Ok(WriteStart::Present) => Reservation::Present,
                Ok(WriteStart::Busy) => Reservation::Busy,
                Err(_) => Reservation::NoRoom,
            }
        };
        requests.iter().map(reserve).collect()
    }

    /// Makes written chunks findable, at once and for everybody. One answer for each, in order.
    /// None is findable in a pool that is lost: they count as [`Inserted::Cleared`].
    ///
    /// # Panics
    /// When a ticket is another engine's.
    pub fn commit(&self, tickets: Vec<WriteTicket>) -> Vec<Inserted> {
        if self.pool_is_lost() {
            return tickets.iter().map(|_| Inserted::Cleared).collect();
        }
        let writes: Vec<_> = tickets.into_iter().map(WriteTicket::written).collect();
        let at_once = self.0.copy_down != CopyDown::OnEviction;
        let Some(lower) = self.0.lower.as_ref().filter(|_| at_once) else {
            return self.0.tier.commit(writes);
        };
        let named: Vec<_> = writes.iter().map(|w| (w.mark.key(), w.parent)).collect();
        // No clear comes in between: neither do these leases keep a chunk from it, nor is a chunk
        // offered that it has forgotten.
        let _held = lower.hold();
        let (inserted, leases) = self.0.tier.commit_leased(COPIER, writes);
        let found = named.into_iter().zip(&inserted);
        let found = found.filter(|(_, inserted)| **inserted != Inserted::Cleared);
        let offers = found.zip(leases.iter());
        let offers = offers.filter(|((_, inserted), _)| **inserted == Inserted::New);
        let offer = |(((key, parent), _), slot): (((_, _), &Inserted), &SealedSlot)| {
            let slot = slot.clone();
            OfferItem { key, parent, slot }
        };
        lower.offer(&offers.map(offer).collect::<Vec<_>>());
        drop(leases);
        inserted
    }

    /// Lets others reserve the chunks of these tickets too, each in memory of its own. The first
    /// commit makes a chunk findable; a later one answers [`Inserted::Present`]. For writers of
    /// whom no commit is expected soon.
    pub fn share_writes(&self, marks: &[MarkId]) {
        self.0.tier.share_writes(marks);
    }

    /// How often everything was forgotten. What was reserved while this has not changed since
    /// some moment, and only that, was reserved without a clear since that moment.
    pub fn clears(&self) -> u64 {
        self.0.tier.clears()
    }

    /// Keeps chunks until they are unpinned. Which of them are there.
    pub fn pin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.pin(keys)
    }

    /// Ends pins, one for each call of [`Self::pin`]. Which of them were pinned.
    pub fn unpin(&self, keys: &[ChunkKey]) -> Vec<bool> {
        self.0.tier.unpin(keys)
    }

    /// Forgets chunks in all tiers. What is leased is unfindable at once and its memory comes
    /// back with the last lease. Waits for the tiers below, at most eleven seconds.
    pub fn remove(&self, keys: &[ChunkKey]) -> Removed {
        let above = || self.0.tier.remove(keys);
        let Some(lower) = &self.0.lower else {
            return Removed {
                found: above(),
                complete: true,
            };
        };
        let deadline = Instant::now() + FORGET_DEADLINE;
        let (mut found, below, complete) = lower.remove(keys, deadline, above);
        found.iter_mut().zip(below).for_each(|(a, b)| *a |= b);
        Removed { found, complete }
    }

    /// Removes the chunks of spaces that no key will name again from DRAM, and drops their queued
    /// copies to lower tiers. Returns the number of chunks removed. What lower tiers have of them
    /// stays until it is evicted there, as does what is being written or promoted now.
    pub fn end_spaces(&self, spaces: &HashSet<SpaceId>) -> u64 {
        if let Some(lower) = &self.0.lower {
            lower.drop_copies_of(spaces);
        }
        self.0.tier.remove_spaces(spaces)
    }

    /// Forgets everything that nobody holds in DRAM; with `force` also what is leased or pinned.
    /// How many chunks went. The tiers below keep theirs.
    pub fn clear_dram(&self, force: bool) -> u64 {
        let which = if force { Clear::All } else { Clear::Idle };
        self.0.tier.clear(which)
    }

    /// Forgets everything that nobody holds, in all tiers; with `force` also what is leased or
    /// pinned. What is on its way down or up is forgotten too. Waits for the tiers below, at
    /// most eleven seconds.
    pub fn clear(&self, force: bool) -> Cleared {
        let Some(lower) = &self.0.lower else {
            return Cleared {
                dram: self.clear_dram(force),
                below: 0,
                complete: true,
            };
        };
        let deadline = Instant::now() + FORGET_DEADLINE;
        let (dram, below, complete) = lower.clear(deadline, || self.clear_dram(force));
        Cleared {
            dram,
            below,
            complete,
        }
    }

    /// Waits until copies are down and closes the tiers below; where only what is evicted goes
    /// down ([`CopyDown::OnEviction`]), all that DRAM holds is offered first, the heads of prompts
    /// before what follows on them. What could not be done by the deadline, and why not: a tier
    /// that could not be closed, or `memory`, of which not all is down.
    pub fn close(&self, deadline: Instant) -> Vec<(String, String)> {
        let Some(lower) = &self.0.lower else {
            return Vec::new();
        };
        let before = lower.missed();
        let mut late = 0;
        if self.0.copy_down == CopyDown::OnEviction && !self.pool_is_lost() {
            // What is on its way then may get there.
            let left = deadline.saturating_duration_since(Instant::now());
            late = self.copy_all_down(lower, deadline - (left / 4).min(CLOSE_MARGIN));
        }
        let (mut failed, missed) = lower.close(deadline);
        late += missed.late;
        let declined = missed.declined - before.declined;
        let lost = missed.failed - before.failed;
        if late + declined + lost > 0 {
            let why = format!(
                "{late} chunks were not written for want of time, {declined} were declined and \
                 {lost} failed"
            );
            failed.push(("memory".to_owned(), why));
        }
        failed
    }

    /// Offers every chunk to the tiers below, each when there is room for it on the way. How many
    /// the deadline left behind.
    fn copy_all_down(&self, lower: &Lower, deadline: Instant) -> u64 {
        let tier = &self.0.tier;
        let chunks = tier.list_heads_first();
        let unoffered = &self.0.unoffered;
        unoffered.store(
            chunks.iter().map(|chunk| chunk.len).sum(),
            Ordering::Relaxed,
        );
        for (place, chunk) in chunks.iter().enumerate() {
            if !lower.wait_for_room(chunk.len, deadline) {
                return (chunks.len() - place) as u64;
            }
            let _held = lower.hold();
            let leases = tier.lease_again(COPIER, &[chunk.key]);
            let offer = |slot: &SealedSlot| OfferItem {
                key: chunk.key,
                parent: chunk.parent,
                slot: slot.clone(),
            };
            lower.offer(&leases.iter().map(offer).collect::<Vec<_>>());
            unoffered.fetch_sub(chunk.len, Ordering::Relaxed);
        }
        0
    }

    /// Bytes of chunks that lower tiers may lack if the process ends now: copies on their way and,
    /// where only what is evicted is copied ([`CopyDown::OnEviction`]), what [`Self::close`] has
    /// not offered yet, or before it all that DRAM holds.
    pub fn unwritten_bytes(&self) -> u64 {
        let Some(lower) = &self.0.lower else {
            return 0;
        };
        let unoffered = match self.0.unoffered.load(Ordering::Relaxed) {
            _ if self.0.copy_down != CopyDown::OnEviction => 0,
            NOT_CLOSED => self.usage().chunk_bytes,
            bytes => bytes,
        };
        lower.queued() + unoffered
    }

    /// Grants a tenant this many bytes of its own, or with none a share of what is left.
    pub fn set_quota(&self, tenant: TenantId, quota: Option<u64>) {
        self.0.tier.set_quota(tenant, quota);
    }

    /// What each tenant uses and may use. One that uses nothing and has no quota may be missing.
    pub fn tenants(&self) -> Vec<TenantStatus> {
        self.0
            .tier
            .tenants()
            .into_iter()
            .map(|(id, usage)| TenantStatus::new(id, usage))
            .collect()
    }

    /// Returns the usage and quota of one tenant; zeroes for one that is not known.
    pub fn tenant(&self, tenant: TenantId) -> TenantStatus {
        TenantStatus::new(tenant, self.0.tier.tenant_usage(tenant))
    }

    /// The DRAM tier, for what this type does not offer.
    pub fn local(&self) -> &LocalTier {
        &self.0.tier
    }

    /// Name of the pool when it is shared memory.
    pub fn shared_name(&self) -> Option<&SharedName> {
        self.arena().shared_name()
    }

    /// Bytes of the pool.
    pub fn pool_bytes(&self) -> u64 {
        self.arena().len() as u64
    }

    /// Returns true once the pool's memory was lost ([`Arena::is_lost`]): nothing is found or
    /// committed any more, and the result of a running copy must be discarded. This is permanent.
    pub fn pool_is_lost(&self) -> bool {
        self.arena().is_lost()
    }

    fn arena(&self) -> &Arena {
        self.0.tier.pool().arena()
    }

    /// How each tier is, fastest first.
    pub fn health(&self) -> Vec<TierHealth> {
        let dram = TierHealth {
            tier: "dram".to_owned(),
            fault: self.0.tier.pool().fault(),
        };
        let lower = self.0.lower.iter().flat_map(Lower::health);
        iter::once(dram).chain(lower).collect()
    }

    /// Chunks that are leased now, each counted for each lease.
    pub fn leases(&self) -> u64 {
        self.0.tier.leases()
    }

    /// What is held at this moment.
    pub fn usage(&self) -> EngineUsage {
        let prefaulted = self.arena().prefault_progress().done;
        EngineUsage::new(&self.0.tier.usage(), self.pool_bytes(), prefaulted)
    }

    /// What the tiers below hold, and what went to and fro.
    pub fn lower(&self) -> Vec<LowerStatus> {
        self.0.lower.as_ref().map_or_else(Vec::new, Lower::status)
    }

    /// What was counted so far.
    pub fn stats(&self) -> EngineStats {
        self.0.tier.stats().into()
    }
}

/// Keeps the pool below its high watermark until the engine is gone.
fn maintain(engine: &Weak<Inner>, stop: &Stop, every: Duration) {
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
        inner.tier.pool().recover();
        let more = || {
            let lower = inner.lower.as_ref();
            let _held = lower.map(Lower::hold);
            let evicted_go_down = inner.copy_down == CopyDown::OnEviction;
            let lower = lower.filter(|_| evicted_go_down);
            let leaving = lower.map_or(0, Lower::queued);
            inner.tier.maintain_besides(EVICT_AT_ONCE, leaving).more
        };
        while more() {
            thread::yield_now();
        }
    }
}
