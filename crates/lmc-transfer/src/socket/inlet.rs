//! The receiving half of a stream.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lmc_memory::checksum;
use tokio::io::Interest;
use tokio::task::coop::consume_budget;
use tokio::time::timeout;

use super::connection::{
    Connection, Gone, LANE_ROOM, Lane, Offered, Outgoing, Payload, Reply, Source,
};
use super::endpoint::{Moved, Sockets};
use super::frame::{Decoder, Frame, Outcome, PieceHead, Pieces, Segment, reason};
use super::landing::Target;
use super::rendezvous::{CARRIED_ROOM, Offer};
use super::shared::Shared;
use super::window::receive_bytes;

/// Bytes that are read ahead at most, where frames or small pieces may follow.
const STASH: usize = 16 << 10;
/// Bytes of a piece from which reading ahead into it costs more than another system call.
const LARGE: u64 = 16 << 10;
/// Bytes of a payload of which a thread is woken at a time, where so many are to come: each
/// wake-up is paid for by the sender too, on a virtual machine with tens of microseconds.
const AT_A_TIME: u64 = 1 << 20;
const LEAST_AT_A_TIME: u64 = 256 << 10;
/// How long so many may take. A sender that breaks off, or a slow way, brings fewer.
const AT_A_TIME_PATIENCE: Duration = Duration::from_millis(2);
/// Bytes of what nobody wants that are read at a time.
const SINK: usize = 64 << 10;

pub(super) struct Inlet {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    lane: usize,
    decoder: Decoder,
    stash: Box<[u8]>,
    /// What of the stash is not used yet.
    start: usize,
    end: usize,
    sink: Vec<u8>,
    /// Bytes that must be there before this half is woken.
    low_water: u64,
    moved: Moved,
}

/// Where a payload goes.
#[derive(Clone, Copy)]
enum Place<'a> {
    /// To places of the arena that were checked.
    Arena,
    /// To slots of a call, while it holds them.
    Slots(&'a Target),
    Nowhere,
}

impl Place<'_> {
    fn with<T>(self, act: impl FnOnce() -> T) -> Option<T> {
        match self {
            Self::Arena => Some(act()),
            Self::Slots(target) => target.with(act),
            Self::Nowhere => None,
        }
    }
}

/// How a payload arrived.
struct Arrival {
    /// Segments with a wrong checksum.
    bad: Vec<u32>,
    /// Whether the sender broke it off, or some of it was not wanted any more.
    aborted: bool,
}

impl Inlet {
    pub(super) fn new(
        shared: &Arc<Shared>,
        connection: &Arc<Connection>,
        sockets: &Arc<Sockets>,
        lane: usize,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            connection: Arc::clone(connection),
            sockets: Arc::clone(sockets),
            lane,
            decoder: Decoder::default(),
            stash: vec![0; STASH].into(),
            start: 0,
            end: 0,
            sink: Vec::new(),
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
        // Many may have come with one read.
        consume_budget().await;
        match self.frame().await? {
            Frame::Ping => {}
            Frame::Read {
                id,
                offer,
                segments,
            } => {
                self.admit()?;
                let outgoing = self.data(id, offer, segments);
                self.lane().push(outgoing);
            }
            Frame::Data { id } => {
                let pending = self.lane().take(id);
                let asked = pending.and_then(|mut pending| Some((pending.target.take()?, pending)));
                let Some((target, pending)) = asked else {
                    return Err(Gone::Broken("data that was not asked for".into()));
                };
                let place = Place::Slots(&target);
                let Arrival { bad, aborted } = self.payload(&target.segments, place).await?;
                pending.answer(Reply::Arrived { bad, aborted });
            }
            Frame::Write { id, segments } => {
                self.admit()?;
                let outcome = self.write(&segments).await?;
                self.lane().push(self.answer(id, outcome));
            }
            Frame::Answer { id, outcome } => {
                let Some(pending) = self.lane().take(id) else {
                    return Err(Gone::Broken("an answer without a request".into()));
                };
                if pending.target.is_some() && outcome == Outcome::Done {
                    return Err(Gone::Broken("a read that is done without data".into()));
                }
                pending.answer(Reply::Outcome(outcome));
            }
            Frame::Offer {
                id,
                tag,
                objects,
                carried,
            } => {
                let bytes = match carried {
                    true => self.carried(&objects).await?,
                    false => None,
                };
                let offer = Offer {
                    connection: Arc::clone(&self.connection),
                    id,
                    objects,
                    carried,
                    bytes,
                };
                if !self.connection.rendezvous.offer(tag, offer) {
                    return Err(Gone::Broken("too many offers".into()));
                }
            }
            Frame::Withdraw { id } => {
                let offer = self.connection.rendezvous.withdraw(&self.connection, id);
                if let Some(offer) = offer.filter(|offer| offer.carried) {
                    offer.finish(0, Outcome::Withdrawn);
                }
            }
            Frame::Finish { id, done, outcome } => {
                let offered = self.connection.offers.lock().remove(&id);
                if let Some(offered) = offered {
                    let _ = offered.finish.send((done, outcome));
                }
            }
        }
        Ok(())
    }

    fn lane(&self) -> &Lane {
        &self.connection.lanes[self.lane]
    }

    /// Counts a request of the peer.
    fn admit(&self) -> Result<(), Gone> {
        self.shared.counters.served.add(1);
        match self.lane().unanswered.fetch_add(1, Ordering::Relaxed) {
            n if n < LANE_ROOM => Ok(()),
            _ => Err(Gone::Broken("too many requests at once".into())),
        }
    }

    /// What answers a read.
    fn data(&self, id: u64, offer: Option<u64>, segments: Vec<Segment>) -> Outgoing {
        let mut source = Source::Places;
        if let Some(offer) = offer {
            let mut offers = self.connection.offers.lock();
            let Some(Offered {
                objects: Some(slots),
                pulled,
                ..
            }) = offers.get_mut(&offer)
            else {
                return self.answer(id, Outcome::Withdrawn);
            };
            *pulled = true;
            source = Source::Offer {
                _slots: Arc::clone(slots),
            };
        }
        if let Some(refusal) = self.refuse(&segments) {
            return self.answer(id, refusal);
        }
        Outgoing {
            payload: Some(Payload { segments, source }),
            ..self.answering(&Frame::Data { id })
        }
    }

    /// What ends a request of the peer.
    fn answering(&self, frame: &Frame) -> Outgoing {
        Outgoing {
            answers: Some(Arc::clone(&self.lane().unanswered)),
            ..Outgoing::of(frame.encode())
        }
    }

    fn answer(&self, id: u64, outcome: Outcome) -> Outgoing {
        self.answering(&Frame::Answer { id, outcome })
    }

    /// The bytes that come along with an offer; none where they are not those that were sent, and
    /// are to be read again.
    async fn carried(&mut self, objects: &[Segment]) -> Result<Option<Vec<u8>>, Gone> {
        if self.connection.carried.fetch_add(1, Ordering::Relaxed) >= CARRIED_ROOM {
            return Err(Gone::Broken("too many offers with their objects".into()));
        }
        let total: u64 = objects.iter().map(|object| object.len).sum();
        let mut bytes = vec![0; total as usize];
        let mut rest = &mut bytes[..];
        let mut sound = true;
        for object in objects {
            let head = self.piece_head().await?;
            if u64::from(head.len) != object.len {
                return Err(Gone::Broken("a piece of another length".into()));
            }
            let (now, later) = rest.split_at_mut(object.len as usize);
            self.fill(now).await?;
            if checksum(now) != head.sum {
                self.shared.counters.corrupt.add(1);
                sound = false;
            }
            rest = later;
        }
        Ok(sound.then_some(bytes))
    }

    /// Takes what a peer writes.
    async fn write(&mut self, segments: &[Segment]) -> Result<Outcome, Gone> {
        let refusal = self.refuse(segments);
        let place = match refusal {
            Some(_) => Place::Nowhere,
            None => Place::Arena,
        };
        let arrival = self.payload(segments, place).await?;
        Ok(match (refusal, arrival.bad.first()) {
            (Some(refusal), _) => refusal,
            (None, Some(&segment)) => Outcome::Corrupt(segment),
            (None, None) if arrival.aborted => Outcome::Aborted,
            (None, None) => Outcome::Done,
        })
    }

    /// What to say to a peer that names places outside the arena, or for which there is no memory.
    fn refuse(&self, segments: &[Segment]) -> Option<Outcome> {
        let arena = self.shared.window.arena();
        // Places that were never handed out may have no memory yet.
        let touchable = |segment: &Segment| arena.ensure(segment.offset, segment.len);
        let why_not = segments
            .iter()
            .find_map(|segment| touchable(segment).err())?;
        self.shared.counters.refused_requests.add(1);
        Some(Outcome::Refused(reason(&why_not)))
    }

    /// The next frame.
    async fn frame(&mut self) -> Result<Frame, Gone> {
        loop {
            let mut input = &self.stash[self.start..self.end];
            let decoded = self.decoder.feed(&mut input);
            self.start = self.end - input.len();
            match decoded {
                Ok(Some(frame)) => return Ok(frame),
                Ok(None) => self.more().await?,
                Err(error) => return Err(Gone::Broken(error.to_string())),
            }
        }
    }

    /// A payload, piece by piece.
    async fn payload(&mut self, segments: &[Segment], place: Place<'_>) -> Result<Arrival, Gone> {
        let mut arrival = Arrival {
            bad: Vec::new(),
            aborted: false,
        };
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
            let ahead = match pieces.peek() {
                Some((_, next)) if next.len >= LARGE => PieceHead::LEN,
                _ => STASH,
            };
            self.piece(piece, place, ahead, &mut left).await?;
            // While the piece is still in the cache.
            match place.with(|| self.shared.window.sum(piece)) {
                Some(sum) if sum == head.sum => {}
                None => {
                    self.shared.counters.discarded.add(1);
                    arrival.aborted = true;
                }
                Some(_) => {
                    self.shared.counters.corrupt.add(1);
                    if arrival.bad.last() != Some(&number) {
                        arrival.bad.push(number);
                    }
                }
            }
            self.moved.add(piece.len).await;
        }
        self.wake_at(1);
        Ok(arrival)
    }

    /// Sets how many bytes must be there before this half is woken.
    fn wake_at(&mut self, bytes: u64) {
        if self.low_water != bytes && self.sockets.0[self.lane].set_low_water(bytes) {
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

    /// The bytes of one piece, and up to so many that follow it. `left` is what the payload has
    /// left, or 0 where it does not come at once.
    async fn piece(
        &mut self,
        piece: Segment,
        place: Place<'_>,
        ahead: usize,
        left: &mut u64,
    ) -> Result<(), Gone> {
        let stashed = &self.stash[self.start..self.end];
        let mut done = stashed.len().min(piece.len as usize);
        place.with(|| self.shared.window.put(piece, &stashed[..done]));
        self.start += done;
        *left = left.saturating_sub(done as u64);
        while done < piece.len as usize {
            // The stash is used up, or the piece would be whole.
            (self.start, self.end) = (0, 0);
            let rest = Segment {
                offset: piece.offset + done as u64,
                len: piece.len - done as u64,
            };
            // A mark that is set is kept while so many are to come: to set it costs, too.
            if self.low_water == 1 || self.low_water > *left {
                self.wake_at(match *left {
                    // Of a short payload less, so that it is taken while the rest is sent.
                    left if left >= LEAST_AT_A_TIME => (left / 4).clamp(LEAST_AT_A_TIME, AT_A_TIME),
                    _ => 1,
                });
            }
            let window = &self.shared.window;
            let (stash, sink) = (&mut self.stash[..ahead], &mut self.sink);
            let into = |socket: RawFd| {
                let received = place.with(|| window.receive(socket, rest, stash));
                received.unwrap_or_else(|| discard(socket, sink, rest.len))
            };
            let received = self.sockets.0[self.lane].when(Interest::READABLE, into);
            let received = match self.low_water {
                1 => received.await?,
                _ => match timeout(AT_A_TIME_PATIENCE, received).await {
                    Ok(received) => received?,
                    Err(_) => {
                        *left = 0;
                        continue;
                    }
                },
            };
            self.heard(received)?;
            let now = received.min(rest.len as usize);
            done += now;
            *left = left.saturating_sub(now as u64);
            self.end = received - now;
        }
        Ok(())
    }

    /// Fills a buffer of this side's own.
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
                    let socket = &self.sockets.0[self.lane];
                    let read = |socket| receive_bytes(socket, rest);
                    let received = socket.when(Interest::READABLE, read).await?;
                    self.heard(received)?;
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
        let socket = &self.sockets.0[self.lane];
        let read = |socket| receive_bytes(socket, free);
        let received = socket.when(Interest::READABLE, read).await?;
        self.heard(received)?;
        self.end += received;
        Ok(())
    }

    fn heard(&self, bytes: usize) -> Result<(), Gone> {
        if bytes == 0 {
            return Err(Gone::Closed);
        }
        self.shared.counters.bytes_in.add(bytes);
        let heard = &self.connection.heard;
        heard.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// Reads what nobody wants, no more than so many bytes.
fn discard(socket: RawFd, sink: &mut Vec<u8>, most: u64) -> io::Result<usize> {
    sink.resize(SINK, 0);
    receive_bytes(socket, &mut sink[..most.min(SINK as u64) as usize])
}
