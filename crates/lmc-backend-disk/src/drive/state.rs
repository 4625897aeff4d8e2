//! The state of a drive that the types of this module share, and the parts of it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, Clears, StoreItem, Stored};
use lmc_key::ChunkKey;
use parking_lot::{Condvar, Mutex};

use super::health::Condition;
use crate::batch::Batch;
use crate::claim::Claim;
use crate::counters::Counters;
use crate::files::wait_for;
use crate::format::{DriveHeader, PutRecord, Record};
use crate::index::Index;
use crate::volume::{AlignedBuf, FileId, Kind, Volume};

/// Settings of a drive. The public form is [`crate::DiskConfig`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct DriveSettings {
    /// Bytes that all files together may take.
    pub(crate) capacity: u64,
    /// Bytes that are left free on the file system.
    pub(crate) keep_free: u64,
    /// Bytes of each log.
    pub(crate) log_bytes: u64,
    /// Bytes that may be on their way to the drive; beyond, stores are declined.
    pub(crate) max_writing: u64,
    /// Time between two looks at a drive that was taken out.
    pub(crate) probe_every: Duration,
    /// A batch that waits this long for a drive tells of a stall; a shorter one only of an
    /// impatient caller.
    pub(crate) stall: Duration,
    /// Time that a closing drive waits for its threads.
    pub(crate) leave: Duration,
}

/// A chunk that was written and waits to be made durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ready {
    pub(super) put: PutRecord,
    pub(super) file: SegmentFile,
}

/// The open file of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SegmentFile {
    pub(super) id: FileId,
    /// Syncs of the file that failed. The kernel reports a lost write with one of them, and the
    /// next succeeds: a writer whose write began before a failure trusts no sync after it.
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

/// A caller that waits for a chunk to be durable: its batch, and the index in it.
pub(super) type StoreWaiter = (Arc<Batch<Result<Stored, BackendError>>>, usize);
/// A caller that waits for a change to be durable: its batch, and the index in it.
pub(super) type ChangeWaiter = (Arc<Batch<Option<bool>>>, usize);

/// A chunk on its way.
#[derive(Debug, Default)]
pub(super) struct Writing {
    /// True if the chunk was removed meanwhile: it will not be found.
    pub(super) doomed: bool,
    pub(super) first: Option<StoreWaiter>,
    /// Others who want to store the same.
    pub(super) others: Vec<StoreWaiter>,
    /// Stores that came after the removal: they begin when this one is over.
    pub(super) again: Vec<(StoreItem, StoreWaiter)>,
}

#[derive(Debug, Default)]
pub(super) struct Queue {
    /// Changes to log, in their order, and chunks to make durable before.
    pub(super) changes: Vec<LogChange>,
    /// Chunks that the unlogged changes remove.
    pub(super) gone: Gone,
    /// Chunks that the changes being written remove, or do not add: the log may not hold these
    /// changes yet, or their write failed.
    pub(super) behind: Gone,
    pub(super) stop: Stop,
}

/// Chunks that are not found, and that a restart might find.
#[derive(Debug, Default)]
pub(super) struct Gone {
    pub(super) keys: HashSet<ChunkKey>,
    /// True if it may be any chunk: whole segments began their next use, or all was cleared.
    pub(super) any: bool,
}

impl Gone {
    fn may_be(&self, key: &ChunkKey) -> bool {
        self.any || self.keys.contains(key)
    }
}

impl Queue {
    pub(super) fn push(&mut self, record: Record, waiter: Option<(ChangeWaiter, bool)>) {
        match record {
            Record::Remove { key } => drop(self.gone.keys.insert(key)),
            Record::Begin { .. } | Record::Cleared { .. } => self.gone.any = true,
            Record::Put(_) => {}
        }
        self.changes.push(LogChange::Other(record, waiter));
    }

    /// Takes all there is to log.
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
    /// Any other record, with its waiter and the answer for it.
    Other(Record, Option<(ChangeWaiter, bool)>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Stop {
    #[default]
    No,
    /// Write what is queued, make a checkpoint, end.
    Orderly,
    /// End.
    AtOnce,
}

/// Growth of a drive, as the space thread and the stores see it.
#[derive(Debug, Default)]
pub(super) struct Growth {
    /// True if a segment may have to be made or freed.
    pub(super) wanted: bool,
    /// True once no more space will be asked for.
    pub(super) over: bool,
    /// Chunks that wait for a segment.
    pub(super) parked: VecDeque<StoreItem>,
    /// No segment could be made. It is tried again from then on.
    pub(super) not_before: Option<Instant>,
}

/// The chunks and files of a drive, behind one lock.
#[derive(Debug)]
pub(super) struct DriveState {
    pub(super) index: Index,
    /// The clears that the chunks were stored after; the index has the digest.
    pub(super) clears: Arc<Clears>,
    /// The open file of each segment.
    pub(super) files: Vec<Option<SegmentFile>>,
    pub(super) writing: HashMap<ChunkKey, Writing>,
    pub(super) queue: Queue,
    pub(super) growth: Growth,
    pub(super) closed: bool,
    /// Files of segments that are there.
    pub(super) segments_made: u64,
}

/// A drive as all types of this module use it; it uses none of them.
///
/// Lock order: `SegmentSpace::files`, `FileWatch::look`, the writes of a chunk, `state`, the faults in
/// `condition`.
#[derive(Debug)]
pub(super) struct DriveCore {
    pub(super) volume: Arc<dyn Volume>,
    pub(super) header: DriveHeader,
    pub(super) settings: DriveSettings,
    pub(super) state: Mutex<DriveState>,
    /// Wakes the log's thread: the queue has something, or the drive shall stop.
    pub(super) work: Condvar,
    pub(super) counters: Counters,
    pub(super) condition: Condition,
    /// Keeps other processes from the folder until the drive and its threads are gone.
    pub(super) claim: Option<Claim>,
}

impl DriveCore {
    /// Removes a chunk whose bytes are wrong or cannot be read, for good.
    pub(super) fn retire(&self, found: &PutRecord) {
        let mut state = self.state.lock();
        if state.index.retire(found) {
            let record = Record::Remove { key: found.key };
            state.queue.push(record, None);
            drop(state);
            self.work.notify_one();
        }
    }

    /// Carries out an operation of the drive's own and waits for it.
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
