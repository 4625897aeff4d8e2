//! ZeroMQ on tokio: a ROUTER socket that bounds everything a peer can make it hold.

mod connection;
mod peer;
mod router;
mod zmtp;

pub use router::{BindError, ZmqConfig, ZmqServer};
pub(crate) use zmtp::{Decoder, Event, encode_message, encode_ready, greeting};
pub use zmtp::{Limits, ZmtpError};
