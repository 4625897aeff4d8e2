//! The object that passes clears on from daemon to daemon.

use std::collections::BTreeMap;

use lmc_backend::{Clear, ClearEpoch};
use lmc_key::SpaceId;
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: [u8; 8] = *b"LMCCLEAR";
const VERSION: u32 = 1;
const HEAD_LEN: usize = 16;
const ENTRY_LEN: usize = 48;
/// Spaces with a clear of their own, at most. Above that, all spaces are cleared.
pub const MAX_CLEARS: usize = 1024;
/// Most bytes of the object.
pub const MAX_CLEARS_LEN: usize = HEAD_LEN + (MAX_CLEARS + 1) * ENTRY_LEN + 8;

/// The newest clears that are known: one of all spaces, and later ones of single spaces.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClearSet {
    all: ClearEpoch,
    spaces: BTreeMap<SpaceId, ClearEpoch>,
}

/// The reason why an object of clears is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ClearsError {
    /// A later version.
    #[error("version {0} of the object of clears is not known")]
    Version(u32),
    /// More bytes than this version writes.
    #[error("an object of clears of {0} bytes is not known")]
    Len(u64),
    /// Bytes that this layout does not write.
    #[error("the object of clears is damaged")]
    Damaged,
}

impl ClearSet {
    /// Returns the newest epoch of a space.
    pub fn of(&self, space: SpaceId) -> ClearEpoch {
        let of_space = self.spaces.get(&space);
        of_space.map_or(self.all, |epoch| epoch.join(self.all))
    }

    /// Returns an epoch that is as new as that of every space.
    pub fn of_all(&self) -> ClearEpoch {
        let spaces = self.spaces.values();
        spaces.fold(self.all, |newest, &epoch| newest.join(epoch))
    }

    /// Takes in a clear. Returns true if it was not known.
    pub fn note(&mut self, clear: Clear) -> bool {
        let known = match clear.space {
            None => self.all,
            Some(space) => self.of(space),
        };
        let joined = known.join(clear.epoch);
        if joined == known {
            return false;
        }
        match clear.space {
            None => {
                self.all = joined;
                let is_newer = |epoch: &ClearEpoch| epoch.join(joined) != joined;
                self.spaces.retain(|_, epoch| is_newer(epoch));
            }
            Some(space) => {
                self.spaces.insert(space, joined);
            }
        }
        if self.spaces.len() > MAX_CLEARS {
            // What is cleared too much is computed again; what is not cleared is served.
            self.all = self.of_all();
            self.spaces.clear();
        }
        true
    }

    /// Takes in all clears of another set. Returns true if any was not known.
    pub fn join(&mut self, other: &Self) -> bool {
        let mut changed = false;
        for clear in other.clears() {
            changed |= self.note(clear);
        }
        changed
    }

    /// Returns the clears, that of all spaces first; none if nothing was ever cleared.
    pub fn clears(&self) -> Vec<Clear> {
        let all = Some(Clear::all(self.all)).filter(|clear| clear.epoch != ClearEpoch::default());
        let spaces = self.spaces.iter();
        let spaces = spaces.map(|(&space, &epoch)| Clear::space(space, epoch));
        all.into_iter().chain(spaces).collect()
    }

    /// Returns the bytes of the object.
    pub fn encode(&self) -> Vec<u8> {
        let clears = self.clears();
        let mut bytes = Vec::with_capacity(HEAD_LEN + clears.len() * ENTRY_LEN + 8);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((clears.len() as u32).to_le_bytes());
        for Clear { space, epoch } in clears {
            bytes.extend(u64::from(space.is_some()).to_le_bytes());
            bytes.extend(space.map_or([0; 16], |space| *space.as_bytes()));
            bytes.extend(epoch.counter.to_le_bytes());
            bytes.extend(epoch.origin);
        }
        bytes.extend(xxh3_64(&bytes).to_le_bytes());
        bytes
    }

    /// Reads an object.
    ///
    /// # Errors
    /// [`ClearsError`] for bytes that this version does not write.
    pub fn decode(bytes: &[u8]) -> Result<Self, ClearsError> {
        let body = Self::entries(bytes)?;
        let mut this = Self::default();
        for entry in body.chunks_exact(ENTRY_LEN) {
            let Clear { space, epoch } = decode_clear(entry).ok_or(ClearsError::Damaged)?;
            let before = match space {
                None => std::mem::replace(&mut this.all, epoch),
                Some(space) => this.spaces.insert(space, epoch).unwrap_or_default(),
            };
            if before != ClearEpoch::default() || this.spaces.len() > MAX_CLEARS {
                return Err(ClearsError::Damaged);
            }
        }
        Ok(this)
    }

    /// Returns the bytes of the entries of an object.
    fn entries(bytes: &[u8]) -> Result<&[u8], ClearsError> {
        let damaged = ClearsError::Damaged;
        let rest = bytes.strip_prefix(&MAGIC).ok_or(damaged)?;
        let (version, rest) = rest.split_first_chunk().ok_or(damaged)?;
        let version = u32::from_le_bytes(*version);
        if version > VERSION {
            return Err(ClearsError::Version(version));
        }
        let (count, rest) = rest.split_first_chunk().ok_or(damaged)?;
        let count = u32::from_le_bytes(*count) as usize;
        let (body, sum) = rest.split_last_chunk().ok_or(damaged)?;
        let is_valid = version > 0
            && count <= MAX_CLEARS + 1
            && body.len() == count * ENTRY_LEN
            && xxh3_64(&bytes[..bytes.len() - 8]) == u64::from_le_bytes(*sum);
        is_valid.then_some(body).ok_or(damaged)
    }
}

fn decode_clear(entry: &[u8]) -> Option<Clear> {
    let (kind, rest) = entry.split_first_chunk()?;
    let (space, rest) = rest.split_first_chunk()?;
    let (counter, rest) = rest.split_first_chunk()?;
    let (origin, _) = rest.split_first_chunk()?;
    let epoch = ClearEpoch {
        counter: u64::from_le_bytes(*counter),
        origin: *origin,
    };
    if epoch.counter == 0 || epoch.counter > ClearEpoch::MAX_COUNTER {
        return None;
    }
    match u64::from_le_bytes(*kind) {
        0 if *space == [0; 16] => Some(Clear::all(epoch)),
        1 => Some(Clear::space(SpaceId::new(*space), epoch)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn epoch(counter: u64, origin: u8) -> ClearEpoch {
        ClearEpoch {
            counter,
            origin: [origin; 16],
        }
    }

    fn space(n: u16) -> SpaceId {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&n.to_le_bytes());
        SpaceId::new(bytes)
    }

    fn set(clears: &[Clear]) -> ClearSet {
        let mut set = ClearSet::default();
        for &clear in clears {
            set.note(clear);
        }
        set
    }

    #[test]
    fn golden_object() {
        let set = set(&[
            Clear::all(epoch(2, 0xAA)),
            Clear::space(space(0x0102), epoch(3, 0xBB)),
        ]);
        let golden = "4c4d43434c454152010000000200000000000000000000000000000000000000\
            00000000000000000200000000000000aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\
            0100000000000000020100000000000000000000000000000300000000000000\
            bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";
        let hex: String = set.encode().iter().map(|b| format!("{b:02x}")).collect();
        let (body, sum) = hex.split_at(hex.len() - 16);
        assert_eq!(body, golden);
        assert_eq!(sum, "0fead9db92100abd");
        assert_eq!(ClearSet::decode(&set.encode()), Ok(set));
    }

    #[test]
    fn a_clear_of_all_covers_older_ones_of_single_spaces() {
        let mut set = set(&[
            Clear::space(space(1), epoch(1, 1)),
            Clear::space(space(2), epoch(5, 2)),
        ]);
        assert!(set.note(Clear::all(epoch(3, 3))));
        assert!(!set.note(Clear::all(epoch(2, 9))));
        assert!(!set.note(Clear::space(space(1), epoch(2, 9))));
        assert_eq!(set.of(space(1)), epoch(3, 3));
        assert_eq!(set.of(space(2)), epoch(5, 2));
        assert_eq!(set.of(space(3)), epoch(3, 3));
        assert_eq!(set.clears().len(), 2);
    }

    #[test]
    fn what_does_not_fit_clears_all_spaces() {
        let mut set = ClearSet::default();
        for n in 0..=MAX_CLEARS as u16 {
            assert!(set.note(Clear::space(space(n), epoch(4, 4))));
        }
        assert_eq!(set.clears(), [Clear::all(epoch(4, 4))]);
        assert!(set.encode().len() <= MAX_CLEARS_LEN);
    }

    #[test]
    fn objects_of_others_are_refused() {
        let good = set(&[Clear::all(epoch(2, 1))]).encode();
        let mut later = good.clone();
        later[8] = 2;
        assert_eq!(ClearSet::decode(&later), Err(ClearsError::Version(2)));
        for cut in 0..good.len() {
            assert_eq!(ClearSet::decode(&good[..cut]), Err(ClearsError::Damaged));
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
            ("version 0", sealed(8, &[0])),
            ("more entries than there are", sealed(12, &[2])),
            ("as many as can be", sealed(12, &[0xFF; 4])),
            ("an unknown kind", sealed(16, &[2])),
            ("a space in a clear of all", sealed(24, &[1])),
            ("no clear", sealed(40, &[0; 8])),
            ("a counter that is none", sealed(40, &[0xFF; 8])),
        ] {
            assert_eq!(
                ClearSet::decode(&bytes),
                Err(ClearsError::Damaged),
                "{what}"
            );
        }
    }

    fn any_clear() -> impl Strategy<Value = Clear> {
        let epoch = (1..6u64, 0..3u8).prop_map(|(counter, origin)| epoch(counter, origin));
        let space = prop::option::of((0..4u16).prop_map(space));
        (space, epoch).prop_map(|(space, epoch)| Clear { space, epoch })
    }

    proptest! {
        #[test]
        fn sets_come_back(clears in prop::collection::vec(any_clear(), 0..20)) {
            let set = set(&clears);
            prop_assert_eq!(ClearSet::decode(&set.encode()), Ok(set));
        }

        /// A clear of either of two sets is one of their join.
        #[test]
        fn a_join_forgets_no_clear(
            ours in prop::collection::vec(any_clear(), 0..12),
            theirs in prop::collection::vec(any_clear(), 0..12),
        ) {
            let (mut ours, theirs) = (set(&ours), set(&theirs));
            let before = ours.clone();
            let changed = ours.join(&theirs);
            prop_assert_eq!(changed, ours != before);
            for clear in before.clears().into_iter().chain(theirs.clears()) {
                // One that has no entry of its own is cleared with all.
                let known = ours.of(clear.space.unwrap_or(space(100)));
                prop_assert_eq!(known.join(clear.epoch), known);
            }
            prop_assert!(!ours.join(&theirs));
        }

        #[test]
        fn any_bytes_are_taken_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            bytes.splice(..0, MAGIC);
            let sum = xxh3_64(&bytes);
            bytes.extend(sum.to_le_bytes());
            if let Ok(set) = ClearSet::decode(&bytes) {
                prop_assert!(ClearSet::decode(&set.encode()) == Ok(set));
            }
        }
    }
}
