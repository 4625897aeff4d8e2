//! Storing chunks: who waits for what, and writing them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_backend::{BackendError, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::{LogChange, Ready, SegmentFile, Shared, StoreWaiter, Writing, again};
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, blocks};
use crate::index::Extent;
use crate::volume::{AlignedBuf, BLOCK, Buf, Done, Kind, Op};

/// The two writes of a chunk.
struct Writes {
    /// The chunk, with its sum once the second has begun.
    ready: Ready,
    left: u8,
    error: Option<io::Error>,
    /// True if the pool was lost before the sum was computed, so that it may be of other bytes.
    lost: bool,
}

impl Shared {
    pub(super) fn store(self: &Arc<Self>, item: StoreItem, waiter: StoreWaiter) {
        let len = item.slot.len();
        let refusal = {
            let mut state = self.state.lock();
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
                return self.write_or_park(item);
            }
        };
        waiter.0.answer(waiter.1, refusal);
    }

    /// Writes a chunk's bytes and its header. The sum of the bytes, where it is not known, is made
    /// while those are on their way.
    pub(super) fn write(
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
            let (writes, shared) = (Arc::clone(&writes), Arc::clone(self));
            self.volume.submit(vec![Op {
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
                        shared.write_ended(writes.ready, writes.error.take(), lost);
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
            drive_id: self.header.drive_id,
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
                self.state.lock().index.leave(put.location.segment);
                let lost = || BackendError::Io(io::Error::other("the slot's memory was lost"));
                self.store_ended(&put.key, put.len, |_| Err(lost()));
            }
            None => {
                self.state.lock().queue.changes.push(LogChange::Put(ready));
                self.work.notify_one();
            }
            Some(error) => {
                self.write_failed(&put, &error);
                self.store_ended(&put.key, put.len, |_| Err(BackendError::Io(again(&error))));
            }
        }
    }

    /// Handles a chunk that could not be written or made durable: its location is abandoned.
    pub(super) fn write_failed(&self, put: &PutRecord, error: &io::Error) {
        count(&self.counters.write_errors, 1);
        {
            let mut state = self.state.lock();
            state.index.leave(put.location.segment);
            state.index.close_active(put.location.segment);
        }
        self.condition
            .write_failed(put, &format!("writing: {error}"));
    }

    /// Answers all who wait for a chunk. The argument is false for the first of them.
    pub(super) fn store_ended(
        self: &Arc<Self>,
        key: &ChunkKey,
        len: u64,
        answer: impl Fn(bool) -> Result<Stored, BackendError>,
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
