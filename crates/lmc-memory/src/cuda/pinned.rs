//! The pool's memory, registered with the GPUs in the background, from its first byte on. Bytes that
//! are not registered yet are copied all the same, at a fifth of the rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::driver::{self, Context, CudaError, Result};
use crate::{Arena, MappedSegment};

/// Bytes that are registered at a time: long enough to cost 45 ms a GiB, as one call for all does.
/// Tests have many pieces in a small pool.
const PIECE: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

/// Pause before pages that are not there yet are looked for again.
const AGAIN: Duration = if cfg!(test) {
    Duration::from_millis(1)
} else {
    Duration::from_secs(1)
};
/// Bytes of another process's pool that are entered into the page table at a time: threads of this
/// process that map memory wait meanwhile.
const ENTERED: u64 = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// Memory that chunks lie in.
#[derive(Debug)]
pub(super) enum HostPool {
    /// The pool of this process, which gets its pages where it has none yet.
    Own(Arc<Arena>),
    /// The pool of another process, which gets the pages by itself.
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

    /// Returns true if a part has its pages; `None` if it gets none.
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

/// A pool that is registered by a thread, and unregistered on drop.
#[derive(Debug)]
pub(super) struct Pinned {
    shared: Arc<Registration>,
    thread: Option<JoinHandle<()>>,
    /// Context of the registrations, which are good in all other contexts while this one lives.
    context: Arc<Context>,
}

#[derive(Debug)]
struct Registration {
    pool: HostPool,
    /// Bytes from the start of the pool that are registered.
    done: AtomicUsize,
    stopped: AtomicBool,
}

impl Pinned {
    /// Begins to register a pool, in this context and for all others. `failed` is called if a part
    /// cannot be registered, after which no more is.
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

    /// Returns how many of these bytes are registered, or not, by one call: the driver copies no range
    /// that is registered in part, or by two calls. `None`: they lie outside of the pool.
    pub(super) fn alike(&self, base: *const u8, len: usize) -> Option<usize> {
        let pool = &self.shared.pool;
        let at = base.addr().checked_sub(pool.base().addr())?;
        (at < pool.len()).then(|| len.min(PIECE - at % PIECE))
    }

    /// Bytes that are registered.
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

    /// Waits until a piece has its pages. Returns false if it does not get them, or nothing is to be
    /// registered any more.
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
            // The thread does nothing that panics.
            let _ = thread.join();
        }
        // Where no context can be entered, the driver is beyond use.
        let _entered = self.context.enter();
        for start in (0..self.done()).step_by(PIECE) {
            driver::unregister(self.shared.pool.base().wrapping_add(start));
        }
    }
}
