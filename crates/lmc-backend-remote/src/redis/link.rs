//! The connection that all but the values goes over, by the crate `redis`, and the servers' names.

use std::time::{Duration, Instant};

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster::ClusterClient;
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{RoutingInfo, SingleNodeRoutingInfo};
use redis::sentinel::{SentinelClientBuilder, SentinelServerType};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, ErrorKind,
    IntoConnectionInfo, Pipeline, ProtocolVersion, RedisConnectionInfo, RedisError,
    ServerErrorKind, TlsMode, Value,
};

use super::url::{RedisUrl, Topology};
use super::wire::{Address, refused};
use crate::store::StoreError;

/// Longest wait for an answer, whatever the caller's deadline is.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The protocol that servers before Redis 6 and proxies know as well: they have no `HELLO`.
const PROTOCOL: ProtocolVersion = ProtocolVersion::RESP2;
/// Slots of a cluster.
const SLOTS: u16 = 16384;
/// Ranges of slots that are believed.
const MAX_RANGES: usize = SLOTS as usize;

/// A connection, and the servers that have the keys.
#[derive(Clone, Debug)]
pub(super) struct Link {
    connection: Connection,
    nodes: Nodes,
}

#[derive(Clone)]
enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::One(_) => "One",
            Self::Cluster(_) => "Cluster",
        })
    }
}

/// The servers that have the keys.
#[derive(Clone, Debug)]
enum Nodes {
    One(Address),
    /// First and last slot of each range, and the node that has it.
    Cluster(Vec<(u16, u16, Address)>),
}

impl Link {
    /// Connects to the servers of a URL.
    async fn connect(url: &RedisUrl) -> Result<Self, RedisError> {
        match url.topology {
            Topology::Single => Self::to_one(info(url, &url.nodes[0])?).await,
            Topology::Sentinel => {
                let sentinels = url.nodes.iter().map(|node| location(url, node));
                let mut sentinels = SentinelClientBuilder::new(
                    sentinels,
                    &url.service,
                    SentinelServerType::Master,
                )?
                .set_client_to_redis_protocol(PROTOCOL)
                .set_client_to_redis_db(url.db.into());
                if url.tls {
                    sentinels = sentinels.set_client_to_redis_tls_mode(TlsMode::Secure);
                }
                if let Some(username) = &url.username {
                    sentinels = sentinels.set_client_to_redis_username(username);
                }
                if let Some(password) = &url.password {
                    sentinels = sentinels.set_client_to_redis_password(password);
                }
                let mut sentinels = sentinels.build()?;
                let master = sentinels.async_get_client().await?;
                Self::to_one(master.get_connection_info().clone()).await
            }
            Topology::Cluster => Self::to_cluster(url).await,
        }
    }

    async fn to_one(info: ConnectionInfo) -> Result<Self, RedisError> {
        let (host, port) = match info.addr() {
            ConnectionAddr::Tcp(host, port) => (host.clone(), *port),
            ConnectionAddr::TcpTls { host, port, .. } => (host.clone(), *port),
            _ => return Err((ErrorKind::InvalidClientConfig, "not a TCP address").into()),
        };
        Ok(Self {
            connection: Connection::One(connect(info).await?),
            nodes: Nodes::One(Address { host, port }),
        })
    }

    async fn to_cluster(url: &RedisUrl) -> Result<Self, RedisError> {
        let nodes: Result<Vec<_>, _> = url.nodes.iter().map(|node| info(url, node)).collect();
        let mut builder = ClusterClient::builder(nodes?)
            .use_protocol(PROTOCOL)
            .connection_timeout(ANSWER_TIMEOUT)
            .response_timeout(ANSWER_TIMEOUT)
            .retries(2);
        if url.tls {
            builder = builder.tls(TlsMode::Secure);
        }
        if let Some(username) = &url.username {
            builder = builder.username(username);
        }
        if let Some(password) = &url.password {
            builder = builder.password(password);
        }
        let mut connection = builder.build()?.get_async_connection().await?;
        let mut slots = redis::cmd("CLUSTER");
        slots.arg("SLOTS");
        let slots = connection.route_command(
            slots,
            RoutingInfo::SingleNode(SingleNodeRoutingInfo::Random),
        );
        let nodes = ranges(slots.await?).ok_or_else(|| {
            RedisError::from((
                ErrorKind::Parse,
                "an answer to CLUSTER SLOTS that is not one",
            ))
        })?;
        Ok(Self {
            connection: Connection::Cluster(connection),
            nodes: Nodes::Cluster(nodes),
        })
    }

    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.connection, Connection::Cluster(_))
    }

    /// Returns the server that has a key; `None` where none is known to.
    pub(super) fn node(&self, key: &str) -> Option<&Address> {
        match &self.nodes {
            Nodes::One(node) => Some(node),
            Nodes::Cluster(ranges) => {
                let slot = slot(key.as_bytes());
                let range = ranges
                    .iter()
                    .find(|(first, last, _)| (*first..=*last).contains(&slot));
                range.map(|(_, _, node)| node)
            }
        }
    }

    /// Returns all servers that have keys, in an order that does not change while they stay.
    pub(super) fn nodes(&self) -> Vec<Address> {
        match &self.nodes {
            Nodes::One(node) => vec![node.clone()],
            Nodes::Cluster(ranges) => {
                let mut nodes: Vec<_> = ranges.iter().map(|(_, _, node)| node.clone()).collect();
                nodes.sort_unstable();
                nodes.dedup();
                nodes
            }
        }
    }

    /// Sends commands on one key, or, to one server, on several.
    pub(super) async fn pipeline(&self, commands: &Pipeline) -> Result<Vec<Value>, RedisError> {
        match self.connection.clone() {
            Connection::One(mut connection) => commands.query_async(&mut connection).await,
            Connection::Cluster(mut connection) => {
                let answers = commands.query_async(&mut connection).await;
                match answers.as_ref().err().and_then(asked_at) {
                    Some(node) => ask(connection, commands, node).await,
                    None => answers,
                }
            }
        }
    }

    /// Connects once more to the server that has a key, for requests that no other may come between.
    pub(super) async fn own_connection(
        &self,
        url: &RedisUrl,
        key: &str,
    ) -> Result<MultiplexedConnection, RedisError> {
        let node = self.node(key).ok_or_else(|| {
            RedisError::from((
                ErrorKind::ClusterConnectionNotFound,
                "no server has the key",
            ))
        })?;
        connect(info(url, node)?).await
    }

    /// Sends a command to one of [`Self::nodes`].
    pub(super) async fn on(&self, node: &Address, command: Cmd) -> Result<Value, RedisError> {
        match self.connection.clone() {
            Connection::One(mut connection) => connection.req_packed_command(&command).await,
            Connection::Cluster(mut connection) => {
                let Address { host, port } = node.clone();
                let to = SingleNodeRoutingInfo::ByAddress { host, port };
                connection
                    .route_command(command, RoutingInfo::SingleNode(to))
                    .await
            }
        }
    }
}

async fn connect(info: ConnectionInfo) -> Result<MultiplexedConnection, RedisError> {
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(Some(ANSWER_TIMEOUT))
        .set_response_timeout(Some(ANSWER_TIMEOUT));
    let client = Client::open(info)?;
    client
        .get_multiplexed_async_connection_with_config(&config)
        .await
}

/// Returns the node where the key of a request is, whose slot is on its way there.
fn asked_at(error: &RedisError) -> Option<Address> {
    let is_ask = error.kind() == ErrorKind::Server(ServerErrorKind::Ask);
    let (node, _) = error.redirect_node().filter(|_| is_ask)?;
    let (host, port) = node.rsplit_once(':')?;
    let (host, port) = (host.to_owned(), port.parse().ok()?);
    Some(Address { host, port })
}

/// Sends commands to a node that a slot is on its way to. The crate does that too, but asks the
/// node once, for the first of the commands.
async fn ask(
    mut connection: ClusterConnection,
    commands: &Pipeline,
    node: Address,
) -> Result<Vec<Value>, RedisError> {
    let mut asking = redis::pipe();
    for command in commands.cmd_iter() {
        asking.cmd("ASKING").add_command(command.clone());
    }
    let (len, Address { host, port }) = (asking.len(), node);
    let to = SingleNodeRoutingInfo::ByAddress { host, port };
    let answers = connection.route_pipeline(asking, 0, len, to).await?;
    Ok(answers.into_iter().skip(1).step_by(2).collect())
}

fn location(url: &RedisUrl, node: &Address) -> ConnectionAddr {
    let Address { host, port } = node.clone();
    match url.tls {
        false => ConnectionAddr::Tcp(host, port),
        true => ConnectionAddr::TcpTls {
            host,
            port,
            insecure: false,
            tls_params: None,
        },
    }
}

fn info(url: &RedisUrl, node: &Address) -> Result<ConnectionInfo, RedisError> {
    let mut login = RedisConnectionInfo::default()
        .set_protocol(PROTOCOL)
        // A proxy may close a connection for a command that it does not know.
        .set_skip_set_lib_name()
        .set_db(url.db.into());
    if let Some(username) = &url.username {
        login = login.set_username(username);
    }
    if let Some(password) = &url.password {
        login = login.set_password(password);
    }
    let info = location(url, node).into_connection_info()?;
    Ok(info.set_redis_settings(login))
}

/// Reads an answer to `CLUSTER SLOTS`.
fn ranges(value: Value) -> Option<Vec<(u16, u16, Address)>> {
    let Value::Array(rows) = value else {
        return None;
    };
    let number = |value: Option<&Value>| match value {
        Some(Value::Int(number)) => u16::try_from(*number).ok(),
        _ => None,
    };
    let range = |row: &Value| {
        let Value::Array(row) = row else { return None };
        let (first, last) = (number(row.first())?, number(row.get(1))?);
        let Some(Value::Array(master)) = row.get(2) else {
            return None;
        };
        let host = match master.first()? {
            Value::BulkString(host) => String::from_utf8(host.clone()).ok()?,
            Value::SimpleString(host) => host.clone(),
            _ => return None,
        };
        let port = number(master.get(1))?;
        let is_range = first <= last && last < SLOTS && !host.is_empty();
        is_range.then_some((first, last, Address { host, port }))
    };
    (rows.len() <= MAX_RANGES).then_some(())?;
    rows.iter().map(range).collect()
}

/// Returns the slot of a key: of its part in the first braces, where there is one.
fn slot(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|&byte| byte == b'{')? + 1;
        let len = key[open..].iter().position(|&byte| byte == b'}')?;
        (len > 0).then(|| &key[open..open + len])
    };
    crc16::State::<crc16::XMODEM>::calculate(tag().unwrap_or(key)) % SLOTS
}

/// Returns true if a new connection is needed: this one is broken, or its server is no longer the
/// one that has the key.
fn is_lost(error: &RedisError) -> bool {
    use ServerErrorKind::{ClusterDown, MasterDown, Moved, ReadOnly};
    let kind = error.kind();
    error.is_unrecoverable_error()
        || error.is_io_error()
        || error.is_timeout()
        || [ReadOnly, MasterDown, ClusterDown, Moved]
            .map(ErrorKind::Server)
            .contains(&kind)
}

/// Returns the meaning of an error. Its text is to be cleaned before it is shown.
fn error_of(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::Deadline;
    }
    let reason = error.to_string();
    match error.code() {
        Some(code @ ("OOM" | "NOAUTH" | "WRONGPASS" | "NOPERM" | "READONLY" | "MISCONF")) => {
            refused(&format!("{code} {reason}"), 0)
        }
        _ if error.kind() == ErrorKind::AuthenticationFailed => StoreError::Denied { reason },
        _ => StoreError::Unavailable { reason },
    }
}

/// Returns the meaning of an error of the login. A server's text is dropped, but for its code: it
/// may repeat the command, with the password.
fn error_of_login(error: &RedisError) -> StoreError {
    if error.is_timeout() {
        return StoreError::Deadline;
    }
    match error.code() {
        Some(code) => refused(code, 0),
        None if error.kind() == ErrorKind::AuthenticationFailed => StoreError::Denied {
            reason: error.category().to_owned(),
        },
        // An error of a cluster is the texts of its nodes.
        None if error.is_io_error() || error.kind() == ErrorKind::ClusterConnectionNotFound => {
            StoreError::unavailable(error)
        }
        None => StoreError::unavailable(error.category()),
    }
}

/// Connects to the servers of a URL, by the deadline.
pub(super) async fn connect_by(deadline: Instant, url: &RedisUrl) -> Result<Link, StoreError> {
    match tokio::time::timeout_at(deadline.into(), Link::connect(url)).await {
        Ok(link) => link.map_err(|error| error_of_login(&error)),
        Err(_) => Err(StoreError::Deadline),
    }
}

/// Waits for an answer until the deadline.
pub(super) async fn answer_by<T>(
    deadline: Instant,
    answer: impl Future<Output = Result<T, RedisError>>,
) -> Result<T, Lost> {
    match tokio::time::timeout_at(deadline.into(), answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(Lost::of(&error)),
        // An answer that never comes is a sign of a cut connection, too.
        Err(_) => Err(Lost {
            is_lost: true,
            error: StoreError::Deadline,
        }),
    }
}

/// A failure, and whether a new connection is needed.
#[derive(Debug)]
pub(super) struct Lost {
    pub(super) is_lost: bool,
    pub(super) error: StoreError,
}

impl Lost {
    pub(super) fn of(error: &RedisError) -> Self {
        Self {
            is_lost: is_lost(error),
            error: error_of(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_the_slots_of_the_specification() {
        // Examples of the cluster's specification.
        assert_eq!(slot(b"123456789"), 0x31c3 % SLOTS);
        assert_eq!(slot(b"{user1000}.following"), slot(b"user1000"));
        assert_eq!(slot(b"foo{}{bar}"), slot_of_whole(b"foo{}{bar}"));
        assert_eq!(slot(b"foo{{bar}}zap"), slot_of_whole(b"{bar"));
        assert_eq!(slot(b"foo{bar}{zap}"), slot_of_whole(b"bar"));
    }

    fn slot_of_whole(key: &[u8]) -> u16 {
        crc16::State::<crc16::XMODEM>::calculate(key) % SLOTS
    }

    #[test]
    fn ranges_of_slots_are_checked() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        let row = |first, last, host, port| {
            let node = Value::Array(vec![text(host), Value::Int(port), text("id")]);
            Value::Array(vec![Value::Int(first), Value::Int(last), node])
        };
        let good = ranges(Value::Array(vec![
            row(0, 100, "a", 1),
            row(101, 16383, "b", 2),
        ]));
        assert_eq!(good.map(|it| it.len()), Some(2));
        for bad in [
            row(5, 4, "a", 1),
            row(0, 16384, "a", 1),
            row(-1, 4, "a", 1),
            row(0, 4, "", 1),
            row(0, 4, "a", 65536),
            Value::Array(vec![Value::Int(0), Value::Int(1)]),
            Value::Int(0),
        ] {
            assert_eq!(ranges(Value::Array(vec![bad])), None);
        }
        assert_eq!(ranges(Value::Nil), None);
    }
}
