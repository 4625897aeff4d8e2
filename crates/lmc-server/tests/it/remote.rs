//! Several daemons that share a store.

#[allow(dead_code, reason = "the tests of the tier use all of it")]
use std::process::Output;

use lmc_testkit::{Folder, in_lab, until, write_secret};
use lmc_vllm_adapter::Request;
use serde_json::Value;

use crate::common::Server;
use crate::common::prompt::{CHUNKS, Prompt, register, retrieve, store};
use crate::common::redis::Redis;
use crate::common::remote::{Daemon, Target, folder};

#[test]
fn a_daemon_finds_what_another_has_stored_also_when_all_have_stopped() {
    let folder = folder();
    let (mut first, mut second) = (Daemon::start(&folder), Daemon::start(&folder));
    first.store();
    second.until_read();
    assert_eq!(
        second.written(),
        0.0,
        "what came from the store is not offered to it"
    );
    drop((first, second));
    Daemon::start(&folder).until_read();
}

#[test]
fn a_store_is_filled_from_the_store_after_it() {
    let (near, far, files) = (folder(), folder(), Folder::temporary());
    let tables = format!(
        "[[tier]]\nkind = \"remote\"\nurl = \"file://{}\"\nfill = true\n\
         [[tier]]\nkind = \"remote\"\nurl = \"file://{}\"\nlocate_timeout = 5\n",
        near.text(),
        far.text()
    );
    let file = files.join("lmc.toml");
    std::fs::write(&file, tables).expect("space");
    Daemon::start(&far).store();
    let mut both = Daemon::start_by(&["--config", file.to_str().expect("text")]);
    both.until_read();
    until("the first store is filled", || {
        both.written() == CHUNKS as f64
    });
    let far = "lmc_tier_copied_chunks_total{tier=\"remote2\"}";
    assert_eq!(
        both.server.metric(far),
        0.0,
        "what came from it is not offered to it"
    );
    Daemon::start(&near).until_read();
}

#[test]
fn tiers_are_asked_in_the_order_of_their_tables() {
    let (folder, files) = (folder(), Folder::temporary());
    let tables = format!(
        "[[tier]]\nkind = \"remote\"\nurl = \"file://{}\"\n\
         [[tier]]\nkind = \"peers\"\nurl = \"none\"\nlisten = \"127.0.0.1:0\"\n",
        folder.text()
    );
    let file = files.join("lmc.toml");
    std::fs::write(&file, tables).expect("space");
    let server = Server::start(&["--config", file.to_str().expect("text")]);
    let answer = server.get("/healthz");
    let (_, body) = answer.split_once("\r\n\r\n").expect("a body");
    let health: Value = serde_json::from_str(body).expect("JSON");
    let tiers = health["tiers"].as_array().into_iter().flatten();
    let tiers: Vec<_> = tiers.filter_map(|tier| tier["tier"].as_str()).collect();
    assert_eq!(tiers, ["dram", "remote", "peers"]);
}

/// Slow: daemons look for clears in their store every 2 s.
#[test]
fn a_clear_at_one_daemon_empties_the_others_and_deletes_nothing() {
    let folder = folder();
    let (mut first, mut second) = (Daemon::start(&folder), Daemon::start(&folder));
    first.store();
    second.until_read();
    let clear = Request::Clear { force: true };
    first.server.client().ask(&clear).expect("an answer");
    second.until_absent();
    first.until_absent();
    let target = Target::new(format!("file://{}", folder.text()));
    assert_eq!(target.chunks(), CHUNKS as u64);
    assert!(folder.join("v2/clears").exists());
    // A daemon that starts later knows of it, and computes the prompt again.
    let mut third = Daemon::start(&folder);
    third.until_absent();
    third.store();
    first.until_read();
}

fn clear(daemon: &Daemon, flags: &[&str]) -> Output {
    let url = format!("127.0.0.1:{}", daemon.server.http);
    let mut command = crate::common::lmc();
    command.args(["clear", "--url", &url]).args(flags);
    command.output().expect("the binary runs")
}

fn a_shared_clear_deletes_what_it_covers(target: &Target) {
    let (mut first, mut second) = (Daemon::start_in(target), Daemon::start_in(target));
    first.store();
    second.until_read();
    assert_eq!(target.chunks(), CHUNKS as u64);
    let said = clear(&first, &[]);
    assert!(said.status.success(), "{said:?}");
    assert_eq!(
        target.chunks(),
        CHUNKS as u64,
        "an ordinary clear deletes nothing"
    );
    second.until_absent();
    // What is stored again is as new as the clear.
    second.store();
    first.until_read();
    let said = clear(&first, &["--shared"]);
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.status.success(), "{said:?}");
    // Those of before the first clear lie beside those of before the second.
    assert!(text.contains("deleted 12 of 12 chunks in remote"), "{text}");
    assert_eq!(target.chunks(), 0);
    second.until_absent();
    first.until_absent();
    let deleted = "lmc_tier_events_total{tier=\"remote\",what=\"stale_deleted\"}";
    assert_eq!(first.server.metric(deleted), 2.0 * CHUNKS as f64);
    // What is stored after the clear stays.
    Daemon::start_in(target).store();
    let tier = first.server.get("/cache/clear/shared");
    assert!(tier.contains("\"state\":\"done\""), "{tier}");
    assert_eq!(target.chunks(), CHUNKS as u64);
}

#[test]
fn a_shared_clear_deletes_what_it_covers_and_nothing_that_was_stored_after_it() {
    if !in_lab("daemons look for clears in their store every 2 s") {
        return;
    }
    let folder = folder();
    a_shared_clear_deletes_what_it_covers(&Target::new(format!("file://{}", folder.text())));
    assert!(folder.join("v2/clears").exists());
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_shared_clear_deletes_in_a_redis() {
    let redis = Redis::start(&[]);
    let url = format!("redis://127.0.0.1:{}", redis.port);
    a_shared_clear_deletes_what_it_covers(&Target::new(url));
}

#[test]
#[ignore = "needs s3s-fs and moto_server: cargo xtask test-remote"]
fn a_shared_clear_deletes_in_an_s3() {
    for kind in [
        crate::s3_servers::Kind::Files,
        crate::s3_servers::Kind::Moto,
    ] {
        let server = crate::s3_servers::Server::start(kind);
        let mut target = Target::new(format!("s3://{}/of/lmc", crate::s3_servers::BUCKET));
        target.variables = crate::s3_servers::variables(server.port);
        a_shared_clear_deletes_what_it_covers(&target);
    }
}

#[test]
fn a_shared_clear_that_cannot_delete_says_why() {
    let server = Server::start(&["--l1-size-gb", "64MiB"]);
    let url = format!("127.0.0.1:{}", server.http);
    let mut command = crate::common::lmc();
    let said = command.args(["clear", "--shared", "--url", &url]).output();
    let said = said.expect("the binary runs");
    let error = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(
        !said.status.success() && error.contains("--remote"),
        "{error}"
    );
    for (body, part) in [
        ("{\"shared\": 1}", "shared to be true or false"),
        ("{\"shared\": true, \"tier\": \"l1\"}", "tier all"),
    ] {
        let (code, answer) = crate::common::ask(server.http, "POST", "/cache/clear", body);
        assert!(code == 400 && answer.contains(part), "{answer}");
    }
    let (code, _) = crate::common::ask(server.http, "GET", "/cache/clear/shared", "");
    assert_eq!(code, 404);
}

/// Returns the descriptions of spaces in a folder.
fn descriptions(folder: &Folder) -> Vec<String> {
    let below = |path: std::path::PathBuf| {
        let entries = std::fs::read_dir(path).into_iter().flatten();
        entries.map(|entry| entry.expect("an entry").path())
    };
    let folders = below(folder.join("v2")).flat_map(below);
    let files = folders.flat_map(|folder| below(folder.join("spaces")));
    let is_whole = |path: &std::path::PathBuf| !path.to_string_lossy().contains(".tmp-");
    let files = files.filter(is_whole);
    files
        .map(|path| std::fs::read_to_string(path).expect("text"))
        .collect()
}

#[test]
fn a_space_is_described_in_the_store_and_no_secret_is_shown() {
    const KEY: &str = "marked-secret-key-0123456789abcdef0123456789";
    const SALT: &str = "marked-secret-salt";
    let folder = folder();
    let keys = Folder::temporary();
    let key = keys.join("key");
    write_secret(&key, KEY);
    let key = key.to_str().expect("text");
    let mut first = Daemon::start_with(&folder, &["--remote-key", key]);
    first.store();
    until("the space is described", || {
        descriptions(&folder).len() == 1
    });
    let common = descriptions(&folder).remove(0);
    assert!(common.contains("\"model\": \"model\"") && common.contains("\"salted\": false"));
    Prompt::default().store_salted(&mut first.client, &first.shm_name, SALT);
    until("the salted space is described", || {
        descriptions(&folder).len() == 2
    });
    let all = descriptions(&folder).concat();
    assert_eq!(all.matches("\"salt_digest\": \"").count(), 1, "{all}");
    let config = first.server.get("/config");
    let flags = [
        "serve",
        "--remote",
        "file:///nowhere",
        "--remote-key",
        key,
        "--print-config",
    ];
    let printed = crate::common::lmc()
        .args(flags)
        .output()
        .expect("the binary runs");
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(printed.contains("remote_key"), "{printed}");
    let log = first.server.log().join("\n");
    for shown in [all, config, printed, log] {
        assert!(!shown.contains("marked-secret"), "{shown}");
    }
}

#[test]
fn a_key_of_a_store_that_cannot_be_read_ends_the_start() {
    for flags in [
        &["--remote-key", "/nowhere"][..],
        &["--remote", "file:///tmp", "--remote-key", "/nowhere"],
    ] {
        let output = crate::common::lmc()
            .args(["serve", "--port", "0", "--http-port", "0"])
            .args(flags)
            .output()
            .expect("it runs");
        assert!(!output.status.success());
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            error.contains("--remote-key") || error.contains("remote_key"),
            "{error}"
        );
    }
}

#[test]
fn a_daemon_starts_and_serves_without_its_store() {
    let parent = folder();
    let missing = parent.join("missing");
    let url = format!("file://{}", missing.display());
    let server = Server::start(&["--l1-size-gb", "64MiB", "--remote", &url]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    assert_eq!(retrieve(&mut client, &shm_name, "request"), CHUNKS as u64);
    assert!(!missing.exists());
    std::fs::create_dir(&missing).expect("a folder");
    server.line("remote store in use");
}
