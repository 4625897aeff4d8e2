//! A mutator of the committed seeds and of what it made of them, without coverage guidance.

use std::time::{Duration, Instant, UNIX_EPOCH};

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}

fn mutate(random: &mut Random, pool: &[Vec<u8>]) -> Vec<u8> {
    let mut data = pool[random.below(pool.len())].clone();
    for _ in 0..=random.below(8) {
        let at = random.below(data.len() + 1);
        match random.below(6) {
            0 => data.insert(at, random.next() as u8),
            1 if at < data.len() => drop(data.remove(at)),
            2 if at < data.len() => data[at] ^= 1 << random.below(8),
            3 if at < data.len() => {
                data[at] = [0, 1, 0x7f, 0x80, 0xc0, 0xdf, 0xff][random.below(7)];
            }
            4 => data.truncate(at),
            _ => {
                let other = &pool[random.below(pool.len())];
                let from = random.below(other.len() + 1);
                data.splice(at..at, other[from..].iter().copied());
            }
        }
    }
    data.truncate(4096);
    data
}

/// A function that takes an input and panics when a rule is broken.
pub(crate) type Target = fn(&[u8]);

/// Runs `TARGET SECONDS [SEED]` from the command line. The seed that it prints repeats the run.
pub(crate) fn main(targets: &[(&str, Target)]) {
    let names: Vec<&str> = targets.iter().map(|(name, _)| *name).collect();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [target, seconds, rest @ ..] = &args[..] else {
        eprintln!("usage: fuzz {} SECONDS [SEED]", names.join("|"));
        std::process::exit(2);
    };
    let Some((_, run)) = targets.iter().find(|(name, _)| name == target) else {
        eprintln!("unknown target {target:?}, expected {}", names.join(", "));
        std::process::exit(2);
    };
    let seconds: u64 = seconds.parse().expect("SECONDS is a number");
    let now = UNIX_EPOCH
        .elapsed()
        .map_or(1, |since| since.as_nanos() as u64);
    let seed = rest
        .first()
        .map_or(now, |seed| seed.parse().expect("SEED is a number"));
    println!("fuzz {target}: {seconds} s, seed {seed}");
    let mut pool: Vec<Vec<u8>> = vec![Vec::new(), (0..64).collect()];
    for entry in std::fs::read_dir(format!("fuzz/seeds/{target}"))
        .into_iter()
        .flatten()
        .flatten()
    {
        pool.extend(std::fs::read(entry.path()));
    }
    let seeds = pool.len();
    let mut random = Random(seed);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut runs = 0u64;
    while Instant::now() < until {
        for _ in 0..64 {
            let data = mutate(&mut random, &pool);
            run(&data);
            runs += 1;
            if pool.len() < seeds + 4096 {
                pool.push(data);
            } else {
                let at = seeds + random.below(4096);
                pool[at] = data;
            }
        }
    }
    println!("fuzz {target}: {runs} inputs, no rule broken");
}
