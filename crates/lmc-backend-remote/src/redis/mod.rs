//! Chunks in Redis: one server, a cluster, or a master that Sentinels name.
//!
//! The protocol is RESP2, which all servers and their proxies support. Values are moved directly between the
//! socket and the slots; all other answers are limited before they are stored.

mod batch;
mod listing;
mod servers;
mod url;
mod wire;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::StreamExt;
use lmc_backend::{Answers, BoxFuture};
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio_rustls::rustls::ClientConfig;

use self::batch::{Idle, Question};
use self::listing::{Listings, Position};
use self::servers::Servers;
pub use self::url::{RedisUrl, RedisUrlError, Topology};
use self::wire::{Address, Answer, Command, ELEMENT, WRONG_TYPE, Wire, code_of, refused};
use crate::clock::ahead_ms;
use crate::format::{HEADER_LEN, Name, OLD_ROOT, Scope, ValueName};
use crate::store::{
    Each, GetItem, Got, Head, ListPage, ListedObject, Put, PutItem, Single, Store, StoreError,
    Version, until,
};
use crate::tls;

/// Most connections for queries, that is for everything but values, to all servers together.
const ASKERS: usize = 16;
/// Most bytes of a page of names: many times the bytes of [`MAX_PAGE`] names, because the server's page may
/// be longer than requested.
const MAX_SCAN: usize = 4 << 20;
/// Most bytes of a server's description of itself.
const MAX_INFO: usize = 64 << 10;
/// Number of requests to each server in the search for chunks of the old layout.
const OLD_SCANS: usize = 16;
/// Most names that are requested for a page.
const MAX_PAGE: usize = 1000;
/// Characters of an error text that are shown.
const MAX_REASON: usize = 300;
/// Characters of a password that are searched for in a text: a server truncates what it repeats.
const PASSWORD_START: usize = 16;
/// Longest value that a server accepts, unless its settings differ.
const MAX_VALUE: u64 = 512 << 20;

/// Settings of a [`RedisStore`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RedisConfig {
    /// The servers, and their login.
    pub url: RedisUrl,
    /// Prefix of every key, such as `lmc/`. Default: `lmc/`.
    pub prefix: String,
    /// Time after which the server expires a value that was not used. Default: none; the server's
    /// `maxmemory-policy` decides.
    pub ttl: Option<Duration>,
    /// Number of connections for reading values, to all servers together, and the same number for writing
    /// values. Default: 4.
    pub connections: usize,
}

impl RedisConfig {
    /// Returns the settings with these defaults.
    pub fn new(url: RedisUrl) -> Self {
        Self {
            url,
            prefix: "lmc/".to_owned(),
            ttl: None,
            connections: 4,
        }
    }
}

/// Memory usage of a server, according to the server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RedisMemory {
    /// Host and port of the server.
    pub node: String,
    /// Bytes in use; `None` if the server does not report it.
    pub used: Option<u64>,
    /// Most bytes (`maxmemory`); `None` if there is no limit.
    pub max: Option<u64>,
    /// Behaviour of a full server (`maxmemory-policy`), if the server reports it.
    pub policy: Option<String>,
}

/// The login for connections.
struct Login {
    username: Option<String>,
    password: Option<String>,
    db: u32,
    tls: Option<Arc<ClientConfig>>,
}

/// Omits the password.
impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Login").finish_non_exhaustive()
    }
}

impl Login {
    /// Makes the text of an error safe to show. A text that may contain the password is dropped.
    fn clean(&self, mut error: StoreError) -> StoreError {
        if let StoreError::Unavailable { reason } | StoreError::Denied { reason } = &mut error {
            let start: Option<String> = self
                .password
                .as_ref()
                .map(|password| password.chars().take(PASSWORD_START).collect());
            *reason = match start.is_some_and(|start| reason.contains(&start)) {
                true => "an error that contains the password".to_owned(),
                // The server's text may have any characters.
                false => {
                    let text = reason.chars().filter(|c| !c.is_control());
                    text.take(MAX_REASON).collect()
                }
            };
        }
        error
    }
}

/// Chunks in Redis. Must be used on a runtime.
#[derive(Debug)]
pub struct RedisStore {
    config: RedisConfig,
    login: Login,
    servers: Mutex<Option<Arc<Servers>>>,
    /// One caller finds the servers while the others wait for it.
    finding: tokio::sync::Mutex<()>,
    idle: Idle,
    readers: Semaphore,
    writers: Semaphore,
    askers: Semaphore,
    listings: Listings,
    is_closed: AtomicBool,
}

impl RedisConfig {
    /// Makes the store; it connects at the first use.
    ///
    /// With TLS, the system's certificates are trusted, or those in `SSL_CERT_FILE`.
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if TLS is required and no certificate is trusted on this host.
    pub fn open(self) -> Result<RedisStore, StoreError> {
        let url = &self.url;
        let login = Login {
            username: url.username.clone(),
            password: url.password.clone(),
            db: url.db,
            tls: url
                .tls
                .then(|| tls::config(true).map(Arc::new))
                .transpose()?,
        };
        let connections = self.connections.max(1);
        Ok(RedisStore {
            login,
            servers: Mutex::default(),
            finding: tokio::sync::Mutex::default(),
            idle: Idle::default(),
            readers: Semaphore::new(connections),
            writers: Semaphore::new(connections),
            askers: Semaphore::new(ASKERS),
            listings: Listings::default(),
            is_closed: AtomicBool::new(false),
            config: Self {
                connections,
                ..self
            },
        })
    }
}

impl RedisStore {
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

    /// Returns the servers that have the keys; finds them if they are not known yet.
    async fn servers(&self, deadline: Instant) -> Result<Arc<Servers>, StoreError> {
        let there = || self.servers.lock().clone();
        if let Some(servers) = there() {
            return Ok(servers);
        }
        let finding = async { Ok::<_, StoreError>(self.finding.lock().await) };
        let _finding = until(deadline, finding).await?;
        if self.is_closed.load(Ordering::Acquire) {
            return Err(StoreError::unavailable("closed"));
        }
        if let Some(servers) = there() {
            return Ok(servers);
        }
        let servers = Arc::new(Servers::find(&self.config.url, &self.login, deadline).await?);
        *self.servers.lock() = Some(Arc::clone(&servers));
        Ok(servers)
    }

    /// Drops the servers and all connections, so that the next caller finds the servers again.
    fn lose(&self, servers: &Arc<Servers>) {
        let mut known = self.servers.lock();
        if known
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, servers))
        {
            *known = None;
            self.idle.clear();
        }
    }

    /// Reads the answers to the commands for one key.
    fn read_answers<T>(
        &self,
        answers: &[Answer],
        read: impl Fn(&[Answer]) -> Option<T>,
    ) -> Result<T, StoreError> {
        let error = || match answers.iter().find_map(Answer::error) {
            Some(text) => self.login.clean(refused(text, 0)),
            None => unexpected(),
        };
        read(answers).ok_or_else(error)
    }

    /// Runs a query for each key.
    async fn each<T>(
        &self,
        names: impl IntoIterator<Item = Name>,
        deadline: Instant,
        ask: impl Fn(&str) -> Vec<Command>,
        read: impl Fn(&[Answer]) -> Option<T>,
    ) -> Vec<Result<T, StoreError>> {
        let question = |name| {
            let key = self.key(name);
            let commands = ask(&key);
            Question { key, commands }
        };
        let questions: Vec<Question> = names.into_iter().map(question).collect();
        if questions.is_empty() {
            return Vec::new();
        }
        let mut results = StoreError::Deadline.each(questions.len());
        let mut answered = self.run(questions, deadline);
        while let Some((index, answers)) = answered.next().await {
            results[index] = answers.and_then(|answers| self.read_answers(&answers, &read));
        }
        results
    }

    /// Runs a query for one key.
    async fn one<T>(
        &self,
        name: Name,
        deadline: Instant,
        ask: impl Fn(&str) -> Vec<Command>,
        read: impl Fn(&[Answer]) -> Option<T>,
    ) -> Result<T, StoreError> {
        let mut results = self.each([name], deadline, ask, read).await;
        results.pop().unwrap_or(Err(StoreError::Deadline))
    }

    fn head(&self, answers: &[Answer]) -> Option<Option<Head>> {
        let [start, len, left @ ..] = answers else {
            return None;
        };
        // A key of another program: not a value, and a value replaces it.
        if start
            .error()
            .is_some_and(|text| code_of(text) == WRONG_TYPE)
        {
            return Some(Some(Head {
                header: None,
                value_len: 0,
                age: None,
            }));
        }
        let Answer::Bytes(start) = start else {
            return None;
        };
        let left = match left {
            [] => None,
            [Answer::Number(left)] => u64::try_from(*left).ok().map(Duration::from_millis),
            _ => return None,
        };
        let value_len = len.number()?;
        if value_len == 0 {
            return Some(None);
        }
        let age = |left| self.config.ttl.map(|ttl| ttl.saturating_sub(left));
        Some(Some(Head {
            header: start.first_chunk().copied().map(Box::new),
            value_len,
            age: left.and_then(age),
        }))
    }

    /// Lists the result of one `SCAN`, in the order of names, without the names that the listing already had:
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
        let nodes = self.servers(deadline).await?.nodes();
        let limit = limit.clamp(1, MAX_PAGE);
        if at.found.is_empty() {
            let Some(node) = nodes.get(at.node) else {
                return Err(StoreError::unavailable(
                    "the cluster has changed: start the listing again",
                ));
            };
            let pattern = self.pattern(scope);
            let (next, keys) = self
                .scan_once(node, at.cursor, &pattern, limit, deadline)
                .await?;
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

    /// Scans some keys with their pattern. Returns the cursor for the next ones, zero at the end.
    async fn scan_once(
        &self,
        node: &Address,
        cursor: u64,
        pattern: &str,
        count: usize,
        deadline: Instant,
    ) -> Result<(u64, Vec<String>), StoreError> {
        let (cursor, count) = (cursor.to_string(), count.to_string());
        let scan = Command::new(["SCAN", &cursor, "MATCH", pattern, "COUNT", &count]);
        let scan = scan.answered_by(MAX_SCAN);
        let found = self.ask_server(node, scan, deadline).await?;
        let read = || {
            let [next, keys] = found.elements()? else {
                return None;
            };
            // A key that is not UTF-8 belongs to another program.
            let keys = keys.elements()?.iter().filter_map(Answer::text);
            Some((next.number()?, keys.map(str::to_owned).collect()))
        };
        read().ok_or_else(unexpected)
    }

    /// Returns the prefix of the keys, escaped for a pattern.
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

    /// Writes the object of clears if there is none; works also through proxies without `WATCH`.
    async fn create(&self, bytes: Bytes, deadline: Instant) -> Result<bool, StoreError> {
        let ask = |key: &str| vec![Command::new([b"SET", key.as_bytes(), &bytes, b"NX"])];
        let read = |answers: &[Answer]| match answers {
            [Answer::Status] => Some(true),
            [Answer::Null] => Some(false),
            _ => None,
        };
        self.one(Name::Clears, deadline, ask, read).await
    }

    /// Writes the object of clears if it is unchanged since it was read. `WATCH` belongs to a connection, so
    /// each write has a connection of its own.
    async fn swap(
        &self,
        bytes: Bytes,
        read: Version,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let servers = self.servers(deadline).await?;
        let swapped = self.swap_at(&servers, &bytes, &read.0, deadline).await;
        swapped.map_err(|error| {
            self.lose(&servers);
            self.login.clean(error)
        })
    }

    async fn swap_at(
        &self,
        servers: &Servers,
        bytes: &[u8],
        read: &[u8],
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let key = self.key(Name::Clears);
        let node = servers.node(&key);
        let node = node.ok_or_else(|| StoreError::unavailable("no node has the clears"))?;
        let mut wire = Wire::connect(node, &self.login, deadline).await?;
        // One byte more than was read, to see whether the object has grown.
        let last = read.len().to_string();
        let found = Command::new(["GETRANGE", &key, "0", &last]).answered_by(read.len() + 1);
        let watch = [Command::new(["WATCH", &key]), found];
        match wire.ask(&watch, deadline).await?.as_slice() {
            [Answer::Status, Answer::Bytes(found)] if found == read => {}
            [Answer::Status, Answer::Bytes(_)] => return Ok(false),
            _ => return Err(unexpected()),
        }
        let set = [
            Command::new(["MULTI"]),
            Command::new([b"SET", key.as_bytes(), bytes]),
            Command::new(["EXEC"]).answered_by(ELEMENT),
        ];
        match wire.ask(&set, deadline).await?.as_slice() {
            [_, _, Answer::Array(set)] if *set == [Answer::Status] => Ok(true),
            // The key was changed after `WATCH`.
            [_, _, Answer::Null] => Ok(false),
            _ => Err(unexpected()),
        }
    }

    /// Samples some keys to find one of layout v1.
    async fn look_for_old_chunks(&self, deadline: Instant) -> Result<Option<String>, StoreError> {
        let pattern = format!("{}{OLD_ROOT}/*", self.escaped_prefix());
        for node in self.servers(deadline).await?.nodes() {
            let mut cursor = 0;
            for _ in 0..OLD_SCANS {
                let (next, keys) = self
                    .scan_once(&node, cursor, &pattern, MAX_PAGE, deadline)
                    .await?;
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

    /// Queries the memory usage of each server that has keys.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn memory(&self, deadline: Instant) -> Result<Vec<RedisMemory>, StoreError> {
        let mut nodes = Vec::new();
        for node in self.servers(deadline).await?.nodes() {
            let info = Command::new(["INFO", "memory"]).answered_by(MAX_INFO);
            let info = self.ask_server(&node, info, deadline).await?;
            let info = info.text().unwrap_or_default();
            let field = |name: &str| {
                let mut lines = info.lines().filter_map(|line| line.split_once(':'));
                Some(lines.find(|(field, _)| *field == name)?.1.trim())
            };
            let number = |name| field(name).and_then(|value| value.parse::<u64>().ok());
            // The server's text is shown to people.
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

    /// Returns the milliseconds by which the clock of the first server with keys is ahead of this host's,
    /// negative if it is behind; `None` if the server does not report its time.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn clock_ahead_ms(&self, deadline: Instant) -> Result<Option<i64>, StoreError> {
        let nodes = self.servers(deadline).await?.nodes();
        let Some(node) = nodes.first() else {
            return Ok(None);
        };
        let time = Command::new(["TIME"]).answered_by(MAX_INFO);
        let asked = Instant::now();
        let time = self.ask_server(node, time, deadline).await?;
        let Some([Some(seconds), Some(micros)]) = time
            .elements()
            .and_then(|time| time.first_chunk::<2>())
            .map(|time| time.each_ref().map(Answer::number))
        else {
            return Ok(None);
        };
        let micros = Duration::from_micros(micros);
        let time = Duration::from_secs(seconds).checked_add(micros);
        // The server read its clock about half-way through the request.
        let now = time.and_then(|time| time.checked_add(asked.elapsed() / 2));
        Ok(now.and_then(ahead_ms))
    }
}

fn unexpected() -> StoreError {
    StoreError::unavailable("the server's answer is of another type than expected")
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
        let names = names.iter().map(|name| Name::Value(*name));
        let ask = |key: &str| {
            let last = (HEADER_LEN - 1).to_string();
            let mut commands = vec![
                Command::new(["GETRANGE", key, "0", &last]).answered_by(HEADER_LEN),
                Command::new(["STRLEN", key]),
            ];
            // The age is irrelevant unless values expire.
            if self.config.ttl.is_some() {
                commands.push(Command::new(["PTTL", key]));
            }
            commands
        };
        Box::pin(self.each(names, deadline, ask, |answers| self.head(answers)))
    }

    fn get(&self, items: Vec<GetItem>, deadline: Instant) -> Answers<'_, Got> {
        self.run(items, deadline)
    }

    fn put(&self, items: Vec<PutItem>, deadline: Instant) -> Answers<'_, Result<Put, StoreError>> {
        self.run(items, deadline)
    }

    fn remove<'a>(&'a self, names: &'a [Name], deadline: Instant) -> Each<'a, bool> {
        let ask = |key: &str| vec![Command::new(["UNLINK", key])];
        Box::pin(self.each(names.iter().copied(), deadline, ask, is_one))
    }

    fn touch<'a>(&'a self, names: &'a [ValueName], deadline: Instant) -> Each<'a, bool> {
        let names = names.iter().map(|name| Name::Value(*name));
        let ttl_ms = self.ttl_ms();
        let ask = move |key: &str| {
            vec![match ttl_ms {
                Some(ttl_ms) => Command::new(["PEXPIRE", key, &ttl_ms.to_string()]),
                None => Command::new(["EXISTS", key]),
            }]
        };
        Box::pin(self.each(names, deadline, ask, is_one))
    }

    /// Lists names. In a listing of more than a million names, some names may be repeated.
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
        let ask = move |key: &str| {
            let last = max.saturating_sub(1).to_string();
            vec![
                Command::new(["STRLEN", key]),
                Command::new(["GETRANGE", key, "0", &last]).answered_by(max),
            ]
        };
        let read = |answers: &[Answer]| match answers {
            [len, Answer::Bytes(start)] => Some((len.number()?, start.clone())),
            _ => None,
        };
        Box::pin(async move {
            let (found, bytes) = self.one(name, deadline, ask, read).await?;
            let max = max as u64;
            match found {
                0 => Ok(None),
                found if found > max => Err(StoreError::TooLarge { max, found }),
                _ => Ok(Some(bytes)),
            }
        })
    }

    fn write(&self, name: Name, bytes: Bytes, deadline: Instant) -> Single<'_, ()> {
        let ask = move |key: &str| vec![Command::new([b"SET", key.as_bytes(), &bytes])];
        let read = |answers: &[Answer]| matches!(answers, [Answer::Status]).then_some(());
        Box::pin(self.one(name, deadline, ask, read))
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
        *self.servers.lock() = None;
        self.idle.clear();
        Box::pin(std::future::ready(()))
    }
}

fn is_one(answers: &[Answer]) -> Option<bool> {
    let [answer] = answers else { return None };
    answer.number().map(|count| count == 1)
}
