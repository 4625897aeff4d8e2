//! A registered worker: what its chunks look like and how their bytes move.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use lmc_engine::OwnerId;
use lmc_key::{DtypeName, KeySpace, LayoutFingerprint, ModelName, Salt, SpaceId};
use lmc_memory::{
    ChunkOrder, DType, GroupLayout, KvGroup, KvMemory, KvOrder, KvTensor, MappedSegment, PagedKv,
    Planes, SegmentError, SharedName,
};
use thiserror::Error;

use crate::protocol::{
    CpuShm, EngineDrivenContext, EngineGroup, EngineRecord, IdentityDigest, KvDescriptor,
    RegisterKvCache,
};
use crate::service::context::Context;
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

/// The way a worker's bytes reach the pool.
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
    /// The owner of its transfers.
    pub(crate) owner: OwnerId,
    pub(crate) client: ClientId,
    pub(crate) model: ModelName,
    pub(crate) world_size: u32,
    /// Identity that the engine's own client stated; requests of it name the same.
    pub(crate) identity: Option<IdentityDigest>,
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
    /// True once it has sent a sign of life; decides how long its silence is tolerated.
    pub(crate) pinged: bool,
    /// Time at which the worker's connection ended, if it did.
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
        let identity = (context.record.as_ref()).map(|record| IdentityDigest::of(&record.identity));
        let fingerprint = match &context.record {
            Some(record) => recorded(&layout, record)?,
            None => token_order(&[layout], &[])?,
        };
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: context.model_name.parse().map_err(invalid)?,
            world_size: context.world_size,
            identity,
            fingerprint,
            // A record names the format of the elements.
            opaque: match identity {
                Some(_) => None,
                None => Opaque::of(fingerprint, &[dtype], &layout.shape()),
            },
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
        let mut orders = Vec::with_capacity(groups.len());
        let (mut end, mut mla) = (0, true);
        let mut dtypes = Vec::with_capacity(groups.len());
        for group in groups {
            let layers = layers(group, &tensors)?;
            let described = describe(group, &layers, order, chunk_size)?;
            mla &= described.is_latent();
            let numbers: Vec<usize> = layers
                .iter()
                .map(|layer| segments.open(layer))
                .collect::<Result<_, _>>()?;
            let paged = described
                .open(&numbers, segments.memory())
                .map_err(invalid)?;
            let start = end;
            end += usize::try_from(described.chunk_bytes()).map_err(invalid)?;
            dtypes.push(described.dtype());
            orders.push(described.order());
            copies.push(GroupCopy {
                paged,
                blocks_per_chunk: described.blocks_per_chunk(),
                tokens_per_block: described.tokens_per_block(),
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
        let (fingerprint, shape) = identity(&orders, &layers)?;
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: registration.model_name.parse().map_err(invalid)?,
            world_size: registration.world_size,
            identity: None,
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
    pub(super) fn space(&self, context: &Context, salt: &Salt) -> SpaceId {
        let mut spaces = self.spaces.borrow_mut();
        if let Some(&space) = spaces.get(salt) {
            return space;
        }
        if spaces.len() >= MAX_SPACES {
            spaces.clear();
        }
        let space = self.key_space(&context.config, salt);
        let id = space.id();
        context.spaces.describe(id, space, true);
        spaces.insert(salt.clone(), id);
        id
    }

    /// Returns all that the space of this worker's chunks under a tenant's salt is made of.
    pub(super) fn key_space(&self, config: &ServiceConfig, salt: &Salt) -> KeySpace {
        KeySpace {
            algorithm: config.hasher.algorithm(),
            chunk_size: config.hasher.chunk_size(),
            model: self.model.clone(),
            world_size: self.world_size,
            layout: self.fingerprint,
            dtype: dtype_name(self.dtype),
            salt: salt.clone(),
            identity: config.identity.clone(),
        }
    }

    /// Returns true if requests about it may come on this connection: its own, or any when its own is
    /// over.
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

/// The fingerprint of a chunk and the shape to show for it. `layers` are the indices of all
/// groups' layers, in the order in which they lie in a chunk.
fn identity(
    groups: &[ChunkOrder],
    layers: &[u32],
) -> Result<(LayoutFingerprint, Vec<u64>), RegisterError> {
    let token_ordered: Option<Vec<_>> = groups
        .iter()
        .map(|group| match group {
            ChunkOrder::Tokens(layout) => Some(*layout),
            ChunkOrder::Blocks { .. } => None,
        })
        .collect();
    if let Some(layouts) = token_ordered {
        return Ok((token_order(&layouts, layers)?, layouts[0].shape()));
    }
    let mut description = b"lmc layout 2: blocks".to_vec();
    let mut shape = Vec::new();
    for group in groups {
        let (layout, within) = match group {
            ChunkOrder::Tokens(layout) => (layout, [0; 4]),
            ChunkOrder::Blocks {
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
        let bytes = GroupLayout::canonical_bytes(&[*layout]).map_err(invalid)?;
        description.extend_from_slice(&bytes);
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

/// The fingerprint of a chunk that the engine's own client describes.
fn recorded(
    layout: &GroupLayout,
    record: &EngineRecord,
) -> Result<LayoutFingerprint, RegisterError> {
    let mut description = b"lmc layout 4: engine".to_vec();
    description.extend_from_slice(&GroupLayout::canonical_bytes(&[*layout]).map_err(invalid)?);
    description.extend_from_slice(blake3::hash(record.layout.as_bytes()).as_bytes());
    description.extend_from_slice(&IdentityDigest::of(&record.identity).0);
    Ok(LayoutFingerprint::of(&description))
}

fn token_order(groups: &[GroupLayout], layers: &[u32]) -> Result<LayoutFingerprint, RegisterError> {
    let mut description = b"lmc layout 1: tokens".to_vec();
    description.extend_from_slice(&GroupLayout::canonical_bytes(groups).map_err(invalid)?);
    describe_order(layers, &mut description);
    Ok(LayoutFingerprint::of(&description))
}

/// Order of the layers, unless each is at its own index.
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

/// Returns the tensors of a group's layers.
fn layers<'a>(
    group: &EngineGroup,
    tensors: &[&'a CpuShm],
) -> Result<Vec<&'a CpuShm>, RegisterError> {
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
    Ok(layers)
}

/// Reads the layout of a group off its layers.
fn describe(
    group: &EngineGroup,
    layers: &[&CpuShm],
    order: KvOrder,
    chunk_size: u32,
) -> Result<KvGroup, RegisterError> {
    let tensors: Vec<_> = layers
        .iter()
        .map(|layer| {
            Ok(KvTensor {
                dtype: layer.tensor.dtype.parse().map_err(invalid)?,
                shape: &layer.tensor.shape,
                strides: &layer.tensor.stride,
                storage_offset: layer.tensor.storage_offset,
            })
        })
        .collect::<Result<_, RegisterError>>()?;
    let declared = (group.tokens_per_block > 0).then_some(group.tokens_per_block);
    KvGroup::describe(&tensors, order, declared, chunk_size).map_err(invalid)
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

    /// Returns the segments as the memory of a KV group.
    fn memory(&self) -> Vec<Arc<dyn KvMemory>> {
        let mapped = self.mapped.iter();
        mapped.map(|segment| Arc::clone(segment) as _).collect()
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
