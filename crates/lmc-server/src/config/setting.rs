//! A setting: one name for the flag, the variable and the file's key.

use std::fmt;

use super::secret::mask_passwords;

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
    /// The tier of chunks on drives.
    Disk,
    /// The tier of peers.
    Peers,
    /// The tier of a shared store.
    Remote,
    /// Timeouts of leases, sessions and workers.
    Lifetimes,
    /// The stream of KV events.
    Events,
    /// Log lines.
    Log,
}

impl Group {
    /// The heading under which the group is printed.
    pub fn heading(self) -> &'static str {
        match self {
            Self::Listening => "Listening",
            Self::Http => "HTTP",
            Self::Identity => "Identity of chunks",
            Self::Pool => "Pool",
            Self::Eviction => "Eviction",
            Self::Disk => "Disk",
            Self::Peers => "Peers",
            Self::Remote => "Shared store",
            Self::Lifetimes => "Lifetimes",
            Self::Events => "KV events",
            Self::Log => "Log",
        }
    }
}

/// A value as it was written, before it is parsed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Raw {
    /// One value in its text form.
    Text(String),
    /// A list of pairs: a table of the file, or a flag that was repeated.
    Pairs(Vec<(String, String)>),
}

impl Raw {
    /// The single text, or what was expected instead of a table.
    pub(crate) fn text(&self) -> Result<&str, String> {
        match self {
            Self::Text(text) => Ok(text.trim()),
            Self::Pairs(_) => Err("expected one value, found a table".to_owned()),
        }
    }
}

impl fmt::Display for Raw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(&mask_passwords(text)),
            Self::Pairs(pairs) => {
                for (i, (name, value)) in pairs.iter().enumerate() {
                    let comma = if i == 0 { "" } else { "," };
                    write!(f, "{comma}{name}={value}")?;
                }
                Ok(())
            }
        }
    }
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
    /// The name as a flag, without its dashes in front.
    pub name: &'static str,
    /// Group that lists the setting.
    pub group: Group,
    /// Name of the value in help texts.
    pub placeholder: &'static str,
    /// Form on the command line.
    pub shape: Shape,
    /// The default in its text form.
    pub default: &'static str,
    /// One or two sentences for people.
    pub help: &'static str,
}

impl Info {
    /// Returns true if a value may hold a password or a tenant's salt: no error repeats it.
    pub fn is_secret(&self) -> bool {
        ["remote", "remote-salts", "quota"].contains(&self.name)
    }

    /// The environment variable, e.g. `LMC_HTTP_PORT`.
    pub fn variable(&self) -> String {
        format!("LMC_{}", self.name.replace('-', "_").to_ascii_uppercase())
    }

    /// The key in the TOML file, e.g. `http_port`.
    pub fn key(&self) -> String {
        self.name.replace('-', "_")
    }

    /// The flag, e.g. `--http-port`.
    pub fn flag(&self) -> String {
        format!("--{}", self.name)
    }
}
