//! The clock of a store, which may differ from this host's clock, and the clock for the age of knowledge.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};

/// A clock that continues while the host or its VM is suspended, unlike [`Instant`]. Default:
/// `CLOCK_BOOTTIME`.
#[derive(Clone)]
pub struct BootClock(Arc<dyn Fn() -> Duration + Send + Sync>);

impl BootClock {
    /// Makes a clock that a test drives: `now` returns the time since any fixed instant.
    pub fn driven(now: impl Fn() -> Duration + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    /// Returns the time since a fixed instant.
    pub(crate) fn now(&self) -> Duration {
        (self.0)()
    }
}

impl Default for BootClock {
    fn default() -> Self {
        Self::driven(|| {
            let now = clock_gettime(ClockId::Boottime);
            // Neither field is negative.
            let seconds = u64::try_from(now.tv_sec).unwrap_or_default();
            Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or_default())
        })
    }
}

impl fmt::Debug for BootClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BootClock").field(&self.now()).finish()
    }
}

/// The store's time since 1970, with the instant of this host at which it was read.
#[derive(Debug, Default)]
pub(crate) struct StoreClock(Mutex<Option<(Instant, Duration)>>);

impl StoreClock {
    /// Sets the store's current time.
    pub(crate) fn set(&self, time: Duration) {
        *self.0.lock() = Some((Instant::now(), time));
    }

    /// Returns true if the time was set less than `kept` ago.
    pub(crate) fn was_set_within(&self, kept: Duration) -> bool {
        let set = *self.0.lock();
        set.is_some_and(|(at, _)| at.elapsed() < kept)
    }

    /// Returns the store's time; `None` before it was set.
    pub(crate) fn now(&self) -> Option<Duration> {
        let (at, time) = (*self.0.lock())?;
        Some(time + at.elapsed())
    }

    /// Returns the milliseconds by which the store's clock is ahead of this host's, negative if it is behind;
    /// `None` before the time was set.
    pub(crate) fn ahead_ms(&self) -> Option<i64> {
        ahead_ms(self.now()?)
    }

    /// Returns the time since `then` by the store's clock; `None` before it was set.
    pub(crate) fn since(&self, then: Duration) -> Option<Duration> {
        Some(self.now()?.saturating_sub(then))
    }
}

/// Returns the milliseconds by which a time since 1970 is ahead of this host's clock.
pub(crate) fn ahead_ms(time: Duration) -> Option<i64> {
    let here = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let ms = |time: Duration| i64::try_from(time.as_millis()).ok();
    ms(time)?.checked_sub(ms(here)?)
}
