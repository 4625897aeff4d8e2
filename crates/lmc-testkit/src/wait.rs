//! Waits for a condition.

use std::thread;
use std::time::{Duration, Instant};

/// Longest wait of a test for an event that should happen at once, on a machine that is busy with
/// other tests.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Time between two checks of a condition that no event announces.
const INTERVAL: Duration = Duration::from_millis(1);

/// Returns the instant [`DEADLINE`] from now.
pub fn soon() -> Instant {
    Instant::now() + DEADLINE
}

/// Returns as soon as `done` returns true. `done` is called once a millisecond.
///
/// # Panics
/// After [`DEADLINE`]; the message contains `what`.
#[track_caller]
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = soon();
    while !done() {
        assert!(Instant::now() < deadline, "not within the deadline: {what}");
        thread::sleep(INTERVAL);
    }
}
