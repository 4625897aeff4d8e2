//! Events about chunks, from all tiers of one engine to those that listen.

use std::fmt;
use std::sync::Arc;

use lmc_key::{ChunkKey, SpaceId};
use parking_lot::RwLock;

/// Name of the engine's memory in events, beside the names of the tiers below it.
pub const DRAM: &str = "dram";

/// A change of one chunk in one tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkEvent<'a> {
    /// Name of the tier: [`DRAM`] or [`Backend::name`](crate::Backend::name).
    pub tier: &'a str,
    /// Key of the chunk, as tiers name it.
    pub key: &'a ChunkKey,
    /// The chunk before it in its prompt, as far as the tier knows.
    pub parent: Option<&'a ChunkKey>,
    /// The space that the key's name stands for; the name itself where that is not known. `None` for a
    /// chunk from before a clear: no new request finds it, and listeners count it as gone.
    pub space: Option<SpaceId>,
    /// The change.
    pub change: Change,
}

/// Kind of a [`ChunkEvent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Change {
    /// The tier has the chunk. In memory: an engine of this host computed it. A drive reports a chunk
    /// that it moves again.
    Stored,
    /// Memory has the chunk, which came from a tier below.
    Promoted,
    /// The chunk had to go for others.
    Evicted,
    /// The chunk was removed by its key, or its bytes were damaged.
    Removed,
    /// The chunk was cleared from memory. It may stay there for its readers; then a second event without a
    /// space follows. Lower tiers report [`EventSink::any_changed`].
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
/// Called under a lock of the tier, so that the events of one chunk in one tier come in the order in
/// which they happened: an implementation does not wait, and calls nothing of a tier, an engine or
/// [`Events`].
/// What takes longer goes through a bounded queue, whose losses the listener counts or makes good.
pub trait EventSink: fmt::Debug + Send + Sync {
    /// A chunk has come into a tier or gone from it.
    fn changed(&self, event: &ChunkEvent<'_>);

    /// Any chunk of a tier may have come or gone, without an event for each: the tier was cleared, or
    /// a device with its chunks failed or works again. Default: does nothing.
    fn any_changed(&self, _tier: &str) {}

    /// Peers may have to hear again which spaces engines of this host use, or whether it is drained. Default:
    /// does nothing.
    fn host_changed(&self) {}
}

/// The bus of one engine, on which its tiers report and listeners hear. Clones are one bus. Memory and
/// drives report.
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
    /// Returns events without listeners. `space_of` gives the space that a key's name stands for; it
    /// is called as a listener is. Default: names are spaces.
    pub fn new(space_of: impl Fn(SpaceId) -> Option<SpaceId> + Send + Sync + 'static) -> Self {
        Self(Arc::new(Bus {
            sinks: RwLock::default(),
            space_of: Some(Box::new(space_of)),
        }))
    }

    /// Passes events on to this listener from now on.
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

    /// Passes an event on as it is.
    pub fn send(&self, event: &ChunkEvent<'_>) {
        let sinks = self.0.sinks.read();
        sinks.iter().for_each(|sink| sink.changed(event));
    }

    /// Reports that any chunk of a tier may have come or gone.
    pub fn report_any(&self, tier: &str) {
        let sinks = self.0.sinks.read();
        sinks.iter().for_each(|sink| sink.any_changed(tier));
    }

    /// Reports that engines of this host may use a space that they did not use before, or that it is
    /// drained or not drained any more.
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
