//! Operations of a tier for tests without a runtime: each waits for all answers of its batch.

use std::time::Instant;

use lmc_key::{ChunkKey, SpaceId};

use super::block_on;
use crate::{
    Answers, Backend, BackendError, Clear, ClearEpoch, LoadItem, Loaded, LocateHint, Located,
    StoreItem, Stored, in_order,
};

fn wait<T>(answers: Answers<'_, T>, len: usize) -> Vec<T> {
    let answers = block_on(in_order(answers, len)).into_iter();
    let answer = |answer: Option<T>| answer.expect("one answer for each key");
    answers.map(answer).collect()
}

/// Returns the newest epoch that a tier has noted for a space.
fn epoch_of(backend: &dyn Backend, space: SpaceId) -> ClearEpoch {
    let clears = backend.clears().into_iter();
    let clears = clears.filter(|clear| clear.covers(space));
    clears.fold(ClearEpoch::default(), |newest, clear| {
        newest.join(clear.epoch)
    })
}

/// Stores chunks that were computed after the last clear that the tier knows of.
pub fn store_batch(
    backend: &dyn Backend,
    items: Vec<StoreItem>,
    deadline: Instant,
) -> Vec<Result<Stored, BackendError>> {
    let len = items.len();
    let current = |item: StoreItem| {
        let epoch = epoch_of(backend, item.key.space);
        item.with_epoch(epoch)
    };
    let items = items.into_iter().map(current).collect();
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

/// Clears all spaces, with the epoch that follows on those that the tier has noted.
///
/// # Errors
/// [`BackendError`] of the tier.
pub fn clear_all(backend: &dyn Backend, deadline: Instant) -> Result<u64, BackendError> {
    let clears = backend.clears().into_iter();
    let newest = clears.fold(ClearEpoch::default(), |newest, clear| {
        newest.join(clear.epoch)
    });
    block_on(backend.clear(Clear::all(newest.next()), deadline))
}
