//! Listings of a tree, in the order of names.

use std::collections::BTreeSet;
use std::io;
use std::time::Instant;

use super::tree::{is_absent, is_file};
use super::value::Values;
use crate::format::{Name, Scope};
use crate::store::{ListPage, ListedObject, StoreError};

/// Names between two looks at the clock.
const LOOK_AFTER: usize = 256;

impl Values {
    /// Lists the objects of a scope whose names come after `token`. Keeps no more names than the
    /// page has, however full a folder is.
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
                for path in self.first_names(&folder, after, limit + 1, deadline)? {
                    if page.objects.len() == limit {
                        page.next = page.objects.last().map(|last| last.name.to_string());
                        return Ok(page);
                    }
                    page.objects.extend(self.listed(&path, scope)?);
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

    /// Returns the first `limit` paths in a folder after a path, in order.
    fn first_names(
        &self,
        folder: &str,
        after: &str,
        limit: usize,
        deadline: Instant,
    ) -> Result<Vec<String>, StoreError> {
        let mut first = BTreeSet::new();
        let mut seen = 0;
        let names = self.tree.names(folder, |name| {
            seen += 1;
            if seen % LOOK_AFTER == 0 {
                in_time(deadline)?;
            }
            let path = format!("{folder}/{name}");
            if path.as_str() > after && path.parse::<Name>().is_ok() {
                first.insert(path);
                if first.len() > limit {
                    first.pop_last();
                }
            }
            Ok(false)
        });
        names.map_err(late)?;
        Ok(first.into_iter().collect())
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
