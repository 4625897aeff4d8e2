//! The HTTP side beyond this host: TLS, and the token that tools send.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Output;

use lmc_testkit::{DEADLINE, Folder, free_port, is_root, until, write_secret};

use crate::common::{Server, ask, lmc};
use crate::other_users::run_as_stranger;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/data/tls")
        .join(name)
}

/// Runs a tool against a server that speaks TLS, with the token and the certificates of two files.
fn tool(http: u16, arguments: &[&str], token: &Path, trusted: &Path) -> Output {
    let url = format!("https://localhost:{http}");
    let mut tool = lmc();
    tool.args(arguments).args(["--url", &url]);
    tool.env("LMC_HTTP_TOKEN_FILE", token)
        .env("LMC_CA_FILE", trusted);
    tool.output().expect("the binary runs")
}

#[test]
fn tools_reach_a_server_over_tls_and_its_files_are_read_again() {
    let folder = Folder::temporary();
    let [cert, key, token] = ["cert", "key", "token"].map(|name| folder.join(name));
    fs::copy(data("server.crt"), &cert).expect("a file");
    write_secret(
        &key,
        &fs::read_to_string(data("server.key")).expect("a key"),
    );
    write_secret(&token, "0123456789abcdef\n");
    let http = free_port();
    // It is asked over TLS alone, so that the helper cannot wait for its answer.
    let server = Server::spawn(&[
        "--http-port",
        &http.to_string(),
        "--http-tls-cert",
        cert.to_str().expect("text"),
        "--http-tls-key",
        key.to_str().expect("text"),
        "--http-token-file",
        token.to_str().expect("text"),
    ]);
    let status = |trusted: &Path| tool(http, &["status"], &token, trusted);
    until("it answers over TLS", || {
        status(&data("ca.crt")).status.success()
    });
    let stranger = tool(http, &["status"], &token, &data("server.crt"));
    let why = String::from_utf8_lossy(&stranger.stderr).into_owned();
    assert!(
        !stranger.status.success() && why.contains("ertificate"),
        "{why}"
    );
    let plain = lmc()
        .args(["status", "--url", &format!("127.0.0.1:{http}")])
        .output();
    assert!(!plain.expect("it runs").status.success());

    fs::write(&cert, "no certificate").expect("a file");
    let reload = tool(http, &["reload"], &token, &data("ca.crt"));
    let why = String::from_utf8_lossy(&reload.stderr).into_owned();
    assert!(
        !reload.status.success() && why.contains("--http-tls-cert"),
        "{why}"
    );
    assert!(
        status(&data("ca.crt")).status.success(),
        "the old one stays"
    );
    // Another one takes its turn without a restart.
    fs::copy(data("other.crt"), &cert).expect("a file");
    write_secret(&key, &fs::read_to_string(data("other.key")).expect("a key"));
    let reload = tool(http, &["reload"], &token, &data("ca.crt"));
    assert!(reload.status.success(), "{reload:?}");
    assert!(
        !status(&data("ca.crt")).status.success(),
        "the old one is gone"
    );
    let done = status(&data("other.crt"));
    assert!(done.status.success(), "{done:?}");
    drop(server);
}

/// Port of the HTTP side that [`asking_stranger`] asks, and the token that it shows.
const HTTP: &str = "LMC_TEST_STRANGER_HTTP";
const TOKEN: &str = "LMC_TEST_STRANGER_TOKEN";

/// The process of another user that asks without a token, and with one. Does nothing when the test suite
/// runs it.
#[test]
fn asking_stranger() {
    let (Ok(http), Ok(token)) = (std::env::var(HTTP), std::env::var(TOKEN)) else {
        return;
    };
    let http: u16 = http.parse().expect("a port");
    for line in [
        "GET /status",
        "POST /cache/clear",
        "GET /healthz",
        "GET /",
        "GET /live",
    ] {
        for shown in ["", token.as_str()] {
            let mut stream = TcpStream::connect(("127.0.0.1", http)).expect("a connection");
            stream.set_read_timeout(Some(DEADLINE)).expect("a timeout");
            let head = format!(
                "{line} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {shown}\r\n\
                 content-type: application/json\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
            );
            stream.write_all(head.as_bytes()).expect("a request");
            // A stream of states goes on: its head says enough.
            let mut start = [0; 12];
            stream.read_exact(&mut start).expect("an answer");
            let start = String::from_utf8_lossy(&start);
            println!("{line} {}: {start}", shown.len());
        }
    }
}

#[test]
fn another_user_is_answered_with_the_token_alone() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = Folder::temporary();
    let token = folder.join("token");
    write_secret(&token, "0123456789abcdef\n");
    let server = Server::start(&["--http-token-file", token.to_str().expect("text")]);
    let port = server.http.to_string();
    let variables = [(HTTP, port.as_str()), (TOKEN, "0123456789abcdef")];
    let said = run_as_stranger(asking_stranger, &variables);
    for line in ["GET /status", "POST /cache/clear", "GET /live"] {
        assert!(said.contains(&format!("{line} 0: HTTP/1.1 401")), "{said}");
        assert!(said.contains(&format!("{line} 16: HTTP/1.1 200")), "{said}");
    }
    for line in ["GET /healthz", "GET /"] {
        assert!(said.contains(&format!("{line} 0: HTTP/1.1 200")), "{said}");
    }
}

#[test]
fn a_certificate_without_a_key_and_a_token_that_is_none_are_refused() {
    let folder = Folder::temporary();
    let (token, cert) = (folder.join("token"), data("server.crt"));
    write_secret(&token, "short\n");
    let token = token.to_str().expect("text");
    let cert = cert.to_str().expect("text");
    for (flags, expected) in [
        (["--http-tls-cert", cert], "requires --http-tls-key"),
        (
            ["--http-token-file", token],
            "at least 16 visible characters",
        ),
    ] {
        let mut serve = lmc();
        serve
            .arg("serve")
            .args(flags)
            .args(["--port", "0", "--http-port", "0"]);
        serve.args(["--l1-size-gb", "16MiB", "--state-dir", "none"]);
        let refused = serve.output().expect("the binary runs");
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && why.contains(expected), "{why}");
    }
    // Users of this host whom the server trusts need no token.
    write_secret(Path::new(token), "0123456789abcdef\n");
    let server = Server::start(&["--http-token-file", token]);
    assert_eq!(ask(server.http, "GET", "/status", "").0, 200);
}
