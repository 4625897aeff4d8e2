//! Looks up the socket at the other end of a connection, and the user that owns it.
//!
//! `NETLINK_SOCK_DIAG` looks up one socket in microseconds, however many the machine has. Where it
//! is missing, the table in `/proc/net/tcp` has the same data. Both list sockets of this network
//! namespace only, and both report root as the owner of a closed socket, so an owner without an
//! inode is ignored.

use std::fs;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpStream, UnixStream};

use crate::peer::ClientSocket;

/// Netlink family of routes, from `linux/netlink.h`.
const NETLINK_ROUTE: i32 = 0;
/// Message types of a request for one route and of its reply, from `linux/rtnetlink.h`.
const RTM_GETROUTE: u16 = 26;
const RTM_NEWROUTE: u16 = 24;
/// Attributes of a route: its destination, and its interface.
const RTA_DST: u16 = 1;
const RTA_OIF: u16 = 4;
/// Offset of the type in `struct rtmsg`, and the type of a route to this host.
const RTM_TYPE: usize = 7;
const RTN_LOCAL: u8 = 2;
/// Netlink family of socket diagnostics, from `linux/netlink.h`.
const NETLINK_SOCK_DIAG: i32 = 4;
/// Message type of a request for one socket and of its reply, from `linux/sock_diag.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// Message type of an error reply, from `linux/netlink.h`.
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
/// Size of `struct nlmsghdr` in bytes.
const HEADER: usize = 16;
const AF_UNIX: u8 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const AF_NETLINK: i32 = 16;
const IPPROTO_TCP: u8 = 6;
/// `UDIAG_SHOW_PEER` and `UNIX_DIAG_PEER` of `linux/unix_diag.h`.
const UDIAG_SHOW_PEER: u32 = 4;
const UNIX_DIAG_PEER: u16 = 2;
/// Size of `struct unix_diag_msg` in bytes; attributes follow it.
const UNIX_DIAG_MSG: usize = 16;
/// Offsets of the owner and the inode in `struct inet_diag_msg`.
const INET_DIAG_UID: usize = 64;
const INET_DIAG_INODE: usize = 68;
/// Cookie that matches any socket.
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// Looks up the other end of a TCP connection.
pub(super) fn of_tcp(stream: &TcpStream) -> ClientSocket {
    let (Ok(remote), Ok(local)) = (stream.peer_addr(), stream.local_addr()) else {
        return ClientSocket::default();
    };
    let (remote, local) = (canonical(remote), canonical(local));
    let owner = match inet_owner(remote, local) {
        Ok(owner) => owner,
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(_) => listed_owner(remote, local),
    };
    ClientSocket {
        address: remote.to_string(),
        uid: owner.map(|owner| owner.uid),
        inode: owner.map(|owner| owner.inode),
        takes_descriptors: false,
    }
}

/// Returns true if the other end was a socket of this host that is closed now, so that [`of_tcp`]
/// can no longer find its owner.
pub(super) fn is_closed(stream: &TcpStream) -> bool {
    let (Ok(remote), Ok(local)) = (stream.peer_addr(), stream.local_addr()) else {
        // The connection was reset; data that it has sent can still be read.
        return true;
    };
    is_gone(canonical(remote), canonical(local))
}

/// Returns true if the socket whose own address is `remote` and whose peer is `local` was one of this
/// host, and no process has it open.
fn is_gone(remote: SocketAddr, local: SocketAddr) -> bool {
    let is_local = is_of_this_host(remote, local);
    match query(&inet_request(remote, local)) {
        Ok(reply) => is_local || is_about(&reply, remote, local),
        Err(error) if error.kind() == io::ErrorKind::NotFound => is_local,
        // The kernel lists no sockets here, so the absence of this one proves nothing.
        Err(_) => is_local && Path::new("/proc/net/tcp").exists(),
    }
}

/// Returns true if the other end of a connection is a socket of this host: no other host is connected
/// with a loopback address, or sends from an address of this host. A local socket may be bound to
/// any of those.
fn is_of_this_host(remote: SocketAddr, local: SocketAddr) -> bool {
    let is_loopback = remote.ip().is_loopback() || local.ip().is_loopback();
    is_loopback || remote.ip() == local.ip() || is_own_address(remote).unwrap_or(false)
}

/// Asks the kernel whether packets to an address stay on this host.
fn is_own_address(address: SocketAddr) -> io::Result<bool> {
    let (family, bytes, interface) = match address {
        SocketAddr::V4(v4) => (AF_INET, v4.ip().octets().to_vec(), 0),
        SocketAddr::V6(v6) => (AF_INET6, v6.ip().octets().to_vec(), v6.scope_id()),
    };
    // `struct rtmsg`: family and length of the destination in bits; the rest is zero.
    let mut request = vec![0; 12];
    request[..2].copy_from_slice(&[family, bytes.len() as u8 * 8]);
    let mut push = |kind: u16, value: &[u8]| {
        request.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        request.extend_from_slice(&kind.to_ne_bytes());
        request.extend_from_slice(value);
    };
    push(RTA_DST, &bytes);
    if interface != 0 {
        push(RTA_OIF, &interface.to_ne_bytes());
    }
    let reply = ask(NETLINK_ROUTE, RTM_GETROUTE, RTM_NEWROUTE, &request)?;
    Ok(reply.get(RTM_TYPE) == Some(&RTN_LOCAL))
}

/// Looks up the other end of a Unix socket. Its user is the one that connected.
pub(super) fn of_unix(stream: &UnixStream) -> ClientSocket {
    let credentials = stream.peer_cred().ok();
    let pid = pid_of(stream);
    ClientSocket {
        address: pid.map_or_else(|| "unix".to_owned(), |pid| format!("unix pid {pid}")),
        uid: credentials.map(|credentials| credentials.uid()),
        inode: unix_peer(stream).ok().flatten(),
        takes_descriptors: true,
    }
}

/// Returns the id of the process that connected a Unix socket; `None` if it is in another PID
/// namespace.
pub(super) fn pid_of(stream: &UnixStream) -> Option<u32> {
    let pid = u32::try_from(stream.peer_cred().ok()?.pid()?).ok()?;
    (pid != 0).then_some(pid)
}

/// Converts an IPv4-mapped IPv6 address, as a dual-stack socket reports it, to IPv4.
fn canonical(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => SocketAddr::from((v4, address.port())),
        IpAddr::V6(_) => address,
    }
}

/// User and inode of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Owner {
    uid: u32,
    inode: u64,
}

impl Owner {
    /// Returns `None` for a socket that no process has open: its owner is unknown.
    fn known(uid: u32, inode: u64) -> Option<Self> {
        (inode != 0).then_some(Self { uid, inode })
    }
}

/// Asks for one socket and returns the reply without its header.
fn query(request: &[u8]) -> io::Result<Vec<u8>> {
    ask(
        NETLINK_SOCK_DIAG,
        SOCK_DIAG_BY_FAMILY,
        SOCK_DIAG_BY_FAMILY,
        request,
    )
}

/// Sends one netlink request of type `kind` and returns the reply, of type `expected`, without its
/// header.
fn ask(family: i32, kind: u16, expected: u16, request: &[u8]) -> io::Result<Vec<u8>> {
    let socket = Socket::new(
        Domain::from(AF_NETLINK),
        Type::DGRAM.cloexec().nonblocking(),
        Some(Protocol::from(family)),
    )?;
    let mut message = Vec::with_capacity(HEADER + request.len());
    message.extend_from_slice(&((HEADER + request.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&kind.to_ne_bytes());
    message.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    message.extend_from_slice(&[0; 8]);
    message.extend_from_slice(request);
    socket.send(&message)?;
    // The kernel replies during the send, so the reply is available.
    let mut reply = vec![0; 1024];
    let len = (&socket).read(&mut reply)?;
    reply.truncate(len);
    match reply
        .get(4..6)
        .map(|kind| u16::from_ne_bytes([kind[0], kind[1]]))
    {
        Some(found) if found == expected => Ok(reply.split_off(HEADER)),
        Some(NLMSG_ERROR) => {
            let code = number(&reply, HEADER).unwrap_or(0) as i32;
            Err(io::Error::from_raw_os_error(-code))
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_ne_bytes(*bytes))
}

/// Returns the owner of the socket whose own address is `remote` and whose peer is `local`.
fn inet_owner(remote: SocketAddr, local: SocketAddr) -> io::Result<Option<Owner>> {
    let reply = query(&inet_request(remote, local))?;
    let read = |at| number(&reply, at).ok_or(io::ErrorKind::InvalidData);
    if !is_about(&reply, remote, local) {
        return Ok(None);
    }
    Ok(Owner::known(
        read(INET_DIAG_UID)?,
        u64::from(read(INET_DIAG_INODE)?),
    ))
}

/// Returns true if a reply describes the requested socket. If no connection matches, the kernel
/// returns a listening socket, which is not the peer.
fn is_about(reply: &[u8], remote: SocketAddr, local: SocketAddr) -> bool {
    let source = reply.get(4..6).unwrap_or_default();
    let destination = reply.get(6..8).unwrap_or_default();
    source == remote.port().to_be_bytes() && destination == local.port().to_be_bytes()
}

/// Builds a `struct inet_diag_req_v2`.
fn inet_request(remote: SocketAddr, local: SocketAddr) -> Vec<u8> {
    let family = if remote.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut request = vec![family, IPPROTO_TCP, 0, 0];
    // Connections in any state.
    request.extend_from_slice(&u32::MAX.to_ne_bytes());
    request.extend_from_slice(&remote.port().to_be_bytes());
    request.extend_from_slice(&local.port().to_be_bytes());
    for address in [remote.ip(), local.ip()] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(v4) => bytes[..4].copy_from_slice(&v4.octets()),
            IpAddr::V6(v6) => bytes = v6.octets(),
        }
        request.extend_from_slice(&bytes);
    }
    let interface = match remote {
        SocketAddr::V6(v6) => v6.scope_id(),
        SocketAddr::V4(_) => 0,
    };
    request.extend_from_slice(&interface.to_ne_bytes());
    request.extend_from_slice(&NO_COOKIE);
    request
}

/// Returns the owner of a socket, as [`inet_owner`] does, from the kernel's table of all sockets.
fn listed_owner(remote: SocketAddr, local: SocketAddr) -> Option<Owner> {
    let table = match remote {
        SocketAddr::V4(_) => "/proc/net/tcp",
        SocketAddr::V6(_) => "/proc/net/tcp6",
    };
    let table = fs::read_to_string(table).ok()?;
    find_listed(&table, remote, local)
}

fn find_listed(table: &str, remote: SocketAddr, local: SocketAddr) -> Option<Owner> {
    let (remote, local) = (listed(remote), listed(local));
    let line = table.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        (fields.get(1)? == &remote && fields.get(2)? == &local).then_some(fields)
    })?;
    Owner::known(line.get(7)?.parse().ok()?, line.get(9)?.parse().ok()?)
}

/// Formats an address as in the table: 32-bit words in the machine's byte order.
fn listed(address: SocketAddr) -> String {
    let octets: Vec<u8> = match address.ip() {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let words = octets.chunks(4).map(|word| {
        let word: [u8; 4] = word.try_into().expect("addresses are whole words");
        format!("{:08X}", u32::from_ne_bytes(word))
    });
    format!("{}:{:04X}", words.collect::<String>(), address.port())
}

/// Returns the inode of the socket that a Unix socket of this process is connected to.
fn unix_peer(stream: &UnixStream) -> io::Result<Option<u64>> {
    let local = fs::File::from(stream.as_fd().try_clone_to_owned()?);
    let inode = u32::try_from(local.metadata()?.ino()).map_err(io::Error::other)?;
    // `struct unix_diag_req`.
    let mut request = vec![AF_UNIX, 0, 0, 0];
    request.extend_from_slice(&u32::MAX.to_ne_bytes());
    request.extend_from_slice(&inode.to_ne_bytes());
    request.extend_from_slice(&UDIAG_SHOW_PEER.to_ne_bytes());
    request.extend_from_slice(&NO_COOKIE);
    let reply = query(&request)?;
    let mut attributes = reply.get(UNIX_DIAG_MSG..).unwrap_or_default();
    while let Some(head) = attributes.first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        if u16::from_ne_bytes([head[2], head[3]]) == UNIX_DIAG_PEER {
            let peer = number(attributes, 4).filter(|&peer| peer != 0);
            return Ok(peer.map(u64::from));
        }
        let next = len.max(4).next_multiple_of(4);
        attributes = attributes.get(next..).unwrap_or_default();
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn inode(fd: i32) -> u64 {
        let link = fs::read_link(format!("/proc/self/fd/{fd}")).expect("an open socket");
        let link = link.to_string_lossy().into_owned();
        let number = link.trim_start_matches("socket:[").trim_end_matches(']');
        number.parse().expect("a number")
    }

    fn own_uid() -> u32 {
        fs::metadata("/proc/self").expect("proc").uid()
    }

    #[tokio::test]
    async fn the_other_end_of_a_loopback_connection_is_known_both_ways() {
        for host in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = tokio::net::TcpListener::bind(host).await else {
                println!("skipped: cannot listen on {host}");
                continue;
            };
            let address = listener.local_addr().expect("bound");
            let mut to = address;
            if to.ip().is_unspecified() {
                to.set_ip(std::net::Ipv4Addr::LOCALHOST.into());
            }
            let client = TcpStream::connect(to).await.expect("it listens");
            let (accepted, _) = listener.accept().await.expect("a connection");
            let peer = of_tcp(&accepted);
            assert_eq!(peer.uid, Some(own_uid()));
            assert_eq!(peer.inode, Some(inode(client.as_raw_fd())));
            let (remote, local) = (client.local_addr().expect("bound"), to);
            let owner = listed_owner(remote, local).expect("it is in the table");
            assert_eq!((Some(owner.uid), Some(owner.inode)), (peer.uid, peer.inode));
        }
    }

    /// The kernel reports root as the owner of a socket that no process has open.
    #[tokio::test]
    async fn a_closed_socket_has_no_owner() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("loopback");
        let address = listener.local_addr().expect("bound");
        drop(TcpStream::connect(address).await.expect("it listens"));
        let (accepted, _) = listener.accept().await.expect("a connection");
        let peer = of_tcp(&accepted);
        assert_eq!((peer.uid, peer.inode), (None, None));
    }

    /// Addresses for documentation, which no other host of a network has.
    const FAR: [&str; 2] = ["203.0.113.1", "2001:db8::1"];

    /// Returns addresses of this host that are not loopback, as far as it has any.
    fn own_addresses() -> Vec<IpAddr> {
        let own = FAR.map(|far| {
            let far: IpAddr = far.parse().expect("an address");
            let any = match far {
                IpAddr::V4(_) => IpAddr::from([0; 4]),
                IpAddr::V6(_) => IpAddr::from([0; 16]),
            };
            let socket = std::net::UdpSocket::bind((any, 0)).ok()?;
            // Connecting sends nothing.
            socket.connect((far, 9)).ok()?;
            Some(socket.local_addr().ok()?.ip())
        });
        own.into_iter().flatten().collect()
    }

    /// A client could bind its socket to another address of this host than loopback, send and close:
    /// once the kernel had forgotten the socket, the client counted as one of another host.
    #[test]
    fn a_forgotten_socket_of_this_host_is_gone_at_any_address() {
        let gone = |remote: &str, local: &str| {
            let address = |ip: &str| SocketAddr::from((ip.parse::<IpAddr>().expect("an ip"), 1));
            is_gone(canonical(address(remote)), canonical(address(local)))
        };
        let [far, far_v6] = FAR;
        for (remote, local) in [
            (far, "127.0.0.1"),
            (far, "127.9.9.9"),
            ("127.9.9.9", far),
            ("::ffff:203.0.113.1", "::ffff:127.0.0.1"),
            ("::ffff:127.0.0.1", "::ffff:203.0.113.1"),
            (far_v6, "::1"),
            ("::1", far_v6),
            (far, far),
        ] {
            assert!(gone(remote, local), "{remote} to {local}");
        }
        assert!(!gone(far, "203.0.113.2"), "another host");
        assert!(!gone(far_v6, "2001:db8::2"), "another host");
        for own in own_addresses() {
            println!("this host has {own}");
            // Stands for another address of this host, which may have only one.
            let local = FAR[usize::from(own.is_ipv6())];
            assert!(gone(&own.to_string(), local), "{own} to {local}");
        }
    }

    #[tokio::test]
    async fn the_other_end_of_a_unix_socket_is_known() {
        let (local, remote) = UnixStream::pair().expect("a pair");
        let peer = of_unix(&local);
        assert_eq!(peer.uid, Some(own_uid()));
        assert_eq!(peer.inode, Some(inode(remote.as_raw_fd())));
    }

    #[test]
    fn a_line_of_the_table_is_read() {
        let line = "   0: 0100007F:9C40 0100007F:15B3 01 00000000:00000000 00:00000000 00000000  \
                    1000        0 31337 1 0000000000000000 20 4 30 10 -1";
        let remote = "127.0.0.1:40000".parse().expect("an address");
        let local = "127.0.0.1:5555".parse().expect("an address");
        let owner = Owner {
            uid: 1000,
            inode: 31337,
        };
        assert_eq!(find_listed(line, remote, local), Some(owner));
        assert_eq!(find_listed(line, local, remote), None);
    }
}
