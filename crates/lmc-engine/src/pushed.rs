//! Chunks that peers have pushed and that no lookup has found yet.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use lmc_key::{ChunkKey, FoldState};
use parking_lot::Mutex;

/// Time for which a chunk counts if no lookup finds it.
const COUNTED: Duration = Duration::from_secs(60);
/// Most entries of removed chunks in the queue of ends, in addition to the number of chunks.
const MAX_STALE_ENDS: usize = 64;

/// The chunks that were pushed here and not found since. Limits the memory of the latest ones, because their
/// requests may never come.
#[derive(Debug)]
pub(crate) struct PushedChunks {
    /// Most bytes of chunks that count.
    capacity: u64,
    /// Number of chunks, so that the table is rarely locked.
    len: AtomicUsize,
    table: Mutex<PushedTable>,
}

#[derive(Debug)]
struct PushedChunk {
    /// Bytes of the chunk's slot.
    bytes: u64,
    peer: Arc<str>,
    /// End of the time for which the chunk counts; none once it is over.
    end: Option<Instant>,
    /// Number of pushes in progress that bring the chunk.
    receiving: u32,
}

#[derive(Debug, Default)]
struct PushedTable {
    by_key: HashMap<ChunkKey, PushedChunk, FoldState>,
    /// Ends of the chunks in order, including those of removed chunks.
    ends: VecDeque<(ChunkKey, Instant)>,
    /// Bytes of the chunks that count.
    bytes: u64,
    /// Bytes of the chunks that count, by peer.
    by_peer: HashMap<Arc<str>, u64>,
}

impl PushedTable {
    fn add(&mut self, key: ChunkKey, bytes: u64, peer: &Arc<str>, end: Instant) {
        let chunk = PushedChunk {
            bytes,
            peer: Arc::clone(peer),
            end: Some(end),
            receiving: 0,
        };
        self.by_key.insert(key, chunk);
        self.ends.push_back((key, end));
        self.bytes += bytes;
        *self.by_peer.entry(Arc::clone(peer)).or_default() += bytes;
    }

    /// Removes a chunk. Returns true if it was there.
    fn remove(&mut self, key: &ChunkKey) -> bool {
        self.uncount(key);
        self.by_key.remove(key).is_some()
    }

    fn uncount(&mut self, key: &ChunkKey) {
        let Some(chunk) = self.by_key.get_mut(key) else {
            return;
        };
        if chunk.end.take().is_none() {
            return;
        }
        self.bytes -= chunk.bytes;
        if let Some(bytes) = self.by_peer.get_mut(&chunk.peer) {
            *bytes -= chunk.bytes;
            if *bytes == 0 {
                self.by_peer.remove(&chunk.peer);
            }
        }
    }

    /// Returns true if a chunk counts until exactly this time.
    fn ends_at(&self, (key, end): &(ChunkKey, Instant)) -> bool {
        (self.by_key.get(key)).is_some_and(|chunk| chunk.end == Some(*end))
    }

    fn expire(&mut self, now: Instant) {
        while let Some(&one) = self.ends.front()
            && one.1 <= now
        {
            self.ends.pop_front();
            if self.ends_at(&one) {
                self.uncount(&one.0);
            }
        }
        if self.ends.len() > 2 * self.by_key.len() + MAX_STALE_ENDS {
            let mut ends = std::mem::take(&mut self.ends);
            ends.retain(|one| self.ends_at(one));
            self.ends = ends;
        }
    }
}

impl PushedChunks {
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            capacity,
            len: AtomicUsize::new(0),
            table: Mutex::default(),
        }
    }

    fn change<T>(&self, change: impl FnOnce(&mut PushedTable) -> T) -> T {
        let mut table = self.table.lock();
        let changed = change(&mut table);
        self.len.store(table.by_key.len(), Ordering::Relaxed);
        changed
    }

    /// Adds the leading chunks of a push that begins, each with a slot of `bytes` bytes, as far as the limits
    /// allow. Returns the number of chunks added; the caller must call [`Self::end`] for them.
    pub(crate) fn begin(&self, keys: &[ChunkKey], bytes: u64, peer: &str, now: Instant) -> usize {
        let peer: Arc<str> = peer.into();
        self.change(|table| {
            table.expire(now);
            let mut begun = 0;
            for key in keys {
                if !table.by_key.contains_key(key) {
                    let of_peer = table.by_peer.get(&peer).copied().unwrap_or(0);
                    if table.bytes.saturating_add(bytes) > self.capacity
                        || of_peer.saturating_add(bytes) > self.capacity / 2
                    {
                        break;
                    }
                    table.add(*key, bytes, &peer, now + COUNTED);
                }
                if let Some(chunk) = table.by_key.get_mut(key) {
                    chunk.receiving += 1;
                }
                begun += 1;
            }
            begun
        })
    }

    /// Records that a push has ended. Removes the chunks that are not in DRAM and that no other push brings.
    pub(crate) fn end<'a>(&self, chunks: impl Iterator<Item = (&'a ChunkKey, bool)>) {
        self.change(|table| {
            for (key, is_there) in chunks {
                let Some(chunk) = table.by_key.get_mut(key) else {
                    continue;
                };
                chunk.receiving = chunk.receiving.saturating_sub(1);
                if !is_there && chunk.receiving == 0 {
                    table.remove(key);
                }
            }
        });
    }

    /// Returns for each chunk whether a push is bringing it.
    pub(crate) fn are_receiving(&self, keys: &[ChunkKey]) -> Vec<bool> {
        if self.is_empty() {
            return vec![false; keys.len()];
        }
        let table = self.table.lock();
        let is_receiving = |key| {
            table
                .by_key
                .get(key)
                .is_some_and(|chunk| chunk.receiving > 0)
        };
        keys.iter().map(is_receiving).collect()
    }

    /// Returns true if there are no pushed chunks. Takes no lock.
    pub(crate) fn is_empty(&self) -> bool {
        self.len.load(Ordering::Relaxed) == 0
    }

    /// Removes chunks that a lookup has found, or that are gone. Returns the index of the first key that was
    /// in the table.
    pub(crate) fn remove(&self, keys: &[ChunkKey]) -> Option<usize> {
        if keys.is_empty() || self.is_empty() {
            return None;
        }
        self.change(|table| {
            let removed = keys.iter().map(|key| table.remove(key));
            removed.enumerate().fold(None, |first, (index, removed)| {
                first.or(removed.then_some(index))
            })
        })
    }

    /// Stops counting chunks whose time is over.
    pub(crate) fn expire(&self, now: Instant) {
        if !self.is_empty() {
            self.change(|table| table.expire(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use lmc_key::{ChunkHash, SpaceId};

    use super::*;

    fn keys(numbers: Range<u8>) -> Vec<ChunkKey> {
        let key = |n: u8| ChunkKey {
            space: SpaceId::new([1; 16]),
            kv_rank: 0,
            group: 0,
            hash: ChunkHash::new([n; 32]),
        };
        numbers.map(key).collect()
    }

    impl PushedChunks {
        /// Begins a push of these chunks by `peer`, and ends it with those of them that are there.
        fn push(&self, peer: &str, numbers: Range<u8>, there: Range<u8>, now: Instant) -> usize {
            let keys = keys(numbers.clone());
            let begun = self.begin(&keys, 10, peer, now);
            let is_there = numbers.map(|number| there.contains(&number));
            self.end(keys.iter().zip(is_there).take(begun));
            begun
        }

        fn bytes(&self) -> u64 {
            let table = self.table.lock();
            let of_peers: u64 = table.by_peer.values().sum();
            assert_eq!(table.bytes, of_peers);
            table.bytes
        }
    }

    #[test]
    fn chunks_take_memory_until_they_are_found_or_a_minute_is_over() {
        let (pushed, now) = (PushedChunks::new(80), Instant::now());
        let push = |numbers: Range<u8>, now| pushed.push("a", numbers.clone(), numbers, now);
        assert_eq!(push(0..3, now), 3);
        // Known ones count once. One peer has half of it.
        assert_eq!((push(0..9, now), pushed.bytes()), (4, 40));
        assert_eq!(pushed.push("b", 3..20, 3..20, now), 5);
        assert_eq!(pushed.bytes(), 80);
        assert_eq!(pushed.remove(&keys(1..3)), Some(0));
        assert_eq!((push(20..30, now), pushed.bytes()), (2, 80));
        pushed.remove(&keys(0..1));
        let later = now + COUNTED - Duration::from_millis(1);
        assert_eq!(push(0..1, later), 1);
        // The end of its first time is none of its second.
        pushed.expire(now + COUNTED);
        assert_eq!(pushed.bytes(), 10);
        // One that counts no more was not found yet all the same.
        assert_eq!(pushed.remove(&[keys(1..3), keys(0..1)].concat()), Some(2));
        assert_eq!(pushed.remove(&keys(2..4)), Some(1));
        assert_eq!((pushed.bytes(), pushed.remove(&keys(0..4))), (0, None));
        assert_eq!(pushed.begin(&keys(0..1), u64::MAX, "a", now), 0);
    }

    /// The end of the first push once let the second one's chunk in without a count.
    #[test]
    fn a_chunk_of_two_pushes_counts_until_both_have_ended_without_it() {
        let (pushed, now) = (PushedChunks::new(80), Instant::now());
        let two = keys(0..2);
        assert_eq!(pushed.begin(&two, 10, "a", now), 2);
        assert_eq!(pushed.begin(&two, 10, "b", now), 2);
        pushed.end(two.iter().map(|key| (key, false)));
        assert_eq!(pushed.bytes(), 20);
        pushed.end(two.iter().zip([true, false]));
        assert_eq!(pushed.bytes(), 10);
    }

    #[test]
    fn what_is_remembered_of_chunks_that_are_found_ends_as_well() {
        let (pushed, now) = (PushedChunks::new(80), Instant::now());
        for _ in 0..100 {
            assert_eq!(pushed.push("a", 0..4, 0..4, now), 4);
            pushed.remove(&keys(0..4));
            assert!(pushed.table.lock().ends.len() <= MAX_STALE_ENDS + 4);
        }
    }
}
