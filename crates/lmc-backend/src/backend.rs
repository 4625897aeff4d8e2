//! The trait.

use std::fmt;
use std::pin::Pin;
use std::time::Instant;

use lmc_key::ChunkKey;

use crate::{BackendError, Cursor, Health, LoadItem, Loaded, Page, StoreItem, Stored, Usage};

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Keys that the default of [`Backend::clear`] removes in one go.
const REMOVE_AT_ONCE: usize = 1024;

/// A place that holds chunks below DRAM.
///
/// What every implementation MUST do:
///
/// - **Order.** Batches answer with exactly one result for each key, in the order of the keys.
///   An empty batch answers at once. A key may stand in a batch twice.
/// - **Deadlines.** Every operation is over soon after its deadline. What was not done by then
///   answers with the `Deadline` error of the operation, the rest with its results.
/// - **Right bytes or none.** [`Loaded::Hit`] only for bytes whose identity and checksum were
///   verified after their last trip through something that can lie. A mismatch is a miss (and a
///   counter of the implementation), never an error and never data.
/// - **Immutability.** A key decides its bytes: storing a key that is present changes nothing.
/// - **Visibility.** What `store` has answered with [`Stored::Written`] is found by the next
///   operation, until it is removed or evicted; what `remove` or `clear` has answered `Ok` for is
///   not found by the next operation.
/// - **Lost memory.** Bytes that were read from a slot whose arena is lost afterwards
///   ([`lmc_memory::Arena::is_lost`]) are not the chunk's: `store` answers an error and keeps none,
///   and `load` takes nothing for damaged because of them.
/// - **Cancellation.** A future may be dropped at any point. Slots that something may still write
///   to stay with the implementation until that is known to be over; they are never returned
///   to their pool before. A dropped `store` or `remove` may or may not take effect.
/// - **No panics** for anything that a device, a peer or a file may do.
pub trait Backend: fmt::Debug + Send + Sync {
    /// A short name for logs and metrics, such as `disk`.
    fn name(&self) -> &str;

    /// Which chunks are present, each with its length in bytes, so that a slot can be reserved
    /// to load it into. An answer is a hint: the chunk may be gone when it is loaded.
    ///
    /// # Errors
    /// [`BackendError`] for each key that could not be looked up.
    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>>;

    /// Reads chunks into the slots given. A slot's length must be the chunk's.
    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> BoxFuture<'_, Vec<Loaded>>;

    /// Writes chunks; answers when they are as durable as the tier promises. The slots are held
    /// until nothing reads from them any more.
    ///
    /// # Errors
    /// [`BackendError`] for each chunk; after one, the chunk may or may not be present.
    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>>;

    /// Forgets chunks; `true` for those that were there.
    ///
    /// # Errors
    /// [`BackendError`] for each key; after one, the chunk may or may not be present.
    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>>;

    /// Forgets every chunk; how many were there. A chunk whose `store` was begun before is not
    /// found when that ends after it, whether anybody still waits for that or not. What is
    /// stored from then on may be there afterwards.
    ///
    /// Default: lists all and removes what is listed, which is right for a tier whose stores are
    /// done when they are begun.
    ///
    /// # Errors
    /// [`BackendError`]; after one, any chunk may or may not be present.
    fn clear(&self, deadline: Instant) -> BoxFuture<'_, Result<u64, BackendError>> {
        Box::pin(async move {
            let (mut gone, mut cursor) = (0, Cursor::START);
            loop {
                let page = self.list(cursor, REMOVE_AT_ONCE, deadline).await?;
                let keys: Vec<_> = page.items.iter().map(|item| item.key).collect();
                for removed in self.remove(&keys, deadline).await {
                    gone += u64::from(removed?);
                }
                match page.next {
                    Some(next) => cursor = next,
                    None => return Ok(gone),
                }
            }
        })
    }

    /// A page of the chunks that are present, in an order of the tier's own. Starts at
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

    /// What the tier holds.
    ///
    /// # Errors
    /// [`BackendError`].
    fn usage(&self, deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>>;

    /// What the tier counted since it was made, by names that fit a metric's label. Default:
    /// nothing.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// How the tier is, from memory: never waits.
    fn health(&self) -> Health;

    /// Stops: nothing is left running, what was acknowledged is durable. Every operation from
    /// then on answers with its `Closed` error; closing again is no error.
    ///
    /// # Errors
    /// [`BackendError`] when something that was acknowledged may be lost.
    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>>;
}
