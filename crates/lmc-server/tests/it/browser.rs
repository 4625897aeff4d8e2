//! The page at `/` in Chromium, and `lmc top` in a terminal. `cargo xtask test-page` runs these tests.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use lmc_testkit::{Folder, until};

use crate::common::Server;
use crate::common::prompt::{Prompt, register_wide};

/// The folder of the pictures in the docs, which are replaced where LMC_WRITE_SCREENSHOTS is set.
const PICTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pictures");

/// Returns true where the pictures in the docs are to be replaced.
fn writes_pictures() -> bool {
    std::env::var_os("LMC_WRITE_SCREENSHOTS").is_some()
}

/// Starts a server with a drive in `folder`, and plays prompts through it for as long as the pictures need.
fn at_work(folder: &Folder) -> Server {
    let drive = folder.join("drive");
    let server = Server::start(&[
        "--l1-size-gb",
        "128MiB",
        "--disk-create",
        "--disk-size",
        "512MiB",
        "--disk-keep-free",
        "0",
        "--disk",
        drive.to_str().expect("text"),
    ]);
    let mut client = server.client();
    // Chunks of 1 MiB: memory holds twenty prompts, and the drive the others.
    let shm_name = register_wide(&mut client, 256);
    let begun = Instant::now();
    let mut request = 0u32;
    // Uses enough for the hit ratio by size; for the pictures, some samples of the last hour.
    while request < 200 || (writes_pictures() && begun.elapsed() < Duration::from_secs(90)) {
        request += 1;
        let prompt =
            Prompt(request * request % 53 + u32::from(request.is_multiple_of(9)) * request);
        if prompt.retrieve(&mut client, &shm_name, &format!("{request}")) == 0 {
            prompt.try_store(&mut client, &shm_name);
        }
    }
    server
}

#[test]
#[ignore = "needs Chromium and tools of npm: cargo xtask test-page"]
fn the_page_shows_a_server_at_work_to_every_reader() {
    let folder = Folder::temporary();
    let server = at_work(&folder);
    let tools = std::env::var_os("LMC_TEST_BROWSER");
    let tools = tools.expect("LMC_TEST_BROWSER names a folder: cargo xtask test-page does");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../xtask/browser/page.mjs");
    let mut node = Command::new("node");
    node.arg(script).arg(tools);
    node.arg(format!("http://127.0.0.1:{}/", server.http));
    let pictures = match writes_pictures() {
        true => Path::new(PICTURES).to_owned(),
        false => folder.join("pictures"),
    };
    fs::create_dir_all(&pictures).expect("a folder");
    let done = node.arg(&pictures).output().expect("node runs");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{said}");
    for name in ["page-light.png", "page-dark.png"] {
        assert!(pictures.join(name).is_file(), "{name}");
    }
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

    /// Runs a program in a terminal of 110 columns and 36 lines.
    fn run(program: &[&str]) -> Self {
        let terminal = Self(format!("lmc-{}", std::process::id()));
        let size = ["new-session", "-d", "-x", "110", "-y", "36"];
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
    let server = at_work(&folder);
    let url = format!("http://127.0.0.1:{}", server.http);
    let terminal = Terminal::run(&[env!("CARGO_BIN_EXE_lmc"), "top", "--url", &url]);
    let shows = |wanted: &[&str]| {
        let screen = terminal.screen();
        screen.is_some_and(|screen| wanted.iter().all(|text| screen.contains(text)))
    };
    let parts = [
        "chunks of 256 tokens",
        "memory",
        "disk",
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
    // A server that has gone is named, and the last state stays.
    drop(server);
    terminal.tmux(&["send-keys", "r"]);
    until("the fault is shown", || shows(&["no answer"]));
    assert!(shows(&["requests of engines"]));
    terminal.tmux(&["send-keys", "q"]);
    until("it has ended", || terminal.screen().is_none());
}
