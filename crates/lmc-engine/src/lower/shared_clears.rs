//! Clears that other processes pass on through a shared tier.

use std::sync::Arc;
use std::time::Duration;

use lmc_backend::{Clear, Sharing};

use super::Tiers;

/// Pause between two looks at the clears that the tiers know of.
const PAUSE: Duration = Duration::from_millis(500);

impl Tiers {
    /// Returns true if there is a tier through which other processes may pass clears on.
    pub(crate) fn has_shared(&self) -> bool {
        let mut tiers = self.tiers.iter();
        tiers.any(|tier| tier.backend.sharing() == Sharing::Shared)
    }

    /// Takes in the clears that the shared tiers learn of, until the task is aborted.
    pub(super) async fn follow_clears(self: Arc<Self>) {
        loop {
            for tier in &self.tiers {
                if tier.backend.sharing() != Sharing::Shared {
                    continue;
                }
                for Clear { space, epoch } in tier.backend.clears() {
                    match space {
                        None => self.learn_clear(epoch),
                        Some(space) => _ = self.learn(space, epoch),
                    }
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
