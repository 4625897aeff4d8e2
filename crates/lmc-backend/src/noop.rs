//! The tier that holds nothing.

use std::future::ready;
use std::time::Instant;

use lmc_key::ChunkKey;

use crate::{
    Backend, BackendError, BoxFuture, Cursor, Health, LoadItem, Loaded, Page, StoreItem, Stored,
    Usage,
};

/// Declines every chunk and never finds one: what the engine runs on when there is no lower tier.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopBackend;

impl Backend for NoopBackend {
    fn name(&self) -> &str {
        "noop"
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, BackendError>>> {
        Box::pin(ready(keys.iter().map(|_| Ok(None)).collect()))
    }

    fn load(&self, items: Vec<LoadItem>, _deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        let misses = items.into_iter().map(|item| Loaded::Miss(item.slot));
        Box::pin(ready(misses.collect()))
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        _deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, BackendError>>> {
        Box::pin(ready(items.iter().map(|_| Ok(Stored::Declined)).collect()))
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(ready(keys.iter().map(|_| Ok(false)).collect()))
    }

    fn list(
        &self,
        _cursor: Cursor,
        _limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(ready(Ok(Page::default())))
    }

    fn usage(&self, _deadline: Instant) -> BoxFuture<'_, Result<Usage, BackendError>> {
        Box::pin(ready(Ok(Usage::default().with_capacity(0))))
    }

    fn health(&self) -> Health {
        Health::Ready
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        Box::pin(ready(Ok(())))
    }
}
