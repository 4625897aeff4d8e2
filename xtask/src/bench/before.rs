//! `cargo xtask bench before`: this tree and an earlier commit, cell by cell in turn.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::figures::range;
use super::rounds::{Rounds, shown};
use super::transfer::Player;
use super::{check_amounts, conditions, disk, p2p, remote};

const NOW: &str = "now";
const BEFORE: &str = "before";
/// This tree, measured a second time: the ratio to `NOW` shows the noise of the machine.
const AGAIN: &str = "again";
/// Speed of a cell, in GB/s or reads per second.
const SPEED: &str = "speed";
const PROGRAMS: &str =
    "-p lmc-server -p lmc-backend-remote -p lmc-backend-disk --examples --all-features";

/// Measures the programs of `bench disk`, `bench p2p` and `bench remote` of this tree and of an earlier
/// commit, cell by cell in turn, and prints the ratio of their speeds.
///
/// `bench serve --before` does the same for the server.
#[derive(Debug, clap::Args)]
pub(crate) struct BeforeArgs {
    /// Folder `target/release` of a checkout of the earlier commit, after
    /// `cargo build --release --locked -p lmc-server -p lmc-backend-remote -p lmc-backend-disk --examples
    /// --all-features`
    #[arg(long, value_name = "PATH")]
    of: PathBuf,
    /// Benchmarks to run
    #[arg(long, value_delimiter = ',', default_value = "disk,p2p,remote", value_parser = ["disk", "p2p", "remote"])]
    only: Vec<String>,
    /// Measure only the cells whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    cell: String,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// Seconds of each cell of the disk tier
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    seconds: f64,
    /// Folder on the drive to use
    #[arg(long, value_name = "PATH", default_value = "target")]
    dir: PathBuf,
    /// Also write the figures of all rounds to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Name and folder of programs of each racer.
type Racers = [(&'static str, PathBuf); 3];

pub(crate) fn run(args: &BeforeArgs) -> Result<bool> {
    check_amounts(args.rounds, args.seconds, 0.001)?;
    let now = crate::build_release(PROGRAMS)?;
    let mut racers = [(NOW, now.clone()), (BEFORE, args.of.clone()), (AGAIN, now)];
    for (_, folder) in &mut racers {
        let programs = folder.join("examples");
        let is_there = programs.join("disk_speed").exists();
        ensure!(is_there, "expected the examples in {}", programs.display());
        *folder = fs::canonicalize(programs)?;
    }
    let mut cells = Rounds::default();
    for round in 1..=args.rounds {
        // Each is first in turn.
        let mut racers = racers.clone();
        racers.rotate_left(round % 3);
        for what in &args.only {
            println!("round {round} of {}: {what}", args.rounds);
            match &**what {
                "disk" => drives(args, &racers, &mut cells)?,
                "p2p" => peers(args, &racers, &mut cells)?,
                _ => stores(args, &racers, &mut cells)?,
            }
        }
    }
    let conditions = conditions::machine();
    println!("{}\n{}", conditions::lines(&conditions), text(&cells));
    if let Some(path) = &args.json {
        let value = json!({"conditions": conditions::json(&conditions), "cells": cells.json()});
        let written = fs::write(path, serde_json::to_string_pretty(&value)? + "\n");
        written.with_context(|| path.display().to_string())?;
    }
    Ok(true)
}

fn drives(args: &BeforeArgs, racers: &Racers, cells: &mut Rounds) -> Result<()> {
    let asked = disk::Asked::without_peers(args.seconds, &args.dir)?;
    fs::create_dir_all(&asked.folder)?;
    for cell in asked.cells() {
        let name = disk::cell_name(cell);
        if name.contains(&args.cell) {
            for (who, programs) in racers {
                let [(_, speed), _] = disk::ours(&asked, &programs.join("disk_speed"), cell, &[])?;
                cells.add(&name, who, &[(SPEED, speed)]);
            }
        }
    }
    fs::remove_dir_all(&asked.folder)?;
    Ok(())
}

fn peers(args: &BeforeArgs, racers: &Racers, cells: &mut Rounds) -> Result<()> {
    let start = |(who, programs): &(&'static str, PathBuf)| {
        let player = Player::start(&programs.join("p2p_speed"), "sockets", &[])?;
        Ok((*who, player))
    };
    let mut players = racers.iter().map(start).collect::<Result<Vec<_>>>()?;
    for cell in p2p::cells() {
        if cell.name().contains(&args.cell) {
            for (who, player) in &mut players {
                for (kind, seconds) in p2p::medians(player, cell)? {
                    let row = format!("peer, {}, {kind}", cell.name());
                    cells.add(&row, who, &[(SPEED, 1.0 / seconds)]);
                }
            }
        }
    }
    Ok(())
}

fn stores(args: &BeforeArgs, racers: &Racers, cells: &mut Rounds) -> Result<()> {
    let example = |programs: &PathBuf| programs.join("remote_speed");
    let mut rig = remote::Rig::of(&args.dir, &example(&racers[0].1))?;
    for store in remote::STORES {
        for (len, bytes) in remote::LENS {
            let row = format!("{store}, {len}");
            if row.contains(&args.cell) {
                for (who, programs) in racers {
                    rig.measure_with(example(programs));
                    for (what, figure) in rig.measure_in(store, bytes)? {
                        // Commits do not measure lookups of headers in one way.
                        let (what, speed) = match what {
                            "put_gb_per_s" => ("write", figure),
                            "get_gb_per_s" => ("read", figure),
                            "get_one_us" => ("one read", 1.0 / figure),
                            _ => continue,
                        };
                        cells.add(&format!("{row}, {what}"), who, &[(SPEED, speed)]);
                    }
                }
            }
        }
    }
    Ok(())
}

/// Returns the ratios of all rows, and their geometric mean.
fn text(cells: &Rounds) -> String {
    let mut text =
        "| what | now / before | least and most of the rounds | again / now |\n|---|--:|---|--:|\n"
            .to_owned();
    let show = |ratio| shown(ratio, |it| format!("{it:.2}"));
    let ratio = |row: &str, pair| cells.between(row, pair, SPEED, |a, b| a / b);
    let mut logarithms = Vec::new();
    for row in cells.rows() {
        let pair = [NOW, BEFORE];
        let rounds = cells.each_between(row, pair, SPEED, |a, b| a / b);
        let (least, most) = range(&rounds.unwrap_or_default());
        let (found, noise) = (ratio(row, pair), ratio(row, [AGAIN, NOW]));
        logarithms.extend(found.map(f64::ln));
        let _ = writeln!(
            text,
            "| {row} | {} | {least:.2} to {most:.2} | {} |",
            show(found),
            show(noise)
        );
    }
    let mean = logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64;
    let _ = writeln!(text, "\nGeometric mean of all rows: {:.2}.", mean.exp());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_one_round() {
        let mut cells = Rounds::default();
        for (before, now) in [(1.0, 2.0), (10.0, 10.0), (4.0, 2.0)] {
            cells.add("row", BEFORE, &[(SPEED, before)]);
            cells.add("row", NOW, &[(SPEED, now)]);
            cells.add("row", AGAIN, &[(SPEED, now)]);
        }
        let text = text(&cells);
        assert!(
            text.contains("| row | 1.00 | 0.50 to 2.00 | 1.00 |"),
            "{text}"
        );
    }
}
