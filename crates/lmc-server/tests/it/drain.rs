//! A server that is taken out of service before it is stopped.

use std::process::Output;

use lmc_testkit::{Folder, free_port, until};

use crate::common::prompt::{CHUNKS, Prompt, register, retrieve, store};
use crate::common::{Server, ask, lmc};

/// Starts a server whose drive gets what leaves memory.
fn start(folder: &Folder) -> Server {
    Server::start(&[
        "--l1-size-gb",
        "64MiB",
        "--disk-create",
        "--disk-size",
        "512MiB",
        "--disk-keep-free",
        "0",
        "--disk-read-timeout-seconds",
        "60",
        "--disk-write",
        "back",
        "--disk",
        folder.text(),
    ])
}

fn drain(server: &Server, flags: &[&str]) -> Output {
    let url = format!("http://127.0.0.1:{}", server.http);
    let mut drain = lmc();
    drain.args(["drain", "--url", &url]).args(flags);
    drain.output().expect("the binary runs")
}

fn readiness(server: &Server) -> (u16, String) {
    ask(server.http, "GET", "/readyz", "")
}

#[test]
fn a_server_that_was_drained_has_lost_nothing_when_it_is_killed() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    let on_disk = |server: &Server| server.metric("lmc_tier_chunks{tier=\"disk\"}");
    assert_eq!((on_disk(&server), readiness(&server).0), (0.0, 200));

    let drained = drain(&server, &[]);
    let said = String::from_utf8_lossy(&drained.stdout).into_owned();
    assert!(drained.status.success(), "{drained:?}");
    assert!(
        said.contains("the tiers have all chunks that they take"),
        "{said}"
    );
    assert_eq!(on_disk(&server), CHUNKS as f64);
    let (code, answer) = readiness(&server);
    assert!(code == 503 && answer.contains("draining"), "{answer}");
    assert_eq!(server.metric("lmc_draining"), 1.0);
    let status = lmc()
        .args(["status", "--url", &format!("127.0.0.1:{}", server.http)])
        .output();
    let status = String::from_utf8(status.expect("it runs").stdout).expect("text");
    assert!(status.contains("draining (lmc drain)"), "{status}");
    assert!(
        !Prompt(2).try_store(&mut client, &shm_name),
        "it takes nothing"
    );
    assert_eq!(
        server.metric("lmc_chunks_drained_total"),
        2.0 * CHUNKS as f64
    );
    assert_eq!(retrieve(&mut client, &shm_name, "read"), CHUNKS as u64);
    drop(server);

    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    assert_eq!(retrieve(&mut client, &shm_name, "again"), CHUNKS as u64);
}

#[test]
fn a_drain_waits_for_stores_that_had_begun_and_can_be_cancelled() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    Prompt(1).prepare_store(&mut client, &shm_name);
    let waited = drain(&server, &["--timeout", "1s", "--json"]);
    assert_eq!(waited.status.code(), Some(1), "{waited:?}");
    let state: serde_json::Value = serde_json::from_slice(&waited.stdout).expect("JSON");
    assert_eq!(
        (&state["state"], &state["storing_chunks"]),
        (&"draining".into(), &CHUNKS.into())
    );
    Prompt(1).commit_store(&mut client);
    assert!(drain(&server, &[]).status.success());
    assert_eq!(
        server.metric("lmc_tier_chunks{tier=\"disk\"}"),
        CHUNKS as f64
    );

    assert!(drain(&server, &["--cancel"]).status.success());
    assert_eq!(readiness(&server).0, 200);
    store(&mut client, &shm_name);
}

#[test]
fn peers_learn_that_a_server_is_drained_and_that_it_is_no_more() {
    let at = |port: u16| format!("127.0.0.1:{port}");
    let (first, second) = (at(free_port()), at(free_port()));
    let size = ["--l1-size-gb", "64MiB"];
    let start = |more: &[&str]| Server::start(&[&size[..], more].concat());
    let drained = start(&["--p2p-listen", &first]);
    let peer = start(&["--p2p-listen", &second, "--p2p-peer", &first]);
    peer.line("peer connected");
    let shows = || {
        let peers = lmc()
            .args(["peers", "--url", &at(peer.http)])
            .output()
            .expect("it runs");
        String::from_utf8_lossy(&peers.stdout).contains("being drained")
    };
    assert!(!shows());
    assert!(drain(&drained, &[]).status.success());
    until("the peer shows it", shows);
    assert!(drain(&drained, &["--cancel"]).status.success());
    until("the peer shows it no more", || !shows());
}
