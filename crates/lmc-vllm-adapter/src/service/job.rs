//! Work that copies, and the named threads that do it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;

use parking_lot::Mutex;

use crate::protocol::Reply;

/// Which threads do a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Those that copy.
    Copy,
    /// One of its own, as a slow tier may hold it up for seconds.
    Clear,
}

/// Work whose answer comes later.
pub(crate) struct Job {
    pub(crate) lane: Lane,
    work: Box<dyn FnOnce() -> Reply + Send>,
}

impl Job {
    pub(crate) fn new(lane: Lane, work: impl FnOnce() -> Reply + Send + 'static) -> Self {
        Self {
            lane,
            work: Box::new(work),
        }
    }

    pub(crate) fn run(self) -> Reply {
        (self.work)()
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads `{name}-{i}` that run jobs in the order in which they came.
///
/// They end when the last handle goes. The queue is bounded by what connections may have in
/// flight.
#[derive(Debug)]
pub(crate) struct Workers {
    queue: mpsc::Sender<Work>,
}

impl Workers {
    pub(crate) fn start(name: &str, threads: usize) -> io::Result<Self> {
        let (queue, work) = mpsc::channel::<Work>();
        let work = Arc::new(Mutex::new(work));
        for index in 0..threads.max(1) {
            let work = Arc::clone(&work);
            std::thread::Builder::new()
                .name(format!("{name}-{index}"))
                .spawn(move || {
                    loop {
                        // The lock is held while waiting: one idle thread waits for work, the
                        // others wait for their turn to.
                        let next = work.lock().recv();
                        let Ok(next) = next else { return };
                        next();
                    }
                })?;
        }
        Ok(Self { queue })
    }

    pub(crate) fn run(&self, work: Work) {
        // Threads live as long as the queue, so this fails only if they all panicked; then the
        // work is dropped and the client's own deadline ends its wait.
        let _ = self.queue.send(work);
    }
}
