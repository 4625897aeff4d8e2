//! One operation in an engine, and the decision about its next step. Does no I/O itself.

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{BLOCK, Buf, Done, FileId, Kind, OnDone, VolumeOp};

/// Most bytes of one operation. Below every limit of the kernel (2 GiB less a page).
pub(super) const MAX_LEN: u64 = 1 << 30;

/// Most times that an operation that moves no bytes is submitted again.
const MAX_ATTEMPTS: u32 = 16;

/// Longest pause between two attempts.
const MAX_PAUSE: Duration = Duration::from_millis(64);

/// A file as the engines use it. Stays open as long as a task holds it.
#[derive(Debug)]
pub(super) struct OpenFile {
    pub(super) file: File,
    /// True if the file bypasses the page cache.
    pub(super) direct: bool,
    closed: AtomicBool,
}

impl OpenFile {
    pub(super) fn new(file: File, direct: bool) -> Self {
        Self {
            file,
            direct,
            closed: AtomicBool::new(false),
        }
    }

    /// Marks the file as closed: no later operation uses it.
    pub(super) fn set_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

/// Next step of a task after an answer of the kernel.
#[derive(Debug)]
pub(super) enum TaskStep {
    /// The task has ended.
    End(io::Result<()>),
    /// The rest is submitted at once.
    Again,
    /// The task is submitted again after a pause.
    Later(Duration),
}

/// An operation with its file and its progress. Its callback runs exactly once: if it has not run when the
/// task is dropped, it is called with the error that the volume has stopped.
pub(super) struct Task {
    kind: Kind,
    id: FileId,
    /// The file, or the reason why the operation is refused.
    file: io::Result<Arc<OpenFile>>,
    offset: u64,
    len: u64,
    /// Bytes moved so far.
    moved: u64,
    /// Attempts since bytes were last moved.
    attempts: u32,
    buf: Option<Buf>,
    abandoned: Option<Arc<AtomicBool>>,
    done: Option<OnDone>,
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            kind,
            id,
            offset,
            len,
            moved,
            ..
        } = self;
        write!(
            f,
            "{kind:?} of {len} bytes at {offset} of file {}, {moved} moved",
            id.0
        )
    }
}

impl Task {
    /// Makes a task of an operation. A refused operation becomes a task too, so that its callback runs on the
    /// engine's thread like any other.
    pub(super) fn new(mut op: VolumeOp, file: Option<Arc<OpenFile>>) -> Self {
        let file = check(&mut op).and_then(|()| {
            file.ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("{op:?}: the file is not open"),
                )
            })
        });
        let VolumeOp {
            kind,
            file: id,
            offset,
            len,
            buf,
            abandoned,
            done,
        } = op;
        Self {
            kind,
            id,
            file,
            offset,
            len,
            moved: 0,
            attempts: 0,
            buf,
            abandoned,
            done: Some(done),
        }
    }

    /// Returns the task if it may run; ends a refused task.
    pub(super) fn unless_refused(mut self) -> Option<Self> {
        let Err(error) = &mut self.file else {
            return Some(self);
        };
        let error = std::mem::replace(error, stopped());
        self.end(Err(error));
        None
    }

    /// Returns true if no bytes were moved yet and no caller waits for the end any more.
    pub(super) fn is_abandoned(&self) -> bool {
        let abandoned = self.abandoned.as_ref();
        self.moved == 0 && abandoned.is_some_and(|abandoned| abandoned.load(Ordering::Relaxed))
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn id(&self) -> FileId {
        self.id
    }

    pub(super) fn file(&self) -> &OpenFile {
        self.file.as_ref().expect("a refused task never runs")
    }

    /// Returns the offset in the file at which the rest begins.
    pub(super) fn offset(&self) -> u64 {
        self.offset + self.moved
    }

    /// Returns the bytes of the rest.
    pub(super) fn left(&self) -> u64 {
        self.len - self.moved
    }

    /// Returns the first byte of the memory for the rest, valid for [`Self::left`] bytes while the task
    /// exists. A write only reads there.
    pub(super) fn memory(&mut self) -> *mut u8 {
        let start = match self.buf.as_mut().expect("reads and writes have a buffer") {
            Buf::Own(buf) => buf.as_mut_ptr(),
            Buf::Into(part) => part.as_mut_ptr(),
            Buf::From(slot) => slot.as_ptr().cast_mut(),
        };
        start.wrapping_add(self.moved as usize)
    }

    /// Handles the kernel's answer, in bytes.
    pub(super) fn step(&mut self, answer: io::Result<u64>) -> TaskStep {
        let bytes = match answer {
            Err(error) if is_passing(&error) => return self.pause(error),
            Err(error) => return TaskStep::End(Err(error)),
            Ok(_) if self.kind == Kind::Sync => return TaskStep::End(Ok(())),
            Ok(bytes) => bytes.min(self.left()),
        };
        let moved = self.moved + bytes;
        if moved == self.len {
            return TaskStep::End(Ok(()));
        }
        // Direct I/O works in whole blocks only: bytes of an incomplete block are moved again. At the end of
        // the file, this moves nothing.
        let kept = if self.file().direct {
            moved - moved % BLOCK
        } else {
            moved
        };
        if kept > self.moved {
            self.moved = kept;
            self.attempts = 0;
            return TaskStep::Again;
        }
        match self.kind {
            Kind::Read => TaskStep::End(Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                format!(
                    "the file ends after {moved} of the {} bytes to read",
                    self.len
                ),
            ))),
            _ if bytes == 0 => TaskStep::End(Err(io::Error::new(
                io::ErrorKind::WriteZero,
                format!("only {moved} of {} bytes were written", self.len),
            ))),
            _ => self.pause(io::Error::from(io::ErrorKind::WriteZero)),
        }
    }

    fn pause(&mut self, error: io::Error) -> TaskStep {
        if self.attempts == MAX_ATTEMPTS {
            return TaskStep::End(Err(error));
        }
        let pause = Duration::from_millis(1 << self.attempts.min(20)).min(MAX_PAUSE);
        self.attempts += 1;
        TaskStep::Later(pause)
    }

    /// Ends the task, and passes on the result with the buffer.
    pub(super) fn end(mut self, result: io::Result<()>) {
        self.tell(result);
    }

    /// Ends a task that the kernel may still be working on. The buffer is leaked on purpose: lost memory is
    /// better than memory that changes under its next owner.
    pub(super) fn abandon(mut self, error: io::Error) {
        match self.buf.take() {
            Some(Buf::Into(part)) => part.abandon(),
            buffer => {
                let _leaked = ManuallyDrop::new(buffer);
            }
        }
        self.tell(Err(error));
    }

    fn tell(&mut self, result: io::Result<()>) {
        let Some(done) = self.done.take() else { return };
        let buf = self.buf.take();
        // The panic was printed. It is the caller's, and must not end the engine's thread.
        let called = catch_unwind(AssertUnwindSafe(|| done(Done { buf, result })));
        if called.is_err() {
            tracing::error!("a callback of the disk tier panicked at the end of {self:?}");
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.tell(Err(stopped()));
    }
}

/// Returns the error of operations after the stop.
pub(super) fn stopped() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "the volume has stopped")
}

/// Returns true if an error is transient.
pub(super) fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EAGAIN | libc::EINTR | libc::EBUSY)
    )
}

/// Refuses operations that the kernel would refuse, and those for which the memory is too short although the
/// kernel would accept them.
fn check(op: &mut VolumeOp) -> io::Result<()> {
    let memory = match op.buf.as_mut() {
        None => None,
        Some(Buf::Own(buf)) => Some((buf.as_ptr(), buf.len() as u64)),
        Some(Buf::Into(part)) => Some((part.as_mut_ptr().cast_const(), part.capacity())),
        Some(Buf::From(slot)) => Some((slot.as_ptr(), slot.padded_len())),
    };
    let fits = match op.kind {
        Kind::Sync => op.buf.is_none() && op.len == 0,
        Kind::Read => matches!(op.buf, Some(Buf::Own(_) | Buf::Into(_))),
        Kind::Write | Kind::WriteDurably => matches!(op.buf, Some(Buf::Own(_) | Buf::From(_))),
    };
    let end = op.offset.checked_add(op.len);
    let why = match memory {
        _ if !fits => match op.kind {
            Kind::Sync => "a sync has no buffer and no length".to_owned(),
            Kind::Read => "a read needs own memory or a reserved slot".to_owned(),
            _ => "a write needs own memory or a sealed slot".to_owned(),
        },
        None => return Ok(()),
        Some(_) if op.len == 0 || op.len > MAX_LEN => {
            "the length must be between one block and 1 GiB".to_owned()
        }
        Some(_) if !op.len.is_multiple_of(BLOCK) || !op.offset.is_multiple_of(BLOCK) => {
            "offset and length must be whole blocks".to_owned()
        }
        Some(_) if end.is_none_or(|end| end > i64::MAX as u64) => {
            "the end is beyond the largest file size".to_owned()
        }
        Some((at, _)) if !(at.addr() as u64).is_multiple_of(BLOCK) => {
            "the memory must begin at a whole block".to_owned()
        }
        Some((_, capacity)) if op.len > capacity => format!("the buffer has only {capacity} bytes"),
        Some(_) => return Ok(()),
    };
    let why = format!("{op:?}: {why}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Items to return to after a pause.
#[derive(Debug)]
pub(super) struct Later<T>(Vec<(Instant, T)>);

impl<T> Later<T> {
    pub(super) fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) fn push(&mut self, at: Instant, thing: T) {
        self.0.push((at, thing));
    }

    /// Removes and returns the items that are due at `now`, in their order of arrival.
    pub(super) fn take_due(&mut self, now: Instant) -> impl Iterator<Item = T> {
        self.0
            .extract_if(.., move |(at, _)| *at <= now)
            .map(|(_, thing)| thing)
    }

    /// Removes and returns all items, due or not.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = T> {
        self.0.drain(..).map(|(_, thing)| thing)
    }

    /// Returns the time at which the next item is due.
    pub(super) fn next(&self) -> Option<Instant> {
        self.0.iter().map(|(at, _)| *at).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volume::AlignedBuf;

    fn task(kind: Kind, direct: bool, blocks: u64) -> Task {
        let file = Arc::new(OpenFile::new(File::open("/dev/null").unwrap(), direct));
        let len = blocks * BLOCK;
        let buf = (len > 0).then(|| Buf::Own(AlignedBuf::new(len)));
        let op = VolumeOp {
            kind,
            file: FileId(0),
            offset: 2 * BLOCK,
            len,
            buf,
            abandoned: None,
            done: Box::new(drop),
        };
        Task::new(op, Some(file)).unless_refused().unwrap()
    }

    fn errno(error: i32) -> io::Result<u64> {
        Err(io::Error::from_raw_os_error(error))
    }

    #[track_caller]
    fn failed(step: TaskStep) -> io::ErrorKind {
        match step {
            TaskStep::End(Err(error)) => error.kind(),
            other => panic!("{other:?} is no failure"),
        }
    }

    #[test]
    fn short_answers_are_continued_where_whole_blocks_end() {
        let mut task = task(Kind::Read, true, 8);
        let start = task.memory();
        assert!(matches!(task.step(Ok(3 * BLOCK + 5)), TaskStep::Again));
        assert_eq!((task.offset(), task.left()), (5 * BLOCK, 5 * BLOCK));
        assert_eq!(task.memory(), start.wrapping_add(3 * BLOCK as usize));
        assert!(matches!(task.step(Ok(5 * BLOCK)), TaskStep::End(Ok(()))));
    }

    #[test]
    fn behind_the_page_cache_they_are_continued_at_any_byte() {
        let mut task = task(Kind::Write, false, 2);
        assert!(matches!(task.step(Ok(5)), TaskStep::Again));
        assert_eq!((task.offset(), task.left()), (2 * BLOCK + 5, 2 * BLOCK - 5));
        assert!(matches!(
            task.step(Ok(2 * BLOCK - 5)),
            TaskStep::End(Ok(()))
        ));
    }

    #[test]
    fn a_read_that_moves_no_block_is_at_the_end() {
        for bytes in [0, 5] {
            let mut task = task(Kind::Read, true, 2);
            assert!(matches!(task.step(Ok(BLOCK)), TaskStep::Again));
            assert_eq!(failed(task.step(Ok(bytes))), io::ErrorKind::UnexpectedEof);
        }
    }

    #[test]
    fn a_write_that_moves_nothing_fails() {
        assert_eq!(
            failed(task(Kind::Write, true, 2).step(Ok(0))),
            io::ErrorKind::WriteZero
        );
        let mut partly = task(Kind::Write, true, 2);
        assert!(matches!(partly.step(Ok(5)), TaskStep::Later(_)));
        assert_eq!(partly.left(), 2 * BLOCK);
    }

    #[test]
    fn passing_errors_are_tried_again_but_not_for_ever() {
        let mut task = task(Kind::Sync, true, 0);
        let mut waited = Duration::ZERO;
        for _ in 0..MAX_ATTEMPTS {
            let TaskStep::Later(pause) = task.step(errno(libc::EAGAIN)) else {
                panic!("given up too early");
            };
            waited += pause;
        }
        assert!(waited < Duration::from_secs(2), "{waited:?}");
        assert_eq!(
            failed(task.step(errno(libc::EAGAIN))),
            io::ErrorKind::WouldBlock
        );
    }

    #[test]
    fn progress_gives_new_attempts_and_other_errors_end() {
        let mut task = task(Kind::Read, true, 40);
        for _ in 0..39 {
            assert!(matches!(task.step(errno(libc::EINTR)), TaskStep::Later(_)));
            assert!(matches!(task.step(Ok(BLOCK)), TaskStep::Again));
        }
        let TaskStep::End(Err(error)) = task.step(errno(libc::EIO)) else {
            panic!("an error of the drive ends it");
        };
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    fn what_is_due_comes_in_order_and_once() {
        let start = Instant::now();
        let mut later = Later::new();
        for (ms, thing) in [(5, 'a'), (9, 'b'), (1, 'c')] {
            later.push(start + Duration::from_millis(ms), thing);
        }
        assert_eq!(later.next(), Some(start + Duration::from_millis(1)));
        let due: String = later.take_due(start + Duration::from_millis(5)).collect();
        assert_eq!(due, "ac");
        assert_eq!(later.take_all().collect::<String>(), "b");
        assert_eq!(later.next(), None);
    }
}
