//! Users of this host that are served.
//!
//! Every user of the host can connect to a port on loopback, and could commit forged chunks or
//! clear the cache. So the server looks up the user that owns the other end of a connection, and
//! refuses the connection unless that user is trusted.

use lmc_memory::own_uid;
use thiserror::Error;
use tokio::net::TcpStream;

use super::peer;
#[cfg(feature = "service")]
use super::stream::Stream;
#[cfg(feature = "service")]
use crate::peer::ClientSocket;

/// Users of this host that are served.
///
/// A client whose user the kernel does not show, because it is on another host or in another
/// network namespace, is always served: restrict access to the port by other means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TrustedUsers {
    /// Every user.
    All,
    /// The server's own user, root, and the users with these uids.
    OwnAnd(Vec<u32>),
}

impl Default for TrustedUsers {
    /// The server's own user and root.
    fn default() -> Self {
        Self::OwnAnd(Vec::new())
    }
}

/// The result of checking the user behind a connection that is served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trust {
    /// A user of this host, who is trusted.
    User,
    /// The kernel does not show the user: the other end is on another host or in another network
    /// namespace.
    Unknown,
}

/// The reason why a connection of another process on this host is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Untrusted {
    /// The user is not trusted.
    #[error(
        "uid {0} of this host is not trusted: run as the server's user, or add the uid to \
         --trusted-users"
    )]
    User(u32),
    /// The other end has closed its socket, so that its user cannot be looked up.
    #[error(
        "the other end has closed its socket, so its user cannot be checked against --trusted-users"
    )]
    Closed,
}

impl TrustedUsers {
    /// Returns the mode of a Unix socket: other users may connect if any of them is trusted, and are
    /// then checked.
    pub(super) fn socket_mode(&self) -> u32 {
        match self {
            Self::OwnAnd(others) if others.is_empty() => 0o600,
            _ => 0o666,
        }
    }

    /// Checks the user at the other end of a connection, whichever end opened it. A connection that
    /// the other side has not accepted yet has no user, and counts as closed.
    ///
    /// # Errors
    /// [`Untrusted`] if the user is not trusted or cannot be looked up any more.
    pub fn check(&self, stream: &TcpStream) -> Result<Trust, Untrusted> {
        self.check_uid(peer::of_tcp(stream).uid, || peer::is_closed(stream))
    }

    /// Checks the user of a connection whose other end was looked up before.
    #[cfg(feature = "service")]
    pub(super) fn check_peer(
        &self,
        stream: &Stream,
        peer: &ClientSocket,
    ) -> Result<Trust, Untrusted> {
        self.check_uid(peer.uid, || match stream {
            Stream::Tcp(stream) => peer::is_closed(stream),
            Stream::Unix(_) => false,
        })
    }

    fn check_uid(
        &self,
        uid: Option<u32>,
        is_closed: impl FnOnce() -> bool,
    ) -> Result<Trust, Untrusted> {
        let Self::OwnAnd(others) = self else {
            return Ok(uid.map_or(Trust::Unknown, |_| Trust::User));
        };
        match uid {
            Some(uid) if uid == 0 || uid == own_uid() || others.contains(&uid) => Ok(Trust::User),
            Some(uid) => Err(Untrusted::User(uid)),
            None if is_closed() => Err(Untrusted::Closed),
            None => Ok(Trust::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_root_and_named_users_are_trusted() {
        let stranger = own_uid() + 4_242;
        let check_uid = |users: &TrustedUsers, uid| users.check_uid(uid, || false);
        let own = TrustedUsers::default();
        assert_eq!(check_uid(&own, Some(0)), Ok(Trust::User));
        assert_eq!(check_uid(&own, Some(own_uid())), Ok(Trust::User));
        let refused = Err(Untrusted::User(stranger));
        assert_eq!(check_uid(&own, Some(stranger)), refused);
        let named = TrustedUsers::OwnAnd(vec![stranger]);
        assert_eq!(check_uid(&named, Some(stranger)), Ok(Trust::User));
        assert_eq!(
            check_uid(&TrustedUsers::All, Some(stranger)),
            Ok(Trust::User)
        );
    }

    #[test]
    fn an_unknown_user_is_served_unless_its_socket_was_of_this_host() {
        let own = TrustedUsers::default();
        assert_eq!(own.check_uid(None, || false), Ok(Trust::Unknown));
        assert_eq!(own.check_uid(None, || true), Err(Untrusted::Closed));
        assert_eq!(
            TrustedUsers::All.check_uid(None, || true),
            Ok(Trust::Unknown)
        );
    }

    /// Otherwise an untrusted user could send requests and close at once, to be of unknown user.
    #[tokio::test]
    async fn a_closed_local_peer_does_not_count_as_remote() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("loopback");
        let address = listener.local_addr().expect("bound");
        let client = TcpStream::connect(address).await.expect("it listens");
        let (accepted, _) = listener.accept().await.expect("a connection");
        assert_eq!(TrustedUsers::default().check(&accepted), Ok(Trust::User));
        drop(client);
        let found = TrustedUsers::default().check(&accepted);
        assert_eq!(found, Err(Untrusted::Closed));
    }
}
