//! How an engine is set up.

use std::time::Duration;

use lmc_backend_local::{LocalConfigError, PolicyKind};
use lmc_memory::PoolError;
use thiserror::Error;

/// Settings of a [`CacheEngine`](crate::CacheEngine).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineConfig {
    /// What leaves DRAM first. Default: LRU.
    pub policy: PolicyKind,
    /// Bytes that slots are aligned to; a power of two, at least 64. Default: 4096.
    pub align: usize,
    /// Share of the pool above which chunks are evicted before anybody asks for room.
    /// Default: 0.95.
    pub high_watermark: f64,
    /// Share of the pool at which that stops. Default: 0.90.
    pub low_watermark: f64,
    /// Parts of the index with a lock each; none lets the tier choose by the number of cores.
    /// Default: none.
    pub shards: Option<usize>,
    /// Time between two looks at the watermarks. Default: 100 ms.
    pub maintain_every: Duration,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            policy: PolicyKind::default(),
            align: 4096,
            high_watermark: 0.95,
            low_watermark: 0.90,
            shards: None,
            maintain_every: Duration::from_millis(100),
        }
    }
}

/// An engine cannot be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The arena cannot be a pool.
    #[error("pool: {0}")]
    Pool(#[from] PoolError),
    /// The DRAM tier refuses its settings.
    #[error("dram tier: {0}")]
    Local(#[from] LocalConfigError),
    /// The thread that watches the watermarks cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}
