//! Chunks in Redis: one server, a cluster, or a master that Sentinels name.
//!
//! The crate `redis` finds the servers, and asks them everything but the values. Values go over
//! connections of their own, straight between the socket and the slots.

mod bulk;
mod link;
mod listing;
mod url;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use lmc_backend::{Answers, BoxFuture};
use parking_lot::Mutex;
use redis::{FromRedisValue, Pipeline, RedisError, Value};
use tokio::sync::Semaphore;
use tokio_rustls::rustls::ClientConfig;

use self::bulk::Idle;
use self::link::{Link, Lost, answer_by, connect_by};
use self::listing::{Listings, Position};
pub use self::url::{RedisUrl, RedisUrlError, Topology};
use self::wire::WRONG_TYPE;
use crate::clock::ahead_ms;
use crate::format::{HEADER_LEN, Name, OLD_ROOT, Scope, ValueName};
use crate::store::{
    Each, GetItem, Got, Head, ListPage, ListedObject, Put, PutItem, Single, Store, StoreError,
    Version, until,
};
use crate::tls;

/// Keys that are asked about in one request to one server.
const KEYS_AT_ONCE: usize = 64;
/// Requests under way at a time on the connection that is not for values.
const REQUESTS: usize = 64;
/// Requests to each server that look for chunks of the old layout.
const OLD_SCANS: usize = 16;
/// Names of a page that are asked for at most.
const MAX_PAGE: usize = 1000;
/// Characters of an error's text that are shown.
const MAX_REASON: usize = 300;
/// Characters of a password by which it is found in a text: a server cuts what it repeats off.
const PASSWORD_START: usize = 16;
/// Longest value that a server takes, unless its settings say otherwise.
const MAX_VALUE: u64 = 512 << 20;

/// Settings of a [`RedisStore`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RedisConfig {
    /// The servers, and the login there.
    pub url: RedisUrl,
    /// Text before every key, such as `lmc/`. Default: `lmc/`.
    pub prefix: String,
    /// Time after which the server expires a value that was not used. Default: none, and the
    /// server's `maxmemory-policy` decides.
    pub ttl: Option<Duration>,
    /// Connections that values are read on at a time, to all servers together, and as many that
    /// they are written on. Default: 4.
    pub connections: usize,
}

impl RedisConfig {
    /// Settings with these defaults.
    pub fn new(url: RedisUrl) -> Self {
        Self {
            url,
            prefix: "lmc/".to_owned(),
            ttl: None,
            connections: 4,
        }
    }
}

/// The memory of a server, as it says itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisMemory {
    /// Host and port.
    pub node: String,
    /// Bytes in use; `None` where the server does not say.
    pub used: Option<u64>,
    /// Most bytes (`maxmemory`); `None` where there is no limit.
    pub max: Option<u64>,
    /// Behaviour of a full server (`maxmemory-policy`), where the server says it.
    pub policy: Option<String>,
}

/// The login of connections for values.
struct Login {
    username: Option<String>,
    password: Option<String>,
    db: u32,
    tls: Option<Arc<ClientConfig>>,
}

/// Leaves the password out.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

impl Login {
    /// Makes the text of an error fit to be shown. One that may repeat the password is dropped.
    fn clean(&self, mut error: StoreError) -> StoreError {
        if let StoreError::Unavailable { reason } | StoreError::Denied { reason } = &mut error {
            let start: Option<String> = self
                .password
                .as_ref()
                .map(|password| password.chars().take(PASSWORD_START).collect());
            *reason = match start.is_some_and(|start| reason.contains(&start)) {
                true => "an error that repeats the password".to_owned(),
                // The server's text may hold anything.
                false => {
                    let text = reason.chars().filter(|c| !c.is_control());
                    text.take(MAX_REASON).collect()
                }
            };
        }
        error
    }
}

/// Chunks in Redis. Has to be used on a runtime.
#[derive(Debug)]
pub struct RedisStore {
    config: RedisConfig,
    login: Login,
    link: Mutex<Option<Arc<Link>>>,
    /// One caller connects, others wait for it.
    connecting: tokio::sync::Mutex<()>,
    idle: Idle,
    readers: Semaphore,
    writers: Semaphore,
    requests: Semaphore,
    listings: Listings,
    is_closed: AtomicBool,
}

impl RedisStore {
    /// Makes the store; connects when it is first used.
    ///
    /// With TLS the certificates of the system are trusted, or those that `SSL_CERT_FILE` names. The
    /// crate `redis` needs a cryptography provider for the whole process: ring, unless the process
    /// has chosen another.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] where TLS is asked for and no certificate is trusted here.
    pub fn new(config: RedisConfig) -> Result<Self, StoreError> {
        let url = &config.url;
        let login = Login {
            username: url.username.clone(),
            password: url.password.clone(),
            db: url.db,
            tls: url
                .tls
                .then(|| tls::config(true).map(Arc::new))
                .transpose()?,
        };
        let connections = config.connections.max(1);
        Ok(Self {
            login,
            link: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
            idle: Idle::default(),
            readers: Semaphore::new(connections),
            writers: Semaphore::new(connections),
            requests: Semaphore::new(REQUESTS),
            listings: Listings::default(),
            is_closed: AtomicBool::new(false),
            config: RedisConfig {
                connections,
                ..config
            },
        })
    }

    fn key(&self, name: Name) -> String {
        format!("{}{name}", self.config.prefix)
    }

    fn ttl_ms(&self) -> Option<u64> {
        let ttl = self.config.ttl?;
        Some(
            u64::try_from(ttl.as_millis())
                .unwrap_or(u64::MAX)
                .clamp(1, 1 << 52),
        )
    }

    /// Returns the connection that is not for values; connects where there is none.
    async fn link(&self, deadline: Instant) -> Result<Arc<Link>, StoreError> {
        let there = || self.link.lock().clone();
        if let Some(link) = there() {
            return Ok(link);
        }
        let connecting = async { Ok::<_, StoreError>(self.connecting.lock().await) };
        let _connecting = until(deadline, connecting).await?;
        if self.is_closed.load(Ordering::Acquire) {
            return Err(StoreError::unavailable("closed"));
        }
        if let Some(link) = there() {
            return Ok(link);
        }
        let link = connect_by(deadline, &self.config.url).await;
        let link = Arc::new(link.map_err(|error| self.login.clean(error))?);
        *self.link.lock() = Some(Arc::clone(&link));
        Ok(link)
    }

    /// Gives a connection up, so that the next caller connects.
    fn lose(&self, link: &Arc<Link>) {
        let mut held = self.link.lock();
        if held.as_ref().is_some_and(|held| Arc::ptr_eq(held, link)) {
            *held = None;
            self.idle.clear();
        }
    }

    /// Sends commands on one key, or to one server on several, and returns their answers.
    async fn pipeline(
        &self,
        link: &Arc<Link>,
        commands: &Pipeline,
        deadline: Instant,
    ) -> Result<Vec<Value>, StoreError> {
        let permit = async {
            self.requests
                .acquire()
                .await
                .map_err(|_| StoreError::Deadline)
        };
        let _permit = until(deadline, permit).await?;
        self.settle(link, answer_by(deadline, link.pipeline(commands)).await)
    }

    fn settle<T>(&self, link: &Arc<Link>, answer: Result<T, Lost>) -> Result<T, StoreError> {
        answer.map_err(|lost| {
            if lost.is_lost {
                self.lose(link);
            }
            self.login.clean(lost.error)
        })
    }

    /// Reads the answers to the commands for one key.
    fn answer<T>(
        &self,
        link: &Arc<Link>,
        answers: &[Value],
        read: impl Fn(&[Value]) -> Option<T>,
    ) -> Result<T, StoreError> {
        if let Some(answer) = read(answers) {
            return Ok(answer);
        }
        match answers.iter().find_map(error_in) {
            Some(error) => self.settle(link, Err(Lost::of(&error))),
            None => Err(StoreError::unavailable("an answer of another type")),
        }
    }

    /// Asks for something of each key, `commands` commands for each.
    async fn each<T>(
        &self,
        names: Vec<Name>,
        deadline: Instant,
        commands: usize,
        ask: impl Fn(&mut Pipeline, &str),
        read: impl Fn(&[Value]) -> Option<T>,
    ) -> Vec<Result<T, StoreError>> {
        if names.is_empty() {
            return Vec::new();
        }
        let link = match self.link(deadline).await {
            Ok(link) => link,
            Err(error) => return error.each(names.len()),
        };
        // A request to a cluster is about one key.
        let at_once = if link.is_cluster() { 1 } else { KEYS_AT_ONCE };
        let (ask, read, link) = (&ask, &read, &link);
        let batches: Vec<Vec<Name>> = names.chunks(at_once).map(<[_]>::to_vec).collect();
        let asked = batches.into_iter().map(|names| async move {
            let mut pipeline = redis::pipe();
            // Each key has its own answer, which may be an error.
            pipeline.ignore_errors();
            names
                .iter()
                .for_each(|name| ask(&mut pipeline, &self.key(*name)));
            match self.pipeline(link, &pipeline, deadline).await {
                Err(error) => error.each(names.len()),
                Ok(values) if values.len() != names.len() * commands => {
                    StoreError::unavailable("answers are missing").each(names.len())
                }
                Ok(values) => {
                    let answers = values.chunks(commands);
                    answers.map(|one| self.answer(link, one, read)).collect()
                }
            }
        });
        let answers: Vec<Vec<_>> = stream::iter(asked).buffered(REQUESTS).collect().await;
        answers.into_iter().flatten().collect()
    }

    fn head(&self, answers: &[Value]) -> Option<Option<Head>> {
        let [start, len, left] = answers else {
            return None;
        };
        // A key of another program: no value, and it is replaced by one.
        if error_in(start).is_some_and(|error| error.code() == Some(WRONG_TYPE)) {
            return Some(Some(Head {
                header: None,
                value_len: 0,
                age: None,
            }));
        }
        let (start, value_len) = (bytes(start)?, u64::from_redis_value_ref(len).ok()?);
        let left = i64::from_redis_value_ref(left).ok()?;
        if value_len == 0 {
            return Some(None);
        }
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        let age = |left| self.config.ttl.map(|ttl| ttl.saturating_sub(left));
        Some(Some(Head {
            header: start.first_chunk().copied().map(Box::new),
            value_len,
            age: left.and_then(age),
        }))
    }

    /// Lists what one `SCAN` finds, in the order of the names, but for what the listing had before:
    /// `SCAN` repeats names while the server resizes its table.
    async fn scan(
        &self,
        scope: Scope,
        token: Option<&str>,
        limit: usize,
        deadline: Instant,
    ) -> Result<ListPage, StoreError> {
        let mut at = match token {
            None => Position::default(),
            Some(token) => self.listings.take(token)?,
        };
        let link = self.link(deadline).await?;
        let nodes = link.nodes();
        let limit = limit.clamp(1, MAX_PAGE);
        if at.found.is_empty() {
            let Some(node) = nodes.get(at.node) else {
                return Err(StoreError::unavailable(
                    "the cluster has changed: start the listing again",
                ));
            };
            let mut scan = redis::cmd("SCAN");
            scan.arg(at.cursor).arg("MATCH").arg(self.pattern(scope));
            scan.arg("COUNT").arg(limit);
            let found = self.settle(&link, answer_by(deadline, link.on(node, scan)).await)?;
            let found: Option<(u64, Vec<String>)> = FromRedisValue::from_redis_value(found).ok();
            let (next, keys) =
                found.ok_or_else(|| StoreError::unavailable("an answer of another type"))?;
            let name = |key: &String| key.strip_prefix(&self.config.prefix)?.parse::<Name>().ok();
            let names = keys
                .iter()
                .filter_map(name)
                .filter(|name| scope.covers(name));
            at.found.extend(names.filter(|name| at.listed.is_new(name)));
            (at.cursor, at.node) = match next {
                0 => (0, at.node + 1),
                next => (next, at.node),
            };
        }
        let rest = at.found.split_off(limit.min(at.found.len()));
        let object = |name| ListedObject {
            name,
            len: None,
            age: None,
        };
        let objects = std::mem::replace(&mut at.found, rest)
            .into_iter()
            .map(object);
        let objects = objects.collect();
        let is_last = at.found.is_empty() && at.node >= nodes.len();
        let next = (!is_last).then(|| self.listings.keep(at));
        Ok(ListPage { objects, next })
    }

    /// Returns the prefix of the keys as a pattern.
    fn escaped_prefix(&self) -> String {
        let mut pattern = String::new();
        for c in self.config.prefix.chars() {
            if matches!(c, '*' | '?' | '[' | ']' | '\\' | '^' | '-') {
                pattern.push('\\');
            }
            pattern.push(c);
        }
        pattern
    }

    /// Returns the pattern of the keys that a scope may cover.
    fn pattern(&self, scope: Scope) -> String {
        let mut pattern = self.escaped_prefix();
        pattern.push_str(&scope.prefix());
        match scope {
            Scope::Folders => {}
            Scope::Spaces => pattern.push_str("*/spaces/"),
            Scope::Values {
                folder,
                fanout,
                space,
            } => {
                if folder.is_none() {
                    pattern.push_str("*/");
                }
                if folder.is_none() || fanout.is_none() {
                    let fanout = fanout.map_or("??".to_owned(), |fanout| format!("{fanout:02x}"));
                    pattern.push_str(&fanout);
                    pattern.push('/');
                    pattern.extend(space.map(|space| format!("{space}/")));
                }
            }
        }
        pattern.push('*');
        pattern
    }

    /// Writes the object of clears if there is none; also through proxies without `WATCH`.
    async fn create(&self, bytes: Bytes, deadline: Instant) -> Result<bool, StoreError> {
        let ask = move |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("SET").arg(key).arg(&bytes[..]).arg("NX");
        };
        let read = |answers: &[Value]| match answers {
            [Value::Okay] => Some(true),
            [Value::Nil] => Some(false),
            _ => None,
        };
        let mut answers = self.each(vec![Name::Clears], deadline, 1, ask, read).await;
        answers.pop().unwrap_or(Err(StoreError::Deadline))
    }

    /// Writes the object of clears if it is as it was read. `WATCH` is of a connection, so the write has
    /// one of its own.
    async fn swap(
        &self,
        bytes: Bytes,
        read: Version,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let link = self.link(deadline).await?;
        let key = self.key(Name::Clears);
        let swap = async {
            let mut connection = link.own_connection(&self.config.url, &key).await?;
            let mut watch = redis::pipe();
            watch.cmd("WATCH").arg(&key).ignore().cmd("GET").arg(&key);
            let (found,): (Option<Vec<u8>>,) = watch.query_async(&mut connection).await?;
            if found.as_deref() != Some(&read.0[..]) {
                return Ok(false);
            }
            let mut set = redis::pipe();
            set.atomic().cmd("SET").arg(&key).arg(&bytes[..]);
            // No answer: the key has changed since `WATCH`.
            let set: Option<(Value,)> = set.query_async(&mut connection).await?;
            Ok(set.is_some())
        };
        let swapped = answer_by(deadline, swap).await;
        self.settle(&link, swapped)
    }

    /// Looks at some keys for one of layout v1.
    async fn look_for_old_chunks(&self, deadline: Instant) -> Result<Option<String>, StoreError> {
        let link = self.link(deadline).await?;
        let pattern = format!("{}{OLD_ROOT}/*", self.escaped_prefix());
        for node in link.nodes() {
            let mut cursor = 0;
            for _ in 0..OLD_SCANS {
                let mut scan = redis::cmd("SCAN");
                scan.arg(cursor).arg("MATCH").arg(&pattern);
                scan.arg("COUNT").arg(MAX_PAGE);
                let found = self.settle(&link, answer_by(deadline, link.on(&node, scan)).await)?;
                let found: Option<(u64, Vec<String>)> =
                    FromRedisValue::from_redis_value(found).ok();
                let (next, keys) = found.unwrap_or_default();
                if !keys.is_empty() {
                    let command =
                        format!("redis-cli --scan --pattern '{pattern}' | xargs redis-cli unlink");
                    return Ok(Some(command));
                }
                cursor = next;
                if cursor == 0 {
                    break;
                }
            }
        }
        Ok(None)
    }

    /// Asks each server with keys for its memory.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn memory(&self, deadline: Instant) -> Result<Vec<RedisMemory>, StoreError> {
        let link = self.link(deadline).await?;
        let mut nodes = Vec::new();
        for node in link.nodes() {
            let mut info = redis::cmd("INFO");
            info.arg("memory");
            let info = self.settle(&link, answer_by(deadline, link.on(&node, info)).await)?;
            let info = String::from_redis_value(info).unwrap_or_default();
            let field = |name: &str| {
                let mut lines = info.lines().filter_map(|line| line.split_once(':'));
                Some(lines.find(|(field, _)| *field == name)?.1.trim())
            };
            let number = |name| field(name).and_then(|value| value.parse::<u64>().ok());
            // The server's word is shown to people.
            let is_word =
                |text: &&str| text.len() < 64 && text.bytes().all(|b| b.is_ascii_graphic());
            nodes.push(RedisMemory {
                node: format!("{}:{}", node.host, node.port),
                used: number("used_memory"),
                max: number("maxmemory").filter(|&max| max > 0),
                policy: field("maxmemory_policy").filter(is_word).map(str::to_owned),
            });
        }
        Ok(nodes)
    }

    /// Returns the milliseconds by which the clock of the first server with keys is ahead of this
    /// host's, negative where it is behind; `None` where it does not say.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn clock_ahead_ms(&self, deadline: Instant) -> Result<Option<i64>, StoreError> {
        let link = self.link(deadline).await?;
        let Some(node) = link.nodes().into_iter().next() else {
            return Ok(None);
        };
        let asked = Instant::now();
        let time = answer_by(deadline, link.on(&node, redis::cmd("TIME"))).await;
        let time = self.settle(&link, time)?;
        let Ok((seconds, micros)) = <(u64, u32)>::from_redis_value(time) else {
            return Ok(None);
        };
        let micros = Duration::from_micros(micros.into());
        let time = Duration::from_secs(seconds).checked_add(micros);
        // The server read its clock about half way.
        let now = time.and_then(|time| time.checked_add(asked.elapsed() / 2));
        Ok(now.and_then(ahead_ms))
    }
}

/// Returns the error that the server answered.
fn error_in(value: &Value) -> Option<RedisError> {
    match value {
        Value::ServerError(error) => Some(error.clone().into()),
        _ => None,
    }
}

fn bytes(value: &Value) -> Option<&[u8]> {
    match value {
        Value::BulkString(bytes) => Some(bytes),
        _ => None,
    }
}

impl Store for RedisStore {
    fn kind(&self) -> &'static str {
        "redis"
    }

    fn max_value_len(&self) -> u64 {
        MAX_VALUE
    }

    fn ttl(&self) -> Option<Duration> {
        self.config.ttl
    }

    fn heads<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, Option<Head>> {
        let names = names.iter().map(|name| Name::Value(*name)).collect();
        let ask = |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("GETRANGE").arg(key).arg(0).arg(HEADER_LEN - 1);
            pipeline.cmd("STRLEN").arg(key);
            pipeline.cmd("PTTL").arg(key);
        };
        Box::pin(self.each(names, deadline, 3, ask, |answers| self.head(answers)))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        self.run(items, deadline)
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        self.run(items, deadline)
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        let ask = |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("UNLINK").arg(key);
        };
        Box::pin(self.each(names.to_vec(), deadline, 1, ask, is_one))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        let names = names.iter().map(|name| Name::Value(*name)).collect();
        let ttl_ms = self.ttl_ms();
        let ask = move |pipeline: &mut Pipeline, key: &str| {
            match ttl_ms {
                Some(ttl_ms) => pipeline.cmd("PEXPIRE").arg(key).arg(ttl_ms),
                None => pipeline.cmd("EXISTS").arg(key),
            };
        };
        Box::pin(self.each(names, deadline, 1, ask, is_one))
    }

    /// Lists names. In a listing of more than a million names, some may come twice.
    fn list<'a>(
        &'a self,
        scope: Scope,
        token: Option<&'a str>,
        limit: usize,
        deadline: Instant,
    ) -> Single<'a, ListPage> {
        Box::pin(self.scan(scope, token, limit, deadline))
    }

    fn read(&self, name: Name, max: usize, deadline: Instant) -> Single<'_, Option<Bytes>> {
        let ask = move |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("STRLEN").arg(key);
            pipeline
                .cmd("GETRANGE")
                .arg(key)
                .arg(0)
                .arg(max.saturating_sub(1));
        };
        let read = |answers: &[Value]| {
            let [len, start] = answers else { return None };
            Some((u64::from_redis_value_ref(len).ok()?, bytes(start)?.to_vec()))
        };
        Box::pin(async move {
            let mut answers = self.each(vec![name], deadline, 2, ask, read).await;
            let (found, bytes) = answers.pop().unwrap_or(Err(StoreError::Deadline))?;
            let max = max as u64;
            match found {
                0 => Ok(None),
                found if found > max => Err(StoreError::TooLarge { max, found }),
                _ => Ok(Some(bytes.into())),
            }
        })
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        let ask = move |pipeline: &mut Pipeline, key: &str| {
            pipeline.cmd("SET").arg(key).arg(&bytes[..]);
        };
        let read = |answers: &[Value]| matches!(answers, [Value::Okay]).then_some(());
        Box::pin(async move {
            let mut answers = self.each(vec![name], deadline, 1, ask, read).await;
            answers.pop().unwrap_or(Err(StoreError::Deadline))
        })
    }

    fn read_clears(&self, max: usize, deadline: Instant) -> Single<'_, Option<(Bytes, Version)>> {
        Box::pin(async move {
            let bytes = self.read(Name::Clears, max, deadline).await?;
            // The bytes are the version: what was put back as it was has not changed.
            Ok(bytes.map(|bytes| (bytes.clone(), Version(bytes))))
        })
    }

    fn swap_clears(
        &self,
        bytes: Bytes,
        read: Option<Version>,
        deadline: Instant,
    ) -> Single<'_, bool> {
        match read {
            Some(read) => Box::pin(self.swap(bytes, read, deadline)),
            None => Box::pin(self.create(bytes, deadline)),
        }
    }

    fn old_chunks(&self, deadline: Instant) -> Single<'_, Option<String>> {
        Box::pin(self.look_for_old_chunks(deadline))
    }

    fn close(&self, _deadline: Instant) -> BoxFuture<'_, ()> {
        self.is_closed.store(true, Ordering::Release);
        *self.link.lock() = None;
        self.idle.clear();
        Box::pin(std::future::ready(()))
    }
}

fn is_one(answers: &[Value]) -> Option<bool> {
    let [answer] = answers else { return None };
    u64::from_redis_value_ref(answer)
        .ok()
        .map(|count| count == 1)
}
