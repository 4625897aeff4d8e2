//! The sending half of a control connection: who has a message writes it himself while that needs
//! no waiting, since to wake another thread takes as long as a small transfer. A task writes the
//! others.

use std::io;
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::net::{tcp, unix};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::timeout;

use super::wire::{MAX_FRAME, Message, frame};

/// Bytes of messages that wait to be written to a peer; with more, it is taken to be gone. As many
/// as the longest message takes four times.
const MAX_UNSENT: usize = 4 * MAX_FRAME;
/// Bytes that a message counts for beside its frame.
const MESSAGE: usize = 64;
/// A peer that reads nothing for this long is told nothing more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(60);

/// A connection's half that is written to.
#[derive(Debug)]
pub(super) enum Writer {
    Tcp(tcp::OwnedWriteHalf),
    Unix(unix::OwnedWriteHalf),
}

impl Writer {
    fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(half) => half.try_write(bytes),
            Self::Unix(half) => half.try_write(bytes),
        }
    }

    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match self {
                Self::Tcp(half) => half.writable().await?,
                Self::Unix(half) => half.writable().await?,
            }
            match self.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Ends this half.
    pub(super) fn end(&self) {
        let socket = match self {
            Self::Tcp(half) => socket2::SockRef::from(half.as_ref()),
            Self::Unix(half) => socket2::SockRef::from(half.as_ref()),
        };
        // One that is not connected any more has no half to end.
        let _ = socket.shutdown(Shutdown::Write);
    }
}

/// The channel's end of a connection. Dropping it ends this side's half, once what was to be said
/// is said.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) number: u64,
    /// Whether anything was said over it.
    pub(super) used: bool,
    writer: Arc<Writer>,
    /// What is before the next message: those that the task has, and the handshake until it runs.
    before: Arc<AtomicUsize>,
    unsent: mpsc::UnboundedSender<Unsent>,
    room: Arc<Semaphore>,
}

/// What of a message's frame waits to be written, and its share of [`MAX_UNSENT`].
type Unsent = (Vec<u8>, OwnedSemaphorePermit);

/// The task's end.
#[derive(Debug)]
pub(super) struct Outgoing {
    writer: Arc<Writer>,
    before: Arc<AtomicUsize>,
    unsent: mpsc::UnboundedReceiver<Unsent>,
}

impl Link {
    /// Nothing is written before the task runs.
    pub(super) fn new(number: u64, writer: &Arc<Writer>) -> (Self, Outgoing) {
        let (sender, unsent) = mpsc::unbounded_channel();
        let before = Arc::new(AtomicUsize::new(1));
        let link = Self {
            number,
            used: false,
            writer: Arc::clone(writer),
            before: Arc::clone(&before),
            unsent: sender,
            room: Arc::new(Semaphore::new(MAX_UNSENT)),
        };
        let outgoing = Outgoing {
            writer: Arc::clone(writer),
            before,
            unsent,
        };
        (link, outgoing)
    }

    /// Whether the message is under way; if not, the peer does not listen.
    pub(super) fn say(&mut self, message: &Message) -> bool {
        self.used = true;
        let mut frame = frame(message);
        if self.before.load(Ordering::Acquire) == 0 {
            // An error is met by the task too.
            let written = self.writer.try_write(&frame).unwrap_or(0);
            drop(frame.drain(..written));
        }
        if frame.is_empty() {
            return true;
        }
        let bytes = u32::try_from(frame.len() + MESSAGE).expect("frames are bounded");
        let Ok(share) = Arc::clone(&self.room).try_acquire_many_owned(bytes) else {
            return false;
        };
        self.before.fetch_add(1, Ordering::AcqRel);
        self.unsent.send((frame, share)).is_ok()
    }
}

impl Outgoing {
    /// Writes what waits to be, until there is nothing more to say, and ends this side's half.
    /// Whether it has: on a connection that failed, its reader finds that out as well, after what
    /// the peer has said before.
    pub(super) async fn run(mut self) -> bool {
        self.before.fetch_sub(1, Ordering::AcqRel);
        while let Some((frame, share)) = self.unsent.recv().await {
            match timeout(WRITE_TIMEOUT, self.writer.write_all(&frame)).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return false,
                Err(_) => break,
            }
            drop(share);
            self.before.fetch_sub(1, Ordering::AcqRel);
        }
        self.writer.end();
        true
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;
    use tokio::net::UnixStream;
    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        let runtime = Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime")
    }

    /// A socket and the writer to it, which takes no more than a few frames at once.
    fn pair() -> (UnixStream, Arc<Writer>) {
        let (ours, theirs) = UnixStream::pair().expect("two sockets");
        let small = socket2::SockRef::from(&ours).set_send_buffer_size(64 << 10);
        small.expect("a buffer of that size");
        let (_, writer) = ours.into_split();
        (theirs, Arc::new(Writer::Unix(writer)))
    }

    async fn writable(writer: &Writer) {
        match writer {
            Writer::Tcp(half) => half.writable().await,
            Writer::Unix(half) => half.writable().await,
        }
        .expect("it can be written to");
    }

    #[test]
    fn what_waits_for_a_peer_is_bounded_in_bytes() {
        let runtime = runtime();
        let _entered = runtime.enter();
        let (_theirs, writer) = pair();
        let (mut link, mut outgoing) = Link::new(1, &writer);
        let long = Message::Offer {
            send: 1,
            tag: 2,
            lens: vec![u64::MAX; crate::MAX_BATCH],
        };
        let said = (0..100).take_while(|_| link.say(&long)).count();
        assert!((4..=12).contains(&said), "{said} long messages");
        drop(outgoing.unsent.try_recv().expect("it waits"));
        assert!(link.say(&long), "what was written makes room");
        let (mut link, _outgoing) = Link::new(2, &writer);
        let said = (0..1_000_000).take_while(|_| link.say(&Message::Cancel { send: 1 }));
        let said = said.count();
        assert!((10_000..500_000).contains(&said), "{said} short messages");
    }

    #[test]
    fn nothing_is_written_before_the_task_runs() {
        runtime().block_on(async {
            let (theirs, writer) = pair();
            let (mut link, outgoing) = Link::new(1, &writer);
            // A handshake may not be over.
            writable(&writer).await;
            let message = Message::Cancel { send: 1 };
            assert!(link.say(&message));
            let heard = timeout(Duration::from_millis(50), theirs.readable()).await;
            assert!(heard.is_err(), "it was written");
            tokio::spawn(outgoing.run());
            theirs.readable().await.expect("it comes");
            let mut word = [0; 64];
            let read = theirs.try_read(&mut word).expect("it is there");
            assert_eq!(word[..read], frame(&message));
        });
    }

    #[test]
    fn messages_arrive_whole_and_in_their_order_whoever_writes_them() {
        runtime().block_on(async {
            let (mut theirs, writer) = pair();
            let (mut link, outgoing) = Link::new(1, &writer);
            let task = tokio::spawn(outgoing.run());
            writable(&writer).await;
            let mut expected = Vec::new();
            // More than the socket takes: the last that goes at once does so in part.
            for send in 0..300 {
                let lens = vec![send; 1 + send as usize % 7 * 500];
                let message = Message::Offer { send, tag: 0, lens };
                expected.extend(frame(&message));
                assert!(link.say(&message), "message {send}");
            }
            assert!(link.before.load(Ordering::Acquire) > 0, "the task has some");
            let mut found = vec![0; expected.len()];
            theirs.read_exact(&mut found).await.expect("all of them");
            assert!(found == expected, "other bytes than were written");
            while link.before.load(Ordering::Acquire) > 0 {
                tokio::task::yield_now().await;
            }
            writable(&writer).await;
            let last = Message::Cancel { send: 7 };
            assert!(link.say(&last));
            assert_eq!(link.before.load(Ordering::Acquire), 0, "it went at once");
            drop(link);
            assert!(task.await.expect("it ends"));
            let mut word = Vec::new();
            theirs.read_to_end(&mut word).await.expect("an end");
            assert_eq!(word, frame(&last));
        });
    }

    #[test]
    fn who_has_hung_up_is_told_nothing_more() {
        runtime().block_on(async {
            let (theirs, writer) = pair();
            let (mut link, outgoing) = Link::new(1, &writer);
            let task = tokio::spawn(outgoing.run());
            writable(&writer).await;
            drop(theirs);
            // This one meets the error, and the task after it.
            link.say(&Message::Cancel { send: 1 });
            assert!(!task.await.expect("it ends"), "its half failed");
            assert!(!link.say(&Message::Cancel { send: 2 }));
        });
    }
}
