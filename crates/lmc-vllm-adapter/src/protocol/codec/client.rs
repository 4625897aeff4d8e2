//! The client's side of the codec, for load generators and tests: encodes requests, decodes
//! replies.

use bytes::Bytes;

use crate::protocol::codec::{MAX_GROUPS, MAX_NAME, decode_operation};
use crate::protocol::msgpack::{Reader, ValueError, Writer};
use crate::protocol::{
    CacheKey, KvEvent, KvEventBatch, KvEventKind, Operation, Reply, Request, SlotDescriptor,
};

const MAX_SLOTS: usize = 1 << 20;

/// Encodes the frames of a request: number, operation, payloads.
pub(crate) fn encode_request(uid: u64, request: &Request) -> Vec<Bytes> {
    let operation = request.operation();
    let mut frames = vec![value(|w| w.uint(uid))];
    frames.push(value(|w| match operation.id() {
        Some(id) => w.uint(u64::from(id)),
        None => w.str(operation.name()),
    }));
    match request {
        Request::RegisterKvCache(r) => {
            frames.push(value(|w| w.uint(r.instance_id)));
            frames.push(value(|w| {
                w.array(r.kv_caches.len());
                r.kv_caches
                    .iter()
                    .for_each(|descriptor| descriptor.encode(w));
            }));
            frames.push(value(|w| w.str(&r.model_name)));
            frames.push(value(|w| w.uint(u64::from(r.world_size))));
            frames.push(value(|w| w.str(&r.engine_type)));
            frames.push(value(|w| match &r.kv_layout {
                None => w.map(0),
                Some(layout) => {
                    w.map(1);
                    w.str("kv_layout");
                    w.str(layout);
                }
            }));
            frames.push(value(|w| {
                w.array(r.groups.len());
                for group in &r.groups {
                    w.map(5);
                    w.str("engine_group_id");
                    w.uint(u64::from(group.engine_group_id));
                    w.str("layer_indices");
                    numbers(w, &group.layer_indices);
                    w.str("tokens_per_block");
                    w.uint(u64::from(group.tokens_per_block));
                    w.str("sw_size_tokens");
                    w.int(group.sw_size_tokens);
                    w.str("recurrent_state");
                    w.bool(group.recurrent_state);
                }
            }));
        }
        Request::Unregister { instance_id, .. } => frames.push(value(|w| w.uint(*instance_id))),
        Request::RegisterEngineDriven(r) => frames.push(value(|w| {
            w.map(9);
            w.str("instance_id");
            w.uint(r.instance_id);
            w.str("model_name");
            w.str(&r.model_name);
            for (name, number) in [
                ("world_size", r.world_size),
                ("block_size", r.block_size),
                ("num_layers", r.num_layers),
                ("hidden_dim_size", r.hidden_dim_size),
            ] {
                w.str(name);
                w.uint(u64::from(number));
            }
            w.str("dtype_str");
            w.str(&r.dtype);
            w.str("use_mla");
            w.bool(r.use_mla);
            w.str("num_physical_slots");
            match r.num_physical_slots {
                None => w.nil(),
                Some(slots) => w.uint(u64::from(slots)),
            }
        })),
        Request::Store {
            key,
            instance_id,
            block_ids,
        } => {
            frames.push(cache_key(key));
            frames.push(value(|w| w.uint(*instance_id)));
            frames.push(lists(block_ids));
            frames.push(value(|w| w.bin(b"")));
        }
        Request::Retrieve {
            key,
            instance_id,
            block_ids,
            skip_first_n_tokens,
        } => {
            frames.push(cache_key(key));
            frames.push(value(|w| w.uint(*instance_id)));
            frames.push(lists(block_ids));
            frames.push(value(|w| w.bin(b"")));
            frames.push(value(|w| w.uint(*skip_first_n_tokens)));
        }
        Request::Lookup(key) | Request::FreeLookupLocks(key) => {
            frames.push(cache_key(key));
            frames.push(value(|w| w.uint(1)));
        }
        Request::QueryPrefetchStatus { request_id } | Request::EndSession { request_id } => {
            frames.push(value(|w| w.str(request_id)));
        }
        Request::WaitPrefetchStatus {
            request_id,
            timeout,
        } => {
            frames.push(value(|w| w.str(request_id)));
            frames.push(value(|w| w.float(*timeout)));
        }
        Request::PrepareStore { key, instance_id }
        | Request::PrepareRetrieve { key, instance_id }
        | Request::CommitRetrieve { key, instance_id } => {
            frames.push(cache_key(key));
            frames.push(value(|w| w.uint(*instance_id)));
        }
        Request::CommitStore {
            key,
            instance_id,
            pickled,
        } => {
            frames.push(cache_key(key));
            frames.push(value(|w| w.uint(*instance_id)));
            frames.push(value(|w| w.bin(&vec![0x80; *pickled])));
        }
        Request::Clear { force } => frames.push(value(|w| w.bool(*force))),
        Request::Ping { instance_id } => frames.push(value(|w| match instance_id {
            None => w.nil(),
            Some(id) => w.uint(*id),
        })),
        Request::ReportBlockAllocation {
            instance_id,
            model_name,
            records,
        } => {
            frames.push(value(|w| w.uint(*instance_id)));
            frames.push(value(|w| w.str(model_name)));
            frames.push(value(|w| {
                w.array(records.len());
                for record in records {
                    w.map(3);
                    w.str("req_id");
                    w.str(&record.request_id);
                    for (name, len) in [
                        ("new_block_ids", record.blocks),
                        ("new_token_ids", record.tokens),
                    ] {
                        w.str(name);
                        w.array(len);
                        (0..len).for_each(|_| w.uint(0));
                    }
                }
            }));
        }
        Request::SubscribeKvEvents {
            instance_id,
            model_name,
            cursor,
            max_events,
        } => {
            frames.push(value(|w| w.uint(*instance_id)));
            frames.push(value(|w| w.str(model_name)));
            frames.push(value(|w| w.uint(*cursor)));
            frames.push(value(|w| w.uint(*max_events as u64)));
        }
        Request::GetChunkSize | Request::Noop | Request::GetExperimental => {}
    }
    frames
}

fn value(write: impl FnOnce(&mut Writer)) -> Bytes {
    let mut writer = Writer::new();
    write(&mut writer);
    writer.into_bytes().into()
}

fn numbers(w: &mut Writer, list: &[u32]) {
    w.array(list.len());
    list.iter().for_each(|&number| w.uint(u64::from(number)));
}

fn lists(groups: &[Vec<u32>]) -> Bytes {
    value(|w| {
        w.array(groups.len());
        groups.iter().for_each(|group| numbers(w, group));
    })
}

fn cache_key(key: &CacheKey) -> Bytes {
    value(|w| {
        w.map(10);
        w.str("model_name");
        w.str(&key.model_name);
        w.str("world_size");
        w.uint(u64::from(key.world_size));
        w.str("worker_id");
        match key.worker_id {
            None => w.nil(),
            Some(worker) => w.uint(u64::from(worker)),
        }
        w.str("token_ids");
        numbers(w, &key.token_ids);
        w.str("start");
        w.uint(key.start);
        w.str("end");
        w.uint(key.end);
        w.str("request_id");
        w.str(&key.request_id);
        w.str("cache_salt");
        w.str(&key.cache_salt);
        w.str("request_configs");
        match key.configs.skip_save {
            true => {
                w.map(1);
                w.str("lmcache.skip_save");
                w.bool(true);
            }
            false => w.nil(),
        }
        w.str("num_kv_readers");
        w.uint(u64::from(key.num_kv_readers));
    })
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
        | Operation::QueryPrefetchStatus
        | Operation::WaitPrefetchStatus => Reply::Int(r.number("reply")?),
        Operation::GetExperimental => Reply::Strings(
            (0..r.array("reply", MAX_NAME)?)
                .map(|_| r.str("reply", MAX_NAME).map(str::to_owned))
                .collect::<Result<_, _>>()?,
        ),
        Operation::CommitStore | Operation::CommitRetrieve | Operation::Ping => {
            Reply::Bool(r.bool()?)
        }
        Operation::Store | Operation::Retrieve => {
            r.array("reply", 2)?;
            r.bin("event", MAX_NAME)?;
            Reply::Transferred(r.bool()?)
        }
        Operation::RegisterEngineDriven => registered(r)?,
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
    let mut slot = SlotDescriptor {
        offset: 0,
        length: 0,
        shape: Vec::new(),
        dtype: String::new(),
    };
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
    let mut batch = KvEventBatch {
        enabled: false,
        incarnation: 0,
        next_cursor: 0,
        lost: false,
        events: Vec::new(),
    };
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
    let mut event = KvEvent {
        seq: 0,
        kind: KvEventKind::Removed,
        model_name: String::new(),
        hash: Vec::new(),
        parent: None,
        tokens: Vec::new(),
    };
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
