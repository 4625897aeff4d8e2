//! Workers whose memory the server maps and copies, in each layout that vLLM registers.

use std::collections::HashMap;

use crate::common::{
    Answer as _, CHUNK, MODEL, Segment, Server, end_session, lookup, prompt, segment_name,
};
use lmc_vllm_adapter::{
    CacheKey, Client, CpuShm, EngineGroup, KvDescriptor, RegisterKvCache, Reply, Request,
    TensorMeta, UnknownFields,
};

const BLOCK: usize = 4;
pub(crate) const HEADS: usize = 2;
pub(crate) const SIZE: usize = 6;
const BLOCKS: usize = 64;
pub(crate) const LAYERS: usize = 3;

/// The shape of one layer's tensor, in float32.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Form {
    /// `[2, blocks, heads, tokens, size]`, older CPU attention of vLLM.
    SplitHeadsFirst,
    /// `[2, blocks, tokens, heads, size]`.
    SplitTokensFirst,
    /// `[blocks, 2, tokens, heads, size]`.
    PairTokensFirst,
    /// `[blocks, heads, tokens, 2 * size]`, current CPU attention of vLLM.
    FusedHeadsFirst,
    /// `[blocks, tokens, 2 * size]`: MLA.
    Mla,
}

pub(crate) const FORMS: [Form; 5] = [
    Form::SplitHeadsFirst,
    Form::SplitTokensFirst,
    Form::PairTokensFirst,
    Form::FusedHeadsFirst,
    Form::Mla,
];

impl Form {
    /// Returns the shape with this number of blocks, of `block` tokens each.
    pub(crate) fn shape_of(self, blocks: usize, block: usize, heads: usize) -> Vec<u64> {
        let shape: &[usize] = match self {
            Self::SplitHeadsFirst => &[2, blocks, heads, block, SIZE],
            Self::SplitTokensFirst => &[2, blocks, block, heads, SIZE],
            Self::PairTokensFirst => &[blocks, 2, block, heads, SIZE],
            Self::FusedHeadsFirst => &[blocks, heads, block, 2 * SIZE],
            Self::Mla => &[blocks, block, 2 * SIZE],
        };
        shape.iter().map(|&extent| extent as u64).collect()
    }

    fn shape(self) -> Vec<u64> {
        self.shape_of(BLOCKS, BLOCK, HEADS)
    }

    pub(crate) fn order(self) -> &'static str {
        match self {
            Self::SplitHeadsFirst | Self::FusedHeadsFirst => "HND",
            _ => "NHD",
        }
    }

    /// Returns the byte ranges of one block in one layer's tensor.
    fn block(self, block: usize) -> Vec<std::ops::Range<usize>> {
        let elements: u64 = self.shape().iter().product::<u64>();
        let layer_bytes = elements as usize * 4;
        match self {
            Self::SplitHeadsFirst | Self::SplitTokensFirst => {
                let plane = layer_bytes / 2;
                let bytes = plane / BLOCKS;
                vec![
                    block * bytes..(block + 1) * bytes,
                    plane + block * bytes..plane + (block + 1) * bytes,
                ]
            }
            _ => {
                let bytes = layer_bytes / BLOCKS;
                std::iter::once(block * bytes..(block + 1) * bytes).collect()
            }
        }
    }
}

/// An engine's KV memory: all layers in one segment.
struct Engine {
    client: Client,
    segment: Segment,
    form: Form,
    instance_id: u64,
}

pub(crate) fn strides(shape: &[u64]) -> Vec<u64> {
    let mut stride = vec![1; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        stride[axis] = stride[axis + 1] * shape[axis + 1];
    }
    stride
}

impl Engine {
    /// Creates the segment and its descriptors. The size is that of float32; a smaller element type
    /// leaves the end of the segment unused.
    fn memory(form: Form, dtype: &str) -> (Segment, Vec<KvDescriptor>) {
        let shape = form.shape();
        let elements: u64 = shape.iter().product();
        let nbytes = elements * 4 * LAYERS as u64;
        let name = segment_name();
        let segment = Segment::new(&name, nbytes as usize);
        let layers = (0..LAYERS as u64).map(|layer| {
            KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{name}"),
                nbytes,
                tensor: TensorMeta {
                    dtype: dtype.to_owned(),
                    stride: strides(&shape),
                    shape: shape.clone(),
                    storage_offset: layer * elements,
                },
            })
        });
        (segment, layers.collect())
    }

    fn register(server: &Server, form: Form, instance_id: u64) -> Self {
        Self::register_as(server, form, instance_id, "float32")
    }

    fn register_as(server: &Server, form: Form, instance_id: u64, dtype: &str) -> Self {
        Self::register_with(server, form, instance_id, dtype, -1)
    }

    /// `window`: of all layers, in tokens; negative for none.
    fn register_with(
        server: &Server,
        form: Form,
        instance_id: u64,
        dtype: &str,
        window: i64,
    ) -> Self {
        let (segment, kv_caches) = Self::memory(form, dtype);
        let mut client = server.client();
        client
            .ask(&Request::RegisterKvCache(Box::new(RegisterKvCache {
                instance_id,
                kv_caches,
                model_name: MODEL.to_owned(),
                world_size: 1,
                engine_type: "vllm".to_owned(),
                kv_layout: Some(form.order().to_owned()),
                unknown_hints: UnknownFields::default(),
                groups: vec![EngineGroup {
                    layer_indices: (0..LAYERS as u32).collect(),
                    tokens_per_block: BLOCK as u32,
                    sw_size_tokens: window,
                    ..EngineGroup::default()
                }],
            })))
            .expect("registered");
        Self {
            client,
            segment,
            form,
            instance_id,
        }
    }

    fn wipe(&self) {
        self.segment.write(0, &vec![0xEE; self.segment.len]);
    }

    fn layer_bytes(&self) -> usize {
        self.segment.len / LAYERS
    }

    /// Fills a block with bytes derived from a seed.
    fn fill(&self, block: usize, seed: u64) {
        for layer in 0..LAYERS {
            for (part, range) in self.form.block(block).into_iter().enumerate() {
                let bytes: Vec<u8> = (0..range.len())
                    .map(|index| expected(seed, layer, part, index))
                    .collect();
                self.segment
                    .write(layer * self.layer_bytes() + range.start, &bytes);
            }
        }
    }

    /// Returns true if a block contains the bytes of this seed.
    fn holds(&self, block: usize, seed: u64) -> bool {
        (0..LAYERS).all(|layer| {
            self.form
                .block(block)
                .into_iter()
                .enumerate()
                .all(|(part, range)| {
                    let at = layer * self.layer_bytes() + range.start;
                    let bytes = self.segment.read(at, range.len());
                    bytes
                        .iter()
                        .enumerate()
                        .all(|(i, &b)| b == expected(seed, layer, part, i))
                })
        })
    }

    fn key(&self, request: &str, tokens: &[u32], chunks: std::ops::Range<usize>) -> CacheKey {
        CacheKey {
            model_name: MODEL.to_owned(),
            world_size: 1,
            worker_id: Some(0),
            token_ids: tokens.to_vec(),
            start: (chunks.start * CHUNK) as u64,
            end: (chunks.end * CHUNK) as u64,
            request_id: request.to_owned(),
            num_kv_readers: 1,
            ..CacheKey::default()
        }
    }

    fn store(&mut self, key: &CacheKey, block_ids: &[u32]) -> bool {
        let request = Request::Store {
            key: key.clone(),
            instance_id: self.instance_id,
            block_ids: vec![block_ids.to_vec()],
            event: Vec::new(),
        };
        self.client.answer(&request) == Reply::Transferred(true)
    }

    fn retrieve(&mut self, key: &CacheKey, block_ids: &[u32], skip: u64) -> bool {
        let request = Request::Retrieve {
            key: key.clone(),
            instance_id: self.instance_id,
            block_ids: vec![block_ids.to_vec()],
            event: Vec::new(),
            skip_first_n_tokens: skip,
        };
        self.client.answer(&request) == Reply::Transferred(true)
    }
}

fn expected(seed: u64, layer: usize, part: usize, index: usize) -> u8 {
    let mixed = (seed * 1009 + layer as u64 * 131 + part as u64 * 31 + index as u64 * 7 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as u8
}

const PER_CHUNK: usize = CHUNK / BLOCK;

#[test]
fn blocks_come_back_byte_for_byte_in_every_layout() {
    for (number, form) in FORMS.into_iter().enumerate() {
        let server = Server::start();
        let mut engine = Engine::register(&server, form, number as u64);
        let tokens = prompt(1, 3 * CHUNK);
        // Scattered and adjacent blocks, in an order of their own.
        let from: Vec<u32> = vec![7, 8, 9, 30, 2, 1, 50, 51, 52, 53, 10, 63];
        assert_eq!(from.len(), 3 * PER_CHUNK);
        for (seed, &block) in from.iter().enumerate() {
            engine.fill(block as usize, seed as u64);
        }
        assert!(
            engine.store(&engine.key("a", &tokens, 0..3), &from),
            "{form:?}"
        );
        let mut scheduler = server.client();
        let key = engine.key("b", &tokens, 0..3);
        assert_eq!(lookup(&mut scheduler, &key), 3);
        engine.wipe();
        let to: Vec<u32> = (20..32).rev().collect();
        assert!(engine.retrieve(&key, &to, 0), "{form:?}");
        for (seed, &block) in to.iter().enumerate() {
            assert!(
                engine.holds(block as usize, seed as u64),
                "{form:?}: block {block}"
            );
        }
        let untouched = engine.form.block(5).remove(0);
        let untouched = engine.segment.read(untouched.start, untouched.len());
        assert!(untouched.iter().all(|&byte| byte == 0xEE));
        assert_eq!(
            server.status().usage.leases,
            0,
            "the retrieve gave the leases back"
        );
        end_session(&mut scheduler, "b");
        server.assert_idle();
    }
}

#[test]
fn blocks_shared_with_the_engines_own_cache_are_not_written() {
    let server = Server::start();
    let mut engine = Engine::register(&server, Form::FusedHeadsFirst, 100);
    let tokens = prompt(1, 2 * CHUNK);
    let blocks: Vec<u32> = (1..=2 * PER_CHUNK as u32).collect();
    for &block in &blocks {
        engine.fill(block as usize, u64::from(block));
    }
    let key = engine.key("a", &tokens, 0..2);
    assert!(engine.store(&key, &blocks));
    engine.wipe();
    let skip = (3 * BLOCK) as u64;
    assert!(engine.retrieve(&key, &blocks, skip));
    for &block in &blocks {
        let written = engine.holds(block as usize, u64::from(block));
        assert_eq!(written, block > 3, "block {block}");
    }
}

#[test]
fn block_ids_outside_the_engine_and_short_lists_copy_nothing() {
    let server = Server::start();
    let mut engine = Engine::register(&server, Form::FusedHeadsFirst, 103);
    let tokens = prompt(1, 2 * CHUNK);
    let key = engine.key("a", &tokens, 0..2);
    let good: Vec<u32> = (1..=8).collect();
    let mut outside = good.clone();
    outside[5] = BLOCKS as u32;
    assert!(!engine.store(&key, &outside));
    assert!(!engine.store(&key, &good[..7]));
    assert!(!engine.store(&key, &[]));
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert!(engine.store(&key, &good));
    engine.wipe();
    outside[5] = u32::MAX;
    assert!(!engine.retrieve(&key, &outside, 0));
    assert!(
        engine.segment.all_bytes_are(0xEE),
        "a refused copy writes no byte"
    );
    assert!(engine.retrieve(&key, &good, 0));
    end_session(&mut scheduler, "a");
    server.assert_idle();
}

#[test]
fn a_chunk_whose_blocks_the_engine_dropped_is_not_stored() {
    let server = Server::start();
    let mut engine = Engine::register(&server, Form::FusedHeadsFirst, 104);
    let tokens = prompt(1, 3 * CHUNK);
    let key = engine.key("a", &tokens, 0..3);
    let mut blocks: Vec<u32> = (1..=12).collect();
    blocks[5] = 0;
    assert!(engine.store(&key, &blocks));
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 1);
    assert_eq!(server.status().counts.chunks_null, 1);
}

/// vLLM gives a block away when a window has left it, and LMCache's connector does not wait for the copies
/// that it has asked for: what was computed in the block meanwhile was stored as the prompt's.
#[test]
fn nothing_of_an_engine_with_windows_is_kept() {
    let server = Server::start();
    let mut engine = Engine::register_with(&server, Form::FusedHeadsFirst, 105, "float32", 64);
    let tokens = prompt(1, 3 * CHUNK);
    let key = engine.key("a", &tokens, 0..3);
    let blocks: Vec<u32> = (1..=12).collect();
    // The connector goes on.
    assert!(engine.store(&key, &blocks));
    let mut scheduler = server.client();
    assert_eq!(lookup(&mut scheduler, &key), 0);
    assert_eq!(server.status().counts.stores_skipped, 1);
    // Nor is what another engine of the model has stored, as earlier versions did for windows, too.
    let mut other = Engine::register(&server, Form::FusedHeadsFirst, 106);
    let key = other.key("b", &tokens, 0..3);
    assert!(other.store(&key, &blocks));
    assert!(!engine.retrieve(&key, &blocks, 0));
}

#[test]
fn unsupported_registrations_are_refused_with_a_reason() {
    let server = Server::start();
    let mut client = server.client();
    let (segment, good) = Engine::memory(Form::FusedHeadsFirst, "float32");
    let base = RegisterKvCache {
        instance_id: 1,
        kv_caches: good.clone(),
        model_name: MODEL.to_owned(),
        world_size: 1,
        engine_type: "vllm".to_owned(),
        kv_layout: None,
        unknown_hints: UnknownFields::default(),
        groups: Vec::new(),
    };
    let shm = |change: &dyn Fn(&mut CpuShm)| {
        let KvDescriptor::CpuShm(mut shm) = good[0].clone() else {
            panic!("host memory")
        };
        change(&mut shm);
        vec![KvDescriptor::CpuShm(shm)]
    };
    let own_pool = server.shm_name.clone();
    let cases: HashMap<&str, RegisterKvCache> = HashMap::from([
        (
            "memory of kind \"npu\" cannot be opened",
            RegisterKvCache {
                kv_caches: vec![KvDescriptor::Unsupported("npu".to_owned())],
                ..base.clone()
            },
        ),
        (
            "no KV tensors",
            RegisterKvCache {
                kv_caches: Vec::new(),
                ..base.clone()
            },
        ),
        (
            "kv_layout \"XYZ\" is unknown",
            RegisterKvCache {
                kv_layout: Some("XYZ".to_owned()),
                ..base.clone()
            },
        ),
        (
            "recurrent state",
            RegisterKvCache {
                groups: vec![EngineGroup {
                    layer_indices: vec![0],
                    extra_object_group_tag: 0,
                    recurrent_state: true,
                    unknown: UnknownFields::default(),
                    ..EngineGroup::default()
                }],
                ..base.clone()
            },
        ),
        (
            "layer index 9 is beyond",
            RegisterKvCache {
                groups: vec![EngineGroup {
                    layer_indices: vec![9],
                    ..EngineGroup::default()
                }],
                ..base.clone()
            },
        ),
        (
            "do not divide the chunk size",
            RegisterKvCache {
                groups: vec![EngineGroup {
                    layer_indices: vec![0],
                    tokens_per_block: 5,
                    ..EngineGroup::default()
                }],
                ..base.clone()
            },
        ),
        (
            "share /dev/shm",
            RegisterKvCache {
                kv_caches: shm(&|s| s.shm_name = "/lmcache_kv_missing".to_owned()),
                ..base.clone()
            },
        ),
        (
            "shared-memory name",
            RegisterKvCache {
                kv_caches: shm(&|s| s.shm_name = "/../etc/passwd".to_owned()),
                ..base.clone()
            },
        ),
        (
            "pool",
            RegisterKvCache {
                kv_caches: shm(&|s| s.shm_name = own_pool.clone()),
                ..base.clone()
            },
        ),
        (
            "not contiguous",
            RegisterKvCache {
                kv_caches: shm(&|s| s.tensor.stride[3] = 2),
                ..base.clone()
            },
        ),
    ]);
    for (expected, registration) in cases {
        let request = Request::RegisterKvCache(Box::new(registration));
        match client.call(&request).expect("an answer") {
            Reply::Error(text) => assert!(text.contains(expected), "{text:?} lacks {expected:?}"),
            other => panic!("{expected}: answered {other:?}"),
        }
    }
    assert!(server.status().instances.is_empty());
    drop(segment);
}

/// `float16` and `bfloat16` have elements of one size, so only the name in the descriptor
/// distinguishes them.
#[test]
fn two_float_formats_of_one_size_never_share_bytes() {
    for form in FORMS {
        let server = Server::start();
        let mut half = Engine::register_as(&server, form, 1, "float16");
        let mut brain = Engine::register_as(&server, form, 2, "bfloat16");
        half.segment.write(0, &vec![0xAA; half.segment.len]);
        brain.wipe();
        let tokens = prompt(20, 2 * CHUNK);
        let key = half.key("a", &tokens, 0..2);
        let blocks: Vec<u32> = (1..=2 * (CHUNK / BLOCK) as u32).collect();
        assert!(half.store(&key, &blocks), "{form:?}");
        assert!(!brain.retrieve(&key, &blocks, 0), "{form:?}");
        assert!(brain.segment.all_bytes_are(0xEE), "{form:?}");
        half.wipe();
        assert!(half.retrieve(&key, &blocks, 0), "{form:?}");
        assert!(!half.segment.all_bytes_are(0xEE), "{form:?}");
    }
}

/// vLLM registers every fp8 and packed format as `uint8`. Such chunks are removed with their last
/// worker, also in this mode.
#[test]
fn chunks_of_an_unknown_format_end_with_their_last_worker() {
    for form in FORMS {
        let server = Server::start();
        let mut first = Engine::register_as(&server, form, 1, "uint8");
        first.segment.write(0, &vec![0xAA; first.segment.len]);
        let tokens = prompt(21, 2 * CHUNK);
        let key = first.key("a", &tokens, 0..2);
        let blocks: Vec<u32> = (1..=2 * (CHUNK / BLOCK) as u32).collect();
        assert!(first.store(&key, &blocks), "{form:?}");
        assert!(first.retrieve(&key, &blocks, 0), "{form:?}");
        let unregister = Request::Unregister {
            instance_id: 1,
            engine_driven: false,
        };
        assert_eq!(first.client.answer(&unregister), Reply::None);
        let mut next = Engine::register_as(&server, form, 2, "uint8");
        next.wipe();
        assert!(!next.retrieve(&key, &blocks, 0), "{form:?}");
        assert!(next.segment.all_bytes_are(0xEE), "{form:?}");
        let mut scheduler = server.client();
        assert_eq!(lookup(&mut scheduler, &key), 0, "{form:?}");
    }
}
