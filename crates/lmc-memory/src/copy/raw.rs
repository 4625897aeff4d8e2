//! The loop that moves bytes: the only place where a plan meets addresses.

use super::plan::{Op, Repeat};
use super::stream::{Nest, Step, Store};

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

/// Most tokens of a block that are copied before the next ones, where heads lie apart: as many
/// streams as the prefetchers follow at once, and few enough to be asked for ahead.
const TILE: u32 = 16;

/// Bytes of a run up to which the next copy is asked for meanwhile; with more, the streams of
/// the run itself are long enough.
const AHEAD: u64 = 64 << 10;

/// Bytes of a block up to which a gather reads it in order of its addresses: so short a block
/// ends before the prefetchers have found several streams in it.
const SHORT: u64 = 16 << 10;

/// Carries out one copy. `next` is the one that this thread carries out after it.
///
/// # Safety
/// `op` comes from a plan whose paged cache lies in `sides.segment` and whose chunks have the
/// length of the plan's layout from `sides.chunk` on; the chunk and the segment do not
/// overlap; no reference to the bytes that are written is used meanwhile, and no other thread
/// writes them for the same plan.
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
    let (from, to) = match direction {
        Direction::Gather => (paged, chunk),
        Direction::Scatter => (chunk, paged),
    };
    // Only ever prefetched, so it may lie anywhere.
    let after = match next {
        Some((next, sides)) if op.run <= AHEAD => match direction {
            Direction::Gather => sides.segment.wrapping_add(next.paged as usize),
            Direction::Scatter => sides.chunk.wrapping_add(next.chunk_offset as usize),
        },
        _ => from,
    };
    let step = |repeat: Repeat| match direction {
        Direction::Gather => Step {
            count: 0,
            from: repeat.paged as usize,
            to: repeat.chunk as usize,
        },
        Direction::Scatter => Step {
            count: 0,
            from: repeat.chunk as usize,
            to: repeat.paged as usize,
        },
    };
    let by_head = Step {
        count: heads.count as usize,
        ..step(heads)
    };
    let by_token = step(tokens);
    let bytes = op.run * u64::from(heads.count) * u64::from(tokens.count);
    let in_order_of_source = direction == Direction::Gather && bytes <= SHORT;
    let mut first = 0;
    while first < tokens.count {
        let count = TILE.min(tokens.count - first) as usize;
        let by_token = Step { count, ..by_token };
        // The inner loop walks the side that is written in order of its addresses.
        let heads_inside = by_head.to <= by_token.to && !in_order_of_source;
        let (outer, inner) = if heads_inside {
            (by_token, by_head)
        } else {
            (by_head, by_token)
        };
        let nest = Nest {
            outer,
            inner,
            run: op.run as usize,
        };
        // SAFETY: the plan has checked the last run of the last repetition on both sides.
        unsafe {
            let from = from.add(first as usize * by_token.from);
            let to = to.add(first as usize * by_token.to);
            let ahead = if first + TILE < tokens.count {
                from.wrapping_add(count * by_token.from)
            } else {
                after
            };
            store.copy(&nest, from, to, ahead);
        }
        first += TILE;
    }
}
