//! Passing the DRAM tier's events on to their listener, and evicted chunks to lower tiers.

use std::sync::{Arc, OnceLock, Weak};

use lmc_backend_local::{EventSink, Removal, RemovedEvent, StoredEvent};
use lmc_key::ChunkKey;

use crate::clears::ClearLog;
use crate::lower::{Moment, Offer, Tiers};

/// Connects the DRAM tier, which is given its listener when it is made, with the listener, which
/// comes later.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    clears: ClearLog,
    /// Gets keys in their spaces, without the clears.
    listener: OnceLock<Arc<dyn EventSink>>,
    /// Listener of those who tell peers what is here, by its name.
    announcer: OnceLock<Arc<dyn EventSink>>,
    /// The tiers that evicted chunks are offered to. Weak, as they hold the DRAM tier, which holds
    /// this.
    lower: OnceLock<Weak<Tiers>>,
}

impl Relay {
    pub(crate) fn new(clears: ClearLog) -> Self {
        Self {
            clears,
            ..Self::default()
        }
    }

    /// Returns a key in its space.
    fn unnamed(&self, key: &ChunkKey) -> ChunkKey {
        ChunkKey {
            space: self.clears.space_of(key.space),
            ..*key
        }
    }

    /// Sets the listener. Returns false if there is one already.
    pub(crate) fn set(&self, listener: Arc<dyn EventSink>) -> bool {
        self.listener.set(listener).is_ok()
    }

    /// Sets the second listener. Returns false if there is one already.
    pub(crate) fn set_announcer(&self, announcer: Arc<dyn EventSink>) -> bool {
        self.announcer.set(announcer).is_ok()
    }

    /// Offers what is evicted from now on.
    pub(crate) fn offer_evicted(&self, lower: Weak<Tiers>) {
        // Set once, where the engine is made.
        let _ = self.lower.set(lower);
    }
}

impl EventSink for Relay {
    fn on_stored(&self, event: StoredEvent<'_>) {
        if let Some(listener) = self.listener.get() {
            let key = self.unnamed(event.key);
            // A prompt has one space.
            let space = key.space;
            let parent = event.parent.map(|parent| ChunkKey { space, ..*parent });
            let mut event = event;
            (event.key, event.parent) = (&key, parent.as_ref());
            listener.on_stored(event);
        }
        if let Some(announcer) = self.announcer.get() {
            announcer.on_stored(event);
        }
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        let lower = self.lower.get().and_then(Weak::upgrade);
        if let (Some(lower), Removal::Watermark) = (lower, event.cause) {
            let offer = Offer {
                key: *event.key,
                parent: None,
                origin: event.origin,
                slot: event.slot.clone(),
            };
            lower.offer(&[offer], Moment::Leaving);
        }
        if let Some(listener) = self.listener.get() {
            let key = self.unnamed(event.key);
            let mut event = event;
            event.key = &key;
            listener.on_removed(event);
        }
        if let Some(announcer) = self.announcer.get() {
            announcer.on_removed(event);
        }
    }
}
