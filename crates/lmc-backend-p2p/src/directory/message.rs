//! Messages between a member and a directory, as parts of the peer protocol.

use serde::{Deserialize, Serialize};

use super::buckets::{FINGERPRINT_BYTES, Fingerprint, SetDigest};
use crate::message::{MAX_KEYS, MAX_TEXT, MessageError, bound};

/// Most fingerprints of one announcement: what a directory does in a fifth of a millisecond.
pub const MAX_ANNOUNCED: usize = 2048;
/// Generations from this on are refused: there would be none after them.
const MAX_GENERATION: u64 = 1 << 48;
/// Most members that a directory names for a prompt.
pub const MAX_CANDIDATES: usize = 4;

/// Fingerprints, one behind the other.
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

/// Names the chunks that the asking side can lend; without any, says that it is alive.
///
/// A generation names all chunks from the first on. Its announcements are numbered from 1, and a
/// directory applies each of them once and in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announce {
    /// Number of the generation; what was announced in earlier ones is gone.
    pub generation: u64,
    /// Number of the announcement in its generation.
    pub sequence: u64,
    /// Chunks that it can lend from now on.
    pub added: Fingerprints,
    /// Chunks that it cannot lend any more.
    pub removed: Fingerprints,
    /// All that was announced in this generation, this included, if nothing is left to announce.
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
    /// Noted.
    Applied,
    /// The directory does not know what came before it, or knows something else: a generation with
    /// a higher number than this is expected.
    Restart {
        /// Number of the newest generation that it knows.
        known: u64,
    },
    /// A new generation cannot begin yet, because the one before is still being removed.
    Busy,
    /// The directory keeps no more chunks: it took all removals, and not all additions.
    Full {
        /// Entries that the directory keeps, of this member or in all.
        limit: u64,
    },
}

/// Asks which members have chunks of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Find {
    /// The chunks, in the order of the prompt.
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
    /// False while the directory has not been up for long: members may have chunks that they have
    /// not announced yet.
    pub settled: bool,
    /// Members that have leading chunks, the best first.
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
