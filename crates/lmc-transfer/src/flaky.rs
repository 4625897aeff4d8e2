//! Seeded faults around any channel.
//!
//! A call without a fault is passed to the inner channel unchanged. A call with a fault runs on a
//! thread of its own, which keeps the call's slots to the end. A call that is passed on begins when
//! it is made, not later: by then its peer may be another incarnation of the same name.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{Arena, ReservedSlot, SealedSlot};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::blocking::block_on;
use crate::conformance::{Rig, Rng};
use crate::{
    Address, BoxFuture, ChannelConfig, ConnectError, DataPlane, Filled, InArena, Index, PeerId,
    ReadLease, Sent, Slot, TransferChannel, TransferError, WriteLease,
};

/// Rates of faults, each per 1,000 calls. Default: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Faults {
    /// Calls that never reach the peer: they fail at the deadline.
    pub lost: u16,
    /// Calls that are reported as failed at once, and carried out all the same. Slots that they
    /// write to are quarantined meanwhile.
    pub unsettled: u16,
    /// Calls that are carried out, and whose outcome arrives later.
    pub slow: u16,
    /// Calls that carry only some objects of the batch.
    pub partial: u16,
    /// Calls during which the peer or this side dies; requires [`Flaky::with_death`].
    pub death: u16,
    /// Longest delay of an outcome or a death.
    pub delay: Duration,
}

impl Faults {
    /// Returns rates with some of each fault: half of all calls have one.
    pub fn some() -> Self {
        Self {
            lost: 100,
            unsettled: 100,
            slow: 150,
            partial: 130,
            death: 20,
            delay: Duration::from_millis(30),
        }
    }
}

/// Kills the channel of this name, as [`Rig::kill`] does.
pub type Death = Arc<dyn Fn(&PeerId) + Send + Sync>;

/// A channel with faults; for tests.
pub struct Flaky<C> {
    inner: Arc<C>,
    faults: Faults,
    death: Option<Death>,
    rng: Mutex<Rng>,
}

impl<C: fmt::Debug> fmt::Debug for Flaky<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Flaky")
            .field("inner", &self.inner)
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

/// The fault of a call, with a random number that decides its details.
enum Fault {
    None,
    Lost,
    Unsettled,
    Slow(Duration),
    Partial(u64),
    Death(PeerId, Duration),
}

impl<C: TransferChannel + 'static> Flaky<C> {
    /// Wraps a channel; `seed` decides its faults.
    pub fn new(inner: C, faults: Faults, seed: u64) -> Self {
        Self {
            inner: Arc::new(inner),
            faults,
            death: None,
            rng: Mutex::new(Rng::new(seed)),
        }
    }

    /// Lets calls kill their peer or this side. `death` may be called on any thread.
    pub fn with_death(mut self, death: Death) -> Self {
        self.death = Some(death);
        self
    }

    /// Returns the inner channel.
    pub fn inner(&self) -> &C {
        &self.inner
    }

    fn fault(&self, peer: &PeerId) -> Fault {
        let mut rng = self.rng.lock();
        let faults = &self.faults;
        let mut die = rng.below(1000);
        let mut is = |per_mille: u16| {
            let hit = die < u64::from(per_mille);
            die = die.wrapping_sub(u64::from(per_mille));
            hit
        };
        let drawn = [
            is(faults.lost),
            is(faults.unsettled),
            is(faults.slow),
            is(faults.partial),
            is(faults.death) && self.death.is_some(),
        ];
        let micros = u64::try_from(faults.delay.as_micros()).unwrap_or(u64::MAX);
        let delay = Duration::from_micros(rng.below(micros.max(1)));
        match drawn {
            [true, ..] => Fault::Lost,
            [_, true, ..] => Fault::Unsettled,
            [_, _, true, ..] => Fault::Slow(delay),
            [_, _, _, true, _] => Fault::Partial(rng.next_u64()),
            [.., true] => {
                let who = if rng.chance(800) { peer } else { self.id() };
                Fault::Death(who.clone(), delay / 8)
            }
            _ => Fault::None,
        }
    }

    fn run<'a, O: FlakyOperation>(&'a self, op: O, deadline: Instant) -> BoxFuture<'a, O::Output> {
        let fault = match op.is_empty() {
            true => Fault::None,
            false => self.fault(op.peer()),
        };
        let inner = Arc::clone(&self.inner);
        if matches!(fault, Fault::None) {
            return Box::pin(async move { op.run(&*inner, deadline).await });
        }
        let death = self.death.clone();
        Box::pin(async move {
            let (reply, outcome) = oneshot::channel();
            let thread = thread::Builder::new().name("lmc-flaky".to_owned());
            let spawned =
                thread.spawn(move || inject(fault, death.as_ref(), &*inner, op, deadline, reply));
            spawned.expect("a test has a thread for a fault");
            outcome.await.expect("the thread answers")
        })
    }
}

/// An operation that [`Flaky`] can disturb.
trait FlakyOperation: Send + Sized + 'static {
    type Output: Send + 'static;

    fn peer(&self) -> &PeerId;
    fn is_empty(&self) -> bool;
    /// Runs the call unchanged.
    fn run<C: TransferChannel>(
        self,
        inner: &C,
        deadline: Instant,
    ) -> impl Future<Output = Self::Output> + Send;
    /// Runs the call with some of its objects only.
    fn run_partly<C: TransferChannel>(
        self,
        inner: &C,
        deadline: Instant,
        dice: u64,
    ) -> impl Future<Output = Self::Output> + Send;
    /// Returns the outcome of an operation that never began.
    fn lost(self) -> Self::Output;
    /// Returns the outcome of an operation that is reported as failed and still carried out.
    fn unsettled(&self) -> Self::Output;
}

/// Unparks a thread when it is woken.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Returns a waker that unparks the calling thread.
fn thread_waker() -> Waker {
    Waker::from(Arc::new(Unpark(thread::current())))
}

/// Waits until the caller has dropped the call (returns `true`) or the deadline has passed (returns
/// `false`).
fn dropped<T>(reply: &mut oneshot::Sender<T>, deadline: Instant) -> bool {
    let waker = thread_waker();
    loop {
        if reply
            .poll_closed(&mut Context::from_waker(&waker))
            .is_ready()
        {
            return true;
        }
        let Some(left) = deadline.checked_duration_since(Instant::now()) else {
            return false;
        };
        thread::park_timeout(left);
    }
}

/// Runs a future until it is done or the caller has dropped the call.
fn run_wanted<T>(
    mut reply: oneshot::Sender<T>,
    future: impl Future<Output = T>,
    begun: impl FnOnce(),
) -> Option<(oneshot::Sender<T>, T)> {
    let mut future = pin!(future);
    let waker = thread_waker();
    let mut context = Context::from_waker(&waker);
    let mut begun = Some(begun);
    loop {
        if reply.poll_closed(&mut context).is_ready() {
            return None;
        }
        match future.as_mut().poll(&mut context) {
            Poll::Ready(outcome) => return Some((reply, outcome)),
            Poll::Pending => match begun.take() {
                Some(begun) => begun(),
                None => thread::park(),
            },
        }
    }
}

/// Answers, if the caller still waits.
fn answer<T>(outcome: Option<(oneshot::Sender<T>, T)>) {
    if let Some((reply, outcome)) = outcome {
        let _ = reply.send(outcome);
    }
}

fn inject<C: TransferChannel, O: FlakyOperation>(
    fault: Fault,
    death: Option<&Death>,
    inner: &C,
    op: O,
    deadline: Instant,
    mut reply: oneshot::Sender<O::Output>,
) {
    match fault {
        Fault::None => answer(run_wanted(reply, op.run(inner, deadline), || {})),
        Fault::Lost => {
            dropped(&mut reply, deadline);
            answer(Some((reply, op.lost())));
        }
        Fault::Unsettled => {
            if reply.is_closed() {
                return;
            }
            let failed = op.unsettled();
            let mut running = pin!(op.run(inner, deadline));
            let waker = thread_waker();
            let polled = running.as_mut().poll(&mut Context::from_waker(&waker));
            answer(Some((reply, failed)));
            // The call cannot be revoked, not even by dropping it.
            if polled.is_pending() {
                drop(block_on(running));
            }
        }
        Fault::Slow(delay) => {
            if let Some((mut reply, outcome)) = run_wanted(reply, op.run(inner, deadline), || {}) {
                dropped(&mut reply, deadline.min(Instant::now() + delay));
                answer(Some((reply, outcome)));
            }
        }
        Fault::Partial(dice) => answer(run_wanted(
            reply,
            op.run_partly(inner, deadline, dice),
            || {},
        )),
        Fault::Death(who, delay) => {
            let kill = || {
                thread::sleep(delay);
                if let Some(death) = death {
                    death(&who);
                }
            };
            answer(run_wanted(reply, op.run(inner, deadline), kill));
        }
    }
}

fn injected() -> TransferError {
    TransferError::Failed("injected".to_owned())
}

/// Paired, under a tag; or one-sided, at indices.
#[derive(Clone)]
enum How {
    Tag(u64),
    At(Vec<Index>),
}

/// Sends or writes.
struct Out {
    objects: Vec<SealedSlot>,
    peer: PeerId,
    how: How,
}

impl FlakyOperation for Out {
    type Output = Sent;

    fn peer(&self) -> &PeerId {
        &self.peer
    }

    fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    async fn run<C: TransferChannel>(self, inner: &C, deadline: Instant) -> Sent {
        let Self { objects, peer, how } = self;
        match how {
            How::Tag(tag) => inner.send(objects, &peer, tag, deadline).await,
            How::At(at) => inner.write(objects, &peer, &at, deadline).await,
        }
    }

    async fn run_partly<C: TransferChannel>(
        mut self,
        inner: &C,
        deadline: Instant,
        dice: u64,
    ) -> Sent {
        let count = Rng::new(dice).below(self.objects.len() as u64) as usize;
        // A send must be whole: the receiver would take the fewer objects for the whole batch. The
        // sender does not learn here that all of it was sent.
        if let How::At(at) = &mut self.how {
            self.objects.truncate(count);
            at.truncate(count);
        }
        let sent = self.run(inner, deadline).await;
        Sent {
            done: sent.done.min(count),
            error: sent.error.or_else(|| Some(injected())),
            idle: sent.idle,
        }
    }

    fn lost(self) -> Sent {
        Sent::failed(TransferError::Deadline)
    }

    fn unsettled(&self) -> Sent {
        Sent {
            idle: false,
            ..Sent::failed(injected())
        }
    }
}

/// Receives or reads.
struct In {
    slots: Vec<ReservedSlot>,
    peer: PeerId,
    how: How,
}

impl FlakyOperation for In {
    type Output = Filled;

    fn peer(&self) -> &PeerId {
        &self.peer
    }

    fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    async fn run<C: TransferChannel>(self, inner: &C, deadline: Instant) -> Filled {
        let Self { slots, peer, how } = self;
        match how {
            How::Tag(tag) => inner.receive(slots, &peer, tag, deadline).await,
            How::At(at) => inner.read(slots, &peer, &at, deadline).await,
        }
    }

    async fn run_partly<C: TransferChannel>(
        self,
        inner: &C,
        deadline: Instant,
        dice: u64,
    ) -> Filled {
        if matches!(&self.how, How::At(at) if at.len() != self.slots.len()) {
            return self.run(inner, deadline).await;
        }
        let Self { slots, peer, how } = self;
        let mut rng = Rng::new(dice);
        let keep: Vec<_> = slots.iter().map(|_| rng.chance(500)).collect();
        let (slots, error) = match how {
            // A receive must have all its slots; some objects that arrived are discarded
            // afterwards.
            How::Tag(tag) => {
                let filled = inner.receive(slots, &peer, tag, deadline).await;
                let lose = |(slot, keep)| match (slot, keep) {
                    (Slot::Written(slot), false) => {
                        slot.quarantine().release_proven_quiet();
                        Slot::Quarantined
                    }
                    (slot, _) => slot,
                };
                let slots = filled.slots.into_iter().zip(keep).map(lose).collect();
                (slots, filled.error)
            }
            How::At(at) => {
                let (mut through, mut indices) = (Vec::new(), Vec::new());
                let mut lost = Vec::new();
                for ((slot, index), keep) in slots.into_iter().zip(at).zip(&keep) {
                    if *keep {
                        through.push(slot);
                        indices.push(index);
                    } else {
                        lost.push(slot);
                    }
                }
                let filled = inner.read(through, &peer, &indices, deadline).await;
                let (mut through, mut lost) = (filled.slots.into_iter(), lost.into_iter());
                let merged = keep.iter().filter_map(|keep| match keep {
                    true => through.next(),
                    false => lost.next().map(Slot::Idle),
                });
                (merged.collect(), filled.error)
            }
        };
        let error = error.or_else(|| Some(injected()));
        Filled {
            slots,
            error,
            by: DataPlane::default(),
        }
    }

    fn lost(self) -> Filled {
        Filled::untouched(self.slots, TransferError::Deadline)
    }

    fn unsettled(&self) -> Filled {
        Filled {
            slots: self.slots.iter().map(|_| Slot::Quarantined).collect(),
            error: Some(injected()),
            by: DataPlane::default(),
        }
    }
}

impl<C: TransferChannel + 'static> TransferChannel for Flaky<C> {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn id(&self) -> &PeerId {
        self.inner.id()
    }

    fn address(&self) -> &Address {
        self.inner.address()
    }

    fn connect<'a>(
        &'a self,
        peer: &'a PeerId,
        address: &'a Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<Option<Bytes>, ConnectError>> {
        match self.fault(peer) {
            Fault::Lost | Fault::Partial(_) => {
                let error = io::Error::new(io::ErrorKind::ConnectionReset, "injected");
                Box::pin(async move { Err(error.into()) })
            }
            // The connect succeeds, and is reported to the caller as failed.
            Fault::Unsettled => Box::pin(async move {
                self.inner.connect(peer, address, message, deadline).await?;
                Err(ConnectError::Deadline { peer: peer.clone() })
            }),
            Fault::None | Fault::Slow(_) | Fault::Death(..) => {
                self.inner.connect(peer, address, message, deadline)
            }
        }
    }

    fn incarnation(&self) -> u64 {
        self.inner.incarnation()
    }

    fn disconnect<'a>(
        &'a self,
        peer: &'a PeerId,
        deadline: Instant,
    ) -> BoxFuture<'a, Result<(), TransferError>> {
        self.inner.disconnect(peer, deadline)
    }

    fn peer_incarnation(&self, peer: &PeerId) -> Option<u64> {
        self.inner.peer_incarnation(peer)
    }

    fn data_plane(&self, peer: &PeerId) -> Option<DataPlane> {
        self.inner.data_plane(peer)
    }

    fn grant_read(
        &self,
        peer: &PeerId,
        slots: Vec<SealedSlot>,
    ) -> Result<ReadLease, TransferError> {
        self.inner.grant_read(peer, slots)
    }

    fn grant_write(
        &self,
        peer: &PeerId,
        slots: Vec<ReservedSlot>,
    ) -> Result<WriteLease, TransferError> {
        self.inner.grant_write(peer, slots)
    }

    fn unit(&self) -> u64 {
        self.inner.unit()
    }

    fn arena_indices(&self, slots: &[&dyn InArena]) -> Result<Vec<Index>, TransferError> {
        self.inner.arena_indices(slots)
    }

    fn send<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        let (peer, how) = (peer.clone(), How::Tag(tag));
        self.run(Out { objects, peer, how }, deadline)
    }

    fn receive<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        tag: u64,
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        let (peer, how) = (peer.clone(), How::Tag(tag));
        self.run(In { slots, peer, how }, deadline)
    }

    fn write<'a>(
        &'a self,
        objects: Vec<SealedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Sent> {
        let (peer, how) = (peer.clone(), How::At(indices.to_vec()));
        self.run(Out { objects, peer, how }, deadline)
    }

    fn read<'a>(
        &'a self,
        slots: Vec<ReservedSlot>,
        peer: &'a PeerId,
        indices: &'a [Index],
        deadline: Instant,
    ) -> BoxFuture<'a, Filled> {
        let (peer, how) = (peer.clone(), How::At(indices.to_vec()));
        self.run(In { slots, peer, how }, deadline)
    }

    fn close(&self, deadline: Instant) -> BoxFuture<'_, Result<(), TransferError>> {
        self.inner.close(deadline)
    }
}

/// A rig whose channels have faults; some faults kill a channel.
pub struct FlakyRig<R: Rig> {
    inner: Arc<R>,
    faults: Faults,
    seeds: Mutex<Rng>,
    living: Living<R::Channel>,
}

type Living<C> = Arc<Mutex<HashMap<PeerId, Weak<C>>>>;

impl<R: Rig> fmt::Debug for FlakyRig<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FlakyRig")
            .field("faults", &self.faults)
            .finish_non_exhaustive()
    }
}

impl<R: Rig> FlakyRig<R> {
    /// Wraps a rig; `seed` decides the faults.
    pub fn new(inner: R, faults: Faults, seed: u64) -> Self {
        Self {
            inner: Arc::new(inner),
            faults,
            seeds: Mutex::new(Rng::new(seed)),
            living: Living::default(),
        }
    }
}

impl<R> Rig for FlakyRig<R>
where
    R: Rig + Send + 'static,
    R::Channel: 'static,
{
    type Channel = Flaky<R::Channel>;

    fn channel(
        &self,
        id: &str,
        arena: Arc<Arena>,
        change: impl FnOnce(&mut ChannelConfig),
    ) -> Self::Channel {
        let channel = self.inner.channel(id, arena, change);
        let (rig, living) = (Arc::clone(&self.inner), Arc::clone(&self.living));
        let death: Death = Arc::new(move |who| {
            let channel = living.lock().get(who).and_then(Weak::upgrade);
            if let Some(channel) = channel {
                rig.kill(&channel);
            }
        });
        let seed = self.seeds.lock().next_u64();
        let channel = Flaky::new(channel, self.faults, seed).with_death(death);
        let known = Arc::downgrade(&channel.inner);
        self.living.lock().insert(channel.id().clone(), known);
        channel
    }

    fn kill(&self, channel: &Self::Channel) {
        self.inner.kill(&channel.inner);
    }

    fn plane(&self) -> DataPlane {
        self.inner.plane()
    }
}
