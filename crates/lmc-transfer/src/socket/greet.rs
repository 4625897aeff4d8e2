//! Handshakes on sockets: those who connect to this side, and this side to others.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Duration, sleep, timeout};

use super::config::{MAX_KEEPALIVE, MAX_STREAMS};
use super::connection::Remote;
use super::door::{Door, Place};
use super::endpoint::{Listener, Socket};
use super::frame::reason;
use super::handshake::{
    HandshakeError, Label, Message, PREAMBLE, Refusal, Side, Transcript, VERSION, message_len,
    preamble,
};
use super::shared::{NotInstalled, Shared};
use crate::{Address, ConnectError, MAX_MESSAGE, PeerId};

/// Pause after a failed accept, as when there are no file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A handshake that has come as far as its other streams.
#[derive(Debug)]
pub(super) struct Session {
    transcript: Transcript,
    /// Which streams are still to come.
    missing: Vec<bool>,
    joined: mpsc::UnboundedSender<(usize, Socket)>,
}

/// Why the other side does not get through.
#[derive(Debug, Error)]
enum Failure {
    #[error("{0:?}")]
    Handshake(HandshakeError),
    #[error("{0}")]
    Io(#[from] io::Error),
    #[error("refused: {0:?}")]
    Refused(Refusal),
    #[error("out of turn")]
    Unexpected,
}

impl From<HandshakeError> for Failure {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}

impl From<NotInstalled> for Failure {
    fn from(why: NotInstalled) -> Self {
        Self::Refused(Refusal::Other(why.to_string()))
    }
}

async fn receive(socket: &Socket) -> Result<Message, Failure> {
    let mut first = [0; PREAMBLE];
    socket.read_exact(&mut first).await?;
    let mut bytes = vec![0; message_len(first)?];
    socket.read_exact(&mut bytes).await?;
    Ok(Message::decode(&bytes)?)
}

async fn send(socket: &Socket, message: &Message) -> io::Result<()> {
    socket.write_all(&message.encode()).await
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// A number that this process has and no other had.
pub(super) fn incarnation() -> io::Result<u64> {
    random().map(u64::from_le_bytes)
}

/// Takes in those who connect, for ever.
pub(super) async fn accept(shared: Arc<Shared>, listener: Listener) {
    let door = Door::new();
    loop {
        let place = door.wait().await;
        let (socket, source) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(accepted) = door.accept(place, source) else {
            shared.counters.refused_handshakes.add(1);
            tracing::debug!(?source, "refused a handshake: too many from there");
            continue;
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let place = accepted.turn().await;
            let time = shared.config.channel.handshake_timeout;
            let greeted = timeout(time, greet(&shared, socket, place)).await;
            let why = match greeted {
                Ok(Ok(())) => return,
                Ok(Err(failure)) => failure.to_string(),
                Err(_) => format!("not done in {time:?}"),
            };
            shared.counters.refused_handshakes.add(1);
            tracing::debug!(why, "refused a handshake");
        });
    }
}

async fn greet(shared: &Arc<Shared>, socket: Socket, place: Place) -> Result<(), Failure> {
    match receive(&socket).await {
        Ok(Message::Hello { side, to }) => {
            let mut place = Some(place);
            let answered = answer(shared, socket, side, to, &mut place).await;
            let Err((failure, socket)) = answered else {
                return Ok(());
            };
            if let (Failure::Refused(refusal), Some(socket)) = (&failure, socket) {
                send(&socket, &Message::Refused(refusal.clone())).await?;
                // Who gave the place back sends nothing that could be unread.
                if place.is_some() {
                    linger(&socket).await?;
                }
            }
            Err(failure)
        }
        Ok(Message::Join {
            session,
            stream,
            proof,
        }) => {
            let stream = usize::from(stream);
            let mut sessions = shared.sessions.lock();
            let entry = sessions.get_mut(&session).ok_or(Failure::Unexpected)?;
            let said = (&session, stream as u16);
            if !entry.transcript.holds(Label::Join, &said, &proof) {
                return Err(Failure::Refused(Refusal::Key));
            }
            match entry.missing.get_mut(stream) {
                Some(missing) if *missing => *missing = false,
                _ => return Err(Failure::Unexpected),
            }
            let _ = entry.joined.send((stream, socket));
            Ok(())
        }
        Ok(_) => Err(Failure::Unexpected),
        Err(Failure::Handshake(HandshakeError::Version(theirs))) => {
            socket.write_all(&preamble(VERSION, 0)).await?;
            linger(&socket).await?;
            Err(HandshakeError::Version(theirs).into())
        }
        Err(failure) => Err(failure),
    }
}

/// Waits until the other side closes. To close first with bytes unread would take away what was
/// just sent to it.
async fn linger(socket: &Socket) -> io::Result<()> {
    let mut byte = [0; 1024];
    for _ in 0..MAX_MESSAGE / byte.len() + 2 {
        socket.read_exact(&mut byte).await?;
    }
    Ok(())
}

/// The acceptor's side of a handshake. The socket comes back where a refusal can be sent.
async fn answer(
    shared: &Arc<Shared>,
    socket: Socket,
    theirs: Side,
    to: String,
    place: &mut Option<Place>,
) -> Result<(), (Failure, Option<Socket>)> {
    let mut sockets = vec![socket];
    let answered = converse(shared, &mut sockets, theirs, to, place).await;
    let (remote, message, transcript) = match answered {
        Ok(done) => done,
        Err(failure) => return Err((failure, sockets.into_iter().next())),
    };
    let proof = transcript.prove(Label::Welcome, &message);
    let welcome = Message::Welcome { message, proof }.encode();
    let installed = shared.install(remote, &mut sockets, Some(welcome)).await;
    installed.map_err(|why| (why.into(), sockets.into_iter().next()))
}

/// All of it until the connection stands but for the welcome.
async fn converse(
    shared: &Arc<Shared>,
    sockets: &mut Vec<Socket>,
    theirs: Side,
    to: String,
    place: &mut Option<Place>,
) -> Result<(Remote, Option<Vec<u8>>, Transcript), Failure> {
    let config = &shared.config.channel;
    let socket = &sockets[0];
    let refuse = |refusal| Err(Failure::Refused(refusal));
    if to != config.id.as_str() {
        let here = config.id.to_string();
        return refuse(Refusal::WrongPeer { here });
    }
    if theirs.keyed != config.key.is_some() {
        return refuse(Refusal::Key);
    }
    let Some(remote) = remote(shared, &theirs, true) else {
        return refuse(Refusal::Other("not a side that can be connected".into()));
    };
    let streams = usize::from(theirs.streams).min(shared.config.streams);

    let mut transcript = Transcript::new(config.key.as_ref());
    transcript.add(&(&theirs, &to));
    let side = side(shared, streams, theirs.attempt)?;
    let proof = transcript.prove(Label::Challenge, &side);
    transcript.add(&side);
    send(socket, &Message::Challenge { side, proof }).await?;

    let Message::Proof { message, proof } = receive(socket).await? else {
        return Err(Failure::Unexpected);
    };
    if !transcript.holds(Label::Proof, &message, &proof) {
        return refuse(Refusal::Key);
    }
    if message.as_ref().is_some_and(|m| m.len() > MAX_MESSAGE) {
        return refuse(Refusal::Other("the message is too long".into()));
    }
    transcript.add(&message);
    shared.would_install(&remote.id)?;

    let session: [u8; 16] = random()?;
    transcript.add(&session);
    let proof = transcript.prove(Label::Session, &());
    let (joined, mut joins) = mpsc::unbounded_channel();
    let mut missing = vec![true; streams];
    missing[0] = false;
    let entry = Session {
        transcript: transcript.clone(),
        missing,
        joined,
    };
    let _entry = SessionEntry::new(shared, session, entry)?;
    send(socket, &Message::Session { session, proof }).await?;
    // It is known who this is: from here on, peers at a time are the bound.
    *place = None;
    let mut others: HashMap<usize, Socket> = HashMap::new();
    while others.len() + 1 < streams {
        let (stream, socket) = joins.recv().await.ok_or(Failure::Unexpected)?;
        others.insert(stream, socket);
    }
    let joined = (1..streams).filter_map(|stream| others.remove(&stream));
    sockets.extend(joined);

    let answer = match &config.on_connect {
        None => None,
        Some(on_connect) => {
            let on_connect = Arc::clone(on_connect);
            let peer = remote.id.clone();
            let message = message.map(Bytes::from);
            // It is foreign code, which may take its time or panic.
            let call = move || on_connect(&peer, message);
            let called = tokio::task::spawn_blocking(call).await;
            match called {
                Ok(answer) => answer.map(Vec::from),
                Err(_) => return refuse(Refusal::Other("the answer failed".into())),
            }
        }
    };
    if answer.as_ref().is_some_and(|m| m.len() > MAX_MESSAGE) {
        return refuse(Refusal::Other("the answer is too long".into()));
    }
    Ok((remote, answer, transcript))
}

/// An entry in the table of sessions, for as long as it lives.
struct SessionEntry<'a> {
    shared: &'a Shared,
    session: [u8; 16],
}

impl<'a> SessionEntry<'a> {
    fn new(shared: &'a Shared, session: [u8; 16], entry: Session) -> Result<Self, Failure> {
        let mut sessions = shared.sessions.lock();
        if sessions.len() >= shared.config.channel.max_peers {
            let why = "too many handshakes".to_owned();
            return Err(Failure::Refused(Refusal::Other(why)));
        }
        sessions.insert(session, entry);
        Ok(Self { shared, session })
    }
}

impl Drop for SessionEntry<'_> {
    fn drop(&mut self) {
        self.shared.sessions.lock().remove(&self.session);
    }
}

/// What this side says of itself.
fn side(shared: &Shared, streams: usize, attempt: u64) -> io::Result<Side> {
    let config = &shared.config.channel;
    Ok(Side {
        id: config.id.to_string(),
        incarnation: shared.incarnation,
        attempt,
        arena: config.arena.len() as u64,
        unit: config.unit,
        streams: streams as u16,
        keepalive: shared.config.keepalive.as_millis() as u32,
        keyed: config.key.is_some(),
        nonce: random()?,
    })
}

/// What the other side says of itself; none when it makes no sense.
fn remote(shared: &Shared, theirs: &Side, incoming: bool) -> Option<Remote> {
    let streams = usize::from(theirs.streams);
    if !(1..=MAX_STREAMS).contains(&streams) || !theirs.unit.is_power_of_two() {
        return None;
    }
    let keepalive = Duration::from_millis(theirs.keepalive.into());
    Some(Remote {
        id: theirs.id.parse().ok()?,
        incarnation: theirs.incarnation,
        arena: theirs.arena,
        unit: theirs.unit,
        incoming,
        attempt: theirs.attempt,
        keepalive: keepalive.min(MAX_KEEPALIVE).max(shared.config.keepalive),
    })
}

/// The initiator's side of a handshake. To be called on the runtime.
pub(super) async fn connect(
    shared: &Arc<Shared>,
    peer: &PeerId,
    address: &Address,
    message: Option<Bytes>,
) -> Result<Option<Bytes>, ConnectError> {
    let config = &shared.config.channel;
    let open = || async {
        let connected = Socket::connect(address).await;
        connected.ok_or_else(|| ConnectError::Address {
            kind: "socket",
            address: address.to_string(),
        })
    };
    let socket = open().await??;
    let time = config.handshake_timeout;
    let connected = timeout(time, introduce(shared, peer, socket, open, message)).await;
    connected.unwrap_or_else(|_| Err(ConnectError::Deadline { peer: peer.clone() }))
}

/// All that is said on the first socket, while the others are opened.
async fn introduce<F: Future<Output = Result<io::Result<Socket>, ConnectError>>>(
    shared: &Arc<Shared>,
    peer: &PeerId,
    socket: Socket,
    open: impl Fn() -> F,
    message: Option<Bytes>,
) -> Result<Option<Bytes>, ConnectError> {
    let config = &shared.config.channel;
    let attempt = shared.attempts.fetch_add(1, Ordering::Relaxed);
    let mine = side(shared, shared.config.streams, attempt)?;
    let to = peer.to_string();
    let mut transcript = Transcript::new(config.key.as_ref());
    transcript.add(&(&mine, &to));
    say(&socket, &Message::Hello { side: mine, to }).await?;

    let Message::Challenge { side, proof } = hear(&socket, peer).await? else {
        return Err(out_of_turn());
    };
    if side.id != peer.as_str() {
        return Err(wrong_peer(peer, &side.id));
    }
    if side.keyed != config.key.is_some() || !transcript.holds(Label::Challenge, &side, &proof) {
        return Err(ConnectError::Key);
    }
    let streams = usize::from(side.streams);
    let remote = remote(shared, &side, false)
        .filter(|remote| streams <= shared.config.streams && remote.attempt == attempt);
    let remote = remote.ok_or_else(|| malformed("a side that cannot be connected"))?;
    transcript.add(&side);

    let message = message.map(Vec::from);
    let proof = transcript.prove(Label::Proof, &message);
    transcript.add(&message);
    say(&socket, &Message::Proof { message, proof }).await?;

    let Message::Session { session, proof } = hear(&socket, peer).await? else {
        return Err(out_of_turn());
    };
    transcript.add(&session);
    if !transcript.holds(Label::Session, &(), &proof) {
        return Err(ConnectError::Key);
    }
    let mut sockets = vec![socket];
    for stream in 1..streams as u16 {
        let socket = open().await??;
        let proof = transcript.prove(Label::Join, &(&session, stream));
        let join = Message::Join {
            session,
            stream,
            proof,
        };
        say(&socket, &join).await?;
        sockets.push(socket);
    }

    let Message::Welcome { message, proof } = hear(&sockets[0], peer).await? else {
        return Err(out_of_turn());
    };
    if !transcript.holds(Label::Welcome, &message, &proof) {
        return Err(ConnectError::Key);
    }
    match shared.install(remote, &mut sockets, None).await {
        Ok(()) => Ok(message.map(Bytes::from)),
        Err(NotInstalled::Closed) => Err(ConnectError::Closed),
        Err(why) => Err(ConnectError::Refused(why.to_string())),
    }
}

/// Sends; a side that refuses may have closed already, and its reason is still to be heard.
async fn say(socket: &Socket, message: &Message) -> Result<(), ConnectError> {
    match send(socket, message).await {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

async fn hear(socket: &Socket, peer: &PeerId) -> Result<Message, ConnectError> {
    match receive(socket).await {
        Ok(Message::Refused(Refusal::Key)) => Err(ConnectError::Key),
        Ok(Message::Refused(Refusal::WrongPeer { here })) => Err(wrong_peer(peer, &here)),
        Ok(Message::Refused(Refusal::Other(why))) => Err(ConnectError::Refused(reason(&why))),
        Ok(message) => Ok(message),
        Err(Failure::Io(error)) => Err(error.into()),
        Err(Failure::Handshake(HandshakeError::Version(theirs))) => Err(ConnectError::Version {
            ours: VERSION,
            theirs,
        }),
        Err(Failure::Handshake(HandshakeError::Malformed(what))) => Err(malformed(what)),
        Err(Failure::Refused(_) | Failure::Unexpected) => Err(out_of_turn()),
    }
}

fn wrong_peer(expected: &PeerId, found: &str) -> ConnectError {
    match found.parse() {
        Ok(found) => ConnectError::WrongPeer {
            expected: expected.clone(),
            found,
        },
        Err(error) => ConnectError::Malformed(error.to_string()),
    }
}

fn malformed(what: &str) -> ConnectError {
    ConnectError::Malformed(what.to_owned())
}

fn out_of_turn() -> ConnectError {
    malformed("a message out of turn")
}
