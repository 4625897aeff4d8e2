//! The health of each path of a store.

use std::cell::Cell;

use super::*;
use lmc_backend::WriteBackend;

/// A tier over a store of which one path at a time can be broken, with a chunk in it.
struct Paths {
    rig: Rig,
    view: Arc<FaultyStore>,
    /// Keys that are known to be absent, so that a write looks for none.
    fresh: Cell<u64>,
}

const STORED: u64 = 1;

impl Paths {
    const BROKEN: [Calls; 3] = [Calls::Lookups, Calls::Loads, Calls::Writes];

    fn new(config: RemoteConfig) -> Self {
        let store: Arc<MemoryStore> = Arc::default();
        let view = FaultyStore::new(store.clone(), StoreFaults::default(), 0);
        let view = Arc::new(view);
        let mut config = config;
        config.absent_ttl = Duration::from_secs(3600);
        let rig = Rig::through(view.clone(), store, config, Clears::default());
        wait_until_used(&rig.tier);
        rig.store(test_key(STORED)).unwrap();
        (100..400).for_each(|n| assert!(!rig.is_located(test_key(n))));
        let fresh = 100.into();
        Self { rig, view, fresh }
    }

    fn fresh(&self) -> ChunkKey {
        test_key(self.fresh.replace(self.fresh.get() + 1))
    }

    fn is_located(&self, deadline: Instant) -> bool {
        let len = lens_of(&self.rig.tier, &[test_key(STORED)], deadline);
        matches!(len[..], [Ok(Some(5000))])
    }

    /// Sends a request of one kind. Returns true if it has done what it is for.
    fn is_sound(&self, calls: Calls, deadline: Instant) -> bool {
        let stored = test_key(STORED);
        match calls {
            // No chunk is offered while loads are out, and headers are read for writes.
            Calls::Lookups => {
                self.is_located(deadline)
                    || matches!(self.rig.store_by(stored, deadline), Ok(Stored::Present))
            }
            Calls::Loads => self.rig.load_by(stored, deadline).hit().is_some(),
            Calls::Writes => matches!(
                self.rig.store_by(self.fresh(), deadline),
                Ok(Stored::Written)
            ),
            _ => {
                let tier = &self.rig.tier;
                block_on(tier.clear(tier.clears(), deadline)).is_ok()
            }
        }
    }

    /// Sends a request to a path with a fault.
    fn fails(&self, broken: Calls, fault: CallFault) {
        let deadline = match fault {
            CallFault::Hanging => Instant::now() + Duration::from_millis(15),
            _ => soon(),
        };
        assert!(!self.is_sound(broken, deadline));
    }

    fn is_out(&self, broken: Calls) -> bool {
        let at = Self::BROKEN.iter().position(|one| *one == broken).unwrap();
        let mut expected = [0; 3];
        expected[at] = 1;
        self.rig.taken_out() == expected
    }

    /// Checks that health names a path that is out.
    fn is_reported(&self, broken: Calls) {
        let (is_reported, name) = match (broken, self.rig.tier.health()) {
            (Calls::Lookups, Health::Down { reason }) => (reason.contains("misses"), "lookups"),
            (Calls::Loads, Health::Degraded { reason }) => (reason.contains("misses"), "loads"),
            (Calls::Writes, Health::Degraded { reason }) => {
                (reason.contains("not written"), "writes")
            }
            other => panic!("{other:?}"),
        };
        let reason = self.rig.reason();
        assert!(
            is_reported && reason.starts_with(&format!("{name} fail")),
            "{reason}"
        );
    }
}

const FAULTS: [CallFault; 2] = [CallFault::Failing, CallFault::Hanging];

/// The header of a chunk, or the clears that were read every 2 s, kept a store in use whose values never
/// came: each lookup waited for them.
#[test]
fn no_success_on_one_path_keeps_another_in_use_or_takes_it_back() {
    for broken in Paths::BROKEN {
        for used in [Calls::Lookups, Calls::Loads, Calls::Writes, Calls::Clears] {
            for fault in FAULTS.into_iter().filter(|_| used != broken) {
                keeps_out(broken, fault, used);
            }
        }
    }
}

fn keeps_out(broken: Calls, fault: CallFault, used: Calls) {
    // Clears are read all the time.
    let mut config = polling();
    config.timeout = Duration::from_millis(20);
    let hour = Duration::from_secs(3600);
    config.probe_pause = (hour, hour);
    let paths = Paths::new(config);
    paths.view.set_fault(broken, Some(fault));
    until("the path is out", || {
        paths.fails(broken, fault);
        assert!(
            paths.is_sound(used, soon()),
            "{broken:?}, {fault:?}, {used:?}"
        );
        paths.is_out(broken)
    });
    let before = paths.view.broken_calls(broken);
    for _ in 0..10 {
        assert!(
            paths.is_sound(used, soon()),
            "{broken:?}, {fault:?}, {used:?}"
        );
    }
    paths.fails(broken, fault);
    assert_eq!(paths.view.broken_calls(broken), before);
    assert!(paths.is_out(broken));
    paths.is_reported(broken);
}

#[test]
fn no_success_on_other_paths_stands_for_the_clears() {
    for fault in FAULTS {
        let clock = Arc::default();
        let paths = Paths::new(polling_by(&clock));
        paths.view.set_fault(Calls::Clears, Some(fault));
        until("the clears are asked for", || {
            paths.view.broken_calls(Calls::Clears) > 0
        });
        for time in [2_900, 3_100] {
            clock.store(time, Ordering::SeqCst);
            for used in Paths::BROKEN {
                let is_sound = paths.is_sound(used, soon());
                assert_eq!(is_sound, time < 3_000, "{fault:?}, {used:?}");
            }
        }
        assert!(matches!(paths.rig.tier.health(), Health::Down { .. }));
        assert_eq!(paths.rig.taken_out(), [0, 0, 0]);
        paths.view.set_fault(Calls::Clears, None);
        wait_until_used(&paths.rig.tier);
    }
}

/// Settings by which a path that is out is soon tried once, and remembered as faulty.
fn tried_soon() -> RemoteConfig {
    let mut config = config();
    config.probe_pause = (Duration::from_millis(1), Duration::from_secs(3600));
    config
}

#[test]
fn one_request_at_a_time_tries_a_path_that_is_out() {
    for broken in Paths::BROKEN {
        let paths = Paths::new(tried_soon());
        paths.view.set_fault(broken, Some(CallFault::Failing));
        until("the path is out", || {
            paths.fails(broken, CallFault::Failing);
            paths.is_out(broken)
        });
        let before = paths.view.broken_calls(broken);
        paths.view.set_fault(broken, Some(CallFault::Hanging));
        let (tier, pool) = (&paths.rig.tier, &paths.rig.pool);
        let (stored, fresh) = (test_key(STORED), paths.fresh());
        let tries = || match broken {
            Calls::Lookups => lens_of(tier, &[stored], soon())[0].is_ok(),
            Calls::Loads => {
                let item = LoadItem::new(stored, pool.reserve(5000).unwrap());
                let loaded = load_batch(tier, vec![item], soon()).pop().unwrap();
                loaded.hit().is_some()
            }
            _ => store_batch(tier, vec![item(pool, fresh, 5000)], soon())[0].is_ok(),
        };
        std::thread::scope(|scope| {
            let trial = scope.spawn(|| until("it is tried", tries));
            until("a request tries it", || {
                paths.view.broken_calls(broken) > before
            });
            for _ in 0..10 {
                assert!(!paths.is_sound(broken, soon()), "{broken:?}");
                // What cannot be loaded is not offered.
                assert_eq!(paths.is_located(soon()), broken == Calls::Writes);
                for used in Paths::BROKEN {
                    assert!(used == broken || paths.is_sound(used, soon()), "{broken:?}");
                }
            }
            assert_eq!(paths.view.broken_calls(broken), before + 1);
            paths.is_reported(broken);
            paths.view.set_fault(broken, None);
            trial.join().unwrap();
        });
        assert!(Paths::BROKEN.iter().all(|&one| paths.is_sound(one, soon())));
        assert_eq!(paths.rig.tier.health(), Health::Ready);
        assert!(paths.is_out(broken), "once");
    }
}

/// A miss, a header and a removal need no value to pass.
#[test]
fn requests_that_move_no_value_do_not_take_a_path_back() {
    let taken_out = |broken| {
        let paths = Paths::new(tried_soon());
        paths.view.set_fault(broken, Some(CallFault::Failing));
        until("the path is out", || {
            paths.fails(broken, CallFault::Failing);
            paths.is_out(broken)
        });
        paths.view.set_fault(broken, None);
        paths
    };
    let paths = taken_out(Calls::Loads);
    until("a miss is answered", || {
        matches!(paths.rig.load(test_key(50)), Loaded::Miss(_))
    });
    paths.is_reported(Calls::Loads);
    assert!(paths.is_located(soon()), "for the load that tries it");
    assert!(paths.is_sound(Calls::Loads, soon()));
    assert_eq!(paths.rig.tier.health(), Health::Ready);

    let paths = taken_out(Calls::Writes);
    until("a chunk that is there is answered", || {
        matches!(paths.rig.store(test_key(STORED)), Ok(Stored::Present))
    });
    let removed = block_on(paths.rig.tier.remove(&[test_key(STORED)], soon()));
    assert!(matches!(removed[..], [Ok(true)]), "{removed:?}");
    paths.is_reported(Calls::Writes);
    assert!(paths.is_sound(Calls::Writes, soon()));
    assert_eq!(paths.rig.tier.health(), Health::Ready);
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
    let health = rig.tier.health();
    assert!(
        matches!(&health, Health::Degraded { reason } if reason.contains(remedy)),
        "{health:?}"
    );
    assert!(!rig.is_located(test_key(1)));
    assert_eq!(rig.taken_out(), [0, 0, 0]);
    assert!(rig.counter("failed") >= 19);
    assert!(clear_all(&rig.tier, soon()).is_err());
    assert!(!rig.is_hit(test_key(0)));
    assert!(matches!(rig.tier.health(), Health::Degraded { .. }));
    rig.store.deny(Denied::Nothing);
    assert_eq!(rig.store(test_key(1)).unwrap(), Stored::Written);
    clear_all(&rig.tier, soon()).unwrap();
    assert_eq!(rig.tier.health(), Health::Ready);
}

/// A store that is full takes small objects, and another one no values above a limit: a small write, or a
/// chunk that was there, ended the fault until the next write.
#[test]
fn a_refusal_is_reported_until_a_write_as_large_succeeds() {
    for denied in [Denied::Writes, Denied::WritesFull, Denied::WritesTooLarge] {
        // Small writes alone would end it after a while.
        let rig = Rig::over(Arc::default(), tried_soon());
        rig.store(test_key(0)).unwrap();
        rig.store.deny(denied);
        rig.store(test_key(1)).expect_err("refused");
        let reason = rig.reason();
        rig.store.deny(Denied::Nothing);
        let small = item(&rig.pool, test_key(2), 100);
        let written = store_batch(&rig.tier, vec![small], soon());
        assert!(matches!(written[..], [Ok(Stored::Written)]), "{written:?}");
        // The object of clears, and then a map and a description.
        clear_all(&rig.tier, soon()).unwrap();
        let small = item(&rig.pool, test_key(3), 4999);
        let written = store_batch(&rig.tier, vec![small], soon());
        assert!(matches!(written[..], [Ok(Stored::Written)]), "{written:?}");
        assert_eq!(rig.tier.health(), Health::Degraded { reason });
        rig.store(test_key(1)).unwrap();
        assert_eq!(rig.tier.health(), Health::Ready);
    }
}

#[test]
fn a_store_that_takes_all_smaller_writes_is_well_after_a_while() {
    let rig = Rig::new();
    rig.store.deny(Denied::WritesFull);
    rig.store(test_key(0)).expect_err("refused");
    rig.store.deny(Denied::Nothing);
    assert!(matches!(rig.tier.health(), Health::Degraded { .. }));
    let mut keys = (1..).map(test_key);
    until("smaller writes end the refusal", || {
        let small = item(&rig.pool, keys.next().unwrap(), 100);
        let written = store_batch(&rig.tier, vec![small], soon());
        assert!(matches!(written[..], [Ok(Stored::Written)]), "{written:?}");
        rig.tier.health() == Health::Ready
    });
}
