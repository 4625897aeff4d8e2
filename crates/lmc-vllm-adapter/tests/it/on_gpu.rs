//! An engine whose memory lies on a GPU, with the driver of `lmc-fake-cuda`: its own process copies.

use std::cell::RefCell;
use std::ffi::c_char;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use lmc_fake_cuda::{self as fake, Code, Machine, UUIDS};
use lmc_testkit::own_test;
use lmc_vllm_adapter::ServiceConfig;
use lmc_vllm_adapter::adapters::{EngineStream, Finished, Prompt, SchedulerAdapter, WorkerAdapter};

use crate::common::Server;
use crate::common::engine::{
    self, BLOCKS, Engine, LAYER, LAYERS, TIMEOUT, blocks, content, endpoint, hashes, layers_at, op,
    until,
};

/// Calls a function of the driver as an engine does.
macro_rules! call {
    ($function:ident($($argument:expr),*)) => {{
        // SAFETY: the arguments are of this test.
        let result = unsafe { sys::$function($($argument),*) };
        assert_eq!(result, sys::CUresult::CUDA_SUCCESS, stringify!($function));
    }};
}

/// A stream of the engine's process.
fn new_stream() -> sys::CUstream {
    let mut stream = ptr::null_mut();
    call!(cuStreamCreate(&mut stream, 1));
    stream
}

fn after(stream: sys::CUstream) -> Option<EngineStream> {
    // SAFETY: no test destroys its streams.
    Some(unsafe { EngineStream::new(stream.expose_provenance() as u64) })
}

/// Makes a stream wait for what another process has given its own.
fn hold(stream: sys::CUstream, by: &fake::Engine) {
    let handle = sys::CUipcEventHandle {
        reserved: by.record().handle().map(|byte| byte as c_char),
    };
    let mut event = ptr::null_mut();
    call!(cuIpcOpenEventHandle(&mut event, handle));
    call!(cuStreamWaitEvent(stream, event, 0));
}

/// An engine on the first GPU: its scheduler, its worker, the addresses of its layers, and a stream.
struct OnGpu {
    scheduler: SchedulerAdapter,
    worker: WorkerAdapter,
    layers: Vec<u64>,
    stream: sys::CUstream,
    /// Requests that were reported and not asked for yet.
    reported: RefCell<Finished>,
}

impl OnGpu {
    fn start(server: &Server, identity: &str) -> Self {
        let engine = engine::engine(identity, true);
        let scheduler = SchedulerAdapter::start(endpoint(server), engine.clone());
        let worker = WorkerAdapter::start(endpoint(server), engine, 0, 1).expect("a worker");
        // The thread of an engine has a context.
        let mut context = ptr::null_mut();
        call!(cuInit(0));
        call!(cuDevicePrimaryCtxRetain(&mut context, 0));
        call!(cuCtxSetCurrent(context));
        let layer = |_| {
            let mut address = 0;
            call!(cuMemAlloc_v2(&mut address, LAYER * 4));
            address
        };
        let this = Self {
            scheduler: scheduler.expect("a scheduler"),
            worker,
            layers: (0..LAYERS).map(layer).collect(),
            stream: new_stream(),
            reported: RefCell::default(),
        };
        this.register().expect("a known layout");
        this
    }

    fn register(&self) -> Result<(), String> {
        let layers = layers_at(self.layers.iter().map(|&address| address as usize));
        let layers = layers.on_gpu(UUIDS[0].to_owned());
        let registered = self.worker.register_kv_caches(layers);
        registered.map_err(|error| error.to_string())
    }

    /// Writes the content of chunks into blocks, when the stream comes to it; or compares it as it is
    /// now.
    fn content(&self, seed: u32, blocks: &[u32], check: bool) -> bool {
        let mut host = vec![vec![0.0; LAYER]; LAYERS];
        for (layer, &from) in host.iter_mut().zip(&self.layers) {
            call!(cuMemcpyDtoH_v2(layer.as_mut_ptr().cast(), from, LAYER * 4));
        }
        let same = content(&mut host, seed, blocks, 0, check);
        for (layer, &to) in host.iter().zip(&self.layers) {
            if check {
                break;
            }
            let mut pinned = ptr::null_mut();
            call!(cuMemHostAlloc(&mut pinned, LAYER * 4, 0));
            let pinned = pinned.cast::<f32>();
            // SAFETY: as many elements were allocated, and are never freed.
            unsafe { pinned.copy_from_nonoverlapping(layer.as_ptr(), LAYER) };
            // The two planes of a block.
            let len = LAYER / 2 / BLOCKS;
            for &block in blocks {
                for start in [0, LAYER / 2].map(|plane| plane + block as usize * len) {
                    let (to, from) = (to + start as u64 * 4, pinned.wrapping_add(start).cast());
                    call!(cuMemcpyHtoDAsync_v2(to, from, len * 4, self.stream));
                }
            }
        }
        same
    }

    fn begin_store(&self, request: &str, seed: u32, prompt: &Prompt, at: u32) {
        let op = op(request, prompt, 0..2, at);
        self.content(seed, &op.block_ids[0], false);
        let ops = vec![op];
        (self.worker).batched_submit_store_requests(ops, after(self.stream));
    }

    fn lookup(&self, request: &str, prompt: &Prompt) -> u64 {
        (self.scheduler).maybe_submit_lookup_request(request, prompt, "", &Default::default());
        until(|| self.scheduler.check_lookup_result(request))
    }

    fn begin_load(&self, request: &str, prompt: &Prompt, at: u32, stream: sys::CUstream) {
        let ops = vec![op(request, prompt, 0..2, at)];
        (self.worker).batched_submit_retrieve_requests(ops, after(stream));
    }

    /// Names a request finished, and returns true once its stores are reported.
    fn stored(&self, request: &str) -> bool {
        self.take_reports([request.to_owned()]);
        self.reported.borrow_mut().stores.remove(request)
    }

    fn loaded(&self, request: &str) -> bool {
        self.take_reports([]);
        self.reported.borrow_mut().retrieves.remove(request)
    }

    fn take_reports<const N: usize>(&self, named: [String; N]) {
        let found = self.worker.get_finished(named);
        let mut reported = self.reported.borrow_mut();
        reported.stores.extend(found.stores);
        reported.retrieves.extend(found.retrieves);
    }
}

/// Waits until a copy asks the driver about work that is not done.
fn until_it_waits(machine: &Machine) {
    let before = machine.calls("cuEventQuery");
    until(|| (machine.calls("cuEventQuery") > before + 100).then_some(()));
}

#[test]
fn an_engine_on_a_gpu_shares_chunks_with_one_in_host_memory() {
    let test = own_test(an_engine_on_a_gpu_shares_chunks_with_one_in_host_memory);
    Machine::in_own_process(1, test, |machine| {
        let server = Server::start();
        let (on_gpu, prompt) = (OnGpu::start(&server, "i"), hashes(1, 2));
        on_gpu.begin_store("a", 7, &prompt, 0);
        until(|| on_gpu.stored("a").then_some(()));
        let mut on_host = Engine::start(&server, "i", true);
        assert_eq!(on_host.lookup("b", &prompt), 2 * engine_chunk());
        assert!(on_host.load("b", &prompt, 0..2, 5));
        assert!(on_host.content(7, &blocks(2, 5), 0, true));
        let other = hashes(9, 2);
        on_host.store("c", 4, &other, 0..2, 30);
        assert_eq!(on_gpu.lookup("d", &other), 2 * engine_chunk());
        on_gpu.begin_load("d", &other, 40, on_gpu.stream);
        until(|| on_gpu.loaded("d").then_some(()));
        assert!(on_gpu.worker.get_block_ids_with_load_errors().is_empty());
        assert!(on_gpu.content(4, &blocks(2, 40), true));
        assert!(on_gpu.content(7, &blocks(2, 0), true), "other blocks stay");
        // The pool's registration and the lanes go with the worker; the engine's own things stay.
        on_gpu.worker.shutdown();
        let live = machine.live(std::process::id());
        assert_eq!((live.registrations, live.streams, live.modules), (0, 1, 0));
    });
}

fn engine_chunk() -> u64 {
    crate::common::CHUNK as u64
}

#[test]
fn copies_come_after_the_engines_work_and_loads_do_not_wait_for_stores() {
    let test = own_test(copies_come_after_the_engines_work_and_loads_do_not_wait_for_stores);
    Machine::in_own_process(1, test, |machine| {
        let (server, other) = (Server::start(), fake::Engine::new(machine, 0));
        let (engine, first, second) = (OnGpu::start(&server, "i"), hashes(1, 2), hashes(9, 2));
        engine.begin_store("a", 7, &first, 0);
        until(|| engine.stored("a").then_some(()));

        // A load comes after what the engine writes before.
        let stall = other.stall();
        hold(engine.stream, &other);
        engine.content(99, &blocks(2, 2), false);
        assert_eq!(engine.lookup("d", &first), 2 * engine_chunk());
        engine.begin_load("d", &first, 2, engine.stream);
        until_it_waits(machine);
        assert!(!engine.loaded("d"));
        drop(stall);
        until(|| engine.loaded("d").then_some(()));
        assert!(engine.content(7, &blocks(2, 2), true));

        let stall = other.stall();
        hold(engine.stream, &other);
        engine.begin_store("b", 3, &second, 1);
        until_it_waits(machine);
        // Another batch than that of the first.
        engine.begin_store("f", 5, &hashes(13, 2), 32);
        assert!(!engine.stored("b"));
        // Work of another stream is done.
        assert_eq!(engine.lookup("c", &first), 2 * engine_chunk());
        engine.begin_load("c", &first, 30, new_stream());
        until(|| engine.loaded("c").then_some(()));
        assert!(engine.content(7, &blocks(2, 30), true));
        assert!(!engine.stored("b") && !engine.stored("f"));
        drop(stall);
        for request in ["b", "f"] {
            until(|| engine.stored(request).then_some(()));
        }
        // The bytes are those after the engine's work.
        assert_eq!(engine.lookup("e", &second), 2 * engine_chunk());
        engine.begin_load("e", &second, 31, engine.stream);
        until(|| engine.loaded("e").then_some(()));
        assert!(engine.content(3, &blocks(2, 31), true));
        assert!(engine.worker.get_block_ids_with_load_errors().is_empty());
    });
}

/// The stores of one step, however long the first of them waits.
#[test]
fn stores_are_known_to_the_server_before_the_engines_work_is_done() {
    let test = own_test(stores_are_known_to_the_server_before_the_engines_work_is_done);
    Machine::in_own_process(1, test, |machine| {
        let (server, other) = (Server::start(), fake::Engine::new(machine, 0));
        let engine = OnGpu::start(&server, "i");
        let stall = other.stall();
        hold(engine.stream, &other);
        let requests = ["a", "b", "c"];
        let store = |(seed, request)| op(request, &hashes(seed, 2), 0..2, u32::from(seed));
        let stores = (0..).step_by(4).zip(requests).map(store).collect();
        (engine.worker).batched_submit_store_requests(stores, after(engine.stream));
        let ids = requests.map(str::to_owned);
        assert!(engine.worker.wait_until_reserved(&ids, TIMEOUT));
        for request in requests {
            assert!(engine.worker.has_stores(request), "not copied yet");
        }
        drop(stall);
        for request in requests {
            until(|| engine.stored(request).then_some(()));
        }
    });
}

#[test]
fn a_store_that_waits_for_the_engine_is_dropped_when_its_blocks_are_needed() {
    let test = own_test(a_store_that_waits_for_the_engine_is_dropped_when_its_blocks_are_needed);
    Machine::in_own_process(1, test, |machine| {
        let (server, other) = (Server::start(), fake::Engine::new(machine, 0));
        let (engine, prompt) = (OnGpu::start(&server, "i"), hashes(1, 2));
        let stall = other.stall();
        hold(engine.stream, &other);
        engine.begin_store("a", 7, &prompt, 0);
        until_it_waits(machine);
        let all = ["a".to_owned()];
        assert!(!engine.worker.wait_for_stores(&all, Duration::ZERO));
        until(|| engine.stored("a").then_some(()));
        assert_eq!(engine.lookup("b", &prompt), 0);
        drop(stall);
        assert!(engine.worker.wait_for_stores(&all, TIMEOUT));
        assert_eq!(engine.lookup("c", &prompt), 0);
        // The next store of the same chunks gets slots again.
        engine.begin_store("d", 7, &prompt, 0);
        until(|| engine.stored("d").then_some(()));
        assert_eq!(engine.lookup("e", &prompt), 2 * engine_chunk());
        // A worker that waits ends at once, and so does what is queued.
        let _stall = other.stall();
        hold(engine.stream, &other);
        for number in 0..20 {
            engine.begin_store(&format!("f{number}"), 7, &hashes(5 + number, 2), 30);
        }
        until_it_waits(machine);
        engine.worker.shutdown();
        let live = machine.live(std::process::id());
        assert_eq!((live.registrations, live.streams, live.modules), (0, 1, 0));
    });
}

/// As vLLM 0.33 sleeps: it takes the memory away, and maps it again.
#[test]
fn memory_that_is_taken_away_is_left_alone_and_used_again_when_it_is_back() {
    let test = own_test(memory_that_is_taken_away_is_left_alone_and_used_again_when_it_is_back);
    Machine::in_own_process(1, test, |machine| {
        let (server, other) = (Server::start(), fake::Engine::new(machine, 0));
        let (engine, prompt, next) = (OnGpu::start(&server, "i"), hashes(1, 2), hashes(9, 2));
        engine.begin_store("a", 7, &prompt, 0);
        until(|| engine.stored("a").then_some(()));
        let lanes = machine.live(std::process::id()).streams;
        // Both directions wait for the engine's work.
        engine.content(99, &blocks(2, 20), false);
        assert_eq!(engine.lookup("b", &prompt), 2 * engine_chunk());
        let stall = other.stall();
        hold(engine.stream, &other);
        engine.begin_load("b", &prompt, 20, engine.stream);
        for number in 0..3 {
            let seed = 20 + 4 * number;
            engine.begin_store(&format!("s{number}"), 3, &hashes(seed, 2), 30);
        }
        until_it_waits(machine);
        let began = Instant::now();
        engine.worker.unregister_kv_caches();
        engine.worker.unregister_kv_caches();
        // A worker waits 60 s for the engine's work.
        assert!(began.elapsed() < Duration::from_secs(40));
        let live = machine.live(std::process::id());
        assert_eq!((live.registrations, live.streams, live.modules), (0, 1, 0));
        assert_eq!(live.allocations, LAYERS as u64, "the engine's own");
        until(|| engine.loaded("b").then_some(()));
        let failed = engine.worker.get_block_ids_with_load_errors();
        assert_eq!(failed, blocks(2, 20).into_iter().collect());
        for number in 0..3 {
            until(|| engine.stored(&format!("s{number}")).then_some(()));
        }
        assert_eq!(engine.worker.stats().stored_chunks, 2);
        drop(stall);
        // Without memory, stores are dropped and loads fail, on whatever connection.
        until(|| engine.worker.server().is_healthy.then_some(()));
        engine.begin_store("c", 5, &next, 40);
        until(|| engine.stored("c").then_some(()));
        engine.begin_load("d", &prompt, 20, engine.stream);
        until(|| engine.loaded("d").then_some(()));
        assert!(
            engine.content(99, &blocks(2, 20), true),
            "nothing was loaded"
        );
        let failed = engine.worker.get_block_ids_with_load_errors();
        assert_eq!(failed, blocks(2, 20).into_iter().collect());

        engine.register().expect("as before");
        until(|| engine.worker.server().is_healthy.then_some(()));
        assert_eq!(machine.live(std::process::id()).streams, lanes);
        assert_eq!(engine.lookup("e", &next), 0, "it was not stored");
        engine.begin_store("f", 5, &next, 40);
        until(|| engine.stored("f").then_some(()));
        for (request, prompt, seed) in [("g", &prompt, 7), ("h", &next, 5)] {
            assert_eq!(engine.lookup(request, prompt), 2 * engine_chunk());
            engine.begin_load(request, prompt, 20, engine.stream);
            until(|| engine.loaded(request).then_some(()));
            assert!(engine.content(seed, &blocks(2, 20), true), "{request}");
        }
        assert!(engine.worker.get_block_ids_with_load_errors().is_empty());
    });
}

#[test]
fn nothing_is_copied_where_the_engines_work_is_not_known() {
    let test = own_test(nothing_is_copied_where_the_engines_work_is_not_known);
    Machine::in_own_process(1, test, |machine| {
        let server = Server::start();
        let (engine, prompt) = (OnGpu::start(&server, "i"), hashes(1, 2));
        engine.begin_store("a", 7, &prompt, 0);
        until(|| engine.stored("a").then_some(()));
        let other = hashes(9, 2);
        let refused = |named: Option<EngineStream>, why: &str| {
            engine.content(5, &blocks(2, 20), false);
            let stores = vec![op("b", &other, 0..2, 20)];
            engine.worker.batched_submit_store_requests(stores, named);
            until(|| engine.stored("b").then_some(()));
            assert_eq!(engine.lookup("c", &prompt), 2 * engine_chunk());
            let loads = vec![op("c", &prompt, 0..2, 20)];
            engine.worker.batched_submit_retrieve_requests(loads, named);
            until(|| engine.loaded("c").then_some(()));
            let failed = engine.worker.get_block_ids_with_load_errors();
            assert_eq!(failed, blocks(2, 20).into_iter().collect());
            assert!(
                engine.content(5, &blocks(2, 20), true),
                "nothing was loaded"
            );
            assert_eq!(engine.lookup("d", &other), 0);
            for request in ["c", "d"] {
                engine.scheduler.cleanup_lookup_result(request);
                engine.scheduler.end_session(request);
            }
            let log = engine.worker.take_log();
            let has = |what: &str| log.iter().any(|line| line.text.contains(what));
            // Later failures of a kind may be left out of the log.
            let is_named = has("store failed for request b") && has(why);
            assert!(is_named || why.is_empty(), "{log:?}");
        };
        refused(None, "named no stream");
        machine.fail("cuEventRecord", u32::MAX, Code::ILLEGAL_ADDRESS);
        refused(after(engine.stream), "");
        machine.fail("cuEventRecord", 0, Code::ILLEGAL_ADDRESS);
        engine.begin_load("e", &prompt, 20, engine.stream);
        assert_eq!(engine.lookup("e", &prompt), 2 * engine_chunk());
    });
}

#[test]
fn a_gpu_that_cannot_be_used_is_named_at_the_registration() {
    let test = own_test(a_gpu_that_cannot_be_used_is_named_at_the_registration);
    Machine::in_own_process(1, test, |machine| {
        let server = Server::start();
        let engine = OnGpu::start(&server, "i");
        let layers = || layers_at(engine.layers.iter().map(|&address| address as usize));
        let elsewhere = engine
            .worker
            .register_kv_caches(layers().on_gpu(UUIDS[1].to_owned()));
        let text = elsewhere.expect_err("no such GPU").to_string();
        assert!(text.contains(UUIDS[1]) && text.contains(UUIDS[0]), "{text}");
        engine.worker.shutdown();
        drop(engine);
        // As on a GPU whose memory the engine has taken whole.
        let engine = |refuse: bool| {
            let worker = engine::engine("j", true);
            let worker = WorkerAdapter::start(endpoint(&server), worker, 0, 1).expect("a worker");
            if refuse {
                machine.fail("cuMemAlloc_v2", 1, Code::OUT_OF_MEMORY);
            }
            let layers = layers_at((0..LAYERS).map(|_| 1 << 40));
            worker.register_kv_caches(layers.on_gpu(UUIDS[0].to_owned()))
        };
        let text = engine(true).expect_err("no memory").to_string();
        assert_eq!(
            text,
            "the KV cache's GPU cannot be used: cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY"
        );
        engine(false).expect("memory is there again");
    });
}

/// A server that is started again has another pool: the former one's registration goes.
#[test]
fn the_pool_of_a_new_server_is_registered_in_place_of_the_former() {
    let test = own_test(the_pool_of_a_new_server_is_registered_in_place_of_the_former);
    Machine::in_own_process(1, test, |machine| {
        let server = Server::start();
        let port = server.address.port();
        let (engine, prompt) = (OnGpu::start(&server, "i"), hashes(1, 2));
        let registered = || machine.live(std::process::id()).registered_bytes;
        let get_pages = |server: &Server| {
            let arena = server.service.engine().arena();
            arena.ensure(0, server.pool_bytes).expect("memory");
            for at in (0..arena.len()).step_by(4096) {
                // SAFETY: the arena is longer, and no chunk lies there yet.
                unsafe { arena.base_ptr().add(at).write_volatile(0) };
            }
        };
        get_pages(&server);
        until(|| (registered() == 1 << 20).then_some(()));
        drop(server);
        until(|| (!engine.worker.server().is_healthy).then_some(()));
        let pool = 2 << 20;
        let server = Server::with(pool, |_: &mut ServiceConfig| {}, |zmq| zmq.port = port);
        get_pages(&server);
        until(|| engine.worker.server().is_healthy.then_some(()));
        until(|| (registered() == pool as u64).then_some(()));
        until(|| engine.scheduler.server().is_healthy.then_some(()));
        engine.begin_store("a", 7, &prompt, 0);
        until(|| engine.stored("a").then_some(()));
        assert_eq!(engine.lookup("b", &prompt), 2 * engine_chunk());
        engine.begin_load("b", &prompt, 40, engine.stream);
        until(|| engine.loaded("b").then_some(()));
        assert!(engine.content(7, &blocks(2, 40), true));
        assert_eq!(engine.worker.stats().stored_chunks, 2);
    });
}
