//! Helpers for tests of the real binary.

pub(crate) mod page;
pub(crate) mod played;
pub(crate) mod prompt;
pub(crate) mod redis;
pub(crate) mod relay;
pub(crate) mod remote;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::path::PathBuf;
use std::process::{ChildStderr, Command, Stdio};

use lmc_testkit::{DEADLINE, Folder, Process, free_port, until};
use lmc_vllm_adapter::{
    CacheKey, Client, CpuShm, EngineGroup, KvDescriptor, RegisterKvCache, Request, TensorMeta,
    UnknownFields,
};

/// Returns the program without flags, and without settings of the user who runs the tests.
pub(crate) fn lmc() -> Command {
    without_manager(without_settings(Command::new(env!("CARGO_BIN_EXE_lmc"))))
}

fn without_settings(mut command: Command) -> Command {
    for name in ["LMC_CONFIG", "LMC_URL", "LMC_STATE_DIR"] {
        command.env_remove(name);
    }
    command
}

/// Keeps a server from the service manager of who runs the tests.
fn without_manager(mut command: Command) -> Command {
    for name in ["NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC"] {
        command.env_remove(name);
    }
    command
}

/// Adds a verb and flags to a command, and ports and a size for the pool where the flags have
/// none, and a state folder of its own: those of the host have files of other servers, also of ones
/// that had its port. Returns the command, the two ports and that folder.
fn complete(command: Command, verb: &str, args: &[&str]) -> (Command, u16, u16, Folder) {
    let given = |flag: &str| {
        let at = args.iter().position(|arg| **arg == *flag)?;
        Some(args[at + 1].to_owned())
    };
    let mut command = without_settings(command);
    command.arg(verb).args(args).stdout(Stdio::null());
    let mut port = |flag: &str| {
        let port = given(flag).unwrap_or_else(|| {
            let port = free_port().to_string();
            command.args([flag, port.as_str()]);
            port
        });
        port.parse().unwrap_or(0)
    };
    let (port, http) = (port("--port"), port("--http-port"));
    if given("--l1-size-gb").is_none() {
        command.args(["--l1-size-gb", "16MiB"]);
    }
    let state = Folder::temporary();
    command.env("LMC_STATE_DIR", state.text());
    (command, port, http, state)
}

/// A running `lmc serve`, killed when dropped.
pub(crate) struct Server {
    pub(crate) process: Process,
    pub(crate) port: u16,
    pub(crate) http: u16,
    _state: Folder,
}

impl Deref for Server {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

impl Server {
    /// Starts `lmc serve` with these flags and waits until it listens. Where the flags say nothing
    /// else, it has free ports and a pool of 16 MiB.
    pub(crate) fn start(args: &[&str]) -> Self {
        let server = Self::spawn(args);
        server.wait_until_it_listens(args);
        server
    }

    /// As [`Self::start`], by a command (a shell, `setpriv`) that ends with the program.
    pub(crate) fn start_by(command: Command, args: &[&str]) -> Self {
        let server = Self::spawn_by(command, "serve", args);
        server.wait_until_it_listens(args);
        server
    }

    /// As [`Self::start`], without waiting.
    pub(crate) fn spawn(args: &[&str]) -> Self {
        Self::spawn_by(lmc(), "serve", args)
    }

    /// Runs a command that ends with the program, with a verb and flags.
    pub(crate) fn spawn_by(command: Command, verb: &str, args: &[&str]) -> Self {
        let (mut command, port, http, state) = complete(command, verb, args);
        Self {
            process: Process::spawn(&mut command),
            port,
            http,
            _state: state,
        }
    }

    /// As [`Self::spawn`], with its standard error left to the caller.
    pub(crate) fn spawn_unread(args: &[&str]) -> (Self, ChildStderr) {
        let (mut command, port, http, state) = complete(lmc(), "serve", args);
        let (process, stderr) = Process::spawn_unread(&mut command);
        (
            Self {
                process,
                port,
                http,
                _state: state,
            },
            stderr,
        )
    }

    fn wait_until_it_listens(&self, args: &[&str]) {
        match args.contains(&"--log-level") {
            // At other levels it does not say so.
            true => self.wait_until_it_answers(),
            false => drop(self.line("listening for engines")),
        }
    }

    /// Waits until both ports can be connected to.
    pub(crate) fn wait_until_it_answers(&self) {
        for port in [self.http, self.port].into_iter().filter(|port| *port > 0) {
            until("the server listens", || {
                TcpStream::connect(("127.0.0.1", port)).is_ok()
            });
        }
    }

    /// Connects as an engine.
    pub(crate) fn client(&self) -> Client {
        let address = SocketAddr::from(([127, 0, 0, 1], self.port));
        Client::connect(address, DEADLINE).expect("a connection")
    }

    /// Returns the answer to a GET of the HTTP side, with its head.
    pub(crate) fn get(&self, path: &str) -> String {
        ask(self.http, "GET", path, "").1
    }

    /// Returns the value of a metric, by its name with its labels.
    pub(crate) fn metric(&self, series: &str) -> f64 {
        let page = self.get("/metrics");
        let value = |line: &str| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok();
        let found = page.lines().find_map(value);
        found.unwrap_or_else(|| panic!("no {series} in {page}"))
    }

    /// Ends the server in order, and asserts that it succeeds.
    pub(crate) fn terminate(self) {
        self.terminate_by(libc::SIGTERM);
    }

    /// As [`Self::terminate`], by another signal.
    pub(crate) fn terminate_by(mut self, signal: libc::c_int) {
        self.signal(signal);
        let ended = self.process.wait();
        assert!(ended.success(), "{ended}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.process.kill();
        // A killed server leaves its pool behind, for its successor to reclaim.
        let owner = format!("pid {} ", self.process.id());
        let entries = std::fs::read_dir("/dev/shm")
            .into_iter()
            .flatten()
            .flatten();
        for path in entries.map(|entry| entry.path()) {
            let is_ours = path.extension().is_some_and(|kind| kind == "lmc-owner")
                && std::fs::read_to_string(&path).is_ok_and(|text| text.starts_with(&owner));
            if is_ours {
                let _ = std::fs::remove_file(path.with_extension(""));
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// Returns the flags of a new drive of this size in a folder.
pub(crate) fn drive_flags<'a>(folder: &'a Folder, size: &'a str) -> [&'a str; 7] {
    [
        "--disk-create",
        "--disk",
        folder.text(),
        "--disk-size",
        size,
        "--disk-keep-free",
        "0",
    ]
}

/// The pool's segment of the server on a port, which has an unpredictable suffix.
pub(crate) fn segment(port: u16) -> Option<PathBuf> {
    let prefix = format!("lmc_{port}_");
    let entries = std::fs::read_dir("/dev/shm").expect("/dev/shm is there");
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.find(|path| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.extension().is_none() && name.is_some_and(|name| name.starts_with(&prefix))
    })
}

/// Returns the key of the first worker for a request `r` of model `m` with this many tokens.
pub(crate) fn worker_key(tokens: u64) -> CacheKey {
    CacheKey {
        model_name: "m".to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: (0..tokens as u32).collect(),
        end: tokens,
        request_id: "r".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    }
}

/// Registers an engine's memory for copies by the server: one layer of rank 3, `[blocks, tokens,
/// elements]`, in a segment of exactly that size. `dtype` is torch's name and the bytes of an element.
pub(crate) fn registration(
    instance_id: u64,
    model_name: &str,
    shm_name: &str,
    dtype: (&str, u64),
    shape: [u64; 3],
) -> Request {
    let [blocks, tokens, elements] = shape;
    let (dtype, element_bytes) = dtype;
    Request::RegisterKvCache(Box::new(RegisterKvCache {
        instance_id,
        kv_caches: vec![KvDescriptor::CpuShm(CpuShm {
            shm_name: shm_name.to_owned(),
            nbytes: blocks * tokens * elements * element_bytes,
            tensor: TensorMeta {
                dtype: dtype.to_owned(),
                shape: shape.to_vec(),
                stride: vec![tokens * elements, elements, 1],
                storage_offset: 0,
            },
        })],
        model_name: model_name.to_owned(),
        world_size: 1,
        engine_type: "vllm".to_owned(),
        kv_layout: None,
        unknown_hints: UnknownFields::default(),
        groups: vec![EngineGroup {
            layer_indices: vec![0],
            tokens_per_block: u32::try_from(tokens).expect("a block is small"),
            sw_size_tokens: -1,
            ..EngineGroup::default()
        }],
    }))
}

/// Sends a request to the HTTP side of a server. Returns the code of the answer, and all of it.
pub(crate) fn ask(http: u16, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", http)).expect("a connection");
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
    let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
    (code.expect("a status code"), answer)
}
