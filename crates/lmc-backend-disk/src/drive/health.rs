//! Health of a drive: the effects of failures, and the recovery from each.
//!
//! There are five independent faults:
//!
//! - Reads fail or are late: the drive is *out* until a read of its first block succeeds.
//! - Writes fail or are late: the drive is *unwritable* until a write of the same length succeeds. Its chunks
//!   are read, and no chunk is evicted for one that could not be written anyway. Until a chunk is stored
//!   again, only segments whose writes failed are evicted for new chunks.
//! - The *log* cannot be written: the drive is unwritable until a new log is started.
//! - The drive cannot *grow*: new chunks replace others, as on a full drive.
//! - The *files* are not as the drive has left them: the drive is out until they are again, which after a
//!   removal means until a restart.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lmc_backend::{Events, Health, Unavailable};
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::TIER;
use crate::counters::{DiskCounters, count};
use crate::format::{Location, PutRecord, blocks};

/// Remedies for the faults of a drive, which end without a restart.
const CHECK_READS: &str = "the drive's chunks are misses until a read succeeds: check the drive and its cable (dmesg, smartctl -a), and replace a drive that fails";
const CHECK_WRITES: &str = "the drive is read-only until a write succeeds: check that the file system is mounted writable, and check the drive (dmesg, smartctl -a)";
const CHECK_LOG: &str = "the drive is read-only until the log can be written: free space on the file system, check that it is mounted writable, and check the drive (dmesg)";
const CHECK_FOLDER: &str =
    "new chunks replace others: check that the drive's folder exists and is writable";

/// Failures in a row after which a drive is out or unwritable.
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
    /// Number of reads that failed in a row.
    reads: u32,
    out: Option<Fault>,
    /// Number of writes that failed in a row, in different segments.
    writes: u32,
    /// Locations where writes failed since a chunk was last stored, in different segments, the latest last.
    /// They have no chunk.
    broken: Vec<Broken>,
    unwritable: Option<Fault>,
    /// The reason why the log cannot be written.
    log: Option<String>,
    /// Reason why no segment can be made, unless the file system is full.
    growth: Option<String>,
    /// The change of the drive's files by another program.
    files: Option<String>,
    /// Bus for events; set when the drive is open.
    events: Option<Events>,
}

/// Space of a chunk that could not be written or made durable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Broken {
    pub(super) location: Location,
    /// Blocks of the chunk's payload, which follows its header.
    pub(super) payload: u64,
}

#[derive(Debug)]
struct Fault {
    reason: String,
    /// Time at which the last probe began.
    looked: Instant,
    /// True while a probe is running.
    looking: bool,
}

impl Fault {
    fn new(reason: String) -> Option<Self> {
        Some(Self {
            reason,
            looked: Instant::now(),
            looking: false,
        })
    }

    /// Returns true if a probe is due, and marks it as running. Only one probe runs at a time, so that probes
    /// do not pile up on a drive that does not answer.
    fn due(&mut self, every: Duration) -> bool {
        let due = !self.looking && self.looked.elapsed() >= every;
        if due {
            (self.looked, self.looking) = (Instant::now(), true);
        }
        due
    }

    /// Records that a probe has ended without any change.
    fn remains(fault: &mut Option<Self>) {
        if let Some(fault) = fault {
            fault.looking = false;
        }
    }
}

impl Condition {
    pub(super) fn is_log_broken(&self) -> bool {
        self.faults.lock().log.is_some()
    }

    /// Returns true if chunks can be written and logged, as far as known.
    pub(super) fn is_writable(&self) -> bool {
        let faults = self.faults.lock();
        faults.log.is_none() && faults.unwritable.is_none() && faults.files.is_none()
    }

    /// Records a change of the drive's files by another program, or the end of one.
    pub(super) fn looked_at_files(&self, changed: Option<&str>, counters: &DiskCounters) {
        let mut faults = self.faults.lock();
        match (&faults.files, changed) {
            (None, Some(reason)) => {
                count(&counters.taken_out, 1);
                warn!(reason, "drive is taken out, and its chunks are misses");
            }
            (Some(_), None) => {
                info!("the drive's files are as they were; the drive is in use again")
            }
            _ => {}
        }
        faults.files = changed.map(str::to_owned);
        self.set_out(&faults);
    }

    /// Returns the change of the drive's files by another program, if there is one.
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

    /// Records that the log cannot be written.
    pub(super) fn log_failed(&self, error: &io::Error, counters: &DiskCounters) {
        count(&counters.write_errors, 1);
        let reason = format!("the index log cannot be written: {error}; {CHECK_LOG}");
        // For a drive that is out because of its files, a warning was already logged.
        if self.changed_files().is_none() {
            warn!(
                reason,
                "index log write failed; the drive is read-only until it recovers"
            );
        }
        self.faults.lock().log = Some(reason);
    }

    pub(super) fn log_works(&self) {
        if self.is_log_broken() {
            info!("index log works again; the drive is writable");
            self.faults.lock().log = None;
        }
    }

    /// Records whether a segment could be made. A full file system is not a fault.
    pub(super) fn tried_to_grow(&self, error: Option<&io::Error>) {
        let reason = error.map(|error| format!("no segment can be made: {error}; {CHECK_FOLDER}"));
        let mut faults = self.faults.lock();
        if faults.growth == reason {
            return;
        }
        match &reason {
            Some(reason) => warn!(reason, "drive cannot grow"),
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

    /// Records that a chunk was written and is durable.
    pub(super) fn chunk_kept(&self) {
        self.faults.lock().broken.clear();
        self.write_works();
    }

    /// Records that a write succeeded. There may still be no space for chunks.
    pub(super) fn write_works(&self) {
        let mut faults = self.faults.lock();
        faults.writes = 0;
        if faults.unwritable.take().is_some() {
            info!("drive is writable again");
        }
    }

    /// Records that a chunk could not be written or made durable at this location.
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
        // Writes to one segment at the same time fail together, and count once.
        if known.is_none_or(|known| known.location.generation != generation) {
            faults.count_write(what);
        }
    }

    /// Counts a read that failed or was late, and takes the drive out after several in a row.
    pub(super) fn read_counts_as_failed(&self, what: &str, counters: &DiskCounters) {
        let mut faults = self.faults.lock();
        faults.reads += 1;
        if faults.reads >= FAILURES && faults.out.is_none() {
            count(&counters.taken_out, 1);
            warn!(
                reason = what,
                "reads from a drive failed; it is taken out, and its chunks are misses until it recovers"
            );
            faults.out = Fault::new(format!("reads fail: {what}; {CHECK_READS}"));
            self.set_out(&faults);
        }
    }

    /// Begins a probe of reads; returns false if none is due.
    pub(super) fn begin_read_probe(&self, every: Duration) -> bool {
        let mut faults = self.faults.lock();
        faults.out.as_mut().is_some_and(|fault| fault.due(every))
    }

    /// Records the result of a read of the drive's first block.
    pub(super) fn read_probed(&self, answers: bool) {
        let mut faults = self.faults.lock();
        if !answers {
            return Fault::remains(&mut faults.out);
        }
        faults.reads = 0;
        if faults.out.take().is_some() {
            info!("drive recovered");
            self.set_out(&faults);
        }
    }

    /// Begins a write probe, and returns the locations where writes failed, each time with another one first.
    /// `None` if no probe is due.
    pub(super) fn begin_write_probe(&self, every: Duration) -> Option<Vec<Broken>> {
        let mut faults = self.faults.lock();
        let due = |fault: &mut Fault| fault.due(every);
        if !faults.unwritable.as_mut().is_some_and(due) {
            return None;
        }
        let locations = faults.broken.clone();
        if !locations.is_empty() {
            faults.broken.rotate_left(1);
        }
        Some(locations)
    }

    /// Records that a write probe has changed nothing.
    pub(super) fn write_probe_failed(&self) {
        Fault::remains(&mut self.faults.lock().unwritable);
    }

    /// Records that nothing was written within a deadline that was long enough.
    pub(super) fn writes_late(&self, what: &str) {
        self.faults.lock().count_write(what);
    }

    /// Returns the reason why the drive must not be used, if there is one.
    pub(super) fn unavailable(&self) -> Option<Unavailable> {
        if !self.out.load(Ordering::Acquire) {
            return None;
        }
        let faults = self.faults.lock();
        let reason = faults.why_out()?.to_owned();
        Some(Unavailable { reason })
    }

    pub(super) fn health(&self) -> Health {
        let faults = self.faults.lock();
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

    /// Returns the segments that may be evicted for a chunk, the first one first; `None` stands for any
    /// segment. Once chunks could not be stored in several segments, only segments with failed writes are
    /// evicted.
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
            self.unwritable = Fault::new(format!("writes fail: {what}; {CHECK_WRITES}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Causes a fault.
    type Cause<'a> = &'a dyn Fn(&Condition);

    #[test]
    fn every_fault_of_a_drive_says_what_to_do() {
        let (counters, error) = (DiskCounters::default(), io::Error::other("broken"));
        let cases: [(&str, Cause<'_>); 4] = [
            ("reads fail: late; ", &|condition| {
                (0..FAILURES).for_each(|_| condition.read_counts_as_failed("late", &counters));
            }),
            ("writes fail: late; ", &|condition| {
                (0..FAILURES).for_each(|_| condition.writes_late("late"));
            }),
            ("the index log cannot be written: broken; ", &|condition| {
                condition.log_failed(&error, &counters);
            }),
            ("no segment can be made: broken; ", &|condition| {
                condition.tried_to_grow(Some(&error));
            }),
        ];
        for (fault, cause) in cases {
            let condition = Condition::default();
            cause(&condition);
            let (Health::Degraded { reason } | Health::Down { reason }) = condition.health() else {
                panic!("{fault}: no fault");
            };
            let remedy = reason.strip_prefix(fault);
            assert!(
                remedy.is_some_and(|remedy| remedy.contains("check ")),
                "{reason}"
            );
        }
    }
}
