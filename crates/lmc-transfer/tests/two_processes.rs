//! Sockets between two processes, one of which is frozen, killed and started again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot};
use lmc_transfer::conformance::{check_value, fill_value};
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerId, Slot, SocketChannel, SocketConfig, TransferChannel,
    TransferError, block_on,
};

const LISTEN: &str = "LMC_TEST_PEER_LISTEN";
const LENS: [u64; 5] = [1 << 20, 1, 70_000, 4096, 3 << 20];
/// Stamp of what the peer has, and tag under which it sends back what it receives.
const STAMP: u64 = 21;
const TAG: u64 = 5;

fn after(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
}

fn soon() -> Instant {
    after(30_000)
}

fn name(text: &str) -> PeerId {
    text.parse().expect("a name")
}

fn side(id: &str, listen: Address) -> (SocketChannel, Pool) {
    let arena = ArenaConfig::anonymous(32 << 20).build().expect("32 MiB");
    let arena = Arc::new(arena);
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).expect("a pool");
    let config = ChannelConfig::new(name(id), arena);
    let channel = SocketConfig::new(config, listen).build();
    (channel.expect("it listens"), pool)
}

fn slots(pool: &Pool) -> Vec<ReservedSlot> {
    let slot = |&len| pool.reserve(len).expect("room");
    LENS.iter().map(slot).collect()
}

fn objects(pool: &Pool, stamp: u64) -> Vec<SealedSlot> {
    let mut slots = slots(pool);
    for (place, slot) in slots.iter_mut().enumerate() {
        fill_value(stamp, place, slot.bytes_mut());
    }
    slots
        .into_iter()
        .map(|slot| slot.written().seal())
        .collect()
}

/// The other process: has objects at the start of its arena, sends back what it receives.
#[test]
#[ignore = "it is the peer that the other tests start"]
fn peer() {
    let listen = std::env::var(LISTEN).expect("started by another test");
    let (channel, pool) = side("peer", listen.parse().expect("an address"));
    let kept = objects(&pool, STAMP);
    let indices: Vec<u64> = kept.iter().map(|slot| slot.offset() / 4096).collect();
    println!("ready {} {indices:?}", channel.address());
    let test = name("test");
    // The test kills it; should the test die, this ends by itself.
    let end = after(120_000);
    while Instant::now() < end {
        let received = block_on(channel.receive(slots(&pool), &test, TAG, after(500)));
        let Ok(received) = received.into_result() else {
            thread::sleep(Duration::from_millis(5));
            continue;
        };
        let back = received.into_iter().map(|slot| slot.seal()).collect();
        let _ = block_on(channel.send(back, &test, TAG, after(5000)));
    }
}

struct Peer {
    child: Child,
    address: Address,
    indices: Vec<Index>,
}

impl Peer {
    fn start(listen: &Address) -> Self {
        let program = std::env::current_exe().expect("a running test");
        let mut child = Command::new(program)
            .args(["peer", "--exact", "--ignored", "--nocapture"])
            .env(LISTEN, listen.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut lines = output.lines().map(|line| line.expect("text"));
        let ready = lines.find_map(|line| line.split_once("ready ").map(|(_, r)| r.to_owned()));
        let ready = ready.expect("the peer says that it is ready");
        let (address, indices) = ready.split_once(' ').expect("two words");
        let numbers = indices.trim_matches(['[', ']']).split(", ");
        Self {
            child,
            address: address.parse().expect("an address"),
            indices: numbers
                .map(|n| Index(n.parse().expect("a number")))
                .collect(),
        }
    }

    fn signal(&self, signal: &str) {
        // The shell's own: not every machine has the program.
        let kill = format!("kill {signal} {}", self.child.id());
        let status = Command::new("sh").args(["-c", &kill]).status();
        assert!(status.expect("sh is there").success());
    }

    /// Stops all its threads, until SIGCONT.
    fn stop(&self) {
        self.signal("-STOP");
        let end = soon();
        let stopped = || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
            let mut threads = threads.expect("its threads").flatten();
            // The state follows the name, which is in brackets.
            threads.all(|thread| {
                let stat = std::fs::read_to_string(thread.path().join("stat"));
                stat.is_ok_and(|stat| stat.contains(") T "))
            })
        };
        while !stopped() {
            assert!(Instant::now() < end, "it does not stop");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Reads all, checks what is written; the error.
#[track_caller]
fn read(
    channel: &SocketChannel,
    pool: &Pool,
    peer: &Peer,
    deadline: Instant,
) -> Option<TransferError> {
    let id = name("peer");
    let filled = block_on(channel.read(slots(pool), &id, &peer.indices, deadline));
    for (place, slot) in filled.slots.iter().enumerate() {
        match slot {
            Slot::Written(slot) => {
                let checked = check_value(STAMP, place, slot.bytes());
                checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
            Slot::Quiet(_) => assert!(filled.error.is_some()),
            Slot::Quarantined => panic!("sockets need no quarantine"),
        }
    }
    filled.error
}

fn check(listen: &str) {
    let any_port = "tcp://127.0.0.1:0".parse().expect("an address");
    let (channel, pool) = side("test", any_port);
    let mut peer = Peer::start(&listen.parse().expect("an address"));
    let id = name("peer");
    // Places that the peer uses for nothing: what was not quiet may still arrive there.
    let aside: Vec<Index> = (0..5).map(|n| Index(4096 + 700 * n)).collect();
    for round in 0..3 {
        let connected = block_on(channel.connect(&id, &peer.address, None, soon()));
        connected.expect("it listens");
        assert_eq!(read(&channel, &pool, &peer, soon()), None);

        // There and back.
        let sent = block_on(channel.send(objects(&pool, round), &id, TAG, soon()));
        assert_eq!(sent.into_result(), Ok(LENS.len()));
        let back = block_on(channel.receive(slots(&pool), &id, TAG, soon()));
        let back = back.into_result().expect("it comes back");
        for (place, slot) in back.iter().enumerate() {
            let checked = check_value(round, place, slot.bytes());
            checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
        }
        drop(back);

        // Frozen: calls end by their deadlines. Then it goes on as if nothing had been.
        peer.stop();
        let late = TransferError::Deadline { quiet: true };
        assert_eq!(read(&channel, &pool, &peer, after(200)), Some(late));
        let write = channel.write(objects(&pool, 9), &id, &aside, after(200));
        let sent = block_on(write);
        assert_eq!(sent.error, Some(TransferError::Deadline { quiet: false }));
        assert!(channel.is_connected(&id));
        peer.signal("-CONT");
        assert_eq!(read(&channel, &pool, &peer, soon()), None);

        // Killed in the midst of reads.
        let error = thread::scope(|scope| {
            let reads = scope.spawn(|| {
                loop {
                    if let Some(error) = read(&channel, &pool, &peer, soon()) {
                        break error;
                    }
                }
            });
            thread::sleep(Duration::from_millis(50));
            peer.signal("-KILL");
            reads.join().expect("reads do not panic")
        });
        let gone = matches!(
            error,
            TransferError::PeerGone { .. } | TransferError::UnknownPeer { .. }
        );
        assert!(gone, "{error:?}");
        assert!(!channel.is_connected(&id));
        assert_eq!(pool.usage().quarantined_slots, 0);
        let address = peer.address.clone();
        drop(peer);
        peer = Peer::start(&address);
        assert_eq!(peer.address, address);
    }
    let stats = channel.stats();
    assert_eq!((stats.corrupt, stats.broken), (0, 0), "{stats:?}");
    block_on(channel.close(soon())).expect("it closes");
    assert_eq!(pool.usage().slots, 0);
}

#[test]
fn over_tcp() {
    check("tcp://127.0.0.1:0");
}

#[test]
fn over_unix_sockets() {
    let folder = std::env::temp_dir().join(format!("lmc-two-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    check(&format!("unix:{}", folder.join("peer").display()));
    std::fs::remove_dir_all(&folder).expect("removed");
}
