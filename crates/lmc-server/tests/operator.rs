//! The operator's view of a real server: its log, its signals, `lmc status`.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{CacheKey, Client, ClientError, EngineDrivenContext, Reply, Request};

use common::{free_port, registration};

/// For everything that must happen soon, on a machine that is busy with other tests.
const DEADLINE: Duration = Duration::from_secs(20);
/// Above 2^53, which JSON's readers in JavaScript and jq round.
const ID: u64 = 275_782_994_765_433_869;
/// A false line of the log, and a command to a terminal.
const FORGED: &str = "\n2026-01-01T00:00:00.000000Z  WARN FORGED \u{1b}[2J\u{9b}2J";

/// A server whose log goes to a file.
struct Server {
    child: Child,
    log: PathBuf,
    port: u16,
    http: u16,
}

impl Server {
    fn start(args: &[&str]) -> Self {
        Self::start_after("", args)
    }

    /// One that a shell starts after these commands.
    fn start_after(commands: &str, args: &[&str]) -> Self {
        let (port, http) = (free_port(), free_port());
        let log = std::env::temp_dir().join(format!("lmc_operator_{port}.log"));
        let file = std::fs::File::create(&log).expect("a file");
        let child = Command::new("sh")
            .args(["-c", &format!("{commands} exec \"$0\" \"$@\"")])
            .arg(env!("CARGO_BIN_EXE_lmc"))
            .args(["serve", "--l1-size-gb", "16MiB"])
            .args([
                "--port",
                &port.to_string(),
                "--http-port",
                &http.to_string(),
            ])
            .args(args)
            .env_remove("LMC_CONFIG")
            .stderr(file)
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let server = Self {
            child,
            log,
            port,
            http,
        };
        server.wait_for_log("listening for engines");
        server
    }

    fn log(&self) -> String {
        String::from_utf8(std::fs::read(&self.log).expect("the log")).expect("UTF-8")
    }

    fn wait_for_log(&self, part: &str) {
        let deadline = Instant::now() + DEADLINE;
        while !self.log().contains(part) {
            assert!(Instant::now() < deadline, "no {part:?} in {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn client(&self) -> Client {
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        Client::connect(address, DEADLINE).expect("a connection")
    }

    /// The body of the answer to a request.
    fn ask(&self, method: &str, path: &str, body: &str) -> String {
        let (code, answer) = common::ask(self.http, method, path, body);
        assert_eq!(code, 200, "{answer}");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        body.to_owned()
    }

    fn wait_until_it_listens(&self) {
        let deadline = Instant::now() + DEADLINE;
        for port in [self.http, self.port] {
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                assert!(Instant::now() < deadline, "it does not listen");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }

    fn signal(&self, signal: libc::c_int) {
        self.signals(&[signal]);
    }

    /// Sends signals one right after the other.
    fn signals(&self, signals: &[libc::c_int]) {
        let pid = self.child.id();
        let kills: Vec<String> = signals.iter().map(|s| format!("kill -{s} {pid}")).collect();
        let told = Command::new("sh")
            .args(["-c", &kills.join(" && ")])
            .status();
        assert!(told.expect("sh is there").success());
    }

    /// A number of `/metrics`.
    fn metric(&self, name: &str) -> u64 {
        let page = self.ask("GET", "/metrics", "");
        let line = page.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {page}"));
        line.trim().parse().expect("a number")
    }

    fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "it does not end: {}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // In order, so that it removes its pool.
            self.signal(libc::SIGTERM);
        }
        let deadline = Instant::now() + DEADLINE;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(&self.log);
    }
}

/// A folder that is not there yet, and goes with this.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("lmc_operator_{name}_{}", std::process::id()));
        Self(path)
    }

    fn text(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }

    /// Flags of a server that writes there.
    fn flags(&self) -> [&str; 7] {
        [
            "--disk-create",
            "--disk",
            self.text(),
            "--disk-size",
            "256MiB",
            "--disk-keep-free",
            "0",
        ]
    }

    /// Chunks that `lmc disk inspect` finds.
    fn chunks(&self) -> u64 {
        let inspect = Command::new(env!("CARGO_BIN_EXE_lmc"))
            .args(["disk", "inspect", "--json", self.text()])
            .output()
            .expect("the binary runs");
        let found: serde_json::Value = serde_json::from_slice(&inspect.stdout)
            .unwrap_or_else(|error| panic!("{error}: {inspect:?}"));
        found["drives"][0]["chunks"]
            .as_u64()
            .unwrap_or_else(|| panic!("no chunks in {found}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// An engine's memory: four blocks of 256 tokens of one layer, which the server copies.
struct Engine {
    path: PathBuf,
    name: String,
}

impl Engine {
    const BYTES: usize = 4 * 256 * 4 * 4;

    fn new(port: u16) -> Self {
        let name = format!("lmcache_kv_operator_{port}");
        let path = PathBuf::from("/dev/shm").join(&name);
        std::fs::write(&path, vec![7; Self::BYTES]).expect("space in /dev/shm");
        Self { path, name }
    }

    /// Registers and stores `chunks` chunks.
    fn store(&self, client: &mut Client, chunks: u32) {
        let mut ask = |request: &Request| client.ask(request).expect("an answer");
        assert_eq!(ask(&self.registration("m")), Reply::None);
        let store = Request::Store {
            key: key("store", Some(0), 1, chunks),
            instance_id: ID,
            block_ids: vec![(1..=chunks).collect()],
        };
        assert_eq!(ask(&store), Reply::Transferred(true));
    }

    fn registration(&self, model_name: &str) -> Request {
        let name = format!("/{}", self.name);
        registration(ID, model_name, &name, ("float32", 4), [4, 256, 4])
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The key of `chunks` chunks of a prompt.
fn key(request_id: &str, worker_id: Option<u32>, prompt: u32, chunks: u32) -> CacheKey {
    CacheKey {
        model_name: "m".to_owned(),
        world_size: 1,
        worker_id,
        token_ids: (0..256 * chunks).map(|token| prompt + token).collect(),
        start: 0,
        end: u64::from(256 * chunks),
        request_id: request_id.to_owned(),
        cache_salt: String::new(),
        num_kv_readers: 1,
    }
}

/// Until f2c35f9 a model's name, and a request's id, which the users of an engine choose, wrote
/// whole lines of their own into the log, and commands to the terminal that showed it.
#[test]
fn no_name_from_outside_writes_a_line_of_the_log() {
    for format in ["text", "json"] {
        let mut server = Server::start(&["--log-format", format]);
        let mut client = server.client();
        let engine = Engine::new(server.port);
        let hostile = client.ask(&engine.registration(&format!("m{FORGED}")));
        assert!(
            matches!(hostile, Err(ClientError::Refused { .. })),
            "{hostile:?}"
        );
        let mut ask = |request: &Request| client.ask(request).expect("an answer");
        server.wait_for_log("registration refused");
        assert_eq!(ask(&engine.registration("m")), Reply::None);
        // One block is too few for two chunks, which is a warning that names the request.
        let store = Request::Store {
            key: key(&format!("request{FORGED}"), Some(0), 1, 2),
            instance_id: ID,
            block_ids: vec![vec![2]],
        };
        let deadline = Instant::now() + DEADLINE;
        while !server.log().contains("store of request") {
            assert_eq!(ask(&store), Reply::Transferred(false));
            assert!(Instant::now() < deadline, "{}", server.log());
            std::thread::sleep(Duration::from_millis(100));
        }
        server.ask(
            "PUT",
            "/quota/salt%0A2026-01-01T%1B%5B2J%C2%9B2J",
            "{\"limit_gb\": 1}",
        );
        server.wait_for_log("quota set");
        server.signal(libc::SIGTERM);
        assert_eq!(server.wait().code(), Some(0));
        let log = server.log();
        for line in log.lines() {
            assert!(!line.contains(char::is_control), "{line:?}");
            match format {
                "text" => assert!(!line.starts_with("2026-01-01"), "{log}"),
                _ => {
                    let event: serde_json::Value = serde_json::from_str(line).expect(line);
                    let at = event["timestamp"].as_str().expect("a time");
                    assert!(!at.starts_with("2026-01-01"), "{line}");
                }
            }
        }
        assert!(log.contains("FORGED"), "the request's id is not in {log}");
    }
}

/// Until f2c35f9 a lost ssh session, or `kill -HUP` to reload, killed the server on the spot, with
/// all that was to be written back.
#[test]
fn a_hang_up_stops_in_order_and_writes_back() {
    let folder = Folder::new("hang_up");
    let flags = [folder.flags().as_slice(), &["--disk-write", "back"]].concat();
    let mut server = Server::start(&flags);
    let engine = Engine::new(server.port);
    let mut client = server.client();
    engine.store(&mut client, 3);
    // Log rotation, for many daemons.
    server.signals(&[libc::SIGUSR1, libc::SIGUSR2]);
    server.wait_for_log("SIGUSR2");
    assert_eq!(
        client.ask(&Request::Noop).expect("an answer"),
        Reply::Text("OK".to_owned())
    );
    server.signal(libc::SIGHUP);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    assert!(
        server.log().contains("stopping after SIGHUP"),
        "{}",
        server.log()
    );
    assert_eq!(folder.chunks(), 3);
}

/// coreutils' `timeout` sends SIGTERM twice, a closed terminal SIGHUP: the second one skipped the
/// write-back until f2c35f9.
#[test]
fn signals_that_come_together_are_one() {
    let folder = Folder::new("together");
    let flags = [folder.flags().as_slice(), &["--disk-write", "back"]].concat();
    let mut server = Server::start(&flags);
    let engine = Engine::new(server.port);
    engine.store(&mut server.client(), 3);
    server.signals(&[libc::SIGTERM, libc::SIGHUP, libc::SIGTERM, libc::SIGINT]);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    assert_eq!(folder.chunks(), 3);
}

#[test]
fn a_second_signal_stops_at_once_and_says_what_is_not_written() {
    let folder = Folder::new("second");
    let flags = [folder.flags().as_slice(), &["--disk-write", "back"]].concat();
    let mut server = Server::start(&flags);
    let engine = Engine::new(server.port);
    engine.store(&mut server.client(), 3);
    // A request whose body does not come holds the stop up for ten seconds.
    let mut slow = TcpStream::connect(("127.0.0.1", server.http)).expect("a connection");
    let head = "POST /cache/clear HTTP/1.1\r\nhost: 127.0.0.1\r\nexpect: 100-continue\r\n\
                content-type: application/json\r\ncontent-length: 100\r\n\r\n";
    slow.write_all(head.as_bytes()).expect("a request");
    let mut begun = [0; 12];
    slow.set_read_timeout(Some(DEADLINE)).expect("a timeout");
    slow.read_exact(&mut begun).expect("it waits for the body");
    assert_eq!(&begun, b"HTTP/1.1 100");
    server.signal(libc::SIGTERM);
    server.wait_for_log("stopping after SIGTERM");
    // What comes within a second belongs to the first.
    std::thread::sleep(Duration::from_millis(1200));
    // Nor does a terminal that closes meanwhile make it hurry.
    server.signal(libc::SIGHUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(
        matches!(server.child.try_wait(), Ok(None)),
        "{}",
        server.log()
    );
    server.signal(libc::SIGINT);
    assert_eq!(server.wait().code(), Some(1), "{}", server.log());
    assert!(
        server.log().contains("unwritten_bytes=12288"),
        "{}",
        server.log()
    );
}

#[test]
fn a_server_under_nohup_outlives_its_session() {
    let mut server = Server::start_after("trap '' HUP;", &[]);
    server.signals(&[libc::SIGHUP, libc::SIGUSR1]);
    server.wait_for_log("SIGUSR1");
    assert!(server.ask("GET", "/healthz", "").contains("ok"));
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
}

/// Until 8bf0141 a stop waited for the rest of the request until its deadline, and ended with 1.
#[test]
fn a_half_request_does_not_hold_up_the_stop() {
    let mut server = Server::start(&[]);
    let mut half = TcpStream::connect(("127.0.0.1", server.http)).expect("a connection");
    write!(half, "GET /healthz HTTP/1.1\r\nhost: local").expect("half of a request");
    // It is accepted after the other one.
    assert!(server.ask("GET", "/healthz", "").contains("ok"));
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0), "{}", server.log());
    drop(half);
}

/// A server whose log goes into a pipe.
fn with_piped_stderr() -> (Server, ChildStderr) {
    let (port, http) = (free_port(), free_port());
    let mut child = Command::new(env!("CARGO_BIN_EXE_lmc"))
        .args(["serve", "--l1-size-gb", "16MiB"])
        .args([
            "--port",
            &port.to_string(),
            "--http-port",
            &http.to_string(),
        ])
        .env_remove("LMC_CONFIG")
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let stderr = child.stderr.take().expect("it is piped");
    let server = Server {
        child,
        log: std::env::temp_dir().join(format!("lmc_operator_{port}.log")),
        port,
        http,
    };
    std::fs::write(&server.log, "").expect("a file");
    (server, stderr)
}

/// Each event of the log was a panic until f2c35f9 where stderr was gone: a closed terminal, a pipe
/// whose reader had ended.
#[test]
fn a_server_whose_stderr_is_gone_serves_on_and_stops_in_order() {
    let (mut server, stderr) = with_piped_stderr();
    drop(stderr);
    server.wait_until_it_listens();
    // Each of these is an event of the log.
    server.ask("POST", "/cache/clear", "{}");
    server.ask("PUT", "/quota/a", "{\"limit_gb\": 1}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
}

/// Until 8bf0141 the threads that answer engines wrote the log themselves: a pipe without a reader
/// stopped `/healthz` and every engine, and SIGTERM.
#[test]
fn a_server_whose_stderr_is_not_read_serves_on_and_stops_in_order() {
    let (mut server, mut stderr) = with_piped_stderr();
    server.wait_until_it_listens();
    let mut client = server.client();
    // Each of these is an event of the log, of half a kilobyte.
    let path = format!("/quota/{}", "%F0%9F%98%80".repeat(128));
    let deadline = Instant::now() + 3 * DEADLINE;
    while server.metric("lmc_log_lines_dropped_total ") == 0 {
        assert!(Instant::now() < deadline, "no line is dropped");
        for _ in 0..100 {
            server.ask("PUT", &path, "{\"limit_gb\": 1}");
        }
    }
    let noop = client.ask(&Request::Noop);
    assert!(noop.is_ok(), "engines are answered: {noop:?}");
    assert!(server.ask("GET", "/healthz", "").contains("ok"));
    let status = server.ask("GET", "/status", "");
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    assert!(status["lmc"]["log_lines_dropped"].as_u64() > Some(0));
    server.signal(libc::SIGTERM);
    assert_eq!(server.wait().code(), Some(0));
    let mut log = String::new();
    stderr
        .read_to_string(&mut log)
        .expect("what the pipe holds");
    assert!(log.contains("listening for engines"), "{log}");
}

/// Until f2c35f9 all hits were counted as hits in memory, ids lost their last digits in JSON's
/// readers, and `/status` carried a hundred numbers for each operation.
#[test]
fn disk_hits_are_disk_hits_and_ids_are_whole() {
    let folder = Folder::new("hits");
    let server = Server::start(&folder.flags());
    let engine = Engine::new(server.port);
    let mut client = server.client();
    engine.store(&mut client, 3);
    let deadline = Instant::now() + DEADLINE;
    while server.metric("lmc_tier_chunks{tier=\"disk\"} ") != 3 {
        assert!(Instant::now() < deadline, "not all goes down");
        std::thread::sleep(Duration::from_millis(10));
    }
    server.ask(
        "POST",
        "/cache/clear",
        "{\"tier\": \"l1\", \"force\": true}",
    );
    let mut lookup = |request_id: &str| {
        let asked = client.ask(&Request::Lookup(key(request_id, None, 1, 3)));
        assert_eq!(asked.expect("an answer"), Reply::None);
        let request_id = request_id.to_owned();
        let wait = Request::WaitPrefetchStatus {
            request_id,
            timeout: 10.0,
        };
        assert_eq!(client.ask(&wait).expect("an answer"), Reply::Int(3));
        ["", "_l1", "_l2"]
            .map(|tier| server.metric(&format!("lmcache_mp_lookup_hit{tier}_tokens_total ")))
    };
    assert_eq!(lookup("from disk"), [768, 0, 768]);
    assert_eq!(lookup("from memory"), [1536, 768, 768]);
    assert_eq!(server.metric("lmcache_mp_l1_write_chunks_total "), 6);

    let status = |path: &str| -> serde_json::Value {
        serde_json::from_str(&server.ask("GET", path, "")).expect("JSON")
    };
    let brief = status("/status");
    assert_eq!(brief["status"], "ok");
    assert_eq!(brief["lmc"]["instances"][0]["instance_id"], ID.to_string());
    assert_eq!(brief["registered_gpu_ids"][0], ID.to_string());
    let context = &brief["cache_context_meta"][ID.to_string()];
    assert_eq!(
        context["kv_cache_layout"]["kernel_groups"][0]["is_mla"],
        true
    );
    whole(&brief, "/status");
    let of = |status: &serde_json::Value| -> serde_json::Value {
        let operations = status["lmc"]["operations"].as_array().expect("a list");
        let store = operations
            .iter()
            .find(|operation| operation["operation"] == "store");
        store.expect("an operation").clone()
    };
    assert_eq!(of(&brief)["answered"], 1);
    assert!(of(&brief)["p50_seconds"].as_f64() > Some(0.0));
    assert_eq!(of(&brief)["buckets"], serde_json::Value::Null);
    let full = of(&status("/status?full=1"));
    let buckets = full["buckets"].as_array().expect("a list");
    let count = |bucket: &serde_json::Value| bucket["count"].as_u64().expect("a count");
    assert_eq!(buckets.iter().map(count).sum::<u64>(), 1);
}

/// No number is one that a reader of floating-point numbers rounds.
fn whole(value: &serde_json::Value, at: &str) {
    match value {
        serde_json::Value::Object(fields) => {
            fields
                .iter()
                .for_each(|(name, value)| whole(value, &format!("{at}/{name}")));
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| whole(value, at)),
        value => assert!(value.as_u64().is_none_or(|n| n < 1 << 53), "{at}: {value}"),
    }
}

/// Until f2c35f9 an engine whose registration was refused was a counter and nothing else.
#[test]
fn a_refused_registration_is_a_line_of_the_log() {
    let server = Server::start(&["--log-format", "json"]);
    let mut client = server.client();
    let engine = Engine::new(server.port);
    let mut registration = engine.registration("big-model");
    let Request::RegisterKvCache(body) = &mut registration else {
        unreachable!("it is one");
    };
    // No divisor of the chunk size.
    body.groups[0].tokens_per_block = 7;
    assert!(matches!(
        client.ask(&registration),
        Err(ClientError::Refused { .. })
    ));
    server.wait_for_log("registration refused");
    let log = server.log();
    let line = log
        .lines()
        .find(|line| line.contains("registration refused"));
    let event: serde_json::Value = serde_json::from_str(line.expect("a line")).expect("JSON");
    assert_eq!(event["level"], "WARN");
    let fields = &event["fields"];
    assert_eq!(
        (&fields["model"], &fields["instance"]),
        (&"big-model".into(), &ID.into())
    );
    assert!(
        fields["peer"]
            .as_str()
            .is_some_and(|peer| peer.starts_with("127.0.0.1:")),
        "{event}"
    );
    let message = fields["message"].as_str().expect("a text");
    assert!(message.contains("--chunk-size"), "{message}");
}

/// Until f2c35f9 the log said nothing when a worker's connection ended, and of its worker later
/// that it had been silent for too long.
#[test]
fn the_end_of_a_workers_connection_is_logged_and_is_the_reason_of_its_removal() {
    let server = Server::start(&["--worker-orphan-grace-seconds", "1"]);
    let engine = Engine::new(server.port);
    let mut client = server.client();
    let registered = client.ask(&engine.registration("m"));
    assert_eq!(registered.expect("an answer"), Reply::None);
    drop(client);
    server.wait_for_log("worker's connection ended");
    server.wait_for_log("worker removed");
    assert!(!server.log().contains("silent"), "{}", server.log());
}

/// Until f2c35f9 `lmcache describe kvcache` said `MLA: True` for a Llama whose engine packs K and V
/// into one plane. The registration says the same of both, so the server says nothing.
#[test]
fn one_plane_is_not_taken_for_latent_attention() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let mut is_mla = |instance_id: u64, use_mla: bool| {
        let registered = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id,
            model_name: "llama".to_owned(),
            world_size: 1,
            block_size: 16,
            num_layers: 4,
            hidden_dim_size: 256,
            dtype: "bfloat16".to_owned(),
            use_mla,
            num_physical_slots: None,
        }));
        assert!(
            matches!(registered, Ok(Reply::Registered { .. })),
            "{registered:?}"
        );
        let status = server.ask("GET", "/status", "");
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let layout = &status["cache_context_meta"][instance_id.to_string()]["kv_cache_layout"];
        assert_eq!(layout["num_layers"], 4);
        layout["kernel_groups"][0].get("is_mla").cloned()
    };
    assert_eq!(is_mla(1, false), Some(false.into()));
    assert_eq!(is_mla(2, true), None);
}
