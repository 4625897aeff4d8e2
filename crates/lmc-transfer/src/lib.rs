//! Moves chunks between the memory of two processes.
//!
//! A [`TransferChannel`] covers one arena. Two channels connect once. Then either side grants slots
//! to the other, which reads or writes them without a call on the granting side (*one-sided*,
//! [`ReadLease`], [`WriteLease`]); or one side sends and the other receives (*paired*).
//! Every call has a deadline, and every outcome reports the state of each slot: filled, untouched,
//! or quarantined because something may still write to it.
//!
//! A [`SocketChannel`] has one session with each peer, over TCP or Unix sockets. Where both sides
//! have NIXL (feature `nixl`, `NixlPlane`), NIXL moves the bytes of reads: over RDMA, shared memory
//! or TCP.
//!
//! This crate does *not* know which process has which chunk, and does not exchange [indices](Index)
//! between peers: the embedder does.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//! use lmc_transfer::{ChannelConfig, SocketConfig, TransferChannel, block_on};
//!
//! let side = |name: &str| -> Result<_, Box<dyn std::error::Error>> {
//!     let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//!     let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
//!     let config = ChannelConfig::new(name.parse()?, arena);
//!     Ok((SocketConfig::new(config, "tcp://127.0.0.1:0".parse()?).build()?, pool))
//! };
//! let ((a, a_pool), (b, b_pool)) = (side("a")?, side("b")?);
//! let deadline = Instant::now() + Duration::from_secs(5);
//! block_on(a.connect(b.id(), b.address(), None, deadline))?;
//!
//! // b leases an object to a, which reads it alone.
//! let mut object = b_pool.reserve(5).expect("an empty pool has capacity");
//! object.bytes_mut().copy_from_slice(b"hello");
//! let lease = b.grant_read(a.id(), vec![object.written().seal()])?;
//! let slot = a_pool.reserve(5).expect("an empty pool has capacity");
//! let read = block_on(a.read(vec![slot], b.id(), lease.indices(), deadline));
//! assert_eq!(read.into_result()?[0].bytes(), b"hello");
//!
//! // Nothing reads the object any more: it may be evicted.
//! block_on(lease.revoke());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod blocking;
mod channel;
mod checks;
mod config;
#[cfg(feature = "conformance")]
pub mod conformance;
mod connect_once;
mod error;
#[cfg(feature = "conformance")]
mod flaky;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    test,
    allow(unreachable_pub, reason = "public only for the fuzz targets")
)]
pub mod fuzzing;
mod in_arena;
mod index;
mod lease;
mod name;
mod net;
#[cfg(feature = "nixl")]
mod nixl;
mod outcome;
mod session;
mod socket;
mod timer;

pub use blocking::block_on;
pub use channel::TransferChannel;
pub use config::{Admit, ChannelConfig, ConfigError, OnAsk, OnConnect, OnPeer, PeerEvent, Rights};
pub use error::{ConnectError, TransferError};
#[cfg(feature = "conformance")]
pub use flaky::{Death, Faults, Flaky, FlakyRig};
pub use in_arena::InArena;
pub use index::Index;
pub use lease::{ReadLease, WriteLease};
pub use name::{Address, AddressError, PeerId, PeerIdError};
#[cfg(feature = "nixl")]
pub use nixl::{NixlConfig, NixlPlane, has_rdma};
pub use outcome::{DataPlane, Filled, Sent, Slot};
pub use session::{
    Identity, Key, KeyError, Keys, MAX_SECRETS, MIN_KEY, PublicIdentity, read_secret,
};
pub use socket::{SocketChannel, SocketConfig, SocketError, SocketStats};

/// A boxed future that may move between threads. It needs no particular runtime.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Maximum number of objects in a batch.
pub const MAX_BATCH: usize = 65_536;
/// Maximum bytes of a message that is sent with a connect.
pub const MAX_MESSAGE: usize = 64 << 10;
