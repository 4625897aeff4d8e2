//! Workers whose blocks lie in different orders, and have different sizes, under one model name: each
//! is given chunks in its own order or none.

use std::mem;
use std::sync::Arc;

use lmc_backend::MemoryBackend;
use lmc_vllm_adapter::{
    CacheKey, Client, CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor, RegisterKvCache,
    Reply, Request, TensorMeta, UnknownFields,
};

use crate::common::{
    Answer as _, CHUNK, MODEL, Segment, Server, end_session, lookup, prompt, segment_name,
};
use crate::server_driven::{FORMS, Form, HEADS, LAYERS, SIZE, strides};

/// Tokens per block of the engines.
const BLOCKS: [usize; 3] = [2, 4, 8];
/// Chunks of each prompt.
const CHUNKS: usize = 2;
const TOKENS: usize = CHUNKS * CHUNK;
/// Byte of memory that belongs to no prompt.
const UNTOUCHED: u8 = 0xEE;

/// Position of an element of a prompt's KV cache.
#[derive(Clone, Copy)]
struct Element {
    layer: usize,
    plane: usize,
    token: usize,
    head: usize,
    offset: usize,
}

impl Element {
    fn all(heads: usize) -> impl Iterator<Item = Self> {
        let count = LAYERS * 2 * TOKENS * heads * SIZE;
        (0..count).map(move |number| Self {
            layer: number / (2 * TOKENS * heads * SIZE),
            plane: number / (TOKENS * heads * SIZE) % 2,
            token: number / (heads * SIZE) % TOKENS,
            head: number / SIZE % heads,
            offset: number % SIZE,
        })
    }

    /// Returns the value that this element has in every engine.
    fn value(self, seed: u32) -> [u8; 4] {
        let parts = [self.layer, self.plane, self.token, self.head, self.offset];
        let number = (parts.iter()).fold(seed, |sum, &part| {
            (sum ^ part as u32).wrapping_mul(0x0100_0193).rotate_left(5)
        });
        number.to_le_bytes()
    }
}

/// KV cache of an engine, or of one of its ranks: its order, and who copies.
struct Engine {
    form: Form,
    block: usize,
    /// Number of ranks of the engine, which have an equal number of heads each.
    ranks: usize,
    rank: usize,
    instance_id: u64,
    client: Client,
    /// KV memory, where the server copies.
    segment: Option<Segment>,
}

impl Engine {
    /// Returns the number of heads; MLA has one vector for each token.
    fn heads(&self) -> usize {
        match self.form {
            Form::Mla => 1,
            _ => HEADS / self.ranks,
        }
    }

    /// Returns the number of blocks in the KV memory. vLLM never gives block 0 to a request.
    fn blocks(&self) -> usize {
        TOKENS / self.block + 1
    }

    /// Registers an engine whose memory the server copies.
    fn server_driven(server: &Server, form: Form, block: usize, instance_id: u64) -> Self {
        Self::rank(server, form, block, instance_id, (1, 0))
    }

    /// Registers a rank of an engine of `ranks`, whose memory the server copies.
    fn rank(
        server: &Server,
        form: Form,
        block: usize,
        instance_id: u64,
        (ranks, rank): (usize, usize),
    ) -> Self {
        let shape = form.shape_of(TOKENS / block + 1, block, HEADS / ranks);
        let elements: u64 = shape.iter().product();
        let nbytes = elements * 4 * LAYERS as u64;
        let name = segment_name();
        let segment = Segment::new(&name, nbytes as usize);
        let layers = (0..LAYERS as u64).map(|layer| {
            KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{name}"),
                nbytes,
                tensor: TensorMeta {
                    dtype: "float32".to_owned(),
                    stride: strides(&shape),
                    shape: shape.clone(),
                    storage_offset: layer * elements,
                },
            })
        });
        let registration = RegisterKvCache {
            instance_id,
            kv_caches: layers.collect(),
            model_name: MODEL.to_owned(),
            world_size: ranks as u32,
            engine_type: "vllm".to_owned(),
            kv_layout: Some(form.order().to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                layer_indices: (0..LAYERS as u32).collect(),
                tokens_per_block: block as u32,
                sw_size_tokens: -1,
                ..EngineGroup::default()
            }],
        };
        let mut client = server.client();
        let registered = client.ask(&Request::RegisterKvCache(Box::new(registration)));
        assert_eq!(registered.expect("an answer"), Reply::None);
        Self {
            form,
            block,
            ranks,
            rank,
            instance_id,
            client,
            segment: Some(segment),
        }
    }

    /// Registers an engine that copies whole blocks, with their heads first, into the pool.
    fn engine_driven(server: &Server, block: usize, instance_id: u64) -> Self {
        let mut client = server.client();
        let registered = client.ask(&Request::RegisterEngineDriven(EngineDrivenContext {
            instance_id,
            model_name: MODEL.to_owned(),
            world_size: 1,
            block_size: block as u32,
            num_layers: LAYERS as u32,
            hidden_dim_size: (HEADS * SIZE) as u32,
            dtype: "float32".to_owned(),
            use_mla: false,
            num_physical_slots: Some(CHUNK as u32),
            record: None,
            unknown: UnknownFields::default(),
        }));
        assert!(matches!(registered, Ok(Reply::Registered { .. })));
        Self {
            form: Form::SplitHeadsFirst,
            block,
            ranks: 1,
            rank: 0,
            instance_id,
            client,
            segment: None,
        }
    }

    /// Returns the chunk of an element and its byte in it, or 0 and its byte in the KV memory.
    fn byte(&self, at: Element) -> (usize, usize) {
        let (block, heads) = (self.block, self.heads());
        let Element {
            layer,
            plane,
            token,
            head,
            offset,
        } = at;
        if self.segment.is_none() {
            let (chunk, token) = (token / CHUNK, token % CHUNK);
            let row = (plane * LAYERS + layer) * CHUNK / block + token / block;
            let element = ((row * heads + head) * block + token % block) * SIZE + offset;
            return (chunk, 4 * element);
        }
        let (number, token) = (token / block + 1, token % block);
        let element = match self.form {
            Form::SplitHeadsFirst => {
                let row = plane * self.blocks() + number;
                ((row * heads + head) * block + token) * SIZE + offset
            }
            Form::SplitTokensFirst => {
                let row = plane * self.blocks() + number;
                ((row * block + token) * heads + head) * SIZE + offset
            }
            Form::PairTokensFirst => {
                (((number * 2 + plane) * block + token) * heads + head) * SIZE + offset
            }
            // The keys of a block's tokens, then their values, as vLLM's CPU attention lays them out.
            Form::FusedHeadsFirst => {
                (((number * heads + head) * 2 + plane) * block + token) * SIZE + offset
            }
            Form::Mla => ((number * block + token) * 2 + plane) * SIZE + offset,
        };
        let layer_elements = self.blocks() * block * heads * 2 * SIZE;
        (0, 4 * (layer * layer_elements + element))
    }

    fn key(&self, request: &str, tokens: &[u32]) -> CacheKey {
        CacheKey {
            model_name: MODEL.to_owned(),
            world_size: self.ranks as u32,
            worker_id: Some(self.rank as u32),
            token_ids: tokens.to_vec(),
            end: TOKENS as u64,
            request_id: request.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        }
    }

    /// Returns the bytes of whole chunks, or of the KV memory.
    fn image(&self, seed: u32) -> Vec<Vec<u8>> {
        let chunk = LAYERS * 2 * CHUNK * self.heads() * SIZE * 4;
        let mut image = match &self.segment {
            Some(segment) => vec![vec![UNTOUCHED; segment.len]],
            None => vec![vec![UNTOUCHED; chunk]; CHUNKS],
        };
        for element in Element::all(self.heads()) {
            let (part, byte) = self.byte(element);
            let named = Element {
                head: element.head + self.rank * self.heads(),
                ..element
            };
            image[part][byte..byte + 4].copy_from_slice(&named.value(seed));
        }
        image
    }

    fn block_ids(&self) -> Vec<Vec<u32>> {
        vec![(1..self.blocks() as u32).collect()]
    }

    fn store(&mut self, server: &Server, request: &str, tokens: &[u32], seed: u32) {
        let (key, instance_id) = (self.key(request, tokens), self.instance_id);
        let image = self.image(seed);
        if let Some(segment) = &self.segment {
            segment.write(0, &image[0]);
            let store = Request::Store {
                key,
                instance_id,
                block_ids: self.block_ids(),
                event: Vec::new(),
            };
            assert_eq!(self.client.answer(&store), Reply::Transferred(true));
            return;
        }
        let prepare = Request::PrepareStore {
            key: key.clone(),
            instance_id,
        };
        let Reply::StoreSlots { slots, .. } = self.client.answer(&prepare) else {
            panic!("no slots");
        };
        assert_eq!(slots.len(), CHUNKS);
        for (slot, bytes) in slots.iter().zip(&image) {
            server.pool().write(slot, bytes);
        }
        let commit = Request::CommitStore {
            key,
            instance_id,
            pickled: 0,
        };
        assert_eq!(self.client.answer(&commit), Reply::Bool(true));
    }

    /// Returns the bytes of a prompt as [`Self::image`] does; `None` on a miss.
    fn retrieve(&mut self, server: &Server, request: &str, tokens: &[u32]) -> Option<Vec<Vec<u8>>> {
        let (key, instance_id) = (self.key(request, tokens), self.instance_id);
        if let Some(segment) = &self.segment {
            segment.write(0, &vec![UNTOUCHED; segment.len]);
            let retrieve = Request::Retrieve {
                key,
                instance_id,
                block_ids: self.block_ids(),
                event: Vec::new(),
                skip_first_n_tokens: 0,
            };
            let found = self.client.answer(&retrieve) == Reply::Transferred(true);
            return found.then(|| vec![segment.read(0, segment.len)]);
        }
        let prepare = Request::PrepareRetrieve {
            key: key.clone(),
            instance_id,
        };
        let Reply::RetrieveSlots(slots) = self.client.answer(&prepare) else {
            panic!("no answer to a retrieve");
        };
        let found = slots.map(|slots| slots.iter().map(|slot| server.pool().read(slot)).collect());
        let commit = Request::CommitRetrieve { key, instance_id };
        assert_eq!(self.client.answer(&commit), Reply::Bool(found.is_some()));
        found
    }

    /// Returns true if this engine may read chunks of the other.
    fn shares_with(&self, other: &Self) -> bool {
        let is_same = mem::discriminant(&self.form) == mem::discriminant(&other.form);
        // Token after token in each plane, so that the size of a block does not matter.
        let is_in_token_order = matches!(self.form, Form::SplitTokensFirst | Form::Mla);
        match (&self.segment, &other.segment) {
            (Some(_), Some(_)) => is_same && (is_in_token_order || self.block == other.block),
            (None, None) => self.block == other.block,
            _ => false,
        }
    }
}

/// Two engines of every kind are in it, so that what equal engines share is seen as well.
#[test]
fn no_engine_is_given_bytes_in_an_order_that_is_not_its_own() {
    let server = Server::with(64 << 20, |_| {}, |_| {});
    let mut engines = Vec::new();
    for block in BLOCKS {
        for _ in 0..2 {
            for form in FORMS {
                let id = engines.len() as u64;
                engines.push(Engine::server_driven(&server, form, block, id));
            }
            let id = engines.len() as u64;
            engines.push(Engine::engine_driven(&server, block, id));
        }
    }
    let (mut hits, mut misses) = (0, 0);
    for writer in 0..engines.len() {
        let seed = writer as u32;
        let tokens = prompt(seed + 1, TOKENS);
        engines[writer].store(&server, &format!("store-{writer}"), &tokens, seed);
        for reader in 0..engines.len() {
            let request = format!("{writer}-{reader}");
            let found = engines[reader].retrieve(&server, &request, &tokens);
            let name = |number: usize| {
                let Engine {
                    form,
                    block,
                    segment,
                    ..
                } = &engines[number];
                let mode = if segment.is_some() {
                    "server"
                } else {
                    "engine"
                };
                format!("{form:?} in blocks of {block}, {mode}-driven")
            };
            let context = format!("{} reads what {} stored", name(reader), name(writer));
            let shares = engines[reader].shares_with(&engines[writer]);
            assert_eq!(found.is_some(), shares, "{context}");
            if let Some(found) = found {
                assert!(
                    found == engines[reader].image(seed),
                    "wrong bytes: {context}"
                );
                hits += 1;
            } else {
                misses += 1;
            }
        }
    }
    assert!(hits > 2 * engines.len() && misses > hits, "{hits} {misses}");
    server.assert_idle();
}

/// One rank finds as its own what two ranks have stored, and never in another order.
#[test]
fn an_engine_with_one_rank_reads_the_chunks_of_two_ranks_in_its_own_order() {
    let (mut hits, mut misses) = (0, 0);
    for (wide, wide_block) in FORMS
        .into_iter()
        .flat_map(|form| BLOCKS.map(|block| (form, block)))
    {
        let tier = Arc::new(MemoryBackend::default());
        let server = Server::with_tiers(vec![tier as _], 64 << 20, |_| {}, |_| {});
        let tokens = prompt(1, TOKENS);
        for rank in [0, 1] {
            let mut engine = Engine::rank(&server, wide, wide_block, rank as u64, (2, rank));
            engine.store(&server, &format!("store-{rank}"), &tokens, 1);
        }
        for (number, form) in FORMS.into_iter().enumerate() {
            for block in BLOCKS {
                let id = 10 + (number * 10 + block) as u64;
                let mut engine = Engine::server_driven(&server, form, block, id);
                let request = format!("one-{id}");
                let mut key = engine.key(&request, &tokens);
                key.worker_id = None;
                let found = lookup(&mut engine.client, &key);
                let is_same = mem::discriminant(&form) == mem::discriminant(&wide);
                let context = format!("{form:?} of {block} reads {wide:?} of {wide_block}");
                if is_same && block == wide_block && !matches!(form, Form::Mla) {
                    assert_eq!(found, CHUNKS as u64, "{context}");
                }
                let read = engine.retrieve(&server, &request, &tokens);
                assert_eq!(read.is_some(), found == CHUNKS as u64, "{context}");
                match read {
                    Some(read) => {
                        hits += 1;
                        assert!(read == engine.image(1), "wrong bytes: {context}");
                    }
                    None => misses += 1,
                }
                end_session(&mut engine.client, &request);
                // A scheduler is promised what workers of all layouts have.
                let unregister = Request::Unregister {
                    instance_id: id,
                    engine_driven: false,
                };
                assert_eq!(engine.client.answer(&unregister), Reply::None);
            }
        }
        server.assert_idle();
    }
    assert!(hits >= 12 && misses > hits, "{hits} {misses}");
}
