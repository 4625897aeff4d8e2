//! Eviction policies: the rules that choose the next entry to evict.
//!
//! A policy orders the entries of one shard and one tenant class by their slab index. It does not know
//! leases, pins, children or bytes: the shard takes the next entry with [`EvictionPolicy::pop`], and sets
//! entries aside that must not be evicted.

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
    /// Evicts the least recently used chunk.
    #[default]
    Lru,
    /// S3-FIFO (Yang et al., SOSP 2023): a small queue that most chunks leave soon, a main queue with second
    /// chances, and a record of recently evicted chunks. Scans do not flush it.
    S3Fifo,
    /// ARC (Megiddo and Modha, FAST 2003): balances recency and frequency by the evictions that turned out to
    /// be wrong.
    Arc,
    /// Nothing is ever evicted: a full tier refuses new chunks.
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

    /// Returns the policy with this name.
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
/// An entry is *queued* from `insert` until `remove` or `pop`. A popped entry is outside the order until
/// `put_back` or `revive` queues it again, or `evicted` ends it; `remove` is not called for a popped entry.
///
/// Callers insert and touch a batch from the tail of its prefix to the head, so that of entries with the same
/// age the tail is popped first.
pub(crate) trait EvictionPolicy: Send {
    /// Queues a new entry. `fingerprint` identifies the key in the record of evicted entries.
    fn insert(&mut self, nodes: &mut Nodes, id: u32, fingerprint: u32, stamp: u64);

    /// Records that a queued entry was used.
    fn touch(&mut self, nodes: &mut Nodes, id: u32, stamp: u64);

    /// Removes a queued entry, for another reason than eviction.
    fn remove(&mut self, nodes: &mut Nodes, id: u32);

    /// Removes and returns the entry to evict next.
    fn pop(&mut self, nodes: &mut Nodes) -> Option<u32>;

    /// Queues a popped entry at the position that `pop` reaches soonest.
    fn put_back(&mut self, nodes: &mut Nodes, id: u32);

    /// Queues a popped entry as one that was used just now.
    fn revive(&mut self, nodes: &mut Nodes, id: u32, stamp: u64);

    /// Records that a popped entry was evicted.
    fn evicted(&mut self, nodes: &Nodes, id: u32, fingerprint: u32);

    /// Returns the stamp of the entry that `pop` would look at first; `None` if nothing is queued. Shards are
    /// compared by this stamp, so the entry need not be the one that `pop` finally returns.
    fn coldest(&self, nodes: &Nodes) -> Option<u64>;
}
