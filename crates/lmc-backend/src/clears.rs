//! The clears that a daemon has carried out.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fmt;

use lmc_key::ClearsId;
use thiserror::Error;

/// Names the canonical encoding: digests of two different encodings never collide.
const ENCODING: &str = "lmc 2026-11 clears v1";
/// Bytes of one entry in [`Clears::encode`].
const ENTRY_LEN: usize = 24;

/// Random id that a process draws at its first clear, and under which it counts its clears.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StartId([u8; 16]);

/// The clears that a daemon has carried out: for each process that ever cleared, the number of its clears.
///
/// The order of clears of different processes is neither known nor needed: the [`join`](Self::join) of two
/// maps has all clears of both, in whatever order daemons meet. Two daemons that have carried out the same
/// clears have the same map, and the same [`id`](Self::id). The id goes into the names of chunks
/// ([`lmc_key::SpaceId::after`]): a chunk that is found was computed by a daemon that had carried out exactly
/// these clears.
///
/// ```
/// use lmc_backend::{Clears, StartId};
///
/// let (a, b) = (StartId::new([1; 16]), StartId::new([2; 16]));
/// let (mut one, mut other) = (Clears::default(), Clears::default());
/// one.count(a)?;
/// other.count(b)?;
/// assert_ne!(one.id(), other.id());
/// one.join(&other)?;
/// other.join(&one)?;
/// assert_eq!(one.id(), other.id());
/// # Ok::<(), lmc_backend::TooManyClears>(())
/// ```
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Clears(BTreeMap<StartId, u64>);

/// More processes have cleared than a map of clears can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{found} processes have cleared, more than the {} that are counted: stop all daemons, and empty \
     their state folders, drives and shared stores",
    Clears::MAX_STARTS
)]
pub struct TooManyClears {
    /// Number of processes.
    pub found: usize,
}

/// Bytes that are not the encoding of a map of clears.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the map of clears is damaged")]
pub struct ClearsDamaged;

impl StartId {
    /// Makes an id of 16 given bytes.
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Draws a random id.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        Ok(Self(id))
    }

    /// Returns the bytes.
    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl Clears {
    /// Most processes that a map holds.
    pub const MAX_STARTS: usize = 16_384;

    /// Most bytes of [`Self::encode`].
    pub const MAX_LEN: usize = Self::MAX_STARTS * ENTRY_LEN;

    /// Returns the digest of the map: [`ClearsId::NONE`] for the empty map, and a different digest for every
    /// other map.
    pub fn id(&self) -> ClearsId {
        if self.0.is_empty() {
            return ClearsId::NONE;
        }
        let mut hasher = blake3::Hasher::new_derive_key(ENCODING);
        hasher.update(&self.encode());
        let digest = hasher.finalize();
        let (first, _) = digest.as_bytes().split_first_chunk().expect("32 bytes");
        ClearsId::new(*first)
    }

    /// Returns true if the map has no clears.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of processes in the map.
    pub fn starts(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of clears of all processes.
    pub fn total(&self) -> u64 {
        self.0.values().fold(0, |sum, n| sum.saturating_add(*n))
    }

    /// Counts one more clear of a process.
    ///
    /// # Errors
    /// [`TooManyClears`]; the map is unchanged then.
    pub fn count(&mut self, start: StartId) -> Result<(), TooManyClears> {
        let found = self.0.len() + 1;
        match self.0.entry(start) {
            Entry::Occupied(mut known) => {
                let count = known.get_mut();
                *count = count.saturating_add(1);
            }
            Entry::Vacant(_) if found > Self::MAX_STARTS => return Err(TooManyClears { found }),
            Entry::Vacant(new) => _ = new.insert(1),
        }
        Ok(())
    }

    /// Adds the clears of another map. Returns true if any of them was not known.
    ///
    /// # Errors
    /// [`TooManyClears`]; the map is unchanged then.
    pub fn join(&mut self, other: &Self) -> Result<bool, TooManyClears> {
        let new = other.0.keys().filter(|start| !self.0.contains_key(start));
        let found = self.0.len() + new.count();
        if found > Self::MAX_STARTS {
            return Err(TooManyClears { found });
        }
        let mut changed = false;
        for (&start, &count) in &other.0 {
            let known = self.0.entry(start).or_default();
            changed |= count > *known;
            *known = count.max(*known);
        }
        Ok(changed)
    }

    /// Returns true if every clear of the other map is in this one.
    pub fn contains(&self, other: &Self) -> bool {
        let known = |start| self.0.get(start).copied().unwrap_or_default();
        other.0.iter().all(|(start, &count)| count <= known(start))
    }

    /// Returns the entries in the order of their ids.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = (StartId, u64)> + '_ {
        self.0.iter().map(|(&start, &count)| (start, count))
    }

    /// Makes a map of entries. An entry of zero clears, or an id that occurs twice, is damage.
    ///
    /// # Errors
    /// [`ClearsDamaged`], also for more entries than a map can hold.
    pub fn from_entries(
        entries: impl IntoIterator<Item = (StartId, u64)>,
    ) -> Result<Self, ClearsDamaged> {
        let mut map = BTreeMap::new();
        for (start, count) in entries {
            let known = map.insert(start, count);
            if count == 0 || known.is_some() || map.len() > Self::MAX_STARTS {
                return Err(ClearsDamaged);
            }
        }
        Ok(Self(map))
    }

    /// Returns the canonical bytes: for each entry, in the order of the ids, 16 bytes of id and 8 bytes
    /// (little-endian) of count. A file format adds a length, a version and a checksum.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.0.len() * ENTRY_LEN);
        for (start, count) in &self.0 {
            bytes.extend(start.0);
            bytes.extend(count.to_le_bytes());
        }
        bytes
    }

    /// Reads what [`Self::encode`] wrote.
    ///
    /// # Errors
    /// [`ClearsDamaged`] for any other bytes.
    pub fn decode(bytes: &[u8]) -> Result<Self, ClearsDamaged> {
        let (entries, []) = bytes.as_chunks::<ENTRY_LEN>() else {
            return Err(ClearsDamaged);
        };
        if entries.len() > Self::MAX_STARTS {
            return Err(ClearsDamaged);
        }
        let entry = |bytes: &[u8; ENTRY_LEN]| {
            let (start, count) = bytes.split_first_chunk().expect("24 bytes");
            let (count, _) = count.split_first_chunk().expect("8 bytes");
            (StartId(*start), u64::from_le_bytes(*count))
        };
        let this = Self::from_entries(entries.iter().map(entry))?;
        // One map has one encoding.
        (this.encode() == bytes)
            .then_some(this)
            .ok_or(ClearsDamaged)
    }
}

impl fmt::Debug for StartId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(f, "StartId({a:02x}{b:02x}{c:02x}{d:02x})")
    }
}

impl fmt::Debug for Clears {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Clears({} of {})", self.total(), self.starts())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn start(n: u8) -> StartId {
        StartId::new([n; 16])
    }

    fn any_clears() -> impl Strategy<Value = Clears> {
        let counts = prop::collection::btree_map(0..6u8, 1..4u64, 0..5);
        counts.prop_map(|counts| {
            let entries = counts.into_iter().map(|(n, count)| (start(n), count));
            Clears::from_entries(entries).expect("each id once")
        })
    }

    #[test]
    fn golden_bytes_and_digest() {
        let mut clears = Clears::default();
        assert_eq!(clears.id(), ClearsId::NONE);
        for n in [2, 1, 2] {
            clears.count(start(n)).expect("two processes");
        }
        let bytes: String = clears.encode().iter().map(|b| format!("{b:02x}")).collect();
        let (one, two) = ("01".repeat(16), "02".repeat(16));
        assert_eq!(bytes, format!("{one}0100000000000000{two}0200000000000000"));
        assert_eq!(clears.id().to_string(), "0b091030253994bd543f56edd18f976f");
        assert_eq!((clears.starts(), clears.total()), (2, 3));
    }

    #[test]
    fn what_is_too_much_is_refused_and_changes_nothing() {
        let id = |n: usize| {
            let mut id = [0; 16];
            id[..8].copy_from_slice(&(n as u64).to_le_bytes());
            StartId::new(id)
        };
        let most = (0..Clears::MAX_STARTS).map(|n| (id(n), 1));
        let mut full = Clears::from_entries(most.clone()).expect("as many as may be");
        assert_eq!(full.encode().len(), Clears::MAX_LEN);
        let (before, found) = (full.id(), Clears::MAX_STARTS + 1);
        let more = Clears::from_entries([(start(0xEE), 1)]).expect("one");
        assert_eq!(full.count(start(0xEE)), Err(TooManyClears { found }));
        assert_eq!(full.join(&more), Err(TooManyClears { found }));
        assert_eq!(full.id(), before);
        assert_eq!(
            full.count(id(7)),
            Ok(()),
            "a process that has cleared before"
        );
        let one_more = most.chain([(start(0xEE), 1)]);
        assert_eq!(Clears::from_entries(one_more), Err(ClearsDamaged));
    }

    #[test]
    fn other_bytes_are_damage() {
        let clears = Clears::from_entries([(start(1), 3), (start(2), 1)]).expect("two");
        let good = clears.encode();
        for cut in (1..good.len()).filter(|cut| cut % ENTRY_LEN != 0) {
            assert_eq!(Clears::decode(&good[..cut]), Err(ClearsDamaged));
        }
        let swapped = [&good[ENTRY_LEN..], &good[..ENTRY_LEN]].concat();
        let twice = [&good[..ENTRY_LEN], &good[..ENTRY_LEN]].concat();
        let none = [&good[..16], &[0; 8]].concat();
        let long = vec![1; Clears::MAX_LEN + ENTRY_LEN];
        for bytes in [swapped, twice, none, long] {
            assert_eq!(Clears::decode(&bytes), Err(ClearsDamaged));
        }
    }

    proptest! {
        #[test]
        fn the_order_of_joins_does_not_matter(
            a in any_clears(), b in any_clears(), c in any_clears(),
        ) {
            let join = |one: &Clears, other: &Clears| {
                let mut joined = one.clone();
                joined.join(other).expect("few");
                joined
            };
            prop_assert_eq!(join(&a, &b), join(&b, &a));
            prop_assert_eq!(join(&join(&a, &b), &c), join(&a, &join(&b, &c)));
            prop_assert_eq!(join(&a, &a), a.clone());
            let both = join(&a, &b);
            prop_assert!(both.contains(&a) && both.contains(&b));
            prop_assert_eq!(a.clone().join(&b), Ok(!a.contains(&b)));
            prop_assert_eq!(a.id() == b.id(), a == b);
        }

        #[test]
        fn a_clear_is_in_no_map_of_before(mut a in any_clears(), n in 0..8u8) {
            let before = a.clone();
            a.count(start(n)).expect("few");
            prop_assert!(a.contains(&before) && !before.contains(&a));
            prop_assert_eq!(Clears::decode(&a.encode()), Ok(a));
        }
    }
}
