//! Merging: chunks of an engine with more ranks are combined into chunks of an engine with fewer.

use std::collections::HashMap;
use std::time::Duration;
use std::{mem, thread};

use lmc_backend::now;
use lmc_backend_local::Leases;
use lmc_key::{ChunkKey, ClearsId};
use lmc_memory::{SealedSlot, interleave};
use tokio::sync::oneshot;

use crate::engine::{CacheEngine, WeakEngine};
use crate::found::{Found, FoundRank, ReadFrom};
use crate::misses::Missing;
use crate::request::{LookupRequest, Merge, Rank, fits};
use crate::store::{StoreRequest, StoreStart};

/// Interval at which a chunk that another lookup merges or a worker writes is checked.
const POLL: Duration = Duration::from_millis(1);

/// Reason why a chunk is not merged.
enum Refused {
    /// The parts do not make up a chunk of the rank.
    Unfit,
    /// There is no memory for the merged chunk.
    NoMemory,
    /// The lookup has ended, the cache was cleared, or another lookup or worker takes too long to write the
    /// chunk.
    Over,
}

/// The chunks of a lookup that are to be merged.
struct Merging {
    request: LookupRequest,
    merges: Vec<Merge>,
    clears: ClearsId,
    /// Index of the first of these chunks in the request.
    first: usize,
    /// The chunks of the ranks of all merges, in order.
    parts: Found,
}

/// Extends the outcome of a lookup after these clears. Looks up the following chunks for the ranks that the
/// request names for merging, and merges them into chunks of the request's own ranks, which are findable from
/// then on. Takes the time of one lookup for each list of such ranks and for each chunk that other lookups
/// merge meanwhile. Ends with the engine.
pub(crate) async fn complete(
    engine: &WeakEngine,
    mut request: LookupRequest,
    clears: ClearsId,
    mut found: Found,
) -> Found {
    let before_merging = found.hits;
    for merges in mem::take(&mut request.merges) {
        if merges.len() != request.ranks.len() {
            continue;
        }
        while found.hits < request.hashes.len() {
            let before = found.hits;
            merge_leading(engine, &request, &merges, clears, &mut found).await;
            // Chunks that were waited for have come by now, or do not come.
            request = request.without_wait();
            // Another lookup may have merged the next chunks, and then removed their parts.
            if let Some(engine) = engine.upgrade() {
                engine.add_leading(&request, clears, &mut found);
            }
            if found.hits == before {
                break;
            }
        }
    }
    if found.hits > before_merging {
        let missing = request.ranks.first().zip(request.hashes.get(found.hits));
        let missing = missing.map(|(rank, hash)| Missing::new(*rank, *hash, clears));
        found.missing = missing.map(Box::new);
    }
    found
}

/// Merges the leading chunks after the ones found so far.
async fn merge_leading(
    weak: &WeakEngine,
    request: &LookupRequest,
    merges: &[Merge],
    clears: ClearsId,
    found: &mut Found,
) {
    let Some(engine) = weak.upgrade() else {
        return;
    };
    let first = found.hits;
    let ranks = merges.iter().flat_map(|merge| merge.ranks.clone());
    let before = found.fresh_bytes();
    let lookup = engine.lookup(request.after_chunk(first, ranks.collect(), before));
    drop(engine);
    if lookup.clears() != clears {
        return;
    }
    let parts = lookup.wait().await;
    let Some(engine) = weak.upgrade().filter(|_| parts.hits > 0) else {
        return;
    };
    let resident = parts.resident;
    let merging = Merging {
        request: request.clone(),
        merges: merges.to_vec(),
        clears,
        first,
        parts,
    };
    for &rank in &request.ranks[found.ranks.len()..] {
        let none = engine.local().lease_uncounted(request.owner, &[]);
        found.ranks.push(FoundRank::in_dram(rank, none));
    }
    let (sender, merged) = oneshot::channel();
    // Copies of this length would block the runtime. They end with the lookup.
    tokio::task::spawn_blocking(move || {
        let merged = merging.run(&engine, || sender.is_closed());
        let _ = sender.send(merged);
    });
    let Ok(merged) = merged.await else {
        return;
    };
    let (leases, read): (Vec<_>, Vec<_>) = merged.into_iter().unzip();
    for (rank, read) in found.ranks.iter_mut().zip(read) {
        rank.read.extend(read);
    }
    let all_resident = found.resident == first;
    found.add(leases);
    if all_resident {
        found.resident += resident.min(found.hits - first);
    }
}

impl CacheEngine {
    /// Adds the leading chunks after the ones found so far that are in DRAM by now, within the request's
    /// limit.
    fn add_leading(&self, request: &LookupRequest, clears: ClearsId, found: &mut Found) {
        let Some(lower) = self.lower() else {
            return;
        };
        if found.ranks.len() < request.ranks.len() {
            return;
        }
        let leased = request.ranks.iter().map(|&rank| {
            let named = Rank {
                space: rank.space.after(clears),
                ..rank
            };
            let rest = request.hashes[found.hits..].iter();
            let keys: Vec<ChunkKey> = rest.map(|&hash| named.key(hash)).collect();
            let tiers = lower.tiers();
            tiers.lease_uncounted(request.owner, &keys, rank.chunk_bytes)
        });
        let mut leased: Vec<Leases> = leased.collect();
        let bytes: u64 = leased
            .iter()
            .flat_map(Leases::iter)
            .map(SealedSlot::len)
            .sum();
        let allowed = request.allowed(found.fresh_bytes(), bytes);
        if allowed < bytes {
            let chunks = leased.iter().map(Leases::len).max().unwrap_or(0) as u64;
            let kept = (allowed / bytes.div_ceil(chunks)) as usize;
            leased.iter_mut().for_each(|leases| leases.truncate(kept));
        }
        found.add(leased);
    }
}

impl Found {
    /// Returns the bytes that the leases keep from eviction.
    fn fresh_bytes(&self) -> u64 {
        self.ranks
            .iter()
            .map(|rank| rank.leases.fresh_bytes())
            .sum()
    }

    /// Adds leases of the leading chunks after the ones found so far, for each rank.
    fn add(&mut self, leases: Vec<Leases>) {
        let added = leases.iter().map(Leases::len).min().unwrap_or(0);
        self.hits += added;
        for (rank, mut leases) in self.ranks.iter_mut().zip(leases) {
            leases.truncate(added);
            rank.promoted = rank.promoted.max(self.hits);
            // Both are leases of one tier and one owner.
            let _ = rank.leases.append(leases);
        }
    }
}

impl Merging {
    /// Merges the chunks. Returns the leases of the leading merged chunks of each rank, and the tiers that
    /// their parts were read from, by the index of the chunk in the request.
    fn run(mut self, engine: &CacheEngine, is_over: impl Fn() -> bool) -> Vec<(Leases, ReadFrom)> {
        let owner = self.request.owner;
        let none = |_: &Merge| (engine.local().lease_uncounted(owner, &[]), ReadFrom::new());
        let mut merged: Vec<_> = self.merges.iter().map(none).collect();
        let read = self.parts.ranks.iter_mut();
        let read: Vec<HashMap<usize, usize>> = read
            .map(|rank| mem::take(&mut rank.read).into_iter().collect())
            .collect();
        for at in self.first..self.first + self.parts.hits {
            let parts: Vec<Leases> = self.parts.ranks.iter_mut().map(take_first).collect();
            if parts.iter().any(Leases::is_empty) {
                break;
            }
            let leases = loop {
                match self.chunks(engine, at, &parts, &is_over) {
                    Err(Refused::NoMemory) if self.give_up_last(engine, at) => {}
                    merged => break merged,
                }
            };
            let Ok(leases) = leases else {
                break;
            };
            // Dropped early, so that only one chunk needs memory twice.
            drop(parts);
            let mut read = read.iter();
            for ((rank, leases), merge) in merged.iter_mut().zip(leases).zip(&self.merges) {
                let _ = rank.0.append(leases);
                let tiers = read.by_ref().take(merge.ranks.len());
                let tiers = tiers.filter_map(|read| read.get(&(at - self.first)));
                rank.1.extend(tiers.map(|&tier| (at, tier)));
            }
            self.remove_parts(engine, at);
        }
        merged
    }

    /// Gives up the last parts, if there are any after index `at`, to release their memory.
    fn give_up_last(&mut self, engine: &CacheEngine, at: usize) -> bool {
        let ranks = &mut self.parts.ranks;
        let Some(last) = ranks
            .first()
            .and_then(|rank| rank.leases.len().checked_sub(1))
        else {
            return false;
        };
        ranks.iter_mut().for_each(|rank| rank.leases.truncate(last));
        self.remove_parts(engine, at + 1 + last);
        true
    }

    /// Removes the parts of a chunk from DRAM, unless engines of this host use them.
    fn remove_parts(&self, engine: &CacheEngine, at: usize) {
        let removed = self.merges.iter().filter(|merge| !merge.keep);
        let key = |rank: &Rank| {
            let key = rank.key(self.request.hashes[at]);
            let space = key.space.after(self.clears);
            ChunkKey { space, ..key }
        };
        let keys: Vec<ChunkKey> = removed
            .flat_map(|merge| merge.ranks.iter().map(key))
            .collect();
        engine.local().remove(&keys);
    }

    /// Merges one chunk for each rank.
    fn chunks(
        &self,
        engine: &CacheEngine,
        at: usize,
        parts: &[Leases],
        is_over: &impl Fn() -> bool,
    ) -> Result<Vec<Leases>, Refused> {
        let mut rest = parts;
        let merged = self.merges.iter().enumerate().map(|(rank, merge)| {
            let split = rest.split_at_checked(merge.ranks.len());
            let (parts, others) = split.ok_or(Refused::Unfit)?;
            rest = others;
            self.chunk(engine, rank, at, parts, is_over)
        });
        merged.collect()
    }

    /// Merges a chunk of a rank, unless it is present. Returns its lease.
    fn chunk(
        &self,
        engine: &CacheEngine,
        rank: usize,
        at: usize,
        parts: &[Leases],
        is_over: &impl Fn() -> bool,
    ) -> Result<Leases, Refused> {
        let (request, begun) = (&self.request, now());
        let rank_of_request = request.ranks[rank];
        let key = |at: usize| rank_of_request.key(request.hashes[at]);
        let parts = parts.iter().map(|part| Some(part.get(0)?.bytes()));
        let parts: Vec<&[u8]> = parts.collect::<Option<_>>().ok_or(Refused::Unfit)?;
        let wanted = StoreRequest {
            key: key(at),
            parent: at.checked_sub(1).map(key),
            tenant: request.tenant,
            len: parts.iter().map(|part| part.len() as u64).sum(),
        };
        if !fits(wanted.len, rank_of_request.chunk_bytes) {
            return Err(Refused::Unfit);
        }
        loop {
            if is_over() {
                return Err(Refused::Over);
            }
            match engine.reserve(request.owner, self.clears, &[wanted]).pop() {
                Some(StoreStart::Reserved(mut ticket)) => {
                    let run_bytes = self.merges[rank].run_bytes;
                    if !interleave(run_bytes, &parts, ticket.bytes_mut()) {
                        return Err(Refused::Unfit);
                    }
                    engine.commit(vec![ticket]);
                    engine.count_merged();
                    break;
                }
                Some(StoreStart::Present) => break,
                Some(StoreStart::Busy) if now() < begun + engine.pending_timeout() => {
                    thread::sleep(POLL);
                }
                Some(StoreStart::NoMemory) => return Err(Refused::NoMemory),
                Some(StoreStart::Busy | StoreStart::Cleared | StoreStart::Draining) | None => {
                    return Err(Refused::Over);
                }
            }
        }
        let leases = engine.acquire(request.owner, self.clears, &[key(at)]);
        let leases = leases.ok_or(Refused::Over)?;
        let fits = leases.iter().all(|slot| rank_of_request.fits(slot));
        if fits {
            Ok(leases)
        } else {
            Err(Refused::Unfit)
        }
    }
}

/// Removes and returns the lease of the first remaining chunk.
fn take_first(rank: &mut FoundRank) -> Leases {
    let rest = rank.leases.split_off(1);
    mem::replace(&mut rank.leases, rest)
}
