//! Events about chunks, from all tiers of one engine to the listeners.

use std::fmt;
use std::sync::Arc;

use lmc_key::{ChunkKey, SpaceId};
use parking_lot::RwLock;

/// Name of the engine's memory in events, next to the names of the lower tiers.
pub const DRAM: &str = "dram";

/// A change of one chunk in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEvent<'a> {
    /// Name of the tier: [`DRAM`] or [`Backend::name`](crate::Backend::name).
    pub tier: &'a str,
    /// Key of the chunk, as tiers name it.
    pub key: &'a ChunkKey,
    /// Key of the chunk before this one in its prompt, as far as the tier knows it.
    pub parent: Option<&'a ChunkKey>,
    /// The space that the key's name stands for; if it is unknown, the name itself. `None` for a chunk from
    /// before a clear: no new request finds the chunk, and listeners treat it as gone.
    pub space: Option<SpaceId>,
    /// The change.
    pub change: Change,
}

/// Kind of a [`ChunkEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    /// The tier has the chunk. In memory: an engine of this host computed the chunk. A drive reports this
    /// again for a chunk that it moves.
    Stored,
    /// The chunk was promoted into memory from a lower tier.
    Promoted,
    /// The tier evicted the chunk to free capacity.
    Evicted,
    /// The chunk was removed by its key, or because its bytes were damaged.
    Removed,
    /// The chunk was cleared from memory. While readers lease it, the chunk stays in memory; when it is gone,
    /// a second event, without a space, follows. Lower tiers report [`EventSink::any_changed`] instead.
    Cleared,
}

impl Change {
    /// Returns true if the tier has the chunk after this change.
    pub fn is_arrival(self) -> bool {
        matches!(self, Self::Stored | Self::Promoted)
    }
}

/// A listener for the events of one engine's tiers.
///
/// Called under a lock of the tier, so that the events of one chunk in one tier come in the order in which
/// they happened. An implementation must not wait, and must not call a tier, an engine or [`Events`]. Work
/// that takes longer goes through a bounded queue; the listener counts the events that the queue loses, or
/// recovers them.
pub trait EventSink: fmt::Debug + Send + Sync {
    /// A chunk was added to a tier or has left it.
    fn changed(&self, event: &ChunkEvent<'_>);

    /// Any chunk of a tier may have come or gone, without an event for each chunk: the tier was cleared, or a
    /// device with its chunks failed or works again. Default: does nothing.
    fn any_changed(&self, _tier: &str) {}

    /// The spaces that engines of this host use have changed, or the host is drained or no longer drained:
    /// peers may have to be notified. Default: does nothing.
    fn host_changed(&self) {}
}

/// The event bus of one engine: its tiers report events, and listeners receive them. Memory and drives report
/// events. A clone refers to the same bus.
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
/// use lmc_backend::{Change, ChunkEvent, EventSink, Events};
/// # use lmc_key::{ChunkHash, ChunkKey, SpaceId};
///
/// #[derive(Debug, Default)]
/// struct Evictions(AtomicU64);
///
/// impl EventSink for Evictions {
///     fn changed(&self, event: &ChunkEvent<'_>) {
///         if event.change == Change::Evicted {
///             self.0.fetch_add(1, Ordering::Relaxed);
///         }
///     }
/// }
///
/// let events = Events::default();
/// let evictions = Arc::new(Evictions::default());
/// events.listen(Arc::clone(&evictions) as _);
/// # let key = ChunkKey { space: SpaceId::new([1; 16]), kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
/// events.report("disk", &key, None, Change::Evicted);
/// assert_eq!(evictions.0.load(Ordering::Relaxed), 1);
/// ```
#[derive(Clone, Default)]
pub struct Events(Arc<Bus>);

type SpaceOf = dyn Fn(SpaceId) -> Option<SpaceId> + Send + Sync;

#[derive(Default)]
struct Bus {
    sinks: RwLock<Vec<Arc<dyn EventSink>>>,
    space_of: Option<Box<SpaceOf>>,
}

impl Events {
    /// Makes a bus without listeners. `space_of` returns the space that a key's name stands for; it is called
    /// under the same lock as a listener. Default: a name is its space.
    pub fn new(space_of: impl Fn(SpaceId) -> Option<SpaceId> + Send + Sync + 'static) -> Self {
        Self(Arc::new(Bus {
            sinks: RwLock::default(),
            space_of: Some(Box::new(space_of)),
        }))
    }

    /// Passes all later events to this listener.
    pub fn listen(&self, sink: Arc<dyn EventSink>) {
        self.0.sinks.write().push(sink);
    }

    /// Reports a change of a chunk in a tier.
    pub fn report(&self, tier: &str, key: &ChunkKey, parent: Option<&ChunkKey>, change: Change) {
        let space = match &self.0.space_of {
            Some(space_of) => space_of(key.space),
            None => Some(key.space),
        };
        self.send(&ChunkEvent {
            tier,
            key,
            parent,
            space,
            change,
        });
    }

    /// Passes an event to the listeners unchanged.
    pub fn send(&self, event: &ChunkEvent<'_>) {
        let sinks = self.0.sinks.read();
        sinks.iter().for_each(|sink| sink.changed(event));
    }

    /// Reports that any chunk of a tier may have come or gone.
    pub fn report_any(&self, tier: &str) {
        let sinks = self.0.sinks.read();
        sinks.iter().for_each(|sink| sink.any_changed(tier));
    }

    /// Reports that engines of this host may use a space that they did not use before, or that the host is
    /// drained or no longer drained.
    pub fn report_host(&self) {
        let sinks = self.0.sinks.read();
        sinks.iter().for_each(|sink| sink.host_changed());
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sinks = self.0.sinks.read().len();
        f.debug_struct("Events").field("sinks", &sinks).finish()
    }
}
