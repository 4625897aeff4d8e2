//! Control connections: the session's payloads, and what peers tell each other afterwards.
//!
//! Their end is also how the death of a peer is noticed, under every transport: over RDMA, UCX
//! takes most of a minute. Each side ends its half when nothing of it is under way to the other
//! any more, so that the other knows when its memory is its own again ([`Exposures`]).

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot, watch};
use tokio::time::timeout;

use super::engine::{Command, Commands, JoinError, LinkEnd};
use super::link::{Link, Outgoing};
use super::wire::{Intro, MAX_FRAME, Message, agent_name, encode, parse};
use crate::net::Socket;
use crate::session::{
    self, Accept, Accepted, Failure, Local, Opener, Refusal, Remote, Sealer, SecureStream,
    sealed_len,
};
use crate::{Address, ChannelConfig, ConnectError, PeerId};

/// Bytes of the messages of a connection that wait to be read by the engine; with more, the peer
/// waits. As many as the longest message takes twice.
const MAX_UNREAD: usize = 2 * UNPACKED * MAX_FRAME;
/// A message takes this many times its bytes at most: a number takes 8 bytes, 1 when encoded.
const UNPACKED: usize = 8;
/// A host that acknowledges nothing for this long is gone.
const DEAD_AFTER: Duration = Duration::from_secs(20);

/// After a handshake that failed, the other side has this long to end the connection.
const LINGER: Duration = Duration::from_secs(5);
/// The other side of a connection of which this side's half has ended has this long to end its
/// own: it may be stopped for a while.
const DEPARTURE: Duration = Duration::from_secs(600);
/// Time that a connection in the way of another has to end.
const WAY_TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two looks at that.
const WAY_PAUSE: Duration = Duration::from_millis(10);

/// Peers that know where this side's memory is.
#[derive(Debug, Default)]
pub(super) struct Exposures {
    live: AtomicUsize,
    lost: AtomicBool,
}

impl Exposures {
    /// Returns whether one of them may yet end its connection.
    pub(super) fn are_live(&self) -> bool {
        self.live.load(Ordering::Acquire) > 0
    }

    /// Returns whether all of them have.
    pub(super) fn are_over(&self) -> bool {
        !self.are_live() && !self.lost.load(Ordering::Acquire)
    }

    /// Records that the memory's address was handed to a peer whose end will not be observed.
    pub(super) fn lose(&self) {
        self.lost.store(true, Ordering::Release);
    }
}

/// One exposure of memory to a peer, counted until it is dropped.
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

/// State that the handshakes of a channel share.
pub(super) struct Host {
    pub(super) config: ChannelConfig,
    pub(super) local: Local,
    /// Set once all of the memory is registered.
    pub(super) intro: OnceLock<Intro>,
    pub(super) commands: Commands,
    pub(super) runtime: tokio::runtime::Handle,
    pub(super) refused: AtomicU64,
    pub(super) links: AtomicU64,
    pub(super) exposures: Arc<Exposures>,
    /// Turns true when the channel closes.
    pub(super) closing: watch::Sender<bool>,
}

/// A connection that the engine knows, but which does not run yet.
struct Started {
    socket: Arc<Socket>,
    opener: Opener,
    number: u64,
    outgoing: Outgoing,
}

/// A handshake under way, of either side.
#[derive(Default)]
struct Progress {
    /// Set before the other side learns where the memory is.
    exposed: Option<Exposed>,
    /// Number under which the engine knows the connection, once it does.
    number: Option<u64>,
    socket: Option<Arc<Socket>>,
}

impl Accept for Host {
    fn local(&self) -> &Local {
        &self.local
    }

    fn config(&self) -> &ChannelConfig {
        &self.config
    }

    async fn accepted(self: &Arc<Self>, accepted: &mut Accepted) -> Result<(), Failure> {
        let intro = self.intro.get().ok_or_else(not_ready)?;
        accepted.proceed(&self.local, Vec::new()).await?;
        let (message, payload) = accepted.ready().await?;
        let peer = accepted.remote.clone();
        let theirs = intro_of(&payload, &peer).map_err(Failure::refused)?;
        let message = self.local.ask(&self.config, &peer.id, message).await?;
        let mut guard = Lingering::new(self);
        let Some(mut stream) = accepted.stream.take() else {
            return Err(Failure::Unexpected);
        };
        let before = stream.sealer.position();
        let payload = encode(intro);
        let welcome = stream.seal(&session::Message::Welcome { message, payload });
        let SecureStream {
            socket,
            sealer,
            opener,
        } = stream;
        let socket = Arc::new(socket);
        let (number, outgoing) = match self.attach(&socket, sealer, &peer, &theirs).await {
            Ok(attached) => attached,
            Err((failure, mut sealer)) => {
                // The welcome was not sent: a refusal is, instead.
                sealer.rewind(before);
                accepted.stream = Arc::try_unwrap(socket).ok().map(|socket| SecureStream {
                    socket,
                    sealer,
                    opener,
                });
                return Err(failure);
            }
        };
        guard.progress = Progress {
            number: Some(number),
            socket: Some(Arc::clone(&socket)),
            exposed: Some(Exposed::new(&self.exposures)),
        };
        socket.write_all(&welcome).await?;
        let started = Started {
            socket,
            opener,
            number,
            outgoing,
        };
        self.run(started, guard.done());
        Ok(())
    }

    async fn joined(
        self: &Arc<Self>,
        _: Socket,
        _: [u8; 16],
        _: u16,
        _: Vec<u8>,
    ) -> Result<(), Failure> {
        Err(Failure::Unexpected)
    }

    fn refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }
}

fn not_ready() -> Failure {
    Refusal::NotReady.into()
}

fn intro_of(payload: &[u8], peer: &Remote) -> Result<Intro, ConnectError> {
    let intro: Intro = parse(payload)?;
    intro.check(&agent_name(peer.id.as_str(), peer.incarnation))?;
    Ok(intro)
}

/// Sees to the end of a handshake that fails, or is dropped.
struct Lingering<'a> {
    host: &'a Host,
    progress: Progress,
}

impl<'a> Lingering<'a> {
    fn new(host: &'a Host) -> Self {
        Self {
            host,
            progress: Progress::default(),
        }
    }

    fn done(mut self) -> Option<Exposed> {
        self.progress.number = None;
        self.progress.socket = None;
        self.progress.exposed.take()
    }
}

impl Drop for Lingering<'_> {
    fn drop(&mut self) {
        let Progress {
            exposed,
            number,
            socket,
        } = std::mem::take(&mut self.progress);
        if exposed.is_none() && number.is_none() {
            return;
        }
        let commands = self.host.commands.clone();
        self.host.runtime.spawn(async move {
            let down = |end| {
                let fault = "the handshake was not finished".to_owned();
                if let Some(number) = number {
                    commands.give(Command::LinkDown { number, fault, end });
                }
            };
            down(LinkEnd::NotYet);
            let end = match &socket {
                Some(socket) => {
                    socket.end();
                    ends_within(socket, LINGER).await
                }
                None => LinkEnd::Unknown,
            };
            if let Some(exposed) = exposed.filter(|_| end == LinkEnd::Ended) {
                exposed.over();
            }
            down(end);
        });
    }
}

impl Host {
    /// Connects to a peer.
    pub(super) async fn connect(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ConnectError> {
        let mut closing = self.closing.subscribe();
        let limit = left(deadline).min(self.config.handshake_timeout);
        tokio::select! {
            biased;
            _ = closing.wait_for(|closing| *closing) => Err(ConnectError::Closed),
            done = timeout(limit, self.initiate(peer, address, message)) => {
                let late = |_| ConnectError::Deadline { peer: peer.clone() };
                done.map_err(late)?
            }
        }
    }

    async fn initiate(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
    ) -> Result<Option<Bytes>, ConnectError> {
        let intro = self.intro.get().ok_or_else(not_ready);
        let intro = intro.map_err(|failure| failure.into_connect_error(peer))?;
        let socket = Socket::connect(address).await?;
        let connected =
            session::connect(&self.local, &self.config, address, socket, peer, Vec::new()).await?;
        let (stream, remote, _) = connected;
        let introduced = self.introduce(intro, stream, remote, message).await;
        introduced.map_err(|failure| failure.into_connect_error(peer))
    }

    /// Exchanges introductions with a peer that has proved itself.
    async fn introduce(
        &self,
        intro: &Intro,
        mut stream: SecureStream,
        peer: Remote,
        message: Option<Bytes>,
    ) -> Result<Option<Bytes>, Failure> {
        let ready = session::Message::Ready {
            message: message.map(Vec::from),
            payload: encode(intro),
        };
        let ready = stream.seal(&ready);
        let SecureStream {
            socket,
            sealer,
            mut opener,
        } = stream;
        let socket = Arc::new(socket);
        let mut guard = Lingering::new(self);
        guard.progress = Progress {
            number: None,
            socket: Some(Arc::clone(&socket)),
            exposed: Some(Exposed::new(&self.exposures)),
        };
        socket.write_all(&ready).await?;
        let answer = session::recv(&socket, &mut opener).await?;
        let session::Message::Welcome { message, payload } = answer else {
            return Err(Failure::Unexpected);
        };
        let theirs = intro_of(&payload, &peer).map_err(Failure::refused)?;
        let attached = self.attach(&socket, sealer, &peer, &theirs).await;
        let (number, outgoing) = attached.map_err(|(failure, _)| failure)?;
        let started = Started {
            socket,
            opener,
            number,
            outgoing,
        };
        self.run(started, guard.done());
        Ok(message.map(Bytes::from))
    }

    /// Makes a connection known to the engine, and waits where another connection is in the way,
    /// which may be found dead. Returns its number; on failure, a sealer at the same position.
    async fn attach(
        &self,
        socket: &Arc<Socket>,
        mut sealer: Sealer,
        peer: &Remote,
        intro: &Intro,
    ) -> Result<(u64, Outgoing), (Failure, Sealer)> {
        let end = Instant::now() + WAY_TIMEOUT;
        loop {
            let twin = sealer.twin();
            let number = self.links.fetch_add(1, Ordering::Relaxed);
            let (link, outgoing) = Link::new(number, socket, sealer);
            let (reply, joined) = oneshot::channel();
            self.commands.give(Command::Join {
                peer: peer.clone(),
                intro: Box::new(intro.clone()),
                link,
                reply,
            });
            let error = match joined.await {
                Ok(Ok(())) => return Ok((number, outgoing)),
                Ok(Err(error)) => error,
                Err(_) => JoinError::Other(ConnectError::Closed),
            };
            let in_the_way = matches!(error, JoinError::NotYet(_));
            if !in_the_way || Instant::now() >= end {
                return Err((Failure::refused(error), twin));
            }
            sealer = twin;
            tokio::time::sleep(WAY_PAUSE).await;
        }
    }

    /// Lets a connection run by itself.
    fn run(&self, started: Started, exposed: Option<Exposed>) {
        let Started {
            socket,
            opener,
            number,
            outgoing,
        } = started;
        socket.set_dead_after(DEAD_AFTER);
        let (departing, departed) = oneshot::channel();
        let commands = self.commands.clone();
        self.runtime.spawn(async move {
            let (fault, end) = listen(&socket, opener, departed, number, &commands).await;
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

/// Hands on what a peer says, until it says no more. Why it does not, and what is known of that.
/// `departed` says that this side's half has ended.
async fn listen(
    socket: &Socket,
    opener: Opener,
    departed: oneshot::Receiver<()>,
    number: u64,
    commands: &Commands,
) -> (String, LinkEnd) {
    let heard = tokio::select! {
        heard = hear(socket, opener, number, commands) => Some(heard),
        Ok(()) = departed => None,
    };
    let fault = match heard {
        Some(Ok(())) => return ("its control connection ended".to_owned(), LinkEnd::Ended),
        Some(Err(Failure::Io(error))) => {
            let fault = format!("its control connection failed: {error}");
            return (fault, end_by(&error));
        }
        // It is not understood any more; this side's half ends, and then its own does.
        Some(Err(error)) => format!("its control connection failed: {error}"),
        None => "it does not take messages".to_owned(),
    };
    let end = LinkEnd::NotYet;
    commands.give(Command::LinkDown { number, fault, end });
    let end = ends_within(socket, DEPARTURE).await;
    let fault = match end {
        LinkEnd::Ended => "its control connection ended",
        LinkEnd::NotYet | LinkEnd::Unknown => "it does not end its control connection",
    };
    (fault.to_owned(), end)
}

/// Waits for the end of the other side's half, whatever it still says.
async fn ends_within(socket: &Socket, limit: Duration) -> LinkEnd {
    let ends = async {
        let mut rest = [0; 1];
        loop {
            match socket.read_exact(&mut rest).await {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    return LinkEnd::Ended;
                }
                Err(error) => return end_by(&error),
            }
        }
    };
    timeout(limit, ends).await.unwrap_or(LinkEnd::Unknown)
}

/// Returns what an error proves of the peer. Its host resets the connections of a process that has ended;
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
async fn hear(
    socket: &Socket,
    mut opener: Opener,
    number: u64,
    commands: &Commands,
) -> Result<(), Failure> {
    let capacity = Arc::new(Semaphore::new(MAX_UNREAD));
    loop {
        let mut len = [0; 4];
        match socket.read_exact(&mut len).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_FRAME {
            return Err(Failure::refused("a message that is too long"));
        }
        let unpacked = size_of::<Command>() + UNPACKED * len;
        let unpacked = u32::try_from(unpacked).expect("messages are bounded");
        let Ok(seat) = Arc::clone(&capacity).acquire_many_owned(unpacked).await else {
            return Ok(());
        };
        let (mut sealed, mut plain) = (vec![0; sealed_len(len)], Vec::new());
        socket.read_exact(&mut sealed).await?;
        opener.open(&sealed, &mut plain)?;
        let message: Message = parse(&plain).map_err(Failure::refused)?;
        commands.give(Command::Said {
            number,
            message,
            seat,
        });
    }
}

/// Held while a peer's message waits.
pub(super) type Seat = OwnedSemaphorePermit;

/// Returns the time until a deadline.
pub(super) fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    use lmc_memory::ArenaConfig;
    use tokio::io::AsyncWriteExt;
    use tokio::net::UnixStream;

    use super::*;
    use crate::nixl::reach::Reach;
    use crate::session::testing::{RawSession, out_of_order, read_opening};
    use crate::{Identity, Key};

    fn key() -> Key {
        Key::new(&[1; 32]).expect("32 bytes")
    }

    fn host() -> Arc<Host> {
        let arena = ArenaConfig::anonymous(1 << 20).build().expect("1 MiB");
        let mut config = ChannelConfig::new("me".parse().expect("a name"), Arc::new(arena));
        config.keys = Some(key().into());
        let local = Local::new("nixl", &config).expect("random bytes");
        let intro = Intro {
            agent: agent_name("me", local.incarnation),
            metadata: vec![0x5a; 1000],
            base: 1 << 40,
            len: 1 << 20,
            unit: 4096,
            piece: 1 << 30,
            gpu: None,
            reach: Reach::of_this_process(),
            open: false,
            writable: false,
        };
        Arc::new(Host {
            config,
            local,
            intro: OnceLock::from(intro),
            commands: Commands::new().0,
            runtime: tokio::runtime::Handle::current(),
            refused: AtomicU64::new(0),
            links: AtomicU64::new(0),
            exposures: Arc::default(),
            closing: watch::Sender::new(false),
        })
    }

    /// Connects to an acceptor that is played by hand. Returns why that failed, whether the
    /// memory was described to the acceptor, and what that returned.
    async fn connect_to<T: Send + 'static>(
        acceptor: impl FnOnce(TcpStream) -> T + Send + 'static,
    ) -> (ConnectError, bool, T) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("tcp://{}", listener.local_addr().expect("bound"));
        let address = address.parse().expect("an address");
        let accepting = tokio::task::spawn_blocking(move || {
            let (stream, _) = listener.accept().expect("it connects");
            acceptor(stream)
        });
        let (host, peer) = (host(), "peer".parse().expect("a name"));
        let deadline = Instant::now() + Duration::from_secs(60);
        let connecting = host.connect(&peer, &address, None, deadline);
        let error = connecting.await.expect_err("the acceptor does not finish");
        let described = !host.exposures.are_over();
        (error, described, accepting.await.expect("no panic"))
    }

    /// The address of the memory and the keys to it were sent before the acceptor had proved
    /// anything, to whatever listened at a stale address.
    #[test]
    fn memory_is_described_only_to_an_acceptor_that_has_proved_itself() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            let rest = |mut stream: TcpStream| {
                let mut rest = Vec::new();
                // It may be reset: a byte too many of ours was not read.
                let _ = stream.read_to_end(&mut rest);
                rest
            };
            // One that lacks the key gets the first message and no other.
            let (error, described, after) = connect_to(move |mut stream| {
                read_opening(&mut stream).expect("the first message");
                stream.write_all(&out_of_order()).expect("it listens");
                rest(stream)
            })
            .await;
            assert!(matches!(error, ConnectError::Key), "{error}");
            assert!(!described && after.is_empty(), "{} bytes", after.len());

            // One that has proved the key, and not yet that it is the peer, gets the hello.
            let (error, described, after) = connect_to(move |stream| {
                let identity = Identity::generate().expect("random bytes");
                let session = RawSession::accept(stream, &identity, &key());
                let mut session = session.expect("the initiator proves the key");
                let hello = session.recv().expect("a hello");
                let session::Message::Hello { payload, .. } = hello else {
                    panic!("{hello:?}");
                };
                assert!(payload.is_empty());
                let proceed = session::Message::Proceed {
                    from: "another".to_owned(),
                    incarnation: 1,
                    payload: Vec::new(),
                };
                session.send(&proceed).expect("it listens");
                rest(session.stream)
            })
            .await;
            assert!(matches!(error, ConnectError::WrongPeer { .. }), "{error}");
            assert!(!described && after.is_empty(), "{} bytes", after.len());
        });
    }

    #[test]
    fn a_peer_that_does_not_end_a_connection_is_not_waited_for() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        runtime.expect("a runtime").block_on(async {
            let limit = Duration::from_millis(50);
            let (ours, mut theirs) = UnixStream::pair().expect("two sockets");
            let ours = Socket::Unix(ours);
            theirs.write_all(b"something").await.expect("it is read");
            assert_eq!(ends_within(&ours, limit).await, LinkEnd::Unknown);
            drop(theirs);
            let limit = Duration::from_secs(60);
            assert_eq!(ends_within(&ours, limit).await, LinkEnd::Ended);
        });
    }
}
