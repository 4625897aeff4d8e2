//! A setting: one name for the flag, the variable and the file's key.

use std::fmt;

/// Group of settings in `--help`, in `--print-config` and in the documentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// The address that engines connect to.
    Listening,
    /// The HTTP side: health, metrics, tools.
    Http,
    /// Settings that are part of a chunk's identity.
    Identity,
    /// The memory that holds chunks.
    Pool,
    /// Eviction from the pool.
    Eviction,
    /// Settings of all lower tiers together.
    Lower,
    /// Name and key of this daemon among others, and the directory that it hosts.
    Links,
    /// The tier of chunks on drives.
    Disk,
    /// The tier of peers.
    Peers,
    /// The tier of a shared store.
    Remote,
    /// Timeouts of leases, sessions and workers.
    Lifetimes,
    /// The stream of KV events, and notices to proxies.
    Events,
    /// Log lines.
    Log,
}

impl Group {
    /// Returns the heading under which the group is printed.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Listening => "Listening",
            Self::Http => "HTTP",
            Self::Identity => "Identity of chunks",
            Self::Pool => "Pool",
            Self::Eviction => "Eviction",
            Self::Lower => "Lower tiers",
            Self::Links => "Between daemons",
            Self::Disk => "Disk",
            Self::Peers => "Peers",
            Self::Remote => "Shared store",
            Self::Lifetimes => "Lifetimes",
            Self::Events => "Events",
            Self::Log => "Log",
        }
    }
}

/// A value as it was written, before it is parsed. It may hold a secret, so `Debug` does not show it;
/// [`Entry::shown`](super::Entry::shown) returns it without secrets.
#[derive(Clone, PartialEq, Eq)]
pub enum Raw {
    /// One value in its text form.
    Text(String),
    /// A list of pairs: a table of the file, or a flag that was repeated.
    Pairs(Vec<(String, String)>),
}

impl Raw {
    /// Returns the single text, or an error if the value is a table.
    pub(crate) fn text(&self) -> Result<&str, String> {
        match self {
            Self::Text(text) => Ok(text.trim()),
            Self::Pairs(_) => Err("expected one value, found a table".to_owned()),
        }
    }

    /// Returns the pairs; `None` if a part of the text is not a pair.
    pub(crate) fn pairs(&self) -> Option<Vec<(String, String)>> {
        let text = match self {
            Self::Pairs(pairs) => return Some(pairs.clone()),
            Self::Text(text) => text,
        };
        let parts = text.split(',').filter(|part| !part.trim().is_empty());
        let pair = |part: &str| {
            let (name, value) = part.rsplit_once('=')?;
            Some((name.trim().to_owned(), value.trim().to_owned()))
        };
        parts.map(pair).collect()
    }
}

impl fmt::Debug for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Raw(..)")
    }
}

/// The kind of secret in the value of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Secret {
    /// A URL with a password.
    Url,
    /// Salts, separated by commas.
    Salts,
    /// Pairs of a salt and a size.
    Quotas,
}

/// Form of a setting on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// `--name VALUE`.
    Value,
    /// `--name`, `--name=false` or `--no-name`.
    Switch,
    /// `--name A=B`, repeatable; a table in the file.
    Pairs,
}

/// Everything about a setting except its type and its parser.
#[derive(Debug)]
pub struct Info {
    /// Name of the flag, without the leading dashes.
    pub name: &'static str,
    /// Group that lists the setting.
    pub group: Group,
    /// Name of the value in help texts.
    pub placeholder: &'static str,
    /// Form on the command line.
    pub shape: Shape,
    /// The default in its text form.
    pub default: &'static str,
    /// Help text, in full sentences.
    pub help: &'static str,
}

impl Info {
    /// Returns the kind of secret that a value may hold. No error repeats such a value.
    pub fn secret(&self) -> Option<Secret> {
        match self.name {
            "remote" => Some(Secret::Url),
            "remote-salts" => Some(Secret::Salts),
            "quota" => Some(Secret::Quotas),
            _ => None,
        }
    }

    /// Returns the environment variable, e.g. `LMC_HTTP_PORT`.
    pub fn variable(&self) -> String {
        format!("LMC_{}", self.name.replace('-', "_").to_ascii_uppercase())
    }

    /// Returns the key in the TOML file, e.g. `http_port`.
    pub fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// Returns the flag, e.g. `--http-port`.
    pub fn flag(&self) -> String {
        format!("--{}", self.name)
    }
}
