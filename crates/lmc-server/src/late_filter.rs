//! A filter of spaces for tiers. The service decides it, and the service is created after the tiers.

use std::sync::{Arc, OnceLock};

use lmc_engine::SpaceFilter;
use lmc_key::SpaceId;

type Picks = Box<dyn Fn(SpaceId) -> bool + Send + Sync>;

/// A filter that picks nothing until it is decided.
#[derive(Clone, Default)]
pub(crate) struct LateFilter(Arc<OnceLock<Picks>>);

impl LateFilter {
    /// Picks from now on the spaces for which `picks` returns true. To be called once.
    pub(crate) fn decide(&self, picks: impl Fn(SpaceId) -> bool + Send + Sync + 'static) {
        let _ = self.0.set(Box::new(picks));
    }

    /// Returns the filter for a tier.
    pub(crate) fn filter(&self) -> SpaceFilter {
        let decided = Arc::clone(&self.0);
        SpaceFilter::new(move |space| decided.get().is_some_and(|picks| picks(space)))
    }
}
