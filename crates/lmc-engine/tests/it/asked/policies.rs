//! Policies of single tiers.

use lmc_engine::{EngineHost, InUse, Parts, SpaceFilter};

use super::*;

/// `writes_again`: whether a chunk that is written is offered once more when it is found.
fn assert_written_when_reused(tier: impl WriteBackend + 'static, writes_again: bool) {
    let tier = Arc::new(Gated::new(tier));
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |_, policy| {
        policy.admit = Admission::Reused(2);
    });
    write(&engine, SPACE, 0, 0..4);
    for (uses, expected) in [(1, 0), (2, 4), (3, if writes_again { 8 } else { 4 })] {
        assert_eq!(found(&engine, 0..4).resident, 4);
        settle(&engine);
        assert_eq!(tier.stores(), expected, "found {uses} times");
    }
    let status = status(&engine, 0);
    assert_eq!((status.written, status.write_declined), (4, 4));
    assert_idle(&engine);
}

#[test]
fn what_is_found_often_enough_is_written() {
    assert_written_when_reused(MemoryBackend::default(), true);
    // To see that it has the chunk would cost a request.
    assert_written_when_reused(Scripted::new(), false);
}

#[test]
fn tiers_are_written_by_their_own_policies() {
    let tiers = [(); 3].map(|()| Arc::new(Gated::new(MemoryBackend::default())));
    let policy = |write, admit| {
        let mut policy = TierPolicy::default();
        (policy.write, policy.admit) = (write, admit);
        policy
    };
    let policies = [
        policy(WritePolicy::Through, Admission::Always),
        policy(WritePolicy::Back, Admission::Always),
        policy(WritePolicy::Back, Admission::Reused(1)),
    ];
    let lower = tiers.iter().zip(policies);
    let lower = lower.map(|(tier, policy)| LowerTier::new(Arc::clone(tier) as _, policy));
    let arena = ArenaConfig::anonymous((64 * CHUNK) as usize).build();
    let arena = Arc::new(arena.expect("memory"));
    let engine = EngineConfig::default()
        .start(EngineContext::new(arena, EngineHost::default()).with_tiers(lower));
    let engine = engine.expect("an engine");
    write(&engine, SPACE, 0, 0..4);
    assert_eq!(found(&engine, 0..2).resident, 2);
    settle(&engine);
    let stores = || tiers.each_ref().map(|tier| tier.stores());
    assert_eq!(stores(), [4, 0, 0]);
    assert!(engine.unwritten_bytes() > 0, "two tiers lack what is here");
    let closed = engine.close(soon());
    assert_eq!(stores(), [4, 4, 2], "{closed:?}");
    assert!(closed.failed.is_empty() && closed.late == 0, "{closed:?}");
}

#[test]
fn what_comes_from_a_slower_tier_is_written_to_those_that_are_filled() {
    for fill in [false, true] {
        let tiers = [(); 3].map(|()| Arc::new(Gated::new(MemoryBackend::default())));
        put(&*tiers[1], SPACE, 0..4);
        let before = tiers[1].stores();
        let lower = tiers.iter().map(|tier| Arc::clone(tier) as _).collect();
        let engine = engine_with(64, lower, |_, policy| policy.fill = fill);
        assert_eq!(found(&engine, 0..4).hits, 4);
        settle(&engine);
        let stores = tiers.each_ref().map(|tier| tier.stores());
        let first = if fill { 4 } else { 0 };
        assert_eq!(stores, [first, before, 0]);
        assert_idle(&engine);
    }
}

#[test]
fn a_prompt_that_a_near_tier_has_waits_for_no_slower_one() {
    // Longer than this test may take.
    const LONG: Duration = Duration::from_secs(3600);
    let (near, far) = (Scripted::new(), Delayed::slow(Scripted::new(), LONG));
    put(&near, SPACE, 0..8);
    let engine = engine_with(64, vec![Arc::new(near), Arc::new(far)], |_, policy| {
        policy.locate_timeout = LONG;
    });
    assert_eq!(found(&engine, 0..8).hits, 8);
}

#[test]
fn a_tier_is_asked_for_parts_of_chunks_where_its_policy_says_so() {
    let tier = Arc::new(Scripted::new());
    put(&*tier, SPACE, 0..4);
    for asks in [true, false] {
        let engine = engine_with(64, vec![Arc::clone(&tier) as _], |_, policy| {
            policy.asks_for_parts = asks;
        });
        for (parts, hits) in [
            (Parts::of(256, 16), if asks { 4 } else { 0 }),
            (Parts::WHOLE, 4),
        ] {
            let before = tier.asked.load(Ordering::Relaxed);
            let request = request(&[RANK], 0..4);
            let hint = request.hint.clone().with_parts(parts);
            let lookup = engine.lookup(request.with_hint(hint));
            assert_eq!(lookup.wait_blocking().hits, hits);
            let is_asked = tier.asked.load(Ordering::Relaxed) > before;
            assert_eq!(is_asked, hits > 0, "{parts:?}");
            engine.clear_dram(InUse::Remove);
        }
        assert_idle(&engine);
    }
}

#[test]
fn chunks_of_spaces_that_are_not_picked_are_not_written() {
    let tier = Arc::new(Gated::new(MemoryBackend::default()));
    let engine = engine_with(64, vec![Arc::clone(&tier) as _], |_, policy| {
        policy.spaces = SpaceFilter::new(|space| space == OTHER);
    });
    write(&engine, SPACE, 0, 0..4);
    write(&engine, OTHER, 0, 0..3);
    settle(&engine);
    assert_eq!((tier.stores(), status(&engine, 0).chunks), (3, 3));
    assert_eq!(found(&engine, 0..4).resident, 4, "DRAM has them all");
    assert_idle(&engine);
}
