//! The background prefault: threads that make pages present.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use super::PrefaultProgress;
use super::backing::Backing;

/// Time between two attempts to get memory that is not available.
const RETRY: Duration = Duration::from_secs(1);

/// Bytes that a thread takes at a time: about ten milliseconds of work, which limits how long a drop waits,
/// and a multiple of every page size.
const PIECE: u64 = 32 << 20;

/// State that the prefault threads share.
#[derive(Debug)]
struct Work {
    backing: Arc<Backing>,
    next: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
    /// Reason why a thread waits for memory. The next field wakes the thread at the end.
    error: Mutex<Option<String>>,
    wake: Condvar,
}

/// The prefault threads of an arena. Stopped and joined on drop.
#[derive(Debug)]
pub(super) struct Prefaulter {
    work: Arc<Work>,
    threads: Vec<JoinHandle<()>>,
}

impl Prefaulter {
    /// Starts `threads` threads named `lmc-prefault-{i}`.
    pub(super) fn start(backing: Arc<Backing>, threads: usize) -> io::Result<Self> {
        let work = Arc::new(Work {
            backing,
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
            wake: Condvar::new(),
        });
        let mut this = Self {
            work: Arc::clone(&work),
            threads: Vec::with_capacity(threads),
        };
        for i in 0..threads {
            let work = Arc::clone(&work);
            let thread = thread::Builder::new()
                .name(format!("lmc-prefault-{i}"))
                .spawn(move || work.run())?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    pub(super) fn progress(&self) -> PrefaultProgress {
        PrefaultProgress {
            done: self.work.done.load(Ordering::Relaxed),
            total: self.work.total(),
            error: self.work.error.lock().clone(),
        }
    }
}

impl Drop for Prefaulter {
    fn drop(&mut self) {
        {
            let _waits = self.work.error.lock();
            self.work.stop.store(true, Ordering::Relaxed);
            self.work.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            // The panic was printed already; the arena is usable without the prefault.
            let _ = thread.join();
        }
    }
}

impl Work {
    fn total(&self) -> u64 {
        self.backing.len() as u64
    }

    fn run(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            let start = self.next.fetch_add(PIECE, Ordering::Relaxed);
            if start >= self.total() {
                return;
            }
            let len = PIECE.min(self.total() - start);
            while let Err(failure) = self.backing.make_present(start, len) {
                let mut error = self.error.lock();
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
                *error = Some(explain(&failure));
                self.wake.wait_for(&mut error, RETRY);
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
            *self.error.lock() = None;
            self.done.fetch_add(len, Ordering::Relaxed);
        }
    }
}

/// Describes a failure, with the remedy if an operator can do something about it.
pub(super) fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => format!(
            "/dev/shm is full ({error}), so a part of the pool cannot be used: free some of \
             it, enlarge it (mount -o remount,size=… /dev/shm), or make the pool smaller"
        ),
        Some(libc::ENOMEM | libc::EFAULT) => {
            let free = fs::read_to_string("/proc/meminfo")
                .ok()
                .and_then(|text| {
                    text.lines()
                        .find(|l| l.starts_with("MemAvailable"))
                        .map(str::to_owned)
                })
                .unwrap_or_default();
            format!("no memory left for the pool ({error}; {free}): make the pool smaller")
        }
        _ => format!(
            "a part of the pool cannot be used: {error}; make the pool smaller, and check the memory \
             (dmesg)"
        ),
    }
}
