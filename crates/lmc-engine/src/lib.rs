//! The cache engine: one object for a server or an inference engine, over any set of tiers.
//!
//! [`CacheEngine::lookup`] finds the leading chunks of a prompt in all its ranks, leases those in DRAM, and
//! promotes the others from lower tiers. [`CacheEngine::store`] reserves memory for missing chunks, and
//! [`CacheEngine::commit`] makes written chunks findable. The engine contains the DRAM tier
//! (`lmc-backend-local`). Lower tiers follow the contract of `lmc-backend`, and a [`TierPolicy`] decides
//! which chunks each tier is given. No call waits unless its documentation says so: what is not available at
//! once is a miss or a refusal.
//!
//! Not in this crate: tokens and hashes (`lmc-key`), copies (`lmc-memory`), any protocol.
//!
//! ```
//! use std::sync::Arc;
//! use lmc_engine::{EngineConfig, EngineContext, EngineHost, LookupRequest, OwnerId, Rank, StoreRequest, StoreStart};
//! use lmc_key::{ChunkHash, ChunkKey, SpaceId};
//! use lmc_memory::ArenaConfig;
//!
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let engine = EngineConfig::default().start(EngineContext::new(arena, EngineHost::default()))?;
//! let (space, hash) = (SpaceId::new([1; 16]), ChunkHash::new([2; 32]));
//! let key = ChunkKey { space, kv_rank: 0, group: 0, hash };
//!
//! let wanted = StoreRequest { key, parent: None, tenant: Default::default(), len: 5 };
//! let Some(StoreStart::Reserved(mut ticket)) = engine.store(OwnerId(1), engine.clears_id(), &[wanted]).pop() else {
//!     panic!("an empty engine has memory");
//! };
//! ticket.bytes_mut().copy_from_slice(b"hello");
//! engine.commit(vec![ticket]);
//!
//! let ranks = vec![Rank { space, kv_rank: 0, chunk_bytes: None }];
//! let found = engine.lookup(LookupRequest::new(OwnerId(2), vec![hash], ranks)).wait_blocking();
//! assert_eq!(found.hits, 1);
//! let leases = found.into_leases().expect("one rank was found");
//! assert_eq!(leases.get(0).map(|slot| slot.bytes()), Some(&b"hello"[..]));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod clears;
pub use clears::{ClearError, ClearLog, StateFileError};

mod config;
mod demand;
pub use config::{EngineConfig, EngineError};

mod engine;
pub use demand::DemandCurve;
pub use engine::context::EngineContext;
pub use engine::host::{EngineHost, SpaceBook};
pub use engine::lookup::Lookup;
pub use engine::{CacheEngine, Cleared, CloseReport, EngineTask, InUse, Removed};

mod events;

mod found;
pub use found::{Found, FoundRank, TierRun};
mod fingerprints;
pub use fingerprints::FingerprintTable;

mod ghosts;

mod histogram;
pub use histogram::{DistributionSnapshot, Histogram, HistogramSnapshot};

mod lower;
pub use lower::LowerStatus;

mod misses;
pub use misses::{Miss, MissReason, Missing};

mod policy;
pub use policy::{Admission, LowerTier, SpaceFilter, TierPolicy, WritePolicy};

mod pushed;

mod request;
pub use request::{LeaseLimit, LookupRequest, Merge, Rank};
mod status;
pub use status::{EngineStats, EngineTimes, EngineUsage, TenantStatus, TierHealth};

mod store;
pub use store::{StoreRequest, StoreStart, StoreTicket};

#[doc(no_inline)]
pub use lmc_backend::{
    Change, ChunkEvent, Clears, DRAM, EventSink, Events, Host, HostChunk, HostLease, HostSpace,
    LocateHint, Parts, TooManyClears,
};
#[doc(no_inline)]
pub use lmc_backend_local::{Inserted, Leases, MarkId, OwnerId, PolicyKind, TenantId};
#[doc(no_inline)]
pub use lmc_key::ClearsId;

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
