//! The pool's descriptor over the Unix socket: who gets it, what hostile clients can do, and what the
//! server learns of the process that takes it.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{Answer as _, CHUNK, Server, Worker, prompt};
use lmc_testkit::{Folder, Process, own_test, until};
use lmc_vllm_adapter::{Client, Reply, Request, encode_request_frames};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::SockRef;

const HOUR: Duration = Duration::from_secs(3600);
const TIMEOUT: Duration = Duration::from_secs(20);

fn client(socket: &Path) -> Client {
    Client::connect_unix(socket, TIMEOUT).expect("a connection")
}

/// Returns a server with a pool of the given kind, and the folder of its socket.
fn server(sealed: bool) -> (Server, Folder) {
    let folder = Folder::temporary();
    let socket = folder.join("lmc.sock");
    let server = match sealed {
        true => Server::sealed(&socket),
        false => Server::with(
            1 << 20,
            |service| service.slot_grace = HOUR,
            |zmq| {
                zmq.ipc_path = Some(socket);
                zmq.max_connections = 64;
            },
        ),
    };
    (server, folder)
}

fn capabilities(client: &mut Client) -> Vec<String> {
    match client.answer(&Request::GetExperimental) {
        Reply::Strings(names) => names,
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn the_descriptor_is_passed_once_and_over_the_unix_socket_only() {
    for sealed in [false, true] {
        let (server, folder) = server(sealed);
        let offered = |client: &mut Client| {
            let known = capabilities(client);
            known.iter().any(|name| name == "lmc_pool_descriptor")
        };
        let mut tcp = server.client();
        assert!(!offered(&mut tcp));
        let refused = tcp.call(&Request::PoolDescriptor).expect("an answer");
        assert!(matches!(refused, Reply::Error(_)), "{refused:?}");
        let mut unix = client(&folder.join("lmc.sock"));
        assert!(offered(&mut unix));
        assert!(unix.take_descriptor().is_none(), "not asked for");
        let bytes = unix.answer(&Request::PoolDescriptor);
        assert_eq!(bytes, Reply::Int(server.pool_bytes));
        let pool = unix.take_descriptor().expect("it comes with the reply");
        assert_eq!(
            File::from(pool).metadata().expect("open").len(),
            server.pool_bytes
        );
        let again = unix.call(&Request::PoolDescriptor).expect("an answer");
        assert!(matches!(again, Reply::Error(_)), "{again:?}");
        assert!(unix.take_descriptor().is_none());
        assert_eq!(unix.answer(&Request::Noop), Reply::Text("OK".to_owned()));
    }
}

/// The descriptor goes with its own reply, whatever replies are sent before and after it.
#[test]
fn the_descriptor_comes_with_its_reply_among_others() {
    let (_server, folder) = server(true);
    let mut client = client(&folder.join("lmc.sock"));
    let mut bytes = Vec::new();
    for uid in 0..200 {
        let request = match uid {
            100 => Request::PoolDescriptor,
            _ => Request::GetExperimental,
        };
        bytes.extend_from_slice(&encode_request_frames(uid, &request));
    }
    client.send_encoded(&bytes).expect("sent");
    for uid in 0..200 {
        client.receive_frames().expect("a reply");
        if uid == 100 {
            assert!(client.take_descriptor().is_some());
        }
    }
    assert!(client.take_descriptor().is_none());
}

/// Returns the number of descriptors of this process that lead to a file.
fn descriptors_of(file: &str) -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("proc is mounted");
    let leads = |entry: &std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().contains(file))
    };
    open.flatten().filter(leads).count()
}

#[test]
fn descriptors_that_a_client_sends_are_closed_unread() {
    let (server, folder) = server(false);
    let file = memfd_create(c"lmc-test-hostile", MemfdFlags::CLOEXEC).expect("memory");
    let mut raw = UnixStream::connect(folder.join("lmc.sock")).expect("it listens");
    raw.set_read_timeout(Some(TIMEOUT)).expect("a time");
    let bytes = client_bytes(&[Request::Noop, Request::PoolDescriptor, Request::Noop]);
    for byte in &bytes {
        // As many as one message may have.
        let many = [file.as_fd(); 253];
        let mut space = vec![std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
        let part = [std::io::IoSlice::new(std::slice::from_ref(byte))];
        // The kernel limits what is under way.
        let deadline = Instant::now() + TIMEOUT;
        while sendmsg(&raw, &part, &mut control, SendFlags::empty()).is_err() {
            assert!(Instant::now() < deadline, "the server reads");
            control = SendAncillaryBuffer::new(&mut []);
        }
    }
    // A greeting of 64 bytes, and at least something of each reply.
    let mut read = vec![0; 128];
    raw.read_exact(&mut read).expect("replies");
    let mut other = client(&folder.join("lmc.sock"));
    assert_eq!(other.answer(&Request::Noop), Reply::Text("OK".to_owned()));
    assert_eq!(descriptors_of("lmc-test-hostile"), 1, "the client's own");
    drop((raw, other));
    server.eventually("both have ended", |status| {
        status.transport.connections_open == 0
    });
    server.assert_idle();
}

/// Returns true from Linux 6.16 on, which can refuse descriptors for a socket.
fn refuses_descriptors() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("proc is mounted");
    let mut numbers = release.split(['.', '-']).map_while(|n| n.parse().ok());
    let version: (u32, u32) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    version >= (6, 16)
}

/// The last owner of a socket that lingers waits in its close until the other end has read, and the
/// kernel makes the receiver of descriptors that it does not take the last owner.
#[test]
fn descriptors_whose_close_waits_stall_no_other_client() {
    if !refuses_descriptors() {
        return println!("skipped: this kernel passes descriptors to any Unix socket (Linux 6.16)");
    }
    let (server, folder) = server(false);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let (mut kept, mut refused) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let mut lingering = TcpStream::connect(address).expect("it listens");
        kept.push(listener.accept().expect("a connection").0);
        lingering.set_nonblocking(true).expect("a socket");
        while lingering.write(&[0; 64 << 10]).is_ok() {}
        let linger = |time| {
            SockRef::from(&lingering)
                .set_linger(time)
                .expect("a socket")
        };
        linger(Some(10 * TIMEOUT));
        let raw = UnixStream::connect(folder.join("lmc.sock")).expect("it listens");
        let descriptors = [lingering.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let part = [std::io::IoSlice::new(&[0xff])];
        let sent = sendmsg(&raw, &part, &mut control, SendFlags::empty());
        if sent.is_err() {
            // This process is the last owner.
            linger(None);
        }
        drop(lingering);
        assert_eq!(
            server.client().answer(&Request::Noop),
            Reply::Text("OK".to_owned())
        );
        refused.push(sent);
    }
    assert_eq!(refused, [Err(rustix::io::Errno::PERM); 8]);
}

/// Returns the bytes of a client from its greeting on.
fn client_bytes(requests: &[Request]) -> Vec<u8> {
    let mut bytes = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    bytes.extend_from_slice(b"NULL");
    bytes.resize(64, 0);
    let ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER";
    bytes.extend_from_slice(&[4, ready.len() as u8]);
    bytes.extend_from_slice(ready);
    for (uid, request) in requests.iter().enumerate() {
        bytes.extend_from_slice(&encode_request_frames(uid as u64, request));
    }
    bytes
}

/// Clients that ask for the pool and read nothing keep descriptors under way, as many as there may be
/// connections, and an engine is served.
#[test]
fn clients_that_never_read_the_descriptor_keep_no_engine_out() {
    let (server, folder) = server(false);
    let socket = folder.join("lmc.sock");
    let bytes = client_bytes(&[Request::PoolDescriptor, Request::PoolDescriptor]);
    let deaf: Vec<UnixStream> = (0..200)
        .filter_map(|_| {
            let mut stream = UnixStream::connect(&socket).ok()?;
            stream.write_all(&bytes).ok()?;
            Some(stream)
        })
        .collect();
    // The server looks for idle connections to close ten times a second.
    let mut found = None;
    until("an engine is served", || {
        found = Client::connect_unix(&socket, TIMEOUT).ok();
        found.is_some()
    });
    let mut worker = Worker::register_passed(found.expect("it is served"), 1);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(worker.store(&key), 2);
    assert!(worker.retrieve(&key), "byte for byte");
    drop((deaf, worker));
    server.eventually("all have ended", |status| {
        status.transport.connections_open == 0
    });
    server.assert_idle();
}

/// Clients that say nothing, stop in the greeting, or stop in the request for the descriptor.
#[test]
fn clients_that_stop_before_they_have_asked_are_closed() {
    let folder = Folder::temporary();
    let socket = folder.join("lmc.sock");
    let _server = Server::with(
        1 << 20,
        |_| {},
        |zmq| {
            zmq.ipc_path = Some(socket.clone());
            zmq.first_request_timeout = Duration::from_millis(100);
            zmq.peer_timeout = Duration::from_millis(100);
        },
    );
    let bytes = client_bytes(&[Request::PoolDescriptor]);
    for sent in [0, 10, 64, bytes.len() - 1] {
        let mut stream = UnixStream::connect(&socket).expect("it listens");
        stream.set_read_timeout(Some(TIMEOUT)).expect("a time");
        // On a busy machine it may be closed before.
        let _ = stream.write_all(&bytes[..sent]);
        let closed = match stream.read_to_end(&mut Vec::new()) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::ConnectionReset,
        };
        assert!(closed, "after {sent} bytes");
    }
    until("one that asks is served", || {
        let client = Client::connect_unix(&socket, TIMEOUT);
        client.and_then(|mut c| c.ask(&Request::Noop)).is_ok()
    });
}

const SOCKET: &str = "LMC_TEST_TAKER_SOCKET";

/// A worker that takes the pool, prepares a store and waits. Does nothing when the suite runs it.
#[test]
fn a_taker_process() {
    let Some(socket) = std::env::var_os(SOCKET) else {
        return;
    };
    let mut worker = Worker::register_passed(client(Path::new(&socket)), 7);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(worker.prepare_store(&key).0.len(), 2);
    for order in std::io::stdin().lines() {
        assert_eq!(order.expect("a line"), "break");
        // Header of a frame above the limit: the server closes the connection.
        let too_long = [2, 0, 0, 0, 0, 0x40, 0, 0, 0];
        worker.client.send_encoded(&too_long).expect("sent");
    }
}

/// The kernel names the process behind a Unix socket (`SO_PEERPIDFD`), without a search in `/proc`.
#[test]
fn slots_of_a_killed_taker_are_released_at_once_and_those_of_a_stopped_one_are_held() {
    let (server, folder) = server(false);
    let mut taker = Process::spawn(
        own_test(a_taker_process)
            .env(SOCKET, folder.join("lmc.sock"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped()),
    );
    server.eventually("it has prepared", |status| status.transfers.stores == 1);
    let status = server.status();
    let pids: Vec<u32> = status
        .instances
        .iter()
        .flat_map(|i| i.pids.clone())
        .collect();
    if pids.is_empty() {
        return println!("skipped: no SO_PEERPIDFD (Linux 6.5)");
    }
    assert_eq!(pids, [taker.id()]);
    let (mut orders, _output) = taker.pipes();
    orders.write_all(b"break\n").expect("it lives");
    server.eventually("the connection is cut", |status| {
        status.transport.connections_open == 0
    });
    taker.stop();
    for hours in [0, 2, 4] {
        server.service.tick(Instant::now() + hours * HOUR);
        assert_eq!(server.status().usage.reserved_slots, 2);
    }
    taker.kill();
    server.assert_idle();
    assert_eq!(server.status().counts.slots_released_by_death, 2);
}
