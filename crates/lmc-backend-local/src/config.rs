//! Configuration of a tier.

use std::sync::Arc;
use std::thread;

use lmc_memory::Pool;
use thiserror::Error;

use crate::{LocalSink, LocalTier, PolicyKind};

/// Configuration of a [`LocalTier`].
#[derive(Clone, Debug)]
pub struct LocalConfig {
    pub(crate) pool: Pool,
    pub(crate) policy: PolicyKind,
    pub(crate) shards: usize,
    pub(crate) high: f64,
    pub(crate) low: f64,
    pub(crate) events: Option<Arc<dyn LocalSink>>,
}

/// A configuration that makes no tier.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum LocalConfigError {
    /// The number of shards is no power of two from 1 to 128.
    #[error("the number of index shards must be a power of two from 1 to 128, found {found}")]
    Shards {
        /// The number asked for.
        found: usize,
    },
    /// The watermarks are not parts of the pool, or the low one is not the lower one.
    #[error("watermarks must be 0 < low <= high <= 1, found low {low} and high {high}")]
    Watermarks {
        /// Used part of the pool at which eviction starts.
        high: f64,
        /// Used part of the pool at which eviction stops.
        low: f64,
    },
}

impl LocalConfig {
    /// Returns the configuration of a tier over this pool. All memory of the pool may be filled
    /// with chunks.
    pub fn new(pool: Pool) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        Self {
            pool,
            policy: PolicyKind::default(),
            shards: (cores * 4).next_power_of_two().clamp(8, 64),
            high: 0.95,
            low: 0.90,
            events: None,
        }
    }

    /// Sets the eviction policy. Default: [`PolicyKind::Lru`].
    pub fn with_policy(mut self, policy: PolicyKind) -> Self {
        self.policy = policy;
        self
    }

    /// Sets the number of parts of the index with a lock each; a power of two from 1 to 128. More of them let more
    /// threads in at once, fewer make a batch visit fewer locks.
    /// Default: four for each core, 8 to 64.
    pub fn with_shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// [`LocalTier::maintain`] starts to evict when more than `high` of the pool is taken, and
    /// goes on until it is `low`. Default: 0.95 and 0.90.
    pub fn with_watermarks(mut self, high: f64, low: f64) -> Self {
        (self.high, self.low) = (high, low);
        self
    }

    /// Sets the receiver of events about stored and removed chunks. Default: none.
    pub fn with_events(mut self, events: Arc<dyn LocalSink>) -> Self {
        self.events = Some(events);
        self
    }

    /// Makes the tier.
    ///
    /// # Errors
    /// [`LocalConfigError`] says which value is out of its range.
    pub fn build(self) -> Result<LocalTier, LocalConfigError> {
        let found = self.shards;
        if !found.is_power_of_two() || found > 128 {
            return Err(LocalConfigError::Shards { found });
        }
        let Self { high, low, .. } = self;
        if !(0.0 < low && low <= high && high <= 1.0) {
            return Err(LocalConfigError::Watermarks { high, low });
        }
        Ok(LocalTier::new(self))
    }
}
