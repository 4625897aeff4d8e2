//! What tests of the real binary need.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;

/// Below those that the kernel gives to whoever asks for any (`net.ipv4.ip_local_port_range`): such
/// a one could be taken before the server listens there, or be connected to itself by whoever asks
/// whether it does.
const PORTS: std::ops::Range<u16> = 20_000..32_000;

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
