//! The receiving half of a stream.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_memory::{SealedSlot, checksum};
use tokio::io::Interest;
use tokio::task::coop::consume_budget;
use tokio::time::timeout;

use super::budget::Charge;
use super::channel_core::ChannelCore;
use super::connection::{Arrival, Connection, Gone, MAX_REQUESTS, Offered, Reply, Stream};
use super::frame::{Decoder, Frame, FrameOutcome, PieceHead, Pieces};
use super::landing::Target;
use super::offers::{INLINED_OFFERS, Offer};
use super::outgoing::{Outgoing, PayloadSource, PieceForm, Run};
use super::window::Parted;
use crate::lease::{Access, Denied, Granted, Range, Region, Segment};
use crate::net::{Moved, Sockets, receive_bytes};
use crate::session::{Opener, sealed_len};
use crate::{MAX_MESSAGE, Rights};

/// Most bytes that are read ahead where frames or small pieces may follow.
const STASH: usize = 16 << 10;
/// Size of a piece at which reading ahead into it costs more than another system call.
const LARGE: u64 = 16 << 10;
/// Bytes of a payload for which a thread is woken at a time, if at least as many are expected. The
/// sender, too, pays for each wake-up: on a virtual machine tens of microseconds.
const AT_A_TIME: u64 = 1 << 20;
const LEAST_AT_A_TIME: u64 = 256 << 10;
/// Time limit of a wait for [`AT_A_TIME`] bytes: a sender that aborts, or a slow network, brings
/// fewer.
const AT_A_TIME_TIMEOUT: Duration = Duration::from_millis(2);
/// Bytes that are read at a time to be discarded.
const SINK: usize = 64 << 10;
/// Bytes that a request holds for each of its ranges.
const RANGE_BYTES: usize = 64;
/// Bytes of a frame that are not charged to the peer's account.
const FREE: usize = 16 << 10;

#[cfg(feature = "nixl")]
mod plane;

pub(super) struct StreamReader {
    core: Arc<ChannelCore>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    stream: usize,
    decoder: Decoder,
    /// Charge for the bytes that the decoder holds.
    charge: Option<Charge>,
    stash: Box<[u8]>,
    /// Start of the unused part of the stash.
    start: usize,
    end: usize,
    sink: Vec<u8>,
    /// A sealed piece; `plain` has its opened form.
    sealed: Vec<u8>,
    plain: Vec<u8>,
    /// Bytes that must have arrived before this task is woken.
    low_water: u64,
    moved: Moved,
}

/// The target of a range of a payload.
#[derive(Clone, Copy)]
enum Sink<'a> {
    /// Bytes go to the open arena.
    Arena,
    /// Bytes go to slots of a lease, while the lease stands.
    Lease(&'a Granted),
    /// Bytes go to slots of a call, while the call holds them.
    Call(&'a Target),
    Nowhere,
}

impl Sink<'_> {
    /// Runs `act` on the memory, if that is still allowed.
    fn with<T>(self, act: impl FnOnce() -> T) -> Option<T> {
        match self {
            Self::Arena => Some(act()),
            Self::Lease(granted) => {
                let _pin = granted.pin()?;
                Some(act())
            }
            Self::Call(target) => target.with(act),
            Self::Nowhere => None,
        }
    }
}

/// The targets of the ranges of a write.
struct Landings {
    segments: Vec<Segment>,
    /// `None`: the open arena.
    leases: Vec<Option<Arc<Granted>>>,
}

impl StreamReader {
    pub(super) fn new(
        core: &Arc<ChannelCore>,
        connection: &Arc<Connection>,
        sockets: &Arc<Sockets>,
        stream: usize,
        opener: Opener,
    ) -> Self {
        Self {
            core: Arc::clone(core),
            connection: Arc::clone(connection),
            sockets: Arc::clone(sockets),
            stream,
            decoder: Decoder::new(opener),
            charge: None,
            stash: vec![0; STASH].into(),
            start: 0,
            end: 0,
            sink: Vec::new(),
            sealed: Vec::new(),
            plain: Vec::new(),
            low_water: 1,
            moved: Moved::default(),
        }
    }

    pub(super) async fn run(mut self) -> Gone {
        loop {
            if let Err(gone) = self.step().await {
                return gone;
            }
        }
    }

    /// Serves one frame.
    async fn step(&mut self) -> Result<(), Gone> {
        // One read may have brought many frames.
        consume_budget().await;
        match self.frame().await? {
            Frame::Ping(number) => {
                // If the pong would have to wait, the bytes under way are a sign of life, too.
                self.connection.send_now(self.stream, &Frame::Pong(number));
            }
            Frame::Pong(number) => self.connection.ponged(number),
            Frame::Read { id, ranges } => {
                let charge = self.admit(ranges.len())?;
                let outgoing = self.data(id, &ranges, charge);
                self.stream().queue.push(outgoing);
            }
            Frame::Data { id } => {
                let pending = self.stream().take(id);
                let asked = pending.filter(|pending| !pending.is_by_nixl());
                let asked = asked.and_then(|mut pending| Some((pending.target.take()?, pending)));
                let Some((target, pending)) = asked else {
                    return Err(Gone::Broken("data that was not asked for".into()));
                };
                self.answered(1);
                let sink = |_| Sink::Call(&target);
                let arrival = self.payload(&target.segments, sink).await?;
                pending.answer(Reply::Arrived(arrival));
            }
            Frame::Write { id, ranges } => {
                let _charge = self.admit(ranges.len())?;
                let outcome = self.write(&ranges).await?;
                self.stream().queue.push(self.answer(id, outcome));
            }
            Frame::Answer { id, outcome } => self.settle(id, Reply::Outcome(outcome))?,
            Frame::Ask { id, question } => {
                let charge = self.admit(question.len().div_ceil(RANGE_BYTES))?;
                self.answer_question(id, question, charge);
            }
            Frame::Reply { id, answer } => self.settle(id, Reply::Message(answer))?,
            Frame::Offer {
                id,
                tag,
                lens,
                inlined,
            } => self.offer(id, tag, lens, inlined).await?,
            Frame::Withdraw { id } => {
                let offer = self.connection.incoming.withdraw(&self.connection, id);
                if let Some(offer) = offer.filter(|offer| offer.inlined) {
                    offer.finish(0, FrameOutcome::Withdrawn);
                }
            }
            Frame::Finish { id, done, outcome } => {
                let offered = self.connection.offered.lock().remove(&id);
                if let Some(offered) = offered {
                    let _ = offered.finish.send((done, outcome));
                }
            }
            #[cfg(feature = "nixl")]
            Frame::Plane(announcement) => self.announced(announcement)?,
            #[cfg(feature = "nixl")]
            Frame::Fetch {
                id,
                ranges,
                offset,
                millis,
            } => self.fetch(id, &ranges, offset, millis).await?,
            #[cfg(feature = "nixl")]
            Frame::Moved { id, sums } => self.landed(id, &sums).await?,
            #[cfg(feature = "nixl")]
            Frame::Unmoved { id, idle, reason } => self.not_landed(id, idle, reason)?,
            #[cfg(feature = "nixl")]
            Frame::Stop { id } => self.stopped(id)?,
        }
        Ok(())
    }

    fn stream(&self) -> &Stream {
        &self.connection.streams[self.stream]
    }

    fn answered(&self, bytes: u64) {
        self.stream().answered.fetch_add(bytes, Ordering::Relaxed);
    }

    fn charge(&self, bytes: usize) -> Result<Charge, Gone> {
        let charge = self.connection.account.charge(bytes);
        charge.ok_or_else(|| Gone::Broken("it holds too much memory of this side".into()))
    }

    /// Counts a request of the peer.
    fn admit(&self, ranges: usize) -> Result<Charge, Gone> {
        self.core.counters.served.add(1);
        match self.stream().unanswered.fetch_add(1, Ordering::Relaxed) {
            n if n < MAX_REQUESTS => self.charge(ranges * RANGE_BYTES),
            _ => Err(Gone::Broken("too many requests at once".into())),
        }
    }

    /// Returns the answer to a read.
    fn data(&self, id: u64, ranges: &[Range], charge: Charge) -> Outgoing {
        match self.runs(ranges) {
            Ok(payload) => Outgoing {
                payload,
                _charge: Some(charge),
                ..self.answering(&Frame::Data { id })
            },
            Err(outcome) => {
                if outcome != FrameOutcome::Withdrawn {
                    self.core.counters.refused_requests.add(1);
                }
                self.answer(id, outcome)
            }
        }
    }

    /// Ends a request of this side that is answered without data.
    fn settle(&self, id: u64, reply: Reply) -> Result<(), Gone> {
        let Some(pending) = self.stream().take(id) else {
            return Err(Gone::Broken("an answer without a request".into()));
        };
        let completes = matches!(
            reply,
            Reply::Message(_) | Reply::Outcome(FrameOutcome::Done)
        );
        if pending.target.is_some() && completes {
            return Err(Gone::Broken("a read that is done without data".into()));
        }
        self.answered(1);
        pending.answer(reply);
        Ok(())
    }

    /// Sends the answer to a question once the embedder has it.
    fn answer_question(&self, id: u64, question: Vec<u8>, charge: Charge) {
        let Some(on_ask) = &self.core.config.channel.on_ask else {
            let refused = FrameOutcome::Refused("this peer answers no questions".into());
            self.stream().queue.push(self.answer(id, refused));
            return;
        };
        let remote = &self.connection.remote;
        let answering = on_ask(&remote.id, remote.incarnation, question.into());
        let (connection, stream) = (Arc::clone(&self.connection), self.stream);
        let answers = Arc::clone(&self.stream().unanswered);
        tokio::spawn(async move {
            let answer = tokio::select! {
                answer = answering => answer,
                _ = connection.ended() => return,
            };
            let frame = match answer.len() {
                0..=MAX_MESSAGE => Frame::Reply {
                    id,
                    answer: answer.into(),
                },
                _ => Frame::Answer {
                    id,
                    outcome: FrameOutcome::Refused("the answer is too long".into()),
                },
            };
            connection.streams[stream].queue.push(Outgoing {
                answers: Some(answers),
                _charge: Some(charge),
                ..Outgoing::of(&frame)
            });
        });
    }

    /// Resolves the ranges of a read, if the peer may read them.
    fn runs(&self, ranges: &[Range]) -> Result<Vec<Run>, FrameOutcome> {
        let mut runs: Vec<Run> = Vec::new();
        let mut last = None;
        for (number, range) in (0..).zip(ranges) {
            if last != Some(range.region) {
                let source = self.source(range.region).map_err(|denied| match denied {
                    Some(denied) => refusal(denied, number),
                    None => FrameOutcome::Withdrawn,
                })?;
                let segments = Vec::new();
                runs.push(Run { source, segments });
                last = Some(range.region);
            }
            let Some(run) = runs.last_mut() else { continue };
            let segment = match &mut run.source {
                PayloadSource::Arena => self.in_arena(*range),
                PayloadSource::Lease { granted, slots } => {
                    slots.push(range.slot);
                    granted.segment(*range)
                }
                PayloadSource::Offer(slots) => of_offer(slots, *range),
                PayloadSource::Write(_) => None,
            };
            run.segments
                .push(segment.ok_or(FrameOutcome::NotLeased(number))?);
        }
        Ok(runs)
    }

    /// Looks up a region for reading; `Err(None)` for an offer that was withdrawn.
    fn source(&self, region: Region) -> Result<PayloadSource, Option<Denied>> {
        match region {
            Region::Arena if self.core.config.channel.open_arena => Ok(PayloadSource::Arena),
            Region::Arena => Err(Some(Denied::NotLeased)),
            Region::Lease(number) => {
                let incarnation = self.connection.remote.incarnation;
                let granted = self.core.leases.find(number, incarnation, Access::Read);
                let slots = Vec::new();
                let lease = |granted| PayloadSource::Lease { granted, slots };
                granted.map(lease).map_err(Some)
            }
            Region::Offer(offer) => {
                let mut offered = self.connection.offered.lock();
                let Some(Offered {
                    objects: Some(slots),
                    pulled,
                    ..
                }) = offered.get_mut(&offer)
                else {
                    return Err(None);
                };
                *pulled = true;
                Ok(PayloadSource::Offer(Arc::clone(slots)))
            }
        }
    }

    fn in_arena(&self, range: Range) -> Option<Segment> {
        let arena = self.core.window.arena();
        // Ranges that were never allocated may have no memory yet.
        arena.ensure(range.offset, range.len).ok()?;
        Some(Segment {
            offset: range.offset,
            len: range.len,
        })
    }

    /// Returns a frame that ends a request of the peer.
    fn answering(&self, frame: &Frame) -> Outgoing {
        Outgoing {
            answers: Some(Arc::clone(&self.stream().unanswered)),
            ..Outgoing::of(frame)
        }
    }

    fn answer(&self, id: u64, outcome: FrameOutcome) -> Outgoing {
        self.answering(&Frame::Answer { id, outcome })
    }

    /// Receives an offer, with its inlined objects.
    async fn offer(
        &mut self,
        id: u64,
        tag: u64,
        lens: Vec<u64>,
        inlined: bool,
    ) -> Result<(), Gone> {
        let bytes = lens.iter().sum::<u64>() as usize;
        let held = lens.len() * size_of::<u64>() + size_of::<Offer<Connection>>();
        let charge = self.charge(held + if inlined { bytes } else { 0 })?;
        let bytes = match inlined {
            true => self.inlined(&lens, bytes).await?,
            false => None,
        };
        let offer = Offer {
            connection: Arc::clone(&self.connection),
            id,
            lens,
            inlined,
            bytes,
            _charge: charge,
        };
        match self.connection.incoming.offer(tag, offer) {
            true => Ok(()),
            false => Err(Gone::Broken("too many offers".into())),
        }
    }

    /// Receives the objects that are inlined in an offer; `None` if they arrived with a wrong
    /// checksum, and are to be read again.
    async fn inlined(&mut self, lens: &[u64], total: usize) -> Result<Option<Vec<u8>>, Gone> {
        if self.connection.inlined.fetch_add(1, Ordering::Relaxed) >= INLINED_OFFERS {
            return Err(Gone::Broken("too many inlined offers".into()));
        }
        let mut bytes = vec![0; total];
        let mut rest = &mut bytes[..];
        let mut sound = true;
        for len in lens {
            let head = self.piece_head().await?;
            if u64::from(head.len) != *len {
                return Err(Gone::Broken("a piece of another length".into()));
            }
            let (now, later) = rest.split_at_mut(*len as usize);
            let form = self.connection.remote.form;
            if form == PieceForm::Sealed {
                self.open_piece(*len as usize).await?;
                now.copy_from_slice(&self.plain);
            } else {
                self.fill(now).await?;
                if form == PieceForm::Summed && checksum(now) != head.sum {
                    self.core.counters.corrupt.add(1);
                    sound = false;
                }
            }
            rest = later;
        }
        Ok(sound.then_some(bytes))
    }

    /// Receives the bytes of a peer's write.
    async fn write(&mut self, ranges: &[Range]) -> Result<FrameOutcome, Gone> {
        let landings = match self.landings(ranges) {
            Ok(landings) => landings,
            Err(outcome) => {
                self.core.counters.refused_requests.add(1);
                let nowhere = |range: &Range| Segment {
                    offset: 0,
                    len: range.len,
                };
                let segments: Vec<Segment> = ranges.iter().map(nowhere).collect();
                self.payload(&segments, |_| Sink::Nowhere).await?;
                return Ok(outcome);
            }
        };
        let sink = |number: u32| match &landings.leases[number as usize] {
            Some(granted) => Sink::Lease(granted),
            None => Sink::Arena,
        };
        let arrival = self.payload(&landings.segments, sink).await?;
        let revoked = |lease: &Option<Arc<Granted>>| {
            let pin = lease.as_ref().map(|granted| granted.pin());
            pin.is_some_and(|pin| pin.is_none())
        };
        let revoked = landings.leases.iter().position(revoked);
        Ok(match (arrival.bad.first(), revoked) {
            (Some(&number), _) => FrameOutcome::Corrupt(number),
            (None, Some(number)) if arrival.aborted => FrameOutcome::NotLeased(number as u32),
            (None, _) if arrival.aborted => FrameOutcome::Aborted,
            (None, _) => FrameOutcome::Done,
        })
    }

    /// Resolves the ranges of a write, if the peer may write to them.
    fn landings(&self, ranges: &[Range]) -> Result<Landings, FrameOutcome> {
        let config = &self.core.config.channel;
        if config.rights != Rights::ReadWrite {
            return Err(FrameOutcome::ReadOnly);
        }
        let mut landings = Landings {
            segments: Vec::with_capacity(ranges.len()),
            leases: Vec::with_capacity(ranges.len()),
        };
        let incarnation = self.connection.remote.incarnation;
        for (number, range) in (0..).zip(ranges) {
            let (segment, lease) = match range.region {
                Region::Arena if config.open_arena => (self.in_arena(*range), None),
                Region::Lease(lease) => {
                    let granted = self.core.leases.find(lease, incarnation, Access::Write);
                    let granted = granted.map_err(|denied| refusal(denied, number))?;
                    (granted.segment(*range), Some(granted))
                }
                Region::Arena | Region::Offer(_) => (None, None),
            };
            let segment = segment.ok_or(FrameOutcome::NotLeased(number))?;
            landings.segments.push(segment);
            landings.leases.push(lease);
        }
        Ok(landings)
    }

    /// Receives the next frame.
    async fn frame(&mut self) -> Result<Frame, Gone> {
        loop {
            let mut input = &self.stash[self.start..self.end];
            let decoded = self.decoder.feed(&mut input);
            self.start = self.end - input.len();
            match decoded {
                Ok(Some(frame)) => {
                    self.charge = None;
                    return Ok(frame);
                }
                Ok(None) => {
                    let held = self.decoder.held();
                    let charged = self.charge.as_ref().map_or(FREE, Charge::bytes);
                    if held > charged {
                        self.charge = None;
                        self.charge = Some(self.charge(held)?);
                    }
                    self.more().await?;
                }
                Err(error) => return Err(Gone::Broken(error.to_string())),
            }
        }
    }

    /// Receives a payload, piece by piece.
    async fn payload<'a>(
        &mut self,
        segments: &[Segment],
        sink: impl Fn(u32) -> Sink<'a>,
    ) -> Result<Arrival, Gone> {
        let mut arrival = Arrival::default();
        // The checksum of a range of a read, computed for the reader while the pieces are in the
        // cache.
        let mut parted = Parted::default();
        let lens = segments.iter().map(|segment| segment.len);
        let mut left = lens.fold(0, u64::saturating_add);
        let mut pieces = Pieces::of(segments).peekable();
        while let Some((number, piece)) = pieces.next() {
            let head = self.piece_head().await?;
            if head.len == 0 {
                arrival.aborted = true;
                break;
            }
            if u64::from(head.len) != piece.len {
                return Err(Gone::Broken("a piece of another length".into()));
            }
            let sink = sink(number);
            let form = self.connection.remote.form;
            let sum = if form == PieceForm::Sealed {
                self.open_piece(piece.len as usize).await?;
                let put = || self.core.window.put(piece, &self.plain);
                // Opening has verified the bytes.
                sink.with(put).map(|()| head.sum)
            } else {
                let ahead = match pieces.peek() {
                    Some((_, next)) if next.len >= LARGE => PieceHead::LEN,
                    _ => STASH,
                };
                self.piece(piece, sink, ahead, &mut left).await?;
                // While the piece is still in the cache.
                let window = &self.core.window;
                let is_last = pieces.peek().is_none_or(|(next, _)| *next != number);
                sink.with(|| match (form, sink) {
                    (PieceForm::Plain, Sink::Call(_)) => {
                        let sum = window.add_to(piece, &mut parted, is_last);
                        arrival.sums.extend(sum.map(|sum| (number, sum)));
                        head.sum
                    }
                    (PieceForm::Plain, _) => head.sum,
                    _ => window.sum(piece),
                })
            };
            match sum {
                Some(sum) if sum == head.sum => {}
                None => {
                    self.core.counters.discarded.add(1);
                    arrival.aborted = true;
                }
                Some(_) => {
                    self.core.counters.corrupt.add(1);
                    if arrival.bad.last() != Some(&number) {
                        arrival.bad.push(number);
                    }
                }
            }
            self.answered(piece.len);
            self.moved.add(piece.len).await;
        }
        self.wake_at(1);
        Ok(arrival)
    }

    /// Receives and opens a sealed piece.
    async fn open_piece(&mut self, len: usize) -> Result<(), Gone> {
        let mut sealed = std::mem::take(&mut self.sealed);
        sealed.resize(sealed_len(len), 0);
        self.fill(&mut sealed).await?;
        self.plain.clear();
        let opened = self.decoder.open(&sealed, &mut self.plain);
        self.sealed = sealed;
        match opened {
            Ok(()) if self.plain.len() == len => Ok(()),
            Ok(()) => Err(Gone::Broken("a piece of another length".into())),
            Err(error) => Err(Gone::Broken(error.to_string())),
        }
    }

    /// Sets how many bytes must have arrived before this task is woken.
    fn wake_at(&mut self, bytes: u64) {
        if self.low_water != bytes && self.sockets.0[self.stream].set_low_water(bytes) {
            self.low_water = bytes;
        }
    }

    async fn piece_head(&mut self) -> Result<PieceHead, Gone> {
        loop {
            let input = &self.stash[self.start..self.end];
            if let Some((head, _)) = input.split_first_chunk() {
                let head = PieceHead::decode(*head);
                self.start += PieceHead::LEN;
                return Ok(head);
            }
            self.more().await?;
        }
    }

    /// Receives the bytes of one piece, and up to `ahead` bytes after it. `left` is the rest of the
    /// payload in bytes, or 0 once it arrives too slowly to wait for many.
    async fn piece(
        &mut self,
        piece: Segment,
        sink: Sink<'_>,
        ahead: usize,
        left: &mut u64,
    ) -> Result<(), Gone> {
        let stashed = &self.stash[self.start..self.end];
        let mut done = stashed.len().min(piece.len as usize);
        sink.with(|| self.core.window.put(piece, &stashed[..done]));
        self.start += done;
        *left = left.saturating_sub(done as u64);
        while done < piece.len as usize {
            // The stash is used up, or the piece would be complete.
            (self.start, self.end) = (0, 0);
            let rest = Segment {
                offset: piece.offset + done as u64,
                len: piece.len - done as u64,
            };
            // A low-water mark stays while at least as many bytes are expected: setting it has a
            // cost, too.
            if self.low_water == 1 || self.low_water > *left {
                self.wake_at(match *left {
                    // Fewer bytes of a short payload, so that they are received while the rest is
                    // sent.
                    left if left >= LEAST_AT_A_TIME => (left / 4).clamp(LEAST_AT_A_TIME, AT_A_TIME),
                    _ => 1,
                });
            }
            let window = &self.core.window;
            let (stash, discarded) = (&mut self.stash[..ahead], &mut self.sink);
            let into = |socket: RawFd| {
                let received = sink.with(|| window.receive(socket, rest, stash));
                received.unwrap_or_else(|| discard(socket, discarded, rest.len))
            };
            let received = self.sockets.0[self.stream].when(Interest::READABLE, into);
            let received = match self.low_water {
                1 => received.await?,
                _ => match timeout(AT_A_TIME_TIMEOUT, received).await {
                    Ok(received) => received?,
                    Err(_) => {
                        *left = 0;
                        continue;
                    }
                },
            };
            self.received(received)?;
            let now = received.min(rest.len as usize);
            done += now;
            *left = left.saturating_sub(now as u64);
            self.end = received - now;
        }
        Ok(())
    }

    /// Fills a buffer outside the arena.
    async fn fill(&mut self, mut rest: &mut [u8]) -> Result<(), Gone> {
        loop {
            let stashed = &self.stash[self.start..self.end];
            let (now, later) = rest.split_at_mut(stashed.len().min(rest.len()));
            now.copy_from_slice(&stashed[..now.len()]);
            self.start += now.len();
            rest = later;
            match rest.len() as u64 {
                0 => return Ok(()),
                1..LARGE => self.more().await?,
                LARGE.. => {
                    let socket = &self.sockets.0[self.stream];
                    let read = |socket| receive_bytes(socket, rest);
                    let received = socket.when(Interest::READABLE, read).await?;
                    self.received(received)?;
                    rest = &mut rest[received..];
                }
            }
        }
    }

    /// Reads at least a byte into the stash.
    async fn more(&mut self) -> Result<(), Gone> {
        self.wake_at(1);
        self.stash.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        let free = &mut self.stash[self.end..];
        let socket = &self.sockets.0[self.stream];
        let read = |socket| receive_bytes(socket, free);
        let received = socket.when(Interest::READABLE, read).await?;
        self.received(received)?;
        self.end += received;
        Ok(())
    }

    fn received(&self, bytes: usize) -> Result<(), Gone> {
        if bytes == 0 {
            return Err(Gone::Closed);
        }
        self.core.counters.bytes_in.add(bytes);
        let received = &self.stream().received;
        received.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }
}

fn refusal(denied: Denied, number: u32) -> FrameOutcome {
    match denied {
        Denied::NotLeased => FrameOutcome::NotLeased(number),
        Denied::Access => FrameOutcome::ReadOnly,
    }
}

/// The part of an offered object that a range names.
fn of_offer(slots: &[SealedSlot], range: Range) -> Option<Segment> {
    let slot = slots.get(usize::try_from(range.slot).ok()?)?;
    let whole = Segment {
        offset: slot.offset(),
        len: slot.len(),
    };
    whole.part(range.offset, range.len)
}

/// Reads and discards at most `most` bytes.
fn discard(socket: RawFd, sink: &mut Vec<u8>, most: u64) -> io::Result<usize> {
    sink.resize(SINK, 0);
    receive_bytes(socket, &mut sink[..most.min(SINK as u64) as usize])
}
