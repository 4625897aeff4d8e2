//! The state folder: what is remembered of drive sets outside of their drives.
//!
//! A drive that is replaced by an older copy of itself does not know what was cleared since.
//! One file for each set does.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use parking_lot::Mutex;
use tracing::warn;

use crate::epoch::hex;
use crate::error::DiskError;
use crate::set::SetRecord;
use lmc_backend::ClearEpoch;

/// Folder of the sets in a state folder.
const SETS: &str = "disk-sets";
const UNFINISHED: &str = ".unfinished";

/// A state folder that is there.
#[derive(Debug)]
pub(crate) struct StateDir {
    sets: PathBuf,
    /// The tier's folder in other state folders; not all exist.
    others: Vec<PathBuf>,
}

impl StateDir {
    /// Opens the folder, and makes it where it is not there.
    pub(crate) fn open(path: &Path, others: &[PathBuf]) -> Result<Self, DiskError> {
        let sets = path.join(SETS);
        make_folder(&sets).map_err(|source| DiskError::State {
            path: sets.clone(),
            source,
        })?;
        let others = others.iter().filter(|other| *other != path);
        let others = others.map(|other| other.join(SETS)).collect();
        Ok(Self { sets, others })
    }

    /// Returns the records of all sets; of one set several, where several folders have one.
    pub(crate) fn records(&self) -> Result<Vec<SetRecord>, DiskError> {
        let mut records = read_records(&self.sets)?;
        for other in &self.others {
            match read_records(other) {
                Ok(more) => records.extend(more),
                Err(DiskError::State { source, .. }) if is_out_of_reach(&source) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(records)
    }

    /// Writes the record of a set, and returns where later clears are noted.
    pub(crate) fn keep(&self, record: SetRecord) -> Result<Remembered, DiskError> {
        let remembered = Remembered {
            sets: self.sets.clone(),
            record: Mutex::new(record),
        };
        let written = remembered.write(&remembered.record.lock());
        written.map_err(|source| DiskError::State {
            path: self.sets.clone(),
            source,
        })?;
        Ok(remembered)
    }
}

fn make_folder(sets: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(sets)
}

fn is_out_of_reach(error: &io::Error) -> bool {
    use io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | NotADirectory | PermissionDenied)
}

fn read_records(sets: &Path) -> Result<Vec<SetRecord>, DiskError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| DiskError::State { path, source }
    };
    let mut records = Vec::new();
    for entry in fs::read_dir(sets).map_err(failed(sets))? {
        let path = entry.map_err(failed(sets))?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        if name.is_none_or(|name| !is_record(name)) {
            continue;
        }
        let bytes = fs::read(&path).map_err(failed(&path))?;
        let record = SetRecord::decode(&bytes).map_err(io::Error::other);
        records.push(record.map_err(failed(&path))?);
    }
    Ok(records)
}

fn is_record(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The record of one set in the state folder.
#[derive(Debug)]
pub(crate) struct Remembered {
    sets: PathBuf,
    record: Mutex<SetRecord>,
}

impl Remembered {
    /// Notes a clear, durably. An older one than the last that was noted changes nothing.
    pub(crate) fn note(&self, epoch: ClearEpoch) -> io::Result<()> {
        let mut record = self.record.lock();
        if epoch.counter <= record.epoch.counter {
            return Ok(());
        }
        let next = SetRecord {
            epoch,
            ..record.clone()
        };
        self.write(&next)?;
        *record = next;
        Ok(())
    }

    /// Writes the record, also when the folder was removed while the server runs.
    fn write(&self, record: &SetRecord) -> io::Result<()> {
        if !self.sets.is_dir() {
            warn!(folder = ?self.sets, "the state folder was removed; it is made again");
            make_folder(&self.sets)?;
            // The folder's own name must be as durable as the record.
            for folder in self.sets.ancestors().skip(1).take(2) {
                if let Ok(folder) = File::open(folder) {
                    folder.sync_all()?;
                }
            }
        }
        let name = hex(&record.set_id);
        let unfinished = self.sets.join(format!("{name}{UNFINISHED}"));
        // One that a kill has left, or a link that is not ours.
        match fs::remove_file(&unfinished) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&unfinished)?;
        file.write_all(&record.encode())?;
        file.sync_all()?;
        fs::rename(&unfinished, self.sets.join(name))?;
        File::open(&self.sets)?.sync_all()
    }
}
