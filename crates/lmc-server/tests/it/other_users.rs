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
use lmc_server::config::ALL_SETTINGS;
use lmc_testkit::{
    DEADLINE, Folder, Process, free_port, is_root, soon, test_arguments, until, write_secret,
};
use lmc_transfer::{Address, ChannelConfig, SocketConfig};
use lmc_vllm_adapter::{Client, Reply, Request};
use tokio::runtime::Runtime;

use crate::common::prompt::{CHUNKS, register, retrieve, store};
use crate::common::{Server, ask};

/// A user that is not root.
const STRANGER: &str = "65534";
/// The listeners that [`stranger`] visits, as `SETTING=ADDRESS` with commas between them.
const LISTENERS: &str = "LMC_TEST_STRANGER_LISTENERS";
/// The listeners that serve [`stranger`], by their settings.
const SERVED: &str = "LMC_TEST_STRANGER_SERVED";
/// Port at which [`listening_stranger`] listens.
const LISTEN: &str = "LMC_TEST_STRANGER_LISTEN";

/// Visits the listener at an address.
type Visit = fn(&str) -> bool;

/// Every listener of a daemon: the setting that opens it, and a visit that returns true if the visitor
/// is served. What is not in here has no gate.
const VISITS: [(&str, Visit); 6] = [
    ("port", |at| noop(number(at)).is_some()),
    ("http-port", |at| may_change(number(at))),
    ("prometheus-port", |at| passes_guard(number(at))),
    ("ipc-path", |at| maps_pool(Path::new(at))),
    ("p2p-listen", |at| says_its_name(number(at))),
    ("p2p-directory-listen", |at| says_its_name(number(at))),
];

/// Settings with an address or a port that are no listener that every user can reach, each with the
/// reason.
const NO_LISTENERS: [(&str, &str); 2] = [
    (
        "isolated-ipc",
        "it listens nowhere; connections are accepted as without it",
    ),
    (
        "p2p-advertise",
        "the address of --p2p-listen, as peers see it",
    ),
];

fn number(port: &str) -> u16 {
    port.parse().expect("a port")
}

/// Returns the command that runs a program in a process of another user.
fn as_stranger(folder: &Folder, program: &Path) -> Command {
    let copy = folder.join("program");
    // The folder that cargo builds in may be closed to others.
    fs::copy(program, &copy).expect("space");
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid", STRANGER, "--regid", STRANGER, "--clear-groups"])
        .arg(&copy)
        .current_dir("/");
    command
}

/// Returns the command that runs a test in a process of another user.
fn test_as_stranger(folder: &Folder, test: impl Fn()) -> Command {
    let program = std::env::current_exe().expect("a path");
    let mut command = as_stranger(folder, &program);
    command.args(test_arguments(test));
    command
}

/// Runs a test as another user, and returns its output.
pub(crate) fn run_as_stranger(test: impl Fn(), variables: &[(&str, &str)]) -> String {
    let folder = open_folder();
    let mut command = test_as_stranger(&folder, test);
    let output = command.envs(variables.iter().copied()).output();
    let output = output.expect("util-linux is there");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{out}{err}");
    assert!(out.contains("1 passed"), "{out}");
    out
}

/// A server that listens wherever it can.
struct Everywhere {
    server: Server,
    /// The address of each listener, by its setting.
    listeners: Vec<(&'static str, String)>,
}

impl Everywhere {
    /// Starts the server.
    ///
    /// # Panics
    /// If it listens at an address that has no visit.
    fn start(socket: &Path, flags: &[&str]) -> Self {
        let [peers, directory, metrics] = [(); 3].map(|()| free_port().to_string());
        let socket = socket.to_str().expect("text").to_owned();
        let at = |port: &str| format!("127.0.0.1:{port}");
        let (peers_at, directory_at) = (at(&peers), at(&directory));
        let everywhere = [
            "--ipc-path",
            &socket,
            "--p2p-listen",
            &peers_at,
            "--prometheus-port",
            &metrics,
        ];
        let directory_flags = ["--p2p-directory-listen", &directory_at];
        let server = Server::start(&[&everywhere[..], &directory_flags, flags].concat());
        let listeners = VISITS.map(|(setting, _)| {
            let address = match setting {
                "port" => server.port.to_string(),
                "http-port" => server.http.to_string(),
                "prometheus-port" => metrics.clone(),
                "ipc-path" => socket.clone(),
                "p2p-listen" => peers.clone(),
                "p2p-directory-listen" => directory.clone(),
                other => panic!("{other} is not turned on"),
            };
            (setting, address)
        });
        let visited = listeners.iter().map(|(_, address)| address.clone());
        assert_eq!(
            listening(server.process.id()),
            visited.collect(),
            "a listener without a gate"
        );
        Self {
            server,
            listeners: listeners.into(),
        }
    }

    /// Lets another user visit all listeners, of which the given ones serve it.
    fn visit(&self, served: &[&str]) {
        let listeners = self.listeners.iter();
        let listeners: Vec<_> = listeners.map(|(name, at)| format!("{name}={at}")).collect();
        let variables = [
            (LISTENERS, &*listeners.join(",")),
            (SERVED, &served.join(",")),
        ];
        run_as_stranger(stranger, &variables);
    }
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

/// Returns true if the server carries out every change over HTTP, and false if it refuses every change.
fn may_change(http: u16) -> bool {
    let changes = [
        ("PUT", "/quota/tenant", "{\"limit_gb\": 0}"),
        ("DELETE", "/quota/tenant", ""),
        ("POST", "/cache/clear", "{\"force\": true}"),
        ("POST", "/cache/checksums", "{}"),
        ("GET", "/quota/tenant", ""),
    ];
    let refused = changes.map(|(method, path, body)| {
        let (code, answer) = ask(http, method, path, body);
        assert_eq!(code == 403, answer.contains("--trusted-users"), "{answer}");
        code == 403
    });
    assert!(refused == [refused[0]; 5], "{refused:?}");
    // Monitoring needs no trust.
    for path in ["/metrics", "/healthz", "/status"] {
        assert_eq!(ask(http, "GET", path, "").0, 200, "{path}");
    }
    !refused[0]
}

/// Returns false if the port for metrics refuses changes by this user. The port carries out no change.
fn passes_guard(metrics: u16) -> bool {
    assert_eq!(ask(metrics, "GET", "/metrics", "").0, 200);
    let (code, answer) = ask(metrics, "POST", "/cache/clear", "{\"force\": true}");
    assert!([403, 404].contains(&code), "{answer}");
    code == 404
}

/// Returns true if the pool is passed over a Unix socket.
fn maps_pool(socket: &Path) -> bool {
    let Some(pool) = pool(socket) else {
        return false;
    };
    let len = fs::File::from(pool).metadata().expect("it is open").len();
    assert_eq!(len, 16 << 20);
    true
}

/// The process of the other user. Does nothing when the test suite runs it.
#[test]
fn stranger() {
    let Ok(listeners) = std::env::var(LISTENERS) else {
        return;
    };
    let served = std::env::var(SERVED).expect("it is set");
    for (setting, address) in listeners.split(',').filter_map(|one| one.split_once('=')) {
        let visit = VISITS.iter().find(|(name, _)| *name == setting);
        let (_, visit) = visit.expect("a visit for each listener");
        let expected = served.split(',').any(|name| name == setting);
        assert_eq!(visit(address), expected, "{setting}");
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
        let mut command = test_as_stranger(&folder, listening_stranger);
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

/// Returns the addresses at which a process can be reached: its ports of TCP that listen, its ports of
/// UDP without a peer, and its Unix sockets that have a name.
fn listening(pid: u32) -> BTreeSet<String> {
    let (tcp, udp) = (sockets(pid, ["tcp", "tcp6"]), sockets(pid, ["udp", "udp6"]));
    let tcp = tcp
        .into_iter()
        .filter(|socket| socket.state == LISTEN_STATE);
    let udp = udp.into_iter().filter(|socket| socket.remote == 0);
    let ports = tcp.chain(udp).map(|socket| socket.local.to_string());
    ports.chain(named_sockets(pid)).collect()
}

/// Returns the TCP ports that a process has connected to.
fn dialled(pid: u32) -> BTreeSet<u16> {
    let listening = listening(pid);
    let connected = sockets(pid, ["tcp", "tcp6"]).into_iter();
    let connected = connected.filter(|socket| !listening.contains(&socket.local.to_string()));
    connected.map(|socket| socket.remote).collect()
}

/// State of a TCP socket that listens, in `/proc/net/tcp`.
const LISTEN_STATE: &str = "0A";

/// A socket of TCP or UDP.
struct PortSocket {
    local: u16,
    remote: u16,
    state: String,
}

/// Returns the sockets that a process has in some tables of `/proc/net`.
fn sockets(pid: u32, tables: [&str; 2]) -> Vec<PortSocket> {
    // Number, local address, remote address, state, ..., the inode as the tenth.
    let rows = tables.into_iter().flat_map(|table| rows(pid, table, 9));
    let socket = |fields: Vec<String>| {
        let port = |at: usize| {
            let (_, port) = fields.get(at)?.rsplit_once(':')?;
            u16::from_str_radix(port, 16).ok()
        };
        Some(PortSocket {
            local: port(1)?,
            remote: port(2)?,
            state: fields.get(3)?.clone(),
        })
    };
    rows.filter_map(socket).collect()
}

/// Returns the names of a process's Unix sockets.
fn named_sockets(pid: u32) -> impl Iterator<Item = String> {
    // The name follows the inode. An accepted connection has the name of its listener, too.
    let rows = rows(pid, "unix", 6).into_iter();
    let names = rows.filter_map(|fields| fields.get(7).cloned());
    // The server binds its socket with this suffix, and renames it.
    let suffix = format!(".{pid}");
    names.map(move |name| name.strip_suffix(&suffix).unwrap_or(&name).to_owned())
}

/// Returns the rows of a table in `/proc/net` that are about sockets of a process, in fields.
fn rows(pid: u32, table: &str, inode: usize) -> Vec<Vec<String>> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).expect("its process");
    let links = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let open: Vec<String> = links.map(|link| link.display().to_string()).collect();
    let table = fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
    let fields = |line: &str| {
        line.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let is_its = |fields: &Vec<String>| {
        let inode = fields.get(inode).map(|inode| format!("socket:[{inode}]"));
        inode.is_some_and(|socket| open.contains(&socket))
    };
    table.lines().map(fields).filter(is_its).collect()
}

/// A new setting that opens a listener gets a visit.
#[test]
fn every_setting_that_listens_is_visited() {
    let known = VISITS.iter().map(|(name, _)| *name);
    let known: BTreeSet<&str> = known.chain(NO_LISTENERS.map(|(name, _)| name)).collect();
    let listens = |name: &str, placeholder: &str| {
        ["PORT", "ADDR:PORT"].contains(&placeholder)
            || ["listen", "port", "ipc", "socket"]
                .iter()
                .any(|word| name.split('-').any(|part| part == *word))
    };
    let settings = ALL_SETTINGS.iter();
    let found = settings.filter(|info| listens(info.name, info.placeholder));
    assert_eq!(found.map(|info| info.name).collect::<BTreeSet<_>>(), known);
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
    let everywhere = Everywhere::start(&socket, &[]);
    let server = &everywhere.server;
    let limit = "{\"limit_gb\": 7}";
    assert_eq!(ask(server.http, "PUT", "/quota/tenant", limit).0, 200);
    everywhere.visit(&[]);
    // Also where the socket's mode lets it connect, as where others are trusted.
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o666)).expect("it is ours");
    everywhere.visit(&[]);
    server.line("uid 65534 of this host is not trusted");
    let (_, quota) = ask(server.http, "GET", "/quota/tenant", "");
    assert!(quota.contains("\"limit_gb\":7"), "{quota}");
    let (_, metrics) = ask(server.http, "GET", "/metrics", "");
    assert!(
        metrics.contains("lmc_connections_untrusted_total 3\n"),
        "{metrics}"
    );
    for ((setting, visit), (_, address)) in VISITS.iter().zip(&everywhere.listeners) {
        assert!(visit(address), "{setting} does not serve its own user");
    }
}

/// With a key the ports of peers and directories ask for that.
#[test]
fn another_user_without_the_key_is_refused() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = open_folder();
    let key = folder.join("key");
    write_secret(&key, &"0123456789abcdef".repeat(4));
    let key = [
        "--p2p-key",
        key.to_str().expect("text"),
        "--trusted-users",
        STRANGER,
    ];
    let everywhere = Everywhere::start(&folder.join("lmc.sock"), &key);
    everywhere.visit(&["port", "http-port", "prometheus-port", "ipc-path"]);
}

/// A daemon of another user with this one as its peer could read the pool, and a clear at that daemon
/// emptied it.
#[test]
fn a_daemon_of_another_user_reads_and_clears_nothing() {
    if !is_root() {
        return println!("skipped: not root");
    }
    for is_trusted in [false, true] {
        let at = format!("127.0.0.1:{}", free_port());
        let users = if is_trusted { STRANGER } else { "own" };
        let owner = Server::start(&["--p2p-listen", &at, "--trusted-users", users]);
        let mut engine = owner.client();
        let shm_name = register(&mut engine);
        store(&mut engine, &shm_name);

        let folder = open_folder();
        let own = format!("127.0.0.1:{}", free_port());
        let peers = ["--p2p-listen", &own, "--p2p-peer", &at];
        let command = as_stranger(&folder, Path::new(env!("CARGO_BIN_EXE_lmc")));
        let thief = Server::start_by(command, &[&peers[..], &["--state-dir", "none"]].concat());
        let mut theirs = thief.client();
        let their_shm = register(&mut theirs);
        let mut requests = 0..;
        let mut stolen = || {
            let request = format!("theirs-{}", requests.next().expect("a number"));
            retrieve(&mut theirs, &their_shm, &request)
        };
        if is_trusted {
            until("a trusted user's daemon reads", || {
                stolen() == CHUNKS as u64
            });
        } else {
            owner.line("a connection of a peer is refused: uid 65534");
            assert_eq!(stolen(), 0);
        }
        let (code, answer) = ask(thief.http, "POST", "/cache/clear", "{\"force\": true}");
        assert_eq!(code, 200, "{answer}");
        let mut requests = 0..;
        let mut kept = || {
            let request = format!("ours-{}", requests.next().expect("a number"));
            retrieve(&mut engine, &shm_name, &request)
        };
        match is_trusted {
            true => until("a trusted user's clear arrives", || kept() == 0),
            false => assert_eq!(kept(), CHUNKS as u64),
        }
    }
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
        let everywhere = Everywhere::start(&socket, &["--trusted-users", users]);
        everywhere.visit(&VISITS.map(|(setting, _)| setting));
    }
}
