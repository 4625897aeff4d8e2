//! Copies in one direction on one GPU.
//!
//! A kernel gathers runs into one range of the GPU's memory, and a copy engine of the GPU moves that
//! range to the host; a scatter does the two in the other order. So the link runs at its full rate
//! whatever the length of the runs. The kernels of two processes take turns on a GPU, and those of
//! the engine wait for microseconds only.

use std::iter::Peekable;
use std::panic::{self, AssertUnwindSafe};
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

/// A stream with two launches that alternate, so that the link does not wait for the kernel.
#[derive(Debug)]
pub(super) struct Lane {
    direction: Direction,
    launches: [Launch; 2],
    stream: Stream,
    kernel: Kernel,
}

/// One launch of the kernel, with the copies before or after it.
#[derive(Debug)]
struct Launch {
    /// Table of runs in host memory that the driver owns.
    runs: HostBuffer,
    /// Copy of the table that the kernel reads.
    table: DeviceBuffer,
    /// Bytes of the runs, one after another.
    range: DeviceBuffer,
    done: Event,
    is_pending: bool,
}

/// Bytes that are contiguous on the host and in the range.
#[derive(Clone, Copy, Debug)]
struct HostRun {
    host: *mut u8,
    at: usize,
    len: usize,
}

impl Lane {
    pub(super) fn new(direction: Direction) -> Result<Self> {
        Ok(Self {
            direction,
            launches: [Launch::new()?, Launch::new()?],
            stream: Stream::new()?,
            kernel: Kernel::load()?,
        })
    }

    /// Copies all pieces, as long as `proceed` returns true, which is asked before each launch.
    /// Returns false after it did not.
    ///
    /// The pieces are lent for this call: no launch is under way any more when it ends, also by an error
    /// or by a panic of `proceed`.
    pub(super) fn copy(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &Pinned,
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
            // The event of a launch that failed may not be recorded, so the stream is asked. An error of
            // the stream is that of a broken context, which does no work any more.
            let _ = wait(&|| self.stream.is_idle());
        }
        ended.unwrap_or_else(|panic| panic::resume_unwind(panic))
    }

    fn launch_all(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &Pinned,
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
            let stream = &self.stream;
            match self.direction {
                Direction::Gather => {
                    launch.copy_runs(stream, &self.kernel, count)?;
                    launch.move_parts(stream, &parts, self.direction, pinned)?;
                }
                Direction::Scatter => {
                    launch.move_parts(stream, &parts, self.direction, pinned)?;
                    launch.copy_runs(stream, &self.kernel, count)?;
                }
            }
            stream.record(&launch.done)?;
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

    /// Fills the table with the next runs, and `parts` with the host's side. Returns the number of
    /// runs.
    fn load(
        &mut self,
        pieces: &mut Peekable<impl Iterator<Item = Piece>>,
        direction: Direction,
        parts: &mut Vec<HostRun>,
    ) -> usize {
        parts.clear();
        let (mut count, mut at) = (0, 0);
        while let Some(piece) =
            pieces.next_if(|piece| count < RUNS && at + piece.len as usize <= SLICE)
        {
            let len = piece.len as usize;
            match parts.last_mut() {
                Some(part) if part.host.wrapping_add(part.len) == piece.host => part.len += len,
                _ => parts.push(HostRun {
                    host: piece.host,
                    at,
                    len,
                }),
            }
            let in_range = self.range.0 + at as u64;
            let (from, to) = match direction {
                Direction::Gather => (piece.device, in_range),
                Direction::Scatter => (in_range, piece.device),
            };
            let run = Run {
                from,
                to,
                len: piece.len,
            };
            // SAFETY: the count is below RUNS, and no launch reads the table now.
            unsafe { self.runs.base.cast::<Run>().add(count).write(run) };
            count += 1;
            at += len;
        }
        count
    }

    fn copy_runs(&self, stream: &Stream, kernel: &Kernel, count: usize) -> Result<()> {
        // SAFETY: `load` has written as many.
        let runs = unsafe { std::slice::from_raw_parts(self.runs.base.cast(), count) };
        // SAFETY: the table is not written before the launch is done. Device addresses were checked
        // when the plan was made, and the plan keeps that memory open.
        unsafe { stream.copy_runs(kernel, BLOCKS, runs, &self.table) }
    }

    fn move_parts(
        &self,
        stream: &Stream,
        parts: &[HostRun],
        direction: Direction,
        pinned: &Pinned,
    ) -> Result<()> {
        for part in parts {
            let mut done = 0;
            while done < part.len {
                let host = part.host.wrapping_add(done);
                let len = pinned.alike(host, part.len - done);
                let device = self.range.0 + (part.at + done) as u64;
                // SAFETY: the bytes lie in a chunk that is lent for this call, which ends after the last
                // launch, and `load` has counted them in the range.
                unsafe {
                    match direction {
                        Direction::Gather => stream.copy_to_host(device, host, len),
                        Direction::Scatter => stream.copy_to_device(host, device, len),
                    }
                }?;
                done += len;
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
