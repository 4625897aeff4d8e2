//! Calls that wait for the hub's thread.

use std::pin::Pin;
use std::task::{Context, Poll};

use super::worker::Shared;
use crate::cell::Wait;

/// Waits for what a call comes to; dropped, it ends what was begun: at once where it waited,
/// before its next piece where it is copied.
#[derive(Debug)]
pub(super) struct Call<'a, T> {
    pub(super) wait: Wait<T>,
    pub(super) shared: &'a Shared,
    /// What was begun.
    pub(super) number: u64,
}

impl<T> Future for Call<'_, T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        Pin::new(&mut self.wait).poll(context)
    }
}

impl<T> Drop for Call<'_, T> {
    fn drop(&mut self) {
        self.shared.forget(self.number);
    }
}
