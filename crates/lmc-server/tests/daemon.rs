//! The real binary: start, stop, kill, start again, and two at a time.

mod common;
#[path = "../../lmc-memory/tests/common/mod.rs"]
mod own_shm;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{CacheKey, Client, Operation, Reply, Request};

use common::{free_port, registration, segment};

/// For everything that must happen soon, on a machine that is busy with other tests.
const DEADLINE: Duration = Duration::from_secs(20);

struct Daemon {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Daemon {
    fn spawn(args: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lmc"))
            .arg("serve")
            .args(args)
            .env_remove("LMC_CONFIG")
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let stderr = child.stderr.take().expect("it is piped");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            lines,
            seen: Vec::new(),
        }
    }

    /// One that listens, with a small pool named for its port.
    fn start(port: u16, http: u16) -> Self {
        let mut daemon = Self::spawn(&[
            "--port",
            &port.to_string(),
            "--http-port",
            &http.to_string(),
            "--l1-size-gb",
            "16MiB",
        ]);
        daemon.line("listening for engines");
        daemon
    }

    /// Waits for a line of the log that holds `part`.
    fn line(&mut self, part: &str) -> String {
        if let Some(line) = self.seen.iter().find(|line| line.contains(part)) {
            return line.clone();
        }
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(error) => panic!("no line with {part:?} ({error}); the log: {:#?}", self.seen),
            }
        }
    }

    fn signal(&self, signal: libc::c_int) {
        common::signal(&self.child, signal);
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(
                Instant::now() < deadline,
                "it does not end; the log: {:#?}",
                self.seen
            );
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // A killed server leaves its pool behind, for its successor to reclaim.
        let owner = format!("pid {}", self.child.id());
        for entry in std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten()
        {
            let path = entry.path();
            let of_ours = path.extension().is_some_and(|kind| kind == "lmc-owner")
                && std::fs::read_to_string(&path).is_ok_and(|text| text.trim() == owner);
            if of_ours {
                let _ = std::fs::remove_file(path.with_extension(""));
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

fn get(http: u16, path: &str) -> String {
    let mut stream = TcpStream::connect(("127.0.0.1", http)).expect("a connection");
    stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    )
    .expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

fn engines(port: u16) -> Client {
    Client::connect(SocketAddr::from(([127, 0, 0, 1], port)), DEADLINE).expect("a connection")
}

fn segment_exists(port: u16) -> bool {
    segment(port).is_some()
}

#[test]
fn it_listens_at_once_and_stops_clean_on_sigterm() {
    let (port, http) = (free_port(), free_port());
    let asked = Instant::now();
    let mut daemon = Daemon::start(port, http);
    assert!(asked.elapsed() < DEADLINE, "it must listen soon");
    assert!(daemon.line("pool: 16.0 MiB").contains("in shared memory"));
    assert!(get(http, "/healthz").starts_with("HTTP/1.1 200"));
    let mut client = engines(port);
    let answer = client.ask(&Request::Noop).expect("an answer");
    assert_eq!(answer, Reply::Text("OK".to_owned()));
    assert!(segment_exists(port));
    // An open connection of an engine must not hold the stop up.
    let asked = Instant::now();
    daemon.signal(libc::SIGTERM);
    assert_eq!(daemon.wait().code(), Some(0), "the log: {:#?}", daemon.seen);
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "took {:?}",
        asked.elapsed()
    );
    daemon.line("stopping after SIGTERM");
    assert!(!segment_exists(port), "the pool outlived its server");
    drop(client);
}

#[test]
fn a_killed_server_leaves_nothing_in_the_way_of_the_next() {
    let test = "a_killed_server_leaves_nothing_in_the_way_of_the_next";
    own_shm::with_own_shm("size=64m", test, || {
        let (port, http) = (free_port(), free_port());
        let mut first = Daemon::start(port, http);
        first.signal(libc::SIGKILL);
        first.wait();
        assert!(segment_exists(port), "no process could have removed it");
        let mut second = Daemon::start(port, http);
        let line = second.line("reclaimed");
        assert!(
            line.contains(&format!("pid {}", first.child.id())),
            "{line}"
        );
        assert!(get(http, "/healthz").starts_with("HTTP/1.1 200"));
        second.signal(libc::SIGINT);
        assert_eq!(second.wait().code(), Some(0));
        assert!(!segment_exists(port));
    });
}

#[test]
fn a_second_server_says_who_is_in_the_way() {
    let (port, http) = (free_port(), free_port());
    let first = Daemon::start(port, http);
    let pid = first.child.id().to_string();
    let own = free_port().to_string();
    let check = |args: &[&str], parts: &[&str]| {
        let mut second = Daemon::spawn(&[args, &["--l1-size-gb", "16MiB"]].concat());
        let line = second.line("is held by");
        assert_eq!(second.wait().code(), Some(1));
        for part in parts.iter().chain(&[pid.as_str(), "serve"]) {
            assert!(line.contains(part), "{line:?} lacks {part:?}");
        }
    };
    let first_port = port;
    let (port, http) = (port.to_string(), http.to_string());
    let segment = segment(first_port).expect("the pool's name");
    let segment = segment.file_name().and_then(|name| name.to_str());
    let segment = segment.expect("an ASCII name");
    check(&["--port", &port, "--http-port", &own], &[&port, "--port"]);
    check(
        &["--port", &own, "--http-port", &http],
        &[&http, "--http-port"],
    );
    check(
        &["--port", &own, "--http-port", "0", "--shm-name", segment],
        &["the pool", segment],
    );
    assert!(
        get(http.parse().expect("a port"), "/healthz").starts_with("HTTP/1.1 200"),
        "the first server goes on"
    );
}

#[test]
fn two_servers_on_ports_of_the_systems_choice_do_not_meet() {
    let start = || {
        let mut daemon =
            Daemon::spawn(&["--port", "0", "--http-port", "0", "--l1-size-gb", "16MiB"]);
        daemon.line("listening for engines");
        daemon
    };
    let (mut one, mut two) = (start(), start());
    for daemon in [&mut one, &mut two] {
        daemon.signal(libc::SIGTERM);
        assert_eq!(daemon.wait().code(), Some(0));
    }
}

#[test]
fn a_wrong_command_line_ends_with_its_reason_and_code_2() {
    let check = |args: &[&str], part: &str| {
        let mut daemon = Daemon::spawn(args);
        assert_eq!(daemon.wait().code(), Some(2), "{args:?}");
        daemon.line(part);
    };
    check(&["--prot", "1"], "'--port'");
    check(&["--port", "x"], "expected a port number");
    // Once the name of a module that logs nothing, so that the server said nothing either.
    check(&["--log-level", "inof"], "did you mean info?");
    check(&["--l2-adapter", "{}"], "--disk-size");
    check(&["--transport", "grpc"], "ZeroMQ only");
    check(&["--config", "/nowhere.toml"], "cannot be read");
    check(&["--eviction-policy", "IsolatedLRU"], "--quota");
}

#[test]
fn what_is_asked_for_and_cannot_be_had_ends_with_a_remedy() {
    let mut daemon = Daemon::spawn(&["--port", "0", "--http-port", "0", "--l1-size-gb", "30TiB"]);
    daemon.line("make the pool smaller");
    assert_eq!(daemon.wait().code(), Some(1));
    let mut daemon = Daemon::spawn(&["--port", "0", "--http-port", "0", "--numa-node", "63"]);
    daemon.line("NUMA node 63");
    assert_eq!(daemon.wait().code(), Some(1));
}

#[test]
fn the_tools_ask_a_running_server() {
    let (port, http) = (free_port(), free_port());
    let _daemon = Daemon::start(port, http);
    let url = format!("http://127.0.0.1:{http}");
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_lmc"))
            .args(args)
            .env("LMC_URL", &url)
            .output()
            .expect("the binary runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{args:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    };
    let table = run(&["status"]);
    for part in ["healthy", "16.0 MiB", "no workers are registered"] {
        assert!(table.contains(part), "{table} lacks {part:?}");
    }
    let status: serde_json::Value =
        serde_json::from_str(&run(&["status", "--json"])).expect("JSON");
    assert_eq!(status["lmc"]["usage"]["pool_bytes"], 16 << 20);
    assert!(run(&["clear"]).contains("cleared 0 chunks"));
    let printed = run(&["serve", "--print-config", "--chunk-size", "64"]);
    assert!(printed.contains("chunk_size = 64"), "{printed}");
    let nobody = Command::new(env!("CARGO_BIN_EXE_lmc"))
        .args(["status", "--url", "http://127.0.0.1:1"])
        .output()
        .expect("the binary runs");
    assert_eq!(nobody.status.code(), Some(1));
    let text = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(text.contains("is `lmc serve` running"), "{text}");
}

/// Registers an engine of one layer `[blocks, tokens, size]` whose memory the server copies.
fn register_memory(client: &mut Client, shm_name: &str) {
    let name = format!("/{shm_name}");
    let registered = client.ask(&registration(1, "m", &name, ("float32", 4), [4, 256, 4]));
    assert_eq!(registered.expect("an answer"), Reply::None);
}

#[test]
fn a_server_that_stood_still_makes_no_copy_that_was_asked_for_before() {
    let (port, http) = (free_port(), free_port());
    let daemon = Daemon::start(port, http);
    let mut client = engines(port);
    let memory = format!("lmcache_kv_daemon_{}", std::process::id());
    let path = Path::new("/dev/shm").join(&memory);
    std::fs::write(&path, vec![1; 4 * 256 * 4 * 4]).expect("room in /dev/shm");
    register_memory(&mut client, &memory);
    let store = |request_id: &str| Request::Store {
        key: CacheKey {
            model_name: "m".to_owned(),
            world_size: 1,
            worker_id: Some(0),
            token_ids: (0..256).collect(),
            start: 0,
            end: 256,
            request_id: request_id.to_owned(),
            cache_salt: String::new(),
            num_kv_readers: 1,
        },
        instance_id: 1,
        block_ids: vec![vec![2]],
    };
    common::stop(&daemon.child);
    let uid = client.send(&store("before")).expect("sent");
    // Longer than the server thinks that the worker waits with patience.
    std::thread::sleep(Duration::from_millis(5500));
    daemon.signal(libc::SIGCONT);
    let reply = client.receive(uid, Operation::Store).expect("an answer");
    assert_eq!(reply, Reply::Transferred(false));
    let deadline = Instant::now() + DEADLINE;
    while client.ask(&store("after")).expect("an answer") != Reply::Transferred(true) {
        assert!(Instant::now() < deadline, "it never goes on");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::fs::remove_file(&path).expect("it is ours");
}
