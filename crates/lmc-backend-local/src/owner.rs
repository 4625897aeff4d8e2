//! Owners of leases and reservations, and how much each owner holds.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::sync::Mutex;

/// The id of an owner of leases and reservations: the engine's number for a session or an instance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(pub u64);

const STRIPES: usize = 16;

/// Multiplier of Fibonacci hashing: 2^64 divided by the golden ratio.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Count and bytes of what one owner holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// Hashes owner ids. The engine assigns the ids, so no client can choose ids that collide.
#[derive(Debug, Default)]
struct OwnerHasher(u64);

impl Hasher for OwnerHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes
            .iter()
            .for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0.rotate_left(8) ^ number).wrapping_mul(SPREAD);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Stripe = HashMap<OwnerId, Held, BuildHasherDefault<OwnerHasher>>;

/// Counts and bytes by owner. An owner that holds nothing has no entry.
#[derive(Debug, Default)]
pub(crate) struct Owners {
    stripes: [Mutex<Stripe>; STRIPES],
    total: AtomicU64,
}

impl Owners {
    fn stripe(&self, owner: OwnerId) -> &Mutex<Stripe> {
        &self.stripes[(owner.0.wrapping_mul(SPREAD) >> 60) as usize]
    }

    /// Adds `count` items of `bytes` bytes in total to an owner.
    pub(crate) fn take(&self, owner: OwnerId, count: u64, bytes: u64) {
        if count == 0 {
            return;
        }
        let mut stripe = self.stripe(owner).lock();
        let held = stripe.entry(owner).or_default();
        held.count += count;
        held.bytes += bytes;
        drop(stripe);
        self.total.fetch_add(count, Ordering::Relaxed);
    }

    /// Subtracts items that were added to the owner before. Callers are values that added the items when they
    /// were made.
    pub(crate) fn give(&self, owner: OwnerId, count: u64, bytes: u64) {
        if count == 0 {
            return;
        }
        let mut stripe = self.stripe(owner).lock();
        if let Some(held) = stripe.get_mut(&owner) {
            held.count = held.count.saturating_sub(count);
            held.bytes = held.bytes.saturating_sub(bytes);
            if held.count == 0 {
                stripe.remove(&owner);
            }
        }
        drop(stripe);
        self.total.fetch_sub(count, Ordering::Relaxed);
    }

    pub(crate) fn of(&self, owner: OwnerId) -> Held {
        let stripe = self.stripe(owner).lock();
        stripe.get(&owner).copied().unwrap_or_default()
    }

    pub(crate) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Returns all owners that hold something, with the counts.
    pub(crate) fn all(&self) -> Vec<(OwnerId, u64)> {
        let held = |stripe: &Mutex<Stripe>| {
            let stripe = stripe.lock();
            let counts = stripe.iter().map(|(&owner, held)| (owner, held.count));
            counts.collect::<Vec<_>>()
        };
        self.stripes.iter().flat_map(held).collect()
    }
}
