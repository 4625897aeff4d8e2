//! The log: what was written is made durable in groups, and from time to time a checkpoint.

use std::io;
use std::sync::Arc;

use lmc_backend::{BackendError, Stored};
use lmc_key::ChunkKey;
use parking_lot::MutexGuard;
use tracing::{info, warn};

use super::files::replace_file;
use super::{Gone, LogChange, Ready, SegmentFile, Shared, State, Stop, again, is_full};
use crate::clears_file::{self, CLEARS_NAME};
use crate::counters::count;
use crate::format::{
    BLOCK_LEN, CheckpointHeader, MAX_FRAME_RECORDS, PutRecord, RECORD_LEN, Record, encode_frame,
    frame_len,
};
use crate::index::SNAPSHOT_PART;
use crate::log::{Tail, UNFINISHED, checkpoint_name, checkpoint_numbers, log_name, log_numbers};
use crate::volume::{AlignedBuf, BLOCK, FileId, Kind};

#[derive(Debug)]
pub(super) struct Log {
    /// `None` if there was no space for a file: the next log is begun then.
    file: Option<FileId>,
    tail: Tail,
}

impl Shared {
    /// The log's thread: makes changes durable in groups until the drive stops.
    pub(super) fn commit_all(self: Arc<Self>, mut log: Log) -> io::Result<()> {
        loop {
            let (changes, stop) = self.next_changes();
            if stop == Stop::AtOnce {
                self.give_up(changes);
                return Ok(());
            }
            if changes.is_empty() {
                // Either all is over and in order, or it is time to try the log again.
                let renewed = self.renew(&mut log);
                if stop == Stop::Orderly {
                    if self.condition.changed_files().is_none() {
                        return renewed;
                    }
                    // That nothing is durable there was warned of.
                    self.restore_header();
                    return Ok(());
                }
                continue;
            }
            self.commit(&mut log, changes);
        }
    }

    /// Waits for changes. None come when the drive stops, or when the log is to be tried again.
    fn next_changes(&self) -> (Vec<LogChange>, Stop) {
        let mut state = self.state.lock();
        if !self.condition.is_log_broken() {
            state.queue.behind = Gone::default();
        }
        loop {
            let State { queue, writing, .. } = &mut *state;
            let over = match queue.stop {
                Stop::No => false,
                Stop::Orderly => writing.is_empty(),
                Stop::AtOnce => true,
            };
            if over || !queue.changes.is_empty() {
                return (queue.take(), queue.stop);
            }
            if !self.condition.is_log_broken() {
                self.work.wait(&mut state);
            } else if self
                .work
                .wait_for(&mut state, self.settings.probe_every)
                .timed_out()
            {
                return (Vec::new(), Stop::No);
            }
        }
    }

    /// Ends without a trace: nothing that waits was acknowledged.
    fn give_up(self: &Arc<Self>, changes: Vec<LogChange>) {
        for change in changes {
            if let LogChange::Put(Ready { put, .. }) = change {
                self.store_ended(&put.key, put.len, |_| Err(BackendError::Closed));
            }
        }
    }

    /// Makes changes durable: first the bytes of chunks, then the log, then what others see.
    fn commit(self: &Arc<Self>, log: &mut Log, changes: Vec<LogChange>) {
        count(&self.counters.commits, 1);
        let (changes, failed) = self.sync_segments(changes);
        for (put, error) in failed {
            self.write_failed(&put, &error);
            self.store_ended(&put.key, put.len, |_| Err(BackendError::Io(again(&error))));
        }
        // What one frame holds is applied before the next is written: that may begin a new log,
        // whose checkpoint must know of it.
        // A frame fits into an empty log.
        let records_of_log = (self.settings.log_bytes - BLOCK) as usize / RECORD_LEN;
        let most = records_of_log.min(MAX_FRAME_RECORDS);
        let mut changes = changes.into_iter();
        loop {
            let group: Vec<LogChange> = changes.by_ref().take(most).collect();
            if group.is_empty() {
                return;
            }
            let logged = self.log_changes(log, &group);
            for change in group {
                match change {
                    LogChange::Put(ready) => self.committed(&ready.put, &logged),
                    LogChange::Other(_, Some(((batch, index), answer))) if logged.is_ok() => {
                        batch.answer(index, Some(answer));
                    }
                    // The chunks are gone. A restart may not know of the clear.
                    LogChange::Other(Record::Cleared { .. }, Some(((batch, index), _))) => {
                        batch.answer(index, Some(false));
                    }
                    // A removal that is not durable is not acknowledged: its deadline comes.
                    LogChange::Other(..) => {}
                }
            }
        }
    }

    fn log_changes(&self, log: &mut Log, changes: &[LogChange]) -> io::Result<()> {
        let records: Vec<Record> = {
            // What was removed meanwhile is not put: its removal may stand before it.
            let state = self.state.lock();
            let doomed =
                |key: &ChunkKey| state.writing.get(key).is_some_and(|writing| writing.doomed);
            let record = |change: &LogChange| match change {
                LogChange::Put(ready) => {
                    (!doomed(&ready.put.key)).then_some(Record::Put(ready.put))
                }
                LogChange::Other(record, _) => Some(*record),
            };
            changes.iter().filter_map(record).collect()
        };
        if records.is_empty() {
            return Ok(());
        }
        let logged = self.append(log, &records);
        if let Err(error) = &logged {
            self.log_failed(error);
        }
        logged
    }

    fn log_failed(&self, error: &io::Error) {
        count(&self.counters.write_errors, 1);
        let reason = format!("the index log cannot be written: {error}");
        // A drive that is out for its files was warned of.
        if self.condition.changed_files().is_none() {
            warn!(
                reason,
                "index log write failed; the drive is read-only until it recovers"
            );
        }
        self.condition.log_failed(reason);
    }

    fn committed(self: &Arc<Self>, put: &PutRecord, logged: &io::Result<()>) {
        if let Err(error) = logged {
            {
                let mut state = self.state.lock();
                state.index.leave(put.location.segment);
                // It may have been written all the same.
                state.queue.behind.keys.insert(put.key);
            }
            return self.store_ended(&put.key, put.len, |_| Err(BackendError::Io(again(error))));
        }
        {
            let mut state = self.state.lock();
            state.index.leave(put.location.segment);
            let doomed = state
                .writing
                .get(&put.key)
                .is_some_and(|writing| writing.doomed);
            if !doomed {
                state.index.apply(&Record::Put(*put));
            }
        }
        count(&self.counters.written, 1);
        count(&self.counters.written_bytes, put.len);
        self.condition.chunk_kept();
        self.store_ended(&put.key, put.len, |joined| {
            Ok(match joined {
                false => Stored::Written,
                true => Stored::Present,
            })
        });
    }

    /// Syncs the segments that chunks were written to. What could not be synced comes back.
    fn sync_segments(
        &self,
        changes: Vec<LogChange>,
    ) -> (Vec<LogChange>, Vec<(PutRecord, io::Error)>) {
        let mut segments: Vec<(u32, SegmentFile)> = changes
            .iter()
            .filter_map(|change| match change {
                LogChange::Put(ready) => Some((ready.put.location.segment, ready.file)),
                LogChange::Other(..) => None,
            })
            .collect();
        segments.sort_unstable_by_key(|(segment, file)| (*segment, file.failed_syncs));
        segments.dedup();
        let mut failed: Vec<(SegmentFile, io::Error)> = Vec::new();
        for (segment, file) in segments {
            if let Err(error) = self.sync_segment(segment, file) {
                failed.push((file, error));
            }
        }
        if failed.is_empty() {
            return (changes, Vec::new());
        }
        let (mut synced, mut lost) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                LogChange::Put(ready) => {
                    match failed.iter().find(|(file, _)| *file == ready.file) {
                        Some((_, error)) => lost.push((ready.put, again(error))),
                        None => synced.push(LogChange::Put(ready)),
                    }
                }
                other => synced.push(other),
            }
        }
        (synced, lost)
    }

    /// Makes durable what was written to a segment since `file` was looked up.
    fn sync_segment(&self, segment: u32, file: SegmentFile) -> io::Result<()> {
        let with_file = |then: fn(&mut SegmentFile)| {
            let mut state = self.state.lock();
            let known = state.files.get_mut(segment as usize);
            let known = known.and_then(Option::as_mut)?;
            then(known);
            Some(*known)
        };
        if with_file(|_| {}) != Some(file) {
            return Err(io::Error::other("a sync failed after this was written"));
        }
        let synced = self.wait_for(Kind::Sync, file.id, 0, None);
        if synced.is_err() {
            with_file(|file| file.failed_syncs += 1);
        }
        synced
    }

    /// Appends a frame to the log, or to a new one when it is full or in an unknown state.
    fn append(&self, log: &mut Log, records: &[Record]) -> io::Result<()> {
        if let Some(reason) = self.condition.changed_files() {
            return Err(io::Error::other(reason));
        }
        let len = frame_len(records.len()) as u64;
        let full = log.tail.offset + len > log.tail.bytes;
        if full || self.condition.is_log_broken() {
            self.renew(log)?;
        }
        let Tail {
            log: number,
            offset,
            sequence,
            ..
        } = log.tail;
        let Some(file) = log.file else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if records.iter().any(|r| matches!(r, Record::Cleared { .. })) {
            self.write_clears()?;
        }
        let frame = || {
            let mut frame = AlignedBuf::new(len);
            encode_frame(&self.header.drive_id, number, sequence, records, &mut frame);
            Some(frame)
        };
        let written = self.wait_for(Kind::WriteDurably, file, offset, frame());
        match written.map_err(|error| (error.raw_os_error(), error)) {
            // A file system that does not know how to do both at once.
            Err((Some(libc::EOPNOTSUPP | libc::EINVAL), _)) => {
                self.wait_for(Kind::Write, file, offset, frame())?;
                self.wait_for(Kind::Sync, file, 0, None)?;
            }
            Err((_, error)) => return Err(error),
            Ok(()) => {}
        }
        log.tail.offset += len;
        log.tail.sequence += 1;
        Ok(())
    }

    /// Writes the map of the clears that the index is at, unless the file has it. A record with the
    /// digest of the map is written after it.
    fn write_clears(&self) -> io::Result<()> {
        let (id, clears) = {
            let state = self.state.lock();
            let id = state.index.clears();
            if state.noted == Some(id) {
                return Ok(());
            }
            (id, Arc::clone(&state.clears))
        };
        self.check_files()?;
        replace_file(&*self.volume, CLEARS_NAME, &clears_file::encode(&clears))?;
        self.state.lock().noted = Some(id);
        Ok(())
    }

    /// Goes on in the next log.
    fn renew(&self, log: &mut Log) -> io::Result<()> {
        self.check_files()?;
        let next = self.new_log(log.tail.log + 1)?;
        if let Some(file) = std::mem::replace(log, next).file {
            self.volume.close(file);
        }
        self.log_works();
        Ok(())
    }

    fn log_works(&self) {
        if self.condition.is_log_broken() {
            info!("index log works again; the drive is writable");
            self.condition.log_works();
        }
    }

    /// Continues the log of the process before, up to the end of its file if there is no space for
    /// more.
    pub(super) fn old_log(&self, mut tail: Tail) -> io::Result<Log> {
        self.sync_logs()?;
        let (name, bytes) = (log_name(tail.log), self.settings.log_bytes);
        let file = match self.volume.open(&name, Some(bytes)) {
            Err(error) if is_full(&error) => self.volume.open(&name, None)?,
            opened => {
                tail.bytes = bytes;
                opened?
            }
        };
        let file = Some(file);
        Ok(Log { file, tail })
    }

    /// Begins the first log of this process. Without space for it the chunks can still be
    /// read, and it is tried again later, as after any failure.
    pub(super) fn first_log(&self, number: u64) -> io::Result<Log> {
        match self.new_log(number) {
            Err(error) if number > 0 && is_full(&error) => {
                self.sync_logs()?;
                self.log_failed(&error);
                let tail = Tail {
                    log: number - 1,
                    offset: 0,
                    sequence: 0,
                    bytes: 0,
                };
                Ok(Log { file: None, tail })
            }
            begun => begun,
        }
    }

    /// Makes durable what was found in the logs, and the names of all files: the process before
    /// may have been killed before it did, and what is written from now on builds on them.
    fn sync_logs(&self) -> io::Result<()> {
        for number in log_numbers(&self.volume.list()?) {
            let file = self.volume.open(&log_name(number), None)?;
            let synced = self.wait_for(Kind::Sync, file, 0, None);
            self.volume.close(file);
            synced?;
        }
        self.volume.sync_names()
    }

    /// Begins a new log and a checkpoint for it; then older ones go.
    fn new_log(&self, number: u64) -> io::Result<Log> {
        // What an attempt that failed has left would be taken for frames.
        let name = log_name(number);
        if self.volume.list()?.contains(&name) {
            self.volume.remove(&name)?;
        }
        let bytes = self.settings.log_bytes;
        let file = self.volume.open(&name, Some(bytes))?;
        let begun = self.fill_log(file, bytes).inspect_err(|_| {
            // A drive that is full has no use for half of it.
            let _ = self.volume.remove(&name);
        });
        if let Err(error) = begun.and_then(|()| self.replace_logs_before(number)) {
            self.volume.close(file);
            return Err(error);
        }
        count(&self.counters.checkpoints, 1);
        Ok(Log {
            file: Some(file),
            tail: Tail {
                log: number,
                offset: 0,
                sequence: 0,
                bytes,
            },
        })
    }

    /// Writes zeroes to the whole of a new log once. The file system has only reserved the blocks:
    /// each frame would otherwise change the file's metadata, which costs as much as the frame.
    fn fill_log(&self, file: FileId, bytes: u64) -> io::Result<()> {
        const PART: u64 = 1 << 20;
        for at in (0..bytes).step_by(PART as usize) {
            let zeroes = AlignedBuf::new(PART.min(bytes - at));
            self.wait_for(Kind::Write, file, at, Some(zeroes))?;
        }
        Ok(())
    }

    /// Makes a log's checkpoint, which replaces the logs before it.
    fn replace_logs_before(&self, number: u64) -> io::Result<()> {
        self.volume.sync_names()?;
        self.write_clears()?;
        self.checkpoint(number)?;
        for old in checkpoint_numbers(&self.volume.list()?) {
            if old < number {
                self.volume.remove(&checkpoint_name(old))?;
            }
        }
        for old in log_numbers(&self.volume.list()?) {
            if old < number {
                self.volume.remove(&log_name(old))?;
            }
        }
        self.volume.sync_names()
    }

    /// The index as it is now. Those who wait for its lock come in between; nothing is put
    /// meanwhile, because only the log's thread does that, and this is it.
    fn snapshot(&self) -> Vec<Record> {
        let mut records = Vec::new();
        let mut snapshot = self.state.lock().index.snapshot(&mut records);
        loop {
            records.reserve(SNAPSHOT_PART);
            let state = self.state.lock();
            let more = state.index.tell(&mut snapshot, &mut records);
            MutexGuard::unlock_fair(state);
            if !more {
                return records;
            }
        }
    }

    /// Writes the index as it is now.
    fn checkpoint(&self, log: u64) -> io::Result<()> {
        let records = self.snapshot();
        let len = (records.len() * RECORD_LEN).next_multiple_of(BLOCK_LEN) as u64;
        if self.volume.list()?.iter().any(|name| name == UNFINISHED) {
            self.volume.remove(UNFINISHED)?;
        }
        let file = self.volume.open(UNFINISHED, Some(BLOCK + len))?;
        let written = self.write_checkpoint(log, file, &records);
        self.volume.close(file);
        written?;
        self.volume.rename(UNFINISHED, &checkpoint_name(log))?;
        self.volume.sync_names()
    }

    fn write_checkpoint(&self, log: u64, file: FileId, records: &[Record]) -> io::Result<()> {
        let mut sum = xxhash_rust::xxh3::Xxh3Default::new();
        let mut at = BLOCK;
        const PART: usize = 8192;
        for part in records.chunks(PART) {
            let mut bytes = AlignedBuf::new((part.len() * RECORD_LEN) as u64);
            for (record, out) in part.iter().zip(bytes.chunks_exact_mut(RECORD_LEN)) {
                record.encode(out);
            }
            sum.update(&bytes);
            let len = bytes.len() as u64;
            self.wait_for(Kind::Write, file, at, Some(bytes))?;
            at += len;
        }
        let mut head = AlignedBuf::new(BLOCK);
        CheckpointHeader {
            drive_id: self.header.drive_id,
            log,
            records: records.len() as u64,
            body_sum: sum.digest(),
        }
        .encode(&mut head);
        self.wait_for(Kind::Write, file, 0, Some(head))?;
        self.wait_for(Kind::Sync, file, 0, None)
    }
}
