//! Lets one event a second pass, so that a peer cannot fill the log.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[derive(Debug, Default)]
pub(crate) struct Throttle {
    /// Milliseconds at which the last event passed, plus one; 0 before the first.
    last: AtomicU64,
    suppressed: AtomicU64,
}

impl Throttle {
    /// Lets an event pass, and returns the number of suppressed events since the last one; `None`
    /// if it comes within a second of the last one. `now` counts from any fixed moment.
    pub(crate) fn pass(&self, now: Duration) -> Option<u64> {
        let now = now.as_millis() as u64 + 1;
        let last = self.last.load(Ordering::Relaxed);
        let due = last == 0 || now >= last + 1000;
        let swapped = due
            && self
                .last
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        match swapped {
            true => Some(self.suppressed.swap(0, Ordering::Relaxed)),
            false => {
                self.suppressed.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_event_a_second_passes_and_says_how_many_did_not() {
        let throttle = Throttle::default();
        let at = |millis| throttle.pass(Duration::from_millis(millis));
        assert_eq!([at(0), at(1), at(999)], [Some(0), None, None]);
        assert_eq!([at(1000), at(1001), at(5000)], [Some(2), None, Some(1)]);
    }
}
