//! The parts that an engine is started with.

use std::sync::Arc;

use lmc_memory::Arena;
use tokio::runtime::Handle;

use super::host::EngineHost;
use crate::policy::LowerTier;

/// Memory, tiers, host and runtime of an engine.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineContext {
    /// Memory of the DRAM tier.
    pub arena: Arc<Arena>,
    /// Lower tiers, the fastest first. Default: none.
    pub tiers: Vec<LowerTier>,
    /// The host, through which tiers reach the engine, with the log of clears. Tiers that need a host were
    /// given the same one.
    pub host: EngineHost,
    /// Runtime for reads from and writes to lower tiers; it needs a timer. Default: none; an engine with
    /// lower tiers starts a runtime of its own with two threads named `lmc-engine`.
    pub runtime: Option<Handle>,
}

impl EngineContext {
    /// Returns the context of an engine whose DRAM tier uses this arena. A host of
    /// [`EngineHost::default`] has no state file for clears.
    pub fn new(arena: Arc<Arena>, host: EngineHost) -> Self {
        Self {
            arena,
            tiers: Vec::new(),
            host,
            runtime: None,
        }
    }

    /// Sets the lower tiers, the fastest first.
    pub fn with_tiers(mut self, tiers: impl IntoIterator<Item = impl Into<LowerTier>>) -> Self {
        self.tiers = tiers.into_iter().map(Into::into).collect();
        self
    }
}
