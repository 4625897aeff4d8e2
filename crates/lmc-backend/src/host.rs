//! The `Host` trait: a tier's access to the engine above it.

use std::any::Any;
use std::fmt;
use std::future::ready;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_key::{ChunkKey, KeySpace, LayoutFingerprint, SpaceId};
use lmc_memory::SealedSlot;
use parking_lot::Mutex;

use crate::{BoxFuture, Clears, Events, LocateHint, TooManyClears, Usage};

/// State of a chunk in the engine above a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostChunk {
    /// The chunk is in DRAM.
    Memory {
        /// Payload bytes.
        len: u64,
    },
    /// The chunk is in a lower tier whose index is in this process.
    Lower {
        /// Payload bytes.
        len: u64,
    },
    /// An engine of this host is writing it to DRAM.
    Writing,
    /// The engine does not have it, as far as this process knows.
    Absent,
}

impl HostChunk {
    /// Returns the payload bytes of a chunk; `None` unless the chunk can be leased.
    pub fn bytes(&self) -> Option<u64> {
        match *self {
            Self::Memory { len } | Self::Lower { len } => Some(len),
            Self::Writing | Self::Absent => None,
        }
    }
}

/// A lease of a chunk: the chunk stays in memory unchanged.
pub struct HostLease {
    /// The bytes.
    pub slot: SealedSlot,
    /// [`lmc_memory::checksum`] of the bytes, computed when the chunk was committed or first copied. `None`:
    /// compute the checksum from the slot.
    pub checksum: Option<u64>,
    /// Keeps the chunk from eviction while it exists.
    pub lease: Box<dyn Any + Send>,
}

impl fmt::Debug for HostLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostLease")
            .field("slot", &self.slot)
            .field("checksum", &self.checksum)
            .finish_non_exhaustive()
    }
}

/// Consecutive chunks of one prompt, in prompt order, all of the same length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkRun {
    /// Keys of the chunks.
    pub keys: Vec<ChunkKey>,
    /// Payload bytes of each chunk.
    pub chunk_bytes: u64,
    /// Key of the chunk before the first one; `None` if the run starts the prompt.
    pub parent: Option<ChunkKey>,
}

impl ChunkRun {
    /// Returns the run without its first `chunks` chunks.
    pub fn after(&self, chunks: usize) -> Self {
        let before = chunks.checked_sub(1).and_then(|at| self.keys.get(at));
        Self {
            keys: self.keys.get(chunks..).unwrap_or_default().to_vec(),
            chunk_bytes: self.chunk_bytes,
            parent: before.copied().or(self.parent),
        }
    }
}

/// Result of [`Host::receive`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Received {
    /// Number of leading chunks that are in memory now.
    pub chunks: usize,
    /// True if the other chunks are wanted but were not read, for lack of memory, capacity or time.
    pub is_wanted: bool,
}

/// A live space: engines of this host use it, or the host has chunks in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSpace {
    /// Id of the space.
    pub id: SpaceId,
    /// The description that the id is derived from.
    pub description: KeySpace,
}

/// The engine above a tier, for tiers that lend its chunks to other processes or report its chunks to them.
///
/// Keys are the names that tiers use, after the clears. No method except [`Host::promote`] asks a tier that
/// would have to ask another process in turn, so two hosts that ask each other do not loop. Every method may
/// be called before the engine exists; the host has no chunks then.
pub trait Host: fmt::Debug + Send + Sync + 'static {
    /// Returns the state of each chunk. A chunk that is only being promoted is absent, so that two hosts that
    /// ask each other do not wait for each other. Never waits.
    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk>;

    /// Leases chunks: each stays in memory unchanged until its lease is dropped. Returns one answer for each
    /// key. Chunks in lower tiers are promoted first, if the promotion ends by `promote_until`. Computes no
    /// checksum.
    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<HostLease>>>;

    /// Returns some of the chunks that can be leased, and the position for the next call; `None` at the end.
    /// The first position is 0. A chunk that is present throughout the listing is listed; a chunk in several
    /// tiers is listed once for each.
    fn list(&self, from: u128, limit: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)>;

    /// Promotes the leading chunks of one prompt, as a lookup of this host's engines would and within the
    /// same limits. The future ends when the promotion is done.
    fn promote<'a>(&'a self, keys: &'a [ChunkKey], hint: LocateHint) -> BoxFuture<'a, ()>;

    /// Promotes chunks that a peer has pushed, of a space that engines of this host use. Of all other
    /// processes, only `peer` is asked for the chunks. Chunks that were pushed in the last minute and that no
    /// lookup has found yet take at most a quarter of the memory, those of one peer at most an eighth.
    /// Default: promotes nothing.
    fn receive<'a>(
        &'a self,
        run: ChunkRun,
        peer: &'a str,
        timeout: Duration,
    ) -> BoxFuture<'a, Received> {
        let _ = (run, peer, timeout);
        Box::pin(ready(Received::default()))
    }

    /// Returns the clears that this host has carried out. The map contains every map returned before. It is
    /// complete from the first call on: the program that makes the host reads its state file, and the clears
    /// of its private tiers, before it makes a tier that calls this. A caller recomputes the digest only when
    /// the [`Arc`] is another one. Never waits.
    fn clears(&self) -> Arc<Clears>;

    /// Returns false while a restart of this host may not find all clears that it has carried out.
    /// Never waits.
    fn clears_are_noted(&self) -> bool;

    /// Carries out clears that were made elsewhere, and notes them durably if possible
    /// ([`Host::clears_are_noted`]). If `clears` are known but not yet noted, tries to note them again. When
    /// the future has ended, [`Host::clears`] contains the clears, and chunks from before them are not found.
    /// `origin` names the medium that the clears came through, for the log. The future may be dropped at any
    /// point; the clears may or may not be carried out then.
    ///
    /// # Errors
    /// [`TooManyClears`]; nothing is carried out then.
    fn learn(
        &self,
        clears: Clears,
        origin: &'static str,
    ) -> BoxFuture<'_, Result<(), TooManyClears>>;

    /// Returns the bus on which the tiers report chunks that come and go, and on which tiers listen.
    fn events(&self) -> &Events;

    /// Returns the live spaces, the most important first.
    fn spaces(&self) -> Vec<HostSpace>;

    /// Returns the fields of the space that has this name in keys ([`SpaceId::after`]); `None` if only the
    /// name is known. Default: looks among [`Host::spaces`]. Never waits.
    fn describe(&self, name: SpaceId) -> Option<KeySpace> {
        let clears = self.clears().id();
        let mut spaces = self.spaces().into_iter();
        let found = spaces.find(|space| space.id.after(clears) == name);
        found.map(|space| space.description)
    }

    /// Returns true if engines of this host merge chunks of a layout with this number of KV ranks into
    /// their own. Default: false. Never waits.
    fn merges_layout(&self, layout: LayoutFingerprint, ranks: u32) -> bool {
        let _ = (layout, ranks);
        false
    }

    /// Returns true if the request with this id was computed here and has ended, so that no more chunks are
    /// stored for it. Default: false, which also stands for an unknown request. Never waits.
    fn is_over(&self, request: &str) -> bool {
        let _ = request;
        false
    }

    /// Returns true while the host accepts no chunks, because it is to be stopped. Default: false. Never
    /// waits.
    fn is_draining(&self) -> bool {
        false
    }

    /// Returns the chunks and bytes in memory, and the memory's capacity.
    fn usage(&self) -> Usage;
}

/// The host of tiers that no engine uses, for tools. It has no chunks, and keeps the clears that its tiers
/// learn to itself.
#[derive(Debug, Default)]
pub struct NoEngine {
    clears: Mutex<Arc<Clears>>,
    spaces: Mutex<Vec<HostSpace>>,
    events: Events,
}

impl NoEngine {
    /// Makes a host that has carried out these clears.
    pub fn new(clears: Clears) -> Self {
        Self {
            clears: Mutex::new(Arc::new(clears)),
            ..Self::default()
        }
    }

    /// Makes a space known, so that tiers can describe it.
    pub fn add_space(&self, description: KeySpace) {
        let id = description.id();
        self.spaces.lock().push(HostSpace { id, description });
    }
}

impl Host for NoEngine {
    fn states(&self, keys: &[ChunkKey]) -> Vec<HostChunk> {
        vec![HostChunk::Absent; keys.len()]
    }

    fn lease<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _promote_until: Instant,
    ) -> BoxFuture<'a, Vec<Option<HostLease>>> {
        let none = keys.iter().map(|_| None).collect();
        Box::pin(ready(none))
    }

    fn list(&self, _from: u128, _limit: usize) -> BoxFuture<'_, (Vec<ChunkKey>, Option<u128>)> {
        Box::pin(ready((Vec::new(), None)))
    }

    fn promote<'a>(&'a self, _keys: &'a [ChunkKey], _hint: LocateHint) -> BoxFuture<'a, ()> {
        Box::pin(ready(()))
    }

    fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.clears.lock())
    }

    fn clears_are_noted(&self) -> bool {
        true
    }

    fn learn(
        &self,
        clears: Clears,
        _origin: &'static str,
    ) -> BoxFuture<'_, Result<(), TooManyClears>> {
        let mut known = self.clears.lock();
        let mut all = Clears::clone(&known);
        let learned = all.join(&clears).map(|_| *known = Arc::new(all));
        Box::pin(ready(learned))
    }

    fn events(&self) -> &Events {
        &self.events
    }

    fn spaces(&self) -> Vec<HostSpace> {
        self.spaces.lock().clone()
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}
