//! Memory of engines on NVIDIA GPUs: memory of other processes, opened by the handles that they send, or
//! memory of the engine that this process is.
//!
//! The driver is loaded when the first engine with such memory registers; a host without a driver serves all
//! other engines. A worker's registration gets a [`Gpu`] from [`Gpus`], and [`DeviceMemory`] for its tensors.
//! [`CopyPool`](crate::CopyPool) copies between that memory and chunks of the pool.

mod counter;
mod counts;
mod driver;
mod gpus;
mod lane;
mod pinned;

#[cfg(test)]
mod tests;

pub use counter::StorageCounter;
pub use driver::CudaError;
pub use gpus::{DeviceMemory, Gpu, Gpus, Mark, Registration, SharedMemory};
