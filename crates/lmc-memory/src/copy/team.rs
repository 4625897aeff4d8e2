//! A team of threads that share the steps of a loop with the calling thread.

use std::collections::VecDeque;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex};

use super::cpu;

/// The body of a loop, borrowed from the calling thread.
type Body<'a> = dyn Fn(usize) + Sync + 'a;

/// One loop in progress.
struct Loop {
    /// Called only between joining (under the team's lock, while the loop is in the queue) and leaving. The
    /// calling thread removes the loop from the queue and waits until all threads have left it before the
    /// body's real lifetime ends.
    body: &'static Body<'static>,
    steps: usize,
    /// Core of the calling thread, at the time of the call.
    core: usize,
    next: AtomicUsize,
    panicked: AtomicBool,
    helpers: Mutex<usize>,
    left: Condvar,
}

impl Loop {
    fn work(&self) {
        loop {
            let step = self.next.fetch_add(1, Ordering::Relaxed);
            if step >= self.steps {
                return;
            }
            (self.body)(step);
        }
    }
}

#[derive(Default)]
struct LoopQueue {
    queue: Mutex<QueuedLoops>,
    arrived: Condvar,
}

#[derive(Default)]
struct QueuedLoops {
    loops: VecDeque<Arc<Loop>>,
    closed: bool,
}

/// Threads named `{prefix}-{i}`, joined on drop.
pub(super) struct Team {
    shared: Arc<LoopQueue>,
    threads: Vec<JoinHandle<()>>,
}

impl Team {
    pub(super) fn new(prefix: &str, threads: usize) -> io::Result<Self> {
        let mut this = Self {
            shared: Arc::default(),
            threads: Vec::with_capacity(threads),
        };
        for i in 0..threads {
            let shared = Arc::clone(&this.shared);
            let thread = thread::Builder::new()
                .name(format!("{prefix}-{i}"))
                .spawn(move || help(&shared))?;
            this.threads.push(thread);
        }
        Ok(this)
    }

    pub(super) fn threads(&self) -> usize {
        self.threads.len()
    }

    /// Calls `body` once for each step, on this thread and on the free threads of the team. Returns when all
    /// steps are done.
    pub(super) fn run(&self, steps: usize, body: &Body<'_>) {
        if steps <= 1 || self.threads.is_empty() {
            (0..steps).for_each(body);
            return;
        }
        // SAFETY: `Leave` keeps this function from returning or unwinding before the loop is
        // out of the queue and every helper has left it, so no call outlives the borrow.
        let body = unsafe { std::mem::transmute::<&Body<'_>, &'static Body<'static>>(body) };
        let work = Arc::new(Loop {
            body,
            steps,
            core: cpu::current(),
            next: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            helpers: Mutex::new(0),
            left: Condvar::new(),
        });
        {
            let leave = Leave {
                shared: &self.shared,
                work: &work,
            };
            self.shared.queue.lock().loops.push_back(Arc::clone(&work));
            for _ in 0..self.threads.len().min(steps - 1) {
                self.shared.arrived.notify_one();
            }
            work.work();
            drop(leave);
        }
        assert!(
            !work.panicked.load(Ordering::Relaxed),
            "a helper thread panicked"
        );
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.queue.lock().closed = true;
        self.shared.arrived.notify_all();
        for thread in self.threads.drain(..) {
            // A helper catches the panics of loop bodies, so none is passed on here.
            let _ = thread.join();
        }
    }
}

/// Ends a loop for the calling thread, whether it returns or unwinds.
struct Leave<'a> {
    shared: &'a LoopQueue,
    work: &'a Arc<Loop>,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        // After an unwinding, no further steps begin.
        self.work.next.store(self.work.steps, Ordering::Relaxed);
        self.shared
            .queue
            .lock()
            .loops
            .retain(|work| !Arc::ptr_eq(work, self.work));
        let mut helpers = self.work.helpers.lock();
        while *helpers > 0 {
            self.work.left.wait(&mut helpers);
        }
    }
}

/// Loop of each thread of the team: joins the oldest loop that has steps left.
fn help(shared: &LoopQueue) {
    let mut queue = shared.queue.lock();
    loop {
        let free = |work: &&Arc<Loop>| work.next.load(Ordering::Relaxed) < work.steps;
        let Some(work) = queue.loops.iter().find(free).cloned() else {
            if queue.closed {
                return;
            }
            shared.arrived.wait(&mut queue);
            continue;
        };
        *work.helpers.lock() += 1;
        drop(queue);
        cpu::leave(work.core);
        if panic::catch_unwind(AssertUnwindSafe(|| work.work())).is_err() {
            work.panicked.store(true, Ordering::Relaxed);
        }
        {
            let mut helpers = work.helpers.lock();
            *helpers -= 1;
            work.left.notify_one();
        }
        queue = shared.queue.lock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_step_is_done_once_whatever_the_number_of_threads() {
        for threads in [0, 1, 3] {
            let team = Team::new("lmc-test", threads).unwrap();
            for steps in [0, 1, 2, 100] {
                let counts: Vec<_> = (0..steps).map(|_| AtomicUsize::new(0)).collect();
                team.run(steps, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts
                        .iter()
                        .all(|count| count.load(Ordering::Relaxed) == 1)
                );
            }
        }
    }

    #[test]
    fn several_callers_share_a_team() {
        let team = Team::new("lmc-test", 2).unwrap();
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..if cfg!(miri) { 3 } else { 200 } {
                        team.run(7, &|i| {
                            total.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        let rounds = if cfg!(miri) { 3 } else { 200 };
        assert_eq!(total.into_inner(), 4 * rounds * 21);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let team = Team::new("lmc-test", 2).unwrap();
        let result = panic::catch_unwind(AssertUnwindSafe(|| {
            team.run(50, &|i| assert!(i != 20, "step 20"));
        }));
        assert!(result.is_err());
        let count = AtomicUsize::new(0);
        team.run(50, &|_| {
            count.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(count.into_inner(), 50);
    }
}
