//! `lmc doctor` on the host that runs the tests.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use lmc_testkit::{Folder, free_port, write_secret};
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

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tls")
        .join(name)
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
    let shared = Folder::temporary();
    let store = format!("file://{}", shared.text());
    let secrets = Folder::temporary();
    let [token, key] = ["token", "key"].map(|name| secrets.join(name));
    write_secret(&token, "0123456789abcdef\n");
    let text = fs::read_to_string(data("server.key")).expect("a key");
    write_secret(&key, &text);
    let metrics = free_port().to_string();
    let (code, found) = doctor(&[
        "--remote",
        &store,
        "--state-dir",
        run.text(),
        "--http-token-file",
        token.to_str().expect("UTF-8"),
        "--http-tls-cert",
        data("server.crt").to_str().expect("UTF-8"),
        "--http-tls-key",
        key.to_str().expect("UTF-8"),
        "--prometheus-port",
        &metrics,
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
        "metrics port",
        "socket",
        "HTTP files",
        "state folder",
        "peer",
        "store",
    ] {
        assert_eq!(check(&found, name).0, "ok", "{found}");
    }
    // It has changed nothing.
    for folder in [&folder, &run, &shared] {
        let left = fs::read_dir(&**folder).expect("the folder").count();
        assert_eq!(left, 0);
    }
}

#[test]
fn each_problem_names_its_cause_and_the_change_that_helps() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("an address").port().to_string();
    let closed = free_port();
    let peer = format!("127.0.0.1:{closed}");
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let redis = format!("redis://user:marked@127.0.0.1:{closed}");
    let token = folder.join("token");
    write_secret(&token, "short\n");
    let token = token.to_str().expect("UTF-8");
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
        (
            &["--prometheus-port", &port],
            "metrics port",
            "is held by",
            "--prometheus-port",
        ),
        (
            &["--state-dir", "/dev/null/a"],
            "state folder",
            "/dev/null/a",
            "--state-dir",
        ),
        (
            &["--http-token-file", token],
            "HTTP files",
            "--http-token-file",
            "",
        ),
        (
            &["--remote", "file:///nonexistent/lmc"],
            "store",
            "/nonexistent/lmc",
            "",
        ),
        (
            &["--remote", &redis],
            "store",
            "check that the store runs",
            "",
        ),
    ] {
        let (code, found) = doctor(args);
        let (verdict, state, remedy) = check(&found, name);
        assert_eq!((code, verdict), (Some(1), "problem"), "{args:?}: {found}");
        assert!(state.contains(in_found), "{args:?}: {state}");
        assert!(remedy.contains(in_remedy), "{args:?}: {remedy}");
        assert!(!found.to_string().contains("marked"), "{found}");
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
