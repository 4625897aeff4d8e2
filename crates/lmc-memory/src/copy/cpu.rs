//! The core that a thread runs on.

use std::mem::MaybeUninit;

/// Returns the number of the core that this thread runs on.
pub(super) fn current() -> usize {
    if cfg!(miri) {
        return 0;
    }
    // SAFETY: sched_getcpu has no preconditions.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(usize::MAX)
}

/// Moves this thread off a core, if it runs there and may run elsewhere.
///
/// A thread that is woken on the core of its waker can wait for milliseconds until the kernel
/// moves it to one that is idle: in a virtual machine a core that is halted does not count as
/// idle when a thread is woken. The thread may run on the core again afterwards.
pub(super) fn leave(core: usize) {
    if cfg!(miri) || current() != core || core >= libc::CPU_SETSIZE as usize {
        return;
    }
    let size = size_of::<libc::cpu_set_t>();
    let mut allowed = MaybeUninit::<libc::cpu_set_t>::zeroed();
    // SAFETY: the kernel writes at most `size` bytes, which are there; 0 is this thread.
    if unsafe { libc::sched_getaffinity(0, size, allowed.as_mut_ptr()) } != 0 {
        return;
    }
    // SAFETY: it was zeroed, and a set is valid whatever its bits.
    let allowed = unsafe { allowed.assume_init() };
    let mut others = allowed;
    // SAFETY: `core` is below CPU_SETSIZE, and the sets are valid; the kernel reads `size` bytes
    // of them. A refusal changes nothing.
    unsafe {
        libc::CPU_CLR(core, &mut others);
        if libc::CPU_COUNT(&others) > 0 && libc::sched_setaffinity(0, size, &others) == 0 {
            libc::sched_setaffinity(0, size, &allowed);
        }
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
