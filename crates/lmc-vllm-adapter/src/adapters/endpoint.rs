//! The address of a server.

use std::fmt;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use thiserror::Error;

use crate::local::{LOCAL_ADDRESS, LOCAL_SOCKET, check_private, user_folder};

/// Address of a server: `tcp://HOST:PORT`, `ipc://PATH` (a Unix socket) or `local`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Endpoint {
    /// The first usable server of this host, see [`LOCAL_SOCKET`](crate::LOCAL_SOCKET).
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
    /// Returns the addresses to try, in order.
    pub(crate) fn candidates(&self) -> Vec<Self> {
        match self {
            Self::Local => {
                let sockets = sockets(Path::new(LOCAL_SOCKET), &user_folder());
                let port = Self::Tcp(LOCAL_ADDRESS.to_owned());
                sockets.into_iter().map(Self::Ipc).chain([port]).collect()
            }
            given => vec![given.clone()],
        }
    }
}

/// Returns the sockets that exist. Users who may write to the folder of the shared socket are
/// trusted; a user's own folder must be private.
fn sockets(shared: &Path, folder: &Path) -> Vec<PathBuf> {
    let own = folder.join("lmc.sock");
    let is_own = own != shared && check_private(folder).is_ok();
    let sockets = [Some(shared.to_owned()), is_own.then_some(own)];
    let is_socket = |path: &PathBuf| {
        let found = fs::metadata(path);
        found.is_ok_and(|found| found.file_type().is_socket())
    };
    sockets.into_iter().flatten().filter(is_socket).collect()
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
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use lmc_testkit::Folder;

    use super::*;

    #[test]
    fn sockets_that_are_there_are_tried_unless_others_may_write_to_their_folder() {
        let (shared, own) = (Folder::temporary(), Folder::temporary());
        let paths = [&shared, &own].map(|folder| folder.join("lmc.sock"));
        let found = || sockets(&paths[0], &own);
        assert!(found().is_empty());
        let _own = UnixListener::bind(&paths[1]).expect("a socket");
        assert_eq!(found(), [paths[1].clone()]);
        let _shared = UnixListener::bind(&paths[0]).expect("a socket");
        assert_eq!(found(), paths);
        assert_eq!(sockets(&paths[1], &own), [paths[1].clone()]);
        let open = fs::Permissions::from_mode(0o777);
        fs::set_permissions(&own, open).expect("it is ours");
        assert_eq!(found(), [paths[0].clone()]);
    }

    #[test]
    fn the_port_is_tried_last_and_a_given_address_alone() {
        let found = Endpoint::Local.candidates();
        assert_eq!(found.last(), Some(&Endpoint::Tcp(LOCAL_ADDRESS.to_owned())));
        let given = Endpoint::Tcp("host:1".to_owned());
        assert_eq!(given.candidates(), [given]);
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
