//! The `Backend` trait: the contract of every tier below DRAM.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use lmc_key::{ChunkKey, LayoutFingerprint};

use crate::{
    Answers, BackendError, ChunkRun, Cleared, Clears, Cursor, Health, LoadItem, Loaded, LocateHint,
    Located, Page, Sharing, StoreItem, Stored, Usage,
};

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A tier below DRAM: a disk, the memory of peers, a remote store.
///
/// Every implementation MUST keep these rules; the kit in `conformance` checks them.
///
/// - **One answer for each key.** A batch of keys is answered with exactly one result for each.
///   An empty batch is answered at once. A key may stand in a batch twice.
/// - **Deadlines.** Every operation ends soon after its deadline. A key that was not answered by
///   then is answered with [`BackendError::Deadline`].
/// - **Right bytes or none.** [`Loaded::Hit`] only for bytes whose identity and checksum were
///   verified after their last trip through something that can lie, and that are as many as
///   [`Located::Present`] said. A mismatch is a miss (and a counter of the implementation), never
///   an error and never data.
/// - **Immutability.** A key decides its bytes: storing a key that is present changes nothing.
/// - **Visibility.** A chunk whose `store` was answered with [`Stored::Written`] is found by the
///   next operation, until it is removed or evicted; what `remove` or `clear` has answered `Ok`
///   for is not found by the next operation.
/// - **Unknown is not absent.** A tier that cannot say whether it has a chunk answers with an
///   error.
/// - **Lost memory.** Bytes that were read from a slot whose arena is lost afterwards
///   ([`lmc_memory::Arena::is_lost`]) are not the chunk's: `store` answers an error and keeps none,
///   and `load` takes no chunk for damaged because of them.
/// - **Cancellation.** A future or a stream may be dropped at any point; what has not begun then
///   does not begin. Slots that something may still write to stay with the implementation until
///   that is known to be over; they are never returned to their pool before. A dropped `store` or
///   `remove` may or may not take effect.
/// - **No panics** for anything that a device, a peer or a file may do.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Returns a short name for logs and metrics, such as `disk`.
    fn name(&self) -> &str;

    /// Tells whether other processes use the content too. Default: they do not.
    fn sharing(&self) -> Sharing {
        Sharing::Private
    }

    /// Returns the tier again if it can be written to. Default: it cannot, and the engine offers it
    /// nothing.
    fn writer(&self) -> Option<&dyn WriteBackend> {
        None
    }

    /// Returns the tier's index if that is in this process, so that a lookup need not wait.
    /// Default: there is none, and [`Backend::locate`] has to be awaited.
    fn index(&self) -> Option<&dyn LocalIndex> {
        None
    }

    /// Returns the number of keys that a question may name at about the price of one. A prompt's first
    /// question names that number of keys; the others follow if all of these are found. Where several
    /// tiers are asked, the least number counts. Default: 1. Then, where the length of the chunks is known,
    /// the first question also names the prompt's last key: a tier that has both chunks and gives no
    /// handle for them is asked to load the chunks between without a `locate`.
    fn asks_at_once(&self) -> usize {
        1
    }

    /// Asks which chunks the tier has, each with its length, so that a slot can be reserved, and
    /// the estimated cost of loading it.
    ///
    /// # Errors
    /// [`BackendError`] for each key that could not be looked up.
    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>>;

    /// Reads chunks into the slots given. The length of a slot is that of its chunk, as far as the
    /// engine knows: it may ask for chunks that it has not located
    /// ([`asks_at_once`](Self::asks_at_once)). A chunk that is not there is a [`Loaded::Miss`], a chunk of
    /// another length a [`BackendError::Length`].
    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded>;

    /// Returns for each layout, with its number of KV ranks, whether engines of other processes that the
    /// tier reaches are known to have it; of these sources where any are named. Never waits. Default: none
    /// has it.
    fn has_layouts(&self, layouts: &[(LayoutFingerprint, u32)], sources: &[String]) -> Vec<bool> {
        let _ = sources;
        vec![false; layouts.len()]
    }

    /// Pushes chunks, which are in DRAM here, to a process that the tier reaches, so that it has them
    /// before a request asks for them. `to` is a name or an address as an operator knows it. Returns at
    /// once, true if the tier reaches that process; what does not get there is read later, or computed.
    /// Default: the tier reaches none.
    fn push(&self, run: ChunkRun, to: &str) -> bool {
        let _ = (run, to);
        false
    }

    /// Takes in the clears that the engine has carried out, whose map contains all that it said
    /// before, and notes the map as durably as the tier notes anything. Chunks that were computed
    /// before have other names than those that are asked for from now on.
    ///
    /// A private tier removes all its chunks, unless it has noted this very map before. One whose
    /// `store` was begun before and ends after may stay, under a name that is not asked for. A shared
    /// tier deletes nothing, and passes the map on to those that use its content.
    ///
    /// # Errors
    /// [`BackendError`]; after one, any chunk may or may not be present, and the map may or may not
    /// be noted.
    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>>;

    /// Returns the clears that the tier knows of: of a private tier, those that its chunks were
    /// stored after; of a shared one, those that others have passed on through it. Never waits.
    /// Default: none.
    fn clears(&self) -> Arc<Clears> {
        Arc::default()
    }

    /// Returns what the tier holds as far as this process knows; `None` where it does not, and
    /// once the tier is closed. Never waits.
    fn usage(&self) -> Option<Usage>;

    /// Returns the tier's own counters since it was made, under names that fit a metric's label.
    /// Default: none.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Returns true if the tier has chunks that were stored under other settings than this process has,
    /// and that no key of this process names. Never waits. Default: it has none.
    fn has_unreachable(&self) -> bool {
        false
    }

    /// Returns the tier's state as this process knows it. Never waits.
    fn health(&self) -> Health;

    /// Stops the tier: nothing is left running, what was acknowledged is durable. Every operation
    /// from then on answers with [`BackendError::Closed`]; closing again is no error.
    ///
    /// # Errors
    /// [`BackendError`] when something that was acknowledged may be lost.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>>;
}

/// A tier that keeps what it is given: a disk, a remote store.
///
/// The rules of [`Backend`] hold here as well.
pub trait WriteBackend: Backend {
    /// Writes chunks; answers when they are as durable as the tier promises. The slots are held
    /// until nothing reads from them any more.
    ///
    /// # Errors
    /// [`BackendError`] for each chunk; after one, the chunk may or may not be present, or
    /// become present later.
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>>;

    /// Removes chunks; answers `true` for those that were there.
    ///
    /// # Errors
    /// [`BackendError`] for each key; after one, the chunk may or may not be present.
    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>>;

    /// Returns a page of the chunks that are present, in an order of the tier's own. Starts at
    /// [`Cursor::START`] and goes on from [`Page::next`] until that is `None`. A chunk that is
    /// there from the first page to the last is listed exactly once.
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

/// The index of a tier whose index is in this process.
pub trait LocalIndex {
    /// Answers as [`Backend::locate`] does, at once.
    ///
    /// # Errors
    /// [`BackendError`] for each key that could not be looked up.
    fn locate_now(&self, keys: &[ChunkKey]) -> Vec<Result<Located, BackendError>>;

    /// Returns the fault that keeps the tier from a chunk that it may have; `None` where there is none.
    /// A tier of several devices, one of which is out of use, answers for the chunks of that device.
    /// Default: the error of [`Self::locate_now`].
    fn fault_of(&self, key: &ChunkKey) -> Option<BackendError> {
        self.locate_now(&[*key]).pop()?.err()
    }
}
