//! `lmc start`: a server in the background, one for each user of a host.

mod descriptors;

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use lmc_memory::use_all_nodes;
use lmc_vllm_adapter::adapters::{Endpoint, local_server};
use lmc_vllm_adapter::{LOCAL_SOCKET, check_private, user_folder};
use rustix::fs::{FlockOperation, Mode, flock, fstat, ftruncate};
use rustix::process::{Resource, setpriority_process, setsid, umask};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use tracing::warn;

use self::descriptors::keep_descriptors;
use crate::config::{Entry, Raw, ServeConfig, SettingOrigin, mask_password_of};
use crate::limits;
use crate::state::write_private;
use crate::stdout::outln;
use crate::text::version;

pub(crate) const HELP: &str = "\
lmc's own connector for vLLM runs this command if it finds no server. The server's socket, its log and
a record of its settings are in /run/lmc for root, and in /tmp/lmc-UID for other users.

Examples:
  lmc start                                     a server that ends 10 minutes after its last engine
  lmc start -- --l1-size-gb 64 --chunk-size 512 with settings of `lmc serve`";

/// Time that a server has to answer.
const PROBE: Duration = Duration::from_secs(3);
/// Time between two checks of the server that is waited for.
const PAUSE: Duration = Duration::from_millis(20);
/// Seconds without an engine after which a server in the background ends.
const IDLE_SECONDS: &str = "600";
/// Size at which the log of a server in the background is truncated.
const LOG_BYTES: i64 = 16 << 20;
/// Lines of the log that are shown if a server ends at its start.
const SHOWN_LINES: usize = 5;
/// OOM score adjustment of a server: the kernel kills it first when memory is short. Pages of the pool
/// that an engine maps count for the engine as well, so without it the engine may be killed first.
const OOM_SCORE: &str = "1000";

/// Variables that the server gets, and prefixes of further variables. All others belong to an engine,
/// such as LD_PRELOAD and OMP_NUM_THREADS.
const VARIABLES: [&str; 8] = [
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "TZ",
    "TMPDIR",
    "RUST_BACKTRACE",
];
const VARIABLES_FROM: [&str; 5] = ["LMC_", "XDG_", "LC_", "AWS_", "SSL_CERT_"];

// A doc comment here would become the text of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Seconds to wait for the server to start. After that this command ends, and the server continues to start.
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout_seconds: u64,
    /// Print JSON: address, http, started, log, warnings.
    #[arg(long)]
    json: bool,
    /// Flags of `lmc serve` for the server, if it is started.
    #[arg(last = true, value_name = "FLAGS")]
    flags: Vec<String>,
}

/// A server that engines of this user find, now or as soon as it listens.
#[derive(Debug)]
struct Found {
    address: String,
    /// URL of its HTTP side, if known.
    http: Option<String>,
    was_started: bool,
    warnings: Vec<String>,
}

/// The folder of this user's server, with its socket, its log, a record of its settings, and a lock. The
/// server holds the lock until it ends, because the lock is its standard input.
struct Own {
    folder: PathBuf,
}

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode> {
    let deadline = Instant::now() + Duration::from_secs(arguments.timeout_seconds);
    let flags = normalized(&arguments.flags);
    let own = Own {
        folder: user_folder(),
    };
    let found = match running()? {
        Some(server) => own.found(&server, &flags),
        None => own.found_or_started(&flags, deadline)?,
    };
    if arguments.json {
        let found = json!({
            "address": found.address,
            "http": found.http,
            "started": found.was_started,
            "log": own.log(),
            "warnings": found.warnings,
        });
        outln!("{found}");
        return Ok(ExitCode::SUCCESS);
    }
    for warning in &found.warnings {
        eprintln!("lmc start: warning: {warning}");
    }
    match found.was_started {
        true => outln!(
            "started; engines find it at {}; log {}",
            found.address,
            own.log().display()
        ),
        false => outln!("engines find a server at {}", found.address),
    }
    if let Some(http) = &found.http {
        outln!("show its status with: lmc status --url {http}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the address of the server that engines of this user find.
fn running() -> Result<Option<Endpoint>> {
    local_server(PROBE).context("cannot look for a server")
}

impl Own {
    fn socket(&self) -> PathBuf {
        self.folder.join("lmc.sock")
    }

    fn address(&self) -> String {
        Endpoint::Ipc(self.socket()).to_string()
    }

    fn log(&self) -> PathBuf {
        log_beside(&self.socket())
    }

    fn record(&self) -> PathBuf {
        record_beside(&self.socket())
    }

    /// Opens the file that the server of this user has locked.
    fn lock(&self) -> Result<File> {
        let path = self.folder.join("lmc.lock");
        let mut file = OpenOptions::new();
        let file = file.create(true).read(true).write(true).truncate(false);
        file.mode(0o600)
            .open(&path)
            .context(format!("{}", path.display()))
    }

    fn make_folder(&self) -> Result<()> {
        match DirBuilder::new().mode(0o755).create(&self.folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(error).context(format!("{}", self.folder.display()));
            }
            _ => {}
        }
        Ok(check_private(&self.folder)?)
    }

    /// Returns the server that another process has started meanwhile, or starts one.
    fn found_or_started(&self, flags: &[String], deadline: Instant) -> Result<Found> {
        self.make_folder()?;
        let lock = self.lock()?;
        loop {
            let is_ours = flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
            if let Some(server) = running()? {
                drop(lock);
                return Ok(self.found(&server, flags));
            }
            if is_ours {
                return self.start(lock, flags, deadline);
            }
            if Instant::now() >= deadline {
                return Ok(Found {
                    address: self.address(),
                    http: None,
                    was_started: false,
                    warnings: vec![format!(
                        "a server of this user is starting or stopping: engines use it once it \
                         listens; its log is {}",
                        self.log().display()
                    )],
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns a running server, with warnings if its version or its settings are not the requested ones.
    fn found(&self, server: &Endpoint, flags: &[String]) -> Found {
        let address = server.to_string();
        let mut warnings = Vec::new();
        let record = self.record_of(&address);
        match &record {
            Some(record) => {
                let process = &record["process"];
                let found = record["version"].as_str().unwrap_or_default();
                if found != version() {
                    warnings.push(format!(
                        "the running server at {address} is lmc {found}, and this is lmc {}: the running \
                         server is used; end process {process} to start this version",
                        version()
                    ));
                }
                if !flags.is_empty() && record["flags"] != json!(flags) {
                    warnings.push(format!(
                        "the server at {address} was started with other settings ({}), which stay \
                         in effect; end process {process} to change them",
                        shown(&record["flags"])
                    ));
                }
            }
            None if !flags.is_empty() => warnings.push(format!(
                "the server at {address} was not started by `lmc start`: its settings stay in effect, and \
                 the flags given here are ignored"
            )),
            None => {}
        }
        Found {
            address,
            http: record.as_ref().and_then(http_of),
            was_started: false,
            warnings,
        }
    }

    /// Returns the record of the server at an address, if `lmc start` has started it. Such a server
    /// holds the lock.
    fn record_of(&self, address: &str) -> Option<Value> {
        // A shared lock, so that two callers do not take each other for a server.
        let is_locked = |lock: File| flock(&lock, FlockOperation::NonBlockingLockShared).is_err();
        let is_started = address == self.address() && self.lock().is_ok_and(is_locked);
        is_started.then(|| read_record(&self.record())).flatten()
    }

    /// Starts a server, passes it the lock, and waits until it listens.
    fn start(&self, lock: File, flags: &[String], deadline: Instant) -> Result<Found> {
        let socket = self.socket();
        ensure!(
            !flags.iter().any(|flag| flag.starts_with("--ipc-path")),
            "engines look for this server at {}: omit --ipc-path, or start the server with `lmc serve`",
            socket.display()
        );
        let _ = fs::remove_file(self.record());
        let mut child = spawn(&socket, lock, flags)?;
        let mut warnings = Vec::new();
        let record = loop {
            let record = read_record(&self.record());
            if record.is_some() {
                break record;
            }
            if let Some(status) = child.try_wait().context("the server")? {
                bail!(
                    "the server ended at its start ({status}): {}",
                    last_lines(&self.log())
                );
            }
            if Instant::now() >= deadline {
                warnings.push(format!(
                    "the server is not ready yet; engines use it as soon as it is; its log is {}",
                    self.log().display()
                ));
                break None;
            }
            std::thread::sleep(PAUSE);
        };
        Ok(Found {
            address: self.address(),
            http: record.as_ref().and_then(http_of),
            was_started: true,
            warnings,
        })
    }
}

/// Returns flags with their values joined to them (`--name=value`) and sorted, to compare them.
fn normalized(flags: &[String]) -> Vec<String> {
    let mut joined: Vec<String> = Vec::new();
    for flag in flags {
        match joined.last_mut() {
            Some(last) if !flag.starts_with("--") && !last.contains('=') => {
                *last = format!("{last}={flag}");
            }
            _ => joined.push(flag.clone()),
        }
    }
    joined.sort();
    joined
}

/// Returns flags as they would be typed, without passwords.
fn shown(flags: &Value) -> String {
    let flags = flags.as_array().map(Vec::as_slice).unwrap_or_default();
    let flags: Vec<String> = flags
        .iter()
        .filter_map(Value::as_str)
        .map(mask_password_of)
        .collect();
    match flags.is_empty() {
        true => "none".to_owned(),
        false => flags.join(" "),
    }
}

fn log_beside(socket: &Path) -> PathBuf {
    socket.with_file_name("serve.log")
}

fn record_beside(socket: &Path) -> PathBuf {
    socket.with_file_name("serve.json")
}

fn read_record(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

fn http_of(record: &Value) -> Option<String> {
    record["http"].as_str().map(str::to_owned)
}

/// The first arguments of a server in the background. Its socket and the requested flags follow.
const COMMAND: [&str; 3] = ["serve", "--detached", "--ipc-path"];

/// Starts the process of a server, which outlives this process.
fn spawn(socket: &Path, lock: File, flags: &[String]) -> Result<Child> {
    let log = log_beside(socket);
    let _ = fs::rename(&log, older(&log));
    let mut output = OpenOptions::new();
    let output = output.create(true).append(true).mode(0o600);
    let output = output.open(&log).context(format!("{}", log.display()))?;
    let program = std::env::current_exe().context("this program's path")?;
    // An update may have replaced the file.
    let running = PathBuf::from("/proc/self/exe");
    let mut command = Command::new(if program.exists() { program } else { running });
    command
        .args(COMMAND)
        .arg(socket)
        .args(flags)
        .env_clear()
        .envs(std::env::vars_os().filter(|(name, _)| is_kept(name)))
        .stdin(lock)
        .stdout(output.try_clone().context("the log")?)
        .stderr(output);
    keep_descriptors();
    command.spawn().context("the server cannot be started")
}

/// Returns the settings of a server in the background that no flag, variable or file sets. The system
/// chooses the ports: stock clients of a server at 5555 expect to map its pool by name, and other programs
/// of the host may want 8080.
pub(crate) fn settings(entries: &[Entry]) -> Vec<(String, Raw)> {
    let settings = [
        ("port", "0"),
        ("http-port", "0"),
        ("shm-name", "sealed"),
        ("exit-when-idle-seconds", IDLE_SECONDS),
    ];
    let is_default = |(name, _): &(&str, &str)| {
        let entry = entries.iter().find(|entry| entry.info.name == *name);
        entry.is_some_and(|entry| entry.source == SettingOrigin::Default)
    };
    let open = settings.into_iter().filter(is_default);
    open.map(|(name, value)| (name.to_owned(), Raw::Text(value.to_owned())))
        .collect()
}

fn is_kept(name: &OsString) -> bool {
    let Some(name) = name.to_str() else {
        return false;
    };
    VARIABLES.contains(&name) || VARIABLES_FROM.iter().any(|from| name.starts_with(from))
}

/// Returns the end of a log as one line.
fn last_lines(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    match lines.is_empty() {
        true => format!("its log, {}, is empty", log.display()),
        false => lines[lines.len().saturating_sub(SHOWN_LINES)..].join("; "),
    }
}

/// Returns the path of the previous log.
fn older(log: &Path) -> PathBuf {
    log.with_extension("log.1")
}

/// Truncates a log that has reached a size, because its folder may be in memory. Its content is first
/// copied to the older log, if there is space.
fn keep_short(file: impl AsFd, log: &Path, bytes: i64) {
    if fstat(&file).is_ok_and(|found| found.st_size >= bytes) {
        let _ = fs::copy(log, older(log));
        // The server appends, so its next line is the first.
        let _ = ftruncate(&file, 0);
    }
}

/// A server in the background, in its own process.
#[derive(Debug, Clone)]
pub(crate) struct Background {
    socket: PathBuf,
}

impl Background {
    /// Makes this process independent of its parent, which may be an engine: it gets its own session,
    /// all cores and NUMA nodes, no soft limits, and is killed first when memory is short. Changes that
    /// the system does not allow are omitted.
    pub(crate) fn begin(config: &ServeConfig) -> Self {
        let _ = setsid();
        let mut cores = CpuSet::new();
        (0..CpuSet::MAX_CPU).for_each(|core| cores.set(core));
        let _ = sched_setaffinity(None, &cores);
        let _ = use_all_nodes();
        let _ = setpriority_process(None, 0);
        for resource in [
            Resource::As,
            Resource::Cpu,
            Resource::Data,
            Resource::Fsize,
            Resource::Memlock,
        ] {
            limits::raise(resource);
        }
        // Other users may write no file of the server, whatever the engine's umask is.
        umask(umask(Mode::empty()) | Mode::WGRP | Mode::WOTH);
        let _ = fs::write("/proc/self/oom_score_adj", OOM_SCORE);
        let socket = config.ipc_path.clone();
        Self {
            socket: socket.unwrap_or_else(|| LOCAL_SOCKET.into()),
        }
    }

    /// Records for `lmc start` that this server listens, and its flags.
    pub(crate) fn listens(&self, http: &str) {
        let flags: Vec<String> = std::env::args().skip(COMMAND.len() + 2).collect();
        let record = json!({
            "version": version(),
            "process": std::process::id(),
            "http": http,
            "flags": flags,
        });
        if let Err(error) = write_private(&record_beside(&self.socket), &record.to_string()) {
            warn!(
                "cannot record the settings of this server, so `lmc start` does not know them: {error:#}"
            );
        }
    }

    /// Truncates the log if it is long.
    pub(crate) fn keep_log_short(&self) {
        keep_short(io::stderr(), &log_beside(&self.socket), LOG_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ServeConfig;
    use std::io::Write as _;

    #[test]
    fn the_settings_of_the_background_win_over_defaults_only() {
        let load = |flags: &[(&str, &str)], variables: &[(&str, &str)]| {
            let flags = flags
                .iter()
                .map(|(name, value)| ((*name).to_owned(), Raw::Text((*value).to_owned())));
            let variables = variables
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            let loaded = ServeConfig::load(flags, variables, None).expect("valid");
            let found = settings(&loaded.entries).into_iter();
            found.map(|(name, _)| name).collect::<Vec<_>>()
        };
        let all = ["port", "http-port", "shm-name", "exit-when-idle-seconds"];
        assert_eq!(load(&[], &[]), all);
        let given = [("shm-name", "auto"), ("exit-when-idle-seconds", "none")];
        assert_eq!(load(&given, &[("LMC_PORT", "5555")]), ["http-port"]);
    }

    #[test]
    fn flags_are_compared_by_meaning_and_shown_without_passwords() {
        let flags =
            |text: &str| normalized(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        let both = flags("--remote redis://:secret@host --disk-fill --chunk-size=16");
        assert_eq!(
            both,
            flags("--disk-fill --chunk-size 16 --remote=redis://:secret@host")
        );
        let text = shown(&json!(both));
        assert!(
            text.starts_with("--chunk-size=16 --disk-fill --remote=redis://"),
            "{text}"
        );
        assert!(!text.contains("secret"), "{text}");
    }

    #[test]
    fn a_log_is_truncated_at_its_limit_and_continued() {
        let folder = lmc_testkit::Folder::temporary();
        let log = folder.join("serve.log");
        let mut file = File::options();
        let mut file = file.create(true).append(true).open(&log).expect("a file");
        file.write_all(b"line\n").expect("space");
        keep_short(&file, &log, 6);
        assert_eq!(fs::read(&log).expect("it is there"), b"line\n");
        keep_short(&file, &log, 5);
        file.write_all(b"next\n").expect("space");
        assert_eq!(fs::read(&log).expect("it is there"), b"next\n");
        assert_eq!(fs::read(older(&log)).expect("it is kept"), b"line\n");
    }

    #[test]
    fn variables_of_an_engine_are_not_passed_on() {
        for (name, kept) in [
            ("HOME", true),
            ("LMC_CHUNK_SIZE", true),
            ("LC_ALL", true),
            ("LD_PRELOAD", false),
            ("OMP_NUM_THREADS", false),
            ("PYTHONPATH", false),
        ] {
            assert_eq!(is_kept(&name.into()), kept, "{name}");
        }
    }
}
