use lmc_key::ChunkHash;

use super::*;
use crate::protocol::{ConfigValue, CpuShm, KvEvent, TensorMeta, TierChunks, UnknownFields};

fn key() -> CacheKey {
    CacheKey {
        model_name: "meta/llama".to_owned(),
        world_size: 2,
        worker_id: Some(1),
        token_ids: (0..700).map(|i| i * 331).collect(),
        start: 256,
        end: 512,
        request_id: "cmpl-7".to_owned(),
        cache_salt: "tenant".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    }
}

fn requests() -> Vec<Request> {
    let descriptor = KvDescriptor::CpuShm(CpuShm {
        shm_name: "/lmcache_kv_1_0".to_owned(),
        nbytes: 4096,
        tensor: TensorMeta {
            dtype: "bfloat16".to_owned(),
            shape: vec![2, 4, 16, 2, 8],
            stride: vec![1024, 256, 16, 8, 1],
            storage_offset: 0,
        },
    });
    let request_id = "cmpl-7".to_owned();
    vec![
        Request::RegisterKvCache(Box::new(RegisterKvCache {
            instance_id: u64::MAX >> 1,
            kv_caches: vec![descriptor, KvDescriptor::Unsupported("npu".to_owned())],
            model_name: "m".to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: Some("HND".to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                engine_group_id: 0,
                layer_indices: vec![0, 1],
                tokens_per_block: 16,
                sw_size_tokens: -1,
                extra_object_group_tag: 0,
                recurrent_state: false,
                unknown: UnknownFields::default(),
            }],
        })),
        Request::Unregister {
            instance_id: 7,
            engine_driven: false,
        },
        Request::Unregister {
            instance_id: 7,
            engine_driven: true,
        },
        Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id: 9,
            model_name: "m".to_owned(),
            world_size: 4,
            block_size: 16,
            num_layers: 32,
            hidden_dim_size: 1024,
            dtype: "bfloat16".to_owned(),
            use_mla: false,
            num_physical_slots: Some(256),
            record: None,
            unknown: UnknownFields::default(),
        }),
        Request::Store {
            key: key(),
            instance_id: 9,
            block_ids: vec![vec![1, 2, 300], vec![]],
            event: Vec::new(),
        },
        Request::Retrieve {
            key: key(),
            instance_id: 9,
            block_ids: vec![vec![5]],
            event: Vec::new(),
            skip_first_n_tokens: 16,
        },
        Request::Lookup(CacheKey {
            worker_id: None,
            ..key()
        }),
        Request::Lookup(CacheKey {
            token_ids: Vec::new(),
            chunk_hashes: vec![ChunkHash::new([7; 32]), ChunkHash::new([8; 32])],
            identity: Some(IdentityDigest::of("a record")),
            unit: Some(16),
            ..key()
        }),
        Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id: 9,
            model_name: "m".to_owned(),
            world_size: 1,
            block_size: 16,
            num_layers: 2,
            hidden_dim_size: 64,
            dtype: "uint8".to_owned(),
            use_mla: true,
            num_physical_slots: Some(16),
            record: Some(EngineRecord {
                identity: "a record".to_owned(),
                layout: "tokens".to_owned(),
                unit: Some(16),
            }),
            unknown: UnknownFields::default(),
        }),
        Request::QueryPrefetchStatus {
            request_id: request_id.clone(),
        },
        Request::WaitPrefetchStatus {
            request_id: request_id.clone(),
            timeout: 0.25,
        },
        Request::WaitLookup {
            request_id: request_id.clone(),
            timeout: 0.5,
        },
        Request::FreeLookupLocks(key()),
        Request::EndSession {
            request_id: request_id.clone(),
        },
        Request::PrepareStore {
            key: key(),
            instance_id: 9,
        },
        Request::CommitStore {
            key: key(),
            instance_id: 9,
            pickled: 0,
        },
        Request::AbandonStore {
            key: key(),
            instance_id: 9,
        },
        Request::AbandonEarlier { instance_id: 9 },
        Request::PrepareRetrieve {
            key: key(),
            instance_id: 9,
        },
        Request::CommitRetrieve {
            key: key(),
            instance_id: 9,
        },
        Request::Clear { force: true },
        Request::GetChunkSize,
        Request::Ping { instance_id: None },
        Request::Ping {
            instance_id: Some(1 << 40),
        },
        Request::ReportBlockAllocation {
            instance_id: 3,
            model_name: "m".to_owned(),
            records: vec![BlockAllocation {
                request_id,
                blocks: 3,
                tokens: 48,
            }],
        },
        Request::Noop,
        Request::GetExperimental,
        Request::PoolDescriptor,
        Request::SubscribeKvEvents {
            instance_id: 3,
            model_name: "m".to_owned(),
            cursor: 0,
            max_events: 64,
        },
    ]
}

#[test]
fn every_request_survives_the_round_trip() {
    for request in requests() {
        let frames = encode_request(300, &request);
        let Ok(Incoming::Request {
            operation,
            payloads,
            ..
        }) = classify(&frames)
        else {
            panic!("{request:?} is not a request");
        };
        assert_eq!(decode_request(operation, payloads).as_ref(), Ok(&request));
    }
}

#[test]
fn every_prefix_of_a_payload_is_refused_without_a_panic() {
    for request in requests() {
        let frames = encode_request(0, &request);
        for index in 2..frames.len() {
            for cut in 0..frames[index].len().min(400) {
                let mut frames = frames.clone();
                frames[index] = frames[index].slice(..cut);
                let refused = decode_request(&frames[1], &frames[2..]);
                assert!(
                    refused.is_err(),
                    "{request:?} cut at {cut} of payload {}",
                    index - 2
                );
            }
        }
    }
}

fn refusal(operation: &[u8], payloads: &[&[u8]]) -> String {
    let payloads: Vec<_> = payloads.iter().map(|p| Bytes::copy_from_slice(p)).collect();
    decode_request(operation, &payloads)
        .expect_err("should be refused")
        .to_string()
}

/// Engines of this release and the next must agree on these bytes.
#[test]
fn an_identity_and_chunk_hashes_have_these_bytes() {
    let key = CacheKey {
        model_name: "m".to_owned(),
        world_size: 1,
        end: 256,
        request_id: "r".to_owned(),
        num_kv_readers: 1,
        chunk_hashes: vec![ChunkHash::new([7; 32])],
        identity: Some(IdentityDigest::of("a record")),
        ..CacheKey::default()
    };
    let bytes = encoded(&key);
    let own = bytes.windows(12).position(|part| part == b"lmc_identity");
    let own = &bytes[own.expect("the field is there") - 1..];
    let digest = blake3::hash(b"a record");
    let expected = [
        &b"\xaclmc_identity\xc4\x20"[..],
        digest.as_bytes(),
        b"\xb0lmc_chunk_hashes\xc4\x20",
        &[7; 32],
    ];
    assert_eq!(own, expected.concat());
    assert!(decode_request(&encoded(&8_u32), &[bytes, encoded(&1_u32)]).is_ok());
    let odd = Request::RegisterEngineDriven(EngineDrivenContext {
        instance_id: 1,
        model_name: "m".to_owned(),
        world_size: 1,
        block_size: 16,
        num_layers: 2,
        hidden_dim_size: 64,
        dtype: "uint8".to_owned(),
        use_mla: true,
        num_physical_slots: None,
        record: None,
        unknown: UnknownFields::default(),
    });
    let frames = encode_request(1, &odd);
    assert!(
        !frames[2].windows(3).any(|part| part == b"lmc"),
        "stock bytes stay as they are"
    );
}

#[test]
fn refusals_name_the_fault() {
    let check = |operation: &[u8], payloads: &[&[u8]], expected: &str| {
        let text = refusal(operation, payloads);
        assert!(text.contains(expected), "{text:?} lacks {expected:?}");
    };
    check(&[0xcc, 200], &[], "unknown operation number 200");
    check(b"\xa3foo", &[], "unknown operation \"foo\"");
    check(&[0xc0], &[], "operation frame is malformed");
    check(&[11], &[], "unknown operation number 11");
    check(&[29], &[], "p2p_lookup_and_lock is not supported");
    check(&[8], &[b"\x80"], "lookup takes 2 payload frames, found 1");
    check(&[8], &[b"\x80", b"\x01"], "field `model_name` is missing");
    check(
        &[8],
        &[b"\x81\xaacache_salt\xa3a@b", b"\x01"],
        "must not contain '@'",
    );
    check(
        &[22],
        &[b"\xa1x"],
        "expected an integer at byte 0, found a string",
    );
    check(&[22], &[b"\x01\x01"], "1 bytes after the value");
}

#[test]
fn a_reply_of_each_kind_survives_the_round_trip() {
    let slot = SlotDescriptor {
        offset: 4096,
        length: 1 << 20,
        shape: vec![2, 4, 256, 64],
        dtype: "float32".to_owned(),
    };
    let event = KvEvent {
        seq: 9,
        kind: KvEventKind::Stored,
        model_name: "m".to_owned(),
        hash: vec![3; 32],
        parent: Some(vec![4; 32]),
        tokens: vec![1, 2, 70_000],
    };
    let batch = KvEventBatch {
        enabled: true,
        incarnation: u64::MAX,
        next_cursor: 9,
        lost: false,
        events: vec![event],
    };
    let registered = Reply::Registered {
        shm_name: "lmc_5555".to_owned(),
        pool_size: 1 << 40,
    };
    let slots = Reply::StoreSlots {
        slots: vec![slot.clone()],
        chunk_indices: vec![1],
    };
    let tier = TierChunks {
        tier: "disk".to_owned(),
        chunks: 2,
    };
    let found = Reply::Found {
        chunks: 2,
        tiers: vec![tier],
    };
    for (operation, reply) in [
        (Operation::Lookup, Reply::None),
        (Operation::QueryPrefetchStatus, Reply::Int(512)),
        (Operation::QueryPrefetchStatus, Reply::None),
        (Operation::Noop, Reply::Text("OK".to_owned())),
        (
            Operation::GetExperimental,
            Reply::Strings(vec!["kv_event_stream".to_owned()]),
        ),
        (Operation::PoolDescriptor, Reply::Int(1 << 40)),
        (Operation::WaitLookup, found),
        (Operation::CommitStore, Reply::Bool(true)),
        (Operation::Store, Reply::Transferred(true)),
        (Operation::RegisterEngineDriven, registered),
        (Operation::PrepareStore, slots),
        (
            Operation::PrepareRetrieve,
            Reply::RetrieveSlots(Some(vec![slot])),
        ),
        (Operation::PrepareRetrieve, Reply::RetrieveSlots(None)),
        (Operation::SubscribeKvEvents, Reply::Events(batch)),
        (Operation::Lookup, Reply::Error("lmc: no".to_owned())),
    ] {
        let sent = encode_request(0, &Request::Noop)[1].clone();
        let asked = match operation.id() {
            Some(_) if operation == Operation::Noop => sent,
            Some(id) => {
                let mut w = Writer::new();
                w.uint(u64::from(id));
                w.into_bytes().into()
            }
            None => {
                let mut w = Writer::new();
                w.str(operation.name());
                w.into_bytes().into()
            }
        };
        let (answered, payload) = encode_reply(&asked, &reply);
        let frames: Vec<_> = std::iter::once(answered).chain(payload).collect();
        assert_eq!(decode_reply(operation, &frames), Ok(reply));
    }
}

#[test]
fn peers_that_a_request_names_are_read_or_malformed() {
    let with = |write: &dyn Fn(&mut Writer)| {
        let mut w = Writer::new();
        w.map(2);
        w.str("lmcache.p2p.source");
        write(&mut w);
        w.str("lmcache.skip_save");
        w.bool(true);
        let bytes = w.into_bytes();
        let configs = request_configs(&mut Reader::new(&bytes)).expect("never the decoder's error");
        assert!(configs.skip_save, "what follows is read");
        configs.sources
    };
    let named = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned());
        Sources::Named(names.collect())
    };
    assert_eq!(with(&|w| w.nil()), Sources::default());
    let two = with(&|w| w.str("host-a , [fd00::3]:7700"));
    assert_eq!(two, named(&["host-a", "[fd00::3]:7700"]));
    let malformed = |sources| matches!(sources, Sources::Malformed(_));
    for text in [
        "",
        "a,,b",
        "a b",
        "a\u{7}",
        &"a,".repeat(9),
        &"a".repeat(257),
        &"a".repeat(5000),
    ] {
        assert!(malformed(with(&|w| w.str(text))), "{text:?}");
    }
    assert_eq!(with(&|w| w.uint(5)), Sources::NO_TEXT);
    let list = |w: &mut Writer| {
        w.array(1);
        w.str("host-a");
    };
    assert_eq!(with(&list), Sources::NO_TEXT);
}

#[test]
fn a_wait_for_peers_is_read_and_anything_else_under_its_name_ignored() {
    let with = |write: &dyn Fn(&mut Writer)| {
        let mut w = Writer::new();
        w.map(2);
        w.str("lmcache.pd.source");
        w.str("host-a");
        w.str("lmcache.pd.wait_ms");
        write(&mut w);
        let bytes = w.into_bytes();
        let configs = request_configs(&mut Reader::new(&bytes)).expect("never the decoder's error");
        assert_eq!(configs.sources, Sources::parse("host-a"));
        assert_eq!(configs.tags, None, "it is no part of a key");
        configs.wait.as_millis()
    };
    assert_eq!(with(&|w| w.uint(2000)), 2000);
    assert_eq!(with(&|w| w.uint(u64::MAX)), u128::from(u64::MAX));
    for ignored in [
        with(&|w| w.int(-5)),
        with(&|w| w.str("2000")),
        with(&|w| w.float(5.5)),
        with(&|w| w.nil()),
        with(&|w| w.map(0)),
    ] {
        assert_eq!(ignored, 0);
    }
    let mut configs = RequestConfigs::default();
    configs.set("lmcache.pd.source", ConfigValue::Text("host-a".to_owned()));
    configs.set("lmcache.pd.wait_ms", ConfigValue::Int(2000));
    configs.set("lmcache.pd.id", ConfigValue::Text("a1b2".to_owned()));
    configs.set("lmcache.pd.to", ConfigValue::Text("host-b".to_owned()));
    let read = request_configs(&mut Reader::new(&encoded(&configs)));
    assert_eq!(read, Ok(configs));
}

#[test]
fn settings_of_a_request_are_read_and_others_ignored() {
    let with = |write: &dyn Fn(&mut Writer)| {
        let mut w = Writer::new();
        write(&mut w);
        let bytes = w.into_bytes();
        request_configs(&mut Reader::new(&bytes))
    };
    let skips = |configs: Result<RequestConfigs, ValueError>| configs.map(|c| c.skip_save);
    assert_eq!(skips(with(&|w| w.nil())), Ok(false));
    let entry = |value: bool| {
        with(&|w| {
            w.map(3);
            w.str("lmcache.tag.a");
            w.array(1);
            w.str("x");
            w.str("lmcache.skip_save");
            w.bool(value);
            w.str("lmcache.other");
            w.float(0.5);
        })
    };
    assert_eq!(
        (skips(entry(true)), skips(entry(false))),
        (Ok(true), Ok(false))
    );
    let text = with(&|w| {
        w.map(1);
        w.str("lmcache.skip_save");
        w.str("true");
    });
    assert_eq!(skips(text), Ok(false), "the value has another type");
    let many = with(&|w| w.map(1_000_000));
    assert!(many.is_err());
    let asked = Request::Lookup(CacheKey {
        configs: RequestConfigs {
            skip_save: true,
            sources: Sources::parse("host-a, 10.0.0.1:7700"),
            ..RequestConfigs::default()
        },
        ..key()
    });
    let frames = encode_request(1, &asked);
    let read = decode_request(&frames[1], &frames[2..]);
    assert_eq!(read.expect("it was encoded"), asked);
}

#[test]
fn the_parent_of_a_requests_spans_is_read_and_changes_nothing_else() {
    let parent = |text: &str| {
        let mut configs = RequestConfigs::default();
        configs.set("lmcache.traceparent", ConfigValue::Text(text.to_owned()));
        let asked = Request::Lookup(CacheKey { configs, ..key() });
        let frames = encode_request(1, &asked);
        let read = decode_request(&frames[1], &frames[2..]);
        let Ok(Request::Lookup(read)) = read else {
            panic!("{read:?}");
        };
        let without = RequestConfigs {
            parent: None,
            ..read.configs.clone()
        };
        assert_eq!(without, RequestConfigs::default());
        read.configs.parent
    };
    let text = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    assert!(parent(text).is_some());
    assert_eq!(parent(text), TraceParent::parse(text));
    for wrong in ["", "none", &"0".repeat(300)] {
        assert_eq!(parent(wrong), None, "{wrong}");
    }
}

#[test]
fn a_client_passes_entries_on_that_the_server_does_not_know() {
    let mut configs = RequestConfigs::default();
    configs.set("lmcache.skip_save", ConfigValue::Bool(true));
    configs.set("remote_decoder", ConfigValue::Text("d".to_owned()));
    configs.set("lmc.share", ConfigValue::Float(0.5));
    let bytes = encoded(&configs);
    let mut reader = Reader::new(&bytes);
    assert_eq!(reader.map("entries", 8), Ok(3));
    assert_eq!(reader.str("name", 64), Ok("lmcache.skip_save"));
    assert_eq!(reader.bool(), Ok(true));
    assert_eq!(reader.str("name", 64), Ok("lmc.share"));
    assert_eq!(reader.float(), Ok(0.5));
    assert_eq!(reader.str("name", 64), Ok("remote_decoder"));
    assert_eq!(reader.str("text", 64), Ok("d"));
    let read = request_configs(&mut Reader::new(&bytes)).expect("the rest is ignored");
    assert!(read.skip_save && read.others.is_empty());
}

#[test]
fn a_client_leaves_out_entries_with_which_a_server_would_refuse_the_request() {
    let mut configs = RequestConfigs::default();
    configs.set(&"n".repeat(2 * MAX_NAME), ConfigValue::Nil);
    configs.set("lmc.text", ConfigValue::Text("x".repeat(1 << 20)));
    assert_eq!(configs, RequestConfigs::default());
    for entry in 0..2 * MAX_CONFIGS {
        configs.set(&format!("lmc.{entry}"), ConfigValue::Int(1));
    }
    configs.set("lmcache.p2p.source", ConfigValue::Int(1));
    assert_eq!(configs.sources, Sources::NO_TEXT);
    let bytes = encoded(&configs);
    let read = request_configs(&mut Reader::new(&bytes)).expect("the server takes it");
    assert!(matches!(read.sources, Sources::Malformed(_)));
}

/// A client sent any number of tags, and a server refuses a request with more than 256 entries.
#[test]
fn a_client_sends_no_more_tags_than_a_server_reads_and_all_count() {
    let with = |tags: usize, last: i64| {
        let mut configs = RequestConfigs::default();
        for entry in 0..MAX_CONFIGS {
            configs.set(&format!("lmc.{entry}"), ConfigValue::Int(1));
        }
        configs.set("lmcache.skip_save", ConfigValue::Bool(true));
        configs.set("lmcache.p2p.source", ConfigValue::Text("host-a".to_owned()));
        for tag in 0..tags {
            let value = if tag + 1 == tags { last } else { 1 };
            configs.set(&format!("lmcache.tag.{tag}"), ConfigValue::Int(value));
        }
        let bytes = encoded(&configs);
        let read = request_configs(&mut Reader::new(&bytes)).expect("the server takes it");
        read.tags.expect("tags")
    };
    let mut seen = std::collections::HashSet::new();
    for tags in [1, 2, 199, 200, 201, 202, 4 * MAX_CONFIGS] {
        assert!(seen.insert(with(tags, 1)), "{tags} tags");
        assert!(
            seen.insert(with(tags, 2)),
            "the value of the last of {tags} tags"
        );
        assert!(!seen.insert(with(tags, 1)), "the same tags");
    }
}
