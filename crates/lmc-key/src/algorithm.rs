//! Algorithms that turn tokens into chunk hashes.

use std::fmt;
use std::str::FromStr;

/// The function that chains chunk hashes. It is part of a [`KeySpace`](crate::KeySpace), so hashes of
/// different algorithms never meet.
///
/// The names are the values of LMCache's `--hash-algorithm`; LMCache passes every name except `blake3` on to
/// vLLM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum HashAlgorithm {
    /// `blake3`, LMCache's default: BLAKE3(parent ‖ tokens as big-endian `u32`), 32 bytes.
    #[default]
    Blake3 = 1,
    /// `sha256_cbor`, vLLM's: SHA-256 of the canonical CBOR of `[parent, [tokens…], null]`,
    /// 32 bytes.
    Sha256Cbor = 2,
    /// `xxhash_cbor`, vLLM's: XXH3-128 of the same CBOR, 16 bytes. Not collision-resistant: a user who
    /// chooses prompts can make two prompts with the same hash. For one trusted tenant only.
    Xxh3 = 3,
}

impl HashAlgorithm {
    /// Every algorithm, in the order of their codes.
    pub const ALL: [Self; 3] = [Self::Blake3, Self::Sha256Cbor, Self::Xxh3];

    /// Returns the name in LMCache's `--hash-algorithm` and vLLM's `--prefix-caching-hash-algo`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Blake3 => "blake3",
            Self::Sha256Cbor => "sha256_cbor",
            Self::Xxh3 => "xxhash_cbor",
        }
    }

    /// Returns a number that never changes, for canonical encodings and for files.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the bytes of a digest: 32, or 16 for XXH3-128.
    pub const fn digest_len(self) -> usize {
        match self {
            Self::Blake3 | Self::Sha256Cbor => 32,
            Self::Xxh3 => 16,
        }
    }
}

impl fmt::Display for HashAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for HashAlgorithm {
    type Err = UnknownAlgorithm;

    /// Accepts [`name`](Self::name) and the synonyms `sha256_cbor_64bit` (vLLM's former name,
    /// which LMCache still takes), `xxh3_128` and `xxh3`.
    fn from_str(name: &str) -> Result<Self, UnknownAlgorithm> {
        match name {
            "blake3" => Ok(Self::Blake3),
            "sha256_cbor" | "sha256_cbor_64bit" => Ok(Self::Sha256Cbor),
            "xxhash_cbor" | "xxh3_128" | "xxh3" => Ok(Self::Xxh3),
            "builtin" | "sha256" | "xxhash" => Err(UnknownAlgorithm::PythonOnly(name.to_owned())),
            _ => Err(UnknownAlgorithm::Unknown(name.chars().take(64).collect())),
        }
    }
}

/// A name that is not a [`HashAlgorithm`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnknownAlgorithm {
    /// LMCache or vLLM has this algorithm, but its result depends on the Python interpreter (`hash()` or
    /// pickle), so other processes compute other hashes.
    #[error(
        "hash algorithm {0:?} depends on the Python interpreter that runs it; \
         set blake3, sha256_cbor or xxhash_cbor on both sides"
    )]
    PythonOnly(String),
    /// No program has this algorithm.
    #[error("hash algorithm {0:?} is unknown; expected blake3, sha256_cbor or xxhash_cbor")]
    Unknown(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for algorithm in HashAlgorithm::ALL {
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!("xxh3_128".parse(), Ok(HashAlgorithm::Xxh3));
        assert_eq!("sha256_cbor_64bit".parse(), Ok(HashAlgorithm::Sha256Cbor));
        assert_eq!(HashAlgorithm::default().name(), "blake3");
    }

    #[test]
    fn interpreter_bound_names_say_why() {
        let error = "builtin".parse::<HashAlgorithm>().unwrap_err();
        assert_eq!(error, UnknownAlgorithm::PythonOnly("builtin".into()));
        assert!(error.to_string().contains("set blake3"), "{error}");
        assert_eq!(
            "md5".parse::<HashAlgorithm>().unwrap_err().to_string(),
            "hash algorithm \"md5\" is unknown; expected blake3, sha256_cbor or xxhash_cbor"
        );
    }
}
