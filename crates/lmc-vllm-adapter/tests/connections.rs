//! What a connection owes its peer, and what comes back when it ends.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{CHUNK, Server, Worker, prompt};
use lmc_backend::MemoryBackend;
use lmc_backend::conformance::Gated;
use lmc_vllm_adapter::{
    CacheKey, Client, ClientError, Operation, Reply, Request, ZmqConfig, encode_request_frames,
};

type Tier = Arc<Gated<MemoryBackend>>;

/// A prompt is below DRAM, behind a gate that is shut.
fn shut_off(zmq: impl FnOnce(&mut ZmqConfig)) -> (Server, Tier, CacheKey) {
    let tier: Tier = Arc::new(Gated::new(MemoryBackend::default()));
    let server = Server::over(vec![Arc::clone(&tier) as _], 1 << 20, |_| {}, zmq);
    let mut worker = Worker::register(&server, 1);
    let key = worker.key("s", &prompt(1, 2 * CHUNK), 0..2);
    worker.store(&key);
    server.eventually("copies are down", |s| s.lower[0].queued_bytes == 0);
    server.service.engine().clear_dram(true);
    tier.shut();
    (server, tier, key)
}

fn begin_lookup(client: &mut Client, key: &CacheKey) {
    let lookup = Request::Lookup(CacheKey {
        worker_id: None,
        ..key.clone()
    });
    assert_eq!(client.ask(&lookup).expect("an answer"), Reply::None);
}

fn wait() -> Request {
    Request::WaitPrefetchStatus {
        request_id: "s".to_owned(),
        timeout: 20.0,
    }
}

/// A peer filled its share of requests under way, sent more in the same breath, and was cut off
/// as stalled: what it had sent whole counted as owed.
#[test]
fn a_peer_whose_requests_wait_for_the_server_owes_nothing() {
    let (server, tier, key) = shut_off(|zmq| {
        zmq.peer_timeout = Duration::from_millis(500);
        zmq.max_in_flight = 2;
    });
    let mut client = Client::connect(server.address, Duration::from_secs(1)).expect("served");
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
        "no more is under way than twice the limit: {early:?}"
    );
    tier.open();
    let answer = client.receive(54, Operation::Noop);
    assert_eq!(answer.expect("an answer"), Reply::Text("OK".to_owned()));
    assert_eq!(server.status().transport.stalled, 0);
}
