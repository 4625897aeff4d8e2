//! The operations: registrations, sessions, transfers, and the engine behind them.
//!
//! Nothing here knows an encoding or a socket, and the time is an argument.

mod config;
mod connections;
mod context;
mod copies;
mod ends;
mod events;
mod fingerprint;
mod gate;
mod generation;
mod handle;
mod instance;
mod jobs;
mod lookups;
mod misses;
mod notices;
mod opaque;
mod opened;
mod prefills;
mod prepared;
mod pulse;
mod register_error;
mod registry;
mod request_log;
mod session;
mod share;
mod shown;
mod spaces;
mod spans;
mod stats;
mod status;
#[cfg(test)]
mod tests;
mod throttle;
mod transfers;
mod usage;
mod wider;

use std::fmt;

pub use config::{ServiceConfig, ServiceError};
pub(crate) use events::{NextBatch, Subscription};
pub(crate) use gate::Entrance;
pub use handle::{Service, WeakService};
pub(crate) use jobs::Job;
pub use notices::Notice;
pub use registry::InspectError;
pub use request_log::RequestLog;
pub use spaces::SpaceStatus;
pub use spans::{Copied, Span, SpanStep};
pub use stats::{OperationCounts, ServiceCounts, TransportCounts};
pub use status::{
    EventLogStatus, HeldStatus, InstanceStatus, ServiceStatus, SessionStatus, TransferStatus,
};
pub(crate) use throttle::Throttle;
pub use usage::UsageStatus;

/// A connection of a client. Its number is never used again while the process runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClientId(u64);

impl ClientId {
    /// Stands for this server itself, for work of no connection.
    pub(crate) const SERVER: Self = Self(u64::MAX);

    /// Returns the connection with this number, which the owner of the connections assigns.
    pub fn new(number: u64) -> Self {
        Self(number)
    }
}

impl fmt::Display for ClientId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "client {}", self.0)
    }
}

/// Result of starting a request.
pub(crate) enum RequestOutcome {
    /// A reply to send.
    Reply(crate::protocol::Reply),
    /// A job to run where copying does not hold up other requests; its result is the reply.
    Job(Job),
    /// A reply that follows when the lookup is over, see [`Service::wait`].
    Wait(session::Wait),
    /// An empty reply that follows when no copy is under way there any more.
    WhenIdle(Entrance),
    /// A stream: a batch follows whenever there is one and the reader is ready.
    Stream(Subscription),
}
