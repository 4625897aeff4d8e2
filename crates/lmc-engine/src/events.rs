//! Passing the tier's events on to whoever asked for them.

use std::sync::{Arc, OnceLock};

use lmc_backend_local::{EventSink, RemovedEvent, StoredEvent};

/// Stands between the tier, which is told its listener when it is made, and the listener, which
/// comes later.
#[derive(Debug, Default)]
pub(crate) struct Relay(OnceLock<Arc<dyn EventSink>>);

impl Relay {
    /// False when there is a listener already.
    pub(crate) fn set(&self, listener: Arc<dyn EventSink>) -> bool {
        self.0.set(listener).is_ok()
    }
}

impl EventSink for Relay {
    fn on_stored(&self, event: StoredEvent<'_>) {
        if let Some(listener) = self.0.get() {
            listener.on_stored(event);
        }
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        if let Some(listener) = self.0.get() {
            listener.on_removed(event);
        }
    }
}
