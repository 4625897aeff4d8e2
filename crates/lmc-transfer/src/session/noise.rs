//! The cryptography of a session, as bytes. No IO.
//!
//! A connection begins with `Noise_XXpsk0_25519_AESGCM_BLAKE2s`: both sides prove the shared
//! key and their own identity. Message 1 is encrypted under the shared key already, so an acceptor
//! does not answer a stranger. Further streams of a connection use
//! `Noise_NNpsk0_25519_AESGCM_BLAKE2s` with a secret that the first stream carried.
//! The prologue holds the version, so that it cannot be changed on the way.
//!
//! Afterwards each direction is a sequence of [`Sealer`] and [`Opener`] calls with a counter as
//! nonce: bytes that were changed, dropped, repeated or reordered fail to open.

use std::fmt;
use std::sync::Arc;

use snow::{Builder, HandshakeState, StatelessTransportState};
use thiserror::Error;

use super::keys::{Identity, Key, PublicIdentity};

/// The version that this side speaks.
pub(crate) const VERSION: u16 = 5;
/// Bytes before each handshake message: magic (8), version (u16), length (u32), little endian.
pub(crate) const PREAMBLE: usize = 14;
const MAGIC: [u8; 8] = *b"lmc-xfer";
/// Bytes of a handshake message at most.
const MAX_OPENING: usize = 512;
/// Bytes of a tag.
const TAG: usize = 16;
/// Plain bytes under one tag at most.
const CHUNK: usize = 65_535 - TAG;

const MAIN: &str = "Noise_XXpsk0_25519_AESGCM_BLAKE2s";
const JOIN: &str = "Noise_NNpsk0_25519_AESGCM_BLAKE2s";

/// Bytes that are no handshake, or that come from a side without the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(crate) enum NoiseError {
    #[error("malformed: {0}")]
    Malformed(&'static str),
    #[error("version {0}")]
    Version(u16),
    #[error("the keys differ")]
    Key,
}

/// Handshake messages; the part of a session that is not sealed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Opening {
    /// Begins a connection: message 1 of XXpsk0.
    Connect(Vec<u8>),
    /// Begins another stream of a connection: its session, its number, message 1 of NNpsk0.
    Join {
        session: [u8; 16],
        stream: u16,
        noise: Vec<u8>,
    },
    /// Any later Noise message.
    Continue(Vec<u8>),
    /// The acceptor does not know the initiator's key.
    WrongKey,
}

impl Opening {
    /// Preamble and message.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Connect(noise) => {
                body.push(0);
                body.extend_from_slice(noise);
            }
            Self::Join {
                session,
                stream,
                noise,
            } => {
                body.push(1);
                body.extend_from_slice(session);
                body.extend_from_slice(&stream.to_le_bytes());
                body.extend_from_slice(noise);
            }
            Self::Continue(noise) => {
                body.push(2);
                body.extend_from_slice(noise);
            }
            Self::WrongKey => body.push(3),
        }
        let mut bytes = preamble(VERSION, body.len() as u32).to_vec();
        bytes.append(&mut body);
        bytes
    }

    /// Decodes what follows a preamble.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, NoiseError> {
        let malformed = NoiseError::Malformed("an unknown handshake message");
        let (kind, body) = bytes.split_first().ok_or(malformed)?;
        match kind {
            0 => Ok(Self::Connect(body.to_vec())),
            1 => {
                let (session, rest) = body.split_first_chunk().ok_or(malformed)?;
                let (stream, noise) = rest.split_first_chunk().ok_or(malformed)?;
                Ok(Self::Join {
                    session: *session,
                    stream: u16::from_le_bytes(*stream),
                    noise: noise.to_vec(),
                })
            }
            2 => Ok(Self::Continue(body.to_vec())),
            3 if body.is_empty() => Ok(Self::WrongKey),
            _ => Err(malformed),
        }
    }
}

/// The bytes before a handshake message. The answer to a side of another version has length 0,
/// which all versions can read.
pub(crate) fn preamble(version: u16, len: u32) -> [u8; PREAMBLE] {
    let mut bytes = [0; PREAMBLE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&version.to_le_bytes());
    bytes[10..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Bytes of the handshake message that follows a preamble.
pub(crate) fn opening_len(preamble: [u8; PREAMBLE]) -> Result<usize, NoiseError> {
    if preamble[..8] != MAGIC {
        return Err(NoiseError::Malformed("another protocol"));
    }
    let version = u16::from_le_bytes([preamble[8], preamble[9]]);
    if version != VERSION {
        return Err(NoiseError::Version(version));
    }
    let [.., a, b, c, d] = preamble;
    match u32::from_le_bytes([a, b, c, d]) as usize {
        len @ 1..=MAX_OPENING => Ok(len),
        _ => Err(NoiseError::Malformed("an empty or too long message")),
    }
}

/// A Noise handshake under way.
pub(crate) struct Handshake(HandshakeState);

impl fmt::Debug for Handshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handshake")
    }
}

/// A side of a handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Initiator,
    Acceptor,
}

fn prologue(stream: u16) -> Vec<u8> {
    format!("lmc-transfer {VERSION}, stream {stream}").into_bytes()
}

impl Handshake {
    /// Begins a connection's handshake.
    pub(crate) fn connect(role: Role, identity: &Identity, key: &Key) -> Self {
        let prologue = prologue(0);
        let builder = Builder::new(MAIN.parse().expect("a pattern that snow knows"))
            .local_private_key(identity.private())
            .and_then(|builder| builder.psk(0, key.bytes()))
            .and_then(|builder| builder.prologue(&prologue));
        Self::build(role, builder)
    }

    /// Begins a further stream's handshake.
    pub(crate) fn join(role: Role, secret: &[u8; 32], stream: u16) -> Self {
        let prologue = prologue(stream);
        let builder = Builder::new(JOIN.parse().expect("a pattern that snow knows"))
            .psk(0, secret)
            .and_then(|builder| builder.prologue(&prologue));
        Self::build(role, builder)
    }

    fn build(role: Role, builder: Result<Builder<'_>, snow::Error>) -> Self {
        let state = builder.and_then(|builder| match role {
            Role::Initiator => builder.build_initiator(),
            Role::Acceptor => builder.build_responder(),
        });
        Self(state.expect("all parameters are set, once, with keys of 32 bytes"))
    }

    /// The next message of this side.
    pub(crate) fn write(&mut self) -> Vec<u8> {
        let mut message = vec![0; MAX_OPENING];
        let written = self.0.write_message(&[], &mut message);
        message.truncate(written.expect("it is this side's turn, and the message is short"));
        message
    }

    /// Takes a message of the other side.
    pub(crate) fn read(&mut self, message: &[u8]) -> Result<(), NoiseError> {
        let mut payload = [0; MAX_OPENING];
        match self.0.read_message(message, &mut payload) {
            Ok(_) => Ok(()),
            Err(_) => Err(NoiseError::Key),
        }
    }

    /// The keys of both directions, and the other side's identity if it has proved one.
    pub(crate) fn finish(self) -> Result<(Sealer, Opener, Option<PublicIdentity>), NoiseError> {
        let unfinished = |_| NoiseError::Malformed("an unfinished handshake");
        let state = self.0.into_stateless_transport_mode().map_err(unfinished)?;
        let remote = state.get_remote_static();
        let remote = remote.and_then(PublicIdentity::from_bytes);
        let cipher = Arc::new(state);
        let sealer = Sealer {
            cipher: Arc::clone(&cipher),
            nonce: 0,
        };
        Ok((sealer, Opener { cipher, nonce: 0 }, remote))
    }
}

/// Length in bytes of the sealed form of `plain` bytes.
pub(crate) fn sealed_len(plain: usize) -> usize {
    plain + plain.div_ceil(CHUNK).max(1) * TAG
}

/// Encrypts and authenticates what this side sends on one stream.
pub(crate) struct Sealer {
    cipher: Arc<StatelessTransportState>,
    nonce: u64,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealer")
            .field("nonce", &self.nonce)
            .finish()
    }
}

impl Sealer {
    /// Appends the sealed form of `plain` to `out`.
    pub(crate) fn seal(&mut self, plain: &[u8], out: &mut Vec<u8>) {
        let mut chunks = plain.chunks(CHUNK);
        let first = chunks.next().unwrap_or_default();
        for chunk in std::iter::once(first).chain(chunks) {
            let start = out.len();
            out.resize(start + chunk.len() + TAG, 0);
            let sealed = self
                .cipher
                .write_message(self.nonce, chunk, &mut out[start..]);
            sealed.expect("the buffer fits, and no stream lives for 2^64 messages");
            self.nonce += 1;
        }
    }

    /// The number of the next chunk.
    pub(crate) fn position(&self) -> u64 {
        self.nonce
    }

    /// Goes back to an earlier position. Nothing that was sealed since may have been sent.
    pub(crate) fn rewind(&mut self, position: u64) {
        self.nonce = position;
    }
}

/// Verifies and decrypts what the other side sends on one stream.
pub(crate) struct Opener {
    cipher: Arc<StatelessTransportState>,
    nonce: u64,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Opener")
            .field("nonce", &self.nonce)
            .finish()
    }
}

impl Opener {
    /// Appends the plain form of `sealed` to `out`.
    ///
    /// # Errors
    /// The bytes are not the next bytes that the other side sealed. The stream cannot be used any
    /// more.
    pub(crate) fn open(&mut self, sealed: &[u8], out: &mut Vec<u8>) -> Result<(), NoiseError> {
        let changed = NoiseError::Malformed("bytes that were changed in transit");
        for chunk in sealed.chunks(CHUNK + TAG) {
            let start = out.len();
            out.resize(start + chunk.len().checked_sub(TAG).ok_or(changed)?, 0);
            let opened = self
                .cipher
                .read_message(self.nonce, chunk, &mut out[start..]);
            opened.map_err(|_| changed)?;
            self.nonce += 1;
        }
        Ok(())
    }
}

/// Decodes any bytes as a handshake message; what decodes must survive the round trip.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    if let Some((first, _)) = data.split_first_chunk::<PREAMBLE>()
        && let Ok(len) = opening_len(*first)
    {
        assert!(len <= MAX_OPENING);
    }
    if let Ok(opening) = Opening::decode(data) {
        let bytes = opening.encode();
        assert_eq!(Opening::decode(&bytes[PREAMBLE..]), Ok(opening));
    }
}

/// Both ends of an established stream, for tests.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn pair() -> ((Sealer, Opener), (Sealer, Opener)) {
    let secret = [7; 32];
    let mut a = Handshake::join(Role::Initiator, &secret, 1);
    let mut b = Handshake::join(Role::Acceptor, &secret, 1);
    b.read(&a.write()).expect("the same secret");
    a.read(&b.write()).expect("the same secret");
    let (a_seals, a_opens, _) = a.finish().expect("finished");
    let (b_seals, b_opens, _) = b.finish().expect("finished");
    ((a_seals, a_opens), (b_seals, b_opens))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(byte: u8) -> Key {
        Key::new(&[byte; 32]).expect("32 bytes")
    }

    fn identity() -> Identity {
        Identity::generate().expect("random numbers")
    }

    #[test]
    fn both_sides_prove_the_key_and_their_identity() {
        let (a, b) = (identity(), identity());
        let mut initiator = Handshake::connect(Role::Initiator, &a, &key(1));
        let mut acceptor = Handshake::connect(Role::Acceptor, &b, &key(1));
        acceptor.read(&initiator.write()).expect("message 1");
        initiator.read(&acceptor.write()).expect("message 2");
        acceptor.read(&initiator.write()).expect("message 3");
        let (mut seals, _, found) = initiator.finish().expect("finished");
        assert_eq!(found, Some(b.public()));
        let (_, mut opens, found) = acceptor.finish().expect("finished");
        assert_eq!(found, Some(a.public()));
        for plain in [vec![], vec![1; 5], vec![2; 200_000]] {
            let (mut sealed, mut opened) = (Vec::new(), Vec::new());
            seals.seal(&plain, &mut sealed);
            assert_eq!(sealed.len(), sealed_len(plain.len()));
            opens.open(&sealed, &mut opened).expect("as it was sealed");
            assert_eq!(opened, plain);
        }
    }

    /// The initiator's first message is refused without the key: an acceptor answers no stranger.
    #[test]
    fn the_first_message_proves_the_key() {
        let first = |key: &Key| Handshake::connect(Role::Initiator, &identity(), key).write();
        let read = |message: &[u8]| {
            let mut acceptor = Handshake::connect(Role::Acceptor, &identity(), &key(1));
            acceptor.read(message)
        };
        assert_eq!(read(&first(&key(1))), Ok(()));
        for key in [key(2), Key::none()] {
            assert_eq!(read(&first(&key)), Err(NoiseError::Key));
        }
        assert_eq!(read(&[0; 48]), Err(NoiseError::Key));
        assert_eq!(read(b""), Err(NoiseError::Key));
    }

    #[test]
    fn sealed_bytes_open_once_unchanged_and_in_order() {
        let ((mut seals, _), (_, mut opens)) = pair();
        let mut seal = |plain: &[u8]| {
            let mut sealed = Vec::new();
            seals.seal(plain, &mut sealed);
            sealed
        };
        let (first, second) = (seal(b"first"), seal(b"second"));
        let mut open = |sealed: &[u8]| opens.open(sealed, &mut Vec::new()).is_ok();
        assert!(!open(&second), "out of order");
        let mut changed = first.clone();
        changed[2] ^= 1;
        assert!(!open(&changed));
        assert!(open(&first));
        assert!(!open(&first), "repeated");
        assert!(open(&second));
        assert!(!open(&[1; 15]), "shorter than a tag");
    }

    #[test]
    fn preambles_are_bounded() {
        assert_eq!(opening_len(preamble(VERSION, 5)), Ok(5));
        assert_eq!(opening_len(preamble(9, 5)), Err(NoiseError::Version(9)));
        for len in [0, MAX_OPENING as u32 + 1, u32::MAX] {
            assert!(opening_len(preamble(VERSION, len)).is_err());
        }
        assert!(opening_len(*b"GET / HTTP/1.1").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(data in prop::collection::vec(any::<u8>(), 0..200)) {
            fuzz(&data);
            let mut acceptor = Handshake::connect(Role::Acceptor, &identity(), &key(1));
            prop_assert!(acceptor.read(&data).is_err());
        }
    }
}
