//! The space thread of a drive.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::space::SegmentSpace;
use super::store::ChunkWriter;
use super::watch::FileWatch;

/// The thread that makes and removes segments, and checks the drive's files from time to time. A file system
/// may be slow at that, so no store waits for this thread beyond its deadline.
#[derive(Debug)]
pub(super) struct SpaceThread {
    pub(super) space: Arc<SegmentSpace>,
    pub(super) writer: Arc<ChunkWriter>,
    pub(super) watch: Arc<FileWatch>,
    /// Interval at which the files are checked.
    pub(super) probe_every: Duration,
}

impl SpaceThread {
    /// Runs the thread until the drive stops.
    pub(super) fn run(self) {
        let mut next_look = Instant::now();
        while let Some(is_space_wanted) = self.space.wait_for_work(next_look) {
            if Instant::now() >= next_look {
                // The result is in the drive's condition.
                let _ = self.watch.check_files();
                next_look = Instant::now() + self.probe_every;
            }
            if is_space_wanted {
                self.space.shrink();
                self.space.grow();
                self.writer.write_parked();
            }
        }
        // Their slots are released; the drive answers these stores.
        let parked = self.writer.take_parked();
        drop(parked);
    }
}
