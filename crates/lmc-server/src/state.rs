//! The state folder: clears and quotas that this server remembers outside of its tiers.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use lmc_engine::ClearLog;
use tracing::warn;

use crate::config::{ServeConfig, StateDir};

/// Returns the folder of what this server remembers outside of its tiers; `None` without one that can be
/// written.
fn folder(config: &ServeConfig) -> Option<PathBuf> {
    match &config.state_dir {
        StateDir::None => None,
        StateDir::Path(path) => Some(path.clone()),
        StateDir::Auto => usual_folders().into_iter().find(|path| is_writable(path)),
    }
}

/// Returns the file for the quotas that are set over HTTP; `None` where they are not kept.
pub(crate) fn quotas_file(config: &ServeConfig) -> Option<PathBuf> {
    Some(folder(config)?.join(format!("{}.quotas", name(config))))
}

/// Replaces a file that only this user may read, durably.
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

/// Opens the log of clears. It is done before any tier is opened, any port listened at for
/// peers, and any store asked.
pub(crate) fn open_clears(config: &ServeConfig) -> Result<ClearLog> {
    let opened = match (&config.state_dir, folder(config)) {
        (StateDir::None, _) => return Ok(ClearLog::default()),
        (StateDir::Auto, None) => {
            warn!(
                "no state folder is writable: a restart forgets the clears from now on that no drive, peer or store has noted; set --state-dir"
            );
            ClearLog::read(&name(config), &usual_folders())
        }
        (StateDir::Auto, Some(folder)) => {
            // Another may have been writable at the last start: under another user or HOME.
            let mut others = usual_folders();
            others.retain(|path| *path != folder);
            ClearLog::open(&folder, &name(config), &others)
        }
        (StateDir::Path(path), _) => ClearLog::open(path, &name(config), &[]),
    };
    opened.map_err(|error| anyhow!("it is not known what was cleared: {error}"))
}

/// The name of this server's file: that of the peer; or else, in a folder that may be that of
/// several servers, the address that engines connect to.
fn name(config: &ServeConfig) -> String {
    let name = match (&config.p2p_name, &config.state_dir, &config.ipc_path) {
        (Some(name), ..) => name.clone(),
        (None, StateDir::Path(_), _) => "lmc".to_owned(),
        // Any port: the next start has another.
        (None, _, Some(path)) if config.port == 0 => path.display().to_string(),
        (None, ..) => format!("{}-{}", config.host, config.port),
    };
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    name.chars()
        .map(|c| if is_plain(c) || c == '.' { c } else { '_' })
        .collect()
}

fn usual_folders() -> Vec<PathBuf> {
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
