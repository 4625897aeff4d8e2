//! The space thread of a drive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::space::SegmentSpace;
use super::store::ChunkWriter;
use super::watch::FileWatch;

/// The thread that makes and gives back segments, and looks at the drive's files from time to time: a
/// file system may be slow at that, and no store waits for it beyond its deadline.
#[derive(Debug)]
pub(super) struct SpaceThread {
    pub(super) space: Arc<SegmentSpace>,
    pub(super) writer: Arc<ChunkWriter>,
    pub(super) watch: Arc<FileWatch>,
    /// Time between two looks at the files.
    pub(super) probe_every: Duration,
}

impl SpaceThread {
    /// Runs the thread until the drive stops.
    pub(super) fn run(self) {
        let mut next_look = Instant::now();
        while let Some(is_space_wanted) = self.space.wait_for_work(next_look) {
            if Instant::now() >= next_look {
                // What it finds is in the drive's condition.
                let _ = self.watch.check_files();
                next_look = Instant::now() + self.probe_every;
            }
            if is_space_wanted {
                self.space.shrink();
                self.space.grow();
                self.writer.write_parked();
            }
        }
        // Their slots are free; the drive answers for them.
        let parked = self.writer.take_parked();
        drop(parked);
    }
}
