//! Passing the tier's events on to whoever asked for them.

use std::sync::{Arc, OnceLock, Weak};

use lmc_backend_local::{EventSink, Removal, RemovedEvent, StoredEvent};

use crate::lower::{OfferItem, Shared};

/// Stands between the tier, which is told its listener when it is made, and the listener, which
/// comes later.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    listener: OnceLock<Arc<dyn EventSink>>,
    /// Where evicted chunks are offered. Weak, as it holds the tier, which holds this.
    lower: OnceLock<Weak<Shared>>,
}

impl Relay {
    /// False when there is a listener already.
    pub(crate) fn set(&self, listener: Arc<dyn EventSink>) -> bool {
        self.listener.set(listener).is_ok()
    }

    /// Offers what is evicted from now on.
    pub(crate) fn offer_evicted(&self, lower: Weak<Shared>) {
        // Set once, where the engine is made.
        let _ = self.lower.set(lower);
    }
}

impl EventSink for Relay {
    fn on_stored(&self, event: StoredEvent<'_>) {
        if let Some(listener) = self.listener.get() {
            listener.on_stored(event);
        }
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        let lower = self.lower.get().and_then(Weak::upgrade);
        if let (Some(lower), Removal::Watermark) = (lower, event.cause) {
            lower.offer(&[OfferItem {
                key: *event.key,
                parent: None,
                slot: event.slot.clone(),
            }]);
        }
        if let Some(listener) = self.listener.get() {
            listener.on_removed(event);
        }
    }
}
