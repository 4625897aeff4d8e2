//! Loads that take more than half of the time that a prompt has. Timers jump to their end when
//! nothing else is to be done, so that no test waits.

use lmc_backend::{Answers, LoadItem, Loaded};
use lmc_engine::{Miss, MissReason};
use tokio::runtime::Runtime;

use super::*;

const TIMEOUT: Duration = DEADLINE.saturating_mul(10);

/// A shared tier that lets the loads of another one through when it is called itself.
#[derive(Debug)]
struct Opening {
    inner: Gated<MemoryBackend>,
    other: Arc<Gated<MemoryBackend>>,
    /// True if a load opens the other tier, and no question does.
    at_load: bool,
}

impl Backend for Opening {
    lmc_backend::forward!(inner: name sharing clear clears usage health close);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        if !self.at_load {
            self.other.open();
        }
        self.inner.locate(keys, hint, deadline)
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.other.open();
        self.inner.load(items, deadline)
    }
}

impl WriteBackend for Opening {
    lmc_backend::forward!(inner: store remove list);
}

/// A tier with eight chunks whose loads wait.
fn shut(inner: MemoryBackend) -> Gated<MemoryBackend> {
    let gated = Gated::new(inner);
    put(&gated, SPACE, 0..8);
    gated.shut();
    gated
}

/// An engine above these tiers, and the runtime with the paused clock that it runs on.
fn paused(tiers: [Arc<dyn Backend>; 2]) -> (CacheEngine, Runtime) {
    let mut builder = Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    let engine = engine_on(
        Some(runtime.handle()),
        64,
        tiers.into(),
        |config, policy| {
            config.promotion_timeout = TIMEOUT;
            policy.locate_timeout = TIMEOUT;
            policy.write = WritePolicy::Back;
        },
    );
    (engine, runtime)
}

/// Looks eight chunks up, all of which are found, beside others that hold memory. Returns the part of
/// the time that was needed, and for each tier the chunks that it promoted and failed to promote.
fn found_in(tiers: [Arc<dyn Backend>; 2], held: Range<u64>) -> (f64, [(u64, u64); 2]) {
    let (engine, runtime) = paused(tiers);
    write(&engine, SPACE, 0, held.clone());
    engine.pin(&keys(held));
    let lookup = engine.lookup(request(&[RANK], 0..8));
    let (found, time) = runtime.block_on(async {
        let start = tokio::time::Instant::now();
        (lookup.wait().await, start.elapsed())
    });
    assert_eq!(found.hits, 8);
    for (slot, key) in found.ranks[0].leases.iter().zip(keys(0..8)) {
        check_value(&key, slot.bytes()).expect("the bytes that were stored");
    }
    let runs = found.runs();
    drop(found);
    assert_idle(&engine);
    let promoted = [0, 1].map(|tier| {
        let status = status(&engine, tier);
        (status.promoted, status.promote_failed)
    });
    let by_tier = |tier: usize| {
        let of_it = runs.iter().filter(|run| run.tier == Some(tier));
        of_it.map(|run| run.chunks as u64).sum()
    };
    assert_eq!(promoted.map(|(chunks, _)| chunks), [0, 1].map(by_tier));
    (time.div_duration_f64(TIMEOUT), promoted)
}

#[test]
fn a_chunk_whose_tier_hangs_is_read_from_the_next_one_in_half_of_the_time() {
    for media in [MemoryBackend::default, MemoryBackend::shared] {
        let sound = MemoryBackend::shared();
        put(&sound, SPACE, 0..8);
        let (time, promoted) = found_in([Arc::new(shut(media())), Arc::new(sound)], 0..0);
        assert!((0.4..0.6).contains(&time), "{time}");
        assert_eq!(promoted, [(0, 8), (8, 0)]);
    }
}

#[test]
fn the_first_answer_counts_where_two_tiers_load_a_chunk() {
    let late = Arc::new(shut(MemoryBackend::default()));
    let next = Arc::new(Opening {
        inner: shut(MemoryBackend::shared()),
        other: Arc::clone(&late),
        at_load: true,
    });
    let (time, promoted) = found_in([Arc::clone(&late) as _, Arc::clone(&next) as _], 0..0);
    assert!((0.4..0.6).contains(&time), "{time}");
    assert!(next.inner.loads() > 0);
    assert_eq!(promoted, [(8, 0), (0, 0)]);
}

/// The answer of a lookup once named the tier whose bytes were dropped.
#[test]
fn a_chunk_that_two_tiers_load_is_named_by_the_one_whose_bytes_are_kept() {
    let late = Arc::new(shut(MemoryBackend::default()));
    let sound = Gated::new(MemoryBackend::shared());
    put(&sound, SPACE, 0..8);
    let next = Opening {
        inner: sound,
        other: Arc::clone(&late),
        at_load: true,
    };
    let (_, promoted) = found_in([Arc::clone(&late) as _, Arc::new(next)], 0..0);
    assert_eq!(late.loads(), 8);
    assert_eq!(promoted.iter().map(|(chunks, _)| chunks).sum::<u64>(), 8);
}

#[test]
fn a_late_load_goes_on_where_no_other_tier_has_the_chunk_or_there_is_no_memory_for_a_second() {
    let without = Gated::new(MemoryBackend::shared());
    for (inner, held) in [(without, 0..0), (shut(MemoryBackend::shared()), 100..156)] {
        let late = Arc::new(shut(MemoryBackend::default()));
        let next = Arc::new(Opening {
            inner,
            other: Arc::clone(&late),
            at_load: false,
        });
        let (time, promoted) = found_in([late, next], held);
        assert!((0.4..0.6).contains(&time), "{time}");
        assert_eq!(promoted, [(8, 0), (0, 0)]);
    }
}

/// Looks eight chunks up, some of which are in a tier whose loads wait, while another prompt holds all
/// permits of that tier. Returns how many are found, the part of the time that was needed, and the reason
/// why the others are not found.
fn found_beside_a_prompt_that_hangs(
    hung: MemoryBackend,
    has: Range<u64>,
    other: MemoryBackend,
) -> (usize, f64, Option<Miss>) {
    put(&hung, SPACE, has);
    put(&hung, SPACE, 100..112);
    let hung = Arc::new(Gated::new(hung));
    hung.shut();
    let (engine, runtime) = paused([Arc::clone(&hung) as _, Arc::new(other)]);
    let holding = engine.lookup(request(&[RANK], 100..112));
    runtime.block_on(async {
        while hung.loads() < 12 {
            yield_now().await;
        }
    });
    let lookup = engine.lookup(request(&[RANK], 0..8));
    let (found, time) = runtime.block_on(async {
        let start = tokio::time::Instant::now();
        (lookup.wait().await, start.elapsed())
    });
    let hits = found.hits;
    let miss = found.missing.as_ref().map(|missing| engine.miss(missing));
    drop((found, holding));
    runtime.block_on(async {
        while engine.usage().reserved_slots > 0 {
            yield_now().await;
        }
    });
    assert_idle(&engine);
    (hits, time.div_duration_f64(TIMEOUT), miss)
}

/// Such a prompt once waited for the permits until its time was over.
#[test]
fn a_prompt_that_waits_for_permits_of_a_tier_is_read_from_the_next_one_in_half_of_the_time() {
    for media in [MemoryBackend::default, MemoryBackend::shared] {
        let sound = MemoryBackend::shared();
        put(&sound, SPACE, 0..8);
        let (hits, time, miss) = found_beside_a_prompt_that_hangs(media(), 0..8, sound);
        assert_eq!((hits, miss), (8, None));
        assert!((0.4..0.6).contains(&time), "{time}");
    }
}

#[test]
fn a_prompt_waits_for_permits_to_its_end_where_no_other_tier_has_it() {
    let other = MemoryBackend::shared();
    let (hits, time, miss) =
        found_beside_a_prompt_that_hangs(MemoryBackend::default(), 0..8, other);
    // The tier was not asked to read them.
    let late = Miss::probable(MissReason::TierLate(Some(0)));
    assert_eq!((hits, miss), (0, Some(late)));
    assert!((0.9..1.1).contains(&time), "{time}");
}

#[test]
fn the_head_of_a_prompt_is_read_while_its_tail_waits_for_permits() {
    let sound = MemoryBackend::default();
    put(&sound, SPACE, 0..2);
    let (hits, _, miss) = found_beside_a_prompt_that_hangs(MemoryBackend::default(), 2..8, sound);
    let late = Miss::probable(MissReason::TierLate(Some(0)));
    assert_eq!((hits, miss), (2, Some(late)));
}
