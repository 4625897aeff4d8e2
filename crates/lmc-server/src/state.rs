//! The state folder: clears and quotas that this server keeps outside its tiers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use lmc_engine::ClearLog;
use tracing::warn;

use crate::config::{ServeConfig, StateDir};

/// Returns the state folder; `None` if there is none that can be written.
fn folder(config: &ServeConfig) -> Option<PathBuf> {
    match &config.state_dir {
        StateDir::None => None,
        StateDir::Path(path) => Some(path.clone()),
        StateDir::Auto => usual_folders().into_iter().find(|path| is_writable(path)),
    }
}

/// Returns the file for the quotas that are set over HTTP; `None` if they are not kept.
pub(crate) fn quotas_file(config: &ServeConfig) -> Option<PathBuf> {
    Some(folder(config)?.join(format!("{}.quotas", name(config))))
}

/// Durably replaces a file that only this user may read.
pub(crate) fn write_private(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let new = path.with_extension("new");
    let mut options = OpenOptions::new();
    let options = options.create(true).write(true).truncate(true).mode(0o600);
    let mut file = options.open(&new)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    fs::rename(&new, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

/// Opens the log of clears. Must be called before any tier is opened, any store is asked, and the server
/// listens for peers.
pub(crate) fn open_clears(config: &ServeConfig) -> Result<ClearLog> {
    let opened = match (&config.state_dir, folder(config)) {
        (StateDir::None, _) => return Ok(ClearLog::default()),
        (StateDir::Auto, None) => {
            warn!(
                "no state folder is writable: a restart loses the clears from now on, unless a drive, a peer or a store has recorded them; set --state-dir to a writable folder"
            );
            ClearLog::read(&name(config), &usual_folders())
        }
        (StateDir::Auto, Some(folder)) => {
            // Another folder may have been the writable one at the last start, under another user or HOME.
            let mut others = usual_folders();
            others.retain(|path| *path != folder);
            ClearLog::open(&folder, &name(config), &others)
        }
        (StateDir::Path(path), _) => ClearLog::open(path, &name(config), &[]),
    };
    opened.map_err(|error| anyhow!("the record of clears in --state-dir cannot be opened: {error}"))
}

/// Returns the name of this server's file: its name among peers, or else, in a folder that several servers
/// may use, the address that engines connect to.
fn name(config: &ServeConfig) -> String {
    let name = match (&config.p2p_name, &config.state_dir, &config.ipc_path) {
        (Some(name), ..) => name.clone(),
        (None, StateDir::Path(_), _) => "lmc".to_owned(),
        // With port 0 the next start has another port.
        (None, _, Some(path)) if config.port == 0 => path.display().to_string(),
        (None, ..) => format!("{}-{}", config.host, config.port),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    name.chars()
        .map(|c| if is_plain(c) || c == '.' { c } else { '_' })
        .collect()
}

/// Returns the state folders of `--state-dir auto`, in the order in which they are tried.
pub(crate) fn usual_folders() -> Vec<PathBuf> {
    let below = |variable: &str, path: &str| {
        let base = PathBuf::from(std::env::var_os(variable)?);
        base.is_absolute().then(|| base.join(path))
    };
    let usual = [
        below("XDG_STATE_HOME", "lmc"),
        Some("/var/lib/lmc".into()),
        below("HOME", ".local/state/lmc"),
    ];
    usual.into_iter().flatten().collect()
}

/// Returns true if files can be created in a folder. Creates the folder if it is missing.
fn is_writable(path: &Path) -> bool {
    let probe = path.join(format!(".probe-{}", std::process::id()));
    let made = fs::create_dir_all(path).and_then(|()| {
        let mut new = OpenOptions::new();
        new.write(true).create_new(true).open(&probe)
    });
    let _ = fs::remove_file(&probe);
    made.is_ok()
}
