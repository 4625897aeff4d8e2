//! Ports to listen on.

use std::net::TcpListener;
use std::ops::Range;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Range below the ports that the kernel assigns by itself (`net.ipv4.ip_local_port_range`): an
/// assigned port could be taken before the server listens there, or a client could connect to
/// itself.
const PORTS: Range<u16> = 20_000..32_000;

/// Returns a free TCP port of 127.0.0.1, reserved for this process among all callers of this
/// function.
///
/// # Panics
/// When no port is free.
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
        // Reserved for as long as this process lives.
        Box::leak(Box::new(ours));
        TcpListener::bind(("127.0.0.1", *port)).is_ok()
    });
    free.next().expect("a free port")
}
