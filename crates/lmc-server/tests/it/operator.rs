//! The operator's view of a real server: its log, its signals, `lmc status`.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use lmc_testkit::{DEADLINE, Folder, until};
use lmc_vllm_adapter::{
    CacheKey, Client, ClientError, ConfigValue, EngineDrivenContext, Reply, Request, UnknownFields,
};
use rustix::pty::{self, OpenptFlags};

use crate::common::prompt::worker;
use crate::common::{Server, drive_flags, lmc, registration};

/// Above 2^53, which JSON's readers in JavaScript and jq round.
const ID: u64 = 275_782_994_765_433_869;
/// A false line of the log, and a command to a terminal.
const FORGED: &str = "\n2026-01-01T00:00:00.000000Z  WARN FORGED \u{1b}[2J\u{9b}2J";

/// Returns the body of the answer to a request.
fn ask(server: &Server, method: &str, path: &str, body: &str) -> String {
    let (code, answer) = crate::common::ask(server.http, method, path, body);
    assert_eq!(code, 200, "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    body.to_owned()
}

/// Sends signals one right after the other.
fn signals(server: &Server, signals: &[libc::c_int]) {
    signals.iter().for_each(|signal| server.signal(*signal));
}

/// Flags of a server that writes to a folder when it stops.
fn write_back(folder: &Folder) -> Vec<&str> {
    [
        &drive_flags(folder, "256MiB")[..],
        &["--disk-write", "back"],
    ]
    .concat()
}

/// Returns how many chunks `lmc disk inspect` finds.
fn chunks_on(folder: &Folder) -> u64 {
    let inspect = lmc()
        .args(["disk", "inspect", "--json", folder.text()])
        .output()
        .expect("the binary runs");
    let found: serde_json::Value = serde_json::from_slice(&inspect.stdout)
        .unwrap_or_else(|error| panic!("{error}: {inspect:?}"));
    found["drives"][0]["chunks"]
        .as_u64()
        .unwrap_or_else(|| panic!("no chunks in {found}"))
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
            event: Vec::new(),
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
        end: u64::from(256 * chunks),
        request_id: request_id.to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
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
        let mut request = |request: &Request| client.ask(request).expect("an answer");
        server.line("registration refused");
        assert_eq!(request(&engine.registration("m")), Reply::None);
        // One block is too few for two chunks, which is a warning that names the request.
        let store = Request::Store {
            key: key(&format!("request{FORGED}"), Some(0), 1, 2),
            instance_id: ID,
            block_ids: vec![vec![2]],
            event: Vec::new(),
        };
        // It is logged at most once a second.
        until("the warning is logged", || {
            assert_eq!(request(&store), Reply::Transferred(false));
            let log = server.log();
            log.iter().any(|line| line.contains("store of request"))
        });
        ask(
            &server,
            "PUT",
            "/quota/salt%0A2026-01-01T%1B%5B2J%C2%9B2J",
            "{\"limit_gb\": 1}",
        );
        server.line("quota set");
        server.signal(libc::SIGTERM);
        assert_eq!(server.process.wait().code(), Some(0));
        let log = server.log();
        for line in &log {
            assert!(!line.contains(char::is_control), "{line:?}");
            match format {
                "text" => assert!(!line.starts_with("2026-01-01"), "{log:#?}"),
                _ => {
                    let event: serde_json::Value = serde_json::from_str(line).expect(line);
                    let at = event["timestamp"].as_str().expect("a time");
                    assert!(!at.starts_with("2026-01-01"), "{line}");
                }
            }
        }
        let has_id = log.iter().any(|line| line.contains("FORGED"));
        assert!(has_id, "the request's id is not in {log:#?}");
    }
}

/// A program in a terminal of its own, and the other end of the terminal.
fn in_a_terminal() -> (Command, OwnedFd) {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let other = pty::openpt(flags).expect("a terminal");
    pty::grantpt(&other).expect("a terminal");
    pty::unlockpt(&other).expect("a terminal");
    let name = pty::ptsname(&other, Vec::new()).expect("a name");
    let name = name.into_string().expect("a path");
    let terminal = File::options().read(true).write(true).open(name);
    let mut command = Command::new("setsid");
    command.args(["--ctty", env!("CARGO_BIN_EXE_lmc")]);
    command.stdin(terminal.expect("it opens"));
    (command, other)
}

/// Until f2c35f9 a lost ssh session killed the server on the spot, with all that was to be written
/// back.
#[test]
fn a_hang_up_stops_in_order_and_writes_back() {
    let folder = Folder::temporary();
    let (command, terminal) = in_a_terminal();
    let mut server = Server::start_by(command, &write_back(&folder));
    let engine = Engine::new(server.port);
    let mut client = server.client();
    engine.store(&mut client, 3);
    // Log rotation, for many daemons.
    signals(&server, &[libc::SIGUSR1, libc::SIGUSR2]);
    server.line("SIGUSR2");
    assert_eq!(
        client.ask(&Request::Noop).expect("an answer"),
        Reply::Text("OK".to_owned())
    );
    drop(terminal);
    assert_eq!(server.process.wait().code(), Some(0));
    server.line("stopping after SIGHUP");
    assert_eq!(chunks_on(&folder), 3);
}

/// coreutils' `timeout` sends SIGTERM twice, a closed terminal SIGHUP: the second one skipped the
/// write-back until f2c35f9.
#[test]
fn signals_that_come_together_are_one() {
    let folder = Folder::temporary();
    let mut server = Server::start(&write_back(&folder));
    let engine = Engine::new(server.port);
    engine.store(&mut server.client(), 3);
    signals(
        &server,
        &[libc::SIGTERM, libc::SIGHUP, libc::SIGTERM, libc::SIGINT],
    );
    assert_eq!(server.process.wait().code(), Some(0));
    assert_eq!(chunks_on(&folder), 3);
}

#[test]
fn a_second_signal_stops_at_once_and_says_what_is_not_written() {
    let folder = Folder::temporary();
    let mut server = Server::start(&write_back(&folder));
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
    server.line("stopping after SIGTERM");
    // What comes within a second belongs to the first.
    std::thread::sleep(Duration::from_millis(1200));
    // Nor does a terminal that closes meanwhile make it hurry.
    server.signal(libc::SIGHUP);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.process.ended(), None);
    server.signal(libc::SIGINT);
    assert_eq!(server.process.wait().code(), Some(1));
    server.line("unwritten_bytes=12288");
}

#[test]
fn a_server_under_nohup_outlives_its_session() {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "trap '' HUP; exec \"$0\" \"$@\"",
        env!("CARGO_BIN_EXE_lmc"),
    ]);
    let mut server = Server::start_by(command, &[]);
    signals(&server, &[libc::SIGHUP, libc::SIGUSR1]);
    server.line("SIGUSR1");
    assert!(ask(&server, "GET", "/healthz", "").contains("ok"));
    server.signal(libc::SIGTERM);
    assert_eq!(server.process.wait().code(), Some(0));
}

/// Until 8bf0141 a stop waited for the rest of the request until its deadline, and ended with 1.
#[test]
fn a_half_request_does_not_hold_up_the_stop() {
    let mut server = Server::start(&[]);
    let mut half = TcpStream::connect(("127.0.0.1", server.http)).expect("a connection");
    write!(half, "GET /healthz HTTP/1.1\r\nhost: local").expect("half of a request");
    // It is accepted after the other one.
    assert!(ask(&server, "GET", "/healthz", "").contains("ok"));
    server.signal(libc::SIGTERM);
    assert_eq!(server.process.wait().code(), Some(0));
    drop(half);
}

/// Each event of the log was a panic until f2c35f9 where stderr was gone: a closed terminal, a pipe
/// whose reader had ended.
#[test]
fn a_server_whose_stderr_is_gone_serves_on_and_stops_in_order() {
    let (mut server, stderr) = Server::spawn_unread(&[]);
    drop(stderr);
    server.wait_until_it_answers();
    // Each of these is an event of the log.
    ask(&server, "POST", "/cache/clear", "{}");
    ask(&server, "PUT", "/quota/a", "{\"limit_gb\": 1}");
    server.signal(libc::SIGTERM);
    assert_eq!(server.process.wait().code(), Some(0));
}

/// Until 8bf0141 the threads that answer engines wrote the log themselves: a pipe without a reader
/// stopped `/healthz` and every engine, and SIGTERM.
///
/// Slow: at its end the server waits 2 s for a reader.
#[test]
fn a_server_whose_stderr_is_not_read_serves_on_and_stops_in_order() {
    let (mut server, mut stderr) = Server::spawn_unread(&["--log-level", "trace"]);
    server.wait_until_it_answers();
    let mut client = server.client();
    // The log has a line for each, with the model's name.
    let worker = Request::RegisterEngineDriven(EngineDrivenContext {
        model_name: "m".repeat(1000),
        ..worker(8, "float32")
    });
    until("a line is dropped", || {
        for _ in 0..100 {
            let registered = client.ask(&worker).expect("an answer");
            assert!(
                matches!(registered, Reply::Registered { .. }),
                "{registered:?}"
            );
        }
        server.metric("lmc_log_lines_dropped_total") > 0.0
    });
    let noop = client.ask(&Request::Noop);
    assert!(noop.is_ok(), "engines are answered: {noop:?}");
    assert!(ask(&server, "GET", "/healthz", "").contains("ok"));
    let status = ask(&server, "GET", "/status", "");
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    assert!(status["lmc"]["log_lines_dropped"].as_u64() > Some(0));
    server.signal(libc::SIGTERM);
    assert_eq!(server.process.wait().code(), Some(0));
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
    let folder = Folder::temporary();
    let server = Server::start(&drive_flags(&folder, "256MiB"));
    let engine = Engine::new(server.port);
    let mut client = server.client();
    engine.store(&mut client, 3);
    until("all chunks are on disk", || {
        server.metric("lmc_tier_chunks{tier=\"disk\"}") == 3.0
    });
    ask(
        &server,
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
            timeout: DEADLINE.as_secs_f64(),
        };
        assert_eq!(client.ask(&wait).expect("an answer"), Reply::Int(3));
        ["", "_l1", "_l2"]
            .map(|tier| server.metric(&format!("lmcache_mp_lookup_hit{tier}_tokens_total")))
    };
    assert_eq!(lookup("from disk"), [768.0, 0.0, 768.0]);
    assert_eq!(lookup("from memory"), [1536.0, 768.0, 768.0]);
    assert_eq!(server.metric("lmcache_mp_l1_write_chunks_total"), 6.0);

    let status = |path: &str| -> serde_json::Value {
        serde_json::from_str(&ask(&server, "GET", path, "")).expect("JSON")
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
    let line = server.line("registration refused");
    let event: serde_json::Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(event["level"], "WARN");
    // Fields are beside the level, where log collectors look for them.
    assert_eq!(
        (&event["model"], &event["instance"]),
        (&"big-model".into(), &ID.into())
    );
    assert!(
        event["peer"]
            .as_str()
            .is_some_and(|peer| peer.starts_with("127.0.0.1:")),
        "{event}"
    );
    let message = event["message"].as_str().expect("a text");
    assert!(message.contains("--chunk-size"), "{message}");
}

/// Until f2c35f9 the log said nothing when a worker's connection ended, and of its worker later
/// that it had been silent for too long.
#[test]
fn the_end_of_a_workers_connection_is_logged_and_is_the_reason_of_its_removal() {
    let server = Server::start(&["--worker-orphan-grace-seconds", "100ms"]);
    let engine = Engine::new(server.port);
    let mut client = server.client();
    let registered = client.ask(&engine.registration("m"));
    assert_eq!(registered.expect("an answer"), Reply::None);
    drop(client);
    server.line("worker's connection ended");
    server.line("worker removed");
    let log = server.log();
    assert!(!log.iter().any(|line| line.contains("silent")), "{log:#?}");
}

/// Until f2c35f9 `lmcache describe kvcache` said `MLA: True` for a Llama whose engine packs K and V
/// into one plane. The registration says the same of both, so the server says nothing.
#[test]
fn one_plane_is_not_taken_for_latent_attention() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let mut is_mla = |instance_id: u64, use_mla: bool| {
        let registered = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
            use_mla,
            ..llama(instance_id)
        }));
        assert!(
            matches!(registered, Ok(Reply::Registered { .. })),
            "{registered:?}"
        );
        let status = ask(&server, "GET", "/status", "");
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let layout = &status["cache_context_meta"][instance_id.to_string()]["kv_cache_layout"];
        assert_eq!(layout["num_layers"], 4);
        layout["kernel_groups"][0].get("is_mla").cloned()
    };
    assert_eq!(is_mla(1, false), Some(false.into()));
    assert_eq!(is_mla(2, true), None);
}

fn llama(instance_id: u64) -> EngineDrivenContext {
    EngineDrivenContext {
        instance_id,
        model_name: "llama".to_owned(),
        world_size: 1,
        block_size: 16,
        num_layers: 4,
        hidden_dim_size: 256,
        dtype: "bfloat16".to_owned(),
        use_mla: false,
        num_physical_slots: None,
        record: None,
        unknown: UnknownFields::default(),
    }
}

/// Until 336c9b4 an engine that has its heads before its tokens was given chunks of one that has
/// not, and nothing said that this depends on what the client does not send.
#[test]
fn engines_whose_order_is_unknown_cause_one_warning_where_chunks_are_shared() {
    let folder = Folder::temporary();
    let store = format!("file://{}", folder.text());
    for (flags, warnings) in [
        (&["--remote", store.as_str()][..], 1),
        (&["--remote", store.as_str(), "--identity", "a"], 0),
        (&[], 0),
    ] {
        let server = Server::start(flags);
        let mut client = server.client();
        for instance_id in [1, 2] {
            let registered = client.ask(&Request::RegisterEngineDriven(llama(instance_id)));
            assert!(matches!(registered, Ok(Reply::Registered { .. })));
        }
        server.line("instance=2");
        let log = server.log();
        let warned = log.iter().filter(|line| line.contains("--identity TEXT"));
        assert_eq!(warned.count(), warnings, "{flags:?}: {log:#?}");
    }
}

#[test]
fn fields_of_a_registration_that_are_not_known_are_named() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let registered = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
        unknown: UnknownFields::of([("kv_order", ConfigValue::Int(1))]),
        ..llama(1)
    }));
    assert!(matches!(registered, Ok(Reply::Registered { .. })));
    server.line("kv_order");
    let url = format!("127.0.0.1:{}", server.http);
    let status = lmc().args(["status", "--url", &url]).output();
    let status = status.expect("lmc status");
    let status = String::from_utf8_lossy(&status.stdout);
    assert!(status.contains("kv_order"), "{status}");
}
