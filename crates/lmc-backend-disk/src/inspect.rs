//! Inspection of a tier, and compaction.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, FailedSlot, LoadItem, Loaded, StoreItem, Stored};
use lmc_memory::Pool;

use crate::DiskBackend;
use crate::batch::AnswerBatch;
use crate::drive::Drive;
use crate::format::PutRecord;
use crate::set::{SET_NAME, SetRecord};
use crate::status::{DriveStatus, SegmentStatus};

/// Result of [`DiskBackend::compact`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Chunks that were moved.
    pub moved: u64,
    /// Chunks that turned out to be damaged and were removed.
    pub lost: u64,
    /// Chunks that were not moved because they could not be read or written.
    pub stayed: u64,
    /// True if compaction ended early on a drive, because there was no space to move a chunk to.
    pub no_space: bool,
    /// Segment files removed.
    pub segments: u64,
    /// Bytes of the removed segment files.
    pub freed_bytes: u64,
}

impl DiskBackend {
    /// Returns the content of each drive.
    pub fn inspect(&self) -> Vec<DriveStatus> {
        self.drives().iter().map(|drive| drive.inspect()).collect()
    }

    /// Removes a drive that will not return from the open drives' records of the set. Returns true if any
    /// record listed it.
    ///
    /// # Errors
    /// If a record cannot be read or written.
    pub fn forget_member(&self, drive_id: &[u8; 16]) -> std::io::Result<bool> {
        let mut known = false;
        for drive in self.drives() {
            let Some(bytes) = drive.read_file(SET_NAME)? else {
                continue;
            };
            let mut record = SetRecord::decode(&bytes).map_err(std::io::Error::other)?;
            let before = record.members.len();
            record.members.retain(|member| member.drive_id != *drive_id);
            if record.members.len() < before {
                known = true;
                drive.replace_file(SET_NAME, &record.encode())?;
            }
        }
        Ok(known)
    }

    /// Moves chunks out of segments that are filled to less than `below` of their size (0 to 1), and removes
    /// the files of empty segments.
    ///
    /// For a tier that is not in use meanwhile. `pool` must have capacity for the largest chunk. A chunk
    /// stays at its old location until it is durable at the new one, so a kill loses nothing; no chunk is
    /// evicted for another. `timeout` limits each step. `progress` is called with the number of finished
    /// chunks and of all chunks.
    ///
    /// # Errors
    /// If a file cannot be removed.
    pub async fn compact(
        &self,
        pool: &Pool,
        below: f64,
        timeout: Duration,
        mut progress: impl FnMut(u64, u64),
    ) -> std::io::Result<Compacted> {
        let mut done = Compacted::default();
        let sparse = |drive: &DriveStatus| -> Vec<SegmentStatus> {
            let least = drive.segment_bytes as f64 * below;
            let segments = drive.segments.iter();
            let sparse = segments.filter(|s| !s.active && (s.bytes as f64) < least);
            sparse.copied().collect()
        };
        let drives = self.inspect();
        let total = drives.iter().flat_map(sparse).map(|s| s.chunks).sum();
        for (status, drive) in drives.iter().zip(self.drives()) {
            // Chunks are moved to free space and to segments emptied before. So the segments with the fewest
            // bytes come first, and files are removed last.
            let mut sparse = sparse(status);
            sparse.sort_by_key(|segment| segment.bytes);
            'segments: for segment in &sparse {
                let mut chunks = drive.chunks_of(segment.number);
                // Other chunks were moved into the segment since it was emptied.
                chunks.retain(|put| put.location.generation == segment.generation);
                for put in chunks {
                    match self.move_chunk(drive, &put, pool, timeout).await {
                        Move::Moved => done.moved += 1,
                        Move::Lost => done.lost += 1,
                        Move::Stayed => done.stayed += 1,
                        Move::NoSpace => {
                            done.no_space = true;
                            break 'segments;
                        }
                    }
                    progress(done.moved + done.lost + done.stayed, total);
                }
                drive.reuse(segment.number);
            }
            for segment in sparse {
                if drive.give_back(segment.number)? {
                    done.segments += 1;
                    done.freed_bytes += status.segment_bytes;
                }
            }
        }
        Ok(done)
    }

    async fn move_chunk(
        &self,
        drive: &Drive,
        put: &PutRecord,
        pool: &Pool,
        timeout: Duration,
    ) -> Move {
        let deadline = Instant::now() + timeout;
        let Some(slot) = pool.reserve(put.len) else {
            return Move::Stayed;
        };
        // Read from this drive: another drive may have other bytes under the same key.
        let batch = AnswerBatch::new(1);
        let item = LoadItem::new(put.key, slot);
        drive.load(item, None, (Arc::clone(&batch), 0));
        let late = || Loaded::Failed {
            error: BackendError::Deadline,
            slot: FailedSlot::Quarantined,
        };
        let (mut loaded, _) = batch.all(self.timer(), deadline, late).await;
        let slot = match loaded.pop() {
            Some(Loaded::Hit(slot)) => slot,
            Some(Loaded::Miss(_)) => return Move::Lost,
            _ => return Move::Stayed,
        };
        let item = StoreItem::new(put.key, slot.seal());
        let batch = AnswerBatch::new(1);
        drive.relocate(item, put.payload_sum, (Arc::clone(&batch), 0));
        let late = || Err(BackendError::Deadline);
        let (answers, _) = batch.all(self.timer(), deadline, late).await;
        match answers[..] {
            [Ok(Stored::Written)] => Move::Moved,
            [Err(BackendError::Full { .. })] => Move::NoSpace,
            _ => Move::Stayed,
        }
    }
}

/// Outcome of moving a chunk.
enum Move {
    Moved,
    Lost,
    Stayed,
    NoSpace,
}
