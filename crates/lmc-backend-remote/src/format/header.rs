//! The header of a value.

use lmc_key::{ChunkHash, ChunkKey, SpaceId};
use thiserror::Error;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of a header.
pub const HEADER_LEN: usize = 256;
/// The codec that stores a chunk's bytes unchanged: the only one so far.
pub const CODEC_RAW: u32 = 0;
/// Largest payload that is accepted.
pub const MAX_PAYLOAD_LEN: u64 = 1 << 32;
/// Largest payload offset that is accepted.
const MAX_PAYLOAD_OFFSET: u64 = 1 << 20;

const MAGIC: [u8; 8] = *b"LMCVALUE";
const VERSION: u32 = 2;
/// Offset of the checksum, which covers the preceding bytes.
const SUM_AT: usize = HEADER_LEN - 8;
/// Offset of the bytes that are zero in this version.
const REST_AT: usize = 124;

/// The first 256 bytes of a value. The payload begins at [`payload_offset`](Self::payload_offset).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Key of the chunk.
    pub key: ChunkKey,
    /// Offset of the payload from the start of the value.
    pub payload_offset: u64,
    /// Bytes of the stored payload.
    pub stored_len: u64,
    /// Checksum of the stored payload.
    pub stored_sum: u64,
    /// Bytes of the chunk.
    pub plain_len: u64,
    /// Checksum of the chunk's bytes.
    pub plain_sum: u64,
}

/// Reason why a value is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The header has a version that this lmc cannot read.
    #[error("unknown version {0} of the header")]
    Version(u32),
    /// The payload has a codec that this lmc cannot read.
    #[error("unknown codec {0}")]
    Codec(u32),
    /// The value is truncated, or a checksum is wrong.
    #[error("the value is damaged")]
    Damaged,
    /// The value belongs to another key.
    #[error("the value belongs to another key")]
    OtherKey,
    /// The chunk has another length than the slot.
    #[error("the chunk has {expected} bytes, the slot {found}")]
    Length {
        /// Bytes of the chunk.
        expected: u64,
        /// Bytes of the slot.
        found: u64,
    },
}

impl Refusal {
    /// Returns true if a later lmc may have written the value, so that it must not be changed.
    pub fn is_newer(self) -> bool {
        matches!(self, Self::Version(_) | Self::Codec(_))
    }
}

impl Header {
    /// Makes the header of a chunk that is stored unchanged.
    pub fn raw(key: ChunkKey, payload_offset: u64, len: u64, checksum: u64) -> Self {
        Self {
            key,
            payload_offset,
            stored_len: len,
            stored_sum: checksum,
            plain_len: len,
            plain_sum: checksum,
        }
    }

    /// Returns the bytes of the whole value.
    pub fn value_len(&self) -> u64 {
        self.payload_offset + self.stored_len
    }

    /// Returns the bytes of the header.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        let mut at = 0;
        let mut put = |part: &[u8]| {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        };
        put(&MAGIC);
        put(&VERSION.to_le_bytes());
        put(&CODEC_RAW.to_le_bytes());
        // Parameters of the codec: none.
        put(&[0; 16]);
        put(&self.payload_offset.to_le_bytes());
        put(&self.stored_len.to_le_bytes());
        put(&self.stored_sum.to_le_bytes());
        put(&self.plain_len.to_le_bytes());
        put(&self.plain_sum.to_le_bytes());
        put(self.key.space.as_bytes());
        put(self.key.hash.as_bytes());
        put(&self.key.kv_rank.to_le_bytes());
        put(&self.key.group.to_le_bytes());
        let sum = xxh3_64(&bytes[..SUM_AT]);
        bytes[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Refusal`] if the bytes are not a header that this version writes.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, Refusal> {
        let mut reader = Reader(bytes);
        if reader.array() != MAGIC {
            return Err(Refusal::Damaged);
        }
        // The version is used before the checksum is checked: a later version may have another checksum.
        let version = reader.u32();
        if version > VERSION {
            return Err(Refusal::Version(version));
        }
        let sum = xxh3_64(&bytes[..SUM_AT]);
        if version < VERSION || bytes[SUM_AT..] != sum.to_le_bytes() {
            return Err(Refusal::Damaged);
        }
        let codec = reader.u32();
        if codec != CODEC_RAW {
            return Err(Refusal::Codec(codec));
        }
        let parameters: [u8; 16] = reader.array();
        let this = Self {
            payload_offset: reader.u64(),
            stored_len: reader.u64(),
            stored_sum: reader.u64(),
            plain_len: reader.u64(),
            plain_sum: reader.u64(),
            key: ChunkKey {
                space: SpaceId::new(reader.array()),
                hash: ChunkHash::new(reader.array()),
                kv_rank: u16::from_le_bytes(reader.array()),
                group: u16::from_le_bytes(reader.array()),
            },
        };
        let offsets = HEADER_LEN as u64..=MAX_PAYLOAD_OFFSET;
        let is_valid = parameters == [0; 16]
            && bytes[REST_AT..SUM_AT].iter().all(|&byte| byte == 0)
            && offsets.contains(&this.payload_offset)
            && (1..=MAX_PAYLOAD_LEN).contains(&this.plain_len)
            && (this.stored_len, this.stored_sum) == (this.plain_len, this.plain_sum);
        is_valid.then_some(this).ok_or(Refusal::Damaged)
    }

    /// Reads the header of a value of `value_len` bytes that was found under `key`.
    ///
    /// # Errors
    /// [`Refusal`] also for the header of another key, and for a truncated value.
    pub fn of_value(
        bytes: &[u8; HEADER_LEN],
        key: &ChunkKey,
        value_len: u64,
    ) -> Result<Self, Refusal> {
        let header = Self::decode(bytes)?;
        if header.key != *key {
            return Err(Refusal::OtherKey);
        }
        match header.value_len() == value_len {
            true => Ok(header),
            false => Err(Refusal::Damaged),
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_first_chunk().expect("a header has its fields");
        self.0 = rest;
        *first
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::golden_key as key;
    use super::*;

    fn header() -> Header {
        Header::raw(key(), 4096, 0x0001_0203, 0x1122_3344_5566_7788)
    }

    /// Header with a field changed and its checksum made right.
    fn with(at: usize, part: &[u8]) -> [u8; HEADER_LEN] {
        let mut bytes = header().encode();
        bytes[at..at + part.len()].copy_from_slice(part);
        let sum = xxh3_64(&bytes[..SUM_AT]);
        bytes[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn hex(bytes: &[u8]) -> String {
        let lines = bytes.chunks(32).map(|line| {
            let digits: String = line.iter().map(|byte| format!("{byte:02x}")).collect();
            digits + "\n"
        });
        lines.collect()
    }

    #[test]
    fn golden_header() {
        let golden = include_str!("../../tests/data/header-v2.hex");
        assert_eq!(hex(&header().encode()), golden);
        assert_eq!(Header::decode(&header().encode()), Ok(header()));
    }

    #[test]
    fn unknown_versions_and_codecs_are_named_and_all_else_is_damage() {
        let version = |n: u32| with(8, &n.to_le_bytes());
        assert_eq!(Header::decode(&version(3)), Err(Refusal::Version(3)));
        assert_eq!(Header::decode(&with(12, &[9])), Err(Refusal::Codec(9)));
        let mut later = version(7);
        later[100..].fill(0xAB);
        assert_eq!(Header::decode(&later), Err(Refusal::Version(7)));
        let most = (MAX_PAYLOAD_LEN + 1).to_le_bytes();
        for (what, bytes) in [
            ("no version", version(0)),
            ("an older version", version(1)),
            ("another magic", with(0, b"l")),
            ("parameters of no codec", with(20, &[1])),
            ("an offset in the header", with(32, &255u64.to_le_bytes())),
            ("an offset far away", with(32, &u64::MAX.to_le_bytes())),
            ("another stored length", with(40, &[0xFF])),
            ("another stored checksum", with(48, &[0xFF])),
            ("no bytes", with(40, &[[0; 8], [0; 8], [0; 8]].concat())),
            (
                "too many bytes",
                with(
                    40,
                    &[most, header().stored_sum.to_le_bytes(), most].concat(),
                ),
            ),
            ("bytes that mean nothing", with(SUM_AT - 1, &[1])),
        ] {
            assert_eq!(Header::decode(&bytes), Err(Refusal::Damaged), "{what}");
        }
    }

    #[test]
    fn a_value_belongs_to_its_name_and_is_whole() {
        let bytes = header().encode();
        let len = header().value_len();
        assert_eq!(len, 4096 + 0x0001_0203);
        assert_eq!(Header::of_value(&bytes, &key(), len), Ok(header()));
        let other = ChunkKey {
            group: 773,
            ..key()
        };
        assert_eq!(
            Header::of_value(&bytes, &other, len),
            Err(Refusal::OtherKey)
        );
        for torn in [0, len - 1, len + 1, u64::MAX] {
            assert_eq!(
                Header::of_value(&bytes, &key(), torn),
                Err(Refusal::Damaged)
            );
        }
    }

    proptest! {
        #[test]
        fn headers_come_back(
            space: [u8; 16], hash: [u8; 32], kv_rank: u16, group: u16,
            offset in HEADER_LEN as u64..=MAX_PAYLOAD_OFFSET, len in 1..=MAX_PAYLOAD_LEN, sum: u64,
        ) {
            let (space, hash) = (SpaceId::new(space), ChunkHash::new(hash));
            let key = ChunkKey { space, kv_rank, group, hash };
            let header = Header::raw(key, offset, len, sum);
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn a_flipped_bit_is_never_taken(bit in 0..HEADER_LEN * 8) {
            let mut bytes = header().encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        /// As a fuzzer would: a header with many bytes changed and a checksum that is right.
        #[test]
        fn what_is_taken_is_written_the_same(
            changes in prop::collection::vec((0..SUM_AT, any::<u8>()), 0..40),
        ) {
            let mut bytes = header().encode();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            let sum = xxh3_64(&bytes[..SUM_AT]);
            bytes[SUM_AT..].copy_from_slice(&sum.to_le_bytes());
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
