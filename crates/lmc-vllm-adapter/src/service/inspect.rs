//! Looks into the memory of workers, for diagnostics.

use std::sync::Arc;

use thiserror::Error;

use crate::service::Service;
use crate::service::instance::Transport;
use crate::service::transfer::plan;

/// A worker's memory cannot be looked into as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InspectError {
    /// Nobody has registered with this id.
    #[error("instance_id {0} not registered")]
    Unknown(u64),
    /// The worker copies by itself, so the server has never mapped its memory.
    #[error("worker {0} copies by itself; the server does not map its memory")]
    NotMapped(u64),
    /// The blocks do not make whole chunks of this worker.
    #[error("{0}")]
    Blocks(String),
    /// The one who asked does not wait any more.
    #[error("given up by the caller")]
    Cancelled,
}

impl Service {
    /// Gathers each chunk of a server-driven worker's blocks as a store would, but into a
    /// buffer of its own, and returns what `digest` makes of it. `blocks_per_chunk` must be
    /// that of the worker's layout. Copies all the bytes, each block at most once: for
    /// diagnostics. Ends early when `digest` returns none.
    ///
    /// # Errors
    /// [`InspectError`].
    pub fn inspect_blocks<T>(
        &self,
        instance_id: u64,
        block_ids: &[u32],
        blocks_per_chunk: u64,
        mut digest: impl FnMut(&[u8]) -> Option<T>,
    ) -> Result<Vec<T>, InspectError> {
        let (copies, chunk_bytes) = {
            let state = self.shared.state.lock();
            let instance = state
                .instances
                .get(&instance_id)
                .ok_or(InspectError::Unknown(instance_id))?;
            match &instance.transport {
                Transport::EngineDriven => return Err(InspectError::NotMapped(instance_id)),
                Transport::ServerDriven(copies) => (Arc::clone(copies), instance.chunk_bytes),
            }
        };
        let blocks = |text: String| InspectError::Blocks(text);
        if let Some(copy) = copies
            .iter()
            .find(|copy| copy.blocks_per_chunk != blocks_per_chunk)
        {
            return Err(blocks(format!(
                "a chunk of this worker has {} blocks, not {blocks_per_chunk}",
                copy.blocks_per_chunk
            )));
        }
        let per_chunk = usize::try_from(blocks_per_chunk).unwrap_or(usize::MAX);
        if block_ids.is_empty() || !block_ids.len().is_multiple_of(per_chunk.max(1)) {
            return Err(blocks(format!(
                "{} block ids are not whole chunks of {blocks_per_chunk}",
                block_ids.len()
            )));
        }
        let blocks_there = copies.iter().map(|copy| copy.paged.blocks());
        let blocks_there = blocks_there.min().unwrap_or_default();
        if block_ids.len() > blocks_there as usize {
            return Err(blocks(format!(
                "{} block ids, and the worker has {blocks_there} blocks",
                block_ids.len()
            )));
        }
        let mut chunk = vec![0; usize::try_from(chunk_bytes).expect("a chunk lies in memory")];
        block_ids
            .chunks(per_chunk)
            .map(|ids| {
                for copy in copies.iter() {
                    let plan = plan(copy, ids, &[0], 0, None).map_err(blocks)?;
                    let into = &mut [&mut chunk[copy.range.clone()]];
                    let gathered = self.shared.copies.gather(&plan, into);
                    gathered.map_err(|error| blocks(error.to_string()))?;
                }
                digest(&chunk).ok_or(InspectError::Cancelled)
            })
            .collect()
    }
}
