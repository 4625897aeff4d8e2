//! ZeroMQ on tokio: a ROUTER socket that bounds everything a peer can make it hold.

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
