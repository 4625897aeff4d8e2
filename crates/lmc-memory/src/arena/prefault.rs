//! Making pages present in the background.

use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use super::PrefaultProgress;
use super::backing::Backing;

/// Bytes that a thread takes at a time: some ten milliseconds, which bounds how long a drop
/// waits, and a multiple of every page size.
const PIECE: u64 = 32 << 20;

/// What the threads share.
#[derive(Debug)]
struct Work {
    backing: Arc<Backing>,
    next: AtomicU64,
    done: AtomicU64,
    stop: AtomicBool,
    error: Mutex<Option<String>>,
}

/// Threads that walk an arena. Stopped and joined on drop.
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
        self.work.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A panic there has been printed; the arena is usable without the prefault.
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
            if let Err(error) = self.backing.make_present(start, len) {
                self.stop.store(true, Ordering::Relaxed);
                let mut first = self.error.lock();
                first.get_or_insert_with(|| explain(&error));
                return;
            }
            self.done.fetch_add(len, Ordering::Relaxed);
        }
    }
}

/// Names the remedy of the failures that an operator can do something about.
fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => format!(
            "/dev/shm ran full while the pool was being prefaulted ({error}): something else \
             fills it; enlarge it or make the pool smaller, since touching the rest would kill \
             this process and its clients"
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
        _ => format!("prefault stopped: {error}"),
    }
}
