//! Names of the objects of a store.

use std::fmt;
use std::str::FromStr;

use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use thiserror::Error;

/// Name of the layout, and first part of every name.
pub(crate) const ROOT: &str = "v2";
/// First part of the names in earlier releases. Nothing below it is read.
pub(crate) const OLD_ROOT: &str = "v1";
/// Length of the longest name: a value with a rank and a group of five digits.
const MAX_LEN: usize = 165;

/// Space of the chunks that `lmc remote check` writes and removes. No engine uses it, because ids are
/// digests.
pub const PROBE_SPACE: SpaceId = SpaceId::new(*b"lmc probe chunks");
/// Folder of these chunks: no store has this generation.
pub const PROBE_FOLDER: ChunkFolder = ChunkFolder {
    generation: Generation([0; 8]),
    clears: ClearsId::NONE,
};
/// First byte of these chunks' hashes, so that few names have to be listed to find the chunks.
const PROBE_FANOUT: u8 = 0;

/// Returns the name of a probe, made of 32 random bytes.
pub fn probe(mut random: [u8; 32]) -> ValueName {
    random[0] = PROBE_FANOUT;
    PROBE_FOLDER.value(ChunkKey {
        space: PROBE_SPACE,
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(random),
    })
}

/// Random id that is created together with the object `v2/clears`. If that object is lost, its successor has
/// another generation, so that no chunk from before has a valid name. It has only 8 bytes, because some S3
/// servers do not accept longer names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation([u8; 8]);

impl Generation {
    /// Makes a generation of 8 given bytes.
    pub const fn new(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    /// Draws a random generation.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn random() -> Result<Self, getrandom::Error> {
        let mut id = [0; 8];
        getrandom::fill(&mut id)?;
        Ok(Self(id))
    }

    /// The bytes.
    pub const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

impl FromStr for Generation {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let number = u64::from_str_radix(text, 16).map_err(|_| NameError)?;
        let generation = Self(number.to_be_bytes());
        // A generation has only one text form.
        (generation.to_string() == text)
            .then_some(generation)
            .ok_or(NameError)
    }
}

impl fmt::Debug for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Generation({self})")
    }
}

/// Folder of the chunks that were computed after the same clears: `v2/<generation>/<digest>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkFolder {
    /// Generation of the store.
    pub generation: Generation,
    /// Digest of the clears.
    pub clears: ClearsId,
}

impl ChunkFolder {
    /// Returns the name of a chunk in the folder.
    pub fn value(self, key: ChunkKey) -> ValueName {
        ValueName { folder: self, key }
    }
}

impl fmt::Display for ChunkFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{ROOT}/{}/{}", self.generation, self.clears)
    }
}

/// Name of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ValueName {
    /// Folder of the chunk.
    pub folder: ChunkFolder,
    /// Key of the chunk.
    pub key: ChunkKey,
}

impl fmt::Display for ValueName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (folder, key) = (self.folder, self.key);
        let (fanout, space, hash) = (key.hash.as_bytes()[0], key.space, key.hash);
        let (rank, group) = (key.kv_rank, key.group);
        write!(f, "{folder}/{fanout:02x}/{space}/{hash}-{rank}-{group}")
    }
}

/// Name of an object. Its text form is the object's name in the store, after the prefix of the URL.
///
/// ```
/// use lmc_backend_remote::format::{ChunkFolder, Generation, Name};
/// use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
///
/// let folder = ChunkFolder {
///     generation: Generation::new([0x7e; 8]),
///     clears: ClearsId::NONE,
/// };
/// let key = ChunkKey {
///     space: SpaceId::new([0xaa; 16]),
///     kv_rank: 1,
///     group: 0,
///     hash: ChunkHash::new([0x5c; 32]),
/// };
/// let text = folder.value(key).to_string();
/// assert!(text.starts_with("v2/7e7e") && text.contains("/5c/aaaa"));
/// assert!(text.ends_with("5c-1-0"));
/// assert_eq!(text.parse(), Ok(Name::Value(folder.value(key))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// A chunk: `<folder>/<2 hex of hash>/<space>/<hash>-<rank>-<group>`.
    Value(ValueName),
    /// Map of the clears that came before the chunks of a folder: `<folder>/map`.
    Map(ChunkFolder),
    /// Description of a space of a folder: `<folder>/spaces/<space>`.
    Space(ChunkFolder, SpaceId),
    /// All clears, with the generation: `v2/clears`.
    Clears,
}

impl Name {
    /// Returns the folder of the object; `None` for `v2/clears`.
    pub fn folder(&self) -> Option<ChunkFolder> {
        match *self {
            Self::Value(ValueName { folder, .. }) | Self::Map(folder) | Self::Space(folder, _) => {
                Some(folder)
            }
            Self::Clears => None,
        }
    }

    /// Returns the name of a chunk; `None` for any other object.
    pub fn value(self) -> Option<ValueName> {
        match self {
            Self::Value(name) => Some(name),
            _ => None,
        }
    }
}

impl From<ValueName> for Name {
    fn from(name: ValueName) -> Self {
        Self::Value(name)
    }
}

/// Selection of the names in a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Everything in folders: all objects but `v2/clears`.
    Folders,
    /// Chunks.
    Values {
        /// Folder of the chunks; `None` for all.
        folder: Option<ChunkFolder>,
        /// First byte of the chunks' hashes; `None` for all.
        fanout: Option<u8>,
        /// Space of the chunks, as in their keys; `None` for all.
        space: Option<SpaceId>,
    },
    /// Descriptions of spaces.
    Spaces,
}

/// Text that is not the name of an object of this layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("not a name of layout {ROOT}")]
pub struct NameError;

impl Scope {
    /// All chunks.
    pub const VALUES: Self = Self::Values {
        folder: None,
        fanout: None,
        space: None,
    };

    /// Chunks that `lmc remote check` has written.
    pub const PROBES: Self = Self::Values {
        folder: Some(PROBE_FOLDER),
        fanout: Some(PROBE_FANOUT),
        space: Some(PROBE_SPACE),
    };

    /// Selects the chunks of a folder.
    pub fn values_of(folder: ChunkFolder) -> Self {
        Self::Values {
            folder: Some(folder),
            fanout: None,
            space: None,
        }
    }

    /// Returns the longest common prefix of all names in the scope, up to a `/`.
    pub fn prefix(&self) -> String {
        let Self::Values {
            folder: Some(folder),
            fanout,
            space,
        } = *self
        else {
            return format!("{ROOT}/");
        };
        match (fanout, space) {
            (None, _) => format!("{folder}/"),
            (Some(fanout), None) => format!("{folder}/{fanout:02x}/"),
            (Some(fanout), Some(space)) => format!("{folder}/{fanout:02x}/{space}/"),
        }
    }

    /// Returns true if the scope covers a name.
    pub fn covers(&self, name: &Name) -> bool {
        match (*self, name) {
            (
                Self::Values {
                    folder,
                    fanout,
                    space,
                },
                Name::Value(name),
            ) => {
                folder.is_none_or(|folder| folder == name.folder)
                    && fanout.is_none_or(|fanout| fanout == name.key.hash.as_bytes()[0])
                    && space.is_none_or(|space| space == name.key.space)
            }
            (Self::Spaces, Name::Space(..)) => true,
            (Self::Folders, name) => name.folder().is_some(),
            _ => false,
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(name) => name.fmt(f),
            Self::Map(folder) => write!(f, "{folder}/map"),
            Self::Space(folder, space) => write!(f, "{folder}/spaces/{space}"),
            Self::Clears => write!(f, "{ROOT}/clears"),
        }
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let name = parse(text).ok_or(NameError)?;
        // An object has only one name: no capitals, no leading zeros, no signs.
        (name.to_string() == text).then_some(name).ok_or(NameError)
    }
}

fn parse(text: &str) -> Option<Name> {
    if text.len() > MAX_LEN {
        return None;
    }
    let rest = text.strip_prefix(ROOT)?.strip_prefix('/')?;
    if rest == "clears" {
        return Some(Name::Clears);
    }
    let mut parts = rest.splitn(4, '/');
    let mut part = || parts.next();
    let folder = ChunkFolder {
        generation: part()?.parse().ok()?,
        clears: part()?.parse().ok()?,
    };
    match (part()?, part()) {
        ("map", None) => Some(Name::Map(folder)),
        ("spaces", Some(space)) => Some(Name::Space(folder, space.parse().ok()?)),
        (_, rest) => {
            let (space, rest) = rest?.split_once('/')?;
            let mut parts = rest.splitn(3, '-');
            let mut part = || parts.next();
            let key = ChunkKey {
                space: space.parse().ok()?,
                hash: part()?.parse().ok()?,
                kv_rank: part()?.parse().ok()?,
                group: part()?.parse().ok()?,
            };
            Some(Name::Value(folder.value(key)))
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{golden_folder as folder, golden_key as key};
    use super::*;

    const FOLDER: &str = "v2/a0a1a2a3a4a5a6a7/c0c1c2c3c4c5c6c7c8c9cacbcccdcecf";
    const REST: &str = "10/000102030405060708090a0b0c0d0e0f/\
        101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f-258-772";

    #[test]
    fn golden_names() {
        let zeroes = "0".repeat(32);
        for (name, text) in [
            (
                Name::Value(folder().value(key())),
                format!("{FOLDER}/{REST}"),
            ),
            (Name::Map(folder()), format!("{FOLDER}/map")),
            (
                Name::Space(folder(), key().space),
                format!("{FOLDER}/spaces/000102030405060708090a0b0c0d0e0f"),
            ),
            (Name::Clears, "v2/clears".to_owned()),
            (
                Name::Value(probe([0x99; 32])),
                format!(
                    "v2/0000000000000000/{zeroes}/00/6c6d632070726f6265206368756e6b73/00{}-0-0",
                    "99".repeat(31)
                ),
            ),
        ] {
            assert_eq!(name.to_string(), text);
            assert_eq!(text.parse(), Ok(name));
        }
    }

    #[test]
    fn an_object_has_one_name() {
        let value = format!("{FOLDER}/{REST}");
        for text in [
            "",
            "v2",
            "v2/",
            "v2/clears/",
            "v1/clears",
            "/v2/clears",
            FOLDER,
            &format!("{FOLDER}/map/"),
            &format!("{FOLDER}/map/00"),
            &format!("{FOLDER}/spaces/"),
            &format!("{FOLDER}/spaces/00"),
            &format!("{FOLDER}/spaces/000102030405060708090A0B0C0D0E0F"),
            &value.replace("v2/a0", "v2/A0"),
            &value.replace("/c0", "/"),
            &value.replace("v2/", "v1/"),
            &value.replace("/10/", "/11/"),
            &value.replace("-258-", "-0258-"),
            &value.replace("-258-", "-+258-"),
            &value.replace("-258-", "-65536-"),
            &value.replace("-772", ""),
            &format!("{value}-1"),
            &format!("{value}/"),
            &format!("{value}.tmp"),
            &"v2/".repeat(100),
        ] {
            assert_eq!(text.parse::<Name>(), Err(NameError), "{text}");
        }
    }

    #[test]
    fn scopes_cover_by_folder_hash_and_space() {
        let value = Name::Value(folder().value(key()));
        let space = Name::Space(folder(), key().space);
        let values = |folder, fanout, space| Scope::Values {
            folder,
            fanout,
            space,
        };
        let mine = Some(folder());
        assert!(Scope::VALUES.covers(&value) && !Scope::PROBES.covers(&value));
        assert!(Scope::PROBES.covers(&Name::Value(probe([7; 32]))));
        assert!(values(mine, Some(0x10), Some(key().space)).covers(&value));
        assert!(!values(Some(PROBE_FOLDER), None, None).covers(&value));
        assert!(!values(None, Some(0x11), None).covers(&value));
        assert!(!values(None, None, Some(SpaceId::new([9; 16]))).covers(&value));
        assert!(!Scope::VALUES.covers(&space) && Scope::Spaces.covers(&space));
        assert!(!Scope::Spaces.covers(&Name::Clears) && !Scope::Spaces.covers(&value));
        for name in [value, space, Name::Map(folder())] {
            assert!(Scope::Folders.covers(&name), "{name}");
        }
        assert!(!Scope::Folders.covers(&Name::Clears));
        for (scope, name) in [
            (Scope::VALUES, value),
            (Scope::values_of(folder()), value),
            (values(mine, None, Some(key().space)), value),
            (values(mine, Some(0x10), None), value),
            (values(None, Some(0x10), None), value),
            (values(mine, Some(0x10), Some(key().space)), value),
            (Scope::Spaces, space),
            (Scope::Folders, Name::Map(folder())),
        ] {
            let prefix = scope.prefix();
            assert!(prefix.ends_with('/') && name.to_string().starts_with(&prefix));
        }
    }

    proptest! {
        #[test]
        fn names_come_back(
            generation: [u8; 8], clears: [u8; 16],
            space: [u8; 16], hash: [u8; 32], kv_rank: u16, group: u16,
        ) {
            let (space, hash) = (SpaceId::new(space), ChunkHash::new(hash));
            let folder = ChunkFolder {
                generation: Generation::new(generation),
                clears: ClearsId::new(clears),
            };
            let value = folder.value(ChunkKey { space, kv_rank, group, hash });
            for name in [Name::Value(value), Name::Map(folder), Name::Space(folder, space)] {
                let text = name.to_string();
                prop_assert!(text.len() <= MAX_LEN);
                prop_assert_eq!(text.parse(), Ok(name));
            }
        }

        #[test]
        fn text_that_is_taken_is_the_name(text in "v2/[0-9a-z/-]{0,190}|\\PC{0,190}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
