//! The text fields of an identity, validated when they are parsed.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Longest model name, in bytes of UTF-8. A model may be named by a path.
const MAX_MODEL_BYTES: usize = 1024;
/// Longest name of an element type, in bytes.
const MAX_DTYPE_BYTES: usize = 32;
/// Longest salt, in characters: LMCache's limit.
const MAX_SALT_CHARS: usize = 128;
/// Longest [`IdentityText`], in bytes of UTF-8.
const MAX_IDENTITY_BYTES: usize = 256;

/// The name under which an engine serves its model. Not empty, at most 1,024 bytes, without
/// control characters, so that it cannot end a line of a log.
///
/// Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelName(Arc<str>);

/// The name of an element type as LMCache writes it: `half`, `bfloat16`, `float`, `fp8_e4m3fn`… Letters,
/// digits and `_`, at most 32 bytes.
///
/// The name is text for people. Whether two layouts are equal is decided by the
/// [`LayoutFingerprint`](crate::LayoutFingerprint).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DtypeName(Arc<str>);

/// A tenant's salt. Tenants with different salts never share chunks; the empty salt is the common tenant.
///
/// LMCache's rule: at most 128 characters, none of `@`, `/`, `\` and NUL. Knowing a salt gives access to its
/// tenant's chunks, so no output shows its text.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Salt(Arc<str>);

/// Text that an operator adds to the identity of every chunk of a server, for properties that no engine
/// sends: weights, revision, quantisation, format of the KV cache. Empty by default.
///
/// At most 256 bytes, no control characters. Cheap to clone.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IdentityText(Arc<str>);

/// A text that is not a valid name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The text is empty.
    #[error("{what} is empty; expected at least one character")]
    Empty {
        /// Kind of name.
        what: &'static str,
    },
    /// The text is longer than the limit.
    #[error("{what} has {found} {unit}; expected at most {limit}")]
    TooLong {
        /// Kind of name.
        what: &'static str,
        /// Unit of the limit.
        unit: &'static str,
        /// Largest length allowed.
        limit: usize,
        /// Length of the text.
        found: usize,
    },
    /// The text has a forbidden character.
    #[error("{what} contains {found:?} at byte {at}; expected {expected}")]
    Forbidden {
        /// Kind of name.
        what: &'static str,
        /// The character.
        found: char,
        /// Offset of the character in bytes.
        at: usize,
        /// Rule that the text breaks.
        expected: &'static str,
    },
}

impl ModelName {
    /// Parses and checks a model name.
    ///
    /// # Errors
    /// If the name is empty, too long, or has a control character.
    pub fn parse(name: &str) -> Result<Self, NameError> {
        let what = "model name";
        check_not_empty(what, name)?;
        check_bytes(what, name, MAX_MODEL_BYTES)?;
        check_chars(what, name, "no control characters", |c| !c.is_control())?;
        Ok(Self(name.into()))
    }
}

impl DtypeName {
    /// Parses and checks the name of an element type.
    ///
    /// # Errors
    /// If the name is empty, too long, or has a character other than ASCII letters, digits and `_`.
    pub fn parse(name: &str) -> Result<Self, NameError> {
        let what = "element type";
        check_not_empty(what, name)?;
        check_bytes(what, name, MAX_DTYPE_BYTES)?;
        let expected = "letters, digits and '_', as in bfloat16 or fp8_e4m3fn";
        check_chars(what, name, expected, |c| {
            c.is_ascii_alphanumeric() || c == '_'
        })?;
        Ok(Self(name.into()))
    }
}

impl Salt {
    /// Parses and checks a salt.
    ///
    /// # Errors
    /// If the salt is too long or has `@`, `/`, `\` or NUL.
    pub fn parse(salt: &str) -> Result<Self, NameError> {
        let what = "cache salt";
        // Bytes first, so that a huge input is rejected without counting its characters.
        if salt.len() > MAX_SALT_CHARS {
            let found = salt.chars().take(4 * MAX_SALT_CHARS + 1).count();
            if found > MAX_SALT_CHARS {
                return Err(NameError::TooLong {
                    what,
                    unit: "characters",
                    limit: MAX_SALT_CHARS,
                    found,
                });
            }
        }
        let expected = "none of '@', '/', '\\' and NUL";
        check_chars(what, salt, expected, |c| {
            !matches!(c, '@' | '/' | '\\' | '\0')
        })?;
        Ok(Self(salt.into()))
    }

    /// Returns true for the common tenant.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Default for Salt {
    fn default() -> Self {
        Self("".into())
    }
}

impl fmt::Debug for Salt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Salt(..)")
    }
}

impl IdentityText {
    /// Parses and checks an identity text.
    ///
    /// # Errors
    /// If the text is too long or has a control character.
    pub fn parse(text: &str) -> Result<Self, NameError> {
        let what = "identity";
        check_bytes(what, text, MAX_IDENTITY_BYTES)?;
        check_chars(what, text, "no control characters", |c| !c.is_control())?;
        Ok(Self(text.into()))
    }

    /// Returns true if the text is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Default for IdentityText {
    fn default() -> Self {
        Self("".into())
    }
}

fn check_not_empty(what: &'static str, text: &str) -> Result<(), NameError> {
    match text.is_empty() {
        true => Err(NameError::Empty { what }),
        false => Ok(()),
    }
}

fn check_bytes(what: &'static str, text: &str, limit: usize) -> Result<(), NameError> {
    if text.len() > limit {
        return Err(NameError::TooLong {
            what,
            unit: "bytes",
            limit,
            found: text.len(),
        });
    }
    Ok(())
}

fn check_chars(
    what: &'static str,
    text: &str,
    expected: &'static str,
    allowed: impl Fn(char) -> bool,
) -> Result<(), NameError> {
    match text.char_indices().find(|&(_, c)| !allowed(c)) {
        Some((at, found)) => Err(NameError::Forbidden {
            what,
            found,
            at,
            expected,
        }),
        None => Ok(()),
    }
}

macro_rules! text_of_a_name {
    ($($name:ident),*) => {$(
        impl $name {
            /// Returns the text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                Self::parse(text)
            }
        }
    )*};
}

macro_rules! shown_name {
    ($($name:ident),*) => {$(
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&*self.0, f)
            }
        }
    )*};
}

text_of_a_name!(ModelName, DtypeName, Salt, IdentityText);
shown_name!(ModelName, DtypeName, IdentityText);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salts_follow_lmcaches_rule() {
        for good in ["", "tenant-a", "%41 and spaces", &"é".repeat(128)] {
            assert_eq!(Salt::parse(good).unwrap().as_str(), good);
        }
        for bad in ['@', '/', '\\', '\0'] {
            let Err(NameError::Forbidden { found, at: 1, .. }) = Salt::parse(&format!("a{bad}"))
            else {
                panic!("{bad:?} was let through")
            };
            assert_eq!(found, bad);
        }
        assert_eq!(
            Salt::parse(&"é".repeat(129)).unwrap_err().to_string(),
            "cache salt has 129 characters; expected at most 128"
        );
        assert!(Salt::default().is_empty());
    }

    #[test]
    fn identities_are_bounded_and_printable() {
        assert!(IdentityText::default().is_empty());
        for good in [
            "",
            "llama@2024-06-01 fp8_e4m3",
            &"i".repeat(MAX_IDENTITY_BYTES),
        ] {
            assert_eq!(IdentityText::parse(good).unwrap().as_str(), good);
        }
        assert_eq!(
            IdentityText::parse(&"i".repeat(MAX_IDENTITY_BYTES + 1)),
            Err(NameError::TooLong {
                what: "identity",
                unit: "bytes",
                limit: MAX_IDENTITY_BYTES,
                found: MAX_IDENTITY_BYTES + 1,
            })
        );
        assert!(matches!(
            IdentityText::parse("a\nb"),
            Err(NameError::Forbidden { found: '\n', .. })
        ));
    }

    #[test]
    fn models_and_types_are_bounded() {
        assert_eq!(
            ModelName::parse("").unwrap_err(),
            NameError::Empty { what: "model name" }
        );
        assert!(ModelName::parse(&"m".repeat(MAX_MODEL_BYTES)).is_ok());
        assert!(ModelName::parse(&"m".repeat(MAX_MODEL_BYTES + 1)).is_err());
        for control in ['\0', '\n', '\r', '\t', '\u{1b}', '\u{7f}', '\u{9b}'] {
            let name = format!("a{control}b");
            let Err(NameError::Forbidden { found, at: 1, .. }) = ModelName::parse(&name) else {
                panic!("{control:?} was let through")
            };
            assert_eq!(found, control);
        }
        assert!(ModelName::parse("/models/Qwen 3 (8B) é").is_ok());
        assert!(DtypeName::parse("bfloat16").is_ok());
        assert!(DtypeName::parse("float 16").is_err());
        assert!(DtypeName::parse(&"f".repeat(MAX_DTYPE_BYTES + 1)).is_err());
    }
}
