//! Counters of the tier.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::Refusal;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident,)*) => {
        /// Counters since the tier was made.
        #[derive(Debug, Default)]
        pub(super) struct RemoteCounters {
            $($(#[doc = $doc])* pub(super) $name: Counter,)*
        }

        impl RemoteCounters {
            /// Returns the counters with the names of their fields.
            pub(super) fn named(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

counters! {
    /// Keys that were not looked up, because they were absent a short time ago.
    known_absent,
    /// Values that were not used because they were truncated or a checksum was wrong.
    damaged,
    /// Values that were not used because they belong to another key.
    other_key,
    /// Values that were not used because a later lmc wrote them.
    unknown_format,
    /// Values whose age was reset because they were read after more than half of their lifetime.
    touched,
    /// Lookups that were refused because too many were in progress.
    lookups_refused,
    /// Operations, on a batch or on a single object, that the store failed.
    failed,
    /// Attempts to read or write the object of clears that failed, or found it unusable.
    clears_unread,
    /// Values that were deleted on an operator's order, because no daemon looks for them any more.
    stale_deleted,
    /// Attempts to describe a space that failed.
    spaces_undescribed,
}

/// A counter.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

impl RemoteCounters {
    /// Counts a value that was not used. A slot of another length is not a fault of the value.
    pub(super) fn refused(&self, refusal: Refusal) {
        match refusal {
            Refusal::Damaged => self.damaged.add(1),
            Refusal::OtherKey => self.other_key.add(1),
            Refusal::Version(_) | Refusal::Codec(_) => self.unknown_format.add(1),
            Refusal::Length { .. } => {}
        }
    }
}
