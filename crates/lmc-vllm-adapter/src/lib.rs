//! LMCache's multiprocess protocol, as of lmcache 0.5.6, and the service behind it.
//!
//! A stock vLLM with its stock `LMCacheMPConnector` talks to a [`ZmqServer`], which hands typed
//! [`Request`]s to a [`Service`]; the service works on a [`CacheEngine`](lmc_engine::CacheEngine).
//! Operations, codec and transport are apart: handlers know no encoding, and another codec can
//! stand beside the ZeroMQ one. A [`Client`] speaks the other side, for load generators and
//! tests.
//!
//! Everything from outside is bounded before it is stored and parsed before it is believed.
//! What is *not* here: pickle (a pickled payload is refused, never loaded), GPU memory, gRPC.

mod client;
#[cfg(any(test, feature = "fuzzing"))]
#[cfg_attr(
    test,
    allow(unreachable_pub, reason = "public only for the fuzz targets")
)]
pub mod fuzzing;
mod protocol;
mod service;
mod transport;

pub use client::{Client, ClientError, encode_request_frames};
pub use protocol::{
    BlockAllocation, CacheKey, CpuShm, DecodeError, DescriptorError, EngineDrivenContext,
    EngineGroup, KvDescriptor, KvEvent, KvEventBatch, KvEventKind, Operation, RegisterKvCache,
    Reply, Request, RequestConfigs, SlotDescriptor, TensorMeta, ValueError,
};
pub use service::{
    ClientId, EventLogStatus, HISTOGRAM_BUCKETS, HeldStatus, HistogramSnapshot, InspectError,
    InstanceStatus, OperationCounts, Peer, Service, ServiceConfig, ServiceCounts, ServiceError,
    ServiceStatus, SessionStatus, TransferStatus, TransportCounts,
};
/// The release of lmcache whose multiprocess protocol this crate speaks.
pub const LMCACHE_RELEASE: &str = "0.5.6";

pub use transport::{
    BindError, Keepalive, Limits, TrustedUsers, Untrusted, ZmqConfig, ZmqServer, ZmtpError,
};

/// The README's examples, compiled and run with the doctests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
