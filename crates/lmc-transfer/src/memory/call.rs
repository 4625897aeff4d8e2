//! Calls that wait for the hub's thread.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

use super::worker::Shared;

/// Waits for the outcome of a call. Dropped, it ends what was begun: at once where that waits,
/// before its next piece where it is being copied.
#[derive(Debug)]
pub(super) struct Call<'a, T> {
    pub(super) outcome: oneshot::Receiver<T>,
    pub(super) shared: &'a Shared,
    pub(super) number: u64,
}

impl<T> Future for Call<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let outcome = ready!(Pin::new(&mut self.outcome).poll(context));
        Poll::Ready(outcome.expect("the hub outlives its channels, and answers every call"))
    }
}

impl<T> Drop for Call<'_, T> {
    fn drop(&mut self) {
        self.shared.forget(self.number);
    }
}
