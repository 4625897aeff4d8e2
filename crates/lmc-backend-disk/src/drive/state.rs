//! The state of a drive that the types of this module share.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, Clears, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::{Condvar, Mutex};

use super::health::Condition;
use crate::batch::AnswerBatch;
use crate::claim::Claim;
use crate::counters::DiskCounters;
use crate::files::wait_for;
use crate::format::{DriveHeader, PutRecord, Record};
use crate::index::Index;
use crate::volume::{AlignedBuf, FileId, Kind, Volume};

/// Settings of a drive. The public form is [`crate::DiskConfig`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriveSettings {
    /// Most bytes of all files together.
    pub(crate) capacity: u64,
    /// Bytes to leave free on the file system.
    pub(crate) keep_free: u64,
    /// Bytes of each log.
    pub(crate) log_bytes: u64,
    /// Most bytes that may be waiting or being written; further stores are declined.
    pub(crate) max_writing: u64,
    /// Interval at which a drive that was taken out is probed.
    pub(crate) probe_every: Duration,
    /// A batch that has waited this long for a drive shows that the drive stalls. A shorter wait only shows
    /// that the caller's deadline was short.
    pub(crate) stall: Duration,
    /// Time that a closing drive waits for its threads.
    pub(crate) leave: Duration,
}

/// A chunk that was written and is not durable yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) put: PutRecord,
    pub(super) file: SegmentFile,
}

/// The open file of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentFile {
    pub(super) id: FileId,
    /// Number of failed syncs of the file. The kernel reports a lost write with one failed sync, and the next
    /// sync succeeds. So a writer whose write began before a failure does not trust a later sync.
    pub(super) failed_syncs: u32,
}

impl SegmentFile {
    pub(super) fn new(id: FileId) -> Self {
        Self {
            id,
            failed_syncs: 0,
        }
    }
}

/// A caller that waits for a chunk to be durable: its batch, and the index in the batch.
pub(super) type StoreWaiter = (Arc<AnswerBatch<Result<Stored, BackendError>>>, usize);
/// A caller that waits for a change to be durable: its batch, and the index in the batch.
pub(super) type ChangeWaiter = (Arc<AnswerBatch<Option<bool>>>, usize);

/// A chunk that is being written.
#[derive(Debug, Default)]
pub(super) struct Writing {
    /// True if the chunk was removed meanwhile, so it must not become findable.
    pub(super) doomed: bool,
    pub(super) first: Option<StoreWaiter>,
    /// Other callers that store the same chunk.
    pub(super) others: Vec<StoreWaiter>,
    /// Stores that came after the removal: they begin when this write has ended.
    pub(super) again: Vec<(StoreItem, StoreWaiter)>,
}

#[derive(Debug, Default)]
pub(super) struct LogQueue {
    /// Changes to log, in order, with the chunks to make durable before.
    pub(super) changes: Vec<LogChange>,
    /// Chunks that the unlogged changes remove.
    pub(super) gone: Gone,
    /// Chunks that the changes being written remove, or do not add: these changes may not be in the log yet,
    /// or their write failed.
    pub(super) behind: Gone,
    pub(super) stop: Stop,
}

/// Chunks that are not findable now but that a restart might find.
#[derive(Debug, Default)]
pub(super) struct Gone {
    pub(super) keys: HashSet<ChunkKey>,
    /// True if it may be any chunk: whole segments began their next use, or all chunks were cleared.
    pub(super) any: bool,
}

impl Gone {
    fn may_be(&self, key: &ChunkKey) -> bool {
        self.any || self.keys.contains(key)
    }
}

impl LogQueue {
    pub(super) fn push(&mut self, record: Record, waiter: Option<(ChangeWaiter, bool)>) {
        match record {
            Record::Remove { key } => drop(self.gone.keys.insert(key)),
            Record::Begin { .. } | Record::Cleared { .. } => self.gone.any = true,
            Record::Put(_) => {}
        }
        self.changes.push(LogChange::Other(record, waiter));
    }

    /// Takes all changes that are to be logged.
    pub(super) fn take(&mut self) -> Vec<LogChange> {
        let gone = mem::take(&mut self.gone);
        self.behind.keys.extend(gone.keys);
        self.behind.any |= gone.any;
        mem::take(&mut self.changes)
    }

    /// Returns true if a restart might find a chunk that is not found now.
    pub(super) fn may_bring_back(&self, key: &ChunkKey) -> bool {
        self.gone.may_be(key) || self.behind.may_be(key)
    }
}

#[derive(Debug)]
pub(super) enum LogChange {
    Put(Ready),
    /// Another record, with its waiter and the answer for the waiter.
    Other(Record, Option<(ChangeWaiter, bool)>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stop {
    #[default]
    No,
    /// Write the queued changes, make a checkpoint, then end.
    Orderly,
    /// End at once.
    AtOnce,
}

/// Growth of a drive, shared by the space thread and the stores.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// True if a segment may have to be made or freed.
    pub(super) wanted: bool,
    /// True once no more space will be requested.
    pub(super) over: bool,
    /// Chunks that wait for a segment.
    pub(super) parked: VecDeque<StoreItem>,
    /// Time before which making a segment is not retried, after it failed.
    pub(super) not_before: Option<Instant>,
}

/// The chunks and files of a drive, behind one lock.
#[derive(Debug)]
pub(super) struct DriveState {
    pub(super) index: Index,
    /// The clears after which the chunks were stored; the index has their digest.
    pub(super) clears: Arc<Clears>,
    /// The open file of each segment.
    pub(super) files: Vec<Option<SegmentFile>>,
    pub(super) writing: HashMap<ChunkKey, Writing>,
    pub(super) queue: LogQueue,
    pub(super) growth: Growth,
    pub(super) closed: bool,
    /// Number of segment files that exist.
    pub(super) segments_made: u64,
}

/// The part of a drive that all types of this module use; it uses none of them.
///
/// Lock order: `SegmentSpace::files`, `FileWatch::look`, the writes of a chunk, `state`, the faults in
/// `condition`.
#[derive(Debug)]
pub(super) struct DriveCore {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) header: DriveHeader,
    pub(super) settings: DriveSettings,
    pub(super) state: Mutex<DriveState>,
    /// Wakes the log's thread: the queue has changes, or the drive is to stop.
    pub(super) work: Condvar,
    pub(super) counters: DiskCounters,
    pub(super) condition: Condition,
    /// Keeps other processes away from the folder until the drive and its threads are gone.
    pub(super) claim: Option<Claim>,
}

impl DriveCore {
    /// Removes a chunk permanently because its bytes are wrong or unreadable.
    pub(super) fn retire(&self, found: &PutRecord) {
        let mut state = self.state.lock();
        if state.index.retire(found) {
            let record = Record::Remove { key: found.key };
            state.queue.push(record, None);
            drop(state);
            self.work.notify_one();
        }
    }

    /// Runs an operation of the drive's own and waits for it.
    pub(super) fn wait_for(
        &self,
        kind: Kind,
        file: FileId,
        offset: u64,
        buf: Option<AlignedBuf>,
    ) -> io::Result<()> {
        wait_for(&*self.volume, kind, file, offset, buf)
    }
}
