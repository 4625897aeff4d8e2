//! The address of a server.

use std::fmt;
use std::fs::{self, Metadata};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use crate::LOCAL_SOCKET;

/// Address at which a server is looked for where [`LOCAL_SOCKET`] is not.
const LOCAL_PORT: &str = "127.0.0.1:5555";

/// Address of a server: `tcp://HOST:PORT`, `ipc://PATH` (a Unix socket) or `local`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Endpoint {
    /// `/run/lmc/lmc.sock` if there is a socket at the time of connecting, else `127.0.0.1:5555`.
    #[default]
    Local,
    /// Host and port.
    Tcp(String),
    /// Path of a Unix socket.
    Ipc(PathBuf),
}

/// A text that is not an [`Endpoint`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0:?} is not an address of a server: expected tcp://HOST:PORT, ipc://PATH or local")]
pub struct EndpointError(String);

impl Endpoint {
    /// Returns the address to connect to now.
    pub(crate) fn resolved(&self) -> Self {
        match self {
            Self::Local => Self::at(Path::new(LOCAL_SOCKET)),
            given => given.clone(),
        }
    }

    fn at(socket: &Path) -> Self {
        let is_socket = |there: Metadata| there.file_type().is_socket();
        match fs::metadata(socket).is_ok_and(is_socket) {
            true => Self::Ipc(socket.to_owned()),
            false => Self::Tcp(LOCAL_PORT.to_owned()),
        }
    }
}

impl FromStr for Endpoint {
    type Err = EndpointError;

    fn from_str(text: &str) -> Result<Self, EndpointError> {
        if text == "local" {
            return Ok(Self::Local);
        }
        let wrong = || EndpointError(text.chars().take(256).collect());
        match text.split_once("://") {
            Some(("tcp", address)) => match address.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                    Ok(Self::Tcp(address.to_owned()))
                }
                _ => Err(wrong()),
            },
            Some(("ipc", path)) if !path.is_empty() => Ok(Self::Ipc(path.into())),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("local"),
            Self::Tcp(address) => write!(f, "tcp://{address}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_taken_where_it_is_there() {
        let path = std::env::temp_dir().join(format!("lmc_endpoint_{}", std::process::id()));
        let port = Endpoint::Tcp(LOCAL_PORT.to_owned());
        assert_eq!(Endpoint::at(&path), port);
        fs::write(&path, "no socket").expect("written");
        assert_eq!(Endpoint::at(&path), port);
        fs::remove_file(&path).expect("it is there");
        let _listener = std::os::unix::net::UnixListener::bind(&path).expect("a socket");
        assert_eq!(Endpoint::at(&path), Endpoint::Ipc(path.clone()));
        fs::remove_file(&path).expect("it is there");
        let given = Endpoint::Tcp("host:1".to_owned());
        assert_eq!(given.resolved(), given);
    }

    #[test]
    fn an_address_is_read_and_shown() {
        for text in [
            "tcp://127.0.0.1:5555",
            "tcp://[::1]:1",
            "ipc:///run/lmc/lmc.sock",
            "local",
        ] {
            let endpoint: Endpoint = text.parse().expect("an address");
            assert_eq!(endpoint.to_string(), text);
        }
        for text in [
            "",
            "tcp://",
            "tcp://host",
            "tcp://:1",
            "tcp://h:99999",
            "ipc://",
            "http://h:1",
        ] {
            assert!(text.parse::<Endpoint>().is_err(), "{text:?}");
        }
    }
}
