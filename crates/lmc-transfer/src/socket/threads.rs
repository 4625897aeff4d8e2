//! The threads that move bytes. A stream stays on one thread, with its tasks and its reactor, so
//! its state stays in one core's cache, and no thread wakes to look for work of another thread.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use tokio::sync::watch;

#[derive(Debug)]
pub(super) struct Threads {
    handles: Vec<Handle>,
    /// The thread of the next connection's first stream.
    next: AtomicUsize,
    stop: watch::Sender<bool>,
    running: watch::Sender<usize>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Threads {
    /// Starts threads with the nice value of this thread plus `nice`.
    pub(super) fn start(count: usize, nice: u8) -> io::Result<Self> {
        let mut threads = Self {
            handles: Vec::with_capacity(count),
            next: AtomicUsize::new(0),
            stop: watch::Sender::new(false),
            running: watch::Sender::new(0),
            threads: Mutex::default(),
        };
        for _ in 0..count {
            threads.add(nice)?;
        }
        Ok(threads)
    }

    fn add(&mut self, nice: u8) -> io::Result<()> {
        let (begun, begins) = mpsc::channel();
        let running = Running::new(&self.running);
        let mut stop = self.stop.subscribe();
        let run = move || {
            let _running = running;
            // Changes this thread only; the system refuses only lower values.
            let _ = rustix::process::nice(nice.into());
            let runtime = Builder::new_current_thread()
                .enable_io()
                .enable_time()
                .build();
            match runtime {
                Ok(runtime) => {
                    let _ = begun.send(Ok(runtime.handle().clone()));
                    // An error means that the last owner is gone, which ends the thread, too.
                    let _ = runtime.block_on(stop.wait_for(|stop| *stop));
                    // The thread's tasks end here; a task that runs foreign code is waited for.
                }
                Err(error) => drop(begun.send(Err(error))),
            }
        };
        let thread = thread::Builder::new().name("lmc-socket".into()).spawn(run);
        self.threads.get_mut().push(thread?);
        let ended = |_| io::Error::other("a thread ended at once");
        self.handles.push(begins.recv().map_err(ended)??);
        Ok(())
    }

    /// The thread that has the listener and the handshakes, in addition to its share of streams.
    pub(super) fn first(&self) -> &Handle {
        &self.handles[0]
    }

    /// Returns a thread for each stream of a connection. The next connection begins with another
    /// thread.
    pub(super) fn for_streams(&self, streams: usize) -> impl Iterator<Item = &Handle> {
        let first = self.next.fetch_add(1, Ordering::Relaxed) % self.handles.len();
        self.handles.iter().cycle().skip(first).take(streams)
    }

    /// Asks all threads to end, and does not wait.
    pub(super) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until all have ended.
    pub(super) async fn ended(&self) {
        let mut running = self.running.subscribe();
        let _ = running.wait_for(|running| *running == 0).await;
        let threads = std::mem::take(&mut *self.threads.lock());
        // They have nothing left to do. The waiting future may be polled by one of them, through a
        // waker.
        let own = thread::current().id();
        for thread in threads.into_iter().filter(|t| t.thread().id() != own) {
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use tokio::runtime::Id;

    use super::*;
    use crate::block_on;

    fn homes(threads: &Threads, streams: usize) -> Vec<Id> {
        threads.for_streams(streams).map(Handle::id).collect()
    }

    #[test]
    fn streams_and_the_first_of_each_connection_go_round_all_threads() {
        for count in [1, 2, 3, 4] {
            let threads = Threads::start(count, 0).expect("threads");
            for streams in [1, 4] {
                let connections: Vec<_> = (0..count).map(|_| homes(&threads, streams)).collect();
                let firsts: HashSet<_> = connections.iter().map(|homes| homes[0]).collect();
                assert_eq!(firsts.len(), count, "{streams} streams");
                for homes in connections {
                    assert_eq!(homes.len(), streams);
                    let all: HashSet<_> = homes.into_iter().collect();
                    assert_eq!(all.len(), streams.min(count));
                }
            }
        }
    }

    #[test]
    fn they_alone_are_nicer() {
        let nice = || rustix::process::getpriority_process(None).expect("its own nice value");
        let (ours, threads) = (nice(), Threads::start(2, 3).expect("threads"));
        for home in threads.for_streams(2) {
            let (answer, answers) = mpsc::channel();
            home.spawn(async move { answer.send(nice()) });
            assert_eq!(answers.recv().ok(), Some((ours + 3).min(19)));
        }
        assert_eq!(nice(), ours);
    }

    #[test]
    fn their_end_waits_for_foreign_code_and_can_be_given_up() {
        let threads = Threads::start(2, 0).expect("threads");
        let (go, gone) = mpsc::channel::<()>();
        let foreign = threads.first().spawn_blocking(move || gone.recv());
        threads.stop();
        let soon = async { tokio::time::timeout(Duration::from_millis(50), threads.ended()).await };
        let runtime = Builder::new_current_thread().enable_time().build();
        assert!(runtime.expect("a runtime").block_on(soon).is_err());
        go.send(()).expect("it waits for this");
        block_on(threads.ended());
        assert!(threads.threads.lock().is_empty());
        drop(foreign);
        // Once more, by another who closes.
        block_on(threads.ended());
    }

    #[test]
    fn they_may_be_dropped_where_a_runtime_runs() {
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        let mut running = runtime.block_on(async {
            let threads = Threads::start(2, 0).expect("threads");
            threads.running.subscribe()
        });
        // An error says that the last of them took the other end with it.
        let _ = block_on(running.wait_for(|running| *running == 0));
        assert_eq!(*running.borrow(), 0);
    }
}
