//! Descriptors of engine memory. Decoding a descriptor opens no file and maps no memory.
//!
//! A descriptor is a MessagePack extension of type 1 that contains a map with a type tag and a
//! version. Pickled descriptors of older clients are refused.

use thiserror::Error;

use crate::protocol::msgpack::{Bin, Encode, Reader, Record, ValueError, Writer, encoded, record};

/// MessagePack extension type of a descriptor.
pub(crate) const EXT_CODE: i8 = 1;
/// Most bytes that one descriptor may have; vLLM sends a few hundred.
pub(crate) const MAX_DESCRIPTOR: usize = 64 << 10;
const MAX_RANK: usize = 8;
const MAX_NAME: usize = 255;

/// Why a memory descriptor is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The descriptor or one of its fields cannot be decoded.
    #[error("malformed memory descriptor: {0}")]
    Value(#[from] ValueError),
    /// The MessagePack extension type is not that of a descriptor.
    #[error("memory descriptor has extension type {0}, expected {EXT_CODE}")]
    Code(i8),
    /// The descriptor is a pickle, as older clients send.
    #[error("memory descriptor is a pickle, which is never loaded: upgrade the lmcache client")]
    Pickle,
    /// The version is not 1.
    #[error("memory descriptor has version {0}, expected 1")]
    Version(u64),
    /// The descriptor has a field that version 1 does not define.
    #[error("memory descriptor has an unknown field `{0}`")]
    UnknownField(String),
    /// CUDA memory made of parts, which have no handle for other processes.
    #[error(
        "the engine's CUDA memory lies in expandable segments, which no other process can open: \
         start the engine without expandable_segments in PYTORCH_CUDA_ALLOC_CONF and without sleep \
         mode, or use lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Expandable,
    /// CUDA memory of vLLM's own allocator, which the engine replaces when it sleeps.
    #[error(
        "the engine's CUDA memory is that of vLLM's cumem allocator, which may replace it unseen by \
         this server: start the engine without --enable-cumem-allocator, --enable-sleep-mode and \
         lmcache.mp.use_vmm_api, or use lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Replaceable,
    /// A handle of CUDA memory in a form that this version does not know.
    #[error(
        "the handle of the engine's CUDA memory has {0} bytes in a form that this server does not \
         know: use lmcache.mp.mp_transfer_mode=engine_driven"
    )]
    Handle(usize),
    /// The tensor exceeds its segment.
    #[error("tensor ends at byte {end}, beyond its segment of {nbytes} bytes")]
    Span {
        /// Offset after the last byte of the tensor.
        end: u64,
        /// Size of the segment in bytes.
        nbytes: u64,
    },
}

/// Shape, strides and element type of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Element type by its torch name, such as `bfloat16`.
    pub dtype: String,
    /// Number of elements along each axis.
    pub shape: Vec<u64>,
    /// Distance between neighbours along each axis, in elements.
    pub stride: Vec<u64>,
    /// Offset of the first element from the start of the segment, in elements.
    pub storage_offset: u64,
}

impl TensorMeta {
    /// Returns the byte offset after the last element, for elements of `size` bytes; `None` on
    /// overflow.
    fn end(&self, size: u64) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let mut last = self.storage_offset;
        for (extent, stride) in self.shape.iter().zip(&self.stride) {
            last = last.checked_add((extent - 1).checked_mul(*stride)?)?;
        }
        last.checked_add(1)?.checked_mul(size)
    }
}

/// A tensor in a named POSIX shared-memory segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuShm {
    /// Name of the segment, with its leading slash.
    pub shm_name: String,
    /// Size of the segment in bytes.
    pub nbytes: u64,
    /// Tensor within the segment.
    pub tensor: TensorMeta,
}

/// Handle by which the CUDA driver opens memory or an event of another process.
pub type IpcHandle = [u8; 64];

/// A tensor in memory of an NVIDIA GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cuda {
    /// Id of the GPU, such as `19d82a72-11d8-b896-53d0-54b5ef820006`.
    pub device_uuid: String,
    /// Handle of the allocation.
    pub handle: IpcHandle,
    /// Bytes from the start of the allocation to the tensor's storage.
    pub offset: u64,
    /// Size of the storage in bytes.
    pub nbytes: u64,
    /// Way in which it is shared.
    pub shared_by: SharedBy,
    /// Tensor within the storage.
    pub tensor: TensorMeta,
}

/// Way in which CUDA memory is shared with other processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SharedBy {
    /// As a storage of PyTorch (`cuda`).
    PyTorch {
        /// Name of the shared-memory file with the counters of the engine's shared storages, and the
        /// number of this storage's counter. The receiver of the storage decrements the counter when
        /// it has closed the storage.
        counter: Option<(String, u64)>,
    },
    /// As an allocation of the driver (`cuda_raw`): engine and server need not have one `/dev/shm`.
    Driver,
}

/// A point in an engine's work on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuEvent {
    /// An event of the driver.
    Event(IpcHandle),
    /// A number in the engine's memory that counts what a stream has done: LMCache's timeline
    /// semaphore, which clients with `lmcache.mp.isolated_ipc` send.
    Count {
        /// Handle of the allocation with the numbers.
        handle: IpcHandle,
        /// Bytes from the start of the allocation to the number, a multiple of 8.
        offset: u64,
        /// The point is reached when the number is this or more. At 0 it is reached already.
        least: u64,
    },
}

/// Bytes of [`GpuEvent::Count`]: version 1, handle, offset, number; the numbers are big-endian.
const COUNT_BYTES: usize = 1 + 64 + 8 + 8;

impl GpuEvent {
    /// Decodes the handle of a store or a retrieve.
    ///
    /// # Errors
    /// [`EventError`] if it has another form.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, EventError> {
        if let Ok(handle) = bytes.try_into() {
            return Ok(Self::Event(handle));
        }
        let unknown = EventError(bytes.len());
        let [1, rest @ ..] = bytes else {
            return Err(unknown);
        };
        let (handle, rest) = rest.split_first_chunk().ok_or(unknown)?;
        let (offset, rest) = rest.split_first_chunk().ok_or(unknown)?;
        let least = rest.try_into().map_err(|_| unknown)?;
        let (offset, least) = (u64::from_be_bytes(*offset), u64::from_be_bytes(least));
        if !offset.is_multiple_of(8) {
            return Err(unknown);
        }
        Ok(Self::Count {
            handle: *handle,
            offset,
            least,
        })
    }

    /// Encodes the handle, for clients and tests.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Event(handle) => handle.to_vec(),
            Self::Count {
                handle,
                offset,
                least,
            } => {
                let (offset, least) = (offset.to_be_bytes(), least.to_be_bytes());
                [&[1], &handle[..], &offset, &least].concat()
            }
        }
    }
}

/// The handle of an event is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "the event handle has {0} bytes in a form that this server does not know, expected the 64 of a \
     CUDA event or the {COUNT_BYTES} of a count"
)]
pub(crate) struct EventError(usize);

/// Descriptor of one tensor in an engine's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvDescriptor {
    /// Host memory in a POSIX shared-memory segment.
    CpuShm(CpuShm),
    /// Memory of an NVIDIA GPU.
    Cuda(Box<Cuda>),
    /// Memory of a type that this server cannot open, by its tag (`npu`, `musa`, …).
    Unsupported(String),
}

impl KvDescriptor {
    /// Decodes one descriptor.
    ///
    /// # Errors
    /// [`DescriptorError`] when the descriptor is malformed, pickled, of another version, or
    /// describes bytes outside its segment.
    pub(crate) fn decode(code: i8, bytes: &[u8]) -> Result<Self, DescriptorError> {
        if code != EXT_CODE {
            return Err(DescriptorError::Code(code));
        }
        // A pickle of protocol 2 or later begins with 0x80 and the protocol's number. As
        // MessagePack that is an empty map followed by other bytes, so it is never a valid
        // descriptor.
        if let [0x80, 2..=5, ..] = bytes {
            return Err(DescriptorError::Pickle);
        }
        let mut reader = Reader::new(bytes);
        let (mut tag, mut version, mut tensor) = (None, None, None);
        let (mut shm_name, mut nbytes, mut shared) = (None, None, None);
        let (mut raw_handle, mut raw_offset) = (None, None);
        let mut unknown = None;
        for _ in 0..reader.map("descriptor", 32)? {
            match reader.str("descriptor field", 64)? {
                "type" => tag = Some(reader.str("type", 64)?.to_owned()),
                "version" => version = Some(reader.number::<u64>("version")?),
                "metadata" => tensor = Some(tensor_meta(&mut reader)?),
                "shm_name" => shm_name = Some(reader.str("shm_name", MAX_NAME)?.to_owned()),
                "nbytes" => nbytes = Some(reader.number::<u64>("nbytes")?),
                // Other kinds of memory have handles of other forms under the same name.
                "handle" if tag.as_deref() == Some("cuda") => {
                    shared = Some(shared_storage(&mut reader)?);
                }
                "ipc_handle" if tag.as_deref() == Some("cuda_raw") => {
                    let handle = reader.bin("ipc_handle", MAX_DESCRIPTOR)?;
                    let len = handle.len();
                    let handle = <IpcHandle>::try_from(handle);
                    raw_handle = Some(handle.map_err(|_| DescriptorError::Handle(len))?);
                }
                "alloc_offset" if tag.as_deref() == Some("cuda_raw") => {
                    raw_offset = Some(reader.number::<u64>("alloc_offset")?);
                }
                other => {
                    unknown.get_or_insert_with(|| other.to_owned());
                    reader.skip()?;
                }
            }
        }
        reader.finish()?;
        let tag = tag.ok_or(ValueError::Missing("type"))?;
        if tag == "cuda_vmm" {
            return Err(DescriptorError::Replaceable);
        }
        if !matches!(&*tag, "cpu_shm" | "cuda" | "cuda_raw") {
            return Ok(Self::Unsupported(tag));
        }
        match version.ok_or(ValueError::Missing("version"))? {
            1 => {}
            other => return Err(DescriptorError::Version(other)),
        }
        if let Some(field) = unknown {
            return Err(DescriptorError::UnknownField(field));
        }
        let (tensor, device_uuid) = tensor.ok_or(ValueError::Missing("metadata"))?;
        let nbytes = match &shared {
            Some(storage) => storage.nbytes,
            None => nbytes.ok_or(ValueError::Missing("nbytes"))?,
        };
        let size = tensor
            .dtype
            .parse::<lmc_memory::DType>()
            .map_err(|error| ValueError::Invalid(error.to_string()))?;
        match tensor.end(size.size() as u64) {
            Some(end) if end <= nbytes => {}
            end => {
                return Err(DescriptorError::Span {
                    end: end.unwrap_or(u64::MAX),
                    nbytes,
                });
            }
        }
        if tag != "cpu_shm" {
            let (handle, offset, shared_by) = match shared {
                Some(storage) => {
                    let counter = storage.counter;
                    let shared_by = SharedBy::PyTorch { counter };
                    (storage.handle, storage.offset, shared_by)
                }
                None if tag == "cuda" => return Err(ValueError::Missing("handle").into()),
                None => (
                    raw_handle.ok_or(ValueError::Missing("ipc_handle"))?,
                    raw_offset.ok_or(ValueError::Missing("alloc_offset"))?,
                    SharedBy::Driver,
                ),
            };
            return Ok(Self::Cuda(Box::new(Cuda {
                device_uuid: device_uuid.ok_or(ValueError::Missing("device_uuid"))?,
                handle,
                offset,
                nbytes,
                shared_by,
                tensor,
            })));
        }
        Ok(Self::CpuShm(CpuShm {
            shm_name: shm_name.ok_or(ValueError::Missing("shm_name"))?,
            nbytes,
            tensor,
        }))
    }

    /// Returns shape, strides and element type, if the server knows the kind of memory.
    pub fn tensor(&self) -> Option<&TensorMeta> {
        match self {
            Self::CpuShm(shm) => Some(&shm.tensor),
            Self::Cuda(cuda) => Some(&cuda.tensor),
            Self::Unsupported(_) => None,
        }
    }
}

/// A storage as PyTorch shares it (`_share_cuda_`).
struct SharedStorage {
    handle: IpcHandle,
    nbytes: u64,
    offset: u64,
    counter: Option<(String, u64)>,
}

/// Versions of PyTorch's frame around a handle that are known, and the type of memory that
/// `cudaMalloc` made, of which the handle is a `cudaIpcMemHandle_t`. PyTorch 2.11 writes version 2.
const FRAME_VERSIONS: std::ops::RangeInclusive<u8> = 1..=2;
const FRAME_MALLOC: u8 = b'c';
const FRAME_EXPANDABLE: u8 = b'e';

/// Decodes PyTorch's eight values: device, framed handle, size and offset of the storage, name and
/// number of its counter, event, and whether the receiver has to wait for the event. That event was
/// recorded when the storage was shared, and each copy waits for a later event of its own.
fn shared_storage(reader: &mut Reader<'_>) -> Result<SharedStorage, DescriptorError> {
    let values = reader.array("handle", 8)?;
    if values != 8 {
        let text = format!("a CUDA handle has 8 values, found {values}");
        return Err(ValueError::Invalid(text).into());
    }
    reader.number::<i64>("handle's device")?;
    let frame = reader.bin("handle", MAX_DESCRIPTOR)?;
    let handle = match *frame {
        [version, FRAME_MALLOC, ref handle @ ..] if FRAME_VERSIONS.contains(&version) => {
            <IpcHandle>::try_from(handle).map_err(|_| DescriptorError::Handle(frame.len()))?
        }
        [version, FRAME_EXPANDABLE, ..] if FRAME_VERSIONS.contains(&version) => {
            return Err(DescriptorError::Expandable);
        }
        _ => return Err(DescriptorError::Handle(frame.len())),
    };
    let nbytes = reader.number("handle's size")?;
    let offset = reader.number("handle's offset")?;
    let name = match reader.nil()? {
        true => None,
        false => Some(reader.bin("handle's counter", MAX_NAME)?),
    };
    let number = reader.number("handle's counter number")?;
    if !reader.nil()? {
        reader.bin("handle's event", MAX_NAME)?;
    }
    reader.bool()?;
    let counter = name.and_then(|name| Some((String::from_utf8(name.to_vec()).ok()?, number)));
    Ok(SharedStorage {
        handle,
        nbytes,
        offset,
        counter,
    })
}

/// Encodes a descriptor, for clients and tests.
impl Encode for KvDescriptor {
    fn encode(&self, out: &mut Writer) {
        let map = match self {
            Self::Cuda(cuda) => {
                let metadata = Record(&[
                    ("dtype", &cuda.tensor.dtype),
                    ("shape", &cuda.tensor.shape),
                    ("stride", &cuda.tensor.stride),
                    ("storage_offset", &cuda.tensor.storage_offset),
                    ("device_uuid", &cuda.device_uuid),
                ]);
                match &cuda.shared_by {
                    SharedBy::PyTorch { counter } => encoded(&Record(&[
                        ("type", &"cuda"),
                        ("version", &1_u32),
                        ("metadata", &metadata),
                        ("handle", &SharedAs(cuda, counter.as_ref())),
                    ])),
                    SharedBy::Driver => encoded(&Record(&[
                        ("type", &"cuda_raw"),
                        ("version", &1_u32),
                        ("metadata", &metadata),
                        ("ipc_handle", &Bin(&cuda.handle)),
                        ("alloc_offset", &cuda.offset),
                        ("nbytes", &cuda.nbytes),
                    ])),
                }
            }
            Self::CpuShm(shm) => encoded(&Record(&[
                ("type", &"cpu_shm"),
                ("version", &1_u32),
                ("metadata", &shm.tensor),
                ("shm_name", &shm.shm_name),
                ("nbytes", &shm.nbytes),
            ])),
            Self::Unsupported(tag) => encoded(&Record(&[("type", tag)])),
        };
        out.ext(EXT_CODE, &map);
    }
}

/// A storage as PyTorch shares it.
struct SharedAs<'a>(&'a Cuda, Option<&'a (String, u64)>);

impl Encode for SharedAs<'_> {
    fn encode(&self, out: &mut Writer) {
        let Self(cuda, counter) = self;
        let frame = [&[2, FRAME_MALLOC], &cuda.handle[..]].concat();
        out.array(8);
        out.int(0);
        out.bin(&frame);
        out.uint(cuda.nbytes);
        out.uint(cuda.offset);
        match counter {
            Some((name, number)) => {
                out.bin(name.as_bytes());
                out.uint(*number);
            }
            None => {
                out.nil();
                out.uint(0);
            }
        }
        out.nil();
        out.bool(false);
    }
}

record!(TensorMeta, |tensor|
    "dtype": tensor.dtype,
    "shape": tensor.shape,
    "stride": tensor.stride,
    "storage_offset": tensor.storage_offset,
    "device_uuid": "cpu",
);

/// Decodes a tensor and the id of its device.
fn tensor_meta(reader: &mut Reader<'_>) -> Result<(TensorMeta, Option<String>), DescriptorError> {
    let (mut dtype, mut shape, mut stride, mut storage_offset) = (None, None, None, None);
    let mut device_uuid = None;
    for _ in 0..reader.map("metadata", 32)? {
        match reader.str("metadata field", 64)? {
            "dtype" => dtype = Some(reader.str("dtype", 64)?.to_owned()),
            "shape" => shape = Some(dims(reader, "shape")?),
            "stride" => stride = Some(dims(reader, "stride")?),
            "storage_offset" => storage_offset = Some(reader.number("storage_offset")?),
            "device_uuid" => device_uuid = Some(reader.str("device_uuid", 128)?.to_owned()),
            other => return Err(DescriptorError::UnknownField(other.to_owned())),
        }
    }
    let shape = shape.ok_or(ValueError::Missing("shape"))?;
    let stride = stride.ok_or(ValueError::Missing("stride"))?;
    if shape.len() != stride.len() {
        let text = format!(
            "shape and stride must have the same number of axes, found {} and {}",
            shape.len(),
            stride.len()
        );
        return Err(ValueError::Invalid(text).into());
    }
    let tensor = TensorMeta {
        dtype: dtype.ok_or(ValueError::Missing("dtype"))?,
        shape,
        stride,
        storage_offset: storage_offset.ok_or(ValueError::Missing("storage_offset"))?,
    };
    Ok((tensor, device_uuid))
}

fn dims(reader: &mut Reader<'_>, what: &'static str) -> Result<Vec<u64>, ValueError> {
    (0..reader.array(what, MAX_RANK)?)
        .map(|_| reader.number(what))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> CpuShm {
        CpuShm {
            shm_name: "/lmcache_kv_7_0".to_owned(),
            nbytes: 2 * 8 * 4 * 16 * 4,
            tensor: TensorMeta {
                dtype: "float32".to_owned(),
                shape: vec![2, 8, 4, 16],
                stride: vec![8 * 4 * 16, 4 * 16, 16, 1],
                storage_offset: 0,
            },
        }
    }

    fn round_trip(descriptor: &KvDescriptor) -> Result<KvDescriptor, DescriptorError> {
        let bytes = encoded(descriptor);
        let (code, body) = Reader::new(&bytes).ext("descriptor", MAX_DESCRIPTOR)?;
        KvDescriptor::decode(code, body)
    }

    #[test]
    fn a_descriptor_survives_the_round_trip() {
        let descriptor = KvDescriptor::CpuShm(sample());
        assert_eq!(round_trip(&descriptor), Ok(descriptor));
        let npu = KvDescriptor::Unsupported("npu".to_owned());
        assert_eq!(round_trip(&npu), Ok(npu));
    }

    /// A descriptor of memory of `cudaMalloc` as PyTorch 2.11 shares it, recorded on an H200; the byte
    /// after its version is `kind`.
    fn recorded(kind: u8) -> Vec<u8> {
        const HANDLE: &str = "c0d27a2c000000002702000000000000000000010000000000100000000000000600\
                              000000ff000036000000000000002600d0c19c00005c0000000000000000";
        let hex = |at: usize| u8::from_str_radix(&HANDLE[at..at + 2], 16).expect("hexadecimal");
        let handle: Vec<u8> = (0..HANDLE.len()).step_by(2).map(hex).collect();
        let mut out = Writer::new();
        out.map(4);
        out.str("type");
        out.str("cuda");
        out.str("version");
        out.uint(1);
        out.str("metadata");
        out.raw(&encoded(&Record(&[
            ("dtype", &"int32"),
            ("shape", &vec![1_u64 << 22]),
            ("stride", &vec![1_u64]),
            ("storage_offset", &0_u64),
            ("device_uuid", &"19d82a72-11d8-b896-53d0-54b5ef820006"),
        ])));
        out.str("handle");
        out.array(8);
        out.int(0);
        out.bin(&[&[2, kind], &handle[..]].concat());
        out.uint(16_777_216);
        out.uint(4_194_304);
        out.bin(b"/torch_551_863121536_0");
        out.uint(1);
        out.bin(&[7; 64]);
        out.bool(true);
        out.into_bytes()
    }

    #[test]
    fn a_storage_that_pytorch_shares_is_understood() {
        let found = KvDescriptor::decode(EXT_CODE, &recorded(b'c')).expect("a descriptor");
        let KvDescriptor::Cuda(cuda) = &found else {
            panic!("{found:?}");
        };
        assert_eq!(cuda.handle[..4], [0xc0, 0xd2, 0x7a, 0x2c]);
        assert_eq!((cuda.offset, cuda.nbytes), (4_194_304, 16_777_216));
        let counter = Some(("/torch_551_863121536_0".to_owned(), 1));
        assert_eq!(cuda.shared_by, SharedBy::PyTorch { counter });
        assert_eq!(round_trip(&found), Ok(found.clone()));
        let mut raw = cuda.clone();
        raw.shared_by = SharedBy::Driver;
        let raw = KvDescriptor::Cuda(raw);
        assert_eq!(round_trip(&raw), Ok(raw));
    }

    #[test]
    fn the_handle_of_a_point_in_an_engines_work_has_one_of_two_forms() {
        let count = GpuEvent::Count {
            handle: [3; 64],
            offset: 8,
            least: u64::MAX - 1,
        };
        for event in [GpuEvent::Event([7; 64]), count] {
            assert_eq!(GpuEvent::decode(&event.encode()), Ok(event));
        }
        let bytes = count.encode();
        let other_version = [&[2], &bytes[1..]].concat();
        let longer = [&bytes[..], &[0]].concat();
        let mut odd = bytes.clone();
        odd[72] = 9;
        for bad in [
            &[][..],
            &[1; 63],
            &bytes[..80],
            &other_version,
            &longer,
            &odd,
        ] {
            assert_eq!(GpuEvent::decode(bad), Err(EventError(bad.len())));
        }
    }

    #[test]
    fn cuda_memory_that_cannot_be_opened_is_refused_with_its_cause() {
        let refused = |kind| KvDescriptor::decode(EXT_CODE, &recorded(kind));
        assert_eq!(refused(b'e'), Err(DescriptorError::Expandable));
        assert_eq!(refused(b'x'), Err(DescriptorError::Handle(66)));
        let mut short = recorded(b'c');
        short.truncate(short.len() - 1);
        assert!(KvDescriptor::decode(EXT_CODE, &short).is_err());
        let vmm = encoded(&Record(&[("type", &"cuda_vmm"), ("kind", &"fabric")]));
        let refused = KvDescriptor::decode(EXT_CODE, &vmm);
        assert_eq!(refused, Err(DescriptorError::Replaceable));
        let raw = encoded(&Record(&[
            ("type", &"cuda_raw"),
            ("ipc_handle", &Bin(&[1; 63])),
        ]));
        let short = KvDescriptor::decode(EXT_CODE, &raw);
        assert_eq!(short, Err(DescriptorError::Handle(63)));
    }

    #[test]
    fn a_tensor_outside_its_segment_is_refused() {
        let mut shm = sample();
        shm.tensor.storage_offset = 1;
        let refused = round_trip(&KvDescriptor::CpuShm(shm));
        assert!(
            matches!(refused, Err(DescriptorError::Span { .. })),
            "{refused:?}"
        );
        let mut shm = sample();
        shm.tensor.stride[0] = u64::MAX;
        let refused = round_trip(&KvDescriptor::CpuShm(shm));
        assert!(matches!(
            refused,
            Err(DescriptorError::Span { end: u64::MAX, .. })
        ));
    }

    #[test]
    fn a_pickle_is_named_and_never_loaded() {
        let pickle = b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94.";
        assert_eq!(
            KvDescriptor::decode(EXT_CODE, pickle),
            Err(DescriptorError::Pickle)
        );
    }
}
