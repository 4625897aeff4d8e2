//! An engine in the test process: its scheduler's and its worker's adapter, and the worker's memory.

use std::collections::HashSet;
use std::ops::Range;
use std::time::{Duration, Instant};

use lmc_key::ChunkHash;
use lmc_vllm_adapter::RequestConfigs;
use lmc_vllm_adapter::adapters::{
    Endpoint, EngineDescription, Finished, KvLayers, KvOrder, LayerGroup, LayerTensor, LoadStoreOp,
    Prompt, SchedulerAdapter, Timeouts, WorkerAdapter,
};

use super::{CHUNK, Server, prompt};

pub(crate) const LAYERS: usize = 3;
pub(crate) const HEADS: usize = 2;
pub(crate) const BLOCK: usize = 4;
pub(crate) const HEAD: usize = 8;
pub(crate) const BLOCKS: usize = 64;
/// Elements of one layer: `[2, BLOCKS, HEADS, BLOCK, HEAD]`.
pub(crate) const LAYER: usize = 2 * BLOCKS * HEADS * BLOCK * HEAD;
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Timeouts for tests of other things than a busy machine.
pub(crate) const PATIENT: Timeouts = Timeouts {
    start: TIMEOUT,
    answer: TIMEOUT,
    ping: TIMEOUT,
};

pub(crate) fn engine(identity: &str, hash_mode: bool) -> EngineDescription {
    EngineDescription {
        model: "test/llama".to_owned(),
        world_size: 1,
        num_kv_readers: 1,
        identity: identity.to_owned(),
        hash_mode,
        block_size: BLOCK as u32,
        tails: true,
    }
}

pub(crate) fn endpoint(server: &Server) -> Endpoint {
    format!("tcp://{}", server.address)
        .parse()
        .expect("an address")
}

/// An engine: its scheduler, its worker, and the paged memory of the worker.
pub(crate) struct Engine {
    pub(crate) scheduler: SchedulerAdapter,
    pub(crate) worker: WorkerAdapter,
    pub(crate) memory: Vec<Vec<f32>>,
}

impl Engine {
    pub(crate) fn start(server: &Server, identity: &str, hash_mode: bool) -> Self {
        Self::at(&endpoint(server), engine(identity, hash_mode))
    }

    pub(crate) fn at(endpoint: &Endpoint, engine: EngineDescription) -> Self {
        Self::with(endpoint, engine, PATIENT)
    }

    pub(crate) fn with(endpoint: &Endpoint, engine: EngineDescription, timeouts: Timeouts) -> Self {
        let scheduler = SchedulerAdapter::start_with(endpoint.clone(), engine.clone(), timeouts);
        let worker = WorkerAdapter::start_with(endpoint.clone(), engine, 0, 1, timeouts);
        let worker = worker.expect("a worker");
        let mut memory: Vec<Vec<f32>> = (0..LAYERS).map(|_| vec![0.0; LAYER]).collect();
        worker
            .register_kv_caches(layers(&mut memory))
            .expect("a known layout");
        Self {
            scheduler: scheduler.expect("a scheduler"),
            worker,
            memory,
        }
    }

    /// Writes the content of a prompt's chunk into blocks, or compares it.
    pub(crate) fn content(&mut self, seed: u32, blocks: &[u32], first: usize, check: bool) -> bool {
        content(&mut self.memory, seed, blocks, first, check)
    }

    /// Looks a prompt up and waits for the result, in tokens.
    pub(crate) fn lookup(&self, request: &str, prompt: &Prompt) -> u64 {
        self.lookup_of(request, prompt, "")
    }

    pub(crate) fn lookup_of(&self, request: &str, prompt: &Prompt, salt: &str) -> u64 {
        let configs = RequestConfigs::default();
        (self.scheduler).maybe_submit_lookup_request(request, prompt, salt, &configs);
        let found = until(|| self.scheduler.check_lookup_result(request));
        self.scheduler.cleanup_lookup_result(request);
        found
    }

    pub(crate) fn store(
        &mut self,
        request: &str,
        seed: u32,
        prompt: &Prompt,
        chunks: Range<usize>,
        at: u32,
    ) {
        let op = op(request, prompt, chunks.clone(), at);
        self.content(
            seed,
            &op.block_ids[0].clone(),
            chunks.start * CHUNK / BLOCK,
            false,
        );
        self.worker.submit_store_request(op);
        let finished = self.finished(&[request]);
        assert_eq!(finished.stores, HashSet::from([request.to_owned()]));
    }

    pub(crate) fn load(
        &mut self,
        request: &str,
        prompt: &Prompt,
        chunks: Range<usize>,
        at: u32,
    ) -> bool {
        self.worker
            .submit_retrieve_request(op(request, prompt, chunks, at));
        finished_loads(self, request);
        self.worker.get_block_ids_with_load_errors().is_empty()
    }

    /// Waits until something has finished.
    pub(crate) fn finished(&self, named: &[&str]) -> Finished {
        let mut named: Vec<String> = named.iter().map(|&name| name.to_owned()).collect();
        until(|| {
            let finished = self.worker.get_finished(named.drain(..));
            (finished != Finished::default()).then_some(finished)
        })
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.worker.shutdown();
    }
}

/// Writes the content of a prompt's chunk into blocks of a paged memory, or compares it.
pub(crate) fn content(
    memory: &mut [Vec<f32>],
    seed: u32,
    blocks: &[u32],
    first: usize,
    check: bool,
) -> bool {
    let mut same = true;
    for (layer, memory) in memory.iter_mut().enumerate() {
        for (index, &block) in blocks.iter().enumerate() {
            for plane in 0..2 {
                let block_len = HEADS * BLOCK * HEAD;
                let start = plane * LAYER / 2 + block as usize * block_len;
                for (at, element) in memory[start..start + block_len].iter_mut().enumerate() {
                    let mark = (seed as usize * 131 + (first + index) * 17 + layer) * 4096;
                    let expected = (mark + plane * block_len + at) as f32;
                    match check {
                        true => same &= *element == expected,
                        false => *element = expected,
                    }
                }
            }
        }
    }
    same
}

/// Describes the paged memory of a worker, which must outlive it.
pub(crate) fn layers(memory: &mut [Vec<f32>]) -> KvLayers {
    layers_at(memory.iter_mut().map(|layer| layer.as_mut_ptr().addr()))
}

/// Describes the paged memory of a worker by the addresses of its layers.
pub(crate) fn layers_at(addresses: impl Iterator<Item = usize>) -> KvLayers {
    described(vec![group_at(addresses)])
}

/// Describes a group of layers by their addresses.
pub(crate) fn group_at(addresses: impl Iterator<Item = usize>) -> LayerGroup {
    let tensor = |data: usize| LayerTensor {
        data,
        shape: vec![2, BLOCKS as u64, HEADS as u64, BLOCK as u64, HEAD as u64],
        strides: vec![
            (LAYER / 2) as u64,
            (HEADS * BLOCK * HEAD) as u64,
            (BLOCK * HEAD) as u64,
            HEAD as u64,
            1,
        ],
        dtype: "float32".to_owned(),
    };
    LayerGroup {
        tensors: addresses.map(tensor).collect(),
        window: None,
    }
}

/// Describes groups of layers in the paged memory of a worker.
pub(crate) fn described(groups: Vec<LayerGroup>) -> KvLayers {
    // SAFETY: the memory outlives the worker, which is shut down first, and tests look at it while
    // nothing is copied, or by atomics, whose values they then do not rely on.
    unsafe { KvLayers::new(groups, KvOrder::HeadsFirst, BLOCK as u32) }
}

pub(crate) fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        if let Some(value) = look() {
            return value;
        }
        assert!(Instant::now() < deadline, "timeout");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn blocks(chunks: usize, at: u32) -> Vec<u32> {
    // Scattered, so that no copy is one run by luck.
    (0..(chunks * CHUNK / BLOCK) as u32)
        .map(|index| (at + index * 3) % BLOCKS as u32)
        .collect()
}

pub(crate) fn op(request: &str, prompt: &Prompt, chunks: Range<usize>, at: u32) -> LoadStoreOp {
    LoadStoreOp {
        request_id: request.to_owned(),
        prompt: prompt.clone(),
        tokens: chunks.start * CHUNK..chunks.end * CHUNK,
        block_ids: vec![blocks(chunks.len(), at)],
        skip_first_n_tokens: 0,
        cache_salt: String::new(),
        configs: RequestConfigs::default(),
        store_number: None,
    }
}

pub(crate) fn tokens(seed: u32, chunks: usize) -> Prompt {
    Prompt::Tokens(prompt(seed, chunks * CHUNK + 3).into())
}

pub(crate) fn hashes(seed: u8, chunks: usize) -> Prompt {
    let hash = |chunk| ChunkHash::new([seed.wrapping_mul(31).wrapping_add(chunk); 32]);
    Prompt::Chunks((0..chunks as u8).map(hash).collect())
}

/// Hash of a block of a prompt.
pub(crate) fn hash_of(seed: u8, block: usize) -> ChunkHash {
    let mut hash = [seed; 32];
    hash[0] = block as u8;
    ChunkHash::new(hash)
}

/// Waits until the loads of a request have ended.
pub(crate) fn finished_loads(engine: &Engine, request: &str) {
    let finished = engine.finished(&[]);
    assert_eq!(finished.retrieves, HashSet::from([request.to_owned()]));
}

/// Runs `work` in a forked process, and returns true if it ends there without a panic.
pub(crate) fn succeeds_forked(work: impl FnOnce()) -> bool {
    // SAFETY: the child runs `work`, which takes no lock that another thread may have held, and
    // leaves without running anything of this process's end.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(ended.is_err())) };
    }
    assert!(child > 0, "no process");
    until(|| {
        let mut status = 0;
        // SAFETY: the kernel writes one number.
        let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
        (ended == child).then_some(status == 0)
    })
}
