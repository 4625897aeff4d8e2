//! The directory: it knows which members have which chunks, and which members are alive.
//!
//! A directory only advises; the owner's lease is authoritative. Members announce the chunks that they can
//! lend to all directories ([`Announce`]), as fingerprints. They ask the first directory that answers for
//! members that have the chunks of a prompt ([`Find`]); `locate` then asks only these members. A directory
//! that is slow, gone or wrong costs a miss.
//!
//! [`Table`] is the directory without I/O and clock, [`DirectoryHost`] answers members from it, and
//! [`DirectoryServer`] listens for members.

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
