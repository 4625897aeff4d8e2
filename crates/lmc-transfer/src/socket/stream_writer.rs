//! The task of a stream that sends what callers could not send at once.

use std::sync::Arc;

use tokio::io::Interest;
use tokio::sync::mpsc;

use super::channel_core::ChannelCore;
use super::connection::{Connection, Gone};
use super::outgoing::Outgoing;
use super::writer::Gathered;
use crate::net::{Moved, Sockets};

/// The task that sends the frames that callers could not send at once.
pub(super) struct StreamWriter {
    core: Arc<ChannelCore>,
    connection: Arc<Connection>,
    sockets: Arc<Sockets>,
    stream: usize,
    items: mpsc::UnboundedReceiver<Outgoing>,
    gathered: Gathered,
    moved: Moved,
}

impl StreamWriter {
    pub(super) fn new(
        core: &Arc<ChannelCore>,
        connection: &Arc<Connection>,
        sockets: &Arc<Sockets>,
        stream: usize,
        items: mpsc::UnboundedReceiver<Outgoing>,
    ) -> Self {
        Self {
            core: Arc::clone(core),
            connection: Arc::clone(connection),
            sockets: Arc::clone(sockets),
            stream,
            items,
            gathered: Gathered::default(),
            moved: Moved::default(),
        }
    }

    pub(super) async fn run(mut self) -> Gone {
        loop {
            // The connection owns the other end, and this task the connection.
            let Some(outgoing) = self.items.recv().await else {
                return Gone::Broken("nothing more is to be sent".into());
            };
            outgoing.is_sent();
            if let Err(gone) = self.send(outgoing).await {
                return gone;
            }
            self.connection.streams[self.stream].queue.catch_up();
        }
    }

    async fn send(&mut self, outgoing: Outgoing) -> Result<(), Gone> {
        let connection = Arc::clone(&self.connection);
        let stream = &connection.streams[self.stream];
        let mut _slots = None;
        if let Some(write) = outgoing.write() {
            _slots = write.begin();
            if _slots.is_none() {
                // The write was cancelled. Its capacity is free for another only now.
                drop(stream.take(write.id));
                return Ok(());
            }
        }
        let queue = &stream.queue;
        let (mut pieces, mut slot_sum) = (outgoing.pieces(), None);
        self.gathered.header(&outgoing, &mut queue.sealer.lock());
        loop {
            let more = {
                let mut sealer = queue.sealer.lock();
                queue.gather(&mut self.gathered, &mut sealer, &mut pieces, &mut slot_sum)
            };
            self.flush().await?;
            if !more {
                return Ok(());
            }
        }
    }

    /// Sends the bytes that were gathered.
    async fn flush(&mut self) -> Result<(), Gone> {
        let window = &self.core.window;
        let socket = &self.sockets.0[self.stream];
        let mut done = 0;
        while done < self.gathered.len() {
            let send = |fd| self.gathered.send(window, fd, done);
            let sent = socket.when(Interest::WRITABLE, send).await?;
            self.connection.streams[self.stream].queue.count(sent);
            done += sent;
        }
        self.gathered.clear();
        self.moved.add(done as u64).await;
        Ok(())
    }
}
