//! The answer of a lookup: leased chunks, and the tiers that they came from.

use std::collections::HashMap;

use lmc_backend_local::Leases;
use lmc_key::ChunkHash;

use crate::misses::{LookupEnd, Miss, Missing};
use crate::request::Rank;

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
    pub(crate) miss: Option<Miss>,
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
    /// [`crate::CacheEngine::tier_name`]; with several ranks, the last tier. `None` if the chunks were in DRAM
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
    pub(crate) fn join(found: Vec<FoundRank>, ranks: usize) -> Self {
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
    pub(crate) fn ended_at(mut self, lookup_end: &LookupEnd, hashes: &[ChunkHash]) -> Self {
        self.missing = lookup_end.missing(hashes, self.hits);
        self
    }
}
