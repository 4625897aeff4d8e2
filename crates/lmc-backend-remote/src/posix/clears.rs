//! The object of clears in a shared folder: numbered files, of which the last one counts.
//!
//! A file is written under a temporary name and linked to the number after the one that was read. `link(2)`
//! fails if the name is taken, also on NFS, where the server decides: of several writers that have read the
//! same version, one succeeds. `rename(2)` would replace a file that another writer has just written, and its
//! flag against that does not exist on NFS. Locks may outlive their holders or end too early. Opening the
//! folder makes an NFS client ask the server for it, so that a reader sees the last file.

use std::io;
use std::time::Instant;

use bytes::Bytes;
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, OFlags};

use super::tree::{is_absent, temporary};
use super::value::{MAX_ATTEMPTS, Values, store_error, write_full};
use crate::format::Name;
use crate::store::{StoreError, Version};

impl Values {
    /// Reads the last version of the object.
    pub(super) fn read_clears(&self, max: usize) -> Result<Option<(Bytes, Version)>, StoreError> {
        // Acceptable, because the clears are read only every few seconds.
        self.tree.refresh()?;
        for _ in 0..MAX_ATTEMPTS {
            let Some(last) = self.versions()?.pop() else {
                return Ok(None);
            };
            match self.read_file(&path(last), max) {
                // The version was replaced meanwhile.
                Err(StoreError::Io(error)) if is_absent(&error) => {}
                read => return Ok(Some((read?, version(last)))),
            }
        }
        Err(changes_too_fast())
    }

    /// Links a new version after the one that was read. Returns false if that one is no longer the last.
    pub(super) fn swap_clears(
        &self,
        bytes: &[u8],
        read: Option<&Version>,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let last = read.and_then(number);
        let next = last.unwrap_or_default().checked_add(1);
        let next = next.ok_or_else(changes_too_fast)?;
        if self.versions()?.last() != last.as_ref() {
            return Ok(false);
        }
        let linked = self.link(&path(next), bytes, deadline);
        let linked = linked.map_err(|error| store_error(error, bytes.len() as u64))?;
        match linked {
            None => Err(StoreError::Deadline),
            Some(false) => Ok(false),
            Some(true) => self.confirm(last, next),
        }
    }

    /// Returns true if the version `next`, which was just linked, is the successor of `last`; then removes
    /// the older versions. Otherwise removes `next`.
    fn confirm(&self, last: Option<u64>, next: u64) -> Result<bool, StoreError> {
        // Other daemons may have replaced the version that was read, and then removed it and its successor,
        // so that the successor's number was free again. Versions are removed in order, so in that case the
        // version that was read is gone.
        let versions = self.versions()?;
        let is_ours =
            versions.last() == Some(&next) && last.is_none_or(|last| versions.contains(&last));
        if !is_ours {
            self.unlink(&path(next))?;
            return Ok(false);
        }
        for old in versions.into_iter().filter(|&old| old < next) {
            self.unlink(&path(old))?;
        }
        Ok(true)
    }

    /// Removes all versions. Returns false if there were none.
    pub(super) fn remove_clears(&self) -> io::Result<bool> {
        let versions = self.versions()?;
        for &version in &versions {
            self.unlink(&path(version))?;
        }
        self.tree.remove_empty(&Name::Clears.to_string());
        Ok(!versions.is_empty())
    }

    /// Returns the numbers of the versions, in order.
    fn versions(&self) -> io::Result<Vec<u64>> {
        let number = |name: &str| name.parse().ok().filter(|n: &u64| n.to_string() == name);
        let is_version = |name: &str| Ok(number(name).is_some());
        let names = self.tree.names(&Name::Clears.to_string(), is_version)?;
        let mut versions: Vec<u64> = names.iter().filter_map(|name| number(name)).collect();
        versions.sort_unstable();
        Ok(versions)
    }

    /// Writes a file, syncs it, and links it to a name, which is synced too: unlike a value, the file cannot
    /// be computed again. Returns false if the name is taken, and `None` if the deadline passed first.
    fn link(&self, path: &str, bytes: &[u8], deadline: Instant) -> io::Result<Option<bool>> {
        let made = self.tree.made_parent(path);
        let (folder, target) = made.map_err(|error| match error.kind() {
            io::ErrorKind::NotADirectory => io::Error::new(
                error.kind(),
                format!("{} is a file: move it to {path}", Name::Clears),
            ),
            _ => error,
        })?;
        let (file, name) = temporary(&folder, OFlags::WRONLY)?;
        let link = || {
            write_full(&file, [bytes, &[], &[]])?;
            rustix::fs::fsync(&file)?;
            if Instant::now() >= deadline {
                return Ok(None);
            }
            let flags = AtFlags::empty();
            match rustix::fs::linkat(&folder, &name, &folder, target, flags) {
                Ok(()) => Ok(Some(true)),
                // The answer to a successful link may be lost, and the request sent again.
                Err(_) if has_two_names(&file) => Ok(Some(true)),
                Err(_) if self.tree.stat(path).is_ok() => Ok(Some(false)),
                Err(error) => Err(io::Error::new(
                    io::Error::from(error).kind(),
                    format!(
                        "cannot make a hard link, which passing clears on requires: {error}; use a file \
                         system with hard links"
                    ),
                )),
            }
        };
        let linked = link();
        self.clock.note(&file);
        // A collector removes what remains.
        let _ = rustix::fs::unlinkat(&folder, &name, AtFlags::empty());
        if matches!(linked, Ok(Some(true))) {
            self.tree.sync_parent(path)?;
        }
        linked
    }
}

fn has_two_names(file: &OwnedFd) -> bool {
    rustix::fs::fstat(file).is_ok_and(|stat| stat.st_nlink == 2)
}

fn path(version: u64) -> String {
    format!("{}/{version}", Name::Clears)
}

fn version(number: u64) -> Version {
    Version(Bytes::copy_from_slice(&number.to_le_bytes()))
}

fn number(version: &Version) -> Option<u64> {
    Some(u64::from_le_bytes(version.0[..].try_into().ok()?))
}

fn changes_too_fast() -> StoreError {
    StoreError::unavailable("the object of clears changes faster than it is read")
}

#[cfg(test)]
mod tests {
    use lmc_testkit::{Folder, soon};

    use super::super::tree::Tree;
    use super::*;

    /// Another writer comes between the look of a late one and its link.
    #[test]
    fn a_version_whose_predecessor_was_removed_is_not_the_last_one() {
        let folder = Folder::temporary();
        let values = Values::new(Tree::new(folder.to_path_buf()), false);
        let link = |version: u64| values.link(&path(version), b"x", soon()).expect("a link");
        let found = || values.versions().expect("a list");
        for version in [1, 2] {
            assert_eq!(link(version), Some(true));
        }
        assert!(values.confirm(Some(1), 2).expect("a look"));
        assert_eq!((link(2), found()), (Some(false), vec![2]), "it is taken");
        // The late one has read version 1.
        assert!(link(3) == Some(true) && values.confirm(Some(2), 3).expect("a look"));
        assert_eq!(link(2), Some(true));
        assert!(!values.confirm(Some(1), 2).expect("a look"));
        assert_eq!(found(), [3]);
        // It has read version 8, and all were removed and begun again.
        assert_eq!(link(9), Some(true));
        assert!(!values.confirm(Some(8), 9).expect("a look"));
        assert_eq!(found(), [3]);
    }
}
