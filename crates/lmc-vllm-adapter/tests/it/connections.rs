//! Deadlines, streams and limits of connections, and the release of slots at their end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::common::{Answer as _, CHUNK, MODEL, Segment, Server, Worker, prompt, segment_name};
use bytes::Bytes;
use lmc_backend::conformance::Gated;
use lmc_backend::{Backend, LocalIndex, MemoryBackend, WriteBackend};
use lmc_engine::InUse;
use lmc_testkit::{DEADLINE, until};
use lmc_vllm_adapter::{
    CacheKey, Client, ClientError, CpuShm, EngineGroup, KvDescriptor, Operation, RegisterKvCache,
    Reply, Request, TensorMeta, UnknownFields, ZmqConfig, encode_request_frames,
};

type Tier = Arc<Gated<MemoryBackend>>;

/// Starts a server with one prompt in a lower tier whose loads are blocked, and not in DRAM.
fn with_blocked_tier(zmq: impl FnOnce(&mut ZmqConfig)) -> (Server, Tier, CacheKey) {
    let tier: Tier = Arc::new(Gated::new(MemoryBackend::default()));
    let server = Server::with_tiers(vec![Arc::clone(&tier) as _], 1 << 20, |_| {}, zmq);
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("s", &prompt(1, 2 * CHUNK), 0..2);
    worker.store(&key);
    server.eventually("all copies are written", |s| s.lower[0].queued_bytes == 0);
    server.service.engine().clear_dram(InUse::Remove);
    tier.shut();
    (server, tier, key)
}

fn begin_lookup(client: &mut Client, key: &CacheKey) {
    let lookup = Request::Lookup(CacheKey {
        worker_id: None,
        ..key.clone()
    });
    assert_eq!(client.answer(&lookup), Reply::None);
}

fn wait() -> Request {
    Request::WaitPrefetchStatus {
        request_id: "s".to_owned(),
        timeout: 20.0,
    }
}

#[test]
fn a_peer_whose_requests_wait_for_the_server_has_no_deadline() {
    let (server, tier, key) = with_blocked_tier(|zmq| {
        zmq.peer_timeout = Duration::from_millis(300);
        zmq.max_in_flight = 2;
    });
    // Longer than the deadline of a peer.
    let timeout = Duration::from_secs(1);
    let mut client = Client::connect(server.address, timeout).expect("served");
    begin_lookup(&mut client, &key);
    let mut bytes = Vec::new();
    for uid in 50..54 {
        bytes.extend(encode_request_frames(uid, &wait()));
    }
    bytes.extend(encode_request_frames(54, &Request::Noop));
    client.send_encoded(&bytes).expect("sent");
    let early = client.receive(54, Operation::Noop);
    assert!(
        matches!(early, Err(ClientError::Timeout(_))),
        "no more than twice the limit is in flight: {early:?}"
    );
    tier.open();
    let mut answer = Err(ClientError::Closed);
    until("an answer", || {
        answer = client.receive(54, Operation::Noop);
        !matches!(answer, Err(ClientError::Timeout(_)))
    });
    assert_eq!(answer.expect("an answer"), Reply::Text("OK".to_owned()));
    assert_eq!(server.status().transport.stalled, 0);
}

fn subscribe(instance_id: u64) -> Request {
    Request::SubscribeKvEvents {
        instance_id,
        model_name: MODEL.to_owned(),
        cursor: 0,
        max_events: 10,
    }
}

fn acknowledge(client: &mut Client, uid: u64) {
    let frames = [
        Bytes::from(vec![uid as u8]),
        Bytes::new(),
        Bytes::from_static(b"ack"),
    ];
    client.send_frames(&frames).expect("sent");
}

fn batch(client: &mut Client, uid: u64) -> Reply {
    client
        .receive(uid, Operation::SubscribeKvEvents)
        .expect("an answer")
}

#[test]
fn the_end_of_a_stream_is_sent_before_the_acknowledgement() {
    let server = Server::start();
    let mut client = server.client();
    let uid = client.send(&subscribe(1)).expect("sent");
    assert!(matches!(batch(&mut client, uid), Reply::Events(_)));
    let unregister = Request::Unregister {
        instance_id: 1,
        engine_driven: true,
    };
    // Instance 1 is not registered yet, so this does not end the stream.
    server.client().answer(&unregister);
    assert_eq!(server.status().events.subscribers, 1);
    let mut worker = Worker::register(&server, 1);
    worker.client.answer(&unregister);
    assert_eq!(batch(&mut client, uid), Reply::None);
    assert_eq!(server.status().events.subscribers, 0);
}

/// LMCache's client discards an unread batch when the stream ends. The batch that reports that
/// there is no log is the one that stops it from subscribing again.
#[test]
fn the_end_of_a_stream_without_a_log_waits_for_the_acknowledgement() {
    let server = Server::with(1 << 20, |config| config.kv_event_log_size = 0, |_| {});
    let mut client = server.client();
    let uid = client.send(&subscribe(1)).expect("sent");
    assert!(matches!(batch(&mut client, uid), Reply::Events(batch) if !batch.enabled));
    let noop = client.send(&Request::Noop).expect("sent");
    let next = client.receive_frames().expect("an answer");
    assert_eq!(next[0], vec![noop as u8], "the stream has not ended");
    acknowledge(&mut client, uid);
    assert_eq!(batch(&mut client, uid), Reply::None);
    assert_eq!(server.status().events.subscribers, 0);
}

#[test]
fn a_refused_subscription_changes_nothing() {
    let server = Server::start();
    let mut reader = server.client();
    let uid = reader.send(&subscribe(1000)).expect("sent");
    assert!(matches!(batch(&mut reader, uid), Reply::Events(_)));
    acknowledge(&mut reader, uid);
    let mut client = server.client();
    for instance in 0..64 {
        let uid = client.send(&subscribe(instance)).expect("sent");
        assert!(matches!(batch(&mut client, uid), Reply::Events(_)));
    }
    for instance in (64..128).chain([1000]) {
        let answer = client.call(&subscribe(instance)).expect("an answer");
        assert!(matches!(answer, Reply::Error(_)), "{answer:?}");
    }
    assert_eq!(server.status().events.subscribers, 65);
    drop(client);
    server.eventually("its subscriptions are removed", |s| {
        s.events.subscribers == 1
    });
    let mut worker = Worker::register(&server, 1);
    worker.store(&worker.key("a", &prompt(1, CHUNK), 0..1));
    assert!(matches!(batch(&mut reader, uid), Reply::Events(batch) if batch.events.len() == 1));
}

#[test]
fn a_stream_that_is_replaced_is_removed() {
    let server = Server::start();
    let mut client = server.client();
    for instance in 0..100 {
        let frames = encode_request_frames(7, &subscribe(instance));
        client.send_encoded(&frames).expect("sent");
    }
    client.send(&Request::Noop).expect("sent");
    server.eventually("only the last subscription is left", |s| {
        s.events.subscribers == 1
    });
    drop(client);
    server.eventually("no subscription is left", |s| s.events.subscribers == 0);
}

/// A tier whose lookups panic while `armed` is set.
#[derive(Debug, Default)]
struct Panicking {
    inner: MemoryBackend,
    armed: AtomicBool,
}

impl Backend for Panicking {
    lmc_backend::forward!(inner: name locate load clear usage health close);

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn index(&self) -> Option<&dyn LocalIndex> {
        assert!(!self.armed.load(Ordering::Relaxed), "a panic on purpose");
        self.inner.index()
    }
}

impl WriteBackend for Panicking {
    lmc_backend::forward!(inner: store remove list);
}

#[test]
fn a_panic_in_a_handler_is_answered_and_leaves_nothing_behind() {
    let tier = Arc::new(Panicking::default());
    let server = Server::with_tiers(
        vec![Arc::clone(&tier) as _],
        1 << 20,
        |_| {},
        |zmq| {
            zmq.max_connections = 1;
        },
    );
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    tier.armed.store(true, Ordering::Relaxed);
    let lookup = Request::Lookup(CacheKey {
        worker_id: None,
        token_ids: prompt(2, 2 * CHUNK),
        ..key
    });
    let answer = worker.client.call(&lookup).expect("an answer");
    assert!(matches!(answer, Reply::Error(_)), "{answer:?}");
    let noop = worker.client.ask(&Request::Noop).expect("served");
    assert_eq!(noop, Reply::Text("OK".to_owned()));
    drop(worker);
    server.assert_idle();
    server.eventually("closed", |s| s.transport.connections_open == 0);
    server.client();
}

#[test]
fn a_connection_that_is_cut_off_at_the_stop_is_reported() {
    let (server, tier, key) = with_blocked_tier(|zmq| zmq.stop_timeout = Duration::from_millis(50));
    let mut client = server.client();
    begin_lookup(&mut client, &key);
    client.send(&wait()).expect("sent");
    client.answer(&Request::Noop);
    let service = server.service.clone();
    drop(server);
    assert_eq!(service.status(Instant::now()).transport.connections_open, 0);
    tier.open();
}

const HOUR: Duration = Duration::from_secs(3600);

/// Header of a frame of 1 GiB, which is above the limit.
const TOO_LONG: [u8; 9] = [2, 0, 0, 0, 0, 0x40, 0, 0, 0];

#[test]
fn slots_of_a_cut_off_peer_are_released_when_the_grace_time_ends() {
    let server = Server::with(1 << 20, |config| config.slot_grace = HOUR, |_| {});
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    worker.client.send_encoded(&TOO_LONG).expect("sent");
    server.eventually("closed", |s| s.transport.connections_open == 0);
    let status = server.status();
    assert_eq!(status.transport.broken, 1);
    assert_eq!(status.usage.reserved_slots, 2, "the worker may still copy");
    assert_eq!((status.held.len(), status.held[0].slots), (1, 2));
    let later = Instant::now() + HOUR;
    server.service.tick(later - HOUR / 2);
    assert_eq!(server.status().usage.reserved_slots, 2);
    server.service.tick(later);
    server.assert_idle();
    assert_eq!(server.status().counts.slots_released_by_grace, 2);
}

/// Slots are held while the connection is open: a stopped process reads no bytes.
#[test]
fn a_stalled_peer_keeps_its_slots_and_its_connection() {
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| zmq.peer_timeout = Duration::from_millis(500),
    );
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    // Half a frame.
    worker.client.send_encoded(&[0, 200, 1]).expect("sent");
    server.eventually("it stalls", |s| s.transport.stalled >= 2);
    let status = server.status();
    assert_eq!(status.usage.reserved_slots, 2);
    assert_eq!(status.transport.connections_open, 1);
    drop(worker);
    server.assert_idle();
}

#[test]
fn a_cut_off_peer_does_not_delay_the_stop() {
    let stop_timeout = Duration::from_secs(120);
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.stop_timeout = stop_timeout);
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    worker.client.send_encoded(&TOO_LONG).expect("sent");
    server.eventually("cut off", |s| s.transport.broken == 1);
    let started = Instant::now();
    drop(server);
    assert!(started.elapsed() < stop_timeout / 2);
}

/// Registers an engine whose memory the server copies, of one layer `[16, 4, 8]`.
fn register(client: &mut Client, instance_id: u64) -> Segment {
    let name = segment_name();
    let nbytes = 16 * 4 * 8 * 4;
    let segment = Segment::new(&name, nbytes);
    client
        .ask(&Request::RegisterKvCache(Box::new(RegisterKvCache {
            instance_id,
            kv_caches: vec![KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{name}"),
                nbytes: nbytes as u64,
                tensor: TensorMeta {
                    dtype: "float32".to_owned(),
                    stride: vec![32, 8, 1],
                    shape: vec![16, 4, 8],
                    storage_offset: 0,
                },
            })],
            model_name: MODEL.to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: Some("NHD".to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                layer_indices: vec![0],
                tokens_per_block: 4,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        })))
        .expect("registered");
    segment
}

/// LMCache's client abandons its retrieves when a ping has no reply for ten seconds.
#[test]
fn at_the_limit_copies_are_declined_and_the_rest_is_served() {
    let (server, tier, key) = with_blocked_tier(|zmq| zmq.max_in_flight = 2);
    let mut client = server.client();
    begin_lookup(&mut client, &key);
    let _segment = register(&mut client, 2);
    let waits = [(); 2].map(|()| client.send(&wait()).expect("sent"));
    let ping = Request::Ping {
        instance_id: Some(2),
    };
    assert_eq!(client.answer(&ping), Reply::Bool(true));
    let key = CacheKey {
        model_name: MODEL.to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: prompt(7, CHUNK),
        end: CHUNK as u64,
        request_id: "x".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    };
    let block_ids = vec![vec![1, 2, 3, 4]];
    let store = Request::Store {
        key: key.clone(),
        instance_id: 2,
        block_ids: block_ids.clone(),
        event: Vec::new(),
    };
    let retrieve = Request::Retrieve {
        key,
        instance_id: 2,
        block_ids,
        event: Vec::new(),
        skip_first_n_tokens: 0,
    };
    for copy in [&store, &retrieve] {
        let declined = client.answer(copy);
        assert_eq!(declined, Reply::Transferred(false));
    }
    let counts = server.status().counts;
    assert_eq!((counts.stores_failed, counts.retrieves_missed), (1, 1));
    assert_eq!(counts.over_limit, 2);
    tier.open();
    for uid in waits {
        let answer = client.receive(uid, Operation::WaitPrefetchStatus);
        assert_eq!(answer.expect("an answer"), Reply::Int(2));
    }
    for copy in [&store, &retrieve] {
        let done = client.answer(copy);
        assert_eq!(done, Reply::Transferred(true));
    }
}

/// A worker's process is stopped in the middle of a message (docker pause, SIGSTOP) and continues.
/// LMCache's client does not reconnect while its socket is open.
#[test]
fn a_worker_that_stalled_and_continues_is_served_again() {
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| zmq.peer_timeout = Duration::from_millis(500),
    );
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    worker.prepare_store(&key);
    let ping = encode_request_frames(
        9,
        &Request::Ping {
            instance_id: Some(1),
        },
    );
    let (first, rest) = ping.split_at(ping.len() / 2);
    worker.client.send_encoded(first).expect("sent");
    server.eventually("it stalls", |s| s.transport.stalled >= 1);
    worker.client.send_encoded(rest).expect("sent");
    let answer = worker.client.receive(9, Operation::Ping);
    assert_eq!(answer.expect("an answer"), Reply::Bool(true));
}

/// The layout of an engine whose connection has ended must not limit the hits of others.
#[test]
fn a_cut_off_worker_does_not_count_as_connected() {
    let server = Server::start();
    let mut cut = Worker::register_rank(&server, 1, 0, 1, "float16");
    let key = cut.key("a", &prompt(1, 2 * CHUNK), 0..2);
    cut.prepare_store(&key);
    cut.client.send_encoded(&TOO_LONG).expect("sent");
    server.eventually("cut off", |s| {
        s.transport.broken == 1 && s.transport.connections_open == 0
    });
    let mut worker = Worker::register(&server, 2);
    let key = worker.key("b", &prompt(2, 2 * CHUNK), 0..2);
    assert_eq!(worker.store(&key), 2);
    let mut scheduler = server.client();
    assert_eq!(crate::common::lookup(&mut scheduler, &key), 2);
}

/// 1,023 sockets that sent no request prevented every engine from connecting, without a time limit.
#[test]
fn connections_without_requests_do_not_block_engines() {
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.max_connections = 64);
    let mut first = Worker::register(&server, 1);
    let key = first.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let (slots, indices) = first.prepare_store(&key);
    let mut reader = server.client();
    let uid = reader.send(&subscribe(9)).expect("sent");
    assert!(matches!(batch(&mut reader, uid), Reply::Events(_)));
    let connect = || Client::connect(server.address, DEADLINE);
    let silent: Vec<_> = (0..200).filter_map(|_| connect().ok()).collect();
    assert!(silent.len() >= 46, "they fill a user's share");
    // LMCache's client reconnects when it is refused.
    let deadline = Instant::now() + DEADLINE;
    let client = loop {
        match connect() {
            Ok(client) => break client,
            Err(error) => assert!(Instant::now() < deadline, "refused: {error}"),
        }
    };
    let mut second = Worker::register_on(client, 2, 0, 1, "float32");
    assert_eq!(second.store(&second.key("b", &prompt(2, CHUNK), 0..1)), 1);
    // The engine that was idle in between and the event reader kept their connections.
    first.fill(&key, &slots, &indices);
    assert!(first.commit_store(&key));
    acknowledge(&mut reader, uid);
    assert!(matches!(batch(&mut reader, uid), Reply::Events(_)));
    let transport = server.status().transport;
    assert!(transport.closed_idle > 0);
    assert!(
        transport.connections_open <= 65,
        "{}",
        transport.connections_open
    );
    drop(silent);
}

#[test]
fn a_connection_without_a_request_is_closed_and_an_idle_engine_is_not() {
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| zmq.first_request_timeout = Duration::from_secs(1),
    );
    let mut engine = Worker::register(&server, 1);
    let silent: Vec<_> = (0..10).map(|_| server.client()).collect();
    server.eventually("they are closed", |s| s.transport.silent == 10);
    server.eventually("their permits are released", |s| {
        s.transport.connections_open == 1
    });
    drop(silent);
    let noop = engine.client.ask(&Request::Noop).expect("served");
    assert_eq!(noop, Reply::Text("OK".to_owned()));
}
