//! A tier whose operations a test can hold.

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
    LocateHint, Located, StoreItem, Stored, WriteBackend,
};

/// An operation that a [`Gated`] tier can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// [`Backend::locate`].
    Locate,
    /// [`Backend::load`].
    Load,
    /// [`WriteBackend::store`].
    Store,
    /// [`WriteBackend::remove`].
    Remove,
    /// [`Backend::clear`].
    Clear,
    /// [`Backend::close`].
    Close,
}

/// Wraps a tier in a gate. Operations that are held wait at the gate before they begin, at most until their
/// deadline. All other operations pass.
#[derive(Debug, Default)]
pub struct Gated<B> {
    inner: B,
    gate: Mutex<Gate>,
    loads: AtomicU64,
    stores: AtomicU64,
    ended: [AtomicU64; 6],
}

#[derive(Debug, Default)]
struct Gate {
    held: Vec<Operation>,
    waiting: Vec<Waker>,
}

impl<B: Backend> Gated<B> {
    /// Makes a tier with an open gate.
    pub fn new(inner: B) -> Self {
        Self {
            inner,
            gate: Mutex::default(),
            loads: AtomicU64::new(0),
            stores: AtomicU64::new(0),
            ended: Default::default(),
        }
    }

    /// Holds loads and stores from now on.
    pub fn shut(&self) {
        self.hold(Operation::Load);
        self.hold(Operation::Store);
    }

    /// Holds an operation from now on.
    pub fn hold(&self, operation: Operation) {
        self.gate.lock().held.push(operation);
    }

    /// Releases an operation that was held.
    pub fn release(&self, operation: Operation) {
        self.hold_only(|held| held != operation);
    }

    /// Lets all calls through, both waiting and later ones.
    pub fn open(&self) {
        self.hold_only(|_| false);
    }

    fn hold_only(&self, pick: impl Fn(Operation) -> bool) {
        let mut gate = self.gate.lock();
        gate.held.retain(|held| pick(*held));
        gate.waiting.drain(..).for_each(Waker::wake);
    }

    /// Returns the number of chunks that loads have asked for so far, at the gate or through it.
    pub fn loads(&self) -> u64 {
        self.loads.load(Ordering::Relaxed)
    }

    /// Returns the number of chunks that stores were given so far, at the gate or through it.
    pub fn stores(&self) -> u64 {
        self.stores.load(Ordering::Relaxed)
    }

    /// Returns the number of calls of an operation, other than loads and stores, that have ended so far, with
    /// their own answer or at their deadline.
    pub fn ended(&self, operation: Operation) -> u64 {
        self.ended[operation as usize].load(Ordering::Relaxed)
    }

    /// Waits until an operation is not held. Returns false if the deadline passed first.
    async fn pass(&self, operation: Operation, deadline: Instant) -> bool {
        let opened = poll_fn(|context| {
            let mut gate = self.gate.lock();
            if !gate.held.contains(&operation) {
                return Poll::Ready(());
            }
            gate.waiting.push(context.waker().clone());
            Poll::Pending
        });
        let late = pin!(sleep_until(deadline));
        matches!(select(opened, late).await, Either::Left(_))
    }

    /// Calls an operation once it is not held; `late` is its answer at the deadline.
    fn call<'a, T: Send>(
        &'a self,
        operation: Operation,
        deadline: Instant,
        call: impl FnOnce() -> BoxFuture<'a, T> + Send + 'a,
        late: impl FnOnce() -> T + Send + 'a,
    ) -> BoxFuture<'a, T> {
        Box::pin(async move {
            let answer = match self.pass(operation, deadline).await {
                true => call().await,
                false => late(),
            };
            self.ended[operation as usize].fetch_add(1, Ordering::Relaxed);
            answer
        })
    }
}

impl<B: WriteBackend> Backend for Gated<B> {
    crate::forward!(inner: name sharing index clears usage counters);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        let call = move || self.inner.locate(keys, hint, deadline);
        self.call(Operation::Locate, deadline, call, || late(keys))
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        self.loads.fetch_add(items.len() as u64, Ordering::Relaxed);
        let passed = self.pass(Operation::Load, deadline);
        load_after(&self.inner, passed, items, deadline)
    }

    fn clear(
        &self,
        clears: Arc<Clears>,
        deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        let call = move || self.inner.clear(clears, deadline);
        let late = || Err(BackendError::Deadline);
        self.call(Operation::Clear, deadline, call, late)
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        let call = move || self.inner.close(deadline);
        let late = || Err(BackendError::Deadline);
        self.call(Operation::Close, deadline, call, late)
    }

    fn health(&self) -> Health {
        match self.gate.lock().held.is_empty() {
            true => self.inner.health(),
            false => Health::Down {
                reason: "the gate is shut".to_owned(),
            },
        }
    }
}

impl<B: WriteBackend> WriteBackend for Gated<B> {
    crate::forward!(inner: list);

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        self.stores.fetch_add(items.len() as u64, Ordering::Relaxed);
        let passed = self.pass(Operation::Store, deadline);
        store_after(&self.inner, passed, items, deadline)
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        let call = move || self.inner.remove(keys, deadline);
        self.call(Operation::Remove, deadline, call, || late(keys))
    }
}

/// Returns the answers to keys at the deadline.
fn late<T>(keys: &[ChunkKey]) -> Vec<Result<T, BackendError>> {
    keys.iter().map(|_| Err(BackendError::Deadline)).collect()
}
