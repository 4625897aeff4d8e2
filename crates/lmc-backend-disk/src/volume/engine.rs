//! Code that the I/O engines share.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::FileId;
use super::task::{Task, stopped};

/// Time that a stop waits for operations in the kernel.
pub(super) const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// I/O engine that moves bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiskIo {
    /// Uses io_uring if the kernel allows it, otherwise threads.
    #[default]
    Auto,
    /// Uses io_uring, or fails to open.
    Uring,
    /// Uses threads with blocking calls.
    Threads,
}

/// Moves the bytes of tasks on threads of its own.
pub(super) trait Engine: fmt::Debug + Send + Sync {
    /// Starts tasks. Each task is ended on a thread of the engine, or, after the stop, by
    /// [`end_on_new_thread`].
    fn submit(&self, tasks: Vec<Task>);

    /// Announces that no more tasks of this file will come.
    fn forget(&self, file: FileId);

    /// Returns the name and the number of threads.
    fn name(&self) -> String;

    /// Returns further details that begin with a comma, or an empty text.
    fn details(&self) -> String;

    /// Stops the engine; waits for it unless called on a thread of the engine.
    fn stop(&self);
}

/// Ends tasks that came after the stop, on a new thread: a submitter may hold locks that the callbacks
/// take.
pub(super) fn end_on_new_thread(tasks: Vec<Task>) {
    if tasks.is_empty() {
        return;
    }
    // If no thread can be started, the tasks are dropped here, which ends them too.
    let _ = thread::Builder::new()
        .name("lmc-disk-ended".to_owned())
        .spawn(move || {
            for task in tasks {
                task.end(Err(stopped()));
            }
        });
}

/// Threads that can be joined with a deadline.
#[derive(Debug, Default)]
pub(super) struct ThreadGroup {
    left: Arc<(Mutex<usize>, Condvar)>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

/// Decrements the number of running threads when dropped, also after a panic.
struct CountOut(Arc<(Mutex<usize>, Condvar)>);

impl Drop for CountOut {
    fn drop(&mut self) {
        *self.0.0.lock() -= 1;
        self.0.1.notify_all();
    }
}

impl ThreadGroup {
    pub(super) fn spawn(
        &self,
        name: String,
        run: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        *self.left.0.lock() += 1;
        let count_out = CountOut(Arc::clone(&self.left));
        let handle = thread::Builder::new().name(name).spawn(move || {
            // Moved into the thread, and dropped after everything that `run` holds.
            let _count_out = count_out;
            run();
        })?;
        self.handles.lock().push(handle);
        Ok(())
    }

    /// Waits until all threads have ended; returns false if they have not ended in that time. If the caller
    /// is one of the threads, it does not wait for itself.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let me = thread::current().id();
        if self
            .handles
            .lock()
            .iter()
            .any(|handle| handle.thread().id() == me)
        {
            return true;
        }
        let until = Instant::now() + timeout;
        let mut left = self.left.0.lock();
        while *left > 0 {
            if self.left.1.wait_until(&mut left, until).timed_out() {
                return *left == 0;
            }
        }
        drop(left);
        let handles = std::mem::take(&mut *self.handles.lock());
        for handle in handles {
            // The panic was printed already, and the thread's tasks were ended by the unwinding.
            let _ = handle.join();
        }
        true
    }
}
