//! The description of a space: the model and tenant of its chunks, for people and tools.

use std::fmt;

use lmc_key::{
    ClearsId, DtypeName, HashAlgorithm, IdentityText, KeySpace, LayoutFingerprint, ModelName, Salt,
    SpaceId,
};
use serde::{Deserialize, Serialize};
use thiserror::Error;

const VERSION: u32 = 1;
/// Most bytes of a description, for later versions too.
pub const MAX_SPACE_LEN: usize = 16 << 10;

/// The description of a space: everything that its id is derived from, except the salt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpaceRecord {
    /// Fields of the space; the salt is always empty.
    fields: KeySpace,
    space: SpaceId,
    tenant: Tenant,
}

/// The tenant of a space. Its text form is `none`, `salted`, or the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tenant {
    /// The tenant without a salt.
    Common,
    /// A tenant with a salt. Only a digest of the salt under a key is known, if there was a key.
    Salted(Option<[u8; 16]>),
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Common => f.write_str("none"),
            Self::Salted(None) => f.write_str("salted"),
            Self::Salted(Some(digest)) => f.write_str(&hex(*digest)),
        }
    }
}

/// Returns a digest in the text form of ids.
fn hex(digest: [u8; 16]) -> String {
    SpaceId::new(digest).to_string()
}

/// Reason why a description is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SpaceError {
    /// The description has a later version.
    #[error("unknown version {0} of the description of a space")]
    Version(u32),
    /// The bytes are not of this layout, or describe another space.
    #[error("the description of a space is damaged")]
    Damaged,
}

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

#[derive(Serialize, Deserialize)]
struct Json {
    version: u32,
    space: String,
    model: String,
    world_size: u32,
    dtype: String,
    layout: String,
    chunk_size: u32,
    hash_algorithm: String,
    identity: String,
    salted: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    salt_digest: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tags: Option<String>,
}

impl SpaceRecord {
    /// Describes a space. `digest` is the digest of the salt under a key.
    pub fn new(space: &KeySpace, digest: Option<[u8; 16]>) -> Self {
        let tenant = match space.salt.is_empty() {
            true => Tenant::Common,
            false => Tenant::Salted(digest),
        };
        let fields = KeySpace {
            salt: Salt::default(),
            ..space.clone()
        };
        Self {
            space: space.id(),
            fields,
            tenant,
        }
    }

    /// Returns the id of the space.
    pub fn space(&self) -> SpaceId {
        self.space
    }

    /// Returns the fields of the space, with an empty salt.
    pub fn fields(&self) -> &KeySpace {
        &self.fields
    }

    /// Returns the tenant.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Returns true if the space belongs to the tenant with this salt. This is decided by the space's id, so
    /// no key is needed and no description can claim another tenant.
    pub fn is_of(&self, salt: &Salt) -> bool {
        let salt = salt.clone();
        let fields = KeySpace {
            salt,
            ..self.fields.clone()
        };
        fields.id() == self.space
    }

    /// Returns the bytes of the object.
    pub fn encode(&self) -> Vec<u8> {
        let fields = &self.fields;
        let (salted, digest) = match self.tenant {
            Tenant::Common => (false, None),
            Tenant::Salted(digest) => (true, digest),
        };
        let json = Json {
            version: VERSION,
            space: self.space.to_string(),
            model: fields.model.as_str().to_owned(),
            world_size: fields.world_size,
            dtype: fields.dtype.as_str().to_owned(),
            layout: fields.layout.to_string(),
            chunk_size: fields.chunk_size,
            hash_algorithm: fields.algorithm.name().to_owned(),
            identity: fields.identity.as_str().to_owned(),
            salted,
            salt_digest: digest.map(hex),
            tags: fields.tags.map(|tags| tags.to_string()),
        };
        let mut bytes = serde_json::to_vec_pretty(&json).expect("texts and numbers are JSON");
        bytes.push(b'\n');
        bytes
    }

    /// Reads the description of the space whose name in keys, after these clears, is `named`
    /// ([`SpaceId::after`]). Unknown fields are ignored.
    ///
    /// # Errors
    /// [`SpaceError`]; also if a space without a salt has another id than its fields give.
    pub fn decode(named: SpaceId, clears: ClearsId, bytes: &[u8]) -> Result<Self, SpaceError> {
        if bytes.len() > MAX_SPACE_LEN {
            return Err(SpaceError::Damaged);
        }
        let versioned: Result<Versioned, _> = serde_json::from_slice(bytes);
        match versioned.map_err(|_| SpaceError::Damaged)?.version {
            VERSION => read(named, clears, bytes).ok_or(SpaceError::Damaged),
            0 => Err(SpaceError::Damaged),
            later => Err(SpaceError::Version(later)),
        }
    }
}

fn read(named: SpaceId, clears: ClearsId, bytes: &[u8]) -> Option<SpaceRecord> {
    let json: Json = serde_json::from_slice(bytes).ok()?;
    let digest = json.salt_digest.map(|digest| digest.parse::<SpaceId>());
    let digest = digest.transpose().ok()?;
    let fields = KeySpace {
        algorithm: json.hash_algorithm.parse::<HashAlgorithm>().ok()?,
        chunk_size: json.chunk_size,
        model: json.model.parse::<ModelName>().ok()?,
        world_size: json.world_size,
        layout: json.layout.parse::<LayoutFingerprint>().ok()?,
        dtype: json.dtype.parse::<DtypeName>().ok()?,
        salt: Salt::default(),
        identity: json.identity.parse::<IdentityText>().ok()?,
        tags: json.tags.map(|tags| tags.parse()).transpose().ok()?,
    };
    let space: SpaceId = json.space.parse().ok()?;
    let is_whole = space.after(clears) == named
        && match json.salted {
            true => true,
            false => digest.is_none() && fields.id() == space,
        };
    let tenant = match json.salted {
        true => Tenant::Salted(digest.map(|digest| *digest.as_bytes())),
        false => Tenant::Common,
    };
    is_whole.then_some(SpaceRecord {
        fields,
        space,
        tenant,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use lmc_key::TagsId;

    use super::*;

    const DIGEST: [u8; 16] = [0xd1; 16];

    fn space(salt: &str) -> KeySpace {
        KeySpace {
            algorithm: HashAlgorithm::Blake3,
            chunk_size: 256,
            model: "models/\"Qwen\" é".parse().unwrap(),
            world_size: 2,
            layout: LayoutFingerprint::new(std::array::from_fn(|i| i as u8)),
            dtype: "bfloat16".parse().unwrap(),
            salt: salt.parse().unwrap(),
            identity: "r1".parse().unwrap(),
            tags: None,
        }
    }

    #[test]
    fn golden_description() {
        let golden = include_str!("../../tests/data/space-v1.json");
        let record = SpaceRecord::new(&space("marked-secret"), Some(DIGEST));
        assert_eq!(String::from_utf8(record.encode()).unwrap(), golden);
        let id = space("marked-secret").id();
        let decode = |named, clears| SpaceRecord::decode(named, clears, golden.as_bytes());
        assert_eq!(decode(id, ClearsId::NONE), Ok(record.clone()));
        let clears = ClearsId::new([7; 16]);
        assert_eq!(decode(id.after(clears), clears), Ok(record));
        assert_eq!(decode(id, clears), Err(SpaceError::Damaged));
    }

    #[test]
    fn a_description_never_holds_the_salt_and_names_its_tenant_by_the_id() {
        let salt: Salt = "marked-secret".parse().unwrap();
        for digest in [None, Some(DIGEST)] {
            let record = SpaceRecord::new(&space(salt.as_str()), digest);
            let shown = String::from_utf8(record.encode()).unwrap() + &format!("{record:?}");
            assert!(!shown.contains("marked-secret"), "{shown}");
            assert_eq!(shown.contains("salt_digest"), digest.is_some());
            assert_eq!(record.tenant(), Tenant::Salted(digest));
            assert!(record.is_of(&salt) && !record.is_of(&Salt::default()));
        }
        // Without a salt there is nothing to digest.
        let common = SpaceRecord::new(&space(""), Some(DIGEST));
        assert_eq!(common.tenant(), Tenant::Common);
        assert!(common.is_of(&Salt::default()) && !common.is_of(&salt));
    }

    #[test]
    fn unknown_fields_are_ignored_and_everything_else_is_checked() {
        let record = SpaceRecord::new(&space(""), None);
        let (id, text) = (record.space(), String::from_utf8(record.encode()).unwrap());
        let decode = |text: &str| SpaceRecord::decode(id, ClearsId::NONE, text.as_bytes());
        let more = text.replace('{', "{\"later\": {\"a\": [1, null, \"x\"]},");
        assert_eq!(decode(&more), Ok(record));
        let later = "{\"version\": 2, \"space\": 7}";
        assert_eq!(decode(later), Err(SpaceError::Version(2)));
        let other = SpaceId::new([9; 16]);
        assert_eq!(
            SpaceRecord::decode(other, ClearsId::NONE, text.as_bytes()),
            Err(SpaceError::Damaged)
        );
        let nested = "[".repeat(MAX_SPACE_LEN / 2);
        for (from, to) in [
            ("\"version\": 1", "\"version\": 0"),
            ("\"version\": 1", "\"version\": 1.5"),
            ("\"world_size\": 2", "\"world_size\": 3"),
            ("\"world_size\": 2", "\"world_size\": -1"),
            ("\"world_size\": 2", "\"world_size\": 4294967296"),
            ("bfloat16", "b float"),
            ("r1", "r\\n1"),
            ("blake3", "blake4"),
            ("\"salted\": false", "\"salted\": 0"),
            (
                "\"salted\": false",
                "\"salted\": false, \"salt_digest\": \"00\"",
            ),
            ("}\n", ""),
            ("}\n", "} x"),
            ("{", nested.as_str()),
        ] {
            let changed = text.replace(from, to);
            assert_ne!(changed, text);
            assert_eq!(decode(&changed), Err(SpaceError::Damaged), "{from} {to}");
        }
        let long = text.replace('{', &format!("{{\"x\": \"{}\",", "y".repeat(MAX_SPACE_LEN)));
        assert_eq!(decode(&long), Err(SpaceError::Damaged));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(bytes: Vec<u8>, space: [u8; 16]) {
            let _ = SpaceRecord::decode(SpaceId::new(space), ClearsId::NONE, &bytes);
        }

        #[test]
        fn descriptions_come_back(model in "[^\\p{Cc}]{1,200}", identity in "[^\\p{Cc}]{0,60}", world_size: u32, tags: Option<[u8; 16]>, digest: Option<[u8; 16]>) {
            let space = KeySpace {
                model: model.parse().unwrap(),
                identity: identity.parse().unwrap(),
                tags: tags.map(TagsId::new),
                world_size,
                ..space("salt")
            };
            let record = SpaceRecord::new(&space, digest);
            let bytes = record.encode();
            prop_assert!(bytes.len() < MAX_SPACE_LEN / 2);
            prop_assert_eq!(SpaceRecord::decode(space.id(), ClearsId::NONE, &bytes), Ok(record));
        }
    }
}
