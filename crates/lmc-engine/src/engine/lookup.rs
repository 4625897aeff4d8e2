//! Lookups of prompts: the request, the handle, and the outcome.

use std::mem;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use lmc_backend::now;
use lmc_backend_local::Leases;
use lmc_key::{ChunkKey, ClearsId};
use parking_lot::Mutex;
use pollster::block_on;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::CacheEngine;
use crate::engine::merge::complete;
use crate::found::{Found, FoundRank, ReadFrom};
use crate::ghosts::Departure;
use crate::lower::{ChunkSource, Prompt, Sources, Tiers, Waits, half_of};
use crate::misses::{LookupEnd, Miss, MissReason, Missing};
use crate::request::{LeaseLimit, LookupRequest, Rank};

/// Most failed reads of a prompt that waits for its sources.
const MAX_FAILURES: usize = 3;

/// A lookup that may still be promoting chunks.
///
/// Dropping it ends the promotion and releases the leases. If another lookup waits for one of the chunks,
/// that lookup promotes it.
#[derive(Debug)]
pub struct Lookup {
    clears: ClearsId,
    state: LookupState,
}

#[derive(Debug)]
enum LookupState {
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
            state: LookupState::Done(found),
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
            LookupState::Done(found) => Ok(found),
            LookupState::Promoting(mut promotion) => match promotion.found.try_recv() {
                Ok(found) => Ok(found),
                Err(_) => Err(Self {
                    state: LookupState::Promoting(promotion),
                    ..self
                }),
            },
        }
    }

    /// Waits until every chunk that can be promoted is promoted, at most for the timeouts of the engine.
    /// Nothing is found if the engine is closed meanwhile.
    pub async fn wait(self) -> Found {
        match self.state {
            LookupState::Done(found) => found,
            LookupState::Promoting(mut promotion) => {
                (&mut promotion.found).await.unwrap_or_default()
            }
        }
    }

    /// Waits as [`Lookup::wait`] does, on a thread outside any runtime.
    pub fn wait_blocking(self) -> Found {
        match self.state {
            LookupState::Done(found) => found,
            LookupState::Promoting(mut promotion) => {
                block_on(&mut promotion.found).unwrap_or_default()
            }
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
    /// Prepares a rank that was promoted in part for the next round, with all its chunks. Returns also the
    /// number of its resident chunks, and the chunks that were read.
    fn again(
        request: &LookupRequest,
        clears: ClearsId,
        found: FoundRank,
    ) -> (Self, (usize, ReadFrom)) {
        let name = request.name(found.rank, clears);
        let known = Self {
            rank: found.rank,
            keys: request.keys(name, found.rank, request.hashes.len()),
            leases: found.leases,
            seen: found.seen,
            sources: Sources::default(),
            miss: None,
        };
        (known, (found.resident, found.read))
    }

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
    /// Returns the reason why a lookup did not find a chunk. Never waits.
    pub fn miss(&self, missing: &Missing) -> Miss {
        let Missing {
            rank, hash, known, ..
        } = *missing;
        if let Some(known) = known {
            return known;
        }
        let mut key = rank.key(hash);
        key.space = rank.space.after(missing.clears);
        let down = self.lower().and_then(|lower| lower.tiers().fault_of(&key));
        if let Some(down) = down {
            return down;
        }
        Miss::probable(match self.ghosts().departure(rank.space, &key) {
            Some(Departure::Evicted) => MissReason::Evicted,
            Some(Departure::Cleared) => MissReason::Cleared,
            Some(Departure::Removed) => MissReason::Removed,
            None => MissReason::NeverStored,
        })
    }

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
            state: LookupState::Promoting(Promotion { task, found }),
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
            .map(|rank| Known::again(&request, clears, rank))
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
    let sources: Vec<&[ChunkSource]> = known.iter().map(|rank| &rank.sources.found[..]).collect();
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
