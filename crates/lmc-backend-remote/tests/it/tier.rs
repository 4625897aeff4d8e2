//! The tier over the store in memory: the kit, and what the kit does not see.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

mod paths;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Conformance, Guarantee, block_on, clear_all, lens_of, load_batch, store_batch, test_key,
};
use lmc_backend::{
    Backend, BackendError, Clears, Health, LoadItem, Loaded, LocateHint, Located, NoEngine,
    StartId, StoreItem, Stored, WriteBackend,
};
use lmc_backend_remote::conformance::{
    CallFault, Calls, Denied, FaultyStore, MemoryStore, StoreFaults,
};
use lmc_backend_remote::format::{
    ChunkFolder, ClearsRecord, Generation, MAX_CLEARS_LEN, Name, SpaceRecord, Tenant,
};
use lmc_backend_remote::{BootClock, RemoteConfig, RemoteTier, SaltDigest, StaleDeleted, Store};
use lmc_key::{ChunkKey, ClearsId, HashAlgorithm, IdentityText, KeySpace, LayoutFingerprint};
use lmc_memory::Pool;
use lmc_testkit::{DEADLINE, pool, rounds, soon, until};
use tokio::runtime::Runtime;
use tokio::sync::Semaphore;

use crate::common::{is_hit, item, passes_the_kit, runtime, wait_until_used};

/// Settings with short pauses, which probes soon and never by itself reads clears again.
fn config() -> RemoteConfig {
    let mut config = RemoteConfig::default();
    config.probe_pause = (Duration::from_millis(1), Duration::from_millis(5));
    config.clears_interval = Duration::from_secs(3600);
    // The machine may be busy.
    config.timeout = DEADLINE;
    config
}

/// Settings that read the clears all the time, by a clock that stands still.
fn polling() -> RemoteConfig {
    polling_by(&Arc::default())
}

/// Settings that read the clears all the time, by a clock that shows these milliseconds: the clears
/// count for 3 s, and a lost object is made again after 2 s.
fn polling_by(clock: &Arc<AtomicU64>) -> RemoteConfig {
    let mut config = config();
    let clock = Arc::clone(clock);
    // The tier reads them again at once, and the clock makes intervals of that.
    config.clears_interval = Duration::from_millis(1);
    config.boot_clock =
        BootClock::driven(move || Duration::from_millis(clock.load(Ordering::SeqCst)) / 1000);
    config
}

/// A tier that is ready, over a store.
struct Rig {
    tier: RemoteTier,
    host: Arc<NoEngine>,
    store: Arc<MemoryStore>,
    pool: Pool,
    runtime: Runtime,
}

impl Rig {
    fn new() -> Self {
        Self::over(Arc::default(), config())
    }

    fn over(store: Arc<MemoryStore>, config: RemoteConfig) -> Self {
        let rig = Self::at(store, config, Clears::default());
        wait_until_used(&rig.tier);
        rig
    }

    /// A tier over a store, of a daemon that has carried out these clears. It may not be in use yet.
    fn at(store: Arc<MemoryStore>, config: RemoteConfig, clears: Clears) -> Self {
        Self::through(store.clone(), store, config, clears)
    }

    /// A tier over a store that it sees through another one.
    fn through(
        view: Arc<dyn Store>,
        store: Arc<MemoryStore>,
        config: RemoteConfig,
        clears: Clears,
    ) -> Self {
        let runtime = runtime();
        let handle = runtime.handle().clone();
        let host = Arc::new(NoEngine::new(clears));
        Self {
            tier: config.start(view, Arc::clone(&host) as _, handle),
            host,
            store,
            pool: pool(1 << 20),
            runtime,
        }
    }

    /// Returns the object of clears.
    fn object(&self) -> Option<ClearsRecord> {
        ClearsRecord::decode(&self.store.bytes(Name::Clears)?).ok()
    }

    fn name(&self, key: ChunkKey) -> Name {
        self.object().unwrap().folder().value(key).into()
    }

    /// Carries out what others have cleared, as the engine of the tier does.
    fn follow(&self) {
        let _ = block_on(self.tier.clear(self.tier.clears(), soon()));
    }

    fn reason(&self) -> String {
        match self.tier.health() {
            Health::Ready => String::new(),
            Health::Degraded { reason } | Health::Down { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    fn item(&self, key: ChunkKey) -> StoreItem {
        item(&self.pool, key, 5000)
    }

    fn store(&self, key: ChunkKey) -> Result<Stored, BackendError> {
        self.store_by(key, soon())
    }

    fn store_by(&self, key: ChunkKey, deadline: Instant) -> Result<Stored, BackendError> {
        let mut stored = store_batch(&self.tier, vec![self.item(key)], deadline);
        stored.pop().unwrap()
    }

    fn load(&self, key: ChunkKey) -> Loaded {
        self.load_by(key, soon())
    }

    fn load_by(&self, key: ChunkKey, deadline: Instant) -> Loaded {
        let item = LoadItem::new(key, self.pool.reserve(5000).unwrap());
        load_batch(&self.tier, vec![item], deadline).pop().unwrap()
    }

    fn is_hit(&self, key: ChunkKey) -> bool {
        is_hit(&key, self.load(key))
    }

    fn is_located(&self, key: ChunkKey) -> bool {
        let len = lens_of(&self.tier, &[key], soon()).pop().unwrap().unwrap();
        assert!(len.is_none_or(|len| len == 5000));
        len.is_some()
    }

    fn counter(&self, name: &str) -> u64 {
        let counters = self.tier.counters();
        let counter = counters.iter().find(|(found, _)| *found == name);
        counter.unwrap_or_else(|| panic!("no counter {name}")).1
    }

    /// Returns how often lookups, loads and writes were taken out.
    fn taken_out(&self) -> [u64; 3] {
        ["lookups_taken_out", "loads_taken_out", "writes_taken_out"].map(|name| self.counter(name))
    }

    /// Changes the bytes of a stored value.
    fn damage(&self, key: ChunkKey, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.store.bytes(self.name(key)).unwrap();
        change(&mut bytes);
        self.store.set_bytes(self.name(key), Some(bytes));
    }
}

#[test]
fn the_tier_over_a_store_passes_the_kit() {
    let rig = Rig::new();
    passes_the_kit(&rig.tier);
}

#[test]
fn the_tier_over_a_faulty_store_passes_the_kit() {
    for seed in 1..=rounds(2, 4) as u64 {
        let store = Arc::new(MemoryStore::faulty(StoreFaults::some(), seed));
        let rig = Rig::over(store, config());
        let kit = Conformance::new(Guarantee::Lossy).with_operations(300);
        let tally = kit.run(&rig.tier);
        assert!(tally.hits > 0 && tally.failures > 5, "{tally:?}");
        let is_bad = rig.counter("damaged") > 0 || rig.taken_out() != [0, 0, 0];
        assert!(is_bad, "seed {seed}");
    }
}

#[test]
fn what_is_absent_is_not_asked_for_again_until_it_is_stored() {
    let mut config = config();
    config.absent_ttl = Duration::from_secs(3600);
    let rig = Rig::over(Arc::default(), config);
    let key = test_key(1);
    rig.store(test_key(0)).unwrap();
    assert!(!rig.is_located(key));
    let before = rig.store.requests();
    assert!(!rig.is_located(key));
    assert_eq!(
        (rig.store.requests(), rig.counter("known_absent")),
        (before, 1)
    );
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert_eq!(rig.store.requests(), before + 1, "no look before the write");
    assert!(rig.is_located(key) && rig.is_hit(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Present);
}

#[test]
fn a_value_that_others_remove_after_a_lookup_is_a_miss_and_is_written_again() {
    let rig = Rig::new();
    let key = test_key(1);
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert!(rig.is_located(key));
    rig.store.set_bytes(rig.name(key), None);
    assert!(!rig.is_hit(key) && !rig.is_located(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert!(rig.is_located(key) && rig.is_hit(key));
}

#[test]
fn a_hit_on_an_old_value_makes_it_young_and_a_hit_on_a_young_one_does_not() {
    const TTL: Duration = Duration::from_secs(10_000);
    let store = Arc::new(MemoryStore::default().with_ttl(TTL));
    let rig = Rig::over(store, config());
    let (hot, cold) = (test_key(1), test_key(2));
    rig.store(hot).unwrap();
    rig.store(cold).unwrap();
    let age = |key| rig.store.age(rig.name(key)).unwrap();
    rig.store.age_by(TTL / 3);
    assert!(rig.is_hit(hot));
    rig.store.age_by(TTL / 3);
    assert!(age(hot) > TTL / 2 && rig.counter("touched") == 0);
    assert!(rig.is_hit(hot));
    until("it is touched", || rig.counter("touched") == 1);
    assert!(age(hot) < TTL / 3 && age(cold) > TTL / 2);
    // Not again so soon, whatever the store says of its age.
    rig.store.age_by(TTL * 2 / 3);
    assert!(rig.is_hit(hot));
    block_on(rig.tier.close(soon())).unwrap();
    assert_eq!(rig.counter("touched"), 1);
}

#[test]
fn two_daemons_read_what_either_has_written() {
    let rig = Rig::new();
    let other = Rig::over(Arc::clone(&rig.store), config());
    for n in 0..20 {
        let (writer, reader) = if n % 2 == 0 {
            (&rig, &other)
        } else {
            (&other, &rig)
        };
        assert_eq!(writer.store(test_key(n)).unwrap(), Stored::Written);
        assert_eq!(reader.store(test_key(n)).unwrap(), Stored::Present);
        assert!(reader.is_located(test_key(n)) && reader.is_hit(test_key(n)));
    }
}

#[test]
fn a_damaged_value_is_a_miss_and_is_written_again() {
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 5] = [
        ("payload", |bytes| bytes[1000] ^= 1),
        ("header", |bytes| bytes[100] ^= 1),
        ("end", |bytes| bytes.truncate(1000)),
        ("all but some bytes", |bytes| bytes.truncate(10)),
        ("every byte", Vec::clear),
    ];
    let rig = Rig::new();
    for (n, (what, damage)) in damages.into_iter().enumerate() {
        let key = test_key(n as u64);
        rig.store(key).unwrap();
        rig.damage(key, damage);
        assert!(!rig.is_hit(key), "{what}");
        assert!(!rig.is_located(key), "{what}");
        assert!(rig.counter("damaged") > n as u64, "{what}");
        assert_eq!(rig.store(key).unwrap(), Stored::Written, "{what}");
        assert!(rig.is_located(key) && rig.is_hit(key), "{what}");
    }
}

#[test]
fn a_value_under_the_name_of_another_is_a_miss_and_is_replaced() {
    let rig = Rig::new();
    let (key, other) = (test_key(1), test_key(2));
    rig.store(key).unwrap();
    let bytes = rig.store.bytes(rig.name(key));
    rig.store.set_bytes(rig.name(other), bytes);
    assert!(!rig.is_hit(other) && !rig.is_located(other));
    assert_eq!(rig.counter("other_key"), 2);
    assert_eq!(rig.store(other).unwrap(), Stored::Written);
    assert!(rig.is_hit(other) && rig.is_hit(key));
}

#[test]
fn a_value_of_a_later_version_is_a_miss_and_is_left_alone() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.damage(key, |bytes| bytes[8] = 3);
    let bytes = rig.store.bytes(rig.name(key));
    assert!(!rig.is_hit(key) && !rig.is_located(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Declined);
    assert_eq!(rig.counter("unknown_format"), 3);
    assert_eq!(rig.store.bytes(rig.name(key)), bytes);
}

#[test]
fn a_clear_at_one_daemon_reaches_the_others_and_deletes_nothing() {
    let rig = Rig::over(Arc::default(), polling());
    let other = Rig::over(Arc::clone(&rig.store), polling());
    let key = test_key(1);
    rig.store(key).unwrap();
    assert!(other.is_hit(key));
    let stored = rig.name(key);
    clear_all(&rig.tier, soon()).unwrap();
    assert!(!rig.is_hit(key));
    until("the clear arrives", || {
        other.tier.clears() == rig.tier.clears()
    });
    // No chunk passes until the engine has carried it out.
    assert!(matches!(other.load(key), Loaded::Failed { .. }));
    assert!(other.store(key).is_err() && other.reason().contains("this daemon has not"));
    other.follow();
    assert!(!other.is_hit(key));
    assert!(rig.store.bytes(stored).is_some());
    assert_eq!(other.store(key).unwrap(), Stored::Written);
    until("it is found", || rig.is_located(key));
    assert!(rig.is_hit(key));
    let late = Rig::at(Arc::clone(&rig.store), config(), Clears::default());
    assert!(block_on(late.tier.ready(soon())));
    assert_eq!(
        late.tier.clears(),
        rig.tier.clears(),
        "known before the first answer"
    );
    assert!(matches!(late.load(key), Loaded::Failed { .. }));
    late.follow();
    assert!(late.is_hit(key));
}

/// Each daemon's clears were counted, and the greater count won: the clear of the daemon with the
/// smaller one was confirmed and dropped.
#[test]
fn a_confirmed_clear_holds_beside_a_daemon_that_has_cleared_more_often() {
    let rig = Rig::over(Arc::default(), polling());
    let other = Rig::over(Arc::clone(&rig.store), config());
    let mut often = Clears::default();
    for _ in 0..2 {
        often.count(StartId::new([1; 16])).unwrap();
        block_on(rig.tier.clear(Arc::new(often.clone()), soon())).unwrap();
    }
    let key = test_key(1);
    rig.store(key).unwrap();
    // It has not looked at the store since.
    let mut once = Clears::default();
    once.count(StartId::new([2; 16])).unwrap();
    let cleared = block_on(other.tier.clear(Arc::new(once.clone()), soon())).unwrap();
    assert!(cleared.is_durable);
    let object = rig.object().unwrap().clears;
    assert!(object.contains(&often) && object.contains(&once));
    let is_hit = |rig: &Rig| rig.load(key).hit().is_some();
    assert!(!is_hit(&other));
    other.follow();
    assert!(!is_hit(&other));
    until("the clear arrives", || rig.tier.clears().contains(&once));
    assert!(!is_hit(&rig));
    rig.follow();
    assert!(!is_hit(&rig));
}

/// Two clears of one engine, of which the second came first, took the store out for good.
#[test]
fn clears_that_overtake_each_other_on_their_way_leave_the_store_in_use() {
    let rig = Rig::over(Arc::default(), polling());
    let mut first = Clears::default();
    first.count(StartId::new([1; 16])).unwrap();
    let mut second = first.clone();
    second.count(StartId::new([1; 16])).unwrap();
    for clears in [&second, &first] {
        block_on(rig.tier.clear(Arc::new(clears.clone()), soon())).unwrap();
    }
    let key = test_key(1);
    rig.store(key).unwrap();
    assert!(rig.load(key).hit().is_some());
    assert_eq!(*rig.tier.clears(), second);
}

/// One key that is denied, while all others work, left a daemon with the clears that it had read first,
/// for good.
#[test]
fn a_daemon_that_cannot_read_the_clears_stops_using_the_store() {
    let rig = Rig::over(Arc::default(), polling());
    let clock = Arc::default();
    let faults = StoreFaults::default();
    let view = Arc::new(FaultyStore::new(rig.store.clone(), faults, 1));
    let other = Rig::through(
        view.clone(),
        rig.store.clone(),
        polling_by(&clock),
        Clears::default(),
    );
    wait_until_used(&other.tier);
    let key = test_key(1);
    rig.store(key).unwrap();
    assert!(other.is_hit(key));
    view.set_fault(Calls::Clears, Some(CallFault::Denied));
    clear_all(&rig.tier, soon()).unwrap();
    // Other traffic says nothing of the clears.
    for _ in 0..20 {
        assert!(other.is_hit(key));
    }
    clock.store(2_900, Ordering::SeqCst);
    assert!(other.is_hit(key), "within three intervals");
    clock.store(3_100, Ordering::SeqCst);
    assert!(matches!(other.load(key), Loaded::Failed { .. }));
    assert!(matches!(other.tier.health(), Health::Down { .. }));
    until("the reason is known", || {
        let reason = other.reason();
        reason.contains("denies access") && reason.contains("may read and write v2/clears")
    });
    assert!(other.counter("clears_unread") > 0);
    assert_eq!(other.taken_out(), [0, 0, 0]);
    view.set_fault(Calls::Clears, None);
    until("they are read", || other.tier.clears() == rig.tier.clears());
    other.follow();
    assert!(!other.is_hit(key));
}

/// A daemon that started after the object was evicted took an absent one for no clear, and its own first
/// clear was below the epochs of the values.
#[test]
fn chunks_of_a_store_that_lost_its_clears_are_not_found_any_more() {
    for damaged in [None, Some(b"LMCCLEAR".to_vec())] {
        let rig = Rig::over(Arc::default(), config());
        let key = test_key(1);
        rig.store(key).unwrap();
        for _ in 0..3 {
            clear_all(&rig.tier, soon()).unwrap();
            rig.store(key).unwrap();
        }
        let before = rig.object().unwrap().generation;
        block_on(rig.tier.close(soon())).unwrap();
        rig.store.set_down(false);
        rig.store.set_bytes(Name::Clears, damaged.clone());
        let clock = Arc::default();
        let late = Rig::at(rig.store.clone(), polling_by(&clock), Clears::default());
        until("it waits for those who know more", || {
            late.reason().contains("puts it back")
        });
        clock.store(1_900, Ordering::SeqCst);
        assert!(late.store(key).is_err());
        assert_eq!(late.store.bytes(Name::Clears), damaged);
        clock.store(2_100, Ordering::SeqCst);
        wait_until_used(&late.tier);
        assert!(!late.is_hit(key));
        assert_ne!(late.object().unwrap().generation, before);
        clear_all(&late.tier, soon()).unwrap();
        assert!(!late.is_hit(key));
    }
}

/// A damaged object was taken for a clear with a counter that no peer believed.
#[test]
fn daemons_agree_after_the_clears_were_damaged_or_lost() {
    for harm in [Some(b"LMCCLEAR".to_vec()), None] {
        let rig = Rig::over(Arc::default(), polling());
        let other = Rig::over(Arc::clone(&rig.store), polling());
        clear_all(&rig.tier, soon()).unwrap();
        until("the clear arrives", || {
            other.tier.clears() == rig.tier.clears()
        });
        other.follow();
        let key = test_key(1);
        rig.store(key).unwrap();
        let before = rig.object().unwrap();
        rig.store.set_bytes(Name::Clears, harm);
        until("the object is put back", || {
            rig.object() == Some(before.clone())
        });
        assert!(other.is_hit(key), "chunks stay");
        clear_all(&rig.tier, soon()).unwrap();
        until("the clear arrives", || {
            other.tier.clears() == rig.tier.clears()
        });
        other.follow();
        assert!(!other.is_hit(key) && !rig.is_hit(key));
        for (writer, reader, n) in [(&rig, &other, 2), (&other, &rig, 3)] {
            writer.store(test_key(n)).unwrap();
            assert!(reader.is_hit(test_key(n)));
        }
    }
}

#[test]
fn daemons_that_start_on_an_empty_store_at_once_agree_on_its_generation() {
    let store: Arc<MemoryStore> = Arc::default();
    let rig = |_| Rig::at(Arc::clone(&store), config(), Clears::default());
    let rigs: Vec<Rig> = (0..8).map(rig).collect();
    rigs.iter().for_each(|rig| wait_until_used(&rig.tier));
    rigs[0].store(test_key(1)).unwrap();
    assert!(rigs.iter().all(|rig| rig.is_hit(test_key(1))));
}

#[test]
fn a_daemon_follows_the_generation_of_the_store() {
    let rig = Rig::over(Arc::default(), polling());
    let key = test_key(1);
    rig.store(key).unwrap();
    let other = ClearsRecord {
        generation: Generation::new([9; 8]),
        clears: Clears::default(),
    };
    let before = rig.store.bytes(Name::Clears);
    rig.store.set_bytes(Name::Clears, Some(other.encode()));
    until("its old chunks are misses", || !rig.is_hit(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert!(rig.name(key).to_string().starts_with("v2/0909"));
    rig.store.set_bytes(Name::Clears, before);
    until("the old generation is back", || rig.is_hit(key));
}

#[test]
fn clears_that_were_rolled_back_or_that_two_daemons_wrote_at_once_are_all_kept() {
    let rig = Rig::over(Arc::default(), polling());
    let other = Rig::over(Arc::clone(&rig.store), polling());
    let before = rig.store.bytes(Name::Clears);
    let clears = [1, 2].map(|n| Clears::from_entries([(StartId::new([n; 16]), 1)]).unwrap());
    std::thread::scope(|scope| {
        for (rig, clears) in [&rig, &other].into_iter().zip(&clears) {
            let clears = Arc::new(clears.clone());
            scope.spawn(move || block_on(rig.tier.clear(clears, soon())).unwrap());
        }
    });
    let has_all = || {
        let object = rig.object().unwrap().clears;
        clears.iter().all(|one| object.contains(one))
    };
    assert!(has_all());
    rig.store.set_bytes(Name::Clears, before);
    until("they are written again", has_all);
}

#[test]
fn a_store_that_was_cut_off_learns_of_a_clear_when_it_is_back() {
    let rig = Rig::over(Arc::default(), polling());
    rig.store(test_key(1)).unwrap();
    rig.store.set_down(true);
    assert!(clear_all(&rig.tier, soon()).is_err());
    assert_eq!(rig.tier.clears().total(), 1);
    rig.store.set_down(false);
    until("the clear is in the store", || {
        rig.object().unwrap().clears == *rig.tier.clears()
    });
    until("the store is in use", || rig.tier.health() == Health::Ready);
    assert!(!rig.is_hit(test_key(1)));
}

/// The clears of a later lmc are not known here.
#[test]
fn clears_of_a_later_version_are_left_alone_and_end_the_use_of_the_store() {
    let rig = Rig::over(Arc::default(), polling());
    let key = test_key(1);
    rig.store(key).unwrap();
    let good = rig.store.bytes(Name::Clears).unwrap();
    let mut later = good.clone();
    later[8] = 3;
    for unknown in [later, vec![0; MAX_CLEARS_LEN + 1]] {
        rig.store.set_bytes(Name::Clears, Some(unknown.clone()));
        until("the store is out", || {
            rig.reason().contains("one release of lmc")
        });
        assert!(matches!(rig.load(key), Loaded::Failed { .. }));
        assert!(clear_all(&rig.tier, soon()).is_err());
        assert_eq!(rig.store.bytes(Name::Clears), Some(unknown), "left alone");
        rig.store.set_bytes(Name::Clears, Some(good.clone()));
        wait_until_used(&rig.tier);
    }
}

/// A lifecycle rule removes old objects.
#[test]
fn the_clears_and_the_map_are_written_again_every_day() {
    let clock = Arc::default();
    let mut config = config();
    config.boot_clock = BootClock::driven({
        let clock = Arc::clone(&clock);
        move || Duration::from_secs(AtomicU64::load(&clock, Ordering::SeqCst))
    });
    config.clears_interval = Duration::from_secs(24 * 3600);
    let rig = Rig::over(Arc::default(), config);
    rig.store(test_key(1)).unwrap();
    let map = Name::Map(rig.object().unwrap().folder());
    let day = Duration::from_secs(24 * 3600);
    rig.store.age_by(day);
    clock.store(day.as_secs(), Ordering::SeqCst);
    rig.follow();
    let age = |name| rig.store.age(name).unwrap();
    assert!(age(Name::Clears) < day && age(map) >= day);
    rig.store(test_key(2)).unwrap();
    assert!(age(map) < day);
    rig.store.age_by(day);
    rig.follow();
    assert!(age(Name::Clears) >= day, "not with each reading");
}

/// Nothing below `v1` is read or removed.
#[test]
fn chunks_of_the_old_layout_are_left_alone() {
    let store = Arc::new(MemoryStore::default());
    store.set_foreign("v1/clears", vec![1]);
    let rig = Rig::over(store, config());
    rig.store(test_key(1)).unwrap();
    let delete = rig.tier.delete_stale(|_| {});
    assert!(matches!(block_on(delete), Ok(done) if done.seen == 1 && done.deleted == 0));
    assert!(rig.store.names().contains(&"v1/clears".to_owned()));
}

#[test]
fn a_deletion_takes_what_no_daemon_asks_for_and_leaves_what_it_does_not_know() {
    let rig = Rig::new();
    (0..20).for_each(|n| _ = rig.store(test_key(n)).unwrap());
    let (space, key) = described_space("");
    rig.host.add_space(space.clone());
    rig.store(key).unwrap();
    until("it is described", || rig.description(&space).is_some());
    let first = rig.object().unwrap();
    let delete = || {
        let seen = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&seen);
        let note = move |done: StaleDeleted| noted.store(done.seen, Ordering::SeqCst);
        let done = block_on(rig.tier.delete_stale(note));
        (done, seen.load(Ordering::SeqCst))
    };
    let (done, seen) = delete();
    assert!(matches!(done, Ok(done) if done.seen == 21 && done.deleted == 0));
    assert_eq!(seen, 21);
    clear_all(&rig.tier, soon()).unwrap();
    // A cleared chunk that is stored again has another name.
    rig.store(test_key(0)).unwrap();
    // Folders of another generation, of clears that are not known, and without a map.
    let folder = |generation, clears| ChunkFolder { generation, clears };
    let unknown = ClearsRecord {
        clears: Clears::from_entries([(StartId::new([7; 16]), 1)]).unwrap(),
        ..first.clone()
    };
    let replaced = folder(Generation::new([9; 8]), first.clears.id());
    let unmapped = folder(first.generation, ClearsId::new([8; 16]));
    for folder in [replaced, unknown.folder(), unmapped] {
        rig.store.set_bytes(folder.value(key).into(), Some(vec![1]));
    }
    rig.store
        .set_bytes(Name::Map(unknown.folder()), Some(unknown.encode()));
    rig.store
        .set_bytes(Name::Map(unmapped), Some(first.encode()));
    rig.store.set_down(true);
    assert!(delete().0.is_err());
    rig.store.set_down(false);
    until("the store is in use", || rig.tier.health() == Health::Ready);
    let (done, seen) = delete();
    assert!(
        matches!(done, Ok(done) if done.seen == 25 && done.deleted == 22),
        "{done:?}"
    );
    assert_eq!((seen, rig.counter("stale_deleted")), (25, 22));
    let is_there = |folder: ChunkFolder| {
        let start = folder.to_string();
        rig.store
            .names()
            .iter()
            .any(|name| name.starts_with(&start))
    };
    let current = rig.object().unwrap().folder();
    assert!(is_there(current) && is_there(unknown.folder()) && is_there(unmapped));
    assert!(!is_there(first.folder()) && !is_there(replaced));
    assert!(rig.is_hit(test_key(0)));
    block_on(rig.tier.close(soon())).unwrap();
    assert!(delete().0.is_err());
}

#[test]
fn a_store_that_fails_is_taken_out_and_taken_back() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    let located = || lens_of(&rig.tier, &[key], soon()).pop().unwrap();
    rig.store.set_down(true);
    until("the store is out", || {
        assert!(matches!(located(), Err(BackendError::Unavailable(_))));
        matches!(rig.tier.health(), Health::Down { .. })
    });
    assert_eq!(rig.taken_out(), [1, 0, 0]);
    assert!(matches!(rig.load(key), Loaded::Failed { .. }));
    assert!(matches!(rig.store(key), Err(BackendError::Unavailable(_))));
    rig.store.set_down(false);
    until("a store without requests is not called faulty", || {
        rig.tier.health() == Health::Ready
    });
    until("it is taken back", || located().is_ok());
    assert!(rig.is_located(key) && rig.is_hit(key));
}

#[test]
fn a_store_that_hangs_is_taken_out_and_holds_no_caller() {
    let mut config = config();
    config.timeout = Duration::from_millis(20);
    let rig = Rig::over(Arc::default(), config);
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.set_stalled(true);
    let brief = || Instant::now() + Duration::from_millis(2);
    let located = || lens_of(&rig.tier, &[key], brief()).pop().unwrap();
    until("the store is out", || {
        matches!(located(), Err(BackendError::Unavailable(_)))
    });
    until("it is not asked at all", || {
        let before = rig.store.requests();
        let is_refused = matches!(located(), Err(BackendError::Unavailable(_)));
        is_refused && rig.store.requests() == before
    });
    rig.store.set_stalled(false);
    until("it is found", || {
        matches!(lens_of(&rig.tier, &[key], soon())[..], [Ok(Some(5000))])
    });
    assert_eq!(rig.tier.health(), Health::Ready);
}

#[test]
fn callers_with_little_time_do_not_take_a_slow_store_out() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.set_stalled(true);
    for _ in 0..20 {
        let brief = Instant::now() + Duration::from_millis(1);
        let located = lens_of(&rig.tier, &[key], brief).pop().unwrap();
        assert!(
            matches!(located, Err(BackendError::Deadline)),
            "{located:?}"
        );
    }
    rig.store.set_stalled(false);
    assert!(rig.is_located(key));
    assert_eq!(rig.taken_out(), [0, 0, 0]);
}

#[test]
fn lookups_under_way_are_bounded() {
    let rig = Rig::new();
    rig.store.set_stalled(true);
    for n in 0..100 {
        let brief = Instant::now();
        assert!(lens_of(&rig.tier, &[test_key(n)], brief)[0].is_err());
    }
    until("some are refused", || rig.counter("lookups_refused") >= 30);
    rig.store.set_stalled(false);
}

#[test]
fn a_removal_that_fails_fails_for_each_of_two_equal_keys() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    let removed = block_on(rig.tier.remove(&[key, key], soon()));
    assert!(matches!(removed[..], [Ok(true), Ok(false)]), "{removed:?}");
    rig.store.set_down(true);
    let removed = block_on(rig.tier.remove(&[key, key], soon()));
    assert!(matches!(removed[..], [Err(_), Err(_)]), "{removed:?}");
}

#[test]
fn what_a_caller_left_does_not_hold_slots() {
    let rig = Rig::new();
    rig.store(test_key(1)).unwrap();
    rig.store.set_stalled(true);
    let item = LoadItem::new(test_key(1), rig.pool.reserve(5000).unwrap());
    let deadline = Instant::now() + Duration::from_secs(3600);
    drop(rig.tier.load(vec![item], deadline));
    until("the slot is back", || rig.pool.usage().slots == 0);
    rig.store.set_stalled(false);
}

#[test]
fn a_closed_tier_answers_closed_and_leaves_nothing_running() {
    let rig = Rig::new();
    rig.store(test_key(1)).unwrap();
    block_on(rig.tier.close(soon())).unwrap();
    let located = block_on(rig.tier.locate(&[test_key(1)], LocateHint::none(), soon()));
    assert!(
        matches!(located[..], [Err(BackendError::Closed)]),
        "{located:?}"
    );
    assert!(!matches!(located[..], [Ok(Located::Absent)]));
    until("its tasks have ended", || {
        rig.runtime.metrics().num_alive_tasks() == 0
    });
}

/// A space, and a chunk of it.
fn described_space(salt: &str) -> (KeySpace, ChunkKey) {
    let space = KeySpace {
        algorithm: HashAlgorithm::Blake3,
        chunk_size: 256,
        model: "model".parse().unwrap(),
        world_size: 1,
        layout: LayoutFingerprint::of(b"layout"),
        dtype: "half".parse().unwrap(),
        salt: salt.parse().unwrap(),
        identity: IdentityText::default(),
        tags: None,
    };
    let key = ChunkKey {
        space: space.id(),
        ..test_key(1)
    };
    (space, key)
}

impl Rig {
    fn description(&self, space: &KeySpace) -> Option<SpaceRecord> {
        let folder = self.object()?.folder();
        let named = space.id().after(folder.clears);
        let bytes = self.store.bytes(Name::Space(folder, named))?;
        SpaceRecord::decode(named, folder.clears, &bytes).ok()
    }
}

#[test]
fn a_space_is_described_once_by_the_daemons_that_store_into_it() {
    let rig = Rig::new();
    let (space, key) = described_space("salt");
    // A space whose fields are unknown is described when its next chunk is stored.
    rig.store(key).unwrap();
    assert_eq!(rig.description(&space), None);
    rig.host.add_space(space.clone());
    rig.store(ChunkKey { group: 8, ..key }).unwrap();
    let written = SpaceRecord::new(&space, None);
    until("it is described", || {
        rig.description(&space).as_ref() == Some(&written)
    });
    // The store is not asked again for a while.
    let other_chunk = ChunkKey { group: 9, ..key };
    rig.store(test_key(5)).unwrap();
    let before = rig.store.requests();
    rig.store(other_chunk).unwrap();
    assert_eq!(rig.store.requests(), before + 2, "a look and a write");
    // A daemon without a key leaves it, one with a key adds the digest, and no other takes it back.
    let digests = [None, Some([1; 16]), None, Some([2; 16])];
    let expected = [None, Some([1; 16]), Some([1; 16]), Some([1; 16])];
    for (group, (digest, expected)) in digests.into_iter().zip(expected).enumerate() {
        let mut config = config();
        config.salt_digest = digest.map(|digest| SaltDigest::new(move |_| digest));
        let other = Rig::over(Arc::clone(&rig.store), config);
        other.host.add_space(space.clone());
        let before = rig.store.requests();
        let group = 20 + group as u16;
        other.store(ChunkKey { group, ..key }).unwrap();
        let requests = if digest == expected && digest.is_some() {
            5
        } else {
            4
        };
        until("the description was looked at", || {
            rig.store.requests() >= before + requests
        });
        let found = || rig.description(&space).map(|record| record.tenant());
        until("it is whole", || found() == Some(Tenant::Salted(expected)));
    }
}

#[test]
fn a_description_that_is_damaged_is_written_again_and_one_of_a_later_version_is_left() {
    let (space, key) = described_space("");
    for (there, stays) in [
        (b"{".to_vec(), false),
        (vec![b' '; 1 << 20], false),
        (b"{\"version\": 2}".to_vec(), true),
    ] {
        let rig = Rig::new();
        let name = Name::Space(rig.object().unwrap().folder(), space.id());
        rig.store.set_bytes(name, Some(there.clone()));
        rig.host.add_space(space.clone());
        let before = rig.store.requests();
        rig.store(key).unwrap();
        let requests = if stays { 4 } else { 5 };
        until("the description was looked at", || {
            rig.store.requests() >= before + requests
        });
        match stays {
            true => assert_eq!(rig.store.bytes(name), Some(there)),
            false => until("it is described", || rig.description(&space).is_some()),
        }
    }
}

#[test]
fn a_touch_that_the_deadline_cut_off_is_tried_again() {
    const TTL: Duration = Duration::from_secs(10_000);
    let store = MemoryStore::default().with_ttl(TTL);
    let mut config = config();
    config.timeout = Duration::from_millis(100);
    let rig = Rig::over(Arc::new(store), config);
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.age_by(TTL * 2 / 3);
    rig.store.set_touches_stalled(true);
    assert!(rig.is_hit(key));
    until("the touch has failed", || rig.counter("failed") > 0);
    rig.store.set_touches_stalled(false);
    until("it is touched", || {
        assert!(rig.is_hit(key));
        rig.counter("touched") == 1
    });
}

/// A reader that was slower than the repair hid the repaired value for a minute.
#[test]
fn a_read_from_before_a_repair_does_not_hide_the_repaired_value() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.damage(key, |bytes| bytes[1000] ^= 1);
    let gate = Arc::new(Semaphore::new(0));
    rig.store.hold_values(Some(Arc::clone(&gate)));
    std::thread::scope(|scope| {
        let late = scope.spawn(|| rig.load(key));
        until("the damaged value is read", || rig.store.values_read() == 1);
        rig.store.hold_values(None);
        assert!(!rig.is_hit(key));
        assert_eq!(rig.store(key).unwrap(), Stored::Written);
        gate.add_permits(1);
        assert!(!is_hit(&key, late.join().unwrap()));
    });
    assert_eq!(rig.counter("damaged"), 2);
    assert!(rig.is_hit(key) && rig.is_located(key));
}

#[test]
fn a_description_that_fails_is_tried_again_and_costs_nothing_else() {
    let rig = Rig::new();
    rig.store.deny(Denied::Descriptions);
    let (space, key) = described_space("");
    rig.host.add_space(space.clone());
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    // More often than a store may fail before it is taken out.
    until("it has failed a few times", || {
        rig.counter("spaces_undescribed") >= 8
    });
    let state = (rig.tier.health(), rig.taken_out());
    assert_eq!(state, (Health::Ready, [0, 0, 0]));
    let name = Name::Space(rig.object().unwrap().folder(), space.id());
    assert_eq!(rig.store.bytes(name), None);
    rig.store.deny(Denied::Nothing);
    until("it is described", || rig.store.bytes(name).is_some());
}
