//! Which runs of paged memory belong to which chunk.

use thiserror::Error;

use super::overlap;
use super::paged::PagedGeometry;
use crate::{GroupLayout, PagedKv};

/// Longest single run: longer ones are cut so that several cores can share them.
const MAX_RUN: u64 = 1 << 20;

/// What to copy.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The block table: token `t` lies in block `block_ids[t / block_tokens]`.
    pub block_ids: &'a [u32],
    /// First token of each chunk, counted from the start of the block table.
    pub chunk_starts: &'a [u64],
    /// Tokens of the block table below this one are left out (the engine has them already).
    pub skip_first_tokens: u64,
    /// Blocks with this id stand for nothing and are left out (sliding windows).
    pub null_block: Option<u32>,
}

/// A request that cannot be carried out; nothing has been copied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A block id beyond the engine's cache.
    #[error("block id {id} at position {position} is outside the {blocks} registered blocks")]
    Block {
        /// The id.
        id: u32,
        /// Where in the block table.
        position: usize,
        /// Blocks there are.
        blocks: u32,
    },
    /// The block table ends before the chunk does.
    #[error("chunk {chunk} needs tokens up to {end}, but the block table covers {covered}")]
    Short {
        /// Index of the chunk.
        chunk: usize,
        /// First token beyond the chunk; `u64::MAX` when it cannot be counted.
        end: u64,
        /// Tokens covered by the block table.
        covered: u64,
    },
    /// The chunk's layout is not that of the paged cache.
    #[error(
        "the chunk's layout {chunk:?} differs from the engine's {engine:?} in more than tokens"
    )]
    Layout {
        /// Of the chunk.
        chunk: Box<GroupLayout>,
        /// Of the engine.
        engine: Box<GroupLayout>,
    },
}

/// A repetition of a run: so many, and so far apart on each side, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repeat {
    pub(super) count: u32,
    pub(super) paged: u64,
    pub(super) chunk: u64,
}

impl Repeat {
    const ONCE: Self = Self {
        count: 1,
        paged: 0,
        chunk: 0,
    };
}

/// A run of bytes that is contiguous on both sides, repeated over tokens and heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Op {
    /// Bytes from the start of the segment.
    pub(super) paged: u64,
    /// Bytes from the start of the chunk.
    pub(super) chunk_offset: u64,
    /// Bytes of the run.
    pub(super) run: u64,
    pub(super) segment: u32,
    pub(super) chunk: u32,
    /// Tokens; one where the run covers them.
    pub(super) tokens: u32,
    /// Whether the run is one head, so that heads are repeated too.
    pub(super) by_head: bool,
}

/// Bytes of a chunk that a plan leaves out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) chunk: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The copies of one gather or scatter: checked against the engine's memory, and merged, so
/// that blocks which are neighbours on both sides are one run.
///
/// A plan holds the engine's memory mapped, and can be carried out in either direction by
/// [`crate::CopyPool`].
#[derive(Clone, Debug)]
pub struct CopyPlan {
    pub(super) paged: PagedKv,
    layout: GroupLayout,
    chunks: usize,
    pub(super) ops: Vec<Op>,
    pub(super) holes: Vec<Hole>,
    bytes: u64,
    /// True if no byte of the paged cache is in two copies.
    pub(super) disjoint: bool,
}

impl CopyPlan {
    /// Works out the copies between a paged cache and chunks of `layout`, which may differ
    /// from the cache's own in the number of tokens (a partial chunk).
    ///
    /// # Errors
    /// [`PlanError`]: a block outside the cache, a block table too short, another layout.
    pub fn new(
        paged: &PagedKv,
        layout: &GroupLayout,
        request: &PlanRequest<'_>,
    ) -> Result<Self, PlanError> {
        let engine = paged.layout();
        if engine.with_tokens(layout.tokens()).ok().as_ref() != Some(layout) {
            return Err(PlanError::Layout {
                chunk: Box::new(*layout),
                engine: Box::new(*engine),
            });
        }
        let geometry = *paged.geometry();
        let null = |id: u32| request.null_block == Some(id);
        let outside = |&(_, &id): &(usize, &u32)| id >= geometry.blocks && !null(id);
        if let Some((position, &id)) = request.block_ids.iter().enumerate().find(outside) {
            return Err(PlanError::Block {
                id,
                position,
                blocks: geometry.blocks,
            });
        }
        let covered = request.block_ids.len() as u64 * u64::from(geometry.block_tokens);
        let mut plan = Self {
            paged: paged.clone(),
            layout: *layout,
            chunks: request.chunk_starts.len(),
            ops: Vec::new(),
            holes: Vec::new(),
            bytes: 0,
            disjoint: false,
        };
        let mut spans = Vec::with_capacity(request.block_ids.len());
        for (chunk, &start) in request.chunk_starts.iter().enumerate() {
            let end = start.saturating_add(u64::from(layout.tokens()));
            if end > covered {
                return Err(PlanError::Short {
                    chunk,
                    end,
                    covered,
                });
            }
            let pieces = pieces(&geometry, request, start, end);
            let span = |piece: &Piece| Some((piece.block?, piece.first, piece.tokens));
            spans.extend(pieces.iter().filter_map(span));
            plan.add_chunk(chunk as u32, &geometry, &pieces);
        }
        plan.disjoint = paged.is_disjoint() && overlap::are_distinct(&mut spans);
        Ok(plan)
    }

    /// Adds all planes of one chunk, in the order of the chunk's bytes.
    fn add_chunk(&mut self, chunk: u32, geometry: &PagedGeometry, pieces: &[Piece]) {
        let paged = self.paged.clone();
        let token_bytes = self.layout.token_bytes();
        let heads_touch = geometry.heads == 1 || geometry.head_stride == geometry.head_bytes;
        let tokens_touch = heads_touch && geometry.token_stride == token_bytes;
        for (plane, base) in paged.planes().iter().enumerate() {
            let plane_offset = plane as u64 * self.layout.layer_bytes();
            for piece in pieces {
                let chunk_offset = plane_offset + u64::from(piece.chunk_token) * token_bytes;
                let bytes = u64::from(piece.tokens) * token_bytes;
                let Some(block) = piece.block else {
                    self.add_hole(Hole {
                        chunk,
                        offset: chunk_offset,
                        len: bytes,
                    });
                    continue;
                };
                // Checked by `PagedKv::new` for the last block and token: no overflow.
                let at = base.offset
                    + u64::from(block) * geometry.block_stride
                    + u64::from(piece.first) * geometry.token_stride;
                let (run, tokens) = match (tokens_touch, heads_touch) {
                    (true, _) => (bytes, 1),
                    (false, true) => (token_bytes, piece.tokens),
                    (false, false) => (geometry.head_bytes, piece.tokens),
                };
                self.bytes += bytes;
                self.add_op(Op {
                    paged: at,
                    chunk_offset,
                    run,
                    segment: base.segment as u32,
                    chunk,
                    tokens,
                    by_head: !heads_touch,
                });
            }
        }
    }

    /// Adds a copy, or lengthens the last one if they touch on both sides.
    fn add_op(&mut self, mut op: Op) {
        let plain = |op: &Op| op.tokens == 1 && !op.by_head;
        if let Some(last) = self.ops.last_mut()
            && plain(last)
            && plain(&op)
            && (last.segment, last.chunk) == (op.segment, op.chunk)
            && last.paged + last.run == op.paged
            && last.chunk_offset + last.run == op.chunk_offset
        {
            let more = op.run.min(MAX_RUN - last.run.min(MAX_RUN));
            last.run += more;
            op.run -= more;
            op.paged += more;
            op.chunk_offset += more;
            if op.run == 0 {
                return;
            }
        }
        if plain(&op) {
            while op.run > MAX_RUN {
                self.ops.push(Op { run: MAX_RUN, ..op });
                op.run -= MAX_RUN;
                op.paged += MAX_RUN;
                op.chunk_offset += MAX_RUN;
            }
        }
        self.ops.push(op);
    }

    fn add_hole(&mut self, hole: Hole) {
        if let Some(last) = self.holes.last_mut()
            && last.chunk == hole.chunk
            && last.offset + last.len == hole.offset
        {
            last.len += hole.len;
            return;
        }
        self.holes.push(hole);
    }

    /// How heads are repeated within each token of a copy.
    pub(super) fn heads(&self, op: &Op) -> Repeat {
        let geometry = self.paged.geometry();
        if !op.by_head {
            return Repeat::ONCE;
        }
        Repeat {
            count: geometry.heads,
            paged: geometry.head_stride,
            chunk: geometry.head_bytes,
        }
    }

    /// How tokens are repeated within a copy.
    pub(super) fn tokens(&self, op: &Op) -> Repeat {
        Repeat {
            count: op.tokens,
            paged: self.paged.geometry().token_stride,
            chunk: self.layout.token_bytes(),
        }
    }

    /// The paged cache it was made for.
    pub fn paged(&self) -> &PagedKv {
        &self.paged
    }

    /// The layout of each chunk.
    pub fn layout(&self) -> &GroupLayout {
        &self.layout
    }

    /// Number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Bytes that will be copied.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Copies after merging: one for each run, or for each block where tokens or heads are
    /// apart. Runs longer than 1 MiB count once for each MiB.
    pub fn copies(&self) -> usize {
        self.ops.len()
    }
}

/// Tokens of one chunk that lie in one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    /// `None` for tokens that are left out.
    block: Option<u32>,
    /// First token within the block.
    first: u32,
    tokens: u32,
    /// First token within the chunk.
    chunk_token: u32,
}

/// Cuts the tokens from `start` to `end` of the block table at every block, and at the last
/// token to be skipped. The range is covered by the table.
fn pieces(geometry: &PagedGeometry, request: &PlanRequest<'_>, start: u64, end: u64) -> Vec<Piece> {
    let block_tokens = u64::from(geometry.block_tokens);
    let mut pieces = Vec::with_capacity((end - start).div_ceil(block_tokens) as usize + 2);
    let skip = request.skip_first_tokens.clamp(start, end);
    let mut token = start;
    while token < end {
        let id = request.block_ids[(token / block_tokens) as usize];
        let block_end = (token / block_tokens + 1) * block_tokens;
        let skipped = token < skip;
        let until = block_end.min(if skipped { skip } else { end });
        pieces.push(Piece {
            block: (!skipped && request.null_block != Some(id)).then_some(id),
            first: (token % block_tokens) as u32,
            tokens: (until - token) as u32,
            chunk_token: (token - start) as u32,
        });
        token = until;
    }
    pieces
}

#[cfg(test)]
mod tests;
