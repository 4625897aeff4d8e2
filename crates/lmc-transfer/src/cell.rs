//! A value that one thread puts and a future waits for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Where the value is put.
#[derive(Debug)]
pub(crate) struct Cell<T>(Mutex<Inside<T>>);

#[derive(Debug)]
struct Inside<T> {
    value: Option<T>,
    waker: Option<Waker>,
    /// Nobody waits any more.
    dropped: bool,
    /// Wants to know of that.
    watcher: Option<Waker>,
}

impl<T> Cell<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(Inside {
            value: None,
            waker: None,
            dropped: false,
            watcher: None,
        })))
    }

    /// Puts the value there. To be called without locks: wakers are anybody's code.
    pub(crate) fn put(&self, value: T) {
        let mut inside = self.0.lock();
        if inside.dropped {
            return;
        }
        inside.value = Some(value);
        let waker = inside.waker.take();
        drop(inside);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether nobody waits any more.
    pub(crate) fn is_dropped(&self) -> bool {
        self.0.lock().dropped
    }

    /// Whether nobody waits any more; if somebody does, `watcher` is woken when that ends.
    #[cfg(feature = "conformance")]
    pub(crate) fn watch(&self, watcher: &Waker) -> bool {
        let mut inside = self.0.lock();
        let before = inside.watcher.replace(watcher.clone());
        let dropped = inside.dropped;
        drop(inside);
        drop(before);
        dropped
    }

    /// Waits for the value. To be called once.
    pub(crate) fn wait(self: &Arc<Self>) -> Wait<T> {
        Wait(Arc::clone(self))
    }
}

/// Waits for a cell; dropped, it says so there.
#[derive(Debug)]
pub(crate) struct Wait<T>(Arc<Cell<T>>);

impl<T> Future for Wait<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let mut inside = self.0.0.lock();
        if let Some(value) = inside.value.take() {
            return Poll::Ready(value);
        }
        let before = inside.waker.replace(context.waker().clone());
        drop(inside);
        drop(before);
        Poll::Pending
    }
}

impl<T> Drop for Wait<T> {
    fn drop(&mut self) {
        let mut inside = self.0.0.lock();
        inside.dropped = true;
        let left = (inside.value.take(), inside.waker.take());
        let watcher = inside.watcher.take();
        drop(inside);
        drop(left);
        if let Some(watcher) = watcher {
            watcher.wake();
        }
    }
}
