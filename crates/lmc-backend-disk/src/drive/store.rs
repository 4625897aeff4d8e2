//! Storing chunks: who waits for what, and writing them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lmc_backend::{StoreError, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::{Change, Ready, SegmentFile, Shared, StoreWaiter, Writing, again};
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, blocks};
use crate::index::Extent;
use crate::volume::{AlignedBuf, BLOCK, Buf, Done, Kind, Op};

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
                return self.place(item, sum);
            }
        };
        waiter.0.answer(waiter.1, refusal);
    }

    /// Writes a chunk's header and bytes.
    pub(super) fn write(
        self: &Arc<Self>,
        item: StoreItem,
        sum: u64,
        extent: Extent,
        file: SegmentFile,
    ) {
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
            .write_failed(put, &format!("writing: {error}"));
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
