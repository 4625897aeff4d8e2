//! Lookups: the requests of engines from the first lookup to the end of their sessions.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_engine::{
    Found, FoundRank, LocateHint, LookupRequest, Merge, OwnerId, Parts, Rank, TenantId, TierRun,
};
use lmc_key::{ChunkHash, ClearsId, SpaceId};
use parking_lot::Mutex;

use crate::protocol::{CacheKey, Reply, Sources, TAIL_LOOKUP, TierChunks};
use crate::service::ClientId;
use crate::service::context::{Context, Hashed, refuse};
use crate::service::events::StoredChunk;
use crate::service::misses::LookupRange;
use crate::service::notices::Notices;
use crate::service::registry::{Candidate, RankSet, Registry, WiderSpace};
use crate::service::session::{Followed, Hits, Lookup, RankHold, Session, Sessions, Wait, Waiter};
use crate::service::share::share_of;
use crate::service::stats::add;
use crate::service::status::SessionStatus;
use crate::service::usage::Usage;

/// Requests that are visited under one lock of the sessions.
const SESSIONS_AT_A_TIME: usize = 512;

/// Keys of one lookup, over all its ranks: enough for 64 ranks and a million tokens.
const MAX_KEYS: usize = 1 << 18;

/// Longest wait of a lookup for a tail: its engine stores it when the request ends, and computing
/// it takes little longer.
const TAIL_WAIT: Duration = Duration::from_millis(50);

/// Ranks whose leases are released under one lock of the sessions.
const HOLDS_AT_A_TIME: usize = 256;

/// A lookup whose chunks are being promoted, with everything that its answer needs.
struct Promoting {
    request_id: String,
    number: u64,
    clears: ClearsId,
    model: String,
    /// First chunk of the range that was looked up.
    first: usize,
    readers: u32,
    /// Tokens of a chunk, if not the server's chunk size.
    unit: Option<u32>,
    /// True if the lookup may wait for a peer to compute chunks.
    waits: bool,
    /// Chunks of the range, for the event that announces the promoted ones; empty without
    /// subscribers.
    chunks: Vec<StoredChunk>,
    push: Option<PushOfLookup>,
    /// None for a tail.
    asked: Option<LookupRange>,
    /// Counters of the request's model and tenant.
    usage: Option<Arc<Usage>>,
}

/// The chunks of a lookup, for the peer that receives those of them that are found.
struct PushOfLookup {
    to: String,
    /// Hashes of the range that is looked up, and of the chunk before it.
    hashes: Vec<ChunkHash>,
    parent: Option<ChunkHash>,
}

impl PushOfLookup {
    fn of(key: &CacheKey, hashed: &Hashed, hashes: &[ChunkHash]) -> Option<Self> {
        let to = &key.configs.push_to;
        (!to.is_empty()).then(|| Self {
            to: to.clone(),
            hashes: hashes.to_vec(),
            parent: hashed.parent(hashed.chunks.start),
        })
    }
}

/// Counts a lookup whose chunks are being promoted, until it is dropped.
struct PromotingGauge {
    lookups: Arc<Lookups>,
    /// True if the lookup may wait for a peer to compute chunks.
    waits: bool,
}

impl PromotingGauge {
    fn new(lookups: &Arc<Lookups>, waits: bool) -> Self {
        lookups.promoting.fetch_add(1, Ordering::Relaxed);
        lookups.waiting.fetch_add(waits.into(), Ordering::Relaxed);
        Self {
            lookups: Arc::clone(lookups),
            waits,
        }
    }
}

impl Drop for PromotingGauge {
    fn drop(&mut self) {
        self.lookups.promoting.fetch_sub(1, Ordering::Relaxed);
        let waits = self.waits.into();
        self.lookups.waiting.fetch_sub(waits, Ordering::Relaxed);
    }
}

/// The requests under way, and the chunks that their lookups hold.
#[derive(Debug)]
pub(super) struct Lookups {
    context: Arc<Context>,
    registry: Arc<Registry>,
    sessions: Mutex<Sessions>,
    /// Numbers lookups.
    numbers: AtomicU64,
    /// Number of lookups whose chunks are being promoted.
    promoting: AtomicUsize,
    /// Number of lookups under way that may wait for a peer to compute chunks.
    waiting: AtomicUsize,
}

impl Lookups {
    pub(super) fn new(context: Arc<Context>, registry: Arc<Registry>) -> Self {
        Self {
            context,
            registry,
            sessions: Mutex::default(),
            numbers: AtomicU64::new(0),
            promoting: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
        }
    }

    pub(super) fn lookup(
        self: &Arc<Self>,
        client: ClientId,
        key: &CacheKey,
        now: Instant,
    ) -> Reply {
        let reply = self.look_up(client, key, now);
        if let (Reply::Error(_), Some(notices)) = (&reply, self.notices_of(key)) {
            // The engine computes the prompt without the cache.
            notices.refuse_request(key, prefill_of(key));
        }
        reply
    }

    /// Returns the watch of a request; `None` where nothing watches it, and for a request's second
    /// lookup.
    fn notices_of(&self, key: &CacheKey) -> Option<&Arc<Notices>> {
        let notices = self.context.notices.as_ref();
        notices.filter(|_| !is_second_lookup(&key.request_id))
    }

    fn look_up(self: &Arc<Self>, client: ClientId, key: &CacheKey, now: Instant) -> Reply {
        let context = &self.context;
        let counters = &context.stats.service;
        if key.num_kv_readers == 0 {
            return refuse(
                "num_kv_readers is missing: it tells how long chunks must be held; \
                 upgrade the lmcache client to 0.5.6",
            );
        }
        let sources = match &key.configs.sources {
            Sources::Named(sources) => Arc::clone(sources),
            Sources::Malformed(reason) => {
                // The engine drops the text of a refused lookup.
                let request = &key.request_id;
                context.warn_throttled(&format!("lookup of {request} refused: {reason}"));
                return refuse(reason);
            }
        };
        let hashed = match context.hash(key) {
            Ok(hashed) => hashed,
            Err(refusal) => return refusal,
        };
        let asked = LookupRange::of(key, &hashed, context.tokens_per_chunk(key), now);
        let owner = client.owner();
        let is_known = {
            let mut sessions = self.sessions.lock();
            let is_known = sessions.of(client, &key.request_id).is_some();
            let full = !is_known && self.has_too_many_sessions(&sessions, client);
            if full || self.holds_too_much(owner) {
                // An unanswered lookup would be worse: the request now computes everything.
                add(&counters.over_limit, 1);
                if let Some(id) = prefill_of(key) {
                    // No request waits for a prefill whose end may never be noted.
                    sessions.end_unbegun_prefill(&id, now);
                }
                let before = sessions.end(client, &key.request_id);
                drop(sessions);
                if let Some(before) = before {
                    before.end();
                }
                if let Some(notices) = self.notices_of(key).filter(|_| !is_known) {
                    notices.refuse_request(key, prefill_of(key));
                }
                if let Some(asked) = asked {
                    let usage = context.spaces.usage(None);
                    let note = context.count_refused(asked, usage.as_deref());
                    context.report_lookup(&key.request_id, &key.model_name, &note);
                }
                return Reply::None;
            }
            is_known
        };
        let candidates = self.registry.candidates(client, key, &hashed.salt);
        let ranks = asked_ranks(&candidates, key.world_size as u16);
        if ranks.is_empty() {
            add(&counters.lookups_unregistered, 1);
        }
        let first = hashed.chunks.start;
        let most = MAX_KEYS / ranks.len().max(1);
        let range = &hashed.hashes[hashed.chunks.clone()];
        let hashes = range[..range.len().min(most)].to_vec();
        let asked = asked.map(|asked| asked.looked_up(hashes.len(), !ranks.is_empty()));
        let push = PushOfLookup::of(key, &hashed, &hashes);
        if key.unit.is_none() {
            context.check_push(&key.configs.push_to);
        }
        let engine = &context.engine;
        let tenant = match engine.has_lower_tiers() {
            true => context.spaces.tenant(&hashed.salt, engine),
            // Nothing is promoted, so nothing counts against a quota.
            false => TenantId::default(),
        };
        let chunk_size = context.config.hasher.chunk_size();
        let parts = Parts::of(chunk_size, key.unit.unwrap_or(chunk_size));
        let wait = match is_known {
            // After a preemption the request has tokens of its own, which no other engine computes.
            true => None,
            false => self.wait_for(&sources, key),
        };
        let asked = asked.map(|asked| asked.waiting(wait));
        let id = Some(&*key.configs.awaited).filter(|id| !id.is_empty());
        let id: Option<Arc<str>> = id.map(Arc::from);
        let hint = LocateHint::default()
            .with_sources(sources)
            .with_wait(wait)
            .with_awaited(wait.and(id))
            .with_parts(parts);
        let notices = self.notices_of(key).filter(|_| !is_known);
        let watched = notices.map(|notices| (notices, range.to_vec(), ranks.clone()));
        let request = LookupRequest::new(owner, hashes, ranks)
            .with_tenant(tenant)
            .with_hint(hint)
            .with_limit(share_of(context, client));
        let request = match key.unit {
            None => request,
            Some(_) => request.without_demand(),
        };
        let request = self.with_merges(request, &candidates, key);
        // Rounds of the lookup, and of the chunks that are merged.
        let rounds = 2 + 4 * request.merges() as u32;
        let lookup = engine.lookup(request);
        let clears = lookup.clears();
        let space = candidates.first().map(|candidate| candidate.space);
        let usage = asked.and_then(|_| context.spaces.usage(space));
        if let Some(asked) = asked {
            context.count_asked(asked, usage.as_deref());
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let readers = key.num_kv_readers;
        let mut note = None;
        let (known, promoted) = match lookup.try_found() {
            Ok(found) => {
                let runs = runs(&found);
                let of = (key.model_name.as_str(), key.unit);
                self.note_found((&found, &runs), clears, of, || {
                    self.announcements(key, &hashed)
                });
                self.push_found(&push, &found);
                note = asked
                    .map(|asked| context.count_misses(asked, (&found, &runs), usage.as_deref()));
                let expires = now + context.config.lookup_lease;
                let hits = found.hits as u64;
                let holds = rank_holds(found, first, readers);
                let lookup = Lookup::known(number, hits, holds, expires);
                (lookup.with_runs(runs), None)
            }
            // The engine waits no longer for a tier, whatever the tier does.
            Err(lookup) => {
                // After a wait there is one more round of questions and reads.
                let wait = wait.map_or(Duration::ZERO, |wait| wait + Duration::from_secs(1));
                let expires = now + wait + rounds * engine.lookup_timeout();
                (Lookup::promoting(number, expires), Some(lookup))
            }
        };
        let mut notice = watched.and_then(|(notices, hashes, ranks)| {
            notices.begin(client, key, prefill_of(key), clears, hashes, ranks)
        });
        let mut sessions = self.sessions.lock();
        let new = || {
            Session::new(client, now, clears)
                .with_prefill(prefill_of(key))
                .with_notice(notice.take())
        };
        let session = sessions.begin(client, &key.request_id, new);
        session.last_used = now;
        let before = session.set_lookup(known, clears);
        drop(sessions);
        if let Some(notice) = notice {
            // The session has begun meanwhile.
            notice.cancel();
        }
        // Leases of an earlier lookup of the request are released without the sessions being
        // locked.
        if let Some(before) = before {
            before.end();
        }
        if let Some(lookup) = promoted {
            let promoting = Promoting {
                request_id: key.request_id.clone(),
                number,
                clears,
                model: key.model_name.clone(),
                first,
                readers,
                unit: key.unit,
                waits: wait.is_some(),
                chunks: self.announcements(key, &hashed),
                push,
                asked,
                usage,
            };
            self.finish_when_promoted(lookup, promoting);
        }
        if let Some(note) = note {
            context.report_lookup(&key.request_id, &key.model_name, &note);
        }
        Reply::None
    }

    /// Adds to a lookup the ranks of engines with more ranks whose chunks can be merged: first of
    /// engines that the request's sources have, then of engines that another peer has or whose
    /// chunks are in DRAM. Adds none where workers of the engine differ in layout.
    fn with_merges(
        &self,
        request: LookupRequest,
        candidates: &[Candidate],
        key: &CacheKey,
    ) -> LookupRequest {
        let (context, engine) = (&self.context, &self.context.engine);
        let [candidate] = candidates else {
            return request;
        };
        if candidate.wider.is_empty() || !engine.has_lower_tiers() {
            return request;
        }
        let wider = candidate.wider.iter();
        let layouts = wider.map(|wider| (wider.layout.layout, wider.layout.ranks(key.world_size)));
        let mut layouts: Vec<_> = layouts.collect();
        layouts.push((candidate.layout, key.world_size));
        let known = engine.has_layouts(&layouts, &[]);
        let of_sources = match request.hint.sources.is_empty() {
            true => vec![false; layouts.len()],
            false => engine.has_layouts(&layouts, &request.hint.sources),
        };
        let wider = candidate.wider.iter().zip(known).zip(&of_sources);
        let there = wider
            .filter(|((wider, is_known), _)| *is_known || context.spaces.has_chunks(wider.space));
        let mut there: Vec<_> = there
            .map(|((wider, _), of_source)| (wider, *of_source))
            .collect();
        there.sort_by_key(|(_, of_source)| !of_source);
        let merge = |wider: &WiderSpace, kv_rank: u16| {
            let factor = wider.layout.factor;
            let first = kv_rank.checked_mul(factor)?;
            let rank = |kv_rank| Rank {
                space: wider.space,
                kv_rank,
                chunk_bytes: Some(candidate.chunk_bytes / u64::from(factor)),
            };
            Some(Merge {
                ranks: (first..first.checked_add(factor)?).map(rank).collect(),
                run_bytes: wider.layout.run_bytes,
                keep: wider.is_registered,
            })
        };
        let of_engine = |(wider, _): &(&WiderSpace, bool)| {
            let ranks = 0..key.world_size as u16;
            ranks
                .map(|kv_rank| merge(wider, kv_rank))
                .collect::<Option<Vec<_>>>()
        };
        let merges = there.iter().filter_map(of_engine).collect();
        let request = request.with_merges(merges);
        // Otherwise the sources compute the same as this engine.
        let (own, merged) = of_sources.split_last().expect("its own is the last");
        match !own && merged.contains(&true) {
            true => request.waiting_for_merge(),
            false => request,
        }
    }

    /// Returns the time for which a lookup may wait for the peers that its request names; `None` if
    /// it asks for no wait, or if too many lookups wait.
    fn wait_for(&self, sources: &[String], key: &CacheKey) -> Option<Duration> {
        let config = &self.context.config;
        let most = match key.unit {
            None => config.max_source_wait,
            Some(_) => config.max_source_wait.min(TAIL_WAIT),
        };
        let wait = key.configs.wait.min(most);
        if wait.is_zero() || sources.is_empty() {
            return None;
        }
        let counters = self.context.counters();
        if self.waiting.load(Ordering::Relaxed) >= config.max_source_waits {
            add(&counters.source_waits_refused, 1);
            return None;
        }
        add(&counters.source_waits, 1);
        Some(wait)
    }

    /// Returns true when a connection may begin no more requests: all connections together are at the
    /// limit, or this connection has three quarters of it.
    fn has_too_many_sessions(&self, sessions: &Sessions, client: ClientId) -> bool {
        let max = self.context.config.max_sessions;
        sessions.len() >= max || sessions.len_of(client) >= max - max / 4
    }

    /// Returns true if a connection may hold no more chunks: all connections together hold the
    /// maximum, or half of it while this one holds a quarter.
    fn holds_too_much(&self, owner: OwnerId) -> bool {
        let (max, engine) = (self.context.config.max_lookup_leases, &self.context.engine);
        let held = engine.leases();
        held >= max || (held >= max / 2 && engine.leases_of(owner) >= max / 4)
    }

    /// Returns the chunks of a range for the event that they are in DRAM. Empty without
    /// subscribers, and for chunks of another size, which subscribers do not know.
    fn announcements(&self, key: &CacheKey, hashed: &Hashed) -> Vec<StoredChunk> {
        if !self.context.events.enabled() || key.unit.is_some() {
            return Vec::new();
        }
        let announcement = |(index, chunk): (usize, usize)| StoredChunk {
            hash: hashed.hash(chunk),
            parent: hashed.parent(chunk),
            tokens: self.context.chunk_tokens(key, index),
        };
        hashed
            .chunks
            .clone()
            .enumerate()
            .map(announcement)
            .collect()
    }

    /// Counts the chunks that a lookup found, and announces those that are in DRAM again to
    /// subscribers, except chunks from before a clear. Chunks of another size than the server's are
    /// counted apart and not announced.
    fn note_found(
        &self,
        (found, runs): (&Found, &[TierRun]),
        clears: ClearsId,
        (model, unit): (&str, Option<u32>),
        chunks: impl Fn() -> Vec<StoredChunk>,
    ) {
        if let Some(unit) = unit {
            let tokens = found.hits as u64 * u64::from(unit);
            return add(&self.context.stats.service.hit_tokens_tail, tokens);
        }
        self.count_hits(found, runs);
        let context = &self.context;
        let is_current = || clears == context.engine.clears_id();
        for rank in &found.ranks {
            let known = rank.resident.min(rank.seen);
            if rank.promoted > known && context.events.enabled() && is_current() {
                let promoted: Vec<StoredChunk> =
                    chunks().drain(..rank.promoted).skip(known).collect();
                let model = context.spaces.name(rank.rank.space, model);
                let hashes: Vec<ChunkHash> = promoted.iter().map(|chunk| chunk.hash).collect();
                context.events.stored(&model, promoted);
                // The clear may have reported their removal just before.
                for hash in hashes.into_iter().filter(|_| !is_current()) {
                    context.events.removed(&model, hash);
                }
            }
        }
    }

    /// Pushes the chunks that a lookup found.
    fn push_found(&self, push: &Option<PushOfLookup>, found: &Found) {
        let Some(PushOfLookup { to, hashes, parent }) = push else {
            return;
        };
        let parents = std::iter::once(*parent).chain(hashes.iter().copied().map(Some));
        for rank in &found.ranks {
            let keys = hashes.iter().take(found.hits);
            let keys = keys.map(|hash| rank.rank.key(*hash));
            self.context.push(to, || keys.zip(parents.clone()));
        }
    }

    /// Waits for a lookup's promotion in a task, and then answers the lookup. The task ends with
    /// the request's lookup.
    fn finish_when_promoted(self: &Arc<Self>, lookup: lmc_engine::Lookup, promoting: Promoting) {
        let gauge = PromotingGauge::new(self, promoting.waits);
        let (request_id, number) = (promoting.request_id.clone(), promoting.number);
        let task = self.context.engine.spawn(async move {
            let found = lookup.wait().await;
            gauge.lookups.promoted(&promoting, found);
        });
        let mut sessions = self.sessions.lock();
        match sessions.looking_up(&request_id, number) {
            Some(session) => session.set_task(task),
            None => {
                drop(sessions);
                // The request ended meanwhile.
                drop(task);
            }
        }
    }

    /// Counts the chunks that a lookup found, by the tiers that they came from.
    fn count_hits(&self, found: &Found, runs: &[TierRun]) {
        let counters = &self.context.stats.service;
        let chunk = u64::from(self.context.config.hasher.chunk_size());
        let (hits, resident) = (found.hits as u64, found.resident as u64);
        add(&counters.hit_tokens, hits * chunk);
        add(&counters.hit_tokens_dram, resident * chunk);
        add(&counters.hit_tokens_lower, (hits - resident) * chunk);
        self.context.engine.count_hits(runs, chunk);
    }

    /// Answers a lookup whose promotion has ended.
    fn promoted(&self, promoting: &Promoting, found: Found) {
        let context = &self.context;
        let (runs, of) = (runs(&found), (&*promoting.model, promoting.unit));
        self.note_found((&found, &runs), promoting.clears, of, || {
            promoting.chunks.clone()
        });
        self.push_found(&promoting.push, &found);
        let asked = promoting.asked;
        let usage = promoting.usage.as_deref();
        let note = asked.map(|asked| context.count_misses(asked, (&found, &runs), usage));
        let hits = found.hits as u64;
        let holds = rank_holds(found, promoting.first, promoting.readers);
        let expires = Instant::now() + context.config.lookup_lease;
        let waiting = {
            let mut sessions = self.sessions.lock();
            let (request_id, number) = (&promoting.request_id, promoting.number);
            match sessions.looking_up(request_id, number) {
                Some(session) => session.promoted(number, (hits, runs.clone()), holds, expires),
                None => Err(holds),
            }
        };
        // Leases of a request that is over are released here, where nothing is locked.
        for waiter in waiting.unwrap_or_default() {
            let reply = self.answer(waiter.with_tiers, hits, &runs);
            waiter.tell(reply);
        }
        if let Some(note) = note {
            context.report_lookup(&promoting.request_id, &promoting.model, &note);
        }
    }

    /// Returns the answer to a lookup whose chunks came from these tiers, or were all in DRAM.
    fn answer(&self, with_tiers: bool, hits: u64, runs: &[TierRun]) -> Reply {
        if !with_tiers {
            return Reply::Int(hits);
        }
        let named = |run: &TierRun| {
            let tier = match run.tier {
                None => TierChunks::DRAM,
                Some(index) => self.context.engine.tier_name(index)?,
            };
            Some(TierChunks {
                tier: tier.to_owned(),
                chunks: run.chunks as u64,
            })
        };
        let all = [TierRun {
            tier: None,
            chunks: hits as usize,
        }];
        let runs = match runs {
            [] if hits > 0 => &all[..],
            runs if runs.len() > TierChunks::MAX => &[],
            runs => runs,
        };
        Reply::Found {
            chunks: hits,
            tiers: runs.iter().filter_map(named).collect(),
        }
    }

    /// Passes the answer of a lookup whose chunks are being promoted to `tell`, as soon as there is
    /// one or the timeout has passed.
    pub(crate) fn wait(&self, wait: &Wait, tell: Box<dyn FnOnce(Reply) + Send>) {
        let waiter = Waiter::new(wait, tell);
        let waits = {
            let mut sessions = self.sessions.lock();
            match sessions.of(wait.client, wait.request_id()) {
                Some(session) => {
                    let waits = session.wait(waiter);
                    waits.map_err(|known| (known, session.runs()))
                }
                None => Err(((waiter, 0), Vec::new())),
            }
        };
        if let Err(((waiter, hits), runs)) = waits {
            let reply = self.answer(waiter.with_tiers, hits, &runs);
            waiter.tell(reply);
        }
    }

    /// Returns the leading chunks that were found: 0 for a request that never looked up,
    /// [`Reply::None`] while chunks are being promoted.
    pub(super) fn prefetch_status(
        &self,
        client: ClientId,
        request_id: &str,
        with_tiers: bool,
        now: Instant,
    ) -> Reply {
        let (mut hits, mut runs) = (0, Vec::new());
        if let Some(session) = self.sessions.lock().of(client, request_id) {
            session.last_used = now;
            match session.hits() {
                Hits::Never => {}
                Hits::Promoting => return Reply::None,
                Hits::Known(known) => (hits, runs) = (known, session.runs()),
            }
        }
        self.answer(with_tiers, hits, &runs)
    }

    pub(super) fn free_lookup_locks(
        &self,
        client: ClientId,
        key: &CacheKey,
        now: Instant,
    ) -> Reply {
        let chunk = self.context.tokens_per_chunk(key);
        // A partial chunk at the start is released with its whole chunk; one at the end is kept.
        let chunks = (key.start / chunk) as usize..(key.end / chunk) as usize;
        let kv_rank = key.worker_id.map(|rank| rank as u16);
        let readers = key.num_kv_readers.max(1);
        // A lookup may hold thousands of ranks: other requests are served in between.
        for first in (0..).step_by(HOLDS_AT_A_TIME) {
            let mut sessions = self.sessions.lock();
            let session = sessions.of(client, &key.request_id);
            let released = session.and_then(|session| {
                session.last_used = now;
                session.free(first, HOLDS_AT_A_TIME, kv_rank, &chunks, readers)
            });
            // The leases are released here, without the sessions being locked.
            drop(sessions);
            if released.is_none() {
                break;
            }
        }
        Reply::None
    }

    pub(super) fn end_session(&self, client: ClientId, request_id: &str) -> Reply {
        let session = self.sessions.lock().end(client, request_id);
        // The leases are released here, without the sessions being locked.
        if let Some(session) = session {
            session.end();
        }
        Reply::None
    }
}

impl Lookups {
    /// Notes that a worker serves a request, and names the connection of the request's scheduler
    /// where that is known. `bind` is called while the request cannot end. Returns the clears that
    /// the request follows on.
    pub(super) fn served(
        &self,
        client: ClientId,
        request_id: &str,
        now: Instant,
        bind: impl FnOnce(ClientId),
    ) -> Followed {
        let mut sessions = self.sessions.lock();
        let named = sessions.named(request_id);
        for session in &mut *named {
            session.last_used = now;
        }
        let scheduler = match named {
            // Of several requests with one id, the one on the worker's own connection is meant, if
            // the worker is the scheduler too; otherwise the request is not known.
            [_, _, ..] => named.iter().find(|session| session.client == client),
            _ => named.first(),
        };
        if let Some(scheduler) = scheduler {
            bind(scheduler.client);
        }
        // A session that expired was used one lifetime before.
        let remembered = 2 * self.context.config.session_ttl;
        let then = now.checked_sub(remembered).unwrap_or(self.context.started);
        sessions.followed(client, request_id, then)
    }

    /// Notes that one worker is done with a range that its request's lookup held for it.
    pub(super) fn reader_done(
        &self,
        client: ClientId,
        request_id: &str,
        space: SpaceId,
        kv_rank: u16,
        chunks: &Range<usize>,
    ) {
        let mut sessions = self.sessions.lock();
        let session = sessions.of_worker(client, request_id);
        let released = session.map(|session| session.reader_done(space, kv_rank, chunks));
        // The leases are released here, without the sessions being locked.
        drop(sessions);
        drop(released);
    }

    /// As [`Self::reader_done`], for a worker that has retrieved the range. Counts its tokens, once
    /// for all workers of an engine. An unknown request is counted at its first rank.
    pub(super) fn retrieved(
        &self,
        client: ClientId,
        key: &CacheKey,
        space: SpaceId,
        kv_rank: u16,
        chunks: &Range<usize>,
    ) {
        let mut sessions = self.sessions.lock();
        let session = sessions.of_worker(client, &key.request_id);
        let (new, released) = match session {
            Some(session) => (
                session.retrieve(chunks),
                session.reader_done(space, kv_rank, chunks),
            ),
            None if kv_rank == 0 => (chunks.len(), Vec::new()),
            None => (0, Vec::new()),
        };
        drop(sessions);
        drop(released);
        let counters = self.context.counters();
        let counter = match key.unit {
            None => &counters.retrieved_tokens,
            Some(_) => &counters.retrieved_tokens_tail,
        };
        let tokens = new as u64 * self.context.tokens_per_chunk(key);
        add(counter, tokens);
        if tokens > 0
            && key.unit.is_none()
            && let Some(usage) = self.context.spaces.usage(Some(space))
        {
            add(&usage.retrieved_tokens, tokens);
        }
    }

    /// Ends the requests of a connection, some at a time: other requests are served in between.
    pub(super) fn end_of(&self, client: ClientId) {
        let requests = self.sessions.lock().take_names(client);
        for requests in requests.chunks(SESSIONS_AT_A_TIME) {
            let mut sessions = self.sessions.lock();
            let end = |request: &Arc<str>| sessions.end(client, request);
            let ended: Vec<Session> = requests.iter().filter_map(end).collect();
            drop(sessions);
            // Their leases are released here, where nothing is locked.
            ended.into_iter().for_each(Session::end);
        }
    }

    /// Ends lookups, waits and requests that have expired, some at a time: other requests are
    /// served in between.
    pub(super) fn sweep(&self, now: Instant) {
        let context = &self.context;
        let counters = context.counters();
        let mut to_visit = self.sessions.lock().to_visit();
        while to_visit > 0 {
            let names = to_visit.min(SESSIONS_AT_A_TIME);
            to_visit -= names;
            let mut expired_leases = 0;
            let (mut expired, mut timed_out) = (Vec::new(), Vec::new());
            let mut sessions = self.sessions.lock();
            let ended = sessions.sweep(names, |session| {
                timed_out.append(&mut session.take_timed_out(now));
                if now.saturating_duration_since(session.last_used) >= context.config.session_ttl {
                    return false;
                }
                if let Some((leases, lookup)) = session.expire(now) {
                    expired_leases += leases;
                    expired.push(lookup);
                }
                true
            });
            drop(sessions);
            add(&counters.sessions_expired, ended.len() as u64);
            add(&counters.lookup_leases_expired, expired_leases as u64);
            // Leases are released and waiters are answered here, where nothing is locked.
            ended.into_iter().for_each(Session::end);
            expired.into_iter().for_each(Lookup::end);
            timed_out
                .into_iter()
                .for_each(|waiter| waiter.tell(Reply::None));
        }
    }

    /// Returns true if a prefill with this id is over.
    pub(super) fn is_over(&self, id: &str) -> bool {
        // Nothing is stored without an engine.
        self.registry.is_empty() || self.sessions.lock().is_over(id, Instant::now())
    }

    /// Returns the connections that have requests.
    pub(super) fn clients(&self) -> Vec<ClientId> {
        self.sessions.lock().clients().collect()
    }

    /// Returns the requests under way.
    pub(super) fn status(&self) -> SessionStatus {
        SessionStatus {
            sessions: self.sessions.lock().len(),
            promoting: self.promoting.load(Ordering::Relaxed),
        }
    }
}

/// Returns true if a request looks up the tail after its whole chunks.
fn is_second_lookup(request_id: &str) -> bool {
    request_id.ends_with(TAIL_LOOKUP)
}

/// Returns the id under which other servers may wait for a request; `None` for a request that waits
/// itself.
fn prefill_of(key: &CacheKey) -> Option<Arc<str>> {
    let configs = &key.configs;
    let is_prefill = !configs.awaited.is_empty() && configs.wait.is_zero();
    is_prefill.then(|| configs.awaited.as_str().into())
}

/// Returns the tiers that chunks came from; empty if all were in DRAM.
fn runs(found: &Found) -> Vec<TierRun> {
    match found.was_read() {
        true => found.runs(),
        false => Vec::new(),
    }
}

/// Returns the chunks found that the request's session holds: those of each rank for `readers`
/// workers.
fn rank_holds(found: Found, first: usize, readers: u32) -> Vec<RankHold> {
    if found.hits == 0 {
        return Vec::new();
    }
    let hold = |found: FoundRank| {
        let Rank { space, kv_rank, .. } = found.rank;
        RankHold::new(space, kv_rank, first, found.leases, readers)
    };
    found.ranks.into_iter().map(hold).collect()
}

/// Returns the spaces and KV ranks that a lookup asks for: each rank in the layouts of the workers
/// that may have that rank.
fn asked_ranks(candidates: &[Candidate], world_size: u16) -> Vec<Rank> {
    // A layout that has every rank belongs to a whole engine; other layouts belong to pipeline
    // stages.
    let is_whole = |ranks: &RankSet| ranks.len() == usize::from(world_size);
    let mut known = RankSet::default();
    for candidate in candidates {
        if !is_whole(&candidate.ranks) {
            known.add(&candidate.ranks);
        }
    }
    let asked = |candidate: &Candidate| {
        let rank = |kv_rank| Rank {
            space: candidate.space,
            kv_rank,
            chunk_bytes: Some(candidate.chunk_bytes),
        };
        // A rank that no stage is known to have may be a rank of any of them.
        let of_layout =
            |rank: &u16| candidate.unknown_rank || candidate.ranks.has(*rank) || !known.has(*rank);
        let asked = (0..world_size).filter(of_layout);
        asked.map(rank).collect::<Vec<_>>()
    };
    candidates.iter().flat_map(asked).collect()
}
