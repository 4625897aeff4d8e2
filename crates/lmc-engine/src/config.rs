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
    /// When chunks are copied to the tiers below. Default: [`CopyDown::OnCommit`].
    pub copy_down: CopyDown,
    /// Bytes of copies that may be on their way to each tier below; more are dropped, as a store
    /// waits for nothing. Default: an eighth of the pool.
    pub copy_queue_bytes: Option<u64>,
    /// Time that a tier below is given for a batch of copies. Default: 30 s.
    pub store_deadline: Duration,
    /// Bytes that may be on their way up at a time. Default: a quarter of the pool.
    pub fetch_bytes: Option<u64>,
    /// Time after which what has not come up is a miss. Default: 10 s.
    pub fetch_deadline: Duration,
}

/// When chunks are copied to the tiers below.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum CopyDown {
    /// As soon as they are committed: they survive whatever happens to this process.
    #[default]
    OnCommit,
    /// When they are committed, and again when they are found: for tiers that take what is
    /// offered a second time.
    OnCommitAndHit,
    /// When they are evicted above the high watermark, and when the engine is closed. What goes
    /// because somebody waits for its room is not copied: the copy would hold the very memory that
    /// is waited for.
    OnEviction,
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
            copy_down: CopyDown::default(),
            copy_queue_bytes: None,
            store_deadline: Duration::from_secs(30),
            fetch_bytes: None,
            fetch_deadline: Duration::from_secs(10),
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
    /// A thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[from] std::io::Error),
}
