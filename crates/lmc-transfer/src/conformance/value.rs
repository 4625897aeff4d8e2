//! Bytes that identify their batch and object. The bytes of `lmc-backend`'s kit identify a chunk's
//! key, which this crate does not know.

use std::sync::OnceLock;

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
    /// Number of bytes that were compared.
    pub len: usize,
    /// The first wrong byte.
    pub at: usize,
    /// The expected byte.
    pub expected: u8,
    /// The byte found.
    pub found: u8,
}

/// Bytes of an object that are copied from one start in the table.
const BLOCK: usize = 4096;

/// Random bytes that values are made of.
const TABLE: usize = 64 << 10;

/// Copying and comparing whole blocks is fast without optimization too.
fn table() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut rng = Rng::new(0x7ab1e);
        (0..TABLE / 8)
            .flat_map(|_| rng.next_u64().to_le_bytes())
            .collect()
    })
}

/// Returns the blocks of bytes that belong to an object of a length. Each block starts elsewhere in
/// the table, so that the bytes of one block differ from the bytes of other blocks.
fn blocks(stamp: u64, object: usize, len: usize) -> impl Iterator<Item = &'static [u8]> {
    let table = table();
    let seed = Rng::new(stamp).next_u64() ^ object as u64;
    let mut rng = Rng::new(Rng::new(seed).next_u64() ^ len as u64);
    std::iter::repeat_with(move || {
        let start = rng.below((TABLE - BLOCK) as u64) as usize;
        &table[start..start + BLOCK]
    })
}

/// Writes the bytes of the object with this number in the batch with this stamp.
pub fn fill_value(stamp: u64, object: usize, bytes: &mut [u8]) {
    let blocks = blocks(stamp, object, bytes.len());
    for (part, block) in bytes.chunks_mut(BLOCK).zip(blocks) {
        part.copy_from_slice(&block[..part.len()]);
    }
}

/// Checks every byte against [`fill_value`].
///
/// # Errors
/// [`Mismatch`] names the first wrong byte.
pub fn check_value(stamp: u64, object: usize, bytes: &[u8]) -> Result<(), Mismatch> {
    let blocks = blocks(stamp, object, bytes.len());
    for (n, (part, block)) in bytes.chunks(BLOCK).zip(blocks).enumerate() {
        let block = &block[..part.len()];
        if part == block {
            continue;
        }
        let wrong = part.iter().zip(block).position(|(a, b)| a != b);
        let at = wrong.expect("unequal blocks of one length differ in a byte");
        return Err(Mismatch {
            stamp,
            object,
            len: bytes.len(),
            at: n * BLOCK + at,
            expected: block[at],
            found: part[at],
        });
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

    #[test]
    fn every_byte_of_a_long_value_is_checked() {
        let mut bytes = vec![0; 3 * BLOCK + 5];
        fill_value(1, 2, &mut bytes);
        assert_eq!(check_value(1, 2, &bytes), Ok(()));
        for at in (0..bytes.len()).step_by(97).chain([bytes.len() - 1]) {
            bytes[at] ^= 1;
            assert_eq!(check_value(1, 2, &bytes).map_err(|e| e.at), Err(at));
            bytes[at] ^= 1;
        }
        // A block at another's offset.
        bytes.copy_within(..BLOCK, BLOCK);
        assert!(check_value(1, 2, &bytes).is_err());
    }
}
