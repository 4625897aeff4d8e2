//! The configuration of `lmc serve`, typed and checked.

use std::path::{Path, PathBuf};

use super::layers::{ConfigError, Entry, Layers};
use super::parse::{PeerTransport, PoolSize, SegmentName, TransferMode};
use super::setting::{Group, Raw, Shape};
use super::settings::ServeConfig;
use super::tiers::key_of_store;

/// Least bytes of a drive: a smaller one holds few chunks of any model.
pub(crate) const LEAST_DRIVE: u64 = 64 << 20;

/// A configuration, with what is needed to explain it.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The values.
    pub config: ServeConfig,
    /// Each setting as it was written, and by whom.
    pub entries: Vec<Entry>,
    /// Settings of each further store, without those that are left to their defaults.
    pub further_remotes: Vec<Vec<Entry>>,
    /// Settings that were ignored, for the log.
    pub warnings: Vec<String>,
    /// Variables that were ignored and ask for nothing, for the log.
    pub notes: Vec<String>,
}

impl ServeConfig {
    /// Loads the configuration. Flags win over `variables`, those over the file, that over the
    /// defaults. The file is the one in `file`, or else the one that `LMC_CONFIG` names.
    ///
    /// # Errors
    /// [`ConfigError`], with every problem that was found.
    pub fn load(
        flags: impl IntoIterator<Item = (String, Raw)>,
        variables: impl IntoIterator<Item = (String, String)>,
        file: Option<&Path>,
    ) -> Result<Loaded, ConfigError> {
        let variables: Vec<(String, String)> = variables.into_iter().collect();
        let named = variables
            .iter()
            .find(|(name, value)| name == "LMC_CONFIG" && !value.is_empty());
        let file = file
            .map(PathBuf::from)
            .or_else(|| named.map(|(_, path)| PathBuf::from(path)));
        let mut layers = Layers::new(flags, variables);
        if let Some(path) = file {
            layers.read_file(&path);
        }
        let mut config = Self::take(&mut layers);
        config.cross_check(&mut layers);
        let mut further_remotes = Vec::new();
        for mut store in layers.take_stores() {
            let remote = Self::take(&mut store);
            if config.remotes().any(|other| other.remote == remote.remote) {
                store.refuse(
                    "remote",
                    "expected another store than those of the tables before it",
                );
            }
            config.further_remotes.push(remote);
            further_remotes.push(layers.finish_store(store));
        }
        let notes = layers.take_notes();
        let (entries, warnings) = layers.finish()?;
        Ok(Loaded {
            config,
            entries,
            further_remotes,
            warnings,
            notes,
        })
    }

    /// The shared stores, the nearest first; only their settings of [`Group::Remote`] count.
    pub fn remotes(&self) -> impl Iterator<Item = &Self> {
        std::iter::once(self)
            .chain(&self.further_remotes)
            .filter(|config| config.remote.is_some())
    }

    fn cross_check(&self, layers: &mut Layers) {
        if self.registration_grace < self.reap_timeout {
            layers.refuse(
                "worker-registration-grace-seconds",
                format!(
                    "expected at least worker_reap_timeout_seconds ({}), or workers that warm up would be \
                     forgotten before they can ping",
                    super::size::human_duration(self.reap_timeout)
                ),
            );
        }
        if self.port != 0
            && self.port == self.http_port
            && same_address(&self.host, &self.http_host)
        {
            layers.refuse(
                "http-port",
                format!(
                    "expected another port than --port {}, which engines connect to",
                    self.port
                ),
            );
        }
        if self.transfer_mode == TransferMode::EngineDriven && self.shm_name == SegmentName::None {
            layers.refuse(
                "shm-name",
                "expected a name or auto: engine-driven transfers go through shared memory",
            );
        }
        if self.shm_name == SegmentName::Sealed && self.ipc_path.is_none() {
            layers.refuse(
                "shm-name",
                "sealed requires --ipc-path, over which the pool is passed",
            );
        }
        if self.disk.is_empty() && self.disk_size != PoolSize::Auto {
            layers.refuse("disk-size", "requires --disk");
        }
        if let PoolSize::Bytes(bytes) = self.disk_size
            && !self.disk.is_empty()
            && bytes / (self.disk.len() as u64) < LEAST_DRIVE
        {
            layers.refuse(
                "disk-size",
                format!(
                    "expected at least {} for each drive, or auto",
                    super::size::human_bytes(LEAST_DRIVE)
                ),
            );
        }
        for (name, is_set) in [
            ("remote-size", self.remote_size.is_some()),
            ("remote-ttl", self.remote_ttl.is_some()),
            ("remote-salts", self.remote_salts.is_some()),
            ("remote-key", self.remote_key.is_some()),
        ] {
            if is_set && self.remote.is_none() {
                layers.refuse(name, "requires --remote");
            }
        }
        if self.p2p_listen.is_none() && !self.p2p_peers.is_empty() {
            layers.refuse("p2p-peer", "requires --p2p-listen");
        }
        if self.p2p_listen.is_none() && !self.p2p_directories.is_empty() {
            layers.refuse("p2p-directory", "requires --p2p-listen");
        }
        if let Some(at) = &self.p2p_listen
            && is_wildcard(&at.host)
            && self.p2p_advertise.is_none()
        {
            layers.refuse(
                "p2p-advertise",
                format!("expected the address under which peers reach this server, because --p2p-listen {at} is a wildcard"),
            );
        }
        if self.p2p_listen.is_some()
            && self.p2p_key.is_none()
            && self.p2p_transport == PeerTransport::Nixl
        {
            layers.refuse(
                "p2p-transport",
                "expected --p2p-key with nixl: the memory is described only to peers that prove the key",
            );
        }
        if self.p2p_encrypt && self.p2p_transport == PeerTransport::Nixl {
            layers.refuse(
                "p2p-encrypt",
                "expected --p2p-transport auto or sockets: NIXL cannot encrypt",
            );
        }
        if self.p2p_encrypt && self.p2p_listen.is_none() {
            layers.refuse("p2p-encrypt", "requires --p2p-listen");
        }
        let listeners = [
            ("--p2p-listen", &self.p2p_listen, "read every chunk"),
            (
                "--p2p-directory-listen",
                &self.p2p_directory_listen,
                "announce chunks",
            ),
        ];
        let open = listeners.into_iter().find_map(|(flag, at, harm)| {
            let at = at.as_ref().filter(|at| !is_loopback(&at.host))?;
            Some((flag, at, harm))
        });
        if let (None, Some((flag, at, harm))) = (&self.p2p_key, open) {
            layers.refuse(
                "p2p-key",
                format!("expected a file with a key, because {flag} {at} is not a loopback address: without a key any host could {harm}; make one with: (umask 077; openssl rand -hex 32 > FILE)"),
            );
        }
        if self.eviction_ratio >= self.eviction_watermark {
            layers.refuse(
                "eviction-ratio",
                format!(
                    "expected less than eviction_trigger_watermark ({}), or nothing would stay",
                    self.eviction_watermark
                ),
            );
        }
    }
}

/// Returns true if only this host reaches the address.
pub(crate) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host
            .parse::<std::net::IpAddr>()
            .is_ok_and(|ip| ip.is_loopback())
}

fn same_address(a: &str, b: &str) -> bool {
    a == b || is_wildcard(a) || is_wildcard(b)
}

/// Returns true if the host stands for every address of this host.
pub(super) fn is_wildcard(host: &str) -> bool {
    matches!(host, "0.0.0.0" | "::" | "*")
}

/// The configuration as a TOML file that can be read back, each line with the origin of its
/// value. `notes` explain values that are worked out at start, by setting name.
pub fn print_config(loaded: &Loaded, notes: &[(&str, String)]) -> String {
    let mut out = String::from(
        "# lmc serve: the configuration in effect. Save it as a file and pass it with --config FILE.\n\
         # A flag --some-name is the variable LMC_SOME_NAME and the key some_name.\n\
         # Flags win over variables, variables over the file, the file over defaults.\n",
    );
    let line = |key: &str, entry: &Entry| {
        let note = notes.iter().find(|(name, _)| *name == entry.info.name);
        let note = note
            .map(|(_, text)| format!("; {text}"))
            .unwrap_or_default();
        let line = format!("{key} = {}", toml_value(&entry.shown(str::to_owned)));
        format!("{line:<44} # {}{note}\n", entry.source)
    };
    // Several stores need tables; one is written as its flags are.
    let is_in_table = |entry: &&Entry| {
        !loaded.further_remotes.is_empty() && key_of_store(&entry.info.key()).is_some()
    };
    let (first, entries): (Vec<&Entry>, Vec<&Entry>) = loaded.entries.iter().partition(is_in_table);
    // A table takes every key after it, so tables come last.
    let (pairs, values): (Vec<&Entry>, Vec<&Entry>) = entries
        .into_iter()
        .partition(|entry| entry.info.shape == Shape::Pairs);
    let mut group: Option<Group> = None;
    for entry in values {
        if group.replace(entry.info.group) != Some(entry.info.group) {
            out.push_str(&format!("\n# {}\n", entry.info.group.heading()));
        }
        out.push_str(&line(&entry.info.key(), entry));
    }
    for entry in pairs {
        out.push_str(&format!(
            "\n[{}]{:<30} # {}\n",
            entry.info.key(),
            "",
            entry.source
        ));
        for (name, value) in entry.raw.pairs().unwrap_or_default() {
            out.push_str(&format!("{} = {}\n", quoted(&name), toml_value(&value)));
        }
    }
    let further = loaded
        .further_remotes
        .iter()
        .map(|store| store.iter().collect());
    for store in std::iter::once(first)
        .chain(further)
        .filter(|store: &Vec<&Entry>| !store.is_empty())
    {
        out.push_str("\n[[tier]]\nkind = \"remote\"\n");
        for entry in store {
            if let Some(key) = key_of_store(&entry.info.key()) {
                out.push_str(&line(key, entry));
            }
        }
    }
    out
}

fn toml_value(text: &str) -> String {
    let bare = text == "true" || text == "false" || text.parse::<i64>().is_ok();
    // "1." and ".5" parse as f64 but are not TOML.
    let float = text.parse::<f64>().is_ok_and(f64::is_finite)
        && text
            .split_once('.')
            .is_some_and(|(whole, part)| !whole.is_empty() && !part.is_empty())
        && text
            .chars()
            .all(|c| c.is_ascii_digit() || c == '.' || c == '-');
    // Leading zeros are decimal to us and an error to TOML.
    if (bare || float)
        && !(text.len() > 1 && text.starts_with('0') && !text.starts_with("0."))
        && !text.starts_with('+')
    {
        text.to_owned()
    } else {
        quoted(text)
    }
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}
