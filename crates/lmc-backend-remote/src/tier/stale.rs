//! Deletion of chunks that no daemon looks for any more, on an operator's order.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use lmc_backend::{BackendError, Unavailable, now};

use super::access::StoreAccess;
use super::clears::ClearsSync;
use crate::format::{ChunkFolder, Name, Scope};
use crate::small::StaleFolders;

/// Number of objects of a page. The next constant is the page's timeout.
const PAGE: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Progress of a deletion of stale chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StaleDeleted {
    /// Chunks examined.
    pub seen: u64,
    /// Chunks deleted.
    pub deleted: u64,
}

/// Deletes the objects of stale folders. Ends at the first page with a failure, which does not count against
/// the store's health.
pub(super) async fn delete_stale(
    access: Arc<StoreAccess>,
    clears: Arc<ClearsSync>,
    progress: impl Fn(StaleDeleted) + Send,
) -> Result<StaleDeleted, BackendError> {
    let (mut done, mut token) = (StaleDeleted::default(), None::<String>);
    let mut emptied: HashSet<ChunkFolder> = HashSet::new();
    loop {
        clears.check()?;
        let deadline = now() + TIMEOUT;
        let page = access
            .store
            .list(Scope::Folders, token.as_deref(), PAGE, deadline);
        let page = page.await?;
        let stale = StaleFolders::read(&*access.store, deadline).await?;
        let mut stale = stale.ok_or_else(|| Unavailable {
            reason: format!("{} cannot be read", Name::Clears),
        })?;
        let mut names = Vec::new();
        for object in &page.objects {
            done.seen += u64::from(object.name.value().is_some());
            let Some(folder) = object.name.folder() else {
                continue;
            };
            if !stale.contains(&*access.store, folder, deadline).await? {
                continue;
            }
            match object.name {
                // Without its map, the other objects of a folder would not be known to be stale.
                Name::Map(_) => _ = emptied.insert(folder),
                name => names.push(name),
            }
        }
        let removed = access.store.remove(&names, deadline).await;
        for (name, removed) in names.iter().zip(removed) {
            let removed = u64::from(removed? && name.value().is_some());
            done.deleted += removed;
            access.counters.stale_deleted.add(removed);
        }
        progress(done);
        token = page.next;
        if token.is_none() {
            let maps: Vec<Name> = emptied.into_iter().map(Name::Map).collect();
            for removed in access.store.remove(&maps, deadline).await {
                removed?;
            }
            return Ok(done);
        }
    }
}
