//! A drive as the tier sees it: a flat folder of files, with reads and writes that end later.
//!
//! [`Volume`] is the seam under which a real folder, a crash device and a faulty one stand.
//! Names and sizes change by calls that wait (they are rare); bytes move by [`Op`]s that end on a
//! thread of the volume's own.

mod aligned;
pub(crate) use aligned::AlignedBuf;
mod engine;
mod fixed_files;
mod folder;
pub(crate) use folder::{FolderConfig, FolderVolume, PROBE};
mod part;
pub(crate) use part::Part;
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

/// Offsets, lengths and addresses of all operations are multiples of this many bytes, so that
/// they can go past the page cache (`O_DIRECT`) on any drive.
pub(crate) const BLOCK: u64 = 4096;

/// An open file of a volume. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct FileId(pub(crate) u32);

/// Memory that an operation reads into or writes from. The volume owns it until the kernel is
/// done with it, whatever becomes of the one who asked.
#[derive(Debug)]
pub(crate) enum Buf {
    /// Memory of the tier's own.
    Own(AlignedBuf),
    /// A slot of the pool to read into, or a part of one. Padding up to a whole [`BLOCK`] is
    /// written too.
    Into(Part),
    /// A slot of the pool to write from. Its padding up to a whole [`BLOCK`] is written out too.
    From(SealedSlot),
}

/// Kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Reads `len` bytes at `offset` into the buffer, all of them or none.
    Read,
    /// Writes `len` bytes of the buffer at `offset`, all of them or an error; after an error any
    /// part of them may be there.
    Write,
    /// Writes as [`Kind::Write`] does, and ends when those bytes are durable.
    WriteDurably,
    /// Makes every write of this file that has ended before durable (`fdatasync`). No buffer.
    Sync,
}

/// A completed operation: its buffer, which nothing uses any more, and its outcome.
pub(crate) struct Done {
    pub(crate) buf: Option<Buf>,
    pub(crate) result: io::Result<()>,
}

/// Is called once, on a thread of the volume (or, by [`Volume::carry_out`], on the one that asks),
/// and must not wait for anything.
pub(crate) type OnDone = Box<dyn FnOnce(Done) + Send>;

/// One operation on a file.
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) file: FileId,
    pub(crate) offset: u64,
    /// Bytes, a multiple of [`BLOCK`]; 0 for a sync.
    pub(crate) len: u64,
    pub(crate) buf: Option<Buf>,
    /// Set when no caller waits for the operation any more: it then ends without having begun.
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
impl Op {
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

impl fmt::Debug for Op {
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
    /// The files that are there, in any order.
    fn list(&self) -> io::Result<Vec<String>>;

    /// Returns all bytes of a file that is not being written, by its name.
    fn read_all(&self, name: &str) -> io::Result<Box<dyn AsRef<[u8]>>>;

    /// Opens a file. With a length it is made where it does not exist, and its blocks are allocated
    /// at once (`fallocate`), so that writing inside it cannot meet a full drive; a file that is
    /// there is made at least as long.
    fn open(&self, name: &str, make: Option<u64>) -> io::Result<FileId>;

    /// Forgets an open file. Operations that are under way end as they would.
    fn close(&self, file: FileId);

    /// Gives a file another name, in place of any that has it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a name.
    fn remove(&self, name: &str) -> io::Result<()>;

    /// Makes all that was done to names durable.
    fn sync_names(&self) -> io::Result<()>;

    /// Says which files are not as this volume has left them: removed, replaced or cut short by
    /// another program. `None` while all are.
    fn changed(&self) -> Option<String>;

    /// Bytes that can still be taken on the drive.
    fn free(&self) -> io::Result<u64>;

    /// Starts operations. They run side by side and end in any order; the caller waits for a
    /// write before it reads the same offset. Each is done exactly once, also after
    /// [`Volume::stop`].
    fn submit(&self, ops: Vec<Op>);

    /// Carries out one operation, on the thread that asks where the volume can: it may wait there
    /// for as long as the drive does not answer. What begins after [`Volume::stop`] ends with an
    /// error.
    fn carry_out(&self, op: Op) {
        self.submit(vec![op]);
    }

    /// Describes the I/O for people: `io_uring` or `threads`, and direct or buffered.
    fn describe(&self) -> String;

    /// Ends what is under way and stops the threads. Later operations end with an error.
    fn stop(&self);
}
