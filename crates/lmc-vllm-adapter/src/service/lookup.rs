//! Lookups and what they hold.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Instant;

use lmc_engine::{Found, FoundRank, LookupRequest, OwnerId, Rank, TenantId};
use lmc_key::{ChunkHash, ChunkKey, Salt, SpaceId};

use crate::protocol::{CacheKey, Reply};
use crate::service::ClientId;
use crate::service::events::StoredChunk;
use crate::service::handle::{Service, refuse};
use crate::service::session::{Hits, Lookup, RankHold, Session, Wait, Waiter};
use crate::service::state::{Binding, LayoutOf, RankSet, State};
use crate::service::stats::add;

/// Keys of one lookup, of all its ranks: those of 64 ranks and a million tokens.
const MAX_KEYS: usize = 1 << 18;

/// Ranks whose leases are given back under one lock of the state.
const HOLDS_AT_A_TIME: usize = 256;

/// Layouts of one model above which a lookup finds nothing: each must have the chunk.
const MAX_LAYOUTS: usize = 64;

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

    /// Returns the keys of the range for one KV rank.
    pub(super) fn keys(&self, space: SpaceId, kv_rank: u16) -> Vec<ChunkKey> {
        let key = |&hash: &ChunkHash| ChunkKey {
            space,
            kv_rank,
            group: 0,
            hash,
        };
        self.hashes[self.chunks.clone()].iter().map(key).collect()
    }
}

/// A layout in which a lookup must find a chunk.
struct Candidate {
    space: SpaceId,
    /// Ranks that workers of this layout are known to be of.
    ranks: RankSet,
    /// True if the rank of a worker of this layout is not known yet.
    unknown_rank: bool,
}

/// A lookup whose chunks are being promoted: what is needed to answer it.
struct Promoting {
    request_id: String,
    number: u64,
    model: String,
    /// First chunk of the range that was looked up.
    first: usize,
    readers: u32,
    /// The chunks of the range, for the event of those that are promoted; none without
    /// subscribers.
    chunks: Vec<StoredChunk>,
}

/// Counts a lookup whose chunks are being promoted, until it is dropped.
struct PromotingGauge(Service);

impl PromotingGauge {
    fn new(service: &Service) -> Self {
        service.shared.promoting.fetch_add(1, Ordering::Relaxed);
        Self(service.clone())
    }
}

impl Drop for PromotingGauge {
    fn drop(&mut self) {
        self.0.shared.promoting.fetch_sub(1, Ordering::Relaxed);
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
        let hashes = shared.memo.hash_prompt(hasher, &salt, tokens);
        Ok(Hashed {
            hashes,
            chunks: start..end,
            salt,
        })
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
        let owner = client.owner();
        let candidates = {
            let mut state = shared.state.lock();
            let known = state.sessions.of(client, &key.request_id).is_some();
            let full = !known && self.has_too_many_sessions(&state, client);
            if full || self.holds_too_much(owner) {
                // Unanswered would be worse: the request computes what it could have had.
                add(&counters.over_limit, 1);
                let before = state.sessions.end(client, &key.request_id);
                drop(state);
                drop(before);
                return Reply::None;
            }
            self.candidates(&state, client, key, &hashed.salt)
        };
        let ranks = asked_ranks(&candidates, key.world_size as u16);
        if ranks.is_empty() {
            add(&counters.lookups_unregistered, 1);
        }
        let first = hashed.chunks.start;
        let most = MAX_KEYS / ranks.len().max(1);
        let range = &hashed.hashes[hashed.chunks.clone()];
        let hashes = range[..range.len().min(most)].to_vec();
        let engine = &shared.engine;
        let tenant = match engine.has_lower_tiers() {
            true => shared.spaces.tenant(&hashed.salt, engine),
            // Nothing is promoted, so nothing counts against a quota.
            false => TenantId::default(),
        };
        let request = LookupRequest::new(owner, hashes, ranks)
            .with_tenant(tenant)
            .with_limit(self.share_of(client));
        let lookup = engine.lookup(request);
        let chunk = u64::from(shared.config.hasher.chunk_size());
        add(&counters.lookups, 1);
        add(&counters.lookup_tokens, hashed.chunks.len() as u64 * chunk);
        let number = shared.lookups.fetch_add(1, Ordering::Relaxed);
        let readers = key.num_kv_readers;
        let (known, promoted) = match lookup.try_found() {
            Ok(found) => {
                self.announce(&found, &key.model_name, || self.announcements(key, &hashed));
                self.count_hits(&found);
                let expires = now + shared.config.lookup_lease;
                let hits = found.hits as u64;
                let holds = rank_holds(found, first, readers);
                (Lookup::known(number, hits, holds, expires), None)
            }
            // No engine waits longer for a tier, whatever became of it.
            Err(lookup) => {
                let expires = now + 2 * engine.lookup_timeout();
                (Lookup::promoting(number, expires), Some(lookup))
            }
        };
        let mut state = shared.state.lock();
        let new = || Session::new(client, now);
        let session = state.sessions.begin(client, &key.request_id, new);
        session.last_used = now;
        let before = session.set_lookup(known);
        drop(state);
        // Leases of an earlier lookup of the request go back without the state being locked.
        drop(before);
        if let Some(lookup) = promoted {
            let promoting = Promoting {
                request_id: key.request_id.clone(),
                number,
                model: key.model_name.clone(),
                first,
                readers,
                chunks: self.announcements(key, &hashed),
            };
            self.finish_when_promoted(lookup, promoting);
        }
        Reply::None
    }

    /// Returns true when a connection may begin no more requests: all have as many as they may, or
    /// this one has three quarters of that.
    fn has_too_many_sessions(&self, state: &State, client: ClientId) -> bool {
        let max = self.shared.config.max_sessions;
        let sessions = &state.sessions;
        sessions.len() >= max || sessions.len_of(client) >= max - max / 4
    }

    /// Whether a connection may hold no more chunks: all together hold as many as they may, or half
    /// of that, and this one a quarter.
    fn holds_too_much(&self, owner: OwnerId) -> bool {
        let (max, engine) = (self.shared.config.max_lookup_leases, &self.shared.engine);
        let held = engine.leases();
        held >= max || (held >= max / 2 && engine.leases_of(owner) >= max / 4)
    }

    /// Returns the chunks of a range for the event that they are in DRAM; none without subscribers.
    fn announcements(&self, key: &CacheKey, hashed: &Hashed) -> Vec<StoredChunk> {
        if !self.shared.events.enabled() {
            return Vec::new();
        }
        let announcement = |(index, chunk): (usize, usize)| StoredChunk {
            hash: hashed.hash(chunk),
            parent: hashed.parent(chunk),
            tokens: self.chunk_tokens(key, index),
        };
        hashed
            .chunks
            .clone()
            .enumerate()
            .map(announcement)
            .collect()
    }

    /// Tells subscribers which chunks are in DRAM again.
    fn announce(&self, found: &Found, model: &str, chunks: impl Fn() -> Vec<StoredChunk>) {
        let shared = &self.shared;
        for rank in &found.ranks {
            if rank.promoted > rank.resident && shared.events.enabled() {
                let promoted: Vec<StoredChunk> = chunks()
                    .drain(..rank.promoted)
                    .skip(rank.resident)
                    .collect();
                let model = shared.spaces.name(rank.rank.space, model);
                shared.events.stored(&model, promoted);
            }
        }
    }

    /// Waits for a lookup's promotion in a task, which ends with the request's lookup, and then
    /// answers it.
    fn finish_when_promoted(&self, lookup: lmc_engine::Lookup, promoting: Promoting) {
        let gauge = PromotingGauge::new(self);
        let (request_id, number) = (promoting.request_id.clone(), promoting.number);
        let task = self.shared.engine.spawn(async move {
            let found = lookup.wait().await;
            gauge.0.promoted(&promoting, found);
        });
        let mut state = self.shared.state.lock();
        match state.sessions.looking_up(&request_id, number) {
            Some(session) => session.set_task(task),
            None => {
                drop(state);
                // The request ended meanwhile.
                drop(task);
            }
        }
    }

    /// Counts the chunks that a lookup found, and how many of them DRAM had without lower tiers.
    fn count_hits(&self, found: &Found) {
        let counters = &self.shared.stats.service;
        let chunk = u64::from(self.shared.config.hasher.chunk_size());
        let (hits, resident) = (found.hits as u64, found.resident as u64);
        add(&counters.hit_tokens, hits * chunk);
        add(&counters.hit_tokens_dram, resident * chunk);
        add(&counters.hit_tokens_lower, (hits - resident) * chunk);
    }

    /// Answers a lookup whose promotion has ended.
    fn promoted(&self, promoting: &Promoting, found: Found) {
        let shared = &self.shared;
        self.announce(&found, &promoting.model, || promoting.chunks.clone());
        self.count_hits(&found);
        let hits = found.hits as u64;
        let holds = rank_holds(found, promoting.first, promoting.readers);
        let expires = Instant::now() + shared.config.lookup_lease;
        let waiting = {
            let mut state = shared.state.lock();
            let (request_id, number) = (&promoting.request_id, promoting.number);
            match state.sessions.looking_up(request_id, number) {
                Some(session) => session.promoted(number, hits, holds, expires),
                None => Err(holds),
            }
        };
        // The leases of a request that is over go back here, where nothing is locked.
        for waiter in waiting.unwrap_or_default() {
            waiter.tell(Reply::Int(hits));
        }
    }

    /// Tells the answer to a lookup whose chunks are on their way, as soon as there is one or
    /// the time is over.
    pub(crate) fn wait(&self, wait: &Wait, tell: Box<dyn FnOnce(Reply) + Send>) {
        let waiter = Waiter::new(wait, tell);
        let waits = {
            let mut state = self.shared.state.lock();
            match state.sessions.of(wait.client, wait.request_id()) {
                Some(session) => session.wait(waiter),
                None => Err((waiter, 0)),
            }
        };
        if let Err((waiter, hits)) = waits {
            waiter.tell(Reply::Int(hits));
        }
    }

    /// The layouts in which a lookup must find a chunk for it to count.
    ///
    /// A scheduler names its model, not its layout. Where workers of one model differ in layout
    /// and it is not known which of them the scheduler drives, only what all of them have is a
    /// hit: an engine is never promised what it cannot get. Workers of one engine may differ too
    /// (stages of a pipeline with more layers and fewer): a rank is asked for in the layouts of
    /// those that may be of that rank.
    fn candidates(
        &self,
        state: &State,
        client: ClientId,
        key: &CacheKey,
        salt: &Salt,
    ) -> Vec<Candidate> {
        let mut layouts = state.layouts(&key.model_name, key.world_size);
        if let Some(Binding::One(bound)) = state.bindings.get(&client)
            && layouts
                .iter()
                .any(|layout| layout.instance.fingerprint == *bound)
        {
            layouts.retain(|layout| layout.instance.fingerprint == *bound);
        }
        if layouts.len() > MAX_LAYOUTS {
            // No chunk is in that number of layouts.
            return Vec::new();
        }
        let candidate = |layout: LayoutOf<'_>| Candidate {
            space: layout.instance.space(&self.shared.config, salt),
            ranks: layout.ranks,
            unknown_rank: layout.unknown_rank,
        };
        layouts.into_iter().map(candidate).collect()
    }

    /// Leading chunks found; 0 for a request that never looked up, none while chunks are on
    /// their way up.
    pub(super) fn prefetch_status(
        &self,
        client: ClientId,
        request_id: &str,
        now: Instant,
    ) -> Reply {
        let mut state = self.shared.state.lock();
        let Some(session) = state.sessions.of(client, request_id) else {
            return Reply::Int(0);
        };
        session.last_used = now;
        match session.hits() {
            Hits::Never => Reply::Int(0),
            Hits::Promoting => Reply::None,
            Hits::Known(hits) => Reply::Int(hits),
        }
    }

    pub(super) fn free_lookup_locks(
        &self,
        client: ClientId,
        key: &CacheKey,
        now: Instant,
    ) -> Reply {
        let chunk = u64::from(self.shared.config.hasher.chunk_size());
        // A partial chunk at the start goes with its whole chunk, one at the end stays.
        let chunks = (key.start / chunk) as usize..(key.end / chunk) as usize;
        let kv_rank = key.worker_id.map(|rank| rank as u16);
        let readers = key.num_kv_readers.max(1);
        // A lookup may hold thousands of ranks: others are served in between.
        for first in (0..).step_by(HOLDS_AT_A_TIME) {
            let mut state = self.shared.state.lock();
            let session = state.sessions.of(client, &key.request_id);
            let released = session.and_then(|session| {
                session.last_used = now;
                session.free(first, HOLDS_AT_A_TIME, kv_rank, &chunks, readers)
            });
            // The leases go back here, without the state being locked.
            drop(state);
            if released.is_none() {
                break;
            }
        }
        Reply::None
    }

    pub(super) fn end_session(&self, client: ClientId, request_id: &str) -> Reply {
        let session = self.shared.state.lock().sessions.end(client, request_id);
        // The leases go back here, without the state being locked.
        drop(session);
        Reply::None
    }
}

/// Returns what the request's session holds of the chunks found: each rank's for `readers` workers.
fn rank_holds(found: Found, first: usize, readers: u32) -> Vec<RankHold> {
    if found.hits == 0 {
        return Vec::new();
    }
    let hold = |found: FoundRank| {
        let Rank { space, kv_rank } = found.rank;
        RankHold::new(space, kv_rank, first, found.leases, readers)
    };
    found.ranks.into_iter().map(hold).collect()
}

/// Returns the spaces and KV ranks that a lookup asks for: each rank in the layouts of those that may be
/// of that rank.
fn asked_ranks(candidates: &[Candidate], world_size: u16) -> Vec<Rank> {
    // A layout that has every rank is an engine by itself; the others are stages.
    let is_whole = |ranks: &RankSet| ranks.len() == usize::from(world_size);
    let mut known = RankSet::default();
    for candidate in candidates {
        if !is_whole(&candidate.ranks) {
            known.add(&candidate.ranks);
        }
    }
    let asked = |candidate: &Candidate| {
        let space = candidate.space;
        // Ranks that no stage is known to be of may be of any of them.
        let of_layout =
            |rank: &u16| candidate.unknown_rank || candidate.ranks.has(*rank) || !known.has(*rank);
        let asked = (0..world_size).filter(of_layout);
        asked
            .map(|kv_rank| Rank { space, kv_rank })
            .collect::<Vec<_>>()
    };
    candidates.iter().flat_map(asked).collect()
}
