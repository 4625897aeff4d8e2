//! The configuration of `lmc serve`, typed and checked.

use std::path::{Path, PathBuf};
use std::time::Duration;

use lmc_key::IdentityText;
use lmc_memory::Demand;
use lmc_vllm_adapter::TrustedUsers;

use super::layers::{ConfigError, Entry, Layers};
use super::parse::{
    DiskAdmit, DiskIoName, DiskWrite, EvictionPolicy, HashName, LogFormat, PoolSize, SegmentName,
    StateDir, TransferMode,
};
use super::setting::{Group, Raw, Shape};
use super::settings as s;

/// Least bytes of a drive: a smaller one holds few chunks of any model.
pub(crate) const LEAST_DRIVE: u64 = 64 << 20;

/// Configuration of `lmc serve`. Each field's meaning is the help text of the setting of
/// the same name in `settings.rs`.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the settings table documents every field once")]
pub struct ServeConfig {
    pub host: String,
    pub port: u16,
    pub trusted_users: TrustedUsers,
    pub max_workers: usize,
    pub http_host: String,
    pub ipc_path: Option<PathBuf>,
    pub http_port: u16,
    pub http_allowed_hosts: Vec<String>,
    pub chunk_size: usize,
    pub hash_algorithm: HashName,
    pub identity: IdentityText,
    pub hash_memo_size: u64,
    pub transfer_mode: TransferMode,
    pub null_block_id: Option<u32>,
    pub pool_size: PoolSize,
    pub align_bytes: u64,
    pub huge_pages: Demand,
    pub shm_name: SegmentName,
    pub numa_node: Option<u32>,
    pub lock_memory: Demand,
    pub prefault: bool,
    pub copy_threads: Option<usize>,
    pub eviction_policy: EvictionPolicy,
    pub eviction_watermark: f64,
    pub eviction_ratio: f64,
    pub quotas: Vec<(String, u64)>,
    pub disk: Vec<PathBuf>,
    pub disk_create: bool,
    pub disk_size: PoolSize,
    pub disk_keep_free: u64,
    pub disk_write: DiskWrite,
    pub disk_admit: DiskAdmit,
    pub disk_read_timeout: Duration,
    pub recompute_rate: Option<usize>,
    pub disk_io: DiskIoName,
    pub disk_depth: u32,
    pub state_dir: StateDir,
    pub read_ttl: Duration,
    pub write_ttl: Duration,
    pub session_ttl: Duration,
    pub reap_timeout: Duration,
    pub registration_grace: Duration,
    pub orphan_grace: Duration,
    pub slot_grace: Duration,
    pub shutdown_timeout: Duration,
    pub kv_event_log_size: usize,
    pub log_level: String,
    pub log_format: LogFormat,
}

/// A configuration, with what is needed to explain it.
#[derive(Debug, Clone)]
pub struct Loaded {
    /// The values.
    pub config: ServeConfig,
    /// Each setting as it was written, and by whom.
    pub entries: Vec<Entry>,
    /// Settings that were ignored, for the log.
    pub warnings: Vec<String>,
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
        let config = Self::take(&mut layers);
        let (entries, warnings) = layers.finish()?;
        Ok(Loaded {
            config,
            entries,
            warnings,
        })
    }

    fn take(layers: &mut Layers) -> Self {
        let config = Self {
            host: layers.take(&s::HOST),
            ipc_path: layers.take(&s::IPC_PATH),
            port: layers.take(&s::PORT),
            trusted_users: layers.take(&s::TRUSTED_USERS),
            max_workers: layers.take(&s::MAX_WORKERS),
            http_host: layers.take(&s::HTTP_HOST),
            http_port: layers.take(&s::HTTP_PORT),
            http_allowed_hosts: layers.take(&s::HTTP_ALLOWED_HOST),
            chunk_size: layers.take(&s::CHUNK_SIZE),
            hash_algorithm: layers.take(&s::HASH_ALGORITHM),
            identity: layers.take(&s::IDENTITY),
            hash_memo_size: layers.take(&s::HASH_MEMO_SIZE).0,
            transfer_mode: layers.take(&s::SUPPORTED_TRANSFER_MODE),
            null_block_id: layers.take(&s::NULL_BLOCK_ID),
            pool_size: layers.take(&s::L1_SIZE_GB),
            align_bytes: layers.take(&s::L1_ALIGN_BYTES).0,
            huge_pages: layers.take(&s::L1_USE_HUGEPAGES),
            shm_name: layers.take(&s::SHM_NAME),
            numa_node: layers.take(&s::NUMA_NODE),
            lock_memory: layers.take(&s::LOCK_MEMORY),
            prefault: layers.take(&s::PREFAULT),
            copy_threads: layers.take(&s::COPY_THREADS),
            eviction_policy: layers.take(&s::EVICTION_POLICY),
            eviction_watermark: layers.take(&s::EVICTION_TRIGGER_WATERMARK),
            eviction_ratio: layers.take(&s::EVICTION_RATIO),
            quotas: layers.take(&s::QUOTA),
            disk: layers.take(&s::DISK),
            disk_create: layers.take(&s::DISK_CREATE),
            disk_size: layers.take(&s::DISK_SIZE),
            disk_keep_free: layers.take(&s::DISK_KEEP_FREE).0,
            disk_write: layers.take(&s::DISK_WRITE),
            disk_admit: layers.take(&s::DISK_ADMIT),
            disk_read_timeout: layers.take(&s::DISK_READ_TIMEOUT_SECONDS),
            recompute_rate: layers.take(&s::RECOMPUTE_RATE),
            disk_io: layers.take(&s::DISK_IO),
            disk_depth: layers.take(&s::DISK_DEPTH) as u32,
            state_dir: layers.take(&s::STATE_DIR),
            read_ttl: layers.take(&s::L1_READ_TTL_SECONDS),
            write_ttl: layers.take(&s::L1_WRITE_TTL_SECONDS),
            session_ttl: layers.take(&s::SESSION_TTL_SECONDS),
            reap_timeout: layers.take(&s::WORKER_REAP_TIMEOUT_SECONDS),
            registration_grace: layers.take(&s::WORKER_REGISTRATION_GRACE_SECONDS),
            orphan_grace: layers.take(&s::WORKER_ORPHAN_GRACE_SECONDS),
            slot_grace: layers.take(&s::SLOT_GRACE_SECONDS),
            shutdown_timeout: layers.take(&s::SHUTDOWN_TIMEOUT_SECONDS),
            kv_event_log_size: layers.take(&s::KV_EVENT_LOG_SIZE),
            log_level: layers.take(&s::LOG_LEVEL),
            log_format: layers.take(&s::LOG_FORMAT),
        };
        config.cross_check(layers);
        config
    }

    fn cross_check(&self, layers: &mut Layers) {
        if self.registration_grace < self.reap_timeout {
            layers.refuse(
                &s::WORKER_REGISTRATION_GRACE_SECONDS.info,
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
                &s::HTTP_PORT.info,
                format!(
                    "expected another port than --port {}, which engines connect to",
                    self.port
                ),
            );
        }
        if self.transfer_mode == TransferMode::EngineDriven && self.shm_name == SegmentName::None {
            layers.refuse(
                &s::SHM_NAME.info,
                "expected a name or auto: engine-driven transfers go through shared memory",
            );
        }
        if self.disk_write == DiskWrite::Back && self.disk_admit == DiskAdmit::Second {
            layers.refuse(
                &s::DISK_ADMIT.info,
                "expected always with disk_write = back: what is evicted was used as often as it will be",
            );
        }
        if self.disk.is_empty() && self.disk_size != PoolSize::Auto {
            layers.refuse(&s::DISK_SIZE.info, "requires --disk");
        }
        if let PoolSize::Bytes(bytes) = self.disk_size
            && !self.disk.is_empty()
            && bytes / (self.disk.len() as u64) < LEAST_DRIVE
        {
            layers.refuse(
                &s::DISK_SIZE.info,
                format!(
                    "expected at least {} for each drive, or auto",
                    super::size::human_bytes(LEAST_DRIVE)
                ),
            );
        }
        if self.eviction_ratio >= self.eviction_watermark {
            layers.refuse(
                &s::EVICTION_RATIO.info,
                format!(
                    "expected less than eviction_trigger_watermark ({}), or nothing would stay",
                    self.eviction_watermark
                ),
            );
        }
    }
}

fn same_address(a: &str, b: &str) -> bool {
    let any = |host: &str| host == "0.0.0.0" || host == "::" || host == "*";
    a == b || any(a) || any(b)
}

/// The configuration as a TOML file that can be read back, each line with the origin of its
/// value. `notes` explain values that are worked out at start, by setting name.
pub fn print_config(entries: &[Entry], notes: &[(&str, String)]) -> String {
    let mut out = String::from(
        "# lmc serve: the configuration in effect. Save it as a file and pass it with --config FILE.\n\
         # A flag --some-name is the variable LMC_SOME_NAME and the key some_name.\n\
         # Flags win over variables, variables over the file, the file over defaults.\n",
    );
    let mut group: Option<Group> = None;
    // A table takes every key after it, so pairs come last.
    let (pairs, values): (Vec<&Entry>, Vec<&Entry>) = entries
        .iter()
        .partition(|entry| entry.info.shape == Shape::Pairs);
    for entry in values {
        if group.replace(entry.info.group) != Some(entry.info.group) {
            out.push_str(&format!("\n# {}\n", entry.info.group.heading()));
        }
        let line = format!(
            "{} = {}",
            entry.info.key(),
            toml_value(&entry.raw.to_string())
        );
        let note = notes.iter().find(|(name, _)| *name == entry.info.name);
        let note = note
            .map(|(_, text)| format!("; {text}"))
            .unwrap_or_default();
        out.push_str(&format!("{line:<44} # {}{note}\n", entry.source));
    }
    for entry in pairs {
        out.push_str(&format!(
            "\n[{}]{:<30} # {}\n",
            entry.info.key(),
            "",
            entry.source
        ));
        for (name, value) in pairs_of(&entry.raw) {
            out.push_str(&format!("{} = {}\n", quoted(&name), toml_value(&value)));
        }
    }
    out
}

fn pairs_of(raw: &Raw) -> Vec<(String, String)> {
    match raw {
        Raw::Pairs(pairs) => pairs.clone(),
        Raw::Text(text) => text
            .split(',')
            .filter_map(|part| part.rsplit_once('='))
            .map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()))
            .collect(),
    }
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
