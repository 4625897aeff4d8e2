//! Stores of chunks: the request, the answer, and the right to write a chunk.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_backend_local as local;
use lmc_backend_local::TenantId;
use lmc_key::ChunkKey;

/// A chunk to store.
#[derive(Debug, Clone, Copy)]
pub struct StoreRequest {
    /// Key of the chunk in its space.
    pub key: ChunkKey,
    /// Key of the chunk before this one in its prompt; none for the first chunk.
    pub parent: Option<ChunkKey>,
    /// Tenant whose quota the chunk counts against.
    pub tenant: TenantId,
    /// Payload bytes of the chunk.
    pub len: u64,
}

/// Answer to a [`StoreRequest`].
#[derive(Debug)]
pub enum StoreStart {
    /// A slot is reserved: write the chunk and commit it.
    Reserved(StoreTicket),
    /// The chunk is already present.
    Present,
    /// Another caller is writing the chunk.
    Busy,
    /// The cache was cleared since the chunk was computed.
    Cleared,
    /// There is no memory for the chunk now: all evictable memory is leased, pinned, or promised to another
    /// tenant.
    NoMemory,
    /// The engine accepts no chunks ([`CacheEngine::begin_drain`](crate::CacheEngine::begin_drain)).
    Draining,
}

/// The right to write one chunk, and the memory for it.
///
/// Dropping the ticket releases both. While something outside this process may still be writing to the
/// memory, keep the ticket.
#[derive(Debug)]
pub struct StoreTicket {
    grant: local::WriteGrant,
    parent: Option<ChunkKey>,
    under_way: UnderWay,
}

/// Counts a store as in progress until it is dropped.
#[derive(Debug)]
pub(crate) struct UnderWay(Arc<AtomicU64>);

impl UnderWay {
    pub(crate) fn new(count: &Arc<AtomicU64>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(Arc::clone(count))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl StoreTicket {
    pub(crate) fn new(
        grant: local::WriteGrant,
        parent: Option<ChunkKey>,
        under_way: UnderWay,
    ) -> Self {
        Self {
            grant,
            parent,
            under_way,
        }
    }

    /// Returns the key of the chunk, with its name after the clears.
    pub fn key(&self) -> ChunkKey {
        self.grant.mark.key()
    }

    /// Returns the id of the write mark, for [`CacheEngine::share_writes`](crate::CacheEngine::share_writes).
    pub fn mark(&self) -> local::MarkId {
        self.grant.mark.id()
    }

    /// Returns the offset of the slot in the pool.
    pub fn offset(&self) -> u64 {
        self.grant.slot.offset()
    }

    /// Returns the bytes of the slot.
    #[expect(clippy::len_without_is_empty, reason = "a chunk has at least one byte")]
    pub fn len(&self) -> u64 {
        self.grant.slot.len()
    }

    /// Returns the bytes of the slot, to be written.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.grant.slot.bytes_mut()
    }

    /// Returns the write, and the guard that counts the store as in progress until the commit.
    pub(crate) fn written(self) -> (local::Write, UnderWay) {
        (self.grant.written(self.parent), self.under_way)
    }
}
