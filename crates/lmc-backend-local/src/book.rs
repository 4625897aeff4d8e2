//! Leases by owner and deadline.

use std::collections::{BTreeMap, HashMap};
use std::mem;
use std::ops::Range;
use std::time::Instant;

use crate::{Leases, OwnerId};

/// Keeps the leases of sessions and instances, so that ending an owner returns all it held and a
/// forgotten one returns it in time. No clock and no lock inside: the caller says what time it is.
///
/// What comes out is returned, not dropped: drop it after the lock that the book lies under.
#[derive(Debug, Default)]
pub struct LeaseBook {
    owners: HashMap<OwnerId, Vec<u64>>,
    grants: HashMap<u64, Grant>,
    /// Deadlines in order, each with its grant.
    deadlines: BTreeMap<(Instant, u64), OwnerId>,
    granted: u64,
    leases: usize,
}

#[derive(Debug)]
struct Grant {
    /// The place of the first lease in the owner's numbering, such as its chunk in the prompt.
    first: usize,
    leases: Leases,
    deadline: Instant,
}

impl LeaseBook {
    /// Keeps leases for their owner until `deadline`. The caller numbers what it leases: these
    /// have the places from `first` on. Several grants may have the same place.
    pub fn grant(&mut self, first: usize, leases: Leases, deadline: Instant) {
        if leases.is_empty() {
            return;
        }
        let (id, owner) = (self.granted, leases.owner());
        self.granted += 1;
        self.leases += leases.len();
        self.owners.entry(owner).or_default().push(id);
        self.deadlines.insert((deadline, id), owner);
        let grant = Grant {
            first,
            leases,
            deadline,
        };
        self.grants.insert(id, grant);
    }

    /// The leases of an owner for these places: the oldest grant's for each place.
    #[must_use = "drop the leases to give them back"]
    pub fn release(&mut self, owner: OwnerId, places: Range<usize>) -> Vec<Leases> {
        // Places that still want a lease.
        let mut wanted = vec![places];
        let mut released = Vec::new();
        for id in self.owners.get(&owner).cloned().unwrap_or_default() {
            let mut left = Vec::new();
            for range in wanted {
                // A grant that is cut goes on as two: what is behind the range is a new grant.
                let Some((mut grant, held)) = self.take_if_overlapping(owner, id, &range) else {
                    left.push(range);
                    continue;
                };
                let (from, to) = (range.start.max(held.start), range.end.min(held.end));
                let behind = grant.leases.split_off(to - held.start);
                let wanted = grant.leases.split_off(from - held.start);
                self.grant(held.start, grant.leases, grant.deadline);
                self.grant(to, behind, grant.deadline);
                released.push(wanted);
                left.extend(
                    [range.start..from, to..range.end]
                        .into_iter()
                        .filter(|r| !r.is_empty()),
                );
            }
            wanted = left;
        }
        released
    }

    /// All leases of an owner.
    #[must_use = "drop the leases to give them back"]
    pub fn end(&mut self, owner: OwnerId) -> Vec<Leases> {
        let ids = self.owners.get(&owner).cloned().unwrap_or_default();
        ids.into_iter()
            .filter_map(|id| Some(self.take(owner, id)?.leases))
            .collect()
    }

    /// The leases whose deadline is not after `now`.
    #[must_use = "drop the leases to give them back"]
    pub fn expire(&mut self, now: Instant) -> Vec<Leases> {
        let mut expired = Vec::new();
        while let Some((&(deadline, id), &owner)) = self.deadlines.first_key_value() {
            if deadline > now {
                break;
            }
            expired.extend(self.take(owner, id).map(|grant| grant.leases));
        }
        expired
    }

    /// Sets a new deadline for all that an owner holds.
    pub fn extend(&mut self, owner: OwnerId, deadline: Instant) {
        for &id in self.owners.get(&owner).into_iter().flatten() {
            let grant = self.grants.get_mut(&id);
            let grant = grant.expect("an owner's grants are in the book");
            let before = mem::replace(&mut grant.deadline, deadline);
            self.deadlines.remove(&(before, id));
            self.deadlines.insert((deadline, id), owner);
        }
    }

    /// When something expires next.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines
            .first_key_value()
            .map(|(&(deadline, _), _)| deadline)
    }

    /// Leases in the book.
    pub fn len(&self) -> usize {
        self.leases
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.leases == 0
    }

    /// Leases of an owner in the book.
    pub fn len_of(&self, owner: OwnerId) -> usize {
        let ids = self.owners.get(&owner).into_iter().flatten();
        ids.map(|id| self.grants[id].leases.len()).sum()
    }

    fn take_if_overlapping(
        &mut self,
        owner: OwnerId,
        id: u64,
        places: &Range<usize>,
    ) -> Option<(Grant, Range<usize>)> {
        let grant = self.grants.get(&id)?;
        let held = grant.first..grant.first + grant.leases.len();
        if places.start >= held.end || held.start >= places.end {
            return None;
        }
        Some((self.take(owner, id)?, held))
    }

    fn take(&mut self, owner: OwnerId, id: u64) -> Option<Grant> {
        let grant = self.grants.remove(&id)?;
        self.deadlines.remove(&(grant.deadline, id));
        self.leases -= grant.leases.len();
        if let Some(ids) = self.owners.get_mut(&owner) {
            ids.retain(|&other| other != id);
            if ids.is_empty() {
                self.owners.remove(&owner);
            }
        }
        Some(grant)
    }
}
