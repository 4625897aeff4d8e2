//! The log's thread: makes writes durable in groups, and makes a checkpoint from time to time.

use std::io;
use std::sync::Arc;

use lmc_backend::{BackendError, Stored};
use lmc_key::ChunkKey;

use super::log_files::{Log, LogFiles};
use super::state::{DriveCore, DriveState, Gone, LogChange, Ready, SegmentFile, Stop};
use super::store::ChunkWriter;
use crate::counters::count;
use crate::format::{MAX_FRAME_RECORDS, PutRecord, RECORD_LEN, Record, encode_frame, frame_len};
use crate::log::Tail;
use crate::volume::{AlignedBuf, BLOCK, Kind};

/// The log's thread. Only this thread writes the log and makes chunks findable.
#[derive(Debug)]
pub(super) struct Committer {
    pub(super) core: Arc<DriveCore>,
    pub(super) writer: Arc<ChunkWriter>,
    pub(super) files: LogFiles,
    pub(super) log: Log,
}

impl Committer {
    /// Runs the thread: makes changes durable in groups until the drive stops.
    pub(super) fn run(mut self) -> io::Result<()> {
        loop {
            let (changes, stop) = self.next_changes();
            if stop == Stop::AtOnce {
                self.give_up(changes);
                return Ok(());
            }
            if changes.is_empty() {
                // Either everything is finished and in order, or it is time to retry the log.
                let renewed = self.renew();
                if stop == Stop::Orderly {
                    if self.core.condition.changed_files().is_none() {
                        return renewed;
                    }
                    // A warning has already said that no chunk is durable there.
                    self.files.watch.restore_header();
                    return Ok(());
                }
                continue;
            }
            self.commit(changes);
        }
    }

    /// Waits for changes. Returns none if the drive stops, or if the log is to be retried.
    fn next_changes(&self) -> (Vec<LogChange>, Stop) {
        let mut state = self.core.state.lock();
        if !self.core.condition.is_log_broken() {
            state.queue.behind = Gone::default();
        }
        loop {
            let DriveState { queue, writing, .. } = &mut *state;
            let over = match queue.stop {
                Stop::No => false,
                Stop::Orderly => writing.is_empty(),
                Stop::AtOnce => true,
            };
            if over || !queue.changes.is_empty() {
                return (queue.take(), queue.stop);
            }
            if !self.core.condition.is_log_broken() {
                self.core.work.wait(&mut state);
            } else if self
                .core
                .work
                .wait_for(&mut state, self.core.settings.probe_every)
                .timed_out()
            {
                return (Vec::new(), Stop::No);
            }
        }
    }

    /// Drops the changes: nothing that waits was acknowledged.
    fn give_up(&self, changes: Vec<LogChange>) {
        for change in changes {
            if let LogChange::Put(Ready { put, .. }) = change {
                self.writer
                    .store_ended(&put.key, put.len, |_| Err(BackendError::Closed));
            }
        }
    }

    /// Makes changes durable: first the bytes of chunks, then the log, then the index that others see.
    fn commit(&mut self, changes: Vec<LogChange>) {
        count(&self.core.counters.commits, 1);
        let (changes, failed) = self.sync_segments(changes);
        for (put, error) in failed {
            self.writer.write_failed(&put, &error);
            let error = BackendError::Io(error);
            self.writer
                .store_ended(&put.key, put.len, |_| Err(error.clone()));
        }
        // The records of one frame are applied before the next frame is written: that write may begin a new
        // log, whose checkpoint must have them. A frame fits into an empty log.
        let records_of_log = (self.core.settings.log_bytes - BLOCK) as usize / RECORD_LEN;
        let most = records_of_log.min(MAX_FRAME_RECORDS);
        let mut changes = changes.into_iter();
        loop {
            let group: Vec<LogChange> = changes.by_ref().take(most).collect();
            if group.is_empty() {
                return;
            }
            let logged = self.log_changes(&group).map_err(BackendError::from);
            for change in group {
                match change {
                    LogChange::Put(ready) => self.committed(&ready.put, &logged),
                    LogChange::Other(_, Some(((batch, index), answer))) if logged.is_ok() => {
                        batch.answer(index, Some(answer));
                    }
                    // The chunks are gone, but a restart may not know of the clear.
                    LogChange::Other(Record::Cleared { .. }, Some(((batch, index), _))) => {
                        batch.answer(index, Some(false));
                    }
                    // A removal that is not durable is not acknowledged: its caller waits until the deadline.
                    LogChange::Other(..) => {}
                }
            }
        }
    }

    fn log_changes(&mut self, changes: &[LogChange]) -> io::Result<()> {
        let records: Vec<Record> = {
            // A chunk that was removed meanwhile is not put: the record of its removal may come before it.
            let state = self.core.state.lock();
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
        let logged = self.append(&records);
        if let Err(error) = &logged {
            self.core.condition.log_failed(error, &self.core.counters);
        }
        logged
    }

    fn committed(&self, put: &PutRecord, logged: &Result<(), BackendError>) {
        if let Err(error) = logged {
            {
                let mut state = self.core.state.lock();
                state.index.leave(put.location.segment);
                // The record may have been written nevertheless.
                state.queue.behind.keys.insert(put.key);
            }
            return self
                .writer
                .store_ended(&put.key, put.len, |_| Err(error.clone()));
        }
        {
            let mut state = self.core.state.lock();
            state.index.leave(put.location.segment);
            let doomed = state
                .writing
                .get(&put.key)
                .is_some_and(|writing| writing.doomed);
            if !doomed {
                state.index.apply(&Record::Put(*put));
            }
        }
        count(&self.core.counters.written, 1);
        count(&self.core.counters.written_bytes, put.len);
        self.core.condition.chunk_kept();
        self.writer.store_ended(&put.key, put.len, |joined| {
            Ok(match joined {
                false => Stored::Written,
                true => Stored::Present,
            })
        });
    }

    /// Syncs the segments that chunks were written to. Returns the chunks that could not be synced.
    fn sync_segments(
        &self,
        changes: Vec<LogChange>,
    ) -> (Vec<LogChange>, Vec<(PutRecord, Arc<io::Error>)>) {
        let mut segments: Vec<(u32, SegmentFile)> = changes
            .iter()
            .filter_map(|change| match change {
                LogChange::Put(ready) => Some((ready.put.location.segment, ready.file)),
                LogChange::Other(..) => None,
            })
            .collect();
        segments.sort_unstable_by_key(|(segment, file)| (*segment, file.failed_syncs));
        segments.dedup();
        let mut failed: Vec<(SegmentFile, Arc<io::Error>)> = Vec::new();
        for (segment, file) in segments {
            if let Err(error) = self.sync_segment(segment, file) {
                failed.push((file, Arc::new(error)));
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
                        Some((_, error)) => lost.push((ready.put, Arc::clone(error))),
                        None => synced.push(LogChange::Put(ready)),
                    }
                }
                other => synced.push(other),
            }
        }
        (synced, lost)
    }

    /// Makes durable the bytes that were written to a segment since `file` was looked up.
    fn sync_segment(&self, segment: u32, file: SegmentFile) -> io::Result<()> {
        let with_file = |then: fn(&mut SegmentFile)| {
            let mut state = self.core.state.lock();
            let known = state.files.get_mut(segment as usize);
            let known = known.and_then(Option::as_mut)?;
            then(known);
            Some(*known)
        };
        if with_file(|_| {}) != Some(file) {
            return Err(io::Error::other("a sync failed after this was written"));
        }
        let synced = self.core.wait_for(Kind::Sync, file.id, 0, None);
        if synced.is_err() {
            with_file(|file| file.failed_syncs += 1);
        }
        synced
    }

    /// Appends a frame to the log, or to a new log if this one is full or in an unknown state.
    fn append(&mut self, records: &[Record]) -> io::Result<()> {
        if let Some(reason) = self.core.condition.changed_files() {
            return Err(io::Error::other(reason));
        }
        let len = frame_len(records.len()) as u64;
        let full = self.log.tail.offset + len > self.log.tail.bytes;
        if full || self.core.condition.is_log_broken() {
            self.renew()?;
        }
        let Tail {
            log: number,
            offset,
            sequence,
            ..
        } = self.log.tail;
        let Some(file) = self.log.file else {
            return Err(io::ErrorKind::NotFound.into());
        };
        if records.iter().any(|r| matches!(r, Record::Cleared { .. })) {
            self.files.write_clears()?;
        }
        let frame = || {
            let mut frame = AlignedBuf::new(len);
            encode_frame(
                &self.core.header.drive_id,
                number,
                sequence,
                records,
                &mut frame,
            );
            Some(frame)
        };
        let written = self
            .core
            .wait_for(Kind::WriteDurably, file, offset, frame());
        match written.map_err(|error| (error.raw_os_error(), error)) {
            // A file system that cannot write and sync in one operation.
            Err((Some(libc::EOPNOTSUPP | libc::EINVAL), _)) => {
                self.core.wait_for(Kind::Write, file, offset, frame())?;
                self.core.wait_for(Kind::Sync, file, 0, None)?;
            }
            Err((_, error)) => return Err(error),
            Ok(()) => {}
        }
        self.log.tail.offset += len;
        self.log.tail.sequence += 1;
        Ok(())
    }

    /// Continues in the next log.
    fn renew(&mut self) -> io::Result<()> {
        self.files.watch.check_files()?;
        let next = self.files.new_log(self.log.tail.log + 1)?;
        if let Some(file) = std::mem::replace(&mut self.log, next).file {
            self.core.volume.close(file);
        }
        self.core.condition.log_works();
        Ok(())
    }
}
