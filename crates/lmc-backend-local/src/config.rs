//! Configuration of a tier.

use std::thread;

use thiserror::Error;

use crate::PolicyKind;

/// Configuration of a [`crate::LocalTier`].
#[derive(Clone, Debug)]
pub struct LocalConfig {
    pub(crate) policy: PolicyKind,
    pub(crate) shards: usize,
    pub(crate) high: f64,
    pub(crate) low: f64,
}

/// A configuration that is invalid.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LocalConfigError {
    /// The number of shards is not a power of two from 1 to 128.
    #[error("the number of index shards must be a power of two from 1 to 128, found {found}")]
    Shards {
        /// Number of shards in the configuration.
        found: usize,
    },
    /// The watermarks are not fractions of the pool, or the low one exceeds the high one.
    #[error("watermarks must be 0 < low <= high <= 1, found low {low} and high {high}")]
    Watermarks {
        /// Used fraction of the pool at which eviction starts.
        high: f64,
        /// Used fraction of the pool at which eviction stops.
        low: f64,
    },
}

impl Default for LocalConfig {
    fn default() -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            policy: PolicyKind::default(),
            shards: (cores * 4).next_power_of_two().clamp(8, 64),
            high: 0.95,
            low: 0.90,
        }
    }
}

impl LocalConfig {
    /// Sets the eviction policy. Default: [`PolicyKind::Lru`].
    pub fn with_policy(mut self, policy: PolicyKind) -> Self {
        self.policy = policy;
        self
    }

    /// Sets the number of shards of the index, each with its own lock: a power of two from 1 to 128. With
    /// more shards, more threads work at once; with fewer, a batch takes fewer locks. Default: four for each
    /// core, 8 to 64.
    pub fn with_shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// Sets the watermarks: [`crate::LocalTier::maintain`] starts to evict when more than `high` of the pool is
    /// used, and stops at `low`. Default: 0.95 and 0.90.
    pub fn with_watermarks(mut self, high: f64, low: f64) -> Self {
        (self.high, self.low) = (high, low);
        self
    }
}
