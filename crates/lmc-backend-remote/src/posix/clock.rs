//! The file server's clock, read off files that were just written.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::fd::AsFd;
use rustix::fs::Stat;

/// Time after which the clock is read again.
const KEPT: Duration = Duration::from_secs(60);

/// The file server's time at an instant of this host.
#[derive(Debug, Default)]
pub(super) struct Clock(Mutex<Option<(Instant, Duration)>>);

impl Clock {
    /// Reads the clock off a file that was written just now.
    pub(super) fn note(&self, file: impl AsFd) {
        let now = Instant::now();
        let known = *self.0.lock();
        if known.is_some_and(|(read, _)| now.duration_since(read) < KEPT) {
            return;
        }
        if let Ok(stat) = rustix::fs::fstat(file) {
            *self.0.lock() = modified(&stat).map(|modified| (now, modified));
        }
    }

    /// Returns the file server's time; `None` before the first write.
    pub(super) fn now(&self) -> Option<Duration> {
        let (read, time) = (*self.0.lock())?;
        Some(time + read.elapsed())
    }

    /// Returns the age of a file; `None` before the first write.
    pub(super) fn age(&self, stat: &Stat) -> Option<Duration> {
        Some(self.now()?.saturating_sub(modified(stat)?))
    }
}

/// Returns the time of a file's last change since 1970.
pub(super) fn modified(stat: &Stat) -> Option<Duration> {
    let seconds = u64::try_from(stat.st_mtime).ok()?;
    let nanos = u32::try_from(stat.st_mtime_nsec).ok()?;
    let modified = Duration::from_secs(seconds) + Duration::from_nanos(u64::from(nanos));
    // What no clock can show is not used for sums.
    UNIX_EPOCH
        .checked_add(modified)
        .map(|_: SystemTime| modified)
}
