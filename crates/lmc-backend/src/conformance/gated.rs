//! A tier that can be made to wait.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::thread;
use std::time::Instant;

use lmc_key::ChunkKey;
use parking_lot::Mutex;

use crate::{
    Backend, BackendError, BoxFuture, Cursor, FailedSlot, Health, LoadItem, Loaded, Page,
    StoreItem, Stored, Usage,
};

/// Wraps a tier in a gate: while it is shut, loads and stores wait at it, until their deadline at
/// most. Everything else passes.
#[derive(Debug, Default)]
pub struct Gated<B> {
    inner: B,
    gate: Arc<Mutex<Gate>>,
    loads: AtomicU64,
    stores: AtomicU64,
    clears: AtomicU64,
}

#[derive(Debug, Default)]
struct Gate {
    shut: bool,
    waiting: Vec<Waker>,
}

impl Gate {
    fn wake(&mut self) {
        self.waiting.drain(..).for_each(Waker::wake);
    }
}

impl<B: Backend> Gated<B> {
    /// The gate stands open.
    pub fn new(inner: B) -> Self {
        Self {
            inner,
            gate: Arc::default(),
            loads: AtomicU64::new(0),
            stores: AtomicU64::new(0),
            clears: AtomicU64::new(0),
        }
    }

    /// Lets nothing through from now on.
    pub fn shut(&self) {
        self.gate.lock().shut = true;
    }

    /// Lets everything through that waits, and all that comes.
    pub fn open(&self) {
        let mut gate = self.gate.lock();
        gate.shut = false;
        gate.wake();
    }

    /// Chunks that loads have asked for so far, at the gate or through it.
    pub fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }

    /// Chunks that were to be stored so far, at the gate or through it.
    pub fn stores(&self) -> u64 {
        self.stores.load(Ordering::Relaxed)
    }

    /// False when the deadline came first.
    async fn pass(&self, deadline: Instant) -> bool {
        let mut alarmed = false;
        poll_fn(|context| {
            let mut gate = self.gate.lock();
            if !gate.shut {
                return Poll::Ready(true);
            }
            if Instant::now() >= deadline {
                return Poll::Ready(false);
            }
            gate.waiting.push(context.waker().clone());
            if !alarmed {
                alarmed = true;
                let gate = Arc::clone(&self.gate);
                thread::spawn(move || {
                    thread::sleep(deadline.saturating_duration_since(Instant::now()));
                    gate.lock().wake();
                });
            }
            Poll::Pending
        })
        .await
    }
}

impl<B: Backend> Backend for Gated<B> {
    fn name(&self) -> &str {
        self.inner.name()
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>> {
        self.inner.contains(keys, deadline)
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        self.loads.fetch_add(items.len() as u64, Ordering::Relaxed);
        Box::pin(async move {
            if self.pass(deadline).await {
                return self.inner.load(items, deadline).await;
            }
            let late = |item: LoadItem| Loaded::Failed {
                error: BackendError::Deadline,
                slot: FailedSlot::Quiet(item.slot),
            };
            items.into_iter().map(late).collect()
        })
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>> {
        self.stores.fetch_add(items.len() as u64, Ordering::Relaxed);
        let clears = self.clears.load(Ordering::SeqCst);
        Box::pin(async move {
            if !self.pass(deadline).await {
                return items.iter().map(|_| Err(BackendError::Deadline)).collect();
            }
            // What waited here while all was forgotten is forgotten too.
            if self.clears.load(Ordering::SeqCst) != clears {
                return items.iter().map(|_| Ok(Stored::Declined)).collect();
            }
            self.inner.store(items, deadline).await
        })
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        self.inner.remove(keys, deadline)
    }

    fn clear(&self, deadline: Instant) -> BoxFuture<'_, Result<u64, BackendError>> {
        self.clears.fetch_add(1, Ordering::SeqCst);
        self.inner.clear(deadline)
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        self.inner.list(cursor, limit, deadline)
    }

    fn usage(&self, deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>> {
        self.inner.usage(deadline)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.counters()
    }

    fn health(&self) -> Health {
        match self.gate.lock().shut {
            true => Health::Down {
                reason: "the gate is shut".to_owned(),
            },
            false => self.inner.health(),
        }
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        self.inner.close(deadline)
    }
}
