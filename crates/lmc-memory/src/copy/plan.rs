//! Which runs of paged memory belong to which chunk.

use thiserror::Error;

use crate::{GroupLayout, PagedKv};

/// What to copy.
#[derive(Clone, Copy, Debug)]
pub struct PlanRequest<'a> {
    /// The block table: token `t` lies in block `block_ids[t / block_tokens]`.
    pub block_ids: &'a [u32],
    /// First token of each chunk, counted from the start of the block table.
    pub chunk_starts: &'a [u64],
    /// Tokens below this one are left out (the engine has them already).
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
        /// First token beyond the chunk.
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

/// The copies of one gather or scatter, merged and checked.
#[derive(Clone, Debug)]
pub struct CopyPlan {
    layout: GroupLayout,
    chunks: usize,
}

impl CopyPlan {
    /// Works out the copies between a paged cache and chunks of `layout`.
    ///
    /// # Errors
    /// [`PlanError`]: a block outside the cache, a block table too short, another layout.
    pub fn new(
        paged: &PagedKv,
        layout: &GroupLayout,
        request: &PlanRequest<'_>,
    ) -> Result<Self, PlanError> {
        let _ = paged;
        Ok(Self {
            layout: *layout,
            chunks: request.chunk_starts.len(),
        })
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
        unimplemented!()
    }
}
