//! The tier of peers: daemons find each other's chunks, and read them out of each other's memory.
//!
//! A [`Node`] is one daemon as a peer of others. It asks its peers which chunks they have ([`Node::locate`]),
//! and reads chunks with a lease ([`Node::load`]): the owner keeps the chunks in memory and unchanged, the
//! reader fetches the bytes one-sided and releases the lease, and the owner answers whether the lease was
//! valid without a gap. A chunk is accepted only after that, and only with the right digest. In the other
//! direction the node serves the requests of its peers ([`Node::serve`]) from the chunks of its own engine
//! ([`Host`](lmc_backend::Host)), within limits ([`OwnerLimits`]).
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use lmc_backend::Host;
//! use lmc_backend_p2p::{NodeConfig, P2pBackend, P2pConfig, new_peer_id};
//! use lmc_memory::Arena;
//! use lmc_transfer::{Address, ChannelConfig, SocketConfig};
//! use tokio::runtime::Handle;
//!
//! /// Lends the chunks of `host`, which lie in `arena` of `pool` bytes, and reads the chunks of `peer`.
//! fn start(
//!     arena: Arc<Arena>,
//!     pool: u64,
//!     host: Arc<dyn Host>,
//!     peer: &str,
//! ) -> Result<P2pBackend, Box<dyn std::error::Error>> {
//!     let listen = Address::Tcp { host: "0.0.0.0".into(), port: 7700 };
//!     let channel = ChannelConfig::new(new_peer_id("node-1")?, arena);
//!     let node = NodeConfig::new("node-1", "10.0.0.1:7700", pool);
//!     let mut config = P2pConfig::new(node, SocketConfig::new(channel, listen));
//!     config.peers = vec![peer.to_owned()];
//!     Ok(config.start(host, Handle::current())?)
//! }
//! ```
//!
//! [`Node::locate`] corresponds to LMCache's `batched_async_contains`, and [`Node::load`] to its
//! `batched_get_non_blocking`. The README has the mapping, and a program with two nodes.
//!
//! [`P2pBackend`] is a node as a tier of the engine, over sockets and, where both sides have it, NIXL. A
//! [`Link`] is the part of a channel that the node needs; a simulation with a virtual clock implements it
//! too. [`message`] has the protocol as bytes. A directory knows which daemons have which chunks; it is used
//! where there are too many daemons to ask all of them.

mod backend;
mod config;
mod daemon_link;
mod dial;
mod digest;
pub mod directory;
mod exchange;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    test,
    allow(unreachable_pub, reason = "public only for the fuzz targets")
)]
pub mod fuzzing;
mod leases;
mod link;
pub mod message;
mod node;
mod owner;
mod peers;
mod pushing;
mod reader;
mod recent;
mod resolve;
mod session;
#[cfg(test)]
mod sim;
mod spaces;
mod status;
mod summing;
mod unfit;

pub use backend::{P2pBackend, P2pConfig, new_peer_id};
pub use config::NodeConfig;
pub use daemon_link::DaemonLink;
pub use digest::chunk_digest;
pub use directory::DirectoryUse;
pub use leases::{Busy, LeaseTable, OwnerLimits};
pub use link::{Link, Session};
pub use node::Node;
pub use peers::{Failure, GonePeer, PeerCounters};
pub use pushing::CopyError;
pub use session::{AskError, HelloError};
pub use spaces::{Difference, Mismatch};
pub use status::{Holding, NamedPeer, NodeStatus, PeerStatus, PeersStatus, SpaceView};
pub use unfit::Unfit;

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
