//! Messages of a control connection: bytes and bounds, no IO.
//!
//! The handshake is that of [`crate::session`], with an [`Intro`] of each side as the last
//! payload. Afterwards both send [`Message`]s: the length (u32) of a postcard, and that, sealed.

use serde::{Deserialize, Serialize};

use super::agent::{NixlMemory, Remote};
use super::reach::Reach;
use crate::checks::PeerMemory;
use crate::lease::Range;
use crate::{ConnectError, MAX_BATCH};

/// Bytes of an agent's metadata at most; one registration takes about 500.
pub(super) const MAX_METADATA: usize = 240 << 10;
/// Bytes of a [`Message`] at most: up to 50 bytes for each object.
pub(super) const MAX_FRAME: usize = MAX_BATCH * 50 + 4096;
/// Bytes of an explanation at most, in characters of up to four.
const MAX_REASON: usize = 128;

/// Describes a side's memory to its peer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Intro {
    pub(super) agent: String,
    pub(super) metadata: Vec<u8>,
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) unit: u64,
    /// Bytes of each piece that is registered by itself.
    pub(super) piece: u64,
    /// Number of the GPU whose memory it is.
    pub(super) gpu: Option<u32>,
    pub(super) reach: Reach,
    /// True if any range may be named, without a lease.
    pub(super) open: bool,
    /// True if it may be written to.
    pub(super) writable: bool,
}

impl Intro {
    /// Checks an introduction of the peer with this agent.
    pub(super) fn check(&self, agent: &str) -> Result<(), ConnectError> {
        let sound = self.metadata.len() <= MAX_METADATA
            && self.agent == agent
            && self.unit.is_power_of_two()
            && self.piece > 0
            && self.reach.host.len() <= 256
            && self.base.checked_add(self.len).is_some();
        let fault = || ConnectError::Malformed("an invalid introduction".to_owned());
        sound.then_some(()).ok_or_else(fault)
    }

    /// The memory that it describes.
    pub(super) fn remote(&self) -> Remote {
        Remote {
            agent: self.agent.clone(),
            metadata: self.metadata.clone(),
            base: self.base,
            len: self.len,
            piece: self.piece,
            memory: self.gpu.map_or(NixlMemory::Host, NixlMemory::Gpu),
        }
    }

    pub(super) fn memory(&self, incarnation: u64) -> PeerMemory {
        PeerMemory {
            incarnation,
            arena: self.len,
            unit: self.unit,
        }
    }
}

/// The name of a peer's agent: NIXL keeps what it knows of an agent by its name.
pub(super) fn agent_name(peer: &str, incarnation: u64) -> String {
    format!("{peer}@{incarnation:016x}")
}

/// Set in the numbers of fetches, to distinguish them from the sends of the side that writes.
pub(super) const FETCH: u64 = 1 << 63;
/// Set in the numbers of uses.
pub(super) const USE: u64 = 1 << 62;

/// Messages once both sides know each other. `send` numbers the sends of a sender.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Message {
    /// Nothing is under way that the sender began over connections before this one. It comes
    /// first, once for each time that the sender takes the receiver as a peer.
    Settled,
    /// The sender has objects of these lengths, in bytes.
    Offer { send: u64, tag: u64, lens: Vec<u64> },
    /// The sender has given up before it had offsets, or before it knew of them.
    Withdraw { send: u64 },
    /// The receiver's slots for them, in bytes from its arena's start. From now on the sender
    /// writes there.
    Offsets { send: u64, offsets: Vec<u64> },
    /// The receiver has no such slots: object `object` of `sent` bytes meets `capacity` bytes.
    Unfit {
        send: u64,
        object: u64,
        sent: u64,
        capacity: u64,
    },
    /// The reader has slots at these offsets for these ranges of the other side's memory, which
    /// writes them there as if it sent them: see [`super::reach`]. The reader numbers it, with
    /// [`FETCH`], and gives up after this number of milliseconds.
    Fetch {
        send: u64,
        ranges: Vec<Range>,
        offsets: Vec<u64>,
        millis: u64,
    },
    /// Asks for the right to move leased ranges by itself, until [`Message::Over`] with the same
    /// number, which has [`USE`].
    Use {
        send: u64,
        write: bool,
        ranges: Vec<Range>,
    },
    /// Grants it: where the ranges lie, in bytes from the arena's start. They are pinned.
    Used { send: u64, offsets: Vec<u64> },
    /// Refuses a fetch or a use: the range of this object is not leased, or for reading only.
    Denied {
        send: u64,
        object: u64,
        read_only: bool,
    },
    /// The receiver wants no more.
    Cancel { send: u64 },
    /// The sender has written the first `done` objects and begins no other. With `idle`, nothing
    /// of it is under way; without, the same comes again when that is so.
    Over {
        send: u64,
        done: u64,
        idle: bool,
        reason: Option<String>,
    },
}

/// The bytes of a payload or message.
pub(super) fn encode<T: Serialize>(content: &T) -> Vec<u8> {
    let bytes = postcard::to_extend(content, Vec::new());
    bytes.expect("none of our types fails to serialize")
}

/// Decodes a payload or message; all of its bytes count.
pub(super) fn parse<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, ConnectError> {
    match postcard::take_from_bytes(bytes) {
        Ok((content, [])) => Ok(content),
        Ok((_, rest)) => Err(ConnectError::Malformed(format!(
            "{} bytes after the end of a message",
            rest.len()
        ))),
        Err(error) => Err(ConnectError::Malformed(error.to_string())),
    }
}

/// An explanation, cut to what may be sent.
pub(super) fn reason(text: &str) -> String {
    text.chars().take(MAX_REASON).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::Region;

    #[test]
    fn messages_are_parsed_whole_or_refused() {
        let range = Range {
            region: Region::Lease(u64::MAX),
            slot: u64::MAX,
            offset: 1 << 47,
            len: 1 << 47,
        };
        let message = Message::Fetch {
            send: u64::MAX,
            ranges: vec![range; MAX_BATCH],
            offsets: vec![1 << 47; MAX_BATCH],
            millis: 5,
        };
        let bytes = encode(&message);
        assert!(bytes.len() <= MAX_FRAME, "{} bytes", bytes.len());
        assert_eq!(parse::<Message>(&bytes).expect("a message"), message);
        assert!(parse::<Message>(&bytes[..bytes.len() - 1]).is_err());
        let mut longer = bytes;
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
            let _ = parse::<Intro>(&bytes).map(|intro| intro.check("a").is_ok());
        }
    }
}
