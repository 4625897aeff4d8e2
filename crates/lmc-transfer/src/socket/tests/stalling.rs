//! Those who listen and do not go on.

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

/// Connects until nobody else can wait for the listener.
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
    static RUNTIME: std::sync::OnceLock<tokio::runtime::Runtime> = std::sync::OnceLock::new();
    let runtime = RUNTIME.get_or_init(|| tokio::runtime::Runtime::new().expect("a runtime"));
    runtime.block_on(future)
}

/// The one who connects waited for as long as its deadline was away.
#[test]
fn who_listens_and_says_nothing_is_given_up() {
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
    assert!(began.elapsed() < Duration::from_secs(10));
    victim.ends();
}

/// To find out whether somebody listens there took for ever where that one accepted nobody.
#[test]
fn a_unix_socket_that_hangs_is_in_use() {
    let folder = Folder::new("hangs");
    let path = folder.0.join("socket");
    let listener = unix::UnixListener::bind(&path).expect("bound");
    let waiting = fill(&path);
    let arena = ArenaConfig::anonymous(4096).build().expect("a page");
    let config = ChannelConfig::new(name("a"), Arc::new(arena));
    let taken = SocketConfig::new(config, Address::Unix(path.clone())).build();
    let taken = taken.map(drop).expect_err("somebody listens there");
    assert!(taken.to_string().contains("another process"), "{taken}");
    drop((waiting, listener));
}

/// A Unix socket where many wait said no at once.
#[test]
fn a_connect_waits_for_room_at_a_unix_socket() {
    let folder = Folder::new("room");
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

/// One address had all the places, and nobody else came in until it was forgotten.
#[test]
fn those_of_one_address_who_stall_keep_no_other_out() {
    let victim = Victim::new(|config| {
        config.channel.handshake_timeout = Duration::from_secs(60);
    });
    let to = ([127, 0, 0, 1], victim.port()).into();
    let stall = || async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        let from = ([127, 0, 0, 2], 0).into();
        socket.bind(from).expect("all of 127.0.0.0/8 is this host");
        socket.connect(to).await.expect("it listens")
    };
    let stalled: Vec<_> = (0..600).map(|_| block_on_tokio(stall())).collect();
    let other = Victim::new(|config| config.channel.id = name("other"));
    let address = victim.channel.address();
    let began = Instant::now();
    block_on(
        other
            .channel
            .connect(&name("victim"), address, None, soon()),
    )
    .expect("it is heard");
    assert!(began.elapsed() < Duration::from_secs(20));
    let refused = |v: &Victim| v.channel.stats().refused_handshakes == 600 - 256;
    victim.eventually("no more than its half is kept", refused);
    drop(stalled);
    other.ends();
    victim.ends();
}
