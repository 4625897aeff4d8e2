//! Loads and stores of a wrapped tier that begin after a wait, or end at their deadline.

use std::time::Instant;

use futures_util::FutureExt;

use crate::{
    Answers, Backend, BackendError, FailedSlot, LoadItem, Loaded, StoreItem, Stored, WriteBackend,
    ready,
};

/// Loads from `inner` after `wait`, or answers [`BackendError::Deadline`] when it returns false.
pub(super) fn load_after<'a, B: Backend>(
    inner: &'a B,
    wait: impl Future<Output = bool> + Send + 'a,
    items: Vec<LoadItem>,
    deadline: Instant,
) -> Answers<'a, Loaded> {
    let loaded = wait.map(move |in_time| {
        let late = |item: LoadItem| Loaded::Failed {
            error: BackendError::Deadline,
            slot: FailedSlot::Released(item.slot),
        };
        match in_time {
            true => inner.load(items, deadline),
            false => ready(items.into_iter().map(late)),
        }
    });
    Box::pin(loaded.flatten_stream())
}

/// Stores in `inner` after `wait`, or answers [`BackendError::Deadline`] when it returns false.
pub(super) fn store_after<'a, B: WriteBackend>(
    inner: &'a B,
    wait: impl Future<Output = bool> + Send + 'a,
    items: Vec<StoreItem>,
    deadline: Instant,
) -> Answers<'a, Result<Stored, BackendError>> {
    let stored = wait.map(move |in_time| match in_time {
        true => inner.store(items, deadline),
        false => ready(items.into_iter().map(|_| Err(BackendError::Deadline))),
    });
    Box::pin(stored.flatten_stream())
}
