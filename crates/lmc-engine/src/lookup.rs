//! Lookups of prompts: the request, the handle, and the outcome.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use lmc_backend::{LocateHint, now};
use lmc_backend_local::{Leases, OwnerId, TenantId};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use lmc_memory::SealedSlot;
use parking_lot::Mutex;
use pollster::block_on;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::CacheEngine;
use crate::lower::{Prompt, Source, Sources, Tiers, Waits, fits, half_of};
use crate::merge::{Merge, complete};
use crate::misses::{LookupEnd, Miss, MissReason, Missing};

/// Most failed reads of a prompt that waits for its sources.
const MAX_FAILURES: usize = 3;

/// One rank of a prompt: the space and the KV rank of its chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rank {
    /// Space of the chunks.
    pub space: SpaceId,
    /// KV rank of the chunks.
    pub kv_rank: u16,
    /// Payload bytes of each chunk of the space, if known: a chunk of another length is a miss.
    pub chunk_bytes: Option<u64>,
}

impl Rank {
    /// Returns true if the chunk in this slot has the length of the rank's chunks, or if that length is
    /// unknown.
    pub(crate) fn fits(&self, slot: &SealedSlot) -> bool {
        fits(slot.len(), self.chunk_bytes)
    }

    /// Returns the key of the chunk with this hash.
    pub fn key(&self, hash: ChunkHash) -> ChunkKey {
        ChunkKey {
            space: self.space,
            kv_rank: self.kv_rank,
            group: 0,
            hash,
        }
    }
}

/// Limits the bytes that lookups keep from eviction.
pub trait LeaseLimit: Send + Sync {
    /// Returns the most bytes that a lookup may keep from eviction, at most `leased + more`. `leased` are the
    /// bytes of chunks that this lookup already leases and no other lease holds. `more` are the bytes of
    /// chunks that it is about to promote.
    fn allowed(&self, leased: u64, more: u64) -> u64;
}

/// The limit of a lookup that has already leased bytes, which count against it.
struct After {
    limit: Arc<dyn LeaseLimit>,
    before: u64,
}

impl LeaseLimit for After {
    fn allowed(&self, leased: u64, more: u64) -> u64 {
        let allowed = self.limit.allowed(self.before + leased, more);
        allowed.saturating_sub(self.before)
    }
}

/// A prompt to look up, in all its ranks.
#[derive(Clone)]
#[non_exhaustive]
pub struct LookupRequest {
    /// Owner of the leases.
    pub owner: OwnerId,
    /// Tenant whose quota the promoted chunks count against.
    pub tenant: TenantId,
    /// Prefix hashes of the chunks, from the first one to look up.
    pub hashes: Vec<ChunkHash>,
    /// The ranks; a chunk counts as found if every rank has it.
    pub ranks: Vec<Rank>,
    /// Hints for tiers that are asked.
    pub hint: LocateHint,
    limit: Option<Arc<dyn LeaseLimit>>,
    /// For each merge, the ranks whose chunks can be merged, listed for each rank of the request.
    pub(crate) merges: Vec<Vec<Merge>>,
    /// True if the sources that the prompt waits for compute chunks that are to be merged.
    waits_for_merge: bool,
    /// True if a peer's request caused the lookup: spaces of ranks are names after the clears, and nothing
    /// counts as used.
    for_peers: bool,
    /// Hash of the chunk before the first one, if known.
    parent: Option<ChunkHash>,
    /// True if an engine looks up a whole prompt.
    is_demand: bool,
}

impl LookupRequest {
    /// Makes a request for the chunks with these prefix hashes, for tenant 0.
    pub fn new(owner: OwnerId, hashes: Vec<ChunkHash>, ranks: Vec<Rank>) -> Self {
        Self {
            owner,
            tenant: TenantId::default(),
            hashes,
            ranks,
            hint: LocateHint::default(),
            limit: None,
            merges: Vec::new(),
            waits_for_merge: false,
            for_peers: false,
            parent: None,
            is_demand: true,
        }
    }

    /// Marks the request as caused by a peer: spaces of ranks are names after the clears.
    pub(crate) fn for_peers(mut self, parent: Option<ChunkHash>) -> Self {
        (self.for_peers, self.is_demand) = (true, false);
        self.parent = parent;
        self
    }

    /// Sets the tenant. Default: tenant 0.
    #[must_use]
    pub fn with_tenant(mut self, tenant: TenantId) -> Self {
        self.tenant = tenant;
        self
    }

    /// Sets the hints for tiers that are asked. Default: none.
    #[must_use]
    pub fn with_hint(mut self, hint: LocateHint) -> Self {
        self.hint = hint;
        self
    }

    /// Limits the bytes that the lookup may keep from eviction. Default: no limit.
    #[must_use]
    pub fn with_limit(mut self, limit: Arc<dyn LeaseLimit>) -> Self {
        self.limit = Some(limit);
        self
    }

    /// Sets engines with more ranks, the one to ask first at the front. Each entry has, for each rank of the
    /// request, the ranks whose chunks are merged where chunks of that rank are missing. Default: none.
    /// Without lower tiers nothing is merged.
    #[must_use]
    pub fn with_merges(mut self, merges: Vec<Vec<Merge>>) -> Self {
        self.merges = merges;
        self
    }

    /// Excludes the chunks from [`CacheEngine::demand`], because their size differs from that of most chunks.
    /// Default: they are included.
    #[must_use]
    pub fn without_demand(mut self) -> Self {
        self.is_demand = false;
        self
    }

    /// Returns the number of engines with more ranks in the request.
    pub fn merges(&self) -> usize {
        self.merges.len()
    }

    /// Marks that the sources that the prompt waits for compute chunks to be merged. Default: they compute
    /// chunks of the request's ranks.
    #[must_use]
    pub fn waiting_for_merge(mut self) -> Self {
        self.waits_for_merge = true;
        self
    }

    /// Returns the request for the chunks from index `first` on, for other ranks. The lookup has already
    /// leased `before` bytes, which count against its limit.
    pub(crate) fn after_chunk(&self, first: usize, ranks: Vec<Rank>, before: u64) -> Self {
        Self {
            owner: self.owner,
            tenant: self.tenant,
            hashes: self.hashes[first..].to_vec(),
            ranks,
            hint: self.hint.clone(),
            limit: self.limit_after(before).map(|limit| Arc::new(limit) as _),
            merges: Vec::new(),
            waits_for_merge: false,
            for_peers: self.for_peers,
            parent: first.checked_sub(1).map(|before| self.hashes[before]),
            is_demand: false,
        }
    }

    /// Returns the limit of a lookup that has already leased bytes, which count against it.
    fn limit_after(&self, before: u64) -> Option<After> {
        let limit = self.limit.clone()?;
        Some(After { limit, before })
    }

    /// Returns how many of `bytes` the lookup may keep, after `before`: both are bytes of chunks that it has
    /// just leased.
    pub(crate) fn allowed(&self, before: u64, bytes: u64) -> u64 {
        let limit = self.limit_after(before);
        limit.map_or(bytes, |limit| limit.allowed(bytes, 0))
    }

    pub(crate) fn without_wait(mut self) -> Self {
        self.hint = self.hint.with_wait(None);
        self
    }

    /// Returns the name of a rank's space after these clears, or the space itself if it is a name already.
    fn name(&self, rank: Rank, clears: ClearsId) -> SpaceId {
        match self.for_peers {
            true => rank.space,
            false => rank.space.after(clears),
        }
    }

    /// Prepares a rank that was promoted in part for the next round, with all its chunks. Returns also the
    /// number of its resident chunks, and the chunks that were read.
    fn after(&self, clears: ClearsId, found: FoundRank) -> (Known, (usize, ReadFrom)) {
        let name = self.name(found.rank, clears);
        let known = Known {
            rank: found.rank,
            keys: self.keys(name, found.rank, self.hashes.len()),
            leases: found.leases,
            seen: found.seen,
            sources: Sources::default(),
            miss: None,
        };
        (known, (found.resident, found.read))
    }

    /// Returns the keys of the first `len` chunks of one rank, under the name of its space.
    fn keys(&self, name: SpaceId, rank: Rank, len: usize) -> Vec<ChunkKey> {
        let named = Rank {
            space: name,
            ..rank
        };
        let hashes = self.hashes.iter().take(len);
        hashes.map(|hash| named.key(*hash)).collect()
    }
}

impl fmt::Debug for LookupRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LookupRequest")
            .field("owner", &self.owner)
            .field("tenant", &self.tenant)
            .field("chunks", &self.hashes.len())
            .field("ranks", &self.ranks.len())
            .finish_non_exhaustive()
    }
}

/// The leased chunks of one rank.
#[derive(Debug)]
#[non_exhaustive]
pub struct FoundRank {
    /// The rank.
    pub rank: Rank,
    /// Leases of the leading chunks that every rank has.
    pub leases: Leases,
    /// Number of leading chunks that were in DRAM for this rank before anything was promoted.
    pub resident: usize,
    /// Number of leading chunks that are in DRAM for this rank now, including chunks that other ranks lack.
    pub promoted: usize,
    /// Number of leading chunks before the first chunk that a peer had pushed and no lookup had found yet;
    /// [`Self::resident`] or more if there is no such chunk.
    pub seen: usize,
    /// Indices of the chunks that were read from lower tiers for this lookup, each with the index of its
    /// tier.
    pub(crate) read: ReadFrom,
    /// Reason why the chunk after the leases was not read, if known.
    miss: Option<Miss>,
}

impl FoundRank {
    /// Makes the outcome of a rank whose chunks were leased without any promotion.
    pub(crate) fn in_dram(rank: Rank, leases: Leases) -> Self {
        Self {
            rank,
            resident: leases.len(),
            promoted: 0,
            seen: usize::MAX,
            leases,
            read: Vec::new(),
            miss: None,
        }
    }
}

/// Indices of chunks, each with the index of the tier that it was read from.
pub(crate) type ReadFrom = Vec<(usize, usize)>;

/// Consecutive chunks of a prompt that came from one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierRun {
    /// Index of the lower tier that the chunks were read from for this lookup, as in
    /// [`CacheEngine::tier_name`]; with several ranks, the last tier. `None` if the chunks were in DRAM
    /// already, or another lookup promoted them.
    pub tier: Option<usize>,
    /// Number of chunks.
    pub chunks: usize,
}

/// The outcome of a lookup. Dropping it releases the leases.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Found {
    /// Number of leading chunks that every rank has in DRAM now.
    pub hits: usize,
    /// Number of leading chunks that every rank had in DRAM before anything was promoted.
    pub resident: usize,
    /// The leases of each rank, in the order of the request; fewer ranks if a rank has no chunks.
    pub ranks: Vec<FoundRank>,
    /// The chunk after those that were found. `None` if all were found, the request had no ranks, the pool
    /// was lost, or the engine was closed meanwhile.
    pub missing: Option<Box<Missing>>,
}

impl Found {
    /// Returns the tiers of the chunks that were found, in prompt order.
    pub fn runs(&self) -> Vec<TierRun> {
        let mut tiers = vec![None; self.hits];
        for rank in &self.ranks {
            // If two tiers have answered for a chunk, the first one counts.
            let first: HashMap<usize, usize> = rank.read.iter().rev().copied().collect();
            for (index, tier) in first {
                if let Some(known) = tiers.get_mut(index) {
                    *known = (*known).max(Some(tier));
                }
            }
        }
        let runs = tiers.chunk_by(|one, next| one == next);
        let run = |run: &[Option<usize>]| TierRun {
            tier: run[0],
            chunks: run.len(),
        };
        runs.map(run).collect()
    }

    /// Returns true if a chunk was read from a lower tier for this lookup.
    pub fn was_read(&self) -> bool {
        self.ranks.iter().any(|rank| !rank.read.is_empty())
    }

    /// Returns the leases of the first rank, for callers with a single rank.
    pub fn into_leases(mut self) -> Option<Leases> {
        (!self.ranks.is_empty()).then(|| self.ranks.swap_remove(0).leases)
    }

    /// Combines the outcomes of all ranks. `ranks` is the number of requested ranks.
    fn join(found: Vec<FoundRank>, ranks: usize) -> Self {
        let all = found.len() == ranks;
        let hits = found.iter().map(|rank| rank.leases.len()).min();
        let hits = hits.filter(|_| all).unwrap_or(0);
        let resident = found.iter().map(|rank| rank.resident).min();
        let mut this = Self {
            hits,
            resident: resident.unwrap_or(0).min(hits),
            ranks: found,
            missing: None,
        };
        for rank in &mut this.ranks {
            rank.promoted = rank.leases.len();
            rank.leases.truncate(hits);
        }
        this
    }

    /// Sets the missing chunk, at which the lookup of these chunks ended.
    fn ended_at(mut self, lookup_end: &LookupEnd, hashes: &[ChunkHash]) -> Self {
        self.missing = lookup_end.missing(hashes, self.hits);
        self
    }
}

/// A lookup that may still be promoting chunks.
///
/// Dropping it ends the promotion and releases the leases. If another lookup waits for one of the chunks,
/// that lookup promotes it.
#[derive(Debug)]
pub struct Lookup {
    clears: ClearsId,
    state: State,
}

#[derive(Debug)]
enum State {
    Done(Found),
    Promoting(Promotion),
}

/// A running promotion, aborted when it is dropped.
#[derive(Debug)]
struct Promotion {
    task: AbortHandle,
    found: oneshot::Receiver<Found>,
}

impl Drop for Promotion {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Lookup {
    fn done(clears: ClearsId, found: Found) -> Self {
        Self {
            clears,
            state: State::Done(found),
        }
    }

    /// Returns the digest of the clears after which the chunks were looked up. Chunks are read, and chunks
    /// that are computed for the prompt are stored, after these clears.
    pub fn clears(&self) -> ClearsId {
        self.clears
    }

    /// Returns the outcome.
    ///
    /// # Errors
    /// The lookup itself while it is promoting chunks: call [`Lookup::wait`] for the outcome.
    pub fn try_found(self) -> Result<Found, Self> {
        match self.state {
            State::Done(found) => Ok(found),
            State::Promoting(mut promotion) => match promotion.found.try_recv() {
                Ok(found) => Ok(found),
                Err(_) => Err(Self {
                    state: State::Promoting(promotion),
                    ..self
                }),
            },
        }
    }

    /// Waits until every chunk that can be promoted is promoted, at most for the timeouts of the engine.
    /// Nothing is found if the engine is closed meanwhile.
    pub async fn wait(self) -> Found {
        match self.state {
            State::Done(found) => found,
            State::Promoting(mut promotion) => (&mut promotion.found).await.unwrap_or_default(),
        }
    }

    /// Waits as [`Lookup::wait`] does, on a thread outside any runtime.
    pub fn wait_blocking(self) -> Found {
        match self.state {
            State::Done(found) => found,
            State::Promoting(mut promotion) => block_on(&mut promotion.found).unwrap_or_default(),
        }
    }
}

/// The chunks of one rank before anything is promoted.
struct Known {
    rank: Rank,
    keys: Vec<ChunkKey>,
    /// Leases of the leading chunks in DRAM.
    leases: Leases,
    /// Number of chunks before the first one that was pushed and not found yet.
    seen: usize,
    /// Sources of the chunks after the leased ones.
    sources: Sources,
    /// Reason why the chunk after the sources has no source, if a tier's answer showed one.
    miss: Option<Miss>,
}

impl Known {
    /// Returns the number of leading chunks that some tier has, as far as known.
    fn reach(&self) -> usize {
        match self.sources.is_final {
            true => self.leases.len() + self.sources.found.len(),
            false => self.keys.len(),
        }
    }

    fn truncate(&mut self, reach: usize) {
        self.leases.truncate(reach);
        self.keys.truncate(reach);
        let resident = self.leases.len();
        self.sources.found.truncate(reach - resident);
        self.sources.is_final |= resident + self.sources.found.len() == reach;
    }
}

/// Returns the number of leading chunks, at most `reach`, that a lookup may keep from eviction by its limit.
fn within_limit(
    limit: Option<&Arc<dyn LeaseLimit>>,
    known: &[Known],
    reach: usize,
    align: u64,
) -> usize {
    let Some(limit) = limit else {
        return reach;
    };
    let fresh: u64 = known.iter().map(|rank| rank.leases.fresh_bytes()).sum();
    let more: u64 = known.iter().map(|rank| rank.sources.bytes()).sum();
    let over = (fresh + more).saturating_sub(limit.allowed(fresh, more));
    if over == 0 {
        return reach;
    }
    let taken = |rank: &Known| -> u64 {
        let slots = rank.leases.iter();
        slots.map(|slot| slot.len().next_multiple_of(align)).sum()
    };
    // Bytes of all ranks.
    let bytes = known.iter().map(taken).sum::<u64>() + more;
    let chunk = bytes.div_ceil(reach.max(1) as u64).max(1);
    reach.saturating_sub(over.div_ceil(chunk) as usize)
}

impl CacheEngine {
    /// Looks up a prompt in all its ranks. Leases the leading chunks that are in DRAM, and starts to promote
    /// the following chunks that lower tiers have. A chunk counts only if every rank has it.
    ///
    /// Never waits: if nothing is to be promoted and no tier is to be asked, the handle has the outcome at
    /// once, otherwise after [`Lookup::wait`].
    pub fn lookup(&self, request: LookupRequest) -> Lookup {
        if self.pool_is_lost() {
            return Lookup::done(self.clears_id(), Found::default());
        }
        if request.is_demand {
            self.note_demand(&request.hashes, &request.ranks);
        }
        let clears = self.clears_id();
        let align = self.local().pool().align();
        let mut known: Vec<Known> = Vec::with_capacity(request.ranks.len());
        let mut reach = request.hashes.len();
        let mut lookup_end = LookupEnd::new(clears, reach);
        for &rank in &request.ranks {
            let mut keys = request.keys(request.name(rank, clears), rank, reach);
            let leases = self.lease_fitting(&request, rank, &mut keys);
            let sources = match self.lower() {
                Some(lower) => {
                    let rest = &keys[leases.len()..];
                    let parts = request.hint.parts;
                    lower.tiers().locate_now(rest, rank.chunk_bytes, parts)
                }
                None => Sources {
                    found: Vec::new(),
                    is_final: true,
                },
            };
            let one = Known {
                rank,
                keys,
                seen: usize::MAX,
                leases,
                sources,
                miss: None,
            };
            reach = one.reach();
            lookup_end.lower(reach, rank, None);
            known.push(one);
            if reach == 0 {
                break;
            }
        }
        if known.len() < request.ranks.len() || known.is_empty() {
            reach = 0;
        }
        for rank in &mut known {
            rank.truncate(reach);
        }
        let allowed = within_limit(request.limit.as_ref(), &known, reach, align);
        for rank in &mut known {
            lookup_end.lower(allowed, rank.rank, Some(Miss::certain(MissReason::Limit)));
            rank.truncate(allowed);
            if !request.for_peers {
                let resident = &rank.keys[..rank.leases.len()];
                rank.seen = self.pushed().remove(resident).unwrap_or(usize::MAX);
            }
        }
        let is_done = |rank: &Known| rank.leases.len() == rank.keys.len();
        let is_merged = !request.merges.is_empty() && reach < request.hashes.len();
        let is_known = !is_merged && known.iter().all(is_done);
        let lower = self.lower().filter(|_| !is_known);
        let Some(lower) = lower else {
            let ranks = known.len();
            let found = known.into_iter().map(|rank| FoundRank {
                seen: rank.seen,
                ..FoundRank::in_dram(rank.rank, rank.leases)
            });
            let found = Found::join(found.collect(), ranks);
            return Lookup::done(clears, found.ended_at(&lookup_end, &request.hashes));
        };
        let (sender, found) = oneshot::channel();
        let (tiers, pushed) = (Arc::clone(lower.tiers()), Arc::clone(self.pushed()));
        let engine = self.downgrade();
        if !request.for_peers {
            let absent = known.iter().map(|rank| rank.keys.len() - rank.leases.len());
            tiers.count_lookup(absent.sum());
        }
        let begun = now();
        let task = lower.spawn(async move {
            let found = match request.merges.is_empty() {
                true => promote(&tiers, &request, lookup_end, known, align).await,
                false => {
                    let without_wait = request.clone().without_wait();
                    // The prompt waits once: for the chunks to be merged, if its sources compute those.
                    let (now, then) = match request.waits_for_merge {
                        true => (&without_wait, &request),
                        false => (&request, &without_wait),
                    };
                    let found = promote(&tiers, now, lookup_end, known, align).await;
                    complete(&engine, then.clone(), clears, found).await
                }
            };
            if !request.for_peers && !pushed.is_empty() {
                // A push may have brought the chunks meanwhile.
                for rank in &found.ranks {
                    let name = request.name(rank.rank, clears);
                    pushed.remove(&request.keys(name, rank.rank, found.hits));
                }
            }
            if !request.for_peers && request.hint.wait.is_none() {
                tiers.record_promotion(now().saturating_duration_since(begun));
            }
            // The caller may have dropped the lookup.
            let _ = sender.send(found);
        });
        Lookup {
            clears,
            state: State::Promoting(Promotion { task, found }),
        }
    }

    /// Leases the leading chunks in DRAM. If a chunk has another length than its rank's chunks, removes it
    /// and truncates `keys` before it: a peer may have copied such a chunk here before an engine with its
    /// space was known.
    fn lease_fitting(
        &self,
        request: &LookupRequest,
        rank: Rank,
        keys: &mut Vec<ChunkKey>,
    ) -> Leases {
        let mut leases = match request.for_peers {
            true => self.local().lease_uncounted(request.owner, keys),
            false => self.lease_and_offer(request.owner, keys),
        };
        let wrong = leases.iter().position(|slot| !rank.fits(slot));
        if let Some(at) = wrong {
            leases.truncate(at);
            // A peer may be wrong about the length.
            if !request.for_peers {
                self.local().remove(&keys[at..=at]);
            }
            keys.truncate(at);
        }
        leases
    }
}

/// Promotes the chunks of a prompt that tiers have. If the prompt waits for its sources, reads computed
/// chunks while the sources compute the next ones, until all chunks are read or the time is over.
async fn promote(
    tiers: &Arc<Tiers>,
    request: &LookupRequest,
    lookup_end: LookupEnd,
    known: Vec<Known>,
    align: u64,
) -> Found {
    let clears = lookup_end.clears();
    let wait = request.hint.wait;
    let begun = now();
    let mut waits = Waits {
        written_until: begun + tiers.pending_timeout(),
        expected_until: begun + wait.unwrap_or_default(),
        clears,
    };
    let (mut found, mut reach) =
        promote_known(tiers, request, lookup_end, known, align, waits).await;
    if wait.is_none() || reach == 0 {
        return found;
    }
    // Tiers other than the sources were asked before.
    let request = LookupRequest {
        hint: request.hint.clone().repeated(),
        ..request.clone()
    };
    let (mut is_over, mut failures, mut before) = (false, 0, 0);
    while !is_over && found.hits < request.hashes.len() {
        if found.hits <= before {
            // A busy source sometimes fails to lend a chunk. Otherwise no chunk came.
            failures += 1;
            if reach <= found.hits || failures > MAX_FAILURES {
                break;
            }
        }
        before = found.hits;
        // Chunks that came meanwhile are read even when the time is over. After a clear none come.
        is_over = now() >= waits.expected_until || tiers.clears().id() != clears;
        if is_over {
            waits = waits.over();
        }
        let (known, read): (Vec<Known>, Vec<_>) = mem::take(&mut found.ranks)
            .into_iter()
            .map(|rank| request.after(clears, rank))
            .unzip();
        let lookup_end = LookupEnd::new(clears, request.hashes.len());
        (found, reach) = promote_known(tiers, &request, lookup_end, known, align, waits).await;
        for (rank, (resident, mut read)) in found.ranks.iter_mut().zip(read) {
            rank.resident = resident;
            read.append(&mut rank.read);
            rank.read = read;
        }
        let resident = found.ranks.iter().map(|rank| rank.resident).min();
        found.resident = resident.unwrap_or(0).min(found.hits);
    }
    found
}

/// Asks the tiers that have no local index, then promotes the chunks that are worth it. Returns the outcome,
/// and the number of leading chunks that should have been promoted.
async fn promote_known(
    tiers: &Arc<Tiers>,
    request: &LookupRequest,
    mut lookup_end: LookupEnd,
    mut known: Vec<Known>,
    align: u64,
    waits: Waits,
) -> (Found, usize) {
    let clears = lookup_end.clears();
    let ranks = known.len();
    let begun = now();
    let hint = |rank: &Rank| request.hint.clone().with_chunk_bytes(rank.chunk_bytes);
    let hint = &hint;
    let asked = known.iter_mut().map(|rank| async {
        let rest = &rank.keys[rank.leases.len()..];
        let known = mem::take(&mut rank.sources);
        let hint = hint(&rank.rank);
        let (found, miss) = tiers.locate(rest, known, &hint, waits).await;
        rank.miss = miss;
        rank.sources = Sources {
            found,
            is_final: true,
        };
    });
    futures_util::future::join_all(asked).await;
    // The wait for sources does not count as read time.
    let begun = request.hint.wait.map_or(begun, |_| now());
    let deadline = begun + tiers.promotion_timeout();
    let mut reach = known.iter().map(Known::reach).min().unwrap_or(0);
    for rank in &mut known {
        lookup_end.lower(rank.reach(), rank.rank, rank.miss);
        rank.truncate(reach);
    }
    let mut limit = |reach: usize, reason| {
        let first = known.first().map(|rank| rank.rank);
        first.inspect(|rank| lookup_end.lower(reach, *rank, Some(Miss::certain(reason))));
    };
    reach = within_limit(request.limit.as_ref(), &known, reach, align);
    limit(reach, MissReason::Limit);
    let resident = known
        .iter()
        .map(|rank| rank.leases.len())
        .min()
        .unwrap_or(0);
    let sources: Vec<&[Source]> = known.iter().map(|rank| &rank.sources.found[..]).collect();
    reach = tiers.worth_reading(&sources, resident, reach, request.hint.parts);
    limit(reach, MissReason::Recompute);
    if reach > resident && !request.for_peers {
        for rank in &known {
            tiers.clears().name(rank.rank.space, clears);
        }
    }
    let shared_reach = &Arc::new(AtomicUsize::new(reach));
    let promoted = known.into_iter().map(|mut rank| async move {
        rank.truncate(reach);
        let resident = rank.leases.len();
        let prompt = Arc::new(Prompt {
            owner: request.owner,
            tenant: request.tenant,
            first: resident,
            before: request
                .parent
                .zip(rank.keys.first())
                .map(|(hash, first)| ChunkKey { hash, ..*first }),
            keys: rank.keys,
            hint: Some(hint(&rank.rank)),
            sources: rank.sources.found,
            begun: now(),
            deadline,
            reach: Arc::clone(shared_reach),
            half: half_of(deadline),
            read: Mutex::default(),
            misses: Mutex::default(),
        });
        let leases = tiers.promote(&prompt, rank.leases).await;
        let read = mem::take(&mut *prompt.read.lock());
        FoundRank {
            rank: rank.rank,
            resident,
            seen: rank.seen,
            promoted: 0,
            miss: match leases.len() < reach {
                true => prompt.miss_at(leases.len()),
                false => None,
            },
            leases,
            read,
        }
    });
    let found = futures_util::future::join_all(promoted).await;
    // A rank may end early because another one did: a rank with a known reason is counted first.
    for rank in found.iter().filter(|rank| rank.miss.is_some()) {
        lookup_end.lower(rank.leases.len(), rank.rank, rank.miss);
    }
    for rank in &found {
        lookup_end.lower(rank.leases.len(), rank.rank, None);
    }
    let found = Found::join(found, ranks);
    (found.ended_at(&lookup_end, &request.hashes), reach)
}
