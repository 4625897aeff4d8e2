//! Deadlines of calls, on a thread of their own: the caller's executor may poll a call's future
//! after the channel's runtime has ended.

use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// A thread that wakes futures at their deadlines.
#[derive(Debug)]
pub(crate) struct Timer {
    queue: Arc<AlarmQueue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct AlarmQueue {
    state: Mutex<PendingAlarms>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PendingAlarms {
    waiting: BTreeMap<(Instant, u64), Waker>,
    next: u64,
    /// Instant at which the thread wakes next.
    wakes_at: Option<Instant>,
    stopped: bool,
}

impl Timer {
    pub(crate) fn start() -> io::Result<Self> {
        let queue = Arc::new(AlarmQueue::default());
        let thread = {
            let queue = Arc::clone(&queue);
            let builder = thread::Builder::new().name("lmc-timer".into());
            builder.spawn(move || queue.run())?
        };
        Ok(Self {
            queue,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns a future that is ready at `deadline`.
    pub(crate) fn at(&self, deadline: Instant) -> Alarm {
        Alarm {
            queue: Arc::clone(&self.queue),
            deadline,
            key: None,
        }
    }

    /// Ends the thread, and wakes every alarm once more.
    pub(crate) fn stop(&self) {
        let woken = {
            let mut state = self.queue.state.lock();
            state.stopped = true;
            std::mem::take(&mut state.waiting)
        };
        self.queue.changed.notify_all();
        woken.into_values().for_each(Waker::wake);
        let thread = self.thread.lock().take();
        // This thread itself may drop the last owner, through a waker.
        if let Some(thread) = thread.filter(|t| t.thread().id() != thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl AlarmQueue {
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.stopped {
            let now = Instant::now();
            let first = state.waiting.first_key_value().map(|(&(at, _), _)| at);
            state.wakes_at = first;
            match first {
                None => self.changed.wait(&mut state),
                Some(at) if at > now => {
                    self.changed.wait_until(&mut state, at);
                }
                Some(_) => {
                    let due = state.waiting.pop_first();
                    parking_lot::MutexGuard::unlocked(&mut state, || {
                        if let Some((_, waker)) = due {
                            waker.wake();
                        }
                    });
                }
            }
        }
    }
}

/// A future that is ready at its deadline.
#[derive(Debug)]
pub(crate) struct Alarm {
    queue: Arc<AlarmQueue>,
    deadline: Instant,
    key: Option<u64>,
}

impl Future for Alarm {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if Instant::now() >= this.deadline {
            return Poll::Ready(());
        }
        let waker = context.waker().clone();
        let (old, early) = {
            let mut state = this.queue.state.lock();
            if state.stopped {
                return Poll::Pending;
            }
            let key = *this.key.get_or_insert_with(|| {
                state.next += 1;
                state.next
            });
            let key = (this.deadline, key);
            let old = state.waiting.insert(key, waker);
            // Waking the thread costs as much as a small transfer.
            (old, state.wakes_at.is_none_or(|at| this.deadline < at))
        };
        drop(old);
        if early {
            this.queue.changed.notify_one();
        }
        Poll::Pending
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            let waker = self
                .queue
                .state
                .lock()
                .waiting
                .remove(&(self.deadline, key));
            drop(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::block_on;

    #[test]
    fn alarms_ring_in_any_order_of_setting() {
        let timer = Timer::start().expect("a thread");
        let start = Instant::now();
        for millis in [30, 10, 20, 0] {
            block_on(timer.at(start + Duration::from_millis(millis)));
            assert!(start.elapsed() >= Duration::from_millis(millis));
        }
        drop(timer.at(start + Duration::from_secs(3600)));
        assert!(timer.queue.state.lock().waiting.is_empty());
    }
}
