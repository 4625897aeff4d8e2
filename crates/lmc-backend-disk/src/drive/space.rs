//! Free space for chunks. A thread of the drive makes segments one ahead of need, and gives them
//! back where there are too many: a file system may be slow at that, and no store waits for it
//! beyond its deadline.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::{BackendError, StoreItem, Stored};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tracing::{info, warn};

use super::{SegmentFile, Shared, State, is_full};
use crate::counters::count;
use crate::format::{RECORD_LEN, blocks};
use crate::index::{Allocation, Extent};
use crate::log::segment_name;
use crate::volume::BLOCK;

/// State that the space thread and the stores share.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// True if a segment may have to be made or freed.
    wanted: bool,
    /// True once no more space will be asked for.
    over: bool,
    /// Chunks that wait for a segment.
    parked: VecDeque<StoreItem>,
    /// No segment could be made. It is tried again from then on.
    not_before: Option<Instant>,
}

/// Wakes the thread.
#[derive(Debug, Default)]
pub(super) struct SpaceWork {
    wake: Condvar,
    /// Held while files of segments are made or removed.
    files: Mutex<()>,
}

/// Result of an allocation for a chunk.
enum Found {
    Extent(Extent, SegmentFile),
    /// A segment must be made first.
    Later,
    /// No space is left; with the answer to a store of this number of bytes.
    No(fn(u64) -> Result<Stored, BackendError>),
}

impl Shared {
    /// Returns the number of segments within the capacity. Each needs space for its chunks in two
    /// checkpoints as well (while one is made, the other exists), at most a 32nd; and two logs need
    /// space.
    pub(super) fn max_segments(&self) -> u64 {
        let fixed = 2 * self.settings.log_bytes + 8 * BLOCK;
        let each = self.header.segment_bytes + 2 * self.max_record_bytes();
        self.settings.capacity.saturating_sub(fixed) / each
    }

    /// Bytes of a segment's records in a checkpoint, at most: chunks take two blocks or more.
    fn max_record_bytes(&self) -> u64 {
        RECORD_LEN as u64 * (blocks(self.header.segment_bytes) / 2 + 1)
    }

    /// Starts to write a chunk that is in `writing`, now or when there is a segment for it. They
    /// begin in the order in which they came.
    pub(super) fn write_or_park(self: &Arc<Self>, item: StoreItem) {
        let mut state = self.state.lock();
        if state.growth.parked.is_empty() {
            self.write_first(state, item);
        } else {
            state.growth.parked.push_back(item);
        }
    }

    /// Starts to write the chunks that waited, up to the first for which there is no segment.
    fn write_parked(self: &Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            let Some(item) = state.growth.parked.pop_front() else {
                return;
            };
            if !self.write_first(state, item) {
                return;
            }
        }
    }

    /// Starts to write a chunk before those that wait. False when it waits now, in front of them.
    fn write_first(self: &Arc<Self>, mut state: MutexGuard<'_, State>, item: StoreItem) -> bool {
        let (key, len) = (item.key, item.slot.len());
        let doomed = state.writing.get(&key).is_some_and(|chunk| chunk.doomed);
        let found = if state.growth.over {
            Found::No(|_| Err(BackendError::Closed))
        } else if doomed || self.condition.changed_files().is_some() {
            Found::No(|_| Ok(Stored::Declined))
        } else {
            self.allocate(&mut state, len)
        };
        match found {
            Found::Extent(extent, file) => {
                drop(state);
                self.write(item, None, extent, file);
            }
            Found::Later => {
                state.growth.parked.push_front(item);
                return false;
            }
            Found::No(answer) => {
                drop(state);
                self.store_ended(&key, len, |_| answer(len));
            }
        }
        true
    }

    fn allocate(&self, state: &mut State, len: u64) -> Found {
        let full: fn(u64) -> _ = |needed| Err(BackendError::Full { needed });
        let may_grow = self.may_grow(state);
        let victims = self.condition.may_give_up();
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
            // Refused before it came here.
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

    /// Allocates space for a chunk without evicting another, and waits for a new segment if it must.
    pub(super) fn allocate_spare(&self, len: u64) -> Option<(Extent, SegmentFile)> {
        if !self.state.lock().index.has_spare_space(len) {
            self.grow();
        }
        let mut state = self.state.lock();
        if !state.index.has_spare_space(len) {
            return None;
        }
        match self.allocate(&mut state, len) {
            Found::Extent(extent, file) => Some((extent, file)),
            Found::Later | Found::No(_) => None,
        }
    }

    fn may_grow(&self, state: &State) -> bool {
        let not_before = state.growth.not_before;
        state.segments_made < self.max_segments()
            && not_before.is_none_or(|not_before| Instant::now() >= not_before)
    }

    /// Lets the thread try again, when it is time for that, to make a segment after it has failed.
    pub(super) fn probe_growth(&self) {
        if self.condition.cannot_grow() {
            let mut state = self.state.lock();
            if self.may_grow(&state) {
                self.request_space(&mut state);
            }
        }
    }

    fn request_space(&self, state: &mut State) {
        state.growth.wanted = true;
        self.space.wake.notify_one();
    }

    /// Lets the thread evict what exceeds the capacity, which may be smaller than before.
    pub(super) fn hold_size(&self) {
        let mut state = self.state.lock();
        let (made, most) = (state.segments_made, self.max_segments());
        if made > most {
            warn!(
                segments = made,
                allowed = most,
                segment_bytes = self.header.segment_bytes,
                "drive holds more than its size; its oldest segments are evicted"
            );
            self.request_space(&mut state);
        }
    }

    /// Lets the thread end.
    pub(super) fn end_space_thread(&self) {
        self.state.lock().growth.over = true;
        self.space.wake.notify_one();
    }

    /// The thread: makes and gives back segments, and looks at the drive's files from time to time,
    /// until the drive stops.
    pub(super) fn run_space_thread(self: Arc<Self>) {
        let mut next_look = Instant::now();
        while let Some(is_space_wanted) = self.wait_for_work(next_look) {
            if Instant::now() >= next_look {
                // What it finds is in the drive's condition.
                let _ = self.check_files();
                next_look = Instant::now() + self.settings.probe_every;
            }
            if is_space_wanted {
                self.shrink();
                self.grow();
                self.write_parked();
            }
        }
        // Their slots are free; the drive answers for them.
        let parked = self.take_parked();
        drop(parked);
    }

    /// Takes the chunks that wait for a segment, which no thread will write any more.
    pub(super) fn take_parked(&self) -> VecDeque<StoreItem> {
        mem::take(&mut self.state.lock().growth.parked)
    }

    /// Waits for something to do, or for the next look. Returns true if a segment may have to be made
    /// or freed, and `None` when all is over.
    fn wait_for_work(&self, next_look: Instant) -> Option<bool> {
        let mut state = self.state.lock();
        loop {
            if state.growth.over {
                return None;
            }
            if mem::take(&mut state.growth.wanted) {
                return Some(true);
            }
            let waited = self.space.wake.wait_until(&mut state, next_look);
            if waited.timed_out() && !state.growth.over {
                // A segment that was read or written a moment ago may be idle now.
                return Some(state.segments_made > self.max_segments());
            }
        }
    }

    /// Makes a segment, if there is none to begin and there may be more.
    fn grow(&self) {
        let _one_at_a_time = self.space.files.lock();
        let segment = {
            let state = self.state.lock();
            // One that failed is tried again, needed or not.
            let needed = !state.index.has_free() || self.condition.cannot_grow();
            if !needed || !self.may_grow(&state) {
                return;
            }
            state.index.next_segment()
        };
        if self.check_files().is_err() {
            return;
        }
        let made = self.make_segment(segment);
        if made.is_err() {
            count(&self.counters.write_errors, 1);
        }
        self.condition.tried_to_grow(made.as_ref().err());
        let tried = Instant::now();
        let again = (!matches!(made, Ok(true))).then(|| tried + self.settings.probe_every);
        self.state.lock().growth.not_before = again;
    }

    /// Makes a segment's file. Returns false when the file system has no space to spare for it.
    fn make_segment(&self, segment: u32) -> io::Result<bool> {
        let len = self.header.segment_bytes;
        let segments = self.state.lock().segments_made + 1;
        // The next log and its checkpoint are made while the present ones are there.
        let renewal = self.settings.log_bytes + BLOCK + segments * self.max_record_bytes();
        let needed = len.saturating_add(self.settings.keep_free) + renewal;
        if self.volume.free()? < needed {
            return Ok(false);
        }
        let name = segment_name(segment);
        let file = match self.volume.open(&name, Some(len)) {
            Ok(file) => file,
            Err(error) => {
                // Half of a file would be counted as a whole one.
                let _ = self.volume.remove(&name);
                if is_full(&error) {
                    return Ok(false);
                }
                return Err(error);
            }
        };
        if let Err(error) = self.volume.sync_names() {
            self.volume.close(file);
            let _ = self.volume.remove(&name);
            return Err(error);
        }
        let mut state = self.state.lock();
        let at = segment as usize;
        if state.files.len() <= at {
            state.files.resize(at + 1, None);
        }
        state.files[at] = Some(SegmentFile::new(file));
        state.segments_made += 1;
        state.index.made(segment);
        Ok(true)
    }

    /// Gives segments back while there are more than the capacity allows, empty ones first.
    fn shrink(&self) {
        let mut evicted = 0u64;
        loop {
            let segment = {
                let mut state = self.state.lock();
                if state.segments_made <= self.max_segments() {
                    if evicted > 0 {
                        info!(evicted, "drive is within its size again");
                    }
                    return;
                }
                if self.condition.changed_files().is_some() {
                    return;
                }
                let Some((segment, begin)) = state.index.give_up() else {
                    return;
                };
                state.queue.push(begin, None);
                segment
            };
            self.work.notify_one();
            if let Err(error) = self.give_back(segment) {
                warn!("removing {}: {error}", segment_name(segment));
                return;
            }
            evicted += 1;
        }
    }

    /// Gives the file of an empty segment back to the file system. False when it is not empty.
    pub(super) fn give_back(&self, segment: u32) -> io::Result<bool> {
        let _one_at_a_time = self.space.files.lock();
        self.check_files()?;
        let file = {
            let mut state = self.state.lock();
            if !state.index.unmake(segment) {
                return Ok(false);
            }
            state.segments_made -= 1;
            state.files[segment as usize].take()
        };
        if let Some(file) = file {
            self.volume.close(file.id);
        }
        self.volume.remove(&segment_name(segment))?;
        self.volume.sync_names()?;
        Ok(true)
    }
}
