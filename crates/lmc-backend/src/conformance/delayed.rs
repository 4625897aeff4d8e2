//! A tier that answers after a delay.

use std::sync::Arc;
use std::task::{Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::in_time::{load_after, store_after};
use crate::{
    Answers, Backend, BackendError, BoxFuture, LoadItem, Loaded, LocateHint, Located, StoreItem,
    Stored, WriteBackend, ready,
};

/// Waits until a point in time, on a thread of its own.
pub(super) async fn sleep_until(end: Instant) {
    let waker: Arc<Mutex<Option<Waker>>> = Arc::default();
    let mut alarmed = false;
    std::future::poll_fn(|context| {
        if Instant::now() >= end {
            return Poll::Ready(());
        }
        *waker.lock() = Some(context.waker().clone());
        if !alarmed {
            alarmed = true;
            let waker = Arc::clone(&waker);
            thread::spawn(move || {
                thread::sleep(end.saturating_duration_since(Instant::now()));
                if let Some(waker) = waker.lock().take() {
                    waker.wake();
                }
            });
        }
        Poll::Pending
    })
    .await;
}

/// Wraps a tier so that it has no local index, and answers lookups, loads and stores after a delay.
#[derive(Debug)]
pub struct Delayed<B> {
    inner: B,
    delay: Duration,
    keeps_deadlines: bool,
}

impl<B: Backend> Delayed<B> {
    /// Makes a slow tier: it answers after `delay`, or with [`BackendError::Deadline`] at the deadline.
    pub fn slow(inner: B, delay: Duration) -> Self {
        Self {
            inner,
            delay,
            keeps_deadlines: true,
        }
    }

    /// Makes a tier that breaks the contract: it answers after `delay`, whatever the deadline is.
    pub fn late(inner: B, delay: Duration) -> Self {
        Self {
            inner,
            delay,
            keeps_deadlines: false,
        }
    }

    /// Returns the tier inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    /// Waits. Returns false if the deadline came first.
    async fn delay(&self, deadline: Instant) -> bool {
        let end = Instant::now() + self.delay;
        let is_late = self.keeps_deadlines && end > deadline;
        sleep_until(if is_late { deadline } else { end }).await;
        !is_late
    }
}

impl<B: WriteBackend> Backend for Delayed<B> {
    crate::forward!(inner: name sharing clear clears usage counters health close);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        hint: &'a LocateHint,
        deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        Box::pin(async move {
            if keys.is_empty() {
                return Vec::new();
            }
            match self.delay(deadline).await {
                true => self.inner.locate(keys, hint, deadline).await,
                false => keys.iter().map(|_| Err(BackendError::Deadline)).collect(),
            }
        })
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> Answers<'_, Loaded> {
        if items.is_empty() {
            return ready([]);
        }
        load_after(&self.inner, self.delay(deadline), items, deadline)
    }
}

impl<B: WriteBackend> WriteBackend for Delayed<B> {
    crate::forward!(inner: remove list);

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        if items.is_empty() {
            return ready([]);
        }
        store_after(&self.inner, self.delay(deadline), items, deadline)
    }
}
