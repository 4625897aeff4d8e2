//! Random calls of the session machine against a model: leases, hits and answers agree after each.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use lmc_engine::{
    CacheEngine, EngineConfig, EngineContext, EngineHost, OwnerId, StoreRequest, StoreStart,
    TenantId,
};
use lmc_key::{ChunkHash, ChunkKey};
use lmc_memory::ArenaConfig;
use lmc_testkit::rounds;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;

const CLIENTS: u64 = 2;
const NAMES: [&str; 2] = ["a", "b"];
const RANKS: u16 = 2;
/// Chunks of the prompt that all requests have.
const CHUNKS: usize = 6;

/// A request: its connection and the number of its name.
type Who = (u64, usize);

#[derive(Clone, Debug)]
enum Op {
    /// Looks up: some chunks are leased at once, or are being promoted.
    Lookup {
        who: Who,
        first: usize,
        hits: usize,
        readers: u32,
        promoting: bool,
    },
    /// The promotion of the request's lookup ends, or that of an earlier one.
    Promoted {
        who: Who,
        hits: usize,
        is_earlier: bool,
    },
    Wait {
        who: Who,
        seconds: u64,
    },
    ReaderDone {
        who: Who,
        rank: u16,
        chunks: Range<usize>,
    },
    Free {
        who: Who,
        first: usize,
        count: usize,
        rank: Option<u16>,
        chunks: Range<usize>,
        readers: u32,
    },
    /// Time passes, and what is over ends.
    Pass {
        seconds: u64,
    },
    End {
        who: Who,
    },
    /// A connection ends.
    Gone {
        client: u64,
    },
    /// A sweep refuses the requests of a connection.
    Sweep {
        client: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let who = || (0..CLIENTS, 0..NAMES.len());
    let range = || (0..CHUNKS, 0..=CHUNKS).prop_map(|(from, len)| from..from + len);
    prop_oneof![
        6 => (who(), 0..CHUNKS, 0..=CHUNKS, 1..4_u32, any::<bool>()).prop_map(
            |(who, first, hits, readers, promoting)| Op::Lookup {
                who,
                first,
                hits: hits.min(CHUNKS - first),
                readers,
                promoting,
            }
        ),
        4 => (who(), 0..=CHUNKS, prop::bool::weighted(0.3))
            .prop_map(|(who, hits, is_earlier)| Op::Promoted { who, hits, is_earlier }),
        4 => (who(), 0..20_u64).prop_map(|(who, seconds)| Op::Wait { who, seconds }),
        6 => (who(), 0..RANKS, range())
            .prop_map(|(who, rank, chunks)| Op::ReaderDone { who, rank, chunks }),
        3 => (who(), 0..3_usize, 0..3_usize, prop::option::of(0..RANKS), range(), 0..3_u32).prop_map(
            |(who, first, count, rank, chunks, readers)| Op::Free {
                who, first, count, rank, chunks, readers,
            }
        ),
        3 => (0..30_u64).prop_map(|seconds| Op::Pass { seconds }),
        2 => who().prop_map(|who| Op::End { who }),
        1 => (0..CLIENTS).prop_map(|client| Op::Gone { client }),
        1 => (0..CLIENTS).prop_map(|client| Op::Sweep { client }),
    ]
}

fn space() -> SpaceId {
    SpaceId::new([7; 16])
}

fn key(rank: u16, chunk: usize) -> ChunkKey {
    ChunkKey {
        space: space(),
        kv_rank: rank,
        group: 0,
        hash: ChunkHash::new([chunk as u8 + 1; 32]),
    }
}

/// An engine that has every chunk of every rank.
fn engine() -> &'static CacheEngine {
    static ENGINE: LazyLock<CacheEngine> = LazyLock::new(|| {
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
        let engine = EngineConfig::default()
            .start(EngineContext::new(Arc::new(arena), EngineHost::default()))
            .expect("an engine");
        for rank in 0..RANKS {
            for chunk in 0..CHUNKS {
                let request = StoreRequest {
                    key: key(rank, chunk),
                    parent: None,
                    tenant: TenantId(0),
                    len: 4096,
                };
                let [StoreStart::Reserved(ticket)] =
                    <[_; 1]>::try_from(engine.store(OwnerId(0), ClearsId::NONE, &[request]))
                        .expect("one answer")
                else {
                    panic!("the pool is large enough");
                };
                engine.commit(vec![ticket]);
            }
        }
        engine
    });
    &ENGINE
}

fn holds(first: usize, hits: usize, readers: u32) -> Vec<RankHold> {
    let hold = |rank| {
        let keys: Vec<_> = (first..first + hits)
            .map(|chunk| key(rank, chunk))
            .collect();
        let leases = engine()
            .acquire(OwnerId(1), ClearsId::NONE, &keys)
            .expect("all are there");
        RankHold::new(space(), rank, first, leases, readers)
    };
    match hits {
        0 => Vec::new(),
        _ => (0..RANKS).map(hold).collect(),
    }
}

/// The model of a request's lookup.
#[derive(Debug, Default)]
struct Expected {
    number: u64,
    hits: Option<u64>,
    first: usize,
    /// Readers that each held chunk still has, by hold.
    held: Vec<BTreeMap<usize, u32>>,
    expires: u64,
    /// Waiters, with the second at which each gives up.
    waiting: Vec<(usize, u64)>,
}

impl Expected {
    fn hold(&mut self, hits: usize, readers: u32) {
        let chunks = self.first..self.first + hits;
        let hold = chunks.map(|chunk| (chunk, readers)).collect();
        self.hits = Some(hits as u64);
        self.held = match hits {
            0 => Vec::new(),
            _ => vec![hold; usize::from(RANKS)],
        };
    }

    fn release(hold: &mut BTreeMap<usize, u32>, chunks: &Range<usize>, readers: u32) {
        hold.retain(|chunk, left| {
            if chunks.contains(chunk) {
                *left = left.saturating_sub(readers);
            }
            *left > 0
        });
    }
}

#[derive(Default)]
struct Rig {
    sessions: Sessions,
    requests: BTreeMap<Who, Expected>,
    numbers: u64,
    second: u64,
    waiters: usize,
    /// Answers by waiter: what each received, and what it should be.
    answers: Arc<Mutex<BTreeMap<usize, Vec<Reply>>>>,
    expected: BTreeMap<usize, Reply>,
}

const LEASE_SECONDS: u64 = 40;

impl Rig {
    fn now(&self, start: Instant) -> Instant {
        start + Duration::from_secs(self.second)
    }

    fn answer(&mut self, waiting: Vec<(usize, u64)>, reply: &Reply) {
        for (waiter, _) in waiting {
            let twice = self.expected.insert(waiter, reply.clone());
            assert!(twice.is_none(), "the model answers each once");
        }
    }

    /// A request is over: its waiters are answered with 0.
    fn over(&mut self, who: Who) {
        if let Some(request) = self.requests.remove(&who) {
            self.answer(request.waiting, &Reply::Int(0));
        }
    }

    fn run(&mut self, op: &Op, start: Instant) {
        let now = self.now(start);
        let client = ClientId::new;
        let instant = |second: u64| start + Duration::from_secs(second);
        match op.clone() {
            Op::Lookup {
                who,
                first,
                hits,
                readers,
                promoting,
            } => {
                self.numbers += 1;
                let mut expected = Expected {
                    number: self.numbers,
                    first,
                    expires: self.second + LEASE_SECONDS,
                    ..Expected::default()
                };
                let lookup = match promoting {
                    true => Lookup::promoting(self.numbers, instant(expected.expires)),
                    false => {
                        expected.hold(hits, readers);
                        let holds = holds(first, hits, readers);
                        Lookup::known(self.numbers, hits as u64, holds, instant(expected.expires))
                    }
                };
                let new = || Session::new(client(who.0), now, ClearsId::NONE);
                let session = self.sessions.begin(client(who.0), NAMES[who.1], new);
                if let Some(before) = session.set_lookup(lookup, ClearsId::NONE) {
                    before.end();
                }
                self.over(who);
                self.requests.insert(who, expected);
            }
            Op::Promoted {
                who,
                hits,
                is_earlier,
            } => {
                let Some(request) = self.requests.get_mut(&who) else {
                    return;
                };
                let number = request.number - u64::from(is_earlier);
                let hits = hits.min(CHUNKS - request.first);
                let expires = self.second + LEASE_SECONDS;
                let holds = holds(request.first, hits, 1);
                let session = match is_earlier {
                    true => self.sessions.of(client(who.0), NAMES[who.1]),
                    false => self.sessions.looking_up(NAMES[who.1], number),
                };
                let promoted = match session {
                    Some(session) => {
                        session.promoted(number, (hits as u64, Vec::new()), holds, instant(expires))
                    }
                    None => Err(holds),
                };
                let counts = !is_earlier && request.hits.is_none();
                assert_eq!(promoted.is_ok(), counts);
                for waiter in promoted.unwrap_or_default() {
                    waiter.tell(Reply::Int(hits as u64));
                }
                if counts {
                    request.hold(hits, 1);
                    request.expires = expires;
                    let waiting = mem::take(&mut request.waiting);
                    self.answer(waiting, &Reply::Int(hits as u64));
                }
            }
            Op::Wait { who, seconds } => {
                let waiter = self.waiters;
                self.waiters += 1;
                let answers = Arc::clone(&self.answers);
                let tell = move |reply| answers.lock().entry(waiter).or_default().push(reply);
                let wait = Wait::new(
                    client(who.0),
                    NAMES[who.1].to_owned(),
                    seconds as f64,
                    false,
                    now,
                );
                let asked = Waiter::new(&wait, Box::new(tell));
                let session = self.sessions.of(client(who.0), NAMES[who.1]);
                let refused = match session {
                    Some(session) => session.wait(asked).err(),
                    None => Some((asked, 0)),
                };
                if let Some((asked, hits)) = refused {
                    asked.tell(Reply::Int(hits));
                }
                match self.requests.get_mut(&who) {
                    Some(request) if request.hits.is_none() => {
                        request.waiting.push((waiter, self.second + seconds));
                    }
                    known => {
                        let hits = known.and_then(|request| request.hits).unwrap_or(0);
                        self.expected.insert(waiter, Reply::Int(hits));
                    }
                }
            }
            Op::ReaderDone { who, rank, chunks } => {
                if let Some(session) = self.sessions.of(client(who.0), NAMES[who.1]) {
                    drop(session.reader_done(space(), rank, &chunks));
                }
                let request = self.requests.get_mut(&who);
                let hold = request.and_then(|request| request.held.get_mut(usize::from(rank)));
                if let Some(hold) = hold {
                    Expected::release(hold, &chunks, 1);
                }
            }
            Op::Free {
                who,
                first,
                count,
                rank,
                chunks,
                readers,
            } => {
                let session = self.sessions.of(client(who.0), NAMES[who.1]);
                let freed =
                    session.and_then(|session| session.free(first, count, rank, &chunks, readers));
                let request = self.requests.get_mut(&who);
                let held = request.map_or(0, |request| request.held.len());
                assert_eq!(freed.is_some(), first < held);
                drop(freed);
                if let Some(request) = self.requests.get_mut(&who) {
                    let holds = request.held.iter_mut().enumerate().skip(first).take(count);
                    for (number, hold) in holds {
                        if rank.is_none_or(|rank| usize::from(rank) == number) {
                            Expected::release(hold, &chunks, readers);
                        }
                    }
                }
            }
            Op::Pass { seconds } => {
                self.second += seconds;
                self.pass(start);
            }
            Op::End { who } => {
                let ended = self.sessions.end(client(who.0), NAMES[who.1]);
                assert_eq!(ended.is_some(), self.requests.contains_key(&who));
                if let Some(session) = ended {
                    session.end();
                }
                self.over(who);
            }
            Op::Gone { client: gone } => {
                for name in self.sessions.take_names(client(gone)) {
                    let ended = self.sessions.end(client(gone), &name);
                    ended.expect("its name is listed").end();
                }
                (0..NAMES.len()).for_each(|name| self.over((gone, name)));
            }
            Op::Sweep { client: refused } => {
                let names = self.sessions.to_visit();
                let ended = self
                    .sessions
                    .sweep(names, |session| session.client != client(refused));
                assert!(
                    ended
                        .iter()
                        .all(|session| session.client == client(refused))
                );
                ended.into_iter().for_each(Session::end);
                (0..NAMES.len()).for_each(|name| self.over((refused, name)));
            }
        }
    }

    /// Does what a tick does: waiters past their deadline are answered with 0, then lookups whose
    /// time is over lose their leases.
    fn pass(&mut self, start: Instant) {
        let now = self.now(start);
        let all: Vec<Who> = self.requests.keys().copied().collect();
        for who in all {
            let client = ClientId::new(who.0);
            let session = self.sessions.of(client, NAMES[who.1]);
            let session = session.expect("the model has it");
            for waiter in session.take_timed_out(now) {
                waiter.tell(Reply::None);
            }
            let expired = session.expire(now);
            let request = self.requests.get_mut(&who).expect("it is a key");
            let second = self.second;
            let timed_out = request
                .waiting
                .extract_if(.., |(_, until)| *until <= second);
            let timed_out: Vec<_> = timed_out.collect();
            let is_over =
                request.expires <= second && !(request.hits.is_some() && request.held.is_empty());
            let held: usize = request.held.iter().map(BTreeMap::len).sum();
            assert_eq!(
                expired.as_ref().map(|(leases, _)| *leases),
                is_over.then_some(held)
            );
            if let Some((_, lookup)) = expired {
                lookup.end();
            }
            let mut unanswered = Vec::new();
            if is_over {
                request.hits = Some(request.hits.unwrap_or(0));
                request.held.clear();
                unanswered = mem::take(&mut request.waiting);
            }
            self.answer(timed_out, &Reply::None);
            self.answer(unanswered, &Reply::Int(0));
        }
    }

    fn check(&mut self) {
        let held = self.requests.values().flat_map(|request| &request.held);
        let held: usize = held.map(BTreeMap::len).sum();
        assert_eq!(engine().leases(), held as u64, "leases");
        assert_eq!(self.sessions.len(), self.requests.len());
        for client in 0..CLIENTS {
            let of = self.requests.keys().filter(|who| who.0 == client).count();
            assert_eq!(self.sessions.len_of(ClientId::new(client)), of);
            for (number, name) in NAMES.iter().enumerate() {
                let session = self.sessions.of(ClientId::new(client), name);
                let hits = session.map(|session| session.hits());
                let expected = self.requests.get(&(client, number));
                let expected = expected.map(|one| one.hits.map_or(Hits::Promoting, Hits::Known));
                assert_eq!(hits, expected);
            }
        }
        let answers = self.answers.lock();
        let answers: BTreeMap<usize, Reply> = answers
            .iter()
            .map(|(&waiter, replies)| {
                assert_eq!(replies.len(), 1, "each is answered once");
                (waiter, replies[0].clone())
            })
            .collect();
        assert_eq!(answers, self.expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(rounds(250, 400) as u32))]

    #[test]
    fn sessions_agree_with_the_model(ops in prop::collection::vec(op(), 1..60)) {
        let start = Instant::now();
        let mut rig = Rig::default();
        for op in &ops {
            rig.run(op, start);
            rig.check();
        }
        for client in 0..CLIENTS {
            rig.run(&Op::Gone { client }, start);
        }
        rig.check();
        prop_assert_eq!(engine().leases(), 0);
        prop_assert_eq!(rig.answers.lock().len(), rig.waiters, "all who waited were answered");
    }
}
