//! The sending half of a stream: whoever has a frame sends it himself while that needs no
//! waiting, and a task sends the others.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::io::Interest;
use tokio::sync::mpsc;

use super::connection::{Connection, Gone, Outgoing, Progress, Source};
use super::endpoint::{Moved, Sockets};
use super::frame::{MAX_CARRIED, PIECE, PieceHead, Pieces, Segment};
use super::shared::Shared;
use super::stats::Counters;
use super::window::{Part, Window};

/// Parts that go with one system call at most: heads and pieces.
const PARTS: usize = 128;
/// Bytes of a frame, with its payload, that does not wait for the task.
pub(super) const AT_ONCE: u64 = MAX_CARRIED + (4 << 10);

/// Where frames of a stream are handed in. They go in the order in which they come here.
#[derive(Debug)]
pub(super) struct Outbox {
    window: Window,
    counters: Arc<Counters>,
    /// The tasks own them.
    sockets: Weak<Sockets>,
    lane: usize,
    queue: mpsc::UnboundedSender<Outgoing>,
    line: Mutex<Line>,
    /// Grows with every byte sent.
    sent: AtomicU64,
}

#[derive(Debug, Default)]
struct Line {
    /// Frames that the task has and has not sent. While there are any, nobody else sends.
    behind: usize,
    gathered: Gathered,
}

/// How much of a frame went without waiting.
enum AtOnce {
    Nothing,
    All,
    /// All but these bytes.
    But(Vec<u8>),
}

impl Outbox {
    pub(super) fn new(
        shared: &Shared,
        sockets: &Arc<Sockets>,
        lane: usize,
    ) -> (Self, mpsc::UnboundedReceiver<Outgoing>) {
        let (queue, receiver) = mpsc::unbounded_channel();
        let outbox = Self {
            window: shared.window.clone(),
            counters: Arc::clone(&shared.counters),
            sockets: Arc::downgrade(sockets),
            lane,
            queue,
            line: Mutex::default(),
            sent: AtomicU64::new(0),
        };
        (outbox, receiver)
    }

    /// Sends a frame, now or in its turn.
    pub(super) fn push(&self, outgoing: Outgoing) {
        if let Err((line, outgoing)) = self.start(outgoing) {
            self.hand_over(line, outgoing);
        }
    }

    /// Sends a frame if at least its beginning goes now; whether that is so.
    pub(super) fn push_now(&self, outgoing: Outgoing) -> bool {
        self.start(outgoing).is_ok()
    }

    /// Sends a frame if nothing is before it and its beginning goes now; gives it back if not.
    fn start(&self, mut outgoing: Outgoing) -> Result<(), (MutexGuard<'_, Line>, Outgoing)> {
        let mut line = self.line.lock();
        if line.behind > 0 {
            return Err((line, outgoing));
        }
        match self.at_once(&mut line.gathered, &outgoing) {
            AtOnce::Nothing => return Err((line, outgoing)),
            AtOnce::All => {
                drop(line);
                outgoing.begin();
            }
            AtOnce::But(rest) => {
                let sent = (outgoing.begin(), outgoing.payload.take());
                outgoing.bytes = rest;
                outgoing.answers = None;
                self.hand_over(line, outgoing);
                // Slots are given back under the locks of others.
                drop(sent);
            }
        }
        Ok(())
    }

    fn hand_over(&self, mut line: MutexGuard<'_, Line>, outgoing: Outgoing) {
        line.behind += 1;
        // Nobody listens after the end, which those who wait for answers learn otherwise.
        let unheard = self.queue.send(outgoing);
        drop(line);
        drop(unheard);
    }

    /// Sends what goes without waiting.
    fn at_once(&self, gathered: &mut Gathered, outgoing: &Outgoing) -> AtOnce {
        let segments = outgoing.segments();
        let payload: u64 = segments.iter().map(|segment| segment.len).sum();
        let small = outgoing.bytes.len() as u64 + payload <= AT_ONCE;
        if !small || 2 * segments.len() > PARTS {
            return AtOnce::Nothing;
        }
        let Some(sockets) = self.sockets.upgrade() else {
            return AtOnce::Nothing;
        };
        gathered.own(&outgoing.bytes);
        for (_, piece) in Pieces::of(segments) {
            gathered.piece(&self.window, piece);
        }
        outgoing.is_sent();
        // An error is met by the task too, which ends the connection.
        let sent = sockets.0[self.lane]
            .try_now(Interest::WRITABLE, |fd| gathered.send(&self.window, fd, 0));
        let sent = sent.unwrap_or(0);
        self.count(sent);
        let how = match sent {
            0 => {
                outgoing.is_unsent();
                AtOnce::Nothing
            }
            n if n == gathered.len() => AtOnce::All,
            n => AtOnce::But(gathered.rest(&self.window, n)),
        };
        gathered.clear();
        how
    }

    fn count(&self, sent: usize) {
        self.counters.bytes_out.add(sent);
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
    }

    /// What was sent so far, where that is not all.
    pub(super) fn behind(&self) -> Option<u64> {
        let behind = self.line.lock().behind > 0;
        behind.then(|| self.sent.load(Ordering::Relaxed))
    }

    /// The task has sent a frame.
    fn catch_up(&self) {
        self.line.lock().behind -= 1;
    }
}

/// What goes with one system call.
#[derive(Debug, Default)]
struct Gathered {
    /// Headers and heads.
    scratch: Vec<u8>,
    parts: Vec<Part>,
    /// Bytes of the arena among the parts.
    arena: u64,
}

impl Gathered {
    /// Adds bytes of this side's own.
    fn own(&mut self, bytes: &[u8]) {
        let start = self.scratch.len();
        self.scratch.extend_from_slice(bytes);
        let end = self.scratch.len();
        match self.parts.last_mut() {
            Some(Part::Scratch(range)) => range.end = end,
            _ => self.parts.push(Part::Scratch(start..end)),
        }
    }

    /// Adds a piece of a payload, with its head.
    fn piece(&mut self, window: &Window, piece: Segment) {
        // Just before the kernel copies it, so that it is read from memory once.
        let sum = window.sum(piece);
        let len = piece.len as u32;
        self.own(&PieceHead { len, sum }.encode());
        self.parts.push(Part::Arena(piece));
        self.arena += piece.len;
    }

    fn len(&self) -> usize {
        self.scratch.len() + self.arena as usize
    }

    /// Sends what there is without the bytes that went before.
    fn send(&self, window: &Window, socket: RawFd, before: usize) -> io::Result<usize> {
        window.send(socket, &self.scratch, &self.parts, before)
    }

    /// A copy of the bytes that come after so many.
    fn rest(&self, window: &Window, before: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        for part in &self.parts {
            match part {
                Part::Scratch(range) => bytes.extend_from_slice(&self.scratch[range.clone()]),
                Part::Arena(segment) => window.append(*segment, &mut bytes),
            }
        }
        bytes.split_off(before)
    }

    fn clear(&mut self) {
        self.scratch.clear();
        self.parts.clear();
        self.arena = 0;
    }
}

/// The task that sends what does not go at once.
pub(super) struct Outlet {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    lane: usize,
    queue: mpsc::UnboundedReceiver<Outgoing>,
    gathered: Gathered,
    moved: Moved,
}

impl Outlet {
    pub(super) fn new(
        shared: &Arc<Shared>,
        connection: &Arc<Connection>,
        sockets: &Arc<Sockets>,
        lane: usize,
        queue: mpsc::UnboundedReceiver<Outgoing>,
    ) -> Self {
        Self {
            shared: Arc::clone(shared),
            connection: Arc::clone(connection),
            sockets: Arc::clone(sockets),
            lane,
            queue,
            gathered: Gathered::default(),
            moved: Moved::default(),
        }
    }

    pub(super) async fn run(mut self) -> Gone {
        loop {
            // The connection owns the other end, and this half the connection.
            let Some(outgoing) = self.queue.recv().await else {
                return Gone::Broken("nothing more is to be sent".into());
            };
            outgoing.is_sent();
            if let Err(gone) = self.send(outgoing).await {
                return gone;
            }
            self.outbox().catch_up();
        }
    }

    fn outbox(&self) -> &Outbox {
        &self.connection.lanes[self.lane].outbox
    }

    async fn send(&mut self, outgoing: Outgoing) -> Result<(), Gone> {
        let _slots = outgoing.begin();
        let mut progress = None;
        if let Some(Source::Write(write)) = outgoing.payload.as_ref().map(|p| &p.source) {
            if _slots.is_none() {
                // It was cancelled. Only now there is room for another.
                drop(self.connection.lanes[self.lane].take(write.id));
                return Ok(());
            }
            progress = Some(&**write);
        }
        self.gathered.own(&outgoing.bytes);
        self.pieces(outgoing.segments(), progress).await?;
        self.flush().await
    }

    async fn pieces(
        &mut self,
        segments: &[Segment],
        progress: Option<&Progress>,
    ) -> Result<(), Gone> {
        for (_, piece) in Pieces::of(segments) {
            if progress.is_some_and(Progress::is_cancelled) {
                self.gathered.own(&PieceHead { len: 0, sum: 0 }.encode());
                return Ok(());
            }
            self.gathered.piece(&self.shared.window, piece);
            if self.gathered.arena >= PIECE || self.gathered.parts.len() >= PARTS {
                self.flush().await?;
            }
        }
        Ok(())
    }

    /// Sends what was gathered.
    async fn flush(&mut self) -> Result<(), Gone> {
        let window = &self.shared.window;
        let socket = &self.sockets.0[self.lane];
        let mut done = 0;
        while done < self.gathered.len() {
            let send = |fd| self.gathered.send(window, fd, done);
            let sent = socket.when(Interest::WRITABLE, send).await?;
            self.outbox().count(sent);
            done += sent;
        }
        self.gathered.clear();
        self.moved.add(done as u64).await;
        Ok(())
    }
}
