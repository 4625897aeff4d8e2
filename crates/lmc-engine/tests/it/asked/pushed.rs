//! Chunks that pass between hosts: pushed here, pushed to others, and lent.

use lmc_backend::ChunkRun;
use lmc_engine::InUse;
use tokio::runtime::Runtime;

use super::*;

/// A tier that has chunks, and notes the pushes through it and the advice of questions.
#[derive(Debug)]
struct Passing {
    inner: Gated<MemoryBackend>,
    /// True if it answers only what pushes ask.
    is_busy: bool,
    pushed: Mutex<Vec<(ChunkRun, String)>>,
    advice: Mutex<Vec<LocateHint>>,
}

impl Passing {
    fn new(is_busy: bool) -> Arc<Self> {
        Arc::new(Self {
            inner: Gated::new(MemoryBackend::shared()),
            is_busy,
            pushed: Mutex::default(),
            advice: Mutex::default(),
        })
    }
}

impl Backend for Passing {
    lmc_backend::forward!(inner: load clear clears usage health close);

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        let mut advice = self.advice.lock().expect("no test failed");
        advice.push(hint.clone());
        if self.is_busy && !hint.sources_only {
            let late = keys.iter().map(|_| Err(BackendError::Deadline)).collect();
            return Box::pin(async { late });
        }
        self.inner.locate(keys, hint, deadline)
    }

    fn name(&self) -> &str {
        "passing"
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn push(&self, run: ChunkRun, to: &str) -> bool {
        let mut pushed = self.pushed.lock().expect("no test failed");
        pushed.push((run, to.to_owned()));
        to == "known"
    }
}

#[test]
fn an_engine_that_drains_wants_nothing_that_is_pushed() {
    let receiver = Receiver::new();
    receiver.engine.begin_drain();
    assert_eq!(receiver.receive("peer", 0..4), (0, false));
    receiver.engine.end_drain();
    assert_eq!(receiver.receive("peer", 0..4), (4, true));
}

/// A book of one space.
#[derive(Debug)]
pub(super) struct Used;

impl SpaceBook for Used {
    fn tenant(&self, _: SpaceId) -> TenantId {
        TenantId::default()
    }

    fn spaces(&self) -> Vec<HostSpace> {
        Vec::new()
    }

    fn is_used(&self, space: SpaceId) -> bool {
        space == SPACE
    }
}

/// An engine of 64 chunks, which takes 8 that one peer has pushed, and 16 of all.
struct Receiver {
    engine: CacheEngine,
    runtime: Runtime,
}

impl Receiver {
    /// Returns one whose source has the first 60 chunks.
    fn new() -> Self {
        let source = MemoryBackend::shared();
        put(&source, SPACE, 0..60);
        Self::of(Arc::new(source))
    }

    fn of(source: Arc<dyn Backend>) -> Self {
        Self::waiting(source, DEADLINE)
    }

    /// Returns one that waits for chunks which are on their way.
    fn waiting(source: Arc<dyn Backend>, timeout: Duration) -> Self {
        let runtime = Runtime::new().expect("a runtime");
        let engine = engine_with(64, vec![source], |config, _| {
            config.pending_timeout = timeout;
        });
        engine.host().set_book(Arc::new(Used));
        Self { engine, runtime }
    }

    fn receive(&self, peer: &str, numbers: Range<u64>) -> (usize, bool) {
        self.receive_run(peer, run_of(numbers))
    }

    /// Returns the chunks that are there, and whether the others are wanted.
    fn receive_run(&self, peer: &str, run: ChunkRun) -> (usize, bool) {
        let host = self.engine.host();
        let received = self.runtime.block_on(host.receive(run, peer, DEADLINE));
        (received.chunks, received.is_wanted)
    }
}

pub(super) fn run_of(numbers: Range<u64>) -> ChunkRun {
    ChunkRun {
        parent: numbers
            .start
            .checked_sub(1)
            .map(|before| key(SPACE, 0, before)),
        keys: keys(numbers),
        chunk_bytes: CHUNK,
    }
}

/// Else a prefill engine whose requests never come here could take all memory.
#[test]
fn what_is_pushed_and_not_found_yet_takes_a_quarter_of_the_memory() {
    let receiver = Receiver::new();
    assert_eq!(receiver.receive("a", 0..10), (8, true));
    // What is there already takes no more, what is found none.
    assert_eq!(receiver.receive("a", 0..8), (8, true));
    assert_eq!(receiver.receive("b", 10..20), (8, true));
    assert_eq!(receiver.receive("c", 20..21), (0, true));
    let before = receiver.engine.stats();
    assert_eq!(found(&receiver.engine, 0..6).resident, 6);
    assert_eq!(receiver.receive("a", 20..30), (6, true));
    // Nor does what is gone again.
    receiver.engine.remove(&keys(20..24));
    assert_eq!(receiver.receive("a", 30..32), (2, true));
    // Other promotions are not bounded by it.
    assert_eq!(found(&receiver.engine, 32..60).hits, 28);
    // A push is neither a lookup nor a use.
    let after = receiver.engine.stats();
    assert_eq!(after.hits - before.hits, 6);
    assert_idle(&receiver.engine);
}

/// A quarter of the memory is all that pushes can take in a minute, and the chunks that were used least
/// recently give it.
#[test]
fn pushes_evict_nothing_of_the_three_quarters_that_were_used_last() {
    let source = MemoryBackend::shared();
    put(&source, SPACE, 0..120);
    let receiver = Receiver::of(Arc::new(source));
    assert_eq!(found(&receiver.engine, 0..64).hits, 64);
    assert_eq!(found(&receiver.engine, 0..48).resident, 48);
    assert_eq!(receiver.receive("a", 64..80), (8, true));
    assert_eq!(receiver.receive("b", 80..100), (8, true));
    assert_eq!(receiver.receive("c", 100..120), (0, true));
    assert_eq!(found(&receiver.engine, 0..48).resident, 48);
    assert_idle(&receiver.engine);
}

#[test]
fn chunks_that_do_not_come_leave_nothing_behind() {
    let receiver = Receiver::new();
    let wrong = |chunk_bytes, numbers| ChunkRun {
        chunk_bytes,
        ..run_of(numbers)
    };
    assert_eq!(receiver.receive_run("a", wrong(CHUNK - 1, 0..6)), (0, true));
    assert_eq!(receiver.receive("a", 58..64), (2, true));
    assert_eq!(receiver.receive("a", 0..6), (6, true));
    assert_eq!(receiver.receive("a", 6..8), (0, true));
    // A peer that is wrong about the length of a chunk removes none.
    assert_eq!(receiver.receive_run("a", wrong(u64::MAX, 0..1)), (1, true));
    assert_eq!(receiver.receive_run("b", wrong(u64::MAX, 6..7)), (0, true));
    // A short chunk takes a whole slot.
    assert_eq!(receiver.receive_run("b", wrong(1, 6..20)), (0, true));
    assert_idle(&receiver.engine);
}

/// The chunks of an unknown space once counted for the common tenant.
#[test]
fn what_no_engine_here_would_ask_for_is_not_read() {
    let receiver = Receiver::new();
    let other = ChunkRun {
        keys: vec![key(OTHER, 0, 1)],
        chunk_bytes: CHUNK,
        parent: None,
    };
    assert_eq!(receiver.receive_run("a", other), (0, false));
    receiver.engine.clear(InUse::Remove).expect("a first clear");
    assert_eq!(receiver.receive("a", 0..4), (0, false), "of before it");
    let source = status(&receiver.engine, 0);
    assert_eq!((source.promoted, receiver.engine.usage().chunks), (0, 0));
}

/// Other peers that have such a chunk were once asked too, and judged by the word of its sender.
#[test]
fn the_peer_that_pushes_is_the_only_one_that_is_asked() {
    let source = Passing::new(false);
    put(&source.inner, SPACE, 0..4);
    let receiver = Receiver::of(Arc::clone(&source) as _);
    assert_eq!(receiver.receive("a", 0..4), (4, true));
    let advice = source.advice.lock().expect("no test failed");
    assert!(!advice.is_empty());
    for hint in advice.iter() {
        assert_eq!(
            (&hint.sources[..], hint.sources_only),
            (&["a".to_owned()][..], true)
        );
        assert_eq!(hint.chunk_bytes, Some(CHUNK));
    }
}

#[test]
fn chunks_that_two_peers_push_at_once_are_read_once() {
    let source = Passing::new(false);
    put(&source.inner, SPACE, 0..4);
    let receiver = Receiver::of(Arc::clone(&source) as _);
    source.inner.hold(Operation::Load);
    thread::scope(|scope| {
        let first = scope.spawn(|| receiver.receive("a", 0..4));
        until("it is read", || source.inner.loads() == 4);
        let second = scope.spawn(|| receiver.receive("b", 0..4));
        let is_asked = || receiver.engine.usage().reserved_slots == 4 && !second.is_finished();
        until("the second push waits", is_asked);
        source.inner.release(Operation::Load);
        for push in [first, second] {
            assert_eq!(push.join().expect("no panic"), (4, true));
        }
    });
    assert_eq!(source.inner.loads(), 4);
    assert_idle(&receiver.engine);
}

/// Over a link that is full of pushed bytes a peer answers no question in time, and the engine computed
/// what was on its way.
#[test]
fn a_lookup_waits_for_chunks_that_a_push_brings() {
    let source = Passing::new(true);
    put(&source.inner, SPACE, 0..4);
    let receiver = Receiver::of(Arc::clone(&source) as _);
    source.inner.hold(Operation::Load);
    let lookup = thread::scope(|scope| {
        let push = scope.spawn(|| receiver.receive("a", 0..4));
        until("it is read", || source.inner.loads() == 4);
        let asked = || source.advice.lock().expect("no test failed").len();
        let of_push = asked();
        let lookup = receiver.engine.lookup(request(&[RANK], 0..6));
        until("the peer did not answer", || asked() > of_push);
        let lookup = lookup.try_found().expect_err("nothing is there yet");
        source.inner.open();
        assert_eq!(push.join().expect("a push"), (4, true));
        lookup
    });
    assert_eq!(lookup.wait_blocking().hits, 4);
    assert_idle(&receiver.engine);
}

/// The first of two once took the note of the push away, and the second one found nothing.
#[test]
fn two_lookups_that_wait_for_one_push_both_find_its_chunks() {
    let source = Passing::new(true);
    put(&source.inner, SPACE, 0..4);
    let receiver = Receiver::of(Arc::clone(&source) as _);
    source.inner.hold(Operation::Load);
    let asked = || source.advice.lock().expect("no test failed").len();
    let lookups = thread::scope(|scope| {
        let push = scope.spawn(|| receiver.receive("a", 0..4));
        until("it is read", || source.inner.loads() == 4);
        let look_up = || receiver.engine.lookup(request(&[RANK], 0..4));
        let of_push = asked();
        let lookups = [look_up(), look_up()];
        until("the peer did not answer", || asked() > of_push + 1);
        source.inner.open();
        assert_eq!(push.join().expect("a push"), (4, true));
        assert_eq!(found(&receiver.engine, 0..4).resident, 4);
        lookups
    });
    assert_eq!(lookups.map(|lookup| lookup.wait_blocking().hits), [4, 4]);
    assert_idle(&receiver.engine);
}

/// The peer may have answered too late only because the push took its link.
#[test]
fn tiers_are_asked_again_where_a_push_ends_without_its_chunks() {
    let is_asked_again = || {
        let source = Passing::new(true);
        put(&source.inner, SPACE, 0..4);
        let receiver = Receiver::of(Arc::clone(&source) as _);
        source.inner.hold(Operation::Load);
        let asked = || source.advice.lock().expect("no test failed").len();
        let engine = receiver.engine.clone();
        let push = async move { engine.host().receive(run_of(0..4), "a", DEADLINE).await };
        let push = receiver.runtime.spawn(push);
        until("it is read", || source.inner.loads() == 4);
        let of_push = asked();
        let lookup = receiver.engine.lookup(request(&[RANK], 0..4));
        until("the peer did not answer", || asked() > of_push);
        let before = asked();
        push.abort();
        assert_eq!(lookup.wait_blocking().hits, 0);
        let is_asked_again = asked() > before;
        source.inner.open();
        assert_idle(&receiver.engine);
        is_asked_again
    };
    // Not where the push ends before the lookup has seen it.
    until("a lookup that waits asks again", is_asked_again);
}

#[test]
fn a_push_that_does_not_end_holds_no_lookup_up() {
    let source = Passing::new(true);
    put(&source.inner, SPACE, 0..4);
    let receiver = Receiver::waiting(Arc::clone(&source) as _, Duration::from_millis(20));
    source.inner.hold(Operation::Load);
    thread::scope(|scope| {
        let push = scope.spawn(|| receiver.receive("a", 0..4));
        until("it is read", || source.inner.loads() == 4);
        assert_eq!(found(&receiver.engine, 0..4).hits, 0);
        source.inner.open();
        push.join().expect("a push");
    });
    assert_eq!(found(&receiver.engine, 0..4).hits, 4);
    assert_idle(&receiver.engine);
}

/// A chunk that came alone had no parent, and the heads of prompts were evicted before their tails.
#[test]
fn chunks_that_come_one_after_the_other_are_one_prompt() {
    let receiver = Receiver::new();
    for number in 0..6 {
        assert_eq!(receiver.receive("a", number..number + 1), (1, true));
    }
    let runs = receiver.engine.dram_runs(u64::MAX, |_| true);
    let wanted: Vec<_> = keys(0..6).into_iter().map(|key| (key, CHUNK)).collect();
    assert_eq!(runs, [wanted]);
}

/// Subscribers of events heard that such a chunk went, and not that it had come.
#[test]
fn a_lookup_says_which_of_its_chunks_no_one_has_seen() {
    let receiver = Receiver::new();
    write(&receiver.engine, SPACE, 0, 0..2);
    receiver.receive("a", 0..4);
    let seen = || {
        let found = found(&receiver.engine, 0..4);
        (found.ranks[0].resident, found.ranks[0].seen)
    };
    assert_eq!((seen(), seen()), ((4, 2), (4, usize::MAX)));
}

#[test]
fn what_is_in_dram_is_pushed_by_its_name_after_the_clears() {
    let passing = Passing::new(false);
    let engine = engine(64, vec![Arc::clone(&passing) as _]);
    engine.clear(InUse::Remove).expect("the first one");
    write(&engine, SPACE, 0, 0..2);
    write(&engine, SPACE, 0, 3..5);
    let prompt = |numbers: Range<u64>| -> Vec<_> {
        let parent = |number: u64| number.checked_sub(1).map(|before| key(SPACE, 0, before));
        numbers
            .map(|number| (key(SPACE, 0, number), parent(number)))
            .collect()
    };
    assert!(engine.push(&prompt(0..6), "known"));
    assert!(!engine.push(&prompt(0..1), "stranger"));
    assert!(engine.push(&[], "known") && !engine.push(&[], "stranger"));
    let named = |number: u64| key(SPACE.after(engine.clears_id()), 0, number);
    let run = |numbers: Range<u64>, parent: Option<u64>| ChunkRun {
        keys: numbers.map(named).collect(),
        chunk_bytes: CHUNK,
        parent: parent.map(named),
    };
    let pushed = || std::mem::take(&mut *passing.pushed.lock().expect("no test failed"));
    let runs: Vec<ChunkRun> = pushed().into_iter().map(|(run, _)| run).collect();
    assert_eq!(runs[..2], [run(0..2, None), run(3..5, Some(2))]);
    engine.clear(InUse::Remove).expect("the second one");
    engine.push(&prompt(0..6), "known");
    assert_eq!(pushed()[0].0.keys, [], "they are of before it");
}

/// A book by which all spaces are of one tenant.
#[derive(Debug)]
struct OneTenant(TenantId);

impl SpaceBook for OneTenant {
    fn tenant(&self, space: SpaceId) -> TenantId {
        assert_eq!(space, SPACE);
        self.0
    }

    fn spaces(&self) -> Vec<HostSpace> {
        Vec::new()
    }
}

#[test]
fn what_is_promoted_for_others_counts_for_its_tenant() {
    let disk = Arc::new(MemoryBackend::default());
    put(&*disk, SPACE, 0..4);
    let engine = engine(64, vec![disk]);
    let (tenant, keys) = (TenantId(3), (0..4).map(|number| key(SPACE, 0, number)));
    let keys: Vec<ChunkKey> = keys.collect();
    let runtime = Runtime::new().expect("a runtime");
    engine.host().set_book(Arc::new(OneTenant(tenant)));
    let leased = runtime.block_on(engine.host().lease(&keys, soon()));
    assert!(leased.iter().all(Option::is_some));
    assert_eq!(engine.tenant(tenant).bytes, 4 * CHUNK);
    assert_eq!(engine.tenant(TenantId::default()).bytes, 0);
}
