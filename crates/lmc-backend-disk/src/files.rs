//! Files of a drive: blocking operations, opening segments, and replacing small files as a whole.

use std::io;
use std::sync::mpsc;
use std::time::Duration;

use crate::log::segment_name;
use crate::volume::{AlignedBuf, Buf, FileId, Kind, Volume, VolumeOp};

/// Name of the drive's header file, by which lmc recognises a drive.
pub(crate) const HEADER_NAME: &str = "drive";
/// Name of the header file until it is complete.
pub(crate) const UNFINISHED_HEADER: &str = "drive.unfinished";

/// Timeout of a drive thread's own operations if they run on another thread.
const OWN_TIMEOUT: Duration = Duration::from_secs(30);

/// Returns the bytes of a file; none if there is no such file.
pub(crate) fn read_file(volume: &dyn Volume, name: &str) -> io::Result<Option<Vec<u8>>> {
    if !volume.list()?.iter().any(|known| known == name) {
        return Ok(None);
    }
    let bytes = volume.read_all(name)?;
    Ok(Some((*bytes).as_ref().to_vec()))
}

/// Replaces a file durably. `bytes` are whole blocks.
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

/// Opens an existing segment. A segment that a kill has left incomplete gets the rest of its blocks; without
/// space for them, its chunks can still be read.
pub(crate) fn open_segment(volume: &dyn Volume, segment: u32, bytes: u64) -> io::Result<FileId> {
    let name = segment_name(segment);
    match volume.open(&name, Some(bytes)) {
        Err(error) if is_full(&error) => volume.open(&name, None),
        opened => opened,
    }
}

/// Returns true if the file system is full, or this user's quota is used up.
pub(crate) fn is_full(error: &io::Error) -> bool {
    use io::ErrorKind::{QuotaExceeded, StorageFull};
    matches!(error.kind(), StorageFull | QuotaExceeded)
}

/// Runs an operation of the drive's own and waits for it.
pub(crate) fn wait_for(
    volume: &dyn Volume,
    kind: Kind,
    file: FileId,
    offset: u64,
    buf: Option<AlignedBuf>,
) -> io::Result<()> {
    let (sender, receiver) = mpsc::channel();
    volume.carry_out(VolumeOp {
        kind,
        file,
        offset,
        len: buf.as_ref().map_or(0, |buf| buf.len() as u64),
        buf: buf.map(Buf::Own),
        // Never abandoned, even if the waiter stops waiting.
        abandoned: None,
        done: Box::new(move |done| drop(sender.send(done.result))),
    });
    let late = |_| Err(io::ErrorKind::TimedOut.into());
    receiver.recv_timeout(OWN_TIMEOUT).unwrap_or_else(late)
}
