//! ZeroMQ on tokio: a ROUTER socket that limits the memory each client can make it use.

#[cfg(feature = "service")]
mod admission;
#[cfg(feature = "service")]
mod connection;
#[cfg(feature = "service")]
mod ipc;
mod passing;
mod peer;
#[cfg(feature = "service")]
mod pidfd;
#[cfg(feature = "service")]
mod process;
#[cfg(feature = "service")]
mod router;
#[cfg(feature = "service")]
mod search;
#[cfg(feature = "service")]
mod serving;
#[cfg(any(feature = "adapters", feature = "service"))]
mod stream;
mod trust;
mod zmtp;

pub(crate) use passing::receive_with;
#[cfg(feature = "service")]
pub use router::{BindError, ZmqServer};
#[cfg(feature = "service")]
pub use serving::ZmqConfig;
#[cfg(feature = "service")]
pub use stream::Keepalive;
#[cfg(feature = "adapters")]
pub(crate) use stream::Stream;
pub use trust::{Trust, TrustedUsers, Untrusted};
#[cfg(feature = "adapters")]
pub(crate) use zmtp::encode_pong;
pub(crate) use zmtp::{Decoder, Event, encode_message, encode_ready, greeting};
pub use zmtp::{Limits, ZmtpError};
