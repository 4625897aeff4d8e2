//! Work that copies, and the named threads that do it.

use std::io;
use std::sync::Arc;
use std::sync::mpsc;

use parking_lot::Mutex;

use crate::protocol::Reply;

/// Work whose answer comes later.
pub(crate) struct Job(Box<dyn FnOnce() -> Reply + Send>);

impl Job {
    pub(crate) fn new(work: impl FnOnce() -> Reply + Send + 'static) -> Self {
        Self(Box::new(work))
    }

    pub(crate) fn run(self) -> Reply {
        (self.0)()
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Threads `lmc-transfer-{i}` that run jobs in the order in which they came.
///
/// They end when the last handle goes. The queue is bounded by what connections may have in
/// flight.
#[derive(Debug)]
pub(crate) struct Workers {
    queue: mpsc::Sender<Work>,
}

impl Workers {
    pub(crate) fn start(threads: usize) -> io::Result<Self> {
        let (queue, work) = mpsc::channel::<Work>();
        let work = Arc::new(Mutex::new(work));
        for index in 0..threads.max(1) {
            let work = Arc::clone(&work);
            std::thread::Builder::new()
                .name(format!("lmc-transfer-{index}"))
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
