//! The newest clear epochs that the engine knows.

use std::collections::HashMap;

use lmc_backend::{Clear, ClearEpoch};
use lmc_key::SpaceId;
use parking_lot::RwLock;

/// Spaces with an epoch of their own, at most. What others have of further ones counts as older.
const MAX_SPACES: usize = 4096;

/// The newest clear epoch of all spaces, and later ones of single spaces.
#[derive(Debug, Default)]
pub(crate) struct Epochs(RwLock<Known>);

#[derive(Debug, Default)]
struct Known {
    all: ClearEpoch,
    spaces: HashMap<SpaceId, ClearEpoch>,
}

impl Known {
    fn of(&self, space: SpaceId) -> ClearEpoch {
        let of_space = self.spaces.get(&space).copied();
        of_space.map_or(self.all, |epoch| epoch.join(self.all))
    }
}

impl Epochs {
    /// Returns the newest epoch of a space: that of its resident chunks, and of those computed
    /// from now on.
    pub(crate) fn of(&self, space: SpaceId) -> ClearEpoch {
        self.0.read().of(space)
    }

    /// Takes in clears that a tier has noted.
    pub(crate) fn note(&self, clears: impl IntoIterator<Item = Clear>) {
        let known = &mut *self.0.write();
        for Clear { space, epoch } in clears {
            let newest = match space {
                None => &mut known.all,
                Some(space) => known.spaces.entry(space).or_default(),
            };
            *newest = newest.join(epoch);
        }
    }

    /// Begins a clear of all spaces.
    pub(crate) fn raise(&self) -> Clear {
        let known = &mut *self.0.write();
        let newest = known.spaces.values().fold(known.all, |a, &b| a.join(b));
        known.all = newest.next();
        known.spaces.clear();
        Clear::all(known.all)
    }

    /// Returns the epoch of the newest clear of all spaces.
    pub(crate) fn of_all(&self) -> ClearEpoch {
        self.0.read().all
    }

    /// Takes in a clear of all spaces that was made elsewhere. Returns the clear that follows from
    /// it if it was not known.
    pub(crate) fn learn_all(&self, epoch: ClearEpoch) -> Option<Clear> {
        let known = &mut *self.0.write();
        let joined = known.all.join(epoch);
        if joined == known.all {
            return None;
        }
        known.all = joined;
        Some(Clear::all(joined))
    }

    /// Takes in the epoch of a chunk that was found elsewhere. Returns the clear that follows from
    /// it if the epoch was not known: everything of the space that is here is older.
    pub(crate) fn learn(&self, space: SpaceId, epoch: ClearEpoch) -> Option<Clear> {
        let known = self.of(space);
        if known == epoch || (known.counter > epoch.counter) {
            return None;
        }
        let known = &mut *self.0.write();
        let joined = known.of(space).join(epoch);
        let is_new = !known.spaces.contains_key(&space);
        if joined == known.of(space) || (is_new && known.spaces.len() >= MAX_SPACES) {
            return None;
        }
        known.spaces.insert(space, joined);
        Some(Clear::space(space, joined))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_follows_its_own_clears_and_those_of_all() {
        let epochs = Epochs::default();
        let (a, b) = (SpaceId::new([1; 16]), SpaceId::new([2; 16]));
        let never = ClearEpoch::default();
        assert_eq!((epochs.of(a), epochs.learn(a, never)), (never, None));
        let elsewhere = never.next().next();
        let learned = epochs.learn(a, elsewhere).expect("it is newer");
        assert_eq!(learned, Clear::space(a, elsewhere));
        assert_eq!(epochs.learn(a, elsewhere), None);
        assert_eq!((epochs.of(a), epochs.of(b)), (elsewhere, never));
        let all = epochs.raise();
        assert_eq!((all.space, all.epoch.counter), (None, 3));
        assert_eq!((epochs.of(a), epochs.of(b)), (all.epoch, all.epoch));
        assert_eq!(epochs.learn(a, elsewhere), None, "it is older");
        // Two clears that did not know of each other: what either left is gone.
        let other = elsewhere.next();
        let both = epochs.learn(b, other).expect("neither is newer");
        assert_eq!(both.epoch, all.epoch.join(other));
        assert!(!other.is_valid_at(epochs.of(b)) && !all.epoch.is_valid_at(epochs.of(b)));
    }
}
