//! Flags of `lmc bench`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{Args, ValueEnum, value_parser};
use lmc_memory::DType;

use crate::tools::http::HttpUrl;

/// Operations that the clients of a run issue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub(crate) enum Workload {
    /// The smallest round trip.
    Noop,
    /// Lookups of prompts that are cached.
    Lookup,
    /// Lookups of new prompts.
    LookupCold,
    /// Stores of new prompts.
    Store,
    /// Retrieves of prompts that are cached.
    Retrieve,
    /// Lookups, stores and retrieves in the shares of --mix.
    Mixed,
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("no variant is skipped");
        f.write_str(value.get_name())
    }
}

/// The side that copies between the engine's memory and the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// The worker copies, through the server's shared pool.
    #[value(name = "engine_driven", alias = "engine-driven")]
    EngineDriven,
    /// The server copies, from and to the worker's shared memory.
    #[value(name = "lmcache_driven", alias = "lmcache-driven")]
    LmcacheDriven,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EngineDriven => "engine_driven",
            Self::LmcacheDriven => "lmcache_driven",
        })
    }
}

/// Shares of a mixed workload, summing to 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Mix {
    pub(crate) lookup: f64,
    pub(crate) store: f64,
    pub(crate) retrieve: f64,
}

impl FromStr for Mix {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut mix = Self {
            lookup: 0.0,
            store: 0.0,
            retrieve: 0.0,
        };
        for part in text.split(',') {
            let (name, share) = part
                .split_once('=')
                .ok_or_else(|| format!("expected name=share such as lookup=0.5, found {part:?}"))?;
            let share: f64 = share
                .parse()
                .ok()
                .filter(|share: &f64| share.is_finite() && *share >= 0.0)
                .ok_or_else(|| format!("expected a share of 0 or more, found {share:?}"))?;
            match name {
                "lookup" => mix.lookup = share,
                "store" => mix.store = share,
                "retrieve" => mix.retrieve = share,
                other => {
                    return Err(format!(
                        "expected lookup, store or retrieve, found {other:?}"
                    ));
                }
            }
        }
        let sum = mix.lookup + mix.store + mix.retrieve;
        if sum <= 0.0 {
            return Err("expected at least one share above 0".to_owned());
        }
        Ok(Self {
            lookup: mix.lookup / sum,
            store: mix.store / sum,
            retrieve: mix.retrieve / sum,
        })
    }
}

/// Address of the server, from `tcp://host:port`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) host: String,
    pub(crate) port: u16,
}

impl Target {
    /// Returns the host as it is written in a URL.
    pub(crate) fn authority(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]", self.host)
        } else {
            self.host.clone()
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let expected = || format!("expected tcp://host:port, found {text:?}");
        let address = text.strip_prefix("tcp://").unwrap_or(text);
        let (host, port) = address.rsplit_once(':').ok_or_else(expected)?;
        let port = port.parse().map_err(|_| expected())?;
        if host.is_empty() || port == 0 {
            return Err(expected());
        }
        let host = host.trim_start_matches('[').trim_end_matches(']');
        Ok(Self {
            host: host.to_owned(),
            port,
        })
    }
}

// A doc comment here would become the text of each command.
#[derive(Debug, Clone, Args)]
pub(crate) struct EngineArgs {
    /// The server's address for engines.
    #[arg(long, value_name = "URL", default_value = "tcp://127.0.0.1:5555")]
    pub(crate) url: Target,
    /// The server's HTTP address, to check whether the server is in use and to clear it after the run; by
    /// default port 8080 of --url's host.
    #[arg(long, value_name = "URL", env = "LMC_URL", hide_env_values = true)]
    pub(crate) http_url: Option<HttpUrl>,
    /// Run even if the server holds chunks or serves engines, or if that is not known; it is then not cleared.
    #[arg(long)]
    pub(crate) force: bool,
    /// Side that copies: engine_driven (the engine) or lmcache_driven (the server).
    #[arg(long, default_value = "engine_driven")]
    pub(crate) mode: Mode,
    /// Tensor-parallel workers of an engine; each stores and retrieves its part.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = value_parser!(u32).range(1..=64))]
    pub(crate) tp: u32,
    /// Layers of the model on one worker.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = value_parser!(u32).range(1..=1024))]
    pub(crate) layers: u32,
    /// Elements of one token in one layer's keys.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = value_parser!(u32).range(1..=1 << 20))]
    pub(crate) hidden: u32,
    /// Element type, by torch's name.
    #[arg(long, default_value = "bfloat16", value_parser = dtype)]
    pub(crate) dtype: DType,
    /// Tokens of a block of the engine's memory.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u32).range(1..=1 << 20))]
    pub(crate) block_size: u32,
    /// Check every byte that is read, outside the measured times. `--verify false` turns it off.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub(crate) verify: bool,
    /// Longest wait for an answer, in seconds.
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = timeout)]
    pub(crate) timeout: Duration,
}

/// Settings of `lmc bench`.
#[derive(Debug, Clone, Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
    /// Operations that the clients issue.
    #[arg(long, value_delimiter = ',', default_value = "mixed")]
    pub(crate) workload: Vec<Workload>,
    /// Shares of a mixed workload.
    #[arg(long, default_value = "lookup=0.6,store=0.2,retrieve=0.2")]
    pub(crate) mix: Mix,
    /// Tokens of a prompt; one run for each.
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "N,…",
        default_value = "2048"
    )]
    pub(crate) tokens: Vec<usize>,
    /// Clients at the same time, each with one request under way; one run for each.
    #[arg(long, value_delimiter = ',', value_name = "N,…", default_value = "1")]
    pub(crate) clients: Vec<usize>,
    /// Share of each prompt that all prompts have in common, 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub(crate) shared_prefix: f64,
    /// Prompts that each client has in the cache and requests in turn.
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) prompts: usize,
    /// Seconds of each run, unless --count is given.
    #[arg(long, value_name = "SECONDS", default_value_t = 5.0)]
    pub(crate) duration: f64,
    /// Operations of each client in a run, instead of --duration.
    #[arg(long, value_name = "N")]
    pub(crate) count: Option<u64>,
    /// Seconds of warm-up before each run, which do not count.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.5)]
    pub(crate) warmup: f64,
    /// Connections that one thread of the generator serves (noop and lookups); 0 chooses.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) connections_per_thread: usize,
    /// The server's process, for its CPU time and memory; by default found by its port, if possible.
    #[arg(long, value_name = "PID")]
    pub(crate) server_pid: Option<u32>,
    /// Seed of the prompts; the same seed gives the same prompts.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Name of the model in the chunks' keys. With the same name and seed, a later run finds the chunks
    /// that this run leaves in the server (--force); by default each run has its own name.
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the rows as CSV as well.
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
}

fn dtype(name: &str) -> Result<DType, String> {
    name.parse().map_err(|error| format!("{error}"))
}

fn timeout(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().map(Duration::try_from_secs_f64);
    let timeout = seconds.and_then(Result::ok).filter(|time| !time.is_zero());
    timeout.ok_or_else(|| format!("expected seconds above 0, found {text}"))
}

impl EngineArgs {
    /// Returns the bytes of one worker's part of a chunk.
    pub(crate) fn chunk_bytes(&self, chunk_tokens: usize) -> usize {
        2 * self.layers as usize * self.hidden as usize * self.dtype.size() * chunk_tokens
    }
}

impl BenchArgs {
    /// Checks the values beyond their types.
    pub(crate) fn check(&self) -> Result<(), String> {
        let positive = |name: &str, holds: bool| {
            if holds {
                Ok(())
            } else {
                Err(format!("--{name}: expected a number above 0"))
            }
        };
        positive("tokens", self.tokens.iter().all(|&n| n > 0))?;
        positive("clients", self.clients.iter().all(|&n| n > 0))?;
        positive("prompts", self.prompts > 0)?;
        positive("count", self.count != Some(0))?;
        for (name, seconds) in [("duration", self.duration), ("warmup", self.warmup)] {
            if Duration::try_from_secs_f64(seconds).is_err() {
                return Err(format!("--{name}: expected seconds, found {seconds}"));
            }
        }
        if !(0.0..=1.0).contains(&self.shared_prefix) {
            return Err(format!(
                "--shared-prefix: expected a share of 0 to 1, found {}",
                self.shared_prefix
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, Command, FromArgMatches as _};

    use super::*;

    fn parse(args: &[&str]) -> Result<BenchArgs, String> {
        let command = BenchArgs::augment_args(Command::new("bench"));
        let line = ["bench"].iter().chain(args);
        let matches = command
            .try_get_matches_from(line)
            .map_err(|error| error.to_string())?;
        let args = BenchArgs::from_arg_matches(&matches).map_err(|error| error.to_string())?;
        args.check().map(|()| args)
    }

    #[test]
    fn lists_and_names_are_read() {
        let args = parse(&[
            "--url",
            "tcp://[::1]:6000",
            "--workload",
            "noop,lookup-cold",
            "--tokens",
            "2048,131072",
            "--clients",
            "1,32",
            "--mode",
            "lmcache_driven",
            "--dtype",
            "float32",
            "--verify",
            "false",
        ])
        .expect("valid");
        let target = Target {
            host: "::1".to_owned(),
            port: 6000,
        };
        assert_eq!(args.engine.url, target);
        assert_eq!(args.workload, [Workload::Noop, Workload::LookupCold]);
        assert_eq!(args.tokens, [2048, 131_072]);
        assert_eq!(args.clients, [1, 32]);
        assert_eq!(args.engine.mode, Mode::LmcacheDriven);
        assert_eq!(args.engine.chunk_bytes(256), 2 * 4 * 128 * 4 * 256);
        assert!(!args.engine.verify);
        assert!(parse(&[]).expect("all have defaults").engine.verify);
    }

    #[test]
    fn shares_are_scaled_to_one() {
        let mix: Mix = "lookup=2,store=1,retrieve=1".parse().expect("valid");
        let expected = Mix {
            lookup: 0.5,
            store: 0.25,
            retrieve: 0.25,
        };
        assert_eq!(mix, expected);
        for wrong in ["lookup", "lookup=x", "put=1", "lookup=0", "store=-1"] {
            assert!(wrong.parse::<Mix>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn impossible_values_are_refused() {
        for wrong in [
            &["--url", "localhost"] as &[&str],
            &["--url", "tcp://host:0"],
            &["--tokens", "0"],
            &["--clients", "1,0"],
            &["--shared-prefix", "1.5"],
            &["--duration", "-1"],
            &["--timeout", "0"],
            &["--dtype", "complex"],
            &["--tp", "0"],
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
