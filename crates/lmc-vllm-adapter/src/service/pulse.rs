//! Detects that the process stood still.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Time, after the process continues, in which requests that arrived meanwhile are read.
const CATCH_UP: Duration = Duration::from_secs(2);

/// Beats while the process runs. A request that waited in a socket while the process stood still
/// (stopped by a signal or a debugger, or without CPU) does not show its age.
#[derive(Debug)]
pub(super) struct Pulse {
    tolerance: Duration,
    // One lock: a request that is read during the first beat after a standstill sees all of it or
    // nothing.
    beats: Mutex<Beats>,
}

#[derive(Debug)]
struct Beats {
    last: Option<Instant>,
    caught_up: Option<Instant>,
}

impl Beats {
    fn still(&self, now: Instant, tolerance: Duration) -> bool {
        self.last
            .is_some_and(|last| now.saturating_duration_since(last) > tolerance)
    }
}

impl Pulse {
    /// Returns a pulse for which more than `tolerance` without a beat is a standstill; before the
    /// first beat there is none.
    pub(super) fn new(tolerance: Duration) -> Self {
        Self {
            tolerance,
            beats: Mutex::new(Beats {
                last: None,
                caught_up: None,
            }),
        }
    }

    pub(super) fn beat(&self, now: Instant) {
        let mut beats = self.beats.lock();
        if beats.still(now, self.tolerance) {
            beats.caught_up = Some(now + CATCH_UP);
        }
        beats.last = Some(now);
    }

    /// Returns true if a request that is read now was sent a moment ago.
    pub(super) fn is_steady(&self, now: Instant) -> bool {
        let beats = self.beats.lock();
        !beats.still(now, self.tolerance)
            && beats.caught_up.is_none_or(|caught_up| now >= caught_up)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_stood_still_is_steady_only_when_it_has_caught_up() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let pulse = Pulse::new(Duration::from_secs(5));
        assert!(pulse.is_steady(at(100_000)), "no beat yet");
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
