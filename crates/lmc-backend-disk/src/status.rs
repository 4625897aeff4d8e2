//! The state of drives, for people.

use std::sync::Arc;

use lmc_backend::Clears;

use crate::set::SetMember;
use crate::spaces::SpaceUsage;

/// One drive at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriveStatus {
    /// Made at random with the folder.
    pub drive_id: [u8; 16],
    /// Seconds from 1970 to the folder's making.
    pub created: u64,
    /// Id of its drive set; none before it served with one.
    pub set_id: Option<[u8; 16]>,
    /// Clears that the chunks were stored after.
    pub clears: Arc<Clears>,
    /// Drives of the set, as this one remembers them, itself included.
    pub members: Vec<SetMember>,
    /// Chunks of each key space, the one with the most bytes first.
    pub spaces: Vec<SpaceUsage>,
    /// Bytes of each segment file.
    pub segment_bytes: u64,
    /// Chunks that are there.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
    /// The segments whose files are there, by their numbers.
    pub segments: Vec<SegmentStatus>,
}

/// One segment at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentStatus {
    /// Number of the segment.
    pub number: u32,
    /// Number of the present use of the segment; one sequence counts the uses of all segments.
    pub generation: u64,
    /// Bytes from its start that were written in this use.
    pub used_bytes: u64,
    /// Chunks that are there.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
    /// True if the segment is the one that is written to.
    pub active: bool,
}
