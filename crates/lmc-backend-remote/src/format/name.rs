//! Names of the objects of a store.

use std::fmt;
use std::str::FromStr;

use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use thiserror::Error;

/// Name of the layout, and the first part of every name.
const ROOT: &str = "v1";
/// Length of the longest name: that of a value with ranks and groups of five digits.
const MAX_LEN: usize = 128;

/// Space of the chunks that `lmc remote check` writes and removes. No engine has it: ids are digests.
pub const PROBE_SPACE: SpaceId = SpaceId::new(*b"lmc probe chunks");
/// First byte of the hashes of those chunks, so that few names are listed to find them.
const PROBE_FANOUT: u8 = 0;

/// Returns the key of a probe, of 32 random bytes.
pub fn probe_key(mut random: [u8; 32]) -> ChunkKey {
    random[0] = PROBE_FANOUT;
    ChunkKey {
        space: PROBE_SPACE,
        kv_rank: 0,
        group: 0,
        hash: ChunkHash::new(random),
    }
}

/// Name of an object. Its text is what the store knows it by, after the prefix of the URL.
///
/// ```
/// use lmc_backend_remote::format::Name;
/// use lmc_key::{ChunkHash, ChunkKey, SpaceId};
///
/// let key = ChunkKey {
///     space: SpaceId::new([0xaa; 16]),
///     kv_rank: 1,
///     group: 0,
///     hash: ChunkHash::new([0x5c; 32]),
/// };
/// let text = Name::Value(key).to_string();
/// assert!(text.starts_with("v1/5c/aaaa"));
/// assert!(text.ends_with("5c-1-0"));
/// assert_eq!(text.parse(), Ok(Name::Value(key)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Name {
    /// A chunk: `v1/<2 hex of hash>/<space>/<hash>-<rank>-<group>`.
    Value(ChunkKey),
    /// Description of a space: `v1/spaces/<space>`.
    Space(SpaceId),
    /// The newest clears: `v1/clears`.
    Clears,
}

/// The names that a listing shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    /// Chunks.
    Values {
        /// First byte of the chunks' hashes; `None` for all.
        fanout: Option<u8>,
        /// Space of the chunks; `None` for all.
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
        fanout: None,
        space: None,
    };

    /// Chunks that checks have written.
    pub const PROBES: Self = Self::Values {
        fanout: Some(PROBE_FANOUT),
        space: Some(PROBE_SPACE),
    };

    /// Returns the longest start of all names that the scope covers, up to a `/`.
    pub fn prefix(&self) -> String {
        match *self {
            Self::Spaces => format!("{ROOT}/spaces/"),
            Self::Values { fanout: None, .. } => format!("{ROOT}/"),
            Self::Values {
                fanout: Some(fanout),
                space: None,
            } => format!("{ROOT}/{fanout:02x}/"),
            Self::Values {
                fanout: Some(fanout),
                space: Some(space),
            } => format!("{ROOT}/{fanout:02x}/{space}/"),
        }
    }

    /// Returns true for the names that the scope covers.
    pub fn covers(&self, name: &Name) -> bool {
        match (self, name) {
            (Self::Values { fanout, space }, Name::Value(key)) => {
                fanout.is_none_or(|fanout| fanout == key.hash.as_bytes()[0])
                    && space.is_none_or(|space| space == key.space)
            }
            (Self::Spaces, Name::Space(_)) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(key) => {
                let (fanout, space, hash) = (key.hash.as_bytes()[0], key.space, key.hash);
                let (rank, group) = (key.kv_rank, key.group);
                write!(f, "{ROOT}/{fanout:02x}/{space}/{hash}-{rank}-{group}")
            }
            Self::Space(space) => write!(f, "{ROOT}/spaces/{space}"),
            Self::Clears => write!(f, "{ROOT}/clears"),
        }
    }
}

impl FromStr for Name {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let name = parse(text).ok_or(NameError)?;
        // One object has one name: no capitals, no leading zeros, no signs.
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
    let (folder, rest) = rest.split_once('/')?;
    if folder == "spaces" {
        return Some(Name::Space(rest.parse().ok()?));
    }
    let (space, rest) = rest.split_once('/')?;
    let mut parts = rest.splitn(3, '-');
    let mut part = || parts.next();
    Some(Name::Value(ChunkKey {
        space: space.parse().ok()?,
        hash: part()?.parse().ok()?,
        kv_rank: part()?.parse().ok()?,
        group: part()?.parse().ok()?,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::golden_key as key;
    use super::*;

    const VALUE: &str = "v1/10/000102030405060708090a0b0c0d0e0f/\
        101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f-258-772";

    #[test]
    fn golden_names() {
        let space = key().space;
        for (name, text) in [
            (Name::Value(key()), VALUE),
            (
                Name::Space(space),
                "v1/spaces/000102030405060708090a0b0c0d0e0f",
            ),
            (Name::Clears, "v1/clears"),
            (
                Name::Value(probe_key([0x99; 32])),
                "v1/00/6c6d632070726f6265206368756e6b73/0099999999999999999999999999999999999999999999999999999999999999-0-0",
            ),
        ] {
            assert_eq!(name.to_string(), text);
            assert_eq!(text.parse(), Ok(name));
        }
    }

    #[test]
    fn an_object_has_one_name() {
        for text in [
            "",
            "v1",
            "v1/",
            "v1/clears/",
            "v2/clears",
            "/v1/clears",
            "v1/spaces/",
            "v1/spaces/00",
            "v1/spaces/000102030405060708090A0B0C0D0E0F",
            &VALUE.replace("v1/10/", "v1/11/"),
            &VALUE.replace("-258-", "-0258-"),
            &VALUE.replace("-258-", "-+258-"),
            &VALUE.replace("-258-", "-65536-"),
            &VALUE.replace("-772", ""),
            &format!("{VALUE}-1"),
            &format!("{VALUE}/"),
            &format!("{VALUE}.tmp"),
            &"v1/".repeat(100),
        ] {
            assert_eq!(text.parse::<Name>(), Err(NameError), "{text}");
        }
    }

    #[test]
    fn scopes_cover_by_hash_and_space() {
        let value = Name::Value(key());
        let values = |fanout, space| Scope::Values { fanout, space };
        assert!(Scope::VALUES.covers(&value) && !Scope::PROBES.covers(&value));
        assert!(Scope::PROBES.covers(&Name::Value(probe_key([7; 32]))));
        assert!(values(Some(0x10), Some(key().space)).covers(&value));
        assert!(!values(Some(0x11), None).covers(&value));
        assert!(!values(None, Some(SpaceId::new([9; 16]))).covers(&value));
        assert!(!Scope::VALUES.covers(&Name::Space(key().space)));
        assert!(Scope::Spaces.covers(&Name::Space(key().space)));
        assert!(!Scope::Spaces.covers(&Name::Clears) && !Scope::Spaces.covers(&value));
        for (scope, name) in [
            (Scope::VALUES, value),
            (values(None, Some(key().space)), value),
            (values(Some(0x10), None), value),
            (values(Some(0x10), Some(key().space)), value),
            (Scope::Spaces, Name::Space(key().space)),
        ] {
            let prefix = scope.prefix();
            assert!(prefix.ends_with('/') && name.to_string().starts_with(&prefix));
        }
    }

    proptest! {
        #[test]
        fn names_come_back(space: [u8; 16], hash: [u8; 32], kv_rank: u16, group: u16) {
            let (space, hash) = (SpaceId::new(space), ChunkHash::new(hash));
            let name = Name::Value(ChunkKey { space, kv_rank, group, hash });
            let text = name.to_string();
            prop_assert!(text.len() <= MAX_LEN);
            prop_assert_eq!(text.parse(), Ok(name));
        }

        #[test]
        fn text_that_is_taken_is_the_name(text in "v1/[0-9a-z/-]{0,140}|\\PC{0,140}") {
            if let Ok(name) = text.parse::<Name>() {
                prop_assert_eq!(name.to_string(), text);
            }
        }
    }
}
