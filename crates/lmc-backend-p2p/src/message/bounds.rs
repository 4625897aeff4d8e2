//! Limits of messages, and the error of bytes that break them.

use thiserror::Error;

/// Most keys of one message.
pub const MAX_KEYS: usize = 1024;
/// Most bytes of a body.
pub const MAX_BODY: usize = 60 << 10;
/// Most bytes of a text: a name, an address, a reason.
pub const MAX_TEXT: usize = 256;

/// Bytes that are not a frame of the protocol.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MessageError {
    /// The bytes end before the frame does, or continue after it.
    #[error("expected a frame of {expected} bytes, found {found} bytes")]
    Length {
        /// Bytes of the frame.
        expected: usize,
        /// Bytes found.
        found: usize,
    },
    /// The body is longer than [`MAX_BODY`].
    #[error("a body of {0} bytes is longer than accepted")]
    TooLong(usize),
    /// The kind does not exist in this version.
    #[error("unknown kind {0:#x}")]
    Kind(u16),
    /// The body is invalid for its kind.
    #[error("the body of kind {0:#x} cannot be parsed")]
    Body(u16),
    /// A field is out of its limits.
    #[error("{0} is out of bounds")]
    Bounds(&'static str),
}

pub(crate) fn bound(within: bool, field: &'static str) -> Result<(), MessageError> {
    within.then_some(()).ok_or(MessageError::Bounds(field))
}
