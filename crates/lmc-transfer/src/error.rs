//! Errors of connects and of transfers.

use std::io;
use std::sync::Arc;

use thiserror::Error;

use crate::{ConfigError, Index, PeerId};

/// A peer could not be connected to.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A setting of this side is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The deadline passed first, or [`crate::ChannelConfig::handshake_timeout`].
    #[error("{peer} did not answer the handshake in time")]
    Deadline {
        /// The peer that was connected to.
        peer: PeerId,
    },
    /// No shared key is set, and the address is neither loopback nor a Unix socket.
    #[error(
        "{address} is reached over a network, which requires a shared key: set `keys` on every \
         peer, or use a loopback address or a Unix socket"
    )]
    Unprotected {
        /// The address.
        address: String,
    },
    /// Another peer answers at the address.
    #[error("expected {expected} at this address, found {found}")]
    WrongPeer {
        /// The peer that was connected to.
        expected: PeerId,
        /// The peer that answers.
        found: PeerId,
    },
    /// The name belongs to another identity: see [`crate::ChannelConfig::known_peers`].
    #[error("the identity of {peer} is not the one that is known for its name")]
    Identity {
        /// The peer that was connected to.
        peer: PeerId,
    },
    /// The other side speaks another version.
    #[error(
        "the peer speaks version {theirs} of the handshake, expected {ours}: run the same release on both"
    )]
    Version {
        /// Version of this side.
        ours: u16,
        /// Version of the other side.
        theirs: u16,
    },
    /// The two sides have no shared key in common, or only one has any.
    #[error("the shared key is not the same on both sides")]
    Key,
    /// The other side sent bytes that are no handshake.
    #[error("invalid handshake: {0}")]
    Malformed(String),
    /// The other side refused.
    #[error("refused by the peer: {0}")]
    Refused(String),
    /// [`crate::ChannelConfig::admit`] of this side refused the other end of the connection.
    #[error("the process that listens there is refused by this side: {0}")]
    NotAdmitted(String),
    /// The message is longer than [`crate::MAX_MESSAGE`].
    #[error("a message of {found} bytes: at most {max} are allowed", max = crate::MAX_MESSAGE)]
    Message {
        /// Bytes of the message.
        found: usize,
    },
    /// The channel is closed.
    #[error("the channel is closed")]
    Closed,
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[source] Arc<io::Error>),
    /// The library under the channel failed.
    #[error("{0}")]
    Library(String),
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

/// Objects could not be moved, or not all of them. `object` is the number of an object in its
/// batch.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The peer is not connected.
    #[error("{peer} is not connected")]
    UnknownPeer {
        /// The peer.
        peer: PeerId,
    },
    /// A slot lies in another arena than the channel's.
    #[error("object {object} does not lie in the arena of this channel")]
    NotRegistered {
        /// Number of the object in the batch.
        object: usize,
    },
    /// A slot does not begin at a multiple of the channel's unit.
    #[error("object {object} does not begin at a multiple of {unit} bytes")]
    Unaligned {
        /// Number of the object in the batch.
        object: usize,
        /// Bytes of a unit.
        unit: u64,
    },
    /// Indices of the whole arena were asked for, which is not open.
    #[error("the arena is not open to peers: grant a lease, or set `open_arena`")]
    NotOpen,
    /// The numbers of objects and of indices differ.
    #[error("{objects} objects and {indices} indices: expected equal numbers")]
    Indices {
        /// Number of objects.
        objects: usize,
        /// Number of indices.
        indices: usize,
    },
    /// The batch has too many objects.
    #[error("{objects} objects in one batch: at most {max} are allowed", max = crate::MAX_BATCH)]
    TooMany {
        /// Number of objects.
        objects: usize,
    },
    /// An index of the open arena, with this length, ends outside it.
    #[error("object {object}: {len} bytes at {index} exceed the peer's arena of {arena} bytes")]
    OutOfRange {
        /// Number of the object in the batch.
        object: usize,
        /// The index.
        index: Index,
        /// Bytes of the object.
        len: u64,
        /// Bytes of the peer's arena.
        arena: u64,
    },
    /// An index was granted by another incarnation of the peer, which has ended.
    #[error("object {object}: the peer that granted {index} has ended: ask for a new lease")]
    Stale {
        /// Number of the object in the batch.
        object: usize,
        /// The index.
        index: Index,
    },
    /// A lease does not stand: it was revoked, was never granted to this side, or its slot is
    /// shorter.
    #[error("object {object}: not leased to this side (any more): ask for a new lease")]
    NotLeased {
        /// Number of the object in the batch.
        object: usize,
    },
    /// The peer's channel or lease allows reading only.
    #[error("the peer allows this side to read only")]
    ReadOnly,
    /// The length of an object differs from that of the receiver's slot, or there is no slot.
    #[error("object {object} has {sent} bytes, the receiver's slot {capacity}")]
    Length {
        /// Number of the object in the batch.
        object: usize,
        /// Bytes of the object.
        sent: u64,
        /// Bytes of the slot; 0 when there is none.
        capacity: u64,
    },
    /// The bytes that arrived are not those that were sent.
    #[error("object {object} arrived with a wrong checksum")]
    Corrupt {
        /// Number of the object in the batch.
        object: usize,
    },
    /// The deadline passed first.
    #[error("the deadline passed before the transfer was done")]
    Deadline,
    /// The peer is gone.
    #[error("{peer} is gone: {reason}")]
    PeerGone {
        /// The peer.
        peer: PeerId,
        /// The evidence for it.
        reason: String,
    },
    /// The peer refused the transfer.
    #[error("refused by the peer: {0}")]
    Refused(String),
    /// The channel is closed.
    #[error("the channel is closed")]
    Closed,
    /// The transport failed.
    #[error("the transfer failed: {0}")]
    Failed(String),
}
