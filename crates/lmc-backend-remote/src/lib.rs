//! The tier of shared stores: chunks on shared file systems, in Redis and in object stores, which outlive
//! this host and serve many daemons.
//!
//! [`RemoteTier`] is a tier of the engine over any [`Store`]. The tier verifies every value, remembers for a
//! short time which keys the store lacks, passes clears on, and uses the store only while it knows all clears
//! that were passed on through it. The store moves bytes: names, headers and values in one layout
//! ([`mod@format`]) that all stores share.
//!
//! [`FileStore`] is a folder of a shared file system; the features `redis` and `s3` add such stores.
//! [`open_store`] makes the store of a URL.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use futures_util::StreamExt;
//! use lmc_backend::{Backend, LoadItem, Loaded, NoEngine, StoreItem, WriteBackend};
//! use lmc_backend_remote::{RemoteConfig, StoreOptions, open_store};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//!
//! # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
//! # runtime.block_on(async {
//! let arena = ArenaConfig::anonymous(1 << 20).build()?;
//! let pool = Pool::new(arena.into(), PoolConfig::default())?;
//! let key = ChunkKey { space: SpaceId::new([1; 16]), kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//! let mut slot = pool.reserve(5).expect("an empty pool");
//! slot.bytes_mut().copy_from_slice(b"hello");
//!
//! let folder = std::env::temp_dir().join(format!("lmc-store-example-{}", std::process::id()));
//! std::fs::create_dir_all(&folder)?;
//! let store = open_store(&format!("file://{}", folder.display()), StoreOptions::default())?;
//! let runtime = tokio::runtime::Handle::current();
//! let tier = RemoteConfig::default().start(store.store(), Arc::new(NoEngine::default()), runtime);
//! assert!(tier.ready(Instant::now() + Duration::from_secs(20)).await);
//!
//! let deadline = Instant::now() + Duration::from_secs(20);
//! let items = vec![StoreItem::new(key, slot.written().seal())];
//! let Some((0, stored)) = tier.store(items, deadline).next().await else { panic!("one answer") };
//! stored?; // the store has the chunk
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
//! Not in this crate: which chunks are written to a store, and which tier is asked first (`lmc-engine`).
//!
//! Start with [`RemoteTier`] and [`Store`]; test a new store with the kit in the module `conformance`
//! (feature of the same name).

mod clock;
pub use clock::BootClock;

pub mod format;

mod open;
pub use open::{OpenError, Opened, StoreOptions, check_url, open_store};

mod posix;
pub use posix::{Collected, FileConfig, FileStore, Limits, Shares};

mod small;
pub use small::{StaleFolders, read_clears, read_description, read_map};

mod store;
pub use store::{
    Each, GetItem, Got, Head, HeaderBytes, ListPage, ListedObject, Put, PutItem, PutMode, Single,
    Store, StoreError, Version,
};

#[cfg(feature = "redis")]
pub mod redis;

#[cfg(feature = "s3")]
pub mod s3;

#[cfg(any(feature = "redis", feature = "s3"))]
mod tls;

mod tier;
pub use tier::{RemoteConfig, RemoteTier, SaltDigest, StaleDeleted};

#[cfg(feature = "conformance")]
mod faulty_store;
#[cfg(feature = "conformance")]
mod memory_store;
#[cfg(feature = "conformance")]
mod store_kit;

/// The store in memory, a wrapper that injects faults, and the kit that every store passes.
#[cfg(feature = "conformance")]
pub mod conformance {
    pub use crate::faulty_store::{CallFault, Calls, FaultyStore};
    pub use crate::memory_store::{Denied, MemoryStore, StoreFaults};
    pub use crate::store_kit::{check_replaced_values, check_store, check_swaps};
}

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
