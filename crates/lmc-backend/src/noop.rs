//! A tier that holds nothing.

use std::future;
use std::sync::Arc;
use std::time::Instant;

use lmc_key::ChunkKey;

use crate::{
    Answers, Backend, BackendError, BoxFuture, Cleared, Clears, Cursor, Health, LoadItem, Loaded,
    LocateHint, Located, Page, StoreItem, Stored, Usage, WriteBackend, ready,
};

/// A tier that declines every chunk and never finds one.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopBackend;

impl Backend for NoopBackend {
    fn name(&self) -> &str {
        "noop"
    }

    fn writer(&self) -> Option<&dyn WriteBackend> {
        Some(self)
    }

    fn locate<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _: &'a LocateHint,
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Located, BackendError>>> {
        let absent = keys.iter().map(|_| Ok(Located::Absent));
        Box::pin(future::ready(absent.collect()))
    }

    fn load(&self, items: Vec<LoadItem>, _deadline: Instant) -> Answers<'_, Loaded> {
        ready(items.into_iter().map(|item| Loaded::Miss(item.slot)))
    }

    fn clear(
        &self,
        _clears: Arc<Clears>,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Cleared, BackendError>> {
        Box::pin(future::ready(Ok(Cleared::default())))
    }

    fn usage(&self) -> Option<Usage> {
        Some(Usage::default().with_capacity(0))
    }

    fn health(&self) -> Health {
        Health::Ready
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, Result<(), BackendError>> {
        Box::pin(future::ready(Ok(())))
    }
}

impl WriteBackend for NoopBackend {
    fn store(
        &self,
        items: Vec<StoreItem>,
        _deadline: Instant,
    ) -> Answers<'_, Result<Stored, BackendError>> {
        ready(items.into_iter().map(|_| Ok(Stored::Declined)))
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, BackendError>>> {
        Box::pin(future::ready(keys.iter().map(|_| Ok(false)).collect()))
    }

    fn list(
        &self,
        _cursor: Cursor,
        _limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, BackendError>> {
        Box::pin(future::ready(Ok(Page::default())))
    }
}
