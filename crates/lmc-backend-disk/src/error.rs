//! Errors of opening a disk tier.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lmc_backend::TooManyClears;
use thiserror::Error;

use crate::files::HEADER_NAME;

/// Reason why a disk tier cannot be opened. Nothing on the drive was changed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The configuration has no folder.
    #[error("a disk tier needs at least one folder")]
    NoFolder,
    /// The folder has no drive yet, or the drive's file system is not mounted.
    #[error(
        "{path}: no lmc drive found{expected}; mount the drive, or make a new one with \
         `lmc serve --disk {path} --disk-create`"
    )]
    NoDriveYet {
        /// The folder.
        path: PathBuf,
        /// The drive that was in the folder before, if known.
        expected: String,
    },
    /// The path is a file.
    #[error("{path}: not a folder; name a folder for the drive's files")]
    NotAFolder {
        /// The file.
        path: PathBuf,
    },
    /// The folder's file system does not store files.
    #[error(
        "{path}: the file system there is {name}, which keeps no files; name a folder on a drive"
    )]
    NoFiles {
        /// The folder.
        path: PathBuf,
        /// Name of the file system.
        name: &'static str,
    },
    /// The folder's file system reports no size.
    #[error("{path}: the file system does not say how many bytes are free; set --disk-size")]
    NoSize {
        /// The folder.
        path: PathBuf,
    },
    /// Two drives belong to different sets.
    #[error(
        "{path} belongs to drive set {set} and {other_path} to {other_set}; serve each set by \
         itself, or remove the files of one drive and start with --disk-create"
    )]
    DifferentSets {
        /// A folder.
        path: PathBuf,
        /// Set of the drive.
        set: String,
        /// A folder with a drive of another set.
        other_path: PathBuf,
        /// Id of the other set.
        other_set: String,
    },
    /// The drives and the caller together know more clears than a map can hold.
    #[error(transparent)]
    TooManyClears(#[from] TooManyClears),
    /// The folder does not exist and cannot be created.
    #[error("{path}: cannot make the folder: {source}; make it, or name another")]
    Missing {
        /// The folder.
        path: PathBuf,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
    /// The folder is not writable.
    #[error(
        "{path}: cannot write files there: {source}; check its owner and whether it is mounted read-only"
    )]
    NotWritable {
        /// The folder.
        path: PathBuf,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
    /// Another process uses the folder.
    #[error("{path}: in use by another lmc ({owner}); stop that one, or name another folder")]
    Locked {
        /// The folder.
        path: PathBuf,
        /// Process that uses the folder.
        owner: String,
    },
    /// The folder has no lmc drive.
    #[error("{path}: no lmc drive found; name a folder that `lmc serve --disk` has used")]
    NoDrive {
        /// The folder.
        path: PathBuf,
    },
    /// The folder has other files.
    #[error("{path}: not empty, and not an lmc drive (no `{HEADER_NAME}`); name an empty folder")]
    NotOurs {
        /// The folder.
        path: PathBuf,
    },
    /// The drive was written by another version of lmc, or its header is damaged.
    #[error("{path}: {source}")]
    Format {
        /// The folder.
        path: PathBuf,
        /// Cause.
        source: Arc<io::Error>,
    },
    /// The size is too small for a drive.
    #[error("{path}: {size} bytes for each drive are too few; at least {least} are needed")]
    TooSmall {
        /// The folder.
        path: PathBuf,
        /// Configured size in bytes.
        size: u64,
        /// Least size in bytes.
        least: u64,
    },
    /// The file system has less free space than the configured size.
    #[error(
        "{path}: a size of {} was asked for, the file system has {} free; ask for less, or free some space",
        gib(*size), gib(*free)
    )]
    Space {
        /// The folder.
        path: PathBuf,
        /// Configured size for this drive, in bytes.
        size: u64,
        /// Bytes available, including those that the folder's files take already.
        free: u64,
    },
    /// The drive's segments and logs are more files than the process may open.
    #[error(
        "{path}: the drive has more files than this process may open; raise the limit (ulimit -n)"
    )]
    OpenFiles {
        /// The folder.
        path: PathBuf,
    },
    /// A system call failed.
    #[error("{path}: {source}")]
    Io {
        /// The folder.
        path: PathBuf,
        /// Error of the system call.
        source: Arc<io::Error>,
    },
}

impl DiskError {
    /// Returns a function that converts system errors at a path.
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self + Copy + use<'_> {
        move |source| Self::Io {
            path: path.to_owned(),
            source: source.into(),
        }
    }
}

fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}
