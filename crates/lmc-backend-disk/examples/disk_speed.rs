//! Speed of the tier, for `cargo xtask bench disk`, which runs fio beside it.
//!
//! `disk_speed run FOLDER WHAT CHUNK DEPTH BYTES SECONDS [threads]`: `write`, `read` or `mixed` (half of
//! each), chunks of CHUNK bytes, DEPTH operations at a time, in a tier that holds BYTES of
//! chunks. A write counts when it is durable, a read when it is verified. With `threads` behind it,
//! without io_uring.
//!
//! `disk_speed race FOLDER CHUNK COUNT DEPTH`: stores COUNT chunks, DEPTH at a time, loads them in
//! another order, then loads them again, outside the time, and compares every byte.
//!
//! `disk_speed fill FOLDER COUNT CHUNK`: stores chunks and closes; with `kill` behind it, dies by
//! SIGKILL instead. `disk_speed open FOLDER`: opens the folder and says how long that took.
//!
//! FOLDER is emptied first. Prints one line of JSON.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lmc_backend::conformance::{Rng, block_on, store_batch, test_key};
use lmc_backend::{Backend, LoadItem, Loaded, NoEngine, StoreItem, Stored, WriteBackend};
use lmc_backend_disk::{DiskBackend, DiskConfig, DiskIo};
use lmc_memory::{
    Arena, ArenaConfig, Demand, Pool, PoolConfig, Prefault, ReservedSlot, SealedSlot, WrittenSlot,
};
use tokio::task::JoinSet;

type Failure = Box<dyn Error + Send + Sync>;

const USAGE: &str = "disk_speed run FOLDER WHAT CHUNK DEPTH BYTES SECONDS [threads] \
                     | race FOLDER CHUNK COUNT DEPTH | fill FOLDER COUNT CHUNK [kill] | open FOLDER";
const TIMEOUT: Duration = Duration::from_secs(120);

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        [
            "run",
            folder,
            what,
            chunk,
            depth,
            bytes,
            seconds,
            ref io @ ..,
        ] if io.len() <= 1 => {
            let io = match io {
                [] => DiskIo::Auto,
                ["threads"] => DiskIo::Threads,
                _ => return Err(USAGE.into()),
            };
            let plan = Plan {
                io,
                folder: folder.to_owned(),
                what: what.to_owned(),
                chunk: chunk.parse()?,
                depth: depth.parse()?,
                bytes: bytes.parse()?,
                time: Duration::from_secs_f64(seconds.parse()?),
            };
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            runtime.block_on(run(plan))
        }
        ["race", folder, chunk, count, depth] => {
            let runtime = tokio::runtime::Builder::new_current_thread().build()?;
            runtime.block_on(race(folder, chunk.parse()?, count.parse()?, depth.parse()?))
        }
        ["fill", folder, count, chunk] => fill(folder, count.parse()?, chunk.parse()?, false),
        ["fill", folder, count, chunk, "kill"] => {
            fill(folder, count.parse()?, chunk.parse()?, true)
        }
        ["open", folder] => open(folder),
        _ => Err(USAGE.into()),
    }
}

struct Plan {
    io: DiskIo,
    folder: String,
    what: String,
    chunk: u64,
    depth: u64,
    bytes: u64,
    time: Duration,
}

fn arena(bytes: u64) -> Result<Arc<Arena>, Failure> {
    let arena = ArenaConfig::anonymous(usize::try_from(bytes)?)
        .with_huge_pages(Demand::Auto)
        .with_prefault(Prefault::Background { threads: 2 })
        .build()?;
    while arena.prefault_progress().done < arena.prefault_progress().total {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(Arc::new(arena))
}

fn tier(
    folder: &str,
    bytes: u64,
    arena: &Arc<Arena>,
    io: DiskIo,
) -> Result<Arc<DiskBackend>, Failure> {
    // Space for chunks that are stored twice: segments are evicted whole.
    let config = DiskConfig::new([folder], 2 * bytes + (1 << 30))
        .with_keep_free(0)
        .with_new_drives()
        .with_segment_bytes(256 << 20)
        .with_io(io)
        .with_arena(Arc::clone(arena));
    Ok(Arc::new(config.open(&NoEngine::default())?))
}

/// CPU seconds of this process so far, kernel threads that work for it included.
fn cpu_seconds() -> f64 {
    // In ticks, behind the name, which may hold anything but `)`.
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = fields.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / 100.0
}

async fn store(tier: Arc<DiskBackend>, n: u64, slot: SealedSlot) -> Result<(), String> {
    let item = StoreItem::new(test_key(n), slot);
    let mut stored = tier.store(vec![item], Instant::now() + TIMEOUT);
    match stored.next().await {
        Some((_, Ok(Stored::Written))) => Ok(()),
        other => Err(format!("store of chunk {n}: {other:?}")),
    }
}

async fn load(tier: Arc<DiskBackend>, n: u64, slot: ReservedSlot) -> Result<WrittenSlot, String> {
    let item = LoadItem::new(test_key(n), slot);
    let mut loaded = tier.load(vec![item], Instant::now() + TIMEOUT);
    match loaded.next().await {
        Some((_, Loaded::Hit(slot))) => Ok(slot),
        other => Err(format!("load of chunk {n}: {other:?}")),
    }
}

/// One operation; the bytes that it moved.
async fn operate(
    tier: Arc<DiskBackend>,
    pool: Pool,
    n: u64,
    write: bool,
    len: u64,
) -> Result<u64, String> {
    let slot = pool.reserve(len).ok_or("the pool is too small")?;
    if write {
        // Whatever the slot held before: what a chunk is made of costs the drive the same.
        store(tier, n, slot.written().seal()).await?;
    } else {
        load(tier, n, slot).await?;
    }
    Ok(len)
}

async fn run(plan: Plan) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(&plan.folder);
    let len = plan.chunk;
    let pool_bytes = (plan.depth + 4) * len.next_multiple_of(4096);
    let arena = arena(pool_bytes)?;
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
    // No two blocks of the pool are alike, lest a clever drive saves them once.
    let mut rng = Rng::new(1);
    let mut slot = pool.reserve(pool_bytes).ok_or("an empty pool")?;
    for word in slot.bytes_mut().chunks_exact_mut(8) {
        word.copy_from_slice(&rng.next_u64().to_le_bytes());
    }
    drop(slot);
    let tier = tier(&plan.folder, plan.bytes, &arena, plan.io)?;
    let held = (plan.bytes / len).max(1);
    let mut work = JoinSet::new();
    let spawn = |work: &mut JoinSet<_>, n, write| {
        work.spawn(operate(Arc::clone(&tier), pool.clone(), n, write, len));
    };
    let mut next = 0;
    if plan.what != "write" {
        while next < held || !work.is_empty() {
            while (work.len() as u64) < plan.depth && next < held {
                spawn(&mut work, next, true);
                next += 1;
            }
            work.join_next().await.ok_or("nothing under way")???;
        }
    }
    let (mut bytes, begun, cpu) = (0, Instant::now(), cpu_seconds());
    let mut over = false;
    loop {
        while !over && (work.len() as u64) < plan.depth {
            let write = match plan.what.as_str() {
                "write" => true,
                "read" => false,
                _ => rng.below(2) == 0,
            };
            let n = if write { next } else { rng.below(held) };
            next += u64::from(write);
            spawn(&mut work, n, write);
            // As much is written as the tier shall hold, so that nothing is evicted.
            over = begun.elapsed() >= plan.time || next >= held + plan.bytes / len;
        }
        let Some(done) = work.join_next().await else {
            break;
        };
        bytes += done??;
    }
    let seconds = begun.elapsed().as_secs_f64();
    let cpu = cpu_seconds() - cpu;
    println!("{{\"bytes\": {bytes}, \"seconds\": {seconds}, \"cpu_seconds\": {cpu}}}");
    tier.close(Instant::now() + TIMEOUT).await?;
    fs::remove_dir_all(&plan.folder)?;
    Ok(())
}

/// Carries out one operation for each number, `depth` at a time. Returns seconds and CPU seconds.
async fn each<F>(
    numbers: &[u64],
    depth: usize,
    start: impl Fn(u64) -> F,
) -> Result<(f64, f64), Failure>
where
    F: Future<Output = Result<(), String>> + Send + 'static,
{
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    let mut numbers = numbers.iter();
    let mut work = JoinSet::new();
    loop {
        while work.len() < depth {
            let Some(&n) = numbers.next() else { break };
            work.spawn(start(n));
        }
        let Some(done) = work.join_next().await else {
            return Ok((begun.elapsed().as_secs_f64(), cpu_seconds() - cpu));
        };
        done??;
    }
}

async fn race(folder: &str, len: u64, count: u64, depth: u64) -> Result<(), Failure> {
    let _ = fs::remove_dir_all(folder);
    let arena = arena((2 * depth + 4) * len.next_multiple_of(4096))?;
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
    // Chunk n holds what its number modulo DEPTH says, as in disk_peer.py.
    let data = (0..depth).map(|seed| {
        let mut slot = pool.reserve(len)?;
        let mut rng = Rng::new(seed);
        for word in slot.bytes_mut().chunks_mut(8) {
            word.copy_from_slice(&rng.next_u64().to_le_bytes()[..word.len()]);
        }
        Some(slot.written().seal())
    });
    let data: Option<Vec<SealedSlot>> = data.collect();
    let data = data.ok_or("the pool is too small")?;
    let of = |n: u64| data[(n % depth) as usize].clone();
    let bytes = count * (len.next_multiple_of(4096) + 4096);
    let tier = tier(folder, bytes, &arena, DiskIo::Auto)?;
    let mut numbers: Vec<u64> = (0..count).collect();
    let at_once = usize::try_from(depth)?;
    let store = |n| store(Arc::clone(&tier), n, of(n));
    let written = each(&numbers, at_once, store).await?;
    let mut rng = Rng::new(1);
    for index in (1..numbers.len()).rev() {
        numbers.swap(index, rng.below(index as u64 + 1) as usize);
    }
    let load = |n| {
        let (tier, slot) = (Arc::clone(&tier), pool.reserve(len));
        async move { load(tier, n, slot.ok_or("the pool is too small")?).await }
    };
    let read = each(&numbers, at_once, |n| {
        let loaded = load(n);
        async { loaded.await.map(drop) }
    });
    let read = read.await?;
    let compare = |n| {
        let (loaded, wanted) = (load(n), of(n));
        async move {
            match loaded.await?.bytes() == wanted.bytes() {
                true => Ok(()),
                false => Err(format!("chunk {n} came back with other bytes")),
            }
        }
    };
    each(&numbers, at_once, compare).await?;
    let format = |(seconds, cpu): (f64, f64)| {
        let bytes = count * len;
        format!("{{\"bytes\": {bytes}, \"seconds\": {seconds}, \"cpu_seconds\": {cpu}}}")
    };
    let (written, read) = (format(written), format(read));
    println!("{{\"durable\": true, \"write\": {written}, \"read\": {read}}}");
    tier.close(Instant::now() + TIMEOUT).await?;
    fs::remove_dir_all(folder)?;
    Ok(())
}

fn fill(folder: &str, count: u64, chunk: u64, kill: bool) -> Result<(), Failure> {
    const AT_ONCE: u64 = 1024;
    let _ = fs::remove_dir_all(folder);
    let arena = arena(2 * AT_ONCE * chunk.next_multiple_of(4096))?;
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
    let bytes = count * (chunk.next_multiple_of(4096) + 4096);
    let tier = tier(folder, bytes, &arena, DiskIo::Auto)?;
    for first in (0..count).step_by(AT_ONCE as usize) {
        let item = |n| {
            let slot = pool.reserve(chunk)?;
            Some(StoreItem::new(test_key(n), slot.written().seal()))
        };
        let items: Option<Vec<_>> = (first..count.min(first + AT_ONCE)).map(item).collect();
        let items = items.ok_or("the pool is too small")?;
        for stored in store_batch(&*tier, items, Instant::now() + TIMEOUT) {
            stored?;
        }
    }
    if kill {
        // Nothing of this process is put in order.
        let this = std::process::id().to_string();
        std::process::Command::new("kill")
            .args(["-9", &this])
            .status()?;
        return Err("still alive".into());
    }
    block_on(tier.close(Instant::now() + TIMEOUT))?;
    println!("{{}}");
    Ok(())
}

fn open(folder: &str) -> Result<(), Failure> {
    let begun = Instant::now();
    let tier = DiskConfig::existing([folder])?.open(&NoEngine::default())?;
    let seconds = begun.elapsed().as_secs_f64();
    let chunks = tier.held().chunks;
    println!("{{\"chunks\": {chunks}, \"seconds\": {seconds}}}");
    Ok(())
}
