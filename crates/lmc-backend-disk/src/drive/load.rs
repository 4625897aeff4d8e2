//! Loads: reading chunks, and verifying them.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, FailedSlot, LoadItem, Loaded, ReadRate};
use lmc_memory::{PartedChecksum, ReservedSlot};
use parking_lot::Mutex;

use super::probes::HealthProbes;
use super::state::DriveCore;
use crate::batch::AnswerBatch;
use crate::counters::count;
use crate::format::{ChunkHeader, PutRecord, blocks, payload_sum};
use crate::index::EntryRef;
use crate::volume::{AlignedBuf, BLOCK, Buf, Done, Kind, SlotPart, VolumeOp, is_abandoned};

/// Least bytes of a part of a payload. Parts are read concurrently. One thread receives their completions and
/// sums each part while others are being read, so a drive delivers at most what that thread can sum.
#[cfg(not(test))]
const PART: u64 = 1 << 20;
/// Small in tests, so that short chunks have several parts.
#[cfg(test)]
const PART: u64 = BLOCK;
/// Most parts of a payload.
const PARTS: u64 = 4;

/// A caller that waits for a chunk: its batch, and the index in it.
type Waiter = (Arc<AnswerBatch<Loaded>>, usize);

/// The reads of a chunk.
struct Reading {
    /// Number of reads that have not ended.
    left: usize,
    header: Option<Buf>,
    /// Parts of the payload that have arrived.
    parts: Vec<Option<Buf>>,
    /// Number of parts that are in the sum.
    summed: usize,
    sum: PartedChecksum,
    /// The slot, if the payload is read into other memory first.
    slot: Option<ReservedSlot>,
    error: Option<io::Error>,
}

impl Reading {
    /// Records the end of a read: of a part, or of the header.
    fn ended(&mut self, part: Option<usize>, done: Done) {
        self.left -= 1;
        self.error = self.error.take().or(done.result.err());
        match part {
            None => self.header = done.buf,
            Some(part) => self.parts[part] = done.buf,
        }
        if self.error.is_some() {
            return;
        }
        // All parts but the last are summed, in order.
        while self.summed + 1 < self.parts.len()
            && let Some(Buf::Into(part)) = &self.parts[self.summed]
        {
            self.sum.add(part.bytes());
            self.summed += 1;
        }
    }

    /// Returns the slot, and the checksum of its bytes if the whole slot was read.
    fn into_slot(self) -> Option<(ReservedSlot, u64)> {
        let Self {
            mut parts,
            sum,
            slot,
            ..
        } = self;
        if let Some(mut slot) = slot {
            let Some(Some(Buf::Own(bytes))) = parts.pop() else {
                // The operation was abandoned before the kernel got the slot.
                return Some((slot, 0));
            };
            let len = slot.len() as usize;
            slot.bytes_mut().copy_from_slice(&bytes[..len]);
            let sum = payload_sum(slot.bytes_mut());
            return Some((slot, sum));
        }
        let parts: Vec<SlotPart> = parts
            .into_iter()
            .map_while(|part| match part {
                Some(Buf::Into(part)) => Some(part),
                _ => None,
            })
            .collect();
        let sum = match (parts.last(), self.summed + 1 == parts.len()) {
            (Some(last), true) => sum.end(last.bytes()),
            _ => 0,
        };
        Some((SlotPart::join(parts)?, sum))
    }
}

/// Reads chunks from the drive.
#[derive(Debug)]
pub(super) struct ChunkReader {
    core: Arc<DriveCore>,
    probes: Arc<HealthProbes>,
    rate: ReadRate,
}

impl ChunkReader {
    pub(super) fn new(core: Arc<DriveCore>, probes: Arc<HealthProbes>) -> Self {
        let rate = ReadRate::default();
        Self { core, probes, rate }
    }

    /// Returns the estimated time to read `bytes` bytes.
    pub(super) fn time(&self, bytes: u64) -> Duration {
        self.rate.time(bytes)
    }

    /// Starts to read a chunk; `waiter` gets the outcome. An entry spares the search for the chunk.
    pub(super) fn load(self: &Arc<Self>, item: LoadItem, entry: Option<EntryRef>, waiter: Waiter) {
        let LoadItem { key, slot, .. } = item;
        let answer = |loaded| waiter.0.answer(waiter.1, loaded);
        let failed = |error, slot| Loaded::Failed {
            error,
            slot: FailedSlot::Released(slot),
        };
        let (found, file) = {
            let mut state = self.core.state.lock();
            if state.closed {
                return answer(failed(BackendError::Closed, slot));
            }
            let found = entry.and_then(|entry| state.index.record_at(entry, &key));
            // A chunk may have been moved meanwhile.
            let Some(found) = found.or_else(|| state.index.find(&key)) else {
                count(&self.core.counters.missed, 1);
                return answer(Loaded::Miss(slot));
            };
            let (expected, found_len) = (found.len, slot.len());
            if expected != found_len {
                let error = BackendError::Length {
                    expected,
                    found: found_len,
                };
                return answer(failed(error, slot));
            }
            let segment = found.location.segment;
            let Some(file) = state.files[segment as usize] else {
                return answer(Loaded::Miss(slot));
            };
            state.index.enter(segment, true);
            (found, file)
        };
        self.rate.begin(Instant::now());
        let at = u64::from(found.location.block) * BLOCK;
        let len = blocks(found.len) * BLOCK;
        // A slot that is not aligned for direct I/O is filled from aligned memory.
        let direct = slot.padded_len() >= len && slot.offset().is_multiple_of(BLOCK);
        let (parts, slot) = match direct {
            // The last part has at least one whole block, padding not counted.
            true => (
                SlotPart::split(slot, (found.len / PART).clamp(1, PARTS)),
                None,
            ),
            false => (Vec::new(), Some(slot)),
        };
        let mut parts: Vec<Buf> = parts.into_iter().map(Buf::Into).collect();
        if !direct {
            parts.push(Buf::Own(AlignedBuf::new(len)));
        }
        let reading = Arc::new(Mutex::new(Some(Reading {
            left: 1 + parts.len(),
            header: None,
            parts: parts.iter().map(|_| None).collect(),
            summed: 0,
            sum: PartedChecksum::new(),
            slot,
            error: None,
        })));
        let op = |offset, len, buf, part: Option<usize>| {
            let (reading, this) = (Arc::clone(&reading), Arc::clone(self));
            let (batch, waiter) = (&waiter.0, waiter.clone());
            VolumeOp {
                kind: Kind::Read,
                file: file.id,
                offset,
                len,
                buf: Some(buf),
                abandoned: Some(batch.abandoned()),
                done: Box::new(move |done| {
                    let mut held = reading.lock();
                    let Some(reading) = held.as_mut() else { return };
                    reading.ended(part, done);
                    if reading.left == 0 {
                        let reading = held.take();
                        drop(held);
                        if let Some(reading) = reading {
                            this.read_ended(&found, reading, &waiter);
                        }
                    }
                }),
            }
        };
        let mut ops = vec![op(at, BLOCK, Buf::Own(AlignedBuf::new(BLOCK)), None)];
        let mut offset = at + BLOCK;
        for (number, part) in parts.into_iter().enumerate() {
            let capacity = match &part {
                Buf::Into(part) => part.capacity(),
                _ => len,
            };
            ops.push(op(offset, capacity, part, Some(number)));
            offset += capacity;
        }
        self.core.volume.submit(ops);
    }

    /// Verifies the bytes that were read, and answers.
    fn read_ended(self: &Arc<Self>, found: &PutRecord, mut reading: Reading, waiter: &Waiter) {
        self.core.state.lock().index.leave(found.location.segment);
        let (batch, index) = waiter;
        let read = if reading.error.is_some() {
            0
        } else {
            found.len + BLOCK
        };
        self.rate.end(read, Instant::now());
        let (header, error) = (reading.header.take(), reading.error.take());
        if let Some(error) = error.as_ref().filter(|error| !is_abandoned(error)) {
            count(&self.core.counters.read_errors, 1);
            self.probes.read_failed(*found, error);
        }
        // A slot that the kernel may still write to has no owner; the waiter gets its answer at the deadline.
        let Some((slot, sum)) = reading.into_slot() else {
            return;
        };
        if let Some(error) = error {
            let failed = Loaded::Failed {
                error: BackendError::from(error),
                slot: FailedSlot::Released(slot),
            };
            return batch.answer(*index, failed);
        }
        self.core.condition.read_works();
        if slot.arena().is_lost() {
            // The sum is of other bytes than the drive's, so it shows nothing about the drive.
            let failed = Loaded::Failed {
                error: BackendError::from(io::Error::other("the slot's memory was lost")),
                slot: FailedSlot::Released(slot),
            };
            return batch.answer(*index, failed);
        }
        let right = |header: &AlignedBuf| {
            ChunkHeader::decode(header).is_ok_and(|header| {
                header.drive_id == self.core.header.drive_id
                    && header.key == found.key
                    && header.location == found.location
                    && (header.len, header.payload_sum) == (found.len, found.payload_sum)
            })
        };
        let counter = match header {
            Some(Buf::Own(header)) if right(&header) => {
                if sum == found.payload_sum {
                    count(&self.core.counters.read, 1);
                    count(&self.core.counters.read_bytes, found.len);
                    let slot = slot.written().with_checksum(sum);
                    return batch.answer(*index, Loaded::Hit(slot));
                }
                &self.core.counters.bad_payloads
            }
            _ => &self.core.counters.bad_headers,
        };
        count(counter, 1);
        self.core.retire(found);
        batch.answer(*index, Loaded::Miss(slot));
    }
}

#[cfg(test)]
mod tests {
    use lmc_memory::checksum;

    use super::*;
    use crate::sim::pool;

    fn reading(slot: ReservedSlot, parts: u64) -> (Reading, Vec<SlotPart>) {
        let parts = SlotPart::split(slot, parts);
        let reading = Reading {
            left: 1 + parts.len(),
            header: None,
            parts: parts.iter().map(|_| None).collect(),
            summed: 0,
            sum: PartedChecksum::new(),
            slot: None,
            error: None,
        };
        (reading, parts)
    }

    #[test]
    fn parts_are_summed_in_whatever_order_they_come() {
        let pool = pool();
        let bytes: Vec<u8> = (0..5 * BLOCK + 9).map(|i| (i * 7 / 5) as u8).collect();
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let mut slot = pool.reserve(bytes.len() as u64).unwrap();
            slot.bytes_mut().copy_from_slice(&bytes);
            let (mut reading, parts) = reading(slot, 4);
            let mut parts: Vec<Option<SlotPart>> = parts.into_iter().map(Some).collect();
            for number in order {
                let buf = parts[number].take().map(Buf::Into);
                let result = Ok(());
                reading.ended(Some(number), Done { buf, result });
            }
            let (slot, sum) = reading.into_slot().expect("all of it");
            assert_eq!((slot.len(), sum), (bytes.len() as u64, checksum(&bytes)));
        }
    }

    #[test]
    fn a_slot_with_a_part_that_was_given_up_is_nobodys() {
        let pool = pool();
        for lost in 0..3 {
            let (mut reading, parts) = reading(pool.reserve(3 * BLOCK).unwrap(), 3);
            for (number, part) in parts.into_iter().enumerate() {
                let (buf, result) = match number == lost {
                    false => (Some(Buf::Into(part)), Ok(())),
                    true => {
                        part.abandon();
                        (None, Err(io::ErrorKind::TimedOut.into()))
                    }
                };
                reading.ended(Some(number), Done { buf, result });
            }
            assert!(reading.error.is_some() && reading.into_slot().is_none());
            assert_eq!(pool.usage().quarantined_slots, lost as u64 + 1);
        }
    }
}
