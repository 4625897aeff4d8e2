//! Moves a chunk to another location on its drive.

use std::sync::atomic::Ordering;

use lmc_backend::{BackendError, StoreItem, Stored};

use super::{Drive, StoreWaiter, Writing};

impl Drive {
    /// Starts to write a stored chunk to another location; the answer goes to `waiter`. `sum` is the
    /// checksum of its bytes. The chunk is found at the old location until the new one is durable.
    ///
    /// No other chunk is evicted for it: without free space the answer is [`BackendError::Full`].
    /// The answer is [`Stored::Declined`] when the chunk is not there any more, or another store
    /// writes it.
    pub(crate) fn relocate(&self, item: StoreItem, sum: u64, waiter: StoreWaiter) {
        let shared = &self.shared;
        let (key, len) = (item.key, item.slot.len());
        {
            let mut state = shared.state.lock();
            if state.closed {
                return waiter.0.answer(waiter.1, Err(BackendError::Closed));
            }
            let there = state.index.find(&key).is_some();
            let written = state.writing.contains_key(&key);
            if !there || written || !shared.condition.is_writable() {
                return waiter.0.answer(waiter.1, Ok(Stored::Declined));
            }
            let writing = Writing {
                first: Some(waiter),
                ..Writing::default()
            };
            state.writing.insert(key, writing);
        }
        shared.writing_bytes.fetch_add(len, Ordering::Relaxed);
        match shared.allocate_spare(len) {
            Some((extent, file)) => shared.write(item, Some(sum), extent, file),
            None => shared.store_ended(&key, len, |_| Err(BackendError::Full { needed: len })),
        }
    }

    /// Lets chunks be moved to a segment from which all have gone.
    pub(crate) fn reuse(&self, segment: u32) {
        self.shared.state.lock().index.reuse(segment);
    }
}
