//! Tiers beside others that hang.

use std::sync::atomic::AtomicBool;

use futures_util::FutureExt;
use lmc_backend::{Answers, Cleared, LoadItem, Loaded};
use lmc_engine::WritePolicy;

use super::*;

/// The part of a tier that hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    Locate,
    Load,
    Store,
    Remove,
    Clear,
    Close,
}

/// A tier of which one part hangs until it is released, whatever the deadline is.
#[derive(Debug)]
struct Hung {
    inner: MemoryBackend,
    path: Path,
    released: AtomicBool,
    /// Calls of that part that have ended.
    ended: AtomicU64,
}

impl Hung {
    fn new(inner: MemoryBackend, path: Path) -> Arc<Self> {
        Arc::new(Self {
            inner,
            path,
            released: AtomicBool::new(false),
            ended: AtomicU64::new(0),
        })
    }

    fn release(&self) {
        self.released.store(true, Ordering::Relaxed);
    }

    async fn pass(&self, path: Path) {
        if path != self.path {
            return;
        }
        while !self.released.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.ended.fetch_add(1, Ordering::Relaxed);
    }

    fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }
}

impl Backend for Hung {
    lmc_backend::forward!(inner: sharing index clears list usage health);

    fn name(&self) -> &str {
        "hung"
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            self.pass(Path::Locate).await;
            self.inner.locate(keys, hint, deadline).await
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        let passed = self.pass(Path::Load);
        Box::pin(
            passed
                .map(move |()| self.inner.load(items, deadline))
                .flatten_stream(),
        )
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        let passed = self.pass(Path::Store);
        Box::pin(
            passed
                .map(move |()| self.inner.store(items, deadline))
                .flatten_stream(),
        )
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            self.pass(Path::Remove).await;
            self.inner.remove(keys, deadline).await
        })
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(async move {
            self.pass(Path::Clear).await;
            self.inner.clear(clears, deadline).await
        })
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        Box::pin(async move {
            self.pass(Path::Close).await;
            self.inner.close(deadline).await
        })
    }
}

/// Calls this with a tier that hangs on this path and a sound one: either in memory of this process
/// or to be asked, and either before the other. The tiers are in their order.
fn in_all_positions(path: Path, test: impl Fn(&Hung, &Hung, [Arc<dyn Backend>; 2])) {
    let media = [MemoryBackend::default, MemoryBackend::shared];
    for (hung, sound) in media
        .iter()
        .flat_map(|hung| media.map(|sound| (hung, sound)))
    {
        for is_hung_first in [true, false] {
            let (hung, sound) = (Hung::new(hung(), path), Hung::new(sound(), path));
            sound.release();
            let mut tiers: [Arc<dyn Backend>; 2] =
                [Arc::clone(&hung) as _, Arc::clone(&sound) as _];
            if !is_hung_first {
                tiers.reverse();
            }
            test(&hung, &sound, tiers);
            hung.release();
        }
    }
}

/// No wait of the engine ends by itself while a test runs.
fn patient(tiers: [Arc<dyn Backend>; 2], change: impl FnOnce(&mut TierPolicy)) -> CacheEngine {
    engine_with(64, tiers.into(), |config, policy| {
        config.promotion_timeout = 10 * DEADLINE;
        policy.locate_timeout = 10 * DEADLINE;
        policy.write_timeout = 10 * DEADLINE;
        change(policy);
    })
}

#[test]
fn a_prompt_that_one_tier_has_whole_does_not_wait_for_another_that_does_not_answer() {
    in_all_positions(Path::Locate, |_, sound, tiers| {
        put(&sound.inner, SPACE, 0..8);
        let engine = patient(tiers, |_| {});
        assert_eq!(found(&engine, 0..8).hits, 8);
        assert_idle(&engine);
    });
}

/// Eight prompts in a store that gave no value once made a prompt on a drive take 9.5 s.
#[test]
fn prompts_that_wait_for_a_tier_leave_the_others_their_share_of_promotions() {
    in_all_positions(Path::Load, |hung, sound, tiers| {
        put(&hung.inner, SPACE, 0..64);
        put(&sound.inner, SPACE, 100..116);
        let engine = patient(tiers, |_| {});
        let waiting: Vec<_> = (0..8)
            .map(|n| engine.lookup(request(&[RANK], 8 * n..8 * n + 8)))
            .collect();
        // The share of the tier, and what is common.
        until("as many wait as may", || {
            engine.usage().reserved_slots == 12
        });
        assert_eq!(found(&engine, 100..116).hits, 16);
        drop(waiting);
        until("those that waited end", || {
            let usage = engine.usage();
            (usage.leases, usage.reserved_slots) == (0, 0)
        });
        assert_idle(&engine);
    });
}

/// Tiers that have chunks whose loads fail: two that stand still, and one that lies.
fn failing() -> [Arc<dyn Backend>; 3] {
    let stopped = [MemoryBackend::default(), MemoryBackend::shared()].map(|tier| {
        let tier = Gated::new(tier);
        put(&tier, SPACE, 0..8);
        tier.shut();
        Arc::new(tier) as Arc<dyn Backend>
    });
    let lying = Scripted {
        longer_by: 1,
        ..Scripted::new()
    };
    put(&lying, SPACE, 0..8);
    let [one, other] = stopped;
    [one, other, Arc::new(lying)]
}

#[test]
fn a_found_chunk_that_fails_to_load_is_read_from_the_next_tier_that_has_it() {
    for sound in [MemoryBackend::default, MemoryBackend::shared] {
        for failing in failing() {
            let sound = sound();
            put(&sound, SPACE, 0..8);
            let has_index = failing.index().is_some() || sound.index().is_none();
            let mut policy = TierPolicy::default();
            policy.locate_timeout = DEADLINE;
            let mut stopped = policy.clone();
            stopped.read_timeout = Some(Duration::from_millis(20));
            let tiers = [
                LowerTier::new(failing, stopped),
                LowerTier::new(Arc::new(sound), policy),
            ];
            let mut config = EngineConfig::default();
            config.promotion_timeout = DEADLINE;
            let arena = ArenaConfig::anonymous((64 * CHUNK) as usize).build();
            let arena = Arc::new(arena.expect("memory"));
            let engine = CacheEngine::with_tiers(config, arena, tiers).expect("an engine");
            assert_eq!(found(&engine, 0..8).hits, 8);
            // An index in this process is asked before any other tier.
            assert_eq!(status(&engine, 0).promote_failed > 0, has_index);
            assert_eq!(status(&engine, 1).promoted, 8);
            assert_idle(&engine);
        }
    }
}

#[test]
fn a_chunk_that_fails_to_load_twice_is_a_miss() {
    let lying = || {
        Arc::new(Scripted {
            longer_by: 1,
            ..Scripted::new()
        })
    };
    let tiers = [lying(), lying(), lying()];
    tiers.iter().for_each(|tier| put(&**tier, SPACE, 0..1));
    let engine = engine(
        64,
        tiers.each_ref().map(|tier| Arc::clone(tier) as _).into(),
    );
    assert_eq!(found(&engine, 0..1).hits, 0);
    // No third is tried.
    let failed = [0, 1, 2].map(|tier| status(&engine, tier).promote_failed);
    assert_eq!(failed, [1, 1, 0]);
    assert_idle(&engine);
}

#[test]
fn a_chunk_that_is_being_removed_is_not_read_from_another_tier() {
    let gated = Arc::new(Gated::new(MemoryBackend::shared()));
    let hung = Hung::new(MemoryBackend::shared(), Path::Remove);
    put(&*gated, SPACE, 0..1);
    put(&hung.inner, SPACE, 0..1);
    let engine = patient([Arc::clone(&gated) as _, Arc::clone(&hung) as _], |_| {});
    gated.shut();
    let lookup = engine.lookup(request(&[RANK], 0..1));
    until("it is being read", || gated.loads() == 1);
    let removing = engine.clone();
    let removing = thread::spawn(move || removing.remove(&keys(0..1)));
    until("the first tier has removed it", || gated.removals() == 1);
    gated.open();
    assert_eq!(lookup.wait_blocking().hits, 0);
    hung.release();
    assert!(removing.join().expect("no panic").complete);
    assert_eq!(found(&engine, 0..1).hits, 0);
    assert_idle(&engine);
}

#[test]
fn what_one_prompt_reads_from_another_tier_is_not_asked_of_the_first_by_others() {
    let stopped = Arc::new(Gated::new(MemoryBackend::shared()));
    // Others would have the time to begin again while it answers.
    let slow = Delayed::slow(MemoryBackend::shared(), Duration::from_millis(20));
    let sound = Arc::new(Gated::new(slow));
    put(&*stopped, SPACE, 0..1);
    put(&*sound, SPACE, 0..1);
    let tiers: [Arc<dyn Backend>; 2] = [Arc::clone(&stopped) as _, Arc::clone(&sound) as _];
    let engine = patient(tiers, |policy| {
        policy.read_timeout = Some(Duration::from_millis(500));
    });
    stopped.shut();
    let lookups = [(); 4].map(|()| engine.lookup(request(&[RANK], 0..1)));
    for lookup in lookups {
        assert_eq!(lookup.wait_blocking().hits, 1);
    }
    assert_eq!((stopped.loads(), sound.loads()), (1, 1));
    assert_idle(&engine);
}

/// A store that took nothing once left a drive beside it 64 of 320 chunks.
#[test]
fn what_is_written_back_at_a_close_reaches_a_tier_beside_one_that_takes_nothing() {
    in_all_positions(Path::Store, |hung, sound, tiers| {
        let engine = patient(tiers, |policy| {
            policy.write = WritePolicy::Back;
            policy.write_queue_bytes = Some(2 * CHUNK);
        });
        write(&engine, SPACE, 0, 0..24);
        let closing = engine.clone();
        let closing = thread::spawn(move || closing.close(Instant::now() + 10 * DEADLINE));
        until("the sound tier has all", || {
            sound.inner.usage().is_some_and(|usage| usage.chunks == 24)
        });
        assert!(engine.unwritten_bytes() > 0, "the other has none");
        hung.release();
        let closed = closing.join().expect("no panic");
        assert!(closed.is_complete(), "{closed:?}");
    });
}

#[test]
fn a_clear_a_removal_and_a_close_reach_each_tier_however_long_another_takes() {
    for path in [Path::Clear, Path::Remove, Path::Close] {
        in_all_positions(path, |hung, sound, tiers| {
            put(&sound.inner, SPACE, 0..2);
            let engine = patient(tiers, |_| {});
            if path == Path::Clear {
                // The start passes clears on, too.
                until("the start is over", || sound.ended() == 1);
            }
            let before = sound.ended();
            let asking = engine.clone();
            let asking = thread::spawn(move || match path {
                Path::Clear => drop(asking.clear(false)),
                Path::Remove => drop(asking.remove(&keys(0..1))),
                _ => drop(asking.close(soon())),
            });
            until("the sound tier has carried it out", || {
                sound.ended() > before
            });
            assert!(!asking.is_finished());
            hung.release();
            asking.join().expect("no panic");
        });
    }
}
