//! Threads that copy.

use std::io;

use thiserror::Error;

use crate::{CopyPlan, PagedKv, SegmentError};

/// A gather or scatter that was not carried out or not completed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The chunks given are not those planned.
    #[error("the plan has {expected} chunks of {bytes} bytes, found {found}")]
    Chunks {
        /// Chunks planned.
        expected: usize,
        /// Bytes of each.
        bytes: u64,
        /// What was given.
        found: String,
    },
    /// The plan was made for another paged cache.
    #[error("the plan was made for another paged cache")]
    OtherPaged,
    /// The engine's memory went away; what was copied cannot be trusted.
    #[error(transparent)]
    Segment(#[from] SegmentError),
}

/// Named threads (`lmc-copy-{i}`) that copy, together with the thread that asks.
#[derive(Debug)]
pub struct CopyPool {
    workers: usize,
}

impl CopyPool {
    /// Starts `workers` threads; 0 means that the caller copies alone.
    ///
    /// # Errors
    /// What the system says when a thread cannot be started.
    pub fn new(workers: usize) -> io::Result<Self> {
        Ok(Self { workers })
    }

    /// Threads besides the caller.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Copies paged memory into chunks; `chunks[i]` belongs to the plan's i-th chunk.
    ///
    /// # Errors
    /// [`CopyError`]; after [`CopyError::Segment`] the chunks' bytes are not to be used.
    pub fn gather(
        &self,
        plan: &CopyPlan,
        paged: &PagedKv,
        chunks: &mut [&mut [u8]],
    ) -> Result<(), CopyError> {
        let _ = (plan, paged, chunks);
        unimplemented!()
    }

    /// Copies chunks into paged memory; `chunks[i]` belongs to the plan's i-th chunk.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn scatter(
        &self,
        plan: &CopyPlan,
        paged: &PagedKv,
        chunks: &[&[u8]],
    ) -> Result<(), CopyError> {
        let _ = (plan, paged, chunks);
        unimplemented!()
    }
}
