//! The cache engine: one object that a server or an inference engine talks to, whatever tiers
//! lie under it.
//!
//! [`CacheEngine`] finds the leading chunks of a prompt and leases them, reserves memory for
//! what is missing, and makes written chunks findable. It stands on the DRAM tier
//! (`lmc-backend-local`); slower tiers come in below it by the contract of `lmc-backend`. They
//! are given copies of what is committed, and what only they have comes up when it is asked for.
//! No call waits unless it says so: what cannot be had at once is a miss or a refusal.
//!
//! What is *not* here: tokens and hashes (`lmc-key`), copies (`lmc-memory`), any protocol.
//!
//! ```
//! use std::sync::Arc;
//! use lmc_engine::{CacheEngine, EngineConfig, OwnerId, Reservation, WriteRequest};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::ArenaConfig;
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let engine = CacheEngine::new(EngineConfig::default(), arena)?;
//! let space = SpaceId::new([1; 16]);
//! let key = ChunkKey { space, kv_rank: 0, group: 0, hash: ChunkHash::new([2; 32]) };
//!
//! let wanted = WriteRequest { key, parent: None, tenant: Default::default(), len: 5 };
//! let Some(Reservation::Reserved(mut ticket)) = engine.reserve(OwnerId(1), &[wanted]).pop()
//! else {
//!     panic!("an empty engine has room");
//! };
//! ticket.bytes_mut().copy_from_slice(b"hello");
//! engine.commit(vec![ticket]);
//!
//! let found = engine.lookup(OwnerId(2), &[key]);
//! assert_eq!(found.get(0).map(|slot| slot.bytes()), Some(&b"hello"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod config;
pub use config::{CopyDown, EngineConfig, EngineError};

mod engine;
pub use engine::{Below, CacheEngine, Cleared, Removed, TierHealth};

mod events;

mod lower;
pub use lower::{Fetch, LowerStatus};

mod status;
pub use status::{EngineStats, EngineUsage, TenantStatus};

mod write;
pub use write::{Reservation, WriteRequest, WriteTicket};

#[doc(no_inline)]
pub use lmc_backend_local::{
    EventSink, Inserted, Leases, MarkId, OwnerId, PolicyKind, Removal, RemovedEvent, StoredEvent,
    TenantId,
};

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
