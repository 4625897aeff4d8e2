//! The files of the repository, read once.

use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, Result};

/// Folders that hold no source.
const LEFT_OUT: [&str; 4] = ["target", "corpus", "artifacts", "__pycache__"];
const ENDINGS: [&str; 4] = ["rs", "md", "toml", "py"];

/// A text file.
pub(crate) struct File {
    /// Path from the root, with slashes.
    pub(crate) path: String,
    pub(crate) text: String,
}

impl File {
    /// `path:line`, counted from 1.
    pub(crate) fn at(&self, index: usize) -> String {
        format!("{}:{}", self.path, index + 1)
    }

    /// The folder, from the root.
    pub(crate) fn folder(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(folder, _)| folder)
    }
}

/// Sources, documents and manifests.
pub(crate) struct Tree {
    root: PathBuf,
    files: Vec<File>,
}

impl Tree {
    /// Reads the tree below `root`; hidden folders and build outputs are left out.
    pub(crate) fn read(root: &Path) -> Result<Self> {
        let mut files = Vec::new();
        collect(root, "", &mut files)?;
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Self {
            root: root.to_owned(),
            files,
        })
    }

    /// A tree out of texts, for tests of the rules.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Self {
        let files = files.iter().map(|(path, text)| File {
            path: (*path).to_owned(),
            text: (*text).to_owned(),
        });
        Self {
            root: PathBuf::from("/nonexistent"),
            files: files.collect(),
        }
    }

    /// Files with an ending, `rs` or `md`.
    pub(crate) fn with_ending(&self, ending: &str) -> impl Iterator<Item = &File> {
        let ending = format!(".{ending}");
        self.files
            .iter()
            .filter(move |file| file.path.ends_with(&ending))
    }

    /// The file at a path from the root.
    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// The text at a path from the root; empty where there is none.
    pub(crate) fn text(&self, path: &str) -> &str {
        self.file(path).map_or("", |file| &file.text)
    }

    /// A manifest; empty where there is none.
    pub(crate) fn manifest(&self, path: &str) -> toml::Table {
        self.text(path).parse().unwrap_or_default()
    }

    /// Folders in `crates/`.
    pub(crate) fn crates(&self) -> Vec<&str> {
        let manifests = self
            .files
            .iter()
            .filter_map(|file| file.path.strip_prefix("crates/"));
        manifests
            .filter_map(|path| path.strip_suffix("/Cargo.toml"))
            .filter(|folder| !folder.contains('/'))
            .collect()
    }

    /// Returns true if a file or folder exists at a path from the root, read or not.
    pub(crate) fn exists(&self, path: &str) -> bool {
        self.file(path).is_some() || self.root.join(path).exists()
    }
}

fn collect(root: &Path, folder: &str, files: &mut Vec<File>) -> Result<()> {
    let here = root.join(folder);
    let entries = fs::read_dir(&here).with_context(|| format!("cannot list {}", here.display()))?;
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with('.') || LEFT_OUT.contains(&name.as_str()) {
            continue;
        }
        let path = if folder.is_empty() {
            name
        } else {
            format!("{folder}/{name}")
        };
        if entry.file_type()?.is_dir() {
            collect(root, &path, files)?;
        } else if ENDINGS
            .iter()
            .any(|ending| path.ends_with(&format!(".{ending}")))
        {
            let text = fs::read_to_string(entry.path())
                .with_context(|| format!("{path} is not a text file"))?;
            files.push(File { path, text });
        }
    }
    Ok(())
}

/// A path with `.` and `..` worked out; none when it leaves the root.
pub(crate) fn normal(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(part) => parts.push(part.to_str()?),
            Component::CurDir => {}
            Component::ParentDir => {
                parts.pop()?;
            }
            Component::RootDir | Component::Prefix(_) => return None,
        }
    }
    Some(parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_worked_out() {
        assert_eq!(normal("docs/../README.md").as_deref(), Some("README.md"));
        assert_eq!(normal("./a/b").as_deref(), Some("a/b"));
        assert_eq!(normal("../x"), None);
    }
}
