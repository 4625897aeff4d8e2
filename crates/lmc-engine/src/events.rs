//! Relays events of the DRAM tier to the listeners, and offers evicted chunks to lower tiers.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lmc_backend::{Change, ChunkEvent, DRAM, Events};
use lmc_backend_local::{LocalSink, Origin, Removal, RemovedEvent, StoredEvent};
use lmc_key::{ChunkKey, FoldState, SpaceId};
use parking_lot::Mutex;

use crate::clears::ClearLog;
use crate::histogram::Distribution;
use crate::lower::{Offer, OfferReason, Tiers};
use crate::pushed::PushedChunks;

/// Upper bound of each bucket in seconds: from thrashing to a week.
const AGES: &[u64] = &[
    1, 5, 15, 60, 300, 900, 3600, 14_400, 43_200, 86_400, 259_200, 604_800,
];
/// Upper bound of each bucket of uses. The DRAM tier counts at most 255 uses.
const USES: &[u64] = &[0, 1, 2, 4, 8, 16, 32, 64, 128];

/// Ages and uses of the chunks that were evicted from DRAM.
#[derive(Debug)]
pub(crate) struct Lives {
    pub(crate) age_seconds: Distribution,
    pub(crate) uses: Distribution,
}

impl Default for Lives {
    fn default() -> Self {
        Self {
            age_seconds: Distribution::new(AGES),
            uses: Distribution::new(USES),
        }
    }
}

/// The listener of the DRAM tier.
#[derive(Debug)]
pub(crate) struct Relay {
    clears: ClearLog,
    events: Events,
    outdated: Outdated,
    pushed: Arc<PushedChunks>,
    lives: Arc<Lives>,
    /// The tiers that evicted chunks are offered to. Weak, because they hold the DRAM tier, which holds this
    /// relay.
    lower: OnceLock<Weak<Tiers>>,
}

/// Chunks in DRAM from before a clear. Listeners treat them as gone, or have never counted them.
#[derive(Debug, Default)]
struct Outdated {
    keys: Mutex<HashSet<ChunkKey, FoldState>>,
    /// Number of keys, so that the set is rarely locked.
    len: AtomicUsize,
}

impl Outdated {
    fn insert(&self, key: &ChunkKey) -> bool {
        let mut keys = self.keys.lock();
        let is_new = keys.insert(*key);
        self.len.store(keys.len(), Ordering::Relaxed);
        is_new
    }

    /// Removes a key; returns whether it was in the set. The events of one key come in order, so its insert
    /// is visible here.
    fn remove(&self, key: &ChunkKey) -> bool {
        if self.len.load(Ordering::Relaxed) == 0 {
            return false;
        }
        let mut keys = self.keys.lock();
        let was_there = keys.remove(key);
        self.len.store(keys.len(), Ordering::Relaxed);
        was_there
    }
}

impl Relay {
    pub(crate) fn new(
        clears: ClearLog,
        events: Events,
        pushed: Arc<PushedChunks>,
        lives: Arc<Lives>,
    ) -> Self {
        Self {
            clears,
            events,
            pushed,
            lives,
            outdated: Outdated::default(),
            lower: OnceLock::new(),
        }
    }

    fn report(
        &self,
        key: &ChunkKey,
        parent: Option<&ChunkKey>,
        space: Option<SpaceId>,
        change: Change,
    ) {
        self.events.send(&ChunkEvent {
            tier: DRAM,
            key,
            parent,
            space,
            change,
        });
    }

    /// Offers chunks that are evicted from now on to these tiers.
    pub(crate) fn offer_evicted(&self, lower: Weak<Tiers>) {
        // Set once, when the engine is made.
        let _ = self.lower.set(lower);
    }
}

impl LocalSink for Relay {
    fn on_stored(&self, event: StoredEvent<'_>) {
        let space = self.clears.current_space_of(event.key.space);
        if space.is_none() {
            self.outdated.insert(event.key);
        }
        let change = match event.origin == Origin::COMPUTED {
            true => Change::Stored,
            false => Change::Promoted,
        };
        self.report(event.key, event.parent, space, change);
    }

    fn on_removed(&self, event: RemovedEvent<'_>) {
        self.pushed.remove(std::slice::from_ref(event.key));
        let lower = self.lower.get().and_then(Weak::upgrade);
        if let (Some(lower), Removal::Watermark) = (lower, event.cause) {
            let offer = Offer {
                key: *event.key,
                parent: None,
                origin: event.origin,
                slot: event.slot.clone(),
            };
            lower.offer(&[offer], OfferReason::Leaving);
        }
        let change = match event.cause {
            Removal::Removed => Change::Removed,
            Removal::Cleared => Change::Cleared,
            _ => {
                self.lives.age_seconds.record(event.age_seconds.into());
                self.lives.uses.record(event.uses.into());
                Change::Evicted
            }
        };
        let is_known = !self.outdated.remove(event.key);
        let space = is_known.then(|| self.clears.space_of(event.key.space));
        self.report(event.key, None, space, change);
    }

    fn on_left(&self, event: RemovedEvent<'_>) {
        if self.outdated.insert(event.key) {
            let space = self.clears.space_of(event.key.space);
            self.report(event.key, None, Some(space), Change::Cleared);
        }
    }
}
