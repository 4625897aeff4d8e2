//! Owners of leases and reservations, and how many each has.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// The id of an owner of leases and reservations: a session or an instance, as the engine numbers
/// them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(pub u64);

const STRIPES: usize = 16;

/// Counts of what each owner holds. An owner without anything costs nothing.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    stripes: [Mutex<HashMap<OwnerId, u64>>; STRIPES],
    total: AtomicU64,
}

impl Owners {
    fn stripe(&self, owner: OwnerId) -> &Mutex<HashMap<OwnerId, u64>> {
        let spread = owner.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60;
        &self.stripes[spread as usize]
    }

    /// An owner takes `n` more.
    pub(crate) fn take(&self, owner: OwnerId, n: u64) {
        if n == 0 {
            return;
        }
        *self.stripe(owner).lock().entry(owner).or_default() += n;
        self.total.fetch_add(n, Ordering::Relaxed);
    }

    /// An owner gives `n` back that it took before: callers are values that took them.
    pub(crate) fn give(&self, owner: OwnerId, n: u64) {
        if n == 0 {
            return;
        }
        let mut held = self.stripe(owner).lock();
        if let std::collections::hash_map::Entry::Occupied(mut count) = held.entry(owner) {
            match count.get().checked_sub(n) {
                Some(left) if left > 0 => *count.get_mut() = left,
                _ => {
                    count.remove();
                }
            }
        }
        self.total.fetch_sub(n, Ordering::Relaxed);
    }

    pub(crate) fn of(&self, owner: OwnerId) -> u64 {
        self.stripe(owner).lock().get(&owner).copied().unwrap_or(0)
    }

    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Everyone who holds something, with how much.
    pub(crate) fn all(&self) -> Vec<(OwnerId, u64)> {
        let held = |stripe: &Mutex<HashMap<OwnerId, u64>>| {
            stripe
                .lock()
                .iter()
                .map(|(&owner, &n)| (owner, n))
                .collect::<Vec<_>>()
        };
        self.stripes.iter().flat_map(held).collect()
    }
}
