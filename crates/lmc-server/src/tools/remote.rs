//! `lmc remote`: inspects a shared store, and removes chunks that are not needed. It works without a server.

mod check;
mod du;
mod gc;
mod listing;
mod removing;
mod rm;
mod selectors;

use std::future::Future;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use clap::{Args, Subcommand};
use lmc_backend_remote::redis::RedisMemory;
use lmc_backend_remote::{Opened, StoreError, StoreOptions, open_store};
use tokio::runtime::Builder;

use crate::config::{RemoteUrl, human_bytes};

/// Time for one request to the store: a page of a listing, a batch of removals, a value.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Examples:
  lmc remote check file:///mnt/shared/lmc
  lmc remote du redis://cache:6379
  lmc remote gc file:///mnt/shared/lmc --size 20TiB --dry-run
  lmc remote rm redis://cache:6379 --model meta-llama/Llama-3.1-8B
  AWS_REGION=eu-central-1 lmc remote du s3://bucket/lmc --json
Settings from the environment (AWS_…, SSL_CERT_FILE) count as for `lmc serve --remote`.
docs/remote.md says more about each kind of store.";

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Writes, reads, lists and removes a few values, measures the times, and reports faults
    #[command(after_help = check::HELP)]
    Check(Url),
    /// Shows the chunks and bytes of each model and each space
    #[command(after_help = du::HELP)]
    Du(du::Arguments),
    /// Removes the oldest chunks beyond a size or an age, and leftovers
    #[command(after_help = gc::HELP)]
    Gc(gc::Arguments),
    /// Removes the chunks of a model, a tenant or a space
    #[command(after_help = rm::HELP)]
    Rm(rm::Arguments),
}

// A doc comment here would become the text of each command.
#[derive(Debug, Args)]
pub(crate) struct Url {
    /// URL of the store, as for `lmc serve --remote`. Put a URL with a password into the variable, because
    /// other users can see the command line.
    #[arg(value_name = "URL", env = "LMC_REMOTE", hide_env_values = true)]
    url: String,
}

/// A store on which a command works.
struct Target {
    /// URL of the store; shown without a password.
    url: RemoteUrl,
    opened: Opened,
}

pub(super) fn run(verb: &Verb) -> Result<()> {
    match verb {
        Verb::Check(url) => with_store(url, check::run),
        Verb::Du(arguments) => with_store(&arguments.url, |target| du::run(target, arguments)),
        Verb::Gc(arguments) => with_store(&arguments.url, |target| gc::run(target, arguments)),
        Verb::Rm(arguments) => with_store(&arguments.url, |target| rm::run(target, arguments)),
    }
}

/// Opens a store, works on it and closes it. Work that still hangs does not keep the program running.
fn with_store<F: Future<Output = Result<()>>>(
    url: &Url,
    work: impl FnOnce(Target) -> F,
) -> Result<()> {
    // An error must not repeat the text, which may hold a password.
    let url = RemoteUrl::parse(&url.url).map_err(|error| anyhow!("URL: {error}"))?;
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.context("cannot start")?;
    let done = runtime.block_on(async {
        let opened = open_store(url.with_secrets(), StoreOptions::default());
        let opened = opened.map_err(|error| anyhow!("{url}: {error}"))?;
        let store = opened.store();
        let done = work(Target { url, opened }).await;
        store.close(Instant::now() + TIMEOUT).await;
        done
    });
    runtime.shutdown_background();
    done
}

/// Returns the deadline of a request that begins now.
fn deadline() -> Instant {
    Instant::now() + TIMEOUT
}

/// Describes the memory of a Redis and its behaviour when full. Returns true if that suits a cache.
fn memory(node: &RedisMemory) -> (bool, String) {
    let (name, policy) = (&node.node, node.policy.as_deref().unwrap_or("not known"));
    let used = node
        .used
        .map_or_else(|| "not known".to_owned(), human_bytes);
    let Some(max) = node.max.map(human_bytes) else {
        let text = format!(
            "{name}: {used} in use, and maxmemory is not set: Redis grows until its host has no memory; \
             set maxmemory, and maxmemory-policy allkeys-lru"
        );
        return (false, text);
    };
    let text = format!("{name}: {used} of {max} in use, maxmemory-policy {policy}");
    match policy {
        "noeviction" => {
            let remedy = "when full, it refuses chunks; set allkeys-lru if only lmc uses it";
            (false, format!("{text}: {remedy}"))
        }
        _ => (true, text),
    }
}

/// Returns the text of a store's error, with the remedy.
pub(crate) fn explained(error: &StoreError) -> String {
    let remedy = match error {
        // This error's text names the remedy.
        StoreError::Io(error) if error.kind() == ErrorKind::NotFound => return error.to_string(),
        StoreError::Deadline => {
            "the network, a proxy or the store hangs: try to reach the store with its own tools from this host"
        }
        StoreError::Unavailable { .. } => {
            "check that the store runs, that the URL is right, and that this host may reach it"
        }
        StoreError::Denied { .. } => {
            "check user and password, the AWS_… variables, or owner and permissions of the folder"
        }
        StoreError::Full { .. } => {
            "free some space: `lmc remote gc` for a folder, maxmemory-policy for Redis, a lifecycle rule for S3"
        }
        _ => "see the store's log, and this host's log (dmesg)",
    };
    format!("{error}; {remedy}")
}
