//! Answers that come one by one, and the future that waits for all of them or its deadline.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use parking_lot::Mutex;

use crate::timer::{Expire, Timer};

/// The answers of one batch, filled from any thread.
#[derive(Debug)]
pub(crate) struct Batch<T>(Mutex<State<T>>);

#[derive(Debug)]
struct State<T> {
    answers: Vec<Option<T>>,
    missing: usize,
    expired: bool,
    waker: Option<Waker>,
}

impl<T: Send + 'static> Batch<T> {
    pub(crate) fn new(len: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            answers: std::iter::repeat_with(|| None).take(len).collect(),
            missing: len,
            expired: false,
            waker: None,
        })))
    }

    /// Fills one place. An answer to a place that has one, or after the deadline, is dropped.
    pub(crate) fn answer(&self, place: usize, answer: T) {
        let waker = {
            let mut state = self.0.lock();
            if state.expired || state.answers[place].is_some() {
                return;
            }
            state.answers[place] = Some(answer);
            state.missing -= 1;
            if state.missing > 0 {
                return;
            }
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until every place has an answer or the deadline comes; what is missing then is
    /// made by `late`. Whether the deadline came first is the second value.
    pub(crate) async fn all(
        self: Arc<Self>,
        timer: &Timer,
        deadline: Instant,
        mut late: impl FnMut(usize) -> T,
    ) -> (Vec<T>, bool) {
        let mut watched = false;
        poll_fn(move |context| {
            let mut state = self.0.lock();
            if state.missing > 0 && !state.expired {
                if Instant::now() < deadline {
                    state.waker = Some(context.waker().clone());
                    drop(state);
                    if !watched {
                        watched = true;
                        let batch = Arc::clone(&self) as Arc<dyn Expire>;
                        timer.watch(deadline, Arc::downgrade(&batch));
                    }
                    return Poll::Pending;
                }
                state.expired = true;
            }
            let was_late = state.missing > 0;
            let answers = std::mem::take(&mut state.answers);
            let answers = answers.into_iter().enumerate();
            let all = answers.map(|(place, answer)| answer.unwrap_or_else(|| late(place)));
            Poll::Ready((all.collect(), was_late))
        })
        .await
    }
}

impl<T: Send> Expire for Batch<T> {
    fn expire(&self) {
        let waker = {
            let mut state = self.0.lock();
            state.expired |= state.missing > 0;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
