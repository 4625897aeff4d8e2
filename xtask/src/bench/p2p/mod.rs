//! `cargo xtask bench p2p`: prefixes that one daemon reads from another, beside the bare channel.

mod report;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::transfer::{BatchShape, Player, iperf, nixl_variables};
use super::{ceiling, conditions, page};
use crate::ucx::Nixl;
use crate::{packages, scripts, two_sides};
use report::{BARE, FIRST, LATER, LMCACHE, MOONCAKE, Report};

/// Section of the page, and file, for each transport.
const SOCKETS: (&str, &str) = ("bench p2p", "docs/benchmarks/p2p.json");
const NIXL: (&str, &str) = ("bench p2p nixl", "docs/benchmarks/p2p-nixl.json");
const KIB: usize = 1 << 10;
/// Chunks of 256 tokens in a prefix: 4,096 and 16,384 tokens.
const CHUNKS: [usize; 2] = [16, 64];
const LENS: [usize; 4] = [64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB];
/// Bytes of all prompts of a cell, about, and the least and the most prompts.
const CELL: usize = 512 << 20;
const PROMPTS: (usize, usize) = (4, 40);
/// Reads of a prompt by later leases, and over the bare channel.
const AGAIN: usize = 3;
/// Seconds of a measurement of iperf3.
const IPERF: f64 = 1.0;
/// Longest time of a cell beyond a player's own limit.
const CELL_SECONDS: f64 = 30.0;

/// Measures prefixes that one daemon reads from another over loopback, beside the bare channel and
/// the same slots, in turn; writes docs/benchmarks.md.
///
/// Installs iperf3 where it is not.
#[derive(Debug, clap::Args)]
pub(crate) struct P2pArgs {
    /// Transport of the bytes; `nixl` (UCX over TCP) has a section of its own
    #[arg(long, value_parser = ["sockets", "nixl"], default_value = "sockets")]
    transport: String,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// One round of three cells, in under a minute; writes nothing
    #[arg(long)]
    quick: bool,
    /// Measure Mooncake Store and LMCache's P2P over TCP in the same run, fetched from PyPI
    #[arg(long)]
    race: bool,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

impl P2pArgs {
    fn cells(&self) -> Vec<BatchShape> {
        match self.quick {
            true => cells()
                .filter(|cell| cell.count == CHUNKS[0])
                .skip(1)
                .collect(),
            false => cells().collect(),
        }
    }
}

/// Returns the prefixes that are measured.
pub(super) fn cells() -> impl Iterator<Item = BatchShape> {
    let cells = CHUNKS.map(|count| LENS.map(|len| BatchShape::new(count, len)));
    cells.into_iter().flatten()
}

/// Asks a player for a cell. Returns each kind of read with its median time in seconds.
pub(super) fn medians(player: &mut Player, cell: BatchShape) -> Result<[(&'static str, f64); 3]> {
    let found = player.ask(&line(cell, prompts(cell)), CELL_SECONDS)?;
    let mut medians = [FIRST, LATER, BARE].map(|kind| (kind, 0.0));
    for (kind, seconds) in &mut medians {
        *seconds = Reads::of(&found, kind)?.at(0.5);
    }
    Ok(medians)
}

/// The measurement of a cell, as a player is asked for it.
fn line(cell: BatchShape, prompts: usize) -> String {
    format!("prefixes {} {} {prompts} {AGAIN}", cell.count, cell.len)
}

fn prompts(cell: BatchShape) -> usize {
    (CELL / (cell.count * cell.len)).clamp(PROMPTS.0, PROMPTS.1)
}

/// Times of one kind of read, and CPU of both processes.
#[derive(Debug, Clone, PartialEq)]
struct Reads {
    /// Sorted.
    seconds: Vec<f64>,
    cpu_reader: f64,
    cpu_owner: f64,
}

impl Reads {
    fn of(found: &Value, kind: &str) -> Result<Self> {
        let number = |name: &str| found[kind][name].as_f64().with_context(|| name.to_owned());
        let mut seconds: Vec<f64> = serde_json::from_value(found[kind]["seconds"].clone())?;
        ensure!(!seconds.is_empty(), "nothing was read: {kind}");
        seconds.sort_by(f64::total_cmp);
        Ok(Self {
            seconds,
            cpu_reader: number("cpu_reader")?,
            cpu_owner: number("cpu_owner")?,
        })
    }

    /// The time that this share of the reads took at most.
    fn at(&self, share: f64) -> f64 {
        self.seconds[((self.seconds.len() - 1) as f64 * share) as usize]
    }
}

/// A script that is measured beside lmc, and obeys lines as the example does.
struct Other {
    name: &'static str,
    python: String,
    script: &'static str,
    /// Folder of further Python packages.
    packages: Option<String>,
}

impl Other {
    fn mooncake() -> Result<Self> {
        let folder = scripts::set_up("xtask/python/mooncake.sh", &[])?;
        Ok(Self {
            name: MOONCAKE,
            python: format!("{folder}/bin/python"),
            script: "xtask/python/mooncake_peer.py",
            packages: None,
        })
    }

    fn lmcache() -> Result<Self> {
        let python = format!("{}/bin/python", crate::vllm::environment()?);
        let packages = scripts::set_up("xtask/python/lmcache_p2p.sh", &[&python])?;
        Ok(Self {
            name: LMCACHE,
            python,
            script: "xtask/python/lmcache_peer.py",
            packages: Some(packages),
        })
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.args([self.script, "drive"]);
        command.envs(self.packages.iter().map(|folder| ("PYTHONPATH", folder)));
        command
    }
}

pub(super) fn run(args: &P2pArgs) -> Result<bool> {
    ensure!(args.rounds > 0, "--rounds takes a number above 0");
    packages::install("iperf3", "iperf3")?;
    let over_nixl = args.transport == "nixl";
    let mut flags = "--package lmc-server --example p2p_speed".to_owned();
    let mut variables = Vec::new();
    if over_nixl {
        flags += " --features nixl";
        let logs = Path::new("target/bench/p2p-nixl");
        two_sides::fresh(logs)?;
        variables = nixl_variables(&Nixl::find()?, "tcp", logs);
    }
    let program = crate::build_release(&flags)?.join("examples/p2p_speed");
    fs::create_dir_all("target/bench")?;
    let mut conditions = conditions::machine();
    let version = conditions::output("iperf3", &["--version"]);
    conditions.push(("iperf3", version.lines().next().unwrap_or("unknown").into()));
    let mut report = Report::new(conditions, over_nixl);
    let others = match args.race {
        true => vec![Other::mooncake()?, Other::lmcache()?],
        false => Vec::new(),
    };
    let rounds = if args.quick { 1 } else { args.rounds };
    for round in 1..=rounds {
        println!("round {round} of {rounds}");
        let mut player = Player::start(&program, &args.transport, &variables)?;
        for cell in args.cells() {
            let found = player.ask(&line(cell, prompts(cell)), CELL_SECONDS)?;
            let missed = found["missed"].as_f64().context("missed")?;
            for kind in [FIRST, LATER, BARE] {
                report.cell(cell, kind, &Reads::of(&found, kind)?);
            }
            report.missed(cell, missed);
        }
        drop(player);
        for other in &others {
            let mut player = Player::run(other.command(), other.name)?;
            for cell in args.cells() {
                // Few prompts: it takes up to twenty times as long.
                let found = player.ask(&line(cell, PROMPTS.0), CELL_SECONDS)?;
                report.cell(cell, other.name, &Reads::of(&found, other.name)?);
            }
        }
        report.ceiling(
            "iperf3, 4 streams",
            iperf(4, "read", BatchShape::new(1, KIB * KIB), IPERF)?.gb_per_s(),
        );
        report.ceiling("memcpy, 1 core", ceiling::memcpy(1));
    }
    let text = report.text(rounds);
    println!("{text}");
    if !(args.dry_run || args.quick) {
        let (section, json) = if over_nixl { NIXL } else { SOCKETS };
        page::write(section, &text, json, &report.json())?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flags_choose_cells() {
        let cells = |quick| {
            let args = P2pArgs {
                transport: "sockets".to_owned(),
                rounds: 3,
                quick,
                race: false,
                dry_run: false,
            };
            args.cells()
                .iter()
                .map(|cell| cell.name())
                .collect::<Vec<_>>()
        };
        assert_eq!(cells(true), ["16 × 256 KiB", "16 × 1 MiB", "16 × 4 MiB"]);
        assert_eq!(cells(false).len(), 8);
        assert!(crate::parse_action("bench p2p --rounds 5 --transport nixl --dry-run").is_ok());
    }

    #[test]
    fn reads_are_sorted_and_there() {
        let found =
            json!({"first": {"seconds": [3.0, 1.0, 2.0], "cpu_reader": 0.5, "cpu_owner": 0.25}});
        let reads = Reads::of(&found, FIRST).expect("all of it is there");
        assert_eq!(
            (reads.at(0.5), reads.at(1.0), reads.cpu_owner),
            (2.0, 3.0, 0.25)
        );
        for wrong in [
            json!({}),
            json!({"first": {"seconds": [], "cpu_reader": 0, "cpu_owner": 0}}),
        ] {
            assert!(Reads::of(&wrong, FIRST).is_err(), "{wrong}");
        }
    }
}
