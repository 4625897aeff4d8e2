//! Settings that a running server reads again.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use lmc_testkit::Folder;
use serde_json::Value;

use crate::common::{Server, ask, lmc, prompt};

/// A server with files for its settings and quotas.
struct Daemon {
    folder: Folder,
    server: Server,
}

impl Daemon {
    /// Starts it without a terminal, as a service manager does.
    fn start() -> Self {
        let folder = Folder::temporary();
        let (config, quotas) = (config_of(&folder), quotas_of(&folder));
        let named = quotas.display().to_string();
        fs::write(&config, format!("quota_file = {named:?}\n")).expect("a file");
        fs::write(&quotas, "tenant-a=1MiB\n").expect("a file");
        fs::set_permissions(&quotas, PermissionsExt::from_mode(0o600)).expect("its owner's");
        let mut command = Command::new("setsid");
        command.arg(env!("CARGO_BIN_EXE_lmc"));
        let server = Server::start_by(command, &["--config", &config.display().to_string()]);
        Self { folder, server }
    }

    fn add_setting(&self, line: &str) {
        let path = config_of(&self.folder);
        let text = fs::read_to_string(&path).expect("the file");
        fs::write(&path, format!("{text}{line}\n")).expect("the file");
    }

    fn reload(&self) -> Output {
        let url = format!("http://127.0.0.1:{}", self.server.http);
        let mut reload = lmc();
        reload.args(["reload", "--url", &url]);
        reload.output().expect("the binary runs")
    }

    fn reloads(&self) -> String {
        let said = self.reload();
        assert!(said.status.success(), "{said:?}");
        String::from_utf8(said.stdout).expect("text")
    }

    /// The quota of a tenant in bytes; `None` without one.
    fn quota(&self, salt: &str) -> Option<u64> {
        let (_, answer) = ask(self.server.http, "GET", &format!("/quota/{salt}"), "");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let quota: Value = serde_json::from_str(body).expect("JSON");
        let gib = quota["limit_gb"]
            .as_f64()
            .filter(|_| quota["exists"] != false)?;
        (gib > 0.0).then_some((gib * (1u64 << 30) as f64) as u64)
    }

    fn setting(&self, name: &str) -> String {
        let answer = self.server.get("/config");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let config: Value = serde_json::from_str(body).expect("JSON");
        config["lmc"][name]["value"].to_string()
    }
}

fn config_of(folder: &Path) -> PathBuf {
    folder.join("lmc.toml")
}

fn quotas_of(folder: &Path) -> PathBuf {
    folder.join("quotas")
}

#[test]
fn what_can_change_does_and_what_cannot_is_named() {
    let daemon = Daemon::start();
    assert_eq!(daemon.quota("tenant-a"), Some(1 << 20));
    assert_eq!(daemon.reloads(), "nothing changed\n");
    daemon.add_setting("request_log = \"all\"");
    daemon.add_setting("session_ttl_seconds = 77");
    fs::write(quotas_of(&daemon.folder), "tenant-b=2MiB\n").expect("the file");
    let said = daemon.reloads();
    assert!(
        said.starts_with("changed: request-log, quota-file\n"),
        "{said}"
    );
    assert!(
        said.ends_with("a restart is needed for: session-ttl-seconds\n"),
        "{said}"
    );
    daemon
        .server
        .line("settings read again: changed request-log, quota-file; a restart is needed for");
    assert_eq!(daemon.quota("tenant-a"), None);
    assert_eq!(daemon.quota("tenant-b"), Some(2 << 20));
    assert!(daemon.setting("request_log").contains("all"));
    assert!(!daemon.setting("session_ttl_seconds").contains("77"));
    let mut engine = daemon.server.client();
    let shm = prompt::register(&mut engine);
    prompt::store(&mut engine, &shm);
    prompt::retrieve(&mut engine, &shm, "logged");
    daemon.server.line("lookup request=\"logged\"");
    // It is asked for as long as it is not in effect.
    assert!(daemon.reloads().contains("session-ttl-seconds"));
}

#[test]
fn an_error_changes_nothing() {
    let daemon = Daemon::start();
    daemon.add_setting("log_level = \"debug\"");
    daemon.add_setting("request_log = \"every\"");
    let said = daemon.reload();
    assert!(!said.status.success(), "{said:?}");
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("request"), "{said}");
    assert!(!daemon.setting("log_level").contains("debug"));
    fs::write(quotas_of(&daemon.folder), "tenant-a\n").expect("the file");
    assert!(!daemon.reload().status.success());
    assert_eq!(daemon.quota("tenant-a"), Some(1 << 20));
}

#[test]
fn a_hang_up_without_a_terminal_reads_the_settings_again() {
    let daemon = Daemon::start();
    daemon.add_setting("log_level = \"debug\"");
    daemon.server.signal(libc::SIGHUP);
    daemon.server.line("settings read again: changed log-level");
    // A line of that level.
    drop(daemon.server.client());
    daemon.server.line("DEBUG");
    daemon.add_setting("no_such_setting = 1");
    daemon.server.signal(libc::SIGHUP);
    daemon.server.line("settings stay as they are");
    daemon.server.terminate();
}
