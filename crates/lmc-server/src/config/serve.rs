//! The configuration of `lmc serve`, typed and checked.

use std::path::{Path, PathBuf};

use super::layers::{Entry, Layers};
use super::parse::{self, PeerTransport, PoolSize, SegmentName, TransferMode, is_wildcard};
use super::problem::ConfigError;
use super::setting::{Group, Raw, Shape};
use super::settings::{
    ALL, DiskSettings, PeersSettings, RemoteSettings, ServeConfig, TierSettings,
};
use super::tiers::{self, Kind};

/// Smallest size of a drive in bytes: a smaller drive holds few chunks of any model.
pub(crate) const LEAST_DRIVE: u64 = 64 << 20;

/// A configuration, with the origin of each setting.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The values.
    pub config: ServeConfig,
    /// Each setting as it was written, with its origin.
    pub entries: Vec<Entry>,
    /// Settings of each further store, except those with default values.
    pub further_remotes: Vec<Vec<Entry>>,
    /// Settings that were ignored, for the log.
    pub warnings: Vec<String>,
    /// Notes about ignored variables that need no action, for the log.
    pub notes: Vec<String>,
}

impl ServeConfig {
    /// Loads the configuration. Flags win over `variables`, variables over the file, the file over the
    /// defaults. The file is `file`, or else the file that `LMC_CONFIG` names.
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
        let mut layers = Layers::new(ALL, flags, variables);
        if let Some(path) = file {
            layers.read_file(&path);
        }
        let mut config = Self::take(&mut layers);
        if config.disable_prometheus {
            config.prometheus_port = None;
        }
        config.cross_check(&mut layers);
        let disk = DiskSettings::take(&mut layers);
        disk.cross_check(&mut layers);
        let peers = PeersSettings::take(&mut layers);
        config.cross_check_peers(&peers, &mut layers);
        let mut stores = vec![RemoteSettings::take(&mut layers)];
        stores[0].cross_check(&mut layers);
        let mut further_remotes = Vec::new();
        for mut store in layers.take_stores() {
            let remote = RemoteSettings::take(&mut store);
            if stores.iter().any(|other| other.url == remote.url) {
                store.refuse("remote", "expected a store that no earlier table names");
            }
            stores.push(remote);
            further_remotes.push(layers.finish_store(store));
        }
        let mut disk = (!disk.folders.is_empty()).then_some(TierSettings::Disk(disk));
        let mut peers = (peers.listen.is_some()).then_some(TierSettings::Peers(peers));
        let mut stores = stores.into_iter();
        let next = |kind| match kind {
            Kind::Disk => disk.take(),
            Kind::Peers => peers.take(),
            Kind::Remote => {
                let store = stores.next().filter(|store| store.url.is_some());
                store.map(TierSettings::Remote)
            }
        };
        let order = tiers::order(layers.tables());
        config.tiers = order.into_iter().filter_map(next).collect();
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

    /// Returns the settings of the drives, if there are any.
    pub fn disk(&self) -> Option<&DiskSettings> {
        self.tiers.iter().find_map(|tier| match tier {
            TierSettings::Disk(disk) => Some(disk),
            _ => None,
        })
    }

    /// Returns the settings of the peers, if there are any.
    pub fn peers(&self) -> Option<&PeersSettings> {
        self.tiers.iter().find_map(|tier| match tier {
            TierSettings::Peers(peers) => Some(peers),
            _ => None,
        })
    }

    /// Returns the shared stores, in the order in which they are asked.
    pub fn remotes(&self) -> impl Iterator<Item = &RemoteSettings> {
        self.tiers.iter().filter_map(|tier| match tier {
            TierSettings::Remote(store) => Some(store),
            _ => None,
        })
    }

    fn cross_check(&self, layers: &mut Layers) {
        if self.registration_grace < self.reap_timeout {
            layers.refuse(
                "worker-registration-grace-seconds",
                format!(
                    "expected at least worker_reap_timeout_seconds ({}); otherwise workers that warm up \
                     would be removed before they can ping",
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
        if let Some(metrics) = self.prometheus_port.filter(|port| *port != 0) {
            if metrics == self.port {
                layers.refuse(
                    "prometheus-port",
                    format!(
                        "expected another port than --port {metrics}, which engines connect to"
                    ),
                );
            }
            if metrics == self.http_port && same_address(&self.host, &self.http_host) {
                layers.refuse(
                    "prometheus-port",
                    format!("expected another port than --http-port {metrics}, which serves /metrics too"),
                );
            }
        }
        match (&self.http_tls_cert, &self.http_tls_key) {
            (Some(_), None) => layers.refuse("http-tls-cert", "requires --http-tls-key"),
            (None, Some(_)) => layers.refuse("http-tls-key", "requires --http-tls-cert"),
            _ => {}
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
        if self.eviction_ratio >= self.eviction_watermark {
            layers.refuse(
                "eviction-ratio",
                format!(
                    "expected less than eviction_trigger_watermark ({}); otherwise eviction would empty the pool",
                    self.eviction_watermark
                ),
            );
        }
    }

    /// Checks the settings of the peers, and of the directory that this server hosts.
    fn cross_check_peers(&self, peers: &PeersSettings, layers: &mut Layers) {
        if peers.listen.is_none() && !peers.peers.is_empty() {
            layers.refuse("p2p-peer", "requires --p2p-listen");
        }
        if peers.listen.is_none() && !peers.directories.is_empty() {
            layers.refuse("p2p-directory", "requires --p2p-listen");
        }
        if let Some(at) = &peers.listen
            && is_wildcard(&at.host)
            && peers.advertise.is_none()
        {
            layers.refuse(
                "p2p-advertise",
                format!("expected the address under which peers reach this server, because --p2p-listen {at} is a wildcard"),
            );
        }
        if peers.listen.is_some()
            && self.p2p_key.is_none()
            && peers.transport == PeerTransport::Nixl
        {
            layers.refuse(
                "p2p-transport",
                "nixl requires --p2p-key: the server describes its memory only to peers that prove that they have the key",
            );
        }
        if self.p2p_encrypt && peers.transport == PeerTransport::Nixl {
            layers.refuse(
                "p2p-encrypt",
                "expected --p2p-transport auto or sockets: NIXL cannot encrypt",
            );
        }
        if self.p2p_encrypt && peers.listen.is_none() {
            layers.refuse("p2p-encrypt", "requires --p2p-listen");
        }
        let listeners = [
            ("--p2p-listen", &peers.listen, "read every chunk"),
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
                format!("expected a file with a key, because {flag} {at} is not a loopback address: without a key any host could {harm}; create a key with: (umask 077; openssl rand -hex 32 > FILE)"),
            );
        }
    }
}

impl DiskSettings {
    fn cross_check(&self, layers: &mut Layers) {
        if self.folders.is_empty() && self.size != PoolSize::Auto {
            layers.refuse("disk-size", "requires --disk");
        }
        if let PoolSize::Bytes(bytes) = self.size
            && !self.folders.is_empty()
            && bytes / (self.folders.len() as u64) < LEAST_DRIVE
        {
            layers.refuse(
                "disk-size",
                format!(
                    "expected at least {} for each drive, or auto",
                    super::size::human_bytes(LEAST_DRIVE)
                ),
            );
        }
    }
}

impl RemoteSettings {
    fn cross_check(&self, layers: &mut Layers) {
        for (name, is_set) in [
            ("remote-size", self.size.is_some()),
            ("remote-ttl", self.ttl.is_some()),
            ("remote-salts", self.salts.is_some()),
            ("remote-key", self.key.is_some()),
        ] {
            if is_set && self.url.is_none() {
                layers.refuse(name, "requires --remote");
            }
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

/// Returns the configuration as a TOML file that can be read back, each line with the origin of its
/// value. `notes` explain values that are determined at start, by setting name.
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
    // Several stores, or an unusual order, need tables; otherwise flat keys are enough.
    let tiers = &loaded.config.tiers;
    let is_usual = tiers.is_sorted_by_key(TierSettings::kind) && loaded.further_remotes.is_empty();
    let tables = if is_usual { &[] } else { tiers.as_slice() };
    let is_flat = |entry: &&Entry| {
        let key = entry.info.key();
        tables.iter().all(|tier| tier.kind().key_of(&key).is_none())
    };
    // A table takes every key after it, so tables come last.
    let entries = loaded.entries.iter().filter(is_flat);
    let (pairs, values): (Vec<&Entry>, Vec<&Entry>) =
        entries.partition(|entry| entry.info.shape == Shape::Pairs);
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
    let stores = std::iter::once(&loaded.entries).chain(&loaded.further_remotes);
    let mut stores = stores.filter(|entries| names_store(entries));
    for tier in tables {
        let kind = tier.kind();
        let entries = match kind {
            Kind::Remote => stores.next(),
            Kind::Disk | Kind::Peers => Some(&loaded.entries),
        };
        out.push_str(&format!("\n[[tier]]\nkind = \"{}\"\n", kind.name()));
        for entry in entries.into_iter().flatten() {
            if let Some(key) = kind.key_of(&entry.info.key()) {
                out.push_str(&line(key, entry));
            }
        }
    }
    out
}

/// Returns true if one of the entries names a store.
fn names_store(entries: &[Entry]) -> bool {
    let url = entries.iter().find(|entry| entry.info.name == "remote");
    url.is_some_and(|url| matches!(parse::remote_url(&url.raw), Ok(Some(_))))
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
    // Our parser reads numbers with leading zeros as decimal; in TOML they are errors.
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
