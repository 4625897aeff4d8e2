//! Threads that pass slots of one pool to each other, in orders that a seed chooses: at each lock and
//! each change of a count of owners another thread may go on.

use lmc_testkit::interleave::{explore, random_below, spawn, yield_now};
use lmc_testkit::rounds;

use super::*;
use crate::ArenaConfig;

const SLOTS: u64 = 3;
const UNIT: u64 = 64;

/// Slots that all threads see, each with the byte that fills it.
type Shelf = Arc<Mutex<Vec<(u8, SealedSlot)>>>;

fn check(byte: u8, slot: &SealedSlot) {
    let all = slot.bytes().iter().all(|&found| found == byte);
    assert!(all, "a sealed slot was written to");
}

/// One step of a thread: fills a slot with `byte`, or reads, shares or drops what lies on the shelf.
fn step(pool: &Pool, shelf: &Shelf, byte: u8) {
    if random_below(2) == 0 {
        let Some(mut slot) = pool.reserve(UNIT) else {
            return;
        };
        slot.bytes_mut()[..32].fill(byte);
        yield_now();
        slot.bytes_mut()[32..].fill(byte);
        match random_below(4) {
            0 => drop(slot),
            1 => {
                let slot = slot.quarantine();
                yield_now();
                assert!(pool.usage().quarantined_slots > 0);
                slot.release_proven_quiet();
            }
            _ => {
                let sealed = slot.written().seal();
                shelf.lock().push((byte, sealed.clone()));
                check(byte, &sealed);
            }
        }
        return;
    }
    let taken = {
        let mut shelf = shelf.lock();
        let count = shelf.len();
        (count > 0).then(|| shelf.swap_remove(random_below(count)))
    };
    let Some((byte, slot)) = taken else { return };
    let other = slot.clone();
    check(byte, &slot);
    drop(slot);
    yield_now();
    check(byte, &other);
    if random_below(3) == 0 {
        shelf.lock().push((byte, other));
    }
}

#[test]
fn a_slot_goes_back_once_and_only_when_its_last_owner_is_gone() {
    explore(rounds(500, 3000), || {
        let arena = ArenaConfig::anonymous(1).build().expect("a page");
        let config = PoolConfig::default().with_align(UNIT as usize);
        let pool = Pool::new(Arc::new(arena), config).expect("an alignment");
        let rest = pool.usage().capacity - SLOTS * UNIT;
        let ballast = pool.reserve(rest).expect("the pool is larger");
        let shelf = Shelf::default();
        let thread = |number: u8| {
            let (pool, shelf) = (pool.clone(), Arc::clone(&shelf));
            spawn(move || (0..5).for_each(|n| step(&pool, &shelf, number * 16 + n + 1)))
        };
        let threads: Vec<_> = (0..3).map(thread).collect();
        for thread in threads {
            thread.join().expect("no panic");
        }
        let left = std::mem::take(&mut *shelf.lock());
        for (byte, slot) in &left {
            check(*byte, slot);
            assert_eq!(slot.owners(), 1);
        }
        assert_eq!(pool.usage().slots, left.len() as u64 + 1);
        drop((left, ballast));
        let usage = pool.usage();
        assert_eq!(
            (usage.used, usage.slots, usage.quarantined_slots),
            (0, 0, 0)
        );
        assert_eq!(usage.largest_free, usage.capacity);
    });
}
