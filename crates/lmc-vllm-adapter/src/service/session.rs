//! What one request of an engine holds, from its lookup to its end.

use std::ops::Range;
use std::time::Instant;

use lmc_engine::{Leases, OwnerId};
use lmc_key::SpaceId;

use crate::service::ClientId;

/// Consecutive chunks that are held for the same number of readers.
#[derive(Debug)]
struct Part {
    /// First chunk, counted from the start of the prompt.
    first: usize,
    leases: Leases,
    /// Workers that will still read each chunk; at least one.
    readers: u32,
}

impl Part {
    /// Cuts off what lies from chunk `at` on.
    fn split_off(&mut self, at: usize) -> Self {
        let leases = self.leases.split_off(at.saturating_sub(self.first));
        Self {
            first: self.first + self.leases.len(),
            leases,
            readers: self.readers,
        }
    }
}

/// The chunks of one space and KV rank that a lookup holds.
#[derive(Debug)]
pub(crate) struct RankHold {
    pub(crate) space: SpaceId,
    pub(crate) kv_rank: u16,
    parts: Vec<Part>,
}

impl RankHold {
    pub(crate) fn new(space: SpaceId, kv_rank: u16, leases: Leases, readers: u32) -> Self {
        Self {
            space,
            kv_rank,
            parts: vec![Part {
                first: 0,
                leases,
                readers,
            }],
        }
    }

    /// Gives back everything from chunk `len` on.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.release(len..usize::MAX, u32::MAX);
    }

    /// Takes `readers` readers off each chunk of a range; a chunk that nobody will read any
    /// more is given back.
    fn release(&mut self, range: Range<usize>, readers: u32) {
        for mut before in std::mem::take(&mut self.parts) {
            let mut inside = before.split_off(range.start);
            let after = inside.split_off(range.end);
            inside.readers = inside.readers.saturating_sub(readers);
            let kept = [before, inside, after].into_iter();
            self.parts
                .extend(kept.filter(|part| part.readers > 0 && !part.leases.is_empty()));
        }
    }

    fn held(&self) -> usize {
        self.parts.iter().map(|part| part.leases.len()).sum()
    }
}

/// The answer to a lookup and what stands behind it.
#[derive(Debug)]
pub(crate) struct Lookup {
    /// Leading chunks that every rank has.
    pub(crate) hits: u64,
    holds: Vec<RankHold>,
    /// When the leases end by themselves.
    expires: Instant,
}

/// One request of an engine.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) owner: OwnerId,
    /// Connection that looked up; its scheduler.
    pub(crate) client: ClientId,
    pub(crate) last_used: Instant,
    lookup: Option<Lookup>,
}

impl Session {
    pub(crate) fn new(owner: OwnerId, client: ClientId, now: Instant) -> Self {
        Self {
            owner,
            client,
            last_used: now,
            lookup: None,
        }
    }

    /// Takes the outcome of a lookup and returns that of an earlier one.
    #[must_use = "its leases should go back where nothing is locked"]
    pub(crate) fn set_lookup(
        &mut self,
        hits: u64,
        holds: Vec<RankHold>,
        expires: Instant,
    ) -> Option<Lookup> {
        self.lookup.replace(Lookup {
            hits,
            holds,
            expires,
        })
    }

    /// Leading chunks found, when there was a lookup.
    pub(crate) fn hits(&self) -> Option<u64> {
        self.lookup.as_ref().map(|lookup| lookup.hits)
    }

    /// One worker has read (or will not read) a range of chunks of its rank.
    pub(crate) fn reader_done(&mut self, space: SpaceId, kv_rank: u16, chunks: Range<usize>) {
        let Some(lookup) = &mut self.lookup else {
            return;
        };
        let of_rank = |hold: &&mut RankHold| hold.space == space && hold.kv_rank == kv_rank;
        for hold in lookup.holds.iter_mut().filter(of_rank) {
            hold.release(chunks.clone(), 1);
        }
    }

    /// Nobody will read a range of chunks; of all ranks, or of one.
    pub(crate) fn free(&mut self, kv_rank: Option<u16>, chunks: Range<usize>, readers: u32) {
        let Some(lookup) = &mut self.lookup else {
            return;
        };
        for hold in &mut lookup.holds {
            if kv_rank.is_none_or(|rank| rank == hold.kv_rank) {
                hold.release(chunks.clone(), readers);
            }
        }
    }

    /// Takes the lookup out of a session that ends, so that its leases go back where nothing is
    /// locked.
    #[must_use = "its leases should go back where nothing is locked"]
    pub(crate) fn take(&mut self) -> Option<Lookup> {
        self.lookup.take()
    }

    /// Ends the leases when their time is over. How many there were.
    pub(crate) fn expire(&mut self, now: Instant) -> usize {
        let Some(lookup) = self.lookup.as_mut().filter(|lookup| lookup.expires <= now) else {
            return 0;
        };
        let held = lookup.holds.iter().map(RankHold::held).sum();
        lookup.holds.clear();
        held
    }
}
