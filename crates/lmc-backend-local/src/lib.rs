//! The DRAM tier of lmc: an index of chunks over a pool of memory.
//!
//! A [`LocalTier`] knows which chunks are in a [`Pool`](lmc_memory::Pool), leases them to readers, and evicts
//! the least used ones when free space is needed. All of it is synchronous: a call waits only for locks that
//! are held for microseconds, and a reservation fails at once when all memory is leased.
//!
//! A [`Lease`] ends when it is dropped.
//!
//! *Not* in this crate: hashing (`lmc-key`), memory and copies (`lmc-memory`), lower tiers, and any clock,
//! thread or runtime.
//!
//! ```
//! use std::sync::Arc;
//! use lmc_backend_local::{LocalConfig, OwnerId, TenantId, WriteStart};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::{ArenaConfig, Pool, PoolConfig};
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let tier = LocalConfig::default().build(Pool::new(arena, PoolConfig::default())?, None)?;
//! let space = SpaceId::new([1; 16]);
//! let key = ChunkKey { space, kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//! let session = OwnerId(7);
//!
//! let WriteStart::Reserved(mut new) = tier.begin_write(session, TenantId(0), key, 5)? else {
//!     panic!("no other owner writes here");
//! };
//! new.slot.bytes_mut().copy_from_slice(b"hello");
//! tier.commit(vec![new.written(None)]);
//!
//! let leases = tier.lease_leading(session, &[key]);
//! assert_eq!(leases.get(0).map(|slot| slot.bytes()), Some(&b"hello"[..]));
//! assert_eq!(tier.leases_of(session), 1);
//! drop(leases);
//! assert_eq!(tier.leases_of(session), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod class;
pub use class::{TenantId, TenantUsage};

mod chunked;
mod config;
pub use config::{LocalConfig, LocalConfigError};

mod events;
pub use events::{LocalSink, Removal, RemovedEvent, StoredEvent};

mod origin;
pub use origin::Origin;

mod owner;
pub use owner::OwnerId;

mod policy;
pub use policy::PolicyKind;

mod shard;
mod slab;

mod stats;
pub use stats::{LocalStats, LocalUsage};

mod sync;
mod table;

mod tier;
pub use tier::{
    Clear, Cleared, InFlight, Inserted, Lease, Leases, ListedChunk, LocalTier, Maintained, MarkId,
    ReserveError, Write, WriteGrant, WriteStart,
};

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
