//! Prompts that wait for another engine to compute them.

use std::sync::atomic::AtomicBool;

use lmc_backend::now;
use lmc_engine::InUse;
use tokio::runtime::Runtime;

use super::*;

/// A tier of one source, which is expected to compute what it does not have.
#[derive(Debug)]
struct Computing {
    inner: MemoryBackend,
    is_connected: AtomicBool,
    repeated: AtomicUsize,
    /// Loads that fail, from the next one on.
    failures: AtomicUsize,
}

impl Backend for Computing {
    lmc_backend::forward!(inner: clear clears usage health close);

    fn name(&self) -> &str {
        "computing"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        let take = |left: usize| left.checked_sub(1);
        let order = Ordering::Relaxed;
        match self.failures.fetch_update(order, order, take) {
            Ok(_) => {
                let slots = items.into_iter().map(|item| Loaded::Miss(item.slot));
                ready(slots.collect::<Vec<_>>())
            }
            Err(_) => self.inner.load(items, deadline),
        }
    }

    fn sharing(&self) -> Sharing {
        Sharing::Shared
    }

    fn asks_at_once(&self) -> usize {
        64
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        let is_expected = hint.wait.is_some() && self.is_connected.load(Ordering::Relaxed);
        self.repeated
            .fetch_add(hint.is_repeated.into(), Ordering::Relaxed);
        Box::pin(async move {
            let mut located = self.inner.locate(keys, hint, deadline).await;
            for one in &mut located {
                if is_expected && matches!(one, Ok(Located::Absent)) {
                    *one = Ok(Located::Expected);
                }
            }
            located
        })
    }
}

impl WriteBackend for Computing {
    lmc_backend::forward!(inner: store remove list);
}

struct Prefill {
    source: Arc<Computing>,
    engine: CacheEngine,
}

impl Prefill {
    fn new() -> Self {
        Self::beside(None, Duration::ZERO)
    }

    /// Runs everything on this runtime, so on its clock.
    fn on(runtime: &Runtime) -> Self {
        Self::with(Some(runtime.handle()), None, |_| {})
    }

    /// `pending` is the time to wait for chunks that are being written.
    fn beside(other: Option<Arc<Scripted>>, pending: Duration) -> Self {
        Self::with(None, other, |config| config.pending_timeout = pending)
    }

    fn with(
        runtime: Option<&runtime::Handle>,
        other: Option<Arc<Scripted>>,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Self {
        let source = Arc::new(Computing {
            inner: MemoryBackend::shared(),
            is_connected: AtomicBool::new(true),
            repeated: AtomicUsize::new(0),
            failures: AtomicUsize::new(0),
        });
        let mut tiers: Vec<Arc<dyn Backend>> = vec![Arc::clone(&source) as _];
        tiers.extend(other.map(|other| other as Arc<dyn Backend>));
        let engine = engine_on(runtime, 64, tiers, |config, _| change(config));
        Self { source, engine }
    }

    /// Begins to look up six chunks of these ranks.
    fn look_up(&self, ranks: &[Rank], wait: Duration) -> lmc_engine::Lookup {
        let hint = LocateHint::default()
            .with_sources(Arc::new(["prefill".to_owned()]))
            .with_wait(Some(wait));
        self.engine.lookup(request(ranks, 0..6).with_hint(hint))
    }

    fn compute(&self, numbers: Range<u64>) {
        put(&*self.source, SPACE, numbers);
    }

    fn promoted(&self) -> u64 {
        status(&self.engine, 0).promoted
    }

    /// Begins to look up six chunks, two of which are read while the others are computed.
    fn in_the_middle(&self, wait: Duration) -> lmc_engine::Lookup {
        let lookup = self.look_up(&[RANK], wait);
        let lookup = lookup.try_found().expect_err("nothing is computed yet");
        self.compute(0..2);
        until("they are read", || self.promoted() == 2);
        lookup
    }
}

/// The chunks were read once all were there.
#[test]
fn chunks_are_read_while_the_next_are_computed() {
    let prefill = Prefill::new();
    let lookup = prefill.in_the_middle(DEADLINE);
    prefill.compute(2..5);
    until("they are read", || prefill.promoted() == 5);
    prefill.compute(5..6);
    let found = lookup.wait_blocking();
    assert_eq!((found.hits, found.resident), (6, 0));
    let runs = found.runs();
    assert_eq!(
        runs.iter()
            .map(|run| (run.tier, run.chunks))
            .collect::<Vec<_>>(),
        [(Some(0), 6)]
    );
    for (slot, key) in found.ranks[0].leases.iter().zip(keys(0..6)) {
        check_value(&key, slot.bytes()).expect("the bytes that were computed");
    }
    drop(found);
    assert_idle(&prefill.engine);
}

#[test]
fn a_wait_ends_with_its_time_and_with_its_source() {
    let prefill = Prefill::new();
    let found = prefill.look_up(&[RANK], Duration::from_millis(20));
    assert_eq!(found.wait_blocking().hits, 0);
    let lookup = prefill.in_the_middle(DEADLINE);
    prefill.source.is_connected.store(false, Ordering::Relaxed);
    assert_eq!(lookup.wait_blocking().hits, 2);
    assert_eq!(prefill.look_up(&[RANK], DEADLINE).wait_blocking().hits, 2);
    assert_idle(&prefill.engine);
}

/// The longest wait that a server allows and one millisecond, on a clock that jumps.
#[test]
fn a_wait_of_minutes_ends_at_its_deadline() {
    let mut runtime = Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    for wait in [Duration::from_millis(1), Duration::from_secs(300)] {
        let prefill = Prefill::on(&runtime);
        let waited = runtime.block_on(async {
            let begun = now();
            let found = prefill.look_up(&[RANK], wait).wait().await;
            assert_eq!(found.hits, 0);
            now() - begun
        });
        // A source that answers at the end is waited for.
        assert!(waited >= wait && waited < wait + DEADLINE, "{waited:?}");
    }
}

/// On two busy cores a decode engine computed what its prefill engine's server could not lend at once.
#[test]
fn a_source_that_fails_to_lend_is_asked_again_a_few_times() {
    for (failures, hits) in [(3, 6), (100, 2)] {
        let prefill = Prefill::new();
        let lookup = prefill.in_the_middle(DEADLINE);
        prefill.source.failures.store(failures, Ordering::Relaxed);
        prefill.compute(2..6);
        assert_eq!(lookup.wait_blocking().hits, hits);
        assert_idle(&prefill.engine);
    }
}

/// Such a wait took as long as that for chunks that are being written.
#[test]
fn a_short_wait_is_short_whatever_other_prompts_wait_for() {
    let prefill = Prefill::beside(None, 100 * DEADLINE);
    let found = prefill.look_up(&[RANK], Duration::from_millis(20));
    assert_eq!(found.wait_blocking().hits, 0);
}

#[test]
fn a_wait_ends_with_a_clear_after_which_nothing_comes_under_these_names() {
    let prefill = Prefill::new();
    let lookup = prefill.in_the_middle(100 * DEADLINE);
    prefill.engine.clear(InUse::Keep).expect("a first clear");
    assert!(lookup.wait_blocking().hits <= 2);
    assert_idle(&prefill.engine);
}

#[test]
fn a_dropped_lookup_waits_for_nothing_and_holds_nothing() {
    let prefill = Prefill::new();
    drop(prefill.in_the_middle(10 * DEADLINE));
    until("it has ended", || prefill.engine.leases() == 0);
    let asked = || prefill.source.repeated.load(Ordering::Relaxed);
    until("it asks no more", || {
        let before = asked();
        thread::sleep(Duration::from_millis(50));
        asked() == before
    });
    assert_idle(&prefill.engine);
}

#[test]
fn a_prompt_without_a_wait_takes_what_is_there() {
    let prefill = Prefill::new();
    prefill.compute(0..2);
    assert_eq!(found(&prefill.engine, 0..6).hits, 2);
    assert_eq!(prefill.source.repeated.load(Ordering::Relaxed), 0);
}

/// All tiers were asked every few milliseconds.
#[test]
fn while_a_source_computes_no_other_tier_is_asked_again() {
    let store = Arc::new(Scripted::new());
    let prefill = Prefill::beside(Some(Arc::clone(&store)), Duration::ZERO);
    let lookup = prefill.in_the_middle(DEADLINE);
    let repeated = || prefill.source.repeated.load(Ordering::Relaxed);
    let before = repeated();
    until("the source is asked again and again", || {
        repeated() > before + 20
    });
    prefill.compute(2..6);
    assert_eq!(lookup.wait_blocking().hits, 6);
    let asked = store.questions.lock().expect("no panic").len();
    assert!(asked <= 6, "two for each of three reads at most: {asked}");
    assert_idle(&prefill.engine);
}

#[test]
fn a_chunk_counts_once_every_rank_has_computed_it() {
    let prefill = Prefill::new();
    let second = Rank { kv_rank: 1, ..RANK };
    let lookup = prefill.look_up(&[RANK, second], DEADLINE);
    prefill.compute(0..6);
    put_rank(&*prefill.source, SPACE, 1, 0..3);
    until("both are read", || prefill.promoted() >= 6);
    let lookup = lookup.try_found().expect_err("the second goes on");
    put_rank(&*prefill.source, SPACE, 1, 3..6);
    let found = lookup.wait_blocking();
    assert_eq!((found.hits, found.ranks.len()), (6, 2));
    drop(found);
    assert_eq!(prefill.promoted(), 12, "each once");
    assert_idle(&prefill.engine);
}
