//! Handshakes of socket channels: the session's payloads, and the further streams.

use std::collections::hash_map::Entry;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Duration, timeout};

use super::config::{MAX_KEEPALIVE, MAX_STREAMS};
use super::connection::Remote;
use super::outgoing::PieceForm;
use super::shared::{ChannelState, Joining, NotInstalled};
use crate::checks::PeerMemory;
use crate::net::Socket;
use crate::session::{self, Accept, Accepted, Failure, Local, Message, SecureStream};
use crate::{Address, ChannelConfig, ConnectError, PeerId};

/// A side's settings, as sent to the other side.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Side {
    /// Number of the initiator's attempt: a later one supersedes an earlier one.
    pub(super) attempt: u64,
    /// Bytes of its arena.
    pub(super) arena: u64,
    /// Bytes of a unit.
    pub(super) unit: u64,
    /// Streams that the initiator asks for; from the acceptor, streams that the connection has.
    pub(super) streams: u16,
    /// Milliseconds between two of its signs of life.
    pub(super) keepalive: u32,
    /// True if this side wants pieces of objects to be sealed.
    pub(super) sealed: bool,
    /// True if this side wants a checksum for each piece of an object.
    pub(super) summed: bool,
    /// True if this side has NIXL.
    pub(super) nixl: bool,
}

/// The acceptor's payload: its settings, and how further streams join.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Terms {
    pub(super) side: Side,
    pub(super) session: [u8; 16],
    pub(super) secret: [u8; 32],
}

pub(super) fn encode(payload: &impl Serialize) -> Vec<u8> {
    let bytes = postcard::to_extend(payload, Vec::new());
    bytes.expect("a vector takes any number of bytes")
}

pub(super) fn decode<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, Failure> {
    match postcard::take_from_bytes(bytes) {
        Ok((payload, [])) => Ok(payload),
        _ => Err(Failure::refused("a payload that cannot be parsed")),
    }
}

impl From<NotInstalled> for Failure {
    fn from(why: NotInstalled) -> Self {
        Self::refused(why)
    }
}

impl Accept for ChannelState {
    fn local(&self) -> &Local {
        &self.local
    }

    fn config(&self) -> &ChannelConfig {
        &self.core.config.channel
    }

    async fn accepted(self: &Arc<Self>, accepted: &mut Accepted) -> Result<(), Failure> {
        let theirs: Side = decode(&accepted.payload)?;
        let remote = remote(self, &accepted.remote, &theirs, true)?;
        self.would_install(&remote.id)?;
        let count = usize::from(theirs.streams).min(self.core.config.streams);
        let (joined, mut joins) = mpsc::unbounded_channel();
        let mut missing = vec![true; count];
        missing[0] = false;
        let terms = Terms {
            side: side(self, count, theirs.attempt),
            session: session::random()?,
            secret: session::random()?,
        };
        let joining = Joining {
            secret: terms.secret,
            missing,
            joined,
        };
        let _entry = JoiningEntry::new(self, terms.session, joining)?;
        accepted.proceed(&self.local, encode(&terms)).await?;
        let message = accepted.ready().await?;
        let mut others: Vec<(usize, SecureStream)> = Vec::new();
        while others.len() + 1 < count {
            others.push(joins.recv().await.ok_or(Failure::Unexpected)?);
        }
        others.sort_by_key(|(stream, _)| *stream);
        let config = &self.core.config.channel;
        let message = self.local.ask(config, &remote.id, message).await?;
        let mut streams = vec![accepted.stream.take().ok_or(Failure::Unexpected)?];
        streams.extend(others.into_iter().map(|(_, stream)| stream));
        // The first frame's nonce follows the welcome's, so the welcome is sealed now.
        let before = streams[0].sealer.position();
        let welcome = streams[0].seal(&Message::Welcome { message });
        let installed = self.install(remote, &mut streams, Some(welcome)).await;
        if installed.is_err()
            && let Some(mut first) = streams.into_iter().next()
        {
            // The welcome was not sent.
            first.sealer.rewind(before);
            accepted.stream = Some(first);
        }
        Ok(installed?)
    }

    async fn joined(
        self: &Arc<Self>,
        socket: Socket,
        session: [u8; 16],
        stream: u16,
        message: Vec<u8>,
    ) -> Result<(), Failure> {
        let secret = {
            let joining = self.joining.lock();
            let joining = joining.get(&session).ok_or(Failure::Unexpected)?;
            joining.secret
        };
        let joined = session::accept_join(socket, &secret, stream, &message).await?;
        // From here on it is known that the peer sent the message.
        let mut joining = self.joining.lock();
        let Entry::Occupied(mut joining) = joining.entry(session) else {
            return Err(Failure::Unexpected);
        };
        let stream = usize::from(stream);
        match joining.get_mut().missing.get_mut(stream) {
            Some(missing) if *missing => *missing = false,
            _ => return Err(Failure::Unexpected),
        }
        let sent = joining.get().joined.send((stream, joined));
        sent.map_err(|_| Failure::Unexpected)
    }

    fn refused(&self) {
        self.core.counters.refused_handshakes.add(1);
    }
}

/// An entry in the table of handshakes that wait for streams; dropping it removes the entry.
struct JoiningEntry<'a> {
    shared: &'a ChannelState,
    session: [u8; 16],
}

impl<'a> JoiningEntry<'a> {
    fn new(shared: &'a ChannelState, session: [u8; 16], entry: Joining) -> Result<Self, Failure> {
        let mut joining = shared.joining.lock();
        if joining.len() >= shared.core.config.channel.max_peers {
            return Err(Failure::refused("too many handshakes"));
        }
        joining.insert(session, entry);
        Ok(Self { shared, session })
    }
}

impl Drop for JoiningEntry<'_> {
    fn drop(&mut self) {
        self.shared.joining.lock().remove(&self.session);
    }
}

fn side(shared: &ChannelState, streams: usize, attempt: u64) -> Side {
    let config = &shared.core.config.channel;
    Side {
        attempt,
        arena: config.arena.len() as u64,
        unit: config.unit,
        streams: streams as u16,
        keepalive: shared.core.config.keepalive.as_millis() as u32,
        sealed: config.encrypt_objects,
        summed: config.object_checksums,
        #[cfg(feature = "nixl")]
        nixl: shared.core.config.nixl.is_some(),
        #[cfg(not(feature = "nixl"))]
        nixl: false,
    }
}

/// Returns the other side of a connection, if its settings are valid.
fn remote(
    shared: &ChannelState,
    peer: &session::Remote,
    theirs: &Side,
    incoming: bool,
) -> Result<Remote, Failure> {
    let streams = usize::from(theirs.streams);
    if !(1..=MAX_STREAMS).contains(&streams) || !theirs.unit.is_power_of_two() {
        return Err(Failure::refused("the other side's settings are invalid"));
    }
    let keepalive = Duration::from_millis(theirs.keepalive.into());
    let config = &shared.core.config.channel;
    let form = if theirs.sealed || config.encrypt_objects {
        PieceForm::Sealed
    } else if theirs.summed || config.object_checksums {
        PieceForm::Summed
    } else {
        PieceForm::Plain
    };
    Ok(Remote {
        id: peer.id.clone(),
        incarnation: peer.incarnation,
        identity: peer.identity,
        memory: PeerMemory {
            incarnation: peer.incarnation,
            arena: theirs.arena,
            unit: theirs.unit,
        },
        incoming,
        attempt: theirs.attempt,
        keepalive: keepalive
            .min(MAX_KEEPALIVE)
            .max(shared.core.config.keepalive),
        form,
        #[cfg(feature = "nixl")]
        nixl: theirs.nixl,
    })
}

/// Connects to a peer. Call it on the runtime.
pub(super) async fn connect(
    shared: &Arc<ChannelState>,
    peer: &PeerId,
    address: &Address,
    message: Option<Bytes>,
) -> Result<Option<Bytes>, ConnectError> {
    let time = shared.core.config.channel.handshake_timeout;
    let connected = timeout(time, initiate(shared, peer, address, message)).await;
    connected.unwrap_or_else(|_| Err(ConnectError::Deadline { peer: peer.clone() }))
}

async fn initiate(
    shared: &Arc<ChannelState>,
    peer: &PeerId,
    address: &Address,
    message: Option<Bytes>,
) -> Result<Option<Bytes>, ConnectError> {
    let attempt = shared.attempts.fetch_add(1, Ordering::Relaxed);
    let mine = encode(&side(shared, shared.core.config.streams, attempt));
    let config = &shared.core.config.channel;
    let socket = Socket::connect(address).await?;
    let connected = session::connect(&shared.local, config, address, socket, peer, mine).await?;
    let (stream, found, payload) = connected;
    let rest = go_on(shared, address, message, stream, &found, &payload, attempt);
    rest.await
        .map_err(|failure| failure.into_connect_error(peer))
}

async fn go_on(
    shared: &Arc<ChannelState>,
    address: &Address,
    message: Option<Bytes>,
    mut stream: SecureStream,
    found: &session::Remote,
    payload: &[u8],
    attempt: u64,
) -> Result<Option<Bytes>, Failure> {
    let terms: Terms = decode(payload)?;
    let streams = terms.side.streams;
    let remote = remote(shared, found, &terms.side, false)?;
    if usize::from(streams) > shared.core.config.streams || remote.attempt != attempt {
        return Err(Failure::Unexpected);
    }
    let ready = Message::Ready {
        message: message.map(Vec::from),
    };
    stream.send(&ready).await?;
    let mut joins = JoinSet::new();
    for number in 1..streams {
        let (shared, address, terms) = (Arc::clone(shared), address.clone(), terms.clone());
        joins.spawn(async move {
            let socket = Socket::connect(&address).await?;
            let config = &shared.core.config.channel;
            let joined = session::join(config, socket, terms.session, &terms.secret, number).await;
            joined.map(|stream| (number, stream))
        });
    }
    let mut others = Vec::new();
    while let Some(joined) = joins.join_next().await {
        others.push(joined.map_err(|error| Failure::Io(io::Error::other(error)))??);
    }
    others.sort_by_key(|(number, _)| *number);
    let Message::Welcome { message } = stream.recv().await? else {
        return Err(Failure::Unexpected);
    };
    let mut streams = vec![stream];
    streams.extend(others.into_iter().map(|(_, stream)| stream));
    shared.install(remote, &mut streams, None).await?;
    Ok(message.map(Bytes::from))
}

/// Decodes any bytes as payloads of a handshake.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    if let Ok(side) = decode::<Side>(data) {
        assert_eq!(decode::<Side>(&encode(&side)).ok(), Some(side));
    }
    if let Ok(terms) = decode::<Terms>(data) {
        assert_eq!(decode::<Terms>(&encode(&terms)).ok(), Some(terms));
    }
}
