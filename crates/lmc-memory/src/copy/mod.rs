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
#[cfg(feature = "cuda")]
pub(crate) use workers::Direction;
pub use workers::{CopyError, CopyPool};
