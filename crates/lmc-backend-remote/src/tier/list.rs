//! Listings: a store's positions are texts, a tier's positions are numbers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use lmc_backend::{BackendError, Cursor, Listed, Page, Unavailable, now};
use parking_lot::Mutex;

use super::access::StoreAccess;
use super::clears::ClearsSync;
use crate::format::{ChunkFolder, Scope, ValueName};
use crate::store::StoreError;

/// Most listings in progress; beyond that, the oldest one ends with an error.
const MAX_LISTINGS: usize = 16;
/// Most chunks of a page.
const MAX_PAGE: usize = 1000;

/// The listings in progress.
#[derive(Debug)]
pub(super) struct Listings {
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    tokens: Mutex<Tokens>,
}

/// Starts of the next pages of listings.
#[derive(Debug, Default)]
struct Tokens {
    tokens: BTreeMap<u128, String>,
    last: u128,
}

impl Listings {
    pub(super) fn new(access: &Arc<StoreAccess>, clears: &Arc<ClearsSync>) -> Self {
        Self {
            access: Arc::clone(access),
            clears: Arc::clone(clears),
            tokens: Mutex::default(),
        }
    }

    fn token(&self, cursor: Cursor) -> Result<Option<String>, BackendError> {
        if cursor == Cursor::START {
            return Ok(None);
        }
        let token = self.tokens.lock().tokens.get(&cursor.raw()).cloned();
        let lost = || Unavailable {
            reason: "the listing is too old: start it again".to_owned(),
        };
        Ok(Some(token.ok_or_else(lost)?))
    }

    /// Replaces the position of a listing with the next one.
    fn advance(&self, from: Cursor, next: Option<String>) -> Option<Cursor> {
        let state = &mut *self.tokens.lock();
        state.tokens.remove(&from.raw());
        state.last += 1;
        state.tokens.insert(state.last, next?);
        while state.tokens.len() > MAX_LISTINGS {
            state.tokens.pop_first();
        }
        Some(Cursor::from_raw(state.last))
    }

    pub(super) async fn list(
        self: &Arc<Self>,
        cursor: Cursor,
        limit: usize,
        deadline: Instant,
    ) -> Result<Page, BackendError> {
        let folder = self.clears.check()?;
        self.access.paths.lookups.check(now())?;
        let token = self.token(cursor)?;
        let this = Arc::clone(self);
        let listed = self.access.spawn(async move {
            let page = this.page(folder, token.as_deref(), limit, deadline).await;
            this.access.counters.failed.add(page.is_err().into());
            page
        });
        let (items, next) = listed.await.map_err(|_| BackendError::Closed)??;
        let next = self.advance(cursor, next);
        Ok(Page { items, next })
    }

    async fn page(
        &self,
        folder: ChunkFolder,
        token: Option<&str>,
        limit: usize,
        deadline: Instant,
    ) -> Result<(Vec<Listed>, Option<String>), StoreError> {
        let limit = limit.clamp(1, MAX_PAGE);
        let page = self
            .access
            .store
            .list(Scope::values_of(folder), token, limit, deadline)
            .await?;
        let names = page.objects.iter();
        let names: Vec<ValueName> = names.filter_map(|object| object.name.value()).collect();
        let mut items = Vec::new();
        for (name, head) in names
            .iter()
            .zip(self.access.store.heads(&names, deadline).await)
        {
            let Some(head) = head? else {
                continue;
            };
            let header = head.check(&name.key).ok();
            items.extend(header.map(|header| Listed::new(name.key, header.plain_len)));
        }
        Ok((items, page.next))
    }
}
