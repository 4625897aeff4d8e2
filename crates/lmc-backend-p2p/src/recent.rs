//! A bounded map that drops the oldest entries.

use std::collections::{HashMap, VecDeque};

use lmc_key::{ChunkKey, FoldState};

/// Values of the chunks that were inserted most recently.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    values: HashMap<ChunkKey, V, FoldState>,
    /// The keys of `values`, each once, the oldest first.
    order: VecDeque<ChunkKey>,
    capacity: usize,
}

impl<V> Recent<V> {
    /// Returns a map of at most `capacity` chunks, at least one.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            values: HashMap::default(),
            order: VecDeque::new(),
            capacity: capacity.max(1),
        }
    }

    pub(crate) fn get(&self, key: &ChunkKey) -> Option<&V> {
        self.values.get(key)
    }

    /// Returns the value of a chunk; inserts one if there is none.
    pub(crate) fn entry(&mut self, key: ChunkKey, new: impl FnOnce() -> V) -> &mut V {
        if !self.values.contains_key(&key) {
            while self.values.len() >= self.capacity {
                let oldest = self.order.pop_front().expect("each value has its key here");
                self.values.remove(&oldest);
            }
            self.order.push_back(key);
        }
        self.values.entry(key).or_insert_with(new)
    }

    /// Keeps the values for which `keep` returns true.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&mut V) -> bool) {
        self.values.retain(|_, value| keep(value));
        self.order.retain(|key| self.values.contains_key(key));
    }
}

#[cfg(test)]
mod tests {
    use lmc_key::{ChunkHash, SpaceId};

    use super::*;

    #[test]
    fn the_oldest_go_first_and_nothing_is_counted_twice() {
        let key = |n: u8| ChunkKey {
            space: SpaceId::new([0; 16]),
            kv_rank: 0,
            group: 0,
            hash: ChunkHash::new([n; 32]),
        };
        let mut recent = Recent::new(3);
        for n in [1, 2, 1, 3, 1] {
            *recent.entry(key(n), || 0) += 1;
        }
        assert_eq!(recent.get(&key(1)), Some(&3));
        *recent.entry(key(4), || 0) += 1;
        let left = [1, 2, 3, 4].map(|n| recent.get(&key(n)).copied());
        assert_eq!(left, [None, Some(1), Some(1), Some(1)]);
        recent.retain(|_| false);
        for n in 1..=4 {
            recent.entry(key(n), || 7);
        }
        let left = [1, 2, 3, 4].map(|n| recent.get(&key(n)).copied());
        assert_eq!(left, [None, Some(7), Some(7), Some(7)]);
    }
}
