//! Answers that come one by one, and the future that waits for all of them or its deadline.

use std::future::poll_fn;
use std::mem;
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
    /// With their places, as they came, those that nobody has looked at.
    arrived: Vec<(usize, T)>,
    answered: Vec<bool>,
    missing: usize,
    expired: bool,
    /// Whoever waits is woken at each answer, and not only at the last.
    eager: bool,
    waker: Option<Waker>,
}

impl<T: Send + 'static> Batch<T> {
    pub(crate) fn new(len: usize) -> Arc<Self> {
        Self::with(len, false)
    }

    /// One whose answers are looked at while others are still missing.
    pub(crate) fn eager(len: usize) -> Arc<Self> {
        Self::with(len, true)
    }

    fn with(len: usize, eager: bool) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            arrived: Vec::with_capacity(len),
            answered: vec![false; len],
            missing: len,
            expired: false,
            eager,
            waker: None,
        })))
    }

    /// Fills one place. An answer to a place that has one, or after the deadline, is dropped.
    pub(crate) fn answer(&self, place: usize, answer: T) {
        let waker = {
            let mut state = self.0.lock();
            if state.expired || state.answered[place] {
                return;
            }
            state.answered[place] = true;
            state.arrived.push((place, answer));
            state.missing -= 1;
            if state.missing > 0 && !state.eager {
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
        late: impl Fn(usize) -> T,
    ) -> (Vec<T>, bool) {
        self.map(timer, deadline, |_, answer| answer, late).await
    }

    /// As [`Self::all`], with what `look` makes of each answer.
    pub(crate) async fn map<U>(
        self: Arc<Self>,
        timer: &Timer,
        deadline: Instant,
        mut look: impl FnMut(usize, T) -> U,
        mut late: impl FnMut(usize) -> U,
    ) -> (Vec<U>, bool) {
        let mut made: Vec<Option<U>> = Vec::new();
        made.resize_with(self.0.lock().answered.len(), || None);
        let mut watched = false;
        let was_late = poll_fn(|context| {
            loop {
                let (arrived, was_late) = {
                    let mut state = self.0.lock();
                    state.expired |= state.missing > 0 && Instant::now() >= deadline;
                    let over = state.expired || state.missing == 0;
                    let arrived = mem::take(&mut state.arrived);
                    if !over && arrived.is_empty() {
                        state.waker = Some(context.waker().clone());
                        break;
                    }
                    (arrived, over.then_some(state.missing > 0))
                };
                for (place, answer) in arrived {
                    made[place] = Some(look(place, answer));
                }
                if let Some(was_late) = was_late {
                    return Poll::Ready(was_late);
                }
            }
            if !watched {
                watched = true;
                let batch = Arc::clone(&self) as Arc<dyn Expire>;
                timer.watch(deadline, Arc::downgrade(&batch));
            }
            Poll::Pending
        })
        .await;
        let made = made.into_iter().enumerate();
        let all = made.map(|(place, made)| made.unwrap_or_else(|| late(place)));
        (all.collect(), was_late)
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
