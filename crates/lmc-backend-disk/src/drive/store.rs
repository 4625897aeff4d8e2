//! Stores of chunks: their waiters, and their writes.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_backend::{BackendError, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::{Mutex, MutexGuard};

use super::space::{Found, SegmentSpace};
use super::state::{DriveCore, DriveState, LogChange, Ready, SegmentFile, StoreWaiter, Writing};
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, blocks};
use crate::index::Extent;
use crate::volume::{AlignedBuf, BLOCK, Buf, Done, Kind, VolumeOp};

/// The two writes of a chunk.
struct Writes {
    /// The chunk; its checksum is set once the second write has begun.
    ready: Ready,
    left: u8,
    error: Option<io::Error>,
    /// True if the pool was lost before the sum was computed, so that the sum may be of other bytes.
    lost: bool,
}

/// Stores of chunks, until the log's thread takes over.
#[derive(Debug)]
pub(super) struct ChunkWriter {
    core: Arc<DriveCore>,
    space: Arc<SegmentSpace>,
    /// Bytes of chunks that are waiting or being written to the drive.
    writing_bytes: AtomicU64,
}

impl ChunkWriter {
    pub(super) fn new(core: Arc<DriveCore>, space: Arc<SegmentSpace>) -> Self {
        Self {
            core,
            space,
            writing_bytes: AtomicU64::new(0),
        }
    }

    /// Starts to store a chunk; `waiter` gets the answer.
    pub(super) fn store(self: &Arc<Self>, item: StoreItem, waiter: StoreWaiter) {
        let len = item.slot.len();
        let refusal = {
            let mut state = self.core.state.lock();
            let max = state.index.max_len();
            if state.closed {
                Err(BackendError::Closed)
            } else if state.index.find(&item.key).is_some() {
                Ok(Stored::Present)
            } else if len > max {
                Err(BackendError::TooLarge { max, found: len })
            } else if let Some(writing) = state.writing.get_mut(&item.key) {
                match writing.doomed {
                    true => writing.again.push((item, waiter)),
                    false => writing.others.push(waiter),
                }
                return;
            } else if self.writing_bytes.load(Ordering::Relaxed) >= self.core.settings.max_writing
                || !self.core.condition.is_writable()
            {
                count(&self.core.counters.declined_busy, 1);
                Ok(Stored::Declined)
            } else {
                let writing = Writing {
                    first: Some(waiter),
                    ..Writing::default()
                };
                state.writing.insert(item.key, writing);
                self.writing_bytes.fetch_add(len, Ordering::Relaxed);
                drop(state);
                return self.write_or_park(item);
            }
        };
        waiter.0.answer(waiter.1, refusal);
    }

    /// Starts to write a stored chunk to another location; `waiter` gets the answer. `sum` is the checksum of
    /// its bytes. The chunk is found at the old location until the new one is durable.
    ///
    /// No other chunk is evicted for it: without free space the answer is [`BackendError::Full`]. The answer
    /// is [`Stored::Declined`] if the chunk is no longer present, or another store writes it.
    pub(super) fn relocate(self: &Arc<Self>, item: StoreItem, sum: u64, waiter: StoreWaiter) {
        let (key, len) = (item.key, item.slot.len());
        {
            let mut state = self.core.state.lock();
            if state.closed {
                return waiter.0.answer(waiter.1, Err(BackendError::Closed));
            }
            let there = state.index.find(&key).is_some();
            let written = state.writing.contains_key(&key);
            if !there || written || !self.core.condition.is_writable() {
                return waiter.0.answer(waiter.1, Ok(Stored::Declined));
            }
            let writing = Writing {
                first: Some(waiter),
                ..Writing::default()
            };
            state.writing.insert(key, writing);
        }
        self.writing_bytes.fetch_add(len, Ordering::Relaxed);
        match self.space.allocate_spare(len) {
            Some((extent, file)) => self.write(item, Some(sum), extent, file),
            None => self.store_ended(&key, len, |_| Err(BackendError::Full { needed: len })),
        }
    }

    /// Starts to write a chunk that is in `writing`, now or when there is a segment for it. Writes begin in
    /// the order of their stores.
    fn write_or_park(self: &Arc<Self>, item: StoreItem) {
        let mut state = self.core.state.lock();
        if state.growth.parked.is_empty() {
            self.write_first(state, item);
        } else {
            state.growth.parked.push_back(item);
        }
    }

    /// Starts to write the waiting chunks, up to the first for which there is no segment.
    pub(super) fn write_parked(self: &Arc<Self>) {
        loop {
            let mut state = self.core.state.lock();
            let Some(item) = state.growth.parked.pop_front() else {
                return;
            };
            if !self.write_first(state, item) {
                return;
            }
        }
    }

    /// Starts to write a chunk ahead of those that wait. Returns false if it now waits, at the front.
    fn write_first(
        self: &Arc<Self>,
        mut state: MutexGuard<'_, DriveState>,
        item: StoreItem,
    ) -> bool {
        let (key, len) = (item.key, item.slot.len());
        let doomed = state.writing.get(&key).is_some_and(|chunk| chunk.doomed);
        let found = if state.growth.over {
            Found::No(|_| Err(BackendError::Closed))
        } else if doomed || self.core.condition.changed_files().is_some() {
            Found::No(|_| Ok(Stored::Declined))
        } else {
            self.space.allocate(&mut state, len)
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

    /// Removes and returns the chunks that wait for a segment, because no thread will write them any more.
    pub(super) fn take_parked(&self) -> VecDeque<StoreItem> {
        mem::take(&mut self.core.state.lock().growth.parked)
    }

    /// Writes a chunk's bytes and its header. A checksum that is not known yet is computed while the bytes
    /// are being written.
    fn write(
        self: &Arc<Self>,
        item: StoreItem,
        sum: Option<u64>,
        extent: Extent,
        file: SegmentFile,
    ) {
        let StoreItem {
            key, parent, slot, ..
        } = item;
        let location = extent.location;
        let at = u64::from(location.block) * BLOCK;
        let len = blocks(slot.len()) * BLOCK;
        let direct = slot.padded_len() >= len && slot.offset().is_multiple_of(BLOCK);
        let payload = match direct {
            true => Buf::From(slot.clone()),
            false => {
                let mut bytes = AlignedBuf::new(len);
                bytes[..slot.len() as usize].copy_from_slice(slot.bytes());
                Buf::Own(bytes)
            }
        };
        let put = PutRecord {
            key,
            location,
            len: slot.len(),
            payload_sum: 0,
        };
        let writes = Arc::new(Mutex::new(Writes {
            ready: Ready { put, file },
            left: 2,
            error: None,
            lost: false,
        }));
        let write = |offset, len, buf| {
            let (writes, this) = (Arc::clone(&writes), Arc::clone(self));
            self.core.volume.submit(vec![VolumeOp {
                kind: Kind::Write,
                file: file.id,
                offset,
                len,
                buf: Some(buf),
                abandoned: None,
                done: Box::new(move |done: Done| {
                    drop(done.buf);
                    let mut writes = writes.lock();
                    writes.left -= 1;
                    writes.error = writes.error.take().or(done.result.err());
                    if writes.left == 0 {
                        let lost = writes.lost;
                        this.write_ended(writes.ready, writes.error.take(), lost);
                    }
                }),
            }]);
        };
        write(at + BLOCK, len, payload);
        let sum = sum.unwrap_or_else(|| slot.checksum());
        {
            let mut writes = writes.lock();
            writes.ready.put.payload_sum = sum;
            writes.lost = slot.arena().is_lost();
        }
        drop(slot);
        let mut header = AlignedBuf::new(BLOCK);
        ChunkHeader {
            drive_id: self.core.header.drive_id,
            key,
            parent: parent.map(|parent| parent.hash),
            location,
            len: put.len,
            payload_sum: sum,
        }
        .encode(&mut header);
        write(at, BLOCK, Buf::Own(header));
    }

    fn write_ended(self: &Arc<Self>, ready: Ready, error: Option<io::Error>, lost: bool) {
        let put = ready.put;
        match error {
            _ if lost => {
                self.core.state.lock().index.leave(put.location.segment);
                let error = BackendError::from(io::Error::other("the slot's memory was lost"));
                self.store_ended(&put.key, put.len, |_| Err(error.clone()));
            }
            None => {
                self.core
                    .state
                    .lock()
                    .queue
                    .changes
                    .push(LogChange::Put(ready));
                self.core.work.notify_one();
            }
            Some(error) => {
                self.write_failed(&put, &error);
                let error = BackendError::from(error);
                self.store_ended(&put.key, put.len, |_| Err(error.clone()));
            }
        }
    }

    /// Handles a chunk that could not be written or made durable: its location is abandoned.
    pub(super) fn write_failed(&self, put: &PutRecord, error: &io::Error) {
        count(&self.core.counters.write_errors, 1);
        {
            let mut state = self.core.state.lock();
            state.index.leave(put.location.segment);
            state.index.close_active(put.location.segment);
        }
        self.core
            .condition
            .write_failed(put, &format!("writing: {error}"));
    }

    /// Answers all callers that wait for a chunk. `answer` gets false for the first of them.
    pub(super) fn store_ended(
        self: &Arc<Self>,
        key: &ChunkKey,
        len: u64,
        answer: impl Fn(bool) -> Result<Stored, BackendError>,
    ) {
        self.writing_bytes.fetch_sub(len, Ordering::Relaxed);
        let ended = self.core.state.lock().writing.remove(key);
        // The log's thread may wait for the last store before it stops.
        self.core.work.notify_one();
        let Some(Writing {
            first,
            others,
            again,
            ..
        }) = ended
        else {
            return;
        };
        if let Some((batch, index)) = first {
            batch.answer(index, answer(false));
        }
        for (batch, index) in others {
            batch.answer(index, answer(true));
        }
        for (item, waiter) in again {
            self.store(item, waiter);
        }
    }
}
