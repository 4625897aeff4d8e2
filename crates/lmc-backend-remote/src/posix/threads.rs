//! Threads for blocking calls; their number is limited, however long a call hangs.

use std::collections::VecDeque;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

/// Most jobs that may wait.
const MAX_WAITING: usize = 4096;

/// Kinds of jobs. Jobs of an earlier lane begin first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Small reads and changes of names.
    Names,
    /// Reads of values.
    Reads,
    /// Writes of values.
    Writes,
}

const LANES: usize = 3;

/// The threads, which are started with the first jobs.
pub(super) struct Threads {
    shared: Arc<JobPool>,
}

struct JobPool {
    state: Mutex<JobLanes>,
    arrived: Condvar,
    /// Most threads that may work for each lane at a time.
    most: [usize; LANES],
}

#[derive(Default)]
struct JobLanes {
    waiting: [VecDeque<Box<dyn Job>>; LANES],
    working: [usize; LANES],
    threads: usize,
    idle: usize,
    is_closed: bool,
}

/// A waiting job.
trait Job: Send {
    /// Runs the job, unless its caller has taken the arguments back.
    fn run(self: Box<Self>);
    fn is_abandoned(&self) -> bool;
}

/// The result of a job.
#[derive(Debug)]
pub(super) enum JobOutcome<A, T> {
    /// The job is done.
    Done(T),
    /// The job had not begun by the deadline, and never will.
    Late(A),
    /// The job cannot begin: too many jobs wait, or the threads have ended.
    Refused(A, &'static str),
    /// The job is in progress, and keeps its arguments until it ends.
    Running,
}

struct Work<A, T, F> {
    arguments: Arc<Mutex<Option<A>>>,
    answer: oneshot::Sender<T>,
    run: F,
}

impl<A: Send, T: Send, F: FnOnce(A) -> T + Send> Job for Work<A, T, F> {
    fn run(self: Box<Self>) {
        let Self {
            arguments,
            answer,
            run,
        } = *self;
        let taken = arguments.lock().take();
        if let Some(arguments) = taken {
            // The caller may be gone.
            let _ = answer.send(run(arguments));
        }
    }

    fn is_abandoned(&self) -> bool {
        self.answer.is_closed() || self.arguments.lock().is_none()
    }
}

/// Takes the arguments of a job back if its caller is dropped before the job begins.
struct Arguments<A>(Arc<Mutex<Option<A>>>);

impl<A> Drop for Arguments<A> {
    fn drop(&mut self) {
        let left = self.0.lock().take();
        drop(left);
    }
}

impl Threads {
    /// Makes at most `threads` threads; two are reserved for small reads, and half do no writes.
    pub(super) fn new(threads: usize) -> Self {
        let threads = threads.max(4);
        let shared = JobPool {
            state: Mutex::default(),
            arrived: Condvar::new(),
            most: [threads, threads - 2, threads / 2],
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Runs a job. Dropping the future cancels a job that has not begun.
    pub(super) async fn run<A: Send + 'static, T: Send + 'static>(
        &self,
        lane: Lane,
        arguments: A,
        deadline: Instant,
        run: impl FnOnce(A) -> T + Send + 'static,
    ) -> JobOutcome<A, T> {
        let arguments = Arguments(Arc::new(Mutex::new(Some(arguments))));
        let (answer, answered) = oneshot::channel();
        let work = Work {
            arguments: Arc::clone(&arguments.0),
            answer,
            run,
        };
        if let Err(reason) = self.shared.push(lane, Box::new(work)) {
            let back = arguments.0.lock().take();
            return back.map_or(JobOutcome::Running, |back| {
                JobOutcome::Refused(back, reason)
            });
        }
        match tokio::time::timeout_at(deadline.into(), answered).await {
            Ok(Ok(done)) => JobOutcome::Done(done),
            Ok(Err(_)) | Err(_) => {
                let back = arguments.0.lock().take();
                back.map_or(JobOutcome::Running, JobOutcome::Late)
            }
        }
    }

    /// Ends the idle threads at once, and the others when their jobs end.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            std::mem::take(&mut state.waiting)
        };
        self.shared.arrived.notify_all();
        drop(waiting);
    }

    /// Returns the number of threads.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.shared.state.lock().threads
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.close();
    }
}

impl JobPool {
    fn push(self: &Arc<Self>, lane: Lane, job: Box<dyn Job>) -> Result<(), &'static str> {
        let mut state = self.state.lock();
        if state.is_closed {
            return Err("the store is closed");
        }
        let waiting = &mut state.waiting[lane as usize];
        if waiting.len() >= MAX_WAITING {
            waiting.retain(|job| !job.is_abandoned());
        }
        if waiting.len() >= MAX_WAITING {
            return Err("too many operations wait for the file system");
        }
        waiting.push_back(job);
        let most = self.most[Lane::Names as usize];
        // A thread that was woken for an earlier job still counts as idle.
        let jobs: usize = state.waiting.iter().map(VecDeque::len).sum();
        if state.idle < jobs && state.threads < most {
            let shared = Arc::clone(self);
            let named = thread::Builder::new().name("lmc-remote".to_owned());
            match named.spawn(move || shared.serve()) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => return Err("no thread can be started"),
                Err(_) => {}
            }
        }
        drop(state);
        self.arrived.notify_one();
        Ok(())
    }

    fn next(&self, state: &mut JobLanes) -> Option<(usize, Box<dyn Job>)> {
        let lane = (0..LANES).find(|&lane| {
            state.working[lane] < self.most[lane] && !state.waiting[lane].is_empty()
        })?;
        Some((lane, state.waiting[lane].pop_front()?))
    }

    fn serve(&self) {
        let mut state = self.state.lock();
        loop {
            while let Some((lane, job)) = self.next(&mut state) {
                state.working[lane] += 1;
                drop(state);
                // A job that panics drops its arguments, and its caller is answered that the job is in
                // progress.
                let _ = std::panic::catch_unwind(AssertUnwindSafe(|| job.run()));
                state = self.state.lock();
                state.working[lane] -= 1;
            }
            if state.is_closed {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            self.arrived.wait(&mut state);
            state.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Barrier, mpsc};
    use std::time::Duration;

    use futures_util::FutureExt;
    use futures_util::future::join_all;
    use lmc_testkit::{soon, until};

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_time().build().unwrap()
    }

    #[test]
    fn no_job_waits_behind_one_that_hangs_and_a_panic_costs_no_thread() {
        let runtime = runtime();
        for _ in 0..50 {
            let threads = Threads::new(4);
            for _ in 0..4 {
                let panics = threads.run(Lane::Reads, (), soon(), |()| panic!("on purpose"));
                assert!(matches!(runtime.block_on(panics), JobOutcome::Running));
            }
            // One thread is idle when two jobs come, each of which waits for the other.
            until("a thread is idle", || threads.shared.state.lock().idle > 0);
            let met = Arc::new(Barrier::new(2));
            let meet = || {
                let met = Arc::clone(&met);
                let meet = move |()| _ = met.wait();
                threads.run(Lane::Reads, (), soon(), meet)
            };
            let outcomes = runtime.block_on(join_all([meet(), meet()]));
            assert!(
                outcomes
                    .iter()
                    .all(|one| matches!(one, JobOutcome::Done(())))
            );
        }
    }

    #[test]
    fn calls_that_hang_hold_a_bounded_number_of_threads_and_end_at_their_deadline() {
        let threads = Threads::new(4);
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let hang = |lane| {
            let gate = Arc::clone(&gate);
            let deadline = Instant::now() + Duration::from_millis(50);
            let wait = move |n| {
                // Ends when the sender is dropped.
                let _ = gate.lock().recv();
                n
            };
            threads.run(lane, lane as usize, deadline, wait)
        };
        let runtime = runtime();
        let running = |outcomes: &[JobOutcome<usize, usize>]| {
            let running = outcomes
                .iter()
                .filter(|one| matches!(one, JobOutcome::Running));
            let late = outcomes
                .iter()
                .filter(|one| matches!(one, JobOutcome::Late(_)));
            (running.count(), late.count())
        };
        for lane in [Lane::Writes, Lane::Names] {
            let mut hanging = 0;
            until("two hang", || {
                hanging += running(&[runtime.block_on(hang(lane))]).0;
                hanging == 2
            });
            let outcomes = runtime.block_on(join_all((0..18).map(|_| hang(lane))));
            assert_eq!(
                running(&outcomes),
                (0, 18),
                "{lane:?} leave half of the threads alone"
            );
        }
        assert_eq!(threads.count(), 4);
        drop(go);
        let done = runtime.block_on(threads.run(Lane::Reads, 7, soon(), |n| n + 1));
        assert!(matches!(done, JobOutcome::Done(8)));
        threads.close();
        until("the threads end", || threads.count() == 0);
        let refused = runtime.block_on(threads.run(Lane::Reads, 7, soon(), |n| n + 1));
        assert!(matches!(refused, JobOutcome::Refused(7, _)));
    }

    #[test]
    fn jobs_that_were_left_are_not_kept() {
        let threads = Threads::new(4);
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let kept = Arc::new(());
        let runtime = runtime();
        for _ in 0..2 * MAX_WAITING {
            let (gate, kept) = (Arc::clone(&gate), Arc::clone(&kept));
            let wait = move |kept: Arc<()>| {
                let _ = gate.lock().recv();
                drop(kept);
            };
            // The caller leaves after one poll.
            let job = threads.run(Lane::Writes, kept, soon(), wait);
            let outcome = runtime.block_on(async { job.now_or_never() });
            assert!(outcome.is_none(), "refused");
        }
        assert!(
            Arc::strong_count(&kept) <= 3,
            "only those that run keep theirs"
        );
        drop(go);
    }
}
