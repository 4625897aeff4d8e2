//! Reading chunks back, and checking what was read.

use std::io;
use std::sync::Arc;

use lmc_backend::{FailedSlot, LoadError, LoadItem, Loaded};
use lmc_memory::ReservedSlot;
use parking_lot::Mutex;

use super::{Drive, Shared};
use crate::batch::Batch;
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, Record, blocks, payload_sum};
use crate::volume::{AlignedBuf, BLOCK, Buf, Kind, Op};

/// What came of reading a chunk, before anybody has looked at it.
#[derive(Debug)]
pub(crate) enum Read {
    /// Header and payload, and where they should be from.
    Raw {
        found: PutRecord,
        header: AlignedBuf,
        payload: Buf,
        slot: Option<ReservedSlot>,
    },
    Done(Loaded),
}

/// The two reads of a chunk.
struct Both {
    left: u8,
    header: Option<Buf>,
    payload: Option<Buf>,
    slot: Option<ReservedSlot>,
    error: Option<io::Error>,
}

impl Drive {
    /// Starts to read a chunk; what comes of it goes to `waiter`.
    pub(crate) fn load(&self, item: LoadItem, waiter: (Arc<Batch<Read>>, usize)) {
        let shared = &self.shared;
        let LoadItem { key, slot, .. } = item;
        let answer = |loaded| waiter.0.answer(waiter.1, Read::Done(loaded));
        let quiet = |error, slot| Loaded::Failed {
            error,
            slot: FailedSlot::Quiet(slot),
        };
        let (found, file) = {
            let mut state = shared.state.lock();
            if state.closed {
                return answer(quiet(LoadError::Closed, slot));
            }
            let Some(found) = state.index.find(&key) else {
                count(&shared.counters.missed, 1);
                return answer(Loaded::Miss(slot));
            };
            let (expected, found_len) = (found.len, slot.len());
            if expected != found_len {
                let error = LoadError::Length {
                    expected,
                    found: found_len,
                };
                return answer(quiet(error, slot));
            }
            let segment = found.place.segment;
            let Some(file) = state.files[segment as usize] else {
                return answer(Loaded::Miss(slot));
            };
            state.index.enter(segment, true);
            (found, file)
        };
        let at = u64::from(found.place.block) * BLOCK;
        let len = blocks(found.len) * BLOCK;
        // A slot that is not laid out for direct I/O is filled from memory that is.
        let direct = slot.padded_len() >= len && slot.offset().is_multiple_of(BLOCK);
        let (payload, slot) = match direct {
            true => (Buf::Into(slot), None),
            false => (Buf::Own(AlignedBuf::new(len)), Some(slot)),
        };
        let both = Arc::new(Mutex::new(Both {
            left: 2,
            header: None,
            payload: None,
            slot,
            error: None,
        }));
        let op = |offset, len, buf, is_header: bool| {
            let (both, shared, waiter) = (Arc::clone(&both), Arc::clone(shared), waiter.clone());
            Op {
                kind: Kind::Read,
                file: file.id,
                offset,
                len,
                buf: Some(buf),
                done: Box::new(move |done| {
                    let mut ends = both.lock();
                    match is_header {
                        true => ends.header = done.buf,
                        false => ends.payload = done.buf,
                    }
                    ends.error = ends.error.take().or(done.result.err());
                    ends.left -= 1;
                    if ends.left == 0 {
                        shared.read_ended(&found, &mut ends, &waiter);
                    }
                }),
            }
        };
        let header = Buf::Own(AlignedBuf::new(BLOCK));
        shared.volume.submit(vec![
            op(at, BLOCK, header, true),
            op(at + BLOCK, len, payload, false),
        ]);
    }

    /// Checks what was read. Takes as long as a look at every byte.
    pub(crate) fn verify(&self, read: Read) -> Loaded {
        let shared = &self.shared;
        let (found, header, payload, slot) = match read {
            Read::Done(loaded) => return loaded,
            Read::Raw {
                found,
                header,
                payload,
                slot,
            } => (found, header, payload, slot),
        };
        let right = ChunkHeader::decode(&header).is_ok_and(|header| {
            header.drive_id == shared.header.drive_id
                && header.key == found.key
                && header.place == found.place
                && (header.len, header.payload_sum) == (found.len, found.payload_sum)
        });
        let mut slot = match (payload, slot) {
            (Buf::Into(slot), _) => slot,
            (Buf::Own(bytes), Some(mut slot)) => {
                let len = slot.len() as usize;
                slot.bytes_mut().copy_from_slice(&bytes[..len]);
                slot
            }
            (Buf::Own(_), None) | (Buf::From(_), _) => unreachable!("not made by `load`"),
        };
        let counter = if !right {
            &shared.counters.bad_headers
        } else if payload_sum(slot.bytes_mut()) != found.payload_sum {
            &shared.counters.bad_payloads
        } else {
            count(&shared.counters.read, 1);
            count(&shared.counters.read_bytes, found.len);
            return Loaded::Hit(slot.written());
        };
        count(counter, 1);
        shared.retire(&found);
        Loaded::Miss(slot)
    }
}

impl Shared {
    fn read_ended(
        self: &Arc<Self>,
        found: &PutRecord,
        ends: &mut Both,
        waiter: &(Arc<Batch<Read>>, usize),
    ) {
        self.state.lock().index.leave(found.place.segment);
        let (header, payload, slot) = (ends.header.take(), ends.payload.take(), ends.slot.take());
        let (batch, place) = waiter;
        if let Some(error) = ends.error.take() {
            count(&self.counters.read_errors, 1);
            self.read_failed(*found, &error);
            let ((Some(Buf::Into(slot)), _) | (_, Some(slot))) = (payload, slot) else {
                return;
            };
            let failed = Loaded::Failed {
                error: LoadError::Io(error),
                slot: FailedSlot::Quiet(slot),
            };
            return batch.answer(*place, Read::Done(failed));
        }
        self.condition.read_works();
        let (Some(Buf::Own(header)), Some(payload)) = (header, payload) else {
            return;
        };
        let raw = Read::Raw {
            found: *found,
            header,
            payload,
            slot,
        };
        batch.answer(*place, raw);
    }

    /// Forgets a chunk whose bytes are wrong or cannot be read, for good.
    pub(super) fn retire(&self, found: &PutRecord) {
        let mut state = self.state.lock();
        if state.index.retire(found) {
            let record = Record::Remove { key: found.key };
            state.queue.push(record, None);
            drop(state);
            self.work.notify_one();
        }
    }
}
