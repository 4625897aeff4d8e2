//! `lmc remote gc`: keeps a store within a size and an age if it does not expire chunks by itself.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, anyhow};
use clap::Args;
use lmc_backend_remote::format::{ChunkFolder, Name, PROBE_FOLDER, PROBE_SPACE, Scope, Standing};
use lmc_backend_remote::{
    Collected, FileStore, Limits, ListedObject, Opened, Shares, StaleFolders, StoreError,
};
use lmc_key::SpaceId;

use super::du::{Usage, shown};
use super::listing::{Listing, folders_bar};
use super::removing::{Action, Selection, apply, remove_descriptions};
use super::rm::older_than;
use super::selectors::Selectors;
use super::{Target, Url, deadline, explained, memory};
use crate::config::{human_bytes, parse_bytes};
use crate::stdout::outln;

/// Age from which the leftovers of a check or a writer are removed.
const LEFT: Duration = Duration::from_secs(3600);
/// Time for one folder; the collection itself ends before.
const FOLDER: Duration = Duration::from_secs(660);
/// Greatest age that is counted in minutes: two years.
const MAX_MINUTES: u64 = 2 * 365 * 24 * 60;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Examples:
  lmc remote gc file:///mnt/shared/lmc --size 20TiB --older-than 30d
  lmc remote gc s3://bucket/lmc --older-than 30d --dry-run
  lmc remote gc file:///mnt/shared/lmc --model meta-llama/Llama-3.1-8B --size 2TiB
Several selectors narrow the selection, as for `lmc remote rm`: only chunks and leftovers of the selected
spaces are removed, and only these chunks count towards the size; values of killed checks stay.
Without --size and --older-than only leftovers are removed: files that were being written an hour ago or
earlier, values of killed checks, descriptions of spaces without chunks. A folder within the size loses no
chunks. Above the size, each of its 256 parts loses first the chunks that no daemon asks for any more, and
then the chunks that were used longest ago, until the whole folder is within the size. A bucket loses
chunks in the same order. Daemons with --remote-size or --remote-ttl do the same by themselves.
Redis needs no collection.";

// A doc comment here would become the text of the command.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(super) url: Url,
    #[command(flatten)]
    selectors: Selectors,
    /// Limit on the bytes of the chunks, such as 20TiB; a bare number is bytes. Chunks that were used longest
    /// ago are removed first.
    #[arg(long, value_name = "SIZE")]
    size: Option<String>,
    /// Age above which chunks are removed, such as 12h or 30d.
    #[arg(long, value_name = "DURATION")]
    older_than: Option<String>,
    /// Only show what would be removed.
    #[arg(long)]
    dry_run: bool,
}

pub(super) async fn run(target: Target, arguments: &Arguments) -> Result<()> {
    let size = arguments
        .size
        .as_deref()
        .map(|text| parse_bytes(text, 1).map_err(|error| anyhow!("--size {text}: {error}")));
    let size = size.transpose()?;
    let limits = Limits {
        ttl: arguments
            .older_than
            .as_deref()
            .map(older_than)
            .transpose()?,
        dry_run: arguments.dry_run,
    };
    let (verb, action) = match limits.dry_run {
        true => ("would remove", Action::Count),
        false => ("removed", Action::Remove),
    };
    let selection = Selection {
        spaces: arguments.selectors.spaces(&target).await?,
        older_than: None,
    };
    match &target.opened {
        Opened::File(store) => {
            let spaces = selection.spaces.clone().map(Arc::new);
            let (collected, failure) = collect(store, limits, size, spaces).await?;
            let usage = Usage {
                chunks: collected.expired + collected.evicted,
                bytes: collected.removed_bytes,
            };
            outln!(
                "{verb} {}: {} chunks too old, {} chunks beyond the size; {} are left",
                shown(usage),
                collected.expired,
                collected.evicted,
                human_bytes(collected.bytes - collected.removed_bytes)
            );
            if let Some(failure) = failure {
                return Err(failure);
            }
            let unused = async |object: &ListedObject, folder, space| {
                let is_old = object.age.is_some_and(|age| age > LEFT);
                Ok(is_old && selection.has(space) && !has_chunks(&target, folder, space).await?)
            };
            let descriptions = remove_descriptions(&target, action, unused).await?;
            outln!(
                "{verb} {} files that were being written an hour ago or earlier, and {descriptions} descriptions of spaces without chunks",
                collected.temporary
            );
        }
        Opened::Redis(store) => {
            outln!(
                "Redis limits itself by maxmemory, and by the expiry that daemons with --remote-ttl set: no chunk is collected"
            );
            let nodes = store.memory(deadline()).await;
            let nodes = nodes.map_err(|error| anyhow!("INFO memory: {}", explained(&error)))?;
            nodes.iter().for_each(|node| outln!("{}", memory(node).1));
        }
        _ => {
            let usage = collect_listed(&target, &selection, limits, size, action).await?;
            outln!("{verb} {}", shown(usage));
        }
    }
    if selection.spaces.is_some() {
        return Ok(());
    }
    let probes = probes(&target, action).await?;
    outln!("{verb} {probes} values of killed checks");
    Ok(())
}

/// Collects all folders, one at a time, for all spaces or some. If a folder cannot be collected, the
/// others still are. Returns what was collected, and the first failure.
async fn collect(
    store: &Arc<FileStore>,
    limits: Limits,
    size: Option<u64>,
    spaces: Option<Arc<HashSet<SpaceId>>>,
) -> Result<(Collected, Option<anyhow::Error>)> {
    let mut shares = Shares::of(size);
    if size.is_some() {
        let nothing = Limits {
            dry_run: true,
            ..Limits::default()
        };
        let bar = folders_bar(256).with_message("measuring");
        for fanout in 0..=u8::MAX {
            let measured = collect_folder(store, fanout, nothing, shares, spaces.clone()).await?;
            shares = measured.1;
            bar.inc(1);
        }
        bar.finish_and_clear();
    }
    let bar = folders_bar(256).with_message("collecting");
    let (mut sum, mut failure) = (Collected::default(), None);
    for fanout in 0..=u8::MAX {
        let (collected, left) =
            collect_folder(store, fanout, limits, shares, spaces.clone()).await?;
        shares = left;
        match collected {
            Ok(collected) => {
                sum.bytes += collected.bytes;
                sum.expired += collected.expired;
                sum.evicted += collected.evicted;
                sum.removed_bytes += collected.removed_bytes;
                sum.temporary += collected.temporary;
            }
            Err(error) => {
                let error = explained(&error);
                failure.get_or_insert(anyhow!("folder {fanout:02x} was not collected: {error}"));
            }
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok((sum, failure))
}

async fn collect_folder(
    store: &Arc<FileStore>,
    fanout: u8,
    limits: Limits,
    mut shares: Shares,
    spaces: Option<Arc<HashSet<SpaceId>>>,
) -> Result<(Result<Collected, StoreError>, Shares)> {
    let store = Arc::clone(store);
    let collect = move || {
        let collected = store.collect(fanout, limits, &mut shares, spaces.as_deref());
        if collected.is_err() {
            shares.skip(fanout);
        }
        (collected, shares)
    };
    let collecting = tokio::task::spawn_blocking(collect);
    match tokio::time::timeout(FOLDER, collecting).await {
        Ok(collected) => Ok(collected?),
        Err(_) => Err(anyhow!(
            "folder {fanout:02x} takes more than {} s: the file system hangs or is very slow",
            FOLDER.as_secs()
        )),
    }
}

async fn has_chunks(target: &Target, folder: ChunkFolder, space: SpaceId) -> Result<bool> {
    let store = target.opened.store();
    let scope = Scope::Values {
        folder: Some(folder),
        fanout: None,
        space: Some(space),
    };
    let page = store.list(scope, None, 1, deadline()).await;
    let page = page.map_err(|error| anyhow!("{}", explained(&error)))?;
    Ok(!page.objects.is_empty() || page.next.is_some())
}

/// Removes the chunks of a listing that are too old or beyond the size: first the chunks that no daemon
/// asks for any more, and then the oldest chunks. Chunks of one minute are removed together.
async fn collect_listed(
    target: &Target,
    selection: &Selection,
    limits: Limits,
    size: Option<u64>,
    action: Action,
) -> Result<Usage> {
    let first = match size {
        Some(most) => first_to_go(target, selection, most).await?,
        None => None,
    };
    if first.is_none() && limits.ttl.is_none() {
        return Ok(Usage::default());
    }
    let goes = |object: &ListedObject, standing| {
        let is_old = limits.ttl.is_some_and(|ttl| object.age > Some(ttl));
        let is_beyond = first.is_some_and(|first| (standing, minute(object)) >= first);
        standing != Standing::Unknown && (is_old || is_beyond)
    };
    let pick = async |page| {
        let mut page = with_standing(target, selection, page).await?;
        page.retain(|(object, standing)| goes(object, *standing));
        Ok(page.into_iter().map(|(object, _)| object).collect())
    };
    apply(target, selection.listing(target), action, pick).await
}

/// Returns the selected chunks of a page, except values of checks, with the standing of their folders.
async fn with_standing(
    target: &Target,
    selection: &Selection,
    page: Vec<ListedObject>,
) -> Result<Vec<(ListedObject, Standing)>> {
    let store = target.opened.store();
    let of_clears = |error: StoreError| anyhow!("{}: {}", Name::Clears, explained(&error));
    let folders = StaleFolders::read(&*store, deadline()).await;
    let mut folders = folders.map_err(of_clears)?;
    let mut found = Vec::new();
    for object in page {
        let Name::Value(name) = object.name else {
            continue;
        };
        if name.folder == PROBE_FOLDER || selection.picks(&object) != Some(true) {
            continue;
        }
        let standing = match &mut folders {
            Some(folders) => {
                let standing = folders.standing(&*store, name.folder, deadline()).await;
                standing.map_err(of_clears)?
            }
            None => Standing::Unknown,
        };
        found.push((object, standing));
    }
    Ok(found)
}

/// Returns the first key of the chunks to remove, so that the other chunks have at most `most` bytes.
async fn first_to_go(
    target: &Target,
    selection: &Selection,
    most: u64,
) -> Result<Option<(Standing, u64)>> {
    let mut bytes: BTreeMap<(Standing, u64), u64> = BTreeMap::new();
    let mut listing = selection.listing(target);
    while let Some(page) = listing.next().await? {
        for (object, standing) in with_standing(target, selection, page).await? {
            let key = match standing {
                // These chunks stay, so they count before all others.
                Standing::Unknown => (Standing::Used, 0),
                standing => (standing, minute(&object)),
            };
            *bytes.entry(key).or_default() += object.len.unwrap_or(0);
        }
    }
    Ok(cut(&bytes, most))
}

/// Returns the age of a chunk in minutes.
fn minute(object: &ListedObject) -> u64 {
    let minutes = object.age.map_or(0, |age| age.as_secs() / 60);
    minutes.min(MAX_MINUTES)
}

/// Returns the first key that is to be removed with all keys after it, so that the keys before it have at
/// most `most` bytes.
fn cut<K: Copy + Ord>(bytes: &BTreeMap<K, u64>, most: u64) -> Option<K> {
    let mut sum = 0u64;
    bytes.iter().find_map(|(&key, &bytes)| {
        sum = sum.saturating_add(bytes);
        (sum > most).then_some(key)
    })
}

/// Removes the values that killed checks have left, and returns their number.
async fn probes(target: &Target, action: Action) -> Result<u64> {
    let store = target.opened.store();
    let mut listing = Listing::of_scope(&target.opened, Scope::PROBES);
    let mut count = 0;
    while let Some(page) = listing.next().await? {
        // Redis gives no age, so values of a check that runs now are removed, too; that check reports it.
        let is_left = |object: &ListedObject| object.age.is_none_or(|age| age > LEFT);
        let names: Vec<_> = page.iter().filter(|o| is_left(o)).map(|o| o.name).collect();
        count += names.len() as u64;
        if action == Action::Remove && !names.is_empty() {
            let removed = store.remove(&names, deadline()).await;
            if let Some(error) = removed.into_iter().find_map(Result::err) {
                return Err(anyhow!(
                    "cannot remove values of checks: {}",
                    explained(&error)
                ));
            }
        }
    }
    let of_check = async |object: &ListedObject, _, space| {
        let is_old = object.age.is_none_or(|age| age > LEFT);
        Ok(space == PROBE_SPACE && is_old)
    };
    Ok(count + remove_descriptions(target, action, of_check).await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_minutes_are_removed_until_the_rest_fits() {
        let minutes = BTreeMap::from([(0, 10), (5, 10), (7, 10)]);
        for (most, expected) in [
            (0, Some(0)),
            (9, Some(0)),
            (10, Some(5)),
            (29, Some(7)),
            (30, None),
            (u64::MAX, None),
        ] {
            assert_eq!(cut(&minutes, most), expected, "{most}");
        }
        assert_eq!(cut(&BTreeMap::<u64, u64>::new(), 0), None);
    }
}
