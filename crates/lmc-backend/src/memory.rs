//! A tier that is a map in memory.

use std::collections::BTreeMap;
use std::future::ready as done;
use std::io;
use std::ops::Bound;
use std::sync::Arc;
use std::time::Instant;

use lmc_key::ChunkKey;
use parking_lot::Mutex;

use crate::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, FailedSlot, Health, Listed,
    LoadItem, Loaded, LocalIndex, LocateHint, Located, Location, Page, Sharing, StoreItem, Stored,
    Usage, WriteBackend, ready,
};

/// A tier that copies chunks into a map on the heap: the twin of every real tier in tests and examples.
/// Nothing is evicted; without a capacity the map grows without bound.
#[derive(Debug, Default)]
pub struct MemoryBackend {
    state: Mutex<ChunkMap>,
    capacity: Option<u64>,
    is_shared: bool,
}

#[derive(Clone, Debug, Default)]
struct ChunkMap {
    chunks: BTreeMap<ChunkKey, Chunk>,
    /// Keys by arrival number: the order of listings.
    arrivals: BTreeMap<u128, ChunkKey>,
    /// Number of the last arrival. The first arrival has number 1, so cursor 0 is before all arrivals.
    arrived: u128,
    /// Payload bytes of the chunks.
    bytes: u64,
    clears: Arc<Clears>,
    closed: bool,
}

#[derive(Clone, Debug)]
struct Chunk {
    arrival: u128,
    bytes: Box<[u8]>,
}

impl ChunkMap {
    fn take(&mut self, key: &ChunkKey) -> bool {
        let Some(chunk) = self.chunks.remove(key) else {
            return false;
        };
        self.arrivals.remove(&chunk.arrival);
        self.bytes -= chunk.bytes.len() as u64;
        true
    }
}

impl MemoryBackend {
    /// Makes a tier that holds at most `capacity` bytes of chunks, and answers [`BackendError::Full`] beyond
    /// that.
    pub fn with_capacity(capacity: u64) -> Self {
        Self {
            capacity: Some(capacity),
            ..Self::default()
        }
    }

    /// Makes a tier that behaves like a store that other processes use too: it has no index in this process,
    /// and a clear removes nothing.
    pub fn shared() -> Self {
        Self {
            is_shared: true,
            ..Self::default()
        }
    }

    fn locate_one(&self, state: &ChunkMap, key: &ChunkKey) -> Result<Located, BackendError> {
        if state.closed {
            return Err(BackendError::Closed);
        }
        let location = |chunk: &Chunk| Location::new(chunk.bytes.len() as u64);
        let found = state.chunks.get(key).map(location);
        Ok(found.map_or(Located::Absent, Located::Present))
    }

    fn load_one(&self, LoadItem { key, mut slot, .. }: LoadItem) -> Loaded {
        let state = self.state.lock();
        if state.closed {
            let (error, slot) = (BackendError::Closed, FailedSlot::Released(slot));
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
                slot: FailedSlot::Released(slot),
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
            return Err(BackendError::from(io::Error::other(
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
        Ok(state.take(key))
    }
}

impl Clone for MemoryBackend {
    /// Copies the content, as copying a drive's folder does.
    fn clone(&self) -> Self {
        Self {
            state: Mutex::new(self.state.lock().clone()),
            ..*self
        }
    }
}

impl LocalIndex for MemoryBackend {
    fn locate_now(&self, keys: &[ChunkKey]) -> Vec<Result<Located, BackendError>> {
        let state = self.state.lock();
        let located = keys.iter().map(|key| self.locate_one(&state, key));
        located.collect()
    }
}

impl Backend for MemoryBackend {
    fn name(&self) -> &str {
        "memory"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn sharing(&self) -> Sharing {
        match self.is_shared {
            true => Sharing::Shared,
            false => Sharing::Private,
        }
    }

    fn index(&self) -> Option<&dyn LocalIndex> {
        (!self.is_shared).then_some(self as &dyn LocalIndex)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _: &'a LocateHint,
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(done(self.locate_now(keys)))
    }

    fn load(&self, items: Vec<LoadItem>, _deadline: Instant) -> Answers<'_, Loaded> {
        ready(items.into_iter().map(|item| self.load_one(item)))
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        let mut state = self.state.lock();
        if state.closed {
            return Box::pin(done(Err(BackendError::Closed)));
        }
        let is_known = state.clears == clears;
        let mut known = Clears::clone(&state.clears);
        if let Err(error) = known.join(&clears) {
            return Box::pin(done(Err(BackendError::from(io::Error::other(error)))));
        }
        state.clears = Arc::new(known);
        let mut removed = 0;
        if !self.is_shared && !is_known {
            removed = state.chunks.len() as u64;
            state.chunks.clear();
            state.arrivals.clear();
            state.bytes = 0;
        }
        Box::pin(done(Ok(Cleared::new(removed))))
    }

    fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.state.lock().clears)
    }

    fn usage(&self) -> Option<Usage> {
        let state = self.state.lock();
        let mut usage = Usage::new(state.chunks.len() as u64, state.bytes);
        usage.capacity = self.capacity;
        (!state.closed).then_some(usage)
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
        Box::pin(done(Ok(())))
    }
}

impl WriteBackend for MemoryBackend {
    fn store(
        &self,
        items: Vec<StoreItem>,
        _deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        ready(items.iter().map(|item| self.store_one(item)))
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(done(keys.iter().map(|key| self.remove_one(key)).collect()))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        let state = self.state.lock();
        if state.closed {
            return Box::pin(done(Err(BackendError::Closed)));
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
        Box::pin(done(Ok(page)))
    }
}
