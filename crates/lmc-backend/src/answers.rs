//! Streams of answers to the keys of a batch.

use std::pin::Pin;

use futures_core::Stream;
use futures_util::{StreamExt, stream};

/// A stream of answers to a batch: one `(index, answer)` for each key, in the order in which the answers
/// become known. The index is the key's position in the batch.
///
/// Dropping the stream cancels the operations that have not begun.
pub type Answers<'a, T> = Pin<Box<dyn Stream<Item = (usize, T)> + Send + 'a>>;

/// Returns a stream of answers that are known already, in the order of the batch.
pub fn ready<'a, T: Send + 'a>(answers: impl IntoIterator<Item = T>) -> Answers<'a, T> {
    let answers: Vec<(usize, T)> = answers.into_iter().enumerate().collect();
    Box::pin(stream::iter(answers))
}

/// Waits for all answers to a batch of `len` keys and returns them in the order of the batch. A result is
/// `None` if the stream ended without an answer for its key. A second answer for a key is dropped, and so is
/// an answer for a key that is not in the batch.
pub async fn in_order<T>(mut answers: Answers<'_, T>, len: usize) -> Vec<Option<T>> {
    let mut ordered: Vec<Option<T>> = std::iter::repeat_with(|| None).take(len).collect();
    while let Some((index, answer)) = answers.next().await {
        if let Some(empty @ None) = ordered.get_mut(index) {
            *empty = Some(answer);
        }
    }
    ordered
}
