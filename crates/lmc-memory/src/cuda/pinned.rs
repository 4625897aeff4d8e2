//! The pool's memory, registered with the GPUs in the background, from its first byte on. Bytes that
//! are not registered yet are copied all the same, at a fifth of the rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use super::driver::{self, Context};
use crate::Arena;

/// Bytes that are registered at a time: long enough to cost 45 ms a GiB, as one call for all does.
/// Tests have many pieces in a small pool.
const PIECE: usize = if cfg!(test) { 16 << 10 } else { 256 << 20 };

/// An arena that is registered by a thread, and unregistered on drop.
#[derive(Debug)]
pub(super) struct Pinned {
    shared: Arc<Registration>,
    thread: Option<JoinHandle<()>>,
    /// Context of the registrations, which are good in all other contexts while this one lives.
    context: Arc<Context>,
}

#[derive(Debug)]
struct Registration {
    arena: Arc<Arena>,
    /// Bytes from the start of the arena that are registered.
    done: AtomicUsize,
    stopped: AtomicBool,
}

impl Pinned {
    /// Begins to register an arena, in this context and for all others.
    pub(super) fn start(arena: Arc<Arena>, context: Arc<Context>) -> Self {
        let shared = Arc::new(Registration {
            arena,
            done: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
        });
        let of_thread = (Arc::clone(&shared), Arc::clone(&context));
        let thread = thread::Builder::new()
            .name("lmc-gpu-pin".to_owned())
            .spawn(move || {
                let (shared, context) = of_thread;
                if context.bind().is_ok() {
                    shared.register_all();
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
    /// that is registered in part, or by two calls.
    pub(super) fn alike(&self, base: *const u8, len: usize) -> usize {
        let arena = &self.shared.arena;
        let (start, base) = (arena.base_ptr().as_ptr().addr(), base.addr());
        let end = start + arena.len();
        if base < start || base >= end {
            // Not a chunk of the pool: such a buffer lies outside of the pool as a whole.
            return len;
        }
        len.min(PIECE - (base - start) % PIECE)
    }

    /// Bytes that are registered.
    pub(super) fn done(&self) -> usize {
        self.shared.done.load(Ordering::Acquire)
    }
}

impl Registration {
    fn register_all(&self) {
        let len = self.arena.len();
        for start in (0..len).step_by(PIECE) {
            let piece = PIECE.min(len - start);
            let is_there = self.arena.ensure(start as u64, piece as u64).is_ok();
            if self.stopped.load(Ordering::Relaxed) || !is_there {
                return;
            }
            let base = self.arena.base_ptr().as_ptr().wrapping_add(start);
            // SAFETY: the arena stays mapped for as long as this value holds it, and `Pinned::drop`
            // unregisters every piece before.
            if unsafe { driver::register(base, piece) }.is_err() {
                return;
            }
            self.done.store(start + piece, Ordering::Release);
        }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread does nothing that panics.
            let _ = thread.join();
        }
        // Where no context can be bound, the driver is beyond use.
        let _ = self.context.bind();
        for start in (0..self.done()).step_by(PIECE) {
            driver::unregister(self.shared.arena.base_ptr().as_ptr().wrapping_add(start));
        }
    }
}
