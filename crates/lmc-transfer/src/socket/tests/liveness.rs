//! Connections of which a part is dead.

use lmc_testkit::in_lab;

use super::*;

/// Forwards connections to a port; those that are marked are swallowed, byte for byte.
struct Proxy {
    port: u16,
    swallows: Arc<AtomicBool>,
}

impl Proxy {
    /// Swallows one connection of those that come, by its number, once the flag is set.
    fn new(to: u16, number: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = listener.local_addr().expect("bound").port();
        let swallows = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&swallows);
        thread::spawn(move || {
            for (at, client) in listener.incoming().enumerate() {
                let Ok(client) = client else { return };
                let Ok(server) = TcpStream::connect(("127.0.0.1", to)) else {
                    return;
                };
                let dead = (at == number).then(|| Arc::clone(&flag));
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (
                        from.try_clone().expect("a copy"),
                        to.try_clone().expect("a copy"),
                    );
                    let dead = dead.clone();
                    thread::spawn(move || {
                        let mut bytes = [0; 65_536];
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            let dead = dead.as_ref().is_some_and(|d| d.load(Ordering::Acquire));
                            if !dead && to.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
            }
        });
        Self { port, swallows }
    }
}

/// Only the first stream was pinged: when another died, large transfers failed for minutes, and
/// the peer still counted as connected.
#[test]
fn one_dead_stream_ends_the_connection() {
    let often = |config: &mut SocketConfig| config.keepalive = Duration::from_millis(100);
    let victim = Victim::new(often);
    let proxy = Proxy::new(victim.port(), 2);
    let other = Victim::new(|config| {
        often(config);
        config.channel.id = name("other");
    });
    let to = name("victim");
    let address = local(proxy.port);
    let connect = other.channel.connect(&to, &address, None, soon());
    block_on(connect).expect("through the proxy");
    proxy.swallows.store(true, Ordering::Release);
    other.eventually("the dead stream is noticed", |v| {
        !v.channel.is_connected(&to)
    });
    victim.eventually("on both sides", |v| !v.channel.is_connected(&name("other")));
    other.ends();
    victim.ends();
}

/// The opposite: an idle connection lives as long as all of its streams do.
#[test]
fn an_idle_connection_lives() {
    if !in_lab("waits 2.5 s, and a machine that is busy for 2 s would end the connection") {
        return;
    }
    let often = |config: &mut SocketConfig| config.keepalive = Duration::from_millis(500);
    let victim = Victim::new(often);
    let other = Victim::new(|config| {
        often(config);
        config.channel.id = name("other");
    });
    let (to, address) = (name("victim"), victim.channel.address());
    block_on(other.channel.connect(&to, address, None, soon())).expect("it listens");
    // Longer than a dead stream would live.
    thread::sleep(Duration::from_millis(2500));
    assert!(other.channel.is_connected(&to));
    assert!(victim.channel.is_connected(&name("other")));
    other.ends();
    victim.ends();
}

/// Requests without an answer kept their capacity for ever: after 64 of them, nothing could be
/// asked any more, and the peer still counted as connected.
#[test]
fn a_peer_that_answers_nothing_is_taken_for_dead() {
    let victim = Victim::new(|config| config.keepalive = Duration::from_millis(200));
    let mut raw = Raw::connect(&victim, 1);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            // It shows signs of life, and takes what it is sent.
            raw.stream.set_nonblocking(true).expect("a socket");
            while !over.load(Ordering::Relaxed) {
                let ping = raw.bytes_of(&Frame::Ping(0));
                let _ = raw.stream.write_all(&ping);
                let _ = raw.stream.read(&mut [0; 4096]);
                thread::sleep(Duration::from_millis(5));
            }
        });
        let (from, index) = (name("raw"), [Index::arena(1, 0)]);
        let slots = vec![victim.slot(1, 64)];
        let read = victim.channel.read(slots, &from, &index, after(200));
        assert_eq!(block_on(read).error, Some(TransferError::Deadline));
        victim.eventually("it is taken for dead", |v| {
            !v.channel.is_connected(&name("raw"))
        });
        over.store(true, Ordering::Relaxed);
    });
    victim.ends();
}
