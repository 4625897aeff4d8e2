//! The real binary with a disk tier: killed, started again, looked into.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use lmc_testkit::{Folder, free_port, until};
use lmc_vllm_adapter::{Reply, Request};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, key, register, register_as, register_wide, retrieve, store};

fn new_folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

fn start(folder: &Path) -> Server {
    start_with(folder, &[])
}

/// Starts a server with a disk tier, and a limit on open files as low as a shell may set it.
fn start_with(folder: &Path, flags: &[&str]) -> Server {
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -S -n 64 && exec \"$0\" \"$@\""])
        .arg(env!("CARGO_BIN_EXE_lmc"));
    let folder = folder.to_str().expect("text");
    let mut args = vec!["--l1-size-gb", "64MiB"];
    if !flags.contains(&"--disk-size") {
        args.extend(["--disk-size", "512MiB"]);
    }
    args.extend(["--disk-keep-free", "0", "--log-level", "warn"]);
    // The machine may be busy.
    args.extend(["--disk-read-timeout-seconds", "60"]);
    args.extend(["--disk-create", "--disk", folder]);
    args.extend(flags);
    if !flags.contains(&"--state-dir") {
        args.extend(["--state-dir", "none"]);
    }
    Server::start_by(command, &args)
}

/// Returns the value of a metric of the disk tier.
fn metric(server: &Server, name: &str) -> f64 {
    server.metric(&format!("{name}{{tier=\"disk\"}}"))
}

/// Waits until the drives have `chunks` chunks.
fn wait_for_chunks(server: &Server, chunks: usize) {
    until("all chunks are on disk", || {
        metric(server, "lmc_tier_chunks") == chunks as f64
    });
}

fn lmc(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lmc"));
    command
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the binary starts")
}

#[test]
fn a_server_may_open_as_many_files_as_the_system_lets_it() {
    let folder = new_folder();
    let server = start(&folder);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.id()));
    let limits = limits.expect("the server runs");
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    let numbers: Vec<&str> = line.expect("a limit").split_whitespace().collect();
    let [.., soft, hard, "files"] = numbers[..] else {
        panic!("{limits}");
    };
    assert_eq!(soft, hard);
}

#[test]
fn a_server_that_was_killed_finds_its_chunks_on_disk() {
    let folder = new_folder();
    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    wait_for_chunks(&server, CHUNKS);
    // While it runs no other process can open the folder; the error names this one.
    let path = folder.text();
    let refused = lmc(&["disk", "verify", path]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1));
    assert!(why.contains(&format!("pid {}", server.id())), "{why}");
    drop(server);

    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    assert_eq!(retrieve(&mut client, &shm_name, "again"), CHUNKS as u64);
    assert_eq!(
        metric(&server, "lmc_tier_fetched_chunks_total"),
        CHUNKS as f64
    );
    drop(server);

    let verified = lmc(&["disk", "verify", path, "--json"]);
    assert!(verified.status.success(), "{verified:?}");
    let said: serde_json::Value = serde_json::from_slice(&verified.stdout).expect("JSON");
    assert_eq!(
        (&said["whole"], &said["damaged"]),
        (&CHUNKS.into(), &0.into())
    );
    let inspected = |flags: &[&str]| {
        let inspected = lmc(&[&["disk", "inspect", path], flags].concat());
        String::from_utf8_lossy(&inspected.stdout).into_owned()
    };
    let (summary, segments) = (inspected(&[]), inspected(&["--segments"]));
    assert!(summary.contains("chunks     6 ("), "{summary}");
    let bars = segments.strip_prefix(&summary).expect("the summary first");
    assert!(
        bars.contains("6 chunks") && bars.contains("written to"),
        "{bars}"
    );
    assert!(lmc(&["disk", "compact", path]).status.success());
}

#[test]
fn a_server_that_writes_back_and_is_stopped_finds_its_chunks_on_disk() {
    let folder = new_folder();
    let server = start_with(&folder, &["--disk-write", "back"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    assert_eq!(metric(&server, "lmc_tier_chunks"), 0.0, "none had to go");
    drop(client);
    server.terminate();

    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    assert_eq!(retrieve(&mut client, &shm_name, "again"), CHUNKS as u64);
    drop(server);
}

/// More is to be written than may be on its way, and no drive refuses its share of that.
#[test]
fn all_of_what_is_written_back_goes_down_on_several_drives() {
    let (first, second) = (new_folder(), new_folder());
    let both = format!("{},{}", first.display(), second.display());
    let server = start_with(Path::new(&both), &["--disk-write", "back"]);
    let mut client = server.client();
    // 4 MiB a chunk, and 8 MiB may be on their way.
    let shm_name = register_wide(&mut client, 1024);
    store(&mut client, &shm_name);
    drop(client);
    server.terminate();

    let server = start(Path::new(&both));
    let mut client = server.client();
    let shm_name = register_wide(&mut client, 1024);
    assert_eq!(retrieve(&mut client, &shm_name, "again"), CHUNKS as u64);
    drop(server);
}

#[test]
fn a_damaged_chunk_is_a_miss_and_verify_says_so() {
    let folder = new_folder();
    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    wait_for_chunks(&server, CHUNKS);
    drop(server);
    // One byte in the middle of what is written.
    let segment = folder.join("segment-00000000");
    let file = OpenOptions::new().read(true).write(true).open(&segment);
    let file = file.expect("a segment");
    let at = 4096 + 100;
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("a byte");
    file.write_all_at(&[byte[0] ^ 1], at).expect("a byte");
    drop(file);

    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let hits = retrieve(&mut client, &shm_name, "again");
    assert!(hits < CHUNKS as u64, "the damaged chunk was found");
    drop(server);
    // The server has forgotten it, or was killed before it could say so to the drive.
    let verify = || lmc(&["disk", "verify", folder.text()]);
    let first = verify();
    let text = String::from_utf8_lossy(&first.stdout).into_owned();
    assert!(text.starts_with("5 chunks are whole"), "{first:?}");
    assert!(verify().status.success(), "{first:?}");
}

/// Clears over HTTP, as `lmc clear` does.
fn clear(server: &Server) -> serde_json::Value {
    let url = format!("http://127.0.0.1:{}", server.http);
    let cleared = lmc(&["clear", "--force", "--json", "--url", &url]);
    assert!(cleared.status.success(), "{cleared:?}");
    serde_json::from_slice(&cleared.stdout).expect("JSON")
}

fn copied(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    let copied = Command::new("cp").arg("-r").args([from, to]).status();
    assert!(copied.expect("cp is there").success());
}

fn stored(paths: &str, flags: &[&str]) {
    let server = start_with(Path::new(paths), flags);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    wait_for_chunks(&server, CHUNKS);
    drop(client);
    server.terminate();
}

fn found(paths: &str, flags: &[&str]) -> u64 {
    let server = start_with(Path::new(paths), flags);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let hits = retrieve(&mut client, &shm_name, "again");
    drop(client);
    server.terminate();
    hits
}

/// An engine cleared the cache for new weights while one of two drives was not mounted. With that
/// drive came the KV of the old weights.
#[test]
fn what_was_cleared_while_a_drive_was_absent_does_not_come_back_with_it() {
    let (a, b) = (new_folder(), new_folder());
    let both = format!("{},{}", a.display(), b.display());
    stored(&both, &[]);
    let server = start(&a);
    let said = clear(&server);
    assert_eq!(said["status"], "ok", "{said}");
    server.terminate();
    let inspected = lmc(&["disk", "inspect", "--json", &both]);
    let said: serde_json::Value = serde_json::from_slice(&inspected.stdout).expect("JSON");
    assert!(said["drives"][1]["chunks"].as_u64() > Some(0), "{said}");
    assert_eq!(found(&both, &[]), 0);
    let inspected = lmc(&["disk", "inspect", "--json", &both]);
    let said: serde_json::Value = serde_json::from_slice(&inspected.stdout).expect("JSON");
    for drive in 0..2 {
        let drive = &said["drives"][drive];
        assert_eq!((&drive["chunks"], &drive["clears"]), (&0.into(), &1.into()));
    }
    // A drive that stays absent is named until it is removed from the set.
    let server = start(&a);
    let missing = said["drives"][1]["drive_id"].as_str().expect("an id");
    let status = lmc(&[
        "status",
        "--json",
        "--url",
        &format!("http://127.0.0.1:{}", server.http),
    ]);
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    assert!(text.contains(missing), "{text}");
    server.terminate();
    let forgotten = lmc(&["disk", "forget", missing, a.text()]);
    assert!(forgotten.status.success(), "{forgotten:?}");
}

/// The only drive was replaced by a copy of itself from before a clear.
#[test]
fn what_was_cleared_does_not_come_back_with_an_old_copy_of_the_drive() {
    let (drive, state) = (new_folder(), new_folder());
    let path = drive.text();
    let known = ["--state-dir", state.text()];
    stored(path, &known);
    let copy = new_folder();
    copied(&drive, &copy);
    let server = start_with(&drive, &known);
    clear(&server);
    drop(server);
    copied(&copy, &drive);
    assert_eq!(found(path, &known), 0);
    // Without the state folder nothing says that there was a clear.
    copied(&copy, &drive);
    assert_eq!(found(path, &[]), CHUNKS as u64);
}

/// Until 8bf0141 a clear was refused once the state folder had been deleted, and the drive's old
/// copy had hits after it.
#[test]
fn a_state_folder_that_was_removed_is_made_again_by_a_clear() {
    let (drive, state) = (new_folder(), new_folder());
    let path = drive.text();
    let known = ["--state-dir", state.text()];
    stored(path, &known);
    let copy = new_folder();
    copied(&drive, &copy);
    let server = start_with(&drive, &known);
    std::fs::remove_dir_all(&state).expect("it is there");
    clear(&server);
    drop(server);
    copied(&copy, &drive);
    assert_eq!(found(path, &known), 0);
}

fn is_faulty(server: &Server) -> bool {
    server.get("/healthz").contains("degraded")
}

/// Until 8bf0141 a server whose drive's folder was removed said that all was well, and kept nothing
/// of what it took.
/// Slow: a server looks at its drives every 2 s.
#[test]
fn a_drive_whose_folder_is_moved_has_a_fault_until_it_is_back() {
    let (drive, away) = (new_folder(), new_folder());
    let server = start(&drive);
    assert!(!is_faulty(&server));
    std::fs::rename(&drive, &away).expect("it is there");
    until("the drive has a fault", || is_faulty(&server));
    assert!(server.get("/metrics").contains("lmc_faulty_tiers 1\n"));
    std::fs::rename(&away, &drive).expect("nothing is there");
    until("the drive is used again", || !is_faulty(&server));
}

/// Files were deleted under a server. It said that all was well and went on writing to the deleted
/// files, and then no start was possible: the folder was "not empty, and not an lmc drive".
/// Slow: a server looks at its drives every 2 s.
#[test]
fn a_drive_whose_files_are_deleted_has_a_fault_and_a_restart_goes_on_with_what_is_left() {
    let drive = new_folder();
    // As a unit file has it, which makes no drives.
    let serve = [
        "--l1-size-gb",
        "64MiB",
        "--disk",
        drive.text(),
        "--disk-size",
        "512MiB",
        "--disk-keep-free",
        "0",
        "--state-dir",
        "none",
    ];
    let delete = |kept: &[&str]| {
        for file in std::fs::read_dir(&drive).expect("a folder") {
            let path = file.expect("a file").path();
            let name = path.file_name().expect("a name").to_string_lossy();
            if !kept.iter().any(|kept| name.starts_with(kept)) {
                std::fs::remove_file(&path).expect("it is there");
            }
        }
    };
    let mut server = start(&drive);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    drop(client);
    for (kept, found) in [(&["segment-", "log-", "checkpoint-"][..], CHUNKS), (&[], 0)] {
        wait_for_chunks(&server, CHUNKS);
        delete(kept);
        // `lock` is gone as well.
        let second = refused(&serve[2..8]);
        let why = match kept {
            [] => "no lmc drive found",
            _ => "in use by another lmc",
        };
        assert!(second.contains(why), "{second}");
        until("the drive has a fault", || is_faulty(&server));
        let url = format!("http://127.0.0.1:{}", server.http);
        let status = lmc(&["status", "--url", &url]);
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        for said in [server.get("/healthz"), status] {
            assert!(
                said.contains(drive.text()) && said.contains("restart the server"),
                "{said}"
            );
        }
        server.signal(libc::SIGTERM);
        assert!(server.process.wait().success());
        let log = server.log();
        let warned = log
            .iter()
            .filter(|line| line.contains("drive is taken out"));
        assert_eq!(warned.count(), 1, "{log:#?}");
        server = Server::start(&serve);
        let mut client = server.client();
        let shm_name = register(&mut client);
        assert_eq!(retrieve(&mut client, &shm_name, "again"), found as u64);
    }
    server.terminate();
}

/// A server was started with another chunk size. It said how many chunks it had found, and none
/// of them could be hit.
#[test]
fn chunks_of_other_settings_are_counted_and_named() {
    let drive = new_folder();
    let path = drive.text();
    stored(path, &[]);
    let said = |flags: &[&str]| {
        let mut server = start_with(&drive, flags);
        server.signal(libc::SIGTERM);
        assert!(server.process.wait().success());
        server.log().join("\n")
    };
    let other = said(&["--chunk-size", "128"]);
    assert!(other.contains("6 chunks (192 KiB)"), "{other}");
    assert!(
        other.contains("--chunk-size 256 --hash-algorithm blake3"),
        "{other}"
    );
    let other = said(&["--identity", "v2 \"a\""]);
    assert!(other.contains("6 chunks (192 KiB)"), "{other}");
    assert!(
        other.contains(r#"--chunk-size 256 --hash-algorithm blake3 --identity "v2 \"a\"""#),
        "{other}"
    );
    let same = said(&[]);
    assert!(!same.contains("chunks (192 KiB)"), "{same}");
    assert_eq!(
        found(path, &[]),
        CHUNKS as u64,
        "they are there all the same"
    );
    let inspected = lmc(&["disk", "inspect", "--json", path]);
    let said: serde_json::Value = serde_json::from_slice(&inspected.stdout).expect("JSON");
    let space = &said["drives"][0]["spaces"][0];
    assert_eq!(
        (&space["chunks"], &space["bytes"]),
        (&6.into(), &(192 << 10).into())
    );
    assert_eq!(
        space["settings"],
        "--chunk-size 256 --hash-algorithm blake3"
    );
}

/// Runs `lmc serve` with flags that end its start, and returns what it says.
fn refused(flags: &[&str]) -> String {
    let (port, http) = (free_port().to_string(), free_port().to_string());
    let common = ["serve", "--l1-size-gb", "16MiB", "--state-dir", "none"];
    let ports = ["--port", &port, "--http-port", &http];
    let refused = lmc(&[&common[..], &ports, flags].concat());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success(), "{said}");
    said
}

/// The drive was not mounted, and its mount point became a new one on the root file system.
#[test]
fn an_empty_folder_is_no_drive_without_the_flag_that_says_so() {
    let folder = new_folder();
    let path = folder.text();
    let said = refused(&["--disk", path, "--disk-size", "64MiB"]);
    let command = format!("lmc serve --disk {path} --disk-create");
    assert!(said.contains(&command), "{said}");
    let left = std::fs::read_dir(&folder).expect("a folder").count();
    assert_eq!(left, 0);
}

#[test]
fn what_is_no_drive_is_refused_with_what_it_is() {
    for (flags, named) in [
        (&["--disk", "/etc/hostname"][..], "not a folder"),
        (&["--disk", "/proc"], "proc"),
        (
            &["--disk", "/sys", "--disk-size", "1GiB", "--disk-create"],
            "sysfs",
        ),
        (&["--disk", "/data", "--disk-size", "10MiB"], "64.0 MiB"),
        (&["--disk-size", "1GiB"], "--disk"),
    ] {
        let said = refused(flags);
        assert!(said.contains(named), "{flags:?}: {said}");
    }
}

#[test]
fn a_folder_that_cannot_be_used_ends_the_start_with_its_reason() {
    let folder = new_folder();
    std::fs::write(folder.join("notes.txt"), "mine").expect("a file");
    let (port, http) = (free_port().to_string(), free_port().to_string());
    let path = folder.text();
    let refused = lmc(&[
        "serve",
        "--port",
        &port,
        "--http-port",
        &http,
        "--l1-size-gb",
        "16MiB",
        "--disk",
        path,
        "--disk-create",
        "--state-dir",
        "none",
        "--disk-size",
        "64MiB",
    ]);
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{why}");
    assert!(why.contains("name an empty folder"), "{why}");
    let nothing = lmc(&["disk", "inspect", path]);
    let why = String::from_utf8_lossy(&nothing.stderr).into_owned();
    assert!(
        !nothing.status.success() && why.contains("no lmc drive found"),
        "{why}"
    );
}

/// A worker prepares a store of chunks that lie on disk, and never commits. Lookups of those
/// chunks used to take 10 s and to miss, until the worker's connection ended.
#[test]
fn an_uncommitted_store_does_not_hide_what_lies_on_disk() {
    let folder = new_folder();
    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    wait_for_chunks(&server, CHUNKS);
    drop(server);

    let server = start(&folder);
    let mut client = server.client();
    let shm_name = register(&mut client);
    let prepare = Request::PrepareStore {
        key: key("uncommitted"),
        instance_id: 1,
    };
    let prepared = client.ask(&prepare).expect("an answer");
    assert!(
        matches!(&prepared, Reply::StoreSlots { slots, .. } if slots.len() == CHUNKS),
        "{prepared:?}"
    );
    // A lookup that waited for the store would end as a miss.
    assert_eq!(retrieve(&mut client, &shm_name, "lookup"), CHUNKS as u64);
    server.terminate();
}

/// Weights that change under one model name: vLLM's connector sends the path and nothing of what
/// lies there, so the operator tells the server with `--identity`. Chunks of the old weights are
/// on disk, and must not be found under another identity, or under none.
#[test]
fn chunks_are_found_only_under_the_identity_that_they_were_stored_with() {
    let folder = new_folder();
    let hits = |flags: &[&str], request: &str| {
        let server = start_with(&folder, flags);
        let mut client = server.client();
        let shm_name = register(&mut client);
        let hits = retrieve(&mut client, &shm_name, request);
        drop(client);
        server.terminate();
        hits
    };
    let old = ["--identity", "weights of 2026-10"];
    let server = start_with(&folder, &old);
    let mut client = server.client();
    let shm_name = register(&mut client);
    store(&mut client, &shm_name);
    let status = lmc(&[
        "status",
        "--url",
        &format!("http://127.0.0.1:{}", server.http),
    ]);
    let status = String::from_utf8(status.stdout).expect("text");
    assert!(status.contains("\"weights of 2026-10\""), "{status}");
    drop(client);
    server.terminate();
    assert_eq!(hits(&["--identity", "weights of 2026-11"], "new"), 0);
    assert_eq!(hits(&[], "none"), 0);
    assert_eq!(hits(&old, "old"), CHUNKS as u64);
}

/// Nothing on a drive or in a store says in which format a chunk of `uint8` is, so after a restart
/// none is found, unless the operator vouches for the format with `--identity`. Until 336c9b4 such
/// chunks were written to stores all the same, and stayed there.
#[test]
fn chunks_of_an_unknown_format_are_written_and_found_again_only_under_an_identity() {
    for (flags, expected) in [
        (&[][..], 0),
        (&["--identity", "fp8_e4m3"][..], CHUNKS as u64),
    ] {
        let (folder, store_folder) = (new_folder(), Folder::temporary());
        let remote = format!("file://{}", store_folder.text());
        let flags = [flags, &["--remote", &remote]].concat();
        let server = start_with(&folder, &flags);
        let mut client = server.client();
        let shm_name = register_as(&mut client, 8, "uint8");
        store(&mut client, &shm_name);
        // What is to be written is queued at the commit.
        for tier in ["disk", "remote"] {
            let of = |metric: &str| server.metric(&format!("{metric}{{tier=\"{tier}\"}}"));
            until("the queue is empty", || of("lmc_tier_queued_bytes") == 0.0);
            assert_eq!(
                of("lmc_tier_copied_chunks_total"),
                expected as f64,
                "{tier}"
            );
        }
        drop(server);
        let server = start_with(&folder, &flags);
        let mut client = server.client();
        let shm_name = register_as(&mut client, 8, "uint8");
        assert_eq!(retrieve(&mut client, &shm_name, "again"), expected);
    }
}

#[test]
fn chunks_that_are_recomputed_faster_than_they_are_read_stay_on_disk() {
    let folder = new_folder();
    let path = folder.to_str().expect("a path");
    stored(path, &[]);
    // A billion tokens a second: no drive is as fast.
    assert_eq!(found(path, &["--recompute-rate", "1000000000"]), 0);
    assert_eq!(found(path, &["--recompute-rate", "1"]), found(path, &[]));
    let server = start_with(&folder, &["--recompute-rate", "1000000000"]);
    let mut client = server.client();
    let shm_name = register(&mut client);
    assert_eq!(retrieve(&mut client, &shm_name, "again"), 0);
    assert!(metric(&server, "lmc_tier_fetches_skipped_total") > 0.0);
}

#[test]
fn a_password_in_a_setting_is_in_no_output() {
    let url = "redis://user:MARKED-SECRET@host:6379/0";
    let said = refused(&["--disk", url]);
    assert!(
        said.contains("redis://user:***@host") && !said.contains("MARKED"),
        "{said}"
    );
    let shown = lmc(&["serve", "--shm-name", url, "--print-config"]);
    for output in [&shown.stdout, &shown.stderr] {
        assert!(!String::from_utf8_lossy(output).contains("MARKED"));
    }
}
