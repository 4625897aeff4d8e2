//! Copies in one direction on one GPU.
//!
//! A kernel gathers runs into one range of the GPU's memory, and a copy engine of the GPU moves that
//! range to the host; a scatter does the two in the other order. So the link runs at its full rate
//! whatever the length of the runs. The kernels of two processes take turns on a GPU, and those of
//! the engine wait for microseconds only.

use std::iter::Peekable;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::time::Duration;

use super::driver::{self, DeviceBuffer, Event, HostBuffer, Kernel, Result, Run, Stream};
use super::pinned::Pinned;
use crate::copy::Direction;

// The limits are small in tests, where short copies are to have several launches.

/// Longest run of the kernel's table: a longer one is cut, so that several blocks of threads share
/// it.
const RUN: u64 = if cfg!(test) { 4 << 10 } else { 64 << 10 };
/// Most runs of one launch.
const RUNS: usize = if cfg!(test) { 32 } else { 8192 };
/// Most bytes of one launch, which is what a copy that is stopped still writes: 0.3 ms at 55 GB/s.
const SLICE: usize = if cfg!(test) { 32 << 10 } else { 16 << 20 };
/// Blocks of threads of the kernel: about one for each multiprocessor of a large GPU.
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
    /// True after an error of a stream: copies need new objects of the driver.
    is_broken: bool,
}

/// One launch of the kernel, with the copies before or after it. The other launch is on another
/// stream: the GPU works at both at a time.
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

    /// Returns true if the lane can copy nothing more.
    pub(super) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// Copies all pieces, as long as `proceed` returns true, which is asked before each launch.
    /// Returns false after it did not.
    ///
    /// The pieces are lent for this call: no launch is under way any more when it ends, also by an error
    /// or by a panic of `proceed`.
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
            // The event of a launch that failed may not be recorded, so the streams are asked. An error
            // of a stream is that of a broken context, which does no work any more.
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

/// Cuts a piece where the kernel's runs end.
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

    /// Waits until the launch is done, if one is pending.
    fn finish(&mut self, wait: &Wait<'_>) -> Result<()> {
        if self.is_pending {
            wait(&|| self.done.is_done())?;
            self.is_pending = false;
        }
        Ok(())
    }

    /// Fills the table with the next runs, and `parts` with what crosses the link for them. Returns the
    /// number of runs.
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
                // Parts follow each other in the range.
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
                // A buffer outside of a pool lies outside of it as a whole.
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

/// Time after which a launch counts as hung: it takes about a millisecond.
pub(super) const HUNG: Duration = Duration::from_secs(20);

/// Waits until a question about the GPU's work is answered with true.
pub(super) type Wait<'a> = dyn Fn(&dyn Fn() -> Result<bool>) -> Result<()> + 'a;

/// Waits for launches. `late` is called when they count as hung; the wait goes on until the GPU is done
/// or broken, because an answer before would give blocks away that are still written.
pub(super) fn wait_for(is_done: &dyn Fn() -> Result<bool>, late: &dyn Fn()) -> Result<()> {
    driver::wait(is_done, &|elapsed| {
        if elapsed > HUNG {
            late();
        }
        true
    })
    .map(drop)
}
