//! Gather and scatter on several cores.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

use super::Direction;
use super::paged::KvSegments;
use super::plan::{CopyPlan, CopyRun};
use super::stream::Store;
use super::team::Team;
use crate::SegmentError;

/// Bytes that a thread takes at a time: enough that taking a share costs nothing, and so few that the caller
/// does not wait for the last thread. A stopped copy writes at most one share (or one run, if that is longer)
/// more for each thread.
const SHARE: u64 = 512 << 10;

/// Size from which copies bypass the cache.
const LARGE: u64 = 1 << 20;

/// Length of a run up to which the next run is prefetched meanwhile; longer runs keep the hardware's
/// prefetchers busy.
const AHEAD: u64 = 64 << 10;

/// A gather or scatter that was not carried out, or whose result must not be used.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The number of chunks is not as planned; nothing has been copied.
    #[error("the plan has {expected} chunks, {found} were given")]
    Chunks {
        /// Chunks in the plan.
        expected: usize,
        /// Chunks passed.
        found: usize,
    },
    /// The length of a chunk is not as planned; nothing has been copied.
    #[error("chunk {chunk} must have {expected} bytes, found {found}")]
    ChunkBytes {
        /// Index of the chunk.
        chunk: usize,
        /// Bytes in the plan.
        expected: u64,
        /// Bytes of the chunk.
        found: u64,
    },
    /// The engine's memory was lost. The chunks' bytes after a gather must not be used.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The GPU could not copy. The chunks' bytes after a gather must not be used.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] crate::cuda::CudaError),
    /// The caller stopped the copy. A part of the bytes was copied.
    #[error("the copy was stopped before its end")]
    Stopped,
}

/// Threads (`lmc-copy-{i}`) that copy together with the calling thread.
///
/// Several threads may call at once; they are served in turn, each with at least its own core.
pub struct CopyPool {
    team: Team,
}

impl fmt::Debug for CopyPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyPool")
            .field("workers", &self.workers())
            .finish()
    }
}

/// First byte of each segment and chunk.
struct Addresses {
    segments: Vec<*mut u8>,
    chunks: Vec<*mut u8>,
}

// SAFETY: addresses are shared among the threads of one gather or scatter, no two of which write
// the same byte: see `CopyPool::copy`.
unsafe impl Sync for Addresses {}

impl CopyPool {
    /// Starts `workers` threads; with 0 the caller copies alone.
    ///
    /// # Errors
    /// The error of the system if a thread cannot be started.
    pub fn new(workers: usize) -> io::Result<Self> {
        Ok(Self {
            team: Team::new("lmc-copy", workers)?,
        })
    }

    /// Returns the number of threads besides the caller.
    pub fn workers(&self) -> usize {
        self.team.threads()
    }

    /// Returns the kind of copy that is used from 1 MiB on. The first call in a process, or the first such
    /// copy, measures it in about 10 ms.
    pub fn large_copies() -> impl fmt::Debug {
        Store::around_the_cache()
    }

    /// Copies paged memory into chunks; `chunks[i]` is the i-th chunk of the plan. Bytes of skipped blocks
    /// are set to zero, so that no former content of a slot remains.
    ///
    /// # Errors
    /// [`CopyError`]; after [`CopyError::Segment`] the chunks' bytes must not be used.
    pub fn gather(&self, plan: &CopyPlan, chunks: &mut [&mut [u8]]) -> Result<(), CopyError> {
        self.gather_while(plan, chunks, &|| true)
    }

    /// Copies as [`Self::gather`] does, as long as `proceed` returns true. Each thread calls it before each
    /// share of at most 1 MiB.
    ///
    /// # Errors
    /// [`CopyError`]; after [`CopyError::Stopped`] and [`CopyError::Segment`] the chunks' bytes must not be
    /// used.
    pub fn gather_while(
        &self,
        plan: &CopyPlan,
        chunks: &mut [&mut [u8]],
        proceed: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), CopyError> {
        check(plan, chunks.iter().map(|chunk| chunk.len()))?;
        for hole in &plan.holes {
            let from = hole.offset as usize;
            chunks[hole.chunk as usize][from..from + hole.len as usize].fill(0);
        }
        let chunks = chunks.iter_mut().map(|chunk| chunk.as_mut_ptr()).collect();
        self.copy(plan, Direction::Gather, chunks, proceed)
    }

    /// Copies chunks into paged memory; `chunks[i]` is the i-th chunk of the plan.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn scatter(&self, plan: &CopyPlan, chunks: &[&[u8]]) -> Result<(), CopyError> {
        self.scatter_while(plan, chunks, &|| true)
    }

    /// Copies as [`Self::scatter`] does, as long as `proceed` returns true. Each thread calls it before each
    /// share of at most 1 MiB; after the first false, no thread begins another share.
    ///
    /// # Errors
    /// [`CopyError`]; after [`CopyError::Stopped`] a part of the paged memory has been written.
    pub fn scatter_while(
        &self,
        plan: &CopyPlan,
        chunks: &[&[u8]],
        proceed: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), CopyError> {
        check(plan, chunks.iter().map(|chunk| chunk.len()))?;
        // Scatter only reads from these addresses.
        let chunks = chunks
            .iter()
            .map(|chunk| chunk.as_ptr().cast_mut())
            .collect();
        self.copy(plan, Direction::Scatter, chunks, proceed)
    }

    fn copy(
        &self,
        plan: &CopyPlan,
        direction: Direction,
        chunks: Vec<*mut u8>,
        proceed: &(dyn Fn() -> bool + Sync),
    ) -> Result<(), CopyError> {
        #[cfg_attr(
            not(feature = "cuda"),
            allow(
                clippy::infallible_destructuring_match,
                reason = "there is one kind of memory then"
            )
        )]
        let segments = match plan.paged.segments() {
            KvSegments::Host(segments) => segments,
            #[cfg(feature = "cuda")]
            KvSegments::Device(segments) => {
                return on_device(plan, segments, direction, &chunks, proceed);
            }
        };
        for segment in segments {
            segment.check()?;
        }
        let addresses = Addresses {
            segments: segments
                .iter()
                .map(|segment| segment.base_ptr().as_ptr())
                .collect(),
            chunks,
        };
        let addresses = &addresses;
        let store = if plan.bytes() < LARGE {
            Store::Plain
        } else {
            Store::around_the_cache()
        };
        let step = ops_of_a_share(plan);
        let stopped = AtomicBool::new(false);
        let copy_share = |i: usize| {
            if stopped.load(Ordering::Relaxed) || !proceed() {
                stopped.store(true, Ordering::Relaxed);
                return;
            }
            let share = &plan.runs[i * step..plan.runs.len().min((i + 1) * step)];
            for (i, run) in share.iter().enumerate() {
                let next = share.get(i + 1);
                carry_out(run, next, direction, store, addresses);
            }
            store.finish();
        };
        let shares = plan.runs.len().div_ceil(step);
        // A gather writes chunks; its copies are always disjoint there.
        if direction == Direction::Gather || plan.disjoint {
            self.team.run(shares, &copy_share);
        } else {
            (0..shares).for_each(copy_share);
        }
        for segment in segments {
            segment.check()?;
        }
        match stopped.into_inner() {
            true => Err(CopyError::Stopped),
            false => Ok(()),
        }
    }
}

/// Copies between a GPU's memory and chunks. The GPU carries out the copies of a launch in any order. Two
/// copies write the same byte only if the engine's layers share one cache, and then they write the same
/// value.
#[cfg(feature = "cuda")]
fn on_device(
    plan: &CopyPlan,
    segments: &[std::sync::Arc<crate::cuda::DeviceMemory>],
    direction: Direction,
    chunks: &[*mut u8],
    proceed: &(dyn Fn() -> bool + Sync),
) -> Result<(), CopyError> {
    let Some(gpu) = segments.first().map(|memory| memory.gpu()) else {
        return Ok(());
    };
    let runs = plan.runs.iter().map(|run| {
        let device = segments[run.segment as usize].base() + run.paged;
        let host = chunks[run.chunk as usize].wrapping_add(run.chunk_offset as usize);
        (device, host, run.len)
    });
    match gpu.copy(direction, runs, proceed)? {
        true => Ok(()),
        false => Err(CopyError::Stopped),
    }
}

fn carry_out(
    run: &CopyRun,
    next: Option<&CopyRun>,
    direction: Direction,
    store: Store,
    addresses: &Addresses,
) {
    let source = |run: &CopyRun| match direction {
        Direction::Gather => {
            addresses.segments[run.segment as usize].wrapping_add(run.paged as usize)
        }
        Direction::Scatter => {
            addresses.chunks[run.chunk as usize].wrapping_add(run.chunk_offset as usize)
        }
    };
    let from = source(run);
    // Used for prefetching only.
    let ahead = match next {
        Some(next) if run.len <= AHEAD => source(next),
        _ => from,
    };
    // SAFETY: the plan was checked against these segments when it was made, and `check` has
    // compared the chunks' lengths with its layout, so both sides have the run. On the server,
    // chunks lie in its pool, which cannot be opened as a segment (`shared_file::is_pool`); in a
    // worker, chunks lie in the mapped pool and the paged side in the engine's own tensors, which
    // are another mapping. So the sides do not overlap. A gather writes chunks, which are borrowed
    // mutably for the call, each byte in one copy; a scatter writes the paged side, each byte on
    // one thread (`copy`). The paged side's bytes belong to the engine, which may write them at any
    // time, as may another plan that the engine asks for meanwhile: they are only ever copied,
    // never borrowed, and nothing is decided by them, so such a race garbles bytes of that engine
    // and nothing else. The caller calls `Store::finish`.
    unsafe {
        let to = match direction {
            Direction::Gather => {
                addresses.chunks[run.chunk as usize].add(run.chunk_offset as usize)
            }
            Direction::Scatter => addresses.segments[run.segment as usize].add(run.paged as usize),
        };
        store.copy(from, to, run.len as usize, ahead);
    }
}

/// Returns about how many copies make up one share; the copies of a plan have similar sizes.
fn ops_of_a_share(plan: &CopyPlan) -> usize {
    let average = (plan.bytes() / plan.runs.len().max(1) as u64).max(1);
    (SHARE / average).max(1) as usize
}

fn check(plan: &CopyPlan, lens: impl ExactSizeIterator<Item = usize>) -> Result<(), CopyError> {
    if lens.len() != plan.chunks() {
        return Err(CopyError::Chunks {
            expected: plan.chunks(),
            found: lens.len(),
        });
    }
    let expected = plan.chunk_bytes();
    for (chunk, found) in lens.enumerate() {
        if found as u64 != expected {
            return Err(CopyError::ChunkBytes {
                chunk,
                expected,
                found: found as u64,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
