//! Listings: the positions of a store are texts, those of a tier are numbers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use lmc_backend::{BackendError, Cursor, Listed, Page, Unavailable};
use lmc_key::ChunkKey;
use parking_lot::Mutex;

use super::Shared;
use crate::format::{Name, Scope};
use crate::store::StoreError;

/// Listings that may be under way at a time; the oldest one ends with an error.
const MAX_LISTINGS: usize = 16;
/// Chunks of a page, at most.
const MAX_PAGE: usize = 1000;

/// Starts of the next pages of listings.
#[derive(Debug, Default)]
pub(super) struct Listings(Mutex<Tokens>);

#[derive(Debug, Default)]
struct Tokens {
    tokens: BTreeMap<u128, String>,
    last: u128,
}

impl Listings {
    fn token(&self, cursor: Cursor) -> Result<Option<String>, BackendError> {
        if cursor == Cursor::START {
            return Ok(None);
        }
        let token = self.0.lock().tokens.get(&cursor.raw()).cloned();
        let lost = || Unavailable {
            reason: "the listing is too old: start it again".to_owned(),
        };
        Ok(Some(token.ok_or_else(lost)?))
    }

    /// Replaces the position of a listing by the next one.
    fn advance(&self, from: Cursor, next: Option<String>) -> Option<Cursor> {
        let state = &mut *self.0.lock();
        state.tokens.remove(&from.raw());
        state.last += 1;
        state.tokens.insert(state.last, next?);
        while state.tokens.len() > MAX_LISTINGS {
            state.tokens.pop_first();
        }
        Some(Cursor::from_raw(state.last))
    }
}

impl Shared {
    pub(super) async fn list(
        self: &Arc<Self>,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> Result<Page, BackendError> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(BackendError::Closed);
        }
        self.breaker.check()?;
        let token = self.listings.token(cursor)?;
        let shared = Arc::clone(self);
        let listed = self.spawn(async move {
            let begun = Instant::now();
            let page = shared.page(token.as_deref(), limit, deadline).await;
            shared.note([&page], begun);
            page
        });
        let (items, next) = listed.await.map_err(|_| BackendError::Closed)??;
        let next = self.listings.advance(cursor, next);
        Ok(Page { items, next })
    }

    async fn page(
        &self,
        token: Option<&str>,
        limit: usize,
        deadline: Instant,
    ) -> Result<(Vec<Listed>, Option<String>), StoreError> {
        let limit = limit.clamp(1, MAX_PAGE);
        let page = self
            .store
            .list(Scope::VALUES, token, limit, deadline)
            .await?;
        let key = |name| match name {
            Name::Value(key) => Some(key),
            Name::Space(_) | Name::Clears => None,
        };
        let names = page.objects.iter().map(|object| object.name);
        let keys: Vec<ChunkKey> = names.filter_map(key).collect();
        let mut items = Vec::new();
        for (key, head) in keys.iter().zip(self.store.heads(&keys, deadline).await) {
            let Some(head) = head? else {
                continue;
            };
            let header = head.check(key).ok();
            let header = header.filter(|header| self.is_current(header));
            items.extend(header.map(|header| Listed::new(*key, header.plain_len)));
        }
        Ok((items, page.next))
    }
}
