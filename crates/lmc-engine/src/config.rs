//! Settings of an engine.

use std::sync::Arc;
use std::time::Duration;

use lmc_backend::TooManyClears;
use lmc_backend_local::{LocalConfigError, Origin, PolicyKind};
use lmc_memory::PoolError;
use thiserror::Error;

/// Settings of a [`CacheEngine`](crate::CacheEngine).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Eviction policy of the DRAM tier. Default: LRU.
    pub policy: PolicyKind,
    /// Alignment of slots in bytes; a power of two, at least 64. Default: 4096.
    pub align: usize,
    /// Used fraction of the pool above which chunks are evicted before a caller needs their memory. Default:
    /// 0.95.
    pub high_watermark: f64,
    /// Used fraction of the pool at which this eviction stops. Default: 0.90.
    pub low_watermark: f64,
    /// Number of shards of the index, each with its own lock; `None` lets the tier choose by the number of
    /// cores. Default: none.
    pub shards: Option<usize>,
    /// Time between two checks of the watermarks. Default: 100 ms.
    pub maintain_every: Duration,
    /// Most bytes of the pool that are used by reads from lower tiers in flight. Default and maximum: a
    /// quarter of the pool.
    pub promotion_bytes: Option<u64>,
    /// Time after which a chunk that is not promoted yet counts as a miss. Default: 10 s.
    pub promotion_timeout: Duration,
    /// Longest wait for chunks that another engine is writing to a tier, or that a peer is pushing. Default:
    /// 500 ms.
    pub pending_timeout: Duration,
    /// Time that an engine takes to recompute one chunk. Chunks are read from lower tiers only if the
    /// estimated read time is shorter. Default: none; chunks are always read.
    pub recompute_time: Option<Duration>,
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
            promotion_bytes: None,
            promotion_timeout: Duration::from_secs(10),
            pending_timeout: Duration::from_millis(500),
            recompute_time: None,
        }
    }
}

/// Reason why an engine cannot be created.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The pool cannot be created in the arena.
    #[error("pool: {0}")]
    Pool(#[from] PoolError),
    /// The DRAM tier rejects its settings.
    #[error("dram tier: {0}")]
    Local(#[from] LocalConfigError),
    /// Too many lower tiers were given.
    #[error("{found} lower tiers, at most {max} are supported", max = Origin::MAX_TIERS)]
    TooManyTiers {
        /// Number of lower tiers.
        found: usize,
    },
    /// The tiers together know more clears than a map can hold.
    #[error(transparent)]
    Clears(#[from] TooManyClears),
    /// The host belongs to another engine.
    #[error("the host belongs to another engine: make one for each")]
    Host,
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] Arc<std::io::Error>),
}

impl From<std::io::Error> for EngineError {
    fn from(error: std::io::Error) -> Self {
        Self::Thread(Arc::new(error))
    }
}
