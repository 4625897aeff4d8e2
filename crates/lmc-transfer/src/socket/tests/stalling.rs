//! Handshakes that stall, of either side.

use std::os::unix::net as unix;

use super::*;

/// A folder that is removed.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new(what: &str) -> Self {
        let folder = format!("lmc-socket-{what}-{}", std::process::id());
        let folder = std::env::temp_dir().join(folder);
        std::fs::create_dir_all(&folder).expect("a folder");
        Self(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Connects until the backlog of the listener is full.
fn fill(path: &std::path::Path) -> Vec<tokio::net::UnixStream> {
    let mut waiting = Vec::new();
    loop {
        match block_on_tokio(tokio::net::UnixStream::connect(path)) {
            Ok(stream) => waiting.push(stream),
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                return waiting;
            }
        }
    }
}

fn block_on_tokio<T>(future: impl Future<Output = T>) -> T {
    static RUNTIME: OnceLock<tokio::runtime::Runtime> = OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| tokio::runtime::Runtime::new().expect("a runtime"));
    runtime.block_on(future)
}

/// A connect waited for as long as its deadline was away.
#[test]
fn a_listener_that_sends_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let victim = Victim::new(|config| {
        config.channel.handshake_timeout = Duration::from_millis(200);
    });
    let (raw, address) = (name("raw"), local(port));
    let began = Instant::now();
    let connected = block_on(victim.channel.connect(&raw, &address, None, soon()));
    assert!(
        matches!(connected, Err(ConnectError::Deadline { .. })),
        "{connected:?}"
    );
    assert!(began.elapsed() < Duration::from_secs(30));
    victim.ends();
}

/// Finding out whether a process listens there took for ever where that one accepted none.
#[test]
fn a_unix_socket_that_hangs_is_in_use() {
    let folder = Folder::new("hangs");
    let path = folder.0.join("socket");
    let listener = unix::UnixListener::bind(&path).expect("bound");
    let waiting = fill(&path);
    let arena = ArenaConfig::anonymous(4096).build().expect("a page");
    let config = ChannelConfig::new(name("a"), Arc::new(arena));
    let taken = SocketConfig::new(config, Address::Unix(path.clone())).build();
    let taken = taken.map(drop).expect_err("another process listens there");
    assert!(taken.to_string().contains("another process"), "{taken}");
    drop((waiting, listener));
}

/// A Unix socket where many wait said no at once.
#[test]
fn a_connect_waits_for_a_full_backlog() {
    let folder = Folder::new("capacity");
    let path = folder.0.join("socket");
    let listener = unix::UnixListener::bind(&path).expect("bound");
    let waiting = fill(&path);
    let victim = Victim::new(|_| {});
    let (raw, address) = (name("raw"), Address::Unix(path));
    thread::scope(|scope| {
        let connecting = scope.spawn(|| {
            let connect = victim.channel.connect(&raw, &address, None, soon());
            block_on(connect)
        });
        thread::sleep(Duration::from_millis(50));
        assert!(!connecting.is_finished(), "it does not wait");
        for _ in &waiting {
            drop(listener.accept().expect("they wait"));
        }
        let (mut stream, _) = listener.accept().expect("it comes");
        stream.write_all(&preamble(77, 0)).expect("sent");
        let connected = connecting.join().expect("a connect does not panic");
        assert!(
            matches!(connected, Err(ConnectError::Version { theirs: 77, .. })),
            "{connected:?}"
        );
    });
    victim.ends();
}

/// One address had all the capacity, and no other peer came in until it was forgotten.
#[test]
fn idle_connects_of_one_address_keep_no_other_out() {
    let victim = Victim::new(|config| {
        config.channel.handshake_timeout = Duration::from_secs(300);
    });
    let stalled: Vec<_> = (0..600).map(|_| idle_connect(&victim, 2)).collect();
    let other = Victim::new(|config| config.channel.id = name("other"));
    let address = victim.channel.address();
    block_on(
        other
            .channel
            .connect(&name("victim"), address, None, soon()),
    )
    .expect("it is let in");
    let refused = |v: &Victim| v.channel.stats().refused_handshakes >= 600 - 128;
    victim.eventually("no more than its share is kept", refused);
    drop(stalled);
    other.ends();
    victim.ends();
}

/// Connects from 127.0.0.`host`, and sends nothing.
fn idle_connect(victim: &Victim, host: u8) -> tokio::net::TcpStream {
    let to = ([127, 0, 0, 1], victim.port()).into();
    block_on_tokio(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        let from = ([127, 0, 0, host], 0).into();
        socket.bind(from).expect("all of 127.0.0.0/8 is this host");
        socket.connect(to).await.expect("it listens")
    })
}

/// Idle sockets of a few addresses, 54 in a second, kept everybody else out for good.
#[test]
fn idle_connects_of_many_addresses_keep_no_peer_out() {
    let victim = Victim::new(|config| {
        config.channel.handshake_timeout = Duration::from_secs(300);
    });
    let (full, over) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut idle = std::collections::VecDeque::new();
            let mut host = 0;
            while !over.load(Ordering::Relaxed) {
                host = host % 8 + 2;
                idle.push_back(idle_connect(&victim, host));
                if idle.len() > 400 {
                    idle.pop_front();
                }
                // Still ten times as many. An honest handshake is evicted after 192 idle ones.
                if full.load(Ordering::Relaxed) {
                    thread::sleep(Duration::from_millis(2));
                }
            }
        });
        let refused = |v: &Victim| v.channel.stats().refused_handshakes > 200;
        victim.eventually("the limit is reached", refused);
        full.store(true, Ordering::Relaxed);
        for round in 0..5 {
            let other = Victim::new(|config| config.channel.id = name("other"));
            let (to, address) = (name("victim"), victim.channel.address());
            let connected = block_on(other.channel.connect(&to, address, None, soon()));
            connected.unwrap_or_else(|error| panic!("round {round}: {error}"));
            other.ends();
        }
        over.store(true, Ordering::Relaxed);
    });
    victim.ends();
}
