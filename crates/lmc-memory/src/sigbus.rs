//! Survival of shared memory that another process truncates.
//!
//! Touching a page of a shared mapping beyond the end of its file, or a page for which the file system has no
//! space, raises SIGBUS, which ends the process by default: one engine could stop the server for all.
//! Checking the size first leaves a race. Moving the bytes with `pread` and `pwrite`, which return short
//! counts instead, has less than half the speed (5 against 12 GB/s on one core). So, as Wayland compositors
//! do for their clients' buffers, a handler replaces the whole mapping that faulted with private zero pages
//! and marks it as lost. The copy continues over zeroes to its end, and its caller finds the mark and
//! discards the result.
//!
//! Faults at any other address are passed to the previous handler.

use std::collections::HashMap;
use std::io;
use std::mem;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Ranges of the first block of the table; each further block has twice as many.
const FIRST_BLOCK: usize = 512;

/// Blocks of the table.
const BLOCKS: usize = 6;

/// Most ranges that can be guarded at once: about half of the mappings that Linux allows a process
/// (`vm.max_map_count`, 65,530 unless set).
pub(crate) const MAX_GUARDS: usize = FIRST_BLOCK * ((1 << BLOCKS) - 1);

/// Most segments of other processes of one user that can be guarded at once; 8 engines of 8 ranks with a
/// segment for each of 128 layers need 8,192.
pub(crate) const MAX_GUARDS_PER_USER: usize = MAX_GUARDS / 2;

/// A guarded range. The handler reads it without a lock; `end` is 0 while the slot is free or being written.
#[derive(Debug)]
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

/// The blocks of the table, each null until it is needed. Blocks are never freed, so the handler can walk
/// them at any time.
static TABLE: [AtomicPtr<Slot>; BLOCKS] = [const { AtomicPtr::new(ptr::null_mut()) }; BLOCKS];

/// Free slots, and the number of ranges of each user. Not used by the handler.
static BOOKS: Mutex<Option<Books>> = Mutex::new(None);

#[derive(Debug, Default)]
struct Books {
    free: Vec<&'static Slot>,
    blocks: usize,
    users: HashMap<u32, usize>,
}

/// The handler that was installed before this one.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn block_len(block: usize) -> usize {
    FIRST_BLOCK << block
}

/// Returns the slots of all existing blocks.
fn slots() -> impl Iterator<Item = &'static Slot> {
    let blocks = TABLE.iter().enumerate().map_while(|(block, start)| {
        let start = start.load(Ordering::Acquire);
        // SAFETY: a pointer that is not null was published by `Books::grow` for a leaked block
        // of this length, which is only ever accessed by shared reference.
        (!start.is_null()).then(|| unsafe { slice::from_raw_parts(start, block_len(block)) })
    });
    blocks.flatten()
}

impl Books {
    /// Adds a block, unless all exist.
    fn grow(&mut self) {
        let Some(published) = TABLE.get(self.blocks) else {
            return;
        };
        let slot = || Slot {
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        };
        let block: Vec<Slot> = (0..block_len(self.blocks)).map(|_| slot()).collect();
        let block: &'static mut [Slot] = block.leak();
        let start = block.as_mut_ptr();
        let block: &'static [Slot] = block;
        published.store(start, Ordering::Release);
        self.free.extend(block);
        self.blocks += 1;
    }
}

/// A guarded range: faults in it are survived until this is dropped.
#[derive(Debug)]
pub(crate) struct Guard {
    slot: &'static Slot,
    user: Option<u32>,
}

impl Guard {
    /// Guards a mapping. The guard must be dropped before the mapping is unmapped, because afterwards the
    /// range may belong to another mapping at once.
    ///
    /// With a user, the range counts against that user's share of the table.
    pub(crate) fn new(base: NonNull<u8>, len: usize, user: Option<u32>) -> io::Result<Self> {
        install()?;
        let mut books = BOOKS.lock();
        let books = books.get_or_insert_default();
        if books.free.is_empty() {
            books.grow();
        }
        let full = |who: &str, max: usize| {
            io::Error::other(format!(
                "{who} has {max} shared segments mapped, which is the maximum"
            ))
        };
        if let Some(user) = user {
            let count = books.users.entry(user).or_default();
            if *count >= MAX_GUARDS_PER_USER {
                return Err(full(&format!("user {user}"), MAX_GUARDS_PER_USER));
            }
            if !books.free.is_empty() {
                *count += 1;
            }
        }
        let Some(slot) = books.free.pop() else {
            return Err(full("this process", MAX_GUARDS));
        };
        let start = base.as_ptr() as usize;
        slot.lost.store(false, Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
        slot.end.store(start + len, Ordering::Release);
        Ok(Self { slot, user })
    }

    /// Returns true once the range has faulted or [`Guard::mark_lost`] was called.
    pub(crate) fn is_lost(&self) -> bool {
        self.slot.lost.load(Ordering::Acquire)
    }

    /// Marks the range as lost before any of its bytes is touched.
    pub(crate) fn mark_lost(&self) {
        self.slot.lost.store(true, Ordering::Release);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.slot.end.store(0, Ordering::Release);
        let mut books = BOOKS.lock();
        let Some(books) = books.as_mut() else {
            return;
        };
        books.free.push(self.slot);
        if let Some(count) = self.user.and_then(|user| books.users.get_mut(&user)) {
            *count -= 1;
        }
    }
}

/// Installs the handler, once per process.
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

/// The signal handler. Allocates nothing, takes no lock, and calls nothing but `mmap` and the previous
/// handler.
extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes valid information to a handler installed with SA_SIGINFO.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in slots() {
        let end = slot.end.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Acquire);
        // Read again: if one guard was dropped and another made in between, the values would be of two
        // ranges.
        let same = slot.end.load(Ordering::Relaxed) == end;
        if end == 0 || !same || !(start..end).contains(&address) {
            continue;
        }
        slot.lost.store(true, Ordering::Release);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the range is a mapping of ours that is guarded, so it is still mapped, and its
        // bytes are only used by code that checks the mark afterwards. `mmap` is a bare system
        // call.
        let mapped = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                end - start,
                access,
                flags,
                -1,
                0,
            )
        };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Does what would have happened without this handler.
fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let Some(previous) = PREVIOUS.get() else {
        return;
    };
    match previous.sa_sigaction {
        libc::SIG_DFL | libc::SIG_IGN => {
            // The instruction runs again and ends the process, with a core dump if so configured.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Finding 16 of the review: 4,096 guards for the process, which one registration could take.
    #[test]
    fn one_user_takes_half_of_the_table_at_most() {
        let (greedy, other) = (4_000_000_000, 4_000_000_001);
        let mut page = [0u8; 64];
        let base = NonNull::from(&mut page[0]);
        let guard = |user| Guard::new(base, page.len(), Some(user));
        let guards: Vec<Guard> = (0..MAX_GUARDS_PER_USER)
            .map(|_| guard(greedy).expect("half of the table"))
            .collect();
        const { assert!(MAX_GUARDS_PER_USER >= 8 * 8 * 128) };
        assert!(guard(greedy).is_err());
        let others = guard(other).expect("the other half");
        assert!(!others.is_lost());
        others.mark_lost();
        assert!(others.is_lost() && guards.iter().all(|guard| !guard.is_lost()));
        drop(guards);
        assert!(!guard(greedy).expect("given back").is_lost());
    }
}
