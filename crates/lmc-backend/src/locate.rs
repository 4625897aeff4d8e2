//! Answers to "does this tier have the chunk, and what would it cost to load it?".

use std::any::Any;
use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

/// Number of partial chunks, such as the blocks of a tail, that make one whole chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts(NonZeroU32);

impl Parts {
    /// The value for whole chunks.
    pub const WHOLE: Self = Self(NonZeroU32::MIN);

    /// Returns the value for chunks of `tokens` tokens where a whole chunk has `whole`; at least 1.
    pub fn of(whole: u32, tokens: u32) -> Self {
        Self(NonZeroU32::new(whole / tokens.max(1)).unwrap_or(NonZeroU32::MIN))
    }

    /// Returns the number.
    pub fn get(self) -> u32 {
        self.0.get()
    }
}

impl Default for Parts {
    fn default() -> Self {
        Self::WHOLE
    }
}

/// Hints for a lookup. A tier may ignore them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocateHint {
    /// Sources to ask first, for a tier that has several: names or addresses as an operator knows them.
    /// Unknown sources are ignored. Default: none.
    pub sources: Arc<[String]>,
    /// Payload bytes of each chunk, if known: the tier treats a chunk of another length at a source as
    /// absent. Default: none.
    pub chunk_bytes: Option<u64>,
    /// Number of chunks that make a whole chunk: more than 1 for the blocks of a tail, which a tier may not
    /// store at all. Default: 1.
    pub parts: Parts,
    /// Time that each tier may take for its answer, where no prompt waits for it; the engine computes the
    /// deadline from it. Default: none, so each tier's own timeout applies.
    pub timeout: Option<Duration>,
    /// Time for which the prompt waits for its sources to compute chunks that no tier has yet; the engine
    /// computes the deadline from it. A tier that reaches one of the sources answers [`Located::Expected`]
    /// for such chunks. Default: none; the prompt does not wait.
    pub wait: Option<Duration>,
    /// Id under which the sources know the request that computes the prompt: once the request has ended
    /// there, no more chunks are expected. Default: none; chunks are expected until the wait ends.
    pub awaited: Option<Arc<str>>,
    /// True if the lookup repeats an earlier one, so that only the sources need to be asked again. Default:
    /// false.
    pub is_repeated: bool,
    /// True if only the sources are to be asked. Default: false.
    pub sources_only: bool,
}

impl LocateHint {
    /// Returns a hint that has only defaults.
    pub fn none() -> &'static Self {
        static NONE: LazyLock<LocateHint> = LazyLock::new(LocateHint::default);
        &NONE
    }

    /// Sets the sources to ask first.
    #[must_use]
    pub fn with_sources(mut self, sources: Arc<[String]>) -> Self {
        self.sources = sources;
        self
    }

    /// Sets the payload bytes of each chunk.
    #[must_use]
    pub fn with_chunk_bytes(mut self, chunk_bytes: Option<u64>) -> Self {
        self.chunk_bytes = chunk_bytes;
        self
    }

    /// Sets the number of chunks that make a whole chunk.
    #[must_use]
    pub fn with_parts(mut self, parts: Parts) -> Self {
        self.parts = parts;
        self
    }

    /// Sets the time for which the prompt waits for its sources.
    #[must_use]
    pub fn with_wait(mut self, wait: Option<Duration>) -> Self {
        self.wait = wait;
        self
    }

    /// Sets the id of the request that computes the prompt at the sources.
    #[must_use]
    pub fn with_awaited(mut self, request: Option<Arc<str>>) -> Self {
        self.awaited = request;
        self
    }

    /// Marks the lookup as a repeated one.
    #[must_use]
    pub fn repeated(mut self) -> Self {
        self.is_repeated = true;
        self
    }

    /// Restricts the lookup to the sources.
    #[must_use]
    pub fn only_sources(mut self) -> Self {
        self.sources_only = true;
        self
    }

    /// Sets the time that each tier may take for its answer.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }
}

/// The state of one key in a tier.
///
/// The answer is a hint: the chunk may be gone when it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Located {
    /// The tier has the chunk.
    Present(Location),
    /// The engine that computes the chunk is writing it to the tier; the chunk is expected soon. Never the
    /// answer for a chunk that the tier is only fetching from elsewhere.
    Pending,
    /// The tier does not have the chunk, but a source that the prompt waits for ([`LocateHint::wait`]) may
    /// write it.
    Expected,
    /// The tier does not have the chunk.
    Absent,
}

impl Located {
    /// Returns the location of a chunk that is present.
    pub fn present(self) -> Option<Location> {
        match self {
            Self::Present(location) => Some(location),
            Self::Pending | Self::Expected | Self::Absent => None,
        }
    }
}

/// Length and load cost of a chunk in a tier, with the tier's handle for it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Location {
    /// Payload bytes of the chunk: the length of the slot to load it into.
    pub len: u64,
    /// Estimated time to load the chunk as one of a batch, from the tier's measurements so far.
    pub cost: Duration,
    /// Handle that the caller passes back with the load ([`LoadItem::handle`](crate::LoadItem::handle)).
    pub handle: Option<Handle>,
}

impl Location {
    /// Makes the location of a chunk of `len` bytes that costs nothing to load.
    pub fn new(len: u64) -> Self {
        Self {
            len,
            cost: Duration::ZERO,
            handle: None,
        }
    }

    /// Sets the estimated time of a load. Default: zero.
    #[must_use]
    pub fn with_cost(mut self, cost: Duration) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the handle to pass back with the load. Default: none.
    #[must_use]
    pub fn with_handle(mut self, handle: Handle) -> Self {
        self.handle = Some(handle);
        self
    }
}

/// Compares all fields except the handle.
impl PartialEq for Location {
    fn eq(&self, other: &Self) -> bool {
        (self.len, self.cost) == (other.len, other.cost)
    }
}

impl Eq for Location {}

/// A tier's knowledge about a chunk that it has located, so that a load need not find the chunk again. Opaque
/// to everything but the tier.
#[derive(Clone)]
pub struct Handle(Arc<dyn Any + Send + Sync>);

impl Handle {
    /// Makes a handle that holds `known`.
    pub fn new<T: Any + Send + Sync>(known: T) -> Self {
        Self(Arc::new(known))
    }

    /// Returns the value in the handle; `None` if it is of another type.
    pub fn get<T: Any>(&self) -> Option<&T> {
        self.0.downcast_ref()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handle")
    }
}

/// The processes that use a tier's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Only this process stores and clears chunks in the tier. A clear removes the chunks.
    Private,
    /// Other processes use the content too. A clear only passes its map on, and removes nothing.
    Shared,
}
