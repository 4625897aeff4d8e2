//! The driver as programs see it that load it with cudarc.

mod control;
mod cuda;
mod events;
mod kernels;
mod memory;
mod program;
mod promises;
mod sharing;
