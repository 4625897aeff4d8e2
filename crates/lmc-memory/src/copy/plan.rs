//! [`CopyPlan`]: the runs of paged memory that belong to each chunk.

use thiserror::Error;

use super::overlap;
use crate::PagedKv;

/// Longest single run: longer runs are cut so that several cores can share them.
const MAX_RUN: u64 = 1 << 20;

/// The chunks of one copy, described by their blocks.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// Block table of the request: ids of the engine's blocks, in token order.
    pub block_ids: &'a [u32],
    /// Index of each chunk's first block in the block table.
    pub first_blocks: &'a [u64],
    /// Number of blocks at the start of the block table that are skipped, because the engine has them
    /// already.
    pub skip_blocks: u64,
    /// Id of blocks without memory (sliding windows), which are skipped.
    pub null_block: Option<u32>,
}

/// A request that is invalid; nothing has been copied.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A block id is beyond the engine's cache.
    #[error("block id {id} at position {position} is outside the {blocks} registered blocks")]
    Block {
        /// The block id.
        id: u32,
        /// Index in the block table.
        position: usize,
        /// Blocks of the engine's cache.
        blocks: u32,
    },
    /// The block table ends before the chunk.
    #[error("chunk {chunk} needs blocks up to {end}, but the block table has {found}")]
    Short {
        /// Index of the chunk.
        chunk: usize,
        /// Index of the first block after the chunk; `u64::MAX` if it overflows.
        end: u64,
        /// Number of blocks in the block table.
        found: u64,
    },
}

/// A run of bytes that is contiguous on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRun {
    /// Bytes from the start of the segment.
    pub(super) paged: u64,
    /// Bytes from the start of the chunk.
    pub(super) chunk_offset: u64,
    /// Bytes of the run.
    pub(super) len: u64,
    pub(super) segment: u32,
    pub(super) chunk: u32,
}

/// Bytes of a chunk that a plan does not copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hole {
    pub(super) chunk: u32,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// The copies of one gather or scatter, checked against the engine's memory. Blocks that are adjacent on both
/// sides are merged into one run.
///
/// A plan keeps the engine's memory mapped. [`crate::CopyPool`] carries it out, in either direction.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    pub(super) paged: PagedKv,
    chunks: usize,
    pub(super) runs: Vec<CopyRun>,
    pub(super) holes: Vec<Hole>,
    bytes: u64,
    /// True if no byte of the paged cache is in two copies.
    pub(super) disjoint: bool,
}

impl CopyPlan {
    /// Computes the copies between a paged cache and its chunks.
    ///
    /// # Errors
    /// [`PlanError`]: a block is outside the cache, or the block table is too short.
    pub fn new(paged: &PagedKv, request: &PlanRequest<'_>) -> Result<Self, PlanError> {
        let blocks = paged.blocks();
        if let Some((position, &id)) = request
            .block_ids
            .iter()
            .enumerate()
            .find(|&(_, &id)| id >= blocks && request.null_block != Some(id))
        {
            return Err(PlanError::Block {
                id,
                position,
                blocks,
            });
        }
        let found = request.block_ids.len() as u64;
        let mut plan = Self {
            paged: paged.clone(),
            chunks: request.first_blocks.len(),
            runs: Vec::new(),
            holes: Vec::new(),
            bytes: 0,
            disjoint: false,
        };
        let mut copied = Vec::with_capacity(request.block_ids.len());
        for (chunk, &first) in request.first_blocks.iter().enumerate() {
            let end = first.saturating_add(paged.blocks_per_chunk());
            if end > found {
                return Err(PlanError::Short { chunk, end, found });
            }
            let table: Vec<Option<u32>> = (first..end)
                .map(|index| (index, request.block_ids[index as usize]))
                .map(|(index, id)| {
                    (index >= request.skip_blocks && request.null_block != Some(id)).then_some(id)
                })
                .collect();
            copied.extend(table.iter().flatten());
            plan.add_chunk(chunk as u32, &table);
        }
        plan.disjoint = paged.is_disjoint() && overlap::are_distinct(&mut copied);
        Ok(plan)
    }

    /// Adds all planes of one chunk, in the order of the chunk's bytes. `None` in the table stands for a
    /// skipped block.
    fn add_chunk(&mut self, chunk: u32, table: &[Option<u32>]) {
        let paged = self.paged.clone();
        let len = paged.block_bytes();
        let mut chunk_offset = 0;
        for base in paged.planes() {
            for &block in table {
                match block {
                    None => self.add_hole(Hole {
                        chunk,
                        offset: chunk_offset,
                        len,
                    }),
                    Some(block) => {
                        self.bytes += len;
                        self.add_run(CopyRun {
                            // Checked by `PagedKv::new` for the last block: no overflow.
                            paged: base.offset + u64::from(block) * paged.block_stride(),
                            chunk_offset,
                            len,
                            segment: base.segment as u32,
                            chunk,
                        });
                    }
                }
                chunk_offset += len;
            }
        }
    }

    /// Adds a copy, or extends the last one if they are adjacent on both sides.
    fn add_run(&mut self, mut run: CopyRun) {
        if let Some(last) = self.runs.last_mut()
            && (last.segment, last.chunk) == (run.segment, run.chunk)
            && last.paged + last.len == run.paged
            && last.chunk_offset + last.len == run.chunk_offset
        {
            let more = run.len.min(MAX_RUN - last.len.min(MAX_RUN));
            last.len += more;
            run.len -= more;
            run.paged += more;
            run.chunk_offset += more;
            if run.len == 0 {
                return;
            }
        }
        while run.len > MAX_RUN {
            self.runs.push(CopyRun {
                len: MAX_RUN,
                ..run
            });
            run.len -= MAX_RUN;
            run.paged += MAX_RUN;
            run.chunk_offset += MAX_RUN;
        }
        self.runs.push(run);
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

    /// Returns the bytes of each chunk.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.paged.chunk_bytes()
    }

    /// Returns the number of chunks.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns the number of bytes to copy.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of copies after merging: one for each run. A run longer than 1 MiB counts once for
    /// each MiB.
    pub fn copies(&self) -> usize {
        self.runs.len()
    }
}

#[cfg(test)]
mod tests;
