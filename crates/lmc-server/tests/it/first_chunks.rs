//! The engine over a shared store that has not handed the whole prompt over yet.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lmc_backend::conformance::{block_on, check_value, fill_value, store_batch, test_hash};
use lmc_backend::{NoEngine, StoreItem, Stored};
use lmc_backend_remote::RemoteConfig;
use lmc_backend_remote::conformance::MemoryStore;
use lmc_engine::{
    EngineConfig, EngineContext, EngineHost, Found, LookupRequest, LowerTier, OwnerId, Rank,
    TierPolicy,
};
use lmc_key::{ChunkKey, SpaceId};
use lmc_memory::ArenaConfig;
use lmc_testkit::{pool, soon, until};
use tokio::sync::Semaphore;

const CHUNK: u64 = 4096;
const RANK: Rank = Rank {
    space: SpaceId::new([7; 16]),
    kv_rank: 0,
    chunk_bytes: None,
};

fn key(number: u64) -> ChunkKey {
    ChunkKey {
        space: RANK.space,
        kv_rank: 0,
        group: 0,
        hash: test_hash(number),
    }
}

fn request(owner: u64, numbers: Range<u64>) -> LookupRequest {
    let hashes = numbers.map(|number| key(number).hash).collect();
    LookupRequest::new(OwnerId(owner), hashes, vec![RANK])
}

/// Checks that these leading chunks of a prompt were found, with their bytes.
fn has(found: &Found, chunks: u64) {
    assert_eq!(found.hits as u64, chunks);
    let slots = found.ranks[0].leases.iter();
    for (slot, number) in slots.zip(0..chunks) {
        check_value(&key(number), slot.bytes()).expect("the bytes that were stored");
    }
}

#[test]
fn the_first_chunks_are_usable_while_the_store_holds_the_last_one_back() {
    const CHUNKS: u64 = 8;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime");
    let store = Arc::new(MemoryStore::default());
    let (host, on) = (Arc::new(NoEngine::default()), runtime.handle().clone());
    let tier = RemoteConfig::default().start(store.clone(), host, on);
    let tier = Arc::new(tier);
    assert!(block_on(tier.ready(soon())), "the store answers");
    let memory = pool(1 << 20);
    let item = |number| {
        let mut slot = memory.reserve(CHUNK).expect("an empty pool");
        fill_value(&key(number), slot.bytes_mut());
        StoreItem::new(key(number), slot.written().seal())
    };
    for stored in store_batch(&*tier, (0..CHUNKS).map(item).collect(), soon()) {
        assert!(matches!(stored, Ok(Stored::Written)), "{stored:?}");
    }
    let arena = ArenaConfig::anonymous((32 * CHUNK) as usize).build();
    let mut policy = TierPolicy::default();
    // The machine may be busy.
    policy.locate_timeout = Duration::from_secs(30);
    let mut config = EngineConfig::default();
    config.promotion_timeout = Duration::from_secs(60);
    let lower = LowerTier::new(tier, policy);
    let engine = config.start(
        EngineContext::new(Arc::new(arena.expect("memory")), EngineHost::default())
            .with_tiers([lower]),
    );
    let engine = engine.expect("an engine");

    let gate = Arc::new(Semaphore::new(CHUNKS as usize - 1));
    store.hold_values(Some(Arc::clone(&gate)));
    let whole = engine.lookup(request(1, 0..CHUNKS));
    until("the last value waits in the store", || {
        store.values_read() == CHUNKS && gate.available_permits() == 0
    });
    let mut first = None;
    until("the first chunks are in memory", || {
        // Nothing is promoted for this prompt: it has what is there, at once.
        let found = engine.lookup(request(2, 0..CHUNKS - 1)).try_found();
        first = found.ok();
        first.is_some()
    });
    has(&first.expect("they were found"), CHUNKS - 1);
    assert_eq!(engine.lower_status()[0].promoted, CHUNKS - 1);
    let Err(whole) = whole.try_found() else {
        panic!("the whole prompt was answered without its last chunk");
    };
    gate.add_permits(1);
    has(&whole.wait_blocking(), CHUNKS);
    assert_eq!(store.values_read(), CHUNKS, "each value was read once");
}
