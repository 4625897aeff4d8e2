//! Names and addresses of peers.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;

/// Bytes of a name at most.
const MAX_NAME: usize = 128;

/// The name of a peer: 1 to 128 printable ASCII characters without spaces. A process that starts
/// again may keep its name: channels distinguish the two by their incarnation.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(Arc<str>);

/// A text that is not a valid peer id.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("invalid peer id {0:?}: expected 1 to 128 printable ASCII characters without spaces")]
pub struct PeerIdError(String);

impl PeerId {
    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PeerId {
    type Err = PeerIdError;

    fn from_str(text: &str) -> Result<Self, PeerIdError> {
        let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
        if text.is_empty() || text.len() > MAX_NAME || !printable {
            let shown: String = text.chars().take(MAX_NAME).collect();
            return Err(PeerIdError(shown));
        }
        Ok(Self(text.into()))
    }
}

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

/// The address of a channel: `tcp://HOST:PORT` (an IPv6 host in brackets) or `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// A TCP port.
    Tcp {
        /// Name or IP address of the host.
        host: String,
        /// The port; 0 to let the system choose one.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

/// A text that is not a valid address.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("invalid address {0:?}: expected tcp://HOST:PORT or unix:PATH")]
pub struct AddressError(String);

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let parsed = match text.strip_prefix("unix:") {
            Some(path) => (!path.is_empty()).then(|| Self::Unix(path.into())),
            None => text.strip_prefix("tcp://").and_then(tcp),
        };
        parsed.ok_or_else(|| AddressError(text.chars().take(256).collect()))
    }
}

fn tcp(text: &str) -> Option<Address> {
    let (host, port) = text.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let host = match bare {
        Some(host) => host,
        None if host.contains(':') => return None,
        None => host,
    };
    let port = port.parse().ok()?;
    (!host.is_empty()).then(|| Address::Tcp {
        host: host.to_owned(),
        port,
    })
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_printed_as_they_are_read() {
        for text in [
            "tcp://host.example:7000",
            "tcp://[::1]:0",
            "unix:/run/lmc.sock",
        ] {
            let address: Address = text.parse().expect("an address");
            assert_eq!(address.to_string(), text);
        }
        for text in [
            "",
            "tcp://",
            "tcp://h",
            "tcp://h:65536",
            "tcp://::1:5",
            "udp://h:1",
            "unix:",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_short_and_printable() {
        assert!("node-1/gpu0".parse::<PeerId>().is_ok());
        for text in ["", "two words", "ä", &"x".repeat(129)] {
            assert!(text.parse::<PeerId>().is_err(), "{text}");
        }
    }
}
