//! The loop that moves bytes: the only place where a plan meets addresses.

use super::plan::{Op, Repeat};
use super::stream::Store;

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

/// Most entries of the inner loop before the outer one moves on: as many streams as the
/// prefetchers follow at once, and as many pages as the first TLB holds beside others.
const TILE: u32 = 16;

/// Bytes of a copy up to which the next one is asked for meanwhile; with more, the streams of
/// the copy itself are long enough.
const AHEAD: u64 = 64 << 10;

/// Carries out one copy. `next` is the one that this thread carries out after it.
///
/// # Safety
/// `op` comes from a plan whose paged cache lies in `sides.segment` and whose chunks have the
/// length of the plan's layout from `sides.chunk` on; the chunk and the segment do not
/// overlap; nobody else in this process accesses the bytes that are written.
pub(super) unsafe fn copy(
    op: &Op,
    next: Option<(&Op, Sides)>,
    tokens: Repeat,
    heads: Repeat,
    direction: Direction,
    store: Store,
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
    let (from, to) = match direction {
        Direction::Gather => (paged, chunk),
        Direction::Scatter => (chunk, paged),
    };
    let bytes = op.run * u64::from(tokens.count) * u64::from(heads.count);
    let ahead = match next {
        // Only ever prefetched, so it may lie anywhere.
        Some((next, sides)) if bytes <= AHEAD => match direction {
            Direction::Gather => sides.segment.wrapping_add(next.paged as usize),
            Direction::Scatter => sides.chunk.wrapping_add(next.chunk_offset as usize),
        },
        _ => from,
    };
    if tokens.count == 1 && heads.count == 1 {
        // SAFETY: as above, and the sides do not overlap.
        unsafe { store.copy(from, to, run, ahead) };
        return;
    }
    // The inner loop walks the side that is written in order of its addresses.
    let heads_inside = match direction {
        Direction::Gather => heads.count > 1,
        Direction::Scatter => heads.count > 1 && heads.paged <= tokens.paged,
    };
    let (outer, inner) = if heads_inside {
        (tokens, heads)
    } else {
        (heads, tokens)
    };
    let steps = |repeat: Repeat| match direction {
        Direction::Gather => (repeat.paged as usize, repeat.chunk as usize),
        Direction::Scatter => (repeat.chunk as usize, repeat.paged as usize),
    };
    let (from_outer, to_outer) = steps(outer);
    let (from_inner, to_inner) = steps(inner);
    let mut first = 0;
    while first < inner.count {
        let last = inner.count.min(first + TILE);
        for i in 0..outer.count as usize {
            for j in first as usize..last as usize {
                let at = i * from_outer + j * from_inner;
                // SAFETY: the plan has checked the last run of the last repetition on both
                // sides.
                unsafe {
                    let to = to.add(i * to_outer + j * to_inner);
                    store.copy(from.add(at), to, run, ahead.wrapping_add(at));
                }
            }
        }
        first = last;
    }
}
