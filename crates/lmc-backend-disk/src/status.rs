//! The state of drives, for an operator.

use std::sync::Arc;

use lmc_backend::Clears;

use crate::set::SetMember;
use crate::spaces::SpaceUsage;

/// One drive at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriveStatus {
    /// Random id drawn when the folder was created.
    pub drive_id: [u8; 16],
    /// Time at which the folder was created, in seconds since 1970.
    pub created: u64,
    /// Id of its drive set; none if the drive has not served in a set yet.
    pub set_id: Option<[u8; 16]>,
    /// Clears after which the chunks were stored.
    pub clears: Arc<Clears>,
    /// Drives of the set according to this drive, itself included.
    pub members: Vec<SetMember>,
    /// Chunks of each key space, the one with the most bytes first.
    pub spaces: Vec<SpaceUsage>,
    /// Bytes of each segment file.
    pub segment_bytes: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
    /// Segments that have a file, by number.
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
    /// Bytes written in this use, from the segment's start.
    pub used_bytes: u64,
    /// Number of chunks.
    pub chunks: u64,
    /// Payload bytes of these chunks.
    pub bytes: u64,
    /// True if the segment is being written.
    pub active: bool,
}
