//! A tier over a store, with a pool.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Conformance, Guarantee, block_on, check_value, fill_value, lens_of, load_batch, store_batch,
    test_key,
};
use lmc_backend::{
    Backend, BackendError, Clears, Health, LoadItem, Loaded, NoEngine, StoreItem, Stored,
};
use lmc_backend_remote::conformance::{FaultyStore, StoreFaults};
use lmc_backend_remote::format::{ChunkFolder, ClearsRecord, Generation, Name, Scope};
use lmc_backend_remote::{ListedObject, RemoteConfig, RemoteTier, Store, read_clears};
use lmc_key::ChunkKey;
use lmc_memory::Pool;
use lmc_testkit::{pool, soon, until};
use tokio::runtime::{Builder, Runtime};

pub(crate) fn runtime() -> Runtime {
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(2).enable_all().build().unwrap()
}

/// A chunk to store, of the bytes that its key says.
pub(crate) fn item(pool: &Pool, key: ChunkKey, len: u64) -> StoreItem {
    let mut slot = pool.reserve(len).unwrap();
    fill_value(&key, slot.bytes_mut());
    StoreItem::new(key, slot.written().seal())
}

/// Returns true for a hit, which has the right bytes, and false for a miss.
pub(crate) fn is_hit(key: &ChunkKey, loaded: Loaded) -> bool {
    match loaded {
        Loaded::Hit(slot) => {
            check_value(key, slot.bytes()).unwrap();
            true
        }
        Loaded::Miss(_) => false,
        other => panic!("{other:?}"),
    }
}

/// Returns the object of clears of a store where nothing was cleared.
pub(crate) fn clears_object() -> Vec<u8> {
    let object = ClearsRecord {
        generation: Generation::new([b'g'; 8]),
        clears: Clears::default(),
    };
    object.encode()
}

/// Waits until a tier is in use. Carries out what others have cleared, as an engine does.
pub(crate) fn wait_until_used(tier: &RemoteTier) {
    assert!(block_on(tier.ready(soon())), "{:?}", tier.health());
    let _ = block_on(tier.clear(tier.clears(), soon()));
    until("the store is in use", || tier.health() == Health::Ready);
}

/// Checks the tier by the kit, which closes it.
pub(crate) fn passes_the_kit(tier: &RemoteTier) {
    let tally = Conformance::new(Guarantee::Exact).run(tier);
    assert!(tally.hits > 100 && tally.written > 30, "{tally:?}");
}

/// Checks the tier over a store whose answers are wrong or fail, by the kit, which closes it. The
/// store has to be empty.
pub(crate) fn passes_the_lossy_kit(store: Arc<dyn Store>, seed: u64) {
    let store = Arc::new(FaultyStore::new(store, StoreFaults::some(), seed));
    let mut config = RemoteConfig::default();
    config.probe_pause = (Duration::from_millis(1), Duration::from_millis(5));
    let runtime = runtime();
    let tier = config.start(
        store,
        Arc::new(NoEngine::default()),
        runtime.handle().clone(),
    );
    wait_until_used(&tier);
    let kit = Conformance::new(Guarantee::Lossy).with_operations(300);
    let tally = kit.run(&tier);
    assert!(tally.hits > 0 && tally.failures > 5, "{tally:?}");
    let counters = tier.counters();
    // By chance the store fails so often that the tier leaves it out for most of the run.
    let mut some = counters.iter().filter(|(_, count)| *count > 0);
    let is_bad = some.any(|(name, _)| *name == "damaged" || name.ends_with("_taken_out"));
    assert!(is_bad, "{counters:?}");
}

/// A tier over a real server. Its chunks have numbers, and lengths by those.
pub(crate) struct Rig<S> {
    pub(crate) tier: RemoteTier,
    pub(crate) store: Arc<S>,
    pub(crate) pool: Pool,
    pub(crate) runtime: Runtime,
    lens: [u64; 5],
}

impl<S: Store> Rig<S> {
    /// A tier that probes soon and asks for each key. It may not be in use yet.
    pub(crate) fn over(
        store: Arc<S>,
        lens: [u64; 5],
        change: impl FnOnce(&mut RemoteConfig),
    ) -> Self {
        let mut config = RemoteConfig::default();
        config.probe_pause = (Duration::from_millis(5), Duration::from_millis(50));
        config.absent_ttl = Duration::ZERO;
        change(&mut config);
        let runtime = runtime();
        let tier = config.start(
            store.clone(),
            Arc::new(NoEngine::default()),
            runtime.handle().clone(),
        );
        Self {
            tier,
            store,
            pool: pool(32 << 20),
            runtime,
            lens,
        }
    }

    /// Waits until the tier is in use.
    pub(crate) fn used(self) -> Self {
        wait_until_used(&self.tier);
        self
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.tier.health() == Health::Ready
    }

    /// Returns true once the store answers again and no path is known to fail.
    pub(crate) fn is_back(&self) -> bool {
        lens_of(&self.tier, &[test_key(0)], soon())[0].is_ok() && self.is_ready()
    }

    /// Returns the folder of the chunks.
    pub(crate) fn folder(&self) -> ChunkFolder {
        let clears = self.runtime.block_on(read_clears(&*self.store, soon()));
        clears.unwrap().unwrap().unwrap().folder()
    }

    /// Returns the name of a chunk.
    pub(crate) fn name(&self, number: u64) -> Name {
        self.folder().value(test_key(number)).into()
    }

    pub(crate) fn len(&self, number: u64) -> u64 {
        self.lens[number as usize % self.lens.len()]
    }

    pub(crate) fn store(&self, numbers: Range<u64>) -> Vec<Result<Stored, BackendError>> {
        let item = |number| item(&self.pool, test_key(number), self.len(number));
        store_batch(&self.tier, numbers.map(item).collect(), soon())
    }

    pub(crate) fn write(&self, numbers: Range<u64>) {
        for stored in self.store(numbers) {
            assert!(matches!(stored, Ok(Stored::Written)), "{stored:?}");
        }
    }

    /// Stores chunks again in a store that has lost everything. Until the tier gives a new generation to the
    /// store, it stores chunks under the earlier one, and then finds these no more.
    pub(crate) fn write_after_loss(&self, numbers: Range<u64>) {
        until("the chunks are in the new generation", || {
            self.store(numbers.clone());
            let clears = self.runtime.block_on(read_clears(&*self.store, soon()));
            let Ok(Ok(Some(clears))) = clears else {
                return false;
            };
            let keys = numbers.clone().map(test_key);
            let names: Vec<_> = keys.map(|key| clears.folder().value(key)).collect();
            let heads = self.runtime.block_on(self.store.heads(&names, soon()));
            heads.iter().all(|head| matches!(head, Ok(Some(_))))
        });
    }

    /// Loads chunks into slots that are longer than they by some bytes.
    pub(crate) fn load(
        &self,
        numbers: Range<u64>,
        longer_by: u64,
        deadline: Instant,
    ) -> Vec<Loaded> {
        let item = |number| {
            let slot = self.pool.reserve(self.len(number) + longer_by);
            LoadItem::new(test_key(number), slot.unwrap())
        };
        load_batch(&self.tier, numbers.map(item).collect(), deadline)
    }

    /// Returns the number of hits, each of which has the right bytes.
    pub(crate) fn hits_by(&self, numbers: Range<u64>, deadline: Instant) -> usize {
        let loaded = self.load(numbers.clone(), 0, deadline).into_iter();
        let hits = loaded.zip(numbers).filter_map(|(loaded, number)| {
            let slot = loaded.hit()?;
            check_value(&test_key(number), slot.bytes()).unwrap();
            Some(())
        });
        hits.count()
    }

    pub(crate) fn hits(&self, numbers: Range<u64>) -> usize {
        self.hits_by(numbers, soon())
    }

    /// Checks that slots of another length than their values' get nothing of them.
    pub(crate) fn refuses_other_lengths(&self, numbers: Range<u64>) {
        for loaded in self.load(numbers, 1, soon()) {
            assert!(matches!(loaded, Loaded::Failed { .. }), "{loaded:?}");
        }
    }

    /// Lists a scope in pages of at most `limit` objects.
    pub(crate) fn listed(&self, scope: Scope, limit: usize) -> Vec<ListedObject> {
        let (mut objects, mut token) = (Vec::new(), None);
        loop {
            let page = self.store.list(scope, token.as_deref(), limit, soon());
            let page = self.runtime.block_on(page).unwrap();
            assert!(page.objects.len() <= limit);
            objects.extend(page.objects);
            token = page.next;
            if token.is_none() {
                return objects;
            }
        }
    }

    /// Checks that each of `count` chunks is listed once, in small pages, too.
    pub(crate) fn lists_once(&self, count: usize) {
        for limit in [1, 7, 1000] {
            let listed = self.listed(Scope::VALUES, limit).into_iter();
            let mut names: Vec<String> = listed.map(|object| object.name.to_string()).collect();
            names.sort();
            let before = names.len();
            names.dedup();
            assert_eq!((names.len(), before), (count, count), "pages of {limit}");
        }
    }
}
