//! Lookups and what they hold.

use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use lmc_engine::{Below, Leases, OwnerId};
use lmc_key::{ChunkHash, ChunkKey, Salt, SpaceId};
use parking_lot::Mutex;

use crate::protocol::{CacheKey, Reply};
use crate::service::ClientId;
use crate::service::events::StoredChunk;
use crate::service::handle::{Service, refuse};
use crate::service::session::{Fetches, Hits, Lookup, RankHold, Session, Wait, Waiter};
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

    /// Keys of the range for one KV rank.
    pub(super) fn keys(&self, space: SpaceId, kv_rank: u16) -> Vec<ChunkKey> {
        self.leading_keys(space, kv_rank, self.chunks.len())
    }

    /// Keys of the first `len` chunks of the range for one KV rank.
    fn leading_keys(&self, space: SpaceId, kv_rank: u16, len: usize) -> Vec<ChunkKey> {
        let key = |&hash: &ChunkHash| ChunkKey {
            space,
            kv_rank,
            group: 0,
            hash,
        };
        let range = &self.hashes[self.chunks.clone()];
        range.iter().take(len).map(key).collect()
    }
}

/// What a lookup found for one rank.
pub(super) struct Found {
    space: SpaceId,
    kv_rank: u16,
    /// Keys of the range, as far as they are anywhere.
    keys: Vec<ChunkKey>,
    /// The leading ones in DRAM.
    pub(super) leases: Leases,
    /// Where the ones after them are.
    pub(super) below: Below,
}

/// A layout in which a lookup must find a chunk.
struct Candidate {
    space: SpaceId,
    /// Ranks that workers of this layout are known to be of.
    ranks: RankSet,
    /// True if the rank of a worker of this layout is not known yet.
    unknown_rank: bool,
}

impl Found {
    /// Holds `hits` chunks from chunk `first` of the prompt on.
    fn hold(self, first: usize, hits: usize, readers: u32) -> RankHold {
        let mut hold = RankHold::new(self.space, self.kv_rank, first, self.leases, readers);
        hold.truncate(first + hits);
        hold
    }
}

/// A lookup whose chunks are coming up. Its end is that of the last rank, however that came.
struct Rising {
    service: Service,
    request_id: String,
    number: u64,
    /// First chunk of the range that was looked up.
    first: usize,
    readers: u32,
    ranks: usize,
    /// Leading chunks that DRAM had for every rank when the lookup came.
    dram: usize,
    risen: Mutex<Vec<(SpaceId, u16, Leases)>>,
}

impl Drop for Rising {
    fn drop(&mut self) {
        let service = self.service.clone();
        service.shared.promoting.fetch_sub(1, Ordering::Relaxed);
        service.risen(self);
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
        let spaces = asked_ranks(&candidates, key.world_size as u16);
        if spaces.is_empty() {
            add(&counters.lookups_unregistered, 1);
        }
        // Chunks up to which every rank has all, in DRAM or below.
        let mut reach = if spaces.is_empty() {
            0
        } else {
            hashed.chunks.len().min(MAX_KEYS / spaces.len())
        };
        let mut found = Vec::new();
        for &(space, kv_rank) in &spaces {
            let keys = hashed.leading_keys(space, kv_rank, reach);
            let leases = shared.engine.lookup(owner, &keys);
            let below = shared.engine.below(&keys[leases.len()..]);
            reach = leases.len() + below.len();
            found.push(Found {
                space,
                kv_rank,
                keys,
                leases,
                below,
            });
            if reach == 0 {
                break;
            }
        }
        let reach = self.within_share(client, &mut found, reach);
        let chunk = u64::from(shared.config.hasher.chunk_size());
        add(&counters.lookups, 1);
        add(&counters.lookup_tokens, hashed.chunks.len() as u64 * chunk);
        let rises = found.iter().any(|found| found.leases.len() < reach);
        let expires = now + shared.config.lookup_lease;
        let number = shared.lookups.fetch_add(1, Ordering::Relaxed);
        let lookup = match rises {
            // No engine waits longer for a tier, whatever became of it.
            true => Lookup::rising(number, now + 2 * shared.engine.fetch_deadline()),
            false => {
                let first = hashed.chunks.start;
                let hold = |found: Found| found.hold(first, reach, key.num_kv_readers);
                let holds = found.drain(..).map(hold).collect();
                self.count_hits(reach, reach);
                Lookup::known(number, reach as u64, holds, expires)
            }
        };
        let mut state = shared.state.lock();
        let new = || Session::new(client, now);
        let session = state.sessions.begin(client, &key.request_id, new);
        session.last_used = now;
        let before = session.set_lookup(lookup);
        drop(state);
        // Leases of an earlier lookup of the request go back without the state being locked.
        drop(before);
        if rises {
            self.raise(key, &hashed, number, reach, found);
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
        let (max, local) = (
            self.shared.config.max_lookup_leases,
            self.shared.engine.local(),
        );
        let held = local.leases();
        held >= max || (held >= max / 2 && local.leases_of(owner) >= max / 4)
    }

    /// Brings up what only slower tiers have. The lookup is answered when all ranks are done.
    fn raise(&self, key: &CacheKey, hashed: &Hashed, number: u64, reach: usize, found: Vec<Found>) {
        let shared = &self.shared;
        let tenant = shared.spaces.tenant(&hashed.salt, &shared.engine);
        shared.promoting.fetch_add(1, Ordering::Relaxed);
        let rising = Arc::new(Rising {
            service: self.clone(),
            request_id: key.request_id.clone(),
            number,
            first: hashed.chunks.start,
            readers: key.num_kv_readers,
            ranks: found.len(),
            dram: found
                .iter()
                .map(|found| found.leases.len())
                .min()
                .unwrap_or(0),
            risen: Mutex::default(),
        });
        let mut fetches = Fetches::default();
        for mut found in found {
            found.keys.truncate(reach);
            found.leases.truncate(reach);
            found.below.truncate(reach - found.leases.len());
            let Found {
                space,
                kv_rank,
                keys,
                leases,
                below,
            } = found;
            let model = shared.spaces.name(space, &key.model_name);
            let held = leases.len();
            let announcement = |place: usize| StoredChunk {
                hash: keys[place].hash,
                parent: hashed.parent(hashed.chunks.start + place),
                tokens: self.chunk_tokens(key, place),
            };
            let mut announced: Vec<StoredChunk> = match shared.events.enabled() {
                true => (held..reach).map(announcement).collect(),
                false => Vec::new(),
            };
            let (rising, events) = (Arc::clone(&rising), Arc::clone(&shared.events));
            let done = move |leases: Leases| {
                // Subscribers hear of what is in DRAM, and this is again.
                announced.truncate(leases.len().saturating_sub(held));
                events.stored(&model, announced);
                rising.risen.lock().push((space, kv_rank, leases));
            };
            let fetch = shared.engine.fetch(tenant, keys, leases, below, done);
            fetches.0.push(fetch);
        }
        let mut state = shared.state.lock();
        match state.sessions.looking_up(&key.request_id, number) {
            Some(session) => session.set_fetches(fetches),
            None => {
                drop(state);
                // The request ended meanwhile.
                drop(fetches);
            }
        }
    }

    /// Counts the chunks that a lookup found, and how many of them DRAM had without lower tiers.
    fn count_hits(&self, hits: usize, dram: usize) {
        let counters = &self.shared.stats.service;
        let chunk = u64::from(self.shared.config.hasher.chunk_size());
        let dram = dram.min(hits);
        add(&counters.hit_tokens, hits as u64 * chunk);
        add(&counters.hit_tokens_dram, dram as u64 * chunk);
        add(&counters.hit_tokens_lower, (hits - dram) as u64 * chunk);
    }

    /// All ranks of a lookup are done.
    fn risen(&self, rising: &mut Rising) {
        let shared = &self.shared;
        let risen = mem::take(rising.risen.get_mut());
        // One that was given up has nothing.
        let all = risen.len() == rising.ranks;
        let hits = risen.iter().map(|(_, _, leases)| leases.len()).min();
        let hits = hits.filter(|_| all).unwrap_or(0);
        let hold = |(space, kv_rank, leases)| {
            let mut hold = RankHold::new(space, kv_rank, rising.first, leases, rising.readers);
            hold.truncate(rising.first + hits);
            hold
        };
        let holds: Vec<RankHold> = risen.into_iter().map(hold).collect();
        self.count_hits(hits, rising.dram);
        let expires = Instant::now() + shared.config.lookup_lease;
        let waiting = {
            let mut state = shared.state.lock();
            let session = state.sessions.looking_up(&rising.request_id, rising.number);
            match session {
                Some(session) => session.risen(rising.number, hits as u64, holds, expires),
                None => Err(holds),
            }
        };
        // The leases of a request that is over go back here, where nothing is locked.
        for waiter in waiting.unwrap_or_default() {
            waiter.tell(Reply::Int(hits as u64));
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
            Hits::Rising => Reply::None,
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

/// The spaces and KV ranks that a lookup asks for: each rank in the layouts of those that may be
/// of that rank.
fn asked_ranks(candidates: &[Candidate], world_size: u16) -> Vec<(SpaceId, u16)> {
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
        asked.map(|rank| (space, rank)).collect::<Vec<_>>()
    };
    candidates.iter().flat_map(asked).collect()
}
