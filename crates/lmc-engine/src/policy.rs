//! Policies of lower tiers: which chunks a tier stores, when they are written, and the tier's timeouts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use lmc_backend::Backend;
use lmc_key::SpaceId;

/// A tier below DRAM with its policy.
#[derive(Clone, Debug)]
pub struct LowerTier {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) policy: TierPolicy,
    pub(crate) kept: Option<Arc<dyn fmt::Debug + Send + Sync>>,
}

impl LowerTier {
    /// Makes a tier with a policy.
    pub fn new(backend: Arc<dyn Backend>, policy: TierPolicy) -> Self {
        Self {
            backend,
            policy,
            kept: None,
        }
    }

    /// Keeps a value, such as the tier's runtime, alive until the engine has ended. Default: none.
    #[must_use]
    pub fn keeping(mut self, kept: Arc<dyn fmt::Debug + Send + Sync>) -> Self {
        self.kept = Some(kept);
        self
    }

    /// Returns the tier itself.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }
}

impl From<Arc<dyn Backend>> for LowerTier {
    /// Makes a tier with the default policy.
    fn from(backend: Arc<dyn Backend>) -> Self {
        Self::new(backend, TierPolicy::default())
    }
}

/// The policy of one lower tier.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TierPolicy {
    /// Time at which chunks are written to the tier. Default: [`WritePolicy::Through`].
    pub write: WritePolicy,
    /// Chunks that are written to the tier. Default: [`Admission::Always`].
    pub admit: Admission,
    /// Spaces whose chunks are written to the tier. Default: all.
    pub spaces: SpaceFilter,
    /// Asks the tier for the blocks of tails too, if it has no local index. Default: true.
    pub asks_for_parts: bool,
    /// Writes to this tier the chunks that are promoted from tiers after it, so that they are nearer the next
    /// time. Default: false.
    pub fill: bool,
    /// Most bytes that are queued for writing to the tier; further writes are dropped, because a store never
    /// waits. Default: an eighth of the pool.
    pub write_queue_bytes: Option<u64>,
    /// Timeout of one write. Default: 30 s.
    pub write_timeout: Duration,
    /// Timeout of one read. Default: none; only that of the whole promotion applies.
    pub read_timeout: Option<Duration>,
    /// Timeout for a lookup in a tier without a local index. It delays every prompt that no tier has.
    /// Default: 5 ms.
    pub locate_timeout: Duration,
}

impl TierPolicy {
    /// Returns the policy of a shared store with this timeout for a read. Lookups have a timeout of 50 ms,
    /// and blocks of tails are not looked up, because each of them would be an object of its own.
    pub fn of_store(read_timeout: Duration) -> Self {
        Self {
            asks_for_parts: false,
            locate_timeout: Duration::from_millis(50),
            read_timeout: Some(read_timeout),
            ..Self::default()
        }
    }
}

impl Default for TierPolicy {
    fn default() -> Self {
        Self {
            write: WritePolicy::default(),
            admit: Admission::default(),
            spaces: SpaceFilter::default(),
            asks_for_parts: true,
            fill: false,
            write_queue_bytes: None,
            write_timeout: Duration::from_secs(30),
            read_timeout: None,
            locate_timeout: Duration::from_millis(5),
        }
    }
}

/// Selects spaces, and thereby models and tenants.
#[derive(Clone, Default)]
pub struct SpaceFilter(Option<Arc<dyn Fn(SpaceId) -> bool + Send + Sync>>);

impl SpaceFilter {
    /// Makes a filter that selects the spaces for which `picks` returns true. It is called for each chunk
    /// that is stored, and must not wait.
    pub fn new(picks: impl Fn(SpaceId) -> bool + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(picks)))
    }

    pub(crate) fn picks(&self, space: SpaceId) -> bool {
        self.0.as_ref().is_none_or(|picks| picks(space))
    }
}

impl fmt::Debug for SpaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "some" } else { "all" })
    }
}

/// Time at which chunks are written to a lower tier. A chunk is never written to the tier that it came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WritePolicy {
    /// Chunks are written at their commit. They survive the end of this process if the tier does.
    #[default]
    Through,
    /// Chunks are written when they are evicted above the high watermark, and when the engine is closed. A
    /// chunk that is evicted because a caller needs its memory is not written: the write would keep that
    /// memory in use.
    Back,
}

/// Selection of the chunks that are written to a lower tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Admission {
    /// Every chunk is admitted.
    #[default]
    Always,
    /// Chunks that were found this many times after they were computed, from 1 to [`Admission::MAX_REUSES`]:
    /// fewer writes, and none for prompts that are never repeated.
    Reused(u8),
}

impl Admission {
    /// Largest number of reuses that a policy can require.
    pub const MAX_REUSES: u8 = 14;
}
