//! The contract of lmc's tiers: the operations that the engine asks of a disk, a peer or a remote
//! store.
//!
//! [`Backend`] is a tier that can be read, [`WriteBackend`] a tier that can also be written; both can be
//! trait objects. Every operation takes a batch and a deadline, and answers once for each key; partial
//! success is normal. A tier reports which chunks it has ([`Backend::locate`], or at once by its
//! [`LocalIndex`]), loads them into slots that the caller has reserved, and stores them from sealed slots,
//! without a copy in between where the tier can do so. Loads and stores answer for each key as soon as the
//! key is done ([`Answers`]). A key determines its bytes for ever, so nothing is ever overwritten. No tier
//! knows of clears: after a clear, the same chunk has another name ([`Clears`]). A tier that lends the chunks
//! of the engine above it is given a [`Host`] when it is made.
//!
//! Outside this crate: how chunks are found, leased and evicted in DRAM (`lmc-backend-local`), which tier a
//! chunk belongs in (`lmc-engine`), and any executor.
//!
//! Start with [`Backend`], [`LoadItem`] and [`Loaded`]; test a new tier with the kit in the module
//! `conformance` (feature of the same name).
//!
//! ```
//! use std::{sync::Arc, time::{Duration, Instant}};
//! use lmc_backend::{LoadItem, Loaded, MemoryBackend, StoreItem, WriteBackend, in_order};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//! # use lmc_backend::conformance::block_on;
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let pool = Pool::new(arena, PoolConfig::default())?;
//! let space = SpaceId::new([1; 16]);
//! let key = ChunkKey { space, kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//! let tier: Arc<dyn WriteBackend> = Arc::new(MemoryBackend::default());
//! let deadline = Instant::now() + Duration::from_secs(1);
//!
//! let mut slot = pool.reserve(5).expect("an empty pool has free capacity");
//! slot.bytes_mut().copy_from_slice(b"hello");
//! # block_on(async {
//! in_order(tier.store(vec![StoreItem::new(key, slot.written().seal())], deadline), 1).await;
//! let into = pool.reserve(5).expect("the pool has capacity for two");
//! let mut loaded = in_order(tier.load(vec![LoadItem::new(key, into)], deadline), 1).await;
//! let Some(Some(Loaded::Hit(slot))) = loaded.pop() else { panic!("a miss") };
//! assert_eq!(slot.bytes(), b"hello");
//! # });
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod answers;
pub use answers::{Answers, in_order, ready};

mod backend;
pub use backend::{Backend, LocalIndex, WriteBackend};

mod clears;
pub use clears::{Clears, ClearsDamaged, StartId, TooManyClears};

mod clock;
pub use clock::now;

mod error;
pub use error::{BackendError, Unavailable};

mod events;
pub use events::{Change, ChunkEvent, DRAM, EventSink, Events};

mod host;
pub use host::{ChunkRun, Host, HostChunk, HostLease, HostSpace, NoEngine, Received};

mod item;
pub use item::{
    Cleared, Cursor, FailedSlot, Health, Listed, LoadItem, Loaded, Page, StoreItem, Stored, Usage,
};

mod locate;
pub use locate::{Handle, LocateHint, Located, Location, Parts, Sharing};

mod memory;
pub use memory::MemoryBackend;

mod noop;
pub use noop::NoopBackend;

mod read_rate;
pub use read_rate::ReadRate;

#[cfg(feature = "conformance")]
pub mod conformance;

/// A boxed future that may move between threads.
pub type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
