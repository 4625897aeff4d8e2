//! Reasons of misses.

use lmc_backend::FailedSlot;
use lmc_backend::conformance::{Faults, Faulty};
use lmc_engine::{InUse, Miss, MissReason};

use super::*;

/// Returns the reason why a lookup ends, after this number of chunks.
fn miss_of(engine: &CacheEngine, found: &Found, hits: usize) -> Miss {
    assert_eq!(found.hits, hits);
    let missing = found.missing.as_ref().expect("not all were found");
    assert_eq!(missing.hash, test_hash(hits as u64));
    engine.miss(missing)
}

/// Looks up eight chunks of one rank. Returns the reason why the lookup ends after this number.
fn miss(engine: &CacheEngine, hits: usize) -> Miss {
    miss_of(engine, &found(engine, 0..8), hits)
}

const fn probably(reason: MissReason) -> Miss {
    Miss::probable(reason)
}

#[test]
fn a_lookup_that_finds_all_misses_nothing() {
    let engine = engine(64, Vec::new());
    write(&engine, SPACE, 0, 0..8);
    assert_eq!(found(&engine, 0..8).missing, None);
    let no_rank = engine.lookup(request(&[], 0..8)).wait_blocking();
    assert_eq!((no_rank.hits, no_rank.missing), (0, None));
}

#[test]
fn a_chunk_that_went_has_another_reason_than_one_that_never_came() {
    let engine = engine(16, Vec::new());
    assert_eq!(miss(&engine, 0), probably(MissReason::NeverStored));
    write(&engine, SPACE, 0, 0..8);
    engine.remove(&keys(5..6));
    assert_eq!(miss(&engine, 5), probably(MissReason::Removed));
    engine.clear_dram(InUse::Remove);
    assert_eq!(miss(&engine, 0), probably(MissReason::Cleared));
    write(&engine, SPACE, 0, 0..8);
    write(&engine, SPACE, 0, 100..116);
    assert_eq!(miss(&engine, 0), probably(MissReason::Evicted));
    // What had been evicted before a clear would have been cleared by it.
    engine.clear(InUse::Keep).expect("a clear");
    assert_eq!(miss(&engine, 0), probably(MissReason::Cleared));
    let new = engine.lookup(request(&[RANK], 200..208)).wait_blocking();
    let missing = new.missing.expect("nothing was found");
    assert_eq!(engine.miss(&missing), probably(MissReason::NeverStored));
    write(&engine, SPACE, 0, 0..8);
    write(&engine, SPACE, 0, 100..116);
    assert_eq!(miss(&engine, 0), probably(MissReason::Evicted));
}

#[test]
fn what_dram_has_evicted_and_the_tier_lacks_counts_as_evicted() {
    let tier = Arc::new(MemoryBackend::with_capacity(4 * CHUNK));
    let engine = engine(16, vec![tier]);
    write(&engine, SPACE, 0, 0..8);
    settle(&engine);
    write(&engine, SPACE, 0, 100..116);
    settle(&engine);
    let missing = found(&engine, 0..8).missing;
    let missing = missing.expect("the tier has four chunks at most");
    assert_eq!(engine.miss(&missing), probably(MissReason::Evicted));
}

#[test]
fn of_several_ranks_the_one_that_lacks_the_chunk_says_why() {
    let engine = engine(64, Vec::new());
    let rank = |kv_rank| Rank { kv_rank, ..RANK };
    write(&engine, SPACE, 0, 0..8);
    write(&engine, SPACE, 1, 0..8);
    // The first rank would end later.
    engine.remove(&[key(SPACE, 0, 5), key(SPACE, 1, 3)]);
    let found = engine.lookup(request(&[rank(0), rank(1)], 0..8));
    let found = found.wait_blocking();
    let reason = miss_of(&engine, &found, 3);
    assert_eq!(reason, probably(MissReason::Removed));
    assert_eq!(found.missing.map(|missing| missing.rank), Some(rank(1)));
    let found = engine.lookup(request(&[rank(0), rank(7)], 0..8));
    let found = found.wait_blocking();
    let reason = miss_of(&engine, &found, 0);
    assert_eq!(reason, probably(MissReason::NeverStored));
    assert_eq!(found.missing.map(|missing| missing.rank), Some(rank(7)));
    // A tier lacks chunks of the second rank, and then fails to deliver them.
    for (of_tier, loads, reason) in [
        (4, Loads::All, probably(MissReason::NeverStored)),
        (8, Loads::MissOf(1), probably(MissReason::TierLost(0))),
    ] {
        let inner = MemoryBackend::shared();
        put_rank(&inner, SPACE, 0, 2..6);
        put_rank(&inner, SPACE, 1, 2..of_tier);
        let engine = self::engine(64, vec![Arc::new(Loading { inner, loads })]);
        write(&engine, SPACE, 0, 0..2);
        write(&engine, SPACE, 1, 0..2);
        let found = engine.lookup(request(&[rank(0), rank(1)], 0..8));
        let found = found.wait_blocking();
        let hits = if of_tier == 4 { 4 } else { 2 };
        assert_eq!(miss_of(&engine, &found, hits), reason);
        assert_eq!(found.missing.map(|missing| missing.rank), Some(rank(1)));
    }
}

#[test]
fn limits_and_cheaper_recomputing_are_certain() {
    let tier = || {
        let tier = Scripted {
            cost: Duration::from_millis(10),
            ..Scripted::new()
        };
        put(&tier, SPACE, 2..8);
        Arc::new(tier)
    };
    let in_dram = engine(64, Vec::new());
    write(&in_dram, SPACE, 0, 0..8);
    let limit = Arc::new(AtMost(3 * CHUNK));
    let found = in_dram.lookup(request(&[RANK], 0..8).with_limit(limit));
    let reason = miss_of(&in_dram, &found.wait_blocking(), 3);
    assert_eq!(reason, Miss::certain(MissReason::Limit));
    let limited = engine(64, vec![tier()]);
    write(&limited, SPACE, 0, 0..2);
    for allowed in [1, 5] {
        let limit = Arc::new(AtMost(allowed * CHUNK));
        let found = limited.lookup(request(&[RANK], 0..8).with_limit(limit));
        let reason = miss_of(&limited, &found.wait_blocking(), allowed as usize);
        assert_eq!(reason, Miss::certain(MissReason::Limit));
    }
    let fast = engine_with(64, vec![tier()], |config, _| {
        config.recompute_time = Some(Duration::from_millis(1));
    });
    write(&fast, SPACE, 0, 0..2);
    assert_eq!(miss(&fast, 2), Miss::certain(MissReason::Recompute));
    // There is no memory for more than the tenant's quota.
    let engine = engine(64, vec![tier()]);
    write(&engine, SPACE, 0, 0..2);
    let tenant = TenantId(3);
    engine.set_quota(tenant, Some(4 * CHUNK));
    let found = engine.lookup(request(&[RANK], 0..8).with_tenant(tenant));
    let reason = miss_of(&engine, &found.wait_blocking(), 6);
    assert_eq!(reason, Miss::certain(MissReason::Limit));
}

#[test]
fn a_tier_that_does_not_answer_is_probably_the_reason() {
    // A lookup that waited for it would not end within the runner's limit.
    let late = Delayed::late(MemoryBackend::shared(), 10 * DEADLINE);
    let here = MemoryBackend::default();
    put(&here, SPACE, 0..2);
    let engine = engine_with(64, vec![Arc::new(here), Arc::new(late)], |_, policy| {
        policy.locate_timeout = Duration::from_millis(10);
    });
    assert_eq!(miss(&engine, 2), probably(MissReason::TierLate(Some(1))));
    let failing = |deadlines, errors| {
        let faults = Faults {
            errors,
            deadlines,
            ..Faults::default()
        };
        Arc::new(Faulty::new(MemoryBackend::shared(), faults, 1))
    };
    let engine = self::engine(64, vec![failing(0, 1000)]);
    assert_eq!(miss(&engine, 0), probably(MissReason::TierDown(Some(0))));
    let engine = self::engine(64, vec![failing(1000, 0)]);
    assert_eq!(miss(&engine, 0), probably(MissReason::TierLate(Some(0))));
    // Tiers whose index is in this process are not asked, and fail all the same.
    let out = Faults {
        errors: 1000,
        ..Faults::default()
    };
    let out = Faulty::new(MemoryBackend::default(), out, 1);
    let engine = self::engine(64, vec![Arc::new(out)]);
    assert_eq!(miss(&engine, 0), probably(MissReason::TierDown(Some(0))));
}

/// Answers loads with an error, a miss, or not at all.
#[derive(Debug)]
struct Loading {
    inner: MemoryBackend,
    loads: Loads,
}

#[derive(Debug)]
enum Loads {
    All,
    Fail(fn() -> BackendError),
    Miss,
    /// Misses for one rank.
    MissOf(u16),
    Never,
}

impl Backend for Loading {
    lmc_backend::forward!(inner: name locate sharing clear clears usage health close);

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        // A batch is of one rank.
        let rank = items.first().map(|item| item.key.kv_rank);
        let delivers = match self.loads {
            Loads::All => true,
            Loads::MissOf(missed) => rank != Some(missed),
            _ => false,
        };
        if delivers {
            return self.inner.load(items, deadline);
        }
        let answer = |item: LoadItem| {
            let loaded = match self.loads {
                Loads::All | Loads::Miss | Loads::MissOf(_) => Loaded::Miss(item.slot),
                Loads::Fail(error) => Loaded::Failed {
                    error: error(),
                    slot: FailedSlot::Released(item.slot),
                },
                Loads::Never => return None,
            };
            Some(loaded)
        };
        ready(items.into_iter().filter_map(answer).collect::<Vec<_>>())
    }
}

#[test]
fn a_tier_that_does_not_deliver_a_chunk_is_the_reason() {
    let closed = || BackendError::Closed;
    let deadline = || BackendError::Deadline;
    let length = || BackendError::Length {
        expected: 2 * CHUNK,
        found: CHUNK,
    };
    for (loads, reason) in [
        (
            Loads::Fail(closed),
            Miss::certain(MissReason::TierDown(Some(0))),
        ),
        (
            Loads::Fail(deadline),
            Miss::certain(MissReason::TierLate(Some(0))),
        ),
        (Loads::Miss, probably(MissReason::TierLost(0))),
        (Loads::Fail(length), probably(MissReason::TierLost(0))),
        (Loads::Never, Miss::certain(MissReason::TierLate(Some(0)))),
    ] {
        let inner = MemoryBackend::shared();
        put(&inner, SPACE, 2..8);
        let engine = engine(64, vec![Arc::new(Loading { inner, loads })]);
        write(&engine, SPACE, 0, 0..2);
        assert_eq!(miss(&engine, 2), reason);
        assert_idle(&engine);
    }
}

#[test]
fn a_chunk_that_is_still_being_written_when_the_wait_ends_is_late() {
    let tier = Scripted::new();
    tier.pending.store(usize::MAX, Ordering::Relaxed);
    put(&tier, SPACE, 0..8);
    let engine = engine_with(64, vec![Arc::new(tier)], |config, _| {
        config.pending_timeout = Duration::from_millis(1);
    });
    let late = MissReason::TierLate(Some(0));
    assert_eq!(miss(&engine, 0), Miss::certain(late));
}
