//! Chunks that a tier is assumed to have, because it has one before them and the last one.

use super::*;

/// Looks up ranks whose chunks have a known length, and checks every byte that is found.
fn found_sized(engine: &CacheEngine, ranks: Range<u16>, numbers: Range<u64>) -> Found {
    let rank = |kv_rank| Rank {
        kv_rank,
        chunk_bytes: Some(CHUNK),
        ..RANK
    };
    let ranks: Vec<Rank> = ranks.map(rank).collect();
    let lookup = engine.lookup(request(&ranks, numbers.clone()));
    let found = lookup.wait_blocking();
    for rank in &found.ranks {
        for (slot, number) in rank.leases.iter().zip(numbers.clone()) {
            let key = key(SPACE, rank.rank.kv_rank, number);
            check_value(&key, slot.bytes()).expect("the bytes that were stored");
        }
    }
    found
}

/// A tier with these ranges of chunks, each named by its first and the one after its last.
fn tier(has: &[(u64, u64)]) -> Arc<Scripted> {
    let tier = Scripted::new();
    for &(first, end) in has {
        put(&tier, SPACE, first..end);
    }
    Arc::new(tier)
}

fn above(tiers: &[&Arc<Scripted>]) -> CacheEngine {
    let tiers = tiers.iter().map(|tier| Arc::clone(tier) as _);
    engine(64, tiers.collect())
}

fn questions(tier: &Scripted) -> Vec<usize> {
    tier.questions.lock().expect("no panic").clone()
}

/// A store was asked about each chunk of a prompt, and then for the chunk.
#[test]
fn a_tier_that_has_the_first_and_the_last_chunk_is_not_asked_about_those_between() {
    for (numbers, hits, asked) in [
        (0..8, 8, &[2][..]),
        (0..3, 3, &[2]),
        (0..2, 2, &[1, 1]),
        (0..12, 8, &[2, 11]),
        (20..30, 0, &[2]),
    ] {
        let tier = tier(&[(0, 8)]);
        let engine = above(&[&tier]);
        let found = found_sized(&engine, 0..1, numbers.clone());
        assert_eq!(
            (found.hits, &questions(&tier)[..]),
            (hits, asked),
            "{numbers:?}"
        );
        assert_eq!(status(&engine, 0).promoted, hits as u64);
        drop(found);
        assert_idle(&engine);
    }
    let tier = tier(&[(0, 8)]);
    let engine = above(&[&tier]);
    assert_eq!(found(&engine, 0..8).hits, 8);
    assert_eq!(questions(&tier), [1, 7], "no length is known");
}

/// Each of the chunks that a store had was asked about, if it lacked the last one.
#[test]
fn the_end_of_what_a_tier_has_is_searched_for_with_few_questions() {
    for (has, hits) in [
        (&[(0, 1)][..], 1),
        (&[(0, 2)], 2),
        (&[(0, 300)], 300),
        (&[(0, 998)], 998),
        (&[(0, 999)], 999),
        // With a gap before or after a chunk that was asked about.
        (&[(0, 500), (501, 900)], 500),
        (&[(0, 10), (900, 999)], 10),
    ] {
        let tier = tier(has);
        let engine = engine(2048, vec![Arc::clone(&tier) as _]);
        assert_eq!(found_sized(&engine, 0..1, 0..1000).hits, hits, "{has:?}");
        let asked: usize = questions(&tier).iter().sum();
        assert!(asked <= 2 + 3 * 17, "{has:?}: {:?}", questions(&tier));
        assert_idle(&engine);
    }
}

/// The first question to peers was about one chunk only, if there was a store as well.
#[test]
fn what_one_tier_lacks_of_a_first_question_is_found_in_the_other() {
    for (near_has, of_near, of_far) in [((0, 2), &[4, 6][..], 6), ((0, 0), &[4], 2)] {
        let near = Arc::new(Scripted {
            at_once: 4,
            ..Scripted::new()
        });
        put(&*near, SPACE, near_has.0..near_has.1);
        let far = tier(&[(0, 8)]);
        let engine = above(&[&near, &far]);
        assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 8, "{near_has:?}");
        assert_eq!(questions(&near), of_near, "{near_has:?}");
        // Its first question is not waited for where the nearer tier has the chunk.
        assert_eq!(questions(&far).pop(), Some(of_far), "{near_has:?}");
        assert_idle(&engine);
    }
}

#[test]
fn a_chunk_that_is_missing_between_ends_what_is_found_unless_another_tier_has_it() {
    for (far_has, hits) in [((3, 4), 8), ((20, 21), 3)] {
        let (near, far) = (tier(&[(0, 3), (4, 8)]), tier(&[far_has]));
        let engine = above(&[&near, &far]);
        assert_eq!(found_sized(&engine, 0..1, 0..8).hits, hits);
        // The farther one may have been asked about the two as well.
        assert_eq!(
            (questions(&near), questions(&far).pop()),
            (vec![2], Some(1))
        );
        assert_idle(&engine);
    }
}

#[test]
fn nothing_is_assumed_of_two_tiers_of_pending_chunks_and_of_handles() {
    // The first and the last chunk are in two tiers, of which the farther one answers first.
    let far = tier(&[(4, 8)]);
    let near = Delayed::slow(MemoryBackend::shared(), Duration::from_millis(50));
    put(near.inner(), SPACE, 0..4);
    let engine = engine(64, vec![Arc::new(near) as _, Arc::clone(&far) as _]);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 8);
    assert_eq!(questions(&far), [2, 7]);
    // An engine was writing them.
    let writing = tier(&[(0, 8)]);
    writing.pending.store(1, Ordering::Relaxed);
    let engine = above(&[&writing]);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 8);
    assert_eq!(questions(&writing), [2, 1, 7]);
    // A tier that tells where each chunk is loads none that it was not asked about.
    let handing = Arc::new(Handing {
        inner: MemoryBackend::shared(),
        fails: false,
    });
    put(&*handing, SPACE, 0..8);
    let engine = self::engine(64, vec![Arc::clone(&handing) as _]);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 8);
}

/// The other ranks once read all of their chunks, and held them until the last was there.
#[test]
fn a_rank_that_lacks_a_chunk_ends_the_reading_of_the_others() {
    const MANY: u64 = 1000;
    let tier = Arc::new(MemoryBackend::shared());
    put(&*tier, SPACE, 0..1);
    put(&*tier, SPACE, 2..MANY);
    put_rank(&*tier, SPACE, 1, 0..MANY);
    let engine = engine_with(2 * MANY, vec![tier], |config, _| {
        // Some windows of some chunks.
        config.promotion_bytes = Some(16 * CHUNK);
    });
    assert_eq!(found_sized(&engine, 0..2, 0..MANY).hits, 1);
    let promoted = status(&engine, 0).promoted;
    assert!(promoted < MANY / 2, "{promoted}");
    assert_idle(&engine);
}

#[test]
fn a_chunk_of_another_length_ends_what_is_found() {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
    let pool = Pool::new(Arc::new(arena), PoolConfig::default()).expect("a pool");
    let mut slot = pool.reserve(2 * CHUNK).expect("an empty pool");
    slot.bytes_mut().fill(9);
    let longer = StoreItem::new(key(SPACE, 0, 2), slot.written().seal());
    // In the tier.
    let odd = tier(&[(0, 2), (3, 8)]);
    block_on(lmc_backend::in_order(odd.store(vec![longer], soon()), 1));
    let engine = above(&[&odd]);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 2);
    assert_idle(&engine);
    // In memory.
    let whole = tier(&[(0, 8)]);
    let engine = above(&[&whole]);
    let request = StoreRequest {
        key: key(SPACE, 0, 2),
        parent: None,
        tenant: TenantId::default(),
        len: 2 * CHUNK,
    };
    let started = engine.store(OwnerId(1), engine.clears_id(), &[request]);
    let tickets = started.into_iter().filter_map(|start| match start {
        StoreStart::Reserved(ticket) => Some(ticket),
        _ => None,
    });
    assert_eq!(engine.commit(tickets.collect()).len(), 1);
    settle(&engine);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 2);
    assert_idle(&engine);
}

/// The questions to the peers once waited for a store that the prompt did not need.
#[test]
fn a_store_that_is_silent_does_not_delay_the_first_answer_of_peers() {
    let peers = Arc::new(Scripted {
        at_once: 256,
        ..Scripted::new()
    });
    put(&*peers, SPACE, 0..8);
    let store = Arc::new(Gated::new(MemoryBackend::shared()));
    let tiers = vec![Arc::clone(&peers) as _, Arc::clone(&store) as _];
    let engine = engine(64, tiers);
    store.hold(Operation::Locate);
    assert_eq!(found_sized(&engine, 0..1, 0..8).hits, 8);
    assert_eq!(questions(&peers), [8], "one question about all keys");
    assert_idle(&engine);
}
