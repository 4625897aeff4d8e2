//! Writing chunks: what is asked for, and what one holds while writing.

use lmc_backend_local as local;
use lmc_backend_local::TenantId;
use lmc_key::ChunkKey;

/// A chunk that somebody wants to write.
#[derive(Debug, Clone, Copy)]
pub struct WriteRequest {
    /// Which chunk.
    pub key: ChunkKey,
    /// The chunk before it in its prompt; none for the first.
    pub parent: Option<ChunkKey>,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its bytes.
    pub len: u64,
}

/// What became of a [`WriteRequest`].
#[derive(Debug)]
pub enum Reservation {
    /// Write it.
    Reserved(WriteTicket),
    /// It is there already.
    Present,
    /// Another ticket is exclusive for it.
    Busy,
    /// No memory can be had for it now: all that could go is leased, pinned, or promised to
    /// another tenant.
    NoRoom,
}

/// The right to write one chunk, and the memory for it.
///
/// Dropping it gives both back. Where something outside this process may still be writing to the
/// memory, hold on to the ticket until it is known not to.
#[derive(Debug)]
pub struct WriteTicket {
    reservation: local::Reservation,
    parent: Option<ChunkKey>,
}

impl WriteTicket {
    pub(crate) fn new(reservation: local::Reservation, parent: Option<ChunkKey>) -> Self {
        Self {
            reservation,
            parent,
        }
    }

    /// Which chunk.
    pub fn key(&self) -> ChunkKey {
        self.reservation.mark.key()
    }

    /// Names its write mark, for [`CacheEngine::share_writes`](crate::CacheEngine::share_writes).
    pub fn mark(&self) -> local::MarkId {
        self.reservation.mark.id()
    }

    /// Bytes from the start of the pool to the slot.
    pub fn offset(&self) -> u64 {
        self.reservation.slot.offset()
    }

    /// Bytes of the slot.
    #[expect(clippy::len_without_is_empty, reason = "a chunk has at least one byte")]
    pub fn len(&self) -> u64 {
        self.reservation.slot.len()
    }

    /// The slot, to be filled.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        self.reservation.slot.bytes_mut()
    }

    pub(crate) fn written(self) -> local::Write {
        self.reservation.written(self.parent)
    }
}
