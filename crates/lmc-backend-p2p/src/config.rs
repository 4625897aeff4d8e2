//! Settings of a daemon among its peers.

use std::time::Duration;

use lmc_transfer::Keys;

use crate::leases::OwnerLimits;
use crate::message::{OLDEST_VERSION, VERSION};

/// Settings of a [`Node`](crate::Node).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct NodeConfig {
    /// Name of this daemon, for people.
    pub name: String,
    /// Address that peers connect to.
    pub address: String,
    /// Tokens in a chunk.
    pub chunk_size: u32,
    /// Name of the algorithm of prefix hashes.
    pub algorithm: String,
    /// Bounds of what peers may lease here.
    pub limits: OwnerLimits,
    /// Duration of the leases that this daemon asks for; renewed after a third of it. Default:
    /// 2 s.
    pub lease: Duration,
    /// Payload bytes of a chunk, at most: a peer that claims to have a longer one does not have it.
    /// Default: 1 GiB.
    pub max_chunk: u64,
    /// Time for which a peer may keep this daemon waiting for a lease, because others have leased
    /// all that it lends or because the chunks are on its disk. Default: 200 ms.
    pub lease_wait: Duration,
    /// True if directories are asked for the peers that have chunks; otherwise every connected
    /// peer is asked. Default: false.
    pub uses_directories: bool,
    /// Keys under which the salts of tenants are described to peers: those of the channel.
    pub(crate) salt_keys: Option<Keys>,
    /// Oldest and newest version of the protocol to speak. Default: all that the crate knows.
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
