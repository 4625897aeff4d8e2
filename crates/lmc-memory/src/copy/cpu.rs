//! The core that the current thread runs on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Returns the number of the core that this thread runs on.
pub(super) fn current() -> usize {
    if cfg!(miri) {
        return 0;
    }
    sched_getcpu()
}

/// Moves this thread off a core, if it runs there and may run elsewhere.
///
/// A thread that is woken on its waker's core can wait for milliseconds until the kernel moves it to an idle
/// core: in a virtual machine, a halted core does not count as idle when a thread is woken. The thread may
/// run on the core again afterwards.
pub(super) fn leave(core: usize) {
    if cfg!(miri) || current() != core || core >= CpuSet::MAX_CPU {
        return;
    }
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mut others = allowed;
    others.unset(core);
    // If the kernel refuses, nothing changes.
    if others.count() > 0 && sched_setaffinity(None, &others).is_ok() {
        let _ = sched_setaffinity(None, &allowed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_leaves_its_core_and_keeps_the_others() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for _ in 0..100 {
            leave(current());
        }
        let after = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(after, cores);
    }
}
