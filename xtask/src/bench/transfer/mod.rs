//! `cargo xtask bench transfer`: channels between two processes beside what they stand on.

mod player;
mod report;

use std::path::Path;

use anyhow::{Result, bail, ensure};

use super::{check_amounts, conditions, page};
use crate::packages;
use crate::two_sides;
use crate::ucx::Nixl;
use player::Sample;
pub(super) use player::{Player, iperf, nixl_variables};
use report::{Report, Round};

const SECTION: &str = "bench transfer";
const JSON: &str = "docs/benchmarks/transfer.json";
const LOGS: &str = "target/bench-transfer";
const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Objects of a batch, and bytes of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchShape {
    pub(super) count: usize,
    pub(super) len: usize,
}

impl BatchShape {
    pub(super) const fn new(count: usize, len: usize) -> Self {
        Self { count, len }
    }

    pub(super) fn name(self) -> String {
        let len = match self.len {
            len if len < KIB => format!("{len} B"),
            len if len < MIB => format!("{} KiB", len / KIB),
            len => format!("{} MiB", len / MIB),
        };
        match self.count {
            1 => len,
            count => format!("{count} × {len}"),
        }
    }
}

const LARGE: [BatchShape; 3] = [
    BatchShape::new(64, MIB),
    BatchShape::new(16, 4 * MIB),
    BatchShape::new(1024, 64 * KIB),
];
const SMALL: [BatchShape; 3] = [
    BatchShape::new(1, 8),
    BatchShape::new(1, 4 * KIB),
    BatchShape::new(1, 64 * KIB),
];
/// The batch that a player moves before it is measured.
const FIRST_USE: BatchShape = BatchShape::new(64, 64 * KIB);
const WAYS: [&str; 3] = ["write", "read", "send"];

/// The comparison of a channel's large batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    /// iperf3 with so many streams.
    Iperf(u32),
    /// A player of this kind.
    Player(&'static str),
}

/// A channel and what it is measured beside.
struct Pair {
    name: &'static str,
    ours: &'static str,
    beside: Beside,
    /// A second comparison of large batches.
    also: Option<&'static str>,
    /// The comparison of small transfers.
    small: &'static str,
    /// The least share of the other's speed that is aimed at.
    aim: f64,
    /// For NIXL: what UCX may use, and what it says of itself when it does.
    ucx: Option<(&'static str, &'static str)>,
}

const PAIRS: [Pair; 6] = [
    Pair {
        name: "TCP, 4 streams",
        ours: "socket:tcp:4",
        beside: Beside::Iperf(4),
        also: Some("stream:tcp:4"),
        small: "stream:tcp:1",
        aim: 0.9,
        ucx: None,
    },
    Pair {
        name: "TCP, 1 stream",
        ours: "socket:tcp:1",
        beside: Beside::Iperf(1),
        also: Some("stream:tcp:1"),
        small: "stream:tcp:1",
        aim: 0.9,
        ucx: None,
    },
    Pair {
        name: "Unix sockets, 4 streams",
        ours: "socket:unix:4",
        beside: Beside::Player("stream:unix:4"),
        also: None,
        small: "stream:unix:1",
        aim: 0.9,
        ucx: None,
    },
    Pair {
        name: "Unix sockets, 1 stream",
        ours: "socket:unix:1",
        beside: Beside::Player("stream:unix:1"),
        also: None,
        small: "stream:unix:1",
        aim: 0.9,
        ucx: None,
    },
    Pair {
        name: "NIXL, UCX tcp",
        ours: "nixl",
        beside: Beside::Player("bare-nixl"),
        also: None,
        small: "bare-nixl",
        aim: 0.95,
        ucx: Some(("tcp", "tcp/lo")),
    },
    Pair {
        name: "NIXL, UCX cma",
        ours: "nixl",
        beside: Beside::Player("bare-nixl"),
        also: None,
        small: "bare-nixl",
        aim: 0.95,
        ucx: Some(("tcp,cma,self", "cma/memory")),
    },
];

/// Measures channels between two processes of this machine beside what they stand on, in turn in
/// each round; writes docs/benchmarks.md.
///
/// Installs iperf3 where it is not, and fetches NIXL's library from PyPI; without that, its rows are
/// left out.
#[derive(Debug, clap::Args)]
pub(crate) struct TransferArgs {
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Pairs whose name holds this: TCP, Unix, NIXL; writes nothing
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// One round, fewer batches, in under two minutes; writes nothing
    #[arg(long)]
    quick: bool,
    /// Write nothing
    #[arg(long)]
    dry_run: bool,
}

struct Asked {
    rounds: usize,
    seconds: f64,
    large: Vec<BatchShape>,
    only: String,
    dry: bool,
}

impl Asked {
    fn of(args: &TransferArgs) -> Result<Self> {
        let mut asked = Self {
            rounds: args.rounds,
            seconds: args.seconds,
            large: LARGE.to_vec(),
            only: args.only.clone(),
            dry: args.dry_run || args.quick || !args.only.is_empty(),
        };
        if args.quick {
            (asked.rounds, asked.seconds) = (1, 0.5);
            asked.large = LARGE[..1].to_vec();
        }
        let found = asked.pairs().next().is_some();
        ensure!(
            found,
            "no pair's name holds {:?}; try TCP, Unix or NIXL",
            asked.only
        );
        check_amounts(asked.rounds, asked.seconds, 0.01)?;
        Ok(asked)
    }

    /// Returns the pairs that are to be measured.
    fn pairs(&self) -> impl Iterator<Item = &'static Pair> {
        PAIRS.iter().filter(|pair| pair.name.contains(&self.only))
    }

    /// Seconds for small transfers, which need fewer to be many.
    fn seconds_small(&self) -> f64 {
        self.seconds / 2.0
    }
}

pub(super) fn run(args: &TransferArgs) -> Result<bool> {
    let asked = Asked::of(args)?;
    packages::install("iperf3", "iperf3")?;
    let nixl = Nixl::find();
    if let Err(why) = &nixl {
        println!("SKIPPED: NIXL: {why:#}");
    }
    let features = if nixl.is_ok() { "--features nixl" } else { "" };
    let flags = format!("--package lmc-transfer {features} --example transfer_speed");
    let program = crate::build_release(&flags)?.join("examples/transfer_speed");
    let mut report = Report::new(conditions(nixl.as_ref().ok()));
    for round in 1..=asked.rounds {
        println!("round {round} of {}", asked.rounds);
        for pair in asked.pairs() {
            if let (Some((tls, transport)), Ok(nixl)) = (pair.ucx, &nixl) {
                let logs = Path::new(LOGS);
                two_sides::fresh(logs)?;
                let variables = nixl_variables(nixl, tls, logs);
                play(pair, &asked, &program, &variables, &mut report)?;
                player::expect_transport(logs, transport)?;
            } else if pair.ucx.is_none() {
                play(pair, &asked, &program, &[], &mut report)?;
            }
        }
        let mut copier = Player::start(&program, "memcpy", &[])?;
        for &batch in &asked.large {
            let found = copier.measure("write", batch, asked.seconds)?;
            report.ceiling("memcpy", batch, found);
        }
    }
    let text = report.text(asked.rounds, asked.seconds);
    println!("{text}");
    if !asked.dry {
        page::write(SECTION, &text, JSON, &report.json())?;
    }
    Ok(true)
}

/// One round of a pair.
fn play(
    pair: &Pair,
    asked: &Asked,
    program: &Path,
    variables: &[(String, String)],
    report: &mut Report,
) -> Result<()> {
    // All of them before the first is measured: one of bare NIXL burns a core until then.
    let start = |who| {
        let mut player = Player::start(program, who, variables)?;
        player.measure("write", FIRST_USE, 0.3)?;
        anyhow::Ok(player)
    };
    let mut ours = start(pair.ours)?;
    let mut beside = match pair.beside {
        Beside::Player(who) => Some(start(who)?),
        Beside::Iperf(_) => None,
    };
    let mut also = pair.also.map(start).transpose()?;
    for &batch in &asked.large {
        for way in WAYS {
            let own = ours.measure(way, batch, asked.seconds)?;
            let other = match (pair.beside, &mut beside) {
                (Beside::Iperf(streams), _) => iperf(streams, way, batch, asked.seconds)?,
                (_, Some(player)) => player.measure(way, batch, asked.seconds)?,
                (Beside::Player(who), None) => bail!("{who} was started above"),
            };
            let also = also.as_mut();
            let also = also.map(|player| player.measure(way, batch, asked.seconds));
            report.large(
                pair,
                way,
                batch,
                Round {
                    ours: own,
                    other,
                    also: also.transpose()?,
                },
            );
        }
    }
    drop((beside, also));
    let mut bare = start(pair.small)?;
    for batch in SMALL {
        for way in WAYS {
            let own = ours.measure(way, batch, asked.seconds_small())?;
            let other = bare.measure(way, batch, asked.seconds_small())?;
            let round = Round {
                ours: own,
                other,
                also: None,
            };
            report.small(pair, way, batch, round);
        }
    }
    report.idle(pair, ours.idle(asked.seconds.max(1.0))?);
    Ok(())
}

fn conditions(nixl: Option<&Nixl>) -> Vec<(&'static str, String)> {
    let mut conditions = conditions::machine();
    let version = conditions::output("iperf3", &["--version"]);
    let version = version.lines().next().unwrap_or("unknown").to_owned();
    conditions.push(("iperf3", version));
    let nixl = nixl.map_or_else(
        || "none: its rows are left out".to_owned(),
        |nixl| {
            let name = nixl.library().parent().and_then(Path::file_name);
            let name = name.map(|name| name.to_string_lossy().into_owned());
            let wheel = "the wheel nixl-cu12 1.5.1, UCX 1.23";
            match std::env::var_os("LMC_NIXL_LIBRARY") {
                None => wheel.to_owned(),
                Some(_) => name.unwrap_or_default(),
            }
        },
    );
    conditions.push(("NIXL", nixl));
    conditions
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_checked() {
        let asked = |rounds, seconds, only: &str, quick| {
            Asked::of(&TransferArgs {
                rounds,
                seconds,
                only: only.to_owned(),
                quick,
                dry_run: false,
            })
        };
        assert!(!asked(3, 1.5, "", false).expect("valid").dry);
        assert!(asked(3, 1.5, "TCP", false).expect("valid").dry);
        assert!(asked(3, 1.5, "", true).expect("valid").dry);
        for (rounds, seconds, only) in [
            (0, 1.0, ""),
            (1, 0.0, ""),
            (1, f64::NAN, ""),
            (1, 1.0, "unix"),
        ] {
            assert!(asked(rounds, seconds, only, false).is_err());
        }
    }

    #[test]
    fn batches_are_named() {
        let names: Vec<String> = LARGE.iter().chain(&SMALL).map(|b| b.name()).collect();
        let expected = [
            "64 × 1 MiB",
            "16 × 4 MiB",
            "1024 × 64 KiB",
            "8 B",
            "4 KiB",
            "64 KiB",
        ];
        assert_eq!(names, expected);
    }
}
