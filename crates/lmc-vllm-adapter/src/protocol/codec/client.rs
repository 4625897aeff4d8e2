//! The client's side of the codec, for load generators and tests: encodes requests, decodes
//! replies.

use bytes::Bytes;

use crate::protocol::codec::{
    CHUNK_HASHES, IDENTITY, LAYOUT, MAX_GROUPS, MAX_NAME, UNIT, decode_operation,
};
use crate::protocol::msgpack::{Bin, Encode, Reader, Record, ValueError, Writer, encoded, record};
use crate::protocol::{
    AWAITED, BlockAllocation, CacheKey, ConfigValue, EngineDrivenContext, EngineGroup, KvEvent,
    KvEventBatch, KvEventKind, Operation, PUSH_TO, Reply, Request, RequestConfigs, SOURCES,
    SlotDescriptor, Sources, TierChunks, UnknownFields, WAIT,
};

const MAX_SLOTS: usize = 1 << 20;

/// Encodes the frames of a request: number, operation, payloads.
pub(crate) fn encode_request(uid: u64, request: &Request) -> Vec<Bytes> {
    let operation = request.operation();
    let mut frames = vec![
        encoded(&uid),
        match operation.id() {
            Some(id) => encoded(&u32::from(id)),
            None => encoded(&operation.name()),
        },
    ];
    let mut push =
        |values: &[&dyn Encode]| frames.extend(values.iter().map(|&value| encoded(value)));
    match request {
        Request::RegisterKvCache(r) => {
            let layout = r
                .kv_layout
                .iter()
                .map(|layout| ("kv_layout", layout as &dyn Encode));
            let layout: Vec<_> = layout.collect();
            let hints = With(&layout, &r.unknown_hints);
            push(&[&r.instance_id, &r.kv_caches, &r.model_name, &r.world_size]);
            push(&[&r.engine_type, &hints, &r.groups]);
        }
        Request::Unregister { instance_id, .. } => push(&[instance_id]),
        Request::RegisterEngineDriven(context) => push(&[context]),
        Request::Store {
            key,
            instance_id,
            block_ids,
            event,
        } => push(&[key, instance_id, block_ids, &Bin(event)]),
        Request::Retrieve {
            key,
            instance_id,
            block_ids,
            event,
            skip_first_n_tokens,
        } => {
            let event = Bin(event);
            push(&[key, instance_id, block_ids, &event, skip_first_n_tokens]);
        }
        Request::Lookup(key) | Request::FreeLookupLocks(key) => push(&[key, &1_u32]),
        Request::QueryPrefetchStatus { request_id } | Request::EndSession { request_id } => {
            push(&[request_id]);
        }
        Request::WaitPrefetchStatus {
            request_id,
            timeout,
        }
        | Request::WaitLookup {
            request_id,
            timeout,
        } => push(&[request_id, timeout]),
        Request::PrepareStore { key, instance_id }
        | Request::AbandonStore { key, instance_id }
        | Request::PrepareRetrieve { key, instance_id }
        | Request::CommitRetrieve { key, instance_id } => push(&[key, instance_id]),
        Request::CommitStore {
            key,
            instance_id,
            pickled,
        } => push(&[key, instance_id, &Bin(&vec![0x80; *pickled])]),
        Request::Clear { force } => push(&[force]),
        Request::AbandonEarlier { instance_id } => push(&[instance_id]),
        Request::Ping { instance_id } => push(&[instance_id]),
        Request::ReportBlockAllocation {
            instance_id,
            model_name,
            records,
        } => push(&[instance_id, model_name, records]),
        Request::SubscribeKvEvents {
            instance_id,
            model_name,
            cursor,
            max_events,
        } => push(&[instance_id, model_name, cursor, &(*max_events as u64)]),
        Request::GetChunkSize
        | Request::Noop
        | Request::GetExperimental
        | Request::PoolDescriptor => {}
    }
    frames
}

/// A map of known fields and of fields that the other side may not know.
struct With<'a>(&'a [(&'a str, &'a dyn Encode)], &'a UnknownFields);

impl Encode for With<'_> {
    fn encode(&self, out: &mut Writer) {
        let Self(known, UnknownFields(unknown)) = self;
        out.map(known.len() + unknown.len());
        for (name, value) in *known {
            out.str(name);
            value.encode(out);
        }
        for (name, value) in unknown {
            out.str(name);
            out.raw(value);
        }
    }
}

impl Encode for EngineGroup {
    fn encode(&self, out: &mut Writer) {
        let known: &[(&str, &dyn Encode)] = &[
            ("engine_group_id", &self.engine_group_id),
            ("layer_indices", &self.layer_indices),
            ("tokens_per_block", &self.tokens_per_block),
            ("sw_size_tokens", &self.sw_size_tokens),
            ("extra_object_group_tag", &self.extra_object_group_tag),
            ("recurrent_state", &self.recurrent_state),
        ];
        With(known, &self.unknown).encode(out);
    }
}

impl Encode for EngineDrivenContext {
    fn encode(&self, out: &mut Writer) {
        let mut fields: Vec<(&str, &dyn Encode)> = vec![
            ("instance_id", &self.instance_id),
            ("model_name", &self.model_name),
            ("world_size", &self.world_size),
            ("block_size", &self.block_size),
            ("num_layers", &self.num_layers),
            ("hidden_dim_size", &self.hidden_dim_size),
            ("dtype_str", &self.dtype),
            ("use_mla", &self.use_mla),
            ("num_physical_slots", &self.num_physical_slots),
        ];
        if let Some(record) = &self.record {
            fields.push((IDENTITY, &record.identity));
            fields.push((LAYOUT, &record.layout));
            if let Some(unit) = &record.unit {
                fields.push((UNIT, unit));
            }
        }
        With(&fields, &self.unknown).encode(out);
    }
}

record!(BlockAllocation, |record|
    "req_id": record.request_id,
    "new_block_ids": vec![0_u32; record.blocks],
    "new_token_ids": vec![0_u32; record.tokens],
);

impl Encode for ConfigValue {
    fn encode(&self, out: &mut Writer) {
        match self {
            Self::Nil => out.nil(),
            Self::Bool(value) => out.bool(*value),
            Self::Int(value) => out.int(*value),
            Self::Float(value) => out.float(*value),
            Self::Text(text) => out.str(text),
        }
    }
}

impl Encode for RequestConfigs {
    fn encode(&self, out: &mut Writer) {
        let named = match &self.sources {
            Sources::Named(names) => names.join(","),
            Sources::Malformed(_) => String::new(),
        };
        let mut entries: Vec<(&str, &dyn Encode)> = Vec::new();
        if self.skip_save {
            entries.push(("lmcache.skip_save", &true));
        }
        if self.sources != Sources::default() {
            entries.push((SOURCES[0], &named));
        }
        let millis = i64::try_from(self.wait.as_millis()).unwrap_or(i64::MAX);
        let millis = ConfigValue::Int(millis);
        if !self.wait.is_zero() {
            entries.push((WAIT, &millis));
        }
        if !self.awaited.is_empty() {
            entries.push((AWAITED, &self.awaited));
        }
        if !self.push_to.is_empty() {
            entries.push((PUSH_TO, &self.push_to));
        }
        let others = self.others.iter();
        entries.extend(others.map(|(name, value)| (name.as_str(), value as &dyn Encode)));
        match entries.is_empty() {
            true => out.nil(),
            false => Record(&entries).encode(out),
        }
    }
}

impl Encode for CacheKey {
    fn encode(&self, out: &mut Writer) {
        let mut fields: Vec<(&str, &dyn Encode)> = vec![
            ("model_name", &self.model_name),
            ("world_size", &self.world_size),
            ("worker_id", &self.worker_id),
            ("token_ids", &self.token_ids),
            ("start", &self.start),
            ("end", &self.end),
            ("request_id", &self.request_id),
            ("cache_salt", &self.cache_salt),
            ("request_configs", &self.configs),
            ("num_kv_readers", &self.num_kv_readers),
        ];
        let identity = self.identity.as_ref().map(|digest| Bin(&digest.0));
        if let Some(identity) = &identity {
            fields.push((IDENTITY, identity));
        }
        let hashes: Vec<u8>;
        let bin;
        if !self.chunk_hashes.is_empty() {
            hashes = (self.chunk_hashes.iter().flat_map(|hash| hash.as_bytes()))
                .copied()
                .collect();
            bin = Bin(&hashes);
            fields.push((CHUNK_HASHES, &bin));
        }
        if let Some(unit) = &self.unit {
            fields.push((UNIT, unit));
        }
        Record(&fields).encode(out);
    }
}

/// Decodes the reply to a request of this operation, from the frames after the request number.
///
/// # Errors
/// [`ValueError`] when the value has not the type that the operation replies with. A refusal is
/// not an error but a [`Reply::Error`].
pub(crate) fn decode_reply(operation: Operation, frames: &[Bytes]) -> Result<Reply, ValueError> {
    let [answered, payload @ ..] = frames else {
        return Err(ValueError::Missing("operation"));
    };
    if decode_operation(answered) != Ok(operation) {
        let text = Reader::new(answered)
            .str("refusal", 64 << 10)
            .unwrap_or("no text");
        return Ok(Reply::Error(text.to_owned()));
    }
    let Some(payload) = payload.first() else {
        return Ok(Reply::None);
    };
    let mut reader = Reader::new(payload);
    let r = &mut reader;
    let reply = match operation {
        Operation::Noop => Reply::Text(r.str("reply", MAX_NAME)?.to_owned()),
        Operation::GetChunkSize
        | Operation::PoolDescriptor
        | Operation::AbandonEarlier
        | Operation::QueryPrefetchStatus
        | Operation::WaitPrefetchStatus => Reply::Int(r.number("reply")?),
        Operation::GetExperimental => Reply::Strings(
            (0..r.array("reply", MAX_NAME)?)
                .map(|_| r.str("reply", MAX_NAME).map(str::to_owned))
                .collect::<Result<_, _>>()?,
        ),
        Operation::CommitStore
        | Operation::AbandonStore
        | Operation::CommitRetrieve
        | Operation::Ping => Reply::Bool(r.bool()?),
        Operation::Store | Operation::Retrieve => {
            r.array("reply", 2)?;
            r.bin("event", MAX_NAME)?;
            Reply::Transferred(r.bool()?)
        }
        Operation::RegisterEngineDriven => registered(r)?,
        Operation::WaitLookup => found(r)?,
        Operation::PrepareStore | Operation::PrepareRetrieve => slots(operation, r)?,
        Operation::SubscribeKvEvents => Reply::Events(events(r)?),
        _ => {
            return Err(ValueError::Invalid(format!(
                "{operation} has no reply value"
            )));
        }
    };
    reader.finish()?;
    Ok(reply)
}

fn found(r: &mut Reader<'_>) -> Result<Reply, ValueError> {
    let (mut chunks, mut tiers) = (0, Vec::new());
    for _ in 0..r.map("reply", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "chunks" => chunks = r.number("chunks")?,
            "tiers" => {
                tiers = (0..r.array("tiers", TierChunks::MAX)?)
                    .map(|_| tier_chunks(r))
                    .collect::<Result<_, _>>()?;
            }
            _ => r.skip()?,
        }
    }
    Ok(Reply::Found { chunks, tiers })
}

fn tier_chunks(r: &mut Reader<'_>) -> Result<TierChunks, ValueError> {
    let mut found = TierChunks::default();
    for _ in 0..r.map("tier", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "tier" => found.tier = r.str("tier", MAX_NAME)?.to_owned(),
            "chunks" => found.chunks = r.number("chunks")?,
            _ => r.skip()?,
        }
    }
    Ok(found)
}

fn registered(r: &mut Reader<'_>) -> Result<Reply, ValueError> {
    let (mut shm_name, mut pool_size) = (String::new(), 0);
    for _ in 0..r.map("reply", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "shm_name" => shm_name = r.str("shm_name", MAX_NAME)?.to_owned(),
            "pool_size" => pool_size = r.number("pool_size")?,
            _ => r.skip()?,
        }
    }
    Ok(Reply::Registered {
        shm_name,
        pool_size,
    })
}

fn slots(operation: Operation, r: &mut Reader<'_>) -> Result<Reply, ValueError> {
    let (mut success, mut slots, mut chunk_indices) = (false, Vec::new(), Vec::new());
    for _ in 0..r.map("reply", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "success" => success = r.bool()?,
            "context" => {
                for _ in 0..r.map("context", MAX_NAME)? {
                    match r.str("field", MAX_NAME)? {
                        "slots" => {
                            slots = (0..r.array("slots", MAX_SLOTS)?)
                                .map(|_| slot(r))
                                .collect::<Result<_, _>>()?;
                        }
                        "chunk_indices" => {
                            chunk_indices = (0..r.array("chunk_indices", MAX_SLOTS)?)
                                .map(|_| r.number("chunk index"))
                                .collect::<Result<_, _>>()?;
                        }
                        _ => r.skip()?,
                    }
                }
            }
            _ => r.skip()?,
        }
    }
    Ok(match operation {
        Operation::PrepareStore => Reply::StoreSlots {
            slots,
            chunk_indices,
        },
        _ => Reply::RetrieveSlots(success.then_some(slots)),
    })
}

fn slot(r: &mut Reader<'_>) -> Result<SlotDescriptor, ValueError> {
    let mut slot = SlotDescriptor::default();
    for _ in 0..r.map("slot", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "offset" => slot.offset = r.number("offset")?,
            "length" => slot.length = r.number("length")?,
            "shape" => {
                slot.shape = (0..r.array("shape", 8)?)
                    .map(|_| r.number("shape"))
                    .collect::<Result<_, _>>()?;
            }
            "dtype" => slot.dtype = r.str("dtype", MAX_NAME)?.to_owned(),
            _ => r.skip()?,
        }
    }
    Ok(slot)
}

fn events(r: &mut Reader<'_>) -> Result<KvEventBatch, ValueError> {
    let mut batch = KvEventBatch::default();
    for _ in 0..r.map("reply", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "enabled" => batch.enabled = r.bool()?,
            "incarnation" => batch.incarnation = r.number("incarnation")?,
            "next_cursor" => batch.next_cursor = r.number("next_cursor")?,
            "lost" => batch.lost = r.bool()?,
            "events" => {
                batch.events = (0..r.array("events", MAX_SLOTS)?)
                    .map(|_| event(r))
                    .collect::<Result<_, _>>()?;
            }
            _ => r.skip()?,
        }
    }
    Ok(batch)
}

fn event(r: &mut Reader<'_>) -> Result<KvEvent, ValueError> {
    let mut event = KvEvent::default();
    for _ in 0..r.map("event", MAX_NAME)? {
        match r.str("field", MAX_NAME)? {
            "seq" => event.seq = r.number("seq")?,
            "kind" => {
                if r.str("kind", MAX_NAME)? == "stored" {
                    event.kind = KvEventKind::Stored;
                }
            }
            "model_name" => event.model_name = r.str("model_name", MAX_NAME)?.to_owned(),
            "block_hashes" => {
                for _ in 0..r.array("block_hashes", MAX_GROUPS)? {
                    event.hash = r.bin("hash", MAX_NAME)?.to_vec();
                }
            }
            "parent_block_hash" if !r.nil()? => {
                event.parent = Some(r.bin("hash", MAX_NAME)?.to_vec());
            }
            "parent_block_hash" => {}
            "token_ids" => r.tokens(MAX_SLOTS, &mut event.tokens)?,
            _ => r.skip()?,
        }
    }
    Ok(event)
}
