//! One drive at work: chunks are written beside each other, made durable in groups, read back
//! and checked.

mod commit;
mod files;
pub(crate) use files::{read_file, replace_file};
mod health;
mod load;
mod relocate;
mod space;
mod store;
mod watch;

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lmc_backend::{BackendError, Clears, Events, ReadRate, StoreItem, Stored};
use lmc_key::{ChunkKey, ClearsId, SpaceId};
use parking_lot::{Condvar, Mutex};
use tracing::warn;

use crate::batch::Batch;
use crate::claim::Claim;
use crate::clears_file;
use crate::counters::{Counters, count};
use crate::format::{DriveHeader, PutRecord, Record};
use crate::id::hex;
use crate::index::{Index, IndexUsage, Segment};
use crate::inspect::{DriveStatus, SegmentStatus};
use crate::log::segment_name;
use crate::set::{SET_NAME, SetRecord};
use crate::spaces::{SPACES_NAME, SpaceUsage, SpacesRecord, attribute};
use crate::timer::join_before;
use crate::volume::{AlignedBuf, BLOCK, Buf, FileId, Kind, Op, Volume};
use health::Condition;
use space::{Growth, SpaceWork};

/// Timeout of a drive thread's own operations, where they are carried out on another thread.
const OWN_TIMEOUT: Duration = Duration::from_secs(30);

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
struct Ready {
    put: PutRecord,
    file: SegmentFile,
}

/// The open file of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SegmentFile {
    id: FileId,
    /// Syncs of the file that failed. The kernel reports a lost write with one of them, and the
    /// next succeeds: a writer whose write began before a failure trusts no sync after it.
    failed_syncs: u32,
}

impl SegmentFile {
    fn new(id: FileId) -> Self {
        Self {
            id,
            failed_syncs: 0,
        }
    }
}

/// A caller that waits for a chunk to be durable: its batch, and the index in it.
type StoreWaiter = (Arc<Batch<Result<Stored, BackendError>>>, usize);
/// A caller that waits for a change to be durable: its batch, and the index in it.
pub(crate) type ChangeWaiter = (Arc<Batch<Option<bool>>>, usize);

/// A chunk on its way.
#[derive(Debug, Default)]
struct Writing {
    /// True if the chunk was removed meanwhile: it will not be found.
    doomed: bool,
    first: Option<StoreWaiter>,
    /// Others who want to store the same.
    others: Vec<StoreWaiter>,
    /// Stores that came after the removal: they begin when this one is over.
    again: Vec<(StoreItem, StoreWaiter)>,
}

#[derive(Debug, Default)]
struct Queue {
    /// Changes to log, in their order, and chunks to make durable before.
    changes: Vec<LogChange>,
    /// Chunks that the unlogged changes remove.
    gone: Gone,
    /// Chunks that the changes being written remove, or do not add: the log may not hold these
    /// changes yet, or their write failed.
    behind: Gone,
    stop: Stop,
}

/// Chunks that are not found, and that a restart might find.
#[derive(Debug, Default)]
struct Gone {
    keys: HashSet<ChunkKey>,
    /// True if it may be any chunk: whole segments began their next use, or all was cleared.
    any: bool,
}

impl Gone {
    fn may_be(&self, key: &ChunkKey) -> bool {
        self.any || self.keys.contains(key)
    }
}

impl Queue {
    fn push(&mut self, record: Record, waiter: Option<(ChangeWaiter, bool)>) {
        match record {
            Record::Remove { key } => drop(self.gone.keys.insert(key)),
            Record::Begin { .. } | Record::Cleared { .. } => self.gone.any = true,
            Record::Put(_) => {}
        }
        self.changes.push(LogChange::Other(record, waiter));
    }

    /// Takes all there is to log.
    fn take(&mut self) -> Vec<LogChange> {
        let gone = mem::take(&mut self.gone);
        self.behind.keys.extend(gone.keys);
        self.behind.any |= gone.any;
        mem::take(&mut self.changes)
    }

    /// Returns true if a restart might find a chunk that is not found now.
    fn may_bring_back(&self, key: &ChunkKey) -> bool {
        self.gone.may_be(key) || self.behind.may_be(key)
    }
}

#[derive(Debug)]
enum LogChange {
    Put(Ready),
    /// Any other record, with its waiter and the answer for it.
    Other(Record, Option<(ChangeWaiter, bool)>),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stop {
    #[default]
    No,
    /// Write what is queued, make a checkpoint, end.
    Orderly,
    /// End.
    AtOnce,
}

#[derive(Debug)]
struct State {
    index: Index,
    /// The clears that the chunks were stored after; the index has the digest.
    clears: Arc<Clears>,
    /// Digest of the map in the drive's file; `None` while the file is damaged.
    noted: Option<ClearsId>,
    /// The open file of each segment.
    files: Vec<Option<SegmentFile>>,
    writing: HashMap<ChunkKey, Writing>,
    queue: Queue,
    growth: Growth,
    closed: bool,
    /// Files of segments that are there.
    segments_made: u64,
}

#[derive(Debug)]
pub(crate) struct Drive {
    shared: Arc<Shared>,
    committer: Mutex<Option<JoinHandle<io::Result<()>>>>,
    space_thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    volume: Arc<dyn Volume>,
    header: DriveHeader,
    header_file: FileId,
    settings: DriveSettings,
    state: Mutex<State>,
    /// The queue has something, or the drive shall stop.
    work: Condvar,
    space: SpaceWork,
    counters: Counters,
    read_rate: ReadRate,
    writing_bytes: AtomicU64,
    condition: Condition,
    /// Held while the drive's files are looked at.
    look: Mutex<()>,
    /// Keeps other processes from the folder until the drive and its threads are gone.
    claim: Option<Claim>,
}

impl Drive {
    /// Runs a drive whose index was recovered.
    pub(crate) fn start(
        volume: Arc<dyn Volume>,
        header: DriveHeader,
        recovered: crate::log::Recovered,
        made: &[u32],
        settings: DriveSettings,
        claim: Option<Claim>,
    ) -> io::Result<Self> {
        let mut index = recovered.index;
        let mut queue = Queue::default();
        let clears = clears_file::read(&*volume)?;
        let noted = clears.as_ref().map(Clears::id);
        let clears = clears.unwrap_or_default();
        if noted != Some(index.clears()) {
            let (chunks, record) = index.clear(clears.id());
            queue.push(record, None);
            warn!(
                drive = hex(&header.drive_id),
                chunks,
                "a clear was cut off, or the map of clears is damaged; the drive's chunks are removed"
            );
        }
        for begin in index.set_made(made) {
            queue.push(begin, None);
        }
        let mut files = Vec::new();
        for &segment in made {
            let at = segment as usize;
            if files.len() <= at {
                files.resize(at + 1, None);
            }
            let file = open_segment(&*volume, segment, header.segment_bytes)?;
            files[at] = Some(SegmentFile::new(file));
        }
        let header_file = volume.open(HEADER_NAME, None)?;
        let shared = Arc::new(Shared {
            header,
            header_file,
            settings,
            state: Mutex::new(State {
                index,
                clears: Arc::new(clears),
                noted,
                files,
                writing: HashMap::new(),
                queue,
                growth: Growth::default(),
                closed: false,
                segments_made: made.len() as u64,
            }),
            work: Condvar::new(),
            space: SpaceWork::default(),
            counters: Counters::default(),
            read_rate: ReadRate::default(),
            writing_bytes: AtomicU64::new(0),
            condition: Condition::default(),
            volume,
            look: Mutex::new(()),
            claim,
        });
        let log = match recovered.tail {
            Some(tail) => shared.old_log(tail)?,
            None => shared.first_log(recovered.next_log)?,
        };
        let for_thread = Arc::clone(&shared);
        let committer = thread::Builder::new()
            .name("lmc-disk-log".to_owned())
            .spawn(move || for_thread.commit_all(log))?;
        let mut drive = Self {
            shared,
            committer: Mutex::new(Some(committer)),
            space_thread: Mutex::new(None),
        };
        let for_thread = Arc::clone(&drive.shared);
        let space_thread = thread::Builder::new()
            .name("lmc-disk-space".to_owned())
            .spawn(move || for_thread.run_space_thread())?;
        *drive.space_thread.get_mut() = Some(space_thread);
        drive.shared.hold_size();
        if let Some(claim) = &drive.shared.claim {
            claim.sign();
        }
        Ok(drive)
    }

    /// Reports from now on which chunks come and go.
    pub(crate) fn report_to(&self, events: &Events) {
        self.shared.state.lock().index.report_to(events.clone());
        self.shared.condition.report_to(events.clone());
    }

    pub(crate) fn find(&self, key: &ChunkKey) -> Option<u64> {
        let state = self.shared.state.lock();
        state.index.find(key).map(|found| found.len)
    }

    pub(crate) fn list(&self, after: Option<(u32, u32)>, limit: usize) -> Vec<PutRecord> {
        self.shared.state.lock().index.list(after, limit)
    }

    /// The drive's id.
    pub(crate) fn id(&self) -> [u8; 16] {
        self.shared.header.drive_id
    }

    pub(crate) fn usage(&self) -> IndexUsage {
        self.shared.state.lock().index.usage()
    }

    /// Bytes of segments that it may have.
    pub(crate) fn capacity(&self) -> u64 {
        self.shared.max_segments() * self.shared.header.segment_bytes
    }

    pub(crate) fn stats(&self) -> crate::DiskStats {
        let mut stats = self.shared.counters.read();
        let usage = self.usage();
        (stats.evicted, stats.evicted_segments) = (usage.evicted_chunks, usage.evicted_segments);
        stats
    }

    pub(crate) fn describe(&self) -> String {
        self.shared.volume.describe()
    }

    pub(crate) fn inspect(&self) -> DriveStatus {
        let shared = &self.shared;
        let record = self.read_file(SET_NAME).ok().flatten();
        let record = record.and_then(|bytes| SetRecord::decode(&bytes).ok());
        let spaces = self.spaces();
        let state = shared.state.lock();
        let usage = state.index.usage();
        let segment = |(number, segment): (u32, &Segment)| {
            let (chunks, bytes) = segment.live();
            SegmentStatus {
                number,
                generation: segment.generation,
                used_bytes: u64::from(segment.used_blocks()) * BLOCK,
                chunks: chunks.into(),
                bytes,
                active: state.index.is_active(number),
            }
        };
        DriveStatus {
            drive_id: shared.header.drive_id,
            created: shared.header.created,
            set_id: record.as_ref().map(|record| record.set_id),
            clears: Arc::clone(&state.clears),
            members: record.map_or_else(Vec::new, |record| record.members),
            spaces,
            segment_bytes: shared.header.segment_bytes,
            chunks: usage.chunks,
            bytes: usage.bytes,
            segments: state.index.segments().map(segment).collect(),
        }
    }

    /// The chunks of one segment.
    pub(crate) fn chunks_of(&self, segment: u32) -> Vec<PutRecord> {
        let mut found = Vec::new();
        let mut after = segment.checked_sub(1).map(|before| (before, u32::MAX));
        loop {
            let page = self.list(after, 1024);
            let of_segment = page.iter().filter(|put| put.location.segment == segment);
            let before = found.len();
            found.extend(of_segment.copied());
            match page.last() {
                Some(last) if found.len() - before == page.len() => {
                    after = Some((last.location.segment, last.location.block));
                }
                _ => return found,
            }
        }
    }

    /// Gives the file of an empty segment back to the file system. False when it is not empty.
    pub(crate) fn give_back(&self, segment: u32) -> io::Result<bool> {
        self.shared.give_back(segment)
    }

    /// Chunks of each space with the settings that they were stored under, the largest first.
    pub(crate) fn spaces(&self) -> Vec<SpaceUsage> {
        let usage = self.shared.state.lock().index.spaces();
        let record = self.read_file(SPACES_NAME).ok().flatten();
        let record = record.and_then(|bytes| SpacesRecord::decode(&bytes).ok());
        let own = record.filter(|record| record.drive_id == self.id());
        attribute(own.as_ref(), &usage)
    }

    /// Returns the segments that have chunks of these spaces, each with its generation.
    pub(crate) fn segments_with(&self, spaces: &HashSet<SpaceId>) -> Vec<(u32, u64)> {
        let state = self.shared.state.lock();
        state.index.segments_with(|space| spaces.contains(&space))
    }

    /// Returns true if a segment has chunks of the use that had this generation.
    pub(crate) fn has_chunks_of(&self, segment: u32, generation: u64) -> bool {
        let state = self.shared.state.lock();
        state.index.has_chunks_of(segment, generation)
    }

    /// Writes the settings of this run, and those of earlier runs from `spaces`.
    pub(crate) fn note_settings(&self, current: &str, spaces: &[SpaceUsage]) -> io::Result<()> {
        let of_space = |usage: &SpaceUsage| {
            let settings = usage.settings.clone();
            (usage.space, settings.unwrap_or_default())
        };
        let index = self.shared.state.lock().index.spaces();
        let newest = index.values().map(|space| space.generation).max();
        let record = SpacesRecord {
            drive_id: self.id(),
            current: current.to_owned(),
            generation: newest.unwrap_or(0),
            of_space: spaces.iter().map(of_space).collect(),
        };
        self.replace_file(SPACES_NAME, &record.encode())
    }

    /// Starts to store a chunk; the answer goes to `waiter`.
    pub(crate) fn store(&self, item: StoreItem, waiter: StoreWaiter) {
        self.shared.store(item, waiter);
    }

    /// Removes a chunk; the answer, when the removal is durable, goes to `waiter`.
    pub(crate) fn remove(&self, key: &ChunkKey, waiter: ChangeWaiter) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        let there = state.index.remove(key);
        let mut given_up = Vec::new();
        if let Some(writing) = state.writing.get_mut(key) {
            writing.doomed = true;
            given_up = mem::take(&mut writing.again);
        } else if !there && !state.queue.may_bring_back(key) {
            drop(state);
            return waiter.0.answer(waiter.1, Some(false));
        }
        // A chunk that is not there may still be in the log, or on its way there: that it is not
        // there is durable after this record. Others need none, and wait for nothing.
        count(&shared.counters.removed, u64::from(there));
        let waiter = Some((waiter, there));
        state.queue.push(Record::Remove { key: *key }, waiter);
        drop(state);
        shared.work.notify_one();
        for (.., (batch, index)) in given_up {
            batch.answer(index, Ok(Stored::Declined));
        }
    }

    /// Returns the estimated time to read `bytes` bytes.
    pub(crate) fn read_time(&self, bytes: u64) -> Duration {
        self.shared.read_rate.time(bytes)
    }

    /// Returns the clears that the chunks were stored after.
    pub(crate) fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.shared.state.lock().clears)
    }

    /// Removes all chunks, also those that are being written, unless the drive is at these clears.
    /// Returns how many were there. The answer to `waiter` is true when all is durable.
    pub(crate) fn clear(&self, clears: &Arc<Clears>, waiter: ChangeWaiter) -> u64 {
        let (shared, id) = (&self.shared, clears.id());
        let mut state = shared.state.lock();
        let (mut gone, mut given_up) = (0, Vec::new());
        let mut record = state.index.cleared();
        // Of two clears at once, the later one may come first.
        if !state.clears.contains(clears) {
            for writing in state.writing.values_mut() {
                writing.doomed = true;
                given_up.append(&mut writing.again);
            }
            (gone, record) = state.index.clear(id);
            state.clears = Arc::clone(clears);
        }
        state.queue.push(record, Some((waiter, true)));
        drop(state);
        shared.work.notify_one();
        count(&shared.counters.removed, gone);
        // Wakers may do anything, so they are called without the lock.
        for (.., (batch, index)) in given_up {
            batch.answer(index, Ok(Stored::Declined));
        }
        gone
    }

    /// Returns true if removals can no longer be made durable.
    pub(crate) fn closed(&self) -> bool {
        self.shared.state.lock().closed
    }

    /// Lets a stop that is under way, or the next one, end without waiting for anything.
    pub(crate) fn give_up(&self) {
        let mut state = self.shared.state.lock();
        state.closed = true;
        state.queue.stop = Stop::AtOnce;
        drop(state);
        self.shared.work.notify_all();
    }

    /// Ends: with `orderly`, after all is durable and a checkpoint was made, unless that is given
    /// up. A thread that a file system does not answer then is left behind, and the folder stays
    /// locked until that ends.
    pub(crate) fn stop(&self, orderly: bool) -> io::Result<()> {
        {
            let mut state = self.shared.state.lock();
            state.closed = true;
            if !orderly {
                state.queue.stop = Stop::AtOnce;
            } else if state.queue.stop == Stop::No {
                state.queue.stop = Stop::Orderly;
            }
        }
        self.shared.work.notify_all();
        let Some(committer) = self.committer.lock().take() else {
            return Ok(());
        };
        let space_thread = self.space_thread.lock().take();
        let me = thread::current().id();
        let goes_on = || !committer.is_finished() && committer.thread().id() != me;
        let given_up = || self.shared.state.lock().queue.stop == Stop::AtOnce;
        while goes_on() && !given_up() {
            thread::sleep(Duration::from_millis(1));
        }
        self.shared.end_space_thread();
        let hangs = !committer.is_finished();
        if hangs {
            // What the threads wait for ends with it, as far as it ends at all.
            self.shared.volume.stop();
        }
        let deadline = Instant::now() + self.shared.settings.leave;
        let ended = join_before(committer, deadline);
        space_thread.map(|space_thread| join_before(space_thread, deadline));
        if !hangs {
            self.shared.volume.stop();
        }
        // A space thread that was left behind does not answer them any more.
        let parked = self.shared.take_parked();
        drop(parked);
        let left: Vec<_> = {
            let mut state = self.shared.state.lock();
            state.queue.changes.clear();
            state.writing.drain().map(|(_, writing)| writing).collect()
        };
        for Writing {
            first,
            others,
            again,
            ..
        } in left
        {
            let again = again.into_iter().map(|(.., waiter)| waiter);
            for (batch, index) in first.into_iter().chain(others).chain(again) {
                batch.answer(index, Err(BackendError::Closed));
            }
        }
        ended.unwrap_or_else(|| Err(io::Error::other("the log's thread failed")))
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        // Like a kill: what was acknowledged is durable, and the next start finds it.
        let _ = self.stop(false);
    }
}

/// Opens an existing segment. One that a kill has left half made gets the rest of its blocks;
/// without space for them, its chunks can still be read.
fn open_segment(volume: &dyn Volume, segment: u32, bytes: u64) -> io::Result<FileId> {
    let name = segment_name(segment);
    match volume.open(&name, Some(bytes)) {
        Err(error) if is_full(&error) => volume.open(&name, None),
        opened => opened,
    }
}

/// Returns true if the file system is full, or the quota of this user is.
fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// Name of the file that says what the folder is.
pub(crate) const HEADER_NAME: &str = "drive";

impl Shared {
    fn wait_for(
        &self,
        kind: Kind,
        file: FileId,
        offset: u64,
        buf: Option<AlignedBuf>,
    ) -> io::Result<()> {
        wait_for(&*self.volume, kind, file, offset, buf)
    }
}

/// Carries out an operation of the drive's own and waits for it: what, on which file, where, with
/// which bytes.
pub(crate) fn wait_for(
    volume: &dyn Volume,
    kind: Kind,
    file: FileId,
    offset: u64,
    buf: Option<AlignedBuf>,
) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    volume.carry_out(Op {
        kind,
        file,
        offset,
        len: buf.as_ref().map_or(0, |buf| buf.len() as u64),
        buf: buf.map(Buf::Own),
        // The waiter may have left.
        abandoned: None,
        done: Box::new(move |done| drop(sender.send(done.result))),
    });
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    receiver.recv_timeout(OWN_TIMEOUT).unwrap_or_else(late)
}

/// Returns a copy of an error for another waiter.
fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}
