//! Gather and scatter between an engine's paged memory and chunks.

mod cpu;
mod overlap;
mod paged;
mod plan;
mod raw;
mod stream;
mod team;
#[cfg(test)]
mod testing;
mod workers;

pub use paged::{
    Axis, KvFormat, KvOrder, PagedError, PagedGeometry, PagedKv, PlaneBase, TensorView,
};
pub use plan::{CopyPlan, PlanError, PlanRequest};
pub use workers::{CopyError, CopyPool};
