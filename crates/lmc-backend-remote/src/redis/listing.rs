//! Listings in progress.

use std::collections::{BTreeMap, HashSet};

use lmc_key::FoldState;
use parking_lot::Mutex;
use xxhash_rust::xxh3::xxh3_64;

use crate::format::Name;
use crate::store::StoreError;

/// Most listings in progress; beyond that, the oldest one ends with an error.
const MAX_LISTINGS: usize = 16;
/// Most names of one listing that are remembered.
const MAX_NAMES: usize = 1 << 20;

/// The positions of listings, each under the token with which it continues.
#[derive(Debug, Default)]
pub(super) struct Listings(Mutex<(u64, BTreeMap<u64, Position>)>);

/// A position in a listing.
#[derive(Debug, Default)]
pub(super) struct Position {
    /// Index of the node.
    pub(super) node: usize,
    /// Cursor of the node's `SCAN`.
    pub(super) cursor: u64,
    /// Names that were found but not listed yet.
    pub(super) found: Vec<Name>,
    pub(super) listed: Names,
}

/// A set of names, stored as their hashes.
#[derive(Debug, Default)]
pub(super) struct Names(HashSet<u64, FoldState>);

impl Names {
    /// Adds a name. Returns true if it was not in the set.
    pub(super) fn is_new(&mut self, name: &Name) -> bool {
        let hash = xxh3_64(name.to_string().as_bytes());
        match self.0.len() < MAX_NAMES {
            true => self.0.insert(hash),
            false => !self.0.contains(&hash),
        }
    }
}

impl Listings {
    /// Removes and returns the position of a token; the token is invalid afterwards.
    pub(super) fn take(&self, token: &str) -> Result<Position, StoreError> {
        let number: Option<u64> = token.parse().ok();
        let position = number.and_then(|number| self.0.lock().1.remove(&number));
        position.ok_or_else(|| StoreError::unavailable("the listing is too old: start it again"))
    }

    /// Stores a position, and returns its token.
    pub(super) fn keep(&self, position: Position) -> String {
        let (last, positions) = &mut *self.0.lock();
        *last += 1;
        positions.insert(*last, position);
        while positions.len() > MAX_LISTINGS {
            positions.pop_first();
        }
        last.to_string()
    }
}
