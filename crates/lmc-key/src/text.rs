//! The text form of a key, for people, tools and remote stores.
//!
//! `model@world_size@worker_id@chunk_hash@dtype[@layer][@tag%value]…`, as LMCache 0.5.6's
//! `CacheEngineKey` writes it. LMCache escapes nothing and splits at every `@`; here what would
//! confuse that is percent-encoded, which leaves every usual key as LMCache has it.

use std::fmt;
use std::str::FromStr;

use crate::escape::{DecodeError, Plain, decode, encode};
use crate::hash::write_hex;
use crate::{ChunkHash, ChunkKey, DtypeName, HashAlgorithm, KeySpace, ModelName, NameError};

/// Longest text that is looked at, in bytes. Every [`KeyText`] prints to less.
pub const MAX_KEY_TEXT_BYTES: usize = 32 << 10;
/// Most tags of a key.
pub const MAX_TAGS: usize = 16;
/// Longest name of a tag, in bytes.
pub const MAX_TAG_NAME_BYTES: usize = 64;
/// Longest value of a tag, in bytes before it is escaped; the longest salt fits.
pub const MAX_TAG_VALUE_BYTES: usize = 512;

const TAG_ALGORITHM: &str = "lmc.algorithm";
const TAG_CHUNK: &str = "lmc.chunk";
const TAG_LAYOUT: &str = "lmc.layout";
const TAG_GROUP: &str = "lmc.group";
const TAG_SALT: &str = "lmc.salt";
const TAG_IDENTITY: &str = "lmc.identity";

/// A key as text: [`Display`](fmt::Display) prints it, [`FromStr`] reads it.
///
/// It names a chunk; the [`ChunkKey`] is what is compared. A key of ours carries what the binary
/// key has beyond LMCache's as tags that begin `lmc.`, so that [`identity`](Self::identity) gives
/// all of it back.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyText {
    /// The model's name.
    pub model: ModelName,
    /// KV ranks that together hold a chunk.
    pub world_size: u32,
    /// The KV rank this key belongs to.
    pub worker_id: u32,
    /// The hash as it was written.
    pub hash: HashText,
    /// The element type.
    pub dtype: DtypeName,
    /// The layer, in the keys of LMCache's layer-wise mode.
    pub layer: Option<u32>,
    tags: Vec<(String, String)>,
}

/// The hash in a text key: hex digits in lower case.
///
/// LMCache's in-process engine writes integers, which need not have a digest's length and can
/// have a minus sign; such a hash is carried, but is no [`ChunkHash`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HashText(String);

/// Why a text is no key, or a key has no text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KeyTextError {
    /// The text is longer than any key.
    #[error("key text has {found} bytes; expected at most {MAX_KEY_TEXT_BYTES}")]
    TooLong {
        /// Bytes that were found.
        found: usize,
    },
    /// Parts are missing.
    #[error(
        "key text has {found} parts separated by '@'; \
         expected model@world_size@worker_id@chunk_hash@dtype and then tags"
    )]
    TooFewParts {
        /// Parts that were found.
        found: usize,
    },
    /// A control character stands in the text as it is.
    #[error("{part} contains the control character {found:?}; expected it escaped as %{:02X}",
        u32::from(*found))]
    Control {
        /// Which part.
        part: &'static str,
        /// The character.
        found: char,
    },
    /// A `%` does not begin an escape.
    #[error("{part} has a '%' at byte {at} without two hex digits; expected '%25' for the sign")]
    Escape {
        /// Which part.
        part: &'static str,
        /// Offset in the part, in bytes.
        at: usize,
    },
    /// The escapes of a part are no UTF-8.
    #[error("{part} is no UTF-8 once its escapes are decoded")]
    Utf8 {
        /// Which part.
        part: &'static str,
    },
    /// A number is none.
    #[error("{part} is {found:?}; expected a decimal number from 0 to {limit}")]
    Number {
        /// Which part.
        part: &'static str,
        /// What was found, shortened.
        found: String,
        /// Largest number that is allowed.
        limit: u32,
    },
    /// The hash is none.
    #[error("chunk hash is {found:?}; expected 1 to 64 hex digits, after a '-' if negative")]
    Hash {
        /// What was found, shortened.
        found: String,
    },
    /// The model's name or the element type breaks its rule.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A tag has no value.
    #[error("tag {found:?} has no '%'; expected name%value")]
    TagWithoutValue {
        /// What was found, shortened.
        found: String,
    },
    /// A tag's name is none.
    #[error(
        "tag name is {found:?}; expected 1 to {MAX_TAG_NAME_BYTES} letters, digits, '-', '_' or '.'"
    )]
    TagName {
        /// What was found, shortened.
        found: String,
    },
    /// A tag's value is too long.
    #[error("tag {name} has a value of {found} bytes; expected at most {MAX_TAG_VALUE_BYTES}")]
    TagValue {
        /// The tag.
        name: String,
        /// Bytes that were found.
        found: usize,
    },
    /// A tag stands twice.
    #[error("tag {name} stands there twice; expected once")]
    DuplicateTag {
        /// The tag.
        name: String,
    },
    /// There are too many tags.
    #[error("key has more than {MAX_TAGS} tags")]
    TooManyTags,
    /// The key was not written by lmc, or was cut: the full identity is not in it.
    #[error("tag {name} is missing; a key that LMCache wrote does not hold the full identity")]
    MissingTag {
        /// The tag.
        name: &'static str,
    },
    /// One of lmc's own tags does not hold what it should.
    #[error("tag {name} is {found:?}; {reason}")]
    BadTag {
        /// The tag.
        name: &'static str,
        /// What was found, shortened.
        found: String,
        /// What was expected.
        reason: String,
    },
}

impl KeyText {
    /// A key without tags.
    pub const fn new(
        model: ModelName,
        world_size: u32,
        worker_id: u32,
        hash: HashText,
        dtype: DtypeName,
    ) -> Self {
        Self {
            model,
            world_size,
            worker_id,
            hash,
            dtype,
            layer: None,
            tags: Vec::new(),
        }
    }

    /// The text of `key`, whose space is `space`, with all of its identity.
    ///
    /// # Panics
    /// In debug builds, when `key` is not of `space`.
    pub fn of(space: &KeySpace, key: &ChunkKey) -> Self {
        debug_assert_eq!(key.space, space.id(), "the key belongs to another space");
        let hash = HashText::of(space.algorithm, &key.hash);
        let (model, dtype) = (space.model.clone(), space.dtype.clone());
        let mut text = Self::new(model, space.world_size, key.kv_rank.into(), hash, dtype);
        let mut put = |name: &str, value: String| text.tags.push((name.to_owned(), value));
        put(TAG_ALGORITHM, space.algorithm.to_string());
        put(TAG_CHUNK, space.chunk_size.to_string());
        put(TAG_LAYOUT, space.layout.to_string());
        if key.group != 0 {
            put(TAG_GROUP, key.group.to_string());
        }
        if !space.salt.is_empty() {
            put(TAG_SALT, space.salt.to_string());
        }
        if !space.identity.is_empty() {
            put(TAG_IDENTITY, space.identity.to_string());
        }
        text
    }

    /// The space and the binary key that [`of`](Self::of) was given.
    ///
    /// # Errors
    /// When a tag of ours is missing or malformed, as in every key that LMCache wrote.
    pub fn identity(&self) -> Result<(KeySpace, ChunkKey), KeyTextError> {
        let algorithm: HashAlgorithm = self.own_tag(TAG_ALGORITHM)?;
        let hash = self
            .hash
            .chunk_hash(algorithm)
            .ok_or_else(|| KeyTextError::Hash {
                found: self.hash.0.clone(),
            })?;
        let space = KeySpace {
            algorithm,
            chunk_size: self.own_tag(TAG_CHUNK)?,
            model: self.model.clone(),
            world_size: self.world_size,
            layout: self.own_tag(TAG_LAYOUT)?,
            dtype: self.dtype.clone(),
            salt: self.own_tag_or_default(TAG_SALT)?,
            identity: self.own_tag_or_default(TAG_IDENTITY)?,
        };
        let kv_rank = u16::try_from(self.worker_id).map_err(|_| KeyTextError::Number {
            part: "worker id",
            found: self.worker_id.to_string(),
            limit: u16::MAX.into(),
        })?;
        let group = self.own_tag_or_default(TAG_GROUP)?;
        Ok((
            space.clone(),
            ChunkKey {
                space: space.id(),
                kv_rank,
                group,
                hash,
            },
        ))
    }

    /// Adds a tag.
    ///
    /// # Errors
    /// When its name or value breaks a rule, when it is there already, or when the key is full.
    pub fn add_tag(&mut self, name: &str, value: &str) -> Result<(), KeyTextError> {
        // A name has no escapes: it ends at the first '%'.
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        if name.is_empty() || name.len() > MAX_TAG_NAME_BYTES || !name.bytes().all(allowed) {
            return Err(KeyTextError::TagName {
                found: shortened(name),
            });
        }
        if value.len() > MAX_TAG_VALUE_BYTES {
            return Err(KeyTextError::TagValue {
                name: name.to_owned(),
                found: value.len(),
            });
        }
        if self.tag(name).is_some() {
            return Err(KeyTextError::DuplicateTag {
                name: name.to_owned(),
            });
        }
        if self.tags.len() == MAX_TAGS {
            return Err(KeyTextError::TooManyTags);
        }
        self.tags.push((name.to_owned(), value.to_owned()));
        Ok(())
    }

    /// The value of a tag.
    pub fn tag(&self, name: &str) -> Option<&str> {
        self.tags()
            .find(|&(found, _)| found == name)
            .map(|(_, value)| value)
    }

    /// All tags, (name, value), in the order in which they are written.
    pub fn tags(&self) -> impl Iterator<Item = (&str, &str)> {
        self.tags
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
    }

    /// The same text with everything escaped that a file name or an object key of some store may
    /// not hold, `/` above all. [`FromStr`] reads it too.
    ///
    /// File systems take 255 bytes at most; a long model name or salt can exceed that.
    pub fn to_file_name(&self) -> String {
        self.print(Plain::FileName)
    }

    fn print(&self, plain: Plain) -> String {
        let mut out = String::with_capacity(256);
        encode(&mut out, self.model.as_str(), plain);
        let Self {
            world_size,
            worker_id,
            hash,
            dtype,
            ..
        } = self;
        out += &format!("@{world_size}@{worker_id}@{hash}@{dtype}");
        if let Some(layer) = self.layer {
            out += &format!("@{layer}");
        }
        for (name, value) in &self.tags {
            out.push('@');
            out += name;
            out.push('%');
            encode(&mut out, value, plain);
        }
        out
    }

    fn own_tag<T: FromStr<Err: fmt::Display>>(
        &self,
        name: &'static str,
    ) -> Result<T, KeyTextError> {
        let found = self.tag(name).ok_or(KeyTextError::MissingTag { name })?;
        found.parse().map_err(|error: T::Err| KeyTextError::BadTag {
            name,
            found: shortened(found),
            reason: error.to_string(),
        })
    }

    fn own_tag_or_default<T: FromStr<Err: fmt::Display> + Default>(
        &self,
        name: &'static str,
    ) -> Result<T, KeyTextError> {
        match self.own_tag(name) {
            Err(KeyTextError::MissingTag { .. }) => Ok(T::default()),
            other => other,
        }
    }
}

impl fmt::Display for KeyText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.print(Plain::Text))
    }
}

impl FromStr for KeyText {
    type Err = KeyTextError;

    fn from_str(text: &str) -> Result<Self, KeyTextError> {
        if text.len() > MAX_KEY_TEXT_BYTES {
            return Err(KeyTextError::TooLong { found: text.len() });
        }
        let parts: Vec<&str> = text.split('@').collect();
        let &[model, world_size, worker_id, hash, dtype, ref tags @ ..] = &parts[..] else {
            return Err(KeyTextError::TooFewParts { found: parts.len() });
        };
        let mut tags = tags;
        let mut key = Self::new(
            ModelName::parse(&decoded("model name", model)?)?,
            number("world size", world_size)?,
            number("worker id", worker_id)?,
            hash.parse()?,
            DtypeName::parse(dtype)?,
        );
        if let [layer, rest @ ..] = tags
            && !layer.contains('%')
        {
            key.layer = Some(number("layer", layer)?);
            tags = rest;
        }
        for tag in tags {
            let Some((name, value)) = tag.split_once('%') else {
                return Err(KeyTextError::TagWithoutValue {
                    found: shortened(tag),
                });
            };
            key.add_tag(name, &decoded("tag value", value)?)?;
        }
        Ok(key)
    }
}

impl HashText {
    /// The digest of a chunk hash, without padding.
    pub fn of(algorithm: HashAlgorithm, hash: &ChunkHash) -> Self {
        let mut text = String::with_capacity(64);
        write_hex(&mut text, hash.digest(algorithm)).expect("writing to a string cannot fail");
        Self(text)
    }

    /// The chunk hash, when this is a digest of `algorithm` in full length.
    pub fn chunk_hash(&self, algorithm: HashAlgorithm) -> Option<ChunkHash> {
        if self.0.len() != 2 * algorithm.digest_len() {
            return None;
        }
        format!("{:0<64}", self.0).parse().ok()
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HashText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl FromStr for HashText {
    type Err = KeyTextError;

    fn from_str(text: &str) -> Result<Self, KeyTextError> {
        let digits = text.strip_prefix('-').unwrap_or(text);
        if !(1..=64).contains(&digits.len()) || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(KeyTextError::Hash {
                found: shortened(text),
            });
        }
        Ok(Self(text.to_ascii_lowercase()))
    }
}

fn number(part: &'static str, text: &str) -> Result<u32, KeyTextError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        // `parse` alone would also take a plus sign.
        Ok(number) if digits => Ok(number),
        _ => Err(KeyTextError::Number {
            part,
            found: shortened(text),
            limit: u32::MAX,
        }),
    }
}

fn decoded(part: &'static str, text: &str) -> Result<String, KeyTextError> {
    if let Some(found) = text.chars().find(|c| c.is_control()) {
        return Err(KeyTextError::Control { part, found });
    }
    decode(text).map_err(|error| match error {
        DecodeError::Escape(at) => KeyTextError::Escape { part, at },
        DecodeError::Utf8 => KeyTextError::Utf8 { part },
    })
}

/// As much of a bad input as an error message should repeat.
fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{IdentityText, LayoutFingerprint, Salt};

    fn space() -> KeySpace {
        KeySpace {
            algorithm: HashAlgorithm::Blake3,
            chunk_size: 256,
            model: "org/model@v1".parse().unwrap(),
            world_size: 8,
            layout: LayoutFingerprint::new([0xab; 16]),
            dtype: "bfloat16".parse().unwrap(),
            salt: Salt::parse("50% é").unwrap(),
            identity: IdentityText::parse("v2 / fp8").unwrap(),
        }
    }

    fn key(group: u16) -> ChunkKey {
        ChunkKey {
            space: space().id(),
            kv_rank: 7,
            group,
            hash: ChunkHash::new([0xc0; 32]),
        }
    }

    #[test]
    fn our_keys_carry_their_identity() {
        let text = KeyText::of(&space(), &key(2));
        assert_eq!(
            text.to_string(),
            format!(
                "org/model%40v1@8@7@{}@bfloat16@lmc.algorithm%blake3@lmc.chunk%256\
                 @lmc.layout%{}@lmc.group%2@lmc.salt%50%25%20%C3%A9@lmc.identity%v2%20/%20fp8",
                "c0".repeat(32),
                "ab".repeat(16)
            )
        );
        let read: KeyText = text.to_string().parse().unwrap();
        assert_eq!(read, text);
        assert_eq!(read.identity(), Ok((space(), key(2))));
    }

    #[test]
    fn file_names_are_one_component() {
        let text = KeyText::of(&space(), &key(0));
        let name = text.to_file_name();
        assert!(name.starts_with("org%2Fmodel%40v1@8@7@c0c0"), "{name}");
        assert_eq!(name.parse(), Ok(text));
    }

    #[test]
    fn defaults_have_no_tag() {
        let space = KeySpace {
            salt: Salt::default(),
            identity: IdentityText::default(),
            ..space()
        };
        let key = ChunkKey {
            space: space.id(),
            ..key(0)
        };
        let text = KeyText::of(&space, &key);
        assert_eq!(text.tags().count(), 3);
        assert_eq!(text.identity(), Ok((space, key)));
    }

    #[test]
    fn the_longest_key_can_be_read() {
        let model = ModelName::parse(&"@".repeat(crate::MAX_MODEL_BYTES)).unwrap();
        let dtype = DtypeName::parse(&"d".repeat(crate::MAX_DTYPE_BYTES)).unwrap();
        let hash: HashText = format!("-{}", "f".repeat(64)).parse().unwrap();
        let mut text = KeyText::new(model, u32::MAX, u32::MAX, hash, dtype);
        text.layer = Some(u32::MAX);
        for i in 0..MAX_TAGS {
            let name = format!("{i:0>MAX_TAG_NAME_BYTES$}");
            text.add_tag(&name, &"@".repeat(MAX_TAG_VALUE_BYTES))
                .unwrap();
        }
        assert_eq!(text.add_tag("one-more", ""), Err(KeyTextError::TooManyTags));
        assert!(text.to_string().len() <= MAX_KEY_TEXT_BYTES);
        assert_eq!(text.to_string().parse(), Ok(text));
    }

    #[test]
    fn malformed_text_is_refused_with_its_reason() {
        let cases = [
            ("", "key text has 1 parts separated by '@'"),
            ("m@1@0@ff", "key text has 4 parts"),
            ("@1@0@ff@half", "model name is empty"),
            (
                "m%4@1@0@ff@half",
                "model name has a '%' at byte 1 without two hex digits",
            ),
            ("m%ff@1@0@ff@half", "model name is no UTF-8"),
            ("m\n@1@0@ff@half", "'\\n'; expected it escaped as %0A"),
            (
                "m@+1@0@ff@half",
                "world size is \"+1\"; expected a decimal number from 0 to 42949",
            ),
            ("m@1@-1@ff@half", "worker id is \"-1\""),
            ("m@4294967296@0@ff@half", "world size is \"4294967296\""),
            (
                "m@1@0@@half",
                "chunk hash is \"\"; expected 1 to 64 hex digits",
            ),
            ("m@1@0@0x1f@half", "chunk hash is \"0x1f\""),
            ("m@1@0@--1@half", "chunk hash is \"--1\""),
            ("m@1@0@ff@", "element type is empty"),
            ("m@1@0@ff@half precision", "element type contains ' '"),
            ("m@1@0@ff@half@x", "layer is \"x\""),
            ("m@1@0@ff@half@1@2", "tag \"2\" has no '%'"),
            ("m@1@0@ff@half@%v", "tag name is \"\""),
            ("m@1@0@ff@half@a b%v", "tag name is \"a b\""),
            ("m@1@0@ff@half@a%1@a%2", "tag a stands there twice"),
            ("m@1@0@ff@half@a%%", "tag value has a '%' at byte 0"),
        ];
        for (text, reason) in cases {
            let error = text.parse::<KeyText>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
        let long = "m".repeat(MAX_KEY_TEXT_BYTES + 1);
        assert_eq!(
            long.parse::<KeyText>(),
            Err(KeyTextError::TooLong {
                found: MAX_KEY_TEXT_BYTES + 1
            })
        );
        let value = format!("m@1@0@ff@half@a%{}", "x".repeat(MAX_TAG_VALUE_BYTES + 1));
        assert!(
            value
                .parse::<KeyText>()
                .unwrap_err()
                .to_string()
                .contains("513 bytes")
        );
        let many: String = (0..=MAX_TAGS).map(|i| format!("@t{i}%v")).collect();
        let many = format!("m@1@0@ff@half{many}");
        assert_eq!(many.parse::<KeyText>(), Err(KeyTextError::TooManyTags));
    }

    #[test]
    fn an_incomplete_identity_says_what_is_missing() {
        let read = |text: &str| text.parse::<KeyText>().unwrap().identity().unwrap_err();
        assert_eq!(
            read("m@1@0@ff@half"),
            KeyTextError::MissingTag {
                name: "lmc.algorithm"
            }
        );
        let hash = "c0".repeat(32);
        let ours = format!("m@1@0@{hash}@half@lmc.algorithm%blake3@lmc.chunk%256");
        assert_eq!(read(&ours), KeyTextError::MissingTag { name: "lmc.layout" });
        let short = ours.replace(&hash, "c0");
        assert_eq!(read(&short), KeyTextError::Hash { found: "c0".into() });
        let ours = format!("{ours}@lmc.layout%{}", "0".repeat(32));
        let wrong = format!("{ours}@lmc.group%65536");
        assert!(matches!(
            read(&wrong),
            KeyTextError::BadTag {
                name: "lmc.group",
                ..
            }
        ));
        let wrong = format!("{ours}@lmc.salt%a%2Fb");
        assert!(
            read(&wrong).to_string().contains("none of '@', '/'"),
            "{}",
            read(&wrong)
        );
        let wrong = ours.replace("m@1@0@", "m@1@65536@");
        assert!(
            read(&wrong).to_string().contains("from 0 to 65535"),
            "{}",
            read(&wrong)
        );
        let wrong = ours.replace("blake3", "builtin");
        assert!(
            read(&wrong).to_string().contains("Python interpreter"),
            "{}",
            read(&wrong)
        );
    }
}
