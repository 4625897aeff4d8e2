//! The directory: which members have which chunks, and which of them are alive.
//!
//! A directory advises; the owner's lease is the truth. Members announce to all directories which
//! chunks they can lend ([`Announce`]), as fingerprints, and ask the first that answers for members
//! that have the chunks of a prompt ([`Find`]); only those are asked by `locate`. A directory that
//! is slow, gone or wrong costs a miss.
//!
//! [`Table`] is the directory without IO and clock, [`DirectoryHost`] answers members from it,
//! [`DirectoryServer`] listens for them.

mod buckets;
mod client;
mod host;
mod lendable;
mod message;
mod runs;
mod table;

pub use buckets::{Fingerprint, SetDigest};
pub use client::DirectoryUse;
pub(crate) use client::{ChangedKeys, DirectoryClient};
pub use host::{DirectoryCounters, DirectoryHost, DirectoryServer, DirectoryStatus};
pub use message::{
    Announce, Announced, Candidate, Find, Fingerprints, Found, MAX_ANNOUNCED, MAX_CANDIDATES,
};
pub use table::{Table, TableLimits};
