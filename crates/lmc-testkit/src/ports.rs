//! Ports to listen on.

use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Below the ports that the kernel assigns by itself (`net.ipv4.ip_local_port_range`): such a port
/// could be taken before the server listens there, or be connected to itself by a client.
const PORTS: Range<u16> = 20_000..32_000;

/// Returns a TCP port of 127.0.0.1 that is free, and reserved for this process among all that ask
/// here.
///
/// # Panics
/// When none is free.
pub fn free_port() -> u16 {
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
