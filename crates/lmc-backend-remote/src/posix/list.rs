//! Listings of a tree, in the order of names.

use std::collections::BTreeSet;
use std::fmt::{self, Display};
use std::io;
use std::str::FromStr;
use std::time::Instant;

use lmc_key::{ClearsId, SpaceId};

use super::tree::{is_absent, is_file};
use super::value::{Names, Values};
use crate::format::{Generation, Name, ROOT, Scope};
use crate::store::{ListPage, ListedObject, StoreError};

/// Number of names between two checks of the deadline.
const LOOK_AFTER: usize = 256;
/// Least number of names of a folder that are kept after one reading, so that not every page of a large
/// folder reads all names again.
const READ_AHEAD: usize = if cfg!(test) { 4 } else { 65_536 };

impl Values {
    /// Lists the objects of a scope whose names come after `token`. Keeps a limited number of names for the
    /// next page, however full a folder is.
    pub(super) fn list(
        &self,
        scope: Scope,
        token: Option<&str>,
        limit: usize,
        deadline: Instant,
    ) -> Result<ListPage, StoreError> {
        let mut page = ListPage::default();
        let after = token.unwrap_or_default();
        // Names compare as their paths do, because names of folders have the same length. Folders of other
        // pages are not read.
        let is_left =
            |folder: &String| after.starts_with(folder.as_str()) || folder.as_str() > after;
        let chunk_folders = match scope {
            Scope::Values {
                folder: Some(folder),
                ..
            } => vec![folder.to_string()],
            _ => self.chunk_folders(deadline)?,
        };
        for chunk_folder in chunk_folders.into_iter().filter(is_left) {
            for part in self.parts(scope, &chunk_folder, deadline)? {
                if !is_left(&part) {
                    continue;
                }
                let folders = match scope {
                    Scope::Values {
                        space: Some(space), ..
                    } => vec![format!("{part}/{space}")],
                    _ if is_fanout(&part) => self.subfolders::<SpaceId>(&part, deadline)?,
                    _ => vec![part],
                };
                for folder in folders.into_iter().filter(is_left) {
                    if self.list_folder(&folder, scope, after, limit, deadline, &mut page)? {
                        return Ok(page);
                    }
                }
            }
        }
        Ok(page)
    }

    /// Adds the objects of one folder to a page. Returns true if the page is full.
    fn list_folder(
        &self,
        folder: &str,
        scope: Scope,
        after: &str,
        limit: usize,
        deadline: Instant,
        page: &mut ListPage,
    ) -> Result<bool, StoreError> {
        let mut names = self.names_after(folder, after, limit, deadline)?;
        loop {
            while let Some(path) = names.paths.pop_front() {
                if page.objects.len() == limit {
                    page.next = page.objects.last().map(|last| last.name.to_string());
                    names.paths.push_front(path);
                    names.after = page.next.clone().unwrap_or_default();
                    *self.read_ahead.lock() = Some(names);
                    return Ok(true);
                }
                page.objects.extend(self.listed(&path, scope)?);
                names.after = path;
            }
            if names.is_whole {
                return Ok(false);
            }
            names = self.names_after(folder, &names.after, limit, deadline)?;
        }
    }

    /// Returns the object at a path; `None` if there is none in the scope.
    fn listed(&self, path: &str, scope: Scope) -> Result<Option<ListedObject>, StoreError> {
        let Some(name) = path.parse().ok().filter(|name| scope.covers(name)) else {
            return Ok(None);
        };
        match self.tree.stat(path) {
            Ok(stat) if is_file(&stat) => Ok(Some(ListedObject {
                name,
                len: u64::try_from(stat.st_size).ok(),
                age: self.clock.age(&stat),
            })),
            Ok(_) => Ok(None),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns the paths of all folders of chunks, in order.
    pub(super) fn chunk_folders(&self, deadline: Instant) -> Result<Vec<String>, StoreError> {
        let mut folders = Vec::new();
        for generation in self.subfolders::<Generation>(ROOT, deadline)? {
            folders.extend(self.subfolders::<ClearsId>(&generation, deadline)?);
        }
        Ok(folders)
    }

    /// Returns the folders of a folder of chunks that belong to a scope, in order.
    fn parts(
        &self,
        scope: Scope,
        chunk_folder: &str,
        deadline: Instant,
    ) -> Result<Vec<String>, StoreError> {
        let fanout = || self.subfolders::<Fanout>(chunk_folder, deadline);
        let (map, spaces) = (chunk_folder.to_owned(), format!("{chunk_folder}/spaces"));
        Ok(match scope {
            Scope::Values {
                fanout: Some(fanout),
                ..
            } => vec![format!("{chunk_folder}/{fanout:02x}")],
            Scope::Values { fanout: None, .. } => fanout()?,
            Scope::Spaces => vec![spaces],
            Scope::Folders => fanout()?.into_iter().chain([map, spaces]).collect(),
        })
    }

    /// Returns the subfolders of a folder whose names are ids, in order.
    pub(super) fn subfolders<I: FromStr + Display>(
        &self,
        folder: &str,
        deadline: Instant,
    ) -> Result<Vec<String>, StoreError> {
        let is_id = |name: &str| {
            in_time(deadline)?;
            Ok(name.parse::<I>().is_ok_and(|id| id.to_string() == name))
        };
        let mut names = self.tree.names(folder, is_id).map_err(late)?;
        names.sort();
        let path = |name| format!("{folder}/{name}");
        Ok(names.into_iter().map(path).collect())
    }

    /// Returns names in a folder after a path: those that the previous page has left, or newly read ones,
    /// more than `limit`.
    fn names_after(
        &self,
        folder: &str,
        after: &str,
        limit: usize,
        deadline: Instant,
    ) -> Result<Names, StoreError> {
        let left = self.read_ahead.lock().take();
        if let Some(left) = left.filter(|left| left.folder == folder && left.after == after) {
            return Ok(left);
        }
        let most = READ_AHEAD.max(limit + 1);
        let (mut first, mut is_whole) = (BTreeSet::new(), true);
        let mut seen = 0;
        let names = self.tree.names(folder, |name| {
            seen += 1;
            if seen % LOOK_AFTER == 0 {
                in_time(deadline)?;
            }
            let path = format!("{folder}/{name}");
            if path.as_str() > after && path.parse::<Name>().is_ok() {
                first.insert(path);
                if first.len() > most {
                    first.pop_last();
                    is_whole = false;
                }
            }
            Ok(false)
        });
        names.map_err(late)?;
        Ok(Names {
            folder: folder.to_owned(),
            after: after.to_owned(),
            paths: first.into_iter().collect(),
            is_whole,
        })
    }
}

/// Name of a folder of the fan-out: two digits.
pub(super) struct Fanout(u8);

impl FromStr for Fanout {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u8::from_str_radix(text, 16).map(Self)
    }
}

impl Display for Fanout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}", self.0)
    }
}

fn is_fanout(folder: &str) -> bool {
    let name = folder.rsplit('/').next();
    name.is_some_and(|name| name.len() == 2)
}

fn in_time(deadline: Instant) -> io::Result<()> {
    match Instant::now() < deadline {
        true => Ok(()),
        false => Err(io::ErrorKind::TimedOut.into()),
    }
}

fn late(error: io::Error) -> StoreError {
    match error.kind() {
        io::ErrorKind::TimedOut => StoreError::Deadline,
        _ => StoreError::from(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lmc_testkit::{Folder, soon};

    use super::super::tree::Tree;
    use super::*;

    fn path(space: u32, n: u32) -> String {
        format!("v2/{0:016x}/{0:032x}/00/{space:032x}/00{n:062x}-0-0", 7)
    }

    /// A tree of empty files.
    struct Files {
        folder: Folder,
        values: Values,
    }

    impl Files {
        fn new(paths: &[String]) -> Self {
            let folder = Folder::temporary();
            let values = Values::new(Tree::new(folder.to_path_buf()), false);
            let this = Self { folder, values };
            paths.iter().for_each(|path| this.make(path));
            this
        }

        fn make(&self, path: &str) {
            let path = self.folder.join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder is made");
            fs::write(path, b"").expect("a file is written");
        }

        /// Lists the names, so many at a time.
        fn list(&self, limit: usize, between: impl Fn()) -> Vec<String> {
            let (mut names, mut token) = (Vec::new(), None);
            loop {
                let page = (self.values).list(Scope::VALUES, token.as_deref(), limit, soon());
                let page = page.expect("a page");
                assert!(page.objects.len() <= limit);
                names.extend(page.objects.iter().map(|object| object.name.to_string()));
                match page.next {
                    None => return names,
                    next => token = next,
                }
                between();
            }
        }
    }

    #[test]
    fn names_beyond_those_that_are_kept_are_listed_once() {
        let names = (0..3).flat_map(|space| (0..11).map(move |n| path(space, n)));
        let names: Vec<String> = names.collect();
        let files = Files::new(&names);
        for limit in 1..=12 {
            assert_eq!(files.list(limit, || {}), names, "{limit} at a time");
        }
        let other = || _ = files.values.list(Scope::VALUES, None, 2, soon());
        assert_eq!(files.list(2, other), names, "another listing is under way");
    }

    /// A listing of 200,000 names took 18 s, because each page read all of them.
    #[test]
    fn a_page_takes_the_names_that_the_page_before_has_left() {
        let names: Vec<String> = (0..4).map(|n| path(0, n)).collect();
        let files = Files::new(&names);
        let found = files.list(1, || files.make(&path(0, 9)));
        assert_eq!(found, names, "the folder was read again");
        assert_eq!(files.list(9, || {}).len(), 5);
    }
}
