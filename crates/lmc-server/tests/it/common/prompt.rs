//! One prompt of a worker that copies through shared memory: stored, looked up and read back.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use lmc_testkit::DEADLINE;
use lmc_vllm_adapter::{
    CacheKey, Client, ClientError, EngineDrivenContext, Reply, Request, RequestConfigs,
    SlotDescriptor, UnknownFields,
};

/// Id of a server's worker.
pub(crate) const WORKER: u64 = 1;
/// Tokens in a chunk.
pub(crate) const CHUNK: usize = 256;
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
    let worker = worker(hidden_dim_size, dtype);
    match client
        .ask(&Request::RegisterEngineDriven(worker))
        .expect("an answer")
    {
        Reply::Registered { shm_name, .. } => shm_name,
        other => panic!("{other:?}"),
    }
}

/// A worker's registration with this number of values for each token, layer and half.
pub(crate) fn worker(hidden_dim_size: u32, dtype: &str) -> EngineDrivenContext {
    EngineDrivenContext {
        instance_id: WORKER,
        model_name: "model".to_owned(),
        world_size: 1,
        block_size: 16,
        num_layers: 2,
        hidden_dim_size,
        dtype: dtype.to_owned(),
        use_mla: false,
        num_physical_slots: Some(CHUNK as u32),
        record: None,
        unknown: UnknownFields::default(),
    }
}

/// A prompt by its number: another one has other tokens and other bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Prompt(pub(crate) u32);

pub(crate) fn key(request: &str) -> CacheKey {
    Prompt::default().key(request)
}

pub(crate) fn store(client: &mut Client, shm_name: &str) {
    Prompt::default().store(client, shm_name);
}

/// Looks up and reads back: how many chunks were there, each with its bytes.
pub(crate) fn retrieve(client: &mut Client, shm_name: &str, request: &str) -> u64 {
    Prompt::default().retrieve(client, shm_name, request)
}

/// Begins a lookup with settings of the request.
pub(crate) fn look_up(
    client: &mut Client,
    request: &str,
    configs: RequestConfigs,
) -> Result<Reply, ClientError> {
    Prompt::default().look_up(client, request, configs)
}

/// Waits for a lookup and reads back: how many chunks were there, each with its bytes.
pub(crate) fn read_found(client: &mut Client, shm_name: &str, request: &str) -> u64 {
    let hits = await_hits(client, request);
    Prompt::default().read_back(client, shm_name, request, hits);
    hits
}

/// Opens the pool of a server.
fn pool(shm_name: &str) -> File {
    let mut options = OpenOptions::new();
    let pool = options.read(true).write(true);
    pool.open(Path::new("/dev/shm").join(shm_name))
        .expect("the pool")
}

impl Prompt {
    /// Begins a lookup with settings of the request.
    pub(crate) fn look_up(
        self,
        client: &mut Client,
        request: &str,
        configs: RequestConfigs,
    ) -> Result<Reply, ClientError> {
        let lookup = CacheKey {
            worker_id: None,
            configs,
            ..self.key(request)
        };
        client.ask(&Request::Lookup(lookup))
    }

    fn key(self, request: &str) -> CacheKey {
        let tokens = (CHUNK * CHUNKS) as u32;
        CacheKey {
            model_name: "model".to_owned(),
            world_size: 1,
            worker_id: Some(0),
            token_ids: (0..tokens).map(|at| self.0 * tokens + at).collect(),
            end: u64::from(tokens),
            request_id: request.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        }
    }

    fn bytes_of(self, chunk: usize, len: u64) -> Vec<u8> {
        let seed = chunk * 7 + self.0 as usize * 101;
        (0..len)
            .map(|at| (at as usize * 31 + (at >> 8) as usize + seed) as u8)
            .collect()
    }

    pub(crate) fn store(self, client: &mut Client, shm_name: &str) {
        assert!(self.try_store(client, shm_name), "the server takes nothing");
    }

    /// Stores all chunks. Returns false if the server takes none now.
    pub(crate) fn try_store(self, client: &mut Client, shm_name: &str) -> bool {
        self.store_by(self.key("store"), client, shm_name)
    }

    /// Stores all chunks under a tenant's salt.
    pub(crate) fn store_salted(self, client: &mut Client, shm_name: &str, salt: &str) {
        let cache_salt = salt.to_owned();
        let key = CacheKey {
            cache_salt,
            ..self.key("store")
        };
        let stored = self.store_by(key, client, shm_name);
        assert!(stored, "the server takes nothing");
    }

    /// Stores all chunks with settings of the request.
    pub(crate) fn store_with(self, client: &mut Client, shm_name: &str, configs: RequestConfigs) {
        let key = CacheKey {
            configs,
            ..self.key("store")
        };
        let stored = self.store_by(key, client, shm_name);
        assert!(stored, "the server takes nothing");
    }

    fn store_by(self, mut key: CacheKey, client: &mut Client, shm_name: &str) -> bool {
        let mut prepared = self.prepare_by(key.clone(), client, shm_name);
        if !prepared {
            // After a clear only what was looked up is stored for a while, and a name counts once.
            static REQUESTS: AtomicU64 = AtomicU64::new(0);
            let number = REQUESTS.fetch_add(1, Ordering::Relaxed);
            key.request_id = format!("{}-{number}", key.request_id);
            let lookup = CacheKey {
                worker_id: None,
                ..key.clone()
            };
            let asked = client.ask(&Request::Lookup(lookup)).expect("an answer");
            assert_eq!(asked, Reply::None);
            prepared = self.prepare_by(key.clone(), client, shm_name);
        }
        if prepared {
            commit((key, WORKER), client);
        }
        prepared
    }

    /// Begins to store all chunks: writes their bytes, and commits none.
    pub(crate) fn prepare_store(self, client: &mut Client, shm_name: &str) {
        let prepared = self.prepare_by(self.key("store"), client, shm_name);
        assert!(prepared, "the server takes nothing");
    }

    /// Ends what [`Self::prepare_store`] began.
    pub(crate) fn commit_store(self, client: &mut Client) {
        commit((self.key("store"), WORKER), client);
    }

    fn prepare_by(self, key: CacheKey, client: &mut Client, shm_name: &str) -> bool {
        let written = prepare((key, WORKER), client, shm_name, |chunk, len| {
            self.bytes_of(chunk, len)
        });
        assert!(written == 0 || written == CHUNKS, "{written} chunks");
        written > 0
    }

    /// Stores what the server takes of the chunks, each of this stamp and nothing else, and ends the
    /// request.
    pub(crate) fn store_stamped(
        self,
        stamp: u32,
        client: &mut Client,
        shm_name: &str,
        request: &str,
    ) {
        let key = self.key(request);
        let bytes = |_, len| stamp.to_le_bytes().repeat(len as usize / 4);
        if prepare((key.clone(), WORKER), client, shm_name, bytes) > 0 {
            commit((key, WORKER), client);
        }
        end(client, request);
    }

    /// Looks up and reads back: how many chunks were there, each with its bytes.
    pub(crate) fn retrieve(self, client: &mut Client, shm_name: &str, request: &str) -> u64 {
        self.begin_lookup(client, request);
        let hits = await_hits(client, request);
        self.read_back(client, shm_name, request, hits);
        hits
    }

    /// Sends a lookup. The server answers at once, and searches its tiers meanwhile.
    pub(crate) fn begin_lookup(self, client: &mut Client, request: &str) {
        let lookup = CacheKey {
            worker_id: None,
            ..self.key(request)
        };
        let reply = client.ask(&Request::Lookup(lookup)).expect("an answer");
        assert_eq!(reply, Reply::None);
    }

    /// Reads the chunks that a lookup has found, compares every byte, and ends the request.
    pub(crate) fn read_back(self, client: &mut Client, shm_name: &str, request: &str, hits: u64) {
        for (chunk, bytes) in self
            .read(client, shm_name, request, hits)
            .iter()
            .enumerate()
        {
            let wanted = self.bytes_of(chunk, bytes.len() as u64);
            assert!(
                *bytes == wanted,
                "chunk {chunk} of {self:?} has wrong bytes"
            );
        }
        end(client, request);
    }

    /// Looks up and reads the stamps of the chunks that are found. The request goes on.
    pub(crate) fn look_up_stamps(
        self,
        client: &mut Client,
        shm_name: &str,
        request: &str,
    ) -> Vec<u32> {
        self.begin_lookup(client, request);
        let hits = await_hits(client, request);
        let chunks = self.read(client, shm_name, request, hits).into_iter();
        let stamp = |bytes: Vec<u8>| {
            let first = bytes[..4].try_into().expect("4 bytes");
            assert!(bytes.chunks(4).all(|one| one == first), "a chunk is torn");
            u32::from_le_bytes(first)
        };
        chunks.map(stamp).collect()
    }

    /// Reads the chunks that a lookup has found.
    fn read(self, client: &mut Client, shm_name: &str, request: &str, hits: u64) -> Vec<Vec<u8>> {
        read(self.key(request), client, shm_name, hits)
    }
}

/// Reads the leading chunks of a prompt, which a lookup of the worker's has found.
pub(crate) fn read(key: CacheKey, client: &mut Client, shm_name: &str, hits: u64) -> Vec<Vec<u8>> {
    if hits == 0 {
        return Vec::new();
    }
    let key = CacheKey {
        end: hits * CHUNK as u64,
        ..key
    };
    let prepare = Request::PrepareRetrieve {
        key: key.clone(),
        instance_id: WORKER,
    };
    let Reply::RetrieveSlots(Some(slots)) = client.ask(&prepare).expect("an answer") else {
        panic!("found and not there");
    };
    assert_eq!(slots.len() as u64, hits);
    let pool = pool(shm_name);
    let read = |slot: &SlotDescriptor| {
        let mut bytes = vec![0; slot.length as usize];
        pool.read_exact_at(&mut bytes, slot.offset)
            .expect("inside the pool");
        bytes
    };
    let chunks = slots.iter().map(read).collect();
    let commit = Request::CommitRetrieve {
        key,
        instance_id: WORKER,
    };
    assert_eq!(client.ask(&commit).expect("an answer"), Reply::Bool(true));
    chunks
}

/// Begins a store of a worker, and writes the chunks that the server takes, by their index and length.
/// Returns how many.
pub(crate) fn prepare(
    (key, instance_id): (CacheKey, u64),
    client: &mut Client,
    shm_name: &str,
    bytes: impl Fn(usize, u64) -> Vec<u8>,
) -> usize {
    let request = Request::PrepareStore { key, instance_id };
    let reply = client.ask(&request).expect("an answer");
    let Reply::StoreSlots {
        slots,
        chunk_indices,
    } = reply
    else {
        panic!("{reply:?}");
    };
    if slots.is_empty() {
        return 0;
    }
    let pool = pool(shm_name);
    for (slot, &chunk) in slots.iter().zip(&chunk_indices) {
        pool.write_all_at(&bytes(chunk as usize, slot.length), slot.offset)
            .expect("inside the pool");
    }
    slots.len()
}

/// Ends a request.
pub(crate) fn end(client: &mut Client, request: &str) {
    let end = Request::EndSession {
        request_id: request.to_owned(),
    };
    client.ask(&end).expect("an answer");
}

/// Commits a store of a worker whose bytes are written.
pub(crate) fn commit((key, instance_id): (CacheKey, u64), client: &mut Client) {
    let commit = Request::CommitStore {
        key,
        instance_id,
        pickled: 0,
    };
    assert_eq!(client.ask(&commit).expect("an answer"), Reply::Bool(true));
}

/// Returns the number of leading chunks that a lookup has found; `None` while it goes on.
pub(crate) fn hits_so_far(client: &mut Client, request: &str) -> Option<u64> {
    let query = Request::QueryPrefetchStatus {
        request_id: request.to_owned(),
    };
    match client.ask(&query).expect("an answer") {
        Reply::None => None,
        Reply::Int(hits) => Some(hits),
        other => panic!("{other:?}"),
    }
}

/// Waits for the end of a lookup. Returns the number of leading chunks that are in memory.
pub(crate) fn await_hits(client: &mut Client, request: &str) -> u64 {
    let wait = Request::WaitPrefetchStatus {
        request_id: request.to_owned(),
        timeout: DEADLINE.as_secs_f64(),
    };
    let Reply::Int(hits) = client.ask(&wait).expect("an answer") else {
        panic!("no answer to the lookup");
    };
    hits
}
