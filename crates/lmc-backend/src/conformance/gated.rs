//! A tier that can be made to wait.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::Instant;

use futures_util::future::{Either, select};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::delayed::sleep_until;
use super::in_time::{load_after, store_after};
use crate::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Health, LoadItem, Loaded,
    StoreItem, Stored,
};

/// Wraps a tier in a gate. While the gate is shut, loads and stores wait at it, until their
/// deadline at most. Everything else passes.
#[derive(Debug, Default)]
pub struct Gated<B> {
    inner: B,
    gate: Arc<Mutex<Gate>>,
    loads: AtomicU64,
    stores: AtomicU64,
    removals: AtomicU64,
    clears_ended: AtomicU64,
}

#[derive(Debug, Default)]
struct Gate {
    shut: bool,
    holds_clears: bool,
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
            removals: AtomicU64::new(0),
            clears_ended: AtomicU64::new(0),
        }
    }

    /// Lets nothing through from now on.
    pub fn shut(&self) {
        self.gate.lock().shut = true;
    }

    /// Lets no clear end from now on either, although it takes effect at once.
    pub fn hold_clears(&self) {
        self.gate.lock().holds_clears = true;
        self.shut();
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

    /// Calls of [`Backend::remove`] that have ended so far.
    pub fn removals(&self) -> u64 {
        self.removals.load(Ordering::Relaxed)
    }

    /// Clears that have ended so far, in order or at their deadline.
    pub fn clears_ended(&self) -> u64 {
        self.clears_ended.load(Ordering::Relaxed)
    }

    /// Waits until the gate is open. Returns false if the deadline came first.
    async fn pass(&self, deadline: Instant) -> bool {
        let opened = poll_fn(|context| {
            let mut gate = self.gate.lock();
            if !gate.shut {
                return Poll::Ready(());
            }
            gate.waiting.push(context.waker().clone());
            Poll::Pending
        });
        let late = pin!(sleep_until(deadline));
        matches!(select(opened, late).await, Either::Left(_))
    }
}

impl<B: Backend> Backend for Gated<B> {
    crate::forward!(inner: name sharing takes_writes index locate clears list usage counters close);

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.loads.fetch_add(items.len() as u64, Ordering::Relaxed);
        load_after(&self.inner, self.pass(deadline), items, deadline)
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        self.stores.fetch_add(items.len() as u64, Ordering::Relaxed);
        store_after(&self.inner, self.pass(deadline), items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(async move {
            let removed = self.inner.remove(keys, deadline).await;
            self.removals.fetch_add(1, Ordering::Relaxed);
            removed
        })
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(async move {
            let cleared = self.inner.clear(clears, deadline).await;
            let held = self.gate.lock().holds_clears;
            let passed = !held || self.pass(deadline).await;
            self.clears_ended.fetch_add(1, Ordering::Relaxed);
            match passed {
                true => cleared,
                false => Err(BackendError::Deadline),
            }
        })
    }

    fn health(&self) -> Health {
        match self.gate.lock().shut {
            true => Health::Down {
                reason: "the gate is shut".to_owned(),
            },
            false => self.inner.health(),
        }
    }
}
