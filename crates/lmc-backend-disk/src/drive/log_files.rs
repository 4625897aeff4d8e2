//! The files of the log: new logs, their checkpoints, and the map of clears.

use std::io;
use std::sync::Arc;

use lmc_key::ClearsId;
use parking_lot::MutexGuard;

use super::state::DriveCore;
use super::watch::FileWatch;
use crate::clears_file::{self, CLEARS_NAME};
use crate::counters::count;
use crate::files::{is_full, replace_file};
use crate::format::{BLOCK_LEN, CheckpointHeader, RECORD_LEN, Record};
use crate::index::SNAPSHOT_PART;
use crate::log::{Tail, UNFINISHED, checkpoint_name, checkpoint_numbers, log_name, log_numbers};
use crate::volume::{AlignedBuf, BLOCK, FileId, Kind};

/// The current log.
#[derive(Debug)]
pub(super) struct Log {
    /// `None` if there was no space for a file: then the next log is tried later.
    pub(super) file: Option<FileId>,
    pub(super) tail: Tail,
}

/// Manages the files that the log's thread writes. No other thread uses it once the drive has started.
#[derive(Debug)]
pub(super) struct LogFiles {
    pub(super) core: Arc<DriveCore>,
    pub(super) watch: Arc<FileWatch>,
    /// Digest of the map in the drive's file; `None` while the file is damaged.
    pub(super) noted: Option<ClearsId>,
}

impl LogFiles {
    /// Writes the map of the index's clears, unless the file has it already. A record with the digest of the
    /// map is written after it.
    pub(super) fn write_clears(&mut self) -> io::Result<()> {
        let (id, clears) = {
            let state = self.core.state.lock();
            let id = state.index.clears();
            if self.noted == Some(id) {
                return Ok(());
            }
            (id, Arc::clone(&state.clears))
        };
        self.watch.check_files()?;
        replace_file(
            &*self.core.volume,
            CLEARS_NAME,
            &clears_file::encode(&clears),
        )?;
        self.noted = Some(id);
        Ok(())
    }

    /// Continues the log of the previous process; up to the end of its file if there is no space for more.
    pub(super) fn old_log(&self, mut tail: Tail) -> io::Result<Log> {
        self.sync_logs()?;
        let (name, bytes) = (log_name(tail.log), self.core.settings.log_bytes);
        let file = match self.core.volume.open(&name, Some(bytes)) {
            Err(error) if is_full(&error) => self.core.volume.open(&name, None)?,
            opened => {
                tail.bytes = bytes;
                opened?
            }
        };
        let file = Some(file);
        Ok(Log { file, tail })
    }

    /// Begins the first log of this process. Without space for it, chunks can still be read, and the log is
    /// retried later, as after any failure.
    pub(super) fn first_log(&mut self, number: u64) -> io::Result<Log> {
        match self.new_log(number) {
            Err(error) if number > 0 && is_full(&error) => {
                self.sync_logs()?;
                self.core.condition.log_failed(&error, &self.core.counters);
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

    /// Makes durable what was found in the logs, and the names of all files: the previous process may have
    /// been killed before it did so, and later writes depend on them.
    fn sync_logs(&self) -> io::Result<()> {
        for number in log_numbers(&self.core.volume.list()?) {
            let file = self.core.volume.open(&log_name(number), None)?;
            let synced = self.core.wait_for(Kind::Sync, file, 0, None);
            self.core.volume.close(file);
            synced?;
        }
        self.core.volume.sync_names()
    }

    /// Begins a new log and makes a checkpoint for it, then removes older ones.
    pub(super) fn new_log(&mut self, number: u64) -> io::Result<Log> {
        // Leftovers of a failed attempt would be taken for frames.
        let name = log_name(number);
        if self.core.volume.list()?.contains(&name) {
            self.core.volume.remove(&name)?;
        }
        let bytes = self.core.settings.log_bytes;
        let file = self.core.volume.open(&name, Some(bytes))?;
        let begun = self.fill_log(file, bytes).inspect_err(|_| {
            // Half of a log is useless to a full drive.
            let _ = self.core.volume.remove(&name);
        });
        if let Err(error) = begun.and_then(|()| self.replace_logs_before(number)) {
            self.core.volume.close(file);
            return Err(error);
        }
        count(&self.core.counters.checkpoints, 1);
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

    /// Writes zeroes to the whole of a new log once. Until then the file system has only reserved the blocks,
    /// and each frame would also change the file's metadata, which costs as much as the frame.
    fn fill_log(&self, file: FileId, bytes: u64) -> io::Result<()> {
        const PART: u64 = 1 << 20;
        for at in (0..bytes).step_by(PART as usize) {
            let zeroes = AlignedBuf::new(PART.min(bytes - at));
            self.core.wait_for(Kind::Write, file, at, Some(zeroes))?;
        }
        Ok(())
    }

    /// Makes a log's checkpoint, which replaces the earlier logs.
    fn replace_logs_before(&mut self, number: u64) -> io::Result<()> {
        self.core.volume.sync_names()?;
        self.write_clears()?;
        self.checkpoint(number)?;
        for old in checkpoint_numbers(&self.core.volume.list()?) {
            if old < number {
                self.core.volume.remove(&checkpoint_name(old))?;
            }
        }
        for old in log_numbers(&self.core.volume.list()?) {
            if old < number {
                self.core.volume.remove(&log_name(old))?;
            }
        }
        self.core.volume.sync_names()
    }

    /// Returns the current index. Other threads may take its lock between two records. No chunk is added
    /// meanwhile, because only this thread, the log's thread, adds chunks.
    fn snapshot(&self) -> Vec<Record> {
        let mut records = Vec::new();
        let mut snapshot = self.core.state.lock().index.snapshot(&mut records);
        loop {
            records.reserve(SNAPSHOT_PART);
            let state = self.core.state.lock();
            let more = state.index.tell(&mut snapshot, &mut records);
            MutexGuard::unlock_fair(state);
            if !more {
                return records;
            }
        }
    }

    /// Writes a checkpoint of the current index.
    fn checkpoint(&self, log: u64) -> io::Result<()> {
        let records = self.snapshot();
        let len = (records.len() * RECORD_LEN).next_multiple_of(BLOCK_LEN) as u64;
        if self
            .core
            .volume
            .list()?
            .iter()
            .any(|name| name == UNFINISHED)
        {
            self.core.volume.remove(UNFINISHED)?;
        }
        let file = self.core.volume.open(UNFINISHED, Some(BLOCK + len))?;
        let written = self.write_checkpoint(log, file, &records);
        self.core.volume.close(file);
        written?;
        self.core.volume.rename(UNFINISHED, &checkpoint_name(log))?;
        self.core.volume.sync_names()
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
            self.core.wait_for(Kind::Write, file, at, Some(bytes))?;
            at += len;
        }
        let mut head = AlignedBuf::new(BLOCK);
        CheckpointHeader {
            drive_id: self.core.header.drive_id,
            log,
            records: records.len() as u64,
            body_sum: sum.digest(),
        }
        .encode(&mut head);
        self.core.wait_for(Kind::Write, file, 0, Some(head))?;
        self.core.wait_for(Kind::Sync, file, 0, None)
    }
}
