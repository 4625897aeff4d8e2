//! Several daemons that read each other's chunks.

mod common;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{CacheKey, Client, EngineDrivenContext, Reply, Request, SlotDescriptor};

use common::Server;

const CHUNK: usize = 256;
const CHUNKS: usize = 6;

/// Starts a daemon that listens for peers at `port`, and connects to others.
fn start(port: u16, peers: &[u16], flags: &[&str]) -> Server {
    let at = |port: &u16| format!("127.0.0.1:{port}");
    let peers: Vec<String> = peers.iter().map(at).collect();
    let (listen, peers) = (at(&port), peers.join(","));
    let mut args = vec!["--l1-size-gb", "64MiB", "--p2p-listen", &listen];
    if !peers.is_empty() {
        args.extend(["--p2p-peer", &peers]);
    }
    args.extend(flags);
    Server::start(&args)
}

fn tier_counter(server: &Server, name: &str) -> f64 {
    server.metric(&format!(
        "lmc_tier_events_total{{tier=\"peers\",what=\"{name}\"}}"
    ))
}

fn register(client: &mut Client) -> String {
    let reply = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
        instance_id: 1,
        model_name: "model".to_owned(),
        world_size: 1,
        block_size: 16,
        num_layers: 2,
        hidden_dim_size: 8,
        dtype: "float32".to_owned(),
        use_mla: false,
        num_physical_slots: Some(CHUNK as u32),
    }));
    match reply.expect("an answer") {
        Reply::Registered { shm_name, .. } => shm_name,
        other => panic!("{other:?}"),
    }
}

fn key(request: &str) -> CacheKey {
    CacheKey {
        model_name: "model".to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: (0..(CHUNK * CHUNKS) as u32).collect(),
        start: 0,
        end: (CHUNK * CHUNKS) as u64,
        request_id: request.to_owned(),
        cache_salt: String::new(),
        num_kv_readers: 1,
        configs: Default::default(),
    }
}

fn bytes_of(chunk: usize, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at as usize * 31 + chunk * 7) as u8)
        .collect()
}

fn store(client: &mut Client, shm_name: &str) {
    let request = Request::PrepareStore {
        key: key("store"),
        instance_id: 1,
    };
    let Reply::StoreSlots {
        slots,
        chunk_indices,
    } = client.ask(&request).expect("an answer")
    else {
        panic!("no slots");
    };
    let pool = OpenOptions::new()
        .write(true)
        .open(Path::new("/dev/shm").join(shm_name))
        .expect("the pool");
    for (slot, &chunk) in slots.iter().zip(&chunk_indices) {
        let bytes = bytes_of(chunk as usize, slot.length);
        pool.write_all_at(&bytes, slot.offset).expect("inside");
    }
    let commit = Request::CommitStore {
        key: key("store"),
        instance_id: 1,
        pickled: 0,
    };
    assert_eq!(client.ask(&commit).expect("an answer"), Reply::Bool(true));
}

/// Looks up and reads back: the number of chunks that were there, each with its bytes.
fn retrieve(client: &mut Client, shm_name: &str, request: &str) -> u64 {
    let lookup = CacheKey {
        worker_id: None,
        ..key(request)
    };
    let reply = client.ask(&Request::Lookup(lookup)).expect("an answer");
    assert_eq!(reply, Reply::None);
    let wait = Request::WaitPrefetchStatus {
        request_id: request.to_owned(),
        timeout: 10.0,
    };
    let Reply::Int(hits) = client.ask(&wait).expect("an answer") else {
        panic!("no answer to the lookup");
    };
    if hits == 0 {
        return 0;
    }
    let range = CacheKey {
        end: hits * CHUNK as u64,
        ..key(request)
    };
    let prepare = Request::PrepareRetrieve {
        key: range,
        instance_id: 1,
    };
    let Reply::RetrieveSlots(Some(slots)) = client.ask(&prepare).expect("an answer") else {
        panic!("found and not there");
    };
    let pool = OpenOptions::new()
        .read(true)
        .open(Path::new("/dev/shm").join(shm_name))
        .expect("the pool");
    for (chunk, slot) in slots.iter().enumerate() {
        let SlotDescriptor { offset, length, .. } = *slot;
        let mut bytes = vec![0; length as usize];
        pool.read_exact_at(&mut bytes, offset).expect("inside");
        assert_eq!(bytes, bytes_of(chunk, length), "chunk {chunk}");
    }
    hits
}

/// Connects a client to a daemon, and registers a worker.
fn worker(server: &Server) -> (Client, String) {
    let mut client = server.client();
    let shm_name = register(&mut client);
    (client, shm_name)
}

/// Looks the prompt up until all of it is found: the peers may not have met yet.
fn until_found(server: &Server) {
    let (mut client, shm_name) = worker(server);
    let mut request = 0;
    until("the peer's chunks are found", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("request-{request}")) == CHUNKS as u64
    });
}

#[test]
fn a_daemon_reads_what_another_has_stored() {
    let (one, two) = (free_port(), free_port());
    let first = start(one, &[], &[]);
    let second = start(two, &[one], &[]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
    assert_eq!(tier_counter(&second, "read"), CHUNKS as f64);
    assert_eq!(tier_counter(&first, "served"), CHUNKS as f64);
    // From now on it has them itself.
    drop(first);
    until_found(&second);
}

#[test]
fn what_another_has_on_disk_is_promoted_there_and_read() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let (one, two) = (free_port(), free_port());
    let disk = [
        "--disk-create",
        "--disk",
        folder.text(),
        "--disk-size",
        "512MiB",
    ];
    let flags = [&disk[..], &["--disk-keep-free", "0", "--state-dir", "none"]].concat();
    let first = start(one, &[], &flags);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until("all chunks are on disk", || {
        first.metric("lmc_tier_chunks{tier=\"disk\"}") == CHUNKS as f64
    });
    drop((client, first));
    let first = start(one, &[], &flags);
    let second = start(two, &[one], &[]);
    until_found(&second);
    assert_eq!(tier_counter(&first, "served"), CHUNKS as f64);
}

#[test]
fn peers_with_another_key_are_strangers() {
    let folder = Folder::temporary();
    let file = |name: &str, key: &str| {
        let path = folder.join(name);
        std::fs::write(&path, key.repeat(8)).expect("the folder can be written");
        path.to_str().expect("text").to_owned()
    };
    let (right, wrong) = (
        file("right", "0123456789abcdef"),
        file("wrong", "fedcba9876543210"),
    );
    let (one, two, three) = (free_port(), free_port(), free_port());
    let first = start(one, &[], &["--p2p-key", &right]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    let stranger = start(two, &[one], &["--p2p-key", &wrong]);
    stranger.line("a peer cannot be connected to");
    let (mut client, shm_name) = worker(&stranger);
    assert_eq!(retrieve(&mut client, &shm_name, "request"), 0);
    let friend = start(three, &[one], &["--p2p-key", &right]);
    until_found(&friend);
}

#[test]
fn a_clear_at_one_daemon_reaches_its_peers() {
    let (one, two) = (free_port(), free_port());
    let first = start(one, &[], &[]);
    let second = start(two, &[one], &[]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
    let clear = Request::Clear { force: true };
    client.ask(&clear).expect("an answer");
    let (mut client, shm_name) = worker(&second);
    let mut request = 0;
    until("the clear has reached the peer", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("after-{request}")) == 0
    });
}

#[test]
fn flags_that_do_not_go_together_are_refused_with_what_to_do() {
    let refused = |flags: &[&str], parts: &[&str]| {
        let out = common::lmc().arg("serve").args(flags).output();
        let out = out.expect("the binary starts");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success(), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part}: {text}");
        }
    };
    refused(&["--p2p-listen", "10.0.0.1:7700"], &["p2p-key", "openssl"]);
    refused(
        &["--p2p-listen", "0.0.0.0:7700", "--p2p-key", "/nowhere"],
        &["p2p-advertise", "wildcard"],
    );
    refused(
        &["--p2p-listen", "0.0.0.0:7700"],
        &["p2p-advertise", "p2p-key"],
    );
    refused(&["--p2p-peer", "host-b:7700"], &["requires --p2p-listen"]);
    refused(&["--p2p-listen", "10.0.0.1"], &["HOST:PORT"]);
    refused(
        &["--p2p-listen", "127.0.0.1:0", "--p2p-key", "/nowhere"],
        &["/nowhere"],
    );
}
