//! Reading a number in device memory.

use super::driver::{Event, HostBuffer, Result, Stream};
use super::lane::Wait;

/// A reader with a stream of its own, so that a read waits for no other work.
#[derive(Debug)]
pub(super) struct CountReader {
    stream: Stream,
    value: HostBuffer,
    done: Event,
}

impl CountReader {
    /// Makes a reader. The caller must have entered a context, also for the functions below.
    pub(super) fn new() -> Result<Self> {
        Ok(Self {
            stream: Stream::new()?,
            value: HostBuffer::new(8)?,
            done: Event::new()?,
        })
    }

    /// Returns the 8-byte number at `address`.
    ///
    /// # Safety
    /// The bytes are device memory until the call ends.
    pub(super) unsafe fn look(&self, address: u64, wait: &Wait<'_>) -> Result<u64> {
        // SAFETY: the caller's promise; nothing reads the buffer before the copy is done.
        let given = unsafe { self.stream.copy_to_host(address, self.value.base, 8) };
        let marked = given.and_then(|()| self.stream.record(&self.done));
        let copied = marked.and_then(|()| wait(&|| self.done.is_done()));
        if copied.is_err() {
            // The copy may be in progress nevertheless, so the stream is polled. An error of the stream means
            // a broken context, which does no more work.
            let _ = wait(&|| self.stream.is_idle());
        }
        // SAFETY: the buffer has 8 bytes, and the copy has ended.
        copied.map(|()| unsafe { self.value.base.cast::<u64>().read_unaligned() })
    }
}
