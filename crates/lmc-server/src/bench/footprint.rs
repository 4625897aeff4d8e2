//! Checks that a server is unused before a run, and clears it afterwards.

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use super::args::EngineArgs;
use crate::tools::http::{Call, HttpUrl};

/// A server's use, as its HTTP side reports it.
#[derive(Debug, Clone, Copy)]
struct Holdings {
    /// Chunks in memory and in every lower tier.
    chunks: u64,
    workers: u64,
    /// Bytes stored since the server's start, by all engines; `None` for a server that is not lmc.
    stored_bytes: Option<u64>,
}

/// The use of the server before the run.
#[derive(Debug)]
pub(crate) struct Footprint {
    url: HttpUrl,
    before: Option<Holdings>,
}

impl Footprint {
    /// Checks the server before any load is sent to it.
    ///
    /// # Errors
    /// The server is in use, or that is not known, and `--force` was not given.
    pub(crate) fn before(args: &EngineArgs) -> Result<Self> {
        let target = &args.url;
        let default = || format!("http://{}:8080", target.authority()).into();
        let url = args.http_url.clone().unwrap_or_else(default);
        let server = format!("the server at tcp://{}:{}", target.authority(), target.port);
        let found = holdings(&url, target.port);
        if !args.force {
            let found = found.with_context(|| {
                format!(
                    "cannot check whether {server} is in use: name its HTTP address with \
                     --http-url, or use --force"
                )
            })?;
            ensure!(
                found.chunks == 0 && found.workers == 0,
                "{server} holds {} chunks and serves {} workers; this load would slow these workers \
                 and may evict these chunks: use a separate server (lmc serve --port 6555 \
                 --http-port 8081, and here --url tcp://127.0.0.1:6555 --http-url \
                 127.0.0.1:8081), or use --force",
                found.chunks,
                found.workers
            );
            eprintln!("lmc: {server} is empty, and is cleared after the run");
            return Ok(Self {
                url,
                before: Some(found),
            });
        }
        eprintln!("lmc: the chunks of this run stay in {server} until they are evicted");
        Ok(Self { url, before: None })
    }

    /// Returns the address of the server's HTTP side.
    pub(crate) fn url(&self) -> &HttpUrl {
        &self.url
    }

    /// Clears a server that was empty before and holds only the `stored` bytes of this run. Prints a note
    /// if it does not clear.
    pub(crate) fn clear(&self, port: u16, stored: u64) {
        let Some(before) = self.before else {
            return;
        };
        match self.try_clear(before, port, stored) {
            Ok(chunks) => eprintln!("lmc: cleared {chunks} chunks"),
            Err(error) => eprintln!(
                "lmc: the chunks of this run stay in the server: {}",
                crate::text::error_text(&error)
            ),
        }
    }

    fn try_clear(&self, before: Holdings, port: u16, stored: u64) -> Result<u64> {
        let now = holdings(&self.url, port)?;
        let (Some(first), Some(last)) = (before.stored_bytes, now.stored_bytes) else {
            bail!("the server is not lmc, so it is not known what its clear does");
        };
        ensure!(
            now.workers == 0,
            "the server serves {} workers now",
            now.workers
        );
        let others = last.saturating_sub(first).saturating_sub(stored);
        ensure!(others == 0, "other engines stored {others} bytes meanwhile");
        let answer = Call::new("POST", "/cache/clear", Some(json!({"tier": "all"})));
        let answer = answer.send(&self.url)?;
        let count = |name: &str| answer["cleared"][name].as_u64().unwrap_or(0);
        Ok(count("chunks").max(count("chunks_below")))
    }
}

/// Asks the HTTP side at `url`, which must belong to the server that engines reach at `port`.
fn holdings(url: &HttpUrl, port: u16) -> Result<Holdings> {
    let config = Call::get("/config").send(url)?;
    let its = &config["mp"]["port"];
    ensure!(
        *its == port,
        "{url} belongs to another server, which serves engines on port {its}"
    );
    let status = Call::get("/status").send(url)?;
    let workers = |name: &str| status[name].as_array().map_or(0, Vec::len) as u64;
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let lower = status["lmc"]["lower"].as_array().into_iter().flatten();
    let lower: u64 = lower.map(|tier| number(&tier["chunks"])).sum();
    let memory = &status["storage_manager"]["l1_manager"]["total_object_count"];
    Ok(Holdings {
        chunks: number(memory) + lower,
        workers: workers("registered_gpu_ids") + workers("registered_non_cuda_instance_ids"),
        stored_bytes: status["lmc"]["counts"]["stored_bytes"].as_u64(),
    })
}
