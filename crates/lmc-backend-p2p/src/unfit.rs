//! Settings in which two daemons must agree.

use lmc_key::Printable;
use thiserror::Error;

use crate::config::NodeConfig;
use crate::message::{Hello, Refusal};

/// A setting in which two daemons differ, so that neither uses the other.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unfit {
    /// The two sides have no common protocol version.
    #[error(
        "no common version of the peer protocol: this side speaks {} to {}, the peer {} to {}",
        here.0, here.1, there.0, there.1
    )]
    Version {
        /// Oldest and newest version of this side.
        here: (u16, u16),
        /// Oldest and newest version of the peer.
        there: (u16, u16),
    },
    /// The chunk sizes differ.
    #[error("the chunk size differs: this side has {here} tokens, the peer {there}")]
    ChunkSize {
        /// Number of tokens in a chunk of this side.
        here: u32,
        /// Number of tokens in a chunk of the peer.
        there: u32,
    },
    /// The algorithms of prefix hashes differ.
    #[error(
        "the hash algorithm differs: this side has {here}, the peer {}",
        Printable(there)
    )]
    Algorithm {
        /// Algorithm of this side.
        here: String,
        /// Algorithm of the peer.
        there: String,
    },
}

impl Unfit {
    /// Compares a peer's hello with the settings of this side.
    pub(crate) fn check(config: &NodeConfig, hello: &Hello) -> Result<(), Self> {
        let (oldest, newest) = config.versions;
        if hello.common_version(oldest, newest).is_none() {
            return Err(Self::Version {
                here: config.versions,
                there: (hello.oldest, hello.newest),
            });
        }
        if hello.chunk_size != config.chunk_size {
            return Err(Self::ChunkSize {
                here: config.chunk_size,
                there: hello.chunk_size,
            });
        }
        if hello.algorithm != config.algorithm {
            return Err(Self::Algorithm {
                here: config.algorithm.clone(),
                there: hello.algorithm.clone(),
            });
        }
        Ok(())
    }

    /// Returns the difference because of which a peer refused this side; `None` if the settings are not the
    /// reason.
    pub(crate) fn refused(config: &NodeConfig, refusal: &Refusal) -> Option<Self> {
        match refusal {
            Refusal::Version { oldest, newest } => Some(Self::Version {
                here: config.versions,
                there: (*oldest, *newest),
            }),
            Refusal::ChunkSize(there) => Some(Self::ChunkSize {
                here: config.chunk_size,
                there: *there,
            }),
            Refusal::Algorithm(there) => Some(Self::Algorithm {
                here: config.algorithm.clone(),
                there: there.clone(),
            }),
            _ => None,
        }
    }

    /// Returns the refusal that reports this side's setting to the peer.
    pub(crate) fn refusal(self) -> Refusal {
        match self {
            Self::Version {
                here: (oldest, newest),
                ..
            } => Refusal::Version { oldest, newest },
            Self::ChunkSize { here, .. } => Refusal::ChunkSize(here),
            Self::Algorithm { here, .. } => Refusal::Algorithm(here),
        }
    }
}
