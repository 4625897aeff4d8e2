//! Behaviour that an embedding program relies on.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lmc::backend::{ChunkEvent, DRAM, EventSink, Host};
use lmc::{CacheBuilder, InUse, PromptCache};
use lmc_testkit::{Folder, until};

const CHUNK: u64 = 8192;

fn builder(layout: &str, folder: &Folder) -> CacheBuilder {
    CacheBuilder::new("model", layout, CHUNK)
        .chunk_size(16)
        .dram(1 << 20)
        .disk(&**folder, 64 << 20)
}

fn hits(cache: &PromptCache, tokens: &[u32]) -> usize {
    let found = cache.lookup(tokens).wait_blocking();
    let hits = found.hits;
    let leases = found.into_leases();
    for (index, slot) in leases.iter().flat_map(|leases| leases.iter()).enumerate() {
        assert!(slot.bytes().iter().all(|&byte| byte == index as u8));
    }
    hits
}

#[test]
fn prompts_are_found_again_after_a_restart_and_by_no_other_layout() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let tokens: Vec<u32> = (0..100).collect();
    let cache = builder("a", &folder).build().expect("a new folder");
    assert_eq!(hits(&cache, &tokens), 0);
    let stored = cache.store(&tokens, |chunk, bytes| bytes.fill(chunk as u8));
    assert_eq!(stored, 6, "the last four tokens are no whole chunk");
    assert_eq!(cache.store(&tokens, |_, _| panic!("they are there")), 0);
    assert_eq!(hits(&cache, &tokens), 6);
    assert_eq!(hits(&cache, &tokens[..40]), 2);
    assert_eq!(hits(&cache, &tokens[1..]), 0);
    let closed = cache.close(Instant::now() + Duration::from_secs(20));
    assert!(closed.is_complete(), "{closed:?}");
    drop(cache);
    let cache = builder("b", &folder).build().expect("the same folder");
    assert_eq!(hits(&cache, &tokens), 0, "another layout");
    drop(cache);
    let cache = builder("a", &folder).build().expect("the same folder");
    assert_eq!(hits(&cache, &tokens), 6);
}

#[derive(Debug, Default)]
struct Arrivals(Mutex<Vec<String>>);

impl EventSink for Arrivals {
    fn changed(&self, event: &ChunkEvent<'_>) {
        assert!(event.change.is_arrival(), "{event:?}");
        self.0.lock().expect("no panic").push(event.tier.to_owned());
    }
}

#[test]
fn a_program_hears_what_each_tier_has_stored() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let cache = builder("a", &folder).build().expect("a new folder");
    let arrivals = Arc::<Arrivals>::default();
    cache
        .engine()
        .host()
        .events()
        .listen(Arc::clone(&arrivals) as _);
    let tokens: Vec<u32> = (0..96).collect();
    assert_eq!(
        cache.store(&tokens, |chunk, bytes| bytes.fill(chunk as u8)),
        6
    );
    let of = |tier: &str| {
        let arrivals = arrivals.0.lock().expect("no panic");
        arrivals.iter().filter(|name| *name == tier).count()
    };
    until("both tiers have reported all chunks", || {
        (of(DRAM), of("disk")) == (6, 6)
    });
}

#[test]
fn a_setting_that_is_not_possible_is_named() {
    let refused = CacheBuilder::new("", "layout", CHUNK).build();
    let text = refused.expect_err("no model").to_string();
    assert!(text.starts_with("model \"\""), "{text}");
}

#[cfg(feature = "shared")]
mod shared {
    use lmc::engine::{EngineError, EngineHost, LookupRequest, Rank};
    use lmc::transfer::{Key, Keys};
    use lmc::{BuildError, OwnerId};
    use lmc_testkit::until;

    use super::*;

    const ANY: &str = "127.0.0.1:0";

    fn keys(secret: u8) -> Keys {
        Key::new(&[secret; 32]).expect("long enough").into()
    }

    fn alone() -> CacheBuilder {
        CacheBuilder::new("model", "a", CHUNK)
            .chunk_size(16)
            .dram(1 << 20)
    }

    fn store(cache: &PromptCache, tokens: &[u32]) -> usize {
        cache.store(tokens, |chunk, bytes| bytes.fill(chunk as u8))
    }

    #[test]
    fn chunks_of_a_peer_are_found_and_not_without_its_key() {
        let tokens: Vec<u32> = (0..96).collect();
        let owner = alone().peers(ANY, keys(1), [""; 0]).build();
        let owner = owner.expect("a port is free");
        assert_eq!(store(&owner, &tokens), 6);
        let address = owner.peers().expect("it has some").node().status().address;
        let reader = |secret| alone().peers(ANY, keys(secret), [&address]).build();
        let (stranger, friend) = (reader(2), reader(1).expect("a port is free"));
        until("the peers are connected", || hits(&friend, &tokens) == 6);
        let stranger = stranger.expect("a port is free");
        let refused = |cache: &PromptCache| {
            let status = cache.peers().expect("it has some").status();
            let failure = status.named.iter().find_map(|peer| peer.failure.clone());
            failure.is_some()
        };
        until("the stranger is refused", || refused(&stranger));
        assert_eq!(hits(&stranger, &tokens), 0);
        // What the friend reads from now on is its own.
        drop(owner);
        assert_eq!(hits(&friend, &tokens), 6);
    }

    #[test]
    fn an_address_that_others_cannot_use_is_refused() {
        for listen in ["0.0.0.0:0", "[::]:0"] {
            let refused = alone().peers(listen, keys(1), [""; 0]).build();
            let text = refused.expect_err("a wildcard").to_string();
            assert!(text.starts_with("peers: expected the address"), "{text}");
        }
    }

    #[test]
    fn a_shared_folder_outlives_its_writer() {
        let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        let url = format!("file://{}", folder.display());
        let tokens: Vec<u32> = (0..96).collect();
        let writer = alone().store(&url).build().expect("a folder");
        assert_eq!(store(&writer, &tokens), 6);
        assert!(
            writer
                .close(Instant::now() + Duration::from_secs(20))
                .is_complete()
        );
        drop(writer);
        let reader = alone().store(&url).build().expect("the same folder");
        // On a busy machine the folder may be late.
        until("the chunks are found", || hits(&reader, &tokens) == 6);
    }

    #[test]
    fn a_clone_of_the_engine_keeps_all_tiers() {
        let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        let tokens: Vec<u32> = (0..96).collect();
        let cache = builder("a", &folder).peers(ANY, keys(1), [""; 0]).build();
        let cache = cache.expect("a port is free");
        assert_eq!(store(&cache, &tokens), 6);
        let (engine, keys) = (cache.engine().clone(), cache.keys(&tokens));
        until("all is on disk", || engine.lower_status()[0].written == 6);
        drop(cache);
        engine.clear_dram(InUse::Remove);
        let hashes = keys.iter().map(|key| key.hash).collect();
        let rank = Rank {
            space: keys[0].space,
            kv_rank: 0,
            chunk_bytes: Some(CHUNK),
        };
        let request = LookupRequest::new(OwnerId(1 << 20), hashes, vec![rank]);
        assert_eq!(engine.lookup(request).wait_blocking().hits, 6);
        assert!(
            engine
                .close(Instant::now() + Duration::from_secs(20))
                .is_complete()
        );
    }

    #[test]
    fn a_cache_that_is_refused_changes_nothing_of_another() {
        let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        let cleared = builder("a", &folder).build().expect("a new folder");
        cleared
            .engine()
            .clear(InUse::Remove)
            .expect("a first clear");
        drop(cleared);
        let tokens: Vec<u32> = (0..96).collect();
        let host = EngineHost::default();
        let first = alone().host(host.clone()).build().expect("memory");
        assert_eq!(store(&first, &tokens), 6);
        let second = builder("b", &folder).host(host).build();
        assert!(matches!(second, Err(BuildError::Engine(EngineError::Host))));
        assert_eq!(hits(&first, &tokens), 6);
    }

    #[test]
    fn chunks_of_another_size_are_others_whatever_the_layout_says() {
        let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        let tokens: Vec<u32> = (0..96).collect();
        let sized = |bytes| {
            CacheBuilder::new("model", "a", bytes)
                .chunk_size(16)
                .dram(1 << 20)
                .disk(&*folder, 64 << 20)
        };
        let cache = sized(CHUNK).build().expect("a new folder");
        assert_eq!(store(&cache, &tokens), 6);
        assert!(
            cache
                .close(Instant::now() + Duration::from_secs(20))
                .is_complete()
        );
        drop(cache);
        let cache = sized(CHUNK / 2).build().expect("the same folder");
        assert_eq!(hits(&cache, &tokens), 0);
        assert_eq!(store(&cache, &tokens), 6);
        until("all is on disk", || {
            cache.engine().lower_status()[0].written == 6
        });
        cache.engine().clear_dram(InUse::Remove);
        assert_eq!(hits(&cache, &tokens), 6);
    }

    #[test]
    fn a_store_without_a_scheme_is_refused() {
        let refused = alone().store("/mnt/shared").build();
        let text = refused.expect_err("no scheme").to_string();
        assert!(text.starts_with("store: expected file:///FOLDER"), "{text}");
    }
}
