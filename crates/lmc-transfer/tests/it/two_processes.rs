//! Sockets between two processes, one of which is frozen, killed and started again.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot};
use lmc_transfer::conformance::{check_value, fill_value};
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerId, Rights, Slot, SocketChannel, SocketConfig,
    TransferChannel, TransferError, block_on,
};

const LISTEN: &str = "LMC_TEST_PEER_LISTEN";
const LENS: [u64; 5] = [1 << 20, 1, 70_000, 4096, 3 << 20];
/// Stamp of the peer's objects.
const STAMP: u64 = 21;
/// Tag under which the peer sends back what it receives.
const TAG: u64 = 5;
/// Tag under which the peer receives indices, to which it writes.
const WRITE_TAG: u64 = 6;
/// Bytes of what it writes.
const WRITTEN: u64 = 16 << 20;

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
    let arena = ArenaConfig::anonymous(48 << 20).build().expect("48 MiB");
    let arena = Arc::new(arena);
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).expect("a pool");
    let mut config = ChannelConfig::new(name(id), arena);
    config.open_arena = true;
    config.rights = Rights::ReadWrite;
    let channel = SocketConfig::new(config, listen).build();
    (channel.expect("it listens"), pool)
}

fn slots(pool: &Pool) -> Vec<ReservedSlot> {
    let slot = |&len| pool.reserve(len).expect("capacity");
    LENS.iter().map(slot).collect()
}

fn objects(pool: &Pool, stamp: u64) -> Vec<SealedSlot> {
    let mut slots = slots(pool);
    for (object, slot) in slots.iter_mut().enumerate() {
        fill_value(stamp, object, slot.bytes_mut());
    }
    slots
        .into_iter()
        .map(|slot| slot.written().seal())
        .collect()
}

/// The other process: has objects in its arena, sends back what it receives, and writes to where
/// it is asked.
#[test]
#[ignore = "it is the peer that the other tests start"]
fn peer() {
    let listen = std::env::var(LISTEN).expect("started by another test");
    let (channel, pool) = side("peer", listen.parse().expect("an address"));
    let kept = objects(&pool, STAMP);
    let units: Vec<u64> = kept.iter().map(|slot| slot.offset() / 4096).collect();
    println!(
        "ready {} {} {units:?}",
        channel.address(),
        channel.incarnation()
    );
    let test = name("test");
    let mut object = pool.reserve(WRITTEN).expect("capacity");
    object.bytes_mut().fill(9);
    let object = object.written().seal();
    // The test kills it; should the test die, this ends by itself.
    let end = after(120_000);
    while Instant::now() < end {
        let index = vec![pool.reserve(24).expect("capacity")];
        let sent = block_on(channel.receive(index, &test, WRITE_TAG, after(20)));
        if let Ok(sent) = sent.into_result() {
            let index = sent[0].bytes().try_into().expect("24 bytes");
            let index = [Index::from_bytes(index)];
            for _ in 0..300 {
                let objects = vec![object.clone()];
                let _ = block_on(channel.write(objects, &test, &index, after(1000)));
            }
        }
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
    incarnation: u64,
    indices: Vec<Index>,
}

impl Peer {
    fn start(listen: &Address) -> Self {
        let program = std::env::current_exe().expect("a running test");
        let mut child = Command::new(program)
            .args(["two_processes::peer", "--exact", "--ignored", "--nocapture"])
            .env(LISTEN, listen.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut lines = output.lines().map(|line| line.expect("text"));
        let ready = lines.find_map(|line| line.split_once("ready ").map(|(_, r)| r.to_owned()));
        let ready = ready.expect("the peer says that it is ready");
        let (address, rest) = ready.split_once(' ').expect("three words");
        let (incarnation, units) = rest.split_once(' ').expect("three words");
        let incarnation = incarnation.parse().expect("a number");
        let numbers = units.trim_matches(['[', ']']).split(", ");
        Self {
            child,
            address: address.parse().expect("an address"),
            incarnation,
            indices: numbers
                .map(|n| Index::arena(incarnation, n.parse().expect("a number")))
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
    for (object, slot) in filled.slots.iter().enumerate() {
        match slot {
            Slot::Written(slot) => {
                let checked = check_value(STAMP, object, slot.bytes());
                checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
            }
            Slot::Idle(_) => assert!(filled.error.is_some()),
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
    for round in 0..3 {
        // Ranges that the peer uses for nothing: what was not idle may still arrive there.
        let aside = (0..5).map(|n| Index::arena(peer.incarnation, 8192 + 700 * n));
        let aside: Vec<Index> = aside.collect();
        let connected = block_on(channel.connect(&id, &peer.address, None, soon()));
        connected.expect("it listens");
        assert_eq!(read(&channel, &pool, &peer, soon()), None);

        // There and back.
        let sent = block_on(channel.send(objects(&pool, round), &id, TAG, soon()));
        assert_eq!(sent.into_result(), Ok(LENS.len()));
        let back = block_on(channel.receive(slots(&pool), &id, TAG, soon()));
        let back = back.into_result().expect("it comes back");
        for (object, slot) in back.iter().enumerate() {
            let checked = check_value(round, object, slot.bytes());
            checked.unwrap_or_else(|mismatch| panic!("{mismatch}"));
        }
        drop(back);

        // Frozen: calls end by their deadlines. Then it goes on as if nothing had been.
        peer.stop();
        let late = TransferError::Deadline;
        assert_eq!(read(&channel, &pool, &peer, after(200)), Some(late));
        let write = channel.write(objects(&pool, 9), &id, &aside, after(1000));
        let sent = block_on(write);
        assert_eq!(sent.error, Some(TransferError::Deadline));
        assert!(!sent.idle, "it may arrive once the peer goes on");
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

/// A writer was frozen in the midst of a write, and its slot was reused meanwhile: when it went on,
/// up to 18 MB of its bytes landed in the next object, after its own deadline.
#[test]
fn a_frozen_writer_lands_in_no_reused_slot() {
    let any_port = "tcp://127.0.0.1:0".parse().expect("an address");
    let (channel, pool) = side("test", any_port);
    let peer = Peer::start(&"tcp://127.0.0.1:0".parse().expect("an address"));
    let id = name("peer");
    let connected = block_on(channel.connect(&id, &peer.address, None, soon()));
    connected.expect("it listens");
    for round in 0..3 {
        let target = pool.reserve(WRITTEN).expect("capacity");
        let offset = target.offset();
        let lease = channel.grant_write(&id, vec![target]);
        let lease = lease.expect("it is connected");
        let mut index = pool.reserve(24).expect("capacity");
        index
            .bytes_mut()
            .copy_from_slice(&lease.indices()[0].to_bytes());
        let before = channel.stats().bytes_in;
        let sent = vec![index.written().seal()];
        let sent = block_on(channel.send(sent, &id, WRITE_TAG, soon()));
        assert_eq!(sent.into_result(), Ok(1));
        // In the midst of a write, more or less.
        let end = soon();
        while channel.stats().bytes_in < before + WRITTEN * (round + 1) / 2 {
            assert!(Instant::now() < end, "it does not write");
            thread::yield_now();
        }
        peer.stop();
        // The peer is frozen, and that is no hindrance.
        let slots = block_on(lease.revoke());
        assert_eq!(slots.len(), 1);
        drop(slots);
        let mut reused = pool.reserve(WRITTEN).expect("capacity");
        assert_eq!(reused.offset(), offset, "the pool gives out the same slot");
        reused.bytes_mut().fill(5);
        let reused = reused.written().seal();
        let refused = channel.stats().refused_requests;
        peer.signal("-CONT");
        // Its later writes are refused; so it has gone on by then.
        let end = soon();
        while channel.stats().refused_requests < refused + 50 {
            assert!(Instant::now() < end, "{:?}", channel.stats());
            thread::sleep(Duration::from_millis(2));
        }
        assert!(reused.bytes().iter().all(|byte| *byte == 5), "it landed");
        drop(reused);
    }
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
