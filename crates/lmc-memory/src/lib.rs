//! The memory under a KV cache: arenas, slots with typed states, layouts, gather and scatter.
//!
//! An [`Arena`] is one range of memory (anonymous, or POSIX shared memory that engines on the host can map).
//! A [`Pool`] hands out slots of an arena by offset, in O(1) and without touching their bytes. A slot's state
//! is its type, so a reader cannot access bytes that are being written. [`KvGroup`] describes vLLM's layouts
//! of a paged KV cache, a [`CopyPlan`] lists the runs of the cache that belong to each chunk, and a
//! [`CopyPool`] copies them on several threads.
//!
//! *Not* in this crate: keys, an index, eviction (`lmc-backend-local`), or any network.
//!
//! ```
//! use std::sync::Arc;
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let pool = Pool::new(arena, PoolConfig::default())?;
//! let mut slot = pool.reserve(5).expect("an empty pool has space");
//! slot.bytes_mut().copy_from_slice(b"hello");
//! let sealed = slot.written().seal();
//! let reader = sealed.clone();
//! drop(sealed);
//! assert_eq!(reader.bytes(), b"hello");
//! drop(reader);
//! assert_eq!(pool.usage().used, 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod arena;
mod checksum;
mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dtype;
mod layout;
mod pool;
mod segment;
mod shared_name;
mod sigbus;

pub use arena::{
    Arena, ArenaConfig, ArenaError, ArenaReport, Demand, Prefault, PrefaultProgress, StaleSegment,
    own_uid, reclaim_stale_segments, use_all_nodes,
};
pub use checksum::{PartedChecksum, checksum};
pub use copy::{
    ChunkOrder, CopyError, CopyPlan, CopyPool, Division, KvGroup, KvOrder, KvSegments, KvTensor,
    PagedError, PagedKv, PlanError, PlanRequest, interleave,
};
pub use dtype::{DType, UnknownDType};
pub use layout::{GroupLayout, LayoutError, Planes};
pub use pool::{
    Pool, PoolConfig, PoolError, PoolUsage, QuarantinedSlot, ReservedSlot, SealedSlot, WrittenSlot,
};
pub use segment::{KvMemory, MappedSegment, ProcessMemory, SegmentError};
pub use shared_name::{NameError, SharedName};

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
