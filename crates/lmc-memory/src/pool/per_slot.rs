//! One value for each slot, at an address that never moves.

use std::sync::OnceLock;

/// Values of the first segment; each further segment has twice as many.
const FIRST: usize = 1024;
/// Number of segments that cover every `u32`.
const SEGMENTS: usize = 23;

/// A table that grows without moving its values, so that readers need no lock. Segments that were never
/// accessed have no memory.
#[derive(Debug)]
pub(super) struct PerSlot<T> {
    segments: [OnceLock<Box<[T]>>; SEGMENTS],
}

impl<T> Default for PerSlot<T> {
    fn default() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
        }
    }
}

/// Returns the segment of a value, and its index in the segment.
fn locate(index: u32) -> (usize, usize) {
    let shifted = index as usize + FIRST;
    let segment = (shifted.ilog2() - FIRST.ilog2()) as usize;
    (segment, shifted - (FIRST << segment))
}

impl<T: Default> PerSlot<T> {
    /// Returns the value of a slot.
    pub(super) fn at(&self, index: u32) -> &T {
        let (segment, offset) = locate(index);
        let values = self.segments[segment]
            .get_or_init(|| (0..FIRST << segment).map(|_| T::default()).collect());
        &values[offset]
    }

    /// Returns the value of a slot, if its segment has memory.
    pub(super) fn get(&self, index: u32) -> Option<&T> {
        let (segment, offset) = locate(index);
        Some(&self.segments[segment].get()?[offset])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn every_slot_has_a_value_of_its_own() {
        let counts = PerSlot::<AtomicU32>::default();
        let indices = [0, 1, 1023, 1024, 3071, 3072, 100_000];
        for index in indices {
            assert_eq!(counts.at(index).fetch_add(index + 1, Ordering::Relaxed), 0);
        }
        for index in indices {
            assert_eq!(counts.at(index).load(Ordering::Relaxed), index + 1);
        }
        assert_eq!(locate(u32::MAX).0, SEGMENTS - 1);
    }

    #[test]
    fn segments_without_a_value_have_no_memory() {
        let counts = PerSlot::<AtomicU32>::default();
        counts.at(1024);
        let there = [0, 1023, 1024, 3071, 3072].map(|index| counts.get(index).is_some());
        assert_eq!(there, [false, false, true, true, false]);
    }
}
