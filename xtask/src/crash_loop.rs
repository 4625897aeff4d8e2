//! `cargo xtask crash-loop`: kills the real disk tier at random instants and looks what is left.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};

use crate::built::Built;

/// Rounds in one folder; then it starts with an empty one, so that nothing is ever evicted.
const ROUNDS_OF_A_FOLDER: u32 = 8;
/// Longest life of a child, in milliseconds.
const LIFE_MS: u64 = 600;
const TIMEOUT: Duration = Duration::from_secs(120);

/// Kills the disk tier at random instants and checks that nothing acknowledged is lost.
#[derive(Debug, clap::Args)]
pub(crate) struct CrashLoopArgs {
    /// Kills
    #[arg(long, value_name = "N", default_value_t = 100)]
    rounds: u32,
    /// Repeat the instants of the run that printed this seed
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Folder on the drive to use
    #[arg(long, value_name = "PATH", default_value = "target")]
    dir: PathBuf,
}

struct Asked {
    rounds: u32,
    seed: u64,
    folder: PathBuf,
}

impl Asked {
    fn of(args: &CrashLoopArgs) -> Result<Self> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
        Ok(Self {
            rounds: args.rounds,
            seed: args.seed.unwrap_or_else(|| now.subsec_nanos().into()),
            // A folder of its own, as it is removed in the end.
            folder: args.dir.join("lmc-crash-loop"),
        })
    }
}

pub(crate) fn run(args: &CrashLoopArgs) -> Result<bool> {
    let asked = Asked::of(args)?;
    let built = Built::workspace()?;
    let child = built.program("lmc-backend-disk", "crash")?;
    println!(
        "{} kills in {}, seed {}",
        asked.rounds,
        asked.folder.display(),
        asked.seed
    );
    let mut random = asked.seed | 1;
    let mut lines = String::new();
    let (mut next, mut whole, mut failed) = (1u64, 0u64, 0u32);
    for round in 0..asked.rounds {
        if round.is_multiple_of(ROUNDS_OF_A_FOLDER) {
            let _ = std::fs::remove_dir_all(&asked.folder);
            std::fs::create_dir_all(&asked.folder)?;
            lines.clear();
        }
        // Both ways to move bytes take turns.
        let io = if round % 4 == 3 { "threads" } else { "auto" };
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let life = Duration::from_millis(1 + random % LIFE_MS);
        let said = write_until_killed(child, &asked.folder, next, io, life)?;
        let numbers = said
            .lines()
            .filter_map(|line| line.get(2..)?.parse::<u64>().ok());
        next = numbers.max().unwrap_or(next) + 1;
        lines.push_str(&said);
        match check(child, &asked.folder, io, &lines) {
            Ok(found) => {
                println!("PASS round {round}, killed after {life:.0?} ({io}): {found}");
                whole += said.lines().filter(|line| line.starts_with('S')).count() as u64;
            }
            Err(error) => {
                failed += 1;
                println!(
                    "FAIL round {round}, killed after {life:.0?} ({io}), seed {}: {error:#}",
                    asked.seed
                );
                // What follows would only repeat it; the folder stays for a look.
                break;
            }
        }
    }
    if failed == 0 {
        let _ = std::fs::remove_dir_all(&asked.folder);
    }
    println!("{whole} chunks were acknowledged and found again");
    println!("{} passed, {failed} failed", asked.rounds - failed);
    Ok(failed == 0)
}

fn child(program: &Path, verb: &str, folder: &Path, io: &str) -> Command {
    let mut command = Command::new(program);
    command.arg(verb).arg(folder).env("LMC_CRASH_IO", io);
    command
}

/// Lets a child write for a while, kills it, and returns the whole lines that it has said.
fn write_until_killed(
    program: &Path,
    folder: &Path,
    first: u64,
    io: &str,
    life: Duration,
) -> Result<String> {
    let mut command = child(program, "write", folder, io);
    let mut running = command
        .arg(first.to_string())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut stdout = running.stdout.take().context("a piped output")?;
    let reader = thread::spawn(move || {
        let mut said = String::new();
        stdout.read_to_string(&mut said).map(|_| said)
    });
    thread::sleep(life);
    let ended = running.try_wait()?;
    running.kill()?;
    running.wait()?;
    let mut said = reader
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    if let Some(status) = ended {
        bail!("the child ended by itself: {status}");
    }
    said.truncate(said.rfind('\n').map_or(0, |end| end + 1));
    Ok(said)
}

fn check(program: &Path, folder: &Path, io: &str, lines: &str) -> Result<String> {
    let mut command = child(program, "check", folder, io);
    let command = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut running = command.spawn()?;
    let mut stdin = running.stdin.take().context("a piped input")?;
    stdin.write_all(lines.as_bytes())?;
    drop(stdin);
    wait(&mut running)?;
    let output = running.wait_with_output()?;
    let (out, err) = (output.stdout, output.stderr);
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&err).trim()
    );
    Ok(String::from_utf8_lossy(&out).trim().to_owned())
}

fn wait(running: &mut Child) -> Result<()> {
    let deadline = Instant::now() + TIMEOUT;
    while running.try_wait()?.is_none() {
        if Instant::now() >= deadline {
            running.kill()?;
            bail!("not checked within {TIMEOUT:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
