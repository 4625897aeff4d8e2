//! Probes of a drive that failed: reads of its first block, repeated reads, and writes where writes failed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::health::Broken;
use super::state::DriveCore;
use crate::counters::count;
use crate::format::{DriveHeader, Location, PutRecord, blocks};
use crate::volume::{AlignedBuf, BLOCK, Buf, FileId, Kind, VolumeOp};

/// Returns true if a read failed because of its location, not because of a lack of memory or the like.
fn is_about_a_location(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    let known = [libc::EIO, libc::ENODATA, libc::EILSEQ, libc::EREMOTEIO];
    code.is_some_and(|code| known.contains(&code)) || error.kind() == io::ErrorKind::UnexpectedEof
}

/// The reads and writes that find out whether a drive works.
#[derive(Debug)]
pub(super) struct HealthProbes {
    core: Arc<DriveCore>,
    header_file: FileId,
}

impl HealthProbes {
    pub(super) fn new(core: Arc<DriveCore>, header_file: FileId) -> Self {
        Self { core, header_file }
    }

    /// Handles a failed read of a chunk. If its location is bad, the chunk is removed. Otherwise the drive is
    /// bad, or the failure was temporary.
    pub(super) fn read_failed(self: &Arc<Self>, found: PutRecord, error: &io::Error) {
        let (what, is_local) = (format!("reading: {error}"), is_about_a_location(error));
        self.look(move |this, answers| match answers {
            true if is_local => this.read_again(found),
            true => {}
            false => {
                let core = &this.core;
                core.condition.read_counts_as_failed(&what, &core.counters);
            }
        });
    }

    /// Reads a chunk a second time, and removes it if its location is unreadable again.
    fn read_again(self: &Arc<Self>, found: PutRecord) {
        let segment = found.location.segment;
        let file = {
            let mut state = self.core.state.lock();
            if state.index.find(&found.key) != Some(found) {
                return;
            }
            let Some(file) = state.files.get(segment as usize).copied().flatten() else {
                return;
            };
            state.index.enter(segment, false);
            file
        };
        let core = Arc::clone(&self.core);
        let len = (1 + blocks(found.len)) * BLOCK;
        self.core.volume.submit(vec![VolumeOp {
            kind: Kind::Read,
            file: file.id,
            offset: u64::from(found.location.block) * BLOCK,
            len,
            buf: Some(Buf::Own(AlignedBuf::new(len))),
            abandoned: None,
            done: Box::new(move |done| {
                core.state.lock().index.leave(segment);
                if done.result.is_err_and(|error| is_about_a_location(&error)) {
                    core.retire(&found);
                }
            }),
        }]);
    }

    /// Reads the drive's first block, and passes on whether that works.
    fn look(self: &Arc<Self>, then: impl FnOnce(&Arc<Self>, bool) + Send + 'static) {
        let this = Arc::clone(self);
        self.core.volume.submit(vec![VolumeOp {
            kind: Kind::Read,
            file: self.header_file,
            offset: 0,
            len: BLOCK,
            buf: Some(Buf::Own(AlignedBuf::new(BLOCK))),
            abandoned: None,
            done: Box::new(move |done| {
                let answers = match (done.result, done.buf) {
                    (Ok(()), Some(Buf::Own(block))) => {
                        DriveHeader::decode(&block).is_ok_and(|header| header == this.core.header)
                    }
                    _ => false,
                };
                then(&this, answers);
            }),
        }]);
    }

    /// Probes reads, if a probe is due.
    pub(super) fn probe_reads(self: &Arc<Self>) {
        let core = &self.core;
        if core.condition.begin_read_probe(core.settings.probe_every) {
            self.look(|this, answers| this.core.condition.read_probed(answers));
        }
    }

    /// Repeats a failed write with the same length, each time at another of the failed locations, unless
    /// other writes are in progress.
    pub(super) fn probe_writes(self: &Arc<Self>) {
        let condition = &self.core.condition;
        let Some(locations) = condition.begin_write_probe(self.core.settings.probe_every) else {
            return;
        };
        let location = {
            let mut state = self.core.state.lock();
            let location = locations.into_iter().find_map(|broken| {
                let Location {
                    segment,
                    generation,
                    ..
                } = broken.location;
                let file = state.files.get(segment as usize).copied().flatten()?;
                let same = state.index.generation(segment) == generation;
                // A free segment may begin its next use during this write.
                (same && !state.index.is_free(segment)).then_some((broken, file.id))
            });
            match location {
                Some((broken, _)) => state.index.enter(broken.location.segment, false),
                // The end of the writes in progress will show the drive's state.
                None if !state.writing.is_empty() => {
                    drop(state);
                    return condition.write_probe_failed();
                }
                None => {}
            }
            location
        };
        match location {
            Some((broken, file)) => self.write_again(Kind::WriteDurably, broken, file),
            // The drive has answered, and there is no location to probe.
            None => condition.write_works(),
        }
    }

    fn write_again(self: &Arc<Self>, kind: Kind, broken: Broken, file: FileId) {
        let this = Arc::clone(self);
        let len = broken.payload * BLOCK;
        self.core.volume.submit(vec![VolumeOp {
            kind,
            file,
            offset: u64::from(broken.location.block + 1) * BLOCK,
            len,
            buf: Some(Buf::Own(AlignedBuf::new(len))),
            abandoned: None,
            done: Box::new(move |done| {
                let code = done.result.as_ref().map_err(io::Error::raw_os_error);
                // A file system that cannot write and sync in one operation.
                let unknown = matches!(code, Err(Some(libc::EOPNOTSUPP | libc::EINVAL)));
                if unknown && kind == Kind::WriteDurably {
                    return this.write_again(Kind::Write, broken, file);
                }
                this.core.state.lock().index.leave(broken.location.segment);
                match done.result {
                    Ok(()) => this.core.condition.write_works(),
                    Err(_) => this.core.condition.write_probe_failed(),
                }
            }),
        }]);
    }

    /// Records reads that had no answer at their deadline, after `waited`.
    pub(super) fn late_reads(&self, reads: u64, waited: Duration) {
        count(&self.core.counters.late, reads);
        if reads > 0 && waited >= self.core.settings.stall {
            let what = format!("no answer in {waited:.1?}");
            let core = &self.core;
            core.condition.read_counts_as_failed(&what, &core.counters);
        }
    }

    /// Records writes that had no answer at their deadline, after `waited`.
    pub(super) fn late_writes(&self, writes: u64, waited: Duration) {
        count(&self.core.counters.late, writes);
        if writes > 0 && waited >= self.core.settings.stall {
            let what = format!("nothing was written in {waited:.1?}");
            self.core.condition.writes_late(&what);
        }
    }
}
