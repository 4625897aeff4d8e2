//! The engine as seen by its tiers: it answers from its own tiers, and never asks other processes. Keys are
//! as tiers name them: by the names of spaces after the clears.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lmc_backend::{
    Backend, BoxFuture, ChunkRun, Clears, Events, Host, HostChunk, HostLease, HostSpace,
    LocateHint, Received, TooManyClears, Usage, now,
};
use lmc_backend_local::{Leases, OwnerId, TenantId};
use lmc_key::{ChunkHash, ChunkKey, KeySpace, LayoutFingerprint, SpaceId};
use parking_lot::{Mutex, RwLock};

use crate::clears::ClearLog;
use crate::engine::{CacheEngine, WeakEngine};
use crate::lower::{ChunkSource, Prompt, half_of};
use crate::request::{LookupRequest, Rank};

/// Owner of the leases granted to other processes.
pub(crate) const PEERS: OwnerId = OwnerId(u64::MAX - 2);

/// Number of low bits in a listing position that hold the position within one tier; the tier's number is
/// above.
const TIER_SHIFT: u32 = 120;

/// The program that uses the engine, as a source of information about spaces and requests.
pub trait SpaceBook: fmt::Debug + Send + Sync {
    /// Returns the tenant of a space's chunks.
    fn tenant(&self, space: SpaceId) -> TenantId;

    /// Returns the live spaces, the most important first.
    fn spaces(&self) -> Vec<HostSpace>;

    /// Returns the fields of a space; `None` if only its id is known. Default: looks among the live spaces.
    fn describe(&self, space: SpaceId) -> Option<KeySpace> {
        let found = self.spaces().into_iter().find(|live| live.id == space);
        found.map(|live| live.description)
    }

    /// Returns true if engines of this host use the space, have chunks in it, or merge its chunks. Default:
    /// true for live spaces.
    fn is_used(&self, space: SpaceId) -> bool {
        self.spaces().iter().any(|live| live.id == space)
    }

    /// Returns true if engines of this host merge chunks of a layout with this number of KV ranks into their
    /// own ([`Merge`](crate::Merge)). Default: false.
    fn merges_layout(&self, layout: LayoutFingerprint, ranks: u32) -> bool {
        let _ = (layout, ranks);
        false
    }

    /// Returns the space and KV rank of the merged chunks that a rank's chunks of this space become part of.
    /// Default: none.
    fn merged(&self, space: SpaceId, kv_rank: u16) -> Option<(SpaceId, u16)> {
        let _ = (space, kv_rank);
        None
    }

    /// Returns true if the request with this id has ended. Default: false, which also stands for an unknown
    /// request.
    fn is_over(&self, request: &str) -> bool {
        let _ = request;
        false
    }
}

/// Access of tiers to the engine. Made before both: tiers that need a host are given it, and
/// [`EngineContext::host`](crate::EngineContext::host) must be the same host.
///
/// A handle: clones share one host, which belongs to one engine.
#[derive(Clone, Debug)]
pub struct EngineHost(Arc<Hosting>);

impl Default for EngineHost {
    fn default() -> Self {
        Self::new(ClearLog::default())
    }
}

#[derive(Debug)]
struct Hosting {
    clears: ClearLog,
    events: Events,
    /// Set when the engine is made.
    engine: OnceLock<WeakEngine>,
    book: RwLock<Option<Arc<dyn SpaceBook>>>,
}

impl EngineHost {
    /// Makes the host of an engine with this log of clears.
    pub fn new(clears: ClearLog) -> Self {
        Self(Arc::new(Hosting {
            events: Events::new(clears.spaces_of_names()),
            clears,
            engine: OnceLock::new(),
            book: RwLock::default(),
        }))
    }

    /// Returns the log of clears.
    pub fn clear_log(&self) -> &ClearLog {
        &self.0.clears
    }

    /// Carries out the clears that a tier knows of. Called for each private tier before this process connects
    /// to peers and stores.
    ///
    /// # Errors
    /// [`TooManyClears`].
    pub fn learn_of(&self, tier: &dyn Backend) -> Result<(), TooManyClears> {
        self.0.clears.learn(&tier.clears(), tier.name()).map(drop)
    }

    /// Sets the source of information about spaces and requests.
    pub fn set_book(&self, book: Arc<dyn SpaceBook>) {
        *self.0.book.write() = Some(book);
    }

    /// Returns true if a book was set ([`Self::set_book`]).
    pub fn has_book(&self) -> bool {
        self.0.book.read().is_some()
    }

    /// Returns true if the host belongs to an engine.
    pub fn is_taken(&self) -> bool {
        self.0.engine.get().is_some()
    }

    /// Sets the engine. Returns false if the host already has one.
    pub(crate) fn set_engine(&self, engine: WeakEngine) -> bool {
        self.0.engine.set(engine).is_ok()
    }

    fn engine(&self) -> Option<CacheEngine> {
        self.0.engine.get()?.upgrade()
    }

    fn book(&self) -> Option<Arc<dyn SpaceBook>> {
        self.0.book.read().clone()
    }

    /// Returns the keys of the merged chunks that a prompt's chunks become part of; none if the chunks are
    /// not merged.
    fn merged(&self, keys: &[ChunkKey]) -> Vec<ChunkKey> {
        let Some((first, book)) = keys.first().zip(self.book()) else {
            return Vec::new();
        };
        let (clears, space) = (&self.0.clears, self.0.clears.space_of(first.space));
        let Some((space, kv_rank)) = book.merged(space, first.kv_rank) else {
            return Vec::new();
        };
        let space = space.after(clears.id());
        let merged = |key: &ChunkKey| ChunkKey {
            space,
            kv_rank,
            ..*key
        };
        keys.iter().map(merged).collect()
    }

    /// Returns the tenant of a prompt's chunks. All of them have the same space.
    fn tenant(&self, keys: &[ChunkKey]) -> TenantId {
        let tenant = keys.first().zip(self.book());
        tenant.map_or_else(TenantId::default, |(key, book)| {
            book.tenant(self.0.clears.space_of(key.space))
        })
    }
}

impl Host for EngineHost {
    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk> {
        match self.engine() {
            Some(engine) => engine.states(keys),
            None => vec![HostChunk::Absent; keys.len()],
        }
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<HostLease>>> {
        Box::pin(async move {
            let Some(engine) = self.engine() else {
                return keys.iter().map(|_| None).collect();
            };
            let leased = engine
                .lease_own(self.tenant(keys), keys, promote_until)
                .await;
            let chunk = |leases: Option<Leases>| {
                let leases = leases?;
                Some(HostLease {
                    slot: leases.get(0)?.clone(),
                    checksum: None,
                    lease: Box::new(leases),
                })
            };
            let mut held: Vec<_> = leased.into_iter().map(chunk).collect();
            if engine.pool_is_lost() {
                held.iter_mut().for_each(|chunk| *chunk = None);
            }
            held
        })
    }

    fn list(&self, from: u128, limit: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        Box::pin(async move {
            match self.engine() {
                Some(engine) => engine.list_own(from, limit).await,
                None => (Vec::new(), None),
            }
        })
    }

    fn promote<'a>(&'a self, keys: &'a [ChunkKey], hint: LocateHint) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            if let Some(engine) = self.engine() {
                engine.promote_own(self.tenant(keys), keys, hint).await;
            }
        })
    }

    fn receive<'a>(
        &'a self,
        run: ChunkRun,
        peer: &'a str,
        timeout: Duration,
    ) -> BoxFuture<'a, Received> {
        Box::pin(async move {
            let is_used = run.keys.first().is_some_and(|key| {
                let (space, clears) = (self.0.clears.space_of(key.space), self.0.clears.id());
                // Otherwise the name is from before a clear.
                space.after(clears) == key.space
                    && self.book().is_some_and(|book| book.is_used(space))
            });
            match self.engine() {
                Some(engine) if is_used => {
                    let tenant = self.tenant(&run.keys);
                    // Chunks that were merged from such chunks before are not read again.
                    let merged = engine.count_leading(&self.merged(&run.keys));
                    let rest = run.after(merged);
                    let mut received = engine.receive_own(tenant, &rest, peer, timeout).await;
                    received.chunks += merged;
                    received
                }
                _ => Received::default(),
            }
        })
    }

    fn clears(&self) -> Arc<Clears> {
        self.0.clears.clears()
    }

    fn clears_are_noted(&self) -> bool {
        self.0.clears.is_noted()
    }

    fn learn(
        &self,
        clears: Clears,
        origin: &'static str,
    ) -> BoxFuture<'_, Result<(), TooManyClears>> {
        let log = self.0.clears.clone();
        Box::pin(async move {
            let clears = Arc::new(clears);
            let (on_thread, of_it) = (log.clone(), Arc::clone(&clears));
            // Blocks until the state file is written.
            let learning = tokio::task::spawn_blocking(move || on_thread.learn(&of_it, origin));
            // A runtime that is shutting down starts no thread.
            let learned = learning.await;
            let learned = learned.unwrap_or_else(|_| log.learn(&clears, origin));
            learned.map(drop)
        })
    }

    fn events(&self) -> &Events {
        &self.0.events
    }

    fn spaces(&self) -> Vec<HostSpace> {
        self.book().map_or_else(Vec::new, |book| book.spaces())
    }

    fn describe(&self, name: SpaceId) -> Option<KeySpace> {
        self.book()?.describe(self.0.clears.space_of(name))
    }

    fn merges_layout(&self, layout: LayoutFingerprint, ranks: u32) -> bool {
        self.book()
            .is_some_and(|book| book.merges_layout(layout, ranks))
    }

    fn is_over(&self, request: &str) -> bool {
        self.book().is_some_and(|book| book.is_over(request))
    }

    fn is_draining(&self) -> bool {
        self.engine().is_some_and(|engine| engine.is_draining())
    }

    fn usage(&self) -> Usage {
        let engine = self.engine();
        engine.map_or_else(Usage::default, |engine| {
            let usage = engine.usage();
            Usage::new(usage.chunks, usage.chunk_bytes).with_capacity(usage.pool_bytes)
        })
    }
}

/// Marks the chunks of a push as being received, until it is dropped.
struct PushGuard<'a> {
    engine: &'a CacheEngine,
    keys: &'a [ChunkKey],
}

impl Drop for PushGuard<'_> {
    fn drop(&mut self) {
        let there = self.engine.local().contains(self.keys);
        let there = there.into_iter().map(|len| len.is_some());
        self.engine.pushed().end(self.keys.iter().zip(there));
    }
}

impl CacheEngine {
    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk> {
        if self.pool_is_lost() {
            return vec![HostChunk::Absent; keys.len()];
        }
        let local = self.local();
        let resident = local.contains(keys);
        let all_resident = resident.iter().all(Option::is_some);
        let sources = match self.lower() {
            Some(lower) if !all_resident => lower.tiers().sources_now(keys, None, None),
            _ => Vec::new(),
        };
        let mut sources = sources.into_iter();
        let held = |(key, resident): (&ChunkKey, Option<u64>)| {
            let source = sources.next().flatten();
            match (resident, source) {
                (Some(len), _) => HostChunk::Memory { len },
                (None, Some(ChunkSource::Tier { len, .. })) => HostChunk::Lower { len },
                _ if local.is_writing(key) && !self.is_promoting(key) => HostChunk::Writing,
                _ => HostChunk::Absent,
            }
        };
        keys.iter().zip(resident).map(held).collect()
    }

    async fn list_own(&self, from: u128, limit: usize) -> (Vec<ChunkKey>, Option<u128>) {
        if self.pool_is_lost() {
            return (Vec::new(), None);
        }
        // The tier, DRAM first, and the position in it.
        let (tier, from) = (
            (from >> TIER_SHIFT) as usize,
            from & ((1 << TIER_SHIFT) - 1),
        );
        let (keys, next) = match tier.checked_sub(1) {
            None => {
                let (keys, next) = self.local().list(from as u64, limit);
                (keys, next.map(u128::from))
            }
            Some(index) => match self.lower() {
                Some(lower) => lower.tiers().list_now(index, from, limit).await,
                None => (Vec::new(), None),
            },
        };
        let tiers = self.lower().map_or(0, |lower| lower.tiers().len());
        let next = match next {
            Some(next) => Some((tier as u128) << TIER_SHIFT | next),
            None => (tier < tiers).then_some((tier as u128 + 1) << TIER_SHIFT),
        };
        (keys, next)
    }

    fn is_promoting(&self, key: &ChunkKey) -> bool {
        let lower = self.lower();
        lower.is_some_and(|lower| lower.tiers().is_promoting(key))
    }

    /// Leases chunks as [`Host::lease`] does. Promoted chunks count against the tenant's quota. Counts
    /// neither as a lookup nor as a use.
    async fn lease_own(
        &self,
        tenant: TenantId,
        keys: &[ChunkKey],
        deadline: Instant,
    ) -> Vec<Option<Leases>> {
        if self.pool_is_lost() {
            return keys.iter().map(|_| None).collect();
        }
        let local = self.local();
        // Promoted chunks stay until the others are leased.
        let mut promoted = None;
        if let Some(lower) = self.lower().filter(|_| now() < deadline) {
            let sources = lower.tiers().sources_now(keys, None, None);
            let sources: Vec<ChunkSource> =
                sources.into_iter().map_while(|source| source).collect();
            if sources
                .iter()
                .any(|source| !matches!(source, ChunkSource::Dram))
            {
                let prompt = Arc::new(Prompt {
                    owner: PEERS,
                    tenant,
                    before: None,
                    keys: keys.to_vec(),
                    hint: None,
                    sources,
                    first: 0,
                    begun: now(),
                    deadline,
                    reach: Arc::new(AtomicUsize::new(keys.len())),
                    half: half_of(deadline),
                    read: Mutex::default(),
                    misses: Mutex::default(),
                });
                let none = local.lease_uncounted(PEERS, &[]);
                promoted = Some(lower.tiers().promote(&prompt, none).await);
            }
        }
        let lease = |key: &ChunkKey| {
            let leases = local.lease_uncounted(PEERS, &[*key]);
            (leases.len() == 1).then_some(leases)
        };
        let leases = keys.iter().map(lease).collect();
        drop(promoted);
        leases
    }

    async fn promote_own(&self, tenant: TenantId, keys: &[ChunkKey], hint: LocateHint) {
        self.promote_after(None, tenant, keys, hint).await;
    }

    /// Promotes chunks of a prompt that follow the chunk with this hash.
    async fn promote_after(
        &self,
        parent: Option<ChunkHash>,
        tenant: TenantId,
        keys: &[ChunkKey],
        hint: LocateHint,
    ) {
        let Some(first) = keys.first() else {
            return;
        };
        let rank = Rank {
            space: first.space,
            kv_rank: first.kv_rank,
            chunk_bytes: hint.chunk_bytes,
        };
        let hashes = keys.iter().map(|key| key.hash).collect();
        let request = LookupRequest::new(PEERS, hashes, vec![rank]).for_peers(parent);
        let lookup = self.lookup(request.with_tenant(tenant).with_hint(hint));
        drop(lookup.wait().await);
    }

    async fn receive_own(
        &self,
        tenant: TenantId,
        run: &ChunkRun,
        peer: &str,
        timeout: Duration,
    ) -> Received {
        if self.pool_is_lost() || self.is_draining() {
            return Received::default();
        }
        let keys = &run.keys;
        let slot = run.chunk_bytes.checked_next_multiple_of(self.align());
        let absent = self.absent(keys);
        // Before the chunks arrive, so that a lookup that finds them at once is counted.
        let begun = self
            .pushed()
            .begin(&absent, slot.unwrap_or(u64::MAX), peer, now());
        let cut_at = absent.get(begun);
        let cut_at = cut_at.and_then(|cut_at| keys.iter().position(|key| key == cut_at));
        let fitting = &keys[..cut_at.unwrap_or(keys.len())];
        let guard = PushGuard {
            engine: self,
            keys: &absent[..begun],
        };
        let hint = LocateHint::default()
            .with_sources(Arc::new([peer.to_owned()]))
            .only_sources()
            .with_chunk_bytes(Some(run.chunk_bytes))
            .with_timeout(timeout);
        let parent = run.parent.map(|parent| parent.hash);
        self.promote_after(parent, tenant, fitting, hint).await;
        drop(guard);
        Received {
            chunks: self.count_leading(fitting),
            is_wanted: true,
        }
    }

    /// Returns the number of leading chunks that are in DRAM.
    fn count_leading(&self, keys: &[ChunkKey]) -> usize {
        let there = self.local().contains(keys).into_iter();
        there.take_while(Option::is_some).count()
    }

    /// Returns the keys of chunks that are not in DRAM.
    fn absent(&self, keys: &[ChunkKey]) -> Vec<ChunkKey> {
        let there = self.local().contains(keys);
        let absent = keys.iter().zip(there).filter(|(_, len)| len.is_none());
        absent.map(|(key, _)| *key).collect()
    }

    /// Returns wanted chunks in DRAM with their payload bytes, as runs of consecutive chunks of a prompt: at
    /// most `limit` bytes, the heads of prompts first.
    pub fn dram_runs(
        &self,
        limit: u64,
        wanted: impl Fn(&ChunkKey) -> bool,
    ) -> Vec<Vec<(ChunkKey, u64)>> {
        let mut runs: Vec<Vec<(ChunkKey, u64)>> = Vec::new();
        // Index of the run whose last chunk this is.
        let mut ends: HashMap<ChunkKey, usize> = HashMap::new();
        let mut left = limit;
        for chunk in self.local().list_heads_first() {
            if !wanted(&chunk.key) {
                continue;
            }
            let Some(rest) = left.checked_sub(chunk.len) else {
                break;
            };
            left = rest;
            let follows = chunk.parent.and_then(|parent| ends.remove(&parent));
            let run = follows.unwrap_or_else(|| {
                runs.push(Vec::new());
                runs.len() - 1
            });
            runs[run].push((chunk.key, chunk.len));
            ends.insert(chunk.key, run);
        }
        runs
    }
}
