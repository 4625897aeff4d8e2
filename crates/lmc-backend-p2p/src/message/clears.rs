//! Clears in messages: the digest that each side sends, and the pages of a map.

use lmc_backend::{Clears, StartId};
use lmc_key::ClearsId;
use serde::{Deserialize, Serialize};

use super::{MessageError, bound};

/// Most entries of one [`ClearsPage`]: even with the longest counts, a page fits into a body.
pub const PAGE_ENTRIES: usize = 2048;
/// Most pages of a map.
pub const MAX_PAGES: u16 = Clears::MAX_STARTS.div_ceil(PAGE_ENTRIES) as u16;

/// A message that names chunks, with the digest of the clears that its sender has carried out. Two sides with
/// different digests pass no chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamped<T> {
    /// Digest of the sender's clears.
    #[serde(with = "digest")]
    pub clears: ClearsId,
    /// The message.
    pub message: T,
}

impl<T> Stamped<T> {
    /// Adds the digest of the sender's clears to a message.
    pub fn new(clears: ClearsId, message: T) -> Self {
        Self { clears, message }
    }
}

/// A page of the map of clears that the sender has carried out.
///
/// Entries are ordered by their start ids, [`PAGE_ENTRIES`] to a page. Each page is a map of its own, so
/// joining only some of the pages is valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearsPage {
    /// Digest of the sender's whole map.
    #[serde(with = "digest")]
    pub clears: ClearsId,
    /// Number of the page, from 0 on. A reply has the number of its request.
    pub page: u16,
    /// Number of pages of the sender's map; 0 before the first clear.
    pub pages: u16,
    /// Entries of the page; none after the last page.
    #[serde(with = "entries")]
    pub entries: Clears,
    /// True if a restart of the sender may not find all clears that it has carried out. At the end of the
    /// body; false if absent.
    #[serde(skip)]
    pub is_volatile: bool,
}

impl ClearsPage {
    /// Returns one page of a map that a restart finds. `clears` is the map's digest.
    pub fn of(map: &Clears, clears: ClearsId, page: u16) -> Self {
        let first = usize::from(page) * PAGE_ENTRIES;
        let entries = map.entries().skip(first).take(PAGE_ENTRIES);
        Self {
            clears,
            page,
            pages: map.starts().div_ceil(PAGE_ENTRIES) as u16,
            entries: Clears::from_entries(entries).expect("entries of a map are a map"),
            is_volatile: false,
        }
    }

    pub(super) fn check(&self) -> Result<(), MessageError> {
        let is_behind = self.page >= self.pages;
        let within = self.page < MAX_PAGES
            && self.pages <= MAX_PAGES
            && self.entries.starts() <= PAGE_ENTRIES
            && self.entries.is_empty() == is_behind;
        bound(within, "clears")
    }
}

/// A digest of clears as its 16 bytes.
pub(super) mod digest {
    use serde::{Deserializer, Serializer};

    use super::{ClearsId, Deserialize, Serialize};

    pub(crate) fn serialize<S: Serializer>(id: &ClearsId, to: S) -> Result<S::Ok, S::Error> {
        id.as_bytes().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<ClearsId, D::Error> {
        Deserialize::deserialize(from).map(ClearsId::new)
    }
}

/// A map of clears as the list of its entries. A count of zero and a repeated id are refused.
mod entries {
    use serde::de::Error;
    use serde::{Deserializer, Serializer};

    use super::{Clears, Deserialize, StartId};

    pub(super) fn serialize<S: Serializer>(map: &Clears, to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(map.entries().map(|(id, count)| (*id.as_bytes(), count)))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Clears, D::Error> {
        let entries: Vec<([u8; 16], u64)> = Deserialize::deserialize(from)?;
        let entries = entries.into_iter();
        let entries = entries.map(|(id, count)| (StartId::new(id), count));
        Clears::from_entries(entries).map_err(D::Error::custom)
    }
}
