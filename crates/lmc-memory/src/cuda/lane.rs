//! Copies in one direction on one GPU.
//!
//! A kernel gathers runs into one range of the GPU's memory, and a copy engine of the GPU moves that range to
//! the host. A scatter does the same in the opposite order. So the link runs at its full rate, whatever the
//! length of the runs. Kernels of two processes take turns on a GPU; the engine's kernels wait only
//! microseconds.

use std::iter::Peekable;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use super::driver::{self, DeviceBuffer, Event, HostBuffer, Kernel, Result, Run, Stream};
use super::pinned::Pinned;
use crate::copy::Direction;

// In tests the limits are small, so that short copies take several launches.

/// Longest run in the kernel's table: a longer run is cut, so that several thread blocks share it.
const RUN: u64 = if cfg!(test) { 4 << 10 } else { 64 << 10 };
/// Most runs of one launch.
const RUNS: usize = if cfg!(test) { 32 } else { 8192 };
/// Most bytes of one launch. A stopped copy still writes this much: 0.3 ms at 55 GB/s.
const SLICE: usize = if cfg!(test) { 32 << 10 } else { 16 << 20 };
/// Thread blocks of the kernel: about one for each multiprocessor of a large GPU.
const BLOCKS: u32 = 128;

/// A run between device memory and a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) device: u64,
    pub(super) host: *mut u8,
    pub(super) len: u64,
}

/// Two launches that alternate, so that the link does not wait for the kernel.
#[derive(Debug)]
pub(super) struct Lane {
    direction: Direction,
    launches: [Launch; 2],
    kernel: Kernel,
    /// True after an error of a stream: then copies need new objects of the driver.
    is_broken: bool,
}

/// One launch of the kernel, with the copies before or after it. The other launch is on another stream, so
/// the GPU works on both at the same time.
#[derive(Debug)]
struct Launch {
    stream: Stream,
    /// Table of runs in host memory that the driver owns.
    runs: HostBuffer,
    /// Copy of the table that the kernel reads.
    table: DeviceBuffer,
    /// Bytes of the runs, one after another.
    range: DeviceBuffer,
    done: Event,
    is_pending: bool,
}

impl Lane {
    pub(super) fn new(direction: Direction) -> Result<Self> {
        Ok(Self {
            direction,
            launches: [Launch::new()?, Launch::new()?],
            kernel: Kernel::load()?,
            is_broken: false,
        })
    }

    /// Returns true if the lane cannot copy any more.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Copies all pieces, as long as `proceed` returns true; it is called before each launch. Returns false
    /// if it returned false.
    ///
    /// The pieces are lent for this call: when it ends, even with an error or a panic of `proceed`, no launch
    /// is in progress.
    pub(super) fn copy(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &[Arc<Pinned>],
        proceed: &dyn Fn() -> bool,
        wait: &Wait<'_>,
    ) -> Result<bool> {
        let ended = panic::catch_unwind(AssertUnwindSafe(|| {
            let proceeded = self.launch_all(pieces, pinned, proceed, wait)?;
            for launch in &mut self.launches {
                launch.finish(wait)?;
            }
            Ok(proceeded)
        }));
        if !matches!(ended, Ok(Ok(_))) {
            // The event of a failed launch may not be recorded, so the streams are polled. An error of a
            // stream means a broken context, which does no more work.
            for launch in &mut self.launches {
                self.is_broken |= wait(&|| launch.stream.is_idle()).is_err();
                launch.is_pending = false;
            }
        }
        ended.unwrap_or_else(|panic| panic::resume_unwind(panic))
    }

    fn launch_all(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &[Arc<Pinned>],
        proceed: &dyn Fn() -> bool,
        wait: &Wait<'_>,
    ) -> Result<bool> {
        let mut pieces = pieces.flat_map(cut).peekable();
        let mut parts = Vec::new();
        let mut turn = 0;
        while pieces.peek().is_some() {
            let launch = &mut self.launches[turn];
            launch.finish(wait)?;
            if !proceed() {
                return Ok(false);
            }
            let count = launch.load(&mut pieces, self.direction, &mut parts);
            launch.is_pending = true;
            match self.direction {
                Direction::Gather => {
                    launch.copy_runs(&self.kernel, count)?;
                    launch.move_parts(&parts, self.direction, pinned)?;
                }
                Direction::Scatter => {
                    launch.move_parts(&parts, self.direction, pinned)?;
                    launch.copy_runs(&self.kernel, count)?;
                }
            }
            launch.stream.record(&launch.done)?;
            turn = 1 - turn;
        }
        Ok(true)
    }
}

/// Cuts a piece into runs of the kernel's maximum length.
fn cut(piece: Piece) -> impl Iterator<Item = Piece> {
    (0..piece.len)
        .step_by(RUN as usize)
        .map(move |start| Piece {
            device: piece.device + start,
            host: piece.host.wrapping_add(start as usize),
            len: RUN.min(piece.len - start),
        })
}

impl Launch {
    fn new() -> Result<Self> {
        Ok(Self {
            stream: Stream::new()?,
            runs: HostBuffer::new(RUNS * size_of::<Run>())?,
            table: DeviceBuffer::new(RUNS * size_of::<Run>())?,
            range: DeviceBuffer::new(SLICE)?,
            done: Event::new()?,
            is_pending: false,
        })
    }

    /// Waits until the launch is done, if one is in progress.
    fn finish(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.is_pending {
            wait(&|| self.done.is_done())?;
            self.is_pending = false;
        }
        Ok(())
    }

    /// Fills the table with the next runs, and `parts` with the byte ranges to move across the link for them.
    /// Returns the number of runs.
    fn load(
        &mut self,
        pieces: &mut Peekable<impl Iterator<Item = Piece>>,
        direction: Direction,
        parts: &mut Vec<Piece>,
    ) -> usize {
        parts.clear();
        let (mut count, mut at) = (0, 0);
        while let Some(piece) =
            pieces.next_if(|piece| count < RUNS && at + piece.len <= SLICE as u64)
        {
            let device = self.range.0 + at;
            let (from, to) = match direction {
                Direction::Gather => (piece.device, device),
                Direction::Scatter => (device, piece.device),
            };
            let len = piece.len;
            // SAFETY: the count is below RUNS, and no launch reads the table now.
            unsafe { (self.runs.base.cast::<Run>().add(count)).write(Run { from, to, len }) };
            count += 1;
            at += len;
            match parts.last_mut() {
                // The parts are consecutive in the range.
                Some(last) if last.host.wrapping_add(last.len as usize) == piece.host => {
                    last.len += len;
                }
                _ => parts.push(Piece { device, ..piece }),
            }
        }
        count
    }

    fn copy_runs(&self, kernel: &Kernel, count: usize) -> Result<()> {
        // SAFETY: `load` has written as many.
        let runs = unsafe { std::slice::from_raw_parts(self.runs.base.cast(), count) };
        // SAFETY: the table is not written before the launch is done. Device addresses were checked
        // when the plan was made, and the plan keeps that memory open.
        unsafe { self.stream.copy_runs(kernel, BLOCKS, runs, &self.table) }
    }

    /// Moves parts across the link.
    fn move_parts(
        &self,
        parts: &[Piece],
        direction: Direction,
        pinned: &[Arc<Pinned>],
    ) -> Result<()> {
        for part in parts {
            let mut done = 0;
            while done < part.len {
                let host = part.host.wrapping_add(done as usize);
                let left = (part.len - done) as usize;
                // A buffer outside a pool is outside it as a whole.
                let alike = pinned.iter().find_map(|pool| pool.alike(host, left));
                let len = alike.unwrap_or(left);
                let device = part.device + done;
                // SAFETY: the bytes lie in a chunk that is lent for this call, which ends after the last
                // launch, and `load` has counted them in the range.
                unsafe {
                    match direction {
                        Direction::Gather => self.stream.copy_to_host(device, host, len),
                        Direction::Scatter => self.stream.copy_to_device(host, device, len),
                    }
                }?;
                done += len as u64;
            }
        }
        Ok(())
    }
}

/// Time after which a launch counts as hung. A launch takes about a millisecond.
pub(super) const HUNG: Duration = Duration::from_secs(20);

/// A function that waits until a question about the GPU's work is answered with true.
pub(super) type Wait<'a> = dyn Fn(&dyn Fn() -> Result<bool>) -> Result<()> + 'a;

/// Waits for launches. `late` is called when they count as hung. The wait continues until the GPU is done or
/// broken: returning earlier would release blocks that are still being written.
pub(super) fn wait_for(is_done: &dyn Fn() -> Result<bool>, late: &dyn Fn()) -> Result<()> {
    driver::wait(is_done, &|elapsed| {
        if elapsed > HUNG {
            late();
        }
        true
    })
    .map(drop)
}
