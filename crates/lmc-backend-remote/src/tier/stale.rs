//! Deletion of what clears have made stale, on an operator's order.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::BackendError;
use lmc_key::ChunkKey;

use super::Shared;
use crate::format::{Name, Scope};
use crate::store::{Head, StoreError};

/// Chunks of a page, and time for it.
const PAGE: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Progress of a deletion of stale chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleDeleted {
    /// Chunks that were looked at.
    pub seen: u64,
    /// Chunks that were deleted.
    pub deleted: u64,
}

impl Shared {
    /// Deletes the chunks that are older than the clears known here, and those that are damaged.
    /// Those of a later version are left alone. Ends at the first page with a failure, which does not
    /// count against the store.
    pub(super) async fn delete_stale(
        self: Arc<Self>,
        progress: impl Fn(StaleDeleted) + Send,
    ) -> Result<StaleDeleted, BackendError> {
        let (mut done, mut token) = (StaleDeleted::default(), None::<String>);
        loop {
            self.check()?;
            let deadline = Instant::now() + TIMEOUT;
            let page = self
                .store
                .list(Scope::VALUES, token.as_deref(), PAGE, deadline);
            let page = page.await?;
            let key = |name| match name {
                Name::Value(key) => Some(key),
                Name::Space(_) | Name::Clears => None,
            };
            let keys = page.objects.iter().filter_map(|object| key(object.name));
            let keys: Vec<ChunkKey> = keys.collect();
            let heads = self.store.heads(&keys, deadline).await;
            let mut stale = Vec::new();
            for (key, head) in keys.iter().zip(heads) {
                done.seen += 1;
                if self.is_stale(key, head)? {
                    stale.push(*key);
                }
            }
            // Own writes of the same keys come before or after it as a whole.
            for removed in self.remove_all(&stale, deadline, || false).await {
                let removed = u64::from(removed?);
                done.deleted += removed;
                self.counters.stale_deleted.add(removed);
            }
            progress(done);
            token = page.next;
            if token.is_none() {
                return Ok(done);
            }
        }
    }

    fn is_stale(
        &self,
        key: &ChunkKey,
        head: Result<Option<Head>, StoreError>,
    ) -> Result<bool, StoreError> {
        let Some(head) = head? else {
            return Ok(false);
        };
        Ok(match head.check(key) {
            Ok(header) => !self.is_current(&header),
            Err(refusal) => !refusal.is_newer(),
        })
    }
}
