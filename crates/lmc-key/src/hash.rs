//! Tokens, and the hash that names a chunk and everything before it.

use std::fmt;
use std::str::FromStr;

use crate::HashAlgorithm;

/// One vocabulary id of the model.
pub type Token = u32;

/// 32 bytes that identify a chunk and everything before it.
///
/// A shorter digest (XXH3-128: 16 bytes) is padded with zeros on the right; [`digest`](Self::digest) returns
/// the unpadded bytes. The text form is 64 lower-case hex digits.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkHash([u8; 32]);

impl ChunkHash {
    /// Makes a hash of 32 given bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Makes a hash of a digest from another program, padded with zeros on the right.
    ///
    /// # Errors
    /// If the length is not that of a digest of `algorithm`.
    pub fn from_digest(algorithm: HashAlgorithm, digest: &[u8]) -> Result<Self, HashParseError> {
        if digest.len() != algorithm.digest_len() {
            return Err(HashParseError::Length {
                expected: algorithm.digest_len(),
                found: digest.len(),
            });
        }
        let mut bytes = [0; 32];
        bytes[..digest.len()].copy_from_slice(digest);
        Ok(Self(bytes))
    }

    /// Returns all 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Returns the digest without padding, as LMCache and vLLM write it in KV events and keys.
    pub fn digest(&self, algorithm: HashAlgorithm) -> &[u8] {
        &self.0[..algorithm.digest_len()]
    }

    /// Returns the first eight bytes: uniformly distributed, good enough to choose a shard or a bucket.
    pub fn prefix_u64(&self) -> u64 {
        u64::from_le_bytes(*self.0.first_chunk().expect("32 bytes have a first eight"))
    }
}

impl AsRef<[u8]> for ChunkHash {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl From<[u8; 32]> for ChunkHash {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Debug for ChunkHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChunkHash(")?;
        write_hex(f, &self.0)?;
        f.write_str(")")
    }
}

impl FromStr for ChunkHash {
    type Err = HashParseError;

    fn from_str(text: &str) -> Result<Self, HashParseError> {
        parse_hex(text).map(Self)
    }
}

/// Text or bytes that are not a hash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HashParseError {
    /// Too many or too few bytes.
    #[error("expected {expected} bytes (two hex digits each in text), found {found}")]
    Length {
        /// Expected number of bytes.
        expected: usize,
        /// Number of bytes found; for text, half the number of digits, rounded down.
        found: usize,
    },
    /// A character that is not a hex digit.
    #[error("expected a hex digit at position {at}, found {found:?}")]
    Digit {
        /// Offset of the character in bytes.
        at: usize,
        /// The character.
        found: char,
    },
}

/// Writes bytes as lower-case hex digits.
pub(crate) fn write_hex(out: &mut impl fmt::Write, bytes: &[u8]) -> fmt::Result {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        out.write_char(DIGITS[usize::from(byte >> 4)].into())?;
        out.write_char(DIGITS[usize::from(byte & 15)].into())?;
    }
    Ok(())
}

/// Parses exactly `2 * N` hex digits of either case.
pub(crate) fn parse_hex<const N: usize>(text: &str) -> Result<[u8; N], HashParseError> {
    for (at, found) in text.char_indices().take(2 * N) {
        if !found.is_ascii_hexdigit() {
            return Err(HashParseError::Digit { at, found });
        }
    }
    if text.len() != 2 * N {
        return Err(HashParseError::Length {
            expected: N,
            found: text.len() / 2,
        });
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = str::from_utf8(pair).expect("checked above: ASCII digits");
        *byte = u8::from_str_radix(pair, 16).expect("checked above: hex digits");
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back() {
        let hash = ChunkHash::new(std::array::from_fn(|i| (i * 7 + 250) as u8));
        let text = hash.to_string();
        assert_eq!(&text[..8], "fa01080f");
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse(), Ok(hash));
        assert_eq!(text.to_uppercase().parse(), Ok(hash));
        assert_eq!(format!("{hash:?}"), format!("ChunkHash({text})"));
    }

    #[test]
    fn malformed_text_is_refused() {
        let good = ChunkHash::default().to_string();
        for (text, error) in [
            (
                String::new(),
                HashParseError::Length {
                    expected: 32,
                    found: 0,
                },
            ),
            (
                good[..63].to_owned(),
                HashParseError::Length {
                    expected: 32,
                    found: 31,
                },
            ),
            (
                good.clone() + "00",
                HashParseError::Length {
                    expected: 32,
                    found: 33,
                },
            ),
            (
                good.replacen('0', "é", 1),
                HashParseError::Digit { at: 0, found: 'é' },
            ),
            (
                format!("{}+1", &good[..62]),
                HashParseError::Digit { at: 62, found: '+' },
            ),
        ] {
            assert_eq!(text.parse::<ChunkHash>(), Err(error), "{text:?}");
        }
    }

    #[test]
    fn short_digests_are_padded_on_the_right() {
        let hash = ChunkHash::from_digest(HashAlgorithm::Xxh3, &[9; 16]).unwrap();
        assert_eq!(hash.as_bytes()[..16], [9; 16]);
        assert_eq!(hash.as_bytes()[16..], [0; 16]);
        assert_eq!(hash.digest(HashAlgorithm::Xxh3), [9; 16]);
        assert_eq!(
            ChunkHash::from_digest(HashAlgorithm::Blake3, &[9; 16]),
            Err(HashParseError::Length {
                expected: 32,
                found: 16
            })
        );
    }
}
