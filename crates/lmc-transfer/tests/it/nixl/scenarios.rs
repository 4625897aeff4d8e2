//! Pitfalls of NIXL that other transports do not have: each, met with a peer in another process.

use std::env;
use std::future::poll_fn;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use libc::{SIGCONT, SIGKILL, SIGSTOP};
use lmc_memory::ArenaConfig;
use lmc_testkit::{Process, own_test};
use lmc_transfer::conformance::{Side, check_value, fill_value};
use lmc_transfer::{
    Address, ChannelConfig, ConnectError, DataPlane, Index, Key, NixlConfig, PeerId, ReadLease,
    Slot, SocketChannel, TransferChannel, TransferError, block_on,
};

use crate::support::nixl::{NixlRig, SCENARIO};

/// Names the folder of the peer's sockets.
const FOLDER: &str = "LMC_NIXL_FOLDER";
/// Bytes of the peer's object, and of its slot for one.
const LARGE: u64 = 9 << 20;
/// Names the peer.
const NAME: &str = "LMC_NIXL_NAME";
/// Time that anything may take that ends by itself.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(40);

pub(crate) type NixlSide = Side<SocketChannel>;

pub(crate) fn run(name: &str) {
    match name {
        "peer" => peer(),
        "missing" => missing(),
        "dropped" => dropped(),
        "killed" => killed(),
        "killed_at_work" => killed_at_work(),
        "frozen" => frozen(),
        "frozen_then_replaced" => frozen_then_replaced(),
        "frozen_writer" => frozen_writer(Left::Late),
        "frozen_at_close" => frozen_writer(Left::Closed),
        "blocked_on_connect" => blocked_on_connect(),
        "forgotten_writer" => frozen_writer(Left::Forgotten),
        "small" => small(),
        "left_open" => left_open(),
        "idle" => idle(),
        "pieces" => pieces(),
        "leased" => leased(),
        other => panic!("no scenario {other}"),
    }
}

/// The other process: an object to be read with stamp 1, a slot to be written. It does what it
/// is asked, line by line, until there are no more.
fn peer() {
    let folder = env::var_os(FOLDER).expect("the peer has its folder");
    let rig = NixlRig::beside(PathBuf::from(folder));
    let name = env::var(NAME).expect("the peer has its name");
    let side = NixlSide::new(&rig, &name);
    let object = side.objects(1, &[LARGE]);
    let mut slot = Some(side.slot(LARGE));
    let unit = |offset: u64| offset / 4096;
    let from = unit(object[0].offset());
    let to = slot.as_ref().map_or(0, |slot| unit(slot.offset()));
    println!("SAYS {} {from} {to}", side.channel.incarnation());
    let me_at = |unit| {
        let incarnation = side.channel.peer_incarnation(&me());
        Index::arena(incarnation.expect("it is connected"), unit)
    };
    let me = me();
    for line in std::io::stdin().lines() {
        over_nixl(&side, &me);
        match line.expect("a line of the test").as_str() {
            "connect" => {}
            "check" => {
                let written = slot.take().expect("checked once").written();
                check_value(2, 0, written.bytes()).expect("what was written");
            }
            "send" => {
                let deadline = Instant::now() + TIMEOUT;
                let sent = block_on(side.channel.send(object.clone(), &me, 7, deadline));
                // What became of it, the other side says.
                println!("it sent {}", sent.done);
            }
            // Reads under a lease whose index it is given, until that is over.
            leased if leased.starts_with("lease ") => {
                let index = leased["lease ".len()..].split(' ');
                let bytes: Vec<u8> = index.map(|byte| byte.parse().expect("a byte")).collect();
                let index = [Index::from_bytes(bytes.try_into().expect("24 bytes"))];
                println!("SAYS busy");
                loop {
                    let deadline = Instant::now() + TIMEOUT;
                    let slots = side.slots(&[LARGE]);
                    let filled = block_on(side.channel.read(slots, &me, &index, deadline));
                    match filled.into_result() {
                        Ok(slots) => check_value(5, 0, slots[0].bytes()).expect("its object"),
                        Err(error) => {
                            let over = matches!(error, TransferError::NotLeased { object: 0 });
                            assert!(over, "{error}");
                            break;
                        }
                    }
                }
            }
            // Until it is killed, over and over.
            busy if ["read", "write", "dabble"].contains(&busy) => {
                println!("SAYS busy");
                let small = side.objects(1, &[8, 100, 3000]);
                loop {
                    let deadline = Instant::now() + TIMEOUT;
                    if busy == "dabble" {
                        let at = [2, 4, 6].map(|page| me_at(LARGE / 4096 + page));
                        let sent = block_on(side.channel.write(small.clone(), &me, &at, deadline));
                        sent.into_result().expect("it is there");
                        continue;
                    }
                    if busy == "read" {
                        let slots = side.slots(&[LARGE]);
                        let filled = block_on(side.channel.read(slots, &me, &[me_at(0)], deadline));
                        filled.into_result().expect("it is there");
                    } else {
                        let object = object.clone();
                        let at = [me_at(LARGE / 4096)];
                        let sent = block_on(side.channel.write(object, &me, &at, deadline));
                        sent.into_result().expect("it is there");
                    }
                }
            }
            other => panic!("{other}"),
        }
        println!("SAYS done");
    }
    drop((object, slot));
    side.goes();
}

/// Waits until bytes go over NIXL.
fn over_nixl(side: &NixlSide, peer: &PeerId) {
    eventually("the plane is there", || {
        side.channel.data_plane(peer) == Some(DataPlane::Nixl)
    });
}

fn me() -> PeerId {
    "me".parse().expect("a name")
}

/// The test's hold on the other process.
struct Other {
    process: Process,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    id: PeerId,
    address: Address,
    from: [Index; 1],
    to: [Index; 1],
    /// First unit of its object.
    first: u64,
}

impl Other {
    fn start(rig: &NixlRig, name: &str) -> Self {
        let mut command = own_test(super::scenario);
        command
            .env(SCENARIO, "peer")
            .env(FOLDER, rig.folder())
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command);
        let (input, output) = process.pipes();
        let mut other = Self {
            process,
            input: Some(input),
            output: BufReader::new(output),
            id: name.parse().expect("a name"),
            address: Address::Unix(rig.folder().join(name)),
            from: [Index::arena(0, 0)],
            to: [Index::arena(0, 0)],
            first: 0,
        };
        let said = other.says();
        let numbers = said
            .split(' ')
            .map(|number| number.parse().expect("a number"));
        let [incarnation, from, to] = numbers.collect::<Vec<u64>>()[..] else {
            panic!("{said:?}");
        };
        other.from = [Index::arena(incarnation, from)];
        other.to = [Index::arena(incarnation, to)];
        other.first = from;
        other
    }

    /// Returns the next thing that it says.
    fn says(&mut self) -> String {
        loop {
            let mut line = String::new();
            let count = self.output.read_line(&mut line).expect("its output");
            if count == 0 {
                panic!("{} has ended: {}", self.id, self.process.wait());
            }
            if let Some((_, said)) = line.split_once("SAYS ") {
                return said.trim().to_owned();
            }
        }
    }

    fn order(&mut self, command: &str) {
        let input = self.input.as_mut().expect("it was not ended");
        writeln!(input, "{command}").expect("it listens");
    }

    fn does(&mut self, command: &str) {
        self.order(command);
        assert_eq!(self.says(), "done");
    }

    /// Lets it go on.
    fn resume(&self) {
        self.process.signal(SIGCONT);
    }

    fn connect(&self, side: &NixlSide) {
        let deadline = Instant::now() + TIMEOUT;
        let connected = block_on(
            side.channel
                .connect(&self.id, &self.address, None, deadline),
        );
        connected.expect("the peer is there");
        over_nixl(side, &self.id);
    }

    /// Reads its object.
    fn read(&self, side: &NixlSide, limit: Duration) -> lmc_transfer::Filled {
        let slots = side.slots(&[LARGE]);
        let deadline = Instant::now() + limit;
        block_on(side.channel.read(slots, &self.id, &self.from, deadline))
    }

    fn reads(&self, side: &NixlSide) {
        let slots = self.read(side, TIMEOUT).into_result().expect("it is there");
        check_value(1, 0, slots[0].bytes()).expect("the peer's object");
    }

    fn write(&self, side: &NixlSide, limit: Duration) -> lmc_transfer::Sent {
        let objects = side.objects(2, &[LARGE]);
        let deadline = Instant::now() + limit;
        block_on(side.channel.write(objects, &self.id, &self.to, deadline))
    }

    /// Lets it end by itself, which it must do well.
    fn ends(mut self) {
        self.input = None;
        let status = self.process.wait();
        assert!(status.success(), "the peer: {status}");
    }
}

#[track_caller]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !so() {
        assert!(Instant::now() < deadline, "{what}: not within {TIMEOUT:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A read that is dropped gives its slots back at once, whatever the peer still writes.
fn dropped() {
    let rig = NixlRig::new();
    let mut other = Other::start(&rig, "peer");
    let side = NixlSide::new(&rig, "me");
    other.connect(&side);
    other.reads(&side);
    let mut dropped = 0;
    for micros in [0, 200, 500, 1000, 2000, 3000, 4000, 6000].repeat(2) {
        let (channel, id) = (&side.channel, &other.id);
        let deadline = Instant::now() + TIMEOUT;
        let mut reading = channel.read(side.slots(&[LARGE]), id, &other.from, deadline);
        let mut poll = || {
            block_on(poll_fn(|context| {
                Poll::Ready(reading.as_mut().poll(context))
            }))
        };
        let begun = poll();
        thread::sleep(Duration::from_micros(micros));
        dropped += usize::from(begun.is_pending() && poll().is_pending());
        drop(reading);
        drop(begun);
        assert_eq!(side.pool.usage().slots, 0);
        side.memory_is_still();
    }
    assert!(dropped > 0, "no read was dropped on its way");
    other.reads(&side);
    assert_eq!(other.write(&side, TIMEOUT).into_result(), Ok(1));
    other.does("check");
    other.ends();
    side.ends();
}

/// Peers that are killed, idle or on the way, and begin again under their name and address.
fn killed() {
    let rig = NixlRig::new();
    let side = NixlSide::new(&rig, "me");
    for round in 0..4 {
        let mut other = Other::start(&rig, "peer");
        other.connect(&side);
        other.reads(&side);
        if round > 0 {
            let writes = round == 2;
            thread::scope(|scope| {
                scope.spawn(|| {
                    let error = loop {
                        let error = match writes {
                            true => other.write(&side, TIMEOUT).error,
                            false => other.read(&side, TIMEOUT).error,
                        };
                        if let Some(error) = error {
                            break error;
                        }
                    };
                    let gone = matches!(
                        error,
                        TransferError::PeerGone { .. } | TransferError::UnknownPeer { .. }
                    );
                    assert!(gone, "{error:?}");
                });
                thread::sleep(Duration::from_millis(50));
                other.process.signal(SIGKILL);
            });
        }
        other.process.kill();
        eventually("its death is noticed", || {
            !side.channel.is_connected(&other.id)
        });
        side.memory_is_still();
    }
    let mut other = Other::start(&rig, "peer");
    other.connect(&side);
    other.reads(&side);
    let sent = other.write(&side, TIMEOUT);
    assert_eq!(sent.into_result(), Ok(1));
    other.does("check");
    other.ends();
    side.ends();
}

/// Peers that are killed while they read or write this side's memory.
fn killed_at_work() {
    let rig = NixlRig::new();
    let side = NixlSide::new(&rig, "me");
    let object = side.objects(1, &[LARGE]);
    let slot = side.slots(&[LARGE]);
    assert_eq!(side.indices(&object), [side.at(0)]);
    assert_eq!(side.indices(&slot), [side.at(LARGE / 4096)]);
    for round in 0..12 {
        let mut other = Other::start(&rig, "peer");
        other.connect(&side);
        other.order(["read", "write", "dabble"][round as usize % 3]);
        assert_eq!(other.says(), "busy");
        thread::sleep(Duration::from_millis(20 + round));
        if round >= 8 {
            // What it had asked for before is served although it is gone.
            other.process.stop();
            thread::sleep(Duration::from_millis(100));
        }
        other.process.kill();
        eventually("its death is noticed", || {
            !side.channel.is_connected(&other.id)
        });
    }
    let other = Other::start(&rig, "peer");
    other.connect(&side);
    other.reads(&side);
    other.ends();
    check_value(1, 0, object[0].bytes()).expect("nothing writes there");
    drop((object, slot));
    side.ends();
}

/// A peer that is stopped: calls end at their deadlines, with all slots, and others are served.
fn frozen() {
    let rig = NixlRig::new();
    let third = Other::start(&rig, "third");
    let side = NixlSide::new(&rig, "me");
    third.connect(&side);
    for dies in [false, true] {
        let mut other = Other::start(&rig, "peer");
        other.connect(&side);
        other.reads(&side);
        other.process.stop();
        // Over NIXL, and then over the streams.
        for limit in [1000, 300, 300] {
            let limit = Duration::from_millis(limit);
            let filled = other.read(&side, limit);
            assert_eq!(filled.error, Some(TransferError::Deadline));
            assert!(matches!(filled.slots[..], [Slot::Idle(_)]));
            drop(filled);
            assert_eq!(side.pool.usage().slots, 0);
            third.reads(&side);
        }
        if dies {
            other.process.kill();
        } else {
            other.resume();
        }
        side.memory_is_still();
        third.reads(&side);
        if !dies {
            other.reads(&side);
            assert_eq!(other.write(&side, TIMEOUT).into_result(), Ok(1));
            other.does("check");
            over_nixl(&side, &other.id);
            other.reads(&side);
            other.ends();
        }
        let id = "peer".parse().expect("a name");
        eventually("its end is noticed", || !side.channel.is_connected(&id));
    }
    third.ends();
    side.ends();
}

/// Has a peer read under a lease until that is over.
fn lends(side: &NixlSide, other: &mut Other) -> ReadLease {
    let objects = side.objects(5, &[LARGE]);
    let lease = side.channel.grant_read(&other.id, objects);
    let lease = lease.expect("it is connected");
    let index = lease.indices()[0].to_bytes().map(|byte| byte.to_string());
    other.order(&format!("lease {}", index.join(" ")));
    assert_eq!(other.says(), "busy");
    lease
}

/// Slow: the fault showed 2 s after the other peer's end.
///
/// A peer is stopped while another is killed, for which this side's agent is replaced: what was
/// begun with the stopped one goes on through the old agent. That agent was ended, at which UCX may
/// abort the peer when it goes on.
fn frozen_then_replaced() {
    let rig = NixlRig::new();
    let side = NixlSide::new(&rig, "me");
    for round in 0..4 {
        let mut stopped = Other::start(&rig, "stopped");
        let mut killed = Other::start(&rig, "killed");
        stopped.connect(&side);
        killed.connect(&side);
        let leases = [&mut stopped, &mut killed].map(|other| lends(&side, other));
        thread::sleep(Duration::from_millis(20 + 3 * round));
        stopped.process.stop();
        killed.process.stop();
        thread::sleep(Duration::from_millis(100));
        killed.process.kill();
        let id = "killed".parse().expect("a name");
        eventually("its end is noticed", || !side.channel.is_connected(&id));
        let revoked = leases.map(|lease| lease.revoke());
        // Only time shows that the agent is not ended.
        thread::sleep(Duration::from_secs(3));
        stopped.resume();
        for revoked in revoked {
            block_on(revoked);
        }
        assert_eq!(stopped.says(), "done");
        side.memory_is_still();
        stopped.reads(&side);
        stopped.ends();
        let id = "stopped".parse().expect("a name");
        eventually("its end is noticed", || !side.channel.is_connected(&id));
    }
    side.ends();
}

/// The moment at which what a sender had begun before it was stopped is left to itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// The receive has missed its deadline.
    Late,
    /// The sender was disconnected, as one is whose name another takes.
    Forgotten,
    /// The channel was closed.
    Closed,
}

/// A sender that is stopped while it writes to a receiver, and goes on later: the receiver has its
/// slots back at once, and nothing is written to them any more.
fn frozen_writer(left: Left) {
    let rig = NixlRig::new();
    for round in 0..8 {
        let side = NixlSide::new(&rig, "me");
        let mut other = Other::start(&rig, "peer");
        other.connect(&side);
        other.does("connect");
        other.order("send");
        let limit = match left {
            Left::Late => Duration::from_millis(400),
            Left::Forgotten | Left::Closed => TIMEOUT,
        };
        let slots = side.slots(&[LARGE]);
        let receiving = side
            .channel
            .receive(slots, &other.id, 7, Instant::now() + limit);
        let filled = thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_micros(1000 + 700 * round));
                other.process.signal(SIGSTOP);
                other.process.stop();
                let soon = Instant::now() + TIMEOUT;
                match left {
                    Left::Late => {}
                    Left::Forgotten => {
                        let forgotten = side.channel.disconnect(&other.id, soon);
                        block_on(forgotten).expect("it is quick");
                    }
                    Left::Closed => block_on(side.channel.close(soon)).expect("it is quick"),
                }
            });
            block_on(receiving)
        });
        match &filled.slots[..] {
            [Slot::Written(slot)] => {
                check_value(1, 0, slot.bytes()).expect("the peer's object");
            }
            [Slot::Idle(_)] => assert!(filled.error.is_some()),
            other => panic!("{other:?}"),
        }
        drop(filled);
        assert_eq!(side.pool.usage().slots, 0);
        other.resume();
        side.memory_is_still();
        if round % 2 == 1 {
            other.process.kill();
        } else if left == Left::Late {
            // Its offer may still stand, and waits for a receive.
            let slots = side.slots(&[LARGE]);
            let again = side
                .channel
                .receive(slots, &other.id, 7, Instant::now() + limit);
            drop(block_on(again));
            assert_eq!(other.says(), "done");
            other.ends();
        } else {
            assert_eq!(other.says(), "done");
        }
        if left != Left::Closed {
            side.ends();
        }
    }
}

/// Thousands of objects that lie apart, in one batch.
fn small() {
    let rig = NixlRig::new();
    let other = Other::start(&rig, "peer");
    let side = NixlSide::new(&rig, "me");
    other.connect(&side);
    // Pages of the peer's object, every other one, backwards: nothing can be joined.
    let pages = LARGE / 4096;
    let backwards: Vec<u64> = (0..pages / 2).rev().map(|page| 2 * page).collect();
    let incarnation = other.from[0].incarnation();
    let index = |page: &u64| Index::arena(incarnation, other.first + page);
    let indices: Vec<Index> = backwards.iter().map(index).collect();
    let lens = vec![1000; indices.len()];
    let deadline = Instant::now() + TIMEOUT;
    let reading = side
        .channel
        .read(side.slots(&lens), &other.id, &indices, deadline);
    let slots = block_on(reading).into_result().expect("they are there");
    let mut whole = vec![0; LARGE as usize];
    fill_value(1, 0, &mut whole);
    assert_eq!(slots.len(), lens.len());
    for (slot, page) in slots.iter().zip(&backwards) {
        let at = *page as usize * 4096;
        assert_eq!(slot.bytes(), &whole[at..at + 1000]);
    }
    drop(slots);
    other.ends();
    side.ends();
}

/// A process may end while its channel is open and something is under way.
fn left_open() {
    let rig = NixlRig::new();
    let mut other = Other::start(&rig, "peer");
    let side: &'static NixlSide = Box::leak(Box::new(NixlSide::new(&rig, "me")));
    other.connect(side);
    other.reads(side);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = other.read(side, Duration::from_millis(1));
        });
    });
    // Its death must not hold up the peer either.
    other.input = None;
    let status = other.process.wait();
    assert!(status.success(), "{status}");
}

/// CPU time of this process, in seconds.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs");
    let fields: Vec<&str> = stat
        .rsplit(')')
        .next()
        .expect("fields")
        .split(' ')
        .collect();
    let ticks: u64 = fields[12..14]
        .iter()
        .map(|ticks| ticks.parse::<u64>().expect("a number"))
        .sum();
    // The kernel counts hundredths of a second for processes.
    ticks as f64 / 100.0
}

/// Two connected channels with nothing to do take next to no CPU time.
fn idle() {
    let rig = NixlRig::with_ports();
    let (a, b) = (NixlSide::new(&rig, "a"), NixlSide::new(&rig, "b"));
    a.connect(&b);
    a.works_with(1, &b);
    let before = cpu();
    // CPU time is counted over time that passes: there is nothing to wait for.
    thread::sleep(Duration::from_secs(4));
    let spent = cpu() - before;
    println!("{spent:.2} s of CPU time in 4 s");
    assert!(spent < 1.0, "{spent} s of CPU time in 4 s");
    a.ends();
    b.ends();
}

/// An `OnConnect` that blocks takes a bounded number of threads, however many connect, and others
/// are served when it is over. Each that gave up left a thread behind.
fn blocked_on_connect() {
    let rig = NixlRig::new();
    let (blocked, entered) = (Arc::new(Mutex::new(())), Arc::new(AtomicUsize::new(0)));
    let b = NixlSide::with(&rig, "b", 4096, |config| {
        config.handshake_timeout = Duration::from_millis(200);
        let (blocked, entered) = (Arc::clone(&blocked), Arc::clone(&entered));
        config.on_connect = Some(Arc::new(move |_, message| {
            entered.fetch_add(1, Ordering::Relaxed);
            drop(blocked.lock());
            message
        }));
    });
    let a = NixlSide::new(&rig, "a");
    let held = blocked.lock().expect("no thread panics");
    let connect = |millis| {
        let deadline = Instant::now() + Duration::from_millis(millis);
        let (id, address) = (b.channel.id(), b.channel.address());
        block_on(a.channel.connect(id, address, None, deadline))
    };
    for _ in 0..40 {
        assert!(connect(20).is_err(), "no handler answers");
    }
    eventually("all are given up", || {
        // The deadline of some may have passed before they began.
        assert!(connect(20).is_err(), "no handler answers");
        b.channel.stats().refused_handshakes >= 40 && entered.load(Ordering::Relaxed) > 0
    });
    // The last ones, too: one that is answered now would end the next connection.
    thread::sleep(Duration::from_millis(1000));
    let most = entered.load(Ordering::Relaxed);
    assert!((1..=16).contains(&most), "{most} threads");
    drop(held);
    eventually("it is answered again", || connect(1000).is_ok());
    a.works_with(1, &b);
    a.ends();
    b.ends();
}

/// Memory is registered in pieces, and objects lie across their borders.
fn pieces() {
    let mut rig = NixlRig::new();
    rig.piece = 1 << 20;
    let (a, b) = (NixlSide::new(&rig, "a"), NixlSide::new(&rig, "b"));
    a.connect(&b);
    for (stamp, len) in [(1, LARGE), (10, 5000), (20, 1 << 20), (30, (3 << 20) + 1)] {
        a.writes(stamp, &[len, 100], &b);
        a.reads(stamp + 1, &[100, len], &b);
        b.reads(stamp + 2, &[len], &a);
    }
    a.ends();
    b.ends();
}

/// A peer is frozen while it reads under a lease: the owner revokes that, and gets its slots back
/// when the peer has gone on, or is dead.
fn leased() {
    let rig = NixlRig::new();
    let side = NixlSide::new(&rig, "me");
    for dies in [false, true] {
        let mut other = Other::start(&rig, "peer");
        other.connect(&side);
        for round in 0..4 {
            let lease = lends(&side, &mut other);
            thread::sleep(Duration::from_millis(20 + 3 * round));
            other.process.stop();
            let revoked = lease.revoke();
            match dies && round == 3 {
                true => {
                    other.process.kill();
                    block_on(revoked);
                }
                false => {
                    other.resume();
                    block_on(revoked);
                    assert_eq!(other.says(), "done", "its next read is refused");
                }
            }
            side.slots_come_back();
        }
        if !dies {
            other.reads(&side);
            other.ends();
        }
        let id = "peer".parse().expect("a name");
        eventually("its end is noticed", || !side.channel.is_connected(&id));
    }
    side.ends();
}

/// Without the library there is an error that says what to do, and no more.
fn missing() {
    let arena = ArenaConfig::anonymous(1 << 20).build().expect("a MiB");
    let id = "a".parse().expect("a name");
    let mut channel = ChannelConfig::new(id, arena.into());
    let open = |channel: &ChannelConfig| NixlConfig::default().open(channel).map(drop);
    let keyless = open(&channel);
    assert!(
        matches!(keyless, Err(ConnectError::Config(_))),
        "{keyless:?}"
    );
    channel.keys = Key::new(&[1; 32]).ok().map(Into::into);
    channel.encrypt_objects = true;
    let sealed = open(&channel);
    assert!(matches!(sealed, Err(ConnectError::Config(_))), "{sealed:?}");
    channel.encrypt_objects = false;
    let error = open(&channel).expect_err("there is no such library");
    let said = error.to_string();
    assert!(matches!(error, ConnectError::Library(_)), "{said}");
    assert!(said.contains("pip install nixl-cu12"), "{said}");
    assert!(said.contains("/nonexistent/libnixl_capi.so"), "{said}");
}
