//! Counters of a channel.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of a [`crate::SocketChannel`] since it was built.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct SocketStats {
            $($(#[$doc])* pub $name: u64,)*
        }

        #[derive(Debug, Default)]
        pub(super) struct SocketCounters {
            $(pub(super) $name: Counter,)*
        }

        impl SocketCounters {
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
    /// Bytes received, with frames and seals.
    bytes_in,
    /// Bytes sent, with frames and seals.
    bytes_out,
    /// Transfers that this side called, the failed ones included.
    operations,
    /// Reads and writes of peers that this side served.
    served,
    /// Pieces of objects that arrived with a wrong checksum.
    corrupt,
    /// Connections to this side that did not complete the handshake.
    refused_handshakes,
    /// Requests of peers that were refused: for memory not leased to them, or beyond their rights.
    refused_requests,
    /// Connections that were ended because the peer broke the protocol or exceeded its memory.
    broken,
    /// Reads that NIXL did not complete, or not in time: the rest went over the streams.
    nixl_failed,
    /// Pieces of objects that were discarded because their call had ended before they arrived, or
    /// because their request was refused. Slots of such calls are returned at once; none is
    /// quarantined.
    discarded,
}
