//! Measures each operation, for several sizes and numbers of objects.

use std::time::{Duration, Instant};

use lmc_memory::ReservedSlot;
use lmc_transfer::conformance::check_value;
use lmc_transfer::{Filled, block_on};
use serde_json::json;

use crate::drive::Drive;
use crate::side::Failure;

const SIZES: [u64; 4] = [4 << 10, 64 << 10, 1 << 20, 4 << 20];
const BATCHES: [usize; 4] = [1, 16, 64, 1024];
/// A cell ends after this long or this many rounds, whichever comes first; after one at least.
const TIME: Duration = Duration::from_millis(300);
const ROUNDS: usize = 50;

/// Every cell that the flags leave targets for. The last bytes of each are all checked.
pub(crate) fn sweep(drive: &mut Drive) -> Result<(), Failure> {
    for size in SIZES {
        for batch in BATCHES {
            if size * batch as u64 > drive.flags.sweep {
                continue;
            }
            let cell = Cell { size, batch };
            cell.report("write", cell.write(drive)?);
            cell.report("read", cell.read(drive)?);
            cell.report("send", cell.send(drive)?);
        }
    }
    drive.control.ask("forget").map(drop)
}

struct Cell {
    size: u64,
    batch: usize,
}

impl Cell {
    fn sizes(&self) -> Vec<u64> {
        vec![self.size; self.batch]
    }

    /// Reserves slots for a batch.
    fn slots(&self, drive: &Drive) -> Result<Vec<ReservedSlot>, Failure> {
        let reserve = |_| drive.side.reserve(self.size);
        (0..self.batch).map(reserve).collect()
    }

    fn typed(&self) -> String {
        format!("{}*{}", self.size, self.batch)
    }

    fn report(&self, operation: &str, mut rounds: Vec<Duration>) {
        rounds.sort();
        let median = rounds[rounds.len() / 2].as_secs_f64();
        let gib = (self.size * self.batch as u64) as f64 / (1u64 << 30) as f64;
        let line = json!({
            "sweep": operation,
            "bytes": self.size,
            "batch": self.batch,
            "rounds": rounds.len(),
            "median_us": (median * 1e7).round() / 10.0,
            "gib_per_s": (gib / median * 1e4).round() / 1e4,
        });
        println!("{line}");
    }

    fn write(&self, drive: &mut Drive) -> Result<Vec<Duration>, Failure> {
        let targets = drive.targets(&self.typed())?;
        let objects = drive.side.objects(&self.sizes(), 21)?;
        let rounds = repeat(|| {
            let objects = objects.clone();
            let begun = Instant::now();
            let deadline = drive.deadline();
            let sent = block_on(drive.side.channel.write(
                objects,
                &drive.server,
                &targets,
                deadline,
            ));
            sent.into_result()?;
            Ok(begun.elapsed())
        })?;
        // All these rounds bring the same bytes.
        drop(objects);
        let others = drive.side.objects(&self.sizes(), 24)?;
        let sent = block_on(drive.side.channel.write(
            others,
            &drive.server,
            &targets,
            drive.deadline(),
        ));
        sent.into_result()?;
        drive.control.ask("verify 24")?;
        Ok(rounds)
    }

    fn read(&self, drive: &mut Drive) -> Result<Vec<Duration>, Failure> {
        let offered = drive.offer(22, &self.typed())?;
        let mut last = Vec::new();
        let rounds = repeat(|| {
            last.clear();
            let slots = self.slots(drive)?;
            let begun = Instant::now();
            last = drive.fetch(slots, &offered)?;
            Ok(begun.elapsed())
        })?;
        for (number, slot) in last.iter().enumerate() {
            check_value(22, number, slot.bytes())?;
        }
        Ok(rounds)
    }

    /// The server sends; time runs from the order to the last byte.
    fn send(&self, drive: &mut Drive) -> Result<Vec<Duration>, Failure> {
        drive.offer(23, &self.typed())?;
        let order = format!("send {} 7", drive.side.channel.id());
        let mut last = Vec::new();
        let rounds = repeat(|| {
            last.clear();
            let slots = self.slots(drive)?;
            let begun = Instant::now();
            drive.control.say(&order)?;
            let filled: Filled = block_on(drive.side.channel.receive(
                slots,
                &drive.server,
                7,
                drive.deadline(),
            ));
            last = filled.into_result()?;
            let took = begun.elapsed();
            drive.control.answer()?;
            Ok(took)
        })?;
        for (number, slot) in last.iter().enumerate() {
            check_value(23, number, slot.bytes())?;
        }
        Ok(rounds)
    }
}

/// One round that does not count, then as many as there is time for.
fn repeat(mut round: impl FnMut() -> Result<Duration, Failure>) -> Result<Vec<Duration>, Failure> {
    round()?;
    let begun = Instant::now();
    let mut rounds = vec![round()?];
    while begun.elapsed() < TIME && rounds.len() < ROUNDS {
        rounds.push(round()?);
    }
    Ok(rounds)
}
