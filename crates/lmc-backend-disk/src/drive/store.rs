//! Finding room for chunks, and writing them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_backend::{StoreError, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::Mutex;
use tracing::warn;

use super::{Change, Ready, SegmentFile, Shared, StoreWaiter, Writing, again};
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, RECORD_LEN, blocks};
use crate::index::{Extent, Room};
use crate::log::segment_name;
use crate::volume::{AlignedBuf, BLOCK, Buf, Done, Kind, Op};

/// Why there is no room for a chunk.
#[derive(Clone, Copy)]
enum NoRoom {
    Full,
    TooLarge { max: u64 },
}

impl NoRoom {
    fn error(self, len: u64) -> StoreError {
        match self {
            Self::Full => StoreError::Full { needed: len },
            Self::TooLarge { max } => StoreError::TooLarge { max, found: len },
        }
    }
}

impl Shared {
    pub(super) fn store(self: &Arc<Self>, item: StoreItem, sum: u64, waiter: StoreWaiter) {
        let len = item.slot.len();
        let refusal = {
            let mut state = self.state.lock();
            let max = state.index.max_len();
            if state.closed {
                Err(StoreError::Closed)
            } else if state.index.find(&item.key).is_some() {
                Ok(Stored::Present)
            } else if len > max {
                Err(StoreError::TooLarge { max, found: len })
            } else if let Some(writing) = state.writing.get_mut(&item.key) {
                match writing.doomed {
                    true => writing.again.push((item, sum, waiter)),
                    false => writing.others.push(waiter),
                }
                return;
            } else if self.writing_bytes.load(Ordering::Relaxed) >= self.settings.max_writing
                || !self.condition.is_writable()
            {
                count(&self.counters.declined_busy, 1);
                Ok(Stored::Declined)
            } else {
                let writing = Writing {
                    first: Some(waiter),
                    ..Writing::default()
                };
                state.writing.insert(item.key, writing);
                self.writing_bytes.fetch_add(len, Ordering::Relaxed);
                drop(state);
                match self.take_room(len) {
                    Ok((extent, file)) => self.write(item, sum, extent, file),
                    Err(no_room) => self.store_ended(&item.key, len, |_| Err(no_room.error(len))),
                }
                return;
            }
        };
        waiter.0.answer(waiter.1, refusal);
    }

    /// Finds room for a chunk, and makes a file for it where that is allowed.
    fn take_room(&self, len: u64) -> Result<(Extent, SegmentFile), NoRoom> {
        let _one_at_a_time = self.room.lock();
        let mut may_grow = true;
        loop {
            let mut state = self.state.lock();
            may_grow &= state.segments_made < self.max_segments();
            let room = state.index.take_room(len, may_grow);
            let extent = match room {
                Room::Extent(extent) => extent,
                Room::Begun { extent, begin, .. } => {
                    state.queue.changes.push(Change::Other(begin, None));
                    extent
                }
                Room::Busy => return Err(NoRoom::Full),
                Room::TooLarge { max } => return Err(NoRoom::TooLarge { max }),
                Room::MayGrow => {
                    let segment = state.index.next_segment();
                    drop(state);
                    may_grow = match self.make_segment(segment) {
                        Ok(grown) => grown,
                        Err(error) => {
                            warn!("making {}: {error}", segment_name(segment));
                            false
                        }
                    };
                    continue;
                }
            };
            let segment = extent.place.segment;
            let Some(file) = state.files[segment as usize] else {
                return Err(NoRoom::Full);
            };
            state.index.enter(segment, false);
            return Ok((extent, file));
        }
    }

    /// Segments for which there is room within the capacity. Beside each of them there must be
    /// room for its chunks in two checkpoints (while one is made, the other is there): chunks
    /// take two blocks or more, so that is at most a 32nd. And for two logs.
    pub(super) fn max_segments(&self) -> u64 {
        let segment = self.header.segment_bytes;
        let fixed = 2 * self.settings.log_bytes + 8 * BLOCK;
        let each = segment + 2 * RECORD_LEN as u64 * (blocks(segment) / 2 + 1);
        self.settings.capacity.saturating_sub(fixed) / each
    }

    /// Makes another segment's file. False when the file system has no room to spare for it.
    fn make_segment(&self, segment: u32) -> io::Result<bool> {
        let len = self.header.segment_bytes;
        if self.volume.free()? < len.saturating_add(self.settings.keep_free) {
            return Ok(false);
        }
        let name = segment_name(segment);
        let file = match self.volume.open(&name, Some(len)) {
            Ok(file) => file,
            Err(error) => {
                // Half of a file would be counted as a whole one.
                let _ = self.volume.remove(&name);
                if error.kind() == io::ErrorKind::StorageFull {
                    return Ok(false);
                }
                return Err(error);
            }
        };
        self.volume.sync_names()?;
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

    /// Writes a chunk's header and bytes.
    fn write(self: &Arc<Self>, item: StoreItem, sum: u64, extent: Extent, file: SegmentFile) {
        let StoreItem {
            key, parent, slot, ..
        } = item;
        let put = PutRecord {
            key,
            place: extent.place,
            len: slot.len(),
            payload_sum: sum,
        };
        let mut header = AlignedBuf::new(BLOCK);
        ChunkHeader {
            drive_id: self.header.drive_id,
            key,
            parent: parent.map(|parent| parent.hash),
            place: put.place,
            len: put.len,
            payload_sum: sum,
        }
        .encode(&mut header);
        let at = u64::from(put.place.block) * BLOCK;
        let len = blocks(put.len) * BLOCK;
        let direct = slot.padded_len() >= len && slot.offset().is_multiple_of(BLOCK);
        let payload = match direct {
            true => Buf::From(slot),
            false => {
                let mut bytes = AlignedBuf::new(len);
                bytes[..put.len as usize].copy_from_slice(slot.bytes());
                Buf::Own(bytes)
            }
        };
        let left = Arc::new(Mutex::new((2u8, None::<io::Error>)));
        let op = |offset, len, buf| {
            let (left, shared) = (Arc::clone(&left), Arc::clone(self));
            Op {
                kind: Kind::Write,
                file: file.id,
                offset,
                len,
                buf: Some(buf),
                done: Box::new(move |done: Done| {
                    drop(done.buf);
                    let mut left = left.lock();
                    left.0 -= 1;
                    left.1 = left.1.take().or(done.result.err());
                    if left.0 == 0 {
                        shared.write_ended(Ready { put, file }, left.1.take());
                    }
                }),
            }
        };
        self.volume.submit(vec![
            op(at, BLOCK, Buf::Own(header)),
            op(at + BLOCK, len, payload),
        ]);
    }

    fn write_ended(self: &Arc<Self>, ready: Ready, error: Option<io::Error>) {
        let put = ready.put;
        match error {
            None => {
                self.state.lock().queue.changes.push(Change::Put(ready));
                self.work.notify_one();
            }
            Some(error) => {
                self.write_failed(&put, &error);
                self.store_ended(&put.key, put.len, |_| Err(StoreError::Io(again(&error))));
            }
        }
    }

    /// A chunk could not be written or made durable: its place is given up.
    pub(super) fn write_failed(&self, put: &PutRecord, error: &io::Error) {
        count(&self.counters.write_errors, 1);
        {
            let mut state = self.state.lock();
            state.index.leave(put.place.segment);
            state.index.close_active(put.place.segment);
        }
        self.condition
            .write_failed(put.place, &format!("writing: {error}"));
    }

    /// Answers all who wait for a chunk. The argument is false for the first of them.
    pub(super) fn store_ended(
        self: &Arc<Self>,
        key: &ChunkKey,
        len: u64,
        answer: impl Fn(bool) -> Result<Stored, StoreError>,
    ) {
        self.writing_bytes.fetch_sub(len, Ordering::Relaxed);
        let ended = self.state.lock().writing.remove(key);
        // The log's thread may wait for the last of them to stop.
        self.work.notify_one();
        let Some(Writing {
            first,
            others,
            again,
            ..
        }) = ended
        else {
            return;
        };
        if let Some((batch, place)) = first {
            batch.answer(place, answer(false));
        }
        for (batch, place) in others {
            batch.answer(place, answer(true));
        }
        for (item, sum, waiter) in again {
            self.store(item, sum, waiter);
        }
    }
}
