//! Random lookups, stores, clears and ends of requests against an oracle: each watched request has one outcome,
//! the right one, and in time.

use std::collections::{BTreeMap, HashSet};

use lmc_backend::conformance::Rng;
use lmc_engine::{
    EngineConfig, EngineContext, EngineHost, Host as _, InUse, Inserted, OwnerId, StoreRequest,
    StoreStart, StoreTicket, TenantId,
};
use lmc_key::SpaceId;
use lmc_memory::ArenaConfig;
use lmc_testkit::rounds;

use super::*;

const CLIENTS: u64 = 2;
const NAMES: u64 = 3;
const PROMPTS: u64 = 2;
/// Chunks of the longest prompt.
const CHUNKS: u64 = 4;
const CHUNK_BYTES: u64 = 4096;

/// A request as its client names it.
type Who = (ClientId, String);

/// A request that has no outcome yet.
struct Request {
    guard: Option<NoticeGuard>,
    world_size: u32,
    clears: ClearsId,
    keys: Vec<(Rank, Vec<ChunkKey>)>,
    /// Chunks that were in DRAM at some time since the lookup.
    had: HashSet<ChunkKey>,
    /// Chunks that the notices must know of; none before their first look at the request.
    known: Option<HashSet<ChunkKey>>,
    /// Chunks that have come since the last look.
    fresh: HashSet<ChunkKey>,
    /// Time of the end of the session.
    ended: Option<Instant>,
    /// Time from which it has failed at the latest, where nothing is being stored.
    over_at: Option<Instant>,
}

impl Request {
    /// Returns true if each rank has all chunks in one layout.
    fn is_whole(&self, chunks: &HashSet<ChunkKey>) -> bool {
        (0..self.world_size).all(|kv_rank| {
            self.keys.iter().any(|(rank, keys)| {
                u32::from(rank.kv_rank) == kv_rank && keys.iter().all(|key| chunks.contains(key))
            })
        })
    }

    fn all_keys(&self) -> impl Iterator<Item = &ChunkKey> {
        self.keys.iter().flat_map(|(_, keys)| keys)
    }
}

/// Outcomes of all schedules, so that a test can tell that it tested something.
#[derive(Debug, Default)]
struct Tally {
    finished: u64,
    failed: u64,
    failed_by_clear: u64,
    put_off: u64,
}

struct Rig {
    rng: Rng,
    engine: CacheEngine,
    notices: Arc<Notices>,
    now: Instant,
    requests: BTreeMap<Who, Request>,
    refused: HashSet<String>,
    tickets: Vec<(ChunkKey, ClearsId, StoreTicket)>,
    counts: Vec<(String, StoreCount)>,
    tally: Tally,
}

fn space(number: u64) -> SpaceId {
    SpaceId::new([number as u8 + 1; 16])
}

fn hash(prompt: u64, chunk: u64) -> ChunkHash {
    // The first chunk is that of all prompts.
    let prompt = if chunk == 0 { 0 } else { prompt };
    ChunkHash::new([(1 + prompt * CHUNKS + chunk) as u8; 32])
}

impl Rig {
    fn new(seed: u64) -> Self {
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
        let engine = EngineConfig::default()
            .start(EngineContext::new(Arc::new(arena), EngineHost::default()));
        let engine = engine.expect("the defaults are valid");
        let notices = Arc::<Notices>::default();
        engine.host().events().listen(Arc::clone(&notices) as _);
        Self {
            rng: Rng::new(seed),
            engine,
            notices,
            now: Instant::now(),
            requests: BTreeMap::new(),
            refused: HashSet::new(),
            tickets: Vec::new(),
            counts: Vec::new(),
            tally: Tally::default(),
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.rng.below(n)
    }

    /// Returns those of these chunks that are in DRAM.
    fn in_dram<'a>(
        &self,
        clears: ClearsId,
        keys: impl IntoIterator<Item = &'a ChunkKey>,
    ) -> HashSet<ChunkKey> {
        let keys: Vec<ChunkKey> = keys.into_iter().copied().collect();
        let there = self.engine.are_in_dram(clears, &keys).into_iter();
        let there = keys.iter().zip(there).filter(|(_, there)| *there);
        there.map(|(key, _)| *key).collect()
    }

    fn who(&mut self) -> Who {
        let client = self.below(CLIENTS);
        let name = self.below(NAMES);
        (ClientId::new(client), format!("{client}-{name}"))
    }

    /// Looks a request up for the first time, or again after its session has ended.
    fn begin(&mut self) {
        let who = self.who();
        let world_size = 1 + self.below(2) as u32;
        let (prompt, chunks) = (self.below(PROMPTS), self.below(CHUNKS + 1));
        let mut hashes: Vec<ChunkHash> = (0..chunks).map(|chunk| hash(prompt, chunk)).collect();
        if self.below(8) == 0 {
            // A client may name one twice.
            hashes.extend(hashes.first().copied());
        }
        // The engine is of one of two layouts, or of none that is known.
        let layouts = [0..1, 1..2, 0..2, 0..0][self.below(4) as usize].clone();
        let ranks: Vec<Rank> = layouts
            .flat_map(|layout| {
                (0..world_size).map(move |kv_rank| Rank {
                    space: space(layout),
                    kv_rank: kv_rank as u16,
                    chunk_bytes: None,
                })
            })
            .collect();
        let clears = self.engine.clears_id();
        let key = CacheKey {
            world_size,
            request_id: who.1.clone(),
            ..CacheKey::default()
        };
        // Its session has ended before.
        self.end_session(&who);
        let keys = ranks.iter().map(|rank| {
            let keys = hashes.iter().map(|hash| rank.key(*hash));
            (*rank, keys.collect::<Vec<_>>())
        });
        let keys: Vec<_> = keys.collect();
        let had = self.in_dram(clears, keys.iter().flat_map(|(_, keys)| keys));
        let guard = self.notices.begin(who.0, &key, None, clears, hashes, ranks);
        let request = Request {
            guard: Some(guard.expect("few are watched")),
            world_size,
            clears,
            keys,
            had,
            known: None,
            fresh: HashSet::new(),
            ended: None,
            over_at: None,
        };
        self.requests.insert(who, request);
    }

    fn end_session(&mut self, who: &Who) {
        let Some(request) = self.requests.get_mut(who) else {
            return;
        };
        let Some(guard) = request.guard.take() else {
            return;
        };
        request.ended = Some(self.now);
        request.over_at = Some(self.now + LATE_STORES);
        drop(guard);
        // The guard reads the system's clock.
        let mut inbox = self.notices.inbox.lock();
        let ended = inbox.news.ended.last_mut().expect("the guard has noted it");
        ended.1 = Some(self.now + LATE_STORES);
    }

    fn cancel(&mut self) {
        let who = self.who();
        let is_open = |request: &&mut Request| request.guard.is_some();
        if let Some(request) = self.requests.get_mut(&who).filter(is_open) {
            let guard = request.guard.take().expect("its session is open");
            guard.cancel();
            self.requests.remove(&who);
        }
    }

    fn begin_store(&mut self) {
        let key = ChunkKey {
            space: space(self.below(2)),
            kv_rank: self.below(2) as u16,
            group: 0,
            hash: hash(self.below(PROMPTS), self.below(CHUNKS)),
        };
        let request = StoreRequest {
            key,
            parent: None,
            tenant: TenantId::default(),
            len: CHUNK_BYTES,
        };
        let clears = self.engine.clears_id();
        for start in self.engine.store(OwnerId(1), clears, &[request]) {
            if let StoreStart::Reserved(ticket) = start {
                self.tickets.push((key, clears, ticket));
            }
        }
    }

    /// Ends a store, well or not.
    fn end_store(&mut self) {
        if self.tickets.is_empty() {
            return;
        }
        let at = self.below(self.tickets.len() as u64) as usize;
        let (key, clears, ticket) = self.tickets.swap_remove(at);
        if self.below(8) == 0 {
            return drop(ticket);
        }
        let inserted = self.engine.commit(vec![ticket]);
        if inserted != [Inserted::New] {
            return;
        }
        assert_eq!(
            clears,
            self.engine.clears_id(),
            "a chunk from before a clear"
        );
        let of_now = self.requests.values_mut();
        for request in of_now.filter(|request| request.clears == clears) {
            if request.all_keys().any(|one| *one == key) {
                request.had.insert(key);
                request.fresh.insert(key);
            }
        }
    }

    /// Takes the notices that are due, and compares them with what the oracle knows.
    fn take(&mut self) {
        if self.below(6) == 0 {
            // More chunks have come than are kept.
            let mut inbox = self.notices.inbox.lock();
            inbox.news.arrived.clear();
            inbox.news.has_more = true;
        }
        let has_more = self.notices.inbox.lock().news.has_more;
        let clears = self.engine.clears_id();
        let mut requests = mem::take(&mut self.requests);
        for request in requests.values_mut() {
            let there = self.in_dram(request.clears, request.all_keys());
            let fresh = mem::take(&mut request.fresh);
            if !fresh.is_empty() && request.known.is_some() {
                // The engine may not have stored the next one yet.
                let put_off = self.now + LATE_STORES;
                request.over_at = request.over_at.map(|over_at| over_at.max(put_off));
            }
            match &mut request.known {
                None => request.known = Some(there),
                Some(known) if has_more => known.extend(fresh.intersection(&there)),
                Some(known) => known.extend(fresh),
            }
        }
        let (notices, again) = self.notices.take(&self.engine, self.now);
        for notice in notices {
            if self.refused.remove(&notice.request_id) {
                assert!(!notice.is_stored);
                continue;
            }
            let client = notice
                .request_id
                .split('-')
                .next()
                .and_then(|n| n.parse().ok());
            let who = (
                ClientId::new(client.expect("a number")),
                notice.request_id.clone(),
            );
            let request = requests.remove(&who);
            let request = request.expect("a second outcome, or one of no request");
            assert_eq!(notice.world_size, request.world_size);
            let is_cleared = request.clears != clears;
            let known = request.known.as_ref().expect("each was looked at");
            match notice.is_stored {
                true => {
                    assert!(!is_cleared, "finished after a clear");
                    assert!(request.is_whole(&request.had), "finished too early");
                    self.tally.finished += 1;
                }
                false if is_cleared => self.tally.failed_by_clear += 1,
                false => {
                    assert!(!request.is_whole(known), "failed with all chunks");
                    let ended = request.ended.expect("failed under way");
                    assert!(self.now >= ended + LATE_STORES, "failed too early");
                    self.tally.failed += 1;
                }
            }
        }
        assert_eq!(self.refused, HashSet::new());
        let again_by = self.now + LOOK_EVERY;
        for ((_, name), request) in &requests {
            assert_eq!(request.clears, clears, "a clear is an end");
            let known = request.known.as_ref().expect("each was looked at");
            assert!(!request.is_whole(known), "all chunks are there");
            let again = again.expect("a request is watched");
            assert!(again <= again_by);
            let Some(over_at) = request.over_at else {
                continue;
            };
            assert!(again <= over_at.max(self.now + LOOK_AGAIN));
            let is_storing = self.counts.iter().any(|(of, _)| of == name)
                || request
                    .all_keys()
                    .any(|key| self.engine.is_writing(clears, *key));
            let latest = match is_storing {
                true => over_at + LONGEST_COPY,
                false => over_at,
            };
            assert!(self.now < latest, "nothing more is stored for it");
            self.tally.put_off += u64::from(self.now >= over_at);
        }
        assert!(!requests.is_empty() || again.is_none());
        self.requests = requests;
    }

    fn step(&mut self) {
        match self.below(32) {
            0..5 => self.begin(),
            5..8 => {
                let who = self.who();
                self.end_session(&who);
            }
            8 => self.cancel(),
            9..15 => self.begin_store(),
            15..22 => self.end_store(),
            22 => {
                let (_, name) = self.who();
                self.counts
                    .push((name.clone(), self.notices.count_store(&name)));
            }
            23 => drop(self.counts.pop()),
            24 => {
                let in_use = InUse::of_force(self.below(2) == 0);
                self.engine.clear_dram(in_use);
            }
            25 if self.below(3) == 0 => {
                let in_use = InUse::of_force(self.below(2) == 0);
                self.engine.clear(in_use).expect("few clears");
            }
            26 => {
                let name = format!("refused-{}", self.rng.next_u64());
                let key = CacheKey {
                    request_id: name.clone(),
                    ..CacheKey::default()
                };
                self.notices.refuse_request(&key, None);
                self.refused.insert(name);
            }
            _ => {
                let millis = [0, 1, 20, 100, 500, 1_000, 11_000][self.rng.below(7) as usize];
                self.now += Duration::from_millis(millis);
                self.take();
            }
        }
    }

    /// Ends all requests. Each has an outcome within the bound, or at the stop of the server.
    fn end(mut self) -> Tally {
        if self.below(3) == 0 {
            // As the server does when it stops.
            self.take();
            let failed = self.notices.fail_all();
            assert!(failed.iter().all(|notice| !notice.is_stored));
            let mut failed: Vec<String> = failed.into_iter().map(|one| one.request_id).collect();
            let expected: Vec<String> =
                self.requests.keys().map(|(_, name)| name.clone()).collect();
            failed.sort();
            assert_eq!(failed, expected);
        } else {
            let all: Vec<Who> = self.requests.keys().cloned().collect();
            all.iter().for_each(|who| self.end_session(who));
            // Stores that never end.
            self.take();
            self.now += LATE_STORES + LONGEST_COPY;
            self.take();
            assert_eq!(self.requests.len(), 0);
        }
        self.requests.clear();
        assert!(self.notices.is_idle());
        self.tally
    }
}

#[test]
fn each_request_has_one_outcome_and_only_one_that_every_rank_has_stored_is_finished() {
    let mut sum = Tally::default();
    for seed in 0..rounds(300, 10_000) as u64 {
        println!("seed {seed}");
        let mut rig = Rig::new(seed);
        (0..200).for_each(|_| rig.step());
        let tally = rig.end();
        sum.finished += tally.finished;
        sum.failed += tally.failed;
        sum.failed_by_clear += tally.failed_by_clear;
        sum.put_off += tally.put_off;
    }
    println!("{sum:?}");
    let counts = [sum.finished, sum.failed, sum.failed_by_clear, sum.put_off];
    assert!(counts.into_iter().all(|count| count > 100), "{sum:?}");
}
