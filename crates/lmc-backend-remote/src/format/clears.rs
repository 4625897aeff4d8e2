//! The objects with maps of clears: one object for all clears, and one in each folder of chunks.

use lmc_backend::Clears;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

use super::{ChunkFolder, Generation, PROBE_FOLDER};

const MAGIC: [u8; 8] = *b"LMCCLEAR";
const VERSION: u32 = 2;
/// Bytes before the entries: magic, version, number of entries, generation.
const HEAD_LEN: usize = 24;
/// Most bytes of the object.
pub const MAX_CLEARS_LEN: usize = HEAD_LEN + Clears::MAX_LEN + 8;

/// A map of clears in a store with a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClearsRecord {
    /// Generation of the store.
    pub generation: Generation,
    /// The clears: in `v2/clears` all that were passed on through the store, in a folder's map those that
    /// came before the folder's chunks.
    pub clears: Clears,
}

/// Status of a folder of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// Daemons that have carried out all clears use the folder.
    Used,
    /// No daemon looks for its chunks any more: the folder has another generation, or its chunks are from
    /// before some of the clears.
    Stale,
    /// The clears of the folder are not known here.
    Unknown,
}

/// Reason why an object of clears is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ClearsError {
    /// The object has a later version.
    #[error("unknown version {0} of the object of clears")]
    Version(u32),
    /// The object has more bytes than this version writes.
    #[error("an object of clears of {0} bytes is too long for this version")]
    Len(u64),
    /// The bytes are not of this layout.
    #[error("the object of clears is damaged")]
    Damaged,
}

impl ClearsRecord {
    /// Returns the folder of the chunks that are computed after all of these clears.
    pub fn folder(&self) -> ChunkFolder {
        ChunkFolder {
            generation: self.generation,
            clears: self.clears.id(),
        }
    }

    /// Returns the status of a folder, according to this record of all clears. `map` is the folder's map, if
    /// it can be read; without it, a folder of this generation is never reported as stale.
    pub fn standing(&self, folder: ChunkFolder, map: Option<&Clears>) -> Standing {
        let is_replaced = folder.generation != self.generation;
        match folder {
            PROBE_FOLDER => Standing::Unknown,
            folder if folder == self.folder() => Standing::Used,
            _ if is_replaced || map.is_some_and(|map| self.clears.contains(map)) => Standing::Stale,
            _ => Standing::Unknown,
        }
    }

    /// Returns the bytes of the object.
    pub fn encode(&self) -> Vec<u8> {
        let entries = self.clears.encode();
        let mut bytes = Vec::with_capacity(HEAD_LEN + entries.len() + 8);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.clears.starts() as u32).to_le_bytes());
        bytes.extend(self.generation.as_bytes());
        bytes.extend(entries);
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`ClearsError`] for bytes that this version does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, ClearsError> {
        let damaged = ClearsError::Damaged;
        let rest = bytes.strip_prefix(&MAGIC).ok_or(damaged)?;
        let (version, rest) = rest.split_first_chunk().ok_or(damaged)?;
        // The version is used before the checksum is checked: a later version may have another checksum.
        let version = u32::from_le_bytes(*version);
        if version > VERSION {
            return Err(ClearsError::Version(version));
        }
        let (count, rest) = rest.split_first_chunk().ok_or(damaged)?;
        let (generation, rest) = rest.split_first_chunk().ok_or(damaged)?;
        let (entries, sum) = rest.split_last_chunk().ok_or(damaged)?;
        let clears = Clears::decode(entries).map_err(|_| damaged)?;
        let is_valid = version == VERSION
            && u32::from_le_bytes(*count) as usize == clears.starts()
            && xxh3_64(&bytes[..bytes.len() - 8]) == u64::from_le_bytes(*sum);
        let generation = Generation::new(*generation);
        is_valid
            .then_some(Self { generation, clears })
            .ok_or(damaged)
    }

    /// Reads the map of a folder; `None` for bytes that are not its map.
    pub fn decode_map(folder: ChunkFolder, bytes: &[u8]) -> Option<Clears> {
        let record = Self::decode(bytes).ok()?;
        (record.folder() == folder).then_some(record.clears)
    }
}

#[cfg(test)]
mod tests {
    use lmc_backend::StartId;
    use proptest::prelude::*;

    use super::super::golden_folder;
    use super::*;

    fn record(entries: &[(u8, u64)]) -> ClearsRecord {
        let entries = entries
            .iter()
            .map(|&(n, count)| (StartId::new([n; 16]), count));
        ClearsRecord {
            generation: golden_folder().generation,
            clears: Clears::from_entries(entries).expect("each id once"),
        }
    }

    #[test]
    fn golden_object() {
        let record = record(&[(0xAA, 2), (0xBB, 3)]);
        let golden = "4c4d43434c45415202000000020000\
            00a0a1a2a3a4a5a6a7\
            aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa0200000000000000\
            bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb0300000000000000";
        let hex: String = record.encode().iter().map(|b| format!("{b:02x}")).collect();
        let (body, sum) = hex.split_at(hex.len() - 16);
        assert_eq!(body, golden);
        assert_eq!(sum, "f1743eafe6e913f9");
        assert_eq!(ClearsRecord::decode(&record.encode()), Ok(record));
    }

    #[test]
    fn objects_of_others_are_refused() {
        let good = record(&[(1, 2)]).encode();
        let mut later = good.clone();
        later[8] = 3;
        assert_eq!(ClearsRecord::decode(&later), Err(ClearsError::Version(3)));
        for cut in 0..good.len() {
            assert_eq!(
                ClearsRecord::decode(&good[..cut]),
                Err(ClearsError::Damaged)
            );
        }
        let sealed = |at: usize, part: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + part.len()].copy_from_slice(part);
            let end = bytes.len() - 8;
            let sum = xxh3_64(&bytes[..end]);
            bytes[end..].copy_from_slice(&sum.to_le_bytes());
            bytes
        };
        for (what, bytes) in [
            ("version 1", sealed(8, &[1])),
            ("more entries than there are", sealed(12, &[2])),
            ("as many as can be", sealed(12, &[0xFF; 4])),
            ("no clear", sealed(HEAD_LEN + 16, &[0; 8])),
        ] {
            let found = ClearsRecord::decode(&bytes);
            assert_eq!(found, Err(ClearsError::Damaged), "{what}");
        }
        let flipped = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            bytes
        };
        // The version is believed before the checksum.
        for at in (0..good.len()).filter(|at| !(8..12).contains(at)) {
            assert_eq!(
                ClearsRecord::decode(&flipped(at)),
                Err(ClearsError::Damaged),
                "byte {at}"
            );
        }
    }

    #[test]
    fn only_folders_that_are_known_to_be_of_the_past_are_stale() {
        let (none, one, two) = (record(&[]), record(&[(1, 1)]), record(&[(1, 1), (2, 1)]));
        let elsewhere = record(&[(3, 1)]);
        let other_generation = ClearsRecord {
            generation: Generation::new([9; 8]),
            ..one.clone()
        };
        let standing = |of: &ClearsRecord| two.standing(of.folder(), Some(&of.clears));
        assert_eq!([&none, &one].map(standing), [Standing::Stale; 2]);
        assert_eq!(standing(&two), Standing::Used);
        assert_eq!(two.standing(two.folder(), None), Standing::Used);
        let elsewhere = standing(&elsewhere);
        assert_eq!(elsewhere, Standing::Unknown, "a clear that is not known");
        assert_eq!(
            two.standing(one.folder(), None),
            Standing::Unknown,
            "no map"
        );
        let replaced = two.standing(other_generation.folder(), None);
        assert_eq!(replaced, Standing::Stale);
        assert_eq!(two.standing(PROBE_FOLDER, None), Standing::Unknown);
        let bytes = one.encode();
        let map = |of: &ClearsRecord| ClearsRecord::decode_map(of.folder(), &bytes);
        assert_eq!(map(&one), Some(one.clears.clone()));
        assert_eq!((map(&two), map(&other_generation)), (None, None));
    }

    proptest! {
        #[test]
        fn records_come_back(
            counts in prop::collection::btree_map(0..9u8, 1..9u64, 0..6), generation: [u8; 8],
        ) {
            let counts: Vec<_> = counts.into_iter().collect();
            let record = ClearsRecord {
                generation: Generation::new(generation),
                ..record(&counts)
            };
            prop_assert!(record.encode().len() <= MAX_CLEARS_LEN);
            prop_assert_eq!(ClearsRecord::decode(&record.encode()), Ok(record));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            bytes.splice(..0, MAGIC);
            let sum = xxh3_64(&bytes);
            bytes.extend(sum.to_le_bytes());
            if let Ok(record) = ClearsRecord::decode(&bytes) {
                prop_assert_eq!(record.encode(), bytes);
            }
        }
    }
}
