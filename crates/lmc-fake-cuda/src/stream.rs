//! Streams: each has a thread that does the stream's work in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

use parking_lot::Mutex;

use crate::driver::{Driver, Event};
use crate::memory::{self, Memory};
use crate::{Code, code::Done};

/// A kernel that the fake implements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// `lmc_copy_runs(const Run* runs, unsigned n)`.
    CopyRuns,
}

impl Kernel {
    pub(crate) fn named(name: &str) -> Option<Self> {
        (name == "lmc_copy_runs").then_some(Self::CopyRuns)
    }
}

/// Bytes of a `Run`: the addresses `from` and `to`, and `len`.
const RUN: usize = 24;

/// A copy between the host and a device. Memory of the host is registered, or its owner waits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) len: usize,
    pub(crate) direction: Direction,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
}

impl Copy {
    /// Fails unless all of the copy is in valid memory; returns true if the host's memory is
    /// registered.
    pub(crate) fn check(&self, memory: &Memory) -> Done<bool> {
        let (device, host) = match self.direction {
            Direction::ToDevice => (self.to, self.from),
            Direction::ToHost => (self.from, self.to),
        };
        memory.device(device, self.len)?;
        memory.is_pinned(host, self.len)
    }
}

/// One piece of work.
#[derive(Debug)]
pub(crate) enum Work {
    Copy {
        copy: Copy,
        pinned: bool,
    },
    /// Writes bytes that the work owns.
    Write {
        to: usize,
        bytes: Vec<u8>,
    },
    CopyRuns {
        runs: usize,
        count: u32,
    },
    Record {
        event: Arc<Event>,
        record: u64,
    },
    Wait {
        event: Arc<Event>,
        record: u64,
    },
    /// Waits until the flag is set.
    Stall(Arc<AtomicBool>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// Ends after the work that was given.
    Drained,
    /// Ends after the work under way.
    AtOnce,
}

#[derive(Debug)]
pub(crate) struct Stream {
    pub(crate) device: usize,
    queue: Mutex<VecDeque<Work>>,
    given: AtomicU64,
    done: AtomicU64,
    end: Mutex<Option<End>>,
}

impl Stream {
    pub(crate) fn start(driver: &Arc<Driver>, device: usize) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            queue: Mutex::default(),
            given: AtomicU64::new(0),
            done: AtomicU64::new(0),
            end: Mutex::new(None),
        });
        let (this, driver) = (Arc::clone(&stream), Arc::clone(driver));
        let thread = thread::Builder::new().name("fake-stream".to_owned());
        let started = thread.spawn(move || this.run(&driver));
        started.expect("the system has threads");
        stream
    }

    /// Appends work, and returns its number, by which a caller can wait for its end.
    pub(crate) fn give(&self, driver: &Driver, work: Work) -> u64 {
        let mut queue = self.queue.lock();
        queue.push_back(work);
        let number = self.given.fetch_add(1, Ordering::SeqCst) + 1;
        drop(queue);
        driver.control.changed();
        number
    }

    pub(crate) fn wait_for(&self, driver: &Driver, number: u64) -> Done {
        driver
            .control
            .wait(|| self.done.load(Ordering::SeqCst) >= number || self.ends_at_once());
        driver.healthy(self.device)
    }

    pub(crate) fn wait_for_all(&self, driver: &Driver) -> Done {
        self.wait_for(driver, self.given.load(Ordering::SeqCst))
    }

    pub(crate) fn query(&self, driver: &Driver) -> Done {
        driver.healthy(self.device)?;
        let given = self.given.load(Ordering::SeqCst);
        match self.done.load(Ordering::SeqCst) >= given {
            true => Ok(()),
            false => Err(Code::NOT_READY),
        }
    }

    pub(crate) fn end(&self, driver: &Driver, how: End) {
        *self.end.lock() = Some(how);
        driver.control.changed();
    }

    fn ends_at_once(&self) -> bool {
        *self.end.lock() == Some(End::AtOnce)
    }

    fn run(&self, driver: &Driver) {
        let held = &driver.control.held[self.device];
        loop {
            driver.control.wait(|| {
                let end = *self.end.lock();
                let idle = self.queue.lock().is_empty();
                let free = held.load(Ordering::SeqCst) == 0;
                end == Some(End::AtOnce) || (!idle && free) || (idle && end.is_some())
            });
            if self.ends_at_once() {
                return;
            }
            let Some(work) = self.queue.lock().pop_front() else {
                return;
            };
            let failed =
                driver.healthy(self.device).is_ok() && self.perform(driver, &work).is_err();
            // A stream that has ended loses its memory.
            if failed && !self.ends_at_once() {
                driver.faulty[self.device].store(true, Ordering::SeqCst);
            }
            self.done.fetch_add(1, Ordering::SeqCst);
            driver.control.changed();
        }
    }

    /// Does one piece of work. If memory was valid when the work was given and is not valid now,
    /// the context has a fault.
    fn perform(&self, driver: &Driver, work: &Work) -> Done {
        match work {
            Work::Copy { copy, pinned } => {
                let memory = driver.memory.read();
                // Memory may be registered while a copy of it waits.
                if !copy.check(&memory)? && *pinned {
                    return Err(Code::INVALID_VALUE);
                }
                // SAFETY: the device's side is mapped for as long as the lock is held. The host's
                // side is registered for as long, or its owner waits.
                unsafe { memory::copy(copy.from, copy.to, copy.len) };
            }
            Work::Write { to, bytes } => driver.write(*to, bytes)?,
            Work::CopyRuns { runs, count } => self.copy_runs(driver, *runs, *count)?,
            Work::Record { event, record } => {
                event.state.reached.fetch_max(*record, Ordering::SeqCst);
            }
            Work::Wait { event, record } => driver.control.wait(|| {
                event.state.reached.load(Ordering::SeqCst) >= *record || self.ends_at_once()
            }),
            Work::Stall(over) => driver
                .control
                .wait(|| over.load(Ordering::SeqCst) || self.ends_at_once()),
        }
        Ok(())
    }

    /// Copies runs in another order at each launch, as the blocks of a kernel may.
    fn copy_runs(&self, driver: &Driver, runs: usize, count: u32) -> Done {
        static LAUNCHES: AtomicUsize = AtomicUsize::new(0);
        let memory = driver.memory.read();
        let mut list = vec![0; count as usize * RUN];
        let own = list.as_mut_ptr().expose_provenance();
        memory.reaches(self.device, runs, list.len())?;
        // SAFETY: the list is mapped for as long as the lock is held, and `own` is as long.
        unsafe { memory::copy(runs, own, list.len()) };
        let mut list: Vec<_> = list.chunks_exact(RUN).collect();
        let mut seed = LAUNCHES.fetch_add(1, Ordering::Relaxed);
        for last in (1..list.len()).rev() {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            list.swap(last, (seed >> 33) % (last + 1));
        }
        for run in list {
            let field = |at: usize| {
                let bytes = run[at * 8..][..8].try_into().expect("8 bytes");
                usize::from_ne_bytes(bytes)
            };
            memory.kernel_copy(self.device, field(0), field(1), field(2))?;
        }
        Ok(())
    }
}
