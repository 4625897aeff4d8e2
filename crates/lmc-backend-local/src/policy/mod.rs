//! Eviction policies: the rules that choose the next entry to evict.
//!
//! A policy orders the entries of one shard and one tenant class by their slab index. It knows
//! nothing of leases, pins, children or bytes: the shard takes the next entry with
//! [`EvictionPolicy::pop`], and keeps aside what may not go.

use std::fmt;

mod arc;
mod ghost;
mod list;
mod lru;
mod none;
mod s3_fifo;

#[cfg(test)]
mod tests;

pub(crate) use list::{List, NIL, Node, Nodes};

/// Rule that decides which chunk is evicted next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PolicyKind {
    /// The chunk that was not used for the longest time.
    #[default]
    Lru,
    /// S3-FIFO (Yang et al., SOSP 2023): a small queue that most chunks leave soon, a main queue
    /// with second chances, and a memory of what left lately. Scans do not flush it.
    S3Fifo,
    /// ARC (Megiddo and Modha, FAST 2003): balances recency and frequency by what it regrets.
    Arc,
    /// Nothing is ever evicted: a full tier refuses.
    None,
}

impl PolicyKind {
    /// All policies, for tests and tables.
    pub const ALL: [Self; 4] = [Self::Lru, Self::S3Fifo, Self::Arc, Self::None];

    /// Returns the name in configuration: `lru`, `s3-fifo`, `arc` or `none`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::S3Fifo => "s3-fifo",
            Self::Arc => "arc",
            Self::None => "none",
        }
    }

    /// The policy with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub(crate) fn build(self) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(lru::Lru::default()),
            Self::S3Fifo => Box::new(s3_fifo::S3Fifo::default()),
            Self::Arc => Box::new(arc::Arc::default()),
            Self::None => Box::new(none::Never),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An order of eviction. Every operation is O(1), amortised.
///
/// An entry is *queued* from `insert` until `remove` or `pop`. A popped entry is out of the order
/// until `put_back` or `revive` queue it again, or `evicted` ends it; `remove` is not called
/// for it.
///
/// Callers insert and touch a batch from the tail of its prefix to the head, so that at equal
/// age the tail is popped first.
pub(crate) trait EvictionPolicy: Send {
    /// Queues a new entry. `fingerprint` tells the key from others for the memory of what left.
    fn insert(&mut self, nodes: &mut Nodes, id: u32, fingerprint: u32, stamp: u64);

    /// The entry, which is queued, was used.
    fn touch(&mut self, nodes: &mut Nodes, id: u32, stamp: u64);

    /// Takes a queued entry out, for another reason than eviction.
    fn remove(&mut self, nodes: &mut Nodes, id: u32);

    /// Takes out the entry that should go next.
    fn pop(&mut self, nodes: &mut Nodes) -> Option<u32>;

    /// Queues a popped entry where `pop` would have it soonest.
    fn put_back(&mut self, nodes: &mut Nodes, id: u32);

    /// Queues a popped entry as one that was just used.
    fn revive(&mut self, nodes: &mut Nodes, id: u32, stamp: u64);

    /// A popped entry was evicted.
    fn evicted(&mut self, nodes: &Nodes, id: u32, fingerprint: u32);

    /// The stamp of the entry that `pop` would look at first; `None` when nothing is queued.
    /// Shards are compared by it, so it need not be the one that `pop` returns in the end.
    fn coldest(&self, nodes: &Nodes) -> Option<u64>;
}
