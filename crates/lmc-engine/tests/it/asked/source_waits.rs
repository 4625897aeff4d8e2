//! Seeded schedules of prompts that wait for a source: it stores chunk by chunk, fails, ends or is late at any
//! moment, pushes the same chunks, and clears and evictions come between.

use std::collections::HashSet;
use std::sync::atomic::AtomicBool;

use futures_util::FutureExt as _;
use lmc_backend::conformance::Rng;
use lmc_backend::{FailedSlot, now};
use lmc_testkit::rounds;
use tokio::time::{sleep, timeout};

use super::pushed::{Used, run_of};
use super::*;

/// Time that a source has for its answer, and a read for its bytes.
const ANSWER: Duration = Duration::from_millis(20);
const READ: Duration = Duration::from_secs(2);
/// Longest time from the end of a source to that of a wait, besides the pause between two questions: an
/// answer of a busy source, and a read.
const ENDED: Duration = Duration::from_millis(300).saturating_add(READ);

/// Faults of a source, each once in this number of calls; 0 for never.
#[derive(Debug, Default, Clone, Copy)]
struct Faults {
    lost: u64,
    failed: u64,
    missed: u64,
    /// Longest time of an answer in milliseconds.
    delay: u64,
}

/// A tier of one source, whose engine computes what it does not have.
#[derive(Debug)]
struct Source {
    inner: MemoryBackend,
    faults: Faults,
    rng: Mutex<Rng>,
    writing: Mutex<HashSet<ChunkKey>>,
    /// True while it may write more.
    is_computing: AtomicBool,
    questions: AtomicU64,
}

impl Source {
    fn new(seed: u64, faults: Faults) -> Arc<Self> {
        Arc::new(Self {
            inner: MemoryBackend::shared(),
            faults,
            rng: Mutex::new(Rng::new(seed)),
            writing: Mutex::default(),
            is_computing: AtomicBool::new(true),
            questions: AtomicU64::new(0),
        })
    }

    fn is_fault(&self, once_in: u64) -> bool {
        once_in > 0 && self.rng.lock().expect("no panic").below(once_in) == 0
    }

    fn delay(&self) -> Duration {
        let most = self.faults.delay * 1000;
        let micros = self.rng.lock().expect("no panic").below(most + 1);
        Duration::from_micros(micros)
    }

    fn state_of(&self, key: &ChunkKey, is_awaited: bool) -> Located {
        if !self.is_computing.load(Ordering::Relaxed) {
            return Located::Absent;
        }
        match self.writing.lock().expect("no panic").contains(key) {
            true => Located::Pending,
            false if is_awaited => Located::Expected,
            false => Located::Absent,
        }
    }
}

impl Backend for Source {
    lmc_backend::forward!(inner: clear clears usage health close);

    fn name(&self) -> &str {
        "source"
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
        self.questions.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            if self.is_fault(self.faults.lost) {
                tokio::time::sleep_until(deadline.into()).await;
                // As a peer that is busy does.
                let busy = |key| match self.state_of(key, hint.wait.is_some()) {
                    Located::Expected => Ok(Located::Expected),
                    _ => Err(BackendError::Deadline),
                };
                return keys.iter().map(busy).collect();
            }
            sleep(self.delay()).await;
            let mut located = self.inner.locate(keys, hint, deadline).await;
            for (one, key) in located.iter_mut().zip(keys) {
                if matches!(one, Ok(Located::Absent)) {
                    *one = Ok(self.state_of(key, hint.wait.is_some()));
                }
            }
            located
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        let fails = self.is_fault(self.faults.failed);
        if fails || self.is_fault(self.faults.missed) {
            let not_read = |item: LoadItem| match fails {
                true => Loaded::Failed {
                    error: BackendError::Deadline,
                    slot: FailedSlot::Released(item.slot),
                },
                false => Loaded::Miss(item.slot),
            };
            return ready(items.into_iter().map(not_read).collect::<Vec<_>>());
        }
        let read = async move {
            sleep(self.delay()).await;
            self.inner.load(items, deadline)
        };
        Box::pin(read.flatten_stream())
    }
}

/// A prompt, as its source computes it.
#[derive(Clone)]
struct Prefill {
    source: Arc<Source>,
    ranks: Vec<Rank>,
    stored: u64,
    /// Longest time for one chunk in milliseconds.
    pace: u64,
    seed: u64,
}

impl Prefill {
    async fn compute(&self) {
        let mut rng = Rng::new(self.seed);
        for number in 0..self.stored {
            sleep(Duration::from_millis(rng.below(self.pace + 1))).await;
            let keys = self.ranks.iter();
            let keys: Vec<_> = keys.map(|rank| key(SPACE, rank.kv_rank, number)).collect();
            let writing = &self.source.writing;
            writing.lock().expect("no panic").extend(&keys);
            for written in &keys {
                sleep(Duration::from_millis(rng.below(self.pace / 4 + 1))).await;
                let one = number..number + 1;
                put_rank(&self.source.inner, SPACE, written.kv_rank, one);
                writing.lock().expect("no panic").remove(written);
            }
        }
    }
}

/// Something that happens at any moment of a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Nothing,
    SourceEnds,
    Clear,
    Evict,
}

/// Waits by what they brought.
#[derive(Debug, Default)]
struct Tally {
    whole: u64,
    in_part: u64,
    nothing: u64,
}

async fn schedule(seed: u64, mut rng: Rng) -> Tally {
    let one_of = |rng: &mut Rng, choices: [u64; 4]| choices[rng.below(4) as usize];
    let is_clean = rng.below(2) == 0;
    let faults = Faults {
        lost: one_of(&mut rng, [0, 0, 20, 4]),
        failed: one_of(&mut rng, [0, 0, 20, 4]),
        missed: one_of(&mut rng, [0, 0, 20, 4]),
        delay: one_of(&mut rng, [1, 1, 15, 40]),
    };
    let faults = if is_clean { Faults::default() } else { faults };
    let source = Source::new(seed, faults);
    let pool = [3, 64, 64, 64][rng.below(4) as usize];
    let (on, tiers) = (runtime::Handle::current(), vec![Arc::clone(&source) as _]);
    let engine = engine_on(Some(&on), pool, tiers, |config, policy| {
        config.pending_timeout = Duration::from_millis(100);
        config.promotion_timeout = READ;
        policy.locate_timeout = ANSWER;
    });
    engine.host().set_book(Arc::new(Used));
    let chunks = 1 + rng.below(8);
    let ranks = [RANK, Rank { kv_rank: 1, ..RANK }];
    let ranks = ranks[..1 + rng.below(2) as usize].to_vec();
    let prefill = Prefill {
        source: Arc::clone(&source),
        ranks: ranks.clone(),
        stored: if rng.below(2) == 0 {
            chunks
        } else {
            rng.below(chunks)
        },
        pace: one_of(&mut rng, [1, 20, 100, 1_000]),
        seed,
    };
    // The source says when the request is over.
    let says_end = rng.below(2) == 0;
    let computing = {
        let prefill = prefill.clone();
        tokio::spawn(async move {
            prefill.compute().await;
            if says_end {
                prefill.source.is_computing.store(false, Ordering::Relaxed);
            }
            now()
        })
    };
    let wait = Duration::from_millis(one_of(&mut rng, [10, 1_000, 60_000, 60_000]));
    let mut waits = Vec::new();
    let all_leave = rng.below(4) == 0;
    for _ in 0..1 + rng.below(2) {
        let hint = LocateHint::default()
            .with_sources(Arc::new(["source".to_owned()]))
            .with_wait(Some(wait));
        let lookup = engine.lookup(request(&ranks, 0..chunks).with_hint(hint));
        let leaves =
            (all_leave || rng.below(4) == 0).then(|| Duration::from_millis(rng.below(500)));
        waits.push(tokio::spawn(async move {
            let begun = now();
            let found = timeout(leaves.unwrap_or(Duration::MAX), lookup.wait()).await;
            (found.ok(), now() - begun, now())
        }));
    }
    if rng.below(3) == 0 {
        let (engine, after) = (engine.clone(), Duration::from_millis(rng.below(2_000)));
        tokio::spawn(async move {
            sleep(after).await;
            engine.host().receive(run_of(0..chunks), "peer", READ).await;
        });
    }
    let event = [
        Event::Nothing,
        Event::SourceEnds,
        Event::Clear,
        Event::Evict,
    ];
    let event = event[rng.below(4) as usize];
    sleep(Duration::from_millis(rng.below(prefill.pace * 8))).await;
    let mut over_at = None;
    match event {
        Event::Nothing => {}
        Event::SourceEnds => {
            computing.abort();
            source.is_computing.store(false, Ordering::Relaxed);
            over_at = Some(now());
        }
        Event::Clear => {
            let clears = Clears::from_entries([(StartId::new([3; 16]), 1)]).expect("one");
            let learned = engine.clear_log().learn(&clears, "a peer");
            assert!(learned.expect("few clears"));
            over_at = Some(now());
        }
        Event::Evict => {
            engine.clear_dram(InUse::Keep);
        }
    }
    let computed = computing.await.ok();
    over_at = over_at.or(computed.filter(|_| says_end));
    let mut tally = Tally::default();
    for waiting in waits {
        let (found, took, ended) = waiting.await.expect("no lookup panics");
        let case = format!("{event:?}, {faults:?}, wait {wait:?}");
        // The service takes the leases back then.
        let longest = wait + Duration::from_secs(1) + 2 * engine.lookup_timeout();
        assert!(took <= longest, "{case}: {took:?}");
        if let Some(by) = over_at.map(|over| over + took / 50 + ENDED) {
            let late = ended.saturating_duration_since(by);
            assert!(late.is_zero(), "{case}: a wait went on for {late:?}");
        }
        let Some(found) = found else {
            continue;
        };
        let hits = found.hits as u64;
        assert!(hits <= prefill.stored);
        for rank in &found.ranks {
            assert_eq!(rank.leases.len(), found.hits);
            for (slot, number) in rank.leases.iter().zip(0..) {
                let key = key(SPACE, rank.rank.kv_rank, number);
                check_value(&key, slot.bytes()).expect("the bytes that were computed");
            }
        }
        let is_in_time = computed.is_some_and(|computed| computed + READ < ended) || says_end;
        if is_clean && pool > 3 && event == Event::Nothing && wait > READ && is_in_time {
            assert_eq!(hits, prefill.stored, "{case}: what is stored did not come");
        }
        match hits {
            0 => tally.nothing += 1,
            _ if hits == chunks => tally.whole += 1,
            _ => tally.in_part += 1,
        }
    }
    // Reads that were given up end, and pushes.
    sleep(2 * READ + ENDED).await;
    let questions = || source.questions.load(Ordering::Relaxed);
    let before = questions();
    sleep(READ).await;
    assert_eq!(questions(), before, "a wait that was given up goes on");
    let usage = engine.usage();
    assert_eq!(
        (usage.leases, usage.reserved_slots),
        (0, 0),
        "something is held"
    );
    assert_eq!(usage.used_bytes, usage.chunk_bytes, "a slot is lost");
    tally
}

#[test]
fn every_wait_ends_in_time_and_leaves_nothing_whatever_becomes_of_its_source() {
    let mut sum = Tally::default();
    for seed in 0..rounds(400, 3_000) as u64 {
        println!("seed {seed}");
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build();
        let runtime = runtime.expect("a runtime");
        let tally = runtime.block_on(schedule(seed, Rng::new(seed)));
        sum.whole += tally.whole;
        sum.in_part += tally.in_part;
        sum.nothing += tally.nothing;
    }
    println!("{sum:?}");
    let counts = [sum.whole, sum.in_part, sum.nothing];
    assert!(counts.into_iter().all(|count| count > 10), "{sum:?}");
}
