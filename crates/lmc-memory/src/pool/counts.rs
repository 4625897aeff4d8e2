//! One counter of owners for each slot, at an address that never moves.

use std::sync::OnceLock;
#[cfg(not(test))]
use std::sync::atomic::AtomicU32;

#[cfg(test)]
use lmc_testkit::interleave::AtomicU32;

/// Counters of the first segment; each further one has twice as many.
const FIRST: usize = 1024;
/// Segments until every `u32` has its counter.
const SEGMENTS: usize = 23;

/// A table of counters that grows without moving, so that readers need no lock.
#[derive(Debug, Default)]
pub(super) struct Counts {
    segments: [OnceLock<Box<[AtomicU32]>>; SEGMENTS],
}

/// Returns the segment of a counter, and its index there.
fn locate(index: u32) -> (usize, usize) {
    let shifted = index as usize + FIRST;
    let segment = (shifted.ilog2() - FIRST.ilog2()) as usize;
    (segment, shifted - (FIRST << segment))
}

impl Counts {
    /// The counter of a slot.
    pub(super) fn at(&self, index: u32) -> &AtomicU32 {
        let (segment, offset) = locate(index);
        let counters = self.segments[segment]
            .get_or_init(|| (0..FIRST << segment).map(|_| AtomicU32::new(0)).collect());
        &counters[offset]
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn every_index_has_a_counter_of_its_own() {
        let counts = Counts::default();
        let indices = [0, 1, 1023, 1024, 3071, 3072, 100_000];
        for index in indices {
            assert_eq!(counts.at(index).fetch_add(index + 1, Ordering::Relaxed), 0);
        }
        for index in indices {
            assert_eq!(counts.at(index).load(Ordering::Relaxed), index + 1);
        }
        assert_eq!(locate(u32::MAX).0, SEGMENTS - 1);
    }
}
