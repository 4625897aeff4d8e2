//! The key space: everything besides the tokens that decides what a chunk's bytes mean.

use std::fmt;
use std::str::FromStr;

use crate::hash::{HashParseError, parse_hex, write_hex};
use crate::{DtypeName, HashAlgorithm, IdentityText, ModelName, Salt};

/// Names the canonical encoding below. Another encoding gets another name, so that ids of different encodings
/// never collide.
const ENCODING: &str = "lmc 2026-11 key space v1";
const LAYOUT_ENCODING: &str = "lmc 2026-11 layout fingerprint v1";
const TAGS_ENCODING: &str = "lmc 2026-11 tags v1";
const CLEARED_ENCODING: &str = "lmc 2026-11 space after clears v1";

/// A digest of a chunk's layout: shape, element type and order of its bytes, for every group. Only layouts
/// with the same fingerprint may read each other's chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LayoutFingerprint([u8; 16]);

/// Digest of the tags of a request. Requests with different tags do not share chunks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TagsId([u8; 16]);

/// Digest of the clears that a daemon has carried out; [`ClearsId::NONE`] before the first clear.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClearsId([u8; 16]);

/// Digest of a whole [`KeySpace`], in 16 bytes. A [`ChunkKey`](crate::ChunkKey) has it combined with the
/// clears that came before the chunk ([`SpaceId::after`]).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId([u8; 16]);

/// The part of an identity that all chunks of a registration share.
///
/// Two spaces that differ in any field have different [`SpaceId`]s.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeySpace {
    /// Algorithm of the chunk hashes.
    pub algorithm: HashAlgorithm,
    /// Number of tokens in a chunk.
    pub chunk_size: u32,
    /// Name under which the engine serves its model.
    pub model: ModelName,
    /// Number of KV ranks that together hold a chunk.
    pub world_size: u32,
    /// Shape, element type and order of a chunk's bytes.
    pub layout: LayoutFingerprint,
    /// Name of the element type, for people and for the text form.
    pub dtype: DtypeName,
    /// Salt of the tenant.
    pub salt: Salt,
    /// Text that the operator adds.
    pub identity: IdentityText,
    /// Tags of the requests; `None` for requests without tags.
    pub tags: Option<TagsId>,
}

impl LayoutFingerprint {
    /// Returns the fingerprint of a canonical description of a layout: equal layouts must have equal
    /// descriptions, different layouts different ones.
    pub fn of(description: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(LAYOUT_ENCODING);
        hasher.update(description);
        Self(truncated(&hasher))
    }
}

impl TagsId {
    /// Returns the digest of tags, given as names with encoded values, in the order of the names. `None` if
    /// there are no tags.
    pub fn of<'a>(tags: impl IntoIterator<Item = (&'a str, &'a [u8])>) -> Option<Self> {
        let mut hasher = blake3::Hasher::new_derive_key(TAGS_ENCODING);
        let mut is_empty = true;
        for (name, value) in tags {
            is_empty = false;
            for bytes in [name.as_bytes(), value] {
                hasher.update(&(bytes.len() as u64).to_le_bytes());
                hasher.update(bytes);
            }
        }
        (!is_empty).then(|| Self(truncated(&hasher)))
    }
}

impl KeySpace {
    /// Returns the id: BLAKE3, cut to 16 bytes, of an encoding in which every field has a fixed width or is
    /// preceded by its length, so that no two spaces have the same encoding.
    pub fn id(&self) -> SpaceId {
        // A field that is missing here would let two spaces share chunks. This pattern names all fields, so
        // it does not compile after one is added.
        let Self {
            algorithm,
            chunk_size,
            model,
            world_size,
            layout,
            dtype,
            salt,
            identity,
            tags,
        } = self;
        let mut hasher = blake3::Hasher::new_derive_key(ENCODING);
        hasher.update(&[algorithm.code()]);
        hasher.update(&chunk_size.to_le_bytes());
        hasher.update(&world_size.to_le_bytes());
        hasher.update(&layout.0);
        for text in [model.as_str(), dtype.as_str(), salt.as_str()] {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        }
        // An empty identity adds nothing, so that ids from before this field do not change. The bytes after
        // the salt are unambiguous, because the salt's length is known.
        if !identity.is_empty() {
            hasher.update(&(identity.as_str().len() as u64).to_le_bytes());
            hasher.update(identity.as_str().as_bytes());
        }
        if let Some(tags) = tags {
            // No identity has this length.
            hasher.update(&u64::MAX.to_le_bytes());
            hasher.update(&tags.0);
        }
        SpaceId(truncated(&hasher))
    }

    /// Returns the names of the fields that differ between two spaces. Never returns values, which may be
    /// secret.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let Self {
            algorithm,
            chunk_size,
            model,
            world_size,
            layout,
            dtype,
            salt,
            identity,
            tags,
        } = self;
        let fields = [
            ("algorithm", *algorithm == other.algorithm),
            ("chunk_size", *chunk_size == other.chunk_size),
            ("model", *model == other.model),
            ("world_size", *world_size == other.world_size),
            ("layout", *layout == other.layout),
            ("dtype", *dtype == other.dtype),
            ("salt", *salt == other.salt),
            ("identity", *identity == other.identity),
            ("tags", *tags == other.tags),
        ];
        let differing = fields.into_iter().filter(|(_, is_equal)| !is_equal);
        differing.map(|(name, _)| name).collect()
    }
}

impl ClearsId {
    /// The digest before the first clear.
    pub const NONE: Self = Self([0; 16]);
}

impl SpaceId {
    /// Returns the name, in keys, of the space's chunks that are computed after these clears. Chunks from
    /// before a clear have another name, so tiers need not distinguish the two. Before the first clear the
    /// name equals the id.
    pub fn after(self, clears: ClearsId) -> Self {
        if clears == ClearsId::NONE {
            return self;
        }
        let mut hasher = blake3::Hasher::new_derive_key(CLEARED_ENCODING);
        hasher.update(&self.0);
        hasher.update(&clears.0);
        Self(truncated(&hasher))
    }
}

fn truncated(hasher: &blake3::Hasher) -> [u8; 16] {
    *hasher
        .finalize()
        .as_bytes()
        .first_chunk()
        .expect("a digest has more than 16 bytes")
}

macro_rules! sixteen_bytes {
    ($($name:ident),*) => {$(
        impl $name {
            /// Makes a value of 16 given bytes.
            pub const fn new(bytes: [u8; 16]) -> Self {
                Self(bytes)
            }

            /// Returns the bytes.
            pub const fn as_bytes(&self) -> &[u8; 16] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }

        impl FromStr for $name {
            type Err = HashParseError;

            fn from_str(text: &str) -> Result<Self, HashParseError> {
                parse_hex(text).map(Self)
            }
        }
    )*};
}

sixteen_bytes!(ClearsId, LayoutFingerprint, SpaceId, TagsId);

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> KeySpace {
        KeySpace {
            algorithm: HashAlgorithm::Blake3,
            chunk_size: 256,
            model: "model".parse().unwrap(),
            world_size: 1,
            layout: LayoutFingerprint::of(b"layout"),
            dtype: "half".parse().unwrap(),
            salt: Salt::default(),
            identity: IdentityText::default(),
            tags: None,
        }
    }

    #[test]
    fn every_field_counts() {
        let other = [
            KeySpace {
                algorithm: HashAlgorithm::Xxh3,
                ..space()
            },
            KeySpace {
                chunk_size: 128,
                ..space()
            },
            KeySpace {
                model: "model2".parse().unwrap(),
                ..space()
            },
            KeySpace {
                world_size: 2,
                ..space()
            },
            KeySpace {
                layout: LayoutFingerprint::of(b"layout2"),
                ..space()
            },
            KeySpace {
                dtype: "float".parse().unwrap(),
                ..space()
            },
            KeySpace {
                salt: "a".parse().unwrap(),
                ..space()
            },
            KeySpace {
                identity: "a".parse().unwrap(),
                ..space()
            },
            KeySpace {
                tags: TagsId::of([("user", &b"a"[..])]),
                ..space()
            },
            KeySpace {
                tags: TagsId::of([("user", &b"b"[..])]),
                ..space()
            },
            KeySpace {
                tags: TagsId::of([("use", &b"ra"[..])]),
                ..space()
            },
            KeySpace {
                tags: TagsId::of([("user", &b"a"[..])]),
                identity: "a".parse().unwrap(),
                ..space()
            },
            // Moving a character over a border must not give the same bytes.
            KeySpace {
                model: "modelh".parse().unwrap(),
                dtype: "alf".parse().unwrap(),
                ..space()
            },
            KeySpace {
                dtype: "hal".parse().unwrap(),
                salt: "f".parse().unwrap(),
                ..space()
            },
            KeySpace {
                salt: "b".parse().unwrap(),
                identity: "a".parse().unwrap(),
                ..space()
            },
            KeySpace {
                salt: "ba".parse().unwrap(),
                ..space()
            },
        ];
        let mut ids: Vec<SpaceId> = other.iter().map(KeySpace::id).collect();
        ids.push(space().id());
        let count = ids.len();
        ids.sort();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn two_spaces_differ_in_the_fields_that_are_named() {
        assert_eq!(space().differences(&space()), [""; 0]);
        let other = KeySpace {
            layout: LayoutFingerprint::of(b"other"),
            salt: "a secret".parse().unwrap(),
            ..space()
        };
        assert_eq!(space().differences(&other), ["layout", "salt"]);
        let all = KeySpace {
            algorithm: HashAlgorithm::Xxh3,
            chunk_size: 128,
            model: "other".parse().unwrap(),
            world_size: 2,
            dtype: "float".parse().unwrap(),
            identity: "other".parse().unwrap(),
            tags: TagsId::of([("user", &b"a"[..])]),
            ..other
        };
        assert_eq!(space().differences(&all).len(), 9);
    }

    #[test]
    fn a_space_has_one_name_for_each_state_of_clears() {
        let (a, b) = (SpaceId::new([1; 16]), SpaceId::new([2; 16]));
        let cleared = [3, 4].map(|n| ClearsId::new([n; 16]));
        let mut names = vec![a.after(ClearsId::NONE), b.after(ClearsId::NONE)];
        assert_eq!(names, [a, b]);
        names.extend(cleared.iter().flat_map(|&id| [a.after(id), b.after(id)]));
        names.push(SpaceId::new(cleared[0].0).after(ClearsId::new(a.0)));
        names.sort();
        names.dedup();
        assert_eq!(names.len(), 7);
    }

    #[test]
    fn text_comes_back() {
        assert_eq!(space().id().to_string().parse(), Ok(space().id()));
        assert_eq!(space().layout.to_string().parse(), Ok(space().layout));
        assert!("00".parse::<SpaceId>().is_err());
    }
}
