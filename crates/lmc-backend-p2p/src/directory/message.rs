//! Messages between a member and a directory, as bodies of the peer protocol.

use serde::{Deserialize, Serialize};

use super::buckets::{FINGERPRINT_BYTES, Fingerprint, SetDigest};
use crate::message::bounds::{MAX_KEYS, MAX_TEXT, MessageError, bound};

/// Most fingerprints of one announcement: a directory needs a fifth of a millisecond for them.
pub const MAX_ANNOUNCED: usize = 2048;
/// Generations from this number on are refused, because none could follow them.
const MAX_GENERATION: u64 = 1 << 48;
/// Most members that a directory names for a prompt.
pub const MAX_CANDIDATES: usize = 4;

/// A list of fingerprints, encoded without gaps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprints(Vec<u8>);

impl FromIterator<Fingerprint> for Fingerprints {
    fn from_iter<I: IntoIterator<Item = Fingerprint>>(fingerprints: I) -> Self {
        let bytes = fingerprints.into_iter().flat_map(Fingerprint::to_bytes);
        Self(bytes.collect())
    }
}

impl Fingerprints {
    /// Returns the fingerprints.
    pub fn iter(&self) -> impl Iterator<Item = Fingerprint> {
        let (whole, _) = self.0.as_chunks::<FINGERPRINT_BYTES>();
        whole.iter().copied().map(Fingerprint::from_bytes)
    }

    /// Returns the number of fingerprints.
    pub fn len(&self) -> usize {
        self.0.len() / FINGERPRINT_BYTES
    }

    /// Returns true if there are no fingerprints.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn check(&self, most: usize) -> Result<(), MessageError> {
        let whole = self.0.len().is_multiple_of(FINGERPRINT_BYTES) && self.len() <= most;
        bound(whole, "fingerprints")
    }
}

/// Announces the chunks that the sender can lend. Without chunks, it shows that the sender is alive.
///
/// A generation announces all chunks from the start. Its announcements are numbered from 1, and a directory
/// applies each of them once and in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announce {
    /// Number of the generation; announcements of earlier generations are void.
    pub generation: u64,
    /// Number of the announcement within its generation.
    pub sequence: u64,
    /// Chunks that the sender can lend from now on.
    pub added: Fingerprints,
    /// Chunks that the sender can no longer lend.
    pub removed: Fingerprints,
    /// Digest of everything announced in this generation, this announcement included, if nothing is left to
    /// announce.
    pub digest: Option<SetDigest>,
}

impl Announce {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        bound(self.generation < MAX_GENERATION, "generation")?;
        self.added.check(MAX_ANNOUNCED)?;
        self.removed.check(MAX_ANNOUNCED)
    }
}

/// Answer to an [`Announce`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Announced {
    /// The announcement was applied.
    Applied,
    /// The directory lacks an earlier announcement, or has other entries: it expects a generation with a
    /// number above `known`.
    Restart {
        /// Number of the newest generation that the directory knows.
        known: u64,
    },
    /// A new generation cannot begin yet, because the previous one is still being removed.
    Busy,
    /// The directory is full: it applied all removals, but not all additions.
    Full {
        /// Most entries that the directory keeps, for this member or in total.
        limit: u64,
    },
}

/// Asks which members have chunks of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Find {
    /// The chunks, in prompt order.
    pub keys: Fingerprints,
}

impl Announced {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        let known = match self {
            Self::Restart { known } => *known,
            _ => 0,
        };
        bound(known < MAX_GENERATION, "generation")
    }
}

impl Find {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        self.keys.check(MAX_KEYS)
    }
}

/// Answer to a [`Find`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// False while the directory has only recently started: members may have chunks that they have not
    /// announced yet.
    pub settled: bool,
    /// Members that have leading chunks, the best one first.
    pub candidates: Vec<Candidate>,
}

impl Found {
    pub(crate) fn check(&self) -> Result<(), MessageError> {
        bound(self.candidates.len() <= MAX_CANDIDATES, "candidates")?;
        let short = |candidate: &Candidate| {
            candidate.peer.len() <= MAX_TEXT && candidate.address.len() <= MAX_TEXT
        };
        bound(self.candidates.iter().all(short), "text")
    }
}

/// A member that may have chunks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Name of the member on the channel.
    pub peer: String,
    /// Address at which it listens.
    pub address: String,
}
