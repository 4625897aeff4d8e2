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
        'folders: for folder in self.folders(scope, deadline)? {
            // Names compare as their paths do, because folders have names of one length.
            if !after.starts_with(&folder) && folder.as_str() < after {
                continue;
            }
            let names = self.first_names(&folder, after, limit + 1, deadline)?;
            for path in names {
                let Ok(name) = path.parse::<Name>() else {
                    continue;
                };
                if page.objects.len() == limit {
                    page.next = page.objects.last().map(|last| last.name.to_string());
                    break 'folders;
                }
                match self.tree.stat(&path) {
                    Ok(stat) if is_file(&stat) && scope.covers(&name) => {
                        page.objects.push(ListedObject {
                            name,
                            len: u64::try_from(stat.st_size).ok(),
                            age: self.clock.age(&stat),
                        });
                    }
                    Ok(_) => {}
                    Err(error) if is_absent(&error) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(page)
    }

    /// Returns the folders that a scope is in, in order.
    fn folders(&self, scope: Scope, deadline: Instant) -> Result<Vec<String>, StoreError> {
        let (fanout, space) = match scope {
            Scope::Spaces => return Ok(vec![folder(scope)]),
            Scope::Values { fanout, space } => (fanout, space),
        };
        let mut folders = Vec::new();
        for byte in 0..=255u8 {
            if fanout.is_some_and(|fanout| fanout != byte) {
                continue;
            }
            match space {
                Some(_) => folders.push(folder(Scope::Values {
                    fanout: Some(byte),
                    space,
                })),
                None => folders.extend(self.spaces_of(byte, deadline)?),
            }
        }
        Ok(folders)
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
