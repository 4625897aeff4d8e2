//! Futures that another thread completes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use super::worker::Shared;

/// Where a value is put for a future that waits for it.
#[derive(Debug)]
pub(super) struct Cell<T>(Mutex<Waiting<T>>);

#[derive(Debug)]
struct Waiting<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// Nobody waits any more.
    dropped: bool,
}

impl<T> Cell<T> {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Waiting {
            value: None,
            waker: None,
            dropped: false,
        })))
    }

    /// Puts the value there. To be called without locks: wakers are anybody's code.
    pub(super) fn put(&self, value: T) {
        let mut waiting = self.0.lock();
        if waiting.dropped {
            return;
        }
        waiting.value = Some(value);
        let waker = waiting.waker.take();
        drop(waiting);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether nobody waits any more.
    pub(super) fn is_dropped(&self) -> bool {
        self.0.lock().dropped
    }
}

/// Waits for a cell; dropped, it says so and ends what was begun.
#[derive(Debug)]
pub(super) struct Call<'a, T> {
    pub(super) cell: Arc<Cell<T>>,
    pub(super) shared: &'a Shared,
    /// What was begun.
    pub(super) number: u64,
}

impl<T> Future for Call<'_, T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut waiting = self.cell.0.lock();
        if let Some(value) = waiting.value.take() {
            return Poll::Ready(value);
        }
        let waker = waiting.waker.replace(context.waker().clone());
        drop(waiting);
        drop(waker);
        Poll::Pending
    }
}

impl<T> Drop for Call<'_, T> {
    fn drop(&mut self) {
        let mut waiting = self.cell.0.lock();
        waiting.dropped = true;
        let left = (waiting.value.take(), waiting.waker.take());
        drop(waiting);
        drop(left);
        self.shared.forget(self.number);
    }
}
