//! One error for each operation.

use std::io;

use thiserror::Error;

/// Why a tier cannot be used just now.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("the tier is not available: {reason}")]
pub struct Unavailable {
    /// What is wrong, for a person.
    pub reason: String,
}

macro_rules! operation_errors {
    ($($(#[$doc:meta])* $name:ident $operation:literal { $($extra:tt)* })*) => {$(
        $(#[$doc])*
        #[derive(Debug, Error)]
        #[non_exhaustive]
        pub enum $name {
            /// The deadline passed first.
            #[error("the deadline passed before the {op} was done", op = $operation)]
            Deadline,
            /// The tier was closed.
            #[error("no {op}: the tier is closed", op = $operation)]
            Closed,
            /// The tier is down, or was taken out.
            #[error(transparent)]
            Unavailable(#[from] Unavailable),
            /// The device or the connection failed.
            #[error("{op} failed: {0}", op = $operation)]
            Io(#[from] io::Error),
            $($extra)*
        }
    )*};
}

operation_errors! {
    /// A key that could not be looked up.
    LookupError "lookup" {}
    /// A chunk that could not be loaded. A chunk that is not there, or whose bytes do not match
    /// its checksum, is no error but a miss.
    LoadError "load" {
        /// The slot's length is not the chunk's.
        #[error("the chunk has {expected} bytes, the slot to load it into {found}: look it up again")]
        Length {
            /// Bytes of the chunk.
            expected: u64,
            /// Bytes of the slot.
            found: u64,
        },
    }
    /// A chunk that could not be stored.
    StoreError "store" {
        /// No room, and nothing that may be evicted.
        #[error("no room for {needed} bytes, and nothing that may be evicted")]
        Full {
            /// Bytes of the chunk.
            needed: u64,
        },
        /// Larger than anything the tier can hold.
        #[error("a chunk of {found} bytes is larger than the {max} that the tier can hold")]
        TooLarge {
            /// Most bytes of a chunk.
            max: u64,
            /// Bytes of this one.
            found: u64,
        },
    }
    /// A key that could not be removed.
    RemoveError "removal" {}
    /// A tier that could not be cleared.
    ClearError "clearing" {}
    /// A listing that could not be made.
    ListError "listing" {}
    /// A usage that could not be told.
    UsageError "usage" {}
    /// A tier that could not be closed in order.
    CloseError "closing" {}
}

macro_rules! part_of_clearing {
    ($($name:ident),*) => {$(
        impl From<$name> for ClearError {
            fn from(error: $name) -> Self {
                match error {
                    $name::Deadline => Self::Deadline,
                    $name::Closed => Self::Closed,
                    $name::Unavailable(why) => Self::Unavailable(why),
                    $name::Io(error) => Self::Io(error),
                }
            }
        }
    )*};
}

part_of_clearing!(ListError, RemoveError);
