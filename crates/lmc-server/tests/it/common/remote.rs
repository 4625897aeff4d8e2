//! Daemons that share a store.

use std::process::Command;

use lmc_testkit::{Folder, until};
use lmc_vllm_adapter::Client;

use super::Server;
use super::prompt::{CHUNKS, Prompt, await_hits, end, register, retrieve};

/// A daemon over a shared folder, and a worker that is registered there.
pub(crate) struct Daemon {
    pub(crate) server: Server,
    pub(crate) client: Client,
    pub(crate) shm_name: String,
    requests: usize,
}

impl Daemon {
    pub(crate) fn start(folder: &Folder) -> Self {
        Self::start_with(folder, &[])
    }

    pub(crate) fn start_with(folder: &Folder, more: &[&str]) -> Self {
        let url = format!("file://{}", folder.text());
        Self::start_by(&[&["--remote", &url], more].concat())
    }

    pub(crate) fn start_by(flags: &[&str]) -> Self {
        Self::start_as(super::lmc(), flags)
    }

    pub(crate) fn start_in(target: &Target) -> Self {
        Self::start_as(target.lmc(), &["--remote", &target.url])
    }

    pub(crate) fn start_as(program: Command, flags: &[&str]) -> Self {
        // The machine may be busy, and nothing may be absent for long.
        let patient = ["--remote-locate-timeout", "5", "--remote-negative-ttl", "0"];
        let flags = [&["--l1-size-gb", "64MiB"], &patient[..], flags].concat();
        let server = Server::start_by(program, &flags);
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

    pub(crate) fn written(&self) -> f64 {
        self.server
            .metric("lmc_tier_copied_chunks_total{tier=\"remote\"}")
    }

    /// Returns the number of the prompt's chunks that a lookup finds. They are not read: a clear may
    /// come in between.
    pub(crate) fn found(&mut self) -> usize {
        self.requests += 1;
        let request_id = format!("request-{}", self.requests);
        Prompt::default().begin_lookup(&mut self.client, &request_id);
        let found = await_hits(&mut self.client, &request_id) as usize;
        end(&mut self.client, &request_id);
        found
    }

    /// Waits until the whole prompt is found, and reads it.
    pub(crate) fn until_read(&mut self) {
        until("the prompt is found", || self.found() == CHUNKS);
        let read = retrieve(&mut self.client, &self.shm_name, "reading");
        assert_eq!(read, CHUNKS as u64);
    }

    pub(crate) fn until_absent(&mut self) {
        until("the prompt is not found", || self.found() == 0);
    }

    /// Stores the prompt until it is in the store.
    pub(crate) fn store(&mut self) {
        until("all chunks are in the store", || {
            // A clear that is learned of meanwhile empties memory.
            if self.found() == 0 {
                Prompt::default().try_store(&mut self.client, &self.shm_name);
            }
            self.written() == CHUNKS as f64
        });
    }
}

/// A store that daemons share, and the program's way to it.
pub(crate) struct Target {
    pub(crate) url: String,
    pub(crate) variables: Vec<(&'static str, String)>,
}

impl Target {
    pub(crate) fn new(url: String) -> Self {
        let variables = Vec::new();
        Self { url, variables }
    }

    pub(crate) fn lmc(&self) -> Command {
        let mut command = super::lmc();
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Returns the number of chunks in the store.
    pub(crate) fn chunks(&self) -> u64 {
        let counted = self
            .lmc()
            .args(["remote", "du", "--json", &self.url])
            .output();
        let counted = counted.expect("the binary runs");
        let report: serde_json::Value =
            serde_json::from_slice(&counted.stdout).unwrap_or_else(|_| panic!("{counted:?}"));
        report["chunks"].as_u64().expect("a number")
    }
}

pub(crate) fn folder() -> Folder {
    Folder::inside(env!("CARGO_TARGET_TMPDIR"))
}
