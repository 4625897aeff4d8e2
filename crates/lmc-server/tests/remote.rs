//! Several daemons that share a store.

mod common;

use lmc_testkit::{Folder, until};
use lmc_vllm_adapter::{Client, Request};

use common::Server;
use common::prompt::{CHUNKS, Prompt, await_hits, register, retrieve, store};

/// A daemon over a shared folder, and a worker that is registered there.
struct Daemon {
    server: Server,
    client: Client,
    shm_name: String,
    requests: usize,
}

impl Daemon {
    fn start(folder: &Folder) -> Self {
        let url = format!("file://{}", folder.text());
        // The machine may be busy, and nothing may be absent for long.
        let patient = ["--remote-locate-timeout", "5", "--remote-negative-ttl", "0"];
        let flags = [&["--l1-size-gb", "64MiB", "--remote", &url], &patient[..]].concat();
        let server = Server::start(&flags);
        // What is offered to a store before it is in use is not written.
        server.line("remote store in use");
        let mut client = server.client();
        let shm_name = register(&mut client);
        Self {
            server,
            client,
            shm_name,
            requests: 0,
        }
    }

    fn written(&self) -> f64 {
        self.server
            .metric("lmc_tier_copied_chunks_total{tier=\"remote\"}")
    }

    /// Returns the number of the prompt's chunks that a lookup finds. They are not read: a clear may
    /// come in between.
    fn found(&mut self) -> usize {
        self.requests += 1;
        let request_id = format!("request-{}", self.requests);
        Prompt::default().begin_lookup(&mut self.client, &request_id);
        let found = await_hits(&mut self.client, &request_id) as usize;
        let end = Request::EndSession { request_id };
        self.client.ask(&end).expect("an answer");
        found
    }

    /// Waits until the whole prompt is found, and reads it.
    fn until_read(&mut self) {
        until("the prompt is found", || self.found() == CHUNKS);
        let read = retrieve(&mut self.client, &self.shm_name, "reading");
        assert_eq!(read, CHUNKS as u64);
    }

    fn until_absent(&mut self) {
        until("the prompt is not found", || self.found() == 0);
    }

    /// Stores the prompt until it is in the store.
    fn store(&mut self) {
        until("all chunks are in the store", || {
            // A clear that is learned of meanwhile empties memory.
            if self.found() == 0 {
                Prompt::default().try_store(&mut self.client, &self.shm_name);
            }
            self.written() == CHUNKS as f64
        });
    }
}

fn folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}

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
fn a_clear_at_one_daemon_empties_the_others_and_deletes_nothing() {
    let folder = folder();
    let (mut first, mut second) = (Daemon::start(&folder), Daemon::start(&folder));
    first.store();
    second.until_read();
    let clear = Request::Clear { force: true };
    first.server.client().ask(&clear).expect("an answer");
    second.until_absent();
    first.until_absent();
    assert!(folder.join("v1/clears").exists());
    // A daemon that starts later knows of it, and computes the prompt again.
    let mut third = Daemon::start(&folder);
    third.until_absent();
    third.store();
    first.until_read();
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
