//! The chunks of this engine that other processes may read: what its own tiers hold, never what
//! it would have to ask others for. Keys are as peers name them: by the names of spaces after the
//! clears.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::LocateHint;
use lmc_backend_local::{EventSink, Leases, OwnerId, TenantId};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use crate::engine::CacheEngine;
use crate::lookup::{LookupRequest, Rank};
use crate::lower::{Prompt, Source, half_of};

/// Owner of the leases that are lent to other processes.
pub(crate) const PEERS: OwnerId = OwnerId(u64::MAX - 2);

/// Bits of a location in one tier, below the tier's number in a listing.
const TIER_SHIFT: u32 = 120;

/// Location of a chunk that this engine has by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnChunk {
    /// The chunk is in DRAM.
    Dram {
        /// Payload bytes.
        len: u64,
    },
    /// The chunk is in a lower tier whose index is in this process.
    Lower {
        /// Payload bytes.
        len: u64,
    },
    /// A worker is writing it to DRAM.
    Writing,
    /// Nowhere, as far as this process knows.
    Absent,
}

impl CacheEngine {
    /// Returns where this engine has each chunk by itself. A chunk that is only being promoted is
    /// absent, so that two engines that ask each other do not wait for each other. Asks no tier,
    /// and never waits.
    pub fn own_chunks(&self, keys: &[ChunkKey]) -> Vec<OwnChunk> {
        if self.pool_is_lost() {
            return vec![OwnChunk::Absent; keys.len()];
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
                (Some(len), _) => OwnChunk::Dram { len },
                (None, Some(Source::Tier { len, .. })) => OwnChunk::Lower { len },
                _ if local.is_writing(key) && !self.is_promoting(key) => OwnChunk::Writing,
                _ => OwnChunk::Absent,
            }
        };
        keys.iter().zip(resident).map(held).collect()
    }

    /// Returns some of the chunks that this engine has by itself, and where to go on; `None` at the
    /// end. Begins at 0. A chunk that is there from the first call to the last is listed; one that
    /// is in several tiers is listed for each.
    pub async fn list_own(&self, from: u128, limit: usize) -> (Vec<ChunkKey>, Option<u128>) {
        if self.pool_is_lost() {
            return (Vec::new(), None);
        }
        // The tier, DRAM first, and the location in it.
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

    /// Sets a listener for chunks that become findable and unfindable in DRAM, beside that of
    /// [`Self::set_events`]: for telling peers what is here. Only the first is taken; returns false
    /// for any other.
    pub fn set_announcer(&self, announcer: Arc<dyn EventSink>) -> bool {
        self.relay().set_announcer(announcer)
    }

    fn is_promoting(&self, key: &ChunkKey) -> bool {
        let lower = self.lower();
        lower.is_some_and(|lower| lower.tiers().is_promoting(key))
    }

    /// Leases chunks of a prompt that this engine has by itself: one answer for each key, in
    /// order. Those in lower tiers whose index is in this process are promoted first, as far as that
    /// is done by the deadline, and count against the tenant's quota. Counts neither as a lookup nor
    /// as a use.
    pub async fn lease_own(
        &self,
        tenant: TenantId,
        keys: &[ChunkKey],
        deadline: Instant,
    ) -> Vec<Option<Leases>> {
        let owner = PEERS;
        if self.pool_is_lost() {
            return keys.iter().map(|_| None).collect();
        }
        let local = self.local();
        // What is promoted stays until the others are leased.
        let mut promoted = None;
        if let Some(lower) = self.lower().filter(|_| Instant::now() < deadline) {
            let sources = lower.tiers().sources_now(keys, None, None);
            let sources: Vec<Source> = sources.into_iter().map_while(|source| source).collect();
            if sources.iter().any(|source| *source != Source::Dram) {
                let prompt = Arc::new(Prompt {
                    owner,
                    tenant,
                    keys: keys.to_vec(),
                    hint: None,
                    sources,
                    first: 0,
                    deadline,
                    half: half_of(deadline),
                    read: Mutex::default(),
                });
                let none = local.lease_uncounted(owner, &[]);
                promoted = Some(lower.tiers().promote(&prompt, none).await);
            }
        }
        let lease = |key: &ChunkKey| {
            let leases = local.lease_uncounted(owner, &[*key]);
            (leases.len() == 1).then_some(leases)
        };
        let leases = keys.iter().map(lease).collect();
        drop(promoted);
        leases
    }

    /// Promotes the leading chunks of a prompt, as a lookup would, and leases none. Counts for a
    /// tenant's quota.
    pub async fn promote_for_peer(&self, tenant: TenantId, keys: &[ChunkKey], hint: LocateHint) {
        let Some(first) = keys.first() else {
            return;
        };
        let rank = Rank {
            space: first.space,
            kv_rank: first.kv_rank,
            chunk_bytes: hint.chunk_bytes,
        };
        let hashes = keys.iter().map(|key| key.hash).collect();
        let request = LookupRequest::new(PEERS, hashes, vec![rank]).named();
        let lookup = self.lookup(request.with_tenant(tenant).with_hint(hint));
        drop(lookup.wait().await);
    }

    /// Returns chunks in DRAM with their payload bytes, as runs of consecutive chunks of a prompt:
    /// of all that are wanted, the heads of prompts first, as far as `limit` bytes go.
    pub fn dram_runs(
        &self,
        limit: u64,
        wanted: impl Fn(&ChunkKey) -> bool,
    ) -> Vec<Vec<(ChunkKey, u64)>> {
        let mut runs: Vec<Vec<(ChunkKey, u64)>> = Vec::new();
        // The run that a chunk is the last one of.
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
