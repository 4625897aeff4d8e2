//! Answers to the keys of a batch, each as it ends.

use std::pin::Pin;

use futures_core::Stream;
use futures_util::{StreamExt, stream};

/// A stream of answers to a batch: `(index, answer)` once for each key, in the order in which they
/// end. The index is that of the key in the batch.
///
/// Dropping it cancels what has not begun.
pub type Answers<'a, T> = Pin<Box<dyn Stream<Item = (usize, T)> + Send + 'a>>;

/// Returns answers that are all known, in the order of the batch.
pub fn ready<'a, T: Send + 'a>(answers: impl IntoIterator<Item = T>) -> Answers<'a, T> {
    let answers: Vec<(usize, T)> = answers.into_iter().enumerate().collect();
    Box::pin(stream::iter(answers))
}

/// Waits for all answers to a batch of `len` keys and returns them in the order of the batch. A
/// result is `None` if the stream ended without an answer to it; a second answer to one key, or
/// one to a key that is not in the batch, is dropped.
pub async fn in_order<T>(mut answers: Answers<'_, T>, len: usize) -> Vec<Option<T>> {
    let mut ordered: Vec<Option<T>> = std::iter::repeat_with(|| None).take(len).collect();
    while let Some((index, answer)) = answers.next().await {
        if let Some(empty @ None) = ordered.get_mut(index) {
            *empty = Some(answer);
        }
    }
    ordered
}
