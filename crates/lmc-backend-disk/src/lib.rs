//! The NVMe tier: chunks on drives, read and written straight from and into the memory pool,
//! and found again after any kill.
//!
//! [`DiskConfig`] opens a [`DiskBackend`], which is a [`Backend`](lmc_backend::Backend). Bytes go
//! past the page cache by io_uring, or by threads where that is forbidden. What
//! [`store`](lmc_backend::Backend::store) has acknowledged is durable; what a kill left half
//! written is never found; what is read is checked against its identity and checksum first.
//! docs/disk-format.md describes every byte.
//!
//! What is *not* here: which chunks go to disk and when (`lmc-engine`), and chunks in DRAM
//! (`lmc-backend-local`).

mod admission;
mod backend;
mod batch;
mod claim;
mod config;
mod counters;
mod drive;
mod format;
mod index;
mod inspect;
mod log;
#[cfg(test)]
mod sim;
mod timer;
mod volume;

pub use backend::DiskBackend;
pub use config::{Admit, DiskConfig, DiskError, DiskIo, usable_bytes};
pub use counters::DiskStats;
pub use inspect::{Compacted, DriveStatus, SegmentStatus};
