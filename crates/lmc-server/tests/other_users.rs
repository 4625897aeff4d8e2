//! Other users of the host, against the real binary.

mod common;

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{ask, free_port};
use lmc_vllm_adapter::{Client, Reply, Request};

/// For everything that must happen soon, on a machine that is busy with other tests.
const DEADLINE: Duration = Duration::from_secs(20);
/// A user that is not root.
const STRANGER: &str = "65534";
const PORTS: &str = "LMC_TEST_STRANGER_PORTS";
const EXPECTED: &str = "LMC_TEST_STRANGER_EXPECTED";

/// A folder that every user can read.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

struct Server {
    child: Child,
    folder: Folder,
    port: u16,
    http: u16,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        let (port, http) = (free_port(), free_port());
        let folder = Folder(std::env::temp_dir().join(format!("lmc_other_users_{port}")));
        fs::create_dir(&folder.0).expect("a folder");
        let readable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&folder.0, readable).expect("it is ours");
        let log = fs::File::create(folder.0.join("log")).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_lmc"))
            .args(["serve", "--l1-size-gb", "16MiB"])
            .args(["--port", &port.to_string()])
            .args(["--http-port", &http.to_string()])
            .args(args)
            .env_remove("LMC_CONFIG")
            .stderr(log)
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let server = Self {
            child,
            folder,
            port,
            http,
        };
        server.wait_for_log("listening for engines");
        server
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.0.join("log")).expect("the log")
    }

    fn wait_for_log(&self, part: &str) {
        let deadline = Instant::now() + DEADLINE;
        while !self.log().contains(part) {
            assert!(Instant::now() < deadline, "no {part:?} in {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Runs [`stranger`] in a process of another user.
    fn visited_by_stranger(&self, expected: &str) {
        let program = self.folder.0.join("test");
        // The folder that cargo builds in may be closed to others.
        fs::copy(std::env::current_exe().expect("a path"), &program).expect("space");
        let output = Command::new("setpriv")
            .args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"])
            .arg(&program)
            .args(["--exact", "stranger", "--nocapture"])
            .env(PORTS, format!("{},{}", self.port, self.http))
            .env(EXPECTED, expected)
            .current_dir("/")
            .output()
            .expect("util-linux is there");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{out}{err}{}", self.log());
        assert!(out.contains("1 passed"), "{out}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        common::remove_segment(self.port);
    }
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

fn is_root() -> bool {
    fs::metadata(Path::new("/proc/self")).is_ok_and(|process| process.uid() == 0)
}

/// Until 8bf0141 every user of the host could commit slots that it had not written, which engines
/// of the server's user then hit with the bytes of others, and could clear the cache.
#[test]
fn another_user_of_the_host_is_refused() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let server = Server::start(&[]);
    assert_eq!(
        ask(server.http, "PUT", "/quota/tenant", "{\"limit_gb\": 7}").0,
        200
    );
    server.visited_by_stranger("refused");
    server.wait_for_log("uid 65534 of this host is not trusted");
    let (_, quota) = ask(server.http, "GET", "/quota/tenant", "");
    assert!(quota.contains("\"limit_gb\":7"), "{quota}");
    let (_, metrics) = ask(server.http, "GET", "/metrics", "");
    assert!(
        metrics.contains("lmc_connections_untrusted_total 1\n"),
        "{metrics}"
    );
    assert!(noop(server.port).is_some(), "its own user is served");
}

#[test]
fn a_user_that_is_named_is_served() {
    if !is_root() {
        return println!("skipped: not root");
    }
    for users in [STRANGER, "all"] {
        let server = Server::start(&["--trusted-users", users]);
        server.visited_by_stranger("trusted");
    }
}
