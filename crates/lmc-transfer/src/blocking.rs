//! The same for callers without a runtime.

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

/// Runs a future of a channel on this thread. Not for threads of a runtime.
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

/// A thread that waits does not sleep for this long, but gives way to others: a small transfer is
/// over by then, and to wake a thread takes as long as that transfer.
const AWAKE: Duration = Duration::from_micros(50);

/// A thread that gives way is back within this time, unless another computes on its core.
const BACK: Duration = Duration::from_micros(200);
/// For this long afterwards, a thread sleeps instead of giving way.
const CROWDED: Duration = Duration::from_millis(100);

thread_local! {
    /// Until when this thread does not give way.
    static CROWDED_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Gives way to other threads for a moment, without sleeping. Not where that was long of late: to
/// give way to a thread that computes costs a tick of the scheduler (4 ms) each time, and one that
/// sleeps is woken within microseconds. Whether it may go on so; if not, the thread is to sleep.
pub(crate) fn give_way() -> bool {
    let begun = Instant::now();
    if CROWDED_UNTIL.get().is_some_and(|until| begun < until) {
        return false;
    }
    thread::yield_now();
    let back = begun.elapsed() < BACK;
    CROWDED_UNTIL.set((!back).then(|| Instant::now() + CROWDED));
    back
}

/// Whether a thread is to look at its future again.
struct Woken {
    thread: Thread,
    woken: AtomicBool,
}

impl Woken {
    fn wait(&self) {
        let begun = Instant::now();
        while !self.woken.swap(false, Ordering::AcqRel) {
            if begun.elapsed() >= AWAKE || !give_way() {
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

/// A channel whose calls block the thread until they are over.
#[derive(Debug, Clone, Copy)]
pub struct Blocking<'a>(&'a dyn TransferChannel);

impl<'a> Blocking<'a> {
    /// The blocking form of a channel.
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

    /// A small write took a tick of the scheduler (4 ms), or two, where threads gave way on cores
    /// on which others computed.
    #[test]
    fn a_thread_does_not_give_way_to_one_that_computes() {
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let patience = Instant::now() + Duration::from_secs(20);
            let mut back = give_way();
            while back && Instant::now() < patience {
                back = give_way();
            }
            over.store(true, Ordering::Relaxed);
            assert!(!back, "it always came back at once");
        });
    }
}
