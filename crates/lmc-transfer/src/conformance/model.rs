//! Random operations against a model: an array of bytes for each target that peers name.

use std::collections::HashSet;
use std::env;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use lmc_memory::{ReservedSlot, SealedSlot};

use super::side::{Still, soon};
use super::{Rig, Rng, Side, fill_value};
use crate::{
    BoxFuture, ConnectError, Filled, Sent, Slot, TransferChannel, TransferError, block_on,
};

/// The suite's random test: a call fails only where the test itself ends it.
pub fn random_operations<R: Rig>(rig: &R) {
    let tally = RandomTest::new(Guarantee::Exact).run(rig);
    assert!(tally.written > 0 && tally.read > 0 && tally.received > 0);
    assert!(tally.dropped > 0 && tally.died > 0, "{tally:?}");
}

/// The guarantee of the channel under test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarantee {
    /// A transfer fails only where a side has died or the deadline was tight.
    Exact,
    /// A transfer may fail, and a side may die, at any time. What arrives is right.
    Lossy,
}

/// The random test.
#[derive(Clone, Debug)]
pub struct RandomTest {
    guarantee: Guarantee,
    seed: u64,
    rounds: usize,
}

/// Counters of a run, so that a test can assert that it did something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tally {
    /// Objects written.
    pub written: u64,
    /// Objects read and compared byte for byte.
    pub read: u64,
    /// Objects received and compared.
    pub received: u64,
    /// Calls that failed.
    pub failed: u64,
    /// Calls that failed while something of them was still under way.
    pub unsettled: u64,
    /// Slots that were returned idle from a failed call.
    pub idle: u64,
    /// Slots that went into quarantine.
    pub quarantined: u64,
    /// Calls dropped half-way.
    pub dropped: u64,
    /// Sides that died.
    pub died: u64,
}

/// Sides, each connected to each.
const SIDES: usize = 3;
/// Targets of each side.
const TARGETS: usize = 48;
/// Bytes of a unit.
const UNIT: u64 = 4096;
/// Objects of a batch at most.
const BATCH: u64 = 8;

impl RandomTest {
    /// Configures 150 rounds with a fresh seed, or the seed in the variable `LMC_SEED`.
    pub fn new(guarantee: Guarantee) -> Self {
        let fresh = || {
            let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            now.map_or(1, |now| now.as_nanos() as u64)
        };
        let given = env::var("LMC_SEED").ok().and_then(|seed| seed.parse().ok());
        Self {
            guarantee,
            seed: given.unwrap_or_else(fresh),
            rounds: 150,
        }
    }

    /// Sets the seed.
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the number of rounds, each of a few concurrent operations. Default: 150.
    pub fn with_rounds(mut self, rounds: usize) -> Self {
        self.rounds = rounds;
        self
    }

    /// Runs the rounds, closes the channels, and checks that every slot came back.
    ///
    /// # Panics
    /// If the channels break their contract; the seed is printed first.
    pub fn run<R: Rig>(&self, rig: &R) -> Tally {
        let run = AssertUnwindSafe(|| Run::new(self, rig).all());
        catch_unwind(run).unwrap_or_else(|panic| {
            eprintln!("again with LMC_SEED={}", self.seed);
            resume_unwind(panic)
        })
    }
}

/// A slot that peers name, and what it should hold.
#[derive(Debug)]
struct Target {
    slot: ReservedSlot,
    bytes: Vec<u8>,
    /// Something may still write there, so it is not compared before the side is gone.
    unsure: bool,
}

struct Player<C> {
    side: Side<C>,
    targets: Vec<Target>,
    still: Still,
}

/// One operation. Operations of one round name different targets.
struct Plan {
    kind: Kind,
    /// The calling side; of a paired operation, the sender.
    from: usize,
    to: usize,
    parts: Vec<TargetRange>,
    /// Stamp of the bytes that are written or sent, and the tag.
    stamp: u64,
    deadline: Duration,
    /// The deadline may pass.
    tight: bool,
    /// Delay after which the call (of a paired one, the first of the two) is dropped.
    drops: Option<Duration>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Read,
    /// A send and a receive. The number counts the slots offered beyond one for each object.
    Paired(usize),
}

/// An object in a target.
struct TargetRange {
    target: usize,
    /// Units from the start of the target.
    unit: u64,
    len: u64,
}

/// Outcomes of an operation; `None` where it was dropped.
#[derive(Default)]
struct Came {
    sent: Option<Sent>,
    filled: Option<Filled>,
}

struct Run<'a, R: Rig> {
    test: &'a RandomTest,
    rig: &'a R,
    rng: Rng,
    stamp: u64,
    players: Vec<Player<R::Channel>>,
    tally: Tally,
}

impl<'a, R: Rig> Run<'a, R> {
    fn new(test: &'a RandomTest, rig: &'a R) -> Self {
        let mut run = Self {
            test,
            rig,
            rng: Rng::new(test.seed),
            stamp: 1,
            players: Vec::new(),
            tally: Tally::default(),
        };
        run.players = (0..SIDES).map(|n| run.player(n)).collect();
        run
    }

    fn exact(&self) -> bool {
        self.test.guarantee == Guarantee::Exact
    }

    fn stamp(&mut self) -> u64 {
        self.stamp += 1;
        self.stamp
    }

    /// A side, new or started again.
    fn player(&mut self, n: usize) -> Player<R::Channel> {
        let side = Side::new(self.rig, &format!("side-{n}"));
        let target = |at| {
            let len = UNIT * if at % 8 == 0 { 64 } else { 4 };
            let mut target = Target {
                slot: side.slot(len),
                bytes: vec![0; len as usize],
                unsure: false,
            };
            target.set(self.stamp());
            target
        };
        Player {
            targets: (0..TARGETS).map(target).collect(),
            still: Still::default(),
            side,
        }
    }

    fn all(mut self) -> Tally {
        for round in 0..self.test.rounds {
            self.connect();
            // Half-way a side dies in any case: a few seeds kill none.
            let dies = self.tally.died == 0 && round == self.test.rounds / 2;
            self.round(dies);
            self.check();
            self.owners_write();
            if round % 4 == 3 {
                self.slots_come_back();
            }
            self.restart_the_unsure();
        }
        for player in mem::take(&mut self.players) {
            player.ends();
        }
        self.tally
    }

    /// Connects sides that are not connected; starts those again that turn out to be dead.
    fn connect(&mut self) {
        for from in 0..SIDES {
            for to in 0..SIDES {
                if from == to || self.connected(from, to) {
                    continue;
                }
                let (a, b) = (&self.players[from].side, &self.players[to].side);
                match a.try_connect(b, soon()) {
                    Err(ConnectError::Closed) => self.start_again(from),
                    Err(error) => assert!(!self.exact(), "connecting: {error}"),
                    Ok(()) => assert!(!self.exact() || self.connected(from, to)),
                }
            }
        }
    }

    fn connected(&self, from: usize, to: usize) -> bool {
        let peer = &self.players[to].side.id;
        self.players[from].side.channel.is_connected(peer)
    }

    /// Restarts a side that was killed. It connects to the others itself, so that all sides know.
    fn start_again(&mut self, n: usize) {
        self.rig.kill(&self.players[n].side.channel);
        let new = self.player(n);
        mem::replace(&mut self.players[n], new).went();
        self.tally.died += 1;
        if !self.exact() {
            return;
        }
        for other in (0..SIDES).filter(|other| *other != n) {
            let (a, b) = (&self.players[n].side, &self.players[other].side);
            a.connect(b);
        }
    }

    /// Runs concurrent operations. A side may be killed under them; with `dies`, one is.
    fn round(&mut self, dies: bool) {
        let mut taken = HashSet::new();
        let count = 1 + self.rng.below(5);
        let plans: Vec<_> = (0..count).map(|_| self.plan(&mut taken)).collect();
        let kill = (self.rng.chance(40) || dies).then(|| {
            let pause = Duration::from_micros(self.rng.below(1000));
            (self.rng.below(SIDES as u64) as usize, pause)
        });
        let players = &self.players;
        let came: Vec<Came> = thread::scope(|scope| {
            let carry_out = |plan| scope.spawn(move || carry_out(players, plan));
            let running: Vec<_> = plans.iter().map(carry_out).collect();
            if let Some((who, pause)) = kill {
                thread::sleep(pause);
                self.rig.kill(&players[who].side.channel);
            }
            let join = |running: thread::ScopedJoinHandle<'_, Came>| match running.join() {
                Ok(came) => came,
                Err(panic) => resume_unwind(panic),
            };
            running.into_iter().map(join).collect()
        });
        let killed = kill.map(|(who, _)| who);
        for (plan, came) in plans.iter().zip(came) {
            self.take(plan, came, killed);
        }
        if let Some(who) = killed {
            self.start_again(who);
        }
    }

    fn plan(&mut self, taken: &mut HashSet<(usize, usize)>) -> Plan {
        let from = self.rng.below(SIDES as u64) as usize;
        let to = (from + 1 + self.rng.below(SIDES as u64 - 1) as usize) % SIDES;
        let mut kind = match self.rng.below(10) {
            0..4 => Kind::Write,
            4..8 => Kind::Read,
            _ => Kind::Paired(self.rng.below(3) as usize),
        };
        let mut parts = Vec::new();
        for _ in 0..self.rng.below(BATCH + 1) {
            let target = self.rng.below(TARGETS as u64) as usize;
            let there = &self.players[to].targets[target];
            let paired = matches!(kind, Kind::Paired(_));
            if !paired && (there.unsure || !taken.insert((to, target))) {
                continue;
            }
            let unit = self.rng.below(there.slot.len() / UNIT);
            let left = there.slot.len() - unit * UNIT;
            let len = match self.rng.below(3) {
                0 => left,
                _ => 1 + self.rng.below(left),
            };
            parts.push(TargetRange { target, unit, len });
        }
        if matches!(kind, Kind::Paired(_)) && parts.is_empty() {
            // Nothing is sent, so slots would wait in vain.
            kind = Kind::Paired(0);
        }
        let drops = self.rng.chance(60);
        let drops = drops.then(|| Duration::from_micros(self.rng.below(600)));
        let tight = !self.exact() || self.rng.chance(50);
        let micros = match (self.exact(), drops) {
            (true, _) if tight => self.rng.below(2000),
            // The other end of a dropped paired call waits until this deadline.
            (true, None) => 60_000_000,
            // Long enough for most, on a busy machine.
            _ => 10_000 + self.rng.below(60_000),
        };
        Plan {
            kind,
            from,
            to,
            parts,
            stamp: self.stamp(),
            deadline: Duration::from_micros(micros),
            tight: tight || drops.is_some(),
            drops,
        }
    }

    /// Checks the outcome of an operation, and notes its effect.
    fn take(&mut self, plan: &Plan, came: Came, killed: Option<usize>) {
        let count = plan.parts.len();
        let fallible = plan.tight
            || !self.exact()
            || killed.is_some_and(|who| [plan.from, plan.to].contains(&who));
        let fails = |tally: &mut Tally, error: &Option<TransferError>| {
            let Some(error) = error else { return };
            tally.failed += 1;
            assert!(fallible, "{error}");
            let expected = matches!(
                error,
                TransferError::Deadline
                    | TransferError::PeerGone { .. }
                    | TransferError::UnknownPeer { .. }
                    | TransferError::Failed(_)
                    | TransferError::Stale { .. }
                    | TransferError::Closed
            );
            assert!(expected, "{error:?}");
        };
        if plan.drops.is_some() {
            self.tally.dropped += 1;
        }
        if let Some(sent) = &came.sent {
            fails(&mut self.tally, &sent.error);
            self.tally.unsettled += u64::from(!sent.idle);
            assert!(sent.done <= count && (sent.error.is_some() || sent.done == count));
        }
        if let Some(filled) = came.filled {
            fails(&mut self.tally, &filled.error);
            self.take_slots(plan, filled);
        }
        if plan.kind == Kind::Write {
            self.note_written(plan, came.sent);
        }
    }

    /// Compares what was read or received.
    fn take_slots(&mut self, plan: &Plan, filled: Filled) {
        let extra = match plan.kind {
            Kind::Paired(extra) => extra,
            _ => 0,
        };
        let count = plan.parts.len();
        assert_eq!(filled.slots.len(), count + extra);
        if filled.error.is_none() {
            assert_eq!(filled.done(), count, "all without an error");
        }
        for (at, slot) in filled.slots.into_iter().enumerate() {
            match slot {
                Slot::Written(slot) => {
                    let part = &plan.parts[at];
                    let mut sent = vec![0; part.len as usize];
                    let expected = if plan.kind == Kind::Read {
                        self.tally.read += 1;
                        let start = (part.unit * UNIT) as usize;
                        &self.players[plan.to].targets[part.target].bytes[start..][..sent.len()]
                    } else {
                        self.tally.received += 1;
                        fill_value(plan.stamp, at, &mut sent);
                        &sent
                    };
                    assert!(slot.bytes() == expected, "object {at} is another");
                }
                Slot::Idle(slot) => {
                    self.tally.idle += 1;
                    let who = match plan.kind {
                        Kind::Read => plan.from,
                        _ => plan.to,
                    };
                    self.players[who].still.keep(slot);
                }
                Slot::Quarantined => self.tally.quarantined += 1,
            }
        }
    }

    /// Notes what a write has changed in the peer's memory.
    fn note_written(&mut self, plan: &Plan, sent: Option<Sent>) {
        let done = sent.as_ref().map_or(0, |sent| sent.done);
        // The end of a write that was dropped is not reported.
        let idle = sent.as_ref().is_some_and(|sent| sent.idle);
        for (at, part) in plan.parts.iter().enumerate() {
            let fresh = self.stamp();
            let target = &mut self.players[plan.to].targets[part.target];
            if at < done {
                self.tally.written += 1;
                let start = (part.unit * UNIT) as usize;
                fill_value(
                    plan.stamp,
                    at,
                    &mut target.bytes[start..][..part.len as usize],
                );
            } else if idle {
                target.set(fresh);
            } else {
                target.unsure = true;
            }
        }
    }

    /// Compares every target that nothing may write to.
    fn check(&mut self) {
        for player in &mut self.players {
            for (at, target) in player.targets.iter_mut().enumerate() {
                if !target.unsure {
                    let right = *target.slot.bytes_mut() == target.bytes[..];
                    assert!(right, "target {at} of {} holds wrong bytes", player.side.id);
                }
            }
        }
    }

    fn owners_write(&mut self) {
        for _ in 0..self.rng.below(4) {
            let stamp = self.stamp();
            let player = self.rng.below(SIDES as u64) as usize;
            let target = self.rng.below(TARGETS as u64) as usize;
            let target = &mut self.players[player].targets[target];
            if !target.unsure {
                target.set(stamp);
            }
        }
    }

    fn slots_come_back(&mut self) {
        for player in &mut self.players {
            player
                .side
                .slots_come_back_but(TARGETS + player.still.len());
            player.still.check();
        }
    }

    /// Restarts sides with many unsure targets: the end of a side ends all writes to its memory.
    fn restart_the_unsure(&mut self) {
        for n in 0..SIDES {
            let unsure = |target: &&Target| target.unsure;
            let unsure = self.players[n].targets.iter().filter(unsure).count();
            if unsure > TARGETS / 4 {
                self.start_again(n);
            }
        }
    }
}

impl Target {
    /// Has the owner write the whole target.
    fn set(&mut self, stamp: u64) {
        fill_value(stamp, 0, &mut self.bytes);
        self.slot.bytes_mut().copy_from_slice(&self.bytes);
    }
}

impl<C: TransferChannel> Player<C> {
    fn ends(mut self) {
        let closed = block_on(self.side.channel.close(soon()));
        closed.expect("a channel closes in time");
        self.still.check();
        drop(self.targets);
        self.side.goes();
    }

    /// Checks and drops a side that has died.
    fn went(mut self) {
        self.still.check();
        drop(self.targets);
        self.side.goes();
    }
}

/// Waits for a call, or drops it after a while.
fn finish<T>(mut call: BoxFuture<'_, T>, drops: Option<Duration>) -> Option<T> {
    let Some(after) = drops else {
        return Some(block_on(call));
    };
    let mut context = Context::from_waker(Waker::noop());
    if call.as_mut().poll(&mut context).is_pending() {
        thread::sleep(after);
    }
    None
}

fn carry_out<C: TransferChannel>(players: &[Player<C>], plan: &Plan) -> Came {
    let (from, to) = (&players[plan.from], &players[plan.to]);
    let deadline = Instant::now() + plan.deadline;
    let lens: Vec<_> = plan.parts.iter().map(|part| part.len).collect();
    let at = |part: &TargetRange| {
        let offset = to.targets[part.target].slot.offset();
        to.side.at(offset / UNIT + part.unit)
    };
    let indices: Vec<_> = plan.parts.iter().map(at).collect();
    let objects = || -> Vec<SealedSlot> { from.side.objects(plan.stamp, &lens) };
    let (channel, peer) = (&from.side.channel, &to.side.id);
    match plan.kind {
        Kind::Write => {
            let call = channel.write(objects(), peer, &indices, deadline);
            Came {
                sent: finish(call, plan.drops),
                filled: None,
            }
        }
        Kind::Read => {
            let call = channel.read(from.side.slots(&lens), peer, &indices, deadline);
            Came {
                sent: None,
                filled: finish(call, plan.drops),
            }
        }
        Kind::Paired(extra) => thread::scope(|scope| {
            let (send_drops, receive_drops) = match plan.stamp % 2 {
                0 => (plan.drops, None),
                _ => (None, plan.drops),
            };
            let sending = scope.spawn(move || {
                let objects = from.side.objects(plan.stamp, &lens);
                finish(
                    channel.send(objects, peer, plan.stamp, deadline),
                    send_drops,
                )
            });
            let mut lens: Vec<_> = plan.parts.iter().map(|part| part.len).collect();
            lens.extend(std::iter::repeat_n(100, extra));
            let slots = to.side.slots(&lens);
            let (channel, sender) = (&to.side.channel, &from.side.id);
            let receiving = channel.receive(slots, sender, plan.stamp, deadline);
            let filled = finish(receiving, receive_drops);
            Came {
                sent: sending.join().unwrap_or_else(|panic| resume_unwind(panic)),
                filled,
            }
        }),
    }
}
