//! Operations of a tier for tests without a runtime: each waits for all answers of its batch.

use std::sync::Arc;
use std::time::Instant;

use lmc_key::ChunkKey;

use super::block_on;
use crate::{
    Answers, Backend, BackendError, Clears, LoadItem, Loaded, LocateHint, Located, StartId,
    StoreItem, Stored, WriteBackend, in_order,
};

fn wait<T>(answers: Answers<'_, T>, len: usize) -> Vec<T> {
    let answers = block_on(in_order(answers, len)).into_iter();
    let answer = |answer: Option<T>| answer.expect("one answer for each key");
    answers.map(answer).collect()
}

/// Stores chunks.
pub fn store_batch(
    backend: &dyn WriteBackend,
    items: Vec<StoreItem>,
    deadline: Instant,
) -> Vec<Result<Stored, BackendError>> {
    let len = items.len();
    wait(backend.store(items, deadline), len)
}

/// Loads chunks.
pub fn load_batch(backend: &dyn Backend, items: Vec<LoadItem>, deadline: Instant) -> Vec<Loaded> {
    let len = items.len();
    wait(backend.load(items, deadline), len)
}

/// Returns the length of each chunk that is present.
pub fn lens_of(
    backend: &dyn Backend,
    keys: &[ChunkKey],
    deadline: Instant,
) -> Vec<Result<Option<u64>, BackendError>> {
    let len = |located: Located| located.present().map(|location| location.len);
    let located = block_on(backend.locate(keys, LocateHint::none(), deadline)).into_iter();
    located.map(|located| located.map(len)).collect()
}

/// Carries out one more clear than the tier knows of. Returns the number of chunks removed.
///
/// # Errors
/// [`BackendError`] of the tier's `clear`.
pub fn clear_all(backend: &dyn Backend, deadline: Instant) -> Result<u64, BackendError> {
    let mut clears = Clears::clone(&backend.clears());
    let start = StartId::random().expect("a test machine has random numbers");
    clears.count(start).expect("a test clears a few times");
    let cleared = block_on(backend.clear(Arc::new(clears), deadline))?;
    Ok(cleared.removed)
}
