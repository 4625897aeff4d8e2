//! Small files of a drive that are replaced whole.

use std::io;

use super::{Drive, wait_for};
use crate::volume::{AlignedBuf, Kind, Volume};

impl Drive {
    /// Returns the bytes of a file of the drive; none where there is no such file.
    pub(crate) fn read_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        read_file(&*self.shared.volume, name)
    }

    /// Replaces a file of the drive, durably: a kill leaves the file before or this one.
    pub(crate) fn replace_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        replace_file(&*self.shared.volume, name, bytes)
    }
}

/// Returns the bytes of a file; none where there is no such file.
pub(crate) fn read_file(volume: &dyn Volume, name: &str) -> io::Result<Option<Vec<u8>>> {
    if !volume.list()?.iter().any(|known| known == name) {
        return Ok(None);
    }
    let bytes = volume.read_all(name)?;
    Ok(Some((*bytes).as_ref().to_vec()))
}

/// Replaces a file, durably. `bytes` are whole blocks.
pub(crate) fn replace_file(volume: &dyn Volume, name: &str, bytes: &[u8]) -> io::Result<()> {
    let unfinished = format!("{name}.unfinished");
    if volume.list()?.contains(&unfinished) {
        volume.remove(&unfinished)?;
    }
    let len = bytes.len() as u64;
    let mut buf = AlignedBuf::new(len);
    buf[..bytes.len()].copy_from_slice(bytes);
    let file = volume.open(&unfinished, Some(len))?;
    let written = wait_for(volume, Kind::Write, file, 0, Some(buf))
        .and_then(|()| wait_for(volume, Kind::Sync, file, 0, None));
    volume.close(file);
    written?;
    volume.rename(&unfinished, name)?;
    volume.sync_names()
}
