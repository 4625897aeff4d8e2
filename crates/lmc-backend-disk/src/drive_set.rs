//! The set of the open drives, and its clears.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use lmc_backend::{Clears, TooManyClears};
use parking_lot::Mutex;
use tracing::warn;

use crate::batch::AnswerBatch;
use crate::drive::Drive;
use crate::error::DiskError;
use crate::format::FormatError;
use crate::id::hex;
use crate::set::{DifferentSets, Joined, Present, SET_NAME, SetMember, SetRecord, join};

/// The set that the open drives belong to.
#[derive(Debug)]
pub(crate) struct DriveSet {
    clears: Mutex<Arc<Clears>>,
    missing: Vec<SetMember>,
}

impl DriveSet {
    /// Makes a set for drives that are only inspected: no drive is compared, written or cleared.
    pub(crate) fn of(drives: &[Drive]) -> Result<Self, TooManyClears> {
        Ok(Self {
            clears: Mutex::new(joined_clears(drives, &Clears::default())?),
            missing: Vec::new(),
        })
    }

    /// Joins drives to a set, and empties each drive that lacks a clear of `clears` or of another drive.
    /// `paths` are the paths of the drives.
    pub(crate) fn join(
        drives: &[Drive],
        paths: &[PathBuf],
        clears: &Clears,
    ) -> Result<Self, DiskError> {
        let clears = joined_clears(drives, clears)?;
        let mut present = Vec::new();
        for (drive, path) in drives.iter().zip(paths) {
            present.push(Present {
                drive_id: drive.id(),
                path: absolute(path),
                record: record_of(drive, path)?,
            });
        }
        let Joined {
            set_id,
            members,
            missing,
        } = join(&present, now()).map_err(|DifferentSets(first, second)| {
            let set = |number: usize| {
                let record = present[number].record.as_ref();
                record.map_or_else(|| "unknown".to_owned(), |record| hex(&record.set_id))
            };
            DiskError::DifferentSets {
                path: paths[first].clone(),
                set: set(first),
                other_path: paths[second].clone(),
                other_set: set(second),
            }
        })?;
        for (drive, path) in drives.iter().zip(paths) {
            if drive.clears() != clears {
                // Until this is durable, the next start finds the same state and does the same.
                let chunks = drive.clear(&clears, (AnswerBatch::new(1), 0));
                if chunks > 0 {
                    warn!(
                        path = %path.display(),
                        chunks,
                        "drive missed a clear; its chunks are removed"
                    );
                }
            }
            let record = SetRecord {
                drive_id: drive.id(),
                set_id,
                members: members.clone(),
            };
            if let Err(error) = drive.replace_file(SET_NAME, &record.encode()) {
                warn!(
                    path = %path.display(),
                    %error,
                    "cannot write the record of the drive set; a missing drive may go unnoticed"
                );
            }
        }
        for member in &missing {
            warn!("{}", missing_text(member));
        }
        Ok(Self {
            clears: Mutex::new(clears),
            missing,
        })
    }

    /// Adds clears that every drive has to carry out.
    pub(crate) fn reach(&self, clears: &Arc<Clears>) {
        let mut known = self.clears.lock();
        if !known.contains(clears) {
            *known = Arc::clone(clears);
        }
    }

    /// Returns the clears that every drive has carried out, or is about to.
    pub(crate) fn clears(&self) -> Arc<Clears> {
        Arc::clone(&self.clears.lock())
    }

    /// Returns the drives of the set that are not open.
    pub(crate) fn missing(&self) -> &[SetMember] {
        &self.missing
    }
}

/// Returns the union of the clears of all drives and of `other`.
fn joined_clears(drives: &[Drive], other: &Clears) -> Result<Arc<Clears>, TooManyClears> {
    let mut joined = other.clone();
    for drive in drives {
        joined.join(&drive.clears())?;
    }
    Ok(Arc::new(joined))
}

/// Returns a drive's record of its set. A damaged record is ignored.
pub(crate) fn record_of(drive: &Drive, path: &Path) -> Result<Option<SetRecord>, DiskError> {
    let io = DiskError::io(path);
    let Some(bytes) = drive.read_file(SET_NAME).map_err(io)? else {
        return Ok(None);
    };
    match SetRecord::decode(&bytes) {
        Ok(record) if record.drive_id == drive.id() => Ok(Some(record)),
        Ok(_) => Ok(None),
        Err(error @ FormatError::Version { .. }) => Err(DiskError::Format {
            path: path.to_owned(),
            source: std::io::Error::other(error).into(),
        }),
        Err(error) => {
            warn!(path = %path.display(), %error, "record of the drive set is damaged and ignored");
            Ok(None)
        }
    }
}

/// Returns a text that names a drive that is not open, with the remedy.
pub(crate) fn missing_text(member: &SetMember) -> String {
    let id = hex(&member.drive_id);
    format!(
        "drive {id} of this set is missing (last at {}, {}): mount it and name it in --disk, or \
         remove it from the set with `lmc disk forget {id} PATH`",
        member.path.display(),
        ago(member.last_seen),
    )
}

/// Formats the age of a Unix time in seconds.
pub(crate) fn ago(then: u64) -> String {
    match now().saturating_sub(then) {
        seconds @ 0..120 => format!("{seconds} s ago"),
        seconds @ 120..7_200 => format!("{} minutes ago", seconds / 60),
        seconds @ 7_200..172_800 => format!("{} hours ago", seconds / 3_600),
        seconds => format!("{} days ago", seconds / 86_400),
    }
}

/// Returns the current time in seconds since 1970.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Returns the absolute form of a path.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.unwrap_or_else(|_| path.to_owned())
}
