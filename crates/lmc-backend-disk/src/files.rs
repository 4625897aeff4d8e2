//! Files of a drive: operations that are waited for, segments that are opened, and small files that are
//! replaced whole.

use std::io;
use std::sync::mpsc;
use std::time::Duration;

use crate::log::segment_name;
use crate::volume::{AlignedBuf, Buf, FileId, Kind, Op, Volume};

/// Name of the file that says what the folder is.
pub(crate) const HEADER_NAME: &str = "drive";
/// Name of that file until it is complete.
pub(crate) const UNFINISHED_HEADER: &str = "drive.unfinished";

/// Timeout of a drive thread's own operations, where they are carried out on another thread.
const OWN_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Opens an existing segment. One that a kill has left half made gets the rest of its blocks;
/// without space for them, its chunks can still be read.
pub(crate) fn open_segment(volume: &dyn Volume, segment: u32, bytes: u64) -> io::Result<FileId> {
    let name = segment_name(segment);
    match volume.open(&name, Some(bytes)) {
        Err(error) if is_full(&error) => volume.open(&name, None),
        opened => opened,
    }
}

/// Returns true if the file system is full, or the quota of this user is.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// Carries out an operation of the drive's own and waits for it: what, on which file, where, with
/// which bytes.
pub(crate) fn wait_for(
    volume: &dyn Volume,
    kind: Kind,
    file: FileId,
    offset: u64,
    buf: Option<AlignedBuf>,
) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    volume.carry_out(Op {
        kind,
        file,
        offset,
        len: buf.as_ref().map_or(0, |buf| buf.len() as u64),
        buf: buf.map(Buf::Own),
        // The waiter may have left.
        abandoned: None,
        done: Box::new(move |done| drop(sender.send(done.result))),
    });
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    receiver.recv_timeout(OWN_TIMEOUT).unwrap_or_else(late)
}

/// Returns a copy of an error for another waiter.
pub(crate) fn again(error: &io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(error.kind(), error.to_string()),
    }
}
