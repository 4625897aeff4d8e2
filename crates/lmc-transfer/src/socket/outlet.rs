//! The sending half of a stream.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::io::Interest;
use tokio::sync::mpsc;

use super::connection::{Connection, Gone, Outgoing, Progress, Source};
use super::endpoint::Sockets;
use super::frame::{PIECE, PieceHead, Pieces, Segment};
use super::shared::Shared;
use super::window::Part;

/// Parts that go with one system call at most: heads and pieces.
const PARTS: usize = 128;

pub(super) struct Outlet {
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    lane: usize,
    queue: mpsc::UnboundedReceiver<Outgoing>,
    /// Headers and heads of what is being sent.
    scratch: Vec<u8>,
    parts: Vec<Part>,
    /// Bytes of the arena among the parts.
    gathered: u64,
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
            scratch: Vec::new(),
            parts: Vec::new(),
            gathered: 0,
        }
    }

    pub(super) async fn run(mut self) -> Gone {
        loop {
            // The connection owns the other end, and this half the connection.
            let Some(outgoing) = self.queue.recv().await else {
                return Gone::Broken("nothing more is to be sent".into());
            };
            if outgoing.answer {
                // Before it is sent: the peer may ask anew as soon as it has the answer.
                let lane = &self.connection.lanes[self.lane];
                lane.unanswered.fetch_sub(1, Ordering::Relaxed);
            }
            if let Err(gone) = self.send(outgoing).await {
                return gone;
            }
        }
    }

    async fn send(&mut self, outgoing: Outgoing) -> Result<(), Gone> {
        let Outgoing {
            bytes,
            payload,
            _room,
            ..
        } = outgoing;
        let Some(payload) = payload else {
            self.own(&bytes);
            return self.flush().await;
        };
        let mut _slots = None;
        let mut progress = None;
        if let Source::Write(write) = &payload.source {
            _slots = write.begin();
            if _slots.is_none() {
                // It was cancelled. Only now there is room for another.
                drop(self.connection.lanes[self.lane].take(write.id));
                return Ok(());
            }
            progress = Some(&**write);
        }
        self.own(&bytes);
        self.pieces(&payload.segments, progress).await?;
        self.flush().await
    }

    async fn pieces(
        &mut self,
        segments: &[Segment],
        progress: Option<&Progress>,
    ) -> Result<(), Gone> {
        for (_, piece) in Pieces::of(segments) {
            if progress.is_some_and(Progress::is_cancelled) {
                self.own(&PieceHead { len: 0, sum: 0 }.encode());
                return Ok(());
            }
            // Just before the kernel copies it, so that it is read from memory once.
            let sum = self.shared.window.sum(piece);
            let len = piece.len as u32;
            self.own(&PieceHead { len, sum }.encode());
            self.parts.push(Part::Arena(piece));
            self.gathered += piece.len;
            if self.gathered >= PIECE || self.parts.len() >= PARTS {
                self.flush().await?;
            }
        }
        Ok(())
    }

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

    /// Sends what was gathered.
    async fn flush(&mut self) -> Result<(), Gone> {
        let total = self.scratch.len() + self.gathered as usize;
        let (scratch, parts) = (&self.scratch[..], &self.parts[..]);
        let window = &self.shared.window;
        let socket = &self.sockets.0[self.lane];
        let mut done = 0;
        while done < total {
            let send = |fd| window.send(fd, scratch, parts, done);
            let sent = socket.when(Interest::WRITABLE, send).await?;
            self.shared.counters.bytes_out.add(sent);
            done += sent;
        }
        self.scratch.clear();
        self.parts.clear();
        self.gathered = 0;
        Ok(())
    }
}
