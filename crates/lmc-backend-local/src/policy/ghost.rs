//! A record of recently evicted entries.

use std::collections::VecDeque;

use hashbrown::HashTable;

/// The most recent fingerprints, dropped oldest first. Two keys may share a fingerprint of 32 bits. Then a
/// new entry is taken for one that was here before, which costs a little memory in the wrong queue.
#[derive(Debug, Default)]
pub(super) struct Ghost {
    /// Entries in the order of arrival, including entries recalled since.
    order: VecDeque<u32>,
    present: HashTable<u32>,
}

fn spread(fingerprint: u32) -> u64 {
    u64::from(fingerprint).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Ghost {
    pub(super) fn len(&self) -> usize {
        self.present.len()
    }

    pub(super) fn push(&mut self, fingerprint: u32) {
        let hash = spread(fingerprint);
        let entry = self
            .present
            .entry(hash, |&f| f == fingerprint, |&f| spread(f));
        if let hashbrown::hash_table::Entry::Vacant(vacant) = entry {
            vacant.insert(fingerprint);
            self.order.push_back(fingerprint);
        }
    }

    /// Drops the fingerprint and returns whether it was recorded.
    pub(super) fn recall(&mut self, fingerprint: u32) -> bool {
        let found = self
            .present
            .find_entry(spread(fingerprint), |&f| f == fingerprint);
        found.map(|entry| entry.remove()).is_ok()
    }

    /// Drops the oldest fingerprints until at most `max` are left, recalled ones included.
    pub(super) fn trim(&mut self, max: usize) {
        while self.order.len() > max {
            if let Some(fingerprint) = self.order.pop_front() {
                self.recall(fingerprint);
            }
        }
    }
}
