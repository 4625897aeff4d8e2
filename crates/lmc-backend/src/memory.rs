//! A map behind the trait.

use std::collections::BTreeMap;
use std::future::ready;
use std::io;
use std::ops::Bound;
use std::time::Instant;

use lmc_key::ChunkKey;
use parking_lot::Mutex;

use crate::{
    Backend, BackendError, BoxFuture, Cursor, FailedSlot, Health, Listed, LoadItem, Loaded, Page,
    StoreItem, Stored, Usage,
};

/// Copies chunks into a map on the heap: the twin of every real tier in tests and examples.
/// Nothing is evicted; without a capacity it grows for ever.
#[derive(Debug, Default)]
pub struct MemoryBackend {
    state: Mutex<State>,
    capacity: Option<u64>,
}

#[derive(Debug, Default)]
struct State {
    chunks: BTreeMap<ChunkKey, Chunk>,
    /// Arrival number to key: the order of listings.
    arrivals: BTreeMap<u128, ChunkKey>,
    /// The number of the last arrival. The first is 1, so that cursor 0 lies before all.
    arrived: u128,
    bytes: u64,
    closed: bool,
}

#[derive(Debug)]
struct Chunk {
    arrival: u128,
    bytes: Box<[u8]>,
}

impl MemoryBackend {
    /// Holds at most `capacity` bytes of chunks, and answers [`BackendError::Full`] beyond.
    pub fn with_capacity(capacity: u64) -> Self {
        Self {
            capacity: Some(capacity),
            ..Self::default()
        }
    }

    fn load_one(&self, LoadItem { key, mut slot }: LoadItem) -> Loaded {
        let state = self.state.lock();
        if state.closed {
            let (error, slot) = (BackendError::Closed, FailedSlot::Quiet(slot));
            return Loaded::Failed { error, slot };
        }
        let Some(chunk) = state.chunks.get(&key) else {
            return Loaded::Miss(slot);
        };
        let expected = chunk.bytes.len() as u64;
        if expected != slot.len() {
            let found = slot.len();
            return Loaded::Failed {
                error: BackendError::Length { expected, found },
                slot: FailedSlot::Quiet(slot),
            };
        }
        slot.bytes_mut().copy_from_slice(&chunk.bytes);
        Loaded::Hit(slot.written())
    }

    fn store_one(&self, item: &StoreItem) -> Result<Stored, BackendError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(BackendError::Closed);
        }
        if state.chunks.contains_key(&item.key) {
            return Ok(Stored::Present);
        }
        let needed = item.slot.len();
        if self
            .capacity
            .is_some_and(|capacity| state.bytes + needed > capacity)
        {
            return Err(BackendError::Full { needed });
        }
        let bytes: Box<[u8]> = item.slot.bytes().into();
        if item.slot.arena().is_lost() {
            return Err(BackendError::Io(io::Error::other(
                "the slot's memory was lost",
            )));
        }
        state.arrived += 1;
        state.bytes += needed;
        let arrival = state.arrived;
        state.arrivals.insert(arrival, item.key);
        state.chunks.insert(item.key, Chunk { arrival, bytes });
        Ok(Stored::Written)
    }

    fn remove_one(&self, key: &ChunkKey) -> Result<bool, BackendError> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(BackendError::Closed);
        }
        let Some(chunk) = state.chunks.remove(key) else {
            return Ok(false);
        };
        state.arrivals.remove(&chunk.arrival);
        state.bytes -= chunk.bytes.len() as u64;
        Ok(true)
    }
}

impl Backend for MemoryBackend {
    fn name(&self) -> &str {
        "memory"
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>> {
        let state = self.state.lock();
        let found = |key| match state.closed {
            true => Err(BackendError::Closed),
            false => Ok(state.chunks.get(key).map(|chunk| chunk.bytes.len() as u64)),
        };
        Box::pin(ready(keys.iter().map(found).collect()))
    }

    fn load(&self, items: Vec<LoadItem>, _deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        let loaded = items.into_iter().map(|item| self.load_one(item));
        Box::pin(ready(loaded.collect()))
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        _deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>> {
        Box::pin(ready(
            items.iter().map(|item| self.store_one(item)).collect(),
        ))
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(ready(keys.iter().map(|key| self.remove_one(key)).collect()))
    }

    fn clear(&self, _deadline: Instant) -> BoxFuture<'_, Result<u64, BackendError>> {
        let mut state = self.state.lock();
        if state.closed {
            return Box::pin(ready(Err(BackendError::Closed)));
        }
        let gone = state.chunks.len() as u64;
        state.chunks.clear();
        state.arrivals.clear();
        state.bytes = 0;
        Box::pin(ready(Ok(gone)))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        let state = self.state.lock();
        if state.closed {
            return Box::pin(ready(Err(BackendError::Closed)));
        }
        let mut rest = state
            .arrivals
            .range((Bound::Excluded(cursor.raw()), Bound::Unbounded));
        let mut page = Page::default();
        let mut last = cursor;
        for (arrival, key) in rest.by_ref().take(limit) {
            let len = state.chunks[key].bytes.len() as u64;
            page.items.push(Listed::new(*key, len));
            last = Cursor::from_raw(*arrival);
        }
        page.next = rest.next().map(|_| last);
        Box::pin(ready(Ok(page)))
    }

    fn usage(&self, _deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>> {
        let state = self.state.lock();
        if state.closed {
            return Box::pin(ready(Err(BackendError::Closed)));
        }
        let mut usage = Usage::new(state.chunks.len() as u64, state.bytes);
        usage.capacity = self.capacity;
        Box::pin(ready(Ok(usage)))
    }

    fn health(&self) -> Health {
        match self.state.lock().closed {
            true => Health::Down {
                reason: "closed".to_owned(),
            },
            false => Health::Ready,
        }
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.state.lock().closed = true;
        Box::pin(ready(Ok(())))
    }
}
