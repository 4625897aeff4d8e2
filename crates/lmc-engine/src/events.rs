//! Passing the DRAM tier's events on to their listener, and evicted chunks to lower tiers.

use std::collections::HashSet;
use std::sync::{Arc, OnceLock, Weak};

use lmc_backend::ChangeSink;
use lmc_backend_local::{EventSink, Removal, RemovedEvent, StoredEvent};
use lmc_key::{ChunkKey, FoldState};
use parking_lot::Mutex;

use crate::clears::ClearLog;
use crate::lower::{Moment, Offer, Tiers};

/// Connects the DRAM tier, which is given its listener when it is made, with the listener, which
/// comes later.
#[derive(Debug, Default)]
pub(crate) struct Relay {
    clears: ClearLog,
    /// Gets keys in their spaces, without the clears.
    listener: OnceLock<Arc<dyn EventSink>>,
    /// Chunks of before a clear that the listener takes for removed, or has not heard of.
    outdated: Mutex<HashSet<ChunkKey, FoldState>>,
    /// Listeners of the lower tiers. They get keys as tiers name them.
    changes: Vec<Arc<dyn ChangeSink>>,
    /// The tiers that evicted chunks are offered to. Weak, as they hold the DRAM tier, which holds
    /// this.
    lower: OnceLock<Weak<Tiers>>,
}

impl Relay {
    pub(crate) fn new(clears: ClearLog, changes: Vec<Arc<dyn ChangeSink>>) -> Self {
        Self {
            clears,
            changes,
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

    /// Reports that a chunk is removed.
    fn report_removed(&self, event: RemovedEvent<'_>) {
        if let Some(listener) = self.listener.get() {
            let key = self.unnamed(event.key);
            let mut event = event;
            event.key = &key;
            listener.on_removed(event);
        }
    }

    /// Sets the listener. Returns false if there is one already.
    pub(crate) fn set(&self, listener: Arc<dyn EventSink>) -> bool {
        self.listener.set(listener).is_ok()
    }

    fn report_changed(&self, key: &ChunkKey) {
        self.changes.iter().for_each(|sink| sink.changed(key));
    }

    /// Offers what is evicted from now on.
    pub(crate) fn offer_evicted(&self, lower: Weak<Tiers>) {
        // Set once, where the engine is made.
        let _ = self.lower.set(lower);
    }
}

impl EventSink for Relay {
    fn on_stored(&self, event: StoredEvent<'_>) {
        self.report_changed(event.key);
        if self.clears.current_space_of(event.key.space).is_none() {
            self.outdated.lock().insert(*event.key);
        } else if let Some(listener) = self.listener.get() {
            let key = self.unnamed(event.key);
            // A prompt has one space.
            let space = key.space;
            let parent = event.parent.map(|parent| ChunkKey { space, ..*parent });
            let mut event = event;
            (event.key, event.parent) = (&key, parent.as_ref());
            listener.on_stored(event);
        }
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        self.report_changed(event.key);
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
        if !self.outdated.lock().remove(event.key) {
            self.report_removed(event);
        }
    }

    fn on_left(&self, event: RemovedEvent<'_>) {
        if self.outdated.lock().insert(*event.key) {
            self.report_removed(event);
        }
    }
}
