//! The clock of deadlines.

use std::time::Instant;

/// Returns the time of the runtime's clock, or the system's outside a runtime. An engine and its tiers
/// compare deadlines with no other clock, so that a test on a paused runtime turns all of them by hand.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
