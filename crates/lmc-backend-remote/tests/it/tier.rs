//! The tier over the store in memory: the kit, and what the kit does not see.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Conformance, Guarantee, block_on, clear_all, lens_of, load_batch, store_batch, test_key,
};
use lmc_backend::{
    Backend, BackendError, Clear, ClearEpoch, Health, LoadItem, Loaded, LocateHint, Located,
    StoreItem, Stored,
};
use lmc_backend_remote::conformance::{Denied, MemoryStore, StoreFaults};
use lmc_backend_remote::format::{ClearSet, MAX_CLEARS_LEN, Name, SpaceRecord, Tenant};
use lmc_backend_remote::{RemoteConfig, RemoteTier, StaleDeleted};
use lmc_key::{ChunkKey, HashAlgorithm, IdentityText, KeySpace, LayoutFingerprint};
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

/// A tier that is ready, over a store.
struct Rig {
    tier: RemoteTier,
    store: Arc<MemoryStore>,
    pool: Pool,
    runtime: Runtime,
}

impl Rig {
    fn new() -> Self {
        Self::over(Arc::default(), config())
    }

    fn over(store: Arc<MemoryStore>, config: RemoteConfig) -> Self {
        let runtime = runtime();
        let tier = RemoteTier::start(config, store.clone(), runtime.handle().clone());
        wait_until_used(&tier);
        Self {
            tier,
            store,
            pool: pool(1 << 20),
            runtime,
        }
    }

    fn item(&self, key: ChunkKey) -> StoreItem {
        item(&self.pool, key, 5000)
    }

    fn store(&self, key: ChunkKey) -> Result<Stored, BackendError> {
        let mut stored = store_batch(&self.tier, vec![self.item(key)], soon());
        stored.pop().unwrap()
    }

    fn load(&self, key: ChunkKey) -> Loaded {
        let item = LoadItem::new(key, self.pool.reserve(5000).unwrap());
        load_batch(&self.tier, vec![item], soon()).pop().unwrap()
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

    /// Changes the bytes of a stored value.
    fn damage(&self, key: ChunkKey, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = self.store.bytes(Name::Value(key)).unwrap();
        change(&mut bytes);
        self.store.set_bytes(Name::Value(key), Some(bytes));
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
        let is_bad = rig.counter("damaged") > 0 || rig.counter("taken_out") > 0;
        assert!(is_bad, "seed {seed}");
    }
}

#[test]
fn what_is_absent_is_not_asked_for_again_until_it_is_stored() {
    let mut config = config();
    config.absent_ttl = Duration::from_secs(3600);
    let rig = Rig::over(Arc::default(), config);
    let key = test_key(1);
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
    rig.store.set_bytes(Name::Value(key), None);
    assert!(!rig.is_hit(key) && !rig.is_located(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    assert!(rig.is_located(key) && rig.is_hit(key));
}

#[test]
fn a_key_that_is_known_absent_and_was_stored_elsewhere_before_a_clear_is_replaced() {
    let rig = Rig::new();
    let other = Rig::over(Arc::clone(&rig.store), config());
    let key = test_key(1);
    assert!(!rig.is_located(key));
    assert_eq!(other.store(key).unwrap(), Stored::Written);
    clear_all(&rig.tier, soon()).unwrap();
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
    let age = |key| rig.store.age(Name::Value(key)).unwrap();
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
    let bytes = rig.store.bytes(Name::Value(key));
    rig.store.set_bytes(Name::Value(other), bytes);
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
    rig.damage(key, |bytes| bytes[8] = 2);
    let bytes = rig.store.bytes(Name::Value(key));
    assert!(!rig.is_hit(key) && !rig.is_located(key));
    assert_eq!(rig.store(key).unwrap(), Stored::Declined);
    assert_eq!(rig.counter("unknown_format"), 3);
    assert_eq!(rig.store.bytes(Name::Value(key)), bytes);
}

#[test]
fn a_clear_at_one_daemon_reaches_the_others_and_deletes_nothing() {
    let mut polling = config();
    polling.clears_interval = Duration::from_millis(1);
    let rig = Rig::over(Arc::default(), polling.clone());
    let other = Rig::over(Arc::clone(&rig.store), polling);
    let key = test_key(1);
    rig.store(key).unwrap();
    assert!(other.is_hit(key));
    clear_all(&rig.tier, soon()).unwrap();
    until("the clear arrives", || {
        other.tier.clears() == rig.tier.clears()
    });
    assert!(!other.is_located(key) && !other.is_hit(key) && !rig.is_hit(key));
    assert!(rig.store.bytes(Name::Value(key)).is_some());
    // A daemon that computed it before the clear does not bring it back.
    let old = rig.item(key).with_epoch(ClearEpoch::default());
    let stored = block_on(lmc_backend::in_order(
        other.tier.store(vec![old], soon()),
        1,
    ));
    assert!(matches!(stored[..], [Some(Ok(Stored::Declined))]));
    assert_eq!(
        other.store(key).unwrap(),
        Stored::Written,
        "an older one is replaced"
    );
    assert!(rig.is_located(key) && rig.is_hit(key));
    let late = Rig::over(Arc::clone(&rig.store), config());
    assert_eq!(
        late.tier.clears(),
        rig.tier.clears(),
        "known before the first answer"
    );
}

#[test]
fn clears_of_daemons_that_overtake_each_other_are_all_kept() {
    let mut polling = config();
    polling.clears_interval = Duration::from_millis(1);
    let rig = Rig::over(Arc::default(), polling.clone());
    let other = Rig::over(Arc::clone(&rig.store), polling);
    let spaces = [test_key(0).space, test_key(4).space];
    for (rig, space) in [&rig, &other].into_iter().zip(spaces) {
        let clear = Clear::space(space, ClearEpoch::default().next());
        block_on(rig.tier.clear(clear, soon())).unwrap();
    }
    // As if the second had not seen the write of the first.
    let mut lost = ClearSet::default();
    lost.note(other.tier.clears().pop().unwrap());
    rig.store.set_bytes(Name::Clears, Some(lost.encode()));
    until("both are known to both", || {
        [&rig, &other]
            .iter()
            .all(|rig| rig.tier.clears().len() == 2)
    });
    let known = || ClearSet::decode(&rig.store.bytes(Name::Clears).unwrap()).unwrap();
    until("both are in the store", || known().clears().len() == 2);
    rig.store.set_bytes(
        Name::Clears,
        Some(b"LMCCLEAR\x01\0\0\0 and nothing else".to_vec()),
    );
    until("they are written again", || {
        let bytes = rig.store.bytes(Name::Clears).unwrap();
        ClearSet::decode(&bytes).is_ok_and(|set| set.clears().len() == 2)
    });
}

#[test]
fn a_store_that_was_cut_off_learns_of_a_clear_when_it_is_back() {
    let mut polling = config();
    polling.clears_interval = Duration::from_millis(1);
    let rig = Rig::over(Arc::default(), polling);
    rig.store(test_key(1)).unwrap();
    rig.store.fail(true);
    assert!(clear_all(&rig.tier, soon()).is_err());
    assert_eq!(rig.tier.clears().len(), 1);
    rig.store.fail(false);
    until("the clear is in the store", || {
        rig.store.bytes(Name::Clears).is_some()
    });
    until("the store is in use", || rig.tier.health() == Health::Ready);
    assert!(!rig.is_hit(test_key(1)));
}

#[test]
fn clears_of_a_later_version_are_not_overwritten() {
    let store = Arc::new(MemoryStore::default());
    let mut later = ClearSet::default().encode();
    later[8] = 2;
    store.set_bytes(Name::Clears, Some(later.clone()));
    let runtime = runtime();
    let tier = RemoteTier::start(config(), store.clone(), runtime.handle().clone());
    let reason = || match tier.health() {
        Health::Down { reason } => reason,
        _ => String::new(),
    };
    until("the fault is known", || {
        reason().contains("one release of lmc")
    });
    assert!(clear_all(&tier, soon()).is_err());
    assert_eq!(store.bytes(Name::Clears), Some(later));
}

#[test]
fn a_store_whose_clears_are_of_a_later_version_serves_nothing_until_they_are_known() {
    let mut polling = config();
    polling.clears_interval = Duration::from_millis(1);
    let rig = Rig::over(Arc::default(), polling);
    let key = test_key(1);
    rig.store(key).unwrap();
    let mut later = ClearSet::default().encode();
    later[8] = 2;
    for unknown in [later, vec![0; MAX_CLEARS_LEN + 1]] {
        rig.store.set_bytes(Name::Clears, Some(unknown.clone()));
        until("the store is out", || rig.tier.health() != Health::Ready);
        assert!(matches!(rig.load(key), Loaded::Failed { .. }));
        assert_eq!(rig.store.bytes(Name::Clears), Some(unknown), "left alone");
        rig.store.set_bytes(Name::Clears, None);
        until("the store is in use", || rig.tier.health() == Health::Ready);
        assert!(rig.is_hit(key));
    }
}

/// A torn object may have held clears that no daemon which lives knows.
#[test]
fn clears_that_are_damaged_at_the_start_count_as_a_clear_of_everything() {
    let rig = Rig::new();
    for (number, clears) in [(1, 0), (2, 1), (3, 5)] {
        let mut epoch = ClearEpoch::default();
        (0..clears).for_each(|_| epoch = epoch.next());
        let item = rig.item(test_key(number)).with_epoch(epoch);
        let stored = store_batch(&rig.tier, vec![item], soon()).pop().unwrap();
        assert_eq!(stored.unwrap(), Stored::Written);
    }
    rig.store.set_bytes(Name::Clears, Some(b"LMCC".to_vec()));
    let late = Rig::over(Arc::clone(&rig.store), config());
    for number in 1..4 {
        assert!(!late.is_hit(test_key(number)));
    }
    let bytes = rig.store.bytes(Name::Clears).unwrap();
    assert_eq!(
        ClearSet::decode(&bytes).unwrap().clears(),
        late.tier.clears()
    );
}

#[test]
fn a_store_that_fails_is_taken_out_and_taken_back() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.fail(true);
    for _ in 0..10 {
        assert!(matches!(rig.load(key), Loaded::Failed { .. }));
    }
    assert!(matches!(rig.tier.health(), Health::Down { .. }));
    assert_eq!(rig.counter("taken_out"), 1);
    let located = lens_of(&rig.tier, &[key], soon()).pop().unwrap();
    assert!(matches!(located, Err(BackendError::Unavailable(_))));
    assert!(matches!(rig.store(key), Err(BackendError::Unavailable(_))));
    rig.store.fail(false);
    until("it is taken back", || rig.tier.health() == Health::Ready);
    assert!(rig.is_located(key) && rig.is_hit(key));
}

#[test]
fn a_store_that_hangs_is_taken_out_and_holds_no_caller() {
    let mut config = config();
    config.timeout = Duration::from_millis(20);
    let rig = Rig::over(Arc::default(), config);
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.stall(true);
    let brief = || Instant::now() + Duration::from_millis(2);
    until("the store is out", || {
        let located = lens_of(&rig.tier, &[key], brief()).pop().unwrap();
        matches!(located, Err(BackendError::Unavailable(_)))
    });
    // Out: it is not asked at all.
    let item = LoadItem::new(key, rig.pool.reserve(5000).unwrap());
    let loaded = load_batch(&rig.tier, vec![item], soon()).pop().unwrap();
    let Loaded::Failed { error, .. } = loaded else {
        panic!("{loaded:?}");
    };
    assert!(matches!(error, BackendError::Unavailable(_)), "{error}");
    rig.store.stall(false);
    until("it is taken back", || rig.tier.health() == Health::Ready);
    until("it is found", || rig.is_located(key));
}

#[test]
fn callers_with_little_time_do_not_take_a_slow_store_out() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    rig.store.stall(true);
    for _ in 0..20 {
        let brief = Instant::now() + Duration::from_millis(1);
        let located = lens_of(&rig.tier, &[key], brief).pop().unwrap();
        assert!(
            matches!(located, Err(BackendError::Deadline)),
            "{located:?}"
        );
    }
    rig.store.stall(false);
    assert!(rig.is_located(key));
    assert_eq!(rig.counter("taken_out"), 0);
}

#[test]
fn lookups_under_way_are_bounded() {
    let rig = Rig::new();
    rig.store.stall(true);
    for n in 0..100 {
        let brief = Instant::now();
        assert!(lens_of(&rig.tier, &[test_key(n)], brief)[0].is_err());
    }
    until("some are refused", || rig.counter("lookups_refused") >= 30);
    rig.store.stall(false);
}

#[test]
fn a_removal_that_fails_fails_for_each_of_two_equal_keys() {
    let rig = Rig::new();
    let key = test_key(1);
    rig.store(key).unwrap();
    let removed = block_on(rig.tier.remove(&[key, key], soon()));
    assert!(matches!(removed[..], [Ok(true), Ok(false)]), "{removed:?}");
    rig.store.fail(true);
    let removed = block_on(rig.tier.remove(&[key, key], soon()));
    assert!(matches!(removed[..], [Err(_), Err(_)]), "{removed:?}");
}

#[test]
fn what_a_caller_left_does_not_hold_slots() {
    let rig = Rig::new();
    rig.store(test_key(1)).unwrap();
    rig.store.stall(true);
    let item = LoadItem::new(test_key(1), rig.pool.reserve(5000).unwrap());
    let deadline = Instant::now() + Duration::from_secs(3600);
    drop(rig.tier.load(vec![item], deadline));
    until("the slot is back", || rig.pool.usage().slots == 0);
    rig.store.stall(false);
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

#[test]
fn a_deletion_takes_what_clears_have_made_stale_and_leaves_all_else() {
    let rig = Rig::new();
    let (new, later, damaged) = (test_key(50), test_key(51), test_key(52));
    (0..20).for_each(|n| _ = rig.store(test_key(n)).unwrap());
    let delete = || {
        let seen = Arc::new(AtomicU64::new(0));
        let noted = Arc::clone(&seen);
        let note = move |done: StaleDeleted| noted.store(done.seen, Ordering::SeqCst);
        let done = block_on(rig.tier.delete_stale(note));
        (done, seen.load(Ordering::SeqCst))
    };
    let (done, seen) = delete();
    assert!(matches!(done, Ok(done) if done.seen == 20 && done.deleted == 0));
    assert_eq!(seen, 20);
    clear_all(&rig.tier, soon()).unwrap();
    for key in [new, later, damaged] {
        rig.store(key).unwrap();
    }
    rig.damage(later, |bytes| bytes[8] = 2);
    rig.damage(damaged, |bytes| bytes[100] ^= 1);
    rig.store.fail(true);
    assert!(delete().0.is_err());
    rig.store.fail(false);
    until("the store is in use", || rig.tier.health() == Health::Ready);
    let (done, seen) = delete();
    assert!(
        matches!(done, Ok(done) if done.seen == 23 && done.deleted == 21),
        "{done:?}"
    );
    assert_eq!((seen, rig.counter("stale_deleted")), (23, 21));
    let is_there = |key| rig.store.bytes(Name::Value(key)).is_some();
    assert!(is_there(new) && is_there(later) && !is_there(damaged));
    assert!(rig.is_hit(new) && rig.store.bytes(Name::Clears).is_some());
    block_on(rig.tier.close(soon())).unwrap();
    assert!(delete().0.is_err());
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
    /// Describes one space from now on, with a digest or without.
    fn describe(&self, space: &KeySpace, digest: Option<[u8; 16]>) {
        let record = SpaceRecord::new(space, digest);
        let describe = move |id| (id == record.space()).then(|| record.clone());
        self.tier.describe_spaces(describe);
    }

    fn description(&self, space: &KeySpace) -> Option<SpaceRecord> {
        let bytes = self.store.bytes(Name::Space(space.id()))?;
        SpaceRecord::decode(space.id(), &bytes).ok()
    }
}

#[test]
fn a_space_is_described_once_by_the_daemons_that_store_into_it() {
    let rig = Rig::new();
    let (space, key) = described_space("salt");
    // What is stored before the fields are known is described later.
    rig.store(key).unwrap();
    assert_eq!(rig.description(&space), None);
    rig.describe(&space, None);
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
        let other = Rig::over(Arc::clone(&rig.store), config());
        other.describe(&space, digest);
        let before = rig.store.requests();
        let group = 20 + group as u16;
        other.store(ChunkKey { group, ..key }).unwrap();
        let requests = if digest == expected && digest.is_some() {
            4
        } else {
            3
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
    let name = Name::Space(space.id());
    for (there, stays) in [
        (b"{".to_vec(), false),
        (vec![b' '; 1 << 20], false),
        (b"{\"version\": 2}".to_vec(), true),
    ] {
        let rig = Rig::new();
        rig.store.set_bytes(name, Some(there.clone()));
        rig.describe(&space, None);
        let before = rig.store.requests();
        rig.store(key).unwrap();
        let requests = if stays { 3 } else { 4 };
        until("the description was looked at", || {
            rig.store.requests() >= before + requests
        });
        match stays {
            true => assert_eq!(rig.store.bytes(name), Some(there)),
            false => until("it is described", || rig.description(&space).is_some()),
        }
    }
}

/// The breaker took reads away, and its probe, a read, brought them back until the next write. A store
/// that was full, or whose limit of a value is below a chunk, took no write for ever and was well.
#[test]
fn a_store_that_takes_no_writes_is_read_on_and_says_what_helps() {
    for (denied, remedy) in [
        (Denied::Writes, "the right to write"),
        (Denied::WritesFull, "maxmemory"),
        (Denied::WritesTooLarge, "--chunk-size"),
    ] {
        takes_no_writes(denied, remedy);
    }
}

fn takes_no_writes(denied: Denied, remedy: &str) {
    let rig = Rig::new();
    assert_eq!(rig.store(test_key(0)).unwrap(), Stored::Written);
    rig.store.deny(denied);
    // In one batch: the headers that are read for it are read before all writes.
    let items = (1..20).map(|n| rig.item(test_key(n)));
    for written in store_batch(&rig.tier, items.collect(), soon()) {
        written.expect_err("writes are refused");
    }
    assert!(rig.is_hit(test_key(0)));
    assert!(clear_all(&rig.tier, soon()).is_err());
    let health = rig.tier.health();
    assert!(
        matches!(&health, Health::Degraded { reason } if reason.contains(remedy)),
        "{health:?}"
    );
    assert!(!rig.is_located(test_key(1)));
    assert_eq!(rig.counter("taken_out"), 0);
    assert!(rig.counter("failed") >= 19);
    rig.store.deny(Denied::Nothing);
    assert_eq!(rig.store(test_key(1)).unwrap(), Stored::Written);
    clear_all(&rig.tier, soon()).unwrap();
    assert_eq!(rig.tier.health(), Health::Ready);
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
    rig.store.stall_touches(true);
    assert!(rig.is_hit(key));
    until("the touch has failed", || rig.counter("failed") > 0);
    rig.store.stall_touches(false);
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
    rig.describe(&space, None);
    assert_eq!(rig.store(key).unwrap(), Stored::Written);
    // More often than a store may fail before it is taken out.
    until("it has failed a few times", || {
        rig.counter("spaces_undescribed") >= 8
    });
    let state = (rig.tier.health(), rig.counter("taken_out"));
    assert_eq!(state, (Health::Ready, 0));
    let name = Name::Space(space.id());
    assert_eq!(rig.store.bytes(name), None);
    rig.store.deny(Denied::Nothing);
    until("it is described", || rig.store.bytes(name).is_some());
}
