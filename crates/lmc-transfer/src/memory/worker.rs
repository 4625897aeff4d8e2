//! The thread that copies and keeps deadlines.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::copying::Delivery;
use super::state::State;
use crate::{ConnectError, MAX_MESSAGE, OnConnect, PeerId};

/// State that the channels of a hub, its thread and its handshakes share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// Looks at the state, or changes it, and has the thread look too.
    pub(super) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let out = change(&mut self.state.lock());
        self.changed.notify_one();
        out
    }

    /// Looks at the state.
    pub(super) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.state.lock())
    }

    /// Removes what a dropped call began.
    pub(super) fn forget(&self, number: u64) {
        let half = self.with(|state| state.forget(number));
        drop(half);
    }

    /// Copies and keeps deadlines until the hub is gone.
    pub(super) fn run(&self) {
        let mut state = self.state.lock();
        loop {
            let now = Instant::now();
            let mut out = state.expire(now);
            let (copy, over) = state.next_copy(now);
            out.extend(over);
            if let Some(mut copy) = copy {
                MutexGuard::unlocked(&mut state, || {
                    deliver(out);
                    copy.step();
                });
                state.copies.push_back(copy);
                continue;
            }
            if !out.is_empty() {
                MutexGuard::unlocked(&mut state, || deliver(out));
                continue;
            }
            if state.over {
                return;
            }
            match state.next_deadline() {
                Some(deadline) => {
                    self.changed.wait_until(&mut state, deadline);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    /// Has a channel answer a handshake; on a thread of its own.
    pub(super) fn ask(
        self: Arc<Self>,
        number: u64,
        answer: &OnConnect,
        from: &PeerId,
        message: Option<Bytes>,
    ) {
        // The handler is the embedder's code; what it does must not undo the hub.
        let answer = catch_unwind(AssertUnwindSafe(|| answer(from, message)));
        let answer = match answer {
            Ok(Some(answer)) if answer.len() > MAX_MESSAGE => Err(ConnectError::Malformed(
                format!("an answer of {} bytes", answer.len()),
            )),
            Ok(answer) => Ok(answer),
            Err(_) => Err(ConnectError::Refused("its handler panicked".to_owned())),
        };
        let out = self.with(|state| {
            let handshakes = &mut state.handshakes;
            let at = handshakes.iter().position(|other| other.number == number);
            let mut out = Vec::new();
            // Not there: the connect was dropped or has ended.
            if let Some(at) = at {
                let handshake = handshakes.swap_remove(at);
                let (from, to) = (handshake.from, handshake.to);
                let answer = answer.and_then(|answer| {
                    out = state.link(from, to)?;
                    Ok(answer)
                });
                handshake.answer(answer, &mut out);
            }
            out
        });
        deliver(out);
    }
}

/// Hands results over. To be called without the lock.
pub(super) fn deliver(out: Vec<Delivery>) {
    for delivery in out {
        // A waker is the embedder's code, too. A panic was printed; the others get theirs.
        let _ = catch_unwind(AssertUnwindSafe(delivery));
    }
}
