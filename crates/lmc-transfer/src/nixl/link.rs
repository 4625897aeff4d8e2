//! The sending half of a control connection: the engine writes a message directly while that needs
//! no waiting, since waking another thread takes as long as a small transfer. A task writes the
//! others.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::Interest;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::wire::{MAX_FRAME, Message, encode};
use crate::net::{Socket, send_bytes};
use crate::session::Sealer;

/// Bytes of messages that wait to be written to a peer; with more, it is taken for dead. As many
/// as the longest message takes four times.
const MAX_UNSENT: usize = 4 * MAX_FRAME;
/// Bytes that a message counts for in addition to its own.
const MESSAGE: usize = 64;
/// A peer that reads nothing for this long is sent nothing more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// The engine's end of a connection. Dropping it ends this side's half, once what was to be said
/// is said.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) number: u64,
    /// True if anything was said over it.
    pub(super) used: bool,
    socket: Arc<Socket>,
    sealer: Sealer,
    /// Messages before the next one: those that the task has, and the handshake until it runs.
    before: Arc<AtomicUsize>,
    unsent: mpsc::UnboundedSender<Unsent>,
    capacity: Arc<Semaphore>,
}

/// The rest of a sealed message that waits to be written, and its share of [`MAX_UNSENT`].
type Unsent = (Vec<u8>, OwnedSemaphorePermit);

/// The task's end.
#[derive(Debug)]
pub(super) struct Outgoing {
    socket: Arc<Socket>,
    before: Arc<AtomicUsize>,
    unsent: mpsc::UnboundedReceiver<Unsent>,
}

impl Link {
    /// Nothing is written before the task runs.
    pub(super) fn new(number: u64, socket: &Arc<Socket>, sealer: Sealer) -> (Self, Outgoing) {
        let (sender, unsent) = mpsc::unbounded_channel();
        let before = Arc::new(AtomicUsize::new(1));
        let link = Self {
            number,
            used: false,
            socket: Arc::clone(socket),
            sealer,
            before: Arc::clone(&before),
            unsent: sender,
            capacity: Arc::new(Semaphore::new(MAX_UNSENT)),
        };
        let outgoing = Outgoing {
            socket: Arc::clone(socket),
            before,
            unsent,
        };
        (link, outgoing)
    }

    /// Sends a message; `false` if the peer takes none.
    pub(super) fn send(&mut self, message: &Message) -> bool {
        self.used = true;
        let plain = encode(message);
        let mut bytes = (plain.len() as u32).to_le_bytes().to_vec();
        self.sealer.seal(&plain, &mut bytes);
        if self.before.load(Ordering::Acquire) == 0 {
            let write = |fd| send_bytes(fd, &bytes);
            // An error is met by the task too.
            let written = self.socket.try_now(Interest::WRITABLE, write).unwrap_or(0);
            drop(bytes.drain(..written));
        }
        if bytes.is_empty() {
            return true;
        }
        let share = u32::try_from(bytes.len() + MESSAGE).expect("messages are bounded");
        let Ok(share) = Arc::clone(&self.capacity).try_acquire_many_owned(share) else {
            return false;
        };
        self.before.fetch_add(1, Ordering::AcqRel);
        self.unsent.send((bytes, share)).is_ok()
    }
}

impl Outgoing {
    /// Writes what waits, until there is nothing more to say, and ends this side's half. Whether
    /// it has: on a connection that failed, its reader finds that out as well, after what the peer
    /// has said before.
    pub(super) async fn run(mut self) -> bool {
        self.before.fetch_sub(1, Ordering::AcqRel);
        while let Some((bytes, share)) = self.unsent.recv().await {
            match timeout(WRITE_TIMEOUT, self.socket.write_all(&bytes)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return false,
                Err(_) => break,
            }
            drop(share);
            self.before.fetch_sub(1, Ordering::AcqRel);
        }
        self.socket.end();
        true
    }
}

#[cfg(test)]
impl Outgoing {
    /// Takes the messages that wait to be written, whole, while the task does not run.
    pub(super) fn waiting(&mut self, opener: &mut crate::session::Opener) -> Vec<Message> {
        let message = |(bytes, _): Unsent| {
            let mut plain = Vec::new();
            opener
                .open(&bytes[4..], &mut plain)
                .expect("as it was sealed");
            super::wire::parse(&plain).expect("a message")
        };
        std::iter::from_fn(|| self.unsent.try_recv().ok())
            .map(message)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::runtime::{Builder, Runtime};

    use super::*;
    use crate::session::{Opener, pair, sealed_len};

    fn runtime() -> Runtime {
        let runtime = Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime")
    }

    /// A peer's socket with what opens its messages, and a link to it, whose socket takes no more
    /// than a few messages at once.
    fn linked() -> (UnixStream, Opener, Link, Outgoing) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let small = socket2::SockRef::from(&ours).set_send_buffer_size(64 << 10);
        small.expect("a buffer of that size");
        let ((sealer, _), (_, opener)) = pair();
        let socket = Arc::new(Socket::Unix(ours));
        let (link, outgoing) = Link::new(1, &socket, sealer);
        (theirs, opener, link, outgoing)
    }

    async fn writable(link: &Link) {
        let ready = link.socket.ready(Interest::WRITABLE).await;
        ready.expect("it can be written to");
    }

    async fn message(theirs: &mut UnixStream, opener: &mut Opener) -> Message {
        let len = theirs.read_u32_le().await.expect("a length") as usize;
        let (mut sealed, mut plain) = (vec![0; sealed_len(len)], Vec::new());
        theirs.read_exact(&mut sealed).await.expect("a message");
        opener.open(&sealed, &mut plain).expect("as it was sealed");
        super::super::wire::parse(&plain).expect("a message")
    }

    #[test]
    fn what_waits_for_a_peer_is_bounded_in_bytes() {
        let runtime = runtime();
        let _entered = runtime.enter();
        let (_theirs, _, mut link, mut outgoing) = linked();
        let long = Message::Offer {
            send: 1,
            tag: 2,
            lens: vec![u64::MAX; crate::MAX_BATCH],
        };
        let sent = (0..100).take_while(|_| link.send(&long)).count();
        assert!((4..=30).contains(&sent), "{sent} long messages");
        drop(outgoing.unsent.try_recv().expect("it waits"));
        assert!(link.send(&long), "what was written frees capacity");
        let (_theirs, _, mut link, _outgoing) = linked();
        let sent = (0..1_000_000).take_while(|_| link.send(&Message::Cancel { send: 1 }));
        let sent = sent.count();
        assert!((10_000..500_000).contains(&sent), "{sent} short messages");
    }

    #[test]
    fn nothing_is_written_before_the_task_runs() {
        runtime().block_on(async {
            let (mut theirs, mut opener, mut link, outgoing) = linked();
            // A handshake may not be over.
            writable(&link).await;
            let cancel = Message::Cancel { send: 1 };
            assert!(link.send(&cancel));
            let heard = timeout(Duration::from_millis(50), theirs.readable()).await;
            assert!(heard.is_err(), "it was written");
            tokio::spawn(outgoing.run());
            assert_eq!(message(&mut theirs, &mut opener).await, cancel);
        });
    }

    #[test]
    fn messages_arrive_whole_and_in_their_order_from_both_writers() {
        runtime().block_on(async {
            let (mut theirs, mut opener, mut link, outgoing) = linked();
            let task = tokio::spawn(outgoing.run());
            writable(&link).await;
            // More than the socket takes: the last that goes at once does so in part.
            let offer = |send: u64| {
                let lens = vec![send; 1 + send as usize % 7 * 500];
                Message::Offer { send, tag: 0, lens }
            };
            for send in 0..300 {
                assert!(link.send(&offer(send)), "message {send}");
            }
            assert!(link.before.load(Ordering::Acquire) > 0, "the task has some");
            for send in 0..300 {
                assert_eq!(message(&mut theirs, &mut opener).await, offer(send));
            }
            while link.before.load(Ordering::Acquire) > 0 {
                tokio::task::yield_now().await;
            }
            writable(&link).await;
            let last = Message::Cancel { send: 7 };
            assert!(link.send(&last));
            assert_eq!(link.before.load(Ordering::Acquire), 0, "it went at once");
            drop(link);
            assert!(task.await.expect("it ends"));
            assert_eq!(message(&mut theirs, &mut opener).await, last);
            let mut rest = Vec::new();
            theirs.read_to_end(&mut rest).await.expect("an end");
            assert!(rest.is_empty());
        });
    }

    #[test]
    fn a_peer_that_has_hung_up_is_sent_nothing_more() {
        runtime().block_on(async {
            let (theirs, _, mut link, outgoing) = linked();
            let task = tokio::spawn(outgoing.run());
            writable(&link).await;
            drop(theirs);
            // This one meets the error, and the task after it.
            link.send(&Message::Cancel { send: 1 });
            assert!(!task.await.expect("it ends"), "its half failed");
            assert!(!link.send(&Message::Cancel { send: 2 }));
        });
    }
}
