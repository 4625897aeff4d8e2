//! The threads that move bytes. What a stream needs stays on one of them: its tasks, and who
//! watches its socket. So its state stays in one core's cache, and no thread is woken to look for
//! work that another has in hand.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::watch;

#[derive(Debug)]
pub(super) struct Threads {
    handles: Vec<Handle>,
    /// Where the next connection's first stream goes.
    next: AtomicUsize,
    stop: watch::Sender<bool>,
    running: watch::Sender<usize>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    pub(super) fn start(count: usize) -> io::Result<Self> {
        let mut threads = Self {
            handles: Vec::with_capacity(count),
            next: AtomicUsize::new(0),
            stop: watch::Sender::new(false),
            running: watch::Sender::new(0),
            threads: Mutex::default(),
        };
        for _ in 0..count {
            threads.add()?;
        }
        Ok(threads)
    }

    fn add(&mut self) -> io::Result<()> {
        let runtime = Builder::new_current_thread()
            .thread_name("lmc-socket")
            .enable_io()
            .enable_time()
            .build()?;
        self.handles.push(runtime.handle().clone());
        let running = Running::new(&self.running);
        let mut stop = self.stop.subscribe();
        let run = move || {
            let _running = running;
            // The other end goes with the last owner.
            let _ = runtime.block_on(stop.wait_for(|stop| *stop));
            // Its tasks end here, and what of them runs foreign code is waited for.
            drop::<Runtime>(runtime);
        };
        let thread = thread::Builder::new().name("lmc-socket".into()).spawn(run);
        self.threads.get_mut().push(thread?);
        Ok(())
    }

    /// The one for what is no stream's.
    pub(super) fn first(&self) -> &Handle {
        &self.handles[0]
    }

    /// One for each stream of a connection, in turn.
    pub(super) fn take(&self, streams: usize) -> impl Iterator<Item = &Handle> {
        let first = self.next.fetch_add(streams, Ordering::Relaxed) % self.handles.len();
        self.handles.iter().cycle().skip(first).take(streams)
    }

    /// Has all end, and waits for none.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until all have ended.
    pub(super) async fn ended(&self) {
        let mut running = self.running.subscribe();
        let _ = running.wait_for(|running| *running == 0).await;
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // It has nothing left to do.
            let _ = thread.join();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Counts a thread for as long as it runs.
struct Running(watch::Sender<usize>);

impl Running {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|running| *running += 1);
        Self(count.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.send_modify(|running| *running -= 1);
    }
}
