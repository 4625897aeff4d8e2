//! Gather and scatter between an engine's paged memory and chunks.

mod cpu;
mod division;
mod kv_group;
mod overlap;
mod paged;
mod plan;
mod stream;
mod team;
#[cfg(test)]
pub(crate) mod testing;
mod workers;

pub use division::{Division, interleave};
pub use kv_group::{ChunkOrder, KvGroup, KvOrder, KvTensor};
pub use paged::{KvSegments, PagedError, PagedKv};
pub use plan::{CopyPlan, PlanError, PlanRequest};
pub use workers::{CopyError, CopyPool};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    /// Copies go from paged memory into chunks.
    Gather,
    /// Copies go from chunks into paged memory.
    Scatter,
}
