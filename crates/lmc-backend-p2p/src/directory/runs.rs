//! Selection of the members that together have the longest prefix of a prompt. No I/O and no clock.

use super::message::MAX_CANDIDATES;

/// Most members that are compared for one prompt.
const MAX_RUNS: usize = 16;

/// Consecutive chunks of a prompt that a member has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    number: u16,
    start: usize,
    /// Position after the last chunk.
    end: usize,
}

/// Runs of a prompt whose chunks are added one after the other.
pub(super) struct Runs {
    runs: Vec<Run>,
    /// For each member number, one more than the index of its last run; 0 if it has none.
    of_number: Vec<u8>,
    /// Numbers that may begin a run with the current chunk.
    fresh: Vec<u16>,
}

impl Runs {
    pub(super) fn new(numbers: usize) -> Self {
        Self {
            runs: Vec::new(),
            of_number: vec![0; numbers],
            fresh: Vec::new(),
        }
    }

    /// Adds the numbers that have the chunk `at`. Returns false if there are none.
    pub(super) fn note(
        &mut self,
        at: usize,
        holders: impl Iterator<Item = u16>,
        may_begin: impl Fn(u16) -> bool,
    ) -> bool {
        self.fresh.clear();
        let mut any = false;
        for number in holders {
            let run = usize::from(self.of_number[usize::from(number)]);
            let run = run.checked_sub(1).map(|run| &mut self.runs[run]);
            match run.filter(|run| run.end == at) {
                Some(run) => {
                    run.end += 1;
                    any = true;
                }
                None if self.fresh.len() < MAX_RUNS && may_begin(number) => self.fresh.push(number),
                None => {}
            }
        }
        if self.runs.len() + self.fresh.len() > MAX_RUNS {
            self.forget_ended(at + 1);
        }
        let most = MAX_RUNS.saturating_sub(self.runs.len());
        for &number in self.fresh.iter().take(most) {
            let (start, end) = (at, at + 1);
            self.runs.push(Run { number, start, end });
            self.of_number[usize::from(number)] = self.runs.len() as u8;
            any = true;
        }
        any
    }

    /// Drops the runs that ended before `end`, except the best and a few that have the first chunk.
    fn forget_ended(&mut self, end: usize) {
        let best = self.cover();
        let mut others = 0;
        self.runs
            .iter()
            .for_each(|run| self.of_number[usize::from(run.number)] = 0);
        self.runs.retain(|run| {
            let other = run.start == 0 && run.end < end;
            others += usize::from(other);
            run.end == end || best.contains(run) || (other && others <= MAX_CANDIDATES)
        });
        for (index, run) in self.runs.iter().enumerate() {
            self.of_number[usize::from(run.number)] = index as u8 + 1;
        }
    }

    /// Returns a few runs that together have the longest prefix.
    fn cover(&self) -> Vec<Run> {
        let mut chosen: Vec<Run> = Vec::new();
        let mut covered = 0;
        while chosen.len() < MAX_CANDIDATES {
            let next = self.runs.iter().filter(|run| run.start <= covered);
            // Of equally long runs the first, which the asker's turn has chosen.
            let next = next.rev().max_by_key(|run| run.end);
            let Some(next) = next.filter(|run| run.end > covered) else {
                break;
            };
            chosen.push(*next);
            covered = next.end;
        }
        chosen
    }

    /// Returns the numbers that together have the longest prefix, then other numbers that have a prefix.
    pub(super) fn best(mut self) -> Vec<u16> {
        let mut chosen: Vec<u16> = self.cover().iter().map(|run| run.number).collect();
        chosen.dedup();
        self.runs.sort_by_key(|run| std::cmp::Reverse(run.end));
        for run in self.runs.iter().filter(|run| run.start == 0) {
            if chosen.len() < MAX_CANDIDATES && !chosen.contains(&run.number) {
                chosen.push(run.number);
            }
        }
        chosen
    }
}
