//! One drive: writes chunks, makes them durable in groups, reads them back and verifies them.

mod commit;
mod health;
mod load;
mod log_files;
mod probes;
mod space;
mod space_thread;
mod state;
pub(crate) use state::DriveSettings;
mod store;
mod watch;

use std::collections::{HashMap, HashSet};
use std::io;
use std::mem;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use lmc_backend::{
    BackendError, Clears, Events, Health, LoadItem, Loaded, StoreItem, Stored, Unavailable,
};
use lmc_key::{ChunkKey, SpaceId};
use parking_lot::{Condvar, Mutex};
use tracing::warn;

use self::commit::Committer;
use self::health::Condition;
use self::load::ChunkReader;
use self::log_files::LogFiles;
use self::probes::HealthProbes;
use self::space::SegmentSpace;
use self::space_thread::SpaceThread;
use self::state::{
    ChangeWaiter, DriveCore, DriveState, Growth, LogQueue, SegmentFile, Stop, StoreWaiter, Writing,
};
use self::store::ChunkWriter;
use self::watch::FileWatch;
use crate::batch::AnswerBatch;
use crate::claim::Claim;
use crate::clears_file;
use crate::counters::{DiskCounters, count};
use crate::files::{HEADER_NAME, open_segment, read_file, replace_file};
use crate::format::{DriveHeader, PutRecord, Record};
use crate::id::hex;
use crate::index::{EntryRef, IndexUsage, Segment};
use crate::set::{SET_NAME, SetRecord};
use crate::spaces::{SPACES_NAME, SpaceUsage, SpacesRecord, attribute};
use crate::status::{DriveStatus, SegmentStatus};
use crate::timer::join_before;
use crate::volume::{BLOCK, Volume};

/// A drive: the state that the types of this module share, these types, and two threads.
#[derive(Debug)]
pub(crate) struct Drive {
    core: Arc<DriveCore>,
    space: Arc<SegmentSpace>,
    writer: Arc<ChunkWriter>,
    reader: Arc<ChunkReader>,
    probes: Arc<HealthProbes>,
    committer: Mutex<Option<JoinHandle<io::Result<()>>>>,
    space_thread: Mutex<Option<JoinHandle<()>>>,
}

impl Drive {
    /// Starts a drive whose index was recovered.
    pub(crate) fn start(
        volume: Arc<dyn Volume>,
        header: DriveHeader,
        recovered: crate::log::Recovered,
        made: &[u32],
        settings: DriveSettings,
        claim: Option<Claim>,
    ) -> io::Result<Self> {
        let mut index = recovered.index;
        let mut queue = LogQueue::default();
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
        let core = Arc::new(DriveCore {
            header,
            settings,
            state: Mutex::new(DriveState {
                index,
                clears: Arc::new(clears),
                files,
                writing: HashMap::new(),
                queue,
                growth: Growth::default(),
                closed: false,
                segments_made: made.len() as u64,
            }),
            work: Condvar::new(),
            counters: DiskCounters::default(),
            condition: Condition::default(),
            volume,
            claim,
        });
        let watch = Arc::new(FileWatch::new(Arc::clone(&core)));
        let space = Arc::new(SegmentSpace::new(Arc::clone(&core), Arc::clone(&watch)));
        let writer = Arc::new(ChunkWriter::new(Arc::clone(&core), Arc::clone(&space)));
        let probes = Arc::new(HealthProbes::new(Arc::clone(&core), header_file));
        let reader = Arc::new(ChunkReader::new(Arc::clone(&core), Arc::clone(&probes)));
        let mut files = LogFiles {
            core: Arc::clone(&core),
            watch: Arc::clone(&watch),
            noted,
        };
        let log = match recovered.tail {
            Some(tail) => files.old_log(tail)?,
            None => files.first_log(recovered.next_log)?,
        };
        let committer = Committer {
            core: Arc::clone(&core),
            writer: Arc::clone(&writer),
            files,
            log,
        };
        let committer = thread::Builder::new()
            .name("lmc-disk-log".to_owned())
            .spawn(move || committer.run())?;
        let mut drive = Self {
            core,
            space,
            writer,
            reader,
            probes,
            committer: Mutex::new(Some(committer)),
            space_thread: Mutex::new(None),
        };
        let space_thread = SpaceThread {
            space: Arc::clone(&drive.space),
            writer: Arc::clone(&drive.writer),
            watch,
            probe_every: settings.probe_every,
        };
        let space_thread = thread::Builder::new()
            .name("lmc-disk-space".to_owned())
            .spawn(move || space_thread.run())?;
        *drive.space_thread.get_mut() = Some(space_thread);
        drive.space.hold_size();
        if let Some(claim) = &drive.core.claim {
            claim.sign();
        }
        Ok(drive)
    }

    /// Reports from now on the chunks that come and go.
    pub(crate) fn report_to(&self, events: &Events) {
        self.core.state.lock().index.report_to(events.clone());
        self.core.condition.report_to(events.clone());
    }

    pub(crate) fn find(&self, key: &ChunkKey) -> Option<(EntryRef, u64)> {
        let state = self.core.state.lock();
        let found = state.index.find_entry(key);
        found.map(|(entry, found)| (entry, found.len))
    }

    pub(crate) fn list(&self, after: Option<(u32, u32)>, limit: usize) -> Vec<PutRecord> {
        self.core.state.lock().index.list(after, limit)
    }

    /// Returns the drive's id.
    pub(crate) fn id(&self) -> [u8; 16] {
        self.core.header.drive_id
    }

    pub(crate) fn usage(&self) -> IndexUsage {
        self.core.state.lock().index.usage()
    }

    /// Returns the bytes of the segments that the drive may have.
    pub(crate) fn capacity(&self) -> u64 {
        self.space.max_segments() * self.core.header.segment_bytes
    }

    pub(crate) fn stats(&self) -> crate::DiskStats {
        let mut stats = self.core.counters.read();
        let usage = self.usage();
        (stats.evicted, stats.evicted_segments) = (usage.evicted_chunks, usage.evicted_segments);
        stats
    }

    pub(crate) fn describe(&self) -> String {
        self.core.volume.describe()
    }

    pub(crate) fn inspect(&self) -> DriveStatus {
        let core = &self.core;
        let record = self.read_file(SET_NAME).ok().flatten();
        let record = record.and_then(|bytes| SetRecord::decode(&bytes).ok());
        let spaces = self.spaces();
        let state = core.state.lock();
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
            drive_id: core.header.drive_id,
            created: core.header.created,
            set_id: record.as_ref().map(|record| record.set_id),
            clears: Arc::clone(&state.clears),
            members: record.map_or_else(Vec::new, |record| record.members),
            spaces,
            segment_bytes: core.header.segment_bytes,
            chunks: usage.chunks,
            bytes: usage.bytes,
            segments: state.index.segments().map(segment).collect(),
        }
    }

    /// Returns the chunks of one segment.
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

    /// Removes the file of an empty segment. Returns false if the segment is not empty.
    pub(crate) fn give_back(&self, segment: u32) -> io::Result<bool> {
        self.space.give_back(segment)
    }

    /// Returns the chunks of each space with the settings that they were stored under, the largest space
    /// first.
    pub(crate) fn spaces(&self) -> Vec<SpaceUsage> {
        let usage = self.core.state.lock().index.spaces();
        let record = self.read_file(SPACES_NAME).ok().flatten();
        let record = record.and_then(|bytes| SpacesRecord::decode(&bytes).ok());
        let own = record.filter(|record| record.drive_id == self.id());
        attribute(own.as_ref(), &usage)
    }

    /// Returns the segments that have chunks of these spaces, each with its generation.
    pub(crate) fn segments_with(&self, spaces: &HashSet<SpaceId>) -> Vec<(u32, u64)> {
        let state = self.core.state.lock();
        state.index.segments_with(|space| spaces.contains(&space))
    }

    /// Returns true if a segment still has chunks of the use with this generation.
    pub(crate) fn has_chunks_of(&self, segment: u32, generation: u64) -> bool {
        let state = self.core.state.lock();
        state.index.has_chunks_of(segment, generation)
    }

    /// Records the settings of this run, and those of earlier runs from `spaces`.
    pub(crate) fn note_settings(&self, current: &str, spaces: &[SpaceUsage]) -> io::Result<()> {
        let of_space = |usage: &SpaceUsage| {
            let settings = usage.settings.clone();
            (usage.space, settings.unwrap_or_default())
        };
        let index = self.core.state.lock().index.spaces();
        let newest = index.values().map(|space| space.generation).max();
        let record = SpacesRecord {
            drive_id: self.id(),
            current: current.to_owned(),
            generation: newest.unwrap_or(0),
            of_space: spaces.iter().map(of_space).collect(),
        };
        self.replace_file(SPACES_NAME, &record.encode())
    }

    /// Starts to store a chunk; `waiter` gets the answer.
    pub(crate) fn store(&self, item: StoreItem, waiter: StoreWaiter) {
        self.writer.store(item, waiter);
    }

    /// Starts to read a chunk; `waiter` gets the outcome.
    pub(crate) fn load(
        &self,
        item: LoadItem,
        entry: Option<EntryRef>,
        waiter: (Arc<AnswerBatch<Loaded>>, usize),
    ) {
        self.reader.load(item, entry, waiter);
    }

    /// Starts to write a stored chunk to another location, as [`ChunkWriter::relocate`] does.
    pub(crate) fn relocate(&self, item: StoreItem, sum: u64, waiter: StoreWaiter) {
        self.writer.relocate(item, sum, waiter);
    }

    /// Allows chunks to be moved to a segment that has become empty.
    pub(crate) fn reuse(&self, segment: u32) {
        self.core.state.lock().index.reuse(segment);
    }

    /// Returns the bytes of a file of the drive; none if there is no such file.
    pub(crate) fn read_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read_file(&*self.core.volume, name)
    }

    /// Replaces a file of the drive durably: after a kill there is either the old file or the new one.
    pub(crate) fn replace_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        replace_file(&*self.core.volume, name, bytes)
    }

    /// Returns the reason why the drive must not be used, if there is one.
    pub(crate) fn unavailable(&self) -> Option<Unavailable> {
        self.core.condition.unavailable()
    }

    pub(crate) fn health(&self) -> Health {
        self.core.condition.health()
    }

    /// Records reads that had no answer at their deadline, after `waited`.
    pub(crate) fn late_reads(&self, reads: u64, waited: Duration) {
        self.probes.late_reads(reads, waited);
    }

    /// Records writes that had no answer at their deadline, after `waited`.
    pub(crate) fn late_writes(&self, writes: u64, waited: Duration) {
        self.probes.late_writes(writes, waited);
    }

    /// Probes a drive that failed, if a probe is due.
    pub(crate) fn probe(&self) {
        self.probes.probe_reads();
        self.probes.probe_writes();
        self.space.probe_growth();
    }

    /// Removes a chunk; `waiter` gets the answer when the removal is durable.
    pub(crate) fn remove(&self, key: &ChunkKey, waiter: ChangeWaiter) {
        let core = &self.core;
        let mut state = core.state.lock();
        let there = state.index.remove(key);
        let mut given_up = Vec::new();
        if let Some(writing) = state.writing.get_mut(key) {
            writing.doomed = true;
            given_up = mem::take(&mut writing.again);
        } else if !there && !state.queue.may_bring_back(key) {
            drop(state);
            return waiter.0.answer(waiter.1, Some(false));
        }
        // A chunk that is not in the index may still be in the log, or about to be written to it: after this
        // record its absence is durable. Other absent chunks need no record, and wait for nothing.
        count(&core.counters.removed, u64::from(there));
        let waiter = Some((waiter, there));
        state.queue.push(Record::Remove { key: *key }, waiter);
        drop(state);
        core.work.notify_one();
        for (.., (batch, index)) in given_up {
            batch.answer(index, Ok(Stored::Declined));
        }
    }

    /// Returns the estimated time to read `bytes` bytes.
    pub(crate) fn read_time(&self, bytes: u64) -> Duration {
        self.reader.time(bytes)
    }

    /// Returns the clears after which the chunks were stored.
    pub(crate) fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.core.state.lock().clears)
    }

    /// Removes all chunks, also those that are being written, unless the drive has these clears already.
    /// Returns the number of chunks. `waiter` gets true when all is durable.
    pub(crate) fn clear(&self, clears: &Arc<Clears>, waiter: ChangeWaiter) -> u64 {
        let (core, id) = (&self.core, clears.id());
        let mut state = core.state.lock();
        let (mut gone, mut given_up) = (0, Vec::new());
        let mut record = state.index.cleared();
        // Of two concurrent clears, the later one may come first.
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
        core.work.notify_one();
        count(&core.counters.removed, gone);
        // Wakers may run any code, so they are called without the lock.
        for (.., (batch, index)) in given_up {
            batch.answer(index, Ok(Stored::Declined));
        }
        gone
    }

    /// Returns true if removals can no longer be made durable.
    pub(crate) fn closed(&self) -> bool {
        self.core.state.lock().closed
    }

    /// Lets a stop that is in progress, or the next one, end without waiting.
    pub(crate) fn give_up(&self) {
        let mut state = self.core.state.lock();
        state.closed = true;
        state.queue.stop = Stop::AtOnce;
        drop(state);
        self.core.work.notify_all();
    }

    /// Stops the drive. With `orderly`, makes everything durable and writes a checkpoint first, unless
    /// [`Self::give_up`] is called. A thread that waits for an unresponsive file system is left behind, and
    /// the folder stays locked until it ends.
    pub(crate) fn stop(&self, orderly: bool) -> io::Result<()> {
        {
            let mut state = self.core.state.lock();
            state.closed = true;
            if !orderly {
                state.queue.stop = Stop::AtOnce;
            } else if state.queue.stop == Stop::No {
                state.queue.stop = Stop::Orderly;
            }
        }
        self.core.work.notify_all();
        let Some(committer) = self.committer.lock().take() else {
            return Ok(());
        };
        let space_thread = self.space_thread.lock().take();
        let me = thread::current().id();
        let goes_on = || !committer.is_finished() && committer.thread().id() != me;
        let given_up = || self.core.state.lock().queue.stop == Stop::AtOnce;
        while goes_on() && !given_up() {
            thread::sleep(Duration::from_millis(1));
        }
        self.space.end_space_thread();
        let hangs = !committer.is_finished();
        if hangs {
            // Stopping the volume also ends what the threads wait for, as far as possible.
            self.core.volume.stop();
        }
        let deadline = Instant::now() + self.core.settings.leave;
        let ended = join_before(committer, deadline);
        space_thread.map(|space_thread| join_before(space_thread, deadline));
        if !hangs {
            self.core.volume.stop();
        }
        // If the space thread was left behind, it does not answer these stores any more.
        let parked = self.writer.take_parked();
        drop(parked);
        let left: Vec<_> = {
            let mut state = self.core.state.lock();
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
        // As after a kill: acknowledged chunks are durable, and the next start finds them.
        let _ = self.stop(false);
    }
}
