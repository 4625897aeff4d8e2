//! The queue of frames that a stream sends: a caller sends its frame directly while that needs no
//! waiting, and a task ([`StreamWriter`](super::stream_writer::StreamWriter)) sends the other
//! frames.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use lmc_memory::SealedSlot;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::Interest;
use tokio::sync::mpsc;

use super::channel_core::ChannelCore;
use super::frame::{Frame, MAX_INLINED, PIECE, PieceHead, seal_header};
use super::outgoing::{Kept, Outgoing, Piece, PieceForm};
use super::stats::SocketCounters;
use super::window::{Parted, SendPart, Window};
use crate::lease::Segment;
use crate::net::Sockets;
use crate::session::Sealer;

/// Most parts (heads and pieces) that one system call sends.
const PARTS: usize = 128;
/// Largest frame, in bytes with its payload, that does not wait for the task.
pub(super) const AT_ONCE: u64 = MAX_INLINED + (4 << 10);

/// The queue of a stream. Frames are sent in the order in which they are pushed.
#[derive(Debug)]
pub(super) struct SendQueue {
    window: Window,
    counters: Arc<SocketCounters>,
    /// Owned by the tasks.
    sockets: Weak<Sockets>,
    stream: usize,
    queue: mpsc::UnboundedSender<Outgoing>,
    line: Mutex<Line>,
    pub(super) sealer: Mutex<Sealer>,
    form: PieceForm,
    /// Grows with every byte sent.
    sent: AtomicU64,
}

#[derive(Debug, Default)]
struct Line {
    /// Frames that the task has yet to send. While there are any, callers do not send directly.
    behind: usize,
    gathered: Gathered,
}

/// The part of a frame that was sent without waiting.
enum AtOnce {
    Nothing,
    All,
    /// All but these bytes.
    But(Vec<u8>),
}

impl SendQueue {
    pub(super) fn new(
        core: &ChannelCore,
        sockets: &Arc<Sockets>,
        stream: usize,
        sealer: Sealer,
        form: PieceForm,
    ) -> (Self, mpsc::UnboundedReceiver<Outgoing>) {
        let (queue, receiver) = mpsc::unbounded_channel();
        let queue = Self {
            window: core.window.clone(),
            counters: Arc::clone(&core.counters),
            sockets: Arc::downgrade(sockets),
            stream,
            queue,
            line: Mutex::default(),
            sealer: Mutex::new(sealer),
            form,
            sent: AtomicU64::new(0),
        };
        (queue, receiver)
    }

    /// Sends a frame, now or in its turn.
    pub(super) fn push(&self, outgoing: Outgoing) {
        if let Err((line, outgoing)) = self.start(outgoing) {
            self.hand_over(line, outgoing);
        }
    }

    /// Sends a frame if at least its beginning can be sent now. Returns whether it was.
    pub(super) fn push_now(&self, outgoing: Outgoing) -> bool {
        self.start(outgoing).is_ok()
    }

    /// Sends bytes that are sealed already, in their turn.
    pub(super) fn push_raw(&self, bytes: Vec<u8>) {
        self.push(raw(bytes));
    }

    /// Sends a frame if the queue is empty and at least its beginning can be sent now; returns the
    /// frame otherwise.
    fn start(&self, mut outgoing: Outgoing) -> Result<(), (MutexGuard<'_, Line>, Outgoing)> {
        let mut line = self.line.lock();
        if line.behind > 0 {
            return Err((line, outgoing));
        }
        match self.at_once(&mut line.gathered, &outgoing) {
            AtOnce::Nothing => return Err((line, outgoing)),
            AtOnce::All => {
                drop(line);
                drop(outgoing.write().and_then(|write| write.begin()));
            }
            AtOnce::But(rest) => {
                let slots = outgoing.write().and_then(|write| write.begin());
                let payload = std::mem::take(&mut outgoing.payload);
                (outgoing.header, outgoing.raw) = (rest, true);
                outgoing.answers = None;
                self.hand_over(line, outgoing);
                // Returning slots takes other locks.
                drop((slots, payload));
            }
        }
        Ok(())
    }

    fn hand_over(&self, mut line: MutexGuard<'_, Line>, outgoing: Outgoing) {
        line.behind += 1;
        // After the end there is no task; calls that wait for answers are woken by the end itself.
        let unheard = self.queue.send(outgoing);
        drop(line);
        drop(unheard);
    }

    /// Sends as much of a frame as goes without waiting.
    fn at_once(&self, gathered: &mut Gathered, outgoing: &Outgoing) -> AtOnce {
        let (parts, payload) = outgoing
            .segments()
            .fold((0, 0), |(parts, bytes), s| (parts + 1, bytes + s.len));
        let small = outgoing.header.len() as u64 + payload <= AT_ONCE;
        if !small || 2 * parts > PARTS {
            return AtOnce::Nothing;
        }
        let Some(sockets) = self.sockets.upgrade() else {
            return AtOnce::Nothing;
        };
        let mut sealer = self.sealer.lock();
        let before = sealer.position();
        gathered.header(outgoing, &mut sealer);
        self.gather(gathered, &mut sealer, &mut outgoing.pieces(), &mut None);
        outgoing.is_sent();
        let send = |fd| gathered.send(&self.window, fd, 0);
        let sent = sockets.0[self.stream].try_now(Interest::WRITABLE, send);
        // The task meets the same error.
        let sent = sent.unwrap_or(0);
        let outcome = if sent == 0 {
            outgoing.is_unsent();
            sealer.rewind(before);
            AtOnce::Nothing
        } else {
            self.count(sent);
            match sent == gathered.len() {
                true => AtOnce::All,
                false => AtOnce::But(gathered.rest(&self.window, sent)),
            }
        };
        gathered.clear();
        outcome
    }

    /// Gathers pieces of a payload until there are enough for one system call. Returns `false` once
    /// nothing of the payload is left, or the rest may not be sent any more.
    pub(super) fn gather<'a>(
        &self,
        gathered: &mut Gathered,
        sealer: &mut Sealer,
        pieces: &mut impl Iterator<Item = Piece<'a>>,
        slot_sum: &mut Option<Parted>,
    ) -> bool {
        for piece in pieces {
            let Some(kept) = piece.source.keep(piece.part) else {
                gathered.abort();
                return false;
            };
            self.sum_slot(slot_sum, &piece, &kept);
            let bytes = piece.bytes;
            match self.form {
                PieceForm::Sealed => gathered.sealed_piece(&self.window, sealer, bytes),
                // Summed just before the kernel copies the piece, so that it is read from memory
                // once.
                PieceForm::Summed => gathered.piece(bytes, self.window.sum(bytes), kept),
                PieceForm::Plain => gathered.piece(bytes, 0, kept),
            }
            if gathered.is_full() {
                return true;
            }
        }
        false
    }

    /// Adds a piece to the checksum of a leased slot that has none yet, if the whole slot is sent
    /// in one part: its bytes are read from memory once, as the kernel copies them next. Where
    /// every piece has a checksum of its own, the slot's checksum is not needed.
    fn sum_slot(&self, sum: &mut Option<Parted>, piece: &Piece<'_>, kept: &Kept) {
        let (whole, bytes) = (piece.whole, piece.bytes);
        let of = |slot: &&SealedSlot| (slot.offset(), slot.len()) == (whole.offset, whole.len);
        let Some(slot) = kept.slot().filter(of) else {
            return;
        };
        if bytes.offset == whole.offset {
            let unknown = self.form != PieceForm::Summed && slot.known_checksum().is_none();
            *sum = unknown.then(Parted::default);
        }
        let is_last = bytes.offset + bytes.len == whole.offset + whole.len;
        let Some(parted) = sum else { return };
        if let Some(sum) = self.window.add_to(bytes, parted, is_last) {
            slot.note_checksum(sum);
        }
    }

    pub(super) fn count(&self, sent: usize) {
        self.counters.bytes_out.add(sent);
        self.sent.fetch_add(sent as u64, Ordering::Relaxed);
    }

    /// Returns the bytes sent so far, while frames wait.
    pub(super) fn behind(&self) -> Option<u64> {
        let behind = self.line.lock().behind > 0;
        behind.then(|| self.sent.load(Ordering::Relaxed))
    }

    /// Notes that the task has sent a frame.
    pub(super) fn catch_up(&self) {
        self.line.lock().behind -= 1;
    }
}

/// Returns a frame of bytes that are encoded already.
fn raw(header: Vec<u8>) -> Outgoing {
    Outgoing {
        header,
        raw: true,
        ..Outgoing::of(&Frame::Ping(0))
    }
}

/// Bytes for one system call.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    /// Headers, heads, and sealed pieces.
    scratch: Vec<u8>,
    parts: Vec<SendPart>,
    /// Bytes of the arena among the parts.
    arena: u64,
    kept: Vec<Kept>,
}

impl Gathered {
    /// Adds what was appended to the scratch since its length was `start` bytes.
    fn add(&mut self, start: usize) {
        let end = self.scratch.len();
        match self.parts.last_mut() {
            Some(SendPart::Scratch(range)) => range.end = end,
            _ => self.parts.push(SendPart::Scratch(start..end)),
        }
    }

    fn own(&mut self, bytes: &[u8]) {
        let start = self.scratch.len();
        self.scratch.extend_from_slice(bytes);
        self.add(start);
    }

    pub(super) fn header(&mut self, outgoing: &Outgoing, sealer: &mut Sealer) {
        let start = self.scratch.len();
        match outgoing.raw {
            true => self.scratch.extend_from_slice(&outgoing.header),
            false => seal_header(&outgoing.header, sealer, &mut self.scratch),
        }
        self.add(start);
    }

    /// Adds a piece of a payload, with its head.
    fn piece(&mut self, piece: Segment, sum: u64, kept: Kept) {
        let len = piece.len as u32;
        self.own(&PieceHead { len, sum }.encode());
        self.parts.push(SendPart::Arena(piece));
        self.arena += piece.len;
        if !matches!(kept, Kept::Already) {
            self.kept.push(kept);
        }
    }

    fn sealed_piece(&mut self, window: &Window, sealer: &mut Sealer, piece: Segment) {
        let (len, sum) = (piece.len as u32, 0);
        self.own(&PieceHead { len, sum }.encode());
        let start = self.scratch.len();
        window.seal(piece, sealer, &mut self.scratch);
        self.add(start);
    }

    /// Appends the mark that no more of the payload follows.
    fn abort(&mut self) {
        self.own(&PieceHead { len: 0, sum: 0 }.encode());
    }

    pub(super) fn len(&self) -> usize {
        self.scratch.len() + self.arena as usize
    }

    fn is_full(&self) -> bool {
        self.len() as u64 >= PIECE || self.parts.len() >= PARTS
    }

    /// Sends the gathered bytes, except the `before` bytes that were sent earlier.
    pub(super) fn send(&self, window: &Window, socket: RawFd, before: usize) -> io::Result<usize> {
        window.send(socket, &self.scratch, &self.parts, before)
    }

    /// Returns a copy of the bytes after the first `before`.
    fn rest(&self, window: &Window, before: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len());
        for part in &self.parts {
            match part {
                SendPart::Scratch(range) => bytes.extend_from_slice(&self.scratch[range.clone()]),
                SendPart::Arena(segment) => window.append(*segment, &mut bytes),
            }
        }
        bytes.split_off(before)
    }

    pub(super) fn clear(&mut self) {
        self.scratch.clear();
        self.parts.clear();
        self.arena = 0;
        self.kept.clear();
    }
}
