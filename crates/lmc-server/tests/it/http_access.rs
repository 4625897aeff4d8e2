//! The HTTP side beyond this host: TLS, and the token that tools send.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use lmc_testkit::{Folder, free_port, write_secret};

use crate::common::{Server, ask, lmc};

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
    lmc_testkit::until("it answers over TLS", || {
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
    fs::copy(data("server.crt"), &cert).expect("a file");
    assert!(
        tool(http, &["reload"], &token, &data("ca.crt"))
            .status
            .success()
    );
    assert!(status(&data("ca.crt")).status.success());
    drop(server);
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
