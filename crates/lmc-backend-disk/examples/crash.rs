//! The child of `cargo xtask crash-loop`: writes until it is killed, or checks what a kill left.
//!
//! `crash write FOLDER FIRST`: stores chunks numbered from FIRST on and removes some, from
//! several threads. It prints a line before and after each step: `s N` before chunk N is stored, `S N`
//! when the tier has acknowledged the store, `r N` before the chunk is removed, `R N` when the tier has
//! acknowledged the removal. Ends only by a signal.
//!
//! `crash check FOLDER`: reads such lines from its standard input and checks every chunk that
//! they name, byte for byte. Ends with 1 when a chunk that was acknowledged is missing, when one
//! whose removal was acknowledged is there, or when any byte is wrong.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{self, BufRead, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lmc_backend::conformance::{
    Rng, block_on, check_value, fill_value, load_batch, store_batch, test_key,
};
use lmc_backend::{LoadItem, Loaded, NoEngine, StoreItem, Stored, WriteBackend};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskIo};
use lmc_memory::{ArenaConfig, Pool, PoolConfig};

const SIZE: u64 = 3 << 30;
/// Chunks are one of these sizes, by their number.
const SIZES: [u64; 4] = [5_000, 64 << 10, 200_000, 1 << 20];
const WRITERS: u64 = 4;
/// Bytes that one run writes before it rests, so that nothing is ever evicted.
const MOST: u64 = 128 << 20;
const TIMEOUT: Duration = Duration::from_secs(60);

type Failure = Box<dyn Error + Send + Sync>;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let outcome = match args[..] {
        ["write", folder, first] => write(folder, first),
        ["check", folder] => check(folder),
        _ => Err("crash write FOLDER FIRST | crash check FOLDER".into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crash: {error}");
            ExitCode::FAILURE
        }
    }
}

fn open(folder: &str, pool: &Pool) -> Result<DiskBackend, Failure> {
    let io = match std::env::var("LMC_CRASH_IO").as_deref() {
        Ok("threads") => DiskIo::Threads,
        _ => DiskIo::Auto,
    };
    let config = DiskConfig::new([folder], SIZE)
        .with_keep_free(0)
        .with_new_drives()
        .with_segment_bytes(64 << 20)
        .with_io(io)
        .with_arena(Arc::clone(pool.arena()));
    Ok(config.open(&NoEngine::default())?)
}

fn pool() -> Result<Pool, Failure> {
    let arena = ArenaConfig::anonymous(64 << 20).build()?;
    Ok(Pool::new(Arc::new(arena), PoolConfig::default())?)
}

fn len(n: u64) -> u64 {
    SIZES[(n % SIZES.len() as u64) as usize]
}

/// Prints a line in one call, so that the line is there whole or not at all.
fn tell(what: char, n: u64) -> io::Result<()> {
    let line = format!("{what} {n}\n");
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    out.flush()
}

fn write(folder: &str, first: &str) -> Result<(), Failure> {
    let first: u64 = first.parse()?;
    let pool = pool()?;
    let tier = open(folder, &pool)?;
    let (next, written) = (AtomicU64::new(first), AtomicU64::new(0));
    thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let (tier, pool, next, written) = (&tier, &pool, &next, &written);
                scope.spawn(move || writer_loop(tier, pool, first + writer, next, written))
            })
            .collect();
        let ends = writers.into_iter().map(|writer| writer.join());
        for end in ends {
            end.map_err(|_| "a writer panicked")??;
        }
        Ok(())
    })
}

fn writer_loop(
    tier: &DiskBackend,
    pool: &Pool,
    seed: u64,
    next: &AtomicU64,
    written: &AtomicU64,
) -> Result<(), Failure> {
    let mut rng = Rng::new(seed);
    let mut mine = Vec::new();
    loop {
        let deadline = Instant::now() + TIMEOUT;
        let numbers: Vec<u64> = (0..1 + rng.below(8))
            .map(|_| next.fetch_add(1, Ordering::Relaxed))
            .collect();
        let mut items = Vec::new();
        for &n in &numbers {
            tell('s', n)?;
            let mut slot = pool.reserve(len(n)).ok_or("the pool is too small")?;
            fill_value(&test_key(n), slot.bytes_mut());
            items.push(StoreItem::new(test_key(n), slot.written().seal()));
        }
        for (stored, &n) in store_batch(tier, items, deadline).iter().zip(&numbers) {
            match stored {
                Ok(Stored::Written) => tell('S', n)?,
                other => return Err(format!("chunk {n}: {other:?}").into()),
            }
            written.fetch_add(len(n), Ordering::Relaxed);
            mine.push(n);
        }
        while rng.below(4) == 0 && !mine.is_empty() {
            let n = mine.swap_remove(rng.below(mine.len() as u64) as usize);
            tell('r', n)?;
            match block_on(tier.remove(&[test_key(n)], deadline))[..] {
                [Ok(true)] => tell('R', n)?,
                ref other => return Err(format!("removal of {n}: {other:?}").into()),
            }
        }
        while written.load(Ordering::Relaxed) > MOST {
            thread::sleep(Duration::from_millis(50));
        }
    }
}

fn check(folder: &str) -> Result<(), Failure> {
    let mut said: BTreeMap<u64, char> = BTreeMap::new();
    for line in io::stdin().lock().lines() {
        let line = line?;
        let (what, n) = line
            .split_once(' ')
            .ok_or("a line is not of `crash write`")?;
        let what = what
            .chars()
            .next()
            .ok_or("a line is not of `crash write`")?;
        said.insert(n.parse()?, what);
    }
    let pool = pool()?;
    let tier = open(folder, &pool)?;
    let (mut there, mut unsure) = (0, 0);
    for (n, what) in said {
        let slot = pool.reserve(len(n)).ok_or("the pool is too small")?;
        let item = LoadItem::new(test_key(n), slot);
        let loaded = load_batch(&tier, vec![item], Instant::now() + TIMEOUT);
        let found = match loaded.into_iter().next() {
            Some(Loaded::Hit(slot)) => {
                let slot = slot.seal();
                check_value(&test_key(n), slot.bytes()).map_err(|e| format!("chunk {n}: {e:?}"))?;
                true
            }
            Some(Loaded::Miss(_)) => false,
            other => return Err(format!("chunk {n}: {other:?}").into()),
        };
        match (what, found) {
            ('S', false) => return Err(format!("chunk {n} was acknowledged and is gone").into()),
            ('R', true) => return Err(format!("chunk {n} was removed and is there").into()),
            ('S', true) => there += 1,
            ('R', false) => {}
            _ => unsure += 1,
        }
    }
    let stats = tier.stats();
    if stats.bad_headers + stats.bad_payloads + stats.evicted > 0 {
        return Err(format!("damaged or evicted chunks: {stats:?}").into());
    }
    println!("{there} acknowledged chunks whole, {unsure} unsure at the kill");
    Ok(())
}
