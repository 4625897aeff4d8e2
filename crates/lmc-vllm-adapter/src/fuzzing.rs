//! Entry points of the fuzz targets: each takes any bytes and panics when a rule is broken.
//!
//! The rules: nothing from outside panics; every request that can be answered is answered; what
//! a read hands out was stored under that very key; and when all peers are gone, nothing is
//! held.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use lmc_engine::{CacheEngine, EngineConfig};
use lmc_key::{ChunkHasher, HashAlgorithm};
use lmc_memory::ArenaConfig;
use parking_lot::Mutex;

use crate::protocol::codec::{Incoming, classify, decode_operation, encode_reply};
use crate::protocol::{
    CacheKey, EngineDrivenContext, KvDescriptor, Reply, Request, decode_reply, decode_request,
    encode_request,
};
use crate::service::{ClientId, ConnectionEnd, NextBatch, Outcome, Service, ServiceConfig};
use crate::transport::{Decoder, Event, Limits, encode_ready, greeting};

/// The stream decoder, fed in pieces whose sizes come from the input.
pub fn zmtp(data: &[u8]) {
    let [mode, rest @ ..] = data else { return };
    let limits = Limits {
        message_bytes: 64 << 10,
        frames: 8,
    };
    let mut decoder = Decoder::new(limits);
    let mut input = BytesMut::new();
    if mode & 1 == 1 {
        input.extend_from_slice(&greeting());
        encode_ready("DEALER", &mut input);
    }
    let step = usize::from(mode >> 1) + 1;
    for piece in rest.chunks(step) {
        input.extend_from_slice(piece);
        assert!(decoder.missing(&input) <= limits.message_bytes + 9);
        loop {
            match decoder.next(&mut input) {
                Ok(Some(Event::Message(frames))) => {
                    assert!(frames.len() <= limits.frames);
                    assert!(frames.iter().map(Bytes::len).sum::<usize>() <= limits.message_bytes);
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
}

/// The request decoder, on frames cut out of the input; what decodes must survive the round
/// trip through our own encoder.
pub fn request(data: &[u8]) {
    let mut rest = data;
    let mut frames = Vec::new();
    while let [low, high, tail @ ..] = rest {
        let len = usize::from(u16::from_le_bytes([*low, *high])).min(tail.len());
        frames.push(Bytes::copy_from_slice(&tail[..len]));
        rest = &tail[len..];
    }
    let Ok(Incoming::Request {
        operation,
        payloads,
        ..
    }) = classify(&frames)
    else {
        return;
    };
    match decode_request(operation, payloads) {
        Err(error) => {
            let (text, value) = encode_reply(operation, &Reply::Error(format!("lmc: {error}")));
            assert!(value.is_none());
            // A refusal must never look like the operation's own answer.
            if let Ok(operation) = decode_operation(operation) {
                assert!(matches!(
                    decode_reply(operation, &[text]),
                    Ok(Reply::Error(_))
                ));
            }
        }
        Ok(Request::RegisterKvCache(r))
            if r.kv_caches
                .iter()
                .any(|d| matches!(d, KvDescriptor::Unsupported(_))) => {}
        // A float's bits and an ignored payload need not come back as they were.
        Ok(Request::WaitPrefetchStatus { .. } | Request::CommitStore { .. }) => {}
        Ok(request) => {
            let frames = encode_request(1, &request);
            assert_eq!(
                decode_request(&frames[1], &frames[2..]).as_ref(),
                Ok(&request)
            );
        }
    }
}

const CHUNK: u32 = 4;
/// Bytes of a chunk of two planes, one layer, four tokens, two elements of eight bits.
const CHUNK_BYTES: usize = 16;
const CLIENTS: u64 = 4;

fn shared_service() -> &'static Mutex<Service> {
    static SERVICE: OnceLock<Mutex<Service>> = OnceLock::new();
    SERVICE.get_or_init(|| {
        let name = format!("lmc_fuzz_{}", std::process::id());
        // Room for eight chunks, so that eviction is part of every run.
        let arena = ArenaConfig::shared(&name, 8 * 4096)
            .build()
            .expect("an arena");
        let engine = CacheEngine::new(EngineConfig::default(), Arc::new(arena));
        let hasher = ChunkHasher::new(HashAlgorithm::Blake3, CHUNK).expect("a chunk size");
        let config = ServiceConfig {
            max_sessions: 6,
            max_instances: 6,
            max_transfers: 3,
            transfer_threads: 1,
            copy_threads: 0,
            kv_event_log_size: 16,
            ..ServiceConfig::new(hasher)
        };
        Mutex::new(Service::new(config, engine.expect("an engine")).expect("threads"))
    })
}

/// Takes small decisions out of the input.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, bound: u64) -> u64 {
        let Some((&byte, rest)) = self.0.split_first() else {
            return 0;
        };
        self.0 = rest;
        u64::from(byte) % bound
    }

    fn key(&mut self) -> CacheKey {
        let prompt = self.below(4) as u32;
        let chunks = self.below(5);
        let start = if self.below(8) == 0 {
            self.below(20)
        } else {
            0
        };
        CacheKey {
            model_name: ["m", "n"][self.below(2) as usize].to_owned(),
            world_size: 1,
            worker_id: [Some(0), Some(0), Some(0), None][self.below(4) as usize],
            // The first chunk is common to all prompts.
            token_ids: (0..16)
                .map(|i| if i < CHUNK { i } else { i + 100 * prompt })
                .collect(),
            start,
            end: chunks * u64::from(CHUNK),
            request_id: format!("r{}", self.below(8)),
            cache_salt: ["", "s"][self.below(2) as usize].to_owned(),
            num_kv_readers: self.below(3) as u32,
        }
    }
}

/// The service as a state machine: any order of any operations from several peers.
pub fn service(data: &[u8]) {
    let service = shared_service().lock();
    let mut choices = Choices(data);
    let mut now = Instant::now();
    let mut streams = Vec::new();
    while !choices.0.is_empty() {
        let client = ClientId::new(choices.below(CLIENTS));
        let instance_id = choices.below(4);
        let request = match choices.below(20) {
            0 | 1 => Request::RegisterEngineDriven(EngineDrivenContext {
                instance_id,
                model_name: ["m", "n"][choices.below(2) as usize].to_owned(),
                world_size: 1,
                block_size: CHUNK,
                num_layers: 1,
                hidden_dim_size: 2,
                dtype: ["int8", "uint8"][choices.below(2) as usize].to_owned(),
                use_mla: false,
                num_physical_slots: None,
            }),
            2 => Request::Unregister {
                instance_id,
                engine_driven: true,
            },
            3 | 4 => Request::Lookup(choices.key()),
            5 => Request::QueryPrefetchStatus {
                request_id: format!("r{}", choices.below(8)),
            },
            6 => Request::FreeLookupLocks(choices.key()),
            7 => Request::EndSession {
                request_id: format!("r{}", choices.below(8)),
            },
            8 | 9 => Request::PrepareStore {
                key: choices.key(),
                instance_id,
            },
            10 | 11 => Request::CommitStore {
                key: choices.key(),
                instance_id,
                pickled: usize::from(choices.below(16) == 0),
            },
            12 | 13 => Request::PrepareRetrieve {
                key: choices.key(),
                instance_id,
            },
            14 => Request::CommitRetrieve {
                key: choices.key(),
                instance_id,
            },
            15 => Request::Clear {
                force: choices.below(2) == 0,
            },
            16 => Request::Ping {
                instance_id: Some(instance_id),
            },
            17 => Request::SubscribeKvEvents {
                instance_id,
                model_name: "m".to_owned(),
                cursor: choices.below(40),
                max_events: choices.below(4) as usize,
            },
            18 => {
                now += Duration::from_secs(choices.below(255) * 3);
                service.tick(now);
                continue;
            }
            _ => {
                let end = if choices.below(2) == 0 {
                    ConnectionEnd::Gone
                } else {
                    ConnectionEnd::Closed
                };
                service.client_gone(client, end, now);
                continue;
            }
        };
        match service.handle(client, request, now) {
            Outcome::Reply(Reply::StoreSlots {
                slots,
                chunk_indices,
            }) => {
                assert_eq!(slots.len(), chunk_indices.len());
                assert!(slots.iter().all(|slot| slot.length == CHUNK_BYTES as u64));
            }
            Outcome::Reply(Reply::RetrieveSlots(Some(slots))) => assert!(!slots.is_empty()),
            Outcome::Reply(_) => {}
            Outcome::Job(job) => drop(job.run()),
            Outcome::Stream(stream) => streams.push(stream),
        }
        for stream in &mut streams {
            if let NextBatch::Batch(batch) = service.next_batch(stream) {
                assert!(batch.events.len() <= 1024);
            }
        }
    }
    // Everybody leaves.
    for instance_id in 0..4 {
        let leave = Request::Unregister {
            instance_id,
            engine_driven: true,
        };
        service.handle(ClientId::new(0), leave, now);
    }
    for client in 0..CLIENTS {
        service.client_gone(ClientId::new(client), ConnectionEnd::Gone, now);
    }
    let status = service.status(now);
    assert_eq!(status.sessions.sessions, 0);
    assert_eq!(
        (status.transfers.stores, status.transfers.retrieves),
        (0, 0)
    );
    assert!(status.instances.is_empty());
    assert_eq!((status.usage.leases, status.usage.reserved_slots), (0, 0));
    service.engine().clear(true);
    assert_eq!(service.status(now).usage.used_bytes, 0, "memory came back");
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    /// Inputs that libFuzzer kept because each reaches something that the others do not.
    #[test]
    fn the_committed_seeds_break_no_rule() {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
        let check = |target: &str, run: fn(&[u8])| {
            let entries = std::fs::read_dir(seeds.join(target)).expect("seeds are committed");
            let mut count = 0;
            for entry in entries {
                let path = entry.expect("a file").path();
                run(&std::fs::read(&path).expect("a file can be read"));
                count += 1;
            }
            assert!(count > 1, "{target}: {count} seeds");
        };
        check("zmtp", super::zmtp);
        check("request", super::request);
        check("service", super::service);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(600))]

        #[test]
        fn any_stream_is_survived(data in prop::collection::vec(any::<u8>(), 0..500)) {
            super::zmtp(&data);
        }

        #[test]
        fn any_frames_are_survived(data in prop::collection::vec(any::<u8>(), 0..300)) {
            super::request(&data);
        }

        #[test]
        fn any_order_of_operations_leaves_nothing_behind(
            data in prop::collection::vec(any::<u8>(), 0..600)) {
            super::service(&data);
        }
    }
}
