//! Threads that use one tier at the same time, in orders that a seed chooses: at each lock another
//! thread may go on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use lmc_backend::conformance::{check_value, fill_value, test_key};
use lmc_memory::{ArenaConfig, PoolConfig, ReservedSlot};
use lmc_testkit::interleave::{explore, random_below, spawn, yield_now};
use lmc_testkit::rounds;

use super::*;
use crate::{Clear, Inserted, Leases, StoredEvent, WriteGrant, WriteStart};

const UNIT: u64 = 64;
const THREADS: usize = 3;
const OWNER: OwnerId = OwnerId(7);
/// Schedules of each test.
fn schedules() -> usize {
    rounds(600, 4000)
}

/// The chunks of the tier by their offset, as its events tell them.
#[derive(Debug, Default)]
struct Ledger {
    resident: parking_lot::Mutex<BTreeMap<u64, ChunkKey>>,
    /// Offsets of chunks that a thread of the test leases, with the number of leases.
    leased: parking_lot::Mutex<BTreeMap<u64, u32>>,
}

impl LocalSink for Ledger {
    fn on_stored(&self, event: StoredEvent<'_>) {
        check_value(event.key, event.slot.bytes()).expect("only whole chunks are findable");
        let mut resident = self.resident.lock();
        let twice = resident.values().any(|key| key == event.key);
        assert!(!twice, "{:?} is there twice", event.key);
        let before = resident.insert(event.slot.offset(), *event.key);
        assert_eq!(before, None, "two chunks lie in one slot");
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        let gone = self.resident.lock().remove(&event.slot.offset());
        assert_eq!(gone, Some(*event.key));
        if !matches!(event.cause, Removal::Removed | Removal::Cleared) {
            let leased = self.leased.lock().contains_key(&event.slot.offset());
            assert!(!leased, "{:?} was evicted while leased", event.key);
        }
    }
}

impl Ledger {
    /// Reads leased chunks twice, with other threads in between.
    fn read(&self, keys: &[ChunkKey], leases: &Leases) {
        for slot in leases.iter() {
            *self.leased.lock().entry(slot.offset()).or_default() += 1;
        }
        for _ in 0..2 {
            for (key, slot) in keys.iter().zip(leases.iter()) {
                check_value(key, slot.bytes()).expect("a leased chunk keeps its bytes");
            }
            yield_now();
        }
        for slot in leases.iter() {
            let mut leased = self.leased.lock();
            let count = leased.get_mut(&slot.offset()).expect("it was counted");
            *count -= 1;
            if *count == 0 {
                leased.remove(&slot.offset());
            }
        }
    }
}

struct Rig {
    tier: LocalTier,
    ledger: Arc<Ledger>,
    /// Makes the pool, which has whole pages, as small as the test wants it.
    ballast: ReservedSlot,
}

impl Rig {
    fn new(units: u64) -> Self {
        let arena = ArenaConfig::anonymous(1).build().expect("a page");
        let config = PoolConfig::default().with_align(UNIT as usize);
        let pool = Pool::new(Arc::new(arena), config).expect("an alignment");
        let rest = pool.usage().capacity - units * UNIT;
        let ballast = pool.reserve(rest).expect("the pool is larger");
        let ledger = Arc::<Ledger>::default();
        let tier = LocalConfig::default()
            .with_shards(2)
            .with_watermarks(0.9, 0.8)
            .build(pool, Some(Arc::clone(&ledger) as _))
            .expect("a configuration");
        Self {
            tier,
            ledger,
            ballast,
        }
    }

    /// Checks a tier that no thread uses any more: nothing is held, every count agrees, and all
    /// chunks can be evicted, those without successors first.
    fn check(self) {
        let tier = self.tier;
        tier.check();
        let usage = tier.usage();
        assert_eq!((usage.leases, usage.writing, usage.pinned), (0, 0, 0));
        assert_eq!(tier.held_bytes(), 0);
        let resident = self.ledger.resident.lock().len() as u64;
        assert_eq!(usage.chunks, resident);
        assert_eq!(
            usage.pool.used,
            self.ballast.padded_len() + resident * UNIT,
            "memory without an owner"
        );
        let parents = tier.stats().evicted_parents;
        drop(self.ballast);
        let whole = tier.begin_write(OWNER, TenantId(0), test_key(99), usage.pool.capacity);
        whole.expect("everything can be evicted");
        assert_eq!(
            tier.stats().evicted_parents,
            parents,
            "a child was counted twice"
        );
    }
}

fn keys(start: u64, len: u64) -> Vec<ChunkKey> {
    (start..start + len).map(test_key).collect()
}

/// All keys are one prompt.
fn parent(n: u64) -> Option<ChunkKey> {
    n.checked_sub(1).map(test_key)
}

fn tenant(n: u64) -> TenantId {
    TenantId((n % 2) as u32)
}

/// Takes memory for a chunk and fills it, with other threads in between.
fn write(started: Result<WriteStart, ReserveError>) -> Option<WriteGrant> {
    let Ok(WriteStart::Reserved(mut grant)) = started else {
        return None;
    };
    let key = grant.mark.key();
    let bytes = grant.slot.bytes_mut();
    let (first, second) = bytes.split_at_mut(UNIT as usize / 2);
    first.fill(0xff);
    second.fill(0xff);
    yield_now();
    fill_value(&key, grant.slot.bytes_mut());
    Some(grant)
}

/// One call of a thread, chosen at random.
fn act(tier: &LocalTier, ledger: &Ledger) {
    let start = random_below(6) as u64;
    let run = keys(start, 3);
    match random_below(10) {
        0..3 => {
            let numbers = start..start + 2;
            let writes = numbers.filter_map(|n| {
                let begun = tier.begin_write(OWNER, tenant(n), test_key(n), UNIT);
                Some(write(begun)?.written(parent(n)))
            });
            let writes: Vec<_> = writes.collect();
            match random_below(3) {
                // Dropping a grant is all that an abort needs.
                0 => drop(writes),
                1 => drop(tier.commit(writes)),
                _ => {
                    let keys: Vec<_> = writes.iter().map(|write| write.mark.key()).collect();
                    let (inserted, leases) = tier.commit_leased(OWNER, writes);
                    let found = keys.into_iter().zip(inserted);
                    let found = found.filter(|(_, inserted)| *inserted != Inserted::Cleared);
                    let found: Vec<_> = found.map(|(key, _)| key).collect();
                    ledger.read(&found, &leases);
                }
            }
        }
        3 | 4 => {
            let mut leases = tier.lease_leading(OWNER, &run);
            ledger.read(&run, &leases);
            leases.truncate(1);
            ledger.read(&run, &leases);
        }
        5 => drop(tier.remove(&run[..2])),
        6 => {
            tier.clear([Clear::Idle, Clear::All][random_below(2)]);
        }
        7 => {
            tier.maintain(2);
            let quota = [None, Some(UNIT), Some(3 * UNIT)][random_below(3)];
            tier.set_quota(TenantId(1), quota);
        }
        8 => {
            tier.pin(&run);
            yield_now();
            tier.unpin(&run);
        }
        _ => {
            let prompt: Vec<_> = (start..start + 3)
                .map(|n| (test_key(n), parent(n)))
                .collect();
            tier.touch(&prompt);
        }
    }
}

#[test]
fn whatever_threads_do_at_once_leased_chunks_stay_and_every_count_agrees() {
    explore(schedules(), || {
        let rig = Rig::new(4);
        let thread = |_| {
            let (tier, ledger) = (rig.tier.clone(), Arc::clone(&rig.ledger));
            spawn(move || (0..4).for_each(|_| act(&tier, &ledger)))
        };
        let threads: Vec<_> = (0..THREADS).map(thread).collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        rig.tier.set_quota(TenantId(1), None);
        rig.check();
    });
}

#[test]
fn of_threads_that_store_one_chunk_at_once_one_writes_it() {
    explore(schedules(), || {
        let rig = Rig::new(16);
        let new: Arc<[AtomicU64; 2]> = Arc::default();
        let granted: Arc<[AtomicU64; 2]> = Arc::default();
        let thread = |number: usize| {
            let (tier, new) = (rig.tier.clone(), Arc::clone(&new));
            let granted = Arc::clone(&granted);
            spawn(move || {
                for n in [number % 2, 1 - number % 2] {
                    let key = test_key(n as u64);
                    // The last thread reads from a lower tier, which waits for no writer.
                    let shared = number == THREADS - 1;
                    let begun = match shared {
                        true => tier.begin_shared_write(OWNER, TenantId(0), key, UNIT),
                        false => tier.begin_write(OWNER, TenantId(0), key, UNIT),
                    };
                    assert!(!shared || !matches!(begun, Ok(WriteStart::Busy)));
                    let Some(grant) = write(begun) else {
                        continue;
                    };
                    if !shared {
                        granted[n].fetch_add(1, Ordering::Relaxed);
                    }
                    let inserted = tier.commit(vec![grant.written(None)])[0];
                    assert_ne!(inserted, Inserted::Cleared, "nothing was cleared");
                    new[n].fetch_add(u64::from(inserted == Inserted::New), Ordering::Relaxed);
                    assert_eq!(tier.contains(&[key]), [Some(UNIT)], "committed is findable");
                }
            })
        };
        let threads: Vec<_> = (0..THREADS).map(thread).collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        for n in 0..2 {
            assert_eq!(new[n].load(Ordering::Relaxed), 1);
            assert!(
                granted[n].load(Ordering::Relaxed) <= 1,
                "two exclusive marks"
            );
        }
        rig.check();
    });
}

#[test]
fn a_write_begun_before_a_clear_is_not_found_after_it() {
    explore(schedules(), || {
        let rig = Rig::new(8);
        let begun: Arc<[AtomicBool; 4]> = Arc::default();
        let writer = {
            let (tier, begun) = (rig.tier.clone(), Arc::clone(&begun));
            spawn(move || {
                let writes = (0..4).filter_map(|n| {
                    let started = tier.begin_write(OWNER, TenantId(0), test_key(n), UNIT);
                    begun[n as usize].store(true, Ordering::Relaxed);
                    Some(write(started)?.written(parent(n)))
                });
                let writes: Vec<_> = writes.collect();
                tier.commit(writes);
            })
        };
        let wanted = random_below(5);
        while begun[..wanted]
            .iter()
            .any(|one| !one.load(Ordering::Relaxed))
        {
            yield_now();
        }
        let all = keys(0, 4);
        // Begun before the clear, as this thread sees it.
        let before: Vec<bool> = begun
            .iter()
            .map(|one| one.load(Ordering::Relaxed))
            .collect();
        match random_below(2) {
            0 => drop(rig.tier.clear(Clear::All)),
            _ => drop(rig.tier.remove(&all)),
        }
        writer.join().expect("no panic");
        for (key, before) in all.iter().zip(before) {
            let found = rig.tier.contains(&[*key])[0].is_some();
            assert!(!(before && found), "{key:?} came back");
        }
        rig.check();
    });
}
