//! Why a connection or a transfer did not come about.

use std::io;

use thiserror::Error;

use crate::{ConfigError, Index, PeerId};

/// A peer could not be connected to.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A setting of this side's own makes no sense.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The deadline passed first, or the time that a handshake may take.
    #[error("{peer} did not answer the handshake in time")]
    Deadline {
        /// Who was connected to.
        peer: PeerId,
    },
    /// The address is of a kind that this channel does not serve.
    #[error("a {kind} channel cannot connect to {address}")]
    Address {
        /// The channel's kind.
        kind: &'static str,
        /// The address.
        address: String,
    },
    /// Somebody else answers there.
    #[error("{expected} was expected, and {found} answers: is the address of another?")]
    WrongPeer {
        /// Who was connected to.
        expected: PeerId,
        /// Who answers.
        found: PeerId,
    },
    /// The other side speaks another version.
    #[error("version {theirs} of the handshake, this side speaks {ours}: run one release on both")]
    Version {
        /// This side's.
        ours: u16,
        /// The other side's.
        theirs: u16,
    },
    /// The two sides have not the same key, or only one has any.
    #[error("the shared key is not the same on both sides")]
    Key,
    /// What the other side sent is no handshake, or is too long for one.
    #[error("not a handshake: {0}")]
    Malformed(String),
    /// The other side said no.
    #[error("refused by the peer: {0}")]
    Refused(String),
    /// The message is longer than [`crate::MAX_MESSAGE`].
    #[error("a message of {found} bytes, {max} are allowed", max = crate::MAX_MESSAGE)]
    Message {
        /// Bytes of the message.
        found: usize,
    },
    /// The channel is closed.
    #[error("the channel is closed")]
    Closed,
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
    /// The library under the channel failed.
    #[error("{0}")]
    Library(String),
}

/// Objects could not be moved, or not all of them.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransferError {
    /// No connection to this peer.
    #[error("{peer} is not connected")]
    UnknownPeer {
        /// The peer.
        peer: PeerId,
    },
    /// A slot of another arena.
    #[error("object {place} does not lie in the arena that the channel registered")]
    NotRegistered {
        /// Its place in the batch.
        place: usize,
    },
    /// A slot that no index names: the pool's alignment is less than the channel's unit.
    #[error("object {place} does not begin at a multiple of {unit} bytes")]
    Unaligned {
        /// Its place in the batch.
        place: usize,
        /// Bytes that one step of an index stands for.
        unit: u64,
    },
    /// Objects and indices do not go together.
    #[error("{objects} objects, and {indices} indices for them")]
    Indices {
        /// Number of objects.
        objects: usize,
        /// Number of indices.
        indices: usize,
    },
    /// Too many objects at once.
    #[error("{objects} objects in one batch, {max} are allowed", max = crate::MAX_BATCH)]
    TooMany {
        /// Number of objects.
        objects: usize,
    },
    /// A place outside the peer's arena.
    #[error(
        "object {place}: {len} bytes at index {index} lie outside the peer's arena of {arena} bytes",
        index = index.0
    )]
    OutOfRange {
        /// Its place in the batch.
        place: usize,
        /// The index that was named.
        index: Index,
        /// Bytes of the object.
        len: u64,
        /// Bytes of the peer's arena.
        arena: u64,
    },
    /// Sender and receiver do not agree on a length, or the receiver has too few slots.
    #[error("object {place} has {sent} bytes, the receiver has room for {room}")]
    Length {
        /// Its place in the batch.
        place: usize,
        /// Bytes of the object.
        sent: u64,
        /// Bytes of the slot; 0 when there is none.
        room: u64,
    },
    /// The bytes that arrived are not those that were sent.
    #[error("object {place} arrived with a wrong checksum")]
    Corrupt {
        /// Its place in the batch.
        place: usize,
    },
    /// The deadline passed first.
    #[error("the deadline passed before the transfer was done")]
    Deadline {
        /// See [`TransferError::quiet`].
        quiet: bool,
    },
    /// The peer is gone.
    #[error("{peer} is gone: {reason}")]
    PeerGone {
        /// The peer.
        peer: PeerId,
        /// How it is known.
        reason: String,
        /// See [`TransferError::quiet`].
        quiet: bool,
    },
    /// The peer refused the transfer.
    #[error("refused by the peer: {0}")]
    Refused(String),
    /// The channel is closed.
    #[error("the channel is closed")]
    Closed,
    /// The transport failed.
    #[error("the transfer failed: {reason}")]
    Failed {
        /// What it said.
        reason: String,
        /// See [`TransferError::quiet`].
        quiet: bool,
    },
}

impl TransferError {
    /// Whether nothing moves bytes of this transfer any more, into the memory of either side. If
    /// not, the places in the *peer's* arena that a send or write named may still change: the
    /// peer must not use them for anything else. (Of this side's slots the outcome says what
    /// became.)
    pub fn quiet(&self) -> bool {
        match self {
            Self::Deadline { quiet }
            | Self::PeerGone { quiet, .. }
            | Self::Failed { quiet, .. } => *quiet,
            // Bytes of a write that was under way may be on their way still.
            Self::Closed => false,
            _ => true,
        }
    }
}
