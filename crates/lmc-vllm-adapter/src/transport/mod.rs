//! ZeroMQ on tokio: a ROUTER socket that limits the memory each client can make it use.

mod admission;
mod connection;
mod ipc;
mod passing;
mod peer;
mod pidfd;
mod process;
mod router;
mod search;
mod stream;
mod trust;
mod zmtp;

pub(crate) use passing::receive_with;
pub use router::{BindError, Keepalive, ZmqConfig, ZmqServer};
#[cfg(feature = "adapters")]
pub(crate) use stream::Stream;
pub use trust::{TrustedUsers, Untrusted};
#[cfg(feature = "adapters")]
pub(crate) use zmtp::encode_pong;
pub(crate) use zmtp::{Decoder, Event, encode_message, encode_ready, greeting};
pub use zmtp::{Limits, ZmtpError};
