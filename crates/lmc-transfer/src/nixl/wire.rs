//! What is said on a control connection: bytes and bounds, no IO.
//!
//! | step | from | bytes |
//! |---|---|---|
//! | 1 | both | [`Hello`]: `lmcn`, version (u16), keyed (u8), 0 (u8), nonce (32); little-endian |
//! | 2 | who connects | frame of an [`Intro`], signed |
//! | 3 | who answers | frame of an [`Answer`], signed |
//! | 4 | both | frames of [`Message`]s |
//!
//! A frame is its length (u32) and that many bytes of postcard; a signed one has HMAC-SHA-256 of
//! both nonces, the step and the bytes in between (32 bytes, zeros where there is no key).

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::agent::{NixlMemory, Remote};
use super::reach::Reach;
use crate::{ConnectError, Key, MAX_BATCH, MAX_MESSAGE, PeerId};

/// Version of all that follows the first six bytes.
pub(super) const VERSION: u16 = 1;
const MAGIC: [u8; 4] = *b"lmcn";
/// Bytes of a [`Hello`].
pub(super) const HELLO: usize = 40;
/// Bytes of a signature.
pub(super) const SIGNATURE: usize = 32;
/// Bytes of an agent's metadata at most; one registration takes about 500.
pub(super) const MAX_METADATA: usize = 256 << 10;
/// Bytes of an [`Intro`] or [`Answer`] at most.
pub(super) const MAX_INTRO: usize = MAX_METADATA + MAX_MESSAGE + 4096;
/// Bytes of a [`Message`] at most: three numbers of up to 10 bytes for each object.
pub(super) const MAX_FRAME: usize = 3 * MAX_BATCH * 10 + 4096;
/// Bytes of an explanation at most.
const MAX_REASON: usize = 512;

/// The first that each side says. Its first six bytes never change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u16,
    pub(super) keyed: bool,
    pub(super) nonce: [u8; 32],
}

impl Hello {
    pub(super) fn bytes(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6] = self.keyed.into();
        bytes[8..].copy_from_slice(&self.nonce);
        bytes
    }

    /// Of the other side's bytes, where it speaks as `self` does.
    pub(super) fn accept(&self, bytes: &[u8; HELLO]) -> Result<Self, ConnectError> {
        if bytes[..4] != MAGIC {
            let found = format!("it begins with {:02x?}", &bytes[..4]);
            return Err(ConnectError::Malformed(found));
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != self.version {
            return Err(ConnectError::Version {
                ours: self.version,
                theirs: version,
            });
        }
        let mut nonce = [0; 32];
        nonce.copy_from_slice(&bytes[8..]);
        let keyed = bytes[6] != 0;
        if keyed != self.keyed {
            return Err(ConnectError::Key);
        }
        Ok(Self {
            version,
            keyed,
            nonce,
        })
    }
}

/// Who one is, and how one's memory is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Intro {
    pub(super) peer: String,
    /// Whom one takes the other side for; only when one connects.
    pub(super) wanted: Option<String>,
    /// Drawn when the channel was made.
    pub(super) incarnation: u64,
    pub(super) agent: String,
    pub(super) metadata: Vec<u8>,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) unit: u64,
    /// Number of the GPU whose memory it is.
    pub(super) gpu: Option<u32>,
    pub(super) reach: Reach,
    /// The side message.
    pub(super) message: Option<Vec<u8>>,
}

impl Intro {
    /// Whether all of it is within its bounds.
    pub(super) fn check(&self) -> Result<(), ConnectError> {
        let message = self.message.as_ref().map_or(0, Vec::len);
        if message > MAX_MESSAGE {
            return Err(ConnectError::Message { found: message });
        }
        let sound = self.metadata.len() <= MAX_METADATA
            && self.peer.parse::<PeerId>().is_ok()
            && self.agent == agent_name(&self.peer, self.incarnation)
            && self.unit.is_power_of_two()
            && self.reach.host.len() <= 256
            && self.base.checked_add(self.len).is_some();
        let fault = || ConnectError::Malformed("an introduction that cannot be".to_owned());
        sound.then_some(()).ok_or_else(fault)
    }

    /// The memory that it tells of.
    pub(super) fn remote(&self) -> Remote {
        Remote {
            agent: self.agent.clone(),
            metadata: self.metadata.clone(),
            base: self.base,
            len: self.len,
            memory: self.gpu.map_or(NixlMemory::Host, NixlMemory::Gpu),
        }
    }
}

/// What the agent of a peer is called: NIXL keeps what it knows of an agent by its name.
pub(super) fn agent_name(peer: &str, incarnation: u64) -> String {
    format!("{peer}@{incarnation:016x}")
}

/// What is answered to an [`Intro`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    Welcome(Intro),
    WrongKey,
    WrongPeer { found: String },
    Refused(String),
}

/// Set in the numbers of fetches, which tells them from the sends of who writes.
pub(super) const FETCH: u64 = 1 << 63;

/// What is said once both sides know each other. `send` numbers the sends of who sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// The sender has objects of these lengths, in bytes.
    Offer { send: u64, tag: u64, lens: Vec<u64> },
    /// The sender has given up before it had places, or before it knew of them.
    Withdraw { send: u64 },
    /// The receiver's places for them, in bytes from its arena's start. From now on the sender
    /// writes there.
    Places { send: u64, offsets: Vec<u64> },
    /// The receiver has no such places: at `place` it has `room` bytes for `sent`.
    Unfit {
        send: u64,
        place: u64,
        sent: u64,
        room: u64,
    },
    /// The reader has these places for objects at these offsets of the other side's arena, which
    /// writes them there as if it sent them: see [`super::reach`]. The reader numbers it, with
    /// [`FETCH`].
    Fetch {
        send: u64,
        offsets: Vec<u64>,
        lens: Vec<u64>,
        places: Vec<u64>,
    },
    /// The receiver wants no more.
    Cancel { send: u64 },
    /// The sender has written the first `done` objects and begins no other. With `quiet`, nothing
    /// of it is under way; without, the same comes again when that is so.
    Over {
        send: u64,
        done: u64,
        quiet: bool,
        reason: Option<String>,
    },
}

/// Bytes of a frame, its length first.
pub(super) fn frame<T: Serialize>(content: &T) -> Vec<u8> {
    let bytes = postcard::to_extend(content, vec![0; 4]);
    let mut bytes = bytes.expect("none of our types fails to serialize");
    let len = u32::try_from(bytes.len() - 4).expect("frames are bounded");
    bytes[..4].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// What a frame says; all of its bytes count.
pub(super) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, ConnectError> {
    match postcard::take_from_bytes(bytes) {
        Ok((content, [])) => Ok(content),
        Ok((_, rest)) => Err(ConnectError::Malformed(format!(
            "{} bytes after the end of a frame",
            rest.len()
        ))),
        Err(error) => Err(ConnectError::Malformed(error.to_string())),
    }
}

/// An explanation, cut to what may be sent.
pub(super) fn reason(text: &str) -> String {
    text.chars().take(MAX_REASON / 4).collect()
}

/// Whose words are signed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Step {
    Intro,
    Answer,
}

/// What both sides of a handshake sign with.
#[derive(Debug, Clone)]
pub(super) struct Signer {
    key: Option<Key>,
    /// Of who connects, and of who answers.
    nonces: [[u8; 32]; 2],
}

impl Signer {
    pub(super) fn new(key: Option<Key>, connects: &Hello, answers: &Hello) -> Self {
        let nonces = [connects.nonce, answers.nonce];
        Self { key, nonces }
    }

    fn mac(&self, step: Step, bytes: &[u8]) -> Option<Hmac<Sha256>> {
        let key = self.key.as_ref()?;
        let mut mac = Hmac::<Sha256>::new_from_slice(key.secret()).expect("a key of any length");
        mac.update(match step {
            Step::Intro => b"lmc nixl handshake: intro",
            Step::Answer => b"lmc nixl handshake: answer",
        });
        mac.update(&self.nonces[0]);
        mac.update(&self.nonces[1]);
        mac.update(bytes);
        Some(mac)
    }

    pub(super) fn sign(&self, step: Step, bytes: &[u8]) -> [u8; SIGNATURE] {
        self.mac(step, bytes)
            .map_or([0; SIGNATURE], |mac| mac.finalize().into_bytes().into())
    }

    /// Whether the other side knows the key; compared in constant time.
    pub(super) fn verify(&self, step: Step, bytes: &[u8], signature: &[u8; SIGNATURE]) -> bool {
        self.mac(step, bytes)
            .is_none_or(|mac| mac.verify_slice(signature).is_ok())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(nonce: u8) -> Hello {
        Hello {
            version: VERSION,
            keyed: true,
            nonce: [nonce; 32],
        }
    }

    #[test]
    fn a_hello_of_another_version_kind_or_key_is_refused() {
        let ours = hello(1);
        let theirs = hello(2);
        assert_eq!(ours.accept(&theirs.bytes()).expect("the same"), theirs);
        let mut old = theirs;
        old.version = 7;
        let error = ours.accept(&old.bytes()).expect_err("another version");
        assert!(matches!(
            error,
            ConnectError::Version { ours: 1, theirs: 7 }
        ));
        let mut open = theirs;
        open.keyed = false;
        let error = ours.accept(&open.bytes()).expect_err("no key");
        assert!(matches!(error, ConnectError::Key));
        let mut http = [0; HELLO];
        http[..4].copy_from_slice(b"GET ");
        let error = ours.accept(&http).expect_err("no hello");
        assert!(matches!(error, ConnectError::Malformed(_)));
    }

    #[test]
    fn a_signature_holds_for_its_key_step_nonces_and_bytes_only() {
        let key = |text: &[u8]| Some(Key::new(text));
        let (a, b) = (hello(1), hello(2));
        let signer = Signer::new(key(b"secret"), &a, &b);
        let signature = signer.sign(Step::Intro, b"words");
        assert!(signer.verify(Step::Intro, b"words", &signature));
        assert!(!signer.verify(Step::Answer, b"words", &signature));
        assert!(!signer.verify(Step::Intro, b"sword", &signature));
        let others = [
            Signer::new(key(b"another"), &a, &b),
            Signer::new(key(b"secret"), &b, &a),
            Signer::new(key(b"secret"), &a, &hello(3)),
        ];
        for other in others {
            assert!(!other.verify(Step::Intro, b"words", &signature));
        }
    }

    #[test]
    fn frames_are_parsed_whole_or_refused() {
        let message = Message::Offer {
            send: 3,
            tag: u64::MAX,
            lens: vec![u64::MAX; MAX_BATCH],
        };
        let bytes = frame(&message);
        assert!(bytes.len() - 4 <= MAX_FRAME);
        assert_eq!(parse::<Message>(&bytes[4..]).expect("a message"), message);
        assert!(parse::<Message>(&bytes[4..bytes.len() - 1]).is_err());
        let mut longer = bytes[4..].to_vec();
        longer.push(0);
        assert!(parse::<Message>(&longer).is_err());
        // A vector that claims more elements than there are bytes.
        assert!(parse::<Message>(&[0, 1, 1, 0xff, 0xff, 0xff, 0xff, 0x0f]).is_err());
    }

    #[test]
    fn random_bytes_are_no_panic() {
        let mut seed = 0x1234_5678_9abc_def1_u64;
        for len in 0..400 {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    seed ^= seed << 13;
                    seed ^= seed >> 7;
                    seed ^= seed << 17;
                    // Small numbers are more often a beginning of something.
                    if seed & 1 == 0 {
                        (seed >> 8) as u8
                    } else {
                        (seed >> 8) as u8 & 7
                    }
                })
                .collect();
            let _ = parse::<Message>(&bytes);
            let _ = parse::<Answer>(&bytes).map(|answer| match answer {
                Answer::Welcome(intro) => intro.check().is_ok(),
                _ => false,
            });
        }
    }
}
