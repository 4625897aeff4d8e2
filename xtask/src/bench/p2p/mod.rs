//! `cargo xtask bench p2p`: prefixes that one daemon reads from another, beside the bare channel.

mod report;

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::transfer::{Batch, Player, iperf};
use super::{ceiling, conditions, page};
use crate::packages;
use crate::scripts;
use report::{BARE, FIRST, LATER, MOONCAKE, Report};

const SECTION: &str = "bench p2p";
const JSON: &str = "docs/benchmarks/p2p.json";
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
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// One round of three cells, in under a minute; writes nothing
    #[arg(long)]
    quick: bool,
    /// Measure Mooncake Store over TCP in the same run, fetched from PyPI
    #[arg(long)]
    race: bool,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

impl P2pArgs {
    fn cells(&self) -> Vec<Batch> {
        let all = CHUNKS.map(|count| LENS.map(|len| Batch::new(count, len)));
        let all = all.into_iter().flatten();
        match self.quick {
            true => all.filter(|cell| cell.count == CHUNKS[0]).skip(1).collect(),
            false => all.collect(),
        }
    }
}

/// The measurement of a cell, as a player is asked for it.
fn line(cell: Batch) -> String {
    let prompts = (CELL / (cell.count * cell.len)).clamp(PROMPTS.0, PROMPTS.1);
    format!("prefixes {} {} {prompts} {AGAIN}", cell.count, cell.len)
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

pub(super) fn run(args: &P2pArgs) -> Result<bool> {
    ensure!(args.rounds > 0, "--rounds takes a number above 0");
    packages::install("iperf3", "iperf3")?;
    let flags = "--package lmc-server --example p2p_speed";
    let program = crate::build_release(flags)?.join("examples/p2p_speed");
    let mut conditions = conditions::machine();
    let version = conditions::output("iperf3", &["--version"]);
    conditions.push(("iperf3", version.lines().next().unwrap_or("unknown").into()));
    let mut report = Report::new(conditions);
    let mooncake = args.race.then(|| -> Result<_> {
        fs::create_dir_all("target/bench")?;
        let folder = scripts::set_up("xtask/python/mooncake.sh", &[])?;
        Ok(format!("{folder}/bin/python"))
    });
    let mooncake = mooncake.transpose()?;
    let rounds = if args.quick { 1 } else { args.rounds };
    for round in 1..=rounds {
        println!("round {round} of {rounds}");
        let mut player = Player::start(&program, "p2p", &[])?;
        for cell in args.cells() {
            let found = player.ask(&line(cell), CELL_SECONDS)?;
            let missed = found["missed"].as_f64().context("missed")?;
            for kind in [FIRST, LATER, BARE] {
                report.cell(cell, kind, &Reads::of(&found, kind)?);
            }
            report.missed(cell, missed);
        }
        drop(player);
        if let Some(python) = &mooncake {
            let mut command = Command::new(python);
            command.args(["xtask/python/mooncake_peer.py", "drive"]);
            let mut player = Player::run(command, MOONCAKE)?;
            for cell in args.cells() {
                let found = player.ask(&line(cell), CELL_SECONDS)?;
                report.cell(cell, MOONCAKE, &Reads::of(&found, MOONCAKE)?);
            }
        }
        report.ceiling(
            "iperf3, 4 streams",
            iperf(4, "read", Batch::new(1, KIB * KIB), IPERF)?.gb_per_s(),
        );
        report.ceiling("memcpy, 1 core", ceiling::memcpy(1));
    }
    let text = report.text(rounds);
    println!("{text}");
    if !(args.dry_run || args.quick) {
        page::write(SECTION, &text)?;
        fs::write(JSON, serde_json::to_string_pretty(&report.json())? + "\n")?;
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
        assert!(crate::parse_action("bench p2p --rounds 5 --dry-run").is_ok());
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
