//! Blocks of atomics that the processes of one machine map.

use std::fs::OpenOptions;
use std::io;
use std::marker::PhantomData;
use std::ops::Deref;
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memmap2::{MmapMut, MmapRaw};
use rustix::thread::futex;

use crate::Code;

/// Devices that a machine can have.
pub(crate) const DEVICES: usize = 2;
/// Functions that can be counted and made to fail.
pub(crate) const FUNCTIONS: usize = 64;

/// Longest sleep between two checks of a condition: a process that is killed between a change and
/// its wake-up wakes no thread.
const LOOK: futex::Timespec = futex::Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Types of which every byte pattern is a valid value, zeros among them.
///
/// # Safety
/// Such a type consists of atomics only.
pub(crate) unsafe trait Atomics {}

// SAFETY: all fields are atomics.
unsafe impl Atomics for Control {}
// SAFETY: all fields are atomics.
unsafe impl Atomics for Record {}
// SAFETY: all fields are atomics.
unsafe impl Atomics for EventState {}

/// A `T` in memory that is mapped.
#[derive(Debug)]
pub(crate) struct SharedMapping<T> {
    map: MmapRaw,
    content: PhantomData<T>,
}

impl<T: Atomics> SharedMapping<T> {
    /// Maps a file, which is made if it is missing.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false);
        Self::of(&file.open(path)?)
    }

    pub(crate) fn of(file: &std::fs::File) -> io::Result<Self> {
        file.set_len(size_of::<T>() as u64)?;
        let map = MmapRaw::map_raw(file)?;
        Ok(Self::from(map))
    }

    /// Makes memory that no other process sees.
    pub(crate) fn private() -> io::Result<Self> {
        Ok(Self::from(MmapMut::map_anon(size_of::<T>())?.into()))
    }

    fn from(map: MmapRaw) -> Self {
        Self {
            map,
            content: PhantomData,
        }
    }
}

impl<T: Atomics> Deref for SharedMapping<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the mapping begins at a page, is as long as `T`, and lives as long as `self`. Any
        // bytes are a `T`, and other processes change them by atomic operations only.
        unsafe { &*self.map.as_ptr().cast::<T>() }
    }
}

/// Faults and state that belong to the whole machine.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control {
    /// Counts changes of anything in the machine; threads sleep on it.
    changes: AtomicU32,
    /// 1 for a device that makes no progress.
    pub(crate) held: [AtomicU32; DEVICES],
    /// Number of calls that are still to fail, by function.
    failures: [AtomicU32; FUNCTIONS],
    /// Number of calls that are still carried out before the failing ones, by function.
    skipped: [AtomicU32; FUNCTIONS],
    codes: [AtomicU32; FUNCTIONS],
}

impl Control {
    /// Wakes all threads that wait for a condition.
    pub(crate) fn changed(&self) {
        self.changes.fetch_add(1, Ordering::SeqCst);
        let all = i32::MAX as u32;
        let _ = futex::wake(&self.changes, futex::Flags::empty(), all);
    }

    /// Returns as soon as `done` returns true; `done` is called after each change in the machine.
    pub(crate) fn wait(&self, mut done: impl FnMut() -> bool) {
        loop {
            let seen = self.changes.load(Ordering::SeqCst);
            if done() {
                return;
            }
            let _ = futex::wait(&self.changes, futex::Flags::empty(), seen, Some(&LOOK));
        }
    }

    pub(crate) fn fail(&self, function: usize, skipped: u32, times: u32, code: Code) {
        self.codes[function].store(code.0, Ordering::SeqCst);
        self.skipped[function].store(skipped, Ordering::SeqCst);
        self.failures[function].store(times, Ordering::SeqCst);
    }

    pub(crate) fn will_fail(&self, function: usize) -> bool {
        self.failures[function].load(Ordering::SeqCst) > 0
    }

    /// Returns the error that this call of a function must return, if any.
    pub(crate) fn failure(&self, function: usize) -> Option<Code> {
        let one_less = |left: u32| left.checked_sub(1);
        let take = |left: &AtomicU32| {
            let taken = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
            taken.is_ok()
        };
        if take(&self.skipped[function]) || !take(&self.failures[function]) {
            return None;
        }
        Some(Code(self.codes[function].load(Ordering::SeqCst)))
    }
}

/// Kinds of objects that are counted in each process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Context,
    Stream,
    Event,
    Module,
    Allocation,
    Mapping,
    HostAllocation,
    Registration,
}

/// Counts of one process.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Record {
    /// Existing objects, by [`Kind`].
    pub(crate) things: [AtomicU64; 8],
    /// Bytes of the existing objects.
    pub(crate) bytes: [AtomicU64; 8],
    /// Calls, by function.
    pub(crate) calls: [AtomicU64; FUNCTIONS],
}

/// Progress of an event. It is ready while the last record has been reached.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct EventState {
    pub(crate) recorded: AtomicU64,
    pub(crate) reached: AtomicU64,
}
