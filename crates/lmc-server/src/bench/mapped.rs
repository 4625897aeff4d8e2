//! Shared memory as a worker maps it: the server's pool, or the worker's own paged memory.
//!
//! `lmc-memory` guards foreign memory against its owner, and refuses pools of lmc. A load generator uses
//! the server's pool as an engine's worker does.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lmc_memory::SharedName;
use memmap2::{MmapOptions, MmapRaw};

/// A mapping of a whole segment. On drop, a segment of our own is removed from the system.
#[derive(Debug)]
pub(crate) struct Mapped {
    memory: MmapRaw,
    _own: Option<Own>,
}

/// A file that is removed on drop.
#[derive(Debug)]
struct Own(PathBuf);

impl Drop for Own {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Mapped {
    /// Maps the first `len` bytes of a segment that exists.
    pub(crate) fn open(name: &str, len: u64) -> Result<Self> {
        // The name comes from the process that listens on the port, which may be any process.
        let path = SharedName::new(name)?.path();
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .with_context(|| {
                format!(
                    "the server's pool {} cannot be opened: check that the server runs on this host, as this user",
                    path.display()
                )
            })?;
        let found = file.metadata()?.len();
        ensure!(
            found >= len && len > 0,
            "the pool {} has {found} bytes, but the server announced {len}",
            path.display()
        );
        Self::map(&file, len as usize, None)
    }

    /// Creates a segment of our own and maps it.
    pub(crate) fn create(name: &str, len: usize) -> Result<Self> {
        let path = PathBuf::from("/dev/shm").join(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("cannot create {}", path.display()))?;
        let own = Own(path);
        file.set_len(len as u64)?;
        Self::map(&file, len, Some(own))
    }

    fn map(file: &File, len: usize, own: Option<Own>) -> Result<Self> {
        let memory = MmapOptions::new().len(len).map_raw(file);
        Ok(Self {
            memory: memory.with_context(|| format!("mmap of {len} bytes"))?,
            _own: own,
        })
    }

    /// Copies `bytes` to `offset`.
    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.check(offset, bytes.len())?;
        // SAFETY: `check` proved that the range is inside the mapping. Another process may write there,
        // which only causes wrong bytes, because no reference to the bytes exists.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.memory.as_mut_ptr().add(at),
                bytes.len(),
            );
        }
        Ok(())
    }

    /// Copies from `offset` into `bytes`.
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<()> {
        let at = self.check(offset, bytes.len())?;
        // SAFETY: as in `write`, the other way round.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.memory.as_mut_ptr().add(at),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        Ok(())
    }

    fn check(&self, offset: u64, len: usize) -> Result<usize> {
        let end = offset.checked_add(len as u64);
        ensure!(
            end.is_some_and(|end| end <= self.memory.len() as u64),
            "the server named bytes {offset}+{len}, outside the segment of {} bytes",
            self.memory.len()
        );
        Ok(offset as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_are_read_and_nothing_outside_is_touched() {
        let name = format!("lmc_bench_test_{}", std::process::id());
        let own = Mapped::create(&name, 8192).expect("a segment");
        let guest = Mapped::open(&name, 8192).expect("it exists");
        own.write(8190, &[1, 2]).expect("inside");
        let mut bytes = [0; 2];
        guest.read(8190, &mut bytes).expect("inside");
        assert_eq!(bytes, [1, 2]);
        assert!(own.write(8191, &[1, 2]).is_err());
        assert!(guest.read(u64::MAX, &mut bytes).is_err());
        assert!(Mapped::open(&name, 8193).is_err());
        drop(own);
        assert!(Mapped::open(&name, 8192).is_err(), "the name outlived it");
    }
}
