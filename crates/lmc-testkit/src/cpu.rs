//! CPU time of a thread.

use std::mem::MaybeUninit;
use std::time::Duration;

/// Returns the CPU time of this thread so far. Unlike the time on a clock, it does not grow while
/// other threads have the core, so a limit on it holds on a busy machine.
pub fn cpu_time() -> Duration {
    let mut time = MaybeUninit::<libc::timespec>::uninit();
    // SAFETY: the kernel fills the one struct, to which the pointer is valid.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, time.as_mut_ptr()) };
    assert_eq!(result, 0, "every Linux has this clock");
    // SAFETY: the call has succeeded, so it has filled the struct.
    let time = unsafe { time.assume_init() };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
