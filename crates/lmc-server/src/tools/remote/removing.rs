//! Chunks that are picked in a listing, counted and removed page by page.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use lmc_backend_remote::format::{ChunkFolder, Name, Scope};
use lmc_backend_remote::{ListedObject, Opened, StoreError};
use lmc_key::SpaceId;

use super::du::{Usage, shown, sized};
use super::listing::Listing;
use super::{TIMEOUT, Target, deadline, explained};

/// The chunks that a command selects.
#[derive(Debug)]
pub(super) struct Selection {
    /// Spaces of the chunks; `None` for all.
    pub(super) spaces: Option<HashSet<SpaceId>>,
    /// Age above which chunks are picked; `None` for any.
    pub(super) older_than: Option<Duration>,
}

/// The chunks that were picked.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Picked {
    pub(super) usage: Usage,
    /// Chunks that were omitted because the store does not give their age.
    pub(super) ageless: u64,
}

/// The treatment of picked chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Count,
    Remove,
}

impl Selection {
    /// Returns whether an object is picked; `None` if its age would decide and is not known.
    pub(super) fn picks(&self, object: &ListedObject) -> Option<bool> {
        let Name::Value(name) = object.name else {
            return Some(false);
        };
        if !self.has(name.key.space) {
            return Some(false);
        }
        match self.older_than {
            None => Some(true),
            Some(limit) => object.age.map(|age| age > limit),
        }
    }

    /// Returns whether chunks of a space can be picked.
    pub(super) fn has(&self, space: SpaceId) -> bool {
        self.spaces
            .as_ref()
            .is_none_or(|spaces| spaces.contains(&space))
    }

    /// Lists chunks of a store, among them all chunks that can be picked.
    pub(super) fn listing(&self, target: &Target) -> Listing {
        let mut only = self.spaces.iter().flatten();
        let space = only.next().filter(|_| only.next().is_none());
        Listing::of_chunks(&target.opened, space.copied())
    }

    /// Counts the chunks, or removes them. Ends at the first page with a failure.
    pub(super) async fn apply(&self, target: &Target, action: Action) -> Result<Picked> {
        if self.older_than.is_some() {
            know_ages(target).await?;
        }
        let mut ageless = 0;
        let pick = async |mut page: Vec<ListedObject>| {
            page.retain(|object| {
                let picks = self.picks(object);
                ageless += u64::from(picks.is_none());
                picks == Some(true)
            });
            Ok(page)
        };
        let usage = apply(target, self.listing(target), action, pick).await?;
        Ok(Picked { usage, ageless })
    }
}

/// Counts or removes the picked objects of each page of a listing. Ends at the first page with a failure.
pub(super) async fn apply(
    target: &Target,
    mut listing: Listing,
    action: Action,
    mut pick: impl AsyncFnMut(Vec<ListedObject>) -> Result<Vec<ListedObject>>,
) -> Result<Usage> {
    let store = target.opened.store();
    let mut usage = Usage::default();
    while let Some(page) = listing.next().await? {
        let chunks = sized(&store, pick(page).await?).await?;
        let names: Vec<Name> = chunks.iter().map(|(name, _)| Name::Value(*name)).collect();
        let removed = match action {
            Action::Count => names.iter().map(|_| Ok(true)).collect(),
            Action::Remove => store.remove(&names, deadline()).await,
        };
        let mut failure = None;
        for ((_, bytes), removed) in chunks.into_iter().zip(removed) {
            match removed {
                // A chunk that another process has removed meanwhile counts as removed, too.
                Ok(_) => usage.add(Usage { chunks: 1, bytes }),
                Err(error) => failure = Some(error),
            }
        }
        if let Some(error) = failure {
            let done = shown(usage);
            bail!("removed {done}, and then failed: {}", explained(&error));
        }
    }
    Ok(usage)
}

/// Makes the ages of a listing known: the file server's clock is read from a new file.
async fn know_ages(target: &Target) -> Result<()> {
    let Opened::File(store) = &target.opened else {
        return Ok(());
    };
    let store = Arc::clone(store);
    let reading = tokio::task::spawn_blocking(move || store.read_clock());
    let read = match tokio::time::timeout(TIMEOUT, reading).await {
        Ok(read) => read?,
        Err(_) => Err(StoreError::Deadline),
    };
    read.map_err(|error| anyhow!("cannot read the file server's clock: {}", explained(&error)))
}

/// Removes the descriptions of spaces that are picked, and returns their number.
pub(super) async fn remove_descriptions(
    target: &Target,
    action: Action,
    picks: impl AsyncFn(&ListedObject, ChunkFolder, SpaceId) -> Result<bool>,
) -> Result<u64> {
    let store = target.opened.store();
    let mut listing = Listing::of_scope(&target.opened, Scope::Spaces);
    let mut count = 0;
    while let Some(page) = listing.next().await? {
        let mut names = Vec::new();
        for object in page {
            if let Name::Space(folder, space) = object.name
                && picks(&object, folder, space).await?
            {
                names.push(object.name);
            }
        }
        count += names.len() as u64;
        if action == Action::Count || names.is_empty() {
            continue;
        }
        let removed = store.remove(&names, deadline()).await;
        if let Some(error) = removed.into_iter().find_map(Result::err) {
            return Err(anyhow!(
                "cannot remove the descriptions of spaces: {}",
                explained(&error)
            ));
        }
    }
    Ok(count)
}
