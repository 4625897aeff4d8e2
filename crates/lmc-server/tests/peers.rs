//! Several daemons that read each other's chunks.

mod common;

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{Client, Request};

use common::Server;
use common::prompt::{CHUNKS, register, retrieve, store};

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

/// Starts two daemons, of which the first has stored the prompt and the second has read it.
fn two_daemons() -> (Server, Server) {
    let one = free_port();
    let first = start(one, &[], &[]);
    let second = start(free_port(), &[one], &[]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
    (first, second)
}

#[test]
fn a_daemon_reads_what_another_has_stored() {
    let (first, second) = two_daemons();
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
    until("the stranger is counted", || {
        tier_counter(&first, "refused_handshakes") > 0.0
    });
    let (mut client, shm_name) = worker(&stranger);
    assert_eq!(retrieve(&mut client, &shm_name, "request"), 0);
    let friend = start(three, &[one], &["--p2p-key", &right]);
    until_found(&friend);
}

#[test]
fn a_clear_at_one_daemon_reaches_its_peers() {
    let (first, second) = two_daemons();
    let clear = Request::Clear { force: true };
    first.client().ask(&clear).expect("an answer");
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
    let listen = ["--p2p-listen", "127.0.0.1:0", "--p2p-transport", "nixl"];
    refused(&listen, &["p2p-transport", "--p2p-key"]);
    refused(&["--p2p-interfaces", "eth0;rm"], &["network devices"]);
    let directory = ["--p2p-directory", "lmc://host-b:7800"];
    refused(&directory, &["p2p-directory", "requires --p2p-listen"]);
    refused(&["--p2p-directory", "host-b:7800"], &["lmc://HOST:PORT"]);
    refused(
        &["--p2p-directory-listen", "10.0.0.1:7800"],
        &["p2p-key", "--p2p-directory-listen", "openssl"],
    );
    refused(
        &["--p2p-listen", "127.0.0.1:0", "--p2p-key", "/nowhere"],
        &["/nowhere"],
    );
}

/// Starts a daemon that announces to directories, and finds peers through them alone.
fn member(directories: &str) -> Server {
    let port = free_port();
    // A loaded machine answers late.
    let timeout = ["--p2p-locate-timeout", "200ms"];
    start(
        port,
        &[],
        &[&timeout[..], &["--p2p-directory", directories]].concat(),
    )
}

#[test]
fn daemons_find_each_other_through_directories_that_come_and_go() {
    let ports = [free_port(), free_port()];
    let at = ports.map(|port| format!("127.0.0.1:{port}"));
    let host = |at: &str| Server::start(&["--l1-size-gb", "64MiB", "--p2p-directory-listen", at]);
    let directories = at.each_ref().map(|at| format!("lmc://{at}")).join(",");
    let first = host(&at[0]);
    // The second hosts a directory and is a member itself.
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let second = Server::start(&[
        "--l1-size-gb",
        "64MiB",
        "--p2p-listen",
        &listen,
        "--p2p-directory",
        &directories,
        "--p2p-directory-listen",
        &at[1],
    ]);
    let (mut client, shm_name) = worker(&second);
    store(&mut client, &shm_name);
    let entries = |server: &Server| server.metric("lmc_directory_entries");
    until("both directories know the chunks", || {
        entries(&first) == CHUNKS as f64 && entries(&second) == CHUNKS as f64
    });
    let third = member(&directories);
    until_found(&third);
    assert_eq!(tier_counter(&third, "read"), CHUNKS as f64);
    until("both know that the third has them, too", || {
        entries(&first) == 2.0 * CHUNKS as f64 && entries(&second) == 2.0 * CHUNKS as f64
    });
    // The first directory is killed: the second answers.
    drop(first);
    let fourth = member(&directories);
    until_found(&fourth);
    // It comes back with nothing, and its members announce everything again.
    let first = host(&at[0]);
    until("the directory knows everything again", || {
        entries(&first) == 3.0 * CHUNKS as f64
    });
    // A member that is killed is not named any more: the others have its chunks.
    drop((client, second));
    until_found(&member(&format!("lmc://{}", at[0])));
}
