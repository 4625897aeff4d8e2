//! The clock of deadlines.

use std::time::Instant;

/// Returns the time of the runtime's clock, or outside a runtime the system's. An engine, the peer protocol
/// and the tier of stores use this clock, so that a test with a paused runtime can move it. The I/O
/// threads of drives and sockets use the system's clock.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
