//! GPU memory against the driver of `lmc-fake-cuda`.
//!
//! A test runs itself again, in a process whose loader finds that driver. There an engine lies beside
//! the code under test.

mod copies;
mod faults;
mod library;
mod life;
mod own;

use std::sync::Arc;
use std::thread;

use lmc_fake_cuda::{Engine, Live, Machine, UUIDS};
use lmc_testkit::{own_test, until};

use super::{CudaError, DeviceMemory, Gpu, Gpus, SharedMemory};
use crate::copy::testing::{self, Format, SPLIT, Sizes, marked};
use crate::{
    Arena, ArenaConfig, CopyPlan, DType, KvSegments, PagedError, PagedKv, PlanRequest, Pool,
    PoolConfig, ReservedSlot,
};

/// Bytes around each segment, so that segments begin at odd addresses.
const BEFORE: usize = 61;
const AFTER: usize = 77;

/// Runs `inside` in a process with a machine that has this number of devices. `test` is the test that
/// calls this function.
fn with_machine(devices: usize, test: impl Fn(), inside: impl FnOnce(&Machine)) {
    Machine::in_own_process(devices, own_test(test), inside);
}

/// Memory of the one engine of a test.
fn shared(handle: [u8; 64]) -> SharedMemory {
    SharedMemory { handle, engine: 1 }
}

fn arena() -> Arc<Arena> {
    Arc::new(ArenaConfig::anonymous(1 << 20).build().unwrap())
}

/// Returns what this process has at the driver.
fn live(machine: &Machine) -> Live {
    machine.live(std::process::id())
}

#[track_caller]
fn assert_given_back(machine: &Machine) {
    until("everything is given back", || {
        live(machine) == Live::default()
    });
}

#[track_caller]
fn until_registered(gpus: &Gpus, arena: &Arena) {
    until("the pool is registered", || {
        gpus.pinned_bytes() == arena.len() as u64
    });
}

/// A slot with most of an arena's bytes.
fn large_slot(arena: &Arc<Arena>) -> ReservedSlot {
    let pool = Pool::new(Arc::clone(arena), PoolConfig::default()).unwrap();
    pool.reserve(900 << 10).unwrap()
}

/// Opens the first GPU and a cache there once the pool is registered. Returns both, the plan of a copy
/// of three chunks, and memory of the pool for them.
fn copying(machine: &Machine) -> (Arc<Gpu>, Twin, CopyPlan, ReservedSlot) {
    let arena = arena();
    let gpus = Gpus::new(Arc::clone(&arena));
    let gpu = gpus.open(UUIDS[0]).unwrap();
    until_registered(&gpus, &arena);
    let twin = Twin::new(machine, 0);
    let plan = plan(&twin.paged(&gpu, 4));
    (gpu, twin, plan, large_slot(&arena))
}

/// Cuts chunks out of memory, at odd addresses and with bytes in between.
fn cut(mut bytes: &mut [u8], len: usize, count: usize) -> Vec<&mut [u8]> {
    let mut chunks = Vec::new();
    for _ in 0..count {
        let (chunk, rest) = bytes[13..].split_at_mut(len);
        chunks.push(chunk);
        bytes = rest;
    }
    chunks
}

/// Asserts that bytes around the chunks of [`cut`] have one value.
fn assert_untouched(bytes: &[u8], len: usize, count: usize, value: u8) {
    let mut at = 0;
    for _ in 0..count {
        assert!(bytes[at..at + 13].iter().all(|&byte| byte == value));
        at += 13 + len;
    }
    assert!(bytes[at..].iter().all(|&byte| byte == value));
}

/// Sizes of a cache with blocks of 6 KiB: chunks of some need several launches.
const SIZES: Sizes = Sizes {
    layers: 3,
    blocks: 12,
    block_tokens: 16,
    heads: 3,
    element: 64,
    padding: 0,
    one_segment: false,
};

/// A cache on a GPU, and the same one in host memory.
struct Twin {
    host: testing::Engine,
    engine: Engine,
    addresses: Vec<usize>,
}

impl Twin {
    fn new(machine: &Machine, device: usize) -> Self {
        Self::of(machine, device, SPLIT, DType::BFloat16, SIZES)
    }

    fn of(machine: &Machine, device: usize, format: Format, dtype: DType, sizes: Sizes) -> Self {
        let host = testing::Engine::new(format, dtype, sizes);
        let engine = Engine::new(machine, device);
        let allocate = |segment: &testing::Segment| {
            let bytes = [vec![0xbb; BEFORE], segment.bytes(), vec![0xbb; AFTER]].concat();
            engine.allocate(&bytes)
        };
        let addresses = host.segments.iter().map(allocate).collect();
        Self {
            host,
            engine,
            addresses,
        }
    }

    /// Opens segment `number` as a worker's registration does.
    fn memory(&self, gpu: &Arc<Gpu>, number: usize) -> super::driver::Result<DeviceMemory> {
        let (handle, offset) = self.engine.handle(self.addresses[number] + BEFORE);
        let len = self.host.segments[number].mapped.len();
        gpu.memory(shared(handle), offset as u64, len, None)
    }

    fn segments(&self, gpu: &Arc<Gpu>) -> super::driver::Result<KvSegments> {
        let memory = |number| Ok(Arc::new(self.memory(gpu, number)?));
        let memories = (0..self.addresses.len()).map(memory);
        Ok(KvSegments::Device(memories.collect::<Result<_, _>>()?))
    }

    fn open(&self, segments: KvSegments, chunk_blocks: u64) -> Result<PagedKv, PagedError> {
        let numbers: Vec<_> = self.host.tensors.iter().map(|t| t.segment).collect();
        let group = self
            .host
            .describe(chunk_blocks * self.host.sizes.block_tokens);
        group?.open(&numbers, segments)
    }

    fn paged(&self, gpu: &Arc<Gpu>, chunk_blocks: u64) -> PagedKv {
        self.open(self.segments(gpu).unwrap(), chunk_blocks)
            .unwrap()
    }

    /// The bytes of a segment on the GPU, around which nothing may have changed.
    fn bytes(&self, number: usize) -> Vec<u8> {
        let len = self.host.segments[number].mapped.len() as usize;
        let mut bytes = self
            .engine
            .read(self.addresses[number], BEFORE + len + AFTER);
        assert!(bytes.drain(BEFORE + len..).all(|byte| byte == 0xbb));
        assert!(bytes.drain(..BEFORE).all(|byte| byte == 0xbb));
        bytes
    }

    /// Gives both caches the same bytes.
    fn fill(&self, seed: u64) {
        for (segment, &address) in self.host.segments.iter().zip(&self.addresses) {
            let bytes = marked(seed, segment.mapped.len() as usize);
            segment.fill(&bytes);
            self.engine.write(address + BEFORE, &bytes);
        }
    }
}

/// A plan for chunks one after another, which takes every block out of order.
fn plan(paged: &PagedKv) -> CopyPlan {
    let table: Vec<u32> = (0..paged.blocks()).rev().collect();
    let chunks = u64::from(paged.blocks()) / paged.blocks_per_chunk();
    let starts: Vec<_> = (0..chunks)
        .map(|chunk| chunk * paged.blocks_per_chunk())
        .collect();
    let request = PlanRequest {
        block_ids: &table,
        first_blocks: &starts,
        skip_blocks: 0,
        null_block: None,
    };
    CopyPlan::new(paged, &request).unwrap()
}

/// Runs `action` on a thread while the GPU begins no work, and lets the GPU go on once the thread waits
/// for it. The thread must not end before.
#[track_caller]
fn while_held<T: Send>(machine: &Machine, action: impl FnOnce() -> T + Send) -> thread::Result<T> {
    let asked = || machine.calls("cuEventQuery") + machine.calls("cuStreamQuery");
    machine.hold(0);
    thread::scope(|scope| {
        let before = asked();
        let thread = scope.spawn(action);
        until("the thread waits", || {
            thread.is_finished() || asked() >= before + 300
        });
        let ended = thread.is_finished();
        machine.resume(0);
        assert!(!ended, "it ended while the GPU had work of it");
        thread.join()
    })
}
