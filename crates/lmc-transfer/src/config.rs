//! How a channel is set up.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use lmc_memory::Arena;

use crate::PeerId;

/// Answers the message that a peer sent along when it connected.
pub type OnConnect = Arc<dyn Fn(&PeerId, Option<Bytes>) -> Option<Bytes> + Send + Sync>;

/// A secret that both sides of a connection prove to know, neither tells.
#[derive(Clone, PartialEq, Eq)]
pub struct Key(Arc<[u8]>);

impl Key {
    /// From any bytes; 32 random ones are best.
    pub fn new(secret: impl Into<Arc<[u8]>>) -> Self {
        Self(secret.into())
    }

    /// The secret.
    pub fn secret(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// What every channel is made from.
#[derive(Clone)]
#[non_exhaustive]
pub struct ChannelConfig {
    /// Who this side is.
    pub id: PeerId,
    /// The memory that peers may name, and that this side's slots lie in.
    pub arena: Arc<Arena>,
    /// Bytes that one step of an index stands for; a power of two, and that of the pool's slots.
    /// Default: 4096.
    pub unit: u64,
    /// Answers the messages of those who connect. Default: nothing.
    pub on_connect: Option<OnConnect>,
    /// What peers must know. Default: nothing, for networks where every host is trusted.
    pub key: Option<Key>,
    /// Time that a peer has for a handshake. Default: 5 s.
    pub handshake_timeout: Duration,
    /// Peers at a time. Default: 1024.
    pub max_peers: usize,
}

impl ChannelConfig {
    /// The defaults.
    pub fn new(id: PeerId, arena: Arc<Arena>) -> Self {
        Self {
            id,
            arena,
            unit: 4096,
            on_connect: None,
            key: None,
            handshake_timeout: Duration::from_secs(5),
            max_peers: 1024,
        }
    }
}

impl fmt::Debug for ChannelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelConfig")
            .field("id", &self.id)
            .field("unit", &self.unit)
            .field("key", &self.key)
            .field("handshake_timeout", &self.handshake_timeout)
            .field("max_peers", &self.max_peers)
            .finish_non_exhaustive()
    }
}
