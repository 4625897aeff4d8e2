//! What an operator sees and does: the log, the signals, `lmc status` of a real server.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{
    CacheKey, Client, ClientError, CpuShm, EngineGroup, KvDescriptor, RegisterKvCache, Reply,
    Request, TensorMeta,
};

use common::free_port;

/// For everything that must happen soon, on a machine that is busy with other tests.
const DEADLINE: Duration = Duration::from_secs(20);
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
        let (port, http) = (free_port(), free_port());
        let log = std::env::temp_dir().join(format!("lmc_operator_{port}.log"));
        let file = std::fs::File::create(&log).expect("a file");
        let child = Command::new(env!("CARGO_BIN_EXE_lmc"))
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
        let mut stream = TcpStream::connect(("127.0.0.1", self.http)).expect("a connection");
        stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        )
        .expect("a request");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
        body.to_owned()
    }

    fn signal(&self, signal: libc::c_int) {
        let kill = format!("kill -{signal} {}", self.child.id());
        let told = Command::new("sh").args(["-c", &kill]).status();
        assert!(told.expect("sh is there").success());
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

    fn registration(&self, model_name: &str) -> Request {
        Request::RegisterKvCache(Box::new(RegisterKvCache {
            instance_id: 1,
            kv_caches: vec![KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{}", self.name),
                nbytes: Self::BYTES as u64,
                tensor: TensorMeta {
                    dtype: "float32".to_owned(),
                    shape: vec![4, 256, 4],
                    stride: vec![256 * 4, 4, 1],
                    storage_offset: 0,
                },
            })],
            model_name: model_name.to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: None,
            groups: vec![EngineGroup {
                layer_indices: vec![0],
                tokens_per_block: 256,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        }))
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
        assert_eq!(ask(&engine.registration("m")), Reply::None);
        // One block is too few for two chunks, which is a warning that names the request.
        let store = Request::Store {
            key: key(&format!("request{FORGED}"), Some(0), 1, 2),
            instance_id: 1,
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
