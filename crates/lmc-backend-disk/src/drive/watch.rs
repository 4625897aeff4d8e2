//! Detection of other programs that remove, replace or truncate files of an open drive.
//!
//! The drive keeps its files open, so its reads and writes would continue as if nothing had happened, in
//! files that no later start finds. A check compares the files with the state in which the drive has left
//! them: from time to time, and before files are made or removed.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::{info, warn};

use super::state::DriveCore;
use crate::claim::Claim;
use crate::files::HEADER_NAME;
use crate::format::BLOCK_LEN;

/// Checks a drive's files, one check at a time.
#[derive(Debug)]
pub(super) struct FileWatch {
    core: Arc<DriveCore>,
    look: Mutex<()>,
}

impl FileWatch {
    pub(super) fn new(core: Arc<DriveCore>) -> Self {
        let look = Mutex::new(());
        Self { core, look }
    }

    /// Checks the drive's files. While they are not as the drive has left them, the drive is out.
    ///
    /// # Errors
    /// The files have changed: no file may be made or removed.
    pub(super) fn check_files(&self) -> io::Result<()> {
        let _one_at_a_time = self.look.lock();
        let changed = self.core.claim.as_ref().and_then(Claim::changed);
        let changed = changed.or_else(|| self.core.volume.changed()).map(|what| {
            format!(
                "{what} under the server; the drive stores and serves no chunks until its files are as \
                 they were: keep other programs away from the folder, and restart the server, which \
                 continues with the remaining files and frees the space of removed ones"
            )
        });
        self.core
            .condition
            .looked_at_files(changed.as_deref(), &self.core.counters);
        changed.map_or(Ok(()), |changed| Err(io::Error::other(changed)))
    }

    /// Writes the drive's header again if it was removed, so that the next start opens the remaining files.
    pub(super) fn restore_header(&self) {
        let Some(claim) = &self.core.claim else {
            return;
        };
        let mut header = [0; BLOCK_LEN];
        self.core.header.encode(&mut header);
        match claim.restore_header(&header) {
            Ok(true) => info!("wrote `{HEADER_NAME}` again, for the next start"),
            Ok(false) => {}
            // There is no folder at the drive's path.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => warn!(%error, "cannot write `{HEADER_NAME}` again, for the next start"),
        }
    }
}
