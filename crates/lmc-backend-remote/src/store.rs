//! The `Store` trait: what lmc requires of a shared file system, Redis or an object store.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_backend::{Answers, BackendError, BoxFuture, FailedSlot, Unavailable, now};
use lmc_key::ChunkKey;
use lmc_memory::{ReservedSlot, SealedSlot};
use thiserror::Error;

use crate::format::{ChunkFolder, HEADER_LEN, Header, Name, Refusal, Scope, ValueName};

/// Bytes of a stored header.
pub type HeaderBytes = [u8; HEADER_LEN];

/// One result for each object of a batch, in order.
pub type Each<'a, T> = BoxFuture<'a, Vec<Result<T, StoreError>>>;

/// The result of an operation on one object, or on the store.
pub type Single<'a, T> = BoxFuture<'a, Result<T, StoreError>>;

/// A service outside this host that holds named objects: a shared file system, Redis, S3.
///
/// Every implementation MUST keep these rules; the kit in `conformance` checks them.
///
/// - **Batches.** There is one answer for each key of a batch; an empty batch is answered at once. Values are
///   read and written in the order of the batch, several at a time, as many as the store's own settings
///   allow; each is answered as soon as it ends.
/// - **Deadlines.** Every operation ends soon after its deadline, even if the store does not answer. An
///   operation that has not begun by then never begins.
/// - **Whole values.** A reader finds a value completely or not at all. A value that was torn by a crash is
///   detected by the header's length and checksums.
/// - **Cancellation.** A future or stream may be dropped at any point; operations that have not begun by then
///   never begin. Slots that something may still write to stay with the store until the writing is over.
/// - **Limits.** Memory beyond the slots, threads, connections and requests in progress are limited, however
///   slow the store is. Reads of headers never wait only because of writes of values.
/// - **No trust.** Everything that the store answers is limited and parsed, and nothing panics. A payload may
///   be wrong: the tier compares its checksum.
pub trait Store: fmt::Debug + Send + Sync + 'static {
    /// Returns the kind of store for logs, such as `file`.
    fn kind(&self) -> &'static str;

    /// Returns the offset of a payload in the values that this implementation writes. Default: directly after
    /// the header.
    fn payload_offset(&self) -> u64 {
        HEADER_LEN as u64
    }

    /// Returns the most bytes of a value, header included. Default: the store has no limit of its own.
    fn max_value_len(&self) -> u64 {
        u64::MAX
    }

    /// Returns the time that a value lives after its write or its last [`Store::touch`]; `None` if unknown.
    /// Default: unknown.
    fn ttl(&self) -> Option<Duration> {
        None
    }

    /// Returns the age from which a value that is read should be touched; `None` if age has no effect.
    /// Default: half of [`Store::ttl`].
    fn touch_age(&self) -> Option<Duration> {
        self.ttl().map(|ttl| ttl / 2)
    }

    /// Reads the headers of values; `None` for an absent value.
    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>>;

    /// Reads values into slots: first the header, which [`GetItem::check`] checks, and then the payload
    /// directly into the slot.
    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got>;

    /// Writes values from slots, without a copy if the store can do that.
    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>>;

    /// Removes objects; answers `true` for each object that existed, if the store reports that.
    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool>;

    /// Resets the age of values to zero; answers `false` for absent values.
    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool>;

    /// Lists objects, in an order of the store's own, from `token` on; `None` starts a listing. An object
    /// that exists from the first page to the last is listed exactly once. Objects whose names are not
    /// [`Name`]s are omitted.
    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage>;

    /// Reads a small object; `None` if it is absent. An object of more than `max` bytes is an error.
    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>>;

    /// Writes a small object, replacing an existing one; never used for [`Name::Clears`].
    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()>;

    /// Reads [`Name::Clears`] with its version; `None` if it is absent. An object of more than `max` bytes is
    /// an error. Default: the bytes are the version, for a store whose [`Store::swap_clears`] compares bytes.
    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        Box::pin(async move {
            let bytes = self.read(Name::Clears, max, deadline).await?;
            // An object that was restored to its former bytes counts as unchanged.
            Ok(bytes.map(|bytes| (bytes.clone(), Version(bytes))))
        })
    }

    /// Writes [`Name::Clears`] if it is unchanged since it was read: it has that version, or is absent for
    /// `None`. Otherwise returns false and changes nothing. Of several writers that have read the same
    /// version, one succeeds. After an error the object may have been written.
    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool>;

    /// Searches for chunks of layout v1, which earlier releases wrote and no code reads. Returns the command
    /// that removes them; `None` if there are none. Default: there are none.
    fn old_chunks(&self, _deadline: Instant) -> Single<'_, Option<String>> {
        Box::pin(std::future::ready(Ok(None)))
    }

    /// Ends all work of the store, by the deadline; work that is still running then is left behind. Later
    /// operations are answered with [`StoreError::Unavailable`].
    fn close(&self, deadline: Instant) -> BoxFuture<'_, ()>;
}

/// Version of an object: the object is replaced only if it still has this version. Opaque to everything but
/// its store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(pub(crate) Bytes);

/// The start of a value, and the store's metadata about it.
#[derive(Clone, Debug)]
pub struct Head {
    /// The header, not parsed yet; `None` for a value that is shorter.
    pub header: Option<Box<HeaderBytes>>,
    /// Bytes of the whole value.
    pub value_len: u64,
    /// Time since the write or the last [`Store::touch`] by the store's clock, if known.
    pub age: Option<Duration>,
}

impl Head {
    /// Parses and checks the header of the value that was found under the name of `key`.
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
    /// Checks the header of a value of `value_len` bytes. Only after an `Ok` is the payload read:
    /// `stored_len` bytes from `payload_offset` on, which fill the slot.
    ///
    /// # Errors
    /// [`Refusal`], with which the item must be answered.
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
    /// The slot has the payload, whose checksum was not compared yet.
    Value {
        /// The header.
        header: Header,
        /// The filled slot.
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
    /// The read failed: the value may exist.
    Failed {
        /// The reason.
        error: StoreError,
        /// The slot, or its quarantine.
        slot: FailedSlot,
    },
}

impl Got {
    /// Makes a failure after which nothing writes to the slot.
    pub fn failed(error: StoreError, slot: ReservedSlot) -> Self {
        let slot = FailedSlot::Released(slot);
        Self::Failed { error, slot }
    }
}

/// A value to write: the header, zeroes up to the payload offset, and the slot's bytes.
#[derive(Clone, Debug)]
pub struct PutItem {
    /// Folder of the chunk.
    pub folder: ChunkFolder,
    /// The header.
    pub header: Header,
    /// The payload.
    pub slot: SealedSlot,
    /// Behaviour if a value already exists.
    pub mode: PutMode,
}

impl PutItem {
    /// Returns the name of the chunk.
    pub fn name(&self) -> ValueName {
        self.folder.value(self.header.key)
    }

    /// Returns the bytes before the payload: the header, and zeroes up to the payload's offset.
    pub fn start(&self) -> Vec<u8> {
        let mut start = self.header.encode().to_vec();
        start.resize(self.header.payload_offset as usize, 0);
        start
    }
}

/// Behaviour of a write if a value already exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutMode {
    /// The existing value is kept.
    Create,
    /// The existing value is replaced.
    Replace,
}

/// Outcome of one write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// The value was written.
    Written,
    /// A value already existed, and was kept.
    Present,
}

/// One object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Name of the object.
    pub name: Name,
    /// Bytes of the object, header included; `None` if the store's listing does not report it.
    pub len: Option<u64>,
    /// As [`Head::age`].
    pub age: Option<Duration>,
}

/// A part of a listing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListPage {
    /// The objects, at most as many as the caller asked for. An empty page is not the end of the listing.
    pub objects: Vec<ListedObject>,
    /// Start of the next page; `None` at the end.
    pub next: Option<String>,
}

/// Failure of a store's operation, for one object or as a whole.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The deadline passed before the operation was complete.
    #[error("the deadline passed before the operation was complete")]
    Deadline,
    /// The store cannot be reached, or was closed.
    #[error("the store is not available: {reason}")]
    Unavailable {
        /// Text for an operator, without secrets.
        reason: String,
    },
    /// The store denies access to this user.
    #[error("the store denies access: {reason}")]
    Denied {
        /// Text for an operator, without secrets.
        reason: String,
    },
    /// The store has no free capacity.
    #[error("the store has no free capacity for {needed} bytes")]
    Full {
        /// Bytes of the object.
        needed: u64,
    },
    /// An object is larger than the store or the caller accepts.
    #[error("an object of {found} bytes is larger than the {max} that are accepted")]
    TooLarge {
        /// Most bytes.
        max: u64,
        /// Bytes of the object.
        found: u64,
    },
    /// The connection or the file system failed.
    #[error("I/O failed: {0}")]
    Io(#[source] Arc<io::Error>),
}

impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> Self {
        Self::Io(Arc::new(error))
    }
}

impl StoreError {
    /// Makes an [`Unavailable`](Self::Unavailable) error with this reason.
    pub fn unavailable(reason: impl fmt::Display) -> Self {
        let reason = reason.to_string();
        Self::Unavailable { reason }
    }

    /// Returns a copy of the error for each of `len` objects.
    pub(crate) fn each<T>(&self, len: usize) -> Vec<Result<T, Self>> {
        (0..len).map(|_| Err(self.clone())).collect()
    }

    /// Returns true if the store refuses a write but can be read.
    pub(crate) fn is_refusal(&self) -> bool {
        self.remedy_of_write().is_some()
    }

    /// Returns the remedy for a write that was refused by a store that can still be read; `None` for other
    /// errors.
    pub(crate) fn remedy_of_write(&self) -> Option<&'static str> {
        match self {
            Self::Denied { .. } => Some("give this user the right to write there"),
            Self::Full { .. } => Some(
                "it is full: free space or inodes there or raise the quota, and set --remote-size \
                 below it; of a Redis, raise maxmemory or set maxmemory-policy allkeys-lru",
            ),
            Self::TooLarge { .. } => Some(
                "chunks are larger than the values that it accepts: lower --chunk-size, or raise its \
                 limit",
            ),
            _ => None,
        }
    }

    /// Returns true if the error concerns one object and shows nothing about the store's health.
    pub fn is_of_object(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::TooLarge { .. })
    }
}

/// Waits for an operation until its deadline; begins no operation after it.
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
