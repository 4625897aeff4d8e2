//! Merging: the chunks of an engine with more ranks make the chunks of one with fewer.

use std::collections::HashMap;
use std::time::{Duration, Instant};
use std::{mem, thread};

use lmc_backend::now;
use lmc_backend_local::Leases;
use lmc_key::{ChunkKey, ClearsId};
use lmc_memory::{SealedSlot, interleave};
use tokio::sync::oneshot;

use crate::engine::CacheEngine;
use crate::lookup::{Found, FoundRank, LookupRequest, Rank, ReadFrom};
use crate::store::{StoreRequest, StoreStart};

/// Time between two looks at a chunk that another lookup merges or a worker writes.
const POLL: Duration = Duration::from_millis(1);

/// Ranks of an engine with more ranks, whose chunks make those of one rank. Each has some of its
/// heads; the ranks are in the order of these.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// Bytes of each rank that lie together in the merged chunk
    /// ([`Division::run_bytes`](lmc_memory::Division::run_bytes)).
    pub run_bytes: u64,
    /// True if engines of this host use the ranks' chunks themselves. Else they leave DRAM once they are
    /// merged.
    pub keep: bool,
}

/// The chunks of a lookup that are merged.
struct Merging {
    request: LookupRequest,
    clears: ClearsId,
    /// Index of the first chunk in the request.
    first: usize,
    /// The chunks of the ranks of all merges, in order.
    parts: Found,
    deadline: Instant,
}

impl CacheEngine {
    /// Completes what a lookup has found after these clears. What follows is looked up for the ranks
    /// that are named for merging, and is merged into chunks of the request's ranks, which are findable
    /// from then on. Takes as long as a lookup, and at most its timeout more.
    pub(crate) async fn merge(
        &self,
        request: &LookupRequest,
        clears: ClearsId,
        mut found: Found,
    ) -> Found {
        if request.merges.len() != request.ranks.len() {
            return found;
        }
        let none = || self.local().lease_uncounted(request.owner, &[]);
        for &rank in &request.ranks[found.ranks.len()..] {
            found.ranks.push(FoundRank::resident(rank, none()));
        }
        let mut request = request.clone();
        let mut deadline = now() + request.hint.wait.unwrap_or_default() + self.lookup_timeout();
        while found.hits < request.hashes.len() {
            let before = found.hits;
            self.merge_leading(&request, clears, &mut found, deadline)
                .await;
            if request.hint.wait.is_some() {
                // All that was waited for is there, or does not come.
                deadline = now() + self.lookup_timeout();
                request = request.without_wait();
            }
            // Another lookup may have merged the next ones, whose parts are gone then.
            self.add_leading(&request, clears, &mut found);
            if found.hits == before || now() >= deadline {
                break;
            }
        }
        found
    }

    /// Merges the leading chunks after those that are found.
    async fn merge_leading(
        &self,
        request: &LookupRequest,
        clears: ClearsId,
        found: &mut Found,
        deadline: Instant,
    ) {
        let first = found.hits;
        let ranks = request.merges.iter().flat_map(|merge| merge.ranks.clone());
        let lookup = self.lookup(request.after_chunk(first, ranks.collect()));
        if lookup.clears() != clears {
            return;
        }
        let parts = lookup.wait().await;
        if parts.hits == 0 {
            return;
        }
        let merging = Merging {
            request: request.clone(),
            clears,
            first,
            parts,
            deadline,
        };
        let (sender, merged) = oneshot::channel();
        let engine = self.clone();
        // Copies of this length would hold up the runtime. They end with the lookup.
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
        found.add(leases);
    }

    /// Adds the leading chunks after those that are found which are in DRAM by now.
    fn add_leading(&self, request: &LookupRequest, clears: ClearsId, found: &mut Found) {
        let leased = request.ranks.iter().map(|&rank| {
            let named = Rank {
                space: rank.space.after(clears),
                ..rank
            };
            let rest = request.hashes[found.hits..].iter();
            let keys: Vec<ChunkKey> = rest.map(|&hash| named.key(hash)).collect();
            let mut leases = self.local().lease_uncounted(request.owner, &keys);
            let is_wrong =
                |slot: &SealedSlot| rank.chunk_bytes.is_some_and(|len| slot.len() != len);
            let wrong = leases.iter().position(is_wrong);
            leases.truncate(wrong.unwrap_or(leases.len()));
            leases
        });
        let leased = leased.collect();
        found.add(leased);
    }
}

impl Found {
    /// Adds leases of the leading chunks after those that are found, of each rank.
    fn add(&mut self, mut leases: Vec<Leases>) {
        let added = leases.iter().map(Leases::len).min().unwrap_or(0);
        self.hits += added;
        for (rank, mut leases) in self.ranks.iter_mut().zip(leases.drain(..)) {
            leases.truncate(added);
            rank.promoted = rank.promoted.max(self.hits);
            // Both are leases of one tier and owner.
            let _ = rank.leases.append(leases);
        }
    }
}

impl Merging {
    /// Returns the leases of the leading merged chunks of each rank, with the tiers that their parts
    /// were read from, by the index of the chunk in the request.
    fn run(mut self, engine: &CacheEngine, is_over: impl Fn() -> bool) -> Vec<(Leases, ReadFrom)> {
        let owner = self.request.owner;
        let none = |_: &Merge| (engine.local().lease_uncounted(owner, &[]), ReadFrom::new());
        let mut merged: Vec<_> = self.request.merges.iter().map(none).collect();
        let read = self.parts.ranks.iter_mut();
        let read: Vec<HashMap<usize, usize>> = read
            .map(|rank| mem::take(&mut rank.read).into_iter().collect())
            .collect();
        for at in self.first..self.first + self.parts.hits {
            let parts: Vec<Leases> = self.parts.ranks.iter_mut().map(next).collect();
            let mut of_ranks = parts.chunks(parts.len() / self.request.merges.len().max(1));
            let leases = (0..self.request.merges.len()).map(|rank| {
                let parts = of_ranks.next().unwrap_or_default();
                self.chunk(engine, rank, at, parts, &is_over)
            });
            let leases: Option<Vec<Leases>> = leases.collect();
            let Some(leases) = leases else {
                break;
            };
            // Memory is needed twice for one chunk only.
            drop(parts);
            let tier_of = |part: usize| read[part].get(&(at - self.first)).copied();
            let mut part = 0;
            for ((rank, leases), merge) in merged.iter_mut().zip(leases).zip(&self.request.merges) {
                let _ = rank.0.append(leases);
                for one in &merge.ranks {
                    rank.1.extend(tier_of(part).map(|tier| (at, tier)));
                    part += 1;
                    if !merge.keep {
                        let key = one.key(self.request.hashes[at]);
                        let space = key.space.after(self.clears);
                        engine.local().remove(&[ChunkKey { space, ..key }]);
                    }
                }
            }
        }
        merged
    }

    /// Merges a chunk of a rank, unless it is there. Returns its lease; `None` where that cannot be done
    /// in time.
    fn chunk(
        &self,
        engine: &CacheEngine,
        rank: usize,
        at: usize,
        parts: &[Leases],
        is_over: &impl Fn() -> bool,
    ) -> Option<Leases> {
        let request = &self.request;
        let key = |at: usize| request.ranks[rank].key(request.hashes[at]);
        let parts = parts.iter().map(|part| Some(part.get(0)?.bytes()));
        let parts: Vec<&[u8]> = parts.collect::<Option<_>>()?;
        let wanted = StoreRequest {
            key: key(at),
            parent: at.checked_sub(1).map(key),
            tenant: request.tenant,
            len: parts.iter().map(|part| part.len() as u64).sum(),
        };
        loop {
            if is_over() {
                return None;
            }
            match engine.store(request.owner, self.clears, &[wanted]).pop()? {
                StoreStart::Reserved(mut ticket) => {
                    let run_bytes = self.request.merges[rank].run_bytes;
                    if !interleave(run_bytes, &parts, ticket.bytes_mut()) {
                        return None;
                    }
                    engine.commit(vec![ticket]);
                    break;
                }
                StoreStart::Present => break,
                StoreStart::Busy if now() < self.deadline => thread::sleep(POLL),
                StoreStart::Busy | StoreStart::Cleared | StoreStart::NoMemory => return None,
            }
        }
        engine.acquire(request.owner, self.clears, &[key(at)])
    }
}

/// Takes the lease of the first chunk that is left.
fn next(rank: &mut FoundRank) -> Leases {
    let rest = rank.leases.split_off(1);
    mem::replace(&mut rank.leases, rest)
}
