//! Lookups and what they hold.

use std::ops::Range;
use std::time::Instant;

use lmc_key::{ChunkHash, ChunkKey, KeySpace, Salt};

use crate::protocol::{CacheKey, Reply};
use crate::service::ClientId;
use crate::service::handle::{Service, refuse};
use crate::service::instance::Instance;
use crate::service::session::{RankHold, Session};
use crate::service::state::{Binding, State};
use crate::service::stats::add;

/// A range of a prompt in chunks, with the hashes up to its end.
pub(super) struct Hashed {
    /// Hashes of all chunks from the first to the end of the range.
    hashes: Vec<ChunkHash>,
    /// The range, in chunks.
    pub(super) chunks: Range<usize>,
    pub(super) salt: Salt,
}

impl Hashed {
    /// Hash of a chunk, counted from the start of the prompt.
    pub(super) fn hash(&self, chunk: usize) -> ChunkHash {
        self.hashes[chunk]
    }

    /// Hash of the chunk before; none for the first.
    pub(super) fn parent(&self, chunk: usize) -> Option<ChunkHash> {
        chunk.checked_sub(1).map(|before| self.hashes[before])
    }

    /// Keys of the range for one KV rank.
    pub(super) fn keys(&self, space: &KeySpace, kv_rank: u16) -> Vec<ChunkKey> {
        let space = space.id();
        let key = |&hash: &ChunkHash| ChunkKey {
            space,
            kv_rank,
            group: 0,
            hash,
        };
        self.hashes[self.chunks.clone()].iter().map(key).collect()
    }
}

impl Service {
    /// Hashes a range of a prompt. Ends are cut down to whole chunks that the prompt has.
    pub(super) fn hash(&self, key: &CacheKey) -> Result<Hashed, Reply> {
        let shared = &self.shared;
        let chunk = u64::from(shared.config.hasher.chunk_size());
        if !key.start.is_multiple_of(chunk) {
            return Err(refuse(&format!(
                "start {} is not a multiple of the chunk size {chunk}",
                key.start
            )));
        }
        let end = key.end.min(key.token_ids.len() as u64) / chunk;
        let start = (key.start / chunk).min(end);
        let salt: Salt = match key.cache_salt.parse() {
            Ok(salt) => salt,
            Err(error) => return Err(refuse(&format!("{error}"))),
        };
        let (start, end) = (start as usize, end as usize);
        let tokens = &key.token_ids[..end * chunk as usize];
        let hasher = &shared.config.hasher;
        let mut hashes = Vec::with_capacity(end);
        shared
            .memo
            .hash_chunks(hasher, &salt, &hasher.start(), tokens, &mut hashes);
        Ok(Hashed {
            hashes,
            chunks: start..end,
            salt,
        })
    }

    /// The space of a worker's chunks for one tenant.
    pub(super) fn space_of(&self, instance: &Instance, salt: &Salt) -> KeySpace {
        let hasher = &self.shared.config.hasher;
        instance.space(hasher.algorithm(), hasher.chunk_size(), salt.clone())
    }

    pub(super) fn lookup(&self, client: ClientId, key: &CacheKey, now: Instant) -> Reply {
        let shared = &self.shared;
        let counters = &shared.stats.service;
        if key.num_kv_readers == 0 {
            return refuse(
                "num_kv_readers is missing: it tells how long chunks must be held; \
                 upgrade the lmcache client to 0.5.6",
            );
        }
        let hashed = match self.hash(key) {
            Ok(hashed) => hashed,
            Err(refusal) => return refusal,
        };
        let (owner, spaces) = {
            let mut state = shared.state.lock();
            let full = state.sessions.len() >= shared.config.max_sessions;
            if full && !state.sessions.contains_key(&key.request_id) {
                // Unanswered would be worse: the request computes what it could have had.
                add(&counters.over_limit, 1);
                return Reply::None;
            }
            let spaces = self.candidate_spaces(&state, client, key, &hashed.salt);
            let owner = state
                .sessions
                .get(&key.request_id)
                .map(|session| session.owner);
            (owner.unwrap_or_else(|| state.new_owner()), spaces)
        };
        if spaces.is_empty() {
            add(&counters.lookups_unregistered, 1);
        }
        let mut hits = if spaces.is_empty() {
            0
        } else {
            hashed.chunks.len()
        };
        let mut holds = Vec::new();
        'all: for space in &spaces {
            for kv_rank in 0..key.world_size as u16 {
                let keys = hashed.keys(space, kv_rank);
                let leases = shared.engine.lookup(owner, &keys[..hits]);
                hits = leases.len();
                holds.push(RankHold::new(
                    space.id(),
                    kv_rank,
                    leases,
                    key.num_kv_readers,
                ));
                if hits == 0 {
                    break 'all;
                }
            }
        }
        for hold in &mut holds {
            hold.truncate(hits);
        }
        let chunk = u64::from(shared.config.hasher.chunk_size());
        add(&counters.lookups, 1);
        add(&counters.lookup_tokens, hashed.chunks.len() as u64 * chunk);
        add(&counters.hit_tokens, hits as u64 * chunk);
        let expires = now + shared.config.lookup_lease;
        let mut state = shared.state.lock();
        let session = state
            .sessions
            .entry(key.request_id.clone())
            .or_insert_with(|| Session::new(owner, client, now));
        session.last_used = now;
        session.client = client;
        let before = session.set_lookup(hits as u64, holds, expires);
        drop(state);
        // Leases of an earlier lookup of the request go back without the state being locked.
        drop(before);
        Reply::None
    }

    /// The spaces in which a lookup must find a chunk for it to count.
    ///
    /// A scheduler names its model, not its layout. Where workers of one model differ in layout
    /// and it is not known which of them the scheduler drives, only what all of them have is a
    /// hit: an engine is never promised what it cannot get.
    fn candidate_spaces(
        &self,
        state: &State,
        client: ClientId,
        key: &CacheKey,
        salt: &Salt,
    ) -> Vec<KeySpace> {
        let mut layouts = state.layouts(&key.model_name, key.world_size);
        if let Some(Binding::One(bound)) = state.bindings.get(&client)
            && layouts
                .iter()
                .any(|instance| instance.fingerprint == *bound)
        {
            layouts.retain(|instance| instance.fingerprint == *bound);
        }
        layouts
            .into_iter()
            .map(|instance| self.space_of(instance, salt))
            .collect()
    }

    /// Leading chunks found; 0 for a request that never looked up.
    pub(super) fn prefetch_status(&self, request_id: &str, now: Instant) -> Reply {
        let mut state = self.shared.state.lock();
        let Some(session) = state.sessions.get_mut(request_id) else {
            return Reply::Int(0);
        };
        session.last_used = now;
        Reply::Int(session.hits().unwrap_or(0))
    }

    pub(super) fn free_lookup_locks(&self, key: &CacheKey, now: Instant) -> Reply {
        let chunk = u64::from(self.shared.config.hasher.chunk_size());
        // A partial chunk at the start goes with its whole chunk, one at the end stays.
        let chunks = (key.start / chunk) as usize..(key.end / chunk) as usize;
        let mut state = self.shared.state.lock();
        if let Some(session) = state.sessions.get_mut(&key.request_id) {
            session.last_used = now;
            let kv_rank = key.worker_id.map(|rank| rank as u16);
            session.free(kv_rank, chunks, key.num_kv_readers.max(1));
        }
        Reply::None
    }

    pub(super) fn end_session(&self, request_id: &str) -> Reply {
        let session = self.shared.state.lock().sessions.remove(request_id);
        // The leases go back here, without the state being locked.
        drop(session);
        Reply::None
    }
}
