//! One prompt of a worker that copies through shared memory: stored, looked up and read back.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use lmc_vllm_adapter::{CacheKey, Client, EngineDrivenContext, Reply, Request, SlotDescriptor};

/// Tokens in a chunk.
const CHUNK: usize = 256;
/// Chunks of the prompt.
pub(crate) const CHUNKS: usize = 6;

pub(crate) fn register(client: &mut Client) -> String {
    register_wide(client, 8)
}

/// Registers a worker with this number of values for each token, layer and half.
pub(crate) fn register_wide(client: &mut Client, hidden_dim_size: u32) -> String {
    register_as(client, hidden_dim_size, "float32")
}

pub(crate) fn register_as(client: &mut Client, hidden_dim_size: u32, dtype: &str) -> String {
    let reply = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
        instance_id: 1,
        model_name: "model".to_owned(),
        world_size: 1,
        block_size: 16,
        num_layers: 2,
        hidden_dim_size,
        dtype: dtype.to_owned(),
        use_mla: false,
        num_physical_slots: Some(CHUNK as u32),
    }));
    match reply.expect("an answer") {
        Reply::Registered { shm_name, .. } => shm_name,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn key(request: &str) -> CacheKey {
    CacheKey {
        model_name: "model".to_owned(),
        world_size: 1,
        worker_id: Some(0),
        token_ids: (0..(CHUNK * CHUNKS) as u32).collect(),
        end: (CHUNK * CHUNKS) as u64,
        request_id: request.to_owned(),
        num_kv_readers: 1,
        ..CacheKey::default()
    }
}

fn bytes_of(chunk: usize, len: u64) -> Vec<u8> {
    (0..len)
        .map(|at| (at as usize * 31 + chunk * 7) as u8)
        .collect()
}

pub(crate) fn store(client: &mut Client, shm_name: &str) {
    let request = Request::PrepareStore {
        key: key("store"),
        instance_id: 1,
    };
    let reply = client.ask(&request).expect("an answer");
    let Reply::StoreSlots {
        slots,
        chunk_indices,
    } = reply
    else {
        panic!("{reply:?}");
    };
    assert_eq!(slots.len(), CHUNKS);
    let pool = OpenOptions::new()
        .write(true)
        .open(Path::new("/dev/shm").join(shm_name));
    let pool = pool.expect("the pool");
    for (slot, &chunk) in slots.iter().zip(&chunk_indices) {
        let bytes = bytes_of(chunk as usize, slot.length);
        pool.write_all_at(&bytes, slot.offset)
            .expect("inside the pool");
    }
    let commit = Request::CommitStore {
        key: key("store"),
        instance_id: 1,
        pickled: 0,
    };
    assert_eq!(client.ask(&commit).expect("an answer"), Reply::Bool(true));
}

/// Looks up and reads back: how many chunks were there, each with its bytes.
pub(crate) fn retrieve(client: &mut Client, shm_name: &str, request: &str) -> u64 {
    let lookup = CacheKey {
        worker_id: None,
        ..key(request)
    };
    let reply = client.ask(&Request::Lookup(lookup)).expect("an answer");
    assert_eq!(reply, Reply::None);
    let wait = Request::WaitPrefetchStatus {
        request_id: request.to_owned(),
        timeout: 10.0,
    };
    let Reply::Int(hits) = client.ask(&wait).expect("an answer") else {
        panic!("no answer to the lookup");
    };
    if hits == 0 {
        return 0;
    }
    let range = CacheKey {
        end: hits * CHUNK as u64,
        ..key(request)
    };
    let prepare = Request::PrepareRetrieve {
        key: range,
        instance_id: 1,
    };
    let Reply::RetrieveSlots(Some(slots)) = client.ask(&prepare).expect("an answer") else {
        panic!("found and not there");
    };
    let pool = OpenOptions::new()
        .read(true)
        .open(Path::new("/dev/shm").join(shm_name));
    let pool = pool.expect("the pool");
    let read = |slot: &SlotDescriptor| {
        let mut bytes = vec![0; slot.length as usize];
        pool.read_exact_at(&mut bytes, slot.offset)
            .expect("inside the pool");
        bytes
    };
    for (chunk, slot) in slots.iter().enumerate() {
        assert_eq!(read(slot), bytes_of(chunk, slot.length), "chunk {chunk}");
    }
    hits
}
