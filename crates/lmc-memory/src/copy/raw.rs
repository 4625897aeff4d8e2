//! The loop that moves bytes: the only place where a plan meets addresses.

use std::ptr;

use super::plan::{Op, Repeat};

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// From paged memory into chunks.
    Gather,
    /// From chunks into paged memory.
    Scatter,
}

/// The two sides of a copy: where a segment and a chunk start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sides {
    pub(super) segment: *mut u8,
    pub(super) chunk: *mut u8,
}

/// One side of a nest of two loops around a run.
#[derive(Clone, Copy)]
struct Walk {
    at: *mut u8,
    outer: usize,
    inner: usize,
}

/// Carries out one copy.
///
/// # Safety
/// `op` comes from a plan whose paged cache lies in `sides.segment` and whose chunks have the
/// length of the plan's layout from `sides.chunk` on; the chunk and the segment do not
/// overlap; nobody else in this process accesses the bytes that are written.
pub(super) unsafe fn copy(
    op: &Op,
    tokens: Repeat,
    heads: Repeat,
    direction: Direction,
    sides: Sides,
) {
    // SAFETY: the plan has checked that every byte of the copy lies inside both sides.
    let (paged, chunk) = unsafe {
        (
            sides.segment.add(op.paged as usize),
            sides.chunk.add(op.chunk_offset as usize),
        )
    };
    let run = op.run as usize;
    if tokens.count == 1 && heads.count == 1 {
        let (from, to) = match direction {
            Direction::Gather => (paged, chunk),
            Direction::Scatter => (chunk, paged),
        };
        // SAFETY: as above, and the sides do not overlap.
        unsafe { ptr::copy_nonoverlapping(from, to, run) };
        return;
    }
    // The inner loop walks the side that is written in order of its addresses: whole cache
    // lines leave the core, and the side that jumps is the one that the prefetchers read.
    let heads_inside = match direction {
        Direction::Gather => heads.count > 1,
        Direction::Scatter => heads.count > 1 && heads.paged <= tokens.paged,
    };
    let (outer, inner) = if heads_inside {
        (tokens, heads)
    } else {
        (heads, tokens)
    };
    let paged = Walk {
        at: paged,
        outer: outer.paged as usize,
        inner: inner.paged as usize,
    };
    let chunk = Walk {
        at: chunk,
        outer: outer.chunk as usize,
        inner: inner.chunk as usize,
    };
    let (from, to) = match direction {
        Direction::Gather => (paged, chunk),
        Direction::Scatter => (chunk, paged),
    };
    let counts = (outer.count as usize, inner.count as usize);
    // SAFETY: the plan has checked the last run of the last repetition on both sides.
    unsafe {
        match run {
            64 => nest::<64>(counts, from, to),
            128 => nest::<128>(counts, from, to),
            256 => nest::<256>(counts, from, to),
            512 => nest::<512>(counts, from, to),
            _ => nest_any(counts, from, to, run),
        }
    }
}

/// Runs of a fixed length, which the compiler turns into straight loads and stores.
///
/// # Safety
/// Every run of the nest lies inside its side, and the sides do not overlap.
unsafe fn nest<const RUN: usize>(counts: (usize, usize), from: Walk, to: Walk) {
    for outer in 0..counts.0 {
        for inner in 0..counts.1 {
            // SAFETY: by the caller's promise.
            unsafe {
                let from = from.at.add(outer * from.outer + inner * from.inner);
                let to = to.at.add(outer * to.outer + inner * to.inner);
                ptr::copy_nonoverlapping(from.cast::<[u8; RUN]>(), to.cast(), 1);
            }
        }
    }
}

/// Runs of any length.
///
/// # Safety
/// As for [`nest`].
unsafe fn nest_any(counts: (usize, usize), from: Walk, to: Walk, run: usize) {
    for outer in 0..counts.0 {
        for inner in 0..counts.1 {
            // SAFETY: by the caller's promise.
            unsafe {
                let from = from.at.add(outer * from.outer + inner * from.inner);
                let to = to.at.add(outer * to.outer + inner * to.inner);
                ptr::copy_nonoverlapping(from, to, run);
            }
        }
    }
}
