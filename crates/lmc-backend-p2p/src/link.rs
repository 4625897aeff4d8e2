//! The channel to peers, as a trait.

use std::time::Instant;

use futures_util::FutureExt;
use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::{
    Address, AddressError, BoxFuture, ConnectError, DataPlane, Filled, Index, PeerId, TransferError,
};
use tokio::runtime::Handle;

/// Identifies one connection of a peer: a lease ends with it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Session {
    /// Name of the peer on the channel.
    pub peer: PeerId,
    /// Incarnation of the peer's channel.
    pub incarnation: u64,
}

/// A channel to peers: requests, leased memory, one-sided reads.
///
/// The channel of `lmc-transfer` implements it, and so does a simulation with a virtual clock.
pub trait Link: Send + Sync + 'static {
    /// Keeps granted memory readable. Dropping it ends the access.
    type Grant: Send + 'static;

    /// Returns true if this incarnation of the peer is connected.
    fn is_current(&self, session: &Session) -> bool;

    /// Returns the runtime of the thread at which a peer's replies arrive. Default: none, and reads run on
    /// the calling runtime.
    fn home(&self, _peer: &PeerId) -> Option<Handle> {
        None
    }

    /// Returns the plane that currently moves the bytes of reads from a peer; sockets if the peer is not
    /// connected.
    fn data_plane(&self, peer: &PeerId) -> DataPlane;

    /// Connects to the peer that should be listening at an address.
    ///
    /// # Errors
    /// [`ConnectError`]; also if another peer listens there.
    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        at: &'a Address,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), ConnectError>>;

    /// Ends the connections to a peer.
    fn disconnect<'a>(&'a self, peer: &'a PeerId, deadline: Instant) -> BoxFuture<'a, ()>;

    /// Sends a request to a connected peer, and returns its reply. Ends by the deadline.
    ///
    /// # Errors
    /// [`TransferError`]; after [`TransferError::Deadline`] the peer may have handled the request.
    fn request<'a>(
        &'a self,
        peer: &'a PeerId,
        body: Vec<u8>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Vec<u8>, TransferError>>;

    /// Allows a connected peer to read these slots. Returns their locations.
    ///
    /// # Errors
    /// [`TransferError`].
    fn grant(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<(Vec<Index>, Self::Grant), TransferError>;

    /// Reads granted slots from a peer's memory.
    fn read<'a>(
        &'a self,
        peer: &'a PeerId,
        slots: Vec<ReservedSlot>,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled>;
}

/// Parses an address from a peer's hello or from a directory, with or without `tcp://`.
pub(crate) fn tcp_address(text: &str) -> Result<Address, AddressError> {
    let bare = text.strip_prefix("tcp://").unwrap_or(text);
    format!("tcp://{bare}").parse()
}

/// Awaits `future` until the deadline, on the runtime's clock.
pub(crate) async fn timeout_at<T>(deadline: Instant, future: impl Future<Output = T>) -> Option<T> {
    let deadline = tokio::time::Instant::from_std(deadline);
    tokio::time::timeout_at(deadline, future)
        .map(Result::ok)
        .await
}
