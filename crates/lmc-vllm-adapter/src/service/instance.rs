//! A registered worker: what its chunks look like and how their bytes move.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use lmc_engine::OwnerId;
use lmc_key::{DtypeName, KeySpace, LayoutFingerprint, ModelName, Salt, SpaceId};
use lmc_memory::{
    DType, GroupLayout, KvOrder, Layout, MappedSegment, PagedGeometry, PagedKv, PlaneBase, Planes,
    SegmentError, SharedName,
};
use thiserror::Error;

use crate::protocol::{CpuShm, EngineDrivenContext, EngineGroup, KvDescriptor, RegisterKvCache};
use crate::service::gate::Gate;
use crate::service::generation::Opaque;
use crate::service::{ClientId, ServiceConfig};

/// Why a registration was refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum RegisterError {
    /// The description cannot be right, or cannot be served here.
    #[error("{0}")]
    Invalid(String),
    /// Memory that this server cannot open.
    #[error(
        "engine memory of kind {0:?} cannot be opened by this server: it serves host memory \
         (cpu_shm); use lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Memory(String),
    /// The user that names the memory is not known, so neither is whether it is theirs.
    #[error(
        "the user of this connection is not known, so this server maps no memory for it: connect \
         over loopback from the server's own network namespace, or use \
         lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    UnknownUser,
}

fn invalid(error: impl std::fmt::Display) -> RegisterError {
    RegisterError::Invalid(error.to_string())
}

/// One KV group of an engine whose memory the server copies from and to.
///
/// A block is copied whole, so the unit of `paged` is a block, not a token: its "tokens" are
/// blocks, and a chunk is a row of blocks for each plane of each layer.
#[derive(Debug)]
pub(crate) struct GroupCopy {
    pub(crate) paged: PagedKv,
    /// Blocks of one chunk.
    pub(crate) blocks_per_chunk: u64,
    /// Tokens of one block.
    pub(crate) tokens_per_block: u64,
    /// First byte of this group in a chunk, and the one after its last.
    pub(crate) range: std::ops::Range<usize>,
}

/// How a worker's bytes reach the pool.
#[derive(Debug)]
pub(crate) enum Transport {
    /// The worker maps the pool and copies by itself.
    EngineDriven,
    /// The server maps the worker's memory and copies.
    ServerDriven(Arc<[GroupCopy]>),
}

/// A registered worker.
#[derive(Debug)]
pub(crate) struct Instance {
    /// Who its transfers belong to.
    pub(crate) owner: OwnerId,
    pub(crate) client: ClientId,
    pub(crate) model: ModelName,
    pub(crate) world_size: u32,
    /// Names the layout in keys: the registered one, or its generation where that is opaque.
    pub(crate) fingerprint: LayoutFingerprint,
    /// Set when the format of its elements is unknown.
    pub(crate) opaque: Option<Opaque>,
    pub(crate) dtype: DType,
    /// Shape that engine-driven workers see.
    pub(crate) shape: Vec<u64>,
    pub(crate) chunk_bytes: u64,
    /// True for multi-head latent attention; `None` if the registration does not distinguish it
    /// from K and V that are packed into one plane.
    pub(crate) mla: Option<bool>,
    pub(crate) transport: Transport,
    /// Stands before copies in its memory.
    pub(crate) gate: Gate,
    /// KV ranks that it has moved chunks of; one, as engines are.
    pub(crate) ranks: BTreeSet<u16>,
    pub(crate) registered: Instant,
    pub(crate) last_seen: Instant,
    /// Whether it ever sent a sign of life; tells how long its silence is tolerated.
    pub(crate) pinged: bool,
    /// When its connection ended, if it did.
    pub(crate) orphaned: Option<Instant>,
    /// Space of its chunks by tenant, for the salts of the last requests.
    spaces: RefCell<HashMap<Salt, SpaceId>>,
}

/// Salts of which a worker's spaces are kept.
const MAX_SPACES: usize = 64;

impl Instance {
    /// A worker that copies by itself.
    pub(crate) fn engine_driven(
        context: &EngineDrivenContext,
        client: ClientId,
        chunk_size: u32,
        now: Instant,
    ) -> Result<Self, RegisterError> {
        let dtype: DType = context.dtype.parse().map_err(invalid)?;
        let tokens = context.num_physical_slots.unwrap_or(chunk_size);
        let planes = if context.use_mla {
            Planes::Fused
        } else {
            Planes::KeyValue
        };
        let layout = GroupLayout::new(
            planes,
            context.num_layers,
            tokens,
            context.hidden_dim_size,
            dtype,
        )
        .map_err(invalid)?;
        let fingerprint = token_order(&[layout], &[])?;
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: context.model_name.parse().map_err(invalid)?,
            world_size: context.world_size,
            fingerprint,
            opaque: Opaque::of(fingerprint, &[dtype], &layout.shape()),
            dtype,
            shape: layout.shape(),
            chunk_bytes: layout.chunk_bytes(),
            // The field is true for every layout of one plane.
            mla: (!context.use_mla).then_some(false),
            transport: Transport::EngineDriven,
            gate: Gate::default(),
            ranks: BTreeSet::new(),
            registered: now,
            last_seen: now,
            pinged: false,
            orphaned: None,
            spaces: RefCell::default(),
        })
    }

    /// A worker whose memory the server copies from and to. `user` is the one at the other end of
    /// its connection.
    pub(crate) fn server_driven(
        registration: &RegisterKvCache,
        client: ClientId,
        user: Option<u32>,
        chunk_size: u32,
        now: Instant,
    ) -> Result<Self, RegisterError> {
        let tensors = tensors(registration)?;
        let user = user.ok_or(RegisterError::UnknownUser)?;
        let mut segments = Segments::of(user);
        let whole = [EngineGroup {
            layer_indices: (0..tensors.len() as u32).collect(),
            ..EngineGroup::default()
        }];
        let groups = if registration.groups.is_empty() {
            &whole[..]
        } else {
            &registration.groups
        };
        let order = match registration.kv_layout.as_deref() {
            None | Some("HND" | "BLHNC") => KvOrder::HeadsFirst,
            Some("NHD" | "BLNHC") => KvOrder::TokensFirst,
            Some(other) => {
                let text =
                    format!("kv_layout {other:?} is unknown, expected NHD, HND, BLHNC or BLNHC");
                return Err(RegisterError::Invalid(text));
            }
        };
        let mut copies = Vec::with_capacity(groups.len());
        let mut identities = Vec::with_capacity(groups.len());
        let (mut end, mut mla) = (0, true);
        let mut dtypes = Vec::with_capacity(groups.len());
        for group in groups {
            let described = describe(group, &tensors, order, chunk_size)?;
            mla &= described.heads_are_latent();
            let (paged, layout) = described.open(&mut segments)?;
            let start = end;
            end += usize::try_from(layout.chunk_bytes()).map_err(invalid)?;
            dtypes.push(layout.dtype());
            identities.push(described.identity()?);
            copies.push(GroupCopy {
                paged,
                blocks_per_chunk: described.blocks_per_chunk,
                tokens_per_block: described.tokens_per_block,
                range: start..end,
            });
        }
        let Some(&dtype) = dtypes.first() else {
            return Err(RegisterError::Invalid("no KV groups".to_owned()));
        };
        let layers: Vec<u32> = groups
            .iter()
            .flat_map(|group| group.layer_indices.iter().copied())
            .collect();
        let (fingerprint, shape) = identity(&identities, &layers)?;
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: registration.model_name.parse().map_err(invalid)?,
            world_size: registration.world_size,
            fingerprint,
            opaque: Opaque::of(fingerprint, &dtypes, &shape),
            dtype,
            shape,
            chunk_bytes: end as u64,
            mla: Some(mla),
            transport: Transport::ServerDriven(copies.into()),
            gate: Gate::default(),
            ranks: BTreeSet::new(),
            registered: now,
            last_seen: now,
            pinged: false,
            orphaned: None,
            spaces: RefCell::default(),
        })
    }

    /// Returns the space of this worker's chunks under a tenant's salt.
    pub(crate) fn space(&self, config: &ServiceConfig, salt: &Salt) -> SpaceId {
        let mut spaces = self.spaces.borrow_mut();
        if let Some(&space) = spaces.get(salt) {
            return space;
        }
        if spaces.len() >= MAX_SPACES {
            spaces.clear();
        }
        let space = KeySpace {
            algorithm: config.hasher.algorithm(),
            chunk_size: config.hasher.chunk_size(),
            model: self.model.clone(),
            world_size: self.world_size,
            layout: self.fingerprint,
            dtype: dtype_name(self.dtype),
            salt: salt.clone(),
            identity: config.identity.clone(),
        };
        *spaces.entry(salt.clone()).or_insert(space.id())
    }

    /// Whether it may be heard of on this connection: its own, or any when its own is over.
    pub(crate) fn belongs_to(&self, client: ClientId) -> bool {
        self.client == client || self.orphaned.is_some()
    }

    /// The worker was heard of, on this connection.
    pub(crate) fn seen(&mut self, client: ClientId, now: Instant) {
        self.client = client;
        self.last_seen = now;
        self.orphaned = None;
    }

    /// `engine_driven` or `lmcache_driven`, as the client's setting calls them.
    pub(crate) fn mode(&self) -> &'static str {
        match self.transport {
            Transport::EngineDriven => "engine_driven",
            Transport::ServerDriven(_) => "lmcache_driven",
        }
    }
}

fn dtype_name(dtype: DType) -> DtypeName {
    dtype
        .name()
        .parse()
        .expect("torch's names of element types are valid in a key's text")
}

/// What makes the bytes of one group's chunks mean what they mean.
enum Identity {
    /// `[planes, layers, tokens, hidden]`, which engine-driven workers write too.
    TokenOrder(GroupLayout),
    /// Blocks as the engine has them, heads before tokens within a block.
    BlockOrder {
        blocks: GroupLayout,
        heads: u64,
        block_tokens: u64,
        inner_planes: u64,
        order: KvOrder,
    },
}

/// The fingerprint of a chunk and the shape to show for it. `layers` are the indices of all
/// groups' layers, in the order in which they lie in a chunk.
fn identity(
    groups: &[Identity],
    layers: &[u32],
) -> Result<(LayoutFingerprint, Vec<u64>), RegisterError> {
    let token_ordered: Option<Vec<_>> = groups
        .iter()
        .map(|group| match group {
            Identity::TokenOrder(layout) => Some(*layout),
            Identity::BlockOrder { .. } => None,
        })
        .collect();
    if let Some(layouts) = token_ordered {
        return Ok((token_order(&layouts, layers)?, layouts[0].shape()));
    }
    let mut description = b"lmc layout 2: blocks".to_vec();
    let mut shape = Vec::new();
    for group in groups {
        let (layout, within) = match group {
            Identity::TokenOrder(layout) => (layout, [0; 4]),
            Identity::BlockOrder {
                blocks,
                heads,
                block_tokens,
                inner_planes,
                order,
            } => {
                let order = match order {
                    KvOrder::TokensFirst => 1,
                    KvOrder::HeadsFirst => 2,
                };
                (blocks, [*heads, *block_tokens, *inner_planes, order])
            }
        };
        description.extend_from_slice(&Layout::single(*layout).canonical_bytes());
        for number in within {
            description.extend_from_slice(&number.to_le_bytes());
        }
        if shape.is_empty() {
            shape = layout.shape();
        }
    }
    describe_order(layers, &mut description);
    Ok((LayoutFingerprint::of(&description), shape))
}

fn token_order(groups: &[GroupLayout], layers: &[u32]) -> Result<LayoutFingerprint, RegisterError> {
    let mut description = b"lmc layout 1: tokens".to_vec();
    description.extend_from_slice(
        &Layout::new(groups.to_vec())
            .map_err(invalid)?
            .canonical_bytes(),
    );
    describe_order(layers, &mut description);
    Ok(LayoutFingerprint::of(&description))
}

/// Which layer comes where, unless each has its own place.
fn describe_order(layers: &[u32], description: &mut Vec<u8>) {
    if !layers.iter().copied().eq(0..layers.len() as u32) {
        description.extend_from_slice(b"layers");
        for layer in layers {
            description.extend_from_slice(&layer.to_le_bytes());
        }
    }
}

fn tensors(registration: &RegisterKvCache) -> Result<Vec<&CpuShm>, RegisterError> {
    if registration.kv_caches.is_empty() {
        return Err(RegisterError::Invalid(
            "no KV tensors were registered".to_owned(),
        ));
    }
    registration
        .kv_caches
        .iter()
        .map(|descriptor| match descriptor {
            KvDescriptor::CpuShm(shm) => Ok(shm),
            KvDescriptor::Unsupported(kind) => Err(RegisterError::Memory(kind.clone())),
        })
        .collect()
}

/// One group's tensors, understood: blocks along one axis, everything else inside a block.
struct Described<'a> {
    tensors: Vec<&'a CpuShm>,
    dtype: DType,
    /// Whether K and V lie in two ranges of each tensor (`[2, blocks, …]`).
    split: bool,
    order: KvOrder,
    blocks: u64,
    /// Elements from one block to the next.
    block_stride: u64,
    /// Elements of a block, which are contiguous.
    block_elements: u64,
    /// Planes inside a block (`[blocks, 2, …]`).
    inner_planes: u64,
    heads: u64,
    block_tokens: u64,
    head_size: u64,
    tokens_per_block: u64,
    blocks_per_chunk: u64,
}

fn describe<'a>(
    group: &EngineGroup,
    tensors: &[&'a CpuShm],
    order: KvOrder,
    chunk_size: u32,
) -> Result<Described<'a>, RegisterError> {
    let fail = |text: String| Err(RegisterError::Invalid(text));
    if group.recurrent_state {
        return fail(
            "a KV group holds recurrent state (Mamba, GDN), which this server does not cache yet"
                .to_owned(),
        );
    }
    let mut layers = Vec::with_capacity(group.layer_indices.len());
    for &index in &group.layer_indices {
        match tensors.get(index as usize) {
            Some(&tensor) => layers.push(tensor),
            None => {
                let count = tensors.len();
                return fail(format!(
                    "layer index {index} is beyond the {count} registered tensors"
                ));
            }
        }
    }
    let once: BTreeSet<u32> = group.layer_indices.iter().copied().collect();
    if once.len() < layers.len() {
        return fail("a KV group names a layer twice".to_owned());
    }
    let Some(first) = layers.first() else {
        return fail("a KV group has no layers".to_owned());
    };
    let (shape, stride) = (&first.tensor.shape, &first.tensor.stride);
    let alike = |t: &&CpuShm| {
        t.tensor.shape == *shape
            && t.tensor.stride == *stride
            && t.tensor.dtype == first.tensor.dtype
    };
    if !layers.iter().all(alike) {
        return fail("the layers of a KV group differ in shape, stride or dtype".to_owned());
    }
    let heads_first = order == KvOrder::HeadsFirst;
    // Rank 5 has a K/V axis, rank 4 packs K and V within a head, rank 3 is MLA.
    let (split, block_axis, inner_planes) = match **shape {
        [2, _, _, _, _] => (true, 1, 1),
        [_, 2, _, _, _] => (false, 0, 2),
        [_, _, _, _] | [_, _, _] => (false, 0, 1),
        _ => {
            return fail(format!(
                "KV tensors of shape {shape:?} are not a layout of vLLM that this server knows"
            ));
        }
    };
    let inner = &shape[shape.len() - if shape.len() == 3 { 2 } else { 3 }..];
    let (heads, block_tokens, head_size) = match (inner, heads_first) {
        ([tokens, size], _) => (1, *tokens, *size),
        ([heads, tokens, size], true) | ([tokens, heads, size], false) => (*heads, *tokens, *size),
        _ => unreachable!("the slice above has two or three axes"),
    };
    let mut expected = 1u64;
    for axis in (block_axis + 1..shape.len()).rev() {
        if stride[axis] != expected && shape[axis] > 1 {
            return fail(format!(
                "a block of the KV tensors is not contiguous: shape {shape:?}, stride {stride:?}"
            ));
        }
        expected = expected.saturating_mul(shape[axis]);
    }
    let tokens_per_block = match u64::from(group.tokens_per_block) {
        0 => block_tokens,
        declared => declared,
    };
    if tokens_per_block == 0 || u64::from(chunk_size) % tokens_per_block != 0 {
        return fail(format!(
            "blocks of {tokens_per_block} tokens do not divide the chunk size {chunk_size}: \
             start the server with a --chunk-size that is a multiple of the engine's block size"
        ));
    }
    Ok(Described {
        dtype: first.tensor.dtype.parse().map_err(invalid)?,
        tensors: layers,
        split,
        order,
        blocks: shape[block_axis],
        block_stride: stride[block_axis],
        block_elements: expected,
        inner_planes,
        heads,
        block_tokens,
        head_size,
        tokens_per_block,
        blocks_per_chunk: u64::from(chunk_size) / tokens_per_block,
    })
}

impl Described<'_> {
    /// Returns true if tokens have one latent vector instead of heads: rank 3, as vLLM lays MLA out.
    fn heads_are_latent(&self) -> bool {
        let first = self.tensors.first();
        first.is_some_and(|first| first.tensor.shape.len() == 3)
    }

    fn planes(&self) -> Planes {
        if self.split {
            Planes::KeyValue
        } else {
            Planes::Fused
        }
    }

    /// The layout in units of blocks.
    fn block_layout(&self) -> Result<GroupLayout, RegisterError> {
        let small = |value: u64| u32::try_from(value).map_err(invalid);
        let layers = small(self.tensors.len() as u64)?;
        let (blocks, elements) = (small(self.blocks_per_chunk)?, small(self.block_elements)?);
        GroupLayout::new(self.planes(), layers, blocks, elements, self.dtype).map_err(invalid)
    }

    fn identity(&self) -> Result<Identity, RegisterError> {
        let blocks = self.block_layout()?;
        // One token after another, with nothing between: the same bytes as in token order.
        // Bytes of a page may be anything: fp8 pages of DSA end with their scales.
        let opaque = self.dtype == DType::UInt8;
        let tokens_adjacent = !opaque
            && self.inner_planes == 1
            && self.block_tokens == self.tokens_per_block
            && (self.order == KvOrder::TokensFirst || self.heads == 1);
        if !tokens_adjacent {
            return Ok(Identity::BlockOrder {
                blocks,
                heads: self.heads,
                block_tokens: self.block_tokens,
                inner_planes: self.inner_planes,
                order: self.order,
            });
        }
        let hidden = u32::try_from(self.heads * self.head_size).map_err(invalid)?;
        let tokens = self.blocks_per_chunk * self.tokens_per_block;
        let tokens = u32::try_from(tokens).map_err(invalid)?;
        GroupLayout::new(self.planes(), blocks.layers(), tokens, hidden, self.dtype)
            .map(Identity::TokenOrder)
            .map_err(invalid)
    }

    /// Maps the segments and checks that all blocks lie inside them.
    fn open(&self, segments: &mut Segments) -> Result<(PagedKv, GroupLayout), RegisterError> {
        let layout = self.block_layout()?;
        let size = self.dtype.size() as u64;
        let outside = || RegisterError::Invalid("KV tensor sizes overflow".to_owned());
        let bytes = |elements: u64| elements.checked_mul(size).ok_or_else(outside);
        let block_bytes = bytes(self.block_elements)?;
        let geometry = PagedGeometry {
            blocks: u32::try_from(self.blocks).map_err(invalid)?,
            block_tokens: 1,
            block_stride: bytes(self.block_stride)?,
            token_stride: block_bytes,
            heads: 1,
            head_stride: block_bytes,
            head_bytes: block_bytes,
        };
        let mut planes = Vec::with_capacity(2 * self.tensors.len());
        for plane in 0..if self.split { 2 } else { 1 } {
            for tensor in &self.tensors {
                let segment = segments.open(tensor)?;
                let elements = self.tensor_plane(tensor, plane).ok_or_else(outside)?;
                planes.push(PlaneBase {
                    segment,
                    offset: bytes(elements)?,
                });
            }
        }
        let paged = PagedKv::new(layout, geometry, planes, segments.mapped.clone());
        Ok((paged.map_err(invalid)?, layout))
    }

    /// First element of K (0) or V (1) in a tensor's segment.
    fn tensor_plane(&self, tensor: &CpuShm, plane: u64) -> Option<u64> {
        let stride = if self.split {
            tensor.tensor.stride[0]
        } else {
            0
        };
        tensor
            .tensor
            .storage_offset
            .checked_add(plane.checked_mul(stride)?)
    }
}

/// Segments of one worker at most; an engine has one for each layer or fewer.
const MAX_SEGMENTS: usize = 1024;

/// The segments of one registration, each mapped once however many layers lie in it.
struct Segments {
    user: u32,
    numbers: HashMap<SharedName, usize>,
    mapped: Vec<Arc<MappedSegment>>,
}

impl Segments {
    fn of(user: u32) -> Self {
        Self {
            user,
            numbers: HashMap::new(),
            mapped: Vec::new(),
        }
    }

    fn open(&mut self, tensor: &CpuShm) -> Result<usize, RegisterError> {
        let name = SharedName::new(&tensor.shm_name).map_err(invalid)?;
        if let Some(&number) = self.numbers.get(&name) {
            return Ok(number);
        }
        if self.mapped.len() >= MAX_SEGMENTS {
            return Err(RegisterError::Invalid(format!(
                "more than {MAX_SEGMENTS} shared-memory segments in one registration"
            )));
        }
        let mapped = MappedSegment::open_for(self.user, &name, tensor.nbytes);
        let mapped = mapped.map_err(|error| match error {
            SegmentError::OtherUser { .. } => invalid(error),
            _ => invalid(format!(
                "{error}: engine and server must run on one host and share /dev/shm"
            )),
        })?;
        // Two names may lead to one file where it was renamed in between. Its bytes are then those
        // of one segment, or copies of two layers could overlap unnoticed.
        let is_same = |known: &Arc<MappedSegment>| known.is_same_file(&mapped);
        let number = match self.mapped.iter().position(is_same) {
            Some(known) if self.mapped[known].len() >= mapped.len() => known,
            Some(_) => {
                return Err(RegisterError::Invalid(format!(
                    "shared-memory segment {name} has two names: register it under one"
                )));
            }
            None => {
                self.mapped.push(Arc::new(mapped));
                self.mapped.len() - 1
            }
        };
        self.numbers.insert(name, number);
        Ok(number)
    }
}
