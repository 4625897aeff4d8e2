//! The clears that a daemon knows, so that none is lost in whatever order daemons meet. No IO.
//!
//! A clear has a random id. The epoch of a set of clears is the sum of their weights and the
//! XOR of their ids: two daemons that know the same clears have the same epoch, whatever their
//! order was, and one that knows more has a greater counter. The newest clears are named one by
//! one, so that two daemons which both know one that the other does not find the union.

use lmc_backend::ClearEpoch;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::message::Epoch;

/// Clears that are named, at most; what was cleared before them is in the epoch only.
pub(crate) const MAX_NAMED: usize = 32;
/// Earlier epochs that are remembered, at most.
pub(crate) const MAX_EARLIER: usize = 16;
/// Clears that another may be ahead by; one that claims more is not believed.
const MAX_AHEAD: u64 = 1 << 32;

/// A clear, or several that a daemon made without a message between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct NamedClear {
    /// Counter of the epoch that it began where it was made.
    at: u64,
    id: [u8; 16],
    /// Number of clears.
    weight: u64,
}

/// The clears that a daemon knows.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Clears {
    epoch: Epoch,
    /// Clears that began an epoch above the floor, in their order.
    named: Vec<NamedClear>,
    /// Clears that began an epoch up to this counter are not named.
    floor: u64,
    /// Epochs of sets that this one includes, newest first.
    earlier: Vec<Epoch>,
}

impl Clears {
    /// Returns the epoch of all of them together.
    pub fn epoch(&self) -> ClearEpoch {
        self.epoch.into()
    }

    /// Takes in the epoch of this daemon's engine: one that is newer follows on a clear here.
    pub fn observe(&mut self, engine: ClearEpoch) {
        let (before, now) = (self.epoch(), engine);
        if now.counter <= before.counter {
            return;
        }
        self.remember(self.epoch);
        self.epoch = now.into();
        let weight = now.counter - before.counter;
        if before.counter == 0 && weight > 1 {
            // The engine knows them from its disk: others know them by their names.
            self.floor = now.counter;
            return;
        }
        self.name([NamedClear {
            at: now.counter,
            id: xor(now.origin, before.origin),
            weight,
        }]);
    }

    /// Takes in the clears that a peer knows. Returns true if one of them was not known here.
    ///
    /// If the names do not tell which clears both have, both sides make one more up, the same one: a
    /// clear too many costs hits, one too few would be wrong bytes.
    pub fn merge(&mut self, theirs: &Self) -> bool {
        let (epoch, other) = (self.epoch, theirs.epoch);
        if other.counter().saturating_sub(epoch.counter()) > MAX_AHEAD {
            return false;
        }
        if epoch == other {
            if theirs.floor < self.floor {
                (self.named, self.floor) = (theirs.named.clone(), theirs.floor);
            }
            return false;
        }
        if other.counter() == 0 || self.earlier.contains(&other) {
            return false;
        }
        if epoch.counter() == 0 || theirs.earlier.contains(&epoch) {
            self.follow(theirs);
            return true;
        }
        let floor = self.floor.max(theirs.floor);
        let only = |one: &Self, other: &Self| -> Vec<NamedClear> {
            let named = one.named.iter().filter(|clear| clear.at > floor);
            let only = named.filter(|clear| !other.named.contains(clear));
            only.copied().collect()
        };
        let (here, there) = (only(self, theirs), only(theirs, self));
        let common = (without(epoch, &here), without(other, &there));
        if common.0.is_some() && common.0 == common.1 {
            self.remember(other);
            if there.is_empty() {
                return false;
            }
            self.remember(epoch);
            let ids = there.iter().fold(self.epoch().origin, |o, c| xor(o, c.id));
            let weights: u64 = there.iter().map(|clear| clear.weight).sum();
            let union = ClearEpoch {
                counter: self.epoch().counter + weights,
                origin: ids,
            };
            self.epoch = union.into();
            self.name(there);
            return true;
        }
        let order = |epoch: Epoch| (epoch.counter(), ClearEpoch::from(epoch).origin);
        let low = ClearEpoch::from(if order(epoch) > order(other) {
            other
        } else {
            self.follow(theirs);
            epoch
        });
        let high = self.epoch();
        self.remember(epoch);
        self.remember(other);
        let id = xxh3_128([high.origin, low.origin].as_flattened()).to_le_bytes();
        let next = ClearEpoch {
            counter: high.counter + 1,
            origin: xor(high.origin, id),
        };
        self.epoch = next.into();
        let (at, weight) = (next.counter, 1);
        self.name([NamedClear { at, id, weight }]);
        true
    }

    /// Returns true if the fields fit together, as far as can be seen.
    pub(crate) fn is_sound(&self) -> bool {
        let counter = self.epoch().counter;
        let total = self
            .named
            .iter()
            .try_fold(0u64, |sum, c| sum.checked_add(c.weight));
        let in_order = self.named.is_sorted_by(|a, b| a < b);
        let within =
            |c: &NamedClear| c.at > self.floor && c.at <= counter && (1..=c.at).contains(&c.weight);
        counter < ClearEpoch::MAX_COUNTER
            && self.named.len() <= MAX_NAMED
            && self.earlier.len() <= MAX_EARLIER
            && total.is_some_and(|total| total <= counter)
            && in_order
            && self.named.iter().all(within)
    }

    fn follow(&mut self, theirs: &Self) {
        let before = std::mem::replace(self, theirs.clone());
        for earlier in before.earlier.into_iter().chain([before.epoch]) {
            self.remember(earlier);
        }
    }

    fn remember(&mut self, epoch: Epoch) {
        if epoch.counter() > 0 && !self.earlier.contains(&epoch) {
            self.earlier.push(epoch);
            self.earlier
                .sort_by_key(|epoch| std::cmp::Reverse(epoch.counter()));
            self.earlier.truncate(MAX_EARLIER);
        }
    }

    fn name(&mut self, clears: impl IntoIterator<Item = NamedClear>) {
        self.named.extend(clears);
        self.named.sort();
        if let Some(last) = self.named.len().checked_sub(MAX_NAMED + 1) {
            self.floor = self.floor.max(self.named[last].at);
        }
        self.named.retain(|clear| clear.at > self.floor);
    }
}

/// Returns the epoch of the other clears of a set; `None` if these cannot be part of it.
fn without(epoch: Epoch, clears: &[NamedClear]) -> Option<ClearEpoch> {
    let start = ClearEpoch::from(epoch);
    clears.iter().try_fold(start, |epoch, clear| {
        Some(ClearEpoch {
            counter: epoch.counter.checked_sub(clear.weight)?,
            origin: xor(epoch.origin, clear.id),
        })
    })
}

fn xor(a: [u8; 16], b: [u8; 16]) -> [u8; 16] {
    (u128::from_le_bytes(a) ^ u128::from_le_bytes(b)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use lmc_backend::conformance::Rng;

    use lmc_testkit::rounds;

    use super::*;

    /// A daemon with the clears that its chunks are known to have survived.
    #[derive(Default, Clone)]
    struct Daemon {
        clears: Clears,
        engine: ClearEpoch,
        /// Numbers of the clears that it has carried out.
        carried_out: std::collections::BTreeSet<usize>,
        changes: usize,
    }

    impl Daemon {
        fn clear(&mut self, number: usize) {
            self.engine = self.engine.next();
            self.carried_out.insert(number);
            self.clears.observe(self.engine);
        }

        fn hear(&mut self, other: &Self) {
            if self.clears.merge(&other.clears) {
                self.engine = self.clears.epoch();
                self.carried_out.extend(&other.carried_out);
                self.changes += 1;
            } else if self.clears.epoch != other.clears.epoch {
                assert!(
                    other.carried_out.is_subset(&self.carried_out),
                    "a clear of the other was taken for known"
                );
            }
        }
    }

    fn meet(daemons: &mut [Daemon], a: usize, b: usize) {
        let (one, other) = (daemons[a].clone(), daemons[b].clone());
        daemons[a].hear(&other);
        daemons[b].hear(&one);
    }

    #[test]
    fn the_side_with_more_clears_learns_of_the_other_sides_too() {
        let mut daemons = vec![Daemon::default(), Daemon::default()];
        (0..3).for_each(|n| daemons[1].clear(n));
        daemons[0].clear(3);
        let alone = daemons[1].engine;
        meet(&mut daemons, 0, 1);
        assert_eq!(daemons[0].engine, daemons[1].engine);
        assert!(!alone.is_valid_at(daemons[1].engine));
        assert_eq!((daemons[0].changes, daemons[1].changes), (1, 1));
        // Nothing is left to say.
        meet(&mut daemons, 0, 1);
        assert_eq!((daemons[0].changes, daemons[1].changes), (1, 1));
    }

    #[test]
    fn clears_made_at_once_do_not_chase_each_other() {
        for seed in 0..rounds(100, 200) as u64 {
            let mut rng = Rng::new(seed);
            let count = 2 + rng.below(9) as usize;
            let mut daemons = vec![Daemon::default(); count];
            for (number, daemon) in daemons.iter_mut().enumerate() {
                daemon.clear(number);
            }
            for _ in 0..count * count * 20 {
                let (a, b) = (rng.below(count as u64), rng.below(count as u64));
                meet(&mut daemons, a as usize, b as usize);
            }
            for daemon in &daemons {
                assert_eq!(daemon.engine.counter, count as u64, "none was made up");
                assert_eq!(daemon.carried_out.len(), count);
                assert!(daemon.changes < count, "{} of {count}", daemon.changes);
            }
        }
    }

    #[test]
    fn no_clear_is_lost_over_cuts_and_restarts() {
        for seed in 0..rounds(100, 300) as u64 {
            let mut rng = Rng::new(seed);
            let count = 2 + rng.below(4) as usize;
            let mut daemons = vec![Daemon::default(); count];
            let mut number = 0;
            for _ in 0..rng.below(400) {
                let host = rng.below(count as u64) as usize;
                match rng.below(16) {
                    0..6 => {
                        daemons[host].clear(number);
                        number += 1;
                    }
                    // It starts again, with what its disk knows.
                    6 => {
                        let engine = daemons[host].engine;
                        daemons[host].clears = Clears::default();
                        daemons[host].clears.observe(engine);
                    }
                    // It starts again, with nothing at all.
                    7 => daemons[host] = Daemon::default(),
                    _ => {
                        let other = rng.below(count as u64) as usize;
                        meet(&mut daemons, host, other);
                    }
                }
                assert!(daemons.iter().all(|daemon| daemon.clears.is_sound()));
            }
            for _ in 0..3 {
                for a in 0..count {
                    (0..a).for_each(|b| meet(&mut daemons, a, b));
                }
            }
            let all: std::collections::BTreeSet<usize> = daemons
                .iter()
                .flat_map(|daemon| daemon.carried_out.clone())
                .collect();
            for daemon in &daemons {
                assert_eq!(daemon.engine, daemons[0].engine, "seed {seed}");
                assert_eq!(daemon.carried_out, all, "seed {seed}");
            }
        }
    }
}
