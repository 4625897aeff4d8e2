//! Moves batches between two processes and says how long that took: what `cargo xtask bench
//! transfer` runs.
//!
//! `transfer_speed drive WHO` starts the other process itself and obeys lines on its standard
//! input, with a line of JSON for each:
//!
//! - `move write|read|send COUNT BYTES SECONDS`: batches for about so long;
//! - `idle SECONDS`: nothing.
//!
//! WHO is `socket:tcp:STREAMS`, `socket:unix:STREAMS` or `nixl` for a channel of ours, and for
//! what it is measured beside `stream:tcp:STREAMS`, `stream:unix:STREAMS`, `bare-nixl`, `memcpy`.

mod channel;
mod cpu;
mod keeper;
mod memcpy;
mod memory;
#[cfg(feature = "nixl")]
mod nixl;
mod stream;

use std::io::BufRead;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Direction of the bytes, seen from the process that drives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Bytes go from here to there; the other side does nothing.
    Write,
    /// Bytes go from there to here; the other side does nothing.
    Read,
    /// Bytes go from here to there; the other side receives.
    Send,
}

/// Objects of a batch, and bytes of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) count: usize,
    pub(crate) len: usize,
}

/// Moves batches.
pub(crate) trait Mover {
    /// Lays out objects where they come from and targets where they go to.
    fn prepare(&mut self, way: Way, shape: Shape, seed: u64) -> Result<(), Failure>;

    /// Moves the batch `batches` times. Returns the time of each.
    fn run(&mut self, batches: usize) -> Result<Vec<Duration>, Failure>;

    /// Compares every byte of the last batch with what it must be.
    fn verify(&mut self) -> Result<(), Failure>;

    /// The other process.
    fn other(&self) -> Option<u32>;
}

/// Batches of one measurement at most.
const MOST: usize = 20_000;
/// Batches before the first that counts, by which it is known how many will.
const WARM_UP: usize = 3;

fn mover(who: &str) -> Result<Box<dyn Mover>, Failure> {
    let words: Vec<&str> = who.split(':').collect();
    Ok(match words[..] {
        ["socket", ..] | ["nixl"] => Box::new(channel::Driver::start(who)?),
        ["stream", kind, streams] => Box::new(stream::Driver::start(kind, streams.parse()?)?),
        #[cfg(feature = "nixl")]
        ["bare-nixl"] => Box::new(nixl::Driver::start()?),
        ["memcpy"] => Box::new(memcpy::Copier::default()),
        _ => return Err(format!("this program knows no {who:?}").into()),
    })
}

fn measure(
    mover: &mut dyn Mover,
    way: Way,
    shape: Shape,
    seconds: f64,
    seed: u64,
) -> Result<serde_json::Value, Failure> {
    mover.prepare(way, shape, seed)?;
    let warm_up = mover.run(WARM_UP)?;
    let last = warm_up.last().map_or(1.0, Duration::as_secs_f64);
    let batches = ((seconds / last) as usize).clamp(1, MOST);
    let other = mover.other();
    let (own_cpu, other_cpu) = (cpu::own()?, cpu::of(other)?);
    let mut times = mover.run(batches)?;
    let own_cpu = cpu::own()? - own_cpu;
    let other_cpu = cpu::of(other)? - other_cpu;
    mover.verify()?;
    let total: Duration = times.iter().sum();
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_secs_f64();
    Ok(json!({
        "batches": batches,
        "bytes": (batches * shape.count * shape.len) as f64,
        "seconds": total.as_secs_f64(),
        "p50": at(0.5),
        "p99": at(0.99),
        "cpu_here": own_cpu,
        "cpu_there": other_cpu,
    }))
}

fn obey(mover: &mut dyn Mover, line: &str, seed: u64) -> Result<serde_json::Value, Failure> {
    let words: Vec<&str> = line.split_whitespace().collect();
    match words[..] {
        ["move", way, count, len, seconds] => {
            let way = match way {
                "write" => Way::Write,
                "read" => Way::Read,
                "send" => Way::Send,
                other => return Err(format!("no way {other:?}").into()),
            };
            let (count, len) = (count.parse()?, len.parse()?);
            let shape = Shape { count, len };
            measure(mover, way, shape, seconds.parse()?, seed)
        }
        ["idle", seconds] => {
            let other = mover.other();
            // What the last batch left to do is over.
            thread::sleep(Duration::from_millis(300));
            let before = (cpu::own()?, cpu::of(other)?, Instant::now());
            thread::sleep(Duration::from_secs_f64(seconds.parse()?));
            let seconds = before.2.elapsed().as_secs_f64();
            let (here, there) = (cpu::own()? - before.0, cpu::of(other)? - before.1);
            Ok(json!({"seconds": seconds, "cpu_here": here, "cpu_there": there}))
        }
        _ => Err(format!("no such command: {line:?}").into()),
    }
}

fn drive(who: &str) -> Result<(), Failure> {
    let mut mover = mover(who)?;
    println!("{}", json!({"ready": who}));
    for (seed, line) in (1..).zip(std::io::stdin().lock().lines()) {
        println!("{}", obey(&mut *mover, &line?, seed)?);
    }
    Ok(())
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["drive", who] => drive(who),
        ["serve", who] => match who.split(':').collect::<Vec<_>>()[..] {
            ["socket", ..] | ["nixl"] => channel::serve(who),
            ["stream", kind, _] => stream::serve(kind),
            #[cfg(feature = "nixl")]
            ["bare-nixl"] => nixl::serve(),
            _ => Err(format!("this program knows no {who:?}").into()),
        },
        _ => Err("expected `drive WHO`".into()),
    }
}
