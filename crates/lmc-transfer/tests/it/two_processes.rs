//! Sockets between two processes, one of which is frozen, killed and started again.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{ArenaConfig, Pool, PoolConfig, ReservedSlot, SealedSlot};
use lmc_testkit::{Folder, Process, free_port, own_test, rounds, soon, until};
use lmc_transfer::conformance::{check_value, fill_value};
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerId, Rights, Slot, SocketChannel, SocketConfig,
    TransferChannel, TransferError, block_on,
};

const LISTEN: &str = "LMC_TEST_PEER_LISTEN";
/// Set where the peer writes to where it is asked. Elsewhere it sends back what it receives.
const WRITES: &str = "LMC_TEST_PEER_WRITES";
const LENS: [u64; 5] = [1 << 20, 1, 70_000, 4096, 3 << 20];
/// Stamp of the peer's objects.
const STAMP: u64 = 21;
/// Tag under which the peer sends back what it receives.
const TAG: u64 = 5;
/// Tag under which the peer receives indices. The peer writes to the indices until it is refused, and then
/// sends them back under the same tag.
const WRITE_TAG: u64 = 6;
/// Bytes of what it writes.
const WRITTEN: u64 = 16 << 20;

fn after(millis: u64) -> Instant {
    Instant::now() + Duration::from_millis(millis)
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
    let mut config = SocketConfig::new(config, listen);
    // A frozen peer is not taken for dead, however long its test is kept from going on.
    config.keepalive = Duration::from_secs(60);
    let channel = config.build();
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

/// The other process: has objects in its arena, and sends back what it receives or writes to
/// where it is asked.
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
    // The test kills it; should the test die, this ends by itself.
    let end = after(240_000);
    match std::env::var_os(WRITES) {
        Some(_) => write_until_refused(&channel, &pool, end),
        None => send_back(&channel, &pool, end),
    }
}

/// Receives, or returns `None` while the test is not connected.
fn received(
    channel: &SocketChannel,
    slots: Vec<ReservedSlot>,
    tag: u64,
    end: Instant,
) -> Option<Vec<SealedSlot>> {
    let received = block_on(channel.receive(slots, &name("test"), tag, end));
    match received.into_result() {
        Ok(received) => Some(received.into_iter().map(|slot| slot.seal()).collect()),
        Err(_) => {
            thread::sleep(Duration::from_millis(5));
            None
        }
    }
}

fn send_back(channel: &SocketChannel, pool: &Pool, end: Instant) {
    while Instant::now() < end {
        if let Some(back) = received(channel, slots(pool), TAG, end) {
            let _ = block_on(channel.send(back, &name("test"), TAG, end));
        }
    }
}

fn write_until_refused(channel: &SocketChannel, pool: &Pool, end: Instant) {
    let test = name("test");
    let mut object = pool.reserve(WRITTEN).expect("capacity");
    object.bytes_mut().fill(9);
    let object = object.written().seal();
    while Instant::now() < end {
        let index = vec![pool.reserve(24).expect("capacity")];
        let Some(asked) = received(channel, index, WRITE_TAG, end) else {
            continue;
        };
        let index = asked[0].bytes().try_into().expect("24 bytes");
        let index = [Index::from_bytes(index)];
        let mut refused = 0;
        while refused < 3 && Instant::now() < end {
            let objects = vec![object.clone()];
            let sent = block_on(channel.write(objects, &test, &index, after(1000)));
            refused += usize::from(matches!(sent.error, Some(TransferError::NotLeased { .. })));
        }
        let _ = block_on(channel.send(asked, &test, WRITE_TAG, end));
    }
}

struct Peer {
    process: Process,
    address: Address,
    incarnation: u64,
    indices: Vec<Index>,
}

impl Peer {
    fn start(listen: &Address, change: impl FnOnce(&mut Command)) -> Self {
        let mut command = own_test(peer);
        command
            .env(LISTEN, listen.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        change(&mut command);
        let mut process = Process::spawn(&mut command);
        let (_, output) = process.pipes();
        let mut lines = BufReader::new(output).lines();
        let ready = lines.find_map(|line| {
            let line = line.expect("text");
            line.split_once("ready ").map(|(_, rest)| rest.to_owned())
        });
        let ready = ready.expect("the peer says that it is ready");
        let (address, rest) = ready.split_once(' ').expect("three words");
        let (incarnation, units) = rest.split_once(' ').expect("three words");
        let incarnation = incarnation.parse().expect("a number");
        let numbers = units.trim_matches(['[', ']']).split(", ");
        Self {
            process,
            address: address.parse().expect("an address"),
            incarnation,
            indices: numbers
                .map(|n| Index::arena(incarnation, n.parse().expect("a number")))
                .collect(),
        }
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

fn check(listen: &Address) {
    let (channel, pool) = side("test", any_port());
    let mut peer = Peer::start(listen, |_| {});
    let id = name("peer");
    for round in 0..rounds(2, 3) as u64 {
        if round > 0 {
            peer = Peer::start(listen, |_| {});
        }
        assert_eq!(peer.address, *listen);
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
        peer.process.stop();
        let late = TransferError::Deadline;
        assert_eq!(read(&channel, &pool, &peer, after(100)), Some(late));
        // A write that has begun may arrive once the peer goes on. On a busy machine none of it
        // may have begun by the deadline.
        until("a write is under way at its deadline", || {
            let write = channel.write(objects(&pool, 9), &id, &aside, after(100));
            let sent = block_on(write);
            assert_eq!(sent.error, Some(TransferError::Deadline));
            !sent.idle
        });
        assert!(channel.is_connected(&id));
        peer.process.signal(libc::SIGCONT);
        assert_eq!(read(&channel, &pool, &peer, soon()), None);

        // Killed in the midst of reads.
        let done = AtomicU64::new(0);
        let error = thread::scope(|scope| {
            let reads = scope.spawn(|| {
                loop {
                    if let Some(error) = read(&channel, &pool, &peer, soon()) {
                        break error;
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
            until("reads go on", || {
                reads.is_finished() || done.load(Ordering::Relaxed) > 2 + round
            });
            peer.process.signal(libc::SIGKILL);
            reads.join().expect("reads do not panic")
        });
        let gone = matches!(
            error,
            TransferError::PeerGone { .. } | TransferError::UnknownPeer { .. }
        );
        assert!(gone, "{error:?}");
        assert!(!channel.is_connected(&id));
        assert_eq!(pool.usage().quarantined_slots, 0);
        peer.process.kill();
    }
    let stats = channel.stats();
    assert_eq!((stats.corrupt, stats.broken), (0, 0), "{stats:?}");
    block_on(channel.close(soon())).expect("it closes");
    assert_eq!(pool.usage().slots, 0);
}

fn any_port() -> Address {
    "tcp://127.0.0.1:0".parse().expect("an address")
}

/// A writer was frozen in the midst of a write, and its slot was reused meanwhile: when it went on,
/// up to 18 MB of its bytes landed in the next object, after its own deadline.
#[test]
fn a_frozen_writer_lands_in_no_reused_slot() {
    let (channel, pool) = side("test", any_port());
    let peer = Peer::start(&any_port(), |command| {
        command.env(WRITES, "1");
    });
    let id = name("peer");
    let connected = block_on(channel.connect(&id, &peer.address, None, soon()));
    connected.expect("it listens");
    for round in 0..rounds(2, 3) as u64 {
        let target = pool.reserve(WRITTEN).expect("capacity");
        let offset = target.offset();
        let lease = channel.grant_write(&id, vec![target]);
        let lease = lease.expect("it is connected");
        let mut index = pool.reserve(24).expect("capacity");
        index
            .bytes_mut()
            .copy_from_slice(&lease.indices()[0].to_bytes());
        let before = channel.stats();
        let sent = vec![index.written().seal()];
        let sent = block_on(channel.send(sent, &id, WRITE_TAG, soon()));
        assert_eq!(sent.into_result(), Ok(1));
        // In the midst of a write, more or less.
        let end = soon();
        while channel.stats().bytes_in < before.bytes_in + WRITTEN * (round + 1) / 2 {
            assert!(Instant::now() < end, "it does not write");
            thread::yield_now();
        }
        peer.process.stop();
        // The peer is frozen, and that is no hindrance.
        let slots = block_on(lease.revoke());
        assert_eq!(slots.len(), 1);
        drop(slots);
        let mut reused = pool.reserve(WRITTEN).expect("capacity");
        assert_eq!(reused.offset(), offset, "the pool gives out the same slot");
        reused.bytes_mut().fill(5);
        let reused = reused.written().seal();
        peer.process.signal(libc::SIGCONT);
        // It sends this when all its writes have ended, the later ones refused.
        let index = vec![pool.reserve(24).expect("capacity")];
        let over = block_on(channel.receive(index, &id, WRITE_TAG, soon()));
        over.into_result().expect("the peer ends its writes");
        assert!(channel.stats().refused_requests >= before.refused_requests + 3);
        assert!(reused.bytes() == vec![5; WRITTEN as usize], "it landed");
        drop(reused);
    }
    block_on(channel.close(soon())).expect("it closes");
    assert_eq!(pool.usage().slots, 0);
}

#[test]
fn over_tcp() {
    let host = "127.0.0.1".to_owned();
    let port = free_port();
    check(&Address::Tcp { host, port });
}

#[test]
fn over_unix_sockets() {
    let folder = Folder::temporary();
    check(&Address::Unix(folder.join("peer")));
}
