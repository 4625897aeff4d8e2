//! A registered worker: the layout of its chunks, and the way of their bytes.

use std::cell::RefCell;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use lmc_engine::OwnerId;
use lmc_key::{DtypeName, KeySpace, LayoutFingerprint, ModelName, Salt, SpaceId, TagsId};
use lmc_memory::cuda::{Gpu, Gpus};
use lmc_memory::{ChunkOrder, DType, GroupLayout, KvGroup, KvOrder, KvTensor, Planes};

use crate::protocol::{
    EngineDrivenContext, EngineGroup, IdentityDigest, KvDescriptor, RegisterKvCache,
};
use crate::service::context::Context;
use crate::service::fingerprint;
use crate::service::gate::Gate;
use crate::service::opaque::Opaque;
use crate::service::opened::{GroupCopy, Segments, ServerCopies};
use crate::service::register_error::{RegisterError, invalid};
use crate::service::wider::{self, WiderLayout};
use crate::service::{ClientId, ServiceConfig};

/// The way of a worker's bytes to the pool.
#[derive(Debug)]
pub(crate) enum Transport {
    /// The worker maps the pool and copies by itself.
    EngineDriven,
    /// The server maps the worker's memory and copies.
    ServerDriven(Arc<ServerCopies>),
}

/// A registered worker.
#[derive(Debug)]
pub(crate) struct Instance {
    /// The owner of the worker's transfers.
    pub(crate) owner: OwnerId,
    pub(crate) client: ClientId,
    pub(crate) model: ModelName,
    pub(crate) world_size: u32,
    /// Identity that the engine's own client stated; its requests name the same.
    pub(crate) identity: Option<IdentityDigest>,
    /// Tokens of a chunk, if not the server's chunk size; requests name the same.
    pub(crate) unit: Option<u32>,
    /// Name of the layout in keys: the registered layout, or its generation if the layout is
    /// opaque.
    pub(crate) fingerprint: LayoutFingerprint,
    /// Layouts of engines with more ranks, whose chunks can be merged into this worker's.
    pub(crate) wider: Vec<WiderLayout>,
    /// Names of the first fields of the registration that this version does not know, for display.
    pub(crate) unknown_fields: Vec<String>,
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
    /// Admits copies in the worker's memory.
    pub(crate) gate: Gate,
    /// KV ranks whose chunks the worker has moved; an engine's worker has one.
    pub(crate) ranks: BTreeSet<u16>,
    pub(crate) registered: Instant,
    pub(crate) last_seen: Instant,
    /// True once the worker has sent a ping; decides how long its silence is tolerated.
    pub(crate) pinged: bool,
    /// Time at which the worker's connection ended, if it did.
    pub(crate) orphaned: Option<Instant>,
    /// Spaces of the worker's chunks by tenant and tags, for those of the last requests.
    spaces: RefCell<HashMap<(Salt, Option<TagsId>), InstanceSpaces>>,
}

/// The spaces of a worker for one tenant and some tags.
#[derive(Debug, Clone)]
pub(super) struct InstanceSpaces {
    /// Space of the worker's chunks.
    pub(super) own: SpaceId,
    /// Spaces of chunks that can be merged into the worker's, in the order of [`Instance::wider`].
    pub(super) wider: Arc<[SpaceId]>,
}

/// Most pairs of tenant and tags for which a worker's spaces are kept.
const MAX_SPACES: usize = 64;

impl Instance {
    /// Returns a worker that copies by itself.
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
        let fingerprint = fingerprint::of_engine_driven(context, &layout).map_err(invalid)?;
        let unit = context.record.as_ref().and_then(|record| record.unit);
        let wider = wider::of_engine_driven(context, layout);
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: context.model_name.parse().map_err(invalid)?,
            world_size: context.world_size,
            identity,
            unit,
            fingerprint,
            wider,
            unknown_fields: unknown_fields(context.unknown.names())?,
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

    /// Returns a worker whose memory the server copies from and to. `user` is the user at the other
    /// end of its connection.
    pub(crate) fn server_driven(
        registration: &RegisterKvCache,
        client: ClientId,
        user: Option<u32>,
        gpus: &Gpus,
        config: &ServiceConfig,
        now: Instant,
    ) -> Result<Self, RegisterError> {
        let groups = describe(registration, config.hasher.chunk_size())?;
        let first = groups.iter().find_map(|group| group.tensors.first());
        let mut segments =
            Segments::of(first.copied(), registration.instance_id, user, gpus, config)?;
        let mut copies = Vec::with_capacity(groups.len());
        let mut end = 0;
        for Described { tensors, kv, .. } in &groups {
            let numbers: Vec<usize> = tensors
                .iter()
                .map(|tensor| segments.open(tensor))
                .collect::<Result<_, _>>()?;
            let start = end;
            end += usize::try_from(kv.chunk_bytes()).map_err(invalid)?;
            copies.push(GroupCopy {
                paged: kv.open(&numbers, segments.memory()).map_err(invalid)?,
                blocks_per_chunk: kv.blocks_per_chunk(),
                tokens_per_block: kv.tokens_per_block(),
                range: start..end,
            });
        }
        let dtypes: Vec<DType> = groups.iter().map(|group| group.kv.dtype()).collect();
        let Some(&dtype) = dtypes.first() else {
            return Err(RegisterError::Invalid("no KV groups".to_owned()));
        };
        let mla = groups.iter().all(|group| group.kv.is_latent());
        let (fingerprint, wider) = server_driven_layouts(registration, &groups)?;
        let shape = fingerprint::shape(groups[0].kv.order());
        Ok(Self {
            owner: OwnerId::default(),
            client,
            model: registration.model_name.parse().map_err(invalid)?,
            world_size: registration.world_size,
            identity: None,
            unit: None,
            fingerprint,
            wider,
            unknown_fields: unknown_fields(unknown_names(registration))?,
            opaque: Opaque::of(fingerprint, &dtypes, &shape),
            dtype,
            shape,
            chunk_bytes: end as u64,
            mla: Some(mla),
            transport: Transport::ServerDriven(Arc::new(ServerCopies::new(registration, copies))),
            gate: Gate::default(),
            ranks: BTreeSet::new(),
            registered: now,
            last_seen: now,
            pinged: false,
            orphaned: None,
            spaces: RefCell::default(),
        })
    }

    /// Returns true if the worker's blocks may change before the server has copied them, so that
    /// nothing is stored.
    pub(super) fn frees_early(&self) -> bool {
        matches!(&self.transport, Transport::ServerDriven(copies) if copies.frees_early)
    }

    /// Returns the space of this worker's chunks under a tenant's salt and a request's tags.
    pub(super) fn space(&self, context: &Context, salt: &Salt, tags: Option<TagsId>) -> SpaceId {
        self.spaces(context, salt, tags).own
    }

    /// Returns the space of this worker's chunks, and the spaces of chunks that can be merged into
    /// them.
    pub(super) fn spaces(
        &self,
        context: &Context,
        salt: &Salt,
        tags: Option<TagsId>,
    ) -> InstanceSpaces {
        let mut spaces = self.spaces.borrow_mut();
        let of = (salt.clone(), tags);
        if let Some(known) = spaces.get(&of) {
            return known.clone();
        }
        if spaces.len() >= MAX_SPACES {
            spaces.clear();
        }
        let own = self.key_space(&context.config, salt, tags);
        let known = InstanceSpaces {
            own: own.id(),
            wider: self.describe_wider(context, &own),
        };
        context.spaces.describe(known.own, own, true);
        context.spaces.count_usage(known.own, self.chunk_bytes);
        if self.opaque.is_some() {
            context.spaces.set_generation(known.own, self.fingerprint);
        }
        spaces.insert(of, known.clone());
        known
    }

    /// Registers the spaces of chunks that can be merged into those of a space of this worker.
    pub(super) fn describe_wider(&self, context: &Context, own: &KeySpace) -> Arc<[SpaceId]> {
        let into = own.id();
        let wider = self.wider.iter().map(|wider| {
            let space = wider.space(own);
            let id = space.id();
            let into = (into, wider.factor);
            context.spaces.describe_merged(id, space, into);
            id
        });
        wider.collect()
    }

    /// Returns the fields of the space of this worker's chunks.
    pub(super) fn key_space(
        &self,
        config: &ServiceConfig,
        salt: &Salt,
        tags: Option<TagsId>,
    ) -> KeySpace {
        KeySpace {
            algorithm: config.hasher.algorithm(),
            chunk_size: self.unit.unwrap_or(config.hasher.chunk_size()),
            model: self.model.clone(),
            world_size: self.world_size,
            layout: self.fingerprint,
            dtype: dtype_name(self.dtype),
            salt: salt.clone(),
            identity: config.identity.clone(),
            tags,
        }
    }

    /// Returns true if requests about the worker may come on this connection: its own one, or any
    /// if its own has ended.
    pub(crate) fn belongs_to(&self, client: ClientId) -> bool {
        self.client == client || self.orphaned.is_some()
    }

    /// Notes a request of the worker on this connection.
    pub(crate) fn seen(&mut self, client: ClientId, now: Instant) {
        self.client = client;
        self.last_seen = now;
        self.orphaned = None;
    }

    /// Returns false if nothing in the registration describes the order of a chunk's bytes.
    pub(crate) fn declares_order(&self) -> bool {
        match self.transport {
            // lmc's own client describes it in its record.
            Transport::EngineDriven => self.identity.is_some(),
            Transport::ServerDriven(_) => true,
        }
    }

    /// Drops the worker. Memory on a GPU is closed in the background: the driver may take long, and the
    /// caller may be the thread of a connection.
    pub(crate) fn close(self) {
        if self.gpu().is_none() {
            return;
        }
        let transport = self.transport;
        // Without a thread the memory is closed here.
        let thread = thread::Builder::new().name("lmc-gpu-close".to_owned());
        let _ = thread.spawn(move || drop(transport));
    }

    /// Returns the GPU that the server copies on, and the bytes of the worker's memory that are
    /// open there.
    pub(crate) fn gpu(&self) -> Option<(&Gpu, u64)> {
        let Transport::ServerDriven(copies) = &self.transport else {
            return None;
        };
        let gpu = copies.gpu()?;
        Some((
            gpu,
            copies.groups.iter().map(|copy| copy.paged.bytes()).sum(),
        ))
    }

    /// Returns `engine_driven` or `lmcache_driven`, as the client's setting calls them.
    pub(crate) fn mode(&self) -> &'static str {
        match self.transport {
            Transport::EngineDriven => "engine_driven",
            Transport::ServerDriven(_) => "lmcache_driven",
        }
    }
}

fn kv_order(kv_layout: Option<&str>) -> Result<KvOrder, RegisterError> {
    match kv_layout {
        None | Some("HND" | "BLHNC") => Ok(KvOrder::HeadsFirst),
        Some("NHD" | "BLNHC") => Ok(KvOrder::TokensFirst),
        Some(other) => Err(RegisterError::Invalid(format!(
            "kv_layout {other:?} is unknown, expected NHD, HND, BLHNC or BLNHC"
        ))),
    }
}

/// Most bytes of the names of fields that this version does not know, each name counted once.
const MAX_UNKNOWN_NAMES: usize = 4096;
/// Number of such names that are shown.
const SHOWN_NAMES: usize = 8;

/// Returns the names of the fields of a registration that this version does not know.
fn unknown_names(registration: &RegisterKvCache) -> impl Iterator<Item = &str> {
    let hints = registration.unknown_hints.names();
    let groups = registration.groups.iter();
    hints.chain(groups.flat_map(|group| group.unknown.names()))
}

/// Returns the first of these names, each once, and how many more there are.
fn unknown_fields<'a>(names: impl Iterator<Item = &'a str>) -> Result<Vec<String>, RegisterError> {
    let names: BTreeSet<&str> = names.collect();
    let bytes: usize = names.iter().map(|name| name.len()).sum();
    if bytes > MAX_UNKNOWN_NAMES {
        return Err(RegisterError::Invalid(format!(
            "the registration has {} fields that this version does not know, with {bytes} bytes in \
             their names; at most {MAX_UNKNOWN_NAMES} bytes are allowed",
            names.len()
        )));
    }
    let more = names.len().saturating_sub(SHOWN_NAMES);
    let shown = names.into_iter().take(SHOWN_NAMES).map(str::to_owned);
    Ok(shown
        .chain((more > 0).then(|| format!("… ({more} more)")))
        .collect())
}

fn dtype_name(dtype: DType) -> DtypeName {
    dtype
        .name()
        .parse()
        .expect("torch's names of element types are valid in a key's text")
}

/// A KV group of a registration, as the server copies it.
struct Described<'a> {
    /// Indices of the layers in the registered tensors.
    layers: Vec<u32>,
    /// Tensors of the layers.
    tensors: Vec<&'a KvDescriptor>,
    kv: KvGroup,
}

/// Describes the KV groups of a registration, in the order in which they lie in a chunk.
fn describe(
    registration: &RegisterKvCache,
    chunk_size: u32,
) -> Result<Vec<Described<'_>>, RegisterError> {
    let tensors = tensors(registration)?;
    let whole = [EngineGroup {
        layer_indices: (0..tensors.len() as u32).collect(),
        ..EngineGroup::default()
    }];
    let groups = if registration.groups.is_empty() {
        &whole[..]
    } else {
        &registration.groups
    };
    let order = kv_order(registration.kv_layout.as_deref())?;
    let describe = |group: &EngineGroup| {
        let tensors = layers(group, &tensors)?;
        Ok(Described {
            layers: group.layer_indices.clone(),
            kv: describe_group(group, &tensors, order, chunk_size)?,
            tensors,
        })
    };
    groups.iter().map(describe).collect()
}

/// Names the layout of a worker's chunks, and those of engines with more ranks.
fn server_driven_layouts(
    registration: &RegisterKvCache,
    groups: &[Described<'_>],
) -> Result<(LayoutFingerprint, Vec<WiderLayout>), RegisterError> {
    let layers: Vec<u32> = groups
        .iter()
        .flat_map(|group| &group.layers)
        .copied()
        .collect();
    let orders: Vec<ChunkOrder> = groups.iter().map(|group| group.kv.order()).collect();
    let layout = fingerprint::of_server_driven(registration, &layers, &orders).map_err(invalid)?;
    let wider = wider::of_server_driven(registration, &layers, &orders);
    Ok((layout, wider))
}

fn tensors(registration: &RegisterKvCache) -> Result<Vec<&KvDescriptor>, RegisterError> {
    if registration.kv_caches.is_empty() {
        return Err(RegisterError::Invalid(
            "no KV tensors were registered".to_owned(),
        ));
    }
    registration
        .kv_caches
        .iter()
        .map(|descriptor| match descriptor {
            KvDescriptor::CpuShm(_) | KvDescriptor::Cuda(_) => Ok(descriptor),
            KvDescriptor::Unsupported(kind) => Err(RegisterError::Memory(kind.clone())),
        })
        .collect()
}

/// Returns the tensors of a group's layers.
fn layers<'a>(
    group: &EngineGroup,
    tensors: &[&'a KvDescriptor],
) -> Result<Vec<&'a KvDescriptor>, RegisterError> {
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
fn describe_group(
    group: &EngineGroup,
    layers: &[&KvDescriptor],
    order: KvOrder,
    chunk_size: u32,
) -> Result<KvGroup, RegisterError> {
    let tensors: Vec<_> = layers
        .iter()
        .filter_map(|layer| layer.tensor())
        .map(|tensor| {
            Ok(KvTensor {
                dtype: tensor.dtype.parse().map_err(invalid)?,
                shape: &tensor.shape,
                strides: &tensor.stride,
                storage_offset: tensor.storage_offset,
            })
        })
        .collect::<Result<_, RegisterError>>()?;
    let declared = (group.tokens_per_block > 0).then_some(group.tokens_per_block);
    KvGroup::describe(&tensors, order, declared, chunk_size).map_err(invalid)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::protocol::{CpuShm, EngineRecord, TensorMeta, UnknownFields};

    const CHUNK_SIZE: u32 = 32;

    fn unknown(value: u8) -> UnknownFields {
        UnknownFields([("new_field".to_owned(), vec![value])].into())
    }

    fn engine_driven(context: &EngineDrivenContext) -> LayoutFingerprint {
        let (client, now) = (ClientId(1), Instant::now());
        let instance = Instance::engine_driven(context, client, CHUNK_SIZE, now);
        instance.expect("a registration").fingerprint
    }

    fn context() -> EngineDrivenContext {
        EngineDrivenContext {
            instance_id: 1,
            model_name: "model".to_owned(),
            world_size: 1,
            block_size: 16,
            num_layers: 2,
            hidden_dim_size: 8,
            dtype: "bfloat16".to_owned(),
            use_mla: false,
            num_physical_slots: Some(CHUNK_SIZE),
            record: None,
            unknown: UnknownFields::default(),
        }
    }

    /// A registration could have 16 MB of such names, which were kept, logged and shown.
    #[test]
    fn unknown_fields_are_shown_in_part_and_their_names_are_bounded() {
        let with = |fields: usize, len: usize| {
            let name = |field| (format!("{field:0len$}"), vec![1]);
            let unknown = UnknownFields((0..fields).map(name).collect());
            let context = EngineDrivenContext {
                unknown: unknown.clone(),
                ..context()
            };
            let (client, now) = (ClientId(1), Instant::now());
            let alone = Instance::engine_driven(&context, client, CHUNK_SIZE, now);
            let mut registration = registration(true);
            registration.groups = vec![registration.groups[0].clone(); 256];
            for group in &mut registration.groups {
                group.unknown = unknown.clone();
            }
            let of_groups = unknown_fields(unknown_names(&registration));
            let alone = alone.map(|instance| instance.unknown_fields);
            assert_eq!(alone.is_ok(), of_groups.is_ok());
            of_groups.inspect(|names| assert_eq!(Some(names), alone.as_ref().ok()))
        };
        assert_eq!(with(0, 1).expect("none"), [""; 0]);
        assert_eq!(with(2, 1).expect("two"), ["0", "1"]);
        let shown = with(64, 64).expect("4,096 bytes");
        assert_eq!(shown.len(), SHOWN_NAMES + 1);
        assert_eq!(shown[0], "0".repeat(64));
        assert_eq!(shown[SHOWN_NAMES], "… (56 more)");
        for (fields, len) in [(65, 64), (64, 1024)] {
            let refused = with(fields, len);
            assert!(
                matches!(refused, Err(RegisterError::Invalid(_))),
                "{fields} {len}"
            );
        }
    }

    /// The model's name and the world size count beside the layout.
    #[test]
    fn every_field_of_an_engine_driven_registration_counts_but_the_id() {
        type Change = fn(&mut EngineDrivenContext);
        let changes: [(&str, Change); 10] = [
            ("block_size", |c| c.block_size = 32),
            ("num_layers", |c| c.num_layers = 4),
            ("hidden_dim_size", |c| c.hidden_dim_size = 4),
            ("dtype_str", |c| c.dtype = "float16".to_owned()),
            ("use_mla", |c| c.use_mla = true),
            ("num_physical_slots", |c| c.num_physical_slots = Some(16)),
            ("num_physical_slots: none", |c| c.num_physical_slots = None),
            ("lmc_layout, lmc_identity", |c| {
                c.record = Some(EngineRecord {
                    identity: String::new(),
                    layout: String::new(),
                    unit: None,
                });
            }),
            ("an unknown field", |c| c.unknown = unknown(1)),
            ("its value", |c| c.unknown = unknown(2)),
        ];
        let mut seen = BTreeSet::from([engine_driven(&context())]);
        for (name, change) in changes {
            let mut changed = context();
            change(&mut changed);
            assert!(seen.insert(engine_driven(&changed)), "{name}");
        }
        let other = EngineDrivenContext {
            instance_id: 2,
            ..context()
        };
        assert!(!seen.insert(engine_driven(&other)), "the id counts");
    }

    /// The own client names the order in which it copies, and what its KV cache means.
    #[test]
    fn the_record_of_the_own_client_counts_and_its_blocks_do_not() {
        let of = |identity: &str, layout: &str, block_size| {
            engine_driven(&EngineDrivenContext {
                record: Some(EngineRecord {
                    identity: identity.to_owned(),
                    layout: layout.to_owned(),
                    unit: None,
                }),
                block_size,
                ..context()
            })
        };
        let first = of("a", "tokens", 16);
        assert_eq!(first, of("a", "tokens", 32));
        assert_ne!(first, of("b", "tokens", 16));
        assert_ne!(first, of("a", "blocks", 16));
    }

    /// Layers of 2 heads of 4 elements in blocks of 16 tokens.
    fn registration(heads_first: bool) -> RegisterKvCache {
        let (shape, layout) = match heads_first {
            true => (vec![2, 8, 2, 16, 4], "HND"),
            false => (vec![2, 8, 16, 2, 4], "NHD"),
        };
        let stride = strides(&shape);
        let tensor = |name: &str| {
            KvDescriptor::CpuShm(CpuShm {
                shm_name: format!("/{name}"),
                nbytes: 1 << 20,
                tensor: TensorMeta {
                    dtype: "bfloat16".to_owned(),
                    shape: shape.clone(),
                    stride: stride.clone(),
                    storage_offset: 0,
                },
            })
        };
        RegisterKvCache {
            instance_id: 1,
            kv_caches: vec![tensor("first"), tensor("second")],
            model_name: "model".to_owned(),
            world_size: 1,
            engine_type: "vllm".to_owned(),
            kv_layout: Some(layout.to_owned()),
            unknown_hints: UnknownFields::default(),
            groups: vec![EngineGroup {
                engine_group_id: 0,
                layer_indices: vec![0, 1],
                tokens_per_block: 16,
                sw_size_tokens: -1,
                extra_object_group_tag: 0,
                recurrent_state: false,
                unknown: UnknownFields::default(),
            }],
        }
    }

    fn strides(shape: &[u64]) -> Vec<u64> {
        let mut stride = vec![1; shape.len()];
        for axis in (0..shape.len() - 1).rev() {
            stride[axis] = stride[axis + 1] * shape[axis + 1];
        }
        stride
    }

    fn server_driven(registration: &RegisterKvCache) -> LayoutFingerprint {
        let groups = describe(registration, CHUNK_SIZE).expect("a description");
        let layouts = server_driven_layouts(registration, &groups);
        layouts.expect("a fingerprint").0
    }

    fn shm(descriptor: &mut KvDescriptor) -> &mut CpuShm {
        match descriptor {
            KvDescriptor::CpuShm(shm) => shm,
            other => panic!("{other:?}"),
        }
    }

    fn each_tensor(registration: &mut RegisterKvCache, change: impl Fn(&mut CpuShm)) {
        registration
            .kv_caches
            .iter_mut()
            .for_each(|tensor| change(shm(tensor)));
    }

    /// Changes one field of a registration. The names are those of the table in docs/protocol.md.
    type Change = (&'static str, fn(&mut RegisterKvCache));

    /// Fields that the table names.
    const LEFT_OUT: [Change; 10] = [
        ("instance_id", |r| r.instance_id = 2),
        ("model_name", |r| r.model_name = "other".to_owned()),
        ("world_size", |r| r.world_size = 2),
        ("engine_type", |r| r.engine_type = "other".to_owned()),
        ("shm_name", |r| {
            each_tensor(r, |t| t.shm_name = "/other".to_owned())
        }),
        ("nbytes", |r| each_tensor(r, |t| t.nbytes = 2 << 20)),
        ("storage_offset", |r| {
            each_tensor(r, |t| t.tensor.storage_offset = 64)
        }),
        ("number of blocks", |r| {
            each_tensor(r, |t| {
                // The axis of the blocks is the first or the second.
                let axis = t.tensor.shape.iter().position(|&extent| extent == 8);
                t.tensor.shape[axis.expect("8 blocks")] = 4;
                t.tensor.stride = strides(&t.tensor.shape);
            });
        }),
        ("engine_group_id", |r| r.groups[0].engine_group_id = 3),
        ("stride", |r| {
            // Blocks with a gap between them.
            each_tensor(r, |t| {
                let axis = t.tensor.shape.iter().position(|&extent| extent == 8);
                let axis = axis.expect("8 blocks");
                for stride in &mut t.tensor.stride[..=axis] {
                    *stride *= 2;
                }
            });
        }),
    ];

    const COUNTING: [Change; 8] = [
        ("sw_size_tokens", |r| r.groups[0].sw_size_tokens = 1024),
        ("layer_indices", |r| r.groups[0].layer_indices = vec![1, 0]),
        ("dtype", |r| {
            each_tensor(r, |t| t.tensor.dtype = "float16".to_owned())
        }),
        ("groups", |r| {
            let group = |layer| EngineGroup {
                layer_indices: vec![layer],
                ..r.groups[0].clone()
            };
            r.groups = vec![group(0), group(1)];
        }),
        ("extra_object_group_tag", |r| {
            r.groups[0].extra_object_group_tag = 1;
        }),
        ("an unknown hint", |r| r.unknown_hints = unknown(1)),
        ("an unknown field of a group", |r| {
            r.groups[0].unknown = unknown(1)
        }),
        ("size of a head", |r| {
            each_tensor(r, |t| {
                *t.tensor.shape.last_mut().expect("axes") = 8;
                t.tensor.stride = strides(&t.tensor.shape);
            });
        }),
    ];

    #[test]
    fn a_field_of_a_server_driven_registration_counts_or_the_table_says_why_not() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/protocol.md");
        let page = std::fs::read_to_string(page).expect("the page");
        for heads_first in [true, false] {
            let base = server_driven(&registration(heads_first));
            for (name, change) in LEFT_OUT {
                let mut changed = registration(heads_first);
                change(&mut changed);
                assert_eq!(server_driven(&changed), base, "{name} counts");
                assert!(
                    page.contains(&format!("\n| `{name}` |")),
                    "{name} has no row"
                );
            }
            for (name, change) in COUNTING {
                let mut changed = registration(heads_first);
                change(&mut changed);
                assert_ne!(server_driven(&changed), base, "{name} does not count");
            }
        }
        assert_ne!(
            server_driven(&registration(true)),
            server_driven(&registration(false)),
        );
    }

    /// Tokens that lie one after another in each block give one chunk for blocks of 16 and of 8 tokens.
    #[test]
    fn the_block_size_counts_where_a_chunk_is_made_of_blocks() {
        for heads_first in [true, false] {
            let base = registration(heads_first);
            let mut other = registration(heads_first);
            other.groups[0].tokens_per_block = 8;
            each_tensor(&mut other, |t| {
                let axis = t.tensor.shape.iter().position(|&extent| extent == 16);
                t.tensor.shape[axis.expect("16 tokens")] = 8;
                t.tensor.stride = strides(&t.tensor.shape);
            });
            let is_same = server_driven(&base) == server_driven(&other);
            assert_eq!(is_same, !heads_first);
        }
    }
}
