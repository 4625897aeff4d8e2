//! Server and engines in containers of their own, which share the folder of the Unix socket and
//! nothing else: each has its own user, mount, IPC and PID namespace, its own `/dev/shm`, `/run` and `/tmp`,
//! and engines have a network of their own too.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Server;
use lmc_key::ChunkHash;
use lmc_testkit::{DEADLINE, Folder, Process, in_lab, test_arguments, until};
use lmc_vllm_adapter::adapters::{
    Endpoint, EngineDescription, KvLayers, KvOrder, LayerGroup, LayerTensor, LoadStoreOp, Prompt,
    SchedulerAdapter, WorkerAdapter,
};
use lmc_vllm_adapter::{
    CacheKey, Client, EngineDrivenContext, LOCAL_SOCKET, Reply, Request, RequestConfigs,
    UnknownFields,
};

/// Makes a process of this test an engine, with what it is to do.
const TASK: &str = "LMC_TEST_CONTAINER";

const CHUNK: usize = 16;
const CHUNKS: usize = 4;
const BLOCK: usize = 4;
const BLOCKS: usize = 32;
/// Elements of a token in each of a layer's two planes.
const WIDTH: usize = 64;
const PLANE: usize = BLOCKS * BLOCK * WIDTH;

/// Returns a command that runs a program, given by its path, in a container, with `folder` at
/// `/run/lmc`. The program is opened before the container's `/tmp` may hide it.
fn container(folder: &Path, own_network: bool) -> Command {
    let script = format!(
        "set -e; exec 9<\"$1\"; shift; \
         mount -t tmpfs tmpfs /dev/shm; mount --bind {} /mnt; mount -t tmpfs tmpfs /run; \
         mkdir /run/lmc; mount --move /mnt /run/lmc; mount -t tmpfs tmpfs /tmp; \
         exec /proc/self/fd/9 \"$@\"",
        folder.display()
    );
    let mut command = Command::new("unshare");
    if own_network {
        command.arg("--net");
    }
    command
        .args(["--user", "--map-root-user"])
        .args(["--mount", "--ipc", "--pid", "--fork", "--kill-child"])
        .args(["--mount-proc", "sh", "-c", &script, "sh"]);
    command
}

/// Returns why there can be no containers here.
pub(crate) fn impossible(folder: &Path) -> Option<String> {
    let tried = container(folder, true).arg("/bin/true").output();
    match tried {
        Ok(output) if output.status.success() => None,
        Ok(output) => Some(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Some(format!("unshare: {error}")),
    }
}

/// Starts a server in a container. Its ports are on the test's network, which engines do not share.
fn serve(folder: &Path, more: &[&str]) -> Server {
    let mut command = container(folder, false);
    command.arg(env!("CARGO_BIN_EXE_lmc"));
    let mut args = vec!["--ipc-path", LOCAL_SOCKET, "--chunk-size", "16"];
    args.extend_from_slice(more);
    Server::start_by(command, &args)
}

/// Starts a test of this program in a container, with a variable that names its task.
pub(crate) fn spawn_test<F: Fn()>(
    folder: &Path,
    own_network: bool,
    test: F,
    (variable, task): (&str, &str),
) -> Process {
    let this = std::env::current_exe().expect("a test has a path");
    let mut command = container(folder, own_network);
    command
        .arg(this)
        .args(test_arguments(test))
        .env(variable, task)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    Process::spawn(&mut command)
}

/// Waits until a test that was started has passed.
pub(crate) fn pass(task: &str, mut process: Process) {
    let (_input, output) = process.pipes();
    let printed = std::io::read_to_string(output).expect("text");
    assert!(process.wait().success(), "{task}: {printed}");
    assert!(printed.contains("1 passed"), "{task}: {printed}");
}

/// Starts an engine in a container.
fn engine(folder: &Path, task: &str) -> Process {
    spawn_test(folder, true, engine_in_a_container, (TASK, task))
}

/// Runs an engine to its end.
fn run(folder: &Path, task: &str) {
    pass(task, engine(folder, task));
}

/// Runs as an engine in a container. Does nothing when the test suite runs it.
#[test]
fn engine_in_a_container() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    assert!(names_in("/dev/shm").is_empty(), "it shares no memory");
    if task != "outlive" {
        assert_eq!(names_in("/run/lmc"), ["lmc.sock"]);
    }
    match &*task {
        "outlive" => outlive(),
        "store" => store(),
        "load" => load(),
        "prepare" => prepare(),
        other => panic!("unknown task {other:?}"),
    }
}

fn names_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder").flatten();
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    entries.map(name).collect()
}

fn description() -> EngineDescription {
    EngineDescription {
        model: "test/llama".to_owned(),
        world_size: 1,
        num_kv_readers: 1,
        identity: "containers".to_owned(),
        hash_mode: true,
        block_size: BLOCK as u32,
        tails: true,
    }
}

fn prompt() -> Prompt {
    let hash = |chunk| ChunkHash::new([chunk + 1; 32]);
    Prompt::Chunks((0..CHUNKS as u8).map(hash).collect())
}

/// Registers a worker with one layer, `[2, BLOCKS, BLOCK, 1, WIDTH]`.
fn worker(memory: &mut [f32]) -> WorkerAdapter {
    assert_eq!(memory.len(), 2 * PLANE);
    let worker = WorkerAdapter::start(Endpoint::Local, description(), 0, 1).expect("a worker");
    let tensor = LayerTensor {
        data: memory.as_mut_ptr() as usize,
        shape: vec![2, BLOCKS as u64, BLOCK as u64, 1, WIDTH as u64],
        strides: [PLANE, BLOCK * WIDTH, WIDTH, WIDTH, 1]
            .map(|stride| stride as u64)
            .to_vec(),
        dtype: "float32".to_owned(),
    };
    let group = LayerGroup {
        tensors: vec![tensor],
        window: None,
    };
    // SAFETY: the callers keep the memory until they have shut the worker down, and look at it only
    // while nothing is copied.
    let layers = unsafe { KvLayers::new(vec![group], KvOrder::TokensFirst, BLOCK as u32) };
    worker.register_kv_caches(layers).expect("a known layout");
    worker
}

fn finish_store(worker: &WorkerAdapter) {
    worker.submit_store_request(transfer(0..16));
    until("the store ends", || {
        let finished = worker.get_finished(["a".to_owned()]);
        !finished.stores.is_empty()
    });
}

fn finish_load(worker: &WorkerAdapter) {
    worker.submit_retrieve_request(transfer(16..32));
    until("the load ends", || {
        !worker.get_finished([]).retrieves.is_empty()
    });
    assert!(worker.get_block_ids_with_load_errors().is_empty());
}

fn transfer(blocks: Range<u32>) -> LoadStoreOp {
    LoadStoreOp {
        request_id: "a".to_owned(),
        prompt: prompt(),
        tokens: 0..CHUNKS * CHUNK,
        block_ids: vec![blocks.collect()],
        skip_first_n_tokens: 0,
        cache_salt: String::new(),
        configs: RequestConfigs::default(),
        store_number: None,
    }
}

/// Elements of the blocks that a transfer has, in one plane.
const MOVED: usize = CHUNKS * CHUNK * WIDTH;

fn store() {
    let mut memory: Vec<f32> = (0..2 * PLANE).map(|at| at as f32).collect();
    let worker = worker(&mut memory);
    assert!(worker.server().is_healthy, "{:?}", worker.take_log());
    finish_store(&worker);
    assert_eq!(worker.stats().stored_chunks, CHUNKS as u64);
    worker.shutdown();
}

fn load() {
    let scheduler = SchedulerAdapter::start(Endpoint::Local, description()).expect("a scheduler");
    let mut memory = vec![0.0; 2 * PLANE];
    let worker = worker(&mut memory);
    let configs = RequestConfigs::default();
    scheduler.maybe_submit_lookup_request("a", &prompt(), "", &configs);
    let mut found = None;
    until("the lookup ends", || {
        found = scheduler.check_lookup_result("a");
        found.is_some()
    });
    assert_eq!(found, Some((CHUNKS * CHUNK) as u64));
    finish_load(&worker);
    worker.shutdown();
    for plane in 0..2 {
        let (from, to) = (plane * PLANE, plane * PLANE + PLANE / 2);
        for at in 0..MOVED {
            assert_eq!(memory[to + at], (from + at) as f32, "plane {plane} at {at}");
        }
    }
}

/// Starts before the server, and outlives it: each server has a pool of its own.
fn outlive() {
    let mut memory: Vec<f32> = (0..2 * PLANE).map(|at| at as f32).collect();
    let worker = worker(&mut memory);
    assert!(!worker.server().is_healthy);
    for lost in 0..2 {
        eprintln!("engine waits for server {lost}");
        until("a server is there", || {
            worker.stats().connections_lost >= lost && worker.server().is_healthy
        });
        finish_store(&worker);
        finish_load(&worker);
    }
    let stats = worker.stats();
    assert_eq!(
        (stats.stored_chunks, stats.retrieved_chunks),
        (2 * CHUNKS as u64, 2 * CHUNKS as u64)
    );
    worker.shutdown();
    for plane in 0..2 {
        let moved = &memory[plane * PLANE..(plane + 1) * PLANE];
        assert_eq!(moved[PLANE / 2..], moved[..PLANE / 2], "plane {plane}");
    }
}

/// Takes the pool, prepares a store, and waits to be killed.
fn prepare() {
    let mut client = Client::connect_unix(LOCAL_SOCKET, DEADLINE).expect("it listens");
    client.ask(&Request::PoolDescriptor).expect("the pool");
    let _pool = client.take_descriptor().expect("it comes with the reply");
    let registration = EngineDrivenContext {
        instance_id: 7,
        model_name: "test/llama".to_owned(),
        world_size: 1,
        block_size: BLOCK as u32,
        num_layers: 1,
        hidden_dim_size: WIDTH as u32,
        dtype: "float32".to_owned(),
        use_mla: false,
        num_physical_slots: Some(CHUNK as u32),
        record: None,
        unknown: UnknownFields::default(),
    };
    let registration = Request::RegisterEngineDriven(registration);
    client.ask(&registration).expect("registered");
    let key = CacheKey {
        model_name: "test/llama".to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: (0..2 * CHUNK as u32).collect(),
        end: 2 * CHUNK as u64,
        request_id: "a".to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    };
    let prepared = client.ask(&Request::PrepareStore {
        key,
        instance_id: 7,
    });
    assert!(
        matches!(&prepared, Ok(Reply::StoreSlots { slots, .. }) if slots.len() == 2),
        "{prepared:?}"
    );
    let _ = std::io::stdin().lines().next();
}

#[test]
fn an_engine_uses_a_server_of_which_it_shares_only_the_sockets_folder() {
    let folder = Folder::temporary();
    if let Some(why) = impossible(&folder) {
        return println!("skipped: no namespaces here ({why})");
    }
    for more in [&["--shm-name", "sealed"][..], &[]] {
        let server = serve(&folder, more);
        run(&folder, "store");
        run(&folder, "load");
        assert_eq!(server.metric("lmc_connections_untrusted_total"), 0.0);
        assert_eq!(server.metric("lmc_reserved_slots"), 0.0);
    }
}

#[test]
fn an_engine_finds_servers_that_start_after_it_and_uses_the_pool_of_each() {
    if !in_lab("an engine gives up on a server after 5 s") {
        return;
    }
    let folder = Folder::temporary();
    if let Some(why) = impossible(&folder) {
        return println!("skipped: no namespaces here ({why})");
    }
    let mut engine = engine(&folder, "outlive");
    engine.line("engine waits for server 0");
    let first = serve(&folder, &["--shm-name", "sealed"]);
    engine.line("engine waits for server 1");
    // Killed, so that its socket stays.
    drop(first);
    let _second = serve(&folder, &["--shm-name", "sealed"]);
    assert!(engine.wait().success());
}

/// Neither sees the other in `/proc`, so only the socket can name the process.
#[test]
fn slots_of_a_killed_worker_in_another_pid_namespace_are_released_at_once() {
    let folder = Folder::temporary();
    if let Some(why) = impossible(&folder) {
        return println!("skipped: no namespaces here ({why})");
    }
    let (server, grace) = (
        serve(&folder, &["--shm-name", "sealed"]),
        Duration::from_secs(120),
    );
    let mut engine = engine(&folder, "prepare");
    until("it has prepared", || {
        server.metric("lmc_pending_stores") == 1.0
    });
    assert_eq!(server.metric("lmc_reserved_slots"), 2.0);
    let killed = Instant::now();
    engine.kill();
    // They are counted just before they are released.
    let released = || server.metric("lmc_reserved_slots") == 0.0;
    until("they are released", released);
    assert!(killed.elapsed() < grace / 2);
    assert_eq!(server.metric("lmc_slots_released_by_death_total"), 2.0);
}
