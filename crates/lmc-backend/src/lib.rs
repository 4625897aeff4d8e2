//! The contract of lmc's tiers: what the engine asks of a disk, a peer or a remote store.
//!
//! [`Backend`] is one object-safe trait. Every operation takes a batch and answers with one
//! result for each key, in the order of the keys; partial success is normal. Loads go into slots
//! that the caller reserved, stores come from sealed slots, and neither copies on the way where
//! the tier can help it. A key decides its bytes for good, so nothing is ever overwritten.
//!
//! What is *not* here: how chunks are found, leased and evicted in DRAM (`lmc-backend-local`),
//! which tier a chunk belongs in (`lmc-engine`), and any executor or timer.
//!
//! Start from [`Backend`], [`LoadItem`] and [`Loaded`]; write a tier against the kit in
//! the module `conformance` (feature of the same name).
//!
//! ```
//! use std::{sync::Arc, time::{Duration, Instant}};
//! use lmc_backend::{Backend, LoadItem, Loaded, MemoryBackend, StoreItem};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//! # use lmc_backend::conformance::block_on;
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let pool = Pool::new(arena, PoolConfig::default())?;
//! let space = SpaceId::new([1; 16]);
//! let key = ChunkKey { space, kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//! let tier: Arc<dyn Backend> = Arc::new(MemoryBackend::default());
//! let deadline = Instant::now() + Duration::from_secs(1);
//!
//! let mut slot = pool.reserve(5).expect("an empty pool has room");
//! slot.bytes_mut().copy_from_slice(b"hello");
//! # block_on(async {
//! tier.store(vec![StoreItem::new(key, slot.written().seal())], deadline).await;
//! let into = pool.reserve(5).expect("the pool has room for two");
//! let mut loaded = tier.load(vec![LoadItem::new(key, into)], deadline).await;
//! let Some(Loaded::Hit(slot)) = loaded.pop() else { panic!("a miss") };
//! assert_eq!(slot.bytes(), b"hello");
//! # });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod backend;
pub use backend::{Backend, BoxFuture};

mod error;
pub use error::{BackendError, Unavailable};

mod item;
pub use item::{
    Cursor, FailedSlot, Health, Listed, LoadItem, Loaded, Page, StoreItem, Stored, Usage,
};

mod memory;
pub use memory::MemoryBackend;

mod noop;
pub use noop::NoopBackend;

#[cfg(feature = "conformance")]
pub mod conformance;

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
