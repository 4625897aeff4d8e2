//! Looking into a tier, and giving its space back.

use std::time::{Duration, Instant};

use lmc_backend::{Backend, LoadItem, Loaded, StoreItem};
use lmc_memory::Pool;

use crate::DiskBackend;

/// One drive at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriveStatus {
    /// Version of its format.
    pub version: u32,
    /// Made at random with the folder.
    pub drive_id: [u8; 16],
    /// Seconds from 1970 to the folder's making.
    pub created: u64,
    /// Bytes of each segment file.
    pub segment_bytes: u64,
    /// Chunks that are there.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The segments whose files are there, by their numbers.
    pub segments: Vec<SegmentStatus>,
}

/// One segment at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentStatus {
    /// Its number.
    pub number: u32,
    /// Which use of which segment this is, counted over the drive.
    pub generation: u64,
    /// Bytes from its start that were written in this use.
    pub used_bytes: u64,
    /// Chunks that are there.
    pub chunks: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Whether it is the one that is written to.
    pub active: bool,
}

/// What [`DiskBackend::compact`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compacted {
    /// Chunks that were moved.
    pub moved: u64,
    /// Chunks that were lost: they could not be read, or not be written again.
    pub lost: u64,
    /// Segment files that went.
    pub segments: u64,
    /// Their bytes.
    pub freed_bytes: u64,
}

impl DiskBackend {
    /// What each drive holds.
    pub fn inspect(&self) -> Vec<DriveStatus> {
        self.drives().iter().map(|drive| drive.inspect()).collect()
    }

    /// Moves chunks out of segments that are filled to less than `below` of their size (0 to 1),
    /// and gives the files of empty segments back to the file system.
    ///
    /// Meant for a tier that nobody else uses just then. `pool` must hold the largest chunk. A
    /// chunk is taken off its old place before it is written to the new one, so that a kill in
    /// between costs that chunk. `patience` bounds each step; `progress` hears of chunks that
    /// are done, of how many.
    ///
    /// # Errors
    /// When a file cannot be removed.
    pub async fn compact(
        &self,
        pool: &Pool,
        below: f64,
        patience: Duration,
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
            for segment in sparse(status) {
                for put in drive.chunks_of(segment.number) {
                    match self.move_chunk(put.key, put.len, pool, patience).await {
                        true => done.moved += 1,
                        false => done.lost += 1,
                    }
                    progress(done.moved + done.lost, total);
                }
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
        key: lmc_key::ChunkKey,
        len: u64,
        pool: &Pool,
        patience: Duration,
    ) -> bool {
        let deadline = Instant::now() + patience;
        let Some(slot) = pool.reserve(len) else {
            return false;
        };
        let loaded = self.load(vec![LoadItem::new(key, slot)], deadline).await;
        let Some(slot) = loaded.into_iter().next().and_then(Loaded::hit) else {
            return false;
        };
        let removed = self.remove(&[key], deadline).await;
        if !matches!(removed[..], [Ok(true)]) {
            return false;
        }
        let item = StoreItem::new(key, slot.seal());
        let stored = self.store(vec![item], deadline).await;
        matches!(stored[..], [Ok(_)])
    }
}
