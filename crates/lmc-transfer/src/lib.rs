//! Moves chunks between the memory of two processes.
//!
//! A [`TransferChannel`] stands over one arena. Two channels connect once; then either side may
//! name places in the other's arena by [`Index`] and read or write them alone (*one-sided*), or
//! both call, one to send and one to receive (*paired*). Every call has a deadline, and every
//! outcome says what became of each slot: filled, untouched, or in quarantine because something
//! may still write to it.
//!
//! What is *not* here: who has which chunk and who may read it for how long. A place that a peer
//! reads must be kept by a lease of whoever embeds this (`lmc-backend-p2p`, `lmc-backend-pd`).

mod blocking;
mod channel;
mod checks;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
mod name;
mod outcome;

pub use blocking::{Blocking, block_on};
pub use channel::{BoxFuture, TransferChannel};
pub use checks::InArena;
pub use config::{ChannelConfig, Key, OnConnect};
pub use error::{ConnectError, TransferError};
pub use name::{Address, AddressError, PeerId, PeerIdError};
pub use outcome::{Filled, Index, Sent, Slot};

/// Objects of one batch at most.
pub const MAX_BATCH: usize = 65_536;
/// Bytes of a side message at most.
pub const MAX_MESSAGE: usize = 64 << 10;
