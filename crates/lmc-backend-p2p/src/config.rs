//! Settings of a daemon as a peer of others.

use std::time::Duration;

use lmc_transfer::Keys;

use crate::leases::OwnerLimits;
use crate::message::{OLDEST_VERSION, VERSION};

/// Settings of a [`Node`](crate::Node).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeConfig {
    /// Name of this daemon, for an operator.
    pub name: String,
    /// Address that peers connect to.
    pub address: String,
    /// Number of tokens in a chunk.
    pub chunk_size: u32,
    /// Name of the algorithm of prefix hashes.
    pub algorithm: String,
    /// Limits of what peers may lease here.
    pub limits: OwnerLimits,
    /// Duration of the leases that this daemon requests; a lease is renewed after a third of it. Default: 2
    /// s.
    pub lease: Duration,
    /// Largest payload of a chunk in bytes: a longer chunk at a peer is treated as absent. Default: 1 GiB.
    pub max_chunk: u64,
    /// Time that a peer may let this daemon wait for a lease, because other peers have leased all that it may
    /// lend or because the chunks are on its disk. Default: 200 ms.
    pub lease_wait: Duration,
    /// True if directories are asked which peers have chunks; otherwise every connected peer is asked.
    /// Default: false.
    pub uses_directories: bool,
    /// Keys for the digests of tenants' salts that peers are shown: the keys of the channel.
    pub(crate) salt_keys: Option<Keys>,
    /// Oldest and newest protocol version to speak. Default: all versions that the crate supports.
    pub versions: (u16, u16),
}

impl NodeConfig {
    /// Returns the defaults for a pool of `pool` bytes.
    pub fn new(name: impl Into<String>, address: impl Into<String>, pool: u64) -> Self {
        Self {
            name: name.into(),
            address: address.into(),
            chunk_size: 256,
            algorithm: "blake3".to_owned(),
            limits: OwnerLimits::for_pool(pool),
            lease: Duration::from_secs(2),
            max_chunk: 1 << 30,
            lease_wait: Duration::from_millis(200),
            uses_directories: false,
            salt_keys: None,
            versions: (OLDEST_VERSION, VERSION),
        }
    }
}
