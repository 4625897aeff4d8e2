//! Engines whose KV cache lies on a GPU, as a stock client on CUDA registers it: the daemon with the
//! driver of `lmc-fake-cuda`.

use lmc_fake_cuda::{Engine, Live, Machine, UUIDS};
use lmc_testkit::until;
use lmc_vllm_adapter::{
    Client, Cuda, EngineGroup, KvDescriptor, Operation, RegisterKvCache, Reply, Request, SharedBy,
    TensorMeta, UnknownFields,
};

use crate::common::{Server, lmc, worker_key};

const CHUNK: u64 = 256;
const BLOCK: u64 = 64;
const BLOCKS: u64 = 64;
const HEADS: u64 = 2;
const SIZE: u64 = 8;
const LAYERS: u64 = 3;
/// Bytes of one block in one plane of one layer.
const RUN: usize = (BLOCK * HEADS * SIZE * 2) as usize;
/// Bytes of one layer.
const LAYER: usize = 2 * BLOCKS as usize * RUN;
const CHUNKS: u64 = 4;

/// An engine with one tensor for each layer: K of all blocks, then V.
struct Worker {
    engine: Engine,
    layers: Vec<usize>,
    client: Client,
}

fn server(machine: &Machine) -> Server {
    let mut command = lmc();
    command.envs(machine.envs());
    Server::start_by(command, &["--l1-size-gb", "64MiB"])
}

impl Worker {
    fn new(machine: &Machine, server: &Server) -> Self {
        let engine = Engine::new(machine, 0);
        let bytes = |layer: u64| -> Vec<u8> {
            let mixed = |at: usize| (at as u64 ^ (layer << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (0..LAYER).map(|at| (mixed(at) >> 56) as u8).collect()
        };
        let layers = (0..LAYERS).map(|layer| engine.allocate(&bytes(layer)));
        Self {
            layers: layers.collect(),
            client: server.client(),
            engine,
        }
    }

    fn registration(&self) -> Request {
        let tensor = |&address: &usize| {
            let (handle, offset) = self.engine.handle(address);
            KvDescriptor::Cuda(Box::new(Cuda {
                device_uuid: UUIDS[0].to_owned(),
                handle,
                offset: offset as u64,
                nbytes: LAYER as u64,
                shared_by: SharedBy::PyTorch { counter: None },
                tensor: TensorMeta {
                    dtype: "bfloat16".to_owned(),
                    shape: vec![2, BLOCKS, BLOCK, HEADS, SIZE],
                    stride: vec![
                        BLOCKS * BLOCK * HEADS * SIZE,
                        BLOCK * HEADS * SIZE,
                        HEADS * SIZE,
                        SIZE,
                        1,
                    ],
                    storage_offset: 0,
                },
            }))
        };
        Request::RegisterKvCache(Box::new(RegisterKvCache {
            instance_id: 1,
            kv_caches: self.layers.iter().map(tensor).collect(),
            model_name: "m".to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: Some("NHD".to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                layer_indices: (0..LAYERS as u32).collect(),
                tokens_per_block: BLOCK as u32,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        }))
    }

    fn register(&mut self) {
        let registration = self.registration();
        let registered = self.client.ask(&registration);
        assert_eq!(registered.expect("an answer"), Reply::None);
    }

    /// Returns the bytes of blocks, of one after the other, K and V of all layers.
    fn blocks(&self, ids: &[u32]) -> Vec<u8> {
        let addresses = ids.iter().flat_map(|&id| {
            let planes = (0..2).map(move |plane| (plane * BLOCKS as usize + id as usize) * RUN);
            planes.flat_map(|offset| self.layers.iter().map(move |layer| layer + offset))
        });
        addresses.flat_map(|at| self.engine.read(at, RUN)).collect()
    }

    fn send(&mut self, operation: Operation, blocks: &[u32], event: [u8; 64]) -> u64 {
        let (instance_id, event) = (1, event.to_vec());
        let block_ids = vec![blocks.to_vec()];
        let request = match operation {
            Operation::Store => Request::Store {
                key: worker_key(CHUNKS * CHUNK),
                instance_id,
                block_ids,
                event,
            },
            _ => Request::Retrieve {
                key: worker_key(CHUNKS * CHUNK),
                instance_id,
                block_ids,
                event,
                skip_first_n_tokens: 0,
            },
        };
        self.client.send(&request).expect("sent")
    }

    fn ask(&mut self, operation: Operation, blocks: &[u32]) -> Reply {
        let event = self.engine.record();
        let uid = self.send(operation, blocks, event.handle());
        self.client.receive(uid, operation).expect("an answer")
    }
}

const PER_PROMPT: u32 = (CHUNKS * CHUNK / BLOCK) as u32;

/// Blocks in which a prompt lies, in an order of their own, and others.
fn source() -> Vec<u32> {
    (1..=PER_PROMPT).map(|block| block * 7 % 31 + 1).collect()
}

fn target() -> Vec<u32> {
    (0..PER_PROMPT).map(|block| 63 - block).collect()
}

fn others() -> Vec<u32> {
    let target = target();
    (0..BLOCKS as u32)
        .filter(|id| !target.contains(id))
        .collect()
}

#[test]
fn an_engine_on_a_gpu_stores_and_retrieves_its_blocks() {
    let machine = Machine::new();
    let server = server(&machine);
    // Hosts without a driver run the same program.
    assert_eq!(machine.calls("cuInit"), 0);
    let mut worker = Worker::new(&machine, &server);
    worker.register();
    let (stored, rest) = (worker.blocks(&source()), worker.blocks(&others()));
    let transferred = Reply::Transferred(true);
    assert_eq!(worker.ask(Operation::Store, &source()), transferred);
    assert_eq!(worker.ask(Operation::Retrieve, &target()), transferred);
    assert_eq!(worker.blocks(&target()), stored);
    assert_eq!(worker.blocks(&others()), rest);
    let status = server.get("/status");
    assert!(status.contains(UUIDS[0]), "{status}");
    until("the pool is registered with the GPU", || {
        machine.live(server.id()).registrations > 0
    });
    let gone = Request::Unregister {
        instance_id: 1,
        engine_driven: false,
    };
    let gone = worker.client.ask(&gone);
    assert_eq!(gone.expect("an answer"), Reply::None);
    until("all that is the GPU's is given back", || {
        machine.live(server.id()) == Live::default()
    });
    // The chunks are not the GPU's.
    worker.register();
    assert_eq!(worker.ask(Operation::Retrieve, &source()), transferred);
    server.terminate();
}

#[test]
fn a_store_waits_for_the_work_of_the_engine() {
    let machine = Machine::new();
    let server = server(&machine);
    let mut worker = Worker::new(&machine, &server);
    worker.register();
    let new = vec![0x5a; RUN];
    let stall = worker.engine.stall();
    let block = source()[0] as usize * RUN;
    worker.engine.write_later(worker.layers[1] + block, &new);
    let event = worker.engine.record();
    let uid = worker.send(Operation::Store, &source(), event.handle());
    until("the server asks for the event", || {
        machine.calls("cuEventQuery") > 3
    });
    drop(stall);
    let reply = worker.client.receive(uid, Operation::Store);
    assert_eq!(reply.expect("an answer"), Reply::Transferred(true));
    let retrieved = worker.ask(Operation::Retrieve, &target());
    assert_eq!(retrieved, Reply::Transferred(true));
    assert_eq!(worker.blocks(&target()), worker.blocks(&source()));
    let block = target()[0] as usize * RUN;
    assert_eq!(worker.engine.read(worker.layers[1] + block, RUN), new);
}

/// Memory that the server has open stays allocated, so an engine that is started again after a crash
/// would find too little for its KV cache.
///
/// Slow: a worker may come back for 3 s.
#[test]
fn the_memory_of_an_engine_that_died_is_closed() {
    let machine = Machine::new();
    let server = server(&machine);
    let mut worker = Worker::new(&machine, &server);
    worker.register();
    assert_eq!(machine.live(server.id()).mappings, LAYERS);
    // The event of an engine that is killed is never reached.
    let _stall = worker.engine.stall();
    let event = worker.engine.record();
    worker.send(Operation::Store, &source(), event.handle());
    until("the server asks for the event", || {
        machine.calls("cuEventQuery") > 3
    });
    drop(worker.client);
    until("the memory is closed", || {
        machine.live(server.id()) == Live::default()
    });
}

#[test]
fn memory_on_a_gpu_that_cannot_be_opened_is_refused_with_the_way_out() {
    let machine = Machine::new();
    let refusal = |server: &Server, change: &dyn Fn(&mut Cuda)| {
        let mut worker = Worker::new(&machine, server);
        let mut registration = worker.registration();
        let Request::RegisterKvCache(asked) = &mut registration else {
            unreachable!("it is made so");
        };
        for descriptor in &mut asked.kv_caches {
            if let KvDescriptor::Cuda(cuda) = descriptor {
                change(cuda);
            }
        }
        match worker.client.ask(&registration) {
            Err(error) => error.to_string(),
            Ok(Reply::Error(text)) => text,
            Ok(other) => panic!("{other:?}"),
        }
    };
    let mut command = lmc();
    let without = Machine::with_devices(0);
    command.envs(without.envs());
    let blind = Server::start_by(command, &[]);
    let text = refusal(&blind, &|_| ());
    assert!(text.contains("CUDA_ERROR_NO_DEVICE"), "{text}");
    assert!(text.contains("mp_transfer_mode=engine_driven"), "{text}");
    let server = server(&machine);
    let text = refusal(&server, &|cuda| cuda.device_uuid.replace_range(..1, "7"));
    assert!(text.contains(UUIDS[0]), "{text}");
    let text = refusal(&server, &|cuda| cuda.nbytes += 1 << 30);
    assert!(text.contains("lie outside of an allocation"), "{text}");
    let text = refusal(&server, &|cuda| cuda.handle[20] ^= 0xff);
    assert!(text.contains("CUDA_ERROR_INVALID_VALUE"), "{text}");
    until("nothing is held for refused engines", || {
        machine.live(server.id()) == Live::default()
    });
}
