//! An executor for one future, by which a thread without a runtime calls a channel. It yields
//! before it parks, as a small transfer is done by then; executors of tests do not.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// Runs a future of a channel on this thread until it is done. Not for threads of a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let woken = Arc::new(Woken {
        thread: thread::current(),
        woken: AtomicBool::new(false),
    });
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => woken.wait(),
        }
    }
}

/// Time that a waiting thread yields before it parks: a small transfer is done by then, and waking
/// a thread takes as long as that transfer.
const AWAKE: Duration = Duration::from_micros(50);

/// Time within which a yield returns, unless another thread computes on the core.
const BACK: Duration = Duration::from_micros(200);
/// Time for which a thread parks instead of yielding, after a yield that took longer.
const CROWDED: Duration = Duration::from_millis(100);

thread_local! {
    /// Instant until which this thread does not yield.
    static CROWDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Yields the core once. Returns `false` if this or a recent yield took longer than [`BACK`]: the
/// caller should then park, because yielding to a thread that computes costs a scheduler tick
/// (4 ms), while a parked thread is woken within microseconds.
pub(crate) fn yield_briefly() -> bool {
    let begun = Instant::now();
    if CROWDED_UNTIL.get().is_some_and(|end| begun < end) {
        return false;
    }
    thread::yield_now();
    let back = begun.elapsed() < BACK;
    CROWDED_UNTIL.set((!back).then(|| Instant::now() + CROWDED));
    back
}

/// Wakes a thread that runs a future.
struct Woken {
    thread: Thread,
    woken: AtomicBool,
}

impl Woken {
    fn wait(&self) {
        let begun = Instant::now();
        while !self.woken.swap(false, Ordering::AcqRel) {
            if begun.elapsed() >= AWAKE || !yield_briefly() {
                thread::park();
            }
        }
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small write took a tick of the scheduler (4 ms), or two, where threads yielded on cores on
    /// which others computed.
    #[test]
    fn a_thread_does_not_yield_to_one_that_computes() {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let deadline = Instant::now() + Duration::from_secs(20);
            let mut back = yield_briefly();
            while back && Instant::now() < deadline {
                back = yield_briefly();
            }
            over.store(true, Ordering::Relaxed);
            assert!(!back, "every yield returned at once");
        });
    }
}
