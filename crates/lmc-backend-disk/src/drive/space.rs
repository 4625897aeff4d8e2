//! Space for chunks: segments are made one ahead of need, and freed if there are too many.

use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::{BackendError, Stored};
use parking_lot::{Condvar, Mutex};
use tracing::{info, warn};

use super::state::{DriveCore, DriveState, SegmentFile};
use super::watch::FileWatch;
use crate::counters::count;
use crate::files::is_full;
use crate::format::{RECORD_LEN, blocks};
use crate::index::{Allocation, Extent};
use crate::log::segment_name;
use crate::volume::BLOCK;

/// Outcome of an allocation for a chunk.
pub(super) enum Found {
    Extent(Extent, SegmentFile),
    /// A segment must be made first.
    Later,
    /// There is no space. Holds a function that returns the answer for a store of this many bytes.
    No(fn(u64) -> Result<Stored, BackendError>),
}

/// The segments of a drive and their files.
#[derive(Debug)]
pub(super) struct SegmentSpace {
    core: Arc<DriveCore>,
    watch: Arc<FileWatch>,
    /// Wakes the space thread, which waits with the lock of the state.
    wake: Condvar,
    /// Locked while segment files are made or removed.
    files: Mutex<()>,
}

impl SegmentSpace {
    pub(super) fn new(core: Arc<DriveCore>, watch: Arc<FileWatch>) -> Self {
        Self {
            core,
            watch,
            wake: Condvar::new(),
            files: Mutex::new(()),
        }
    }

    /// Returns the most segments within the capacity. Each segment also needs space for its chunks' records
    /// in two checkpoints (during a checkpoint, the previous one exists), at most a 32nd of the segment. Two
    /// logs need space too.
    pub(super) fn max_segments(&self) -> u64 {
        let fixed = 2 * self.core.settings.log_bytes + 8 * BLOCK;
        let each = self.core.header.segment_bytes + 2 * self.max_record_bytes();
        self.core.settings.capacity.saturating_sub(fixed) / each
    }

    /// Returns the most bytes of a segment's records in a checkpoint: a chunk takes at least two blocks.
    fn max_record_bytes(&self) -> u64 {
        RECORD_LEN as u64 * (blocks(self.core.header.segment_bytes) / 2 + 1)
    }

    /// Allocates space for a chunk of `len` bytes, and requests a new segment if there is no space.
    pub(super) fn allocate(&self, state: &mut DriveState, len: u64) -> Found {
        let full: fn(u64) -> _ = |needed| Err(BackendError::Full { needed });
        let may_grow = self.may_grow(state);
        let victims = self.core.condition.may_give_up();
        let allocation = state.index.allocate(len, may_grow, victims.as_deref());
        let extent = match allocation {
            Allocation::Extent(extent) => extent,
            Allocation::Begun { extent, begin, .. } => {
                state.queue.push(begin, None);
                if state.segments_made > self.max_segments() {
                    self.request_space(state);
                }
                extent
            }
            Allocation::MayGrow => {
                self.request_space(state);
                return Found::Later;
            }
            Allocation::Busy => return Found::No(full),
            // Refused earlier.
            Allocation::TooLarge { .. } => return Found::No(full),
        };
        let segment = extent.location.segment;
        let Some(file) = state.files[segment as usize] else {
            return Found::No(full);
        };
        state.index.enter(segment, false);
        if may_grow && state.index.runs_low() {
            self.request_space(state);
        }
        Found::Extent(extent, file)
    }

    /// Allocates space for a chunk without evicting another one; waits for a new segment if necessary.
    pub(super) fn allocate_spare(&self, len: u64) -> Option<(Extent, SegmentFile)> {
        if !self.core.state.lock().index.has_spare_space(len) {
            self.grow();
        }
        let mut state = self.core.state.lock();
        if !state.index.has_spare_space(len) {
            return None;
        }
        match self.allocate(&mut state, len) {
            Found::Extent(extent, file) => Some((extent, file)),
            Found::Later | Found::No(_) => None,
        }
    }

    fn may_grow(&self, state: &DriveState) -> bool {
        let not_before = state.growth.not_before;
        state.segments_made < self.max_segments()
            && not_before.is_none_or(|not_before| Instant::now() >= not_before)
    }

    /// Lets the space thread retry to make a segment after a failure, if the retry is due.
    pub(super) fn probe_growth(&self) {
        if self.core.condition.cannot_grow() {
            let mut state = self.core.state.lock();
            if self.may_grow(&state) {
                self.request_space(&mut state);
            }
        }
    }

    fn request_space(&self, state: &mut DriveState) {
        state.growth.wanted = true;
        self.wake.notify_one();
    }

    /// Lets the space thread evict what exceeds the capacity, which may be smaller than before.
    pub(super) fn hold_size(&self) {
        let mut state = self.core.state.lock();
        let (made, most) = (state.segments_made, self.max_segments());
        if made > most {
            warn!(
                segments = made,
                allowed = most,
                segment_bytes = self.core.header.segment_bytes,
                "drive holds more than its size; its oldest segments are evicted"
            );
            self.request_space(&mut state);
        }
    }

    /// Lets the space thread end.
    pub(super) fn end_space_thread(&self) {
        self.core.state.lock().growth.over = true;
        self.wake.notify_one();
    }

    /// Waits for work, or for the next check of the files. Returns true if a segment may have to be made or
    /// freed, and `None` when the drive stops.
    pub(super) fn wait_for_work(&self, next_look: Instant) -> Option<bool> {
        let mut state = self.core.state.lock();
        loop {
            if state.growth.over {
                return None;
            }
            if mem::take(&mut state.growth.wanted) {
                return Some(true);
            }
            let waited = self.wake.wait_until(&mut state, next_look);
            if waited.timed_out() && !state.growth.over {
                // A segment that was in use a moment ago may be idle now.
                return Some(state.segments_made > self.max_segments());
            }
        }
    }

    /// Makes a segment, if no segment is free and the capacity allows another one.
    pub(super) fn grow(&self) {
        let _one_at_a_time = self.files.lock();
        let segment = {
            let state = self.core.state.lock();
            // After a failure it is retried, needed or not.
            let needed = !state.index.has_free() || self.core.condition.cannot_grow();
            if !needed || !self.may_grow(&state) {
                return;
            }
            state.index.next_segment()
        };
        if self.watch.check_files().is_err() {
            return;
        }
        let made = self.make_segment(segment);
        if made.is_err() {
            count(&self.core.counters.write_errors, 1);
        }
        self.core.condition.tried_to_grow(made.as_ref().err());
        let tried = Instant::now();
        let again = (!matches!(made, Ok(true))).then(|| tried + self.core.settings.probe_every);
        self.core.state.lock().growth.not_before = again;
    }

    /// Makes a segment's file. Returns false if the file system has too little free space.
    fn make_segment(&self, segment: u32) -> io::Result<bool> {
        let len = self.core.header.segment_bytes;
        let segments = self.core.state.lock().segments_made + 1;
        // The next log and its checkpoint are made while the present ones exist.
        let renewal = self.core.settings.log_bytes + BLOCK + segments * self.max_record_bytes();
        let needed = len.saturating_add(self.core.settings.keep_free) + renewal;
        if self.core.volume.free()? < needed {
            return Ok(false);
        }
        let name = segment_name(segment);
        let file = match self.core.volume.open(&name, Some(len)) {
            Ok(file) => file,
            Err(error) => {
                // Half of a file would count as a whole segment.
                let _ = self.core.volume.remove(&name);
                if is_full(&error) {
                    return Ok(false);
                }
                return Err(error);
            }
        };
        if let Err(error) = self.core.volume.sync_names() {
            self.core.volume.close(file);
            let _ = self.core.volume.remove(&name);
            return Err(error);
        }
        let mut state = self.core.state.lock();
        let at = segment as usize;
        if state.files.len() <= at {
            state.files.resize(at + 1, None);
        }
        state.files[at] = Some(SegmentFile::new(file));
        state.segments_made += 1;
        state.index.made(segment);
        Ok(true)
    }

    /// Removes segments while there are more than the capacity allows, empty ones first.
    pub(super) fn shrink(&self) {
        let mut evicted = 0u64;
        loop {
            let segment = {
                let mut state = self.core.state.lock();
                if state.segments_made <= self.max_segments() {
                    if evicted > 0 {
                        info!(evicted, "drive is within its size again");
                    }
                    return;
                }
                if self.core.condition.changed_files().is_some() {
                    return;
                }
                let Some((segment, begin)) = state.index.give_up() else {
                    return;
                };
                state.queue.push(begin, None);
                segment
            };
            self.core.work.notify_one();
            if let Err(error) = self.give_back(segment) {
                warn!("removing {}: {error}", segment_name(segment));
                return;
            }
            evicted += 1;
        }
    }

    /// Removes the file of an empty segment. Returns false if the segment is not empty.
    pub(super) fn give_back(&self, segment: u32) -> io::Result<bool> {
        let _one_at_a_time = self.files.lock();
        self.watch.check_files()?;
        let file = {
            let mut state = self.core.state.lock();
            if !state.index.unmake(segment) {
                return Ok(false);
            }
            state.segments_made -= 1;
            state.files[segment as usize].take()
        };
        if let Some(file) = file {
            self.core.volume.close(file.id);
        }
        self.core.volume.remove(&segment_name(segment))?;
        self.core.volume.sync_names()?;
        Ok(true)
    }
}
