//! Indices: names of a peer's memory.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Names memory of a peer: a slot of a lease, or an offset in an open arena.
///
/// An index belongs to the incarnation that made it. It may be sent to the peer that it was
/// granted to in any form ([`Self::to_bytes`], or serde).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Index {
    pub(crate) incarnation: u64,
    /// 0: the open arena.
    pub(crate) lease: u64,
    /// The slot of the lease; in an open arena, units from its start.
    pub(crate) slot: u64,
}

impl Index {
    /// Returns the index of a unit of an open arena. `incarnation` is the incarnation of the
    /// arena's channel.
    pub fn arena(incarnation: u64, unit: u64) -> Self {
        Self {
            incarnation,
            lease: 0,
            slot: unit,
        }
    }

    /// Returns the incarnation of the channel that made the index.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Returns the index as bytes, to be sent.
    pub fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.lease.to_le_bytes());
        bytes[16..].copy_from_slice(&self.slot.to_le_bytes());
        bytes
    }

    /// Returns the index from the bytes that [`Self::to_bytes`] returned.
    pub fn from_bytes(bytes: [u8; 24]) -> Self {
        let number = |at: usize| {
            let bytes = bytes[at..at + 8].try_into();
            u64::from_le_bytes(bytes.expect("eight of 24 bytes"))
        };
        Self {
            incarnation: number(0),
            lease: number(8),
            slot: number(16),
        }
    }
}

impl fmt::Display for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lease {
            0 => write!(f, "unit {}", self.slot),
            lease => write!(f, "slot {} of lease {lease}", self.slot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_the_same_after_its_bytes() {
        let index = Index {
            incarnation: 1,
            lease: 2,
            slot: 3,
        };
        assert_eq!(Index::from_bytes(index.to_bytes()), index);
    }
}
