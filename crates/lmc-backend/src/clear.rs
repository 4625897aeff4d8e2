//! Clears, and the epochs that order them.

use std::fmt;

use lmc_key::SpaceId;

/// Orders clears: a chunk that was computed under an older epoch than the newest one known for its
/// space is gone, wherever a copy of it is found.
///
/// The counter grows with each clear. The origin is random and tells apart two clears that did not
/// know of each other: they share a counter, and neither is newer. [`ClearEpoch::join`] makes of
/// them an epoch above both.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct ClearEpoch {
    /// Number of clears so far; 0 before the first.
    pub counter: u64,
    /// Random id of the last clear; zeroes before the first.
    pub origin: [u8; 16],
}

impl ClearEpoch {
    /// The greatest counter that is believed; a greater one is damage.
    pub const MAX_COUNTER: u64 = 1 << 62;

    /// Returns the epoch of a clear that follows on this one.
    #[must_use]
    pub fn next(self) -> Self {
        let mut origin = [0; 16];
        // Without random numbers two clears of one counter would count as one, so the clock and
        // the address stand in.
        if getrandom::fill(&mut origin).is_err() {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let now = now.map_or(1, |now| now.as_nanos());
            let here = std::ptr::from_ref(&origin) as u128;
            origin = (now ^ (here << 64) ^ u128::from(std::process::id())).to_le_bytes();
        }
        Self {
            counter: self.counter.saturating_add(1).min(Self::MAX_COUNTER),
            origin,
        }
    }

    /// Returns the oldest epoch that is as new as both: the newer of the two, or one above them
    /// where they are two clears of one counter. The order of the arguments does not matter, so
    /// that all who learn of the same two clears agree.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        if self.counter != other.counter {
            return match self.counter > other.counter {
                true => self,
                false => other,
            };
        }
        if self.origin == other.origin {
            return self;
        }
        let mut origin = self.origin;
        for (byte, other) in origin.iter_mut().zip(other.origin) {
            *byte ^= other;
        }
        Self {
            counter: self.counter.saturating_add(1).min(Self::MAX_COUNTER),
            origin,
        }
    }

    /// Returns true for a chunk's epoch under which the chunk is still valid where `known` is the
    /// newest epoch known for its space.
    pub fn is_valid_at(self, known: Self) -> bool {
        self.counter > known.counter || self == known
    }
}

impl fmt::Debug for ClearEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClearEpoch({}", self.counter)?;
        if self.counter > 0 {
            f.write_str(", ")?;
            for byte in &self.origin[..4] {
                write!(f, "{byte:02x}")?;
            }
        }
        f.write_str(")")
    }
}

/// A clear: the chunks that it makes unfindable are those that were computed before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clear {
    /// The space whose chunks are cleared; `None` for all spaces.
    pub space: Option<SpaceId>,
    /// The epoch that begins with the clear.
    pub epoch: ClearEpoch,
}

impl Clear {
    /// Clears all spaces.
    pub fn all(epoch: ClearEpoch) -> Self {
        Self { space: None, epoch }
    }

    /// Clears one space.
    pub fn space(space: SpaceId, epoch: ClearEpoch) -> Self {
        Self {
            space: Some(space),
            epoch,
        }
    }

    /// Returns true if chunks of this space are cleared.
    pub fn covers(&self, space: SpaceId) -> bool {
        self.space.is_none_or(|cleared| cleared == space)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newer_epoch_wins_and_two_clears_of_one_counter_give_one_above_both() {
        let never = ClearEpoch::default();
        let (a, b) = (never.next(), never.next());
        let later = a.next();
        assert_eq!(never.join(never), never);
        assert_eq!(a.join(never), a);
        assert_eq!(b.join(later), later);
        let above = a.join(b);
        assert_eq!(above, b.join(a));
        assert_eq!(above.counter, 2);
        for known in [above, later] {
            assert!(!a.is_valid_at(known) && !b.is_valid_at(known));
        }
        assert!(a.is_valid_at(a) && later.is_valid_at(a));
        assert!(!a.is_valid_at(b) && !b.is_valid_at(a) && !never.is_valid_at(a));
    }
}
