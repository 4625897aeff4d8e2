//! The set of the drives that are open, and its clear epoch.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::SystemTime;

use lmc_key::SpaceId;
use parking_lot::Mutex;
use tracing::warn;

use crate::batch::Batch;
use crate::drive::{ChangeWaiter, Drive};
use crate::epoch::{agreed, hex};
use crate::error::DiskError;
use crate::format::FormatError;
use crate::set::{DifferentSets, Joined, Present, SET_NAME, SetMember, SetRecord, join};
use crate::state_dir::{Remembered, StateDir};
use lmc_backend::{Clear, ClearEpoch};

/// The set that the open drives belong to.
#[derive(Debug)]
pub(crate) struct DriveSet {
    epoch: Mutex<ClearEpoch>,
    missing: Vec<SetMember>,
    remembered: Option<Arc<Remembered>>,
}

impl DriveSet {
    /// Returns a set for drives that are only looked into: nothing is compared, written or
    /// cleared.
    pub(crate) fn of(drives: &[Drive]) -> Self {
        let epochs = drives.iter().map(Drive::epoch);
        Self {
            epoch: Mutex::new(agreed(epochs)),
            missing: Vec::new(),
            remembered: None,
        }
    }

    /// Joins drives, and clears those that missed a clear. `paths` are those of the drives.
    pub(crate) fn join(
        drives: &[Drive],
        paths: &[PathBuf],
        state: Option<&StateDir>,
    ) -> Result<Self, DiskError> {
        let remembered = state.map_or_else(|| Ok(Vec::new()), StateDir::records)?;
        let mut present = Vec::new();
        for (drive, path) in drives.iter().zip(paths) {
            present.push(Present {
                drive_id: drive.id(),
                path: absolute(path),
                epoch: drive.epoch(),
                record: record_of(drive, path)?,
            });
        }
        let joined = join(&present, &remembered, now());
        let Joined {
            set_id,
            epoch,
            members,
            missing,
        } = joined.map_err(|DifferentSets(first, second)| {
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
        let record = |drive_id| SetRecord {
            drive_id,
            set_id,
            epoch,
            members: members.clone(),
        };
        // First: a kill from here on leaves what every drive has to reach.
        let remembered = state.map(|state| state.keep(record([0; 16]))).transpose()?;
        for ((drive, path), was) in drives.iter().zip(paths).zip(&present) {
            if was.epoch != epoch {
                // Until that is durable the drive is behind, and cleared at the next start.
                let chunks = drive.clear(Clear::all(epoch), (Batch::new(1), 0));
                if chunks > 0 {
                    warn!(
                        path = %path.display(),
                        chunks,
                        "drive missed a clear of its set; its chunks are removed"
                    );
                }
            }
            let written = drive.replace_file(SET_NAME, &record(was.drive_id).encode());
            if let Err(error) = written {
                warn!(
                    path = %path.display(),
                    %error,
                    "cannot write the record of the drive set; a missing drive may go unnoticed"
                );
            }
        }
        for clear in space_clears(drives) {
            for drive in drives {
                // As above: durable, or made up for at the next start.
                drive.clear(clear, (Batch::new(1), 0));
            }
        }
        for member in &missing {
            warn!("{}", missing_text(member));
        }
        Ok(Self {
            epoch: Mutex::new(epoch),
            missing,
            remembered: remembered.map(Arc::new),
        })
    }

    /// Begins a clear of all spaces, which every drive has to reach.
    pub(crate) fn raise(&self, to: ClearEpoch) {
        let mut epoch = self.epoch.lock();
        *epoch = epoch.join(to);
    }

    /// Returns the last clear of all spaces.
    pub(crate) fn epoch(&self) -> ClearEpoch {
        *self.epoch.lock()
    }

    /// Notes a clear in the state folder, on a thread of its own because the file system may hang.
    /// The answer is false when that failed.
    pub(crate) fn note(&self, epoch: ClearEpoch, (batch, index): ChangeWaiter) {
        let Some(remembered) = self.remembered.clone() else {
            return batch.answer(index, Some(true));
        };
        let answers = Arc::clone(&batch);
        let thread = thread::Builder::new().name("lmc-disk-state".to_owned());
        let spawned = thread.spawn(move || {
            let noted = remembered.note(epoch);
            if let Err(error) = &noted {
                warn!(%error, "cannot record a clear in the state folder; drives restored from an older copy may serve chunks from before it");
            }
            answers.answer(index, Some(noted.is_ok()));
        });
        if spawned.is_err() {
            batch.answer(index, Some(false));
        }
    }

    /// Drives of the set that are not open.
    pub(crate) fn missing(&self) -> &[SetMember] {
        &self.missing
    }
}

/// Returns the clears of single spaces that any of the drives knows of, each once.
pub(crate) fn space_clears(drives: &[Drive]) -> Vec<Clear> {
    let mut newest: HashMap<SpaceId, ClearEpoch> = HashMap::new();
    for clear in drives.iter().flat_map(Drive::clears) {
        if let Some(space) = clear.space {
            let known = newest.entry(space).or_default();
            *known = known.join(clear.epoch);
        }
    }
    let clear = |(space, epoch)| Clear::space(space, epoch);
    newest.into_iter().map(clear).collect()
}

/// Returns what a drive remembers of its set. A record that is damaged is none.
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
            source: std::io::Error::other(error),
        }),
        Err(error) => {
            warn!(path = %path.display(), %error, "record of the drive set is damaged and ignored");
            Ok(None)
        }
    }
}

/// Names a drive that is not open, and what to do.
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

/// Seconds from 1970.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Returns the path as it is found from any directory.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
    absolute.unwrap_or_else(|_| path.to_owned())
}
