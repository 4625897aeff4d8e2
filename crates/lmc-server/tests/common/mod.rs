//! What tests of the real binary need.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::process::Child;
use std::time::{Duration, Instant};

use lmc_vllm_adapter::{CpuShm, EngineGroup, KvDescriptor, RegisterKvCache, Request, TensorMeta};

/// Below those that the kernel gives to whoever asks for any (`net.ipv4.ip_local_port_range`): such
/// a one could be taken before the server listens there, or be connected to itself by whoever asks
/// whether it does.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

/// Longest that a test waits for an answer of the HTTP side.
const ASKING: Duration = Duration::from_secs(20);

/// A port that is free, and this process's alone among those that ask here.
pub(crate) fn free_port() -> u16 {
    let count = u32::from(PORTS.end - PORTS.start);
    let first = std::process::id().wrapping_mul(7);
    let ports = (0..count).map(|n| PORTS.start + (first.wrapping_add(n) % count) as u16);
    let mut free = ports.filter(|port| {
        let name = format!("lmc-test-port-{port}");
        let name = SocketAddr::from_abstract_name(name).expect("a short name");
        let Ok(ours) = UnixListener::bind_addr(&name) else {
            return false;
        };
        // For as long as this process lives.
        Box::leak(Box::new(ours));
        TcpListener::bind(("127.0.0.1", *port)).is_ok()
    });
    free.next().expect("a free port")
}

/// The pool's segment of the server on a port, which has an unpredictable suffix.
#[allow(dead_code, reason = "not every test binary looks at the segment")]
pub(crate) fn segment(port: u16) -> Option<PathBuf> {
    files_of(port).find(|path| path.extension().is_none())
}

/// Removes what a killed server leaves to its successor.
#[allow(dead_code, reason = "not every test binary kills servers")]
pub(crate) fn remove_segment(port: u16) {
    for path in files_of(port) {
        let _ = std::fs::remove_file(path);
    }
}

fn files_of(port: u16) -> impl Iterator<Item = PathBuf> {
    let prefix = format!("lmc_{port}_");
    let entries = std::fs::read_dir("/dev/shm").expect("/dev/shm is there");
    let paths = entries.flatten().map(|entry| entry.path());
    paths.filter(move |path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(&prefix))
    })
}

/// Registers an engine's memory for copies by the server: one layer of rank 3, `[blocks, tokens,
/// elements]`, in a segment of exactly that size. `dtype` is torch's name and the bytes of an element.
#[allow(dead_code, reason = "not every test binary registers an engine")]
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
        groups: vec![EngineGroup {
            layer_indices: vec![0],
            tokens_per_block: u32::try_from(tokens).expect("a block is small"),
            sw_size_tokens: -1,
            ..EngineGroup::default()
        }],
    }))
}

/// Sends a request to the HTTP side of a server. Returns the code of the answer, and all of it.
#[allow(dead_code, reason = "not every test binary asks the HTTP side")]
pub(crate) fn ask(http: u16, method: &str, path: &str, body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", http)).expect("a connection");
    stream.set_read_timeout(Some(ASKING)).expect("a timeout");
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

/// Sends a signal to a child that has not been waited for.
#[allow(dead_code, reason = "not every test binary sends signals")]
pub(crate) fn signal(child: &Child, signal: libc::c_int) {
    let pid = libc::pid_t::try_from(child.id()).expect("a pid");
    // SAFETY: the process is our child and not waited for yet, so the pid is its own.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Stops all threads of a child, until SIGCONT.
#[allow(dead_code, reason = "not every test binary stops servers")]
pub(crate) fn stop(child: &Child) {
    signal(child, libc::SIGSTOP);
    let deadline = Instant::now() + Duration::from_secs(30);
    let stopped = || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", child.id()));
        let mut threads = threads.expect("its threads").flatten();
        // The state follows the name, which is in brackets.
        threads.all(|thread| {
            let stat = std::fs::read_to_string(thread.path().join("stat"));
            stat.is_ok_and(|stat| stat.contains(") T "))
        })
    };
    while !stopped() {
        assert!(Instant::now() < deadline, "it does not stop");
        std::thread::sleep(Duration::from_millis(1));
    }
}
