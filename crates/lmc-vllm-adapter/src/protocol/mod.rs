//! Operations of the protocol as typed values, and their codec.

pub(crate) mod codec;
mod descriptor;
pub(crate) mod msgpack;
mod operation;

pub use codec::DecodeError;
pub(crate) use codec::{decode_reply, decode_request, encode_request};
pub use descriptor::{CpuShm, Cuda, DescriptorError, IpcHandle, KvDescriptor, TensorMeta};
pub use msgpack::ValueError;
pub use operation::{
    BlockAllocation, CacheKey, ConfigValue, EngineDrivenContext, EngineGroup, EngineRecord,
    IdentityDigest, KvEvent, KvEventBatch, KvEventKind, Operation, Origin, RegisterKvCache, Reply,
    Request, RequestConfigs, SlotDescriptor, Sources, UnknownFields,
};
pub(crate) use operation::{ENGINE_KEYS, POOL_DESCRIPTOR, TAG, WAIT_LOOKUP};
