//! Ports for servers that are started here.

use std::net::TcpListener;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result};

/// Below the ports that the kernel assigns by itself (`net.ipv4.ip_local_port_range`): such a port
/// could be taken before the server listens there, or be connected to itself by a client.
const PORTS: Range<u32> = 20_000..32_000;

/// A port that is free, another each time.
pub(crate) fn free() -> Result<u16> {
    static ASKED: AtomicU32 = AtomicU32::new(0);
    let own = std::process::id().wrapping_mul(7);
    let mut tries = PORTS.map(|_| {
        let nth = own.wrapping_add(ASKED.fetch_add(1, Ordering::Relaxed));
        (PORTS.start + nth % (PORTS.end - PORTS.start)) as u16
    });
    let port = tries.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok());
    port.context("no port is free")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_another_and_one_in_use_is_none() {
        let first = free().expect("a port");
        let listener = TcpListener::bind(("127.0.0.1", first)).expect("it is free");
        let others: Vec<u16> = (0..20).map(|_| free().expect("a port")).collect();
        assert!(others.iter().all(|port| PORTS.contains(&u32::from(*port))));
        assert!(!others.contains(&first));
        drop(listener);
    }
}
