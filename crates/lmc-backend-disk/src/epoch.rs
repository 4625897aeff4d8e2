//! The clear epoch: which clear of a drive set came last.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Names the last clear of everything: every chunk stored before it is gone.
///
/// Drives of a set compare epochs when they are opened. A drive whose epoch is not the newest
/// missed a clear and is cleared before it serves. Two different origins under one counter are
/// two clears that did not know of each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ClearEpoch {
    /// Clears so far; 0 for none.
    pub counter: u64,
    /// Random id of the last clear; zeroes for none.
    pub origin: [u8; 16],
}

impl ClearEpoch {
    /// The greatest counter that is believed; a greater one is damage.
    pub(crate) const MAX_COUNTER: u64 = 1 << 62;

    /// Returns the epoch of a clear that follows on this one.
    pub(crate) fn next(self) -> Self {
        Self {
            counter: self.counter + 1,
            origin: random_id(),
        }
    }

    /// Returns the epoch that all of these have to reach: the newest, or one above it where two
    /// clears share the newest counter.
    pub(crate) fn agreed(epochs: impl IntoIterator<Item = Self>) -> Self {
        let mut newest = Self::default();
        let mut diverged = false;
        for epoch in epochs {
            if epoch.counter > newest.counter {
                (newest, diverged) = (epoch, false);
            } else if epoch.counter == newest.counter {
                diverged |= epoch.origin != newest.origin;
            }
        }
        match diverged {
            true => newest.next(),
            false => newest,
        }
    }
}

/// Returns 16 random bytes.
pub(crate) fn random_id() -> [u8; 16] {
    let random = || {
        RandomState::new()
            .hash_one(std::process::id())
            .to_le_bytes()
    };
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random());
    id[8..].copy_from_slice(&random());
    id
}

/// Returns an id as hexadecimal text.
pub(crate) fn hex(id: &[u8; 16]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_epoch_wins_and_a_tie_of_two_clears_is_above_both() {
        let never = ClearEpoch::default();
        let (a, b) = (never.next(), never.next());
        let later = a.next();
        assert_eq!(ClearEpoch::agreed([]), never);
        assert_eq!(ClearEpoch::agreed([never, never]), never);
        assert_eq!(ClearEpoch::agreed([never, a, a]), a);
        assert_eq!(ClearEpoch::agreed([a, b, later]), later);
        for order in [[a, b, never], [never, b, a]] {
            let above = ClearEpoch::agreed(order);
            assert_eq!(above.counter, 2);
            assert!(above != later && above.origin != a.origin && above.origin != b.origin);
        }
    }
}
