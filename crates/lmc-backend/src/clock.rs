//! The clock of deadlines.

use std::time::Instant;

/// Returns the time of the runtime's clock, or the system's outside a runtime: that of an engine, of the
/// peers' protocol and of the tier of stores. A test on a paused runtime moves it. Threads that do IO,
/// such as those of drives and sockets, use the system's.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
