//! Notices that the process stood still.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time after it went on in which what had arrived meanwhile is read.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Beats while the process runs. A request that waited in a socket while it did not (stopped by a
/// signal, a debugger, or for want of CPU) says nothing of its age.
#[derive(Debug)]
pub(super) struct Pulse {
    started: Instant,
    /// Milliseconds after `started`, plus one; 0 before the first beat.
    last: AtomicU64,
    caught_up: AtomicU64,
    patience: Duration,
}

impl Pulse {
    /// `patience` without a beat is standing still; before the first one nothing is.
    pub(super) fn new(patience: Duration, now: Instant) -> Self {
        Self {
            started: now,
            last: AtomicU64::new(0),
            caught_up: AtomicU64::new(0),
            patience,
        }
    }

    fn since_start(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    fn still(&self, now: Duration) -> bool {
        let last = self.last.load(Ordering::Relaxed).checked_sub(1);
        last.is_some_and(|last| now.saturating_sub(Duration::from_millis(last)) > self.patience)
    }

    pub(super) fn beat(&self, now: Instant) {
        let now = self.since_start(now);
        if self.still(now) {
            let caught_up = (now + CATCH_UP).as_millis() as u64;
            self.caught_up.store(caught_up, Ordering::Relaxed);
        }
        let last = now.as_millis() as u64 + 1;
        self.last.store(last, Ordering::Relaxed);
    }

    /// Whether a request that is read now was sent a moment ago.
    pub(super) fn is_steady(&self, now: Instant) -> bool {
        let now = self.since_start(now);
        let caught_up = Duration::from_millis(self.caught_up.load(Ordering::Relaxed));
        !self.still(now) && now >= caught_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_stood_still_is_steady_only_when_it_has_caught_up() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let pulse = Pulse::new(Duration::from_secs(5), start);
        assert!(pulse.is_steady(at(100_000)), "nobody beats");
        for beat in 1..=20 {
            pulse.beat(at(500 * beat));
            assert!(pulse.is_steady(at(500 * beat)));
        }
        assert!(pulse.is_steady(at(15_000)));
        assert!(!pulse.is_steady(at(15_001)), "no beat for five seconds");
        // Either may come first after standing still, the beat or the request.
        pulse.beat(at(20_000));
        assert!(!pulse.is_steady(at(20_000)));
        pulse.beat(at(21_000));
        assert!(!pulse.is_steady(at(21_999)));
        assert!(pulse.is_steady(at(22_000)));
    }
}
