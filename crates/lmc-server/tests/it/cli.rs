//! The commands around a server, as a user runs them.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Output};

use lmc_testkit::{Folder, free_port};
use lmc_vllm_adapter::{Reply, Request};
use serde_json::{Value, json};

use crate::common::{Server, ask};

/// A server with chunks of 32 tokens.
fn server(verb: &str, args: &[&str]) -> Server {
    let args = [&["--l1-size-gb", "64MiB", "--chunk-size", "32"], args].concat();
    let server = Server::spawn_by(Command::new(env!("CARGO_BIN_EXE_lmc")), verb, &args);
    server.line("listening for engines");
    server
}

fn lmc(args: &[&str]) -> Output {
    crate::common::lmc()
        .args(args)
        .output()
        .expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// vLLM's side of another port was documented nowhere. A server prints the whole line that
/// reaches it; `test-vllm::serve` starts a vLLM with exactly that line.
#[test]
fn a_server_prints_the_vllm_line_that_reaches_it() {
    let server = server("serve", &[]);
    let line = server.line("--kv-transfer-config");
    let config = line.split('\'').nth(1).expect("a value in single quotes");
    let config: Value = serde_json::from_str(config).expect("JSON");
    assert_eq!(config["kv_connector"], "LMCacheMPConnector");
    assert_eq!(config["kv_load_failure_policy"], "recompute");
    let extra = &config["kv_connector_extra_config"];
    assert_eq!(extra["lmcache.mp.port"], server.port);
    assert_eq!(extra.get("lmcache.mp.mp_transfer_mode"), None);
    assert_eq!(extra.get("lmcache.mp.host"), None);
}

/// The example of docs/size.md. A command whose output is read in part, as by `head -1`, panicked.
#[test]
fn a_plan_is_that_of_the_page_and_its_reader_may_leave() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/size.md");
    let page = fs::read_to_string(page).expect("the page");
    let folder = Folder::temporary();
    let config = json!({"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                        "hidden_size": 4096, "head_dim": 128, "torch_dtype": "bfloat16"});
    fs::write(folder.join("config.json"), config.to_string()).expect("a file");
    let line = page.lines().find(|line| line.starts_with("lmc plan"));
    let flags = line.expect("an example").split(' ').skip(3);
    let mut plan = crate::common::lmc();
    plan.arg("plan").arg(&folder).args(flags);
    let shown = text(&plan.output().expect("the binary runs").stdout);
    assert!(page.contains(&format!("```\n{shown}```")), "{shown}");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let ended = plan.stdout(writer).output().expect("the binary runs");
    assert!(ended.status.success(), "{ended:?}");
    assert_eq!(text(&ended.stderr), "");
}

/// An unexpected argument was repeated with its password, and so was the URL of a server that does not
/// answer.
#[test]
fn passwords_of_the_command_line_are_shown_nowhere() {
    let closed = free_port();
    let server = server("serve", &[]);
    let (redis, dead, alive) = (
        "redis://user:marked'1@h",
        format!("http://user:marked-1@127.0.0.1:{closed}"),
        format!("user:marked-1@127.0.0.1:{}", server.http),
    );
    for args in [
        &["serve", redis] as &[&str],
        &["serve", "--remoet", redis],
        &["serve", &format!("--no-prefault={redis}")],
        &["remote", "check", redis, redis],
        &[redis],
        &["status", "--url", &dead],
        &["status", "--url", &alive],
        &["status", "--url", "http://user:marked 1@h"],
        &["status", "--url", "user:marked-1@"],
        &["bench", "--http-url", &dead],
        &["bench", "--force", &dead],
    ] {
        let output = lmc(args);
        let shown = text(&output.stdout) + &text(&output.stderr);
        assert!(!shown.contains("marked"), "{args:?}: {shown}");
    }
    for command in ["status", "bench"] {
        let help = crate::common::lmc()
            .args([command, "--help"])
            .env("LMC_URL", &dead)
            .output();
        let help = text(&help.expect("the binary runs").stdout);
        assert!(
            help.contains("LMC_URL") && !help.contains("marked"),
            "{help}"
        );
    }
}

/// LMCache's verb and every flag that its Kubernetes operator passes, with the operator's values but
/// for ports and the size of the pool.
#[test]
fn the_command_of_lmcaches_operator_starts_a_server() {
    let line = "--host 0.0.0.0 --l1-size-gb 0.0625 --chunk-size 256 --max-workers 1 \
                --hash-algorithm blake3 --eviction-policy LRU --eviction-trigger-watermark 0.8 \
                --eviction-ratio 0.2 --prometheus-port";
    let metrics = free_port();
    let port = metrics.to_string();
    let args: Vec<&str> = line.split_whitespace().chain([port.as_str()]).collect();
    let server = Server::spawn_by(crate::common::lmc(), "server", &args);
    server.line("listening for engines");
    let (code, page) = ask(metrics, "GET", "/metrics", "");
    assert_eq!(code, 200, "{page}");
    let mut client = server.client();
    let answer = client.ask(&Request::GetChunkSize).expect("an answer");
    assert_eq!(answer, Reply::Int(256));
    server.terminate();
}

/// `--version` named neither the commit nor what the binary is compatible with.
#[test]
fn the_long_version_names_protocol_and_disk_format() {
    let long = text(&lmc(&["--version"]).stdout);
    assert!(
        long.starts_with(concat!("lmc ", env!("CARGO_PKG_VERSION"))),
        "{long}"
    );
    let value = |name: &str| {
        let line = long.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}in {long}"))
            .trim()
            .to_owned()
    };
    assert!(value("protocol ").ends_with(lmc_vllm_adapter::LMCACHE_RELEASE));
    assert_eq!(
        value("disk format "),
        lmc_backend_disk::FORMAT_VERSION.to_string()
    );
    let short = text(&lmc(&["-V"]).stdout);
    assert_eq!(
        short.lines().collect::<Vec<_>>(),
        [long.lines().next().expect("a line")]
    );
    let commit = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output();
    if let Some(commit) = commit.ok().filter(|output| output.status.success()) {
        let commit = text(&commit.stdout);
        assert!(short.contains(commit.trim()), "{short} lacks {commit}");
    }
}

#[test]
fn completions_and_manual_pages_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let script = lmc(&["completions", shell]);
        assert!(script.status.success());
        let script = text(&script.stdout);
        assert!(script.contains("l1-size-gb"), "{shell}");
    }
    let page = |args: &[&str]| text(&lmc(&[&["man"], args].concat()).stdout);
    assert!(page(&[]).contains(".TH lmc 1"));
    assert!(page(&["serve"]).contains("l1\\-size\\-gb"));
    assert!(page(&["quota", "set"]).contains(".TH lmc-quota-set 1"));
    let unknown = lmc(&["man", "nosuch"]);
    assert_eq!(unknown.status.code(), Some(1));
    let folder = Folder::temporary();
    assert!(lmc(&["man", "--folder", folder.text()]).status.success());
    for name in ["lmc", "lmc-serve", "lmc-quota-set"] {
        let page = folder.join(format!("{name}.1"));
        let page = fs::read_to_string(page).expect("a page");
        assert!(page.contains(&format!(".TH {name} 1")), "{name}");
    }
}

/// `--url host:port` was refused as an invalid format, and an OS error was printed twice.
#[test]
fn a_url_needs_no_scheme_and_an_error_is_said_once() {
    let server = server("serve", &[]);
    let output = lmc(&["status", "--url", &format!("127.0.0.1:{}", server.http)]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let output = lmc(&["status", "--url", "127.0.0.1:1"]);
    assert_eq!(output.status.code(), Some(1));
    let error = text(&output.stderr);
    assert_eq!(error.matches("(os error 111)").count(), 1, "{error}");
}

/// With a proxy for everybody in its environment, `lmc status` asked the proxy for 127.0.0.1.
#[test]
fn no_variable_leads_a_tool_to_a_proxy() {
    let server = server("serve", &[]);
    let url = format!("http://127.0.0.1:{}", server.http);
    let proxy = TcpListener::bind("127.0.0.1:0").expect("a free port");
    proxy.set_nonblocking(true).expect("a listener");
    let at = format!("http://{}", proxy.local_addr().expect("an address"));
    for variable in [
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "ALL_PROXY",
        "all_proxy",
    ] {
        for tool in ["status", "clear"] {
            let mut command = crate::common::lmc();
            command.args([tool, "--url", &url]).env(variable, &at);
            let output = command.output().expect("it runs");
            let said = text(&output.stderr);
            assert!(output.status.success(), "{variable}, {tool}: {said}");
        }
    }
    let asked = proxy.accept().map(|(_, from)| from);
    assert!(asked.is_err(), "{asked:?}");
}

/// `list` printed nothing, `set` fractions of a GiB, and `get` of an unknown tenant ended with 0.
#[test]
fn quotas_are_shown_in_bytes_and_a_missing_one_is_an_error() {
    let server = server("serve", &[]);
    let url = format!("127.0.0.1:{}", server.http);
    let quota = |args: &[&str]| {
        let output = lmc(&[&["quota"], args, &["--url", &url]].concat());
        (output.status.code(), text(&output.stdout))
    };
    assert_eq!(quota(&["list"]), (Some(0), "no quotas\n".to_owned()));
    let (code, set) = quota(&["set", "team-a", "8MiB"]);
    assert_eq!(code, Some(0));
    // It is lost when the server stops, and the text names what is not.
    assert!(
        set.contains("8.00 MiB") && set.contains("over restarts"),
        "{set}"
    );
    let (_, list) = quota(&["list"]);
    assert!(
        list.contains("team-a") && list.contains("8.00 MiB"),
        "{list}"
    );
    assert_eq!(quota(&["get", "team-a"]).0, Some(0));
    assert_eq!(quota(&["get", "nosuch"]).0, Some(1));
    let (code, json) = quota(&["get", "nosuch", "--json"]);
    assert_eq!(code, Some(1));
    let json: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(json["exists"], false);
    assert_eq!(quota(&["delete", "team-a"]).0, Some(0));
    assert_eq!(quota(&["delete", "team-a"]).0, Some(1));
}

/// `serve` warned of a mistyped variable, `serve --print-config` did not.
#[test]
fn print_config_warns_of_unknown_variables_and_stays_valid() {
    let output = Command::new(env!("CARGO_BIN_EXE_lmc"))
        .args(["serve", "--print-config"])
        .env_remove("LMC_CONFIG")
        .env("LMC_PROT", "1")
        .output()
        .expect("the binary runs");
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("LMC_PROT"));
    assert!(!text(&output.stdout).contains("LMC_PROT"));
}
