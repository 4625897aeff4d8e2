//! Chunks in S3, and in stores that speak its protocol.
//!
//! The crate `object_store` signs requests, finds credentials and retries failed requests; hyper moves the
//! bytes. A value is written from its slot without a copy, and read with one copy: from the buffers of the
//! connection into the slot. An object is written with one request. Multipart uploads would not help: a part
//! must have 5 MiB, which is more than most values, each such upload takes two more requests, and values of a
//! batch are moved concurrently anyway.

mod error;
mod http;
mod profile;
mod url;

use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use lmc_backend::{Answers, BoxFuture};
use object_store::aws::AmazonS3;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    BackoffConfig, GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutPayload,
    RetryConfig, UpdateVersion,
};
use parking_lot::Mutex;
use tokio::sync::Semaphore;

pub use self::error::S3UrlError;
pub use self::http::Connector;
use self::http::{Clock, Refused, cause};
use self::url::Access;
pub use self::url::S3Url;
use crate::format::{
    HEADER_LEN, Header, MAX_PAYLOAD_LEN, Name, OLD_ROOT, Refusal, Scope, ValueName,
};
use crate::store::{
    Each, GetItem, Got, Head, ListPage, ListedObject, Put, PutItem, PutMode, Single, Store,
    StoreError, Version, until,
};

/// Most concurrent requests that do not move values.
const REQUESTS: usize = 64;
/// Most values that are written again at a time: each is in memory meanwhile.
const REWRITES: usize = 2;
/// Most objects that one request removes or lists.
const MAX_BATCH: usize = 1000;
/// Longest position of a listing that is accepted.
const MAX_TOKEN: usize = 4096;
/// Number of retries after transient errors.
const RETRIES: usize = 3;
/// Pause before the first retry, and longest pause.
const PAUSE: (Duration, Duration) = (Duration::from_millis(30), Duration::from_millis(500));

/// Settings of an [`S3Store`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct S3Config {
    /// The bucket, and the prefix of all keys there.
    pub url: S3Url,
    /// Number of values that are read at a time, and the same number for writing. Default: 32.
    pub values_at_once: usize,
    /// Time after which the bucket's lifecycle rule removes a value. Default: none known.
    pub ttl: Option<Duration>,
    access: Access,
}

impl S3Config {
    /// Returns the settings with these defaults. Endpoint, region and credentials come from `variables`, for
    /// example [`std::env::vars`], with the names of the AWS tools: `AWS_ENDPOINT_URL_S3`,
    /// `AWS_ENDPOINT_URL`, `AWS_REGION`, `AWS_DEFAULT_REGION`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`,
    /// `AWS_SESSION_TOKEN`, and the variables of web identities and containers. Settings that the variables lack come
    /// from the profile `AWS_PROFILE` of `~/.aws/credentials` and `~/.aws/config`, or of the files in
    /// `AWS_SHARED_CREDENTIALS_FILE` and `AWS_CONFIG_FILE`; `~` is `HOME`. Without credentials, the
    /// instance's metadata service is asked.
    ///
    /// # Errors
    /// [`S3UrlError`] for an invalid endpoint, for a profile that does not exist, and for a file that cannot
    /// be read.
    pub fn new(
        url: S3Url,
        variables: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, S3UrlError> {
        Ok(Self {
            url,
            values_at_once: 32,
            ttl: None,
            access: Access::of(variables)?,
        })
    }

    /// Makes a client for the bucket, without connecting.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if the settings contradict each other.
    pub fn client(&self, connector: Connector) -> Result<AmazonS3, StoreError> {
        let backoff = BackoffConfig {
            init_backoff: PAUSE.0,
            max_backoff: PAUSE.1,
            base: 2.0,
        };
        let retry = RetryConfig {
            backoff,
            max_retries: RETRIES,
            ..RetryConfig::default()
        };
        let builder = self.access.builder(&self.url.bucket);
        // The header has the checksum of the payload. SHA-256 for the signature would take half a second per
        // GB, on a core with instructions for it, and again at the server.
        let builder = builder.with_unsigned_payload(true).with_retry(retry);
        let client = builder.with_http_connector(connector).build();
        client.map_err(|error| StoreError::unavailable(cause(&error)))
    }
}

/// Chunks in a bucket. Must be used on a runtime with I/O and time.
pub struct S3Store {
    config: S3Config,
    client: Mutex<Option<AmazonS3>>,
    clock: Arc<Clock>,
    readers: Semaphore,
    writers: Semaphore,
    rewriters: Semaphore,
    requests: Semaphore,
    /// Set if no object can be rewritten without the risk of replacing a newer one.
    keeps_age: AtomicBool,
}

/// Omits the client.
impl fmt::Debug for S3Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Store")
            .field("config", &self.config)
            .finish_non_exhaustive()
    }
}

/// Outcome of a read into a slot.
enum Read {
    Value {
        header: Header,
        age: Option<Duration>,
    },
    Absent,
    Refused(Refusal),
}

impl S3Config {
    /// Makes the store; it connects at the first use.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if the settings contradict each other, or if TLS is needed and no
    /// certificate is trusted on this host.
    pub fn open(self) -> Result<S3Store, StoreError> {
        let connector = Connector::new(&self)?;
        let values = self.values_at_once.max(1);
        Ok(S3Store {
            clock: Arc::clone(connector.clock()),
            client: Mutex::new(Some(self.client(connector)?)),
            readers: Semaphore::new(values),
            writers: Semaphore::new(values),
            rewriters: Semaphore::new(REWRITES),
            requests: Semaphore::new(REQUESTS),
            keeps_age: AtomicBool::new(false),
            config: Self {
                values_at_once: values,
                ..self
            },
        })
    }
}

impl S3Store {
    /// Returns the milliseconds by which the store's clock is ahead of this host's, accurate to a second,
    /// negative if it is behind; `None` before the first answer.
    pub fn clock_ahead_ms(&self) -> Option<i64> {
        self.clock.ahead_ms()
    }

    fn client(&self) -> Result<AmazonS3, StoreError> {
        let client = self.client.lock().clone();
        client.ok_or_else(|| StoreError::unavailable("closed"))
    }

    fn path(&self, name: Name) -> Path {
        Path::from(format!("{}{name}", self.config.url.prefix))
    }

    fn age(&self, meta: &ObjectMeta) -> Option<Duration> {
        self.clock.since(meta.last_modified.timestamp())
    }

    async fn head(&self, name: ValueName) -> Result<Option<Head>, StoreError> {
        let options = GetOptions::new().with_range(Some(GetRange::Bounded(0..HEADER_LEN as u64)));
        let path = self.path(name.into());
        let result = match self.client()?.get_opts(&path, options).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) if refused(&error).is_some_and(Refused::is_past_end) => {
                return Ok(Some(Head {
                    header: None,
                    value_len: 0,
                    age: None,
                }));
            }
            Err(error) => return Err(failed(&error, 0)),
        };
        let (value_len, age) = (result.meta.size, self.age(&result.meta));
        let start = Start::read(&mut result.into_stream()).await?;
        Ok(Some(Head {
            header: start.whole().map(Box::new),
            value_len,
            age,
        }))
    }

    async fn read_value(&self, mut item: GetItem, deadline: Instant) -> Got {
        let read = async {
            let _permit = permit(&self.readers).await?;
            self.fill(&mut item).await
        };
        let read = until(deadline, read).await;
        let slot = item.slot;
        match read {
            Ok(Read::Value { header, age }) => Got::Value { header, slot, age },
            Ok(Read::Absent) => Got::Absent(slot),
            Ok(Read::Refused(refusal)) => Got::Refused { refusal, slot },
            Err(error) => Got::failed(error, slot),
        }
    }

    async fn fill(&self, item: &mut GetItem) -> Result<Read, StoreError> {
        let path = self.path(item.name.into());
        let result = match self.client()?.get(&path).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(Read::Absent),
            Err(error) => return Err(failed(&error, 0)),
        };
        let (value_len, age) = (result.meta.size, self.age(&result.meta));
        let mut body = result.into_stream();
        let start = Start::read(&mut body).await?;
        let header = start.whole().ok_or(Refusal::Damaged);
        let header = match header.and_then(|header| item.check(&header, value_len)) {
            Ok(header) => header,
            Err(refusal) => return Ok(Read::Refused(refusal)),
        };
        let mut gap = header.payload_offset as usize - HEADER_LEN;
        let payload = item.slot.bytes_mut();
        let (mut at, mut next) = (0, Some(start.rest));
        while let Some(mut bytes) = next {
            let skipped = gap.min(bytes.len());
            bytes.advance(skipped);
            gap -= skipped;
            let end = at + bytes.len();
            let Some(part) = payload.get_mut(at..end) else {
                return Err(StoreError::unavailable("more bytes than were announced"));
            };
            part.copy_from_slice(&bytes);
            at = end;
            next = part_of(&mut body).await?;
        }
        match at == payload.len() {
            true => Ok(Read::Value { header, age }),
            false => Err(StoreError::unavailable("fewer bytes than were announced")),
        }
    }

    async fn write_value(&self, item: PutItem) -> Result<Put, StoreError> {
        let _permit = permit(&self.writers).await?;
        let (client, path) = (self.client()?, self.path(item.name().into()));
        let parts = [item.start().into(), Bytes::from_owner(item.slot)];
        let payload = PutPayload::from_iter(parts);
        let len = item.header.value_len();
        let mode = match item.mode {
            PutMode::Create => object_store::PutMode::Create,
            PutMode::Replace => object_store::PutMode::Overwrite,
        };
        match client.put_opts(&path, payload, mode.into()).await {
            Ok(_) => Ok(Put::Written),
            Err(object_store::Error::AlreadyExists { .. }) => Ok(Put::Present),
            Err(error) => Err(failed(&error, len)),
        }
    }

    /// Removes objects with one request. S3 does not report which of them existed.
    async fn remove_batch(
        &self,
        names: &[Name],
    ) -> Result<Vec<Result<bool, StoreError>>, StoreError> {
        let _permit = permit(&self.requests).await?;
        let paths: Vec<_> = names.iter().map(|name| Ok(self.path(*name))).collect();
        let removing = self.client()?.delete_stream(stream::iter(paths).boxed());
        // `object_store` panics on an answer about objects that were not named in the request.
        let removing = AssertUnwindSafe(removing.collect::<Vec<_>>()).catch_unwind();
        let wrong = |_| StoreError::unavailable("an answer about other objects");
        let mut removed = removing.await.map_err(wrong)?;
        if removed.len() != names.len() {
            // A failure of the whole request yields one error.
            let error = removed.pop().and_then(Result::err);
            let missing = || StoreError::unavailable("answers are missing");
            return Err(error.map_or_else(missing, |error| failed(&error, 0)));
        }
        let outcome = |one: object_store::Result<Path>| match one {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(failed(&error, 0)),
        };
        Ok(removed.into_iter().map(outcome).collect())
    }

    /// Writes a value again unchanged, which resets its age for the bucket's lifecycle rule. S3 has no other
    /// way: its own copy of an object onto itself needs a header that cannot be sent here.
    async fn rewrite(&self, name: ValueName) -> Result<bool, StoreError> {
        if self.keeps_age.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let _permit = permit(&self.rewriters).await?;
        let (client, path) = (self.client()?, self.path(name.into()));
        let result = match client.get(&path).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(false),
            Err(error) => return Err(failed(&error, 0)),
        };
        let (max, found) = (MAX_PAYLOAD_LEN, result.meta.size);
        if found > max {
            return Err(StoreError::TooLarge { max, found });
        }
        if result.meta.e_tag.is_none() {
            return Ok(self.keep_age("objects have no ETag"));
        }
        let version = UpdateVersion {
            e_tag: result.meta.e_tag.clone(),
            version: None,
        };
        let parts: Vec<Bytes> = result
            .into_stream()
            .try_collect()
            .await
            .map_err(|error| failed(&error, 0))?;
        // If the object was replaced meanwhile, it is new.
        let mode = object_store::PutMode::Update(version);
        let put = client.put_opts(&path, PutPayload::from_iter(parts), mode.into());
        match put.await {
            Ok(_) => Ok(true),
            Err(object_store::Error::Precondition { .. }) => Ok(true),
            Err(error) if refused(&error).is_some_and(Refused::is_unknown) => {
                Ok(self.keep_age("writes by If-Match are not implemented"))
            }
            Err(error) => Err(failed(&error, found)),
        }
    }

    /// Stops resetting the age of values. Returns false, because no age was reset.
    fn keep_age(&self, why: &str) -> bool {
        if !self.keeps_age.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                why,
                "S3 store cannot reset the age of chunks in use, so they expire; use a longer lifecycle rule"
            );
        }
        false
    }

    async fn page(
        &self,
        scope: Scope,
        token: Option<&str>,
        limit: usize,
    ) -> Result<ListPage, StoreError> {
        let prefix = format!("{}{}", self.config.url.prefix, scope.prefix());
        let options = PaginatedListOptions {
            max_keys: Some(limit.clamp(1, MAX_BATCH)),
            page_token: token.map(str::to_owned),
            ..PaginatedListOptions::default()
        };
        let listed = self.client()?.list_paginated(Some(&prefix), options).await;
        let listed = listed.map_err(|error| failed(&error, 0))?;
        let object = |meta: &ObjectMeta| {
            let key = meta.location.as_ref();
            let name: Name = key.strip_prefix(&self.config.url.prefix)?.parse().ok()?;
            scope.covers(&name).then_some(ListedObject {
                name,
                len: Some(meta.size),
                age: self.age(meta),
            })
        };
        let mut objects: Vec<_> = listed.result.objects.iter().filter_map(object).collect();
        objects.truncate(limit);
        let next = listed.page_token.filter(|token| !token.is_empty());
        match next.as_ref().is_none_or(|token| token.len() <= MAX_TOKEN) {
            true => Ok(ListPage { objects, next }),
            false => Err(StoreError::unavailable(
                "the position of a listing is too long",
            )),
        }
    }

    async fn read_object(
        &self,
        name: Name,
        max: u64,
    ) -> Result<Option<(Bytes, Option<String>)>, StoreError> {
        let result = match self.client()?.get(&self.path(name)).await {
            Ok(result) => result,
            Err(object_store::Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(&error, 0)),
        };
        let found = result.meta.size;
        if found > max {
            return Err(StoreError::TooLarge { max, found });
        }
        let e_tag = result.meta.e_tag.clone();
        let bytes = result.bytes().await.map_err(|error| failed(&error, 0))?;
        Ok(Some((bytes, e_tag)))
    }

    async fn swap(&self, bytes: Bytes, read: Option<Version>) -> Result<bool, StoreError> {
        let mode = match read {
            None => object_store::PutMode::Create,
            Some(Version(e_tag)) => object_store::PutMode::Update(UpdateVersion {
                e_tag: Some(String::from_utf8_lossy(&e_tag).into_owned()),
                version: None,
            }),
        };
        let (client, path) = (self.client()?, self.path(Name::Clears));
        let len = bytes.len() as u64;
        match client.put_opts(&path, bytes.into(), mode.into()).await {
            Ok(_) => Ok(true),
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. }
                // The object that was read was removed meanwhile.
                | object_store::Error::NotFound { .. },
            ) => Ok(false),
            Err(error) if refused(&error).is_some_and(Refused::is_unknown) => {
                Err(no_conditional_writes("it does not implement them"))
            }
            Err(error) => Err(failed(&error, len)),
        }
    }

    async fn look_for_old_chunks(&self) -> Result<Option<String>, StoreError> {
        let url = &self.config.url;
        let prefix = format!("{}{OLD_ROOT}/", url.prefix);
        let options = PaginatedListOptions {
            max_keys: Some(1),
            ..PaginatedListOptions::default()
        };
        let listed = self.client()?.list_paginated(Some(&prefix), options).await;
        let listed = listed.map_err(|error| failed(&error, 0))?;
        let command = format!("aws s3 rm --recursive s3://{}/{prefix}", url.bucket);
        Ok((!listed.result.objects.is_empty()).then_some(command))
    }

    /// Runs an operation for each item of a batch, [`REQUESTS`] at a time.
    async fn each<I, T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        items: impl IntoIterator<Item = I>,
        deadline: Instant,
        act: impl Fn(I) -> F,
    ) -> Vec<Result<T, StoreError>> {
        let acts = items.into_iter().map(|item| {
            let act = act(item);
            until(deadline, async {
                let _permit = permit(&self.requests).await?;
                act.await
            })
        });
        stream::iter(acts).buffered(REQUESTS).collect().await
    }
}

/// The first bytes of a value.
struct Start {
    header: [u8; HEADER_LEN],
    len: usize,
    /// Further bytes that came with the last part of the header.
    rest: Bytes,
}

type Body = BoxStream<'static, object_store::Result<Bytes>>;

impl Start {
    async fn read(body: &mut Body) -> Result<Self, StoreError> {
        let mut this = Self {
            header: [0; HEADER_LEN],
            len: 0,
            rest: Bytes::new(),
        };
        while this.len < HEADER_LEN {
            let Some(mut bytes) = part_of(body).await? else {
                break;
            };
            let taken = bytes.len().min(HEADER_LEN - this.len);
            this.header[this.len..][..taken].copy_from_slice(&bytes.split_to(taken));
            this.len += taken;
            this.rest = bytes;
        }
        Ok(this)
    }

    fn whole(&self) -> Option<[u8; HEADER_LEN]> {
        (self.len == HEADER_LEN).then_some(self.header)
    }
}

async fn part_of(body: &mut Body) -> Result<Option<Bytes>, StoreError> {
    let part = body.try_next().await;
    part.map_err(|error| failed(&error, 0))
}

async fn permit(of: &Semaphore) -> Result<tokio::sync::SemaphorePermit<'_>, StoreError> {
    let permit = of.acquire().await;
    permit.map_err(|_| StoreError::unavailable("closed"))
}

/// Returns the error of a store through which clears cannot be passed on.
fn no_conditional_writes(why: &str) -> StoreError {
    StoreError::unavailable(format!(
        "clears are passed on by conditional writes (If-Match, If-None-Match), which this store does \
         not have: {why}; use another store, or a release of it that has them"
    ))
}

/// Returns the store's answer in an error.
fn refused(error: &object_store::Error) -> Option<&Refused> {
    let mut error: &(dyn std::error::Error + 'static) = error;
    loop {
        match error.downcast_ref() {
            Some(refused) => return Some(refused),
            None => error = error.source()?,
        }
    }
}

/// Returns the error of an operation on an object of `len` bytes.
fn failed(error: &object_store::Error, len: u64) -> StoreError {
    match refused(error) {
        Some(refused) => refused.error(len),
        None => StoreError::unavailable(cause(error)),
    }
}

impl Store for S3Store {
    fn kind(&self) -> &'static str {
        "s3"
    }

    fn ttl(&self) -> Option<Duration> {
        self.config.ttl
    }

    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>> {
        Box::pin(self.each(names.iter().copied(), deadline, |name| self.head(name)))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        let read =
            move |(index, item)| async move { (index, self.read_value(item, deadline).await) };
        let reads = items.into_iter().enumerate().map(read);
        Box::pin(stream::iter(reads).buffer_unordered(self.config.values_at_once))
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        let write = move |(index, item)| async move {
            (index, until(deadline, self.write_value(item)).await)
        };
        let writes = items.into_iter().enumerate().map(write);
        Box::pin(stream::iter(writes).buffer_unordered(self.config.values_at_once))
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        Box::pin(async move {
            let mut removed = Vec::with_capacity(names.len());
            for batch in names.chunks(MAX_BATCH) {
                match until(deadline, self.remove_batch(batch)).await {
                    Ok(answers) => removed.extend(answers),
                    Err(error) => removed.extend(error.each(batch.len())),
                }
            }
            removed
        })
    }

    /// Reads a value and writes it again.
    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        // Without a permit of `requests`: otherwise lookups would wait for it.
        let rewrites = names
            .iter()
            .map(move |&name| until(deadline, self.rewrite(name)));
        Box::pin(stream::iter(rewrites).buffered(REWRITES).collect())
    }

    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        Box::pin(until(deadline, self.page(scope, token, limit)))
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        Box::pin(async move {
            let read = until(deadline, self.read_object(name, max as u64)).await?;
            Ok(read.map(|(bytes, _)| bytes))
        })
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        let write = async move {
            let len = bytes.len() as u64;
            let put = self.client()?.put(&self.path(name), bytes.into()).await;
            put.map(|_| ()).map_err(|error| failed(&error, len))
        };
        Box::pin(until(deadline, write))
    }

    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        Box::pin(async move {
            let read = self.read_object(Name::Clears, max as u64);
            let Some((bytes, e_tag)) = until(deadline, read).await? else {
                return Ok(None);
            };
            let e_tag = e_tag.ok_or_else(|| no_conditional_writes("its objects have no ETag"))?;
            Ok(Some((bytes, Version(e_tag.into()))))
        })
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        Box::pin(until(deadline, self.swap(bytes, read)))
    }

    fn old_chunks(&self, deadline: Instant) -> Single<'_, Option<String>> {
        Box::pin(until(deadline, self.look_for_old_chunks()))
    }

    fn close(&self, _: Instant) -> BoxFuture<'_, ()> {
        *self.client.lock() = None;
        Box::pin(std::future::ready(()))
    }
}
