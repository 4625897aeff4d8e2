//! Files without a name that no process can truncate.

use std::fs::File;
use std::io;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Makes a file of `len` bytes in memory, with no pages allocated yet, sealed against shrinking, growing and
/// further seals.
pub(super) fn create(len: u64) -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(c"lmc-pool", flags)?);
    file.set_len(len)?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(file)
}
