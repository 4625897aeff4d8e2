//! Copies within one process, as the machine does them at best.

use std::hint::black_box;
use std::time::{Duration, Instant};

use lmc_transfer::conformance::fill_value;

use crate::{Failure, Mover, Shape, Way, memory};

#[derive(Default)]
pub(crate) struct Copier {
    from: Vec<Vec<u8>>,
    to: Vec<Vec<u8>>,
    seed: u64,
}

impl Mover for Copier {
    fn prepare(&mut self, _: Way, shape: Shape, seed: u64) -> Result<(), Failure> {
        self.seed = seed;
        self.from = vec![vec![1; shape.len]; shape.count];
        self.to = vec![vec![2; shape.len]; shape.count];
        for (number, bytes) in self.from.iter_mut().enumerate() {
            fill_value(seed, number, bytes);
        }
        Ok(())
    }

    fn run(&mut self, batches: usize) -> Result<Vec<Duration>, Failure> {
        let copy = |_| {
            let started = Instant::now();
            for (from, to) in self.from.iter().zip(&mut self.to) {
                to.copy_from_slice(from);
                black_box(to);
            }
            started.elapsed()
        };
        Ok((0..batches).map(copy).collect())
    }

    fn verify(&mut self) -> Result<(), Failure> {
        memory::verify(self.to.iter().map(Vec::as_slice), self.seed)
    }

    fn other(&self) -> Option<u32> {
        None
    }
}
