//! Secrets of the configuration and salts of tenants, against the real binary.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use lmc_server::config::{ALL_SETTINGS, Secret};
use lmc_testkit::{Folder, Process, free_port, is_root, write_secret};

use crate::common::prompt::{Prompt, register};
use crate::common::{Server, ask, lmc};
use crate::other_users::run_as_stranger;

/// A part of every secret here.
const MARK: &str = "marked";
/// The password of every URL here, with a part that is in no salt.
const PASSWORD: &str = "marked-password";
/// Port of the HTTP side that [`reading_stranger`] asks.
const HTTP: &str = "LMC_TEST_STRANGER_HTTP";

/// All that is read over HTTP, but for `/live`, which sends what `/status` answers.
const PATHS: [&str; 21] = [
    "/",
    "/advise",
    "/drain",
    "/history",
    "/livez",
    "/readyz",
    "/healthz",
    "/healthcheck",
    "/metrics",
    "/status",
    "/status?full=1",
    "/tenants",
    "/peers",
    "/peers/copy",
    "/config",
    "/config/adapters",
    "/quota",
    "/quota/marked-quota",
    "/version",
    "/cache/clear/shared",
    "/cache/objects",
];

/// Returns a marked value of a setting.
fn marked(secret: Secret) -> String {
    match secret {
        Secret::Url => url(),
        Secret::Salts => "marked-one,marked-two,_default".to_owned(),
        // More than the pool, which the log says.
        Secret::Quotas => "marked-quota=99GiB,_default=1GiB".to_owned(),
    }
}

/// Returns the URL of a store that does not answer.
fn url() -> String {
    format!("redis://user:{PASSWORD}@127.0.0.1:{}/1", free_port())
}

/// A server whose secrets are all marked.
fn marked_server(folder: &Folder) -> Server {
    let file = |name: &str, text: &str| {
        let path = folder.join(name).display().to_string();
        write_secret(&path, text);
        path
    };
    let key = file("key", &"marked-key-".repeat(4));
    let quotas = "# of tenants\nmarked-file=98GiB\n\n  marked-other = 1GiB, marked-last=2\n";
    let quotas = file("quotas", quotas);
    let tier = |salts: &str| {
        let url = url();
        format!("[[tier]]\nkind = \"remote\"\nurl = \"{url}\"\nsalts = \"{salts}\"\n")
    };
    // The flags win over the first table.
    let tables = tier("marked-table") + &tier("marked-further");
    let config = file("lmc.toml", &tables);
    let peers = format!("127.0.0.1:{}", free_port());
    let mut flags: Vec<String> = Vec::new();
    for info in ALL_SETTINGS {
        flags.extend(
            info.secret()
                .into_iter()
                .flat_map(|s| [info.flag(), marked(s)]),
        );
    }
    let others = [
        "--config",
        &config,
        "--quota-file",
        &quotas,
        "--remote-key",
        &key,
    ];
    let listen = [
        "--p2p-listen",
        &peers,
        "--p2p-key",
        &key,
        "--log-level",
        "trace",
    ];
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    Server::start(&[&flags, &others[..], &listen].concat())
}

/// The process of another user that prints all that it can read over HTTP. Does nothing when the test
/// suite runs it.
#[test]
fn reading_stranger() {
    let Ok(http) = std::env::var(HTTP) else {
        return;
    };
    let http = http.parse().expect("a port");
    for path in PATHS {
        println!("{}", ask(http, "GET", path, "").1);
    }
}

/// Every user of the host could read the salts of all tenants from `/quota` and `/config`, and the log
/// had the salts whose quota was set over HTTP.
#[test]
fn secrets_are_shown_to_no_other_user_and_not_in_the_log() {
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = Folder::temporary();
    let server = marked_server(&folder);
    let mut engine = server.client();
    let shm_name = register(&mut engine);
    Prompt(1).store_salted(&mut engine, &shm_name, "marked-engine");
    for (method, salt) in [
        ("PUT", "marked-put"),
        ("PUT", "marked-gone"),
        ("DELETE", "marked-gone"),
    ] {
        let path = format!("/quota/{salt}");
        let (code, answer) = ask(server.http, method, &path, "{\"limit_gb\": 3}");
        assert_eq!(code, 200, "{answer}");
    }

    let to_others = run_as_stranger(reading_stranger, &[(HTTP, &server.http.to_string())]);
    assert!(!to_others.contains(MARK), "{to_others}");
    assert!(to_others.contains("digest "), "{to_others}");
    let log = server.log().join("\n");
    assert!(!log.contains(MARK), "{log}");
    for line in [
        "quota set over HTTP salt=digest",
        "quota removed over HTTP salt=digest",
        "quota of digest",
    ] {
        assert!(log.contains(line), "{line}: {log}");
    }

    // A trusted user sees salts, and no password.
    let to_own = PATHS.map(|path| server.get(path)).concat();
    for salt in [
        "marked-one",
        "marked-two",
        "marked-further",
        "marked-quota",
        "marked-file",
        "marked-other",
        "marked-last",
        "marked-put",
    ] {
        assert!(to_own.contains(salt), "{salt}: {to_own}");
    }
    assert!(!to_own.contains(PASSWORD), "{to_own}");
    assert!(!to_own.contains("marked-key"), "{to_own}");
}

/// Runs a server that does not start, and returns what it says.
fn refused(args: &[&str]) -> String {
    let mut server = Process::spawn(lmc().arg("serve").args(args));
    assert!(!server.wait().success());
    let said = server.log().join("\n");
    assert!(!said.contains(MARK), "{said}");
    said
}

#[test]
fn a_file_with_quotas_is_private_and_its_errors_show_no_salt() {
    let folder = Folder::temporary();
    let path = folder.join("quotas");
    let text = path.display().to_string();
    let args = [
        "--port",
        "0",
        "--http-port",
        "0",
        "--l1-size-gb",
        "16MiB",
        "--shm-name",
        "none",
    ];
    let args = [&args[..], &["--state-dir", "none", "--quota-file", &text]].concat();
    for (wrong, line) in [
        ("marked-a", 1),
        ("a=1\nmarked-a=much\n", 2),
        ("#\n\nmarked/a=1\n", 3),
        ("1GiB=marked-a", 1),
        ("=1GiB", 1),
    ] {
        write_secret(&path, wrong);
        let said = refused(&args);
        assert!(said.contains(&format!("{text}: line {line}: ")), "{said}");
    }
    write_secret(&path, "marked-a=1GiB");
    for mode in [0o604, 0o620, 0o644] {
        let mode = fs::Permissions::from_mode(mode);
        fs::set_permissions(&path, mode).expect("it is ours");
        assert!(refused(&args).contains("chmod 600"));
    }
    fs::remove_file(&path).expect("it is there");
    assert!(refused(&args).contains("No such file"));
}
