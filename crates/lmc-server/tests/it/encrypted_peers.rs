//! Bytes of chunks between peers, as a relay on the path between them sees them.

use lmc_testkit::{free_port, until};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, register, retrieve, store};
use crate::common::relay::Relay;

fn worker(server: &Server) -> (lmc_vllm_adapter::Client, String) {
    let mut client = server.client();
    let shm_name = register(&mut client);
    (client, shm_name)
}

/// Has one daemon read the prompt of another through a relay. Returns whether the prompt's bytes
/// were seen in clear.
fn is_seen(owner: &[&str], reader: &[&str]) -> bool {
    let port = free_port();
    let relay = Relay::start(port);
    let listen = format!("127.0.0.1:{port}");
    let path = format!("127.0.0.1:{}", relay.port);
    let size = ["--l1-size-gb", "64MiB"];
    let owner = [&size[..], &["--p2p-listen", &listen], owner].concat();
    let owner = [&owner[..], &["--p2p-advertise", &path]].concat();
    let owner = Server::start(&owner);
    let listen = format!("127.0.0.1:{}", free_port());
    let reader = [&size[..], &["--p2p-listen", &listen], reader].concat();
    let reader = [&reader[..], &["--p2p-peer", &path]].concat();
    let reader = Server::start(&reader);
    let (mut client, shm_name) = worker(&owner);
    store(&mut client, &shm_name);
    // Bytes in the middle of the third chunk, as `Prompt::bytes_of` makes them.
    let at = |at: usize| (at * 31 + (at >> 8) + 2 * 7) as u8;
    let needle: Vec<u8> = (5000..5064).map(at).collect();
    let (mut client, shm_name) = worker(&reader);
    let mut request = 0;
    until("the owner's chunks are found, and checked", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("request-{request}")) == CHUNKS as u64
    });
    let (chunk, passed) = (32 << 10, relay.bytes());
    assert!(passed > CHUNKS * chunk, "{passed} bytes went over the path");
    relay.has(&needle)
}

/// Slow: it starts two daemons for each of four pairs of settings.
#[test]
fn chunks_are_encrypted_between_peers_where_either_asks_for_it() {
    let encrypt = ["--p2p-encrypt"];
    assert!(is_seen(&[], &[]), "the relay sees what is not encrypted");
    assert!(!is_seen(&encrypt, &[]), "the owner asks for it");
    assert!(!is_seen(&[], &encrypt), "the reader asks for it");
    assert!(!is_seen(&encrypt, &encrypt), "both ask for it");
}
