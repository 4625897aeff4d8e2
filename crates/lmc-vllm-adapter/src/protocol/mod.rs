//! Operations of the protocol as typed values, and their codec.

pub(crate) mod codec;
mod descriptor;
pub(crate) mod msgpack;
mod operation;
mod trace;

pub use codec::DecodeError;
#[cfg(feature = "service")]
pub(crate) use codec::decode_request;
pub(crate) use codec::{decode_reply, encode_request};
pub use descriptor::{
    CpuShm, Cuda, DescriptorError, GpuEvent, IpcHandle, KvDescriptor, SharedBy, TensorMeta,
};
pub use msgpack::ValueError;
#[cfg(feature = "service")]
pub(crate) use operation::Naming;
#[cfg(any(feature = "adapters", feature = "service"))]
pub(crate) use operation::{
    ABANDON_EARLIER, ENGINE_KEYS, NOTICES, POOL_DESCRIPTOR, TAIL_LOOKUP, UNITS, WAIT_LOOKUP,
};
pub(crate) use operation::{
    AWAITED, MAX_AWAITED, MAX_SOURCE, PUSH_TO, SOURCES, TAG, WAIT, wait_of,
};
pub use operation::{
    BlockAllocation, CacheKey, ConfigValue, EngineDrivenContext, EngineGroup, EngineRecord,
    IdentityDigest, KvEvent, KvEventBatch, KvEventKind, MAX_SOURCE_WAIT, Operation,
    RegisterKvCache, Reply, Request, RequestConfigs, SlotDescriptor, Sources, TierChunks,
    UnknownFields,
};
pub use trace::TraceParent;
pub(crate) use trace::{MAX_TRACE_PARENT, TRACE_PARENT};
