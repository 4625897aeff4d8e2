//! Counters of the tier.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        #[derive(Debug, Default)]
        pub(crate) struct DiskCounters { $(pub(crate) $name: AtomicU64),* }

        /// Counters of a disk tier since it was opened.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct DiskStats { $($(#[$doc])* pub $name: u64),* }

        impl DiskCounters {
            pub(crate) fn read(&self) -> DiskStats {
                DiskStats { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }

        impl DiskStats {
            /// Returns each counter with its name.
            pub fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }

            pub(crate) fn add(&mut self, other: &Self) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

counters! {
    /// Chunks written and acknowledged.
    written,
    /// Payload bytes of the written chunks.
    written_bytes,
    /// Chunks read, verified and returned.
    read,
    /// Payload bytes of the chunks that were read.
    read_bytes,
    /// Chunks looked for and not found.
    missed,
    /// Chunks whose header was damaged or of another chunk: a miss, and the chunk is removed.
    bad_headers,
    /// Chunks whose bytes did not match their checksum: a miss, and the chunk is removed.
    bad_payloads,
    /// Chunks declined, because too many bytes were waiting to be written.
    declined_busy,
    /// Reads that failed.
    read_errors,
    /// Writes and syncs that failed.
    write_errors,
    /// Operations without an answer at their deadline.
    late,
    /// Chunks evicted with their segment.
    evicted,
    /// Segments evicted.
    evicted_segments,
    /// Chunks removed by key.
    removed,
    /// Groups of changes made durable together.
    commits,
    /// Checkpoints of the index.
    checkpoints,
    /// Times that the drive was taken out of use.
    taken_out,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
