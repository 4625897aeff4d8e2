//! A bounded memory of chunks that tiers once had. It distinguishes a chunk that was evicted or cleared from
//! one that was never stored. Chunks of tails take entries like all others: an event does not contain a
//! chunk's number of tokens.

use lmc_backend::{Change, ChunkEvent, EventSink};
use lmc_key::{ChunkKey, SpaceId};

use crate::FingerprintTable;

/// Bits of a payload for the kind of departure; the other bits are from the name of the space.
const CHANGE_BITS: u32 = 2;

/// The last event of a chunk that is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Departure {
    Evicted,
    Cleared,
    Removed,
}

/// A listener of the engine's events.
#[derive(Debug)]
pub(crate) struct Ghosts(FingerprintTable);

impl Ghosts {
    /// Makes a listener for an engine with a pool of this size.
    pub(crate) fn new(pool_bytes: u64) -> Self {
        Self(FingerprintTable::new(pool_bytes))
    }

    /// Returns how a chunk of a space left its tier, if remembered. `key` has the current name, after all
    /// clears: a chunk under another name was computed before a clear.
    pub(crate) fn departure(&self, space: SpaceId, key: &ChunkKey) -> Option<Departure> {
        let payload = self.0.get(identity(space, key))?;
        let is_current = payload >> CHANGE_BITS == name_bits(key.space);
        match payload & ((1 << CHANGE_BITS) - 1) {
            0 if is_current => Some(Departure::Evicted),
            1 if is_current => Some(Departure::Removed),
            _ => Some(Departure::Cleared),
        }
    }
}

/// Returns the identity of a chunk, independent of clears.
fn identity(space: SpaceId, key: &ChunkKey) -> impl std::hash::Hash + use<> {
    (space, key.kv_rank, key.group, key.hash)
}

/// Returns the bits of a space's name that are part of a payload.
fn name_bits(name: SpaceId) -> u16 {
    let [first, second, ..] = *name.as_bytes();
    u16::from_le_bytes([first, second]) >> CHANGE_BITS
}

impl EventSink for Ghosts {
    fn changed(&self, event: &ChunkEvent<'_>) {
        let change = match event.change {
            Change::Stored | Change::Promoted => return,
            Change::Evicted => 0,
            Change::Removed => 1,
            Change::Cleared => 2,
        };
        // A chunk from before a clear was recorded at the clear.
        if let Some(space) = event.space {
            let payload = name_bits(event.key.space) << CHANGE_BITS | change;
            self.0.insert(identity(space, event.key), payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use lmc_backend::DRAM;
    use lmc_key::{ChunkHash, ClearsId};

    use super::*;

    const SPACE: SpaceId = SpaceId::new([7; 16]);

    fn key(number: u64) -> ChunkKey {
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&number.to_le_bytes());
        ChunkKey {
            space: SPACE,
            kv_rank: 0,
            group: 0,
            hash: ChunkHash::new(hash),
        }
    }

    fn report(ghosts: &Ghosts, key: ChunkKey, change: Change) {
        ghosts.changed(&ChunkEvent {
            tier: DRAM,
            key: &key,
            parent: None,
            space: Some(SPACE),
            change,
        });
    }

    #[test]
    fn a_chunk_is_remembered_by_its_last_event() {
        let ghosts = Ghosts::new(0);
        assert_eq!(ghosts.departure(SPACE, &key(1)), None);
        for (change, departure) in [
            (Change::Evicted, Departure::Evicted),
            (Change::Removed, Departure::Removed),
            (Change::Cleared, Departure::Cleared),
            (Change::Evicted, Departure::Evicted),
        ] {
            report(&ghosts, key(1), change);
            assert_eq!(ghosts.departure(SPACE, &key(1)), Some(departure));
        }
        // Another rank and another space have chunks of their own.
        let rank = ChunkKey {
            kv_rank: 1,
            ..key(1)
        };
        assert_eq!(ghosts.departure(SPACE, &rank), None);
        assert_eq!(ghosts.departure(SpaceId::new([8; 16]), &key(1)), None);
        // An arrival is no departure.
        report(&ghosts, key(2), Change::Stored);
        assert_eq!(ghosts.departure(SPACE, &key(2)), None);
    }

    #[test]
    fn a_chunk_that_was_evicted_before_a_clear_counts_as_cleared_after_it() {
        let ghosts = Ghosts::new(0);
        report(&ghosts, key(1), Change::Evicted);
        let name = SPACE.after(ClearsId::new([9; 16]));
        let named = ChunkKey {
            space: name,
            ..key(1)
        };
        let departure = ghosts.departure(SPACE, &named);
        assert_eq!(departure, Some(Departure::Cleared));
        report(&ghosts, named, Change::Evicted);
        let departure = ghosts.departure(SPACE, &named);
        assert_eq!(departure, Some(Departure::Evicted));
    }
}
