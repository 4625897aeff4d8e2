//! The ZeroMQ codec: one MessagePack value per frame.
//!
//! A request is `[uid, operation, payload…]`, a reply `[uid, operation, value?]`. The value frame
//! is absent if the operation returns nothing. A refusal is `[uid, text]`: the text of the error
//! instead of the operation.

use std::collections::BTreeMap;

use bytes::Bytes;
use lmc_key::{ChunkHash, TagsId};
use thiserror::Error;

use crate::protocol::descriptor::{DescriptorError, KvDescriptor, MAX_DESCRIPTOR};
use crate::protocol::msgpack::{Bin, Encode, Reader, Record, ValueError, Writer, encoded, record};
use crate::protocol::{
    AWAITED, BlockAllocation, CacheKey, EngineDrivenContext, EngineGroup, EngineRecord,
    IdentityDigest, KvEvent, KvEventBatch, KvEventKind, MAX_AWAITED, MAX_SOURCE, MAX_TRACE_PARENT,
    Operation, PUSH_TO, RegisterKvCache, Reply, Request, RequestConfigs, SOURCES, SlotDescriptor,
    Sources, TAG, TRACE_PARENT, TierChunks, TraceParent, UnknownFields, WAIT, wait_of,
};

/// Most tokens that one prompt may have.
pub(crate) const MAX_TOKENS: usize = 4 << 20;
/// Most bytes that a model name or another name may have.
pub(crate) const MAX_NAME: usize = 1024;
/// Most bytes that a request id may have; one longer than [`MAX_NAME`] is shortened.
const MAX_REQUEST_ID: usize = 1 << 20;
/// Most bytes of the peers that a request names.
const MAX_SOURCES: usize = 4096;
/// Most entries that `request_configs` may have.
const MAX_CONFIGS: usize = 256;
/// Most characters that a cache salt may have; LMCache's own limit.
pub(crate) const MAX_SALT: usize = 128;
/// Most bytes of an engine's identity record, and of its layout.
const MAX_RECORD: usize = 16 << 10;
/// Most chunks that an engine names by their hashes.
const MAX_CHUNKS: usize = 1 << 18;
/// Field of a key and of a registration for the identity of an engine.
const IDENTITY: &str = "lmc_identity";
/// Field of a key for the hashes of a prompt's chunks.
const CHUNK_HASHES: &str = "lmc_chunk_hashes";
/// Field of a key and of a registration for a chunk size other than the server's.
const UNIT: &str = "lmc_unit";
/// Field of a registration for the order of the elements in a chunk.
const LAYOUT: &str = "lmc_layout";
/// Most ranks that one chunk's KV cache may be split over; a lookup checks each.
const MAX_WORLD_SIZE: u32 = 4096;
const MAX_BLOCK_IDS: usize = 4 << 20;
const MAX_LAYERS: usize = 4096;
const MAX_GROUPS: usize = 256;
const MAX_RECORDS: usize = 65_536;
/// Most bytes of a request number, which is a MessagePack integer.
const MAX_UID: usize = 9;

/// Why frames are not a request that this server can carry out.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Too few frames, or a first frame that is not a request number: no reply can be sent.
    #[error("not a request: {0}")]
    Unanswerable(&'static str),
    /// The second frame is neither a number nor a name.
    #[error("operation frame is malformed: {0}")]
    OperationFrame(ValueError),
    /// The protocol has no such operation.
    #[error("unknown operation {0}: this server speaks lmcache 0.5.6's multiprocess protocol")]
    UnknownOperation(String),
    /// The protocol has this operation, but this server does not support it.
    #[error("operation {0} is not supported by this server")]
    Unsupported(Operation),
    /// The number of payload frames does not match the operation.
    #[error(
        "operation {operation} takes {expected} payload frames, found {found}: \
         the client probably uses another version of lmcache than 0.5.6"
    )]
    FrameCount {
        /// Operation of the request.
        operation: Operation,
        /// Payload frames that the operation takes.
        expected: usize,
        /// Payload frames that arrived.
        found: usize,
    },
    /// A payload cannot be decoded.
    #[error("payload {index} of {operation}: {error}")]
    Payload {
        /// Operation of the request.
        operation: Operation,
        /// Index of the payload, from 0.
        index: usize,
        /// Fault in the payload.
        error: ValueError,
    },
    /// A memory descriptor cannot be used.
    #[error("operation {operation}: {error}")]
    Descriptor {
        /// Operation of the request.
        operation: Operation,
        /// Fault in the descriptor.
        error: DescriptorError,
    },
}

/// A message from a client, classified by its first frames.
#[derive(Debug)]
pub(crate) enum Incoming<'a> {
    /// A request. Its reply begins with the same `uid` and `operation` frames.
    Request {
        uid: &'a Bytes,
        operation: &'a Bytes,
        payloads: &'a [Bytes],
    },
    /// An event stream's reader asks for the next batch.
    StreamAck { uid: &'a Bytes },
    /// An event stream's reader ends the stream.
    StreamCancel { uid: &'a Bytes },
}

/// Classifies a message as a request or as control of an event stream.
pub(crate) fn classify(frames: &[Bytes]) -> Result<Incoming<'_>, DecodeError> {
    let [uid, operation, payloads @ ..] = frames else {
        return Err(DecodeError::Unanswerable("it has fewer than two frames"));
    };
    let number = Reader::new(uid).int();
    if uid.len() > MAX_UID || number.is_err() {
        return Err(DecodeError::Unanswerable(
            "the first frame is not a request number (a MessagePack integer)",
        ));
    }
    if !operation.is_empty() {
        return Ok(Incoming::Request {
            uid,
            operation,
            payloads,
        });
    }
    match payloads {
        [word] if &word[..] == b"ack" => Ok(Incoming::StreamAck { uid }),
        [word] if &word[..] == b"cancel" => Ok(Incoming::StreamCancel { uid }),
        _ => Err(DecodeError::Unanswerable("the operation frame is empty")),
    }
}

/// Decodes an operation frame: a number or a name.
pub(crate) fn decode_operation(frame: &[u8]) -> Result<Operation, DecodeError> {
    let mut reader = Reader::new(frame);
    if let Ok(name) = reader.str("operation", MAX_NAME) {
        reader.finish().map_err(DecodeError::OperationFrame)?;
        return Operation::from_name(name)
            .ok_or_else(|| DecodeError::UnknownOperation(format!("{:?}", truncated(name))));
    }
    let mut reader = Reader::new(frame);
    let id = reader.int().and_then(|id| reader.finish().map(|()| id));
    let id = id.map_err(DecodeError::OperationFrame)?;
    u64::try_from(id)
        .ok()
        .and_then(Operation::from_id)
        .ok_or_else(|| DecodeError::UnknownOperation(format!("number {id}")))
}

fn truncated(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Decodes a request from its operation and payload frames.
///
/// # Errors
/// [`DecodeError`], whose text is sent to the client.
pub(crate) fn decode_request(operation: &[u8], payloads: &[Bytes]) -> Result<Request, DecodeError> {
    let operation = decode_operation(operation)?;
    let expected = payload_count(operation).ok_or(DecodeError::Unsupported(operation))?;
    if payloads.len() != expected {
        return Err(DecodeError::FrameCount {
            operation,
            expected,
            found: payloads.len(),
        });
    }
    let p = Payloads {
        operation,
        frames: payloads,
    };
    // The count is checked and not used: the protocol itself ignores it.
    if let Operation::Lookup | Operation::FreeLookupLocks = operation {
        p.read(1, |r| r.number::<u64>("tp_size").map(drop))?;
    }
    Ok(match operation {
        Operation::RegisterKvCache => {
            let (kv_layout, unknown_hints) = p.read(5, layout_hints)?;
            Request::RegisterKvCache(Box::new(RegisterKvCache {
                instance_id: p.read(0, |r| r.number("instance_id"))?,
                kv_caches: p.descriptors(1)?,
                model_name: p.read(2, |r| name(r, "model_name"))?,
                world_size: p.read(3, world_size)?,
                engine_type: p.read(4, |r| name(r, "engine_type"))?,
                kv_layout,
                unknown_hints,
                groups: p.read(6, engine_groups)?,
            }))
        }
        Operation::UnregisterKvCache | Operation::UnregisterEngineDriven => Request::Unregister {
            instance_id: p.read(0, |r| r.number("instance_id"))?,
            engine_driven: operation == Operation::UnregisterEngineDriven,
        },
        Operation::RegisterEngineDriven => {
            Request::RegisterEngineDriven(p.read(0, engine_driven_context)?)
        }
        Operation::Store => Request::Store {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
            block_ids: p.read(2, block_ids)?,
            event: p.read(3, event)?,
        },
        Operation::Retrieve => Request::Retrieve {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
            block_ids: p.read(2, block_ids)?,
            event: p.read(3, event)?,
            skip_first_n_tokens: p.read(4, |r| r.number("skip_first_n_tokens"))?,
        },
        Operation::Lookup => Request::Lookup(p.read(0, cache_key)?),
        Operation::QueryPrefetchStatus => Request::QueryPrefetchStatus {
            request_id: p.read(0, |r| request_id(r, "request_id"))?,
        },
        Operation::WaitPrefetchStatus => Request::WaitPrefetchStatus {
            request_id: p.read(0, |r| request_id(r, "request_id"))?,
            timeout: p.read(1, Reader::float)?,
        },
        Operation::WaitLookup => Request::WaitLookup {
            request_id: p.read(0, |r| request_id(r, "request_id"))?,
            timeout: p.read(1, Reader::float)?,
        },
        Operation::FreeLookupLocks => Request::FreeLookupLocks(p.read(0, cache_key)?),
        Operation::EndSession => Request::EndSession {
            request_id: p.read(0, |r| request_id(r, "request_id"))?,
        },
        Operation::PrepareStore => Request::PrepareStore {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
        },
        Operation::CommitStore => Request::CommitStore {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
            pickled: p.read(2, |r| Ok(r.bin("data", usize::MAX)?.len()))?,
        },
        Operation::AbandonStore => Request::AbandonStore {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
        },
        Operation::AbandonEarlier => Request::AbandonEarlier {
            instance_id: p.read(0, |r| r.number("instance_id"))?,
        },
        Operation::PrepareRetrieve => Request::PrepareRetrieve {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
        },
        Operation::CommitRetrieve => Request::CommitRetrieve {
            key: p.read(0, cache_key)?,
            instance_id: p.read(1, |r| r.number("instance_id"))?,
        },
        Operation::Clear => Request::Clear {
            force: p.read(0, Reader::bool)?,
        },
        Operation::GetChunkSize => Request::GetChunkSize,
        Operation::Ping => Request::Ping {
            instance_id: p.read(0, |r| {
                if r.nil()? {
                    Ok(None)
                } else {
                    r.number("instance_id").map(Some)
                }
            })?,
        },
        Operation::ReportBlockAllocation => Request::ReportBlockAllocation {
            instance_id: p.read(0, |r| r.number("instance_id"))?,
            model_name: p.read(1, |r| name(r, "model_name"))?,
            records: p.read(2, block_allocations)?,
        },
        Operation::Noop => Request::Noop,
        Operation::GetExperimental => Request::GetExperimental,
        Operation::PoolDescriptor => Request::PoolDescriptor,
        Operation::SubscribeKvEvents => Request::SubscribeKvEvents {
            instance_id: p.read(0, |r| r.number("instance_id"))?,
            model_name: p.read(1, |r| name(r, "model_name"))?,
            cursor: p.read(2, |r| r.number("cursor"))?,
            max_events: p.read(3, |r| r.number("max_events"))?,
        },
        _ => return Err(DecodeError::Unsupported(operation)),
    })
}

/// Returns the number of payload frames of an operation, or `None` if it is not supported.
fn payload_count(operation: Operation) -> Option<usize> {
    Some(match operation {
        Operation::RegisterKvCache => 7,
        Operation::Retrieve => 5,
        Operation::Store | Operation::SubscribeKvEvents => 4,
        Operation::CommitStore | Operation::ReportBlockAllocation => 3,
        Operation::Lookup
        | Operation::WaitPrefetchStatus
        | Operation::WaitLookup
        | Operation::FreeLookupLocks
        | Operation::PrepareStore
        | Operation::AbandonStore
        | Operation::PrepareRetrieve
        | Operation::CommitRetrieve => 2,
        Operation::UnregisterKvCache
        | Operation::UnregisterEngineDriven
        | Operation::RegisterEngineDriven
        | Operation::QueryPrefetchStatus
        | Operation::EndSession
        | Operation::AbandonEarlier
        | Operation::Clear
        | Operation::Ping => 1,
        Operation::GetChunkSize
        | Operation::Noop
        | Operation::GetExperimental
        | Operation::PoolDescriptor => 0,
        _ => return None,
    })
}

struct Payloads<'a> {
    operation: Operation,
    frames: &'a [Bytes],
}

impl<'a> Payloads<'a> {
    fn read<T>(
        &self,
        index: usize,
        read: impl FnOnce(&mut Reader<'a>) -> Result<T, ValueError>,
    ) -> Result<T, DecodeError> {
        let mut reader = Reader::new(&self.frames[index]);
        let value = read(&mut reader).and_then(|value| reader.finish().map(|()| value));
        value.map_err(|error| DecodeError::Payload {
            operation: self.operation,
            index,
            error,
        })
    }

    fn descriptors(&self, index: usize) -> Result<Vec<KvDescriptor>, DecodeError> {
        let raw = self.read(index, |r| {
            (0..r.array("kv_caches", MAX_LAYERS)?)
                .map(|_| r.ext("memory descriptor", MAX_DESCRIPTOR))
                .collect::<Result<Vec<_>, _>>()
        })?;
        raw.into_iter()
            .map(|(code, bytes)| KvDescriptor::decode(code, bytes))
            .collect::<Result<_, _>>()
            .map_err(|error| DecodeError::Descriptor {
                operation: self.operation,
                error,
            })
    }
}

fn name(reader: &mut Reader<'_>, what: &'static str) -> Result<String, ValueError> {
    reader.str(what, MAX_NAME).map(str::to_owned)
}

/// Reads a request id. Users of an engine choose it over HTTP, at any length, and the unmodified
/// vLLM scheduler fails if it is refused, so a long id is replaced by its beginning and its digest.
fn request_id(reader: &mut Reader<'_>, what: &'static str) -> Result<String, ValueError> {
    const KEPT: usize = 128;
    let text = reader.str(what, MAX_REQUEST_ID)?;
    if text.len() <= MAX_NAME {
        return Ok(text.to_owned());
    }
    // A cryptographic digest: a user must not be able to choose an id that equals another's.
    let digest = blake3::hash(text.as_bytes());
    let kept: String = text.chars().take(KEPT).collect();
    Ok(format!("{kept}…{digest}"))
}

fn world_size(reader: &mut Reader<'_>) -> Result<u32, ValueError> {
    match reader.number::<u32>("world_size")? {
        size @ 1..=MAX_WORLD_SIZE => Ok(size),
        other => Err(ValueError::Invalid(format!(
            "world_size must be 1 to {MAX_WORLD_SIZE}, found {other}"
        ))),
    }
}

fn cache_key(reader: &mut Reader<'_>) -> Result<CacheKey, ValueError> {
    let mut key = CacheKey::default();
    let (mut model, mut request, mut tokens, mut range) = (false, false, false, 0);
    for _ in 0..reader.map("key", 64)? {
        match reader.str("key field", MAX_NAME)? {
            "model_name" => {
                key.model_name = name(reader, "model_name")?;
                model = true;
            }
            "world_size" => key.world_size = world_size(reader)?,
            "worker_id" => {
                key.worker_id = if reader.nil()? {
                    None
                } else {
                    Some(reader.number("worker_id")?)
                };
            }
            "token_ids" => {
                key.token_ids.clear();
                reader.tokens(MAX_TOKENS, &mut key.token_ids)?;
                tokens = true;
            }
            "start" => {
                key.start = reader.number("start")?;
                range |= 1;
            }
            "end" => {
                key.end = reader.number("end")?;
                range |= 2;
            }
            "request_id" => {
                key.request_id = request_id(reader, "request_id")?;
                request = true;
            }
            "cache_salt" => key.cache_salt = salt(reader)?,
            "num_kv_readers" => key.num_kv_readers = reader.number("num_kv_readers")?,
            "request_configs" => key.configs = request_configs(reader)?,
            IDENTITY => {
                let digest = reader.bin(IDENTITY, 32)?.try_into();
                let digest = digest.map_err(|_| invalid("lmc_identity must have 32 bytes"))?;
                key.identity = Some(IdentityDigest(digest));
            }
            CHUNK_HASHES => key.chunk_hashes = chunk_hashes(reader)?,
            UNIT => key.unit = Some(unit(reader)?),
            _ => reader.skip()?,
        }
    }
    if key.unit.is_some() && key.chunk_hashes.is_empty() {
        return Err(invalid("lmc_unit needs lmc_chunk_hashes"));
    }
    if !key.chunk_hashes.is_empty() && (key.identity.is_none() || !key.token_ids.is_empty()) {
        return Err(invalid(
            "lmc_chunk_hashes need lmc_identity, which says how they are made, and no token_ids",
        ));
    }
    let missing = [
        (model, "model_name"),
        (key.world_size > 0, "world_size"),
        (tokens, "token_ids"),
        (range & 1 != 0, "start"),
        (range & 2 != 0, "end"),
        (request, "request_id"),
    ];
    if let Some((_, field)) = missing.iter().find(|(present, _)| !present) {
        return Err(ValueError::Missing(field));
    }
    if let Some(worker) = key.worker_id
        && worker >= key.world_size
    {
        let text = format!(
            "worker_id must be less than world_size {}, found {worker}",
            key.world_size
        );
        return Err(ValueError::Invalid(text));
    }
    Ok(key)
}

fn invalid(text: &str) -> ValueError {
    ValueError::Invalid(text.to_owned())
}

/// Reads the number of tokens in a chunk, 1 or more.
fn unit(reader: &mut Reader<'_>) -> Result<u32, ValueError> {
    match reader.number(UNIT)? {
        0 => Err(invalid("lmc_unit must be 1 or more")),
        unit => Ok(unit),
    }
}

/// Reads the hashes of a prompt's chunks: 32 bytes each, in one byte string.
fn chunk_hashes(reader: &mut Reader<'_>) -> Result<Vec<ChunkHash>, ValueError> {
    let bytes = reader.bin(CHUNK_HASHES, 32 * MAX_CHUNKS)?;
    let (hashes, []) = bytes.as_chunks::<32>() else {
        return Err(invalid(
            "lmc_chunk_hashes must have 32 bytes for each chunk",
        ));
    };
    Ok(hashes.iter().copied().map(ChunkHash::new).collect())
}

/// Reads the settings of a request. Ignores an entry that is unknown or whose value has another
/// type, because users of the engine choose both; a tag may have any value. Malformed names of
/// peers fail the lookup only: a refused store could end the engine.
fn request_configs(reader: &mut Reader<'_>) -> Result<RequestConfigs, ValueError> {
    let mut configs = RequestConfigs::default();
    if reader.nil()? {
        return Ok(configs);
    }
    let mut tags = BTreeMap::new();
    for _ in 0..reader.map("request_configs", MAX_CONFIGS)? {
        let name = reader.str("request config", MAX_NAME)?;
        match name {
            "lmcache.skip_save" => match reader.if_bool() {
                Some(skip) => configs.skip_save = skip,
                None => reader.skip()?,
            },
            name if SOURCES.contains(&name) => configs.sources = sources(reader)?,
            WAIT => {
                if let Some(millis) = read_or_skip(reader, Reader::int)? {
                    configs.wait = wait_of(millis);
                }
            }
            AWAITED => {
                let id = read_or_skip(reader, |reader| reader.str(AWAITED, MAX_AWAITED))?;
                if let Some(id) = id {
                    configs.awaited = id.to_owned();
                }
            }
            PUSH_TO => {
                let name = read_or_skip(reader, |reader| reader.str(PUSH_TO, MAX_SOURCE))?;
                if let Some(name) = name {
                    configs.push_to = name.to_owned();
                }
            }
            TRACE_PARENT => {
                let text =
                    read_or_skip(reader, |reader| reader.str(TRACE_PARENT, MAX_TRACE_PARENT))?;
                configs.parent = text.and_then(TraceParent::parse);
            }
            tag if tag.starts_with(TAG) => _ = tags.insert(tag, reader.raw()?),
            _ => reader.skip()?,
        }
    }
    configs.tags = TagsId::of(tags);
    Ok(configs)
}

fn sources(reader: &mut Reader<'_>) -> Result<Sources, ValueError> {
    if reader.nil()? {
        return Ok(Sources::default());
    }
    let text = read_or_skip(reader, |reader| {
        reader.str("lmcache.p2p.source", MAX_SOURCES)
    })?;
    Ok(text.map_or(Sources::NO_TEXT, Sources::parse))
}

/// Reads a value, or passes over one that has another form.
fn read_or_skip<'a, T>(
    reader: &mut Reader<'a>,
    read: impl FnOnce(&mut Reader<'a>) -> Result<T, ValueError>,
) -> Result<Option<T>, ValueError> {
    let before = reader.clone();
    if let Ok(value) = read(reader) {
        return Ok(Some(value));
    }
    *reader = before;
    reader.skip()?;
    Ok(None)
}

fn salt(reader: &mut Reader<'_>) -> Result<String, ValueError> {
    let salt = reader.str("cache_salt", MAX_SALT * 4)?;
    if salt.chars().count() > MAX_SALT {
        let text = format!("cache_salt must have at most {MAX_SALT} characters");
        return Err(ValueError::Invalid(text));
    }
    if let Some(bad) = salt.chars().find(|c| matches!(c, '@' | '/' | '\\' | '\0')) {
        return Err(ValueError::Invalid(format!(
            "cache_salt must not contain {bad:?}"
        )));
    }
    Ok(salt.to_owned())
}

/// Keeps a field that this version does not know.
fn unknown_field(
    unknown: &mut UnknownFields,
    name: &str,
    reader: &mut Reader<'_>,
) -> Result<(), ValueError> {
    unknown.0.insert(name.to_owned(), reader.raw()?.to_vec());
    Ok(())
}

fn layout_hints(reader: &mut Reader<'_>) -> Result<(Option<String>, UnknownFields), ValueError> {
    let (mut layout, mut unknown) = (None, UnknownFields::default());
    for _ in 0..reader.map("layout_hints", 64)? {
        match reader.str("layout hint", MAX_NAME)? {
            "kv_layout" if !reader.nil()? => layout = Some(name(reader, "kv_layout")?),
            "kv_layout" => {}
            other => unknown_field(&mut unknown, other, reader)?,
        }
    }
    Ok((layout, unknown))
}

fn engine_groups(reader: &mut Reader<'_>) -> Result<Vec<EngineGroup>, ValueError> {
    (0..reader.array("engine_group_infos", MAX_GROUPS)?)
        .map(|_| engine_group(reader))
        .collect()
}

fn engine_group(reader: &mut Reader<'_>) -> Result<EngineGroup, ValueError> {
    let mut group = EngineGroup {
        sw_size_tokens: -1,
        ..EngineGroup::default()
    };
    for _ in 0..reader.map("engine group", 64)? {
        match reader.str("engine group field", MAX_NAME)? {
            "engine_group_id" => group.engine_group_id = reader.number("engine_group_id")?,
            "layer_indices" => {
                group.layer_indices = (0..reader.array("layer_indices", MAX_LAYERS)?)
                    .map(|_| reader.number("layer index"))
                    .collect::<Result<_, _>>()?;
            }
            "tokens_per_block" => group.tokens_per_block = reader.number("tokens_per_block")?,
            "sw_size_tokens" => group.sw_size_tokens = reader.number("sw_size_tokens")?,
            "extra_object_group_tag" => {
                group.extra_object_group_tag = reader.number("extra_object_group_tag")?;
            }
            "recurrent_state" => group.recurrent_state = reader.bool()?,
            other => unknown_field(&mut group.unknown, other, reader)?,
        }
    }
    Ok(group)
}

fn engine_driven_context(reader: &mut Reader<'_>) -> Result<EngineDrivenContext, ValueError> {
    let (mut instance_id, mut model_name, mut world, mut block_size) = (None, None, None, None);
    let (mut num_layers, mut hidden, mut dtype, mut use_mla) = (None, None, None, None);
    let (mut num_physical_slots, mut identity, mut layout, mut own_unit) = (None, None, None, None);
    let mut unknown = UnknownFields::default();
    for _ in 0..reader.map("registration", 64)? {
        match reader.str("registration field", MAX_NAME)? {
            "instance_id" => instance_id = Some(reader.number("instance_id")?),
            "model_name" => model_name = Some(name(reader, "model_name")?),
            "world_size" => world = Some(world_size(reader)?),
            "block_size" => block_size = Some(reader.number("block_size")?),
            "num_layers" => num_layers = Some(reader.number("num_layers")?),
            "hidden_dim_size" => hidden = Some(reader.number("hidden_dim_size")?),
            "dtype_str" => dtype = Some(name(reader, "dtype_str")?),
            "use_mla" => use_mla = Some(reader.bool()?),
            "num_physical_slots" if !reader.nil()? => {
                num_physical_slots = Some(reader.number("num_physical_slots")?);
            }
            "num_physical_slots" => {}
            IDENTITY => identity = Some(reader.str(IDENTITY, MAX_RECORD)?.to_owned()),
            LAYOUT => layout = Some(reader.str(LAYOUT, MAX_RECORD)?.to_owned()),
            UNIT => own_unit = Some(unit(reader)?),
            other => unknown_field(&mut unknown, other, reader)?,
        }
    }
    let record = match (identity, layout) {
        (Some(identity), Some(layout)) => Some(EngineRecord {
            identity,
            layout,
            unit: own_unit,
        }),
        (None, None) if own_unit.is_none() => None,
        _ => {
            return Err(invalid(
                "lmc_identity and lmc_layout must be given together, and lmc_unit only with them",
            ));
        }
    };
    Ok(EngineDrivenContext {
        instance_id: instance_id.ok_or(ValueError::Missing("instance_id"))?,
        model_name: model_name.ok_or(ValueError::Missing("model_name"))?,
        world_size: world.ok_or(ValueError::Missing("world_size"))?,
        block_size: block_size.ok_or(ValueError::Missing("block_size"))?,
        num_layers: num_layers.ok_or(ValueError::Missing("num_layers"))?,
        hidden_dim_size: hidden.ok_or(ValueError::Missing("hidden_dim_size"))?,
        dtype: dtype.ok_or(ValueError::Missing("dtype_str"))?,
        use_mla: use_mla.ok_or(ValueError::Missing("use_mla"))?,
        num_physical_slots,
        record,
        unknown,
    })
}

fn event(r: &mut Reader<'_>) -> Result<Vec<u8>, ValueError> {
    r.bin("event_ipc_handle", MAX_DESCRIPTOR)
        .map(<[u8]>::to_vec)
}

fn block_ids(reader: &mut Reader<'_>) -> Result<Vec<Vec<u32>>, ValueError> {
    (0..reader.array("block_ids", MAX_GROUPS)?)
        .map(|_| {
            let mut ids = Vec::new();
            reader.tokens(MAX_BLOCK_IDS, &mut ids)?;
            Ok(ids)
        })
        .collect()
}

fn block_allocations(reader: &mut Reader<'_>) -> Result<Vec<BlockAllocation>, ValueError> {
    (0..reader.array("records", MAX_RECORDS)?)
        .map(|_| {
            let mut record = BlockAllocation::default();
            for _ in 0..reader.map("record", 64)? {
                match reader.str("record field", MAX_NAME)? {
                    "req_id" => record.request_id = request_id(reader, "req_id")?,
                    "new_block_ids" => record.blocks = count(reader)?,
                    "new_token_ids" => record.tokens = count(reader)?,
                    _ => reader.skip()?,
                }
            }
            Ok(record)
        })
        .collect()
}

/// Reads an array and returns its length; the elements are skipped.
fn count(reader: &mut Reader<'_>) -> Result<usize, ValueError> {
    let len = reader.array("ids", MAX_TOKENS)?;
    for _ in 0..len {
        reader.skip()?;
    }
    Ok(len)
}

/// Encodes a reply after the request number: the operation and its value, or a refusal's text.
pub(crate) fn encode_reply(operation: &Bytes, reply: &Reply) -> (Bytes, Option<Bytes>) {
    let value = match reply {
        Reply::None => return (operation.clone(), None),
        Reply::Error(text) => return (encoded(text), None),
        Reply::Bool(value) => encoded(value),
        Reply::Int(value) => encoded(value),
        Reply::Text(text) => encoded(text),
        Reply::Strings(texts) => encoded(texts),
        Reply::Registered {
            shm_name,
            pool_size,
        } => encoded(&Record(&[("shm_name", shm_name), ("pool_size", pool_size)])),
        Reply::Found { chunks, tiers } => encoded(&Record(&[("chunks", chunks), ("tiers", tiers)])),
        Reply::StoreSlots {
            slots,
            chunk_indices,
        } => {
            let context = Record(&[("slots", slots), ("chunk_indices", chunk_indices)]);
            encoded(&Record(&[("context", &context)]))
        }
        Reply::RetrieveSlots(slots) => {
            let context: &[(&str, &dyn Encode)] = match slots {
                None => &[],
                Some(slots) => &[("slots", slots)],
            };
            encoded(&Record(&[
                ("success", &slots.is_some()),
                ("data", &Bin(b"")),
                ("context", &Record(context)),
            ]))
        }
        Reply::Transferred(ok) => {
            // The event handle is empty, because the copy has ended when the reply is sent.
            let mut out = Writer::new();
            out.array(2);
            out.bin(b"");
            out.bool(*ok);
            out.into_bytes().into()
        }
        Reply::Events(batch) => encoded(batch),
    };
    (operation.clone(), Some(value))
}

record!(TierChunks, |found|
    "tier": found.tier,
    "chunks": found.chunks,
);

record!(SlotDescriptor, |slot|
    "offset": slot.offset,
    "length": slot.length,
    "shape": slot.shape,
    "dtype": slot.dtype,
);

record!(KvEventBatch, |batch|
    "enabled": batch.enabled,
    "incarnation": batch.incarnation,
    "next_cursor": batch.next_cursor,
    "lost": batch.lost,
    "events": batch.events,
);

record!(KvEvent, |event|
    "seq": event.seq,
    "kind": if event.kind == KvEventKind::Stored { "stored" } else { "removed" },
    "medium": "CPU",
    "model_name": event.model_name,
    "block_hashes": vec![Bin(&event.hash)],
    "parent_block_hash": event.parent.as_deref().map(Bin),
    "token_ids": event.tokens,
);

mod client;

pub(crate) use client::{decode_reply, encode_request};

#[cfg(test)]
mod tests;
