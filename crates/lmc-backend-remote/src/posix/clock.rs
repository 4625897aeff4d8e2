//! The file server's clock, read from the times of files that were just written.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fd::AsFd;
use rustix::fs::Stat;

use crate::clock::StoreClock;

/// Time after which the clock is read again.
const KEPT: Duration = Duration::from_secs(60);

/// The file server's clock.
#[derive(Debug, Default)]
pub(super) struct Clock(StoreClock);

impl Clock {
    /// Reads the clock from a file that was just written.
    pub(super) fn note(&self, file: impl AsFd) {
        if self.0.was_set_within(KEPT) {
            return;
        }
        let stat = rustix::fs::fstat(file).ok();
        if let Some(now) = stat.as_ref().and_then(modified) {
            self.0.set(now);
        }
    }

    /// Returns the file server's time; `None` before the first write.
    pub(super) fn now(&self) -> Option<Duration> {
        self.0.now()
    }

    /// Returns the clock's lead, as [`StoreClock::ahead_ms`] does.
    pub(super) fn ahead_ms(&self) -> Option<i64> {
        self.0.ahead_ms()
    }

    /// Returns the age of a file; `None` before the first write.
    pub(super) fn age(&self, stat: &Stat) -> Option<Duration> {
        self.0.since(modified(stat)?)
    }
}

/// Returns the time of a file's last change since 1970.
pub(super) fn modified(stat: &Stat) -> Option<Duration> {
    let seconds = u64::try_from(stat.st_mtime).ok()?;
    let nanos = u32::try_from(stat.st_mtime_nsec).ok()?;
    let modified = Duration::from_secs(seconds) + Duration::from_nanos(u64::from(nanos));
    // A time that no clock can have is not used in calculations.
    UNIX_EPOCH
        .checked_add(modified)
        .map(|_: SystemTime| modified)
}
