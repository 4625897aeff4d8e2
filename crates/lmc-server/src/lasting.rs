//! Which chunks go to tiers that outlive the server.

use std::fmt;
use std::sync::{Arc, OnceLock};

use lmc_engine::SpaceFilter;
use lmc_key::SpaceId;
use lmc_vllm_adapter::Service;

type Picks = Box<dyn Fn(SpaceId) -> bool + Send + Sync>;

/// Picks the spaces that engines can still name after a restart. No engine would find chunks of other
/// spaces on a drive or in a store. The service, which knows the spaces, is made after the tiers; before it
/// nothing is picked.
#[derive(Clone, Default)]
pub(crate) struct LastingSpaces(Arc<OnceLock<Picks>>);

impl fmt::Debug for LastingSpaces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastingSpaces")
    }
}

impl LastingSpaces {
    /// Takes what this service knows from now on.
    pub(crate) fn serve(&self, service: &Service) {
        // It is called once.
        let _ = self.0.set(Box::new(service.lasting_spaces()));
    }

    pub(crate) fn picks(&self, space: SpaceId) -> bool {
        self.0.get().is_some_and(|picks| picks(space))
    }

    /// Returns the filter of a tier that takes all of them.
    pub(crate) fn filter(&self) -> SpaceFilter {
        let this = self.clone();
        SpaceFilter::new(move |space| this.picks(space))
    }
}
