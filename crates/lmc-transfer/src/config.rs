//! Settings that every channel has.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use lmc_memory::Arena;
use thiserror::Error;
use tokio::net::TcpStream;

use crate::net::Socket;
use crate::{BoxFuture, Identity, Keys, PeerId, PublicIdentity};

/// Answers the message that a peer sent when it connected. It may block; it runs on a thread of
/// its own.
pub type OnConnect = Arc<dyn Fn(&PeerId, Option<Bytes>) -> Option<Bytes> + Send + Sync>;

/// Answers the questions that peers send at any time: name and incarnation of the peer, and the
/// question. Calling it must not block; what it returns is polled on a thread that moves bytes.
pub type OnAsk = Arc<dyn Fn(&PeerId, u64, Bytes) -> BoxFuture<'static, Bytes> + Send + Sync>;

/// Decides whether a TCP connection is used; an error says why not. It must not block.
///
/// A connection that a peer opened is checked before anything is read from it. A connection that
/// this side opened is checked after the other side's first answer: until the other side has
/// accepted the connection, no process owns its other end. Before the check this side sends only an
/// ephemeral key, which reveals nothing.
pub type Admit = Arc<dyn Fn(&TcpStream) -> Result<(), String> + Send + Sync>;

/// Notified when a peer connects or is gone. It must not block.
pub type OnPeer = Arc<dyn Fn(&PeerId, PeerEvent) + Send + Sync>;

/// A change of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerEvent {
    /// An incarnation of the peer is connected.
    Connected {
        /// Incarnation of the peer.
        incarnation: u64,
    },
    /// An incarnation of the peer is gone: its leases have ended, and its indices are stale.
    Gone {
        /// Incarnation of the peer.
        incarnation: u64,
        /// The evidence for it.
        reason: String,
    },
}

/// Rights of peers in this side's memory, within their leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rights {
    /// Peers may read.
    #[default]
    Read,
    /// Peers may read and write.
    ReadWrite,
}

/// A setting that is invalid.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{name} must be {expected}, found {found}")]
pub struct ConfigError {
    /// The setting's name.
    pub name: &'static str,
    /// Valid values.
    pub expected: &'static str,
    /// The value found.
    pub found: String,
}

impl ConfigError {
    /// Checks a setting.
    pub(crate) fn unless(
        valid: bool,
        name: &'static str,
        expected: &'static str,
        found: &dyn fmt::Debug,
    ) -> Result<(), Self> {
        let found = format!("{found:?}");
        match valid {
            true => Ok(()),
            false => Err(Self {
                name,
                expected,
                found,
            }),
        }
    }
}

/// Settings that every channel has.
#[derive(Clone)]
#[non_exhaustive]
pub struct ChannelConfig {
    /// Name of this side.
    pub id: PeerId,
    /// The memory that this side's slots lie in.
    pub arena: Arc<Arena>,
    /// Rights of peers in this side's memory. Default: [`Rights::Read`].
    pub rights: Rights,
    /// Lets peers name any range of the arena, without a lease. Use it within one trust domain
    /// only: every peer reaches every slot, free ones and other tenants' included, and old contents
    /// cannot be distinguished from new ones. Default: `false`.
    pub open_arena: bool,
    /// Bytes that one step of an open arena's index stands for: a power of two, and the alignment
    /// of the pool's slots. Default: 4096.
    pub unit: u64,
    /// Answers the messages of peers that connect. Default: none.
    pub on_connect: Option<OnConnect>,
    /// Answers the questions of connected peers ([`crate::SocketChannel::ask`]). Default: none.
    pub on_ask: Option<OnAsk>,
    /// Notified when a peer connects or is gone. Default: none.
    pub on_peer: Option<OnPeer>,
    /// Admits connections, whichever side opens them. Default: admits all.
    pub admit: Option<Admit>,
    /// The keys that all peers share. Without any, only loopback addresses and Unix sockets are
    /// served and connected to; NIXL requires them. Default: none.
    pub keys: Option<Keys>,
    /// Proves this side's name. Default: a new identity for each channel, so that a channel that
    /// starts again gets its name back only when its predecessor is gone.
    pub identity: Option<Identity>,
    /// The identities of known names. A listed name is accepted from its identity only. Any other
    /// name is accepted from any identity, and belongs to it while it is connected. Default: empty.
    pub known_peers: HashMap<PeerId, PublicIdentity>,
    /// Encrypts and authenticates objects in transit, as everything else always is. For sockets
    /// only. Default: `false`.
    pub encrypt_objects: bool,
    /// Sends each piece of an object with a checksum, and compares it. If it is off on both sides,
    /// this crate does not notice bytes that changed in transit: only for embedders that compare
    /// objects with digests of their own. The slots of a read then have their checksum already,
    /// unless the object was spread over several streams. For sockets only. Default: `true`.
    pub object_checksums: bool,
    /// Time limit of a handshake, as initiator and as acceptor; above 0. Default: 5 s.
    pub handshake_timeout: Duration,
    /// Maximum number of peers at a time, at least one. Default: 1024.
    pub max_peers: usize,
}

impl ChannelConfig {
    /// Returns the defaults.
    pub fn new(id: PeerId, arena: Arc<Arena>) -> Self {
        Self {
            id,
            arena,
            rights: Rights::default(),
            open_arena: false,
            unit: 4096,
            on_connect: None,
            on_ask: None,
            on_peer: None,
            admit: None,
            keys: None,
            identity: None,
            known_peers: HashMap::new(),
            encrypt_objects: false,
            object_checksums: true,
            handshake_timeout: Duration::from_secs(5),
            max_peers: 1024,
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// The first setting that is invalid.
    pub fn check(&self) -> Result<(), ConfigError> {
        let power = self.unit.is_power_of_two();
        ConfigError::unless(power, "unit", "a power of two", &self.unit)?;
        let time = &self.handshake_timeout;
        ConfigError::unless(!time.is_zero(), "handshake_timeout", "above 0", time)?;
        let peers = &self.max_peers;
        ConfigError::unless(*peers > 0, "max_peers", "above 0", peers)
    }

    /// Checks whether a connection is used, whichever side opened it.
    pub(crate) fn admits(&self, socket: &Socket) -> Result<(), String> {
        match (&self.admit, socket) {
            (Some(admit), Socket::Tcp(stream)) => admit(stream),
            _ => Ok(()),
        }
    }

    pub(crate) fn tell(&self, peer: &PeerId, event: PeerEvent) {
        if let Some(on_peer) = &self.on_peer {
            on_peer(peer, event);
        }
    }
}

impl fmt::Debug for ChannelConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChannelConfig")
            .field("id", &self.id)
            .field("rights", &self.rights)
            .field("open_arena", &self.open_arena)
            .field("unit", &self.unit)
            .field("keys", &self.keys)
            .field("identity", &self.identity)
            .field("handshake_timeout", &self.handshake_timeout)
            .field("max_peers", &self.max_peers)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use lmc_memory::ArenaConfig;

    use super::*;

    type Change = fn(&mut ChannelConfig);

    #[test]
    fn invalid_settings_are_named() {
        let arena = ArenaConfig::anonymous(1 << 20).build();
        let arena = Arc::new(arena.expect("a test machine has 1 MiB"));
        let config = ChannelConfig::new("a".parse().expect("a name"), arena);
        assert_eq!(config.check(), Ok(()));
        let check = |change: Change| {
            let mut config = config.clone();
            change(&mut config);
            config.check().map_err(|error| error.name)
        };
        let cases: [(Change, &str); 5] = [
            (|c| c.unit = 0, "unit"),
            (|c| c.unit = 4097, "unit"),
            (
                |c| c.handshake_timeout = Duration::ZERO,
                "handshake_timeout",
            ),
            (|c| c.max_peers = 0, "max_peers"),
            (|c| (c.unit, c.max_peers) = (3, 0), "unit"),
        ];
        for (change, wrong) in cases {
            assert_eq!(check(change), Err(wrong));
        }
    }
}
