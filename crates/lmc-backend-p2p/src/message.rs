//! Messages of the peer protocol, as bytes. No I/O.
//!
//! A frame is its kind (u16), the length of its body (u32), both little endian, and the body, a message in
//! postcard encoding. A request is one frame, and so is its reply. The reply's kind is that of the request
//! with [`REPLY`] set.
//!
//! Each message that names chunks is [`Stamped`] with the digest of its sender's clears, and so is its
//! answer. Sides with different digests pass no chunk, and exchange their maps, page by page
//! ([`ClearsPage`]).
//!
//! The protocol grows in two ways. A request of an unknown kind is answered with [`Reply::Unsupported`]. A
//! body grows at its end only, and a side ignores the bytes after the fields that it knows; a field that both
//! sides must know has a feature bit in [`Hello`]. Any other change is a new version.

use std::sync::Arc;

use lmc_backend::HostChunk;
use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use lmc_transfer::Index;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::directory::{Announce, Announced, Find, Found};

pub(crate) mod bounds;
mod clears;
mod grown;

use bounds::bound;
pub use bounds::{MAX_BODY, MAX_KEYS, MAX_TEXT, MessageError};
pub use clears::{ClearsPage, MAX_PAGES, PAGE_ENTRIES, Stamped};
use grown::Body;
pub use grown::{FEATURE_LATE_DIGESTS, LATE_DIGEST};

/// Newest protocol version that this crate speaks.
pub const VERSION: u16 = 2;
/// Oldest protocol version that this crate speaks.
pub const OLDEST_VERSION: u16 = VERSION;
/// Most spaces that a [`Hello`] describes.
pub const MAX_SPACES: usize = 64;
/// Most holders that an owner without capacity names.
pub const MAX_HOLDERS: usize = 4;
/// Feature bit of a [`Hello`]: the side is a directory, and has no chunks.
pub const FEATURE_DIRECTORY: u64 = 1 << 8;
/// Bit that is set in the kind of a reply.
pub const REPLY: u16 = 0x8000;

/// Kind of [`Reply::Refused`].
const REFUSED: u16 = 0xfffe;
/// Kind of [`Reply::Unsupported`].
const UNSUPPORTED: u16 = 0xffff;
const HEADER: usize = 6;

/// Chunks of one prompt: keys that differ only in their hashes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyBatch {
    space: [u8; 16],
    kv_rank: u16,
    group: u16,
    /// Hashes of 32 bytes each, without gaps.
    hashes: Vec<u8>,
    /// Id of the request that computes the prompt and that the sender waits for; in [`Request::Locate`] only.
    #[serde(skip)]
    pub awaited: Option<Arc<str>>,
}

impl KeyBatch {
    /// Returns the leading keys that fit into one batch, and their number: those with the same space, rank
    /// and group as the first key, at most [`MAX_KEYS`].
    pub fn leading(keys: &[ChunkKey]) -> Option<(Self, usize)> {
        let first = keys.first()?;
        let prompt = |key: &ChunkKey| (key.space, key.kv_rank, key.group);
        let fits = keys.iter().take(MAX_KEYS);
        let fits: Vec<&ChunkKey> = fits
            .take_while(|key| prompt(key) == prompt(first))
            .collect();
        let batch = Self {
            space: *first.space.as_bytes(),
            kv_rank: first.kv_rank,
            group: first.group,
            hashes: fits.iter().flat_map(|key| *key.hash.as_bytes()).collect(),
            awaited: None,
        };
        Some((batch, fits.len()))
    }

    /// Returns the keys.
    pub fn keys(&self) -> Vec<ChunkKey> {
        let (hashes, _) = self.hashes.as_chunks::<32>();
        let key = |&hash: &[u8; 32]| ChunkKey {
            space: SpaceId::new(self.space),
            kv_rank: self.kv_rank,
            group: self.group,
            hash: ChunkHash::new(hash),
        };
        hashes.iter().map(key).collect()
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.hashes.len() / 32
    }

    /// Returns true if there are no keys.
    pub fn is_empty(&self) -> bool {
        self.hashes.is_empty()
    }

    fn check(&self) -> Result<(), MessageError> {
        let whole = self.hashes.len().is_multiple_of(32) && self.len() <= MAX_KEYS;
        whole.then_some(()).ok_or(MessageError::Bounds("keys"))
    }
}

/// Description of a space for an operator: it shows which fields differ between two peers with the same model
/// and different spaces. Texts are truncated to [`MAX_TEXT`] bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpaceNote {
    /// The space's id.
    pub space: [u8; 16],
    /// Name under which the engine serves its model.
    pub model: String,
    /// Number of KV ranks that together hold a chunk.
    pub world_size: u32,
    /// Fingerprint of the chunks' layout.
    pub layout: [u8; 16],
    /// Element type.
    pub dtype: String,
    /// Digest of the tenant's salt under the shared key; zeroes without a salt.
    pub salt: [u8; 16],
    /// Text that the operator added to the identity.
    pub identity: String,
}

/// First message of each side after the connect.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Oldest version that the side speaks.
    pub oldest: u16,
    /// Newest version that the side speaks.
    pub newest: u16,
    /// Extensions that the side understands.
    pub features: u64,
    /// Name of the side, for an operator.
    pub name: String,
    /// Address at which the side listens for peers.
    pub address: String,
    /// Number of tokens in a chunk.
    pub chunk_size: u32,
    /// Name of the algorithm of prefix hashes.
    pub algorithm: String,
    /// Digest of the clears that the side has carried out.
    #[serde(with = "clears::digest")]
    pub clears: ClearsId,
    /// The live spaces of the side.
    pub spaces: Vec<SpaceNote>,
    /// True while the side accepts no chunks, because it is to be stopped. Older sides do not send it.
    #[serde(skip)]
    pub is_draining: bool,
}

/// A request to a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// First message of the side that connects.
    Hello(Hello),
    /// Asks which chunks the peer has.
    Locate(Stamped<KeyBatch>),
    /// Asks for leases of chunks in the peer's memory.
    Lease(Stamped<Lease>),
    /// Extends a lease.
    Renew(Renew),
    /// Ends a lease, and asks whether it was valid until now.
    Release(Release),
    /// Announces that the sender now holds chunks that it read from the peer.
    Holds(Stamped<KeyBatch>),
    /// Asks the peer to read chunks from the sender, on an operator's order.
    Copy(Stamped<KeyBatch>),
    /// Asks the peer to read chunks from the sender, for a request that will come to the peer.
    Push(Stamped<Push>),
    /// Passes clears on, and asks for those of the peer.
    Clears(ClearsPage),
    /// Announces to a directory which chunks the sender can lend.
    Announce(Stamped<Announce>),
    /// Asks a directory which members have chunks.
    Find(Stamped<Find>),
    /// Asks for a description of what the peer holds.
    Describe(Describe),
}

/// Fields of [`Request::Lease`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// The chunks.
    pub keys: KeyBatch,
    /// Duration of the lease in milliseconds, counted by the owner from the grant.
    pub duration_ms: u32,
    /// Time in milliseconds that the owner may wait until it can lend more, or has promoted chunks from its
    /// disk.
    pub wait_ms: u32,
}

/// Fields of [`Request::Renew`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renew {
    /// Number of the lease.
    pub lease: u64,
    /// Duration in milliseconds, counted by the owner from its answer.
    pub duration_ms: u32,
}

/// Fields of [`Request::Release`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// Number of the lease.
    pub lease: u64,
}

/// Fields of [`Reply::Released`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// For each chunk of the lease, true if it was leased without a gap until now.
    pub held: Vec<bool>,
    /// For each chunk of the lease, its digest; present if the lease had a [`LATE_DIGEST`].
    #[serde(skip)]
    pub digests: Vec<u64>,
}

/// Fields of [`Request::Push`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    /// The chunks, in prompt order.
    pub keys: KeyBatch,
    /// Payload bytes of each chunk.
    pub chunk_bytes: u64,
    /// Hash of the chunk before the first one; none for the first chunk of a prompt.
    pub parent: Option<[u8; 32]>,
}

/// Fields of [`Reply::Pushed`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pushed {
    /// Number of leading chunks that the peer has in memory.
    pub chunks: u32,
    /// True if the peer wants the other chunks, but had no memory, capacity or time for them.
    pub is_wanted: bool,
}

/// Fields of [`Request::Describe`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Describe {
    /// [`Described::digest`] of the spaces that the sender knows; 0 if it knows none.
    pub digest: u64,
}

/// An answer of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// First message of the side that accepted.
    Hello(Hello),
    /// The state of each chunk.
    Located(Stamped<Located>),
    /// The leased chunks.
    Leased(Stamped<Leased>),
    /// True if the lease was valid and continues.
    Renewed(bool),
    /// The lease has ended.
    Released(Released),
    /// The peer recorded it.
    Noted(()),
    /// Number of the chunks that the peer has in memory, after it has read those that it could.
    Copying(u32),
    /// The peer has read the chunks that it could.
    Pushed(Pushed),
    /// Clears of the answering side, which has carried out those of the request.
    Cleared(ClearsPage),
    /// The directory's answer to an announcement.
    Announced(Stamped<Announced>),
    /// Members that may have the chunks.
    Found(Stamped<Found>),
    /// Content of the answering side, for an operator.
    Described(Described),
    /// The request was understood, but is not carried out.
    Refused(Refusal),
    /// The answering side does not know the kind of the request.
    Unsupported(u16),
}

/// The state of one chunk at a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChunkState {
    /// The peer does not have the chunk.
    Absent,
    /// An engine of the peer's host is writing the chunk.
    Writing,
    /// The peer has the chunk in memory.
    Memory {
        /// Payload bytes.
        len: u64,
    },
    /// The peer has the chunk on disk.
    Disk {
        /// Payload bytes.
        len: u64,
    },
}

impl From<HostChunk> for ChunkState {
    fn from(state: HostChunk) -> Self {
        match state {
            HostChunk::Memory { len } => Self::Memory { len },
            HostChunk::Lower { len } => Self::Disk { len },
            HostChunk::Writing => Self::Writing,
            HostChunk::Absent => Self::Absent,
        }
    }
}

impl ChunkState {
    /// Returns the payload bytes of a chunk that is present.
    pub fn bytes(self) -> Option<u64> {
        match self {
            Self::Memory { len } | Self::Disk { len } => Some(len),
            Self::Absent | Self::Writing => None,
        }
    }
}

/// Fields of [`Reply::Located`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Located {
    /// The state of each chunk, in the order of the keys.
    pub states: Vec<ChunkState>,
    /// Bytes that the owner has leased to peers, as a fraction of its limit in units of 1/255.
    pub load: u8,
    /// True if the request that the sender waits for has ended, so that nothing more is stored for it.
    #[serde(skip)]
    pub is_over: bool,
}

impl Located {
    /// Returns true if the peer has every chunk in memory.
    pub fn has_all(&self) -> bool {
        let in_memory = |state: &ChunkState| matches!(state, ChunkState::Memory { .. });
        self.states.iter().all(in_memory)
    }
}

/// The answer for one chunk of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ChunkLease {
    /// The peer does not have the chunk in memory.
    Absent,
    /// The peer must not lease more now.
    Busy,
    /// The chunk may be read.
    Granted {
        /// Location in the peer's memory.
        index: Index,
        /// Payload bytes.
        len: u64,
        /// [`chunk_digest`](crate::chunk_digest) of key and bytes, or [`LATE_DIGEST`].
        digest: u64,
    },
}

/// Fields of [`Reply::Leased`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leased {
    /// Number of the lease; 0 if no chunk was granted.
    pub lease: u64,
    /// Duration in milliseconds, counted by the owner from now on.
    pub duration_ms: u32,
    /// The answer for each chunk, in the order of the keys.
    pub chunks: Vec<ChunkLease>,
    /// Other peers that hold chunks for which this peer is busy: the addresses at which they listen.
    pub holders: Vec<Holder>,
}

/// Fields of [`Reply::Described`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Described {
    /// Changes when the spaces change; never 0.
    pub digest: u64,
    /// Chunks in memory.
    pub chunks: u64,
    /// Payload bytes of the chunks in memory.
    pub bytes: u64,
    /// Bytes of the memory for chunks.
    pub pool: u64,
    /// The live spaces; none if the sender knows them, according to its digest.
    pub spaces: Vec<SpaceNote>,
    /// As [`Hello::is_draining`].
    #[serde(skip)]
    pub is_draining: bool,
}

/// A peer that holds chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Address at which the peer listens.
    pub address: String,
}

/// Reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, Error)]
pub enum Refusal {
    /// The two sides have no version of the protocol in common.
    #[error("no common version of the peer protocol: this side speaks {oldest} to {newest}")]
    Version {
        /// Oldest version of the refusing side.
        oldest: u16,
        /// Newest version of the refusing side.
        newest: u16,
    },
    /// The two sides have different chunk sizes.
    #[error("chunks of this side have {0} tokens")]
    ChunkSize(u32),
    /// The two sides hash prompts differently.
    #[error("prefix hashes of this side are {0}")]
    Algorithm(String),
    /// The sender has sent no [`Hello`].
    #[error("expected a hello first")]
    NoHello,
    /// The request could not be parsed.
    #[error("the request could not be parsed")]
    Malformed,
    /// The sender has more requests in progress than the answering side accepts.
    #[error("too many requests under way")]
    TooMany,
    /// The answering side is stopping.
    #[error("the peer is stopping")]
    Closing,
}

impl Refusal {
    /// Returns the refusal of a request that cannot be parsed. The body of a hello of another version may
    /// differ, but it begins with its versions in any case.
    pub(crate) fn of_unparsed(request: &[u8]) -> Self {
        let versions = match split(request) {
            Ok((1, body)) => postcard::take_from_bytes::<(u16, u16)>(body).ok(),
            _ => None,
        };
        match versions {
            Some(((oldest, newest), _)) if oldest > VERSION || newest < OLDEST_VERSION => {
                Self::Version {
                    oldest: OLDEST_VERSION,
                    newest: VERSION,
                }
            }
            _ => Self::Malformed,
        }
    }
}

macro_rules! kinds {
    ($($number:literal $request:ident $asked:ty, $reply:ident $answered:ty;)*) => {
        impl Request {
            /// Returns the request's kind.
            pub fn kind(&self) -> u16 {
                match self {
                    $(Self::$request(_) => $number,)*
                }
            }

            /// Returns the frame of the request.
            ///
            /// # Errors
            /// [`MessageError::TooLong`].
            pub fn to_bytes(&self) -> Result<Vec<u8>, MessageError> {
                match self {
                    $(Self::$request(body) => frame($number, body),)*
                }
            }

            /// Parses the frame of a request.
            ///
            /// # Errors
            /// [`MessageError`].
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, MessageError> {
                let (kind, body) = split(bytes)?;
                let request = match kind {
                    $($number => Self::$request(parse::<$asked>(kind, body)?),)*
                    _ => return Err(MessageError::Kind(kind)),
                };
                request.check()?;
                Ok(request)
            }
        }

        impl Reply {
            /// Returns the frame of the reply.
            ///
            /// # Errors
            /// [`MessageError::TooLong`].
            pub fn to_bytes(&self) -> Result<Vec<u8>, MessageError> {
                match self {
                    $(Self::$reply(body) => frame(REPLY | $number, body),)*
                    Self::Refused(refusal) => frame(REFUSED, refusal),
                    Self::Unsupported(kind) => frame(UNSUPPORTED, kind),
                }
            }

            /// Parses the frame of a reply.
            ///
            /// # Errors
            /// [`MessageError`].
            pub fn from_bytes(bytes: &[u8]) -> Result<Self, MessageError> {
                let (kind, body) = split(bytes)?;
                let reply = match kind {
                    $(_ if kind == REPLY | $number => Self::$reply(parse::<$answered>(kind, body)?),)*
                    REFUSED => Self::Refused(parse(kind, body)?),
                    UNSUPPORTED => Self::Unsupported(parse(kind, body)?),
                    _ => return Err(MessageError::Kind(kind)),
                };
                reply.check()?;
                Ok(reply)
            }
        }
    };
}

kinds! {
    1 Hello Hello, Hello Hello;
    2 Locate Stamped<KeyBatch>, Located Stamped<Located>;
    3 Lease Stamped<Lease>, Leased Stamped<Leased>;
    4 Renew Renew, Renewed bool;
    5 Release Release, Released Released;
    6 Holds Stamped<KeyBatch>, Noted ();
    7 Copy Stamped<KeyBatch>, Copying u32;
    8 Clears ClearsPage, Cleared ClearsPage;
    9 Announce Stamped<Announce>, Announced Stamped<Announced>;
    10 Find Stamped<Find>, Found Stamped<Found>;
    11 Describe Describe, Described Described;
    12 Push Stamped<Push>, Pushed Pushed;
}

fn frame(kind: u16, body: &impl Body) -> Result<Vec<u8>, MessageError> {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend([0; 4]);
    let bytes = postcard::to_extend(body, bytes);
    let bytes = bytes.and_then(|bytes| body.write_tail(bytes));
    let mut bytes = bytes.map_err(|_| MessageError::Body(kind))?;
    let len = bytes.len() - HEADER;
    if len > MAX_BODY {
        return Err(MessageError::TooLong(len));
    }
    bytes[2..HEADER].copy_from_slice(&(len as u32).to_le_bytes());
    Ok(bytes)
}

fn split(bytes: &[u8]) -> Result<(u16, &[u8]), MessageError> {
    let length = |expected| MessageError::Length {
        expected,
        found: bytes.len(),
    };
    let (header, body) = bytes
        .split_first_chunk::<HEADER>()
        .ok_or_else(|| length(HEADER))?;
    let [k0, k1, l0, l1, l2, l3] = *header;
    let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
    if len > MAX_BODY {
        return Err(MessageError::TooLong(len));
    }
    if body.len() != len {
        return Err(length(HEADER + len));
    }
    Ok((u16::from_le_bytes([k0, k1]), body))
}

/// Parses a body; bytes after the known fields come from a newer peer, and are ignored.
fn parse<T: Body>(kind: u16, body: &[u8]) -> Result<T, MessageError> {
    let parsed = postcard::take_from_bytes::<T>(body);
    let parsed = parsed.and_then(|(mut message, tail)| message.read_tail(tail).map(|()| message));
    parsed.map_err(|_| MessageError::Body(kind))
}

fn check_spaces(spaces: &[SpaceNote]) -> Result<(), MessageError> {
    bound(spaces.len() <= MAX_SPACES, "spaces")?;
    let texts = |space: &SpaceNote| check_texts([&space.model, &space.dtype, &space.identity]);
    spaces.iter().try_for_each(texts)
}

fn check_texts(texts: [&String; 3]) -> Result<(), MessageError> {
    let short = |text: &String| text.len() <= MAX_TEXT;
    bound(texts.into_iter().all(short), "text")
}

impl Hello {
    fn check(&self) -> Result<(), MessageError> {
        bound(self.oldest <= self.newest, "versions")?;
        check_spaces(&self.spaces)?;
        check_texts([&self.name, &self.address, &self.algorithm])
    }

    /// Returns the newest version that both sides speak; `None` if there is none.
    pub fn common_version(&self, oldest: u16, newest: u16) -> Option<u16> {
        let common = self.newest.min(newest);
        (common >= self.oldest.max(oldest)).then_some(common)
    }
}

impl Request {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Hello(hello) => hello.check(),
            Self::Locate(keys) | Self::Holds(keys) | Self::Copy(keys) => keys.message.check(),
            Self::Lease(lease) => lease.message.keys.check(),
            Self::Push(push) => push.message.keys.check(),
            Self::Clears(page) => page.check(),
            Self::Announce(announce) => announce.message.check(),
            Self::Find(find) => find.message.check(),
            Self::Renew(_) | Self::Release(_) | Self::Describe(_) => Ok(()),
        }
    }
}

impl Reply {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Hello(hello) => hello.check(),
            Self::Located(located) => bound(located.message.states.len() <= MAX_KEYS, "states"),
            Self::Leased(Stamped {
                message: leased, ..
            }) => {
                bound(leased.chunks.len() <= MAX_KEYS, "chunks")?;
                bound(leased.holders.len() <= MAX_HOLDERS, "holders")?;
                let short = |holder: &Holder| holder.address.len() <= MAX_TEXT;
                bound(leased.holders.iter().all(short), "text")
            }
            Self::Released(Released { held, digests }) => {
                bound(held.len().max(digests.len()) <= MAX_KEYS, "chunks")
            }
            Self::Cleared(page) => page.check(),
            Self::Announced(answer) => answer.message.check(),
            Self::Found(found) => found.message.check(),
            Self::Described(described) => check_spaces(&described.spaces),
            Self::Refused(Refusal::Algorithm(text)) => bound(text.len() <= MAX_TEXT, "text"),
            _ => Ok(()),
        }
    }
}
