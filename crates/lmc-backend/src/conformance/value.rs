//! Keys by number, and values that encode their key. The values in the kit of `lmc-transfer` encode a batch
//! and an object instead, since channels know no keys.

use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use thiserror::Error;

use super::Rng;

/// Bytes that do not belong to the key that they were found under.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{key:?} of {len} bytes: byte {at} is {found:#04x}, expected {expected:#04x}")]
pub struct Mismatch {
    /// The key.
    pub key: ChunkKey,
    /// Number of bytes checked.
    pub len: usize,
    /// Offset of the first wrong byte.
    pub at: usize,
    /// Byte that belongs at this offset.
    pub expected: u8,
    /// Byte that was found.
    pub found: u8,
}

/// Returns the hash with number `n`.
pub fn test_hash(n: u64) -> ChunkHash {
    let mut rng = Rng::new(n);
    let mut hash = [0; 32];
    for part in hash.chunks_exact_mut(8) {
        part.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    ChunkHash::new(hash)
}

/// Returns the key with number `n`. Every field depends on `n`, and some neighbouring keys differ only in
/// rank or group.
pub fn test_key(n: u64) -> ChunkKey {
    ChunkKey {
        space: SpaceId::new([(n / 4 % 3) as u8; 16]),
        kv_rank: (n % 2) as u16,
        group: (n / 2 % 2) as u16,
        hash: test_hash(n / 4),
    }
}

/// Returns the stream of bytes that belongs to a key and a length.
fn words(key: &ChunkKey, len: usize) -> impl Iterator<Item = [u8; 8]> + use<> {
    let mut seed = len as u64;
    for part in key.to_bytes().chunks(8) {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        seed = Rng::new(seed ^ u64::from_le_bytes(word)).next_u64();
    }
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || rng.next_u64().to_le_bytes())
}

/// Fills `bytes` with the value that belongs to `key` at this length.
pub fn fill_value(key: &ChunkKey, bytes: &mut [u8]) {
    let words = words(key, bytes.len());
    for (part, word) in bytes.chunks_mut(8).zip(words) {
        part.copy_from_slice(&word[..part.len()]);
    }
}

/// Checks every byte against [`fill_value`].
///
/// # Errors
/// [`Mismatch`] for the first wrong byte.
pub fn check_value(key: &ChunkKey, bytes: &[u8]) -> Result<(), Mismatch> {
    let words = words(key, bytes.len());
    for (n, (part, word)) in bytes.chunks(8).zip(words).enumerate() {
        if *part == word[..part.len()] {
            continue;
        }
        for (at, (&found, &expected)) in part.iter().zip(&word).enumerate() {
            if found != expected {
                return Err(Mismatch {
                    key: *key,
                    len: bytes.len(),
                    at: n * 8 + at,
                    expected,
                    found,
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_tell_keys_and_lengths_apart() {
        let (mut bytes, mut longer) = ([0; 37], [0; 38]);
        fill_value(&test_key(1), &mut bytes);
        assert_eq!(check_value(&test_key(1), &bytes), Ok(()));
        for other in [0, 2, 3, 5] {
            assert_eq!(check_value(&test_key(other), &bytes).unwrap_err().len, 37);
        }
        fill_value(&test_key(1), &mut longer);
        assert_ne!(bytes, longer[..37]);
        bytes[20] ^= 1;
        assert_eq!(check_value(&test_key(1), &bytes).unwrap_err().at, 20);
    }
}
