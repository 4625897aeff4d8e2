//! Control connections: the handshake, and what peers tell each other afterwards.
//!
//! Their end is also how the death of a peer is noticed, under every transport: over RDMA, UCX
//! takes most of a minute. Each side ends its half when nothing of it is under way to the other
//! any more, so that the other knows when its memory is its own again ([`Exposures`]).

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};

use super::engine::{Command, Commands, LinkEnd};
use super::link::{Link, Outgoing, Writer};
use super::wire::{
    Answer, HELLO, Hello, Intro, MAX_FRAME, MAX_INTRO, Message, SIGNATURE, Signer, Step, VERSION,
    frame, parse, reason,
};
use crate::{Address, ChannelConfig, ConnectError, MAX_MESSAGE, PeerId};

/// Handshakes that others begin at a time; more wait to be accepted.
const MAX_HANDSHAKES: usize = 64;
/// Bytes of the messages of a connection that wait to be read by the channel; with more, the peer
/// waits. As many as the longest message takes twice.
const MAX_UNREAD: usize = 2 * UNPACKED * MAX_FRAME;
/// A message takes this many times its frame's bytes at most: a number takes 8 bytes, 1 in a frame.
const UNPACKED: usize = 8;
/// A host that does not answer for about this long is gone.
const KEEPALIVE: Duration = Duration::from_secs(5);

type Reader = Box<dyn AsyncRead + Send + Unpin>;

/// After a handshake that failed, the other side has this long to end the connection.
const LINGER: Duration = Duration::from_secs(5);
/// The other side of a connection of which this side's half has ended has this long to end its
/// own: it may be stopped for a while.
const DEPARTURE: Duration = Duration::from_secs(600);
/// Threads that may be in [`crate::OnConnect`] at a time: it may block for longer than a handshake
/// may take.
const MAX_ASKED: usize = 16;

/// Those who were told where this side's memory is.
#[derive(Debug, Default)]
pub(super) struct Exposures {
    live: AtomicUsize,
    lost: AtomicBool,
}

impl Exposures {
    /// Whether one of them may yet end its connection.
    pub(super) fn are_live(&self) -> bool {
        self.live.load(Ordering::Acquire) > 0
    }

    /// Whether all of them have.
    pub(super) fn are_over(&self) -> bool {
        !self.are_live() && !self.lost.load(Ordering::Acquire)
    }

    /// Says that somebody was told of whom nothing will be heard.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }
}

/// One of them.
#[derive(Debug)]
struct Exposed(Option<Arc<Exposures>>);

impl Exposed {
    fn new(exposures: &Arc<Exposures>) -> Self {
        exposures.live.fetch_add(1, Ordering::AcqRel);
        Self(Some(Arc::clone(exposures)))
    }

    /// The other side has ended the connection.
    fn over(mut self) {
        if let Some(exposures) = self.0.take() {
            exposures.live.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Drop for Exposed {
    fn drop(&mut self) {
        if let Some(exposures) = &self.0 {
            exposures.lose();
            exposures.live.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

/// A connection's two halves.
struct Stream {
    reader: Reader,
    writer: Arc<Writer>,
    /// From when the other side is told where the memory is.
    exposed: Option<Exposed>,
    /// From when the channel knows of it.
    number: Option<u64>,
}

impl Stream {
    fn new(reader: impl AsyncRead + Send + Unpin + 'static, writer: Writer) -> Self {
        Self {
            reader: Box::new(BufReader::new(reader)),
            writer: Arc::new(writer),
            exposed: None,
            number: None,
        }
    }

    fn tcp(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        let keepalive = socket2::TcpKeepalive::new()
            .with_time(KEEPALIVE)
            .with_interval(KEEPALIVE)
            .with_retries(3);
        socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let (reader, writer) = stream.into_split();
        Ok(Self::new(reader, Writer::Tcp(writer)))
    }

    fn unix(stream: UnixStream) -> Self {
        let (reader, writer) = stream.into_split();
        Self::new(reader, Writer::Unix(writer))
    }

    async fn connect(address: &Address) -> Result<Self, ConnectError> {
        match address {
            Address::Tcp { host, port } => {
                let stream = TcpStream::connect((host.as_str(), *port)).await?;
                Ok(Self::tcp(stream)?)
            }
            Address::Unix(path) => Ok(Self::unix(UnixStream::connect(path).await?)),
            Address::Memory(_) => Err(ConnectError::Address {
                kind: "nixl",
                address: address.to_string(),
            }),
        }
    }
}

/// Where a channel listens.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Binds; says the address that it got.
    pub(super) async fn bind(address: &Address) -> Result<(Self, Address), ConnectError> {
        match address {
            Address::Tcp { host, port } => {
                let listener = TcpListener::bind((host.as_str(), *port)).await?;
                let host = host.clone();
                let port = listener.local_addr()?.port();
                Ok((Self::Tcp(listener), Address::Tcp { host, port }))
            }
            Address::Unix(path) => {
                let listener = match UnixListener::bind(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                        // Left behind by one that was killed, unless somebody answers.
                        if UnixStream::connect(path).await.is_ok() {
                            return Err(error.into());
                        }
                        std::fs::remove_file(path)?;
                        UnixListener::bind(path)?
                    }
                    bound => bound?,
                };
                Ok((Self::Unix(listener, path.clone()), address.clone()))
            }
            Address::Memory(_) => Err(ConnectError::Address {
                kind: "nixl",
                address: address.to_string(),
            }),
        }
    }

    async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => Stream::tcp(listener.accept().await?.0),
            Self::Unix(listener, _) => Ok(Stream::unix(listener.accept().await?.0)),
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Those who shake hands for a channel.
pub(super) struct Host {
    pub(super) config: ChannelConfig,
    /// What is told to all; `wanted` and `message` are none.
    pub(super) intro: Intro,
    pub(super) commands: Commands,
    pub(super) runtime: tokio::runtime::Handle,
    pub(super) refused: AtomicU64,
    pub(super) links: AtomicU64,
    pub(super) exposures: Arc<Exposures>,
    /// Turns true when the channel closes.
    pub(super) closing: watch::Sender<bool>,
    /// Threads that are in [`crate::OnConnect`].
    pub(super) asking: Arc<Semaphore>,
}

/// Room for those who ask [`crate::OnConnect`].
pub(super) fn asking() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(MAX_ASKED))
}

impl Host {
    /// Lets others connect, until it is aborted.
    pub(super) async fn serve(self: Arc<Self>, listener: Listener) {
        let room = Arc::new(Semaphore::new(MAX_HANDSHAKES));
        loop {
            let Ok(seat) = Arc::clone(&room).acquire_owned().await else {
                return;
            };
            let stream = match listener.accept().await {
                Ok(stream) => stream,
                Err(error) => {
                    tracing::warn!(%error, "a control connection was not accepted");
                    // Out of descriptors, most likely: they come back.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let host = Arc::clone(&self);
            tokio::spawn(async move {
                let _seat = seat;
                if let Err(fault) = host.accepted(stream).await {
                    host.refused.fetch_add(1, Ordering::Relaxed);
                    tracing::info!(fault, "a handshake was refused");
                }
            });
        }
    }

    async fn accepted(&self, mut stream: Stream) -> Result<(), String> {
        let limit = self.config.handshake_timeout;
        match tokio::time::timeout(limit, self.answer(&mut stream)).await {
            Ok(Ok(started)) => {
                self.run(stream, started);
                Ok(())
            }
            Ok(Err(error)) => {
                self.linger(stream);
                Err(error.to_string())
            }
            Err(_) => {
                self.linger(stream);
                Err("it took too long".to_owned())
            }
        }
    }

    /// Ends a connection that came to nothing, and waits for the other side to do so too.
    fn linger(&self, stream: Stream) {
        let Stream {
            mut reader,
            writer,
            exposed,
            number,
        } = stream;
        if exposed.is_none() && number.is_none() {
            return;
        }
        let commands = self.commands.clone();
        self.runtime.spawn(async move {
            let down = |end| {
                let fault = "the handshake was not finished".to_owned();
                if let Some(number) = number {
                    commands.give(Command::LinkDown { number, fault, end });
                }
            };
            down(LinkEnd::NotYet);
            writer.end();
            let end = ends_within(&mut reader, LINGER).await;
            if let Some(exposed) = exposed.filter(|_| end == LinkEnd::Ended) {
                exposed.over();
            }
            down(end);
        });
    }

    fn hello(&self) -> Result<Hello, ConnectError> {
        let mut nonce = [0; 32];
        getrandom::fill(&mut nonce).map_err(io::Error::from)?;
        Ok(Hello {
            version: VERSION,
            keyed: self.config.key.is_some(),
            nonce,
        })
    }

    /// The handshake of who is connected to.
    async fn answer(&self, stream: &mut Stream) -> Result<Started, ConnectError> {
        let ours = self.hello()?;
        stream.writer.write_all(&ours.bytes()).await?;
        let theirs = ours.accept(&read_hello(&mut stream.reader).await?)?;
        let signer = Signer::new(self.config.key.clone(), &theirs, &ours);
        let (signature, bytes) = read_signed(&mut stream.reader).await?;
        let welcomed = self.welcome(&signer, &signature, &bytes, stream).await;
        let (answer, welcomed) = match welcomed {
            Ok((intro, link)) => (Answer::Welcome(intro), Ok(link)),
            Err(error) => {
                let answer = match &error {
                    ConnectError::Key => Answer::WrongKey,
                    ConnectError::WrongPeer { found, .. } => Answer::WrongPeer {
                        found: found.to_string(),
                    },
                    error => Answer::Refused(reason(&error.to_string())),
                };
                (answer, Err(error))
            }
        };
        if welcomed.is_ok() {
            stream.exposed = Some(Exposed::new(&self.exposures));
        }
        write_signed(&stream.writer, &signer, Step::Answer, &frame(&answer)).await?;
        welcomed
    }

    /// Takes a peer in, if it is one.
    async fn welcome(
        &self,
        signer: &Signer,
        signature: &[u8; SIGNATURE],
        bytes: &[u8],
        stream: &mut Stream,
    ) -> Result<(Intro, Started), ConnectError> {
        if !signer.verify(Step::Intro, bytes, signature) {
            return Err(ConnectError::Key);
        }
        let mut theirs: Intro = parse(bytes)?;
        theirs.check()?;
        if theirs.wanted.as_deref() != Some(self.config.id.as_str()) {
            let expected = theirs.wanted.unwrap_or_default().parse();
            return Err(ConnectError::WrongPeer {
                expected: expected.unwrap_or_else(|_| self.config.id.clone()),
                found: self.config.id.clone(),
            });
        }
        let peer = peer_id(&theirs.peer)?;
        let message = theirs.message.take().map(Bytes::from);
        let reply = self.asked(peer, message).await?;
        let started = self.join(theirs, stream).await?;
        let mut intro = self.intro.clone();
        intro.message = reply.map(|reply| reply.to_vec());
        Ok((intro, started))
    }

    /// What this side's [`crate::OnConnect`] answers.
    async fn asked(
        &self,
        peer: PeerId,
        message: Option<Bytes>,
    ) -> Result<Option<Bytes>, ConnectError> {
        let Some(on_connect) = self.config.on_connect.clone() else {
            return Ok(None);
        };
        let asking = Arc::clone(&self.asking).acquire_owned().await;
        let asked = tokio::task::spawn_blocking(move || {
            let _asking = asking;
            on_connect(&peer, message)
        });
        let asked = asked.await;
        let failed = |_| ConnectError::Refused("the peer's OnConnect panicked".to_owned());
        let reply = asked.map_err(failed)?;
        match reply {
            Some(reply) if reply.len() > MAX_MESSAGE => {
                Err(ConnectError::Message { found: reply.len() })
            }
            reply => Ok(reply),
        }
    }

    /// Connects to a peer.
    pub(super) async fn connect(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ConnectError> {
        let mut stream = self
            .unless_over(peer, deadline, Stream::connect(address))
            .await?;
        let introduced = self.introduce(peer, &mut stream, message);
        match self.unless_over(peer, deadline, introduced).await {
            Ok((reply, started)) => {
                self.run(stream, started);
                Ok(reply)
            }
            Err(error) => {
                self.linger(stream);
                Err(error)
            }
        }
    }

    /// Does a part of a connect, unless the deadline or the channel's close comes first.
    async fn unless_over<T>(
        &self,
        peer: &PeerId,
        deadline: Instant,
        part: impl Future<Output = Result<T, ConnectError>>,
    ) -> Result<T, ConnectError> {
        let mut closing = self.closing.subscribe();
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => Err(ConnectError::Closed),
            done = tokio::time::timeout(left(deadline), part) => {
                let late = |_| ConnectError::Deadline { peer: peer.clone() };
                done.map_err(late)?
            }
        }
    }

    /// The handshake of who connects.
    async fn introduce(
        &self,
        peer: &PeerId,
        stream: &mut Stream,
        message: Option<Bytes>,
    ) -> Result<(Option<Bytes>, Started), ConnectError> {
        let ours = self.hello()?;
        stream.writer.write_all(&ours.bytes()).await?;
        let theirs = ours.accept(&read_hello(&mut stream.reader).await?)?;
        let signer = Signer::new(self.config.key.clone(), &ours, &theirs);
        let mut intro = self.intro.clone();
        intro.wanted = Some(peer.to_string());
        intro.message = message.map(|message| message.to_vec());
        stream.exposed = Some(Exposed::new(&self.exposures));
        write_signed(&stream.writer, &signer, Step::Intro, &frame(&intro)).await?;
        let (signature, bytes) = read_signed(&mut stream.reader).await?;
        let answer: Answer = parse(&bytes)?;
        let signed = signer.verify(Step::Answer, &bytes, &signature);
        let mut theirs = match answer {
            Answer::Welcome(theirs) if signed => theirs,
            Answer::Welcome(_) | Answer::WrongKey => return Err(ConnectError::Key),
            Answer::WrongPeer { found } => {
                return Err(ConnectError::WrongPeer {
                    expected: peer.clone(),
                    found: peer_id(&found)?,
                });
            }
            Answer::Refused(why) => return Err(ConnectError::Refused(reason(&why))),
        };
        theirs.check()?;
        let found = peer_id(&theirs.peer)?;
        if found != *peer {
            let expected = peer.clone();
            return Err(ConnectError::WrongPeer { expected, found });
        }
        let reply = theirs.message.take().map(Bytes::from);
        Ok((reply, self.join(theirs, stream).await?))
    }

    /// Makes a peer known to the channel, with a connection that is given a number.
    async fn join(&self, intro: Intro, stream: &mut Stream) -> Result<Started, ConnectError> {
        let number = self.links.fetch_add(1, Ordering::Relaxed);
        let (link, outgoing) = Link::new(number, &stream.writer);
        let (reply, joined) = oneshot::channel();
        stream.number = Some(number);
        self.commands.give(Command::Join { intro, link, reply });
        joined.await.map_err(|_| ConnectError::Closed)??;
        Ok(Started { number, outgoing })
    }

    /// Lets a connection run by itself.
    fn run(&self, stream: Stream, started: Started) {
        let Stream {
            reader, exposed, ..
        } = stream;
        let Started { number, outgoing } = started;
        let (departing, departed) = oneshot::channel();
        let commands = self.commands.clone();
        self.runtime.spawn(async move {
            let (fault, end) = listen(reader, departed, number, &commands).await;
            if let Some(exposed) = exposed.filter(|_| end == LinkEnd::Ended) {
                exposed.over();
            }
            commands.give(Command::LinkDown { number, fault, end });
        });
        self.runtime.spawn(async move {
            if outgoing.run().await {
                // The reader may have ended before.
                let _ = departing.send(());
            }
        });
    }
}

/// A connection whose peer is known, but which does not run yet.
struct Started {
    number: u64,
    outgoing: Outgoing,
}

fn peer_id(text: &str) -> Result<PeerId, ConnectError> {
    text.parse()
        .map_err(|error: crate::PeerIdError| ConnectError::Malformed(error.to_string()))
}

async fn read_hello(reader: &mut Reader) -> Result<[u8; HELLO], ConnectError> {
    let mut bytes = [0; HELLO];
    // Another kind of server may say less and wait.
    reader.read_exact(&mut bytes[..6]).await?;
    let known = bytes[..4] == *b"lmcn" && bytes[4..6] == VERSION.to_le_bytes();
    if known {
        reader.read_exact(&mut bytes[6..]).await?;
    }
    Ok(bytes)
}

async fn read_signed(reader: &mut Reader) -> Result<([u8; SIGNATURE], Vec<u8>), ConnectError> {
    let mut signature = [0; SIGNATURE];
    reader.read_exact(&mut signature).await?;
    Ok((signature, read_frame(reader, MAX_INTRO).await?))
}

async fn write_signed(
    writer: &Writer,
    signer: &Signer,
    step: Step,
    frame: &[u8],
) -> Result<(), ConnectError> {
    let mut bytes = signer.sign(step, &frame[4..]).to_vec();
    bytes.extend_from_slice(frame);
    Ok(writer.write_all(&bytes).await?)
}

async fn read_frame(reader: &mut Reader, max: usize) -> Result<Vec<u8>, ConnectError> {
    let mut len = [0; 4];
    reader.read_exact(&mut len).await?;
    let len = u32::from_le_bytes(len) as usize;
    if len > max {
        let found = format!("a frame of {len} bytes, {max} are allowed");
        return Err(ConnectError::Malformed(found));
    }
    // Memory is taken as bytes arrive, not as they are promised.
    let mut bytes = Vec::new();
    reader.take(len as u64).read_to_end(&mut bytes).await?;
    if bytes.len() < len {
        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
    }
    Ok(bytes)
}

/// Hands on what a peer says, until it says no more. Why it does not, and what is known of that.
/// `departed` says that this side's half has ended.
async fn listen(
    mut reader: Reader,
    departed: oneshot::Receiver<()>,
    number: u64,
    commands: &Commands,
) -> (String, LinkEnd) {
    let heard = tokio::select! {
        heard = hear(&mut reader, number, commands) => Some(heard),
        Ok(()) = departed => None,
    };
    let fault = match heard {
        Some(Ok(())) => return ("its control connection ended".to_owned(), LinkEnd::Ended),
        Some(Err(ConnectError::Io(error))) => {
            let fault = format!("its control connection failed: {error}");
            return (fault, end_by(&error));
        }
        // It is not understood any more; this side's half ends, and then its own does.
        Some(Err(error)) => format!("its control connection failed: {error}"),
        None => "it does not take messages".to_owned(),
    };
    let end = LinkEnd::NotYet;
    commands.give(Command::LinkDown { number, fault, end });
    let end = ends_within(&mut reader, DEPARTURE).await;
    let fault = match end {
        LinkEnd::Ended => "its control connection ended",
        LinkEnd::NotYet | LinkEnd::Unknown => "it does not end its control connection",
    };
    (fault.to_owned(), end)
}

/// Waits for the end of the other side's half, whatever it still says.
async fn ends_within(reader: &mut Reader, limit: Duration) -> LinkEnd {
    let ends = async {
        let mut rest = [0; 512];
        loop {
            match reader.read(&mut rest).await {
                Ok(0) => return LinkEnd::Ended,
                Ok(_) => {}
                Err(error) => return end_by(&error),
            }
        }
    };
    let ends = tokio::time::timeout(limit, ends).await;
    ends.unwrap_or(LinkEnd::Unknown)
}

/// What an error says of the peer. Its host resets the connections of a process that has ended;
/// that nothing answers is no proof of anything.
fn end_by(error: &io::Error) -> LinkEnd {
    match error.kind() {
        io::ErrorKind::ConnectionReset
        | io::ErrorKind::ConnectionAborted
        | io::ErrorKind::BrokenPipe => LinkEnd::Ended,
        _ => LinkEnd::Unknown,
    }
}

/// Hands on what a peer says, up to the end of its connection, or to a fault.
async fn hear(reader: &mut Reader, number: u64, commands: &Commands) -> Result<(), ConnectError> {
    let room = Arc::new(Semaphore::new(MAX_UNREAD));
    loop {
        let frame = read_frame(reader, MAX_FRAME).await;
        let len = frame.as_ref().map_or(0, Vec::len);
        let message: Result<Message, ConnectError> = frame.and_then(|bytes| parse(&bytes));
        let message = match message {
            Ok(message) => message,
            Err(ConnectError::Io(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        let unpacked = size_of::<Command>() + UNPACKED * len;
        let unpacked = u32::try_from(unpacked).expect("frames are bounded");
        let Ok(seat) = Arc::clone(&room).acquire_many_owned(unpacked).await else {
            return Ok(());
        };
        commands.give(Command::Said {
            number,
            message,
            seat,
        });
    }
}

/// Held while a peer's message waits.
pub(super) type Seat = OwnedSemaphorePermit;

/// What is left of the time until a deadline.
pub(super) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime")
    }

    #[test]
    fn who_does_not_end_a_connection_is_not_waited_for() {
        runtime().block_on(async {
            let limit = Duration::from_millis(50);
            let (ours, mut theirs) = tokio::io::duplex(64);
            let mut reader: Reader = Box::new(ours);
            theirs.write_all(b"something").await.expect("it is read");
            assert_eq!(ends_within(&mut reader, limit).await, LinkEnd::Unknown);
            drop(theirs);
            let limit = Duration::from_secs(60);
            assert_eq!(ends_within(&mut reader, limit).await, LinkEnd::Ended);
        });
    }
}
