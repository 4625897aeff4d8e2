//! Measures gather and scatter against plain copies on the same cores in the same run.
//!
//! ```text
//! cargo xtask bench copy [threads] [MiB a side]
//! ```
//! Each line moves every byte of an engine's cache (POSIX shared memory, as vLLM's CPU worker
//! shares it) to or from slots of a pool in shared memory, chunk by chunk as a store or
//! retrieve of a long prompt does. `ratio` is against `copy_nonoverlapping` of the same bytes
//! between the same two memories, cut evenly among the same number of threads; both are the
//! best of the rounds, taken in turn so that a noisy neighbour disturbs both.

use std::error::Error;
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{
    ArenaConfig, CopyPlan, CopyPool, DType, KvGroup, KvMemory, KvOrder, KvSegments, KvTensor,
    MappedSegment, PagedKv, PlanRequest, Pool, PoolConfig, SealedSlot, SharedName,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const LAYERS: u64 = 32;
const ROUNDS: usize = 5;

/// A segment under /dev/shm that goes on drop.
struct Engine {
    name: SharedName,
    segment: Arc<MappedSegment>,
}

impl Engine {
    fn new(bytes: u64) -> Result<Self> {
        let name = SharedName::new(&format!("lmc_bench_kv_{}", std::process::id()))?;
        fs::write(name.path(), vec![1; bytes as usize])?;
        let segment = Arc::new(MappedSegment::open(&name, bytes)?);
        Ok(Self { name, segment })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.name.path());
    }
}

/// One line: the shape of vLLM's tensors within a block, and how chunks are made of blocks.
struct Case {
    label: &'static str,
    /// True for `[2, blocks, …]`, false for `[blocks, …]`.
    split: bool,
    /// Axes of a block.
    block: &'static [u64],
    block_tokens: u64,
    chunk_tokens: u64,
    scattered: bool,
}

/// Copies one range onto another with `threads` threads.
fn memcpy(to: &mut [u8], from: &[u8], threads: usize) -> Duration {
    let share = from.len().div_ceil(threads);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let mut parts = to.chunks_mut(share).zip(from.chunks(share));
        let own = parts.next();
        for (to, from) in parts {
            scope.spawn(move || to.copy_from_slice(from));
        }
        if let Some((to, from)) = own {
            to.copy_from_slice(from);
        }
    });
    start.elapsed()
}

/// The CPU's name and the load it was under when we came.
fn cpu() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load
        .split_whitespace()
        .next()
        .unwrap_or("unknown")
        .to_owned();
    format!(
        "{} (load {load})",
        name.map_or("an unknown CPU", |(_, name)| name)
    )
}

/// Describes an engine's cache as a registration does.
fn open(case: &Case, bytes: u64, segment: &Arc<MappedSegment>) -> Result<PagedKv> {
    let planes = if case.split { 2 } else { 1 };
    let block: u64 = case.block.iter().product();
    let blocks = bytes / 2 / LAYERS / planes / block;
    let mut shape = if case.split { vec![2] } else { Vec::new() };
    shape.push(blocks);
    shape.extend(case.block);
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len() - 1).rev() {
        strides[i] = strides[i + 1] * shape[i + 1];
    }
    let tensor = |layer| KvTensor {
        dtype: DType::BFloat16,
        shape: &shape,
        strides: &strides,
        storage_offset: layer * planes * blocks * block,
    };
    let tensors: Vec<_> = (0..LAYERS).map(tensor).collect();
    let order = match case.block {
        [_, tokens, _] if *tokens == case.block_tokens => KvOrder::HeadsFirst,
        _ => KvOrder::TokensFirst,
    };
    let group = KvGroup::describe(&tensors, order, None, case.chunk_tokens as u32)?;
    let segments: Vec<Arc<dyn KvMemory>> = vec![Arc::clone(segment) as _];
    Ok(group.open(&[0; LAYERS as usize], KvSegments::Host(segments))?)
}

/// Block ids in order, or each far from the one before it.
fn block_table(blocks: u32, scattered: bool) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..blocks).collect();
    if scattered {
        let mut state = 0x9e37_79b9_u64;
        for i in (1..ids.len()).rev() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ids.swap(i, (state >> 33) as usize % (i + 1));
        }
    }
    ids
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let cores = std::thread::available_parallelism()?.get();
    let threads = args.next().map_or(Ok(cores), |text| text.parse())?;
    let mib: u64 = args.next().map_or(Ok(512), |text| text.parse())?;
    let bytes = mib << 20;
    println!(
        "{threads} threads on {cores} cores of {}, {mib} MiB a side, {LAYERS} layers of bfloat16, \
         best of {ROUNDS} rounds",
        cpu()
    );

    let engine = Engine::new(bytes)?;
    let arena = Arc::new(
        ArenaConfig::shared(format!("lmc_bench_{}", std::process::id()), bytes as usize).build()?,
    );
    let pool = Pool::new(arena, PoolConfig::default())?;
    // SAFETY: the segment is this program's own, and nothing writes to it while this slice is
    // in use: it is only read by the plain copies below, between gathers and scatters.
    let source = || unsafe {
        std::slice::from_raw_parts(engine.segment.base_ptr().as_ptr(), bytes as usize)
    };
    let mut whole = pool.reserve(bytes).ok_or("an empty pool")?;
    whole.bytes_mut().fill(2);
    drop(whole);

    let copies = CopyPool::new(threads - 1)?;
    println!("large copies: {:?}", CopyPool::large_copies());
    println!(
        "{:<34} {:>6} {:>6} {:>5} {:>9} {:>8} {:>8} {:>8} {:>6} {:>6}",
        "engine's layout",
        "block",
        "chunk",
        "ids",
        "copies/MiB",
        "memcpy",
        "gather",
        "scatter",
        "ratio",
        "ratio"
    );
    for case in cases() {
        let paged = open(&case, bytes, &engine.segment)?;
        let blocks = paged.blocks();
        let table = block_table(blocks, case.scattered);
        let chunks = u64::from(blocks) / paged.blocks_per_chunk();
        if chunks == 0 {
            println!(
                "{:<34} {:>6} {:>6}  too large for {mib} MiB",
                case.label, case.block_tokens, case.chunk_tokens
            );
            continue;
        }
        let starts: Vec<u64> = (0..chunks).map(|i| i * paged.blocks_per_chunk()).collect();
        // A store of eight chunks at a time, as a long prompt brings them.
        let plan = |starts: &[u64]| {
            CopyPlan::new(
                &paged,
                &PlanRequest {
                    block_ids: &table,
                    first_blocks: starts,
                    skip_blocks: 0,
                    null_block: None,
                },
            )
        };
        let moved = (chunks * paged.chunk_bytes()) as usize;
        let (mut plain, mut gather, mut scatter) = (Duration::MAX, Duration::MAX, Duration::MAX);
        let mut copies_made = 0;
        for _ in 0..ROUNDS {
            let mut whole = pool.reserve(moved as u64).ok_or("an empty pool")?;
            plain = plain.min(memcpy(whole.bytes_mut(), &source()[..moved], threads));
            drop(whole);

            let mut sealed: Vec<SealedSlot> = Vec::new();
            let (mut gathering, mut scattering) = (Duration::ZERO, Duration::ZERO);
            for starts in starts.chunks(8) {
                let mut slots: Vec<_> = starts
                    .iter()
                    .map(|_| {
                        pool.reserve(paged.chunk_bytes())
                            .ok_or("memory for all chunks")
                    })
                    .collect::<std::result::Result<_, _>>()?;
                let start = Instant::now();
                let plan = plan(starts)?;
                let mut bytes: Vec<_> = slots.iter_mut().map(|slot| slot.bytes_mut()).collect();
                copies.gather(&plan, &mut bytes)?;
                gathering += start.elapsed();
                copies_made = plan.copies() * (1 << 20) / plan.bytes() as usize;
                sealed.extend(slots.into_iter().map(|slot| slot.written().seal()));
            }
            for (starts, slots) in starts.chunks(8).zip(sealed.chunks(8)) {
                let start = Instant::now();
                let bytes: Vec<_> = slots.iter().map(|slot| slot.bytes()).collect();
                copies.scatter(&plan(starts)?, &bytes)?;
                scattering += start.elapsed();
            }
            (gather, scatter) = (gather.min(gathering), scatter.min(scattering));
        }
        let rate = |time: Duration| moved as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{:<34} {:>6} {:>6} {:>5} {:>10} {:>8.2} {:>8.2} {:>8.2} {:>6.2} {:>6.2}",
            case.label,
            case.block_tokens,
            case.chunk_tokens,
            if case.scattered { "mixed" } else { "order" },
            copies_made,
            rate(plain),
            rate(gather),
            rate(scatter),
            rate(gather) / rate(plain),
            rate(scatter) / rate(plain),
        );
    }
    println!("rates in GB/s; ratios of gather and scatter to memcpy");
    Ok(())
}

fn cases() -> Vec<Case> {
    let case = |label, split, block, block_tokens, chunk_tokens, scattered| Case {
        label,
        split,
        block,
        block_tokens,
        chunk_tokens,
        scattered,
    };
    let nhd = "[2, blocks, tokens, heads, 128]";
    let hnd = "[2, blocks, heads, tokens, 128]";
    let packed = "[blocks, heads, tokens, 2x128]";
    let small = "[blocks, heads, tokens, 2x32]";
    let mla = "[blocks, tokens, 576]";
    vec![
        case(nhd, true, &[16, 8, 128], 16, 256, false),
        case(nhd, true, &[16, 8, 128], 16, 256, true),
        case(nhd, true, &[128, 8, 128], 128, 256, true),
        case(nhd, true, &[16, 8, 128], 16, 16, true),
        case(hnd, true, &[8, 16, 128], 16, 256, true),
        case(packed, false, &[8, 16, 256], 16, 256, true),
        case(packed, false, &[8, 128, 256], 128, 256, true),
        case(small, false, &[2, 128, 64], 128, 256, true),
        case(small, false, &[4, 16, 64], 16, 256, true),
        case(mla, false, &[16, 576], 16, 256, true),
        case(mla, false, &[64, 576], 64, 256, true),
    ]
}
