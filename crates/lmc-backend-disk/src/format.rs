//! The structures on a drive, byte by byte. Little-endian; docs/disk-format.md has diagrams.
//!
//! Pure functions from bytes to values. Everything read is checked before it is used. Every structure has an
//! XXH3 checksum of itself.

use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use thiserror::Error;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

use crate::volume::BLOCK;

/// Version of every structure, and the only version that can be read.
pub const VERSION: u32 = 4;
/// Bytes of a block, as a length in memory.
pub(crate) const BLOCK_LEN: usize = BLOCK as usize;

/// First bytes of a drive's header file.
pub(crate) const DRIVE_MAGIC: [u8; 8] = *b"LMCDRIVE";
const CHUNK_MAGIC: [u8; 8] = *b"LMCCHUNK";
const FRAME_MAGIC: [u8; 8] = *b"LMCFRAME";
const CHECKPOINT_MAGIC: [u8; 8] = *b"LMCCHKPT";

/// Offset of the checksum of a block: its last eight bytes.
const SUM_AT: usize = BLOCK_LEN - 8;
/// Bytes of a record in a frame and in a checkpoint.
pub(crate) const RECORD_LEN: usize = 128;
/// Bytes before the first record of a frame.
const FRAME_HEAD: usize = 64;
/// Offset of a frame's checksum.
const FRAME_SUM_AT: usize = 48;

/// Reason why bytes are not the expected structure.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum FormatError {
    /// The bytes do not begin with the magic of this structure.
    #[error("not a {what}")]
    Magic { what: &'static str },
    /// The structure has another version.
    #[error(
        "{what} has version {found}, this lmc reads and writes version {VERSION}: use the lmc that \
         wrote it, or remove the files of the folder and start with --disk-create"
    )]
    Version { what: &'static str, found: u32 },
    /// The checksum is wrong.
    #[error("{what} is damaged: its checksum is wrong")]
    Damaged { what: &'static str },
    /// The checksum is right, but a field is invalid.
    #[error("{what} has an invalid {field}")]
    Field {
        what: &'static str,
        field: &'static str,
    },
}

/// Returns the number of blocks for a number of bytes.
pub(crate) fn blocks(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK)
}

/// Returns the checksum of a chunk's bytes.
pub(crate) fn payload_sum(bytes: &[u8]) -> u64 {
    lmc_memory::checksum(bytes)
}

pub(crate) struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(out: &'a mut [u8]) -> Self {
        Self { out, at: 0 }
    }

    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.out[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_le_bytes());
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.put(&value.to_le_bytes());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        self.put(&value.to_le_bytes());
    }

    fn key(&mut self, key: &ChunkKey) {
        self.put(key.space.as_bytes());
        self.put(key.hash.as_bytes());
        self.u16(key.kv_rank);
        self.u16(key.group);
        self.u32(0);
    }
}

pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn array<const N: usize>(&mut self) -> [u8; N] {
        let array = self.bytes[self.at..self.at + N].try_into();
        self.at += N;
        array.expect("the slice has this length")
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    fn key(&mut self) -> ChunkKey {
        let (space, hash) = (SpaceId::new(self.array()), ChunkHash::new(self.array()));
        let (kv_rank, group) = (self.u16(), self.u16());
        self.u32();
        ChunkKey {
            space,
            kv_rank,
            group,
            hash,
        }
    }
}

/// Writes the checksum at the end of a block.
fn sum_block(block: &mut [u8]) {
    let sum = xxh3_64(&block[..SUM_AT]);
    block[SUM_AT..BLOCK_LEN].copy_from_slice(&sum.to_le_bytes());
}

/// The magic and the name of a structure.
pub(crate) struct Head {
    pub(crate) magic: [u8; 8],
    pub(crate) what: &'static str,
}

/// Writes the checksum of a structure at `at`. It is computed with these eight bytes zero, as they are now.
pub(crate) fn put_sum(bytes: &mut [u8], at: usize) {
    let sum = xxh3_64(bytes);
    bytes[at..at + 8].copy_from_slice(&sum.to_le_bytes());
}

/// Returns true if the checksum at `at` is right: that of the structure with these eight bytes zero.
pub(crate) fn sum_is_right(bytes: &[u8], at: usize) -> bool {
    let mut hash = Xxh3Default::new();
    hash.update(&bytes[..at]);
    hash.update(&[0; 8]);
    hash.update(&bytes[at + 8..]);
    bytes[at..at + 8] == hash.digest().to_le_bytes()
}

/// Checks the beginning of any structure: magic, checksum of the whole structure (`intact` returns whether it
/// is right), version.
pub(crate) fn check_head(
    block: &[u8],
    head: Head,
    intact: impl FnOnce() -> bool,
) -> Result<(), FormatError> {
    let Head { magic, what } = head;
    if block[..8] != magic {
        return Err(FormatError::Magic { what });
    }
    // The version is used before the checksum is checked: another version may have another checksum.
    let found = u32::from_le_bytes(block[8..12].try_into().expect("four bytes"));
    if found != VERSION {
        return Err(FormatError::Version { what, found });
    }
    match intact() {
        true => Ok(()),
        false => Err(FormatError::Damaged { what }),
    }
}

fn block_intact(block: &[u8]) -> bool {
    let sum = u64::from_le_bytes(block[SUM_AT..BLOCK_LEN].try_into().expect("eight bytes"));
    xxh3_64(&block[..SUM_AT]) == sum
}

/// Header of a drive: the only block of its file `drive`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriveHeader {
    /// Random id drawn when the folder was created; every chunk on the drive has it.
    pub(crate) drive_id: [u8; 16],
    /// Bytes of each segment file.
    pub(crate) segment_bytes: u64,
    /// Time at which the folder was created, in seconds since 1970.
    pub(crate) created: u64,
}

impl DriveHeader {
    pub(crate) fn encode(&self, block: &mut [u8]) {
        block[..BLOCK_LEN].fill(0);
        let mut w = Writer::new(block);
        w.put(&DRIVE_MAGIC);
        w.u32(VERSION);
        w.u32(0);
        w.put(&self.drive_id);
        w.u64(self.segment_bytes);
        w.u64(self.created);
        sum_block(block);
    }

    pub(crate) fn decode(block: &[u8]) -> Result<Self, FormatError> {
        let what = "folder of a drive";
        let head = Head {
            magic: DRIVE_MAGIC,
            what,
        };
        check_head(block, head, || block_intact(block))?;
        let mut r = Reader::new(&block[16..]);
        let this = Self {
            drive_id: r.array(),
            segment_bytes: r.u64(),
            created: r.u64(),
        };
        let whole = this.segment_bytes.is_multiple_of(BLOCK);
        if !whole || this.segment_bytes < 2 * BLOCK || blocks(this.segment_bytes) >= 1 << 32 {
            return Err(FormatError::Field {
                what,
                field: "segment size",
            });
        }
        Ok(this)
    }
}

/// The block in front of a chunk's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ChunkHeader {
    pub(crate) drive_id: [u8; 16],
    pub(crate) key: ChunkKey,
    /// Hash of the chunk before this one in its prompt, in the same space, rank and group.
    pub(crate) parent: Option<ChunkHash>,
    pub(crate) location: Location,
    /// Bytes of the chunk.
    pub(crate) len: u64,
    pub(crate) payload_sum: u64,
}

/// Location of a chunk in a certain use of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    /// Block of the chunk's header, from the start of the segment.
    pub(crate) block: u32,
    /// Number of the use of the segment; one sequence counts the uses of all segments.
    pub(crate) generation: u64,
}

impl ChunkHeader {
    pub(crate) fn encode(&self, block: &mut [u8]) {
        block[..BLOCK_LEN].fill(0);
        let mut w = Writer::new(block);
        w.put(&CHUNK_MAGIC);
        w.u32(VERSION);
        w.u32(u32::from(self.parent.is_some()));
        w.put(&self.drive_id);
        w.u64(self.location.generation);
        w.u32(self.location.segment);
        w.u32(self.location.block);
        w.u64(self.len);
        w.u64(self.payload_sum);
        w.key(&self.key);
        w.put(self.parent.unwrap_or(ChunkHash::new([0; 32])).as_bytes());
        sum_block(block);
    }

    pub(crate) fn decode(block: &[u8]) -> Result<Self, FormatError> {
        let what = "header of a chunk";
        let head = Head {
            magic: CHUNK_MAGIC,
            what,
        };
        check_head(block, head, || block_intact(block))?;
        let mut r = Reader::new(&block[12..]);
        let flags = r.u32();
        let drive_id = r.array();
        let generation = r.u64();
        let location = Location {
            segment: r.u32(),
            block: r.u32(),
            generation,
        };
        let (len, payload_sum) = (r.u64(), r.u64());
        let key = r.key();
        let parent = ChunkHash::new(r.array());
        if flags > 1 {
            return Err(FormatError::Field {
                what,
                field: "flag",
            });
        }
        Ok(Self {
            drive_id,
            key,
            parent: (flags == 1).then_some(parent),
            location,
            len,
            payload_sum,
        })
    }
}

/// A change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// A chunk was stored.
    Put(PutRecord),
    /// A chunk was removed by key.
    Remove { key: ChunkKey },
    /// A segment begins its next use: all chunks of its earlier uses are gone.
    Begin { segment: u32, generation: u64 },
    /// The drive has carried out these clears. All chunks in uses of segments before `generation` are gone.
    Cleared { clears: ClearsId, generation: u64 },
}

/// Entry of a chunk in the index and in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PutRecord {
    pub(crate) key: ChunkKey,
    pub(crate) location: Location,
    pub(crate) len: u64,
    pub(crate) payload_sum: u64,
}

const PUT: u32 = 1;
const REMOVE: u32 = 2;
const BEGIN: u32 = 3;
const CLEARED: u32 = 4;

impl Record {
    pub(crate) fn encode(&self, out: &mut [u8]) {
        out[..RECORD_LEN].fill(0);
        let mut w = Writer::new(out);
        match self {
            Self::Put(put) => {
                w.u32(PUT);
                w.u32(put.location.segment);
                w.u32(put.location.block);
                w.u32(0);
                w.u64(put.location.generation);
                w.u64(put.len);
                w.u64(put.payload_sum);
                w.key(&put.key);
            }
            Self::Remove { key } => {
                w.u32(REMOVE);
                w.at = 40;
                w.key(key);
            }
            Self::Begin {
                segment,
                generation,
            } => {
                w.u32(BEGIN);
                w.u32(*segment);
                w.u64(0);
                w.u64(*generation);
            }
            Self::Cleared { clears, generation } => {
                w.u32(CLEARED);
                w.at = 16;
                w.u64(*generation);
                w.put(clears.as_bytes());
            }
        }
    }

    /// Decodes a record; `None` for a kind that this version does not know.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut r = Reader::new(bytes);
        let kind = r.u32();
        let (segment, block) = (r.u32(), r.u32());
        r.u32();
        let generation = r.u64();
        let (len, payload_sum) = (r.u64(), r.u64());
        let key = r.key();
        match kind {
            PUT => Some(Self::Put(PutRecord {
                key,
                location: Location {
                    segment,
                    block,
                    generation,
                },
                len,
                payload_sum,
            })),
            REMOVE => Some(Self::Remove { key }),
            BEGIN => Some(Self::Begin {
                segment,
                generation,
            }),
            CLEARED => Some(Self::Cleared {
                clears: ClearsId::new(Reader::new(&bytes[24..]).array()),
                generation,
            }),
            _ => None,
        }
    }
}

/// Most records of one frame: a frame is shorter than a mebibyte.
pub(crate) const MAX_FRAME_RECORDS: usize = ((1 << 20) - FRAME_HEAD) / RECORD_LEN;

/// Returns the bytes of a frame of `records` records.
pub(crate) fn frame_len(records: usize) -> usize {
    (FRAME_HEAD + records * RECORD_LEN).next_multiple_of(BLOCK_LEN)
}

/// Writes a frame: records that take effect together. `out` has [`frame_len`] bytes.
pub(crate) fn encode_frame(
    drive_id: &[u8; 16],
    log: u64,
    sequence: u64,
    records: &[Record],
    out: &mut [u8],
) {
    let out = &mut out[..frame_len(records.len())];
    out.fill(0);
    let mut w = Writer::new(out);
    w.put(&FRAME_MAGIC);
    w.u32(VERSION);
    w.u32(records.len() as u32);
    w.put(drive_id);
    w.u64(log);
    w.u64(sequence);
    // Offset 48: checksum of the frame with these eight bytes zero. Offset 56: unused.
    for (record, out) in records
        .iter()
        .zip(out[FRAME_HEAD..].chunks_exact_mut(RECORD_LEN))
    {
        record.encode(out);
    }
    put_sum(out, FRAME_SUM_AT);
}

/// Reads the frame at the front of `bytes`: its records and its length. The log ends where this fails: at
/// zeroes, a torn frame, or leftovers of an older log.
pub(crate) fn decode_frame(
    drive_id: &[u8; 16],
    log: u64,
    sequence: u64,
    bytes: &[u8],
    records: &mut Vec<Record>,
) -> Result<usize, FormatError> {
    let what = "frame of the index log";
    let field = |field| FormatError::Field { what, field };
    if bytes.len() < BLOCK_LEN {
        return Err(FormatError::Magic { what });
    }
    let mut frame_bytes = None;
    let head = Head {
        magic: FRAME_MAGIC,
        what,
    };
    check_head(bytes, head, || {
        let mut r = Reader::new(&bytes[12..]);
        let count = r.u32() as usize;
        if count > MAX_FRAME_RECORDS || frame_len(count) > bytes.len() {
            return false;
        }
        let len = frame_len(count);
        frame_bytes = Some((len, count));
        sum_is_right(&bytes[..len], FRAME_SUM_AT)
    })?;
    let (len, count) = frame_bytes.ok_or(FormatError::Damaged { what })?;
    let mut r = Reader::new(&bytes[16..]);
    if r.array::<16>() != *drive_id {
        return Err(field("drive"));
    }
    if (r.u64(), r.u64()) != (log, sequence) {
        return Err(field("location in the log"));
    }
    let encoded = bytes[FRAME_HEAD..len].chunks_exact(RECORD_LEN).take(count);
    let before = records.len();
    for bytes in encoded {
        let Some(record) = Record::decode(bytes) else {
            records.truncate(before);
            return Err(field("record"));
        };
        records.push(record);
    }
    Ok(len)
}

/// The first block of a checkpoint. It is followed by the clears ([`Record::Cleared`], if there was any
/// clear), the segments' records ([`Record::Begin`]) and the chunks' records ([`Record::Put`]), without gaps,
/// padded to a whole block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointHeader {
    pub(crate) drive_id: [u8; 16],
    /// Number of the log whose frames follow this checkpoint.
    pub(crate) log: u64,
    pub(crate) records: u64,
    /// XXH3-64 of everything after the first block.
    pub(crate) body_sum: u64,
}

impl CheckpointHeader {
    pub(crate) fn encode(&self, block: &mut [u8]) {
        block[..BLOCK_LEN].fill(0);
        let mut w = Writer::new(block);
        w.put(&CHECKPOINT_MAGIC);
        w.u32(VERSION);
        w.u32(0);
        w.put(&self.drive_id);
        w.u64(self.log);
        w.u64(self.records);
        w.u64(self.body_sum);
        sum_block(block);
    }

    /// Reads a whole checkpoint: its header, and the bytes of its records.
    pub(crate) fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), FormatError> {
        let what = "checkpoint of the index";
        if bytes.len() < BLOCK_LEN {
            return Err(FormatError::Magic { what });
        }
        let head = Head {
            magic: CHECKPOINT_MAGIC,
            what,
        };
        check_head(bytes, head, || block_intact(bytes))?;
        let mut r = Reader::new(&bytes[16..]);
        let this = Self {
            drive_id: r.array(),
            log: r.u64(),
            records: r.u64(),
            body_sum: r.u64(),
        };
        let body = &bytes[BLOCK_LEN..];
        let len = this.records.checked_mul(RECORD_LEN as u64);
        let Some(len) = len.filter(|&len| len <= body.len() as u64) else {
            return Err(FormatError::Field {
                what,
                field: "number of records",
            });
        };
        let padded = (len as usize).next_multiple_of(BLOCK_LEN).min(body.len());
        if xxh3_64(&body[..padded]) != this.body_sum {
            return Err(FormatError::Damaged { what });
        }
        Ok((this, &body[..len as usize]))
    }
}
