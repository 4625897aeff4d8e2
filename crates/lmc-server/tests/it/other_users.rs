//! Other users of the host, against the real binary.

use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use lmc_testkit::{DEADLINE, Folder, is_root, test_arguments};
use lmc_vllm_adapter::{Client, Reply, Request};

use crate::common::{Server, ask};

/// A user that is not root.
const STRANGER: &str = "65534";
const PORTS: &str = "LMC_TEST_STRANGER_PORTS";
const EXPECTED: &str = "LMC_TEST_STRANGER_EXPECTED";
const SOCKET: &str = "LMC_TEST_STRANGER_SOCKET";

/// Runs [`stranger`] in a process of another user.
fn visited_by_stranger(server: &Server, socket: &Path, expected: &str) {
    let folder = open_folder();
    let program = folder.join("test");
    // The folder that cargo builds in may be closed to others.
    fs::copy(std::env::current_exe().expect("a path"), &program).expect("space");
    let output = Command::new("setpriv")
        .args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"])
        .arg(&program)
        .args(test_arguments(stranger))
        .env(PORTS, format!("{},{}", server.port, server.http))
        .env(EXPECTED, expected)
        .env(SOCKET, socket)
        .current_dir("/")
        .output()
        .expect("util-linux is there");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{out}");
}

/// Returns a folder that other users can enter, for the server's Unix socket.
fn open_folder() -> Folder {
    let folder = Folder::temporary();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    folder
}

/// Asks for the pool over the Unix socket.
fn pool(socket: &Path) -> Option<OwnedFd> {
    let mut client = Client::connect_unix(socket, DEADLINE).ok()?;
    client.ask(&Request::PoolDescriptor).ok()?;
    client.take_descriptor()
}

fn noop(port: u16) -> Option<Reply> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut client = Client::connect(address, DEADLINE).ok()?;
    client.ask(&Request::Noop).ok()
}

/// The process of the other user. Does nothing when the test suite runs it.
#[test]
fn stranger() {
    let Ok(ports) = std::env::var(PORTS) else {
        return;
    };
    let (port, http) = ports.split_once(',').expect("two ports");
    let (port, http) = (port.parse().expect("a port"), http.parse().expect("a port"));
    let trusted = std::env::var(EXPECTED).expect("it is set") == "trusted";
    assert_eq!(noop(port).is_some(), trusted);
    let socket = std::env::var_os(SOCKET).expect("it is set");
    let pool = pool(Path::new(&socket));
    assert_eq!(pool.is_some(), trusted);
    if let Some(pool) = pool {
        let len = fs::File::from(pool).metadata().expect("it is open").len();
        assert_eq!(len, 16 << 20);
    }
    for (method, path, body) in [
        ("PUT", "/quota/tenant", "{\"limit_gb\": 0}"),
        ("DELETE", "/quota/tenant", ""),
        ("POST", "/cache/clear", "{\"force\": true}"),
    ] {
        let (code, answer) = ask(http, method, path, body);
        assert_eq!(code, if trusted { 200 } else { 403 }, "{method} {path}");
        assert_eq!(answer.contains("--trusted-users"), !trusted, "{answer}");
    }
    for path in ["/metrics", "/healthz", "/quota/tenant"] {
        assert_eq!(ask(http, "GET", path, "").0, 200, "{path}");
    }
}

/// Until 8bf0141 every user of the host could commit slots that it had not written, which engines
/// of the server's user then hit with the bytes of others, and could clear the cache.
#[test]
fn another_user_of_the_host_is_refused() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = open_folder();
    let socket = folder.join("lmc.sock");
    let server = Server::start(&["--ipc-path", socket.to_str().expect("text")]);
    assert_eq!(
        ask(server.http, "PUT", "/quota/tenant", "{\"limit_gb\": 7}").0,
        200
    );
    visited_by_stranger(&server, &socket, "refused");
    // Also where the socket's mode lets it connect, as where others are trusted.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("it is ours");
    visited_by_stranger(&server, &socket, "refused");
    server.line("uid 65534 of this host is not trusted");
    let (_, quota) = ask(server.http, "GET", "/quota/tenant", "");
    assert!(quota.contains("\"limit_gb\":7"), "{quota}");
    let (_, metrics) = ask(server.http, "GET", "/metrics", "");
    assert!(
        metrics.contains("lmc_connections_untrusted_total 3\n"),
        "{metrics}"
    );
    assert!(noop(server.port).is_some(), "its own user is served");
    assert!(pool(&socket).is_some());
}

#[test]
fn a_user_that_is_named_is_served() {
    if !is_root() {
        return println!("skipped: not root");
    }
    for users in [STRANGER, "all"] {
        let folder = open_folder();
        let socket = folder.join("lmc.sock");
        let path = socket.to_str().expect("text");
        let server = Server::start(&["--trusted-users", users, "--ipc-path", path]);
        visited_by_stranger(&server, &socket, "trusted");
    }
}
