//! The twins and the faulty wrapper pass the kit, and the kit catches tiers that lie.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lmc_backend::conformance::{Conformance, Delayed, Faults, Faulty, Gated, Guarantee};
use lmc_backend::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, FailedSlot, LoadItem,
    Loaded, LocateHint, Located, MemoryBackend, NoopBackend, Page, WriteBackend,
};
use lmc_key::ChunkKey;
use lmc_testkit::rounds;

#[test]
fn a_map_is_exact() {
    let tally = Conformance::new(Guarantee::Exact).run(&MemoryBackend::default());
    assert!(
        tally.hits > 100 && tally.misses > 10 && tally.removed > 10,
        "{tally:?}"
    );
}

#[test]
fn a_shared_map_is_exact() {
    let tally = Conformance::new(Guarantee::Exact).run(&MemoryBackend::shared());
    assert!(tally.hits > 100 && tally.misses > 10, "{tally:?}");
}

#[test]
fn a_slow_map_loses_what_is_asked_for_with_too_short_a_deadline_and_nothing_else() {
    let kit = Conformance::new(Guarantee::Exact).with_operations(100);
    let slow = Delayed::slow(MemoryBackend::default(), Duration::from_millis(2));
    let tally = kit.run(&slow);
    assert!(tally.hits > 0, "{tally:?}");
}

#[test]
fn an_open_gate_changes_nothing() {
    Conformance::new(Guarantee::Exact).run(&Gated::new(MemoryBackend::default()));
}

#[test]
fn a_map_that_is_too_small_is_lossy() {
    let tally = Conformance::new(Guarantee::Lossy).run(&MemoryBackend::with_capacity(100_000));
    assert!(tally.hits > 10 && tally.failures > 10, "{tally:?}");
}

#[test]
fn nothing_is_lossy() {
    let tally = Conformance::new(Guarantee::Lossy).run(&NoopBackend);
    assert!(tally.hits == 0 && tally.misses > 100, "{tally:?}");
}

#[test]
fn a_faulty_map_is_lossy() {
    for seed in 0..rounds(4, 20) as u64 {
        let kit = Conformance::new(Guarantee::Lossy).with_seed(seed);
        let faulty = Faulty::new(MemoryBackend::default(), Faults::some(), seed);
        let tally = kit.run(&faulty);
        assert!(tally.hits > 50 && tally.failures > 50, "{tally:?}");
    }
}

#[test]
fn a_wrapper_without_faults_is_as_good_as_what_it_wraps() {
    let faulty = Faulty::new(MemoryBackend::default(), Faults::default(), 1);
    Conformance::new(Guarantee::Exact).run(&faulty);
}

/// Fault of a tier that answers falsely.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// Answers hit for a chunk that it does not have.
    Invents,
    /// Answers hit without writing.
    Stale,
    /// Answers for all keys but the last.
    Short,
    /// Answers removed and keeps the chunk.
    Keeps,
    /// Answers cleared and keeps every chunk.
    KeepsAll,
    /// Lists the first page again and again.
    Loops,
    /// Never returns the slots of loads that miss.
    Leaks,
    /// Answers that a chunk is longer than it is.
    Longer,
    /// Answers for a key twice.
    Twice,
    /// Does not record clears.
    Forgets,
}

#[derive(Debug)]
struct Liar(MemoryBackend, Lie);

impl Backend for Liar {
    lmc_backend::forward!(0: usage health close);

    fn name(&self) -> &str {
        "liar"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            let mut located = self.0.locate(keys, hint, deadline).await;
            for located in &mut located {
                if let (Lie::Longer, Ok(Located::Present(location))) = (self.1, located) {
                    location.len += 1;
                }
            }
            located
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        if self.1 == Lie::Stale {
            let hit = |item: LoadItem| Loaded::Hit(item.slot.written());
            return lmc_backend::ready(items.into_iter().map(hit));
        }
        let last = items.len().saturating_sub(1);
        let loaded = self.0.load(items, deadline);
        let answered = move |&(index, _): &(usize, Loaded)| self.1 != Lie::Short || index != last;
        let loaded = loaded.filter(move |answer| std::future::ready(answered(answer)));
        let lie = |(index, loaded)| match (self.1, loaded) {
            (Lie::Invents, Loaded::Miss(mut slot)) => {
                slot.bytes_mut()[0] ^= 1;
                (index, Loaded::Hit(slot.written()))
            }
            (Lie::Leaks, Loaded::Miss(slot)) => {
                drop(slot.quarantine());
                let failed = Loaded::Failed {
                    error: BackendError::Deadline,
                    slot: FailedSlot::Quarantined,
                };
                (index, failed)
            }
            (Lie::Twice, honest) => (0, honest),
            (_, honest) => (index, honest),
        };
        Box::pin(loaded.map(lie))
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        match self.1 {
            Lie::KeepsAll => {
                let usage = self.0.usage();
                let removed = usage.map_or(0, |usage| usage.chunks);
                Box::pin(std::future::ready(Ok(Cleared::new(removed))))
            }
            _ => self.0.clear(clears, deadline),
        }
    }

    fn clears(&self) -> Arc<Clears> {
        match self.1 {
            Lie::Forgets => Arc::default(),
            _ => self.0.clears(),
        }
    }
}

impl WriteBackend for Liar {
    lmc_backend::forward!(0: store);

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            if self.1 != Lie::Keeps {
                return self.0.remove(keys, deadline).await;
            }
            let found = self.0.locate(keys, LocateHint::none(), deadline).await;
            let is_there = |found| Ok(matches!(found, Ok(Located::Present(_))));
            found.into_iter().map(is_there).collect()
        })
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        match self.1 {
            Lie::Loops => self.0.list(Cursor::START, limit, deadline),
            _ => self.0.list(cursor, limit, deadline),
        }
    }
}

#[test]
fn the_kit_catches_lies() {
    for lie in [
        Lie::Invents,
        Lie::Stale,
        Lie::Short,
        Lie::Keeps,
        Lie::KeepsAll,
        Lie::Loops,
        Lie::Leaks,
        Lie::Longer,
        Lie::Twice,
        Lie::Forgets,
    ] {
        let liar = Liar(MemoryBackend::default(), lie);
        let guarantee = match lie {
            Lie::Leaks => Guarantee::Lossy,
            _ => Guarantee::Exact,
        };
        let kit = Conformance::new(guarantee)
            .with_seed(7)
            .with_tolerance(Duration::from_millis(50));
        let run = AssertUnwindSafe(|| kit.run(&liar));
        assert!(catch_unwind(run).is_err(), "{lie:?} went unnoticed");
    }
}

#[test]
fn the_kit_catches_a_tier_that_answers_after_its_deadline() {
    let late = Delayed::late(MemoryBackend::default(), Duration::from_millis(100));
    let kit = Conformance::new(Guarantee::Lossy)
        .with_seed(1)
        .with_operations(0)
        .with_tolerance(Duration::from_millis(50));
    let run = AssertUnwindSafe(|| kit.run(&late));
    assert!(catch_unwind(run).is_err(), "it went unnoticed");
}
