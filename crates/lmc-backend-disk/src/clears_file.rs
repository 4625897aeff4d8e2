//! The map of the clears that a drive's chunks were stored after.
//!
//! The log has the digest of the map, and is written after the map. A drive whose log has another digest was
//! killed between the two writes: when it starts, it is emptied, and then has the clears of the file. A drive
//! whose file is damaged or lost is emptied, and then has no clears. docs/disk-format.md has the layout.

use std::io;

use lmc_backend::Clears;

use crate::files::read_file;
use crate::format::{
    BLOCK_LEN, FormatError, Head, Reader, VERSION, Writer, check_head, put_sum, sum_is_right,
};
use crate::volume::Volume;

/// Name of the file.
pub(crate) const CLEARS_NAME: &str = "clears";

const MAGIC: [u8; 8] = *b"LMCCLEAR";
/// Offset of the checksum in the file.
const SUM_AT: usize = 16;
const HEAD: usize = 24;

/// Returns the content of the file, as whole blocks.
pub(crate) fn encode(clears: &Clears) -> Vec<u8> {
    let map = clears.encode();
    let mut out = vec![0; (HEAD + map.len()).next_multiple_of(BLOCK_LEN)];
    let mut w = Writer::new(&mut out);
    w.put(&MAGIC);
    w.u32(VERSION);
    w.u32(map.len() as u32);
    w.u64(0);
    w.put(&map);
    put_sum(&mut out, SUM_AT);
    out
}

fn decode(bytes: &[u8]) -> Result<Clears, FormatError> {
    let what = "map of clears";
    if bytes.len() < BLOCK_LEN {
        return Err(FormatError::Magic { what });
    }
    let head = Head { magic: MAGIC, what };
    check_head(bytes, head, || sum_is_right(bytes, SUM_AT))?;
    let len = Reader::new(&bytes[12..]).u32() as usize;
    let map = bytes[HEAD..].get(..len);
    let field = "map";
    map.and_then(|map| Clears::decode(map).ok())
        .ok_or(FormatError::Field { what, field })
}

/// Reads the map of a drive: empty if there is no file, `None` if the file is damaged.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn read(volume: &dyn Volume) -> io::Result<Option<Clears>> {
    let bytes = read_file(volume, CLEARS_NAME)?;
    Ok(bytes.map_or_else(|| Some(Clears::default()), |bytes| decode(&bytes).ok()))
}

#[cfg(test)]
mod tests {
    use lmc_backend::StartId;

    use super::*;

    #[test]
    fn a_map_comes_back_and_damage_does_not() {
        let entry = |number: u64| (StartId::new(u128::from(number).to_le_bytes()), number + 1);
        for starts in [0, 1, 200, Clears::MAX_STARTS as u64] {
            let right = Clears::from_entries((0..starts).map(entry)).expect("no more than fit");
            let bytes = encode(&right);
            assert!(bytes.len().is_multiple_of(BLOCK_LEN));
            assert_eq!(decode(&bytes), Ok(right));
            for at in (0..bytes.len()).step_by(bytes.len() / 512) {
                let mut bytes = bytes.clone();
                bytes[at] ^= 1;
                decode(&bytes).expect_err("damage");
            }
        }
        decode(&[]).expect_err("nothing");
    }
}
