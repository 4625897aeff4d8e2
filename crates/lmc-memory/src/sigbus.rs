//! Surviving a foreign segment that is cut short while we copy.
//!
//! Touching a page of a shared mapping beyond the end of its file, or one that the file system
//! has no room for, raises SIGBUS, which ends the process by default: one engine could stop
//! the server for all. Checking the size first leaves a window, and moving the bytes with
//! `pread` and `pwrite`, which end short instead, has less than half the speed (5 against
//! 12 GB/s on one core). So, as Wayland compositors do for their clients' buffers, a
//! handler puts private zero pages in place of the segment that faulted and marks it lost; the
//! copy runs to its end over zeroes, and whoever asked for it finds the mark and throws the
//! result away.
//!
//! Faults at any other address go to the handler that was there before.

use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Segments that can be guarded at once.
const SLOTS: usize = 4096;

/// A guarded range. The handler reads these without a lock; `end` is 0 while the slot is free
/// or half written.
struct Slot {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; SLOTS];

/// The handler that was there before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A range whose faults are survived, until drop.
#[derive(Debug)]
pub(crate) struct Guard {
    slot: usize,
}

impl Guard {
    /// Guards a mapping. It must be dropped before the mapping is unmapped, since the range
    /// may belong to somebody else at once afterwards.
    pub(crate) fn new(base: NonNull<u8>, len: usize) -> io::Result<Self> {
        install()?;
        let free = TABLE.iter().position(|slot| {
            slot.taken
                .compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        });
        let Some(index) = free else {
            return Err(io::Error::other(format!(
                "more than {SLOTS} foreign segments are mapped"
            )));
        };
        let slot = &TABLE[index];
        let start = base.as_ptr() as usize;
        slot.lost.store(false, Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        slot.end.store(start + len, Ordering::Release);
        Ok(Self { slot: index })
    }

    /// Whether a fault was survived in the range.
    pub(crate) fn lost(&self) -> bool {
        TABLE[self.slot].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let slot = &TABLE[self.slot];
        slot.end.store(0, Ordering::Release);
        slot.taken.store(false, Ordering::Release);
    }
}

/// Puts the handler in place, once for the process.
fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        // SAFETY: `sigaction` is plain data for which zeroes are valid.
        let (mut new, mut old): (libc::sigaction, libc::sigaction) = unsafe { mem::zeroed() };
        // SAFETY: the first call reads only the action before ours, so that the handler finds
        // it from its first run on; the second installs a handler that does nothing that is
        // not allowed within a signal.
        let result = unsafe {
            let read = libc::sigaction(libc::SIGBUS, ptr::null(), &mut old);
            let _ = PREVIOUS.set(old);
            new.sa_sigaction = on_sigbus as *const () as usize;
            new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&mut new.sa_mask);
            if read == 0 {
                libc::sigaction(libc::SIGBUS, &new, ptr::null_mut())
            } else {
                read
            }
        };
        if result == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error().raw_os_error().unwrap_or(0))
        }
    });
    done.map_err(io::Error::from_raw_os_error)
}

/// The handler. Allocates nothing, takes no lock, and calls nothing but `mmap` and the handler
/// before it.
extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes valid information to a handler installed with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let end = slot.end.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        // Read again: a guard that went and another that came in between would mix two ranges.
        let same = slot.end.load(Ordering::Relaxed) == end;
        if end == 0 || !same || !(start..end).contains(&address) {
            continue;
        }
        slot.lost.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is a mapping of ours that is guarded, so it is still mapped, and
        // only copies that check `lost` afterwards use its bytes. `mmap` is a bare system call.
        let placed = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                end - start,
                access,
                flags,
                -1,
                0,
            )
        };
        if placed != libc::MAP_FAILED {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Does what would have happened without us.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else {
        return;
    };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction runs again and ends the process, with a core if so configured.
            // SAFETY: setting a signal to its default is allowed within a handler.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        handler if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);
            // SAFETY: with SA_SIGINFO the field holds a function of this type.
            let handler = unsafe { mem::transmute::<usize, Handler>(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO the field holds a function of this type.
            let handler = unsafe { mem::transmute::<usize, extern "C" fn(libc::c_int)>(handler) };
            handler(signal);
        }
    }
}
