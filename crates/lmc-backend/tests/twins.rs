//! The twins and the faulty wrapper pass the kit, and the kit catches tiers that lie.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use lmc_backend::conformance::{Conformance, Faults, Faulty, Guarantee};
use lmc_backend::{
    Backend, BackendError, BoxFuture, Cursor, FailedSlot, Health, LoadItem, Loaded, MemoryBackend,
    NoopBackend, Page, StoreItem, Stored, Usage,
};
use lmc_key::ChunkKey;

#[test]
fn a_map_is_exact() {
    let tally = Conformance::new(Guarantee::Exact).run(&MemoryBackend::default());
    assert!(
        tally.hits > 100 && tally.misses > 10 && tally.removed > 10,
        "{tally:?}"
    );
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
    for seed in 0..20 {
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

/// How a tier lies.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// It says hit for a chunk that it does not have.
    Invents,
    /// It says hit without writing.
    Stale,
    /// It answers for all keys but the last.
    Short,
    /// It says removed and keeps the chunk.
    Keeps,
    /// It says cleared and keeps every chunk.
    KeepsAll,
    /// It lists the first page again and again.
    Loops,
    /// It never returns the slots of loads that miss.
    Leaks,
}

#[derive(Debug)]
struct Liar(MemoryBackend, Lie);

impl Backend for Liar {
    fn name(&self) -> &str {
        "liar"
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>> {
        self.0.contains(keys, deadline)
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        Box::pin(async move {
            if self.1 == Lie::Stale {
                let hits = items
                    .into_iter()
                    .map(|item| Loaded::Hit(item.slot.written()));
                return hits.collect();
            }
            let mut loaded = self.0.load(items, deadline).await;
            if self.1 == Lie::Short {
                loaded.pop();
            }
            let lie = |loaded| match (self.1, loaded) {
                (Lie::Invents, Loaded::Miss(mut slot)) => {
                    slot.bytes_mut()[0] ^= 1;
                    Loaded::Hit(slot.written())
                }
                (Lie::Leaks, Loaded::Miss(slot)) => {
                    drop(slot.quarantine());
                    Loaded::Failed {
                        error: BackendError::Deadline,
                        slot: FailedSlot::Quarantined,
                    }
                }
                (_, honest) => honest,
            };
            loaded.into_iter().map(lie).collect()
        })
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>> {
        self.0.store(items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            if self.1 != Lie::Keeps {
                return self.0.remove(keys, deadline).await;
            }
            let found = self.0.contains(keys, deadline).await;
            found
                .into_iter()
                .map(|found| Ok(matches!(found, Ok(Some(_)))))
                .collect()
        })
    }

    fn clear(&self, deadline: Instant) -> BoxFuture<'_, Result<u64, BackendError>> {
        Box::pin(async move {
            if self.1 != Lie::KeepsAll {
                return self.0.clear(deadline).await;
            }
            let usage = self.0.usage(deadline).await;
            Ok(usage.map_or(0, |usage| usage.chunks))
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

    fn usage(&self, deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>> {
        self.0.usage(deadline)
    }

    fn health(&self) -> Health {
        self.0.health()
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.0.close(deadline)
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
    ] {
        let liar = Liar(MemoryBackend::default(), lie);
        let guarantee = match lie {
            Lie::Leaks => Guarantee::Lossy,
            _ => Guarantee::Exact,
        };
        let kit = Conformance::new(guarantee)
            .with_seed(7)
            .with_patience(Duration::from_millis(50));
        let run = AssertUnwindSafe(|| kit.run(&liar));
        assert!(catch_unwind(run).is_err(), "{lie:?} went unnoticed");
    }
}
