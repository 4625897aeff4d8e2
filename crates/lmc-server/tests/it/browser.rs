//! The page at `/` in Chromium. `cargo xtask test-page` runs these tests.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use lmc_testkit::Folder;

use crate::common::Server;
use crate::common::prompt::{Prompt, register_wide};

/// The folder of the pictures in the docs, which are replaced where LMC_WRITE_SCREENSHOTS is set.
const PICTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/pictures");

#[test]
#[ignore = "needs Chromium and tools of npm: cargo xtask test-page"]
fn the_page_shows_a_server_at_work_to_every_reader() {
    let folder = Folder::temporary();
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
    let writes_pictures = std::env::var_os("LMC_WRITE_SCREENSHOTS").is_some();
    let begun = Instant::now();
    let mut request = 0u32;
    // Uses enough for the hit ratio by size; for the pictures, some samples of the last hour.
    while request < 200 || (writes_pictures && begun.elapsed() < Duration::from_secs(90)) {
        request += 1;
        let prompt =
            Prompt(request * request % 53 + u32::from(request.is_multiple_of(9)) * request);
        if prompt.retrieve(&mut client, &shm_name, &format!("{request}")) == 0 {
            prompt.try_store(&mut client, &shm_name);
        }
    }
    let tools = std::env::var_os("LMC_TEST_BROWSER");
    let tools = tools.expect("LMC_TEST_BROWSER names a folder: cargo xtask test-page does");
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../xtask/browser/page.mjs");
    let mut node = Command::new("node");
    node.arg(script).arg(tools);
    node.arg(format!("http://127.0.0.1:{}/", server.http));
    let pictures = match writes_pictures {
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
