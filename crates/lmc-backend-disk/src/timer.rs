//! A timer thread for futures that need no runtime.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// An operation with a deadline.
pub(crate) trait Expire: Send + Sync {
    /// Called when the deadline has passed. Must not wait for anything.
    fn expire(&self);
}

pub(crate) struct Timer {
    shared: Arc<DeadlineQueue>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct DeadlineQueue {
    state: Mutex<Deadlines>,
    wake: Condvar,
}

#[derive(Default)]
struct Deadlines {
    /// Watched operations by deadline; the number distinguishes operations with the same deadline.
    watched: BTreeMap<(Instant, u64), Weak<dyn Expire>>,
    number: u64,
    stopped: bool,
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer").finish_non_exhaustive()
    }
}

impl Timer {
    pub(crate) fn start() -> io::Result<Self> {
        let shared = Arc::<DeadlineQueue>::default();
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("lmc-disk-timer".to_owned())
            .spawn(move || run(&for_thread))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Calls [`Expire::expire`] at the deadline if the operation still exists.
    pub(crate) fn watch(&self, deadline: Instant, what: Weak<dyn Expire>) {
        let mut state = self.shared.state.lock();
        state.number += 1;
        let number = state.number;
        let first = state.watched.first_key_value();
        let is_first = first.is_none_or(|(&(first, _), _)| deadline < first);
        state.watched.insert((deadline, number), what);
        if is_first {
            self.shared.wake.notify_one();
        }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.shared.state.lock().stopped = true;
        self.shared.wake.notify_one();
        if let Some(thread) = self.thread.take() {
            let itself = thread.thread().id() == thread::current().id();
            if !itself {
                let _ = thread.join();
            }
        }
    }
}

/// Joins a thread until the deadline, and returns its result. Returns `None` if the thread panicked or is
/// still running then; a running thread is detached. May be called from that thread itself (by a waker): then
/// the thread is detached at once.
pub(crate) fn join_before<T>(thread: JoinHandle<T>, deadline: Instant) -> Option<T> {
    while !thread.is_finished() {
        if Instant::now() >= deadline || thread.thread().id() == thread::current().id() {
            return None;
        }
        thread::sleep(Duration::from_millis(1));
    }
    thread.join().ok()
}

fn run(shared: &DeadlineQueue) {
    let mut state = shared.state.lock();
    while !state.stopped {
        let Some(first) = state.watched.first_entry() else {
            shared.wake.wait(&mut state);
            continue;
        };
        let &(deadline, _) = first.key();
        if Instant::now() < deadline {
            shared.wake.wait_until(&mut state, deadline);
            continue;
        }
        let due = first.remove();
        drop(state);
        if let Some(what) = due.upgrade() {
            what.expire();
        }
        state = shared.state.lock();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// Drops the last handle of the timer when its time is up, as a waker may.
    struct Last(Mutex<Option<Timer>>, mpsc::Sender<()>);

    impl Expire for Last {
        fn expire(&self) {
            drop(self.0.lock().take());
            self.1.send(()).expect("the test waits");
        }
    }

    #[test]
    fn a_timer_may_be_dropped_on_its_own_thread() {
        let timer = Timer::start().expect("a thread");
        let (sender, dropped) = mpsc::channel();
        let last = Arc::new(Last(Mutex::new(None), sender));
        let what = Arc::downgrade(&last) as Weak<dyn Expire>;
        {
            let mut held = last.0.lock();
            timer.watch(Instant::now(), what);
            *held = Some(timer);
        }
        let dropped = dropped.recv_timeout(lmc_testkit::DEADLINE);
        dropped.expect("the drop did not panic");
    }
}
