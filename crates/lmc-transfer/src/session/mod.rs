//! Sessions: who a peer is, and a sealed stream to it. Channels begin all their connections here.
//!
//! | step | from | what |
//! |---|---|---|
//! | 1 | initiator | Noise message 1, under the shared key |
//! | 2 | acceptor | Noise message 2, if message 1 is under a key that it accepts |
//! | 3 | initiator | Noise message 3, and sealed from here on: [`Message::Hello`] |
//! | 4 | acceptor | [`Message::Proceed`] |
//! | 5 | initiator | [`Message::Ready`]: the embedder's message |
//! | 6 | acceptor | [`Message::Welcome`]: the same of its side |
//!
//! Both sides have proved the key, their identities and their names by step 5. What follows the
//! handshake may reveal where memory is. Either side may answer [`Message::Refused`].

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::sync::Semaphore;

use crate::net::{Listener, Socket};
use crate::{Address, ChannelConfig, ConnectError, MAX_MESSAGE, PeerId};

mod acceptor;
mod keys;
mod limiter;
mod noise;
#[cfg(test)]
pub(crate) mod testing;

pub(crate) use acceptor::{Accept, Accepted, serve};
pub use keys::{Identity, Key, KeyError, Keys, MAX_SECRETS, MIN_KEY, PublicIdentity, read_secret};
use noise::{Handshake, Role, opening_len};
pub(crate) use noise::{NoiseError, Opener, Sealer, sealed_len};
pub(crate) use noise::{Opening, PREAMBLE, VERSION};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use noise::{fuzz, pair};

/// Bytes of a transport's payload at most.
const MAX_PAYLOAD: usize = 1 << 10;
/// Bytes of a message of the handshake at most.
const MAX_LEN: usize = MAX_MESSAGE + MAX_PAYLOAD + 4096;
/// Characters of a reason at most, each of up to four bytes.
const MAX_REASON: usize = 256;
/// Threads that run [`crate::OnConnect`] at a time.
const MAX_HANDLERS: usize = 16;

/// The local side of every session.
#[derive(Debug)]
pub(crate) struct Local {
    pub(crate) id: PeerId,
    pub(crate) incarnation: u64,
    identity: Identity,
    keys: Option<Keys>,
    known: HashMap<PeerId, PublicIdentity>,
    handlers: Arc<Semaphore>,
}

/// The other side of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) id: PeerId,
    pub(crate) incarnation: u64,
    pub(crate) identity: PublicIdentity,
}

/// Messages of a handshake, sealed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    Hello {
        from: String,
        to: String,
        incarnation: u64,
        payload: Vec<u8>,
    },
    Proceed {
        from: String,
        incarnation: u64,
        payload: Vec<u8>,
    },
    Ready {
        message: Option<Vec<u8>>,
    },
    Welcome {
        message: Option<Vec<u8>>,
    },
    Refused(Refusal),
}

/// Reason why a side ends a handshake.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
pub(crate) enum Refusal {
    #[error("the peer at this address is {here}")]
    WrongPeer { here: String },
    #[error("the name belongs to another identity")]
    Identity,
    #[error("{0}")]
    Other(String),
}

/// The reason why a handshake failed.
#[derive(Debug, Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Noise(#[from] NoiseError),
    #[error("refused: {0}")]
    Refused(#[from] Refusal),
    #[error("not admitted: {0}")]
    NotAdmitted(String),
    #[error("a message out of order")]
    Unexpected,
}

impl Failure {
    pub(crate) fn refused(why: impl ToString) -> Self {
        Self::Refused(Refusal::Other(reason(&why.to_string())))
    }

    /// Returns the connect error for this failure.
    pub(crate) fn into_connect_error(self, peer: &PeerId) -> ConnectError {
        match self {
            Self::Io(error) => error.into(),
            Self::Noise(NoiseError::Key) => ConnectError::Key,
            Self::Noise(NoiseError::Version(theirs)) => ConnectError::Version {
                ours: VERSION,
                theirs,
            },
            Self::Noise(error) => ConnectError::Malformed(error.to_string()),
            Self::Refused(Refusal::WrongPeer { here }) => wrong_peer(peer, &here),
            Self::Refused(Refusal::Identity) => ConnectError::Identity { peer: peer.clone() },
            Self::Refused(Refusal::Other(why)) => ConnectError::Refused(reason(&why)),
            Self::NotAdmitted(why) => ConnectError::NotAdmitted(why),
            Self::Unexpected => ConnectError::Malformed("a message out of order".into()),
        }
    }
}

/// Shortens a reason so that it fits into a message.
pub(crate) fn reason(text: &str) -> String {
    text.chars().take(MAX_REASON).collect()
}

/// Random bytes.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// Returns the incarnation of a channel that begins now: later ones are larger, as far as the
/// host's clock goes forward.
fn incarnation() -> io::Result<u64> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let micros = now.map_or(0, |now| now.as_micros() as u64);
    // 2^50 microseconds are 35 years since 1970, 2^52 are 142: twelve bits are left to tell
    // channels of one microsecond apart.
    let [a, b]: [u8; 2] = random()?;
    Ok(micros << 12 | u64::from(u16::from_le_bytes([a, b]) & 0xfff))
}

impl Local {
    pub(crate) fn new(config: &ChannelConfig) -> io::Result<Self> {
        Ok(Self {
            id: config.id.clone(),
            incarnation: incarnation()?,
            identity: match &config.identity {
                Some(identity) => identity.clone(),
                None => Identity::generate()?,
            },
            keys: config.keys.clone(),
            known: config.known_peers.clone(),
            handlers: Arc::new(Semaphore::new(MAX_HANDLERS)),
        })
    }

    /// Checks that this side may listen at the listener's address.
    ///
    /// # Errors
    /// There is no key, and the address is neither loopback nor a Unix socket.
    pub(crate) fn check_listener(&self, listener: &Listener) -> Result<(), ConnectError> {
        match self.keys.is_some() || listener.is_local() {
            true => Ok(()),
            false => Err(unprotected(listener.address())),
        }
    }

    /// Returns whether the other side's name belongs to its identity, or to no known identity.
    fn owns(&self, id: &PeerId, identity: PublicIdentity) -> bool {
        self.known.get(id).is_none_or(|known| *known == identity)
    }

    /// Runs the embedder's handler, which may block or panic.
    pub(crate) async fn ask(
        &self,
        config: &ChannelConfig,
        peer: &PeerId,
        message: Option<Vec<u8>>,
    ) -> Result<Option<Vec<u8>>, Failure> {
        let Some(handler) = config.on_connect.clone() else {
            return Ok(None);
        };
        let permit = Arc::clone(&self.handlers).acquire_owned().await;
        let (peer, message) = (peer.clone(), message.map(Bytes::from));
        let asked = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            handler(&peer, message)
        });
        match asked.await {
            Ok(Some(answer)) if answer.len() > MAX_MESSAGE => {
                Err(Failure::refused("the handler's answer is too long"))
            }
            Ok(answer) => Ok(answer.map(Vec::from)),
            Err(_) => Err(Failure::refused("the handler panicked")),
        }
    }
}

fn unprotected(address: &Address) -> ConnectError {
    let address = address.to_string();
    ConnectError::Unprotected { address }
}

/// A sealed stream to a peer whose key is proved.
#[derive(Debug)]
pub(crate) struct SecureStream {
    pub(crate) socket: Socket,
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

impl SecureStream {
    /// The sealed bytes of a message, its length first.
    pub(crate) fn seal(&mut self, message: &Message) -> Vec<u8> {
        let plain = postcard::to_extend(message, Vec::new());
        let plain = plain.expect("a vector takes any number of bytes");
        let mut bytes = (plain.len() as u32).to_le_bytes().to_vec();
        self.sealer.seal(&plain, &mut bytes);
        bytes
    }

    pub(crate) async fn send(&mut self, message: &Message) -> Result<(), Failure> {
        let bytes = self.seal(message);
        Ok(self.socket.write_all(&bytes).await?)
    }

    pub(crate) async fn recv(&mut self) -> Result<Message, Failure> {
        recv(&self.socket, &mut self.opener).await
    }
}

/// Receives a message of the handshake.
pub(crate) async fn recv(socket: &Socket, opener: &mut Opener) -> Result<Message, Failure> {
    let malformed = |what| Failure::Noise(NoiseError::Malformed(what));
    let mut len = [0; 4];
    socket.read_exact(&mut len).await?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_LEN {
        return Err(malformed("a message that is too long"));
    }
    let mut sealed = vec![0; sealed_len(len)];
    socket.read_exact(&mut sealed).await?;
    let mut plain = Vec::with_capacity(len);
    opener.open(&sealed, &mut plain)?;
    match postcard::take_from_bytes(&plain) {
        Ok((Message::Refused(refusal), [])) => Err(refusal.into()),
        Ok((message, [])) => Ok(message),
        _ => Err(malformed("a message that cannot be parsed")),
    }
}

async fn write_opening(socket: &Socket, opening: &Opening) -> io::Result<()> {
    socket.write_all(&opening.encode()).await
}

async fn read_opening(socket: &Socket) -> Result<Opening, Failure> {
    let mut first = [0; PREAMBLE];
    socket.read_exact(&mut first).await?;
    let mut bytes = vec![0; opening_len(first)?];
    socket.read_exact(&mut bytes).await?;
    Ok(Opening::decode(&bytes)?)
}

async fn read_noise(socket: &Socket, noise: &mut Handshake) -> Result<(), Failure> {
    match read_opening(socket).await? {
        Opening::Continue(message) => Ok(noise.read(&message)?),
        Opening::WrongKey => Err(NoiseError::Key.into()),
        Opening::Connect(_) | Opening::Join { .. } => Err(Failure::Unexpected),
    }
}

fn established(
    noise: Handshake,
    socket: Socket,
) -> Result<(SecureStream, Option<PublicIdentity>), Failure> {
    let (sealer, opener, identity) = noise.finish()?;
    let stream = SecureStream {
        socket,
        sealer,
        opener,
    };
    Ok((stream, identity))
}

/// Connects to a peer, up to step 4. Returns the stream, the peer, and the payload of its
/// [`Message::Proceed`].
pub(crate) async fn connect(
    local: &Local,
    config: &ChannelConfig,
    address: &Address,
    socket: Socket,
    peer: &PeerId,
    payload: Vec<u8>,
) -> Result<(SecureStream, Remote, Vec<u8>), ConnectError> {
    if local.keys.is_none() && !socket.is_local() {
        return Err(unprotected(address));
    }
    let connected = initiate(local, config, socket, peer, payload).await;
    connected.map_err(|failure| failure.into_connect_error(peer))
}

/// Sends the first message of a connection that this side has opened, reads the answer, and checks
/// that the connection is admitted.
///
/// The kernel does not show the owner of a connection that waits to be accepted. A side that has
/// answered has accepted; until then only an ephemeral public key was sent.
async fn open(
    config: &ChannelConfig,
    socket: &Socket,
    opening: &Opening,
    noise: &mut Handshake,
) -> Result<(), Failure> {
    write_opening(socket, opening).await?;
    read_noise(socket, noise).await?;
    config.admits(socket).map_err(Failure::NotAdmitted)
}

async fn initiate(
    local: &Local,
    config: &ChannelConfig,
    socket: Socket,
    peer: &PeerId,
    payload: Vec<u8>,
) -> Result<(SecureStream, Remote, Vec<u8>), Failure> {
    let none = Key::none();
    let key = local.keys.as_ref().map_or(&none, Keys::first);
    let mut noise = Handshake::connect(Role::Initiator, &local.identity, key);
    let opening = Opening::Connect(noise.write());
    open(config, &socket, &opening, &mut noise).await?;
    write_opening(&socket, &Opening::Continue(noise.write())).await?;
    let (mut stream, identity) = established(noise, socket)?;
    let identity = identity.ok_or(Failure::Unexpected)?;
    let hello = Message::Hello {
        from: local.id.to_string(),
        to: peer.to_string(),
        incarnation: local.incarnation,
        payload,
    };
    stream.send(&hello).await?;
    let Message::Proceed {
        from,
        incarnation,
        payload,
    } = stream.recv().await?
    else {
        return Err(Failure::Unexpected);
    };
    if from != peer.as_str() {
        return Err(Refusal::WrongPeer { here: from }.into());
    }
    if !local.owns(peer, identity) {
        return Err(Refusal::Identity.into());
    }
    let remote = Remote {
        id: peer.clone(),
        incarnation,
        identity,
    };
    Ok((stream, remote, payload))
}

/// Opens another stream of a connection.
pub(crate) async fn join(
    config: &ChannelConfig,
    socket: Socket,
    session: [u8; 16],
    secret: &[u8; 32],
    stream: u16,
) -> Result<SecureStream, Failure> {
    let mut noise = Handshake::join(Role::Initiator, secret, stream);
    let opening = Opening::Join {
        session,
        stream,
        noise: noise.write(),
    };
    open(config, &socket, &opening, &mut noise).await?;
    Ok(established(noise, socket)?.0)
}

/// Accepts another stream of a connection, whose opening was read.
pub(crate) async fn accept_join(
    socket: Socket,
    secret: &[u8; 32],
    stream: u16,
    message: &[u8],
) -> Result<SecureStream, Failure> {
    let mut noise = Handshake::join(Role::Acceptor, secret, stream);
    noise.read(message)?;
    write_opening(&socket, &Opening::Continue(noise.write())).await?;
    Ok(established(noise, socket)?.0)
}

fn wrong_peer(expected: &PeerId, found: &str) -> ConnectError {
    match found.parse() {
        Ok(found) => ConnectError::WrongPeer {
            expected: expected.clone(),
            found,
        },
        Err(error) => ConnectError::Malformed(format!("{error}")),
    }
}
