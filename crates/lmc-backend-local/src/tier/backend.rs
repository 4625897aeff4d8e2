//! The tier behind the contract of the lower ones: it copies where those move.

use std::future::ready;
use std::sync::atomic::Ordering;
use std::time::Instant;

use lmc_backend::{
    Backend, BoxFuture, ClearError, CloseError, Cursor, FailedSlot, Health, ListError, Listed,
    LoadError, LoadItem, Loaded, LookupError, Page, RemoveError, StoreError, StoreItem, Stored,
    Usage, UsageError,
};
use lmc_key::ChunkKey;

use super::{Clear, Inserted, LocalTier, ReserveError, WriteStart};
use crate::{OwnerId, TenantId};

/// Who the operations of the contract hold things for. They hold them for the length of a call.
const CONTRACT: OwnerId = OwnerId(u64::MAX);

impl LocalTier {
    fn is_closed(&self) -> bool {
        self.inner().closed.load(Ordering::Acquire)
    }

    fn load_one(&self, LoadItem { key, mut slot, .. }: LoadItem) -> Loaded {
        let Some(lease) = self.lease(CONTRACT, &[key]).pop().flatten() else {
            return Loaded::Miss(slot);
        };
        let (expected, found) = (lease.slot().len(), slot.len());
        if expected != found {
            return Loaded::Failed {
                error: LoadError::Length { expected, found },
                slot: FailedSlot::Quiet(slot),
            };
        }
        slot.bytes_mut().copy_from_slice(lease.bytes());
        Loaded::Hit(slot.written())
    }

    fn store_one(&self, item: StoreItem) -> Result<Stored, StoreError> {
        let needed = item.slot.len();
        let started = self.begin_write(CONTRACT, TenantId::default(), item.key, needed);
        let mut reservation = match started {
            Ok(WriteStart::Reserved(reservation)) => reservation,
            Ok(WriteStart::Present) => return Ok(Stored::Present),
            // Whoever writes it now makes it findable soon; it is not yet.
            Ok(WriteStart::Busy) => return Ok(Stored::Declined),
            Err(ReserveError::TooLarge { len, max }) => {
                return Err(StoreError::TooLarge { max, found: len });
            }
            Err(_) => return Err(StoreError::Full { needed }),
        };
        reservation
            .slot
            .bytes_mut()
            .copy_from_slice(item.slot.bytes());
        let inserted = self.commit(vec![reservation.written(item.parent)]);
        Ok(match inserted[..] {
            [Inserted::Present] => Stored::Present,
            [Inserted::Cleared] => Stored::Declined,
            _ => Stored::Written,
        })
    }
}

impl Backend for LocalTier {
    fn name(&self) -> &str {
        "local"
    }

    fn contains<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<Option<u64>, LookupError>>> {
        if self.is_closed() {
            let closed = keys.iter().map(|_| Err(LookupError::Closed));
            return Box::pin(ready(closed.collect()));
        }
        let found = Self::contains(self, keys);
        Box::pin(ready(found.into_iter().map(Ok).collect()))
    }

    fn leading<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Result<usize, LookupError>> {
        Box::pin(ready(match self.is_closed() {
            true => Err(LookupError::Closed),
            false => Ok(self.lookup_leading(keys)),
        }))
    }

    fn load(&self, items: Vec<LoadItem>, deadline: Instant) -> BoxFuture<'_, Vec<Loaded>> {
        Box::pin(async move {
            let load = |item: LoadItem| {
                let error = match () {
                    () if self.is_closed() => LoadError::Closed,
                    () if Instant::now() >= deadline => LoadError::Deadline,
                    () => return self.load_one(item),
                };
                let slot = FailedSlot::Quiet(item.slot);
                Loaded::Failed { error, slot }
            };
            items.into_iter().map(load).collect()
        })
    }

    fn store(
        &self,
        items: Vec<StoreItem>,
        deadline: Instant,
    ) -> BoxFuture<'_, Vec<Result<Stored, StoreError>>> {
        Box::pin(async move {
            let store = |item| match () {
                () if self.is_closed() => Err(StoreError::Closed),
                () if Instant::now() >= deadline => Err(StoreError::Deadline),
                () => self.store_one(item),
            };
            items.into_iter().map(store).collect()
        })
    }

    fn remove<'a>(
        &'a self,
        keys: &'a [ChunkKey],
        _deadline: Instant,
    ) -> BoxFuture<'a, Vec<Result<bool, RemoveError>>> {
        Box::pin(async move {
            if self.is_closed() {
                return keys.iter().map(|_| Err(RemoveError::Closed)).collect();
            }
            Self::remove(self, keys).into_iter().map(Ok).collect()
        })
    }

    fn clear(&self, _deadline: Instant) -> BoxFuture<'_, Result<u64, ClearError>> {
        Box::pin(ready(match self.is_closed() {
            true => Err(ClearError::Closed),
            false => Ok(Self::clear(self, Clear::All)),
        }))
    }

    fn list(
        &self,
        cursor: Cursor,
        limit: usize,
        _deadline: Instant,
    ) -> BoxFuture<'_, Result<Page, ListError>> {
        if self.is_closed() {
            return Box::pin(ready(Err(ListError::Closed)));
        }
        let (listed, next) = Self::list(self, cursor, limit);
        let listed = listed
            .into_iter()
            .map(|item| Listed::new(item.key, item.len));
        let items = listed.collect();
        Box::pin(ready(Ok(Page { items, next })))
    }

    fn usage(&self, _deadline: Instant) -> BoxFuture<'_, Result<Usage, UsageError>> {
        if self.is_closed() {
            return Box::pin(ready(Err(UsageError::Closed)));
        }
        let usage = Self::usage(self);
        let held = Usage::new(usage.chunks, usage.bytes);
        Box::pin(ready(Ok(held.with_capacity(usage.pool.capacity))))
    }

    fn health(&self) -> Health {
        match self.is_closed() {
            true => Health::Down {
                reason: "closed".to_owned(),
            },
            false => Health::Ready,
        }
    }

    /// Forgets everything: DRAM promises nothing beyond the process.
    fn close(&self, _deadline: Instant) -> BoxFuture<'_, Result<(), CloseError>> {
        Box::pin(async move {
            self.inner().closed.store(true, Ordering::Release);
            self.clear(Clear::All);
            Ok(())
        })
    }
}
