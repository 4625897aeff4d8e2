//! The blocking form of a channel, and an executor for one future.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};

use crate::{Address, ConnectError, Filled, Index, PeerId, Sent, TransferChannel, TransferError};

/// Runs a future of a channel on this thread until it is done. Not for threads of a runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let woken = Arc::new(Woken {
        thread: thread::current(),
        woken: AtomicBool::new(false),
    });
    let waker = Waker::from(Arc::clone(&woken));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => woken.wait(),
        }
    }
}

/// Time that a waiting thread yields before it parks: a small transfer is done by then, and waking
/// a thread takes as long as that transfer.
const AWAKE: Duration = Duration::from_micros(50);

/// Time within which a yield returns, unless another thread computes on the core.
const BACK: Duration = Duration::from_micros(200);
/// Time for which a thread parks instead of yielding, after a yield that took longer.
const CROWDED: Duration = Duration::from_millis(100);

thread_local! {
    /// Until when this thread does not yield.
    static CROWDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Yields the core once. Returns `false` if this or a recent yield took longer than [`BACK`]: the
/// caller should then park, because yielding to a thread that computes costs a scheduler tick
/// (4 ms), while a parked thread is woken within microseconds.
pub(crate) fn yield_briefly() -> bool {
    let begun = Instant::now();
    if CROWDED_UNTIL.get().is_some_and(|until| begun < until) {
        return false;
    }
    thread::yield_now();
    let back = begun.elapsed() < BACK;
    CROWDED_UNTIL.set((!back).then(|| Instant::now() + CROWDED));
    back
}

/// Wakes a thread that runs a future.
struct Woken {
    thread: Thread,
    woken: AtomicBool,
}

impl Woken {
    fn wait(&self) {
        let begun = Instant::now();
        while !self.woken.swap(false, Ordering::AcqRel) {
            if begun.elapsed() >= AWAKE || !yield_briefly() {
                thread::park();
            }
        }
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// A channel whose calls block the thread until they are done.
#[derive(Debug, Clone, Copy)]
pub struct Blocking<'a>(&'a dyn TransferChannel);

impl<'a> Blocking<'a> {
    /// Returns the blocking form of a channel.
    pub fn new(channel: &'a dyn TransferChannel) -> Self {
        Self(channel)
    }

    /// As [`TransferChannel::connect`].
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(
        &self,
        peer: &PeerId,
        address: &Address,
        message: Option<Bytes>,
        deadline: Instant,
    ) -> Result<Option<Bytes>, ConnectError> {
        block_on(self.0.connect(peer, address, message, deadline))
    }

    /// As [`TransferChannel::send`].
    pub fn send(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Sent {
        block_on(self.0.send(objects, peer, tag, deadline))
    }

    /// As [`TransferChannel::receive`].
    pub fn receive(
        &self,
        slots: Vec<ReservedSlot>,
        peer: &PeerId,
        tag: u64,
        deadline: Instant,
    ) -> Filled {
        block_on(self.0.receive(slots, peer, tag, deadline))
    }

    /// As [`TransferChannel::write`].
    pub fn write(
        &self,
        objects: Vec<SealedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Sent {
        block_on(self.0.write(objects, peer, indices, deadline))
    }

    /// As [`TransferChannel::read`].
    pub fn read(
        &self,
        slots: Vec<ReservedSlot>,
        peer: &PeerId,
        indices: &[Index],
        deadline: Instant,
    ) -> Filled {
        block_on(self.0.read(slots, peer, indices, deadline))
    }

    /// As [`TransferChannel::close`].
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn close(&self, deadline: Instant) -> Result<(), TransferError> {
        block_on(self.0.close(deadline))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A small write took a tick of the scheduler (4 ms), or two, where threads yielded on cores on
    /// which others computed.
    #[test]
    fn a_thread_does_not_yield_to_one_that_computes() {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let deadline = Instant::now() + Duration::from_secs(20);
            let mut back = yield_briefly();
            while back && Instant::now() < deadline {
                back = yield_briefly();
            }
            over.store(true, Ordering::Relaxed);
            assert!(!back, "every yield returned at once");
        });
    }
}
