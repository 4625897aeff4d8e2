//! Registration of the pool's memory with the GPUs, in the background and from the first byte on. Bytes that
//! are not registered yet are copied too, at a fifth of the rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::driver::{self, Context, CudaError, Result};
use crate::{Arena, MappedSegment};

/// Bytes that are registered at a time: enough to cost 45 ms per GiB, as a single call for all bytes does.
/// Tests have many pieces in a small pool.
const PIECE: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

/// Pause before missing pages are checked again.
const AGAIN: Duration = if cfg!(test) {
    Duration::from_millis(1)
} else {
    Duration::from_secs(1)
};
/// Bytes of another process's pool that are entered into the page table at a time: meanwhile, threads of this
/// process that map memory wait.
const ENTERED: u64 = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// The memory that chunks are in.
#[derive(Debug)]
pub(super) enum HostPool {
    /// The pool of this process. Missing pages are made present here.
    Own(Arc<Arena>),
    /// The pool of another process, which makes its pages present itself.
    Mapped(Arc<MappedSegment>),
}

impl HostPool {
    fn base(&self) -> *mut u8 {
        match self {
            Self::Own(arena) => arena.base_ptr().as_ptr(),
            Self::Mapped(segment) => segment.base_ptr().as_ptr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Own(arena) => arena.len(),
            Self::Mapped(segment) => segment.len() as usize,
        }
    }

    /// Returns whether a part has its pages; `None` if it will not get them.
    fn is_there(&self, start: u64, len: u64) -> Option<bool> {
        match self {
            Self::Own(arena) => arena.ensure(start, len).ok().map(|()| true),
            Self::Mapped(segment) => {
                for part in (start..start + len).step_by(ENTERED as usize) {
                    let end = (part + ENTERED).min(start + len);
                    if !segment.enter_pages(part..end).ok()? {
                        return Some(false);
                    }
                }
                Some(true)
            }
        }
    }
}

/// A pool that a thread registers. Unregistered on drop.
#[derive(Debug)]
pub(super) struct Pinned {
    shared: Arc<Registration>,
    thread: Option<JoinHandle<()>>,
    /// Context of the registrations, which are valid in all other contexts while this one exists.
    context: Arc<Context>,
}

#[derive(Debug)]
struct Registration {
    pool: HostPool,
    /// Registered bytes, from the start of the pool.
    done: AtomicUsize,
    stopped: AtomicBool,
}

impl Pinned {
    /// Starts to register a pool, in this context and for all others. `failed` is called if a part cannot be
    /// registered; after that, no more parts are registered.
    pub(super) fn start(
        pool: HostPool,
        context: Arc<Context>,
        failed: impl FnOnce(CudaError) + Send + 'static,
    ) -> Self {
        let shared = Arc::new(Registration {
            pool,
            done: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        });
        let of_thread = (Arc::clone(&shared), Arc::clone(&context));
        let thread = thread::Builder::new()
            .name("lmc-gpu-pin".to_owned())
            .spawn(move || {
                let (shared, context) = of_thread;
                let registered = context.enter().and_then(|_entered| shared.register_all());
                if let Err(error) = registered {
                    failed(error);
                }
            });
        Self {
            shared,
            // Without the thread nothing is registered.
            thread: thread.ok(),
            context,
        }
    }

    /// Returns how many of these bytes are either all unregistered, or all registered by one call. The driver
    /// cannot copy a range that is registered in part, or by two calls. `None` if the bytes are outside the
    /// pool.
    pub(super) fn alike(&self, base: *const u8, len: usize) -> Option<usize> {
        let pool = &self.shared.pool;
        let at = base.addr().checked_sub(pool.base().addr())?;
        (at < pool.len()).then(|| len.min(PIECE - at % PIECE))
    }

    /// Returns the bytes that are registered.
    pub(super) fn done(&self) -> usize {
        self.shared.done.load(Ordering::Acquire)
    }
}

impl Registration {
    fn register_all(&self) -> Result<()> {
        let len = self.pool.len();
        for start in (0..len).step_by(PIECE) {
            let piece = PIECE.min(len - start);
            if !self.wait_for(start, piece) {
                return Ok(());
            }
            let base = self.pool.base().wrapping_add(start);
            // SAFETY: the pool stays mapped for as long as this value holds it, and `Pinned::drop`
            // unregisters every piece before.
            unsafe { driver::register(base, piece) }?;
            self.done.store(start + piece, Ordering::Release);
        }
        Ok(())
    }

    /// Waits until a piece has its pages. Returns false if it will not get them, or if the registration is to
    /// stop.
    fn wait_for(&self, start: usize, len: usize) -> bool {
        loop {
            let is_there = self.pool.is_there(start as u64, len as u64);
            if self.stopped.load(Ordering::Relaxed) {
                return false;
            }
            if let Some(true) | None = is_there {
                return is_there.is_some();
            }
            thread::park_timeout(AGAIN);
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does not panic.
            let _ = thread.join();
        }
        // If no context can be entered, the driver is unusable.
        let _entered = self.context.enter();
        for start in (0..self.done()).step_by(PIECE) {
            driver::unregister(self.shared.pool.base().wrapping_add(start));
        }
    }
}
