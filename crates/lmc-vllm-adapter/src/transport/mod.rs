//! ZeroMQ on tokio: a ROUTER socket that limits the memory each client can make it use.

mod admission;
mod connection;
mod ipc;
mod peer;
mod pidfd;
mod process;
mod router;
mod search;
mod stream;
mod trust;
mod zmtp;

pub use router::{BindError, Keepalive, ZmqConfig, ZmqServer};
pub use trust::{TrustedUsers, Untrusted};
pub(crate) use zmtp::{Decoder, Event, encode_message, encode_ready, greeting};
pub use zmtp::{Limits, ZmtpError};
