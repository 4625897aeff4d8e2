//! The state folder: clears that this server remembers outside of its tiers.

use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use lmc_engine::ClearLog;
use tracing::warn;

use crate::config::{ServeConfig, StateDir};

/// Opens the log of clears. It is done before any tier is opened, any port listened at for
/// peers, and any store asked.
pub(crate) fn open_clears(config: &ServeConfig) -> Result<ClearLog> {
    let (folder, others) = match &config.state_dir {
        StateDir::None => return Ok(ClearLog::default()),
        StateDir::Path(path) => (path.clone(), Vec::new()),
        StateDir::Auto => {
            let usual = usual_folders();
            let Some(folder) = usual.iter().find(|path| is_writable(path)) else {
                warn!(
                    "no state folder is writable: a restart forgets the clears from now on that no drive, peer or store has noted; set --state-dir"
                );
                let read = ClearLog::read(&name(config), &usual);
                return read.map_err(|error| anyhow!("it is not known what was cleared: {error}"));
            };
            // Another may have been writable at the last start: under another user or HOME.
            let others = usual.iter().filter(|path| *path != folder);
            (folder.clone(), others.cloned().collect())
        }
    };
    ClearLog::open(&folder, &name(config), &others)
        .map_err(|error| anyhow!("it is not known what was cleared: {error}"))
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
    let made = std::fs::create_dir_all(path).and_then(|()| {
        let mut new = std::fs::OpenOptions::new();
        new.write(true).create_new(true).open(&probe)
    });
    let _ = std::fs::remove_file(&probe);
    made.is_ok()
}
