//! Health of a drive: the effects of failures, and the recovery from each.
//!
//! Five things can be wrong, each by itself. Reads that fail or are late take the drive *out*,
//! until a look at its first block is answered. Writes that fail or are late make it *unwritable*:
//! what is there is read, nothing is given up for what could not be written anyway, until as much
//! as failed can be written; and until a chunk is kept again, only segments that failed are given
//! up for others. The *log* may not be written, until it is started again. *Growth* may fail: chunks
//! then replace others, as on a full drive. And the *files* may not be as the drive has left them:
//! the drive is out until they are again, which after a removal means until a restart.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{Events, Health, Unavailable};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::{Drive, Shared};
use crate::backend::TIER;
use crate::counters::{Counters, count};
use crate::format::{DriveHeader, Location, PutRecord, blocks};
use crate::volume::{AlignedBuf, BLOCK, Buf, FileId, Kind, Op};

/// Failures in a row after which a drive is out, or unwritable.
const FAILURES: u32 = 3;

/// The faults of a drive.
#[derive(Debug, Default)]
pub(super) struct Condition {
    /// True if the drive is out; read on every request.
    out: AtomicBool,
    faults: Mutex<Faults>,
}

#[derive(Debug, Default)]
struct Faults {
    /// Reads that failed in a row.
    reads: u32,
    out: Option<Fault>,
    /// Writes that failed in a row, in different segments.
    writes: u32,
    /// Locations where writes failed since a chunk was last stored, in different segments, the
    /// latest last. They hold no chunk.
    broken: Vec<Broken>,
    unwritable: Option<Fault>,
    /// The reason why the log cannot be written.
    log: Option<String>,
    /// The reason why no segment can be made, other than that the file system is full.
    growth: Option<String>,
    /// The change of the drive's files by another program.
    files: Option<String>,
    /// Set when the drive is open.
    events: Option<Events>,
}

/// Allocation for a chunk that could not be written or made durable.
#[derive(Clone, Copy, Debug)]
struct Broken {
    location: Location,
    /// Blocks of the chunk's payload, which follows its header.
    payload: u64,
}

#[derive(Debug)]
struct Fault {
    reason: String,
    /// Instant at which the last probe began.
    looked: Instant,
    /// True while a probe is running.
    looking: bool,
}

impl Fault {
    fn new(reason: &str) -> Option<Self> {
        Some(Self {
            reason: reason.to_owned(),
            looked: Instant::now(),
            looking: false,
        })
    }

    /// Returns true if a probe is due, and marks it as begun. There is one at a time, so that probes
    /// do not pile up on a drive that does not answer.
    fn due(&mut self, every: Duration) -> bool {
        let due = !self.looking && self.looked.elapsed() >= every;
        if due {
            (self.looked, self.looking) = (Instant::now(), true);
        }
        due
    }

    /// The look is over, and has changed nothing.
    fn remains(fault: &mut Option<Self>) {
        if let Some(fault) = fault {
            fault.looking = false;
        }
    }
}

impl Condition {
    pub(super) fn is_out(&self) -> bool {
        self.out.load(Ordering::Acquire)
    }

    pub(super) fn is_log_broken(&self) -> bool {
        self.faults.lock().log.is_some()
    }

    /// Returns true if chunks can be written and logged, as far as is known.
    pub(super) fn is_writable(&self) -> bool {
        let faults = self.faults.lock();
        faults.log.is_none() && faults.unwritable.is_none() && faults.files.is_none()
    }

    /// Records what was done to the drive's files.
    pub(super) fn looked_at_files(&self, changed: Option<&str>, counters: &Counters) {
        let mut faults = self.faults.lock();
        match (&faults.files, changed) {
            (None, Some(reason)) => {
                count(&counters.taken_out, 1);
                warn!(reason, "drive is taken out, and its chunks are misses");
            }
            (Some(_), None) => info!("the drive's files are as they were; it is used again"),
            _ => {}
        }
        faults.files = changed.map(str::to_owned);
        self.set_out(&faults);
    }

    /// Returns what was done to the drive's files.
    pub(super) fn changed_files(&self) -> Option<String> {
        self.faults.lock().files.clone()
    }

    fn set_out(&self, faults: &Faults) {
        let out = faults.out.is_some() || faults.files.is_some();
        let was_out = self.out.swap(out, Ordering::AcqRel);
        if let Some(events) = faults.events.as_ref().filter(|_| was_out != out) {
            events.report_any(TIER);
        }
    }

    pub(super) fn report_to(&self, events: Events) {
        self.faults.lock().events = Some(events);
    }

    /// Says what is wrong with the log.
    pub(super) fn log_failed(&self, reason: String) {
        self.faults.lock().log = Some(reason);
    }

    pub(super) fn log_works(&self) {
        self.faults.lock().log = None;
    }

    /// Records whether a segment could be made. A full file system is no fault.
    pub(super) fn tried_to_grow(&self, error: Option<&io::Error>) {
        let reason = error.map(|error| format!("making a segment: {error}"));
        let mut faults = self.faults.lock();
        if faults.growth == reason {
            return;
        }
        match &reason {
            Some(reason) => warn!(
                reason,
                "drive cannot grow: check that its folder exists and is writable"
            ),
            None => info!("drive can grow again"),
        }
        faults.growth = reason;
    }

    pub(super) fn cannot_grow(&self) -> bool {
        self.faults.lock().growth.is_some()
    }

    pub(super) fn read_works(&self) {
        self.faults.lock().reads = 0;
    }

    /// A chunk was written and is durable.
    pub(super) fn chunk_kept(&self) {
        self.faults.lock().broken.clear();
        self.write_works();
    }

    /// Records that a write succeeded. There may still be no space for chunks.
    fn write_works(&self) {
        let mut faults = self.faults.lock();
        faults.writes = 0;
        if faults.unwritable.take().is_some() {
            info!("drive is writable again");
        }
    }

    /// A chunk could not be written, or not be made durable, at this location.
    pub(super) fn write_failed(&self, put: &PutRecord, what: &str) {
        let Location {
            segment,
            generation,
            ..
        } = put.location;
        let mut faults = self.faults.lock();
        let known = faults
            .broken
            .iter()
            .position(|broken| broken.location.segment == segment);
        let known = known.map(|at| faults.broken.remove(at));
        faults.broken.push(Broken {
            location: put.location,
            payload: blocks(put.len),
        });
        // What was written to one segment at a time fails together.
        if known.is_none_or(|known| known.location.generation != generation) {
            faults.count_write(what);
        }
    }

    /// The segments that may be given up for a chunk, the first before the others; None for any.
    /// Once chunks could not be kept in several, one that has failed is as good as another.
    pub(super) fn may_give_up(&self) -> Option<Vec<u32>> {
        let faults = self.faults.lock();
        let failed = faults.broken.iter().map(|broken| broken.location.segment);
        (faults.broken.len() >= FAILURES as usize).then(|| failed.collect())
    }
}

impl Faults {
    /// Returns the reason why the drive is out.
    fn why_out(&self) -> Option<&str> {
        let out = || self.out.as_ref().map(|fault| fault.reason.as_str());
        self.files.as_deref().or_else(out)
    }

    fn count_write(&mut self, what: &str) {
        self.writes += 1;
        if self.writes >= FAILURES && self.unwritable.is_none() {
            warn!(
                reason = what,
                "writes to a drive failed; the drive is read-only until it recovers"
            );
            self.unwritable = Fault::new(what);
        }
    }
}

/// Returns true if a read failed because of its location, and not for lack of memory or the like.
fn is_about_a_location(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    let known = [libc::EIO, libc::ENODATA, libc::EILSEQ, libc::EREMOTEIO];
    code.is_some_and(|code| known.contains(&code)) || error.kind() == io::ErrorKind::UnexpectedEof
}

impl Shared {
    fn read_counts_as_failed(&self, what: &str) {
        let mut faults = self.condition.faults.lock();
        faults.reads += 1;
        if faults.reads >= FAILURES && faults.out.is_none() {
            count(&self.counters.taken_out, 1);
            warn!(
                reason = what,
                "reads from a drive failed; it is taken out, and its chunks are misses until it recovers"
            );
            faults.out = Fault::new(what);
            self.condition.set_out(&faults);
        }
    }

    /// A chunk could not be read. Either its location is bad, and it is forgotten, or the drive is, or
    /// it was for a moment only.
    pub(super) fn read_failed(self: &Arc<Self>, found: PutRecord, error: &io::Error) {
        let (what, is_local) = (format!("reading: {error}"), is_about_a_location(error));
        self.look(move |shared, answers| match answers {
            true if is_local => shared.read_again(found),
            true => {}
            false => shared.read_counts_as_failed(&what),
        });
    }

    /// Reads a chunk a second time, and forgets it when its location cannot be read then either.
    fn read_again(self: &Arc<Self>, found: PutRecord) {
        let segment = found.location.segment;
        let file = {
            let mut state = self.state.lock();
            if state.index.find(&found.key) != Some(found) {
                return;
            }
            let Some(file) = state.files.get(segment as usize).copied().flatten() else {
                return;
            };
            state.index.enter(segment, false);
            file
        };
        let shared = Arc::clone(self);
        let len = (1 + blocks(found.len)) * BLOCK;
        self.volume.submit(vec![Op {
            kind: Kind::Read,
            file: file.id,
            offset: u64::from(found.location.block) * BLOCK,
            len,
            buf: Some(Buf::Own(AlignedBuf::new(len))),
            abandoned: None,
            done: Box::new(move |done| {
                shared.state.lock().index.leave(segment);
                if done.result.is_err_and(|error| is_about_a_location(&error)) {
                    shared.retire(&found);
                }
            }),
        }]);
    }

    /// Reads the drive's first block, and tells whether that works.
    fn look(self: &Arc<Self>, then: impl FnOnce(&Arc<Self>, bool) + Send + 'static) {
        let shared = Arc::clone(self);
        self.volume.submit(vec![Op {
            kind: Kind::Read,
            file: self.header_file,
            offset: 0,
            len: BLOCK,
            buf: Some(Buf::Own(AlignedBuf::new(BLOCK))),
            abandoned: None,
            done: Box::new(move |done| {
                let answers = match (done.result, done.buf) {
                    (Ok(()), Some(Buf::Own(block))) => {
                        DriveHeader::decode(&block).is_ok_and(|header| header == shared.header)
                    }
                    _ => false,
                };
                then(&shared, answers);
            }),
        }]);
    }

    fn probe_reads(self: &Arc<Self>) {
        {
            let mut faults = self.condition.faults.lock();
            let due = |fault: &mut Fault| fault.due(self.settings.probe_every);
            if !faults.out.as_mut().is_some_and(due) {
                return;
            }
        }
        self.look(|shared, answers| {
            let mut faults = shared.condition.faults.lock();
            if !answers {
                return Fault::remains(&mut faults.out);
            }
            faults.reads = 0;
            if faults.out.take().is_some() {
                info!("drive recovered");
                shared.condition.set_out(&faults);
            }
        });
    }

    /// Writes as much as failed once more where it did, each time at another of these locations,
    /// unless something is being written anyway.
    fn probe_writes(self: &Arc<Self>) {
        let locations = {
            let mut faults = self.condition.faults.lock();
            let due = |fault: &mut Fault| fault.due(self.settings.probe_every);
            if !faults.unwritable.as_mut().is_some_and(due) {
                return;
            }
            let locations = faults.broken.clone();
            if !locations.is_empty() {
                faults.broken.rotate_left(1);
            }
            locations
        };
        let location = {
            let mut state = self.state.lock();
            let location = locations.into_iter().find_map(|broken| {
                let Location {
                    segment,
                    generation,
                    ..
                } = broken.location;
                let file = state.files.get(segment as usize).copied().flatten()?;
                let same = state.index.generation(segment) == generation;
                // A free segment may begin its next use while this is written.
                (same && !state.index.is_free(segment)).then_some((broken, file.id))
            });
            match location {
                Some((broken, _)) => state.index.enter(broken.location.segment, false),
                // What is under way tells how the drive is when it ends.
                None if !state.writing.is_empty() => {
                    drop(state);
                    return Fault::remains(&mut self.condition.faults.lock().unwritable);
                }
                None => {}
            }
            location
        };
        match location {
            Some((broken, file)) => self.write_again(Kind::WriteDurably, broken, file),
            // It has answered, and there is no location to try.
            None => self.condition.write_works(),
        }
    }

    fn write_again(self: &Arc<Self>, kind: Kind, broken: Broken, file: FileId) {
        let shared = Arc::clone(self);
        let len = broken.payload * BLOCK;
        self.volume.submit(vec![Op {
            kind,
            file,
            offset: u64::from(broken.location.block + 1) * BLOCK,
            len,
            buf: Some(Buf::Own(AlignedBuf::new(len))),
            abandoned: None,
            done: Box::new(move |done| {
                let code = done.result.as_ref().map_err(io::Error::raw_os_error);
                // A file system that does not know how to do both at once.
                let unknown = matches!(code, Err(Some(libc::EOPNOTSUPP | libc::EINVAL)));
                if unknown && kind == Kind::WriteDurably {
                    return shared.write_again(Kind::Write, broken, file);
                }
                shared.state.lock().index.leave(broken.location.segment);
                match done.result {
                    Ok(()) => shared.condition.write_works(),
                    Err(_) => Fault::remains(&mut shared.condition.faults.lock().unwritable),
                }
            }),
        }]);
    }
}

impl Drive {
    /// Returns the reason why the drive is not to be used, if there is one.
    pub(crate) fn unavailable(&self) -> Option<Unavailable> {
        let condition = &self.shared.condition;
        if !condition.is_out() {
            return None;
        }
        let faults = condition.faults.lock();
        let reason = faults.why_out()?.to_owned();
        Some(Unavailable { reason })
    }

    pub(crate) fn health(&self) -> Health {
        let faults = self.shared.condition.faults.lock();
        if let Some(reason) = faults.why_out() {
            let reason = reason.to_owned();
            return Health::Down { reason };
        }
        let unwritable = faults.unwritable.as_ref();
        let unwritable = || unwritable.map(|fault| fault.reason.clone());
        let of_writes = faults.log.clone().or_else(unwritable);
        match of_writes.or_else(|| faults.growth.clone()) {
            Some(reason) => Health::Degraded { reason },
            None => Health::Ready,
        }
    }

    /// Notes that reads had no answer by their deadline, for which they had so long.
    pub(crate) fn late_reads(&self, reads: u64, waited: Duration) {
        count(&self.shared.counters.late, reads);
        if reads > 0 && waited >= self.shared.settings.stall {
            let what = format!("no answer in {waited:.1?}");
            self.shared.read_counts_as_failed(&what);
        }
    }

    /// Notes that writes had no answer by their deadline, for which they had so long.
    pub(crate) fn late_writes(&self, writes: u64, waited: Duration) {
        count(&self.shared.counters.late, writes);
        if writes > 0 && waited >= self.shared.settings.stall {
            let what = format!("nothing was written in {waited:.1?}");
            self.shared.condition.faults.lock().count_write(&what);
        }
    }

    /// Looks whether a drive that failed works again, when it is time for that.
    pub(crate) fn probe(&self) {
        self.shared.probe_reads();
        self.shared.probe_writes();
        self.shared.probe_growth();
    }
}
