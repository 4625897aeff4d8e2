//! A drive as the tier uses it: a flat folder of files, with asynchronous reads and writes.
//!
//! [`Volume`] is the interface that a real folder, a crashing device and a faulty device implement. Names and
//! sizes change by blocking calls, which are rare. Bytes are moved by [`VolumeOp`]s, which end on a thread of
//! the volume's own.

mod aligned;
pub(crate) use aligned::AlignedBuf;
mod engine;
pub use engine::DiskIo;
mod fixed_files;
mod folder;
pub(crate) use folder::{FolderConfig, FolderVolume, PROBE};
mod part;
pub(crate) use part::SlotPart;
mod pool_buffers;
mod system;
pub(crate) use system::{Medium, NO_SIZE, difference, free_bytes, medium};
mod task;
mod threads;
mod uring;
pub use uring::check_io_uring;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use lmc_memory::SealedSlot;
use thiserror::Error;

/// Alignment of the offsets, lengths and addresses of all operations in bytes, so that direct I/O
/// (`O_DIRECT`) works on any drive.
pub(crate) const BLOCK: u64 = 4096;

/// An open file of a volume. Numbers are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId(pub(crate) u32);

/// Memory that an operation reads into or writes from. The volume owns it until the kernel has finished with
/// it, whatever happens to the caller.
#[derive(Debug)]
pub(crate) enum Buf {
    /// Memory of the tier's own.
    Own(AlignedBuf),
    /// A slot of the pool to read into, or a part of one. Its padding up to a whole [`BLOCK`] is overwritten
    /// too.
    Into(SlotPart),
    /// A slot of the pool to write from. Its padding up to a whole [`BLOCK`] is written too.
    From(SealedSlot),
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reads `len` bytes at `offset` into the buffer, all of them or none.
    Read,
    /// Writes `len` bytes of the buffer at `offset`, all of them or with an error; after an error any part of
    /// them may have been written.
    Write,
    /// Writes as [`Kind::Write`] does, and ends when the bytes are durable.
    WriteDurably,
    /// Makes every ended write of this file durable (`fdatasync`). Has no buffer.
    Sync,
}

/// A completed operation: its buffer, which nothing else uses any more, and its outcome.
pub(crate) struct Done {
    pub(crate) buf: Option<Buf>,
    pub(crate) result: io::Result<()>,
}

/// Callback that is called once, on a thread of the volume (or, by [`Volume::carry_out`], on the calling
/// thread). It must not wait for anything.
pub(crate) type OnDone = Box<dyn FnOnce(Done) + Send>;

/// One operation on a file.
pub(crate) struct VolumeOp {
    pub(crate) kind: Kind,
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    /// Bytes, a multiple of [`BLOCK`]; 0 for a sync.
    pub(crate) len: u64,
    pub(crate) buf: Option<Buf>,
    /// Set when no caller waits for the operation any more: then the operation ends without having begun.
    pub(crate) abandoned: Option<Arc<AtomicBool>>,
    pub(crate) done: OnDone,
}

/// The error of an operation that did not begin because no caller waited for it any more.
#[derive(Debug, Error)]
#[error("no caller waits for the operation any more")]
struct Abandoned;

/// Returns the error of an operation that did not begin because no caller waited for it any more.
pub(crate) fn abandoned_error() -> io::Error {
    io::Error::other(Abandoned)
}

#[cfg(test)]
impl VolumeOp {
    /// Returns true if no caller waits for the operation any more.
    pub(crate) fn is_abandoned(&self) -> bool {
        let abandoned = self.abandoned.as_ref();
        abandoned.is_some_and(|abandoned| abandoned.load(std::sync::atomic::Ordering::Relaxed))
    }
}

/// Returns true for the error of an operation that did not begin because no caller waited for it.
pub(crate) fn is_abandoned(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|error| error.is::<Abandoned>())
}

impl fmt::Debug for VolumeOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            file,
            offset,
            len,
            ..
        } = self;
        write!(f, "{kind:?} of {len} bytes at {offset} of file {}", file.0)
    }
}

/// A flat folder of files on one drive.
pub(crate) trait Volume: fmt::Debug + Send + Sync {
    /// Returns the names of the files, in any order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Returns all bytes of a file that is not being written.
    fn read_all(&self, name: &str) -> io::Result<Box<dyn AsRef<[u8]>>>;

    /// Opens a file. With a length, the file is created if it does not exist, and its blocks are allocated at
    /// once (`fallocate`), so that writing inside it cannot fail on a full drive. An existing file is
    /// extended to at least this length.
    fn open(&self, name: &str, make: Option<u64>) -> io::Result<FileId>;

    /// Closes a file. Operations in progress end normally.
    fn close(&self, file: FileId);

    /// Renames a file, and replaces a file that has the new name.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all changes of names durable.
    fn sync_names(&self) -> io::Result<()>;

    /// Returns a description of files that are not as this volume has left them: another program has removed,
    /// replaced or truncated them. `None` if there are none.
    fn changed(&self) -> Option<String>;

    /// Returns the bytes that can still be allocated on the drive.
    fn free(&self) -> io::Result<u64>;

    /// Starts operations. They run concurrently and end in any order; a caller must wait for a write before
    /// it reads the same offset. Each operation ends exactly once, also after [`Volume::stop`].
    fn submit(&self, ops: Vec<VolumeOp>);

    /// Runs one operation, on the calling thread if the volume can. The call may block for as long as the
    /// drive does not answer. An operation that begins after [`Volume::stop`] ends with an error.
    fn carry_out(&self, op: VolumeOp) {
        self.submit(vec![op]);
    }

    /// Describes the I/O for an operator: `io_uring` or `threads`, and direct or buffered.
    fn describe(&self) -> String;

    /// Ends operations in progress and stops the threads. Later operations end with an error.
    fn stop(&self);
}
