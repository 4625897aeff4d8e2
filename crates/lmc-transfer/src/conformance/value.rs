//! Bytes that name their batch and object. Those of the kit of `lmc-backend` name a chunk's key,
//! which this crate does not know.

use thiserror::Error;

use super::Rng;

/// Bytes that are not those of the object.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "stamp {stamp:#x}, object {object}, {len} bytes: byte {at} is {found:#04x}, expected {expected:#04x}"
)]
pub struct Mismatch {
    /// Stamp of the batch.
    pub stamp: u64,
    /// Index of the object in its batch.
    pub object: usize,
    /// Bytes looked at.
    pub len: usize,
    /// The first wrong byte.
    pub at: usize,
    /// The expected byte.
    pub expected: u8,
    /// The byte found.
    pub found: u8,
}

/// The stream of bytes that belongs to an object of a length.
fn words(stamp: u64, object: usize, len: usize) -> impl Iterator<Item = [u8; 8]> {
    let seed = Rng::new(stamp).next_u64() ^ object as u64;
    let mut rng = Rng::new(Rng::new(seed).next_u64() ^ len as u64);
    std::iter::repeat_with(move || rng.next_u64().to_le_bytes())
}

/// Writes the bytes of the object with this number in the batch with this stamp.
pub fn fill_value(stamp: u64, object: usize, bytes: &mut [u8]) {
    let words = words(stamp, object, bytes.len());
    for (part, word) in bytes.chunks_mut(8).zip(words) {
        part.copy_from_slice(&word[..part.len()]);
    }
}

/// Checks every byte against [`fill_value`].
///
/// # Errors
/// [`Mismatch`] names the first wrong byte.
pub fn check_value(stamp: u64, object: usize, bytes: &[u8]) -> Result<(), Mismatch> {
    let words = words(stamp, object, bytes.len());
    for (n, (part, word)) in bytes.chunks(8).zip(words).enumerate() {
        for (at, (&found, &expected)) in part.iter().zip(&word).enumerate() {
            if found != expected {
                return Err(Mismatch {
                    stamp,
                    object,
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
    fn values_distinguish_stamps_numbers_and_lengths() {
        let mut bytes = [0; 37];
        fill_value(1, 2, &mut bytes);
        assert_eq!(check_value(1, 2, &bytes), Ok(()));
        for (stamp, object) in [(1, 1), (2, 2), (2, 1), (0, 3)] {
            assert!(check_value(stamp, object, &bytes).is_err());
        }
        assert!(check_value(1, 2, &bytes[..36]).is_err());
        bytes[20] ^= 1;
        assert_eq!(check_value(1, 2, &bytes).map_err(|e| e.at), Err(20));
    }
}
