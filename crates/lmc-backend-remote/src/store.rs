//! The `Store` trait: what lmc asks of a shared file system, of Redis or of an object store.

use std::fmt;
use std::io;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_backend::{Answers, BackendError, BoxFuture, FailedSlot, Unavailable, now};
use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, SealedSlot};
use thiserror::Error;

use crate::format::{ChunkFolder, HEADER_LEN, Header, Name, Refusal, Scope, ValueName};

/// Bytes of a header, as they are stored.
pub type HeaderBytes = [u8; HEADER_LEN];

/// One result for each object of a batch, in its order.
pub type Each<'a, T> = BoxFuture<'a, Vec<Result<T, StoreError>>>;

/// The result of an operation on one object, or on the store.
pub type Single<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A service outside of this host that holds named objects: a shared file system, Redis, S3.
///
/// Every implementation MUST keep these rules; the kit in `conformance` checks them.
///
/// - **Batches.** One answer for each key of a batch; an empty batch is answered at once. Values
///   are read and written in the order of the batch, several at a time, as many as the store's own
///   settings say; each is answered as it ends.
/// - **Deadlines.** Every operation ends soon after its deadline, also when the store answers
///   nothing at all. What has not begun by then does not begin.
/// - **Whole values.** A reader finds a value whole or not at all; a value that was torn by a crash
///   is found out by the header's length and checksums.
/// - **Cancellation.** A future or stream may be dropped at any point; what has not begun then does
///   not begin. Slots that something may still write to stay with the store until that is over.
/// - **Bounds.** Memory beyond the slots, threads, connections and requests under way are bounded,
///   however slow the store is. Reads of headers never wait for writes of values alone.
/// - **No trust.** Everything that the store answers is bounded and parsed; nothing panics. A
///   payload may be wrong: the tier compares its checksum.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Returns the kind of store for logs, such as `file`.
    fn kind(&self) -> &'static str;

    /// Returns the offset of a payload in the values written here. Default: right after the
    /// header.
    fn payload_offset(&self) -> u64 {
        HEADER_LEN as u64
    }

    /// Returns the most bytes of a value, header included. Default: no limit of the store's own.
    fn max_value_len(&self) -> u64 {
        u64::MAX
    }

    /// Returns the time that a value lives from its write or its last [`Store::touch`]; `None`
    /// where that is not known here. Default: not known.
    fn ttl(&self) -> Option<Duration> {
        None
    }

    /// Returns the age from which a value that is read is touched; `None` where its age decides
    /// nothing. Default: half of [`Store::ttl`].
    fn touch_age(&self) -> Option<Duration> {
        self.ttl().map(|ttl| ttl / 2)
    }

    /// Reads the headers of values; `None` for one that is absent.
    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>>;

    /// Reads values into slots: the header first, which [`GetItem::check`] judges, and then the
    /// payload straight into the slot.
    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got>;

    /// Writes values from slots, without a copy where the store can do that.
    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>>;

    /// Removes objects; answers `true` for those that were there, as far as the store says so.
    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool>;

    /// Makes values as young as new ones; answers `false` for those that are absent.
    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool>;

    /// Lists objects, in an order of the store's own, from `token` on; `None` starts. An object that
    /// is there from the first page to the last is listed exactly once. Objects whose names are not
    /// [`Name`]s are left out.
    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage>;

    /// Reads a small object; `None` for one that is absent. One of more than `max` bytes is an
    /// error.
    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>>;

    /// Writes a small object, in place of the one that is there, and never [`Name::Clears`].
    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()>;

    /// Reads [`Name::Clears`], with its version; `None` where it is absent. One of more than `max`
    /// bytes is an error. Default: its bytes are its version, for a store whose [`Store::swap_clears`]
    /// compares bytes.
    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        Box::pin(async move {
            let bytes = self.read(Name::Clears, max, deadline).await?;
            // What was put back as it was has not changed.
            Ok(bytes.map(|bytes| (bytes.clone(), Version(bytes))))
        })
    }

    /// Writes [`Name::Clears`] if it is as it was read: in that version, or absent for `None`.
    /// Returns false, and changes nothing, if it is not. Of several writers that have read one
    /// version one succeeds. After an error the object may have been written.
    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool>;

    /// Looks for chunks of layout v1, which releases before this one have written and no code reads.
    /// Returns the command that removes them; `None` if there are none. Default: there are none.
    fn old_chunks(&self, _deadline: Instant) -> Single<'_, Option<String>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Ends what runs on behalf of the store, by the deadline; what still runs then is left alone.
    /// Operations afterwards answer with [`StoreError::Unavailable`].
    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()>;
}

/// Version of an object, by which it is replaced only as it was read. Only its store knows what it
/// means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(pub(crate) Bytes);

/// The start of a value, with what the store says of it.
#[derive(Clone, Debug)]
pub struct Head {
    /// The header, unread; `None` for a value that is shorter.
    pub header: Option<Box<HeaderBytes>>,
    /// Bytes of the whole value.
    pub value_len: u64,
    /// Time since its write or its last [`Store::touch`] by the store's clock, where that is known.
    pub age: Option<Duration>,
}

impl Head {
    /// Reads the header of the value that was found under the name of `key`.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check(&self, key: &ChunkKey) -> Result<Header, Refusal> {
        let header = self.header.as_ref().ok_or(Refusal::Damaged)?;
        Header::of_value(header, key, self.value_len)
    }
}

/// A value to read.
#[derive(Debug)]
pub struct GetItem {
    /// Name of the chunk.
    pub name: ValueName,
    /// Slot for the payload.
    pub slot: ReservedSlot,
}

impl GetItem {
    /// Judges the header of a value of `value_len` bytes: the payload is read into the slot only
    /// after an `Ok`, `stored_len` bytes from `payload_offset` on, which are the whole slot.
    ///
    /// # Errors
    /// [`Refusal`], with which the item is answered.
    pub fn check(&self, header: &HeaderBytes, value_len: u64) -> Result<Header, Refusal> {
        let header = Header::of_value(header, &self.name.key, value_len)?;
        let (expected, found) = (header.plain_len, self.slot.len());
        match expected == found {
            true => Ok(header),
            false => Err(Refusal::Length { expected, found }),
        }
    }
}

/// Outcome of one read.
#[derive(Debug)]
pub enum Got {
    /// The slot has the payload; its checksum was not compared yet.
    Value {
        /// The header.
        header: Header,
        /// The slot, whole.
        slot: ReservedSlot,
        /// As [`Head::age`].
        age: Option<Duration>,
    },
    /// The store has no such value.
    Absent(ReservedSlot),
    /// The value must not be used.
    Refused {
        /// The reason.
        refusal: Refusal,
        /// The slot.
        slot: ReservedSlot,
    },
    /// The read failed: the value may be there.
    Failed {
        /// The reason.
        error: StoreError,
        /// The slot, or its quarantine.
        slot: FailedSlot,
    },
}

impl Got {
    /// A failure after which nothing writes to the slot.
    pub fn failed(error: StoreError, slot: ReservedSlot) -> Self {
        let slot = FailedSlot::Released(slot);
        Self::Failed { error, slot }
    }
}

/// A value to write: the header, zeroes up to its payload offset, the slot's bytes.
#[derive(Clone, Debug)]
pub struct PutItem {
    /// Folder of the chunk.
    pub folder: ChunkFolder,
    /// The header.
    pub header: Header,
    /// The payload.
    pub slot: SealedSlot,
    /// Behaviour where there is a value.
    pub mode: PutMode,
}

impl PutItem {
    /// Returns the name of the chunk.
    pub fn name(&self) -> ValueName {
        self.folder.value(self.header.key)
    }

    /// Returns what comes before the payload: the header, and zeroes up to the payload's offset.
    pub fn start(&self) -> Vec<u8> {
        let mut start = self.header.encode().to_vec();
        start.resize(self.header.payload_offset as usize, 0);
        start
    }
}

/// Behaviour of a write where there is a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// The value is left as it is.
    Create,
    /// The value is replaced.
    Replace,
}

/// Outcome of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The value is there now.
    Written,
    /// A value was there already, and was left as it is.
    Present,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Name of the object.
    pub name: Name,
    /// Bytes of the object, header included; `None` where the store's listing does not say.
    pub len: Option<u64>,
    /// As [`Head::age`].
    pub age: Option<Duration>,
}

/// A part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The objects; at most as many as were asked for, and none does not mean the end.
    pub objects: Vec<ListedObject>,
    /// Start of the next page; `None` at the end.
    pub next: Option<String>,
}

/// An operation of a store that failed, for one object or as a whole.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed before the operation was complete.
    #[error("the deadline passed before the operation was complete")]
    Deadline,
    /// The store cannot be reached, or was closed.
    #[error("the store is not available: {reason}")]
    Unavailable {
        /// Text for a person, without secrets.
        reason: String,
    },
    /// The store refuses this user.
    #[error("the store denies access: {reason}")]
    Denied {
        /// Text for a person, without secrets.
        reason: String,
    },
    /// The store has no free capacity.
    #[error("the store has no free capacity for {needed} bytes")]
    Full {
        /// Bytes of the object.
        needed: u64,
    },
    /// An object is larger than the store or the caller takes.
    #[error("an object of {found} bytes is larger than the {max} that are taken")]
    TooLarge {
        /// Most bytes.
        max: u64,
        /// Bytes of the object.
        found: u64,
    },
    /// The connection or the file system failed.
    #[error("I/O failed: {0}")]
    Io(#[from] io::Error),
}

impl StoreError {
    /// An [`Unavailable`](Self::Unavailable) for this reason.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        let reason = reason.to_string();
        Self::Unavailable { reason }
    }

    /// Returns the same error once more, for another object.
    pub(crate) fn again(&self) -> Self {
        match self {
            Self::Deadline => Self::Deadline,
            Self::Unavailable { reason } => Self::Unavailable {
                reason: reason.clone(),
            },
            Self::Denied { reason } => Self::Denied {
                reason: reason.clone(),
            },
            &Self::Full { needed } => Self::Full { needed },
            &Self::TooLarge { max, found } => Self::TooLarge { max, found },
            Self::Io(error) => Self::Io(io::Error::new(error.kind(), error.to_string())),
        }
    }

    /// Returns the same error for each of `len` objects.
    pub(crate) fn each<T>(&self, len: usize) -> Vec<Result<T, Self>> {
        (0..len).map(|_| Err(self.again())).collect()
    }

    /// Returns true where the store refuses a write, and may be read.
    pub(crate) fn is_refusal(&self) -> bool {
        self.remedy_of_write().is_some()
    }

    /// Returns what helps against the refusal of a write by a store that answers and may be read;
    /// `None` for other errors.
    pub(crate) fn remedy_of_write(&self) -> Option<&'static str> {
        match self {
            Self::Denied { .. } => Some("give this user the right to write there"),
            Self::Full { .. } => Some(
                "it is full: free space or inodes there or raise the quota, and set --remote-size \
                 below it; of a Redis, raise maxmemory or set maxmemory-policy allkeys-lru",
            ),
            Self::TooLarge { .. } => Some(
                "chunks are larger than the values that it takes: lower --chunk-size, or raise its \
                 limit",
            ),
            _ => None,
        }
    }

    /// Returns true for an error of one object, which says nothing of the store's health.
    pub fn is_of_object(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::TooLarge { .. })
    }
}

/// Waits for an operation until its deadline; begins none after it.
pub(crate) async fn until<T, E>(
    deadline: Instant,
    operation: impl Future<Output = Result<T, E>>,
) -> Result<T, StoreError>
where
    StoreError: From<E>,
{
    if now() >= deadline {
        return Err(StoreError::Deadline);
    }
    match tokio::time::timeout_at(deadline.into(), operation).await {
        Ok(done) => Ok(done?),
        Err(_) => Err(StoreError::Deadline),
    }
}

impl From<StoreError> for BackendError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Deadline => Self::Deadline,
            StoreError::Unavailable { reason } | StoreError::Denied { reason } => {
                Self::Unavailable(Unavailable { reason })
            }
            StoreError::Full { needed } => Self::Full { needed },
            StoreError::TooLarge { max, found } => Self::TooLarge { max, found },
            StoreError::Io(error) => Self::Io(error),
        }
    }
}
