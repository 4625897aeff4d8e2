//! The question of a lookup: a prompt, its ranks, and its limits.

use std::fmt;
use std::sync::Arc;

use lmc_backend::LocateHint;
use lmc_backend_local::{OwnerId, TenantId};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use lmc_memory::SealedSlot;

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
pub(crate) struct After {
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
    pub(crate) limit: Option<Arc<dyn LeaseLimit>>,
    /// For each merge, the ranks whose chunks can be merged, listed for each rank of the request.
    pub(crate) merges: Vec<Vec<Merge>>,
    /// True if the sources that the prompt waits for compute chunks that are to be merged.
    pub(crate) waits_for_merge: bool,
    /// True if a peer's request caused the lookup: spaces of ranks are names after the clears, and nothing
    /// counts as used.
    pub(crate) for_peers: bool,
    /// Hash of the chunk before the first one, if known.
    pub(crate) parent: Option<ChunkHash>,
    /// True if an engine looks up a whole prompt.
    pub(crate) is_demand: bool,
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

    /// Excludes the chunks from [`crate::CacheEngine::demand`], because their size differs from that of most chunks.
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
    pub(crate) fn limit_after(&self, before: u64) -> Option<After> {
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
    pub(crate) fn name(&self, rank: Rank, clears: ClearsId) -> SpaceId {
        match self.for_peers {
            true => rank.space,
            false => rank.space.after(clears),
        }
    }

    /// Returns the keys of the first `len` chunks of one rank, under the name of its space.
    pub(crate) fn keys(&self, name: SpaceId, rank: Rank, len: usize) -> Vec<ChunkKey> {
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

/// Ranks of an engine with more ranks, whose chunks are merged into those of one rank. Each rank has some of
/// that rank's heads; the ranks are in the order of these heads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Merge {
    /// The ranks.
    pub ranks: Vec<Rank>,
    /// Contiguous bytes of each rank in the merged chunk
    /// ([`Division::run_bytes`](lmc_memory::Division::run_bytes)).
    pub run_bytes: u64,
    /// True if engines of this host use the ranks' chunks themselves. Otherwise these chunks are removed from
    /// DRAM once they are merged.
    pub keep: bool,
}

/// Returns true if a chunk has the expected length, or if none is known.
pub(crate) fn fits(len: u64, chunk_bytes: Option<u64>) -> bool {
    chunk_bytes.is_none_or(|bytes| bytes == len)
}
