//! Listing and telling an index, of any size and while it changes.

use std::collections::BTreeSet;
use std::sync::Arc;

use lmc_backend::conformance::{Rng, test_key};
use lmc_backend::{ChunkEvent, EventSink};
use lmc_testkit::rounds;
use parking_lot::Mutex;

use super::*;

const SEGMENT: u64 = 1 << 30;

fn put(number: u64, segment: u32, block: u32, generation: u64) -> Record {
    Record::Put(PutRecord {
        key: test_key(number),
        location: Location {
            segment,
            block,
            generation,
        },
        len: 100 + number % 4000,
        payload_sum: number,
    })
}

fn begin(segment: u32, generation: u64) -> Record {
    Record::Begin {
        segment,
        generation,
    }
}

/// An index with `each` chunks in each of its segments.
fn filled(segments: u32, each: u32) -> Index {
    let mut index = Index::new(SEGMENT);
    index.expect((segments * each) as usize);
    for segment in 0..segments {
        let generation = u64::from(segment) + 1;
        assert!(index.apply(&begin(segment, generation)));
        for n in 0..each {
            // Chunks that are written beside each other come in any order.
            let number = u64::from(segment * each + (n ^ 1));
            assert!(index.apply(&put(number, segment, 2 * (n ^ 1), generation)));
        }
    }
    index
}

/// Stores a chunk of which a segment holds ten, in the segment that is written next.
fn store_large(index: &mut Index, key: ChunkKey) {
    let len = 96 << 20;
    let extent = match index.allocate(len, false, None) {
        Allocation::Extent(extent) | Allocation::Begun { extent, .. } => extent,
        other => panic!("{other:?}"),
    };
    assert!(index.apply(&Record::Put(PutRecord {
        key,
        location: extent.location,
        len,
        payload_sum: 0,
    })));
}

/// All chunks, page by page.
fn all(index: &Index, limit: usize) -> Vec<PutRecord> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = index.list(after, limit);
        assert!(page.len() <= limit);
        let Some(last) = page.last() else {
            return found;
        };
        after = Some((last.location.segment, last.location.block));
        found.extend(page);
    }
}

fn made_of(records: &[Record]) -> Index {
    let mut index = Index::new(SEGMENT);
    for record in records {
        assert!(index.apply(record), "{record:?} does not fit");
    }
    index
}

#[test]
fn a_listing_goes_through_all_chunks_in_the_order_of_their_locations() {
    let mut index = filled(5, 100);
    for number in (0..500).filter(|number| number % 7 == 0) {
        assert!(index.remove(&test_key(number)) && !index.remove(&test_key(number)));
    }
    // One begins its next use, one is emptied.
    assert!(index.apply(&begin(1, 6)));
    assert!(index.apply(&put(1000, 1, 4, 6)));
    for number in 300..400 {
        index.remove(&test_key(number));
    }
    let numbers = (0..100).chain(200..300).chain(400..500);
    let mut expected: Vec<u64> = numbers.filter(|number| number % 7 != 0).collect();
    let at = expected.partition_point(|&number| number < 100);
    expected.insert(at, 1000);
    for limit in [1, 3, 64, 100, 10_000] {
        let found = all(&index, limit);
        let keys: Vec<_> = found.iter().map(|put| put.key).collect();
        let expected: Vec<_> = expected.iter().map(|&number| test_key(number)).collect();
        assert_eq!(keys, expected, "{limit} at a time");
        assert!(found.iter().all(|put| index.find(&put.key) == Some(*put)));
    }
    assert_eq!(index.usage().chunks, expected.len() as u64);
}

#[test]
fn a_snapshot_makes_the_same_index() {
    let mut index = filled(40, 1000);
    for number in (0..40_000).filter(|number| number % 3 == 0) {
        index.remove(&test_key(number));
    }
    let mut records = Vec::new();
    let mut snapshot = index.snapshot(&mut records);
    let mut before = records.len();
    while index.tell(&mut snapshot, &mut records) {
        assert!(records.len() - before <= SNAPSHOT_PART);
        before = records.len();
    }
    assert_eq!(all(&made_of(&records), 512), all(&index, 512));
}

/// A checkpoint is written while chunks are removed and segments begin their next use. Those changes are in
/// the log that goes on from it, and both together make what is there in the end.
#[test]
fn a_snapshot_of_an_index_that_changes_makes_the_same_index_with_the_changes() {
    for seed in 0..rounds(4, 20) as u64 {
        let mut rng = Rng::new(seed);
        let mut index = filled(30, 1000);
        let mut records = Vec::new();
        let mut snapshot = index.snapshot(&mut records);
        let (mut log, mut generation) = (Vec::new(), 31);
        while index.tell(&mut snapshot, &mut records) {
            for _ in 0..20 {
                let change = match rng.below(100) {
                    0 => {
                        generation += 1;
                        let clears = ClearsId::new([generation as u8; 16]);
                        Record::Cleared { clears, generation }
                    }
                    1..10 => {
                        generation += 1;
                        begin(rng.below(32) as u32, generation)
                    }
                    _ => Record::Remove {
                        key: test_key(rng.below(30_000)),
                    },
                };
                index.apply(&change);
                log.push(change);
            }
        }
        let mut again = made_of(&records);
        for change in &log {
            assert!(again.apply(change));
        }
        assert_eq!(all(&again, 512), all(&index, 512), "seed {seed}");
        let state = |index: &Index| index.usage().chunks;
        assert_eq!(state(&again), state(&index), "seed {seed}");
    }
}

#[test]
fn a_page_and_a_part_of_many_chunks_visit_few_entries() {
    let (segments, each) = (rounds(100, 1000) as u32, 1000);
    let index = filled(segments, each);
    let visits = |run: &mut dyn FnMut()| {
        VISITED.set(0);
        run();
        VISITED.get()
    };
    let page = visits(&mut || assert_eq!(index.list(Some((segments / 2, 500)), 1024).len(), 1024));
    assert!(page <= 4 * each as usize, "a page visits {page} entries");
    let mut records = Vec::new();
    let mut snapshot = None;
    let begin = visits(&mut || snapshot = Some(index.snapshot(&mut records)));
    assert_eq!(begin, segments as usize);
    let mut snapshot = snapshot.expect("it has begun");
    let mut parts = 0;
    let mut goes_on = true;
    while goes_on {
        let part = visits(&mut || goes_on = index.tell(&mut snapshot, &mut records));
        assert!(part <= 2 * SNAPSHOT_PART, "a part visits {part} entries");
        parts += 1;
    }
    assert_eq!(parts, (segments * each) as usize / SNAPSHOT_PART + 1);
    assert_eq!(records.len(), (segments * (each + 1)) as usize);
}

#[test]
fn a_generation_after_which_no_other_comes_is_damage() {
    let mut index = Index::new(SEGMENT);
    assert!(!index.apply(&begin(0, u64::MAX)));
    assert_eq!(index.set_made(&[0, 1]), []);
    let allocation = index.allocate(100, false, None);
    assert!(
        matches!(allocation, Allocation::Begun { .. }),
        "{allocation:?}"
    );
}

/// A checkpoint that was taken after two clears goes on in a log that has both records still.
#[test]
fn a_clear_that_a_checkpoint_has_passed_removes_nothing_once_more() {
    let mut index = filled(3, 10);
    let mut log = Vec::new();
    for number in 1..3 {
        let (gone, record) = index.clear(ClearsId::new([number; 16]));
        assert_eq!(gone, if number == 1 { 30 } else { 0 });
        log.push(record);
    }
    assert_eq!(index.set_made(&[0, 1, 2]), []);
    let Allocation::Begun { extent, begin, .. } = index.allocate(100, false, None) else {
        panic!("three segments are free");
    };
    let Location {
        segment,
        block,
        generation,
    } = extent.location;
    log.extend([begin, put(100, segment, block, generation)]);
    let mut records = Vec::new();
    index.snapshot(&mut records);
    let mut again = made_of(&records);
    // What was stored between the two clears, or before both, is not there.
    log.insert(1, put(99, 1, 4, 2));
    let applied: Vec<bool> = log.iter().map(|record| again.apply(record)).collect();
    assert_eq!(applied, [true, false, true, true, true]);
    assert_eq!(again.clears(), ClearsId::new([2; 16]));
    assert_eq!(again.usage().chunks, 1);
    assert!(again.find(&test_key(100)).is_some());
}

/// Chunks of an index, as its events tell them; `None` once any may have come or gone.
#[derive(Debug)]
struct Heard(Mutex<Option<BTreeSet<ChunkKey>>>);

impl EventSink for Heard {
    fn changed(&self, event: &ChunkEvent<'_>) {
        assert_eq!(event.tier, "disk");
        let mut heard = self.0.lock();
        let Some(keys) = heard.as_mut() else { return };
        match event.change.is_arrival() {
            true => _ = keys.insert(*event.key),
            false => assert!(keys.remove(event.key), "{event:?} of no chunk"),
        }
    }

    fn any_changed(&self, tier: &str) {
        assert_eq!(tier, "disk");
        *self.0.lock() = None;
    }
}

#[test]
fn events_tell_which_chunks_are_there_however_they_come_and_go() {
    let keys_of = |index: &Index| -> BTreeSet<ChunkKey> {
        all(index, 512).into_iter().map(|put| put.key).collect()
    };
    for seed in 0..rounds(20, 200) as u64 {
        let mut rng = Rng::new(seed);
        let mut index = filled(8, 20);
        assert_eq!(index.set_made(&(0..8).collect::<Vec<_>>()), []);
        let events = Events::default();
        let heard = Arc::new(Heard(Mutex::new(Some(keys_of(&index)))));
        events.listen(Arc::clone(&heard) as _);
        index.report_to(events);
        for step in 0..400 {
            let key = test_key(rng.below(300));
            match rng.below(100) {
                0 => {
                    let clears = ClearsId::new([step as u8; 16]);
                    index.clear(clears);
                    let before = heard.0.lock().replace(BTreeSet::new());
                    assert_eq!(before, None, "seed {seed}");
                }
                1..3 => drop(index.give_up()),
                3..20 => drop(index.remove(&key)),
                20..25 => {
                    if let Some(found) = index.find(&key) {
                        assert!(index.retire(&found));
                    }
                }
                _ => {
                    // Also one that is there already, as when it is moved.
                    store_large(&mut index, key);
                }
            }
            let heard = heard.0.lock();
            assert_eq!(
                heard.as_ref(),
                Some(&keys_of(&index)),
                "seed {seed}, step {step}"
            );
        }
        assert!(index.usage().evicted_chunks > 0, "seed {seed}");
    }
}

/// A reference leads to the chunk that was found, and to no other chunk: not after a removal, not after the chunk
/// was moved, and not in the segment's next use.
#[test]
fn a_reference_to_an_entry_leads_to_its_chunk_or_to_none() {
    for seed in 0..rounds(10, 200) as u64 {
        let mut rng = Rng::new(seed);
        let mut index = filled(6, 8);
        assert_eq!(index.set_made(&(0..6).collect::<Vec<_>>()), []);
        let mut kept = Vec::new();
        for step in 0..400 {
            let key = test_key(rng.below(60));
            kept.extend(index.find_entry(&key));
            match rng.below(100) {
                0 => drop(index.clear(ClearsId::new([step as u8; 16]))),
                1..3 => drop(index.give_up()),
                3..30 => drop(index.remove(&key)),
                _ => {
                    store_large(&mut index, key);
                }
            }
            for (entry, before) in &kept {
                let now = index.find_entry(&before.key);
                let expected = now.filter(|(now, _)| now == entry).map(|(_, found)| found);
                let led = index.record_at(*entry, &before.key);
                assert_eq!(led, expected, "seed {seed}, step {step}");
                assert_eq!(index.record_at(*entry, &test_key(61)), None);
            }
        }
        assert!(kept.len() > 50, "seed {seed}");
    }
}
