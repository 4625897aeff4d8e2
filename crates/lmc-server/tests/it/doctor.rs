//! `lmc doctor` on the host that runs the tests.

use std::net::TcpListener;

use lmc_testkit::{Folder, free_port};
use serde_json::Value;

use crate::common::lmc;

/// Runs it with free ports and a small pool, where the flags say nothing else. Returns the exit code and
/// what it printed.
fn doctor(args: &[&str]) -> (Option<i32>, Value) {
    let mut command = lmc();
    command.args(["doctor", "--json"]).args(args);
    for flag in ["--port", "--http-port"] {
        if !args.contains(&flag) {
            command.args([flag, &free_port().to_string()]);
        }
    }
    if !args.contains(&"--l1-size-gb") {
        command.args(["--l1-size-gb", "16MiB"]);
    }
    let output = command.output().expect("the binary runs");
    let found = serde_json::from_slice(&output.stdout);
    (
        output.status.code(),
        found.unwrap_or_else(|error| panic!("{error}: {output:?}")),
    )
}

/// Returns verdict, state and remedy of the only check with a name.
fn check<'a>(found: &'a Value, name: &str) -> (&'a str, &'a str, &'a str) {
    let checks = found["checks"].as_array().expect("a list");
    let mut named = checks.iter().filter(|check| check["check"] == name);
    let check = named
        .next()
        .unwrap_or_else(|| panic!("no {name} in {found}"));
    let text = |key: &str| check[key].as_str().expect("a text");
    (text("verdict"), text("found"), text("remedy"))
}

#[test]
fn a_host_on_which_the_server_starts_has_no_problem() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let listens = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = listens.local_addr().expect("an address").to_string();
    // Paths of sockets are short.
    let run = Folder::temporary();
    let socket = run.join("lmc.sock");
    let (code, found) = doctor(&[
        "--disk",
        folder.text(),
        "--disk-create",
        "--disk-size",
        "64MiB",
        "--disk-keep-free",
        "0",
        "--p2p-listen",
        "127.0.0.1:0",
        "--p2p-peer",
        &peer,
        "--ipc-path",
        socket.to_str().expect("UTF-8"),
    ]);
    assert_eq!(
        (code, &found["problems"]),
        (Some(0), &Value::from(0)),
        "{found}"
    );
    for name in [
        "kernel",
        "memory",
        "/dev/shm",
        "memlock",
        "port",
        "http port",
        "socket",
        "peer",
    ] {
        assert_eq!(check(&found, name).0, "ok", "{found}");
    }
    // It has changed nothing.
    let left = std::fs::read_dir(&*folder).expect("the folder").count();
    assert_eq!(left, 0);
}

#[test]
fn each_problem_names_its_cause_and_the_change_that_helps() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let closed = free_port();
    let peer = format!("127.0.0.1:{closed}");
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    for (args, name, in_found, in_remedy) in [
        (
            &["--port", &port][..],
            "port",
            "is held by process",
            "--port",
        ),
        (
            &["--http-port", &port],
            "http port",
            "is held by",
            "--http-port",
        ),
        (
            &["--l1-size-gb", "4194304"],
            "/dev/shm",
            "4096 TiB",
            "--l1-size-gb",
        ),
        (
            &["--p2p-listen", "127.0.0.1:0", "--p2p-peer", &peer],
            "peer",
            "cannot be reached",
            "--p2p-listen",
        ),
        (
            &["--disk", folder.text()],
            "disk",
            "holds no drive",
            "--disk-create",
        ),
        (&["--disk", "/proc"], "disk", "/proc", ""),
        (
            &["--ipc-path", "/nonexistent/lmc.sock"],
            "socket",
            "/nonexistent",
            "folder",
        ),
        (&["--numa-node", "1023"], "NUMA", "1023", ""),
    ] {
        let (code, found) = doctor(args);
        let (verdict, state, remedy) = check(&found, name);
        assert_eq!((code, verdict), (Some(1), "problem"), "{args:?}: {found}");
        assert!(state.contains(in_found), "{args:?}: {state}");
        assert!(remedy.contains(in_remedy), "{args:?}: {remedy}");
    }
}

#[test]
fn a_drive_in_memory_is_a_warning() {
    let folder = Folder::inside("/dev/shm");
    let (code, found) = doctor(&["--disk", folder.text(), "--disk-create"]);
    assert_eq!(check(&found, "disk").0, "warning", "{found}");
    assert_eq!(code, Some(0), "{found}");
}

#[test]
fn settings_that_cannot_be_are_refused_as_the_server_does() {
    let refused = lmc().args(["doctor", "--disk-size", "1GiB"]).output();
    let refused = refused.expect("the binary runs");
    assert_eq!(refused.status.code(), Some(2));
    let mut table = lmc();
    table.args([
        "doctor",
        "--port",
        "0",
        "--http-port",
        "0",
        "--l1-size-gb",
        "16MiB",
    ]);
    let table = table.output();
    let table = String::from_utf8(table.expect("the binary runs").stdout).expect("UTF-8");
    assert!(table.contains("0 problems"), "{table}");
}
