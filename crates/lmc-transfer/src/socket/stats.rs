//! What a channel counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// What a [`crate::SocketChannel`] has counted since it was built.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct SocketStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: Counter,)*
        }

        impl Counters {
            pub(super) fn read(&self) -> SocketStats {
                SocketStats { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, number: usize) {
        self.0.fetch_add(number as u64, Ordering::Relaxed);
    }
}

counters! {
    /// Bytes received, frames and all.
    bytes_in,
    /// Bytes sent, frames and all.
    bytes_out,
    /// Calls of this side that moved something or tried to.
    operations,
    /// Reads and writes of peers that this side served.
    served,
    /// Pieces of objects that arrived with a wrong checksum.
    corrupt,
    /// Connections to this side that did not get through the handshake.
    refused_handshakes,
    /// Requests of peers for what they may not have: places outside the arena.
    refused_requests,
    /// Connections that were ended because the peer broke the protocol.
    broken,
    /// Pieces of objects that were thrown away: their call had ended before they came, or their
    /// places were refused. Such slots are given back at once; none waits in quarantine.
    discarded,
}
