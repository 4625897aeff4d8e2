//! Other users of the host, against the real binary.

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use lmc_memory::ArenaConfig;
use lmc_testkit::{DEADLINE, Folder, Process, free_port, is_root, soon, test_arguments};
use lmc_transfer::{Address, ChannelConfig, SocketConfig};
use lmc_vllm_adapter::{Client, Reply, Request};
use tokio::runtime::Runtime;

use crate::common::{Server, ask};

/// A user that is not root.
const STRANGER: &str = "65534";
const PORTS: &str = "LMC_TEST_STRANGER_PORTS";
const EXPECTED: &str = "LMC_TEST_STRANGER_EXPECTED";
const SOCKET: &str = "LMC_TEST_STRANGER_SOCKET";

/// Ports of peers and directories, with commas between them.
const PEERS: &str = "LMC_TEST_STRANGER_PEERS";
/// Port at which [`listening_stranger`] listens.
const LISTEN: &str = "LMC_TEST_STRANGER_LISTEN";

/// Returns the command that runs a test in a process of another user.
fn as_stranger(folder: &Folder, test: impl Fn()) -> Command {
    let program = folder.join("test");
    // The folder that cargo builds in may be closed to others.
    fs::copy(std::env::current_exe().expect("a path"), &program).expect("space");
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"])
        .arg(&program)
        .args(test_arguments(test))
        .current_dir("/");
    command
}

/// Runs [`stranger`] in a process of another user.
fn visited_by_stranger(server: &Server, socket: &Path, peers: &[u16], expected: &str) {
    let folder = open_folder();
    let output = as_stranger(&folder, stranger)
        .env(PORTS, format!("{},{}", server.port, server.http))
        .env(EXPECTED, expected)
        .env(
            PEERS,
            peers
                .iter()
                .map(u16::to_string)
                .collect::<Vec<_>>()
                .join(","),
        )
        .env(SOCKET, socket)
        .output()
        .expect("util-linux is there");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{out}");
}

/// Returns a folder that other users can enter, for the server's Unix socket.
fn open_folder() -> Folder {
    let folder = Folder::temporary();
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).expect("it is ours");
    folder
}

/// Asks for the pool over the Unix socket.
fn pool(socket: &Path) -> Option<OwnedFd> {
    let mut client = Client::connect_unix(socket, DEADLINE).ok()?;
    client.ask(&Request::PoolDescriptor).ok()?;
    client.take_descriptor()
}

fn loopback(port: u16) -> Address {
    Address::Tcp {
        host: "127.0.0.1".to_owned(),
        port,
    }
}

/// Returns the settings of a channel that admits every user.
fn channel_at(port: u16) -> SocketConfig {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("memory");
    let id = format!("stranger-{port}").parse().expect("a name");
    SocketConfig::new(ChannelConfig::new(id, Arc::new(arena)), loopback(port))
}

/// Returns true if the peer or the directory at this port says its name.
fn says_its_name(port: u16) -> bool {
    let channel = channel_at(0).build().expect("a channel");
    let runtime = Runtime::new().expect("threads");
    runtime
        .block_on(channel.identify(&loopback(port), soon()))
        .is_ok()
}

fn noop(port: u16) -> Option<Reply> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut client = Client::connect(address, DEADLINE).ok()?;
    client.ask(&Request::Noop).ok()
}

/// The process of the other user. Does nothing when the test suite runs it.
#[test]
fn stranger() {
    let Ok(ports) = std::env::var(PORTS) else {
        return;
    };
    let (port, http) = ports.split_once(',').expect("two ports");
    let (port, http) = (port.parse().expect("a port"), http.parse().expect("a port"));
    let trusted = std::env::var(EXPECTED).expect("it is set") == "trusted";
    assert_eq!(noop(port).is_some(), trusted);
    let socket = std::env::var_os(SOCKET).expect("it is set");
    let pool = pool(Path::new(&socket));
    assert_eq!(pool.is_some(), trusted);
    if let Some(pool) = pool {
        let len = fs::File::from(pool).metadata().expect("it is open").len();
        assert_eq!(len, 16 << 20);
    }
    for port in std::env::var(PEERS)
        .expect("it is set")
        .split_terminator(',')
    {
        let port = port.parse().expect("a port");
        assert_eq!(says_its_name(port), trusted, "{port}");
    }
    for (method, path, body) in [
        ("PUT", "/quota/tenant", "{\"limit_gb\": 0}"),
        ("DELETE", "/quota/tenant", ""),
        ("POST", "/cache/clear", "{\"force\": true}"),
    ] {
        let (code, answer) = ask(http, method, path, body);
        assert_eq!(code, if trusted { 200 } else { 403 }, "{method} {path}");
        assert_eq!(answer.contains("--trusted-users"), !trusted, "{answer}");
    }
    for path in ["/metrics", "/healthz", "/quota/tenant"] {
        assert_eq!(ask(http, "GET", path, "").0, 200, "{path}");
    }
}

/// The process of the other user that listens at the address of a peer, and prints which daemons are
/// connected. Does nothing when the test suite runs it.
#[test]
fn listening_stranger() {
    let Ok(port) = std::env::var(LISTEN) else {
        return;
    };
    let mut config = channel_at(port.parse().expect("a port"));
    config.channel.on_peer = Some(Arc::new(|peer, event| eprintln!("{peer}: {event:?}")));
    let _channel = config.build().expect("a free port");
    eprintln!("the stranger listens");
    // It ends when it is killed.
    loop {
        std::thread::park();
    }
}

/// A stranger that listens at the address of a peer.
struct ListeningStranger {
    process: Process,
    port: u16,
    _folder: Folder,
}

impl ListeningStranger {
    fn start() -> Self {
        let (port, folder) = (free_port(), open_folder());
        let mut command = as_stranger(&folder, listening_stranger);
        let process = Process::spawn(command.env(LISTEN, port.to_string()));
        process.line("the stranger listens");
        Self {
            process,
            port,
            _folder: folder,
        }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

/// Starts a server that connects to a peer and to a directory, and listens wherever it can.
fn dialling(peer: &ListeningStranger, directory: &ListeningStranger, flags: &[&str]) -> Server {
    let listen = ["--p2p-listen", &format!("127.0.0.1:{}", free_port())];
    let peer = ["--p2p-peer", &peer.address()];
    let directory = ["--p2p-directory", &format!("lmc://{}", directory.address())];
    Server::start(&[&listen, &peer, &directory, flags].concat())
}

/// Starts a server that listens wherever it can, and returns its ports for peers and directories.
///
/// # Panics
/// If it listens on a port that this test does not visit.
fn serving(socket: &Path, flags: &[&str]) -> (Server, Vec<u16>) {
    let peers = [free_port(), free_port()];
    let [peer, directory] = peers.map(|port| format!("127.0.0.1:{port}"));
    let everywhere = [
        "--ipc-path",
        socket.to_str().expect("text"),
        "--p2p-listen",
        &peer,
        "--p2p-directory-listen",
        &directory,
    ];
    let server = Server::start(&[&everywhere, flags].concat());
    let mut visited = vec![server.port, server.http, peers[0], peers[1]];
    visited.sort_unstable();
    assert_eq!(
        listening(server.process.id()),
        visited,
        "a listener without a gate"
    );
    (server, peers.to_vec())
}

/// Returns the TCP ports that a process listens on, in order.
fn listening(pid: u32) -> Vec<u16> {
    let sockets = sockets(pid).into_iter();
    let listening = sockets.filter_map(|(local, _, is_listening)| is_listening.then_some(local));
    let mut ports: Vec<u16> = listening.collect();
    ports.sort_unstable();
    ports
}

/// Returns the TCP ports that a process has connected to.
fn dialled(pid: u32) -> BTreeSet<u16> {
    let listening = listening(pid);
    let sockets = sockets(pid).into_iter();
    let connected = sockets.filter(|(local, ..)| !listening.contains(local));
    connected.map(|(_, remote, _)| remote).collect()
}

/// Returns the TCP sockets of a process: both ports, and whether it listens.
fn sockets(pid: u32) -> Vec<(u16, u16, bool)> {
    let sockets = fs::read_dir(format!("/proc/{pid}/fd")).expect("its process");
    let links = sockets.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let sockets: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let tables = ["tcp", "tcp6"];
    tables
        .into_iter()
        .filter_map(|table| fs::read_to_string(format!("/proc/{pid}/net/{table}")).ok())
        .flat_map(|table| {
            let socket = |line: &str| {
                // Number, local address, remote address, state, ..., the inode as the tenth.
                let fields: Vec<&str> = line.split_whitespace().collect();
                let inode = format!("socket:[{}]", fields.get(9)?);
                let port = |at: usize| {
                    let (_, port) = fields.get(at)?.rsplit_once(':')?;
                    u16::from_str_radix(port, 16).ok()
                };
                let socket = (port(1)?, port(2)?, fields.get(3) == Some(&"0A"));
                sockets.contains(&inode).then_some(socket)
            };
            table.lines().filter_map(socket).collect::<Vec<_>>()
        })
        .collect()
}

/// Until 8bf0141 every user of the host could commit slots that it had not written, which engines
/// of the server's user then hit with the bytes of others, and could clear the cache.
#[test]
fn another_user_of_the_host_is_refused() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = open_folder();
    let socket = folder.join("lmc.sock");
    let (server, peers) = serving(&socket, &[]);
    assert_eq!(
        ask(server.http, "PUT", "/quota/tenant", "{\"limit_gb\": 7}").0,
        200
    );
    visited_by_stranger(&server, &socket, &peers, "refused");
    // Also where the socket's mode lets it connect, as where others are trusted.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("it is ours");
    visited_by_stranger(&server, &socket, &peers, "refused");
    server.line("uid 65534 of this host is not trusted");
    let (_, quota) = ask(server.http, "GET", "/quota/tenant", "");
    assert!(quota.contains("\"limit_gb\":7"), "{quota}");
    let (_, metrics) = ask(server.http, "GET", "/metrics", "");
    assert!(
        metrics.contains("lmc_connections_untrusted_total 3\n"),
        "{metrics}"
    );
    assert!(noop(server.port).is_some(), "its own user is served");
    assert!(peers.iter().all(|&port| says_its_name(port)));
    assert!(pool(&socket).is_some());
}

/// A user that listened at the address of a peer or of a directory before that did was connected to,
/// and could read the pool, copy into it and clear it.
#[test]
fn another_user_of_the_host_is_no_peer_and_no_directory() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let [peer, directory] = [(); 2].map(|()| ListeningStranger::start());
    let server = dialling(&peer, &directory, &[]);
    for stranger in [&peer, &directory] {
        let line = server.line(&format!("address={}", stranger.address()));
        assert!(
            line.contains("uid 65534 of this host is not trusted"),
            "{line}"
        );
    }
    for stranger in [peer, directory] {
        let log = stranger.process.log();
        assert!(
            !log.iter().any(|line| line.contains("Connected")),
            "{log:?}"
        );
    }
}

/// The server opens no other connection than those that the test above refuses.
#[test]
fn a_user_that_is_named_is_connected_to() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let [peer, directory] = [(); 2].map(|()| ListeningStranger::start());
    let server = dialling(&peer, &directory, &["--trusted-users", STRANGER]);
    for stranger in [&peer, &directory] {
        stranger.process.line("Connected");
    }
    let expected = BTreeSet::from([peer.port, directory.port]);
    assert_eq!(
        dialled(server.process.id()),
        expected,
        "connected without a check"
    );
}

#[test]
fn a_user_that_is_named_is_served() {
    if !is_root() {
        return println!("skipped: not root");
    }
    for users in [STRANGER, "all"] {
        let folder = open_folder();
        let socket = folder.join("lmc.sock");
        let (server, peers) = serving(&socket, &["--trusted-users", users]);
        visited_by_stranger(&server, &socket, &peers, "trusted");
    }
}
