//! Sets of keys that are remembered for a short time: keys that the store lacks, keys whose value is damaged,
//! and keys that were touched.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use lmc_key::{ChunkKey, FoldState};
use parking_lot::Mutex;

/// Number of counters of stores; a key's fold selects one.
const STRIPES: usize = 256;

/// Keys that were inserted a short time ago. Bounded in entries; the oldest is dropped first.
#[derive(Debug)]
pub(super) struct RecentKeys {
    state: Mutex<RecentEntries>,
    ttl: Duration,
    max_keys: usize,
}

#[derive(Debug)]
struct RecentEntries {
    until: HashMap<ChunkKey, Instant, FoldState>,
    /// The keys with their ends, oldest first. An entry whose end differs from that in `until` is void.
    order: VecDeque<(Instant, ChunkKey)>,
    stores: Vec<u64>,
}

/// Value of the counter for a key's stripe, read before the store was asked for the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked(u64);

fn stripe(key: &ChunkKey) -> usize {
    key.fold() as usize % STRIPES
}

impl RecentKeys {
    pub(super) fn new(ttl: Duration, max_keys: usize) -> Self {
        Self {
            state: Mutex::new(RecentEntries {
                until: HashMap::default(),
                order: VecDeque::new(),
                stores: vec![0; STRIPES],
            }),
            ttl,
            max_keys,
        }
    }

    /// Returns true if a key was inserted a short time ago.
    pub(super) fn contains(&self, key: &ChunkKey, now: Instant) -> bool {
        let state = self.state.lock();
        state.until.get(key).is_some_and(|&until| now < until)
    }

    /// Records that the store is about to be asked for a key.
    pub(super) fn asking(&self, key: &ChunkKey) -> Asked {
        Asked(self.state.lock().stores[stripe(key)])
    }

    /// Inserts a key, unless it was stored here since the store was asked.
    pub(super) fn insert(&self, key: ChunkKey, asked: Asked, now: Instant) {
        let state = &mut *self.state.lock();
        if self.ttl.is_zero() || self.max_keys == 0 || state.stores[stripe(&key)] != asked.0 {
            return;
        }
        let until = now + self.ttl;
        if state.until.insert(key, until) != Some(until) {
            state.order.push_back((until, key));
        }
        // Void entries count too, so that the length of the list is bounded.
        while let Some(&(until, key)) = state.order.front() {
            if state.order.len() <= self.max_keys && now < until {
                break;
            }
            state.order.pop_front();
            if state.until.get(&key) == Some(&until) {
                state.until.remove(&key);
            }
        }
    }

    /// Records that a key was stored here.
    pub(super) fn stored(&self, key: &ChunkKey) {
        let mut state = self.state.lock();
        state.stores[stripe(key)] += 1;
        state.until.remove(key);
    }
}

#[cfg(test)]
mod tests {
    use lmc_backend::conformance::test_key;

    use super::*;

    const TTL: Duration = Duration::from_secs(2);

    #[test]
    fn an_answer_ends_by_time_and_by_a_store() {
        let absent = RecentKeys::new(TTL, 100);
        let (key, now) = (test_key(1), Instant::now());
        let asked = absent.asking(&key);
        absent.insert(key, asked, now);
        assert!(absent.contains(&key, now) && !absent.contains(&test_key(2), now));
        assert!(!absent.contains(&key, now + TTL));
        absent.stored(&key);
        assert!(!absent.contains(&key, now));
        absent.insert(key, asked, now);
        assert!(
            !absent.contains(&key, now),
            "it was asked for before the store"
        );
        absent.insert(key, absent.asking(&key), now);
        assert!(absent.contains(&key, now));
    }

    #[test]
    fn entries_are_bounded() {
        let (absent, mut now) = (RecentKeys::new(TTL, 10), Instant::now());
        for n in 0..30 {
            now += TTL / 100;
            for key in [test_key(n), test_key(0)] {
                absent.insert(key, absent.asking(&key), now);
            }
            let state = absent.state.lock();
            assert!(state.order.len() <= 10 && state.until.len() <= 10);
        }
        assert!(absent.contains(&test_key(29), now) && absent.contains(&test_key(0), now));
        assert!(!absent.contains(&test_key(1), now));
        absent.insert(test_key(40), absent.asking(&test_key(40)), now + 2 * TTL);
        assert_eq!(absent.state.lock().until.len(), 1);
        let none = RecentKeys::new(Duration::ZERO, 10);
        none.insert(test_key(1), none.asking(&test_key(1)), now);
        assert!(!none.contains(&test_key(1), now));
    }
}
