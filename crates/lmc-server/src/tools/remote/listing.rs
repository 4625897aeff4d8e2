//! Listings of a store, a page at a time, and the descriptions of its spaces.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use anyhow::{Result, anyhow};
use indicatif::ProgressBar;
use lmc_backend_remote::format::{ChunkFolder, Scope, SpaceRecord};
use lmc_backend_remote::{ListedObject, Opened, Store, read_description};
use lmc_key::SpaceId;
use tokio::task::JoinSet;

use super::{deadline, explained};
use crate::bars;

/// Names of a page.
const PAGE: usize = 4096;
/// Descriptions that are read at a time.
const READS: usize = 32;

/// A listing under way. Holds one page.
pub(super) struct Listing {
    store: Arc<dyn Store>,
    /// The scopes that are left; the first is being listed.
    scopes: VecDeque<Scope>,
    token: Option<String>,
    listed: u64,
    bar: ProgressBar,
}

impl Listing {
    /// Lists the chunks of a store, or of one space. A bar shows the progress.
    pub(super) fn of_chunks(opened: &Opened, space: Option<SpaceId>) -> Self {
        let scopes = match opened {
            // One folder after the other, so that the bar shows how many are left.
            Opened::File(_) => (0..=u8::MAX)
                .map(|fanout| Scope::Values {
                    folder: None,
                    fanout: Some(fanout),
                    space,
                })
                .collect(),
            // A listing of everything costs no more requests than a listing of a part.
            _ => VecDeque::from([Scope::Values {
                folder: None,
                fanout: None,
                space,
            }]),
        };
        let bar = match scopes.len() {
            1 => chunks_bar(),
            folders => folders_bar(folders as u64),
        };
        Self::of(opened, scopes, bar.with_message("listing"))
    }

    /// Lists the descriptions of spaces, or the probes of checks.
    pub(super) fn of_scope(opened: &Opened, scope: Scope) -> Self {
        Self::of(opened, VecDeque::from([scope]), ProgressBar::hidden())
    }

    fn of(opened: &Opened, scopes: VecDeque<Scope>, bar: ProgressBar) -> Self {
        Self {
            store: opened.store(),
            scopes,
            token: None,
            listed: 0,
            bar,
        }
    }

    /// Returns the next page, which may be empty; `None` at the end.
    pub(super) async fn next(&mut self) -> Result<Option<Vec<ListedObject>>> {
        let Some(&scope) = self.scopes.front() else {
            self.bar.finish_and_clear();
            return Ok(None);
        };
        let token = self.token.take();
        let page = self.store.list(scope, token.as_deref(), PAGE, deadline());
        let page = page.await.map_err(|error| {
            self.bar.finish_and_clear();
            let listed = self.listed;
            anyhow!(
                "the listing ended after {listed} names: {}",
                explained(&error)
            )
        })?;
        self.listed += page.objects.len() as u64;
        self.token = page.next;
        let is_over = self.token.is_none();
        if is_over {
            self.scopes.pop_front();
        }
        match self.bar.length() {
            None => self.bar.set_position(self.listed),
            Some(_) => self.bar.inc(u64::from(is_over)),
        }
        Ok(Some(page.objects))
    }
}

/// Returns a bar that counts chunks whose total number is not known.
fn chunks_bar() -> ProgressBar {
    ProgressBar::new_spinner().with_style(bars::style("{spinner} {msg} {pos} chunks"))
}

/// Returns a bar that counts folders.
pub(super) fn folders_bar(folders: u64) -> ProgressBar {
    let style = bars::style("{msg} {wide_bar} {pos}/{len} folders, {eta} left");
    ProgressBar::new(folders).with_style(style)
}

/// Reads the descriptions of spaces in folders, and returns each with the space's name in keys. A space
/// without a description, or with a description that is damaged or of a later version, is omitted.
pub(super) async fn descriptions(
    store: &Arc<dyn Store>,
    spaces: &[(ChunkFolder, SpaceId)],
) -> Result<HashMap<SpaceId, SpaceRecord>> {
    let mut found = HashMap::new();
    for spaces in spaces.chunks(READS) {
        let mut reads = JoinSet::new();
        for &(folder, space) in spaces {
            let store = Arc::clone(store);
            reads.spawn(async move {
                let read = read_description(&*store, folder, space, deadline());
                (space, read.await)
            });
        }
        while let Some(read) = reads.join_next().await {
            let (space, read) = read?;
            let record = read.map_err(|error| {
                anyhow!(
                    "cannot read the description of space {space}: {}",
                    explained(&error)
                )
            })?;
            let record = record.and_then(Result::ok);
            found.extend(record.map(|record| (space, record)));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bars_are_drawn() {
        chunks_bar();
        assert_eq!(folders_bar(256).length(), Some(256));
    }
}
