//! How a channel is set up.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use lmc_memory::Arena;
use thiserror::Error;

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

/// A setting that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{name} must be {expected}, found {found}")]
pub struct ConfigError {
    /// What it is called.
    pub name: &'static str,
    /// What it may be.
    pub expected: &'static str,
    /// What it is.
    pub found: String,
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
    /// What peers must know, at least a byte. Default: nothing, for networks where every host is
    /// trusted.
    ///
    /// The key protects the handshake, not the bytes after it: who can read or change what passes
    /// between the hosts can do so with a key as well. Against them use a private network or a
    /// tunnel.
    pub key: Option<Key>,
    /// Time that a peer has for a handshake, whoever connects; more than none. Default: 5 s.
    pub handshake_timeout: Duration,
    /// Peers at a time, at least one. Default: 1024.
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

    /// Whether a channel can be made from it.
    ///
    /// # Errors
    /// The first setting that makes no sense.
    pub fn check(&self) -> Result<(), ConfigError> {
        let setting = |fits: bool, name, expected, found: &dyn fmt::Debug| {
            let found = format!("{found:?}");
            let wrong = ConfigError {
                name,
                expected,
                found,
            };
            fits.then_some(()).ok_or(wrong)
        };
        let power = self.unit.is_power_of_two();
        setting(power, "unit", "a power of two", &self.unit)?;
        // Of the key only its length may be told.
        let secret = self.key.as_ref().map_or(1, |key| key.secret().len());
        let expected = "of a byte or more, or none at all";
        setting(secret > 0, "key", expected, &secret)?;
        let time = &self.handshake_timeout;
        setting(!time.is_zero(), "handshake_timeout", "above 0", time)?;
        setting(self.max_peers > 0, "max_peers", "above 0", &self.max_peers)
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

#[cfg(test)]
mod tests {
    use lmc_memory::ArenaConfig;

    use super::*;

    type Change = fn(&mut ChannelConfig);

    #[test]
    fn settings_that_make_no_sense_are_named() {
        let arena = ArenaConfig::anonymous(1 << 20).build();
        let arena = Arc::new(arena.expect("a test machine has 1 MiB"));
        let config = ChannelConfig::new("a".parse().expect("a name"), arena);
        assert_eq!(config.check(), Ok(()));
        let check = |change: Change| {
            let mut config = config.clone();
            change(&mut config);
            config.check().map_err(|error| error.to_string())
        };
        let cases: [(Change, &str); 6] = [
            (|c| c.unit = 0, "unit must be a power of two, found 0"),
            (|c| c.unit = 4097, "unit must be a power of two, found 4097"),
            (
                |c| c.key = Some(Key::new([])),
                "key must be of a byte or more, or none at all, found 0",
            ),
            (
                |c| c.handshake_timeout = Duration::ZERO,
                "handshake_timeout must be above 0, found 0ns",
            ),
            (|c| c.max_peers = 0, "max_peers must be above 0, found 0"),
            (
                |c| (c.unit, c.max_peers) = (3, 0),
                "unit must be a power of two, found 3",
            ),
        ];
        for (change, wrong) in cases {
            assert_eq!(check(change), Err(wrong.to_owned()));
        }
        assert_eq!(check(|c| c.key = Some(Key::new(*b"k"))), Ok(()));
    }
}
