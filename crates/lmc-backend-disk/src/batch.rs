//! Batches of answers that come one by one, and the stream that yields them until the deadline.

use std::collections::VecDeque;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use futures_core::Stream;
use futures_util::StreamExt;
use parking_lot::Mutex;

use crate::timer::{Expire, Timer};

/// The answers of one batch. Any thread may add one.
#[derive(Debug)]
pub(crate) struct AnswerBatch<T> {
    state: Mutex<PendingAnswers<T>>,
    /// True once no caller waits for the answers any more.
    abandoned: Arc<AtomicBool>,
}

#[derive(Debug)]
struct PendingAnswers<T> {
    /// Answers that were not yielded yet.
    ready: VecDeque<(usize, T)>,
    /// True for each key without an answer.
    missing: Vec<bool>,
    expired: bool,
    waker: Option<Waker>,
}

impl<T: Send + 'static> AnswerBatch<T> {
    pub(crate) fn new(len: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(PendingAnswers {
                ready: VecDeque::new(),
                missing: vec![true; len],
                expired: false,
                waker: None,
            }),
            abandoned: Arc::default(),
        })
    }

    /// Answers one key. A second answer to a key is dropped, and so is an answer after the deadline.
    pub(crate) fn answer(&self, index: usize, answer: T) {
        let waker = {
            let mut state = self.state.lock();
            if state.expired || !mem::replace(&mut state.missing[index], false) {
                return;
            }
            state.ready.push_back((index, answer));
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns the flag that is set when no caller waits for the answers any more.
    pub(crate) fn abandoned(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.abandoned)
    }

    /// Yields the answers as they come. At the deadline, `late` gets the indices of the keys without an
    /// answer and answers them.
    pub(crate) fn answers<'a>(
        self: Arc<Self>,
        timer: &'a Timer,
        deadline: Instant,
        late: impl FnOnce(Vec<usize>) -> Vec<T> + Send + Unpin + 'a,
    ) -> impl Stream<Item = (usize, T)> + Send + 'a {
        Answering {
            batch: self,
            timer,
            deadline,
            watched: false,
            late: Some(late),
        }
    }

    /// Waits for all answers, and returns them in the order of the keys. `late` answers the keys without an
    /// answer at the deadline.
    pub(crate) async fn all(
        self: Arc<Self>,
        timer: &Timer,
        deadline: Instant,
        mut late: impl FnMut() -> T + Send + Unpin,
    ) -> (Vec<T>, bool) {
        let len = self.state.lock().missing.len();
        let mut was_late = false;
        let mut ordered: Vec<Option<T>> = std::iter::repeat_with(|| None).take(len).collect();
        let none_came = |missing: Vec<usize>| {
            was_late = true;
            missing.iter().map(|_| late()).collect()
        };
        let mut answers = self.answers(timer, deadline, none_came);
        while let Some((index, answer)) = answers.next().await {
            ordered[index] = Some(answer);
        }
        drop(answers);
        let all = ordered.into_iter().flatten().collect();
        (all, was_late)
    }
}

/// The stream of a batch's answers.
struct Answering<'a, T: Send + 'static, F> {
    batch: Arc<AnswerBatch<T>>,
    timer: &'a Timer,
    deadline: Instant,
    watched: bool,
    late: Option<F>,
}

impl<T, F> Stream for Answering<'_, T, F>
where
    T: Send + 'static,
    F: FnOnce(Vec<usize>) -> Vec<T> + Unpin,
{
    type Item = (usize, T);

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let mut state = this.batch.state.lock();
        if let Some(answer) = state.ready.pop_front() {
            return Poll::Ready(Some(answer));
        }
        if !state.missing.contains(&true) {
            return Poll::Ready(None);
        }
        if Instant::now() < this.deadline {
            state.waker = Some(context.waker().clone());
            drop(state);
            if !mem::replace(&mut this.watched, true) {
                let batch = Arc::clone(&this.batch) as Arc<dyn Expire>;
                this.timer.watch(this.deadline, Arc::downgrade(&batch));
            }
            return Poll::Pending;
        }
        state.expired = true;
        let missing: Vec<usize> = (0..state.missing.len())
            .filter(|&index| mem::replace(&mut state.missing[index], false))
            .collect();
        if let Some(late) = this.late.take() {
            let answers = late(missing.clone());
            state.ready.extend(missing.into_iter().zip(answers));
        }
        Poll::Ready(state.ready.pop_front())
    }
}

impl<T: Send + 'static, F> Drop for Answering<'_, T, F> {
    fn drop(&mut self) {
        self.batch.abandoned.store(true, Ordering::Relaxed);
        // Slots in answers that no caller reads are released now, not with the batch.
        let unread = mem::take(&mut self.batch.state.lock().ready);
        drop(unread);
    }
}

impl<T: Send> Expire for AnswerBatch<T> {
    fn expire(&self) {
        let waker = self.state.lock().waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
