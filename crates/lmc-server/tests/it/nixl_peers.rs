//! Daemons that read each other's chunks over NIXL, with the real library.
use std::thread;
use std::time::Duration;

use lmc_testkit::{Folder, free_port, write_secret};
use lmc_vllm_adapter::{Client, Request};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, register_wide, retrieve, store};

/// Values for each token, layer and half: chunks of 2 MiB, so that all are leased at once.
const WIDE: u32 = 512;
pub(crate) const TCP: &str = "tcp";
const SHARED_MEMORY: &str = "cma,posix,tcp";

/// Returns true, and says so, on a machine without NIXL.
pub(crate) fn skipped() -> bool {
    let skips = std::env::var_os("LMC_NIXL_LIBRARY").is_none();
    if skips {
        println!(
            "skipped: LMC_NIXL_LIBRARY names no library of NIXL; `cargo xtask test-nixl` gets it"
        );
    }
    skips
}

/// Starts a daemon that listens for peers at `port`, and connects to others.
pub(crate) fn start(
    folder: &Folder,
    port: u16,
    peer: Option<u16>,
    transport: &str,
    ucx: &str,
) -> Server {
    let key = folder.join("key");
    write_secret(&key, &"0123456789abcdef".repeat(4));
    let (listen, key) = (format!("127.0.0.1:{port}"), key.display().to_string());
    let mut args = vec!["--l1-size-gb", "256MiB", "--p2p-listen", &listen];
    args.extend(["--p2p-key", &key, "--p2p-transport", transport]);
    args.extend(["--p2p-interfaces", "lo"]);
    let peer = peer.map(|port| format!("127.0.0.1:{port}"));
    if let Some(peer) = &peer {
        args.extend(["--p2p-peer", peer]);
    }
    let mut command = crate::common::lmc();
    command.env("UCX_TLS", ucx);
    Server::start_by(command, &args)
}

/// Returns the bytes that the tier of peers has counted.
fn tier_bytes(server: &Server, what: &str) -> f64 {
    server.metric(&format!(
        "lmc_tier_event_bytes_total{{tier=\"peers\",what=\"{what}\"}}"
    ))
}

fn worker(server: &Server) -> (Client, String) {
    let mut client = server.client();
    let shm_name = register_wide(&mut client, WIDE);
    (client, shm_name)
}

/// Starts an owner, which has stored the prompt, and a reader that is connected to it.
fn two_daemons(folder: &Folder, ucx: &str) -> (Server, Server) {
    let one = free_port();
    let owner = start(folder, one, None, "nixl", ucx);
    let (mut client, shm_name) = worker(&owner);
    store(&mut client, &shm_name);
    let reader = start(folder, free_port(), Some(one), "nixl", ucx);
    reader.line("peer has NIXL");
    (owner, reader)
}

fn a_prompt_is_read_over_nixl(ucx: &str) {
    if skipped() {
        return;
    }
    let folder = Folder::temporary();
    let (_owner, reader) = two_daemons(&folder, ucx);
    let (mut client, shm_name) = worker(&reader);
    let mut request = 0;
    lmc_testkit::until("the peer's chunks are found", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("request-{request}")) == CHUNKS as u64
    });
    let bytes = tier_bytes(&reader, "read");
    assert!(bytes > 0.0);
    assert_eq!(tier_bytes(&reader, "read_nixl"), bytes);
}

#[test]
fn a_prompt_is_read_over_nixl_by_tcp() {
    a_prompt_is_read_over_nixl(TCP);
}

#[test]
fn a_prompt_is_read_over_nixl_by_shared_memory() {
    a_prompt_is_read_over_nixl(SHARED_MEMORY);
}

#[test]
fn a_daemon_without_nixl_reads_over_sockets() {
    if skipped() {
        return;
    }
    let folder = Folder::temporary();
    let one = free_port();
    let owner = start(&folder, one, None, "nixl", TCP);
    let (mut client, shm_name) = worker(&owner);
    store(&mut client, &shm_name);
    let reader = start(&folder, free_port(), Some(one), "sockets", TCP);
    reader.line("peer connected");
    let (mut client, shm_name) = worker(&reader);
    let mut request = 0;
    lmc_testkit::until("the peer's chunks are found", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("request-{request}")) == CHUNKS as u64
    });
    assert!(tier_bytes(&reader, "read") > 0.0);
    assert_eq!(tier_bytes(&reader, "read_nixl"), 0.0);
}

/// The owner is killed or stopped at several moments of a read: before it, in it, after it. What
/// the reader's engine gets is right or missing, and the reader serves on.
fn an_owner_that_ends_in_a_read(signal: libc::c_int, ucx: &str) {
    if skipped() {
        return;
    }
    for delay in [0, 3, 10, 30] {
        let folder = Folder::temporary();
        let (owner, reader) = two_daemons(&folder, ucx);
        let (mut client, shm_name) = worker(&reader);
        let hits = thread::scope(|scope| {
            let reading = scope.spawn(|| retrieve(&mut client, &shm_name, "request"));
            // Not waited for: it is a moment at random.
            thread::sleep(Duration::from_millis(delay));
            owner.signal(signal);
            reading.join().expect("right bytes or none")
        });
        println!("{hits} of {CHUNKS} chunks after {delay} ms");
        let corrupt = "lmc_tier_events_total{tier=\"peers\",what=\"corrupt\"}";
        assert_eq!(reader.metric(corrupt), 0.0);
        // An owner that has gone cannot confirm it.
        if let Err(error) = client.ask(&Request::Clear { force: true }) {
            let text = error.to_string();
            assert!(
                text.contains("cleared here; not confirmed by peers"),
                "{text}"
            );
        }
        store(&mut client, &shm_name);
        assert_eq!(retrieve(&mut client, &shm_name, "again"), CHUNKS as u64);
    }
}

#[test]
fn an_owner_that_is_killed_in_a_read_costs_no_wrong_byte_by_tcp() {
    an_owner_that_ends_in_a_read(libc::SIGKILL, TCP);
}

#[test]
fn an_owner_that_is_killed_in_a_read_costs_no_wrong_byte_by_shared_memory() {
    an_owner_that_ends_in_a_read(libc::SIGKILL, SHARED_MEMORY);
}

#[test]
fn an_owner_that_is_stopped_in_a_read_costs_no_wrong_byte_by_tcp() {
    an_owner_that_ends_in_a_read(libc::SIGSTOP, TCP);
}

#[test]
fn an_owner_that_is_stopped_in_a_read_costs_no_wrong_byte_by_shared_memory() {
    an_owner_that_ends_in_a_read(libc::SIGSTOP, SHARED_MEMORY);
}

/// Copies of local engines go first.
#[test]
fn threads_that_serve_peers_over_nixl_are_nicer() {
    if skipped() {
        return;
    }
    let folder = Folder::temporary();
    let daemon = start(&folder, free_port(), None, "nixl", TCP);
    let tasks = format!("/proc/{}/task", daemon.process.id());
    let nice_of = |stat: &str| {
        let (_, fields) = stat.rsplit_once(") ")?;
        fields.split(' ').nth(16)?.parse::<i32>().ok()
    };
    let ours = std::fs::read_to_string("/proc/self/stat").expect("proc is mounted");
    let nicer = (nice_of(&ours).expect("a number") + 5).min(19);
    let mut seen = Vec::new();
    for task in std::fs::read_dir(tasks).expect("proc is mounted") {
        // A thread may end meanwhile.
        let Ok(stat) = std::fs::read_to_string(task.expect("an entry").path().join("stat")) else {
            continue;
        };
        let name = stat
            .split_once('(')
            .and_then(|(_, rest)| rest.rsplit_once(") "));
        let name = name.expect("a name").0.to_owned();
        if name.starts_with("lmc-nixl") {
            assert_eq!(nice_of(&stat), Some(nicer), "{stat}");
            seen.push(name);
        }
    }
    // UCX's progress thread has the name of the thread that started it.
    for name in ["lmc-nixl", "lmc-nixl-start"] {
        assert!(seen.iter().any(|one| one == name), "{seen:?}");
    }
}

#[test]
fn nixl_that_is_demanded_and_not_there_ends_the_start() {
    let folder = Folder::temporary();
    let key = folder.join("key");
    write_secret(&key, &"0123456789abcdef".repeat(4));
    let mut command = crate::common::lmc();
    command.args([
        "serve",
        "--port",
        "0",
        "--http-port",
        "0",
        "--l1-size-gb",
        "16MiB",
    ]);
    command.args(["--p2p-listen", "127.0.0.1:0", "--p2p-transport", "nixl"]);
    command.arg("--p2p-key").arg(&key);
    command.env("LMC_NIXL_LIBRARY", "/nowhere/libnixl_capi.so");
    let out = command.output().expect("the binary starts");
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success(), "{text}");
    for part in ["--p2p-transport nixl", "/nowhere/", "pip install nixl-cu12"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}
