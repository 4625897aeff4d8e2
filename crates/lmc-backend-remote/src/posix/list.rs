//! Listings of a tree, in the order of names.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::time::Instant;

use super::tree::{is_absent, is_file};
use super::value::Values;
use crate::format::{Name, Scope};
use crate::store::{ListPage, ListedObject, StoreError};

/// Names between two looks at the clock.
const LOOK_AFTER: usize = 256;
/// Names of a folder that are kept from one reading of it, at least: pages of a large folder do not
/// each read all its names.
const READ_AHEAD: usize = if cfg!(test) { 4 } else { 65_536 };

/// Names of a folder that come after a path, in order.
#[derive(Debug)]
pub(super) struct Names {
    folder: String,
    after: String,
    paths: VecDeque<String>,
    /// False where more names may follow.
    is_whole: bool,
}

impl Values {
    /// Lists the objects of a scope whose names come after `token`. Keeps a bounded number of names
    /// for the next page, however full a folder is.
    pub(super) fn list(
        &self,
        scope: Scope,
        token: Option<&str>,
        limit: usize,
        deadline: Instant,
    ) -> Result<ListPage, StoreError> {
        let mut page = ListPage::default();
        let after = token.unwrap_or_default();
        // Names compare as their paths do, because folders have names of one length.
        let is_done = |folder: &str| !after.starts_with(folder) && folder < after;
        // Folders that other pages are of are not looked into.
        for part in parts(scope) {
            if is_done(&folder(part)) {
                continue;
            }
            for folder in self.folders(part, deadline)? {
                if is_done(&folder) {
                    continue;
                }
                let mut names = self.names_after(&folder, after, limit, deadline)?;
                loop {
                    while let Some(path) = names.paths.pop_front() {
                        if page.objects.len() == limit {
                            page.next = page.objects.last().map(|last| last.name.to_string());
                            names.paths.push_front(path);
                            names.after = page.next.clone().unwrap_or_default();
                            *self.read_ahead.lock() = Some(names);
                            return Ok(page);
                        }
                        page.objects.extend(self.listed(&path, scope)?);
                        names.after = path;
                    }
                    if names.is_whole {
                        break;
                    }
                    names = self.names_after(&folder, &names.after, limit, deadline)?;
                }
            }
        }
        Ok(page)
    }

    /// Returns the object at a path; `None` where there is none of the scope.
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

    /// Returns the folders that a part of a scope is in, in order.
    fn folders(&self, part: Scope, deadline: Instant) -> Result<Vec<String>, StoreError> {
        match part {
            Scope::Values {
                fanout: Some(fanout),
                space: None,
            } => self.spaces_of(fanout, deadline),
            _ => Ok(vec![folder(part)]),
        }
    }

    /// Returns the folders of spaces in a folder of the fan-out, in order.
    pub(super) fn spaces_of(
        &self,
        fanout: u8,
        deadline: Instant,
    ) -> Result<Vec<String>, StoreError> {
        let folder = folder(Scope::Values {
            fanout: Some(fanout),
            space: None,
        });
        let is_space = |name: &str| {
            in_time(deadline)?;
            let space = name.parse::<lmc_key::SpaceId>();
            Ok(space.is_ok_and(|space| space.to_string() == name))
        };
        let mut spaces = self.tree.names(&folder, is_space).map_err(late)?;
        spaces.sort();
        let path = |space| format!("{folder}/{space}");
        Ok(spaces.into_iter().map(path).collect())
    }

    /// Returns names in a folder after a path: those that the page before has left, or more than
    /// `limit` that are read.
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

/// Returns the parts of a scope, in the order of names: one for each folder of the fan-out.
fn parts(scope: Scope) -> Vec<Scope> {
    match scope {
        Scope::Values {
            fanout: None,
            space,
        } => (0..=u8::MAX)
            .map(|fanout| Scope::Values {
                fanout: Some(fanout),
                space,
            })
            .collect(),
        _ => vec![scope],
    }
}

/// Returns the folder that the names of a scope begin with.
fn folder(scope: Scope) -> String {
    scope.prefix().trim_end_matches('/').to_owned()
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
        _ => StoreError::Io(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use lmc_testkit::{Folder, soon};

    use super::super::tree::Tree;
    use super::*;

    fn path(space: u32, n: u32) -> String {
        format!("v1/00/{space:032x}/00{n:062x}-0-0")
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
