//! Copies in one direction on one GPU.

use std::ptr;

use super::driver::{DeviceBuffer, Event, HostBuffer, Kernel, Pause, Result, Run, Stream};
use super::pinned::Pinned;
use crate::copy::Direction;

/// Longest run of the kernel's table: a longer one is cut, so that several blocks of threads share
/// it.
const RUN: u64 = 64 << 10;
/// Most runs of one launch.
const RUNS: usize = 4096;
/// Most bytes of one launch, which is what a copy that is stopped still writes: 0.3 ms at 55 GB/s.
const SLICE: usize = 16 << 20;
/// Blocks of threads that copy, of the one per multiprocessor and more that would fit: as many as
/// fill the link (`xtask/python/gpu`), and no more, because the engine computes meanwhile.
const BLOCKS_TO_DEVICE: u32 = 16;
const BLOCKS_TO_HOST: u32 = 8;

/// A run between device memory and a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece {
    pub(super) device: u64,
    pub(super) host: *mut u8,
    pub(super) len: u64,
}

/// A stream with two launches that alternate, so that the GPU does not wait for this process.
#[derive(Debug)]
pub(super) struct Lane {
    direction: Direction,
    flights: [Flight; 2],
    stream: Stream,
    kernel: Kernel,
}

/// One launch: its table and, for host memory that the GPU does not reach, a buffer.
#[derive(Debug)]
struct Flight {
    /// Runs in host memory that the driver owns, and in the device's.
    runs: HostBuffer,
    table: DeviceBuffer,
    buffer: Option<HostBuffer>,
    /// Host side of what a gather has left in the buffer.
    left: Vec<Piece>,
    done: Event,
    is_under_way: bool,
}

impl Lane {
    pub(super) fn new(direction: Direction) -> Result<Self> {
        Ok(Self {
            direction,
            flights: [Flight::new()?, Flight::new()?],
            stream: Stream::new()?,
            kernel: Kernel::load()?,
        })
    }

    /// Copies all pieces, as long as `proceed` returns true, which is asked before each launch.
    /// Returns false after it did not. Nothing is under way any more when this returns, unless with
    /// an error.
    pub(super) fn copy(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &Pinned,
        proceed: &dyn Fn() -> bool,
        wait: &dyn Fn(&Event) -> Result<()>,
    ) -> Result<bool> {
        let launched = self.launch_all(pieces, pinned, proceed, wait);
        // After an error too: what is under way writes to memory that is lent for this call.
        let landed = self.flights.each_mut().map(|flight| flight.land(wait));
        let proceeded = launched?;
        landed.into_iter().collect::<Result<()>>()?;
        Ok(proceeded)
    }

    fn launch_all(
        &mut self,
        pieces: impl Iterator<Item = Piece>,
        pinned: &Pinned,
        proceed: &dyn Fn() -> bool,
        wait: &dyn Fn(&Event) -> Result<()>,
    ) -> Result<bool> {
        let mut pieces = pieces.flat_map(cut).peekable();
        let mut turn = 0;
        while pieces.peek().is_some() {
            let flight = &mut self.flights[turn];
            flight.land(wait)?;
            if !proceed() {
                return Ok(false);
            }
            let runs = flight.load(&mut pieces, self.direction, pinned)?;
            let blocks = match self.direction {
                Direction::Gather => BLOCKS_TO_HOST,
                Direction::Scatter => BLOCKS_TO_DEVICE,
            };
            flight.is_under_way = true;
            let (runs, table, done) = (flight.runs(runs), &flight.table, &flight.done);
            // SAFETY: the table is not written before the flight has landed. Device addresses were
            // checked when the plan was made, and the plan keeps that memory open; host addresses
            // lie in chunks that are lent for this call, which ends after the last landing, and are
            // registered, or lie in the flight's buffer.
            unsafe { (self.stream).copy_runs(&self.kernel, blocks, runs, table, done) }?;
            turn = 1 - turn;
        }
        Ok(true)
    }
}

// SAFETY: the addresses in `left` are used by the copy that put them there and has not returned yet.
unsafe impl Send for Flight {}

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

impl Flight {
    fn new() -> Result<Self> {
        Ok(Self {
            runs: HostBuffer::new(RUNS * size_of::<Run>())?,
            table: DeviceBuffer::new(RUNS * size_of::<Run>())?,
            buffer: None,
            left: Vec::new(),
            done: Event::new()?,
            is_under_way: false,
        })
    }

    /// Waits for the launch, if there is one, and takes its bytes out of the buffer.
    fn land(&mut self, wait: &dyn Fn(&Event) -> Result<()>) -> Result<()> {
        if !self.is_under_way {
            return Ok(());
        }
        wait(&self.done)?;
        self.is_under_way = false;
        let mut at = self
            .buffer
            .as_ref()
            .map_or(ptr::null_mut(), |buffer| buffer.base);
        for piece in self.left.drain(..) {
            // SAFETY: the launch has ended; `load` has counted these bytes in the buffer, and the
            // chunk is lent for the copy.
            unsafe { ptr::copy_nonoverlapping(at, piece.host, piece.len as usize) };
            at = at.wrapping_add(piece.len as usize);
        }
        Ok(())
    }

    /// Fills the table with the next runs. Returns their number.
    fn load(
        &mut self,
        pieces: &mut std::iter::Peekable<impl Iterator<Item = Piece>>,
        direction: Direction,
        pinned: &Pinned,
    ) -> Result<usize> {
        let (mut count, mut bytes) = (0, 0);
        let reaches = |piece: &Piece| pinned.holds(piece.host, piece.len as usize);
        let Some(direct) = pieces.peek().map(reaches) else {
            return Ok(0);
        };
        if !direct && self.buffer.is_none() {
            self.buffer = Some(HostBuffer::new(SLICE)?);
        }
        let buffer = self
            .buffer
            .as_ref()
            .map_or(ptr::null_mut(), |buffer| buffer.base);
        let fits = |piece: &Piece, count: usize, bytes: usize| {
            count < RUNS && bytes + piece.len as usize <= SLICE && reaches(piece) == direct
        };
        while let Some(piece) = pieces.next_if(|piece| fits(piece, count, bytes)) {
            let mut host = piece.host;
            if !direct {
                host = buffer.wrapping_add(bytes);
                match direction {
                    Direction::Gather => self.left.push(piece),
                    // SAFETY: the piece's chunk is lent for the copy, and the buffer has SLICE bytes,
                    // which no launch reads now.
                    Direction::Scatter => unsafe {
                        ptr::copy_nonoverlapping(piece.host, host, piece.len as usize);
                    },
                }
            }
            let host = host.expose_provenance() as u64;
            let (from, to) = match direction {
                Direction::Gather => (piece.device, host),
                Direction::Scatter => (host, piece.device),
            };
            let run = Run {
                from,
                to,
                len: piece.len,
            };
            // SAFETY: `fits` keeps the count below RUNS, and no launch reads the table now.
            unsafe { self.runs.base.cast::<Run>().add(count).write(run) };
            count += 1;
            bytes += piece.len as usize;
        }
        Ok(count)
    }

    fn runs(&self, count: usize) -> &[Run] {
        // SAFETY: `load` has written as many.
        unsafe { std::slice::from_raw_parts(self.runs.base.cast(), count) }
    }
}

/// Time after which a launch counts as hung: 16 MiB take less than a millisecond.
pub(super) const HUNG: std::time::Duration = std::time::Duration::from_secs(20);

/// Waits for a launch. `late` is told once when it counts as hung; the wait goes on until the GPU is
/// done or broken, because an answer before would give blocks away that are still written.
pub(super) fn wait_for(done: &Event, late: &dyn Fn()) -> Result<()> {
    let mut pause = Pause::default();
    let mut said = false;
    while !done.is_done()? {
        if !said && pause.elapsed() > HUNG {
            said = true;
            late();
        }
        pause.take();
    }
    Ok(())
}
