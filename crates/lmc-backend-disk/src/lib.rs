//! The NVMe tier: chunks on drives, read directly into and written directly from the memory pool, and found
//! again after any kill.
//!
//! [`DiskConfig`] opens a [`DiskBackend`], which is a [`Backend`](lmc_backend::Backend). I/O bypasses the
//! page cache, by io_uring, or by threads where io_uring is forbidden. Chunks that
//! [`store`](lmc_backend::WriteBackend::store) has acknowledged are durable. A chunk that a kill left
//! incomplete is never found. Bytes that are read are checked against their identity and checksum first.
//! docs/disk-format.md describes every byte.
//!
//! ```
//! use std::time::{Duration, Instant};
//!
//! use futures_util::StreamExt;
//! use lmc_backend::{Backend, LoadItem, Loaded, NoEngine, StoreItem, WriteBackend};
//! use lmc_backend_disk::DiskConfig;
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//!
//! # let runtime = tokio::runtime::Builder::new_current_thread().build()?;
//! # runtime.block_on(async {
//! let arena = ArenaConfig::anonymous(1 << 20).build()?;
//! let pool = Pool::new(arena.into(), PoolConfig::default())?;
//! let key = ChunkKey { space: SpaceId::new([1; 16]), kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//! let mut slot = pool.reserve(5).expect("an empty pool");
//! slot.bytes_mut().copy_from_slice(b"hello");
//!
//! let folder = std::env::temp_dir().join(format!("lmc-disk-example-{}", std::process::id()));
//! let tier = DiskConfig::new([&folder], 64 << 20).with_new_drives().open(&NoEngine::default())?;
//!
//! let deadline = Instant::now() + Duration::from_secs(20);
//! let items = vec![StoreItem::new(key, slot.written().seal())];
//! let Some((0, stored)) = tier.store(items, deadline).next().await else { panic!("one answer") };
//! stored?; // the chunk is durable
//!
//! let into = pool.reserve(5).expect("memory for two chunks");
//! let Some((0, Loaded::Hit(slot))) = tier.load(vec![LoadItem::new(key, into)], deadline).next().await else {
//!     panic!("the tier has the chunk");
//! };
//! assert_eq!(slot.bytes(), b"hello");
//! tier.close(deadline).await?;
//! # std::fs::remove_dir_all(folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(()) })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Drives that serve together form a set. Each drive records the other drives, and the clears after which its
//! chunks were stored ([`lmc_backend::Clears`]): a drive that was absent during a clear is emptied before it
//! serves again.
//!
//! *Not* in this crate: which chunks go to disk and when (`lmc-engine`), and chunks in DRAM
//! (`lmc-backend-local`).

mod backend;
mod batch;
mod claim;
mod clears_file;
mod config;
mod counters;
mod drive;
mod drive_set;
mod error;
mod files;
mod format;
mod id;
mod index;
mod inspect;
mod log;
mod set;
#[cfg(test)]
mod sim;
mod spaces;
mod status;
mod timer;
mod volume;

pub use backend::DiskBackend;
pub use config::{DiskConfig, usable_bytes};
pub use counters::DiskStats;
pub use error::DiskError;
pub use format::VERSION as FORMAT_VERSION;
pub use inspect::Compacted;
pub use set::SetMember;
pub use spaces::{SpaceUsage, Unreachable};
pub use status::{DriveStatus, SegmentStatus};
pub use volume::{DiskIo, check_io_uring};

/// Name of the tier.
const TIER: &str = "disk";

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
