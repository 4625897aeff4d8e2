//! The one accept loop, and the acceptor's half of a handshake.

use std::sync::Arc;

use tokio::time::{Duration, Instant, sleep, timeout};

use super::limiter::{HandshakeSource, Limiter, Permit};
use super::noise::{Handshake, NoiseError, Opening, Role, VERSION, preamble};
use super::{
    Failure, Key, Local, Message, Refusal, Remote, SecureStream, established, read_noise,
    read_opening, write_opening,
};
use crate::ChannelConfig;
use crate::net::{Listener, Socket};

/// Time until the first message of a handshake must have come.
const FIRST_MESSAGE: Duration = Duration::from_secs(2);
/// Pause after a failed accept, for instance when file descriptors have run out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Minimum time between two warnings of refused connections.
const WARNING_PAUSE: Duration = Duration::from_secs(1);

/// A peer that has proved the key and sent [`Message::Hello`].
#[derive(Debug)]
pub(crate) struct Accepted {
    /// Taken by the transport that accepts the connection.
    pub(crate) stream: Option<SecureStream>,
    pub(crate) remote: Remote,
    /// The payload of its [`Message::Hello`].
    pub(crate) payload: Vec<u8>,
}

impl Accepted {
    pub(crate) fn stream(&mut self) -> Result<&mut SecureStream, Failure> {
        self.stream.as_mut().ok_or(Failure::Unexpected)
    }

    /// Sends [`Message::Proceed`].
    pub(crate) async fn proceed(&mut self, local: &Local, payload: Vec<u8>) -> Result<(), Failure> {
        let proceed = Message::Proceed {
            from: local.id.to_string(),
            incarnation: local.incarnation,
            payload,
        };
        self.stream()?.send(&proceed).await
    }

    /// Waits for [`Message::Ready`]: the embedder's message.
    pub(crate) async fn ready(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        let Message::Ready { message } = self.stream()?.recv().await? else {
            return Err(Failure::Unexpected);
        };
        if message
            .as_ref()
            .is_some_and(|m| m.len() > crate::MAX_MESSAGE)
        {
            return Err(Failure::refused("the message is too long"));
        }
        Ok(message)
    }
}

/// A transport that accepts connections.
pub(crate) trait Accept: Send + Sync + 'static {
    fn local(&self) -> &Local;

    fn config(&self) -> &ChannelConfig;

    /// Continues with an authenticated peer. Takes the stream out of `accepted` once the connection
    /// is established; until then a refusal is sent to the peer.
    fn accepted(
        self: &Arc<Self>,
        accepted: &mut Accepted,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Takes another stream of a connection.
    fn joined(
        self: &Arc<Self>,
        socket: Socket,
        session: [u8; 16],
        stream: u16,
        message: Vec<u8>,
    ) -> impl Future<Output = Result<(), Failure>> + Send;

    /// Counts a handshake that failed.
    fn refused(&self);
}

/// Accepts connections until the task is aborted.
pub(crate) async fn serve<A: Accept>(acceptor: Arc<A>, listener: Listener) {
    let limiter = Limiter::new();
    let mut warned: Option<Instant> = None;
    loop {
        let (socket, source) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection; trying again");
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        if let Err(why) = acceptor.config().admits(&socket) {
            acceptor.refused();
            if warned.is_none_or(|at| at.elapsed() >= WARNING_PAUSE) {
                warned = Some(Instant::now());
                tracing::warn!(?source, "a connection of a peer is refused: {why}");
            }
            continue;
        }
        let (permit, evicted) = limiter.enter(source.map(HandshakeSource::of));
        let acceptor = Arc::clone(&acceptor);
        tokio::spawn(async move {
            let limit = acceptor.config().handshake_timeout;
            let handshake = timeout(limit, handshake(&acceptor, socket, &permit));
            let failed = tokio::select! {
                done = handshake => match done {
                    Ok(Ok(())) => return,
                    Ok(Err(failure)) => failure.to_string(),
                    Err(_) => format!("not done within {limit:?}"),
                },
                Ok(()) = evicted => "evicted: too many handshakes at once".to_owned(),
            };
            acceptor.refused();
            tracing::debug!(?source, failed, "a handshake failed");
        });
    }
}

async fn handshake<A: Accept>(
    acceptor: &Arc<A>,
    socket: Socket,
    permit: &Permit,
) -> Result<(), Failure> {
    let first = timeout(FIRST_MESSAGE, read_opening(&socket)).await;
    let first = first.map_err(|_| Failure::Noise(NoiseError::Malformed("nothing was sent")))?;
    match first {
        Ok(Opening::Connect(message)) => {
            let mut accepted = authenticate(acceptor.local(), socket, &message, permit).await?;
            let outcome = acceptor.accepted(&mut accepted).await;
            if let (Err(Failure::Refused(refusal)), Some(stream)) =
                (&outcome, accepted.stream.as_mut())
            {
                stream.send(&Message::Refused(refusal.clone())).await?;
            }
            outcome
        }
        Ok(Opening::Join {
            session,
            stream,
            noise,
        }) => {
            let joined = acceptor.joined(socket, session, stream, noise).await;
            if joined.is_ok() {
                permit.authenticated();
            }
            joined
        }
        Ok(Opening::Continue(_) | Opening::WrongKey) => Err(Failure::Unexpected),
        Err(Failure::Noise(NoiseError::Version(theirs))) => {
            socket.write_all(&preamble(VERSION, 0)).await?;
            drain(&socket).await;
            Err(NoiseError::Version(theirs).into())
        }
        Err(failure) => Err(failure),
    }
}

/// Reads until the other side closes: closing first, with bytes unread, could destroy what was
/// just sent to it.
async fn drain(socket: &Socket) {
    let mut bytes = [0; 64];
    for _ in 0..64 {
        if socket.read_exact(&mut bytes).await.is_err() {
            return;
        }
    }
}

/// The acceptor's half up to [`Message::Hello`].
async fn authenticate(
    local: &Local,
    socket: Socket,
    message: &[u8],
    permit: &Permit,
) -> Result<Accepted, Failure> {
    let none = Key::none();
    let keys: Vec<&Key> = match &local.keys {
        Some(keys) => keys.accepted().collect(),
        None => vec![&none],
    };
    let accepts = |key: &&Key| {
        let mut noise = Handshake::connect(Role::Acceptor, &local.identity, key);
        noise.read(message).is_ok().then_some(noise)
    };
    let Some(mut noise) = keys.iter().find_map(accepts) else {
        write_opening(&socket, &Opening::WrongKey).await?;
        return Err(NoiseError::Key.into());
    };
    permit.knows_the_key();
    write_opening(&socket, &Opening::Continue(noise.write())).await?;
    read_noise(&socket, &mut noise).await?;
    permit.authenticated();
    let (mut stream, identity) = established(noise, socket)?;
    let hello = stream.recv().await?;
    let checked = hello_of(local, hello, identity);
    match checked {
        Ok((remote, payload)) => Ok(Accepted {
            stream: Some(stream),
            remote,
            payload,
        }),
        Err(failure) => {
            if let Failure::Refused(refusal) = &failure {
                stream.send(&Message::Refused(refusal.clone())).await?;
            }
            Err(failure)
        }
    }
}

fn hello_of(
    local: &Local,
    hello: Message,
    identity: Option<super::PublicIdentity>,
) -> Result<(Remote, Vec<u8>), Failure> {
    let Message::Hello {
        from,
        to,
        incarnation,
        payload,
    } = hello
    else {
        return Err(Failure::Unexpected);
    };
    let identity = identity.ok_or(Failure::Unexpected)?;
    if to != local.id.as_str() {
        let here = local.id.to_string();
        return Err(Refusal::WrongPeer { here }.into());
    }
    let id: crate::PeerId = from
        .parse()
        .map_err(|error: crate::PeerIdError| Failure::refused(error))?;
    if !local.owns(&id, identity) {
        return Err(Refusal::Identity.into());
    }
    let remote = Remote {
        id,
        incarnation,
        identity,
    };
    Ok((remote, payload))
}
