//! What tests of the real binary need.

use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

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
