//! Runs threads of a test in orders that a seed chooses, and gives crates the locks for it.
//!
//! A crate takes its `Mutex` from here in its unit tests and from `parking_lot` elsewhere. Inside
//! [`explore`], each lock is a point at which `shuttle` chooses the thread that runs next. Outside
//! it, the lock is that of `parking_lot`, so that ordinary tests of the same crate are unaffected.
//! A test that holds any other lock while it takes one of these may block for ever: all threads of
//! [`explore`] share one thread of the system.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::PoisonError;
use std::sync::atomic::{self, Ordering};

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
use shuttle::{Config, Runner};

/// Environment variable with the schedule that a failed test printed, to run that order again.
pub const SCHEDULE: &str = "LMC_SCHEDULE";

/// Preemptions at random points in runs by priority.
const PREEMPTIONS: usize = 3;
/// Bytes of a thread's stack. Code without optimization needs more than shuttle's default.
const STACK_BYTES: usize = 256 << 10;

/// Runs `body` under `schedules` different orders of its threads: half of them choose the thread at
/// random at each step, half of them use random priorities with few preemptions.
///
/// Threads are those of [`spawn`]. A panic, a deadlock and an endless loop fail the test, which
/// prints the order; `LMC_SCHEDULE=… cargo test NAME` repeats it.
///
/// # Panics
/// When `body` panics under one of the orders.
pub fn explore(schedules: usize, body: impl Fn() + Clone + Send + Sync + 'static) {
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        Runner::new(scheduler, config).run(body.clone());
    };
    if let Ok(schedule) = std::env::var(SCHEDULE) {
        run(Box::new(ReplayScheduler::new_from_encoded(&schedule)));
        return;
    }
    run(Box::new(RandomScheduler::new(schedules / 2)));
    run(Box::new(PctScheduler::new(PREEMPTIONS, schedules / 2)));
}

/// A thread inside of [`explore`].
pub use shuttle::thread::{JoinHandle, spawn, yield_now};

/// Waits for a future inside of [`explore`].
pub use shuttle::future::block_on;

/// Returns a number below `bound` that belongs to the order, so that it repeats with the order.
pub fn random_below(bound: usize) -> usize {
    thread_rng().gen_range(0..bound)
}

/// A lock with the interface of `parking_lot::Mutex`, which [`explore`] schedules.
pub enum Mutex<T> {
    /// Outside of [`explore`].
    Real(parking_lot::Mutex<T>),
    /// Inside of [`explore`].
    Scheduled(shuttle::sync::Mutex<T>),
}

/// The right to use the value of a [`Mutex`].
pub enum MutexGuard<'a, T> {
    /// Outside of [`explore`].
    Real(parking_lot::MutexGuard<'a, T>),
    /// Inside of [`explore`].
    Scheduled(shuttle::sync::MutexGuard<'a, T>),
}

impl<T> Mutex<T> {
    /// Makes a lock, which is scheduled when it is made inside of [`explore`].
    pub fn new(value: T) -> Self {
        match shuttle::current::try_get_current_task() {
            None => Self::Real(parking_lot::Mutex::new(value)),
            Some(_) => Self::Scheduled(shuttle::sync::Mutex::new(value)),
        }
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        match self {
            Self::Real(mutex) => MutexGuard::Real(mutex.lock()),
            Self::Scheduled(mutex) => {
                let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
                MutexGuard::Scheduled(guard)
            }
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mutex").finish_non_exhaustive()
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::Real(guard) => guard,
            Self::Scheduled(guard) => guard,
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::Real(guard) => guard,
            Self::Scheduled(guard) => guard,
        }
    }
}

/// A count with the interface of `std::sync::atomic::AtomicU32`, which [`explore`] schedules.
/// Every access counts as sequentially consistent: memory orderings are not explored.
#[derive(Debug)]
pub enum AtomicU32 {
    /// Outside of [`explore`].
    Real(atomic::AtomicU32),
    /// Inside of [`explore`].
    Scheduled(shuttle::sync::atomic::AtomicU32),
}

impl Default for AtomicU32 {
    fn default() -> Self {
        Self::new(0)
    }
}

impl AtomicU32 {
    /// Makes a count, which is scheduled when it is made inside of [`explore`].
    pub fn new(value: u32) -> Self {
        match shuttle::current::try_get_current_task() {
            None => Self::Real(atomic::AtomicU32::new(value)),
            Some(_) => Self::Scheduled(shuttle::sync::atomic::AtomicU32::new(value)),
        }
    }

    /// Returns the count.
    pub fn load(&self, order: Ordering) -> u32 {
        match self {
            Self::Real(count) => count.load(order),
            Self::Scheduled(count) => count.load(order),
        }
    }

    /// Sets the count.
    pub fn store(&self, value: u32, order: Ordering) {
        match self {
            Self::Real(count) => count.store(value, order),
            Self::Scheduled(count) => count.store(value, order),
        }
    }

    /// Adds to the count and returns the previous value.
    pub fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        match self {
            Self::Real(count) => count.fetch_add(value, order),
            Self::Scheduled(count) => count.fetch_add(value, order),
        }
    }

    /// Subtracts from the count and returns the previous value.
    pub fn fetch_sub(&self, value: u32, order: Ordering) -> u32 {
        match self {
            Self::Real(count) => count.fetch_sub(value, order),
            Self::Scheduled(count) => count.fetch_sub(value, order),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::sync::Arc;

    use super::*;

    /// Two threads that read, then write: one of the additions is lost in some orders.
    fn lose_an_addition() {
        let sum = Arc::new(Mutex::new(0));
        let add = |sum: Arc<Mutex<u32>>| {
            spawn(move || {
                let read = *sum.lock();
                *sum.lock() = read + 1;
            })
        };
        let threads = [add(Arc::clone(&sum)), add(Arc::clone(&sum))];
        for thread in threads {
            thread.join().expect("no panic");
        }
        assert_eq!(*sum.lock(), 2);
    }

    #[test]
    fn an_order_that_breaks_a_rule_is_found() {
        assert!(catch_unwind(|| explore(200, lose_an_addition)).is_err());
    }

    #[test]
    fn a_deadlock_is_found() {
        let deadlock = || {
            let (a, b) = (Arc::new(Mutex::new(())), Arc::new(Mutex::new(())));
            let (c, d) = (Arc::clone(&a), Arc::clone(&b));
            let other = spawn(move || drop((c.lock(), d.lock())));
            drop((b.lock(), a.lock()));
            other.join().expect("no panic");
        };
        assert!(catch_unwind(|| explore(200, deadlock)).is_err());
    }

    #[test]
    fn outside_of_it_a_lock_is_an_ordinary_one() {
        let mutex = Mutex::new(1);
        *mutex.lock() += 1;
        assert!(matches!(&mutex, Mutex::Real(_)) && *mutex.lock() == 2);
    }
}
