//! LMCache's multiprocess protocol, as of lmcache 0.5.6, and the service behind it.
//!
//! An unmodified vLLM with its `LMCacheMPConnector` connects to a [`ZmqServer`], which passes typed
//! [`Request`]s to a [`Service`]; the service carries them out on a
//! [`CacheEngine`](lmc_engine::CacheEngine). Operations, codec and transport are separate: handlers
//! do not depend on an encoding, so another codec can be added. [`Client`] implements the client's
//! side, for load generators and tests; the feature `adapters` has the engine's side. The feature
//! `service`, which is on by default, has the service and the engine behind it.
//!
//! Every length from outside is checked before memory is allocated for it, and every value is
//! parsed into a type before it is used. *Not* included: pickle (a pickled payload is refused,
//! never loaded) and gRPC.
//!
//! ```
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! use lmc_engine::{EngineConfig, EngineContext, EngineHost};
//! use lmc_key::{ChunkHasher, HashAlgorithm};
//! use lmc_memory::ArenaConfig;
//! use lmc_vllm_adapter::{Client, Reply, Request, ServiceConfig, ZmqConfig};
//!
//! # let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
//! # runtime.block_on(async {
//! let arena = Arc::new(ArenaConfig::anonymous(1 << 20).build()?);
//! let engine = EngineConfig::default().start(EngineContext::new(arena, EngineHost::default()))?;
//! let hasher = ChunkHasher::new(HashAlgorithm::Blake3, 256)?;
//! let service = ServiceConfig::new(hasher).start(engine)?;
//! let server = ZmqConfig { port: 0, ..ZmqConfig::default() }.bind(service).await?;
//! let address = server.local_addr();
//! let (stop, stopped) = tokio::sync::watch::channel(false);
//! let serving = tokio::spawn(server.run(stopped));
//!
//! let asked = tokio::task::spawn_blocking(move || {
//!     let mut client = Client::connect(address, Duration::from_secs(20))?;
//!     client.ask(&Request::GetChunkSize)
//! });
//! assert_eq!(asked.await??, Reply::Int(256));
//!
//! stop.send(true)?;
//! serving.await?;
//! # Ok::<(), Box<dyn std::error::Error>>(()) })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "adapters")]
pub mod adapters;
mod client;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    test,
    allow(unreachable_pub, reason = "public only for the fuzz targets")
)]
pub mod fuzzing;
mod local;
#[cfg(any(feature = "adapters", feature = "service"))]
mod order;
#[cfg_attr(
    not(feature = "service"),
    allow(dead_code, reason = "a server needs the rest")
)]
mod peer;
#[cfg_attr(
    not(feature = "service"),
    allow(dead_code, reason = "a server needs the rest")
)]
mod protocol;
#[cfg(feature = "service")]
mod service;
#[cfg_attr(
    not(feature = "service"),
    allow(dead_code, reason = "a server needs the rest")
)]
mod transport;

pub use client::{Client, ClientError, encode_request_frames};
pub use local::{LOCAL_ADDRESS, LOCAL_SOCKET, check_private, user_folder};
pub use peer::ClientSocket;
pub use protocol::{
    BlockAllocation, CacheKey, ConfigValue, CpuShm, Cuda, DecodeError, DescriptorError,
    EngineDrivenContext, EngineGroup, EngineRecord, GpuEvent, IdentityDigest, IpcHandle,
    KvDescriptor, KvEvent, KvEventBatch, KvEventKind, MAX_SOURCE_WAIT, Operation, RegisterKvCache,
    Reply, Request, RequestConfigs, SharedBy, SlotDescriptor, Sources, TensorMeta, TierChunks,
    TraceParent, UnknownFields, ValueError,
};
#[cfg(feature = "service")]
pub use service::{
    ClientId, Copied, EventLogStatus, HeldStatus, InspectError, InstanceStatus, Notice,
    OperationCounts, RequestLog, Service, ServiceConfig, ServiceCounts, ServiceError,
    ServiceStatus, SessionStatus, SpaceStatus, Span, SpanStep, TransferStatus, TransportCounts,
    UsageStatus, WeakService,
};
#[cfg(feature = "service")]
pub use transport::{BindError, Keepalive, ZmqConfig, ZmqServer};
pub use transport::{Limits, Trust, TrustedUsers, Untrusted, ZmtpError};

/// Release of lmcache whose multiprocess protocol this crate implements.
pub const LMCACHE_RELEASE: &str = "0.5.6";

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
