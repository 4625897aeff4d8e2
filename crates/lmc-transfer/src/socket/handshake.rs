//! The handshake, as messages and proofs. No IO.
//!
//! | who | message | proof: HMAC-SHA256 over |
//! |---|---|---|
//! | initiator | [`Message::Hello`] | |
//! | acceptor | [`Message::Challenge`] | hello, acceptor's side |
//! | initiator | [`Message::Proof`] | hello, challenge, its side message |
//! | acceptor | [`Message::Session`] | the above and the session |
//! | initiator, on each further stream | [`Message::Join`] | the above, number of the stream |
//! | acceptor, on the first | [`Message::Welcome`] | the above, its side message |
//!
//! Each proof begins with its own label, and covers both nonces, both names and both
//! incarnations: none can be used again, by the other role, or in another handshake. Without a
//! key the proofs are made with an empty one and prove nothing; a side with a key refuses one
//! without, and the reverse.

use hmac::{Hmac, Mac};
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use crate::{Key, MAX_MESSAGE};

/// The version that this side speaks.
pub(super) const VERSION: u16 = 1;
/// Bytes before a message: magic, version, length.
pub(super) const PREAMBLE: usize = 14;
/// Bytes of a message at most: a side message and what goes with it.
const MAX_LEN: u32 = MAX_MESSAGE as u32 + 1024;
const MAGIC: [u8; 8] = *b"lmc-xfer";

pub(super) type Proof = [u8; 32];

/// What a side says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Side {
    pub(super) id: String,
    /// Random; another one after each start.
    pub(super) incarnation: u64,
    /// Number of the initiator's attempt: a later one takes the place of an earlier one.
    pub(super) attempt: u64,
    /// Bytes of its arena.
    pub(super) arena: u64,
    /// Bytes of one step of an index.
    pub(super) unit: u64,
    /// Streams that it asks for; of the acceptor, those that there will be.
    pub(super) streams: u16,
    /// Milliseconds between two of its signs of life.
    pub(super) keepalive: u32,
    /// Whether it has a key.
    pub(super) keyed: bool,
    pub(super) nonce: [u8; 32],
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    Hello {
        side: Side,
        /// Who is meant.
        to: String,
    },
    Challenge {
        side: Side,
        proof: Proof,
    },
    Proof {
        message: Option<Vec<u8>>,
        proof: Proof,
    },
    Session {
        session: [u8; 16],
        proof: Proof,
    },
    Join {
        session: [u8; 16],
        stream: u16,
        proof: Proof,
    },
    Welcome {
        message: Option<Vec<u8>>,
        proof: Proof,
    },
    Refused(Refusal),
}

/// Why a side does not go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Refusal {
    /// The keys differ.
    Key,
    /// Another was meant than the one who is here.
    WrongPeer { here: String },
    /// Anything else, for people.
    Other(String),
}

/// Bytes that are no message of a handshake.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum HandshakeError {
    /// No preamble of ours, a length beyond all bounds, or not to be parsed.
    Malformed(&'static str),
    /// Theirs.
    Version(u16),
}

impl Message {
    /// Preamble and message.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = preamble(VERSION, 0).to_vec();
        bytes = postcard::to_extend(self, bytes).expect("a vector takes any number of bytes");
        let len = (bytes.len() - PREAMBLE) as u32;
        bytes[..PREAMBLE].copy_from_slice(&preamble(VERSION, len));
        bytes
    }

    /// From what follows the preamble.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, HandshakeError> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            _ => Err(HandshakeError::Malformed("a message that cannot be parsed")),
        }
    }
}

/// What is sent to a side of another version, with length 0: it can be read by all versions.
pub(super) fn preamble(version: u16, len: u32) -> [u8; PREAMBLE] {
    let mut bytes = [0; PREAMBLE];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..10].copy_from_slice(&version.to_le_bytes());
    bytes[10..].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// Bytes of the message that follows.
pub(super) fn message_len(preamble: [u8; PREAMBLE]) -> Result<usize, HandshakeError> {
    if preamble[..8] != MAGIC {
        return Err(HandshakeError::Malformed(
            "other bytes than ours at its start",
        ));
    }
    let version = u16::from_le_bytes(preamble[8..10].try_into().expect("two bytes"));
    if version != VERSION {
        return Err(HandshakeError::Version(version));
    }
    let len = u32::from_le_bytes(preamble[10..].try_into().expect("four bytes"));
    match len {
        1..=MAX_LEN => Ok(len as usize),
        _ => Err(HandshakeError::Malformed(
            "a message that is empty or too long",
        )),
    }
}

/// What a proof is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Label {
    Challenge,
    Proof,
    Session,
    Join,
    Welcome,
}

/// All that was said so far, and the key.
#[derive(Clone, Debug)]
pub(super) struct Transcript {
    mac: Hmac<Sha256>,
}

impl Transcript {
    pub(super) fn new(key: Option<&Key>) -> Self {
        let secret = key.map(Key::secret).unwrap_or_default();
        let mac = Hmac::new_from_slice(secret).expect("HMAC takes keys of any length");
        Self { mac }
    }

    /// Adds what was said.
    pub(super) fn add(&mut self, what: &impl Serialize) {
        let bytes = postcard::to_extend(what, Vec::new());
        let bytes = bytes.expect("a vector takes any number of bytes");
        self.mac.update(&(bytes.len() as u64).to_le_bytes());
        self.mac.update(&bytes);
    }

    fn labelled(&self, label: Label, what: &impl Serialize) -> Hmac<Sha256> {
        let mut copy = self.clone();
        copy.add(what);
        copy.mac
            .update(format!("lmc-transfer {label:?}").as_bytes());
        copy.mac
    }

    /// A proof that all of it was said, and this besides.
    pub(super) fn prove(&self, label: Label, what: &impl Serialize) -> Proof {
        self.labelled(label, what).finalize().into_bytes().into()
    }

    /// Whether the other side has heard and said the same, and has the key.
    pub(super) fn holds(&self, label: Label, what: &impl Serialize, proof: &Proof) -> bool {
        self.labelled(label, what).verify_slice(proof).is_ok()
    }
}

/// Any bytes as a message; what decodes must survive the round trip.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    if let Some((first, _)) = data.split_first_chunk::<PREAMBLE>()
        && let Ok(len) = message_len(*first)
    {
        assert!(len <= MAX_LEN as usize);
    }
    if let Ok(message) = Message::decode(data) {
        let bytes = message.encode();
        assert_eq!(Message::decode(&bytes[PREAMBLE..]), Ok(message));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn side(id: &str) -> Side {
        Side {
            id: id.to_owned(),
            incarnation: 7,
            attempt: 0,
            arena: 1 << 20,
            unit: 4096,
            streams: 4,
            keepalive: 5000,
            keyed: true,
            nonce: [9; 32],
        }
    }

    #[test]
    fn proofs_hold_for_the_same_words_label_and_key_only() {
        let key = Key::new(*b"secret");
        let mut said = Transcript::new(Some(&key));
        said.add(&side("a"));
        let proof = said.prove(Label::Challenge, &side("b"));
        assert!(said.holds(Label::Challenge, &side("b"), &proof));
        assert!(!said.holds(Label::Proof, &side("b"), &proof), "other label");
        assert!(
            !said.holds(Label::Challenge, &side("c"), &proof),
            "other side"
        );
        let mut other = Transcript::new(Some(&Key::new(*b"secret2")));
        other.add(&side("a"));
        assert!(
            !other.holds(Label::Challenge, &side("b"), &proof),
            "other key"
        );
        let mut swapped = Transcript::new(Some(&key));
        swapped.add(&side("b"));
        assert!(
            !swapped.holds(Label::Challenge, &side("a"), &proof),
            "roles"
        );
    }

    #[test]
    fn preambles_are_bounded() {
        assert_eq!(message_len(preamble(VERSION, 5)), Ok(5));
        assert_eq!(message_len(preamble(9, 5)), Err(HandshakeError::Version(9)));
        for len in [0, MAX_LEN + 1, u32::MAX] {
            assert!(message_len(preamble(VERSION, len)).is_err());
        }
        assert!(message_len(*b"GET / HTTP/1.1").is_err());
        let longest = Message::Welcome {
            message: Some(vec![0; MAX_MESSAGE]),
            proof: [0; 32],
        };
        let bytes = longest.encode();
        let first = bytes[..PREAMBLE].try_into().expect("a preamble");
        assert_eq!(message_len(first), Ok(bytes.len() - PREAMBLE));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(data in prop::collection::vec(any::<u8>(), 0..200)) {
            fuzz(&data);
        }

        #[test]
        fn changed_messages_are_survived(
            place in any::<prop::sample::Index>(), flip in any::<u8>()
        ) {
            let hello = Message::Hello { side: side("somebody"), to: "b".to_owned() };
            let mut bytes = hello.encode();
            let place = place.index(bytes.len());
            bytes[place] ^= flip;
            fuzz(&bytes);
            fuzz(&bytes[PREAMBLE..]);
        }
    }
}
