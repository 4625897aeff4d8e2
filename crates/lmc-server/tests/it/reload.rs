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

    fn quota(&self, salt: &str) -> Option<u64> {
        quota(&self.server, salt)
    }

    fn setting(&self, name: &str) -> String {
        let answer = self.server.get("/config");
        let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
        let config: Value = serde_json::from_str(body).expect("JSON");
        config["lmc"][name]["value"].to_string()
    }
}

/// The quota of a tenant in bytes; `None` without one.
fn quota(server: &Server, salt: &str) -> Option<u64> {
    let (_, answer) = ask(server.http, "GET", &format!("/quota/{salt}"), "");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    let quota: Value = serde_json::from_str(body).expect("JSON");
    let gib = quota["limit_gb"]
        .as_f64()
        .filter(|_| quota["exists"] != false)?;
    (gib > 0.0).then_some((gib * (1u64 << 30) as f64) as u64)
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
fn a_host_name_is_allowed_without_a_restart() {
    let daemon = Daemon::start();
    let named = || {
        let url = format!("http://127.0.0.1:{}/livez", daemon.server.http);
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        let agent: ureq::Agent = config.build().into();
        let answer = agent.get(url).header("host", "lmc.cache.svc").call();
        answer.expect("an answer").status().as_u16()
    };
    assert_eq!(named(), 403);
    daemon.add_setting("http_allowed_host = \"lmc.cache.svc\"");
    assert_eq!(daemon.reloads(), "changed: http-allowed-host\n");
    assert_eq!(named(), 200);
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
    daemon.server.line("settings not reloaded");
    daemon.server.terminate();
}

#[test]
fn a_quota_that_was_set_over_http_lasts_until_the_configuration_has_another() {
    const MIB: u64 = 1 << 20;
    let state = Folder::temporary();
    let start = |quota: &str| Server::start(&["--state-dir", state.text(), "--quota", quota]);
    let set = |server: &Server, salt: &str, bytes: u64| {
        let body = format!("{{\"limit_gb\": {}}}", bytes as f64 / (1u64 << 30) as f64);
        let (code, answer) = ask(server.http, "PUT", &format!("/quota/{salt}"), &body);
        assert!(code == 200 && answer.contains("\"kept\":true"), "{answer}");
    };
    let quotas = |server: &Server| ["a", "b"].map(|salt| quota(server, salt));
    let server = start("a=1MiB");
    set(&server, "a", 2 * MIB);
    set(&server, "b", 4 * MIB);
    drop(server);
    let file = state.join("lmc.quotas");
    let mode = fs::metadata(&file).expect("the file").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it has salts in clear");
    let server = start("a=1MiB");
    assert_eq!(quotas(&server), [Some(2 * MIB), Some(4 * MIB)]);
    assert_eq!(ask(server.http, "DELETE", "/quota/b", "").0, 200);
    assert_eq!(ask(server.http, "DELETE", "/quota/a", "").0, 200);
    drop(server);
    assert_eq!(
        quotas(&start("a=1MiB")),
        [None, None],
        "removed, and not configured since"
    );
    assert_eq!(quotas(&start("a=3MiB")), [Some(3 * MIB), None]);
    fs::write(&file, "{").expect("a file");
    let server = start("a=3MiB");
    drop(server.line("quotas that were set over HTTP cannot be read"));
    assert_eq!(quotas(&server), [Some(3 * MIB), None]);
    assert_eq!(
        fs::read_to_string(&file).expect("the file"),
        "{",
        "it is left as it is"
    );
}
