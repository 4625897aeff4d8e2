//! The tier of peers: daemons find each other's chunks, and read them out of each other's memory.
//!
//! A [`Node`] is one daemon among its peers. It asks them which chunks they have
//! ([`Node::locate`]), and reads chunks by a lease ([`Node::load`]): the owner keeps them in
//! memory and unchanged, the reader fetches the bytes one-sided, gives the lease back, and learns
//! from the owner whether it stood without a gap. Only then, and with the right digest, is a
//! chunk believed. The other way round it serves the requests of its peers ([`Node::serve`]) from
//! the chunks of its own engine ([`Host`](lmc_backend::Host)), within bounds ([`OwnerLimits`]).
//!
//! LMCache's `batched_async_contains` is [`Node::locate`] here, and its `batched_get_non_blocking`
//! is [`Node::load`]; the README has the mapping, and a program with two nodes.
//!
//! [`P2pBackend`] is a node as a tier of the engine, over sockets and, where both sides have it,
//! NIXL. A [`Link`] is what the node needs of a channel; a simulation with a virtual clock implements
//! it, too. [`message`] has the protocol as bytes. A directory knows which daemons have which
//! chunks, where there are too many to ask all.

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
