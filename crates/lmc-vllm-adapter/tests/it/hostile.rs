//! Clients that break the protocol. Each gets an error or is disconnected; others are not affected.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{Answer as _, CHUNK, Server, Worker, lookup, prompt};
use bytes::Bytes;
use lmc_key::ChunkHash;
use lmc_testkit::{DEADLINE, rounds, until};
use lmc_vllm_adapter::{Client, IdentityDigest, Limits, Reply, Request, encode_request_frames};

/// Checks that the server still serves and holds nothing for clients that are gone.
fn assert_serving(server: &Server) {
    // A client that a busy machine keeps from connecting in time tries again.
    until("a client is served", || {
        let client = Client::connect(server.address, DEADLINE);
        let answer = client.and_then(|mut client| client.ask(&Request::Noop));
        answer.is_ok_and(|answer| answer == Reply::Text("OK".to_owned()))
    });
    server.assert_idle();
}

fn frame(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

/// Sends raw frames and returns the text of the refusal.
fn refusal(client: &mut Client, frames: &[&[u8]]) -> String {
    let frames: Vec<_> = frames.iter().map(|f| frame(f)).collect();
    client.send_frames(&frames).expect("sent");
    let answer = client.receive_frames().expect("an answer");
    assert_eq!(answer[0], frames[0], "the answer names the request");
    assert_eq!(answer.len(), 2, "a refusal has no value");
    String::from_utf8_lossy(&answer[1]).into_owned()
}

#[test]
fn every_malformed_request_is_answered_with_its_reason() {
    let server = Server::start();
    let mut client = server.client();
    for (frames, expected) in [
        (
            &[&b"\x00"[..], b"\xcc\xff"][..],
            "unknown operation number 255",
        ),
        (&[b"\x01", b"\x0b"], "unknown operation number 11"),
        (&[b"\x02", b"\xa4boom"], "unknown operation"),
        (&[b"\x03", b"\xc1"], "operation frame is malformed"),
        (
            &[b"\x04", b"\x93\x01\x02\x03"],
            "operation frame is malformed",
        ),
        (
            &[b"\x05", b"\x08"],
            "lookup takes 2 payload frames, found 0",
        ),
        (&[b"\x06", b"\x08", b"\xc1", b"\x01"], "payload 0 of lookup"),
        (
            &[b"\x07", b"\x08", b"\xdf\xff\xff\xff\xff", b"\x01"],
            "payload 0 of lookup",
        ),
        (&[b"\x08", b"\x1d", b"\x90", b"\x80"], "not supported"),
        (&[b"\x09", b"\x16", b"\xa3abc"], "expected an integer"),
        (
            &[b"\x0a", b"\x01", b"", b"", b"", b"", b"", b"", b""],
            "ends early",
        ),
    ] {
        let text = refusal(&mut client, frames);
        assert!(text.contains(expected), "{text:?} lacks {expected:?}");
    }
    let deep: Vec<u8> = std::iter::repeat_n(0x91, 100_000).collect();
    let key = [&b"\x81\xa1x"[..], &deep].concat();
    let text = refusal(&mut client, &[b"\x0b", b"\x08", &key, b"\x01"]);
    assert!(text.contains("nested deeper"), "{text}");
    drop(client);
    assert_serving(&server);
}

#[test]
fn frames_without_a_request_number_are_counted_and_dropped() {
    let server = Server::start();
    let mut client = server.client();
    for frames in [
        &[&b"\x01"[..]][..],
        &[b"", b"\x18"],
        &[b"not a number", b"\x18"],
        &[b"", b""],
    ] {
        let frames: Vec<_> = frames.iter().map(|f| frame(f)).collect();
        client.send_frames(&frames).expect("sent");
    }
    assert_eq!(
        client.ask(&Request::Noop).expect("served"),
        Reply::Text("OK".to_owned())
    );
    assert_eq!(server.status().transport.unanswerable, 4);
}

#[test]
fn invalid_requests_are_refused_with_a_reason() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("a", &prompt(1, 4 * CHUNK), 0..4);
    let mut check =
        |request: Request, expected: &str| match worker.client.call(&request).expect("an answer") {
            Reply::Error(text) => assert!(text.contains(expected), "{text:?} lacks {expected:?}"),
            other => panic!("{request:?} was answered {other:?}"),
        };
    let instance_id = 1;
    let with = |change: &dyn Fn(&mut lmc_vllm_adapter::CacheKey)| {
        let mut key = key.clone();
        change(&mut key);
        key
    };
    check(
        Request::Lookup(with(&|k| k.num_kv_readers = 0)),
        "num_kv_readers",
    );
    let unaligned = with(&|k| k.start = 3);
    check(
        Request::PrepareStore {
            key: unaligned,
            instance_id,
        },
        "multiple of the chunk size",
    );
    let without_worker = with(&|k| k.worker_id = None);
    check(
        Request::PrepareStore {
            key: without_worker,
            instance_id,
        },
        "worker_id is required",
    );
    let hash = ChunkHash::new([1; 32]);
    let unnamed = with(&|k| (k.token_ids, k.chunk_hashes) = (Vec::new(), vec![hash; 4]));
    check(
        Request::Lookup(unnamed),
        "lmc_chunk_hashes need lmc_identity",
    );
    let twice = with(&|k| {
        k.identity = Some(IdentityDigest::of("i"));
        k.chunk_hashes = vec![hash; 4];
    });
    check(Request::Lookup(twice), "no token_ids");
    let in_blocks = |unit| {
        with(&|k| {
            k.identity = Some(IdentityDigest::of("i"));
            (k.token_ids, k.chunk_hashes) = (Vec::new(), vec![hash; 4]);
            k.unit = Some(unit);
        })
    };
    check(Request::Lookup(in_blocks(0)), "lmc_unit must be 1 or more");
    check(
        Request::Lookup(with(&|k| k.unit = Some(4))),
        "lmc_unit needs lmc_chunk_hashes",
    );
    let key = in_blocks(4);
    check(
        Request::PrepareStore { key, instance_id },
        "chunks of another size",
    );
    let foreign = with(&|k| k.identity = Some(IdentityDigest::of("i")));
    check(
        Request::PrepareStore {
            key: foreign,
            instance_id,
        },
        "another identity",
    );
    let other = with(&|k| k.model_name = "other".to_owned());
    check(
        Request::PrepareStore {
            key: other,
            instance_id,
        },
        "registered model",
    );
    check(
        Request::Lookup(with(&|k| k.cache_salt = "a/b".to_owned())),
        "cache_salt",
    );
    drop(worker);
    assert_serving(&server);
}

#[test]
fn ranges_beyond_the_prompt_are_truncated() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 2 * CHUNK + 5);
    let mut key = worker.key("a", &tokens, 0..2);
    key.end = u64::MAX;
    assert_eq!(worker.store(&key), 2);
    key.start = u64::MAX - u64::MAX % CHUNK as u64;
    assert_eq!(worker.prepare_store(&key), (Vec::new(), Vec::new()));
    assert!(!worker.retrieve(&key));
    let free = lmc_vllm_adapter::CacheKey {
        worker_id: None,
        ..key
    };
    worker.client.answer(&Request::FreeLookupLocks(free));
    drop(worker);
    assert_serving(&server);
}

/// Sends bytes and waits until the server closes the connection.
fn is_closed_after(server: &Server, bytes: &[u8]) {
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    // The server may close the connection during the write.
    let _ = stream.write_all(bytes);
    let mut rest = Vec::new();
    let end = stream.read_to_end(&mut rest);
    let reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
    assert!(
        end.as_ref().map_or_else(reset, |_| true),
        "still open: {end:?}"
    );
}

fn opened(then: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    bytes.extend_from_slice(b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER");
    bytes.extend_from_slice(then);
    bytes
}

#[test]
fn malformed_streams_are_closed() {
    let server = Server::start();
    is_closed_after(&server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    is_closed_after(&server, &[0xff; 64]);
    is_closed_after(
        &server,
        &opened(&[0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
    );
    is_closed_after(&server, &opened(&[0x01, 0].repeat(100)));
    is_closed_after(&server, &opened(&[0xf8, 1, 0]));
    is_closed_after(&server, &opened(b"\x04\x06\x05ERROR"));
    assert_eq!(server.status().transport.broken, 6);
    assert_serving(&server);
}

#[test]
fn a_peer_that_stalls_in_the_handshake_or_in_a_message_is_cut_off() {
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| zmq.peer_timeout = Duration::from_millis(200),
    );
    is_closed_after(&server, b"");
    is_closed_after(&server, &opened(b"")[..30]);
    is_closed_after(&server, &opened(&[0x00, 200, 1, 2, 3]));
    is_closed_after(&server, &opened(&[0x01, 1, 9]));
    assert_eq!(server.status().transport.stalled, 4);
    // A client that is only idle stays connected.
    let mut client = None;
    until("a client is connected", || {
        client = Client::connect(server.address, DEADLINE).ok();
        client.is_some()
    });
    let mut client = client.expect("it is connected");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(
        client.ask(&Request::Noop).expect("served"),
        Reply::Text("OK".to_owned())
    );
}

/// A client sent one byte of a long message at a time. Each byte restarted the deadline, so the
/// buffers of incomplete messages were kept forever.
#[test]
fn a_message_that_comes_byte_by_byte_has_one_deadline() {
    let timeout = Duration::from_millis(500);
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.peer_timeout = timeout);
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    let announced = [0x02, 0, 0, 0, 0, 0, 0x10, 0, 0];
    stream.write_all(&opened(&announced)).expect("sent");
    let began = Instant::now();
    while server.status().transport.stalled == 0 {
        assert!(began.elapsed() < DEADLINE, "it is still open");
        let _ = stream.write_all(&[0]);
        std::thread::sleep(timeout / 10);
    }
    assert_serving(&server);
}

/// A client that was idle for longer than the message timeout, and sent its next message in two
/// pieces, was disconnected at the first piece.
#[test]
fn a_message_in_pieces_after_a_pause_is_answered() {
    let timeout = Duration::from_secs(1);
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.peer_timeout = timeout);
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.set_nodelay(true).expect("TCP");
    let read_timeout = Some(DEADLINE);
    stream.set_read_timeout(read_timeout).expect("a timeout");
    let message = encode_request_frames(1, &Request::Noop);
    stream.write_all(&opened(&message)).expect("sent");
    let mut answer = vec![0; 4096];
    assert!(stream.read(&mut answer).expect("an answer") > 0);
    for _ in 0..rounds(1, 3) {
        std::thread::sleep(timeout * 6 / 5);
        let (first, second) = message.split_at(message.len() / 2);
        stream.write_all(first).expect("sent");
        std::thread::sleep(timeout / 100);
        stream.write_all(second).expect("sent");
        assert!(stream.read(&mut answer).expect("an answer") > 0, "closed");
    }
    assert_eq!(server.status().transport.stalled, 0);
}

/// Pings between the frames of a message must not restart its deadline.
#[test]
fn pings_in_a_message_do_not_move_its_deadline() {
    let timeout = Duration::from_millis(500);
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.peer_timeout = timeout);
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.write_all(&opened(&[0x01, 1, 9])).expect("sent");
    let began = Instant::now();
    while server.status().transport.stalled == 0 {
        assert!(began.elapsed() < DEADLINE, "it is still open");
        let _ = stream.write_all(b"\x04\x07\x04PING\0\0");
        std::thread::sleep(timeout / 10);
    }
    assert_serving(&server);
}

/// A client sends small requests faster than they are handled, and reads the replies. Requests that
/// waited were buffered without a limit.
#[test]
fn requests_wait_in_the_socket_and_not_in_the_server() {
    let server = Server::start();
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.write_all(&opened(&[])).expect("sent");
    let mut reader = stream.try_clone().expect("a handle");
    std::thread::spawn(move || {
        let mut answers = vec![0; 1 << 20];
        while reader.read(&mut answers).is_ok_and(|read| read > 0) {}
    });
    let one = encode_request_frames(7, &Request::Ping { instance_id: None });
    let batch = one.repeat(4096);
    let (began, mut sent) = (Instant::now(), 0);
    while began.elapsed() < Duration::from_millis(500) {
        stream.write_all(&batch).expect("sent");
        sent += batch.len();
    }
    let status = server.status();
    let handled = status.counts.pings as usize * one.len();
    let taken = status.transport.bytes_in as usize;
    assert!(
        taken.saturating_sub(handled) < 4 << 20,
        "{taken} of {sent} bytes"
    );
}

/// Event streams whose reader requests batches and reads none: each batch was buffered.
#[test]
fn event_streams_that_are_not_read_hold_little_memory() {
    const CONNECTIONS: usize = 8;
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    // Batches of about 100 KiB.
    for round in 0..24 {
        let key = worker.key("a", &prompt(round, 32 * CHUNK), 0..32);
        worker.store(&key);
    }
    let subscribe = |uid| {
        let request = Request::SubscribeKvEvents {
            instance_id: uid,
            model_name: crate::common::MODEL.to_owned(),
            cursor: 0,
            max_events: 1024,
        };
        encode_request_frames(uid, &request)
    };
    let streams: Vec<u8> = (0..64).flat_map(subscribe).collect();
    let before = crate::common::resident_bytes();
    let mut unread = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut stream = TcpStream::connect(server.address).expect("a connection");
        stream.write_all(&opened(&streams)).expect("sent");
        unread.push(stream);
    }
    server.eventually("all are subscribed", |status| {
        status.events.subscribers == 64 * CONNECTIONS
    });
    assert_serving(&server);
    let grown = crate::common::resident_bytes().saturating_sub(before);
    assert!(grown < 16 << 20, "{grown} bytes");
    // A client that reads gets every event.
    let mut all = vec![0; 64 << 10];
    let mut read = 0;
    let first = &mut unread[0];
    first.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    while read < 4 << 20 {
        read += first.read(&mut all).expect("more batches");
    }
}

#[test]
fn a_message_beyond_the_limit_ends_its_connection_only() {
    let limits = Limits {
        message_bytes: 64 << 10,
        frames: 16,
    };
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.limits = limits);
    let mut worker = Worker::register(&server, 1);
    let mut other = server.client();
    let key = worker.key("a", &prompt(1, 40_000), 0..1);
    assert!(other.call(&Request::Lookup(key)).is_err());
    let key = worker.key("b", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(worker.store(&key), 2);
    drop((worker, other));
    assert_serving(&server);
}

#[test]
fn more_connections_than_the_limit_are_closed_at_once() {
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.max_connections = 3);
    let mut workers: Vec<_> = (0..3).map(|id| Worker::register(&server, id)).collect();
    assert!(Client::connect(server.address, Duration::from_secs(5)).is_err());
    assert_eq!(
        workers[0].client.ask(&Request::Noop).expect("served"),
        Reply::Text("OK".to_owned())
    );
    workers.pop();
    server.eventually("a connection is free", |s| {
        s.transport.connections_open == 2
    });
    assert!(Client::connect(server.address, DEADLINE).is_ok());
    assert!(server.status().transport.connections_refused >= 1);
}

#[test]
fn a_flood_that_never_reads_its_answers_delays_no_other_client() {
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| {
            zmq.max_unread = 64 << 10;
            zmq.peer_timeout = Duration::from_millis(700);
        },
    );
    let mut stream = TcpStream::connect(server.address).expect("a connection");
    stream.write_all(&opened(b"")).expect("sent");
    stream
        .set_write_timeout(Some(Duration::from_millis(200)))
        .expect("a timeout");
    let noop: Vec<u8> = encode_request_frames(0, &Request::Noop);
    let burst = noop.repeat(10_000);
    let flood = std::thread::spawn(move || {
        let until = Instant::now() + DEADLINE;
        while Instant::now() < until {
            if stream
                .write_all(&burst)
                .is_err_and(|e| e.kind() != std::io::ErrorKind::WouldBlock)
            {
                return true;
            }
        }
        false
    });
    let mut worker = Worker::register(&server, 1);
    let mut scheduler = server.client();
    for round in 0..50 {
        let key = worker.key(&format!("r{round}"), &prompt(round, 2 * CHUNK), 0..2);
        worker.store(&key);
        assert_eq!(lookup(&mut scheduler, &key), 2);
    }
    assert!(
        flood.join().expect("no panic"),
        "the flood was never cut off"
    );
    drop((worker, scheduler));
    assert_serving(&server);
}

#[test]
fn requests_behind_a_full_output_are_answered_once_it_is_sent() {
    const REQUESTS: usize = 1000;
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.max_unread = 256);
    let burst = encode_request_frames(0, &Request::Noop).repeat(REQUESTS);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let mut client = server.client();
                client.send_encoded(&burst).expect("sent");
                for _ in 0..REQUESTS {
                    client.receive_frames().expect("answered");
                }
            });
        }
    });
}

#[test]
fn sessions_beyond_the_limit_get_a_miss_and_old_ones_end_by_time() {
    let server = Server::with(
        1 << 20,
        |config| {
            config.max_sessions = 10;
            config.session_ttl = Duration::from_secs(60);
            config.lookup_lease = Duration::from_secs(30);
        },
        |_| {},
    );
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 2 * CHUNK);
    worker.store(&worker.key("s", &tokens, 0..2));
    let mut scheduler = server.client();
    for round in 0..15 {
        let hits = lookup(
            &mut scheduler,
            &worker.key(&format!("r{round}"), &tokens, 0..2),
        );
        // One connection may have three quarters of the sessions.
        assert_eq!(hits, if round < 8 { 2 } else { 0 }, "round {round}");
    }
    let mut other = server.client();
    for round in 0..3 {
        let hits = lookup(&mut other, &worker.key(&format!("s{round}"), &tokens, 0..2));
        assert_eq!(hits, if round < 2 { 2 } else { 0 }, "round {round}");
    }
    assert_eq!(server.status().counts.over_limit, 8);
    assert_eq!(server.status().usage.leases, 20);
    server
        .service
        .tick(Instant::now() + Duration::from_secs(31));
    assert_eq!(server.status().usage.leases, 0);
    assert_eq!(server.status().counts.lookup_leases_expired, 20);
    server
        .service
        .tick(Instant::now() + Duration::from_secs(61));
    assert_eq!(server.status().sessions.sessions, 0);
}

#[test]
fn silence_removes_a_worker_but_frees_no_slot_that_it_may_be_writing() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    let (slots, indices) = worker.prepare_store(&key);
    worker.client.answer(&Request::Ping {
        instance_id: Some(1),
    });
    server
        .service
        .tick(Instant::now() + Duration::from_secs(121));
    let status = server
        .service
        .status(Instant::now() + Duration::from_secs(601));
    assert!(status.instances.is_empty());
    assert_eq!((status.transfers.stores, status.transfers.overdue), (1, 1));
    assert_eq!(
        status.usage.reserved_slots, 2,
        "the worker may still be copying"
    );
    // The worker continues and commits: its bytes are complete, so the chunks are findable.
    worker.fill(&key, &slots, &indices);
    assert!(worker.commit_store(&key));
    let mut next = Worker::register(&server, 2);
    assert!(next.retrieve(&key));
    drop((worker, next));
    assert_serving(&server);
}
