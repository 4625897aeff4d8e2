//! The page at `/` in Chromium, and `lmc top` in a terminal. `cargo xtask test-page` runs these tests.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use lmc_testkit::{Folder, free_port, is_root, until, write_secret};

use crate::common::Server;
use crate::common::prompt::{Prompt, register_wide};

/// The folder of the pictures in the docs, which are replaced where LMC_WRITE_SCREENSHOTS is set.
const PICTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pictures");

/// Returns true where the pictures in the docs are to be replaced.
fn writes_pictures() -> bool {
    std::env::var_os("LMC_WRITE_SCREENSHOTS").is_some()
}

/// A server with a drive, a store, a peer and tenants, at work, and the servers that it reads from.
struct AtWork {
    server: Server,
    peer: Server,
    _writer: Server,
}

/// Starts the servers with their files in `folder`, and plays prompts through them for as long as the
/// pictures need.
fn at_work(folder: &Folder) -> AtWork {
    let path = |name: &str| folder.join(name).to_str().expect("text").to_owned();
    let (drive, store) = (path("drive"), path("store"));
    fs::create_dir_all(&store).expect("a folder");
    let store = format!("file://{store}");
    let (at, own) = (free_port(), free_port());
    let (at, own) = (format!("127.0.0.1:{at}"), format!("127.0.0.1:{own}"));
    let writer = Server::start(&["--l1-size-gb", "64MiB", "--remote", &store]);
    let peer = Server::start(&["--l1-size-gb", "64MiB", "--p2p-listen", &at]);
    let mut flags = vec!["--l1-size-gb", "128MiB", "--quota", "team-a=32MiB"];
    flags.extend([
        "--disk-create",
        "--disk-size",
        "512MiB",
        "--disk-keep-free",
        "0",
    ]);
    flags.extend(["--disk", &drive, "--remote", &store]);
    flags.extend(["--p2p-listen", &own, "--p2p-peer", &at]);
    let server = Server::start(&flags);
    let (mut client, mut of_peer, mut of_writer) =
        (server.client(), peer.client(), writer.client());
    // Chunks of 1 MiB: memory holds twenty prompts, and the drive the others.
    let shm_name = register_wide(&mut client, 256);
    let shm_of_peer = register_wide(&mut of_peer, 256);
    let shm_of_writer = register_wide(&mut of_writer, 256);
    let begun = Instant::now();
    let mut request = 0u32;
    // Uses enough for the hit ratio by size; for the pictures, some samples of the last hour.
    while request < 200 || (writes_pictures() && begun.elapsed() < Duration::from_secs(90)) {
        request += 1;
        let own = request * request % 53 + u32::from(request.is_multiple_of(9)) * request;
        let prompt = match request % 11 {
            3 => {
                let prompt = Prompt(1_000_000 + request);
                prompt.try_store(&mut of_peer, &shm_of_peer);
                prompt
            }
            5 => {
                Prompt(1_500_000 + request).try_store(&mut of_writer, &shm_of_writer);
                // Written to the store by now.
                Prompt(1_500_000 + request.saturating_sub(11))
            }
            _ => Prompt(own),
        };
        if prompt.retrieve(&mut client, &shm_name, &format!("{request}")) == 0 {
            prompt.try_store(&mut client, &shm_name);
        }
    }
    // Stored last, so that they are not evicted.
    for (number, salt) in (2_000_000..).zip(["team-a", "team-b", "team-a"]) {
        Prompt(number).store_salted(&mut client, &shm_name, salt);
    }
    AtWork {
        server,
        peer,
        _writer: writer,
    }
}

/// Opens the page in Chromium in one of the cases of page.mjs.
fn open_page(case: &str, server: &Server, pictures: &Path, token: &str) {
    let tools = std::env::var_os("LMC_TEST_BROWSER");
    let tools = tools.expect("LMC_TEST_BROWSER names a folder: cargo xtask test-page does");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../xtask/browser/page.mjs");
    let mut node = Command::new("node");
    node.arg(script).arg(case).arg(tools);
    node.arg(format!("http://127.0.0.1:{}/", server.http));
    node.arg(pictures).env("LMC_TEST_TOKEN", token);
    let done = node.output().expect("node runs");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
}

#[test]
#[ignore = "needs Chromium and tools of npm: cargo xtask test-page"]
fn the_page_shows_a_server_at_work_and_its_faults_to_every_reader() {
    let folder = Folder::temporary();
    let work = at_work(&folder);
    let pictures = match writes_pictures() {
        true => Path::new(PICTURES).to_owned(),
        false => folder.join("pictures"),
    };
    fs::create_dir_all(&pictures).expect("a folder");
    open_page("work", &work.server, &pictures, "");
    for name in ["page-light.png", "page-dark.png"] {
        assert!(pictures.join(name).is_file(), "{name}");
    }
    drop(work.peer);
    open_page("fault", &work.server, &pictures, "");
}

#[test]
#[ignore = "needs Chromium and tools of npm: cargo xtask test-page"]
fn the_page_asks_for_the_token() {
    // The server trusts root, so that the page is read through the relay of another user.
    if !is_root() {
        return println!("skipped: not root");
    }
    let folder = Folder::temporary();
    let (file, token) = (folder.join("token"), "0123456789abcdef");
    write_secret(&file, token);
    let server = Server::start(&["--http-token-file", file.to_str().expect("text")]);
    open_page("token", &server, &folder.join("pictures"), token);
}

/// A terminal of its own, which ends with this value.
struct Terminal(String);

impl Terminal {
    fn tmux(&self, args: &[&str]) -> Output {
        let mut tmux = Command::new("tmux");
        tmux.args(["-u", "-L", &self.0, "-f", "/dev/null"])
            .args(args);
        tmux.output()
            .expect("tmux: cargo xtask test-page installs it")
    }

    /// Runs a program in a terminal of 120 columns and 44 lines.
    fn run(program: &[&str]) -> Self {
        let terminal = Self(format!("lmc-{}", std::process::id()));
        let size = ["new-session", "-d", "-x", "120", "-y", "44"];
        let started = terminal.tmux(&[&size[..], program].concat());
        assert!(started.status.success(), "{started:?}");
        terminal
    }

    /// Returns the text on the screen; `None` once the program has ended.
    fn screen(&self) -> Option<String> {
        let shown = self.tmux(&["capture-pane", "-p"]);
        let is_there = shown.status.success();
        is_there.then(|| String::from_utf8_lossy(&shown.stdout).into_owned())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.tmux(&["kill-server"]);
    }
}

#[test]
#[ignore = "needs tmux: cargo xtask test-page"]
fn lmc_top_shows_a_server_at_work_and_ends_by_its_key() {
    let folder = Folder::temporary();
    let work = at_work(&folder);
    let url = format!("http://127.0.0.1:{}", work.server.http);
    let terminal = Terminal::run(&[env!("CARGO_BIN_EXE_lmc"), "top", "--url", &url]);
    let shows = |wanted: &[&str]| {
        let screen = terminal.screen();
        screen.is_some_and(|screen| wanted.iter().all(|text| screen.contains(text)))
    };
    let parts = [
        "chunks of 256 tokens",
        "memory",
        "disk",
        "peers: ",
        "remote",
        "_default",
        "127.0.0.1:",
        "evicted since the start",
        "requests of engines",
        "not found, since the start",
        "engines",
        "q quits",
    ];
    until("the whole screen is drawn", || shows(&parts));
    if writes_pictures() {
        let screen = terminal.screen().expect("it is there");
        fs::write(Path::new(PICTURES).join("top.txt"), screen).expect("the folder of pictures");
    }
    drop(work.peer);
    until("the fault and its remedy are shown", || {
        shows(&["no peer is connected: run"])
    });
    // A server that has gone is named, and the last state stays.
    drop(work.server);
    terminal.tmux(&["send-keys", "r"]);
    until("the fault is shown", || shows(&["no answer"]));
    assert!(shows(&["requests of engines"]));
    terminal.tmux(&["send-keys", "q"]);
    until("it has ended", || terminal.screen().is_none());
}
