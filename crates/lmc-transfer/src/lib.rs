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
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//! use lmc_transfer::{Blocking, ChannelConfig, MemoryHub, TransferChannel};
//!
//! let hub = MemoryHub::new()?;
//! let side = |name: &str| -> Result<_, Box<dyn std::error::Error>> {
//!     let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//!     let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
//!     Ok((hub.channel(name, ChannelConfig::new(name.parse()?, arena))?, pool))
//! };
//! let ((a, a_pool), (b, b_pool)) = (side("a")?, side("b")?);
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let to_b = Blocking::new(&a);
//! to_b.connect(b.id(), b.address(), None, deadline)?;
//!
//! // b says where; a writes there, and reads it back.
//! let place = b_pool.reserve(5).expect("an empty pool has room");
//! let indices = b.indices(&[&place])?;
//! let mut object = a_pool.reserve(5).expect("an empty pool has room");
//! object.bytes_mut().copy_from_slice(b"hello");
//! to_b.write(vec![object.written().seal()], b.id(), &indices, deadline).into_result()?;
//! assert_eq!(place.written().bytes(), b"hello");
//!
//! let slot = a_pool.reserve(5).expect("an empty pool has room");
//! let read = to_b.read(vec![slot], b.id(), &indices, deadline).into_result()?;
//! assert_eq!(read[0].bytes(), b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocking;
mod cell;
mod channel;
mod checks;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod error;
#[cfg(feature = "conformance")]
mod flaky;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    test,
    allow(unreachable_pub, reason = "public only for the fuzz targets")
)]
pub mod fuzzing;
mod memory;
mod name;
#[cfg(feature = "nixl")]
mod nixl;
mod outcome;
mod socket;

pub use blocking::{Blocking, block_on};
pub use channel::{BoxFuture, TransferChannel};
pub use checks::InArena;
pub use config::{ChannelConfig, ConfigError, Key, OnConnect};
pub use error::{ConnectError, TransferError};
#[cfg(feature = "conformance")]
pub use flaky::{Death, Faults, Flaky, FlakyRig};
pub use memory::{MemoryChannel, MemoryError, MemoryHub};
pub use name::{Address, AddressError, PeerId, PeerIdError};
#[cfg(feature = "nixl")]
pub use nixl::{NixlAgent, NixlChannel, NixlConfig, NixlMemory, NixlReads};
pub use outcome::{Filled, Index, Sent, Slot};
pub use socket::{SocketChannel, SocketConfig, SocketError, SocketStats};

/// Objects of one batch at most.
pub const MAX_BATCH: usize = 65_536;
/// Bytes of a side message at most.
pub const MAX_MESSAGE: usize = 64 << 10;
