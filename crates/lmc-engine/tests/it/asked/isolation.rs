//! Tiers beside others that hang.

use lmc_engine::{EngineHost, InUse, WritePolicy};

use super::*;

/// A tier whose operations can be held.
type Tier = Gated<MemoryBackend>;

/// Runs a test with a tier that holds this operation and a sound one: either in memory of this process
/// or to be asked, and either before the other. The tiers are in their order.
fn in_all_positions(held: Operation, test: impl Fn(&Tier, &Tier, [Arc<dyn Backend>; 2])) {
    let media = [MemoryBackend::default, MemoryBackend::shared];
    for (hung, sound) in media
        .iter()
        .flat_map(|hung| media.map(|sound| (hung, sound)))
    {
        for is_hung_first in [true, false] {
            let (hung, sound) = (Arc::new(Tier::new(hung())), Arc::new(Tier::new(sound())));
            hung.hold(held);
            let mut tiers: [Arc<dyn Backend>; 2] =
                [Arc::clone(&hung) as _, Arc::clone(&sound) as _];
            if !is_hung_first {
                tiers.reverse();
            }
            test(&hung, &sound, tiers);
            hung.open();
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
    in_all_positions(Operation::Locate, |_, sound, tiers| {
        put(sound, SPACE, 0..8);
        let engine = patient(tiers, |_| {});
        assert_eq!(found(&engine, 0..8).hits, 8);
        assert_idle(&engine);
    });
}

/// Eight prompts in a store that gave no value once made a prompt on a drive take 9.5 s.
#[test]
fn prompts_that_wait_for_a_tier_leave_the_others_their_share_of_promotions() {
    in_all_positions(Operation::Load, |hung, sound, tiers| {
        put(hung, SPACE, 0..64);
        put(sound, SPACE, 100..116);
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
            let engine = config
                .start(EngineContext::new(arena, EngineHost::default()).with_tiers(tiers))
                .expect("an engine");
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
    let hung = Arc::new(Gated::new(MemoryBackend::shared()));
    put(&*gated, SPACE, 0..1);
    put(&*hung, SPACE, 0..1);
    hung.hold(Operation::Remove);
    let engine = patient([Arc::clone(&gated) as _, Arc::clone(&hung) as _], |_| {});
    gated.shut();
    let lookup = engine.lookup(request(&[RANK], 0..1));
    until("it is being read", || gated.loads() == 1);
    let removing = engine.clone();
    let removing = thread::spawn(move || removing.remove(&keys(0..1)));
    until("the first tier has removed it", || {
        gated.ended(Operation::Remove) == 1
    });
    gated.open();
    assert_eq!(lookup.wait_blocking().hits, 0);
    hung.open();
    assert!(removing.join().expect("no panic").complete);
    assert_eq!(found(&engine, 0..1).hits, 0);
    assert_idle(&engine);
}

#[test]
fn a_chunk_that_is_removed_while_it_waits_for_a_permit_is_not_read() {
    let lying = Arc::new(Gated::new(Scripted {
        longer_by: 1,
        ..Scripted::new()
    }));
    let sound = Arc::new(Gated::new(MemoryBackend::shared()));
    put(&*lying, SPACE, 0..1);
    put(&*sound, SPACE, 0..13);
    let engine = patient([Arc::clone(&lying) as _, Arc::clone(&sound) as _], |_| {});
    sound.hold(Operation::Load);
    sound.hold(Operation::Remove);
    let others = engine.lookup(request(&[RANK], 1..13));
    until("all permits of the tier are in use", || sound.loads() == 12);
    sound.hold(Operation::Locate);
    let asked = sound.ended(Operation::Locate);
    let lookup = engine.lookup(request(&[RANK], 0..1));
    until("it fails to load", || {
        status(&engine, 0).promote_failed == 1
    });
    sound.release(Operation::Locate);
    until("it is found elsewhere", || {
        sound.ended(Operation::Locate) > asked
    });
    let removing = engine.clone();
    let removing = thread::spawn(move || removing.remove(&keys(0..1)));
    until("the first tier has removed it", || {
        lying.ended(Operation::Remove) == 1
    });
    sound.release(Operation::Load);
    assert_eq!(lookup.wait_blocking().hits, 0);
    assert_eq!(others.wait_blocking().hits, 12);
    sound.open();
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

/// A drive once got 64 of 320 chunks because a store in the next tier took none.
#[test]
fn what_is_written_back_at_a_close_reaches_a_tier_beside_one_that_takes_nothing() {
    in_all_positions(Operation::Store, |hung, sound, tiers| {
        let engine = patient(tiers, |policy| {
            policy.write = WritePolicy::Back;
            policy.write_queue_bytes = Some(2 * CHUNK);
        });
        write(&engine, SPACE, 0, 0..24);
        let closing = engine.clone();
        let closing = thread::spawn(move || closing.close(Instant::now() + 10 * DEADLINE));
        until("the sound tier has all", || {
            sound.usage().is_some_and(|usage| usage.chunks == 24)
        });
        assert!(engine.unwritten_bytes() > 0, "the other has none");
        hung.open();
        let closed = closing.join().expect("no panic");
        assert!(closed.is_complete(), "{closed:?}");
    });
}

#[test]
fn a_clear_a_removal_and_a_close_reach_each_tier_however_long_another_takes() {
    for operation in [Operation::Clear, Operation::Remove, Operation::Close] {
        in_all_positions(operation, |hung, sound, tiers| {
            put(sound, SPACE, 0..2);
            let engine = patient(tiers, |_| {});
            if operation == Operation::Clear {
                // The start passes clears on, too.
                until("the start is over", || sound.ended(operation) == 1);
            }
            let before = sound.ended(operation);
            let asking = engine.clone();
            let asking = thread::spawn(move || match operation {
                Operation::Clear => drop(asking.clear(InUse::Keep)),
                Operation::Remove => drop(asking.remove(&keys(0..1))),
                _ => drop(asking.close(soon())),
            });
            until("the sound tier has carried it out", || {
                sound.ended(operation) > before
            });
            assert!(!asking.is_finished());
            hung.open();
            asking.join().expect("no panic");
        });
    }
}
