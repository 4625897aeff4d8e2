//! The `Backend` trait: the contract of every tier below DRAM.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use lmc_key::{ChunkKey, LayoutFingerprint};

use crate::{
    Answers, BackendError, BoxFuture, ChunkRun, Cleared, Clears, Cursor, Health, LoadItem, Loaded,
    LocateHint, Located, Page, Sharing, StoreItem, Stored, Usage,
};

/// A tier below DRAM: a disk, the memory of peers, a remote store.
///
/// Every implementation MUST keep these rules; the kit in `conformance` checks them.
///
/// - **One answer for each key.** A batch of keys is answered with exactly one result for each key. An empty
///   batch is answered at once. A key may occur twice in a batch.
/// - **Deadlines.** Every operation ends soon after its deadline. A key without an answer by then is answered
///   with [`BackendError::Deadline`].
/// - **Right bytes or none.** [`Loaded::Hit`] means that the identity and the checksum of the bytes were
///   verified after their last trip through something that can corrupt them, and that their number is the
///   length in [`Located::Present`]. A mismatch is a miss (and a counter of the implementation), never an
///   error and never data.
/// - **Immutability.** A key determines its bytes: storing a key that is present changes nothing.
/// - **Visibility.** After [`Stored::Written`], the next operation finds the chunk, until the chunk is
///   removed or evicted. After an `Ok` of `remove` or `clear`, the next operation does not find the chunk.
/// - **Unknown is not absent.** A tier that cannot say whether it has a chunk answers with an error.
/// - **Lost memory.** If a slot's arena was lost ([`lmc_memory::Arena::is_lost`]), bytes read from the slot
///   may not be the chunk's: `store` answers with an error and keeps no bytes, and `load` does not treat the
///   tier's chunk as damaged.
/// - **Cancellation.** A future or a stream may be dropped at any point; operations that have not begun by
///   then never begin. The implementation keeps a slot that something may still write to, and returns it to
///   its pool only when nothing writes to it any more. A dropped `store` or `remove` may or may not take
///   effect.
/// - **No panics**, whatever a device, a peer or a file does.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns a short name for logs and metrics, such as `disk`.
    fn name(&self) -> &str;

    /// Returns whether other processes use the content too. Default: they do not.
    fn sharing(&self) -> Sharing {
        Sharing::Private
    }

    /// Returns the tier as a writable tier, if it is one. Default: it is not, and the engine stores nothing
    /// in it.
    fn writer(&self) -> Option<&dyn WriteBackend> {
        None
    }

    /// Returns the tier's index if the index is in this process, so that a lookup need not wait. Default:
    /// there is none, and the engine awaits [`Backend::locate`].
    fn index(&self) -> Option<&dyn LocalIndex> {
        None
    }

    /// Returns the number of keys that one `locate` may name at about the cost of one key. The first `locate`
    /// for a prompt names this many keys; if the tier has all of these keys, further calls name the rest of
    /// the prompt. Default: 1. Then, where the length of the chunks is known, the first `locate` also names
    /// the prompt's last key. If the tier has both chunks and gives no handle for them, the engine loads the
    /// chunks between them without a `locate`; if the tier lacks the last one, the engine looks some keys in
    /// between up, until it knows where the tier's chunks end.
    fn asks_at_once(&self) -> usize {
        1
    }

    /// Looks up which chunks the tier has. The answer holds each chunk's length, so that the caller can
    /// reserve a slot, and the estimated cost of loading the chunk.
    ///
    /// # Errors
    /// [`BackendError`] for each key that could not be looked up.
    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>>;

    /// Reads chunks into the slots given. A slot is as long as the engine assumes the chunk to be: the engine
    /// may load chunks that it has not located ([`asks_at_once`](Self::asks_at_once)). An absent chunk is a
    /// [`Loaded::Miss`], a chunk of another length a [`BackendError::Length`].
    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded>;

    /// Returns for each layout, given with its number of KV ranks, whether engines of other processes that
    /// the tier reaches are known to use it. Where `sources` are named, only these processes count. Never
    /// waits. Default: no engine uses it.
    fn has_layouts(&self, layouts: &[(LayoutFingerprint, u32)], sources: &[String]) -> Vec<bool> {
        let _ = sources;
        vec![false; layouts.len()]
    }

    /// Pushes chunks that are in DRAM here to a process that the tier reaches, so that the process has the
    /// chunks before a request asks for them. `to` is a name or an address as an operator knows it. Returns
    /// at once, with true if the tier reaches the process. Chunks that do not arrive are read later, or
    /// computed. Default: the tier reaches no process.
    fn push(&self, run: ChunkRun, to: &str) -> bool {
        let _ = (run, to);
        false
    }

    /// Applies the clears that the engine has carried out, and notes their map as durably as the tier notes
    /// anything. The map contains all clears of the maps given before. Chunks that were computed before a
    /// clear have other names than the chunks that are looked up after it.
    ///
    /// A private tier removes all its chunks, unless it has noted this very map before. A chunk whose `store`
    /// began before the clear and ends after it may stay, under a name that no request looks up. A shared
    /// tier deletes nothing, and passes the map on to the processes that use its content.
    ///
    /// # Errors
    /// [`BackendError`]. After an error, any chunk may or may not be present, and the map may or may not be
    /// noted.
    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>>;

    /// Returns the clears that the tier knows of. For a private tier these are the clears that its chunks
    /// were stored after; for a shared tier, the clears that other processes have passed on through it. Never
    /// waits. Default: none.
    fn clears(&self) -> Arc<Clears> {
        Arc::default()
    }

    /// Returns the tier's content as far as this process knows it; `None` if it is unknown or the tier is
    /// closed. Never waits.
    fn usage(&self) -> Option<Usage>;

    /// Returns the tier's own counters since its creation, under names that are valid as label values of a
    /// metric. Default: none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns true if the tier has chunks that were stored under other settings than this process has, so
    /// that no key of this process names them. Never waits. Default: false.
    fn has_unreachable(&self) -> bool {
        false
    }

    /// Returns the tier's state as this process knows it. Never waits.
    fn health(&self) -> Health;

    /// Stops the tier. Afterwards nothing of it is running, and everything acknowledged is durable. Every
    /// later operation is answered with [`BackendError::Closed`]; closing again is no error.
    ///
    /// # Errors
    /// [`BackendError`] if something that was acknowledged may be lost.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>>;
}

/// A tier that stores chunks: a disk, a remote store.
///
/// The rules of [`Backend`] hold here as well.
pub trait WriteBackend: Backend {
    /// Writes chunks. An answer comes when its chunk is as durable as the tier promises. The tier holds the
    /// slots until nothing reads from them any more.
    ///
    /// # Errors
    /// [`BackendError`] for each chunk. After an error, the chunk may or may not be present, or become
    /// present later.
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>>;

    /// Removes chunks; answers `true` for each chunk that was present.
    ///
    /// # Errors
    /// [`BackendError`] for each key. After an error, the chunk may or may not be present.
    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>>;

    /// Returns a page of the chunks that are present, in an order of the tier's own. A listing starts at
    /// [`Cursor::START`] and continues from [`Page::next`] until that is `None`. A chunk that is present from
    /// the first page to the last is listed exactly once.
    ///
    /// # Errors
    /// [`BackendError`].
    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>>;
}

/// The index of a tier, in the memory of this process.
pub trait LocalIndex {
    /// Answers as [`Backend::locate`] does, at once.
    ///
    /// # Errors
    /// [`BackendError`] for each key that could not be looked up.
    fn locate_now(&self, keys: &[ChunkKey]) -> Vec<Result<Located, BackendError>>;

    /// Returns the fault because of which the tier cannot say whether it has the chunk; `None` if there is no
    /// fault. A tier of several devices, one of which is out of use, returns the fault for the chunks of that
    /// device. Default: the error of [`Self::locate_now`].
    fn fault_of(&self, key: &ChunkKey) -> Option<BackendError> {
        self.locate_now(&[*key]).pop()?.err()
    }
}
