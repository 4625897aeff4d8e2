//! Files of a drive that other programs remove, replace or cut while the drive is open.
//!
//! The drive's own files stay open, so reads and writes would go on as if nothing had happened, in
//! files that no start finds again. A look compares the files with what the drive has left: from
//! time to time, and before files are made or removed.

use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::{info, warn};

use super::state::DriveCore;
use crate::claim::Claim;
use crate::files::HEADER_NAME;
use crate::format::BLOCK_LEN;

/// Looks at a drive's files, one at a time.
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

    /// Looks at the drive's files. While they are not as the drive has left them the drive is out.
    ///
    /// # Errors
    /// The files have changed: none is to be made or removed.
    pub(super) fn check_files(&self) -> io::Result<()> {
        let _one_at_a_time = self.look.lock();
        let changed = self.core.claim.as_ref().and_then(Claim::changed);
        let changed = changed.or_else(|| self.core.volume.changed()).map(|what| {
            format!(
                "{what} under the server; the drive takes and serves nothing until its files are as \
                 they were: keep other programs away from the folder, and restart the server, which \
                 goes on with what is left and gives the space of removed files back"
            )
        });
        self.core
            .condition
            .looked_at_files(changed.as_deref(), &self.core.counters);
        changed.map_or(Ok(()), |changed| Err(io::Error::other(changed)))
    }

    /// Writes the drive's header again if it was removed, so that the next start opens what is left.
    pub(super) fn restore_header(&self) {
        let Some(claim) = &self.core.claim else {
            return;
        };
        let mut header = [0; BLOCK_LEN];
        self.core.header.encode(&mut header);
        match claim.restore_header(&header) {
            Ok(true) => info!("wrote `{HEADER_NAME}` again, for the next start"),
            Ok(false) => {}
            // No folder is where the drive's was.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => warn!(%error, "cannot write `{HEADER_NAME}` again, for the next start"),
        }
    }
}
