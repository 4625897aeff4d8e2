//! Parsers of the settings' values. Each error text continues "VALUE: …" and says what was expected.

use std::fmt::{self, Display, Formatter};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use axum::http::Uri;
use lmc_backend_disk::DiskIo;
use lmc_engine::{Admission, PolicyKind, WritePolicy};
use lmc_key::{HashAlgorithm, IdentityText, Salt};
use lmc_memory::{Demand, SharedName};
use lmc_vllm_adapter::{MAX_SOURCE_WAIT, RequestLog, TrustedUsers};

use super::setting::Raw;
use super::size::{self, GIB};
use super::suggest::nearest;
use crate::salts;

/// Size of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolSize {
    /// A quarter of the memory that is free at start.
    Auto,
    /// A fixed number of bytes.
    Bytes(u64),
}

/// The shared-memory segment behind the pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SegmentName {
    /// A name derived from the port.
    Auto,
    /// No segment: the pool is private to the server.
    None,
    /// A sealed file without a name, which is passed over the Unix socket.
    Sealed,
    /// A fixed name.
    Name(SharedName),
}

impl SegmentName {
    /// Returns true if `/dev/shm` bounds the pool.
    pub fn is_in_dev_shm(&self) -> bool {
        matches!(self, Self::Auto | Self::Name(_))
    }
}

/// Side that copies between the engine's memory and the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransferMode {
    /// Each engine chooses when it registers.
    Auto,
    /// The server gathers and scatters in the engine's memory.
    LmcacheDriven,
    /// The engine's worker copies into shared memory.
    EngineDriven,
}

/// Transports of the bytes that peers read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerTransport {
    /// NIXL where this host has RDMA and the library, sockets otherwise.
    Auto,
    /// Sockets only.
    Sockets,
    /// NIXL, whose library must be installed; sockets to peers without it.
    Nixl,
}

/// The form of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Values of a setting, each with its name and its synonyms in lower case.
type Names<T> = [(T, &'static str, &'static [&'static str])];

const HASHES: &Names<HashAlgorithm> = &[
    (HashAlgorithm::Blake3, "blake3", &[]),
    (HashAlgorithm::Sha256Cbor, "sha256_cbor", &["sha256cbor"]),
    (HashAlgorithm::Xxh3, "xxhash_cbor", &["xxh3", "xxh3_128"]),
];
pub(crate) const TRANSFER_MODES: &Names<TransferMode> = &[
    (TransferMode::Auto, "auto", &[]),
    (TransferMode::LmcacheDriven, "lmcache_driven", &[]),
    (TransferMode::EngineDriven, "engine_driven", &[]),
];
const POLICIES: &Names<PolicyKind> = &[
    (PolicyKind::Lru, "LRU", &[]),
    (PolicyKind::S3Fifo, "S3FIFO", &["s3_fifo"]),
    (PolicyKind::Arc, "ARC", &[]),
    (PolicyKind::None, "noop", &["none"]),
];
pub(crate) const WRITES: &Names<WritePolicy> = &[
    (WritePolicy::Through, "through", &["write_through"]),
    (WritePolicy::Back, "back", &["write_back"]),
];
pub(crate) const ADMISSIONS: &Names<Admission> = &[
    (Admission::Always, "always", &[]),
    (Admission::Reused(1), "second", &["second_touch"]),
];
pub(crate) const IO_ENGINES: &Names<DiskIo> = &[
    (DiskIo::Auto, "auto", &[]),
    (DiskIo::Uring, "uring", &["io_uring"]),
    (DiskIo::Threads, "threads", &[]),
];
pub(crate) const PEER_TRANSPORTS: &Names<PeerTransport> = &[
    (PeerTransport::Auto, "auto", &[]),
    (PeerTransport::Sockets, "sockets", &["socket", "tcp"]),
    (PeerTransport::Nixl, "nixl", &[]),
];
pub(crate) const REQUEST_LOGS: &Names<RequestLog> = &[
    (RequestLog::All, "all", &[]),
    (RequestLog::Slow, "slow", &[]),
    (RequestLog::Off, "off", &["none"]),
];
pub(crate) const LOG_FORMATS: &Names<LogFormat> = &[
    (LogFormat::Text, "text", &[]),
    (LogFormat::Json, "json", &[]),
];

impl TransferMode {
    /// Returns the name as it is written in a configuration.
    pub fn name(self) -> &'static str {
        name_of(TRANSFER_MODES, self)
    }
}

pub(crate) fn admission(raw: &Raw) -> Result<Admission, String> {
    match raw.text().map(str::parse::<u8>) {
        Ok(Ok(0)) => Ok(Admission::Always),
        Ok(Ok(reuses)) if reuses <= Admission::MAX_REUSES => Ok(Admission::Reused(reuses)),
        _ => choice(raw, ADMISSIONS)
            .map_err(|error| format!("{error}, or a number up to {}", Admission::MAX_REUSES)),
    }
}

/// Returns the name of an eviction policy as it is written in a configuration.
pub fn policy_name(policy: PolicyKind) -> &'static str {
    name_of(POLICIES, policy)
}

fn name_of<T: PartialEq>(names: &Names<T>, value: T) -> &'static str {
    let found = names.iter().find(|(known, ..)| *known == value);
    found.map_or("unknown", |(_, name, _)| name)
}

pub(crate) fn choice<T: Copy>(raw: &Raw, names: &Names<T>) -> Result<T, String> {
    let text = raw.text()?;
    let wanted = text.to_ascii_lowercase().replace('-', "_");
    let is_meant = |(_, name, synonyms): &&(T, &str, &[&str])| {
        name.eq_ignore_ascii_case(&wanted) || synonyms.contains(&&*wanted)
    };
    if let Some((value, ..)) = names.iter().find(is_meant) {
        return Ok(*value);
    }
    let names: Vec<&str> = names.iter().map(|(_, name, _)| *name).collect();
    let expected = format!("expected one of {}", names.join(", "));
    Err(match nearest(text, names) {
        Some(name) => format!("{expected}; did you mean {name}?"),
        None => expected,
    })
}

pub(crate) fn identity(raw: &Raw) -> Result<IdentityText, String> {
    IdentityText::parse(raw.text()?).map_err(|error| error.to_string())
}

pub(crate) fn hash_algorithm(raw: &Raw) -> Result<HashAlgorithm, String> {
    if raw.text()?.eq_ignore_ascii_case("builtin") {
        // Python's hash() depends on PYTHONHASHSEED, so it never agrees between machines.
        return Err(
            "Python's builtin hash differs from process to process; use blake3 and set \
             lmcache.mp.hash_algorithm=blake3 in the engine, too"
                .to_owned(),
        );
    }
    choice(raw, HASHES)
}

pub(crate) fn eviction_policy(raw: &Raw) -> Result<PolicyKind, String> {
    if raw.text()?.eq_ignore_ascii_case("IsolatedLRU") {
        return Err("quotas per cache_salt work with every policy here; use LRU, and set limits with --quota \
             SALT=SIZE or `lmc quota set`"
            .to_owned());
    }
    choice(raw, POLICIES)
}

/// Parses the path of a Unix socket; `none` means no socket.
pub(crate) fn ipc_path(raw: &Raw) -> Result<Option<PathBuf>, String> {
    // The size of `sun_path`, less its final NUL and the suffix under which the socket is created.
    const LONGEST: usize = 96;
    let text = raw.text()?;
    let path = text.strip_prefix("ipc://").unwrap_or(text);
    match path {
        "none" => Ok(None),
        path if !path.starts_with('/') => Err("expected an absolute path, or none".to_owned()),
        path if path.len() > LONGEST => Err(format!(
            "expected at most {LONGEST} bytes, found {}: the system allows no longer path for a socket",
            path.len()
        )),
        path => Ok(Some(path.into())),
    }
}

pub(crate) fn folders(raw: &Raw) -> Result<Vec<PathBuf>, String> {
    let text = raw.text()?.trim();
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    if text.contains("://") {
        return Err("expected folders, found a URL".to_owned());
    }
    let folders: Vec<PathBuf> = text.split(',').map(|part| part.trim().into()).collect();
    let twice = |at: usize| folders[..at].contains(&folders[at]);
    if folders.iter().any(|folder| folder.as_os_str().is_empty()) || (0..folders.len()).any(twice) {
        return Err("expected folders separated by commas, each once, or none".to_owned());
    }
    Ok(folders)
}

/// The folder for records that outlive the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StateDir {
    /// The first of the usual folders that can be written.
    Auto,
    /// No folder.
    None,
    /// The named folder.
    Path(PathBuf),
}

pub(crate) fn state_dir(raw: &Raw) -> Result<StateDir, String> {
    match raw.text()?.trim() {
        "" => Err("expected a folder, auto or none".to_owned()),
        text if text.eq_ignore_ascii_case("auto") => Ok(StateDir::Auto),
        text if text.eq_ignore_ascii_case("none") => Ok(StateDir::None),
        text => Ok(StateDir::Path(text.into())),
    }
}

pub(crate) fn host(raw: &Raw) -> Result<String, String> {
    let text = raw.text()?;
    let bare = text.strip_prefix("tcp://").unwrap_or(text);
    if bare.is_empty() || bare.contains(['/', ' ', '?']) {
        return Err(
            "expected an address or host name to listen on, such as 127.0.0.1 or 0.0.0.0"
                .to_owned(),
        );
    }
    Ok(bare
        .trim_start_matches('[')
        .trim_end_matches(']')
        .to_owned())
}

/// Returns true for the characters of a host's name: letters, digits, dots, dashes, underscores.
fn is_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !text.is_empty() && text.chars().all(allowed)
}

pub(crate) fn host_names(raw: &Raw) -> Result<Vec<String>, String> {
    let text = raw.text()?;
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    let name = |part: &str| {
        let name = part.trim();
        is_name(name).then(|| name.to_owned())
    };
    text.split(',')
        .map(name)
        .collect::<Option<Vec<_>>>()
        .ok_or_else(|| {
            "expected host names without scheme and port, separated by commas, such as \
             lmc,lmc.cache.svc, or none"
                .to_owned()
        })
}

pub(crate) fn trusted_users(raw: &Raw) -> Result<TrustedUsers, String> {
    let passwd = || std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    users_of(raw.text()?, passwd)
}

fn users_of(text: &str, passwd: impl Fn() -> String) -> Result<TrustedUsers, String> {
    if text.eq_ignore_ascii_case("all") {
        return Ok(TrustedUsers::All);
    }
    if text.eq_ignore_ascii_case("own") {
        return Ok(TrustedUsers::default());
    }
    let uid = |part: &str| {
        let name = part.trim();
        if name.is_empty() {
            return Err(
                "expected names or uids of users, separated by commas, or own, or all".to_owned(),
            );
        }
        if let Ok(uid) = name.parse() {
            return Ok(uid);
        }
        uid_of(name, &passwd()).ok_or_else(|| {
            format!("/etc/passwd has no user {name:?}: expected a name in it, or a uid")
        })
    };
    let uids = text.split(',').map(uid).collect::<Result<_, _>>()?;
    Ok(TrustedUsers::OwnAnd(uids))
}

fn uid_of(name: &str, passwd: &str) -> Option<u32> {
    passwd.lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next()? == name).then(|| fields.nth(1)?.parse().ok())?
    })
}

pub(crate) fn port(raw: &Raw) -> Result<u16, String> {
    raw.text()?
        .parse()
        .map_err(|_| "expected a port number from 0 to 65535".to_owned())
}

pub(crate) fn optional_port(raw: &Raw) -> Result<Option<u16>, String> {
    match raw.text()? {
        text if text.eq_ignore_ascii_case("none") => Ok(None),
        _ => port(raw)
            .map(Some)
            .map_err(|error| format!("{error}, or none")),
    }
}

pub(crate) fn count<T>(raw: &Raw, least: T, most: T) -> Result<T, String>
where
    T: FromStr + PartialOrd + Display,
{
    let number = raw.text()?.replace('_', "").parse().ok();
    number
        .filter(|n| (&least..=&most).contains(&n))
        .ok_or_else(|| format!("expected a whole number from {least} to {most}"))
}

pub(crate) fn block_id(raw: &Raw) -> Result<Option<u32>, String> {
    let text = raw.text()?;
    if text == "-1" {
        return Ok(None);
    }
    text.parse()
        .map(Some)
        .map_err(|_| "expected a block id, or -1 when every block is valid".to_owned())
}

pub(crate) fn threads(raw: &Raw) -> Result<Option<usize>, String> {
    if raw.text()?.eq_ignore_ascii_case("auto") {
        return Ok(None);
    }
    count(raw, 0, 1024)
        .map(Some)
        .map_err(|expected| format!("{expected}, or auto"))
}

pub(crate) fn memo_size(raw: &Raw) -> Result<u64, String> {
    match size::parse_bytes(raw.text()?, 1)? {
        bytes if bytes > 1 << 40 => Err("expected at most 1TiB".to_owned()),
        bytes => Ok(bytes),
    }
}

pub(crate) fn share(raw: &Raw) -> Result<f64, String> {
    let text = raw.text()?;
    let value = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().map(|p| p / 100.0),
        None => text.parse::<f64>(),
    };
    value
        .ok()
        .filter(|share| *share > 0.0 && *share <= 1.0)
        .ok_or_else(|| "expected a share above 0 and up to 1, such as 0.8 or 80%".to_owned())
}

pub(crate) fn switch(raw: &Raw) -> Result<bool, String> {
    match raw.text()?.to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Ok(true),
        "false" | "0" | "no" | "off" => Ok(false),
        _ => Err("expected true or false".to_owned()),
    }
}

pub(crate) fn demand(raw: &Raw) -> Result<Demand, String> {
    if raw.text()?.eq_ignore_ascii_case("auto") {
        return Ok(Demand::Auto);
    }
    match switch(raw) {
        Ok(true) => Ok(Demand::Required),
        Ok(false) => Ok(Demand::Off),
        Err(_) => Err("expected true, false or auto".to_owned()),
    }
}

pub(crate) fn pool_size(raw: &Raw) -> Result<PoolSize, String> {
    let text = raw.text()?;
    if text.eq_ignore_ascii_case("auto") {
        return Ok(PoolSize::Auto);
    }
    match size::parse_bytes(text, GIB)? {
        // Below this not even one chunk of a small model fits.
        bytes if bytes < 1 << 20 => Err("expected at least 1MiB, or auto".to_owned()),
        bytes => Ok(PoolSize::Bytes(bytes)),
    }
}

pub(crate) fn alignment(raw: &Raw) -> Result<u64, String> {
    let bytes = size::parse_bytes(raw.text()?, 1)?;
    if !bytes.is_power_of_two() || !(64..=1 << 30).contains(&bytes) {
        return Err("expected a power of two from 64 to 1GiB, such as 4096 or 64KiB".to_owned());
    }
    Ok(bytes)
}

pub(crate) fn segment_name(raw: &Raw) -> Result<SegmentName, String> {
    let text = raw.text()?;
    let name = text.strip_prefix('/').unwrap_or(text);
    match name {
        "auto" => Ok(SegmentName::Auto),
        "" | "none" => Ok(SegmentName::None),
        "sealed" => Ok(SegmentName::Sealed),
        _ => SharedName::new(name)
            .map(SegmentName::Name)
            .map_err(|error| {
                format!(
                    "{error}; auto derives a name from the port, sealed has no name and is passed \
                     over --ipc-path, none keeps the pool private"
                )
            }),
    }
}

pub(crate) fn numa_node(raw: &Raw) -> Result<Option<u32>, String> {
    let text = raw.text()?;
    if text.eq_ignore_ascii_case("none") {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| {
        "expected the number of a NUMA node (see `numactl --hardware`), or none".to_owned()
    })
}

pub(crate) fn duration(raw: &Raw) -> Result<Duration, String> {
    size::parse_duration(raw.text()?)
}

pub(crate) fn wait(raw: &Raw) -> Result<Duration, String> {
    match duration(raw)? {
        wait if wait > MAX_SOURCE_WAIT => Err("expected at most 300 seconds".to_owned()),
        wait => Ok(wait),
    }
}

pub(crate) fn rate(raw: &Raw) -> Result<Option<usize>, String> {
    if raw
        .text()
        .is_ok_and(|text| text.eq_ignore_ascii_case("none"))
    {
        return Ok(None);
    }
    let rate = count(raw, 1, 1_000_000_000);
    rate.map(Some).map_err(|error| format!("{error}, or none"))
}

/// A host and a port, as `HOST:PORT` or `[IPv6]:PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPort {
    /// Name or address, without brackets.
    pub host: String,
    /// The port; 0 lets the system choose.
    pub port: u16,
}

impl HostPort {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.trim().rsplit_once(':')?;
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let host = match bracketed {
            Some(ip) => ip.parse::<std::net::Ipv6Addr>().ok()?.to_string(),
            None => host.to_owned(),
        };
        let valid = bracketed.is_some() || is_name(&host);
        let port = port.parse().ok().filter(|_| valid)?;
        Some(Self { host, port })
    }
}

impl Display for HostPort {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

const HOST_PORT: &str = "expected HOST:PORT, such as 10.0.0.1:7700 or [fd00::1]:7700";

/// Returns true if the host stands for every address of this host.
pub(super) fn is_wildcard(host: &str) -> bool {
    matches!(host, "0.0.0.0" | "::" | "*")
}

pub(crate) fn listen_at(raw: &Raw) -> Result<Option<HostPort>, String> {
    match raw.text()? {
        text if text.eq_ignore_ascii_case("none") => Ok(None),
        text => HostPort::parse(text)
            .map(Some)
            .ok_or_else(|| format!("{HOST_PORT}, or none")),
    }
}

/// Parses an address that other processes connect to.
pub(crate) fn reached_at(raw: &Raw) -> Result<Option<HostPort>, String> {
    match listen_at(raw)? {
        Some(at) if at.port == 0 || is_wildcard(&at.host) => Err(
            "expected an address and a port that peers can connect to, not port 0 or a wildcard"
                .to_owned(),
        ),
        at => Ok(at),
    }
}

pub(crate) fn peers(raw: &Raw) -> Result<Vec<HostPort>, String> {
    let text = raw.text()?;
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    let peer = |part: &str| {
        let peer = HostPort::parse(part).filter(|peer| peer.port != 0);
        peer.ok_or_else(|| format!("{HOST_PORT}, several with commas, or none"))
    };
    text.split(',').map(peer).collect()
}

/// Parses names of network devices and returns them as one text, in UCX's form.
pub(crate) fn interfaces(raw: &Raw) -> Result<Option<String>, String> {
    let text = raw.text()?;
    if text.eq_ignore_ascii_case("all") {
        return Ok(None);
    }
    let valid = |c: char| c.is_ascii_alphanumeric() || "._-:".contains(c);
    let is_name = |name: &str| !name.is_empty() && name.chars().all(valid);
    let names: Vec<&str> = text.split(',').map(str::trim).collect();
    match names.iter().all(|name| is_name(name)) {
        true => Ok(Some(names.join(","))),
        false => Err(
            "expected network devices, separated by commas, such as mlx5_0:1,eth0, or all"
                .to_owned(),
        ),
    }
}

pub(crate) fn directories(raw: &Raw) -> Result<Vec<HostPort>, String> {
    let text = raw.text()?;
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    let directory = |part: &str| {
        let at = part.trim().strip_prefix("lmc://").and_then(HostPort::parse);
        let at = at.filter(|at| at.port != 0);
        at.ok_or(
            "expected lmc://HOST:PORT, such as lmc://10.0.0.8:7800, several with commas, or none"
                .to_owned(),
        )
    };
    text.split(',').map(directory).collect()
}

/// A proxy that is notified of each request: its chunks are stored, or it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoticeTarget {
    /// Takes each notice as a POST to this URL.
    Http(Uri),
    /// Takes each notice on a PULL socket of ZeroMQ.
    Zmq(HostPort),
}

impl Display for NoticeTarget {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Http(url) => write!(f, "{url}"),
            Self::Zmq(at) => write!(f, "tcp://{at}"),
        }
    }
}

impl NoticeTarget {
    fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix("tcp://") {
            Some(at) => reached(at).map(Self::Zmq),
            None => http_url(text).map(Self::Http),
        }
    }
}

/// Parses the address of another process.
fn reached(text: &str) -> Option<HostPort> {
    HostPort::parse(text).filter(|at| at.port != 0)
}

/// Parses the URL of a server without TLS.
fn http_url(text: &str) -> Option<Uri> {
    let rest = text.strip_prefix("http://")?;
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let url = format!("http://{}{path}", reached(authority)?).parse();
    url.ok()
}

/// Port of collectors that speak gRPC.
const GRPC_PORT: u16 = 4317;

pub(crate) fn collector(raw: &Raw) -> Result<Option<Uri>, String> {
    let text = raw.text()?.trim_end_matches('/');
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(None);
    }
    let expected = "expected http://HOST:PORT, such as http://localhost:4318, or none; lmc speaks to \
                    a collector without TLS, so run one on this host";
    let url = http_url(text).filter(|url| url.query().is_none());
    let url = url.ok_or(expected)?;
    if url.port_u16() == Some(GRPC_PORT) {
        return Err(
            "port 4317 is for OTLP over gRPC; lmc speaks OTLP over HTTP, for which collectors listen at \
             port 4318"
                .to_owned(),
        );
    }
    let has_path = url.path() != "/";
    let with_path = match has_path {
        true => url,
        false => format!("{text}/v1/traces").parse().map_err(|_| expected)?,
    };
    Ok(Some(with_path))
}

pub(crate) fn notice_targets(raw: &Raw) -> Result<Vec<NoticeTarget>, String> {
    let text = raw.text()?;
    if text.is_empty() || text.eq_ignore_ascii_case("none") {
        return Ok(Vec::new());
    }
    let target = |part: &str| {
        NoticeTarget::parse(part.trim()).ok_or(
            "expected http://HOST:PORT/PATH or tcp://HOST:PORT, such as \
             http://10.0.0.9:5768/api/v1/telemetry, several with commas, or none"
                .to_owned(),
        )
    };
    text.split(',').map(target).collect()
}

pub(crate) fn optional_path(raw: &Raw) -> Result<Option<PathBuf>, String> {
    match raw.text()? {
        "" => Err("expected a path, or none".to_owned()),
        text if text.eq_ignore_ascii_case("none") => Ok(None),
        text => Ok(Some(text.into())),
    }
}

pub(crate) fn peer_name(raw: &Raw) -> Result<Option<String>, String> {
    let text = raw.text()?;
    match text {
        text if text.eq_ignore_ascii_case("auto") => Ok(None),
        text if is_name(text) && text.len() <= 64 => Ok(Some(text.to_owned())),
        _ => Err(
            "expected 1 to 64 letters, digits, dots, dashes and underscores, or auto".to_owned(),
        ),
    }
}

pub(crate) fn bound(raw: &Raw) -> Result<Option<u64>, String> {
    match raw.text()? {
        text if text.eq_ignore_ascii_case("none") => Ok(None),
        text => match size::parse_bytes(text, 1)? {
            0 => Err("expected more than 0 bytes, or none".to_owned()),
            bytes => Ok(Some(bytes)),
        },
    }
}

/// URL of a shared store. Its login is shown nowhere.
#[derive(Clone, PartialEq, Eq)]
pub struct RemoteUrl {
    url: String,
    shown: String,
}

impl RemoteUrl {
    /// Parses a URL. The error does not repeat it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let shown = lmc_backend_remote::check_url(text).map_err(|error| error.to_string())?;
        let url = text.to_owned();
        Ok(Self { url, shown })
    }

    /// Returns the URL with its login.
    pub(crate) fn with_secrets(&self) -> &str {
        &self.url
    }
}

impl Display for RemoteUrl {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for RemoteUrl {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteUrl({self})")
    }
}

pub(crate) fn remote_url(raw: &Raw) -> Result<Option<RemoteUrl>, String> {
    match raw.text()? {
        text if text.is_empty() || text.eq_ignore_ascii_case("none") => Ok(None),
        text => RemoteUrl::parse(text)
            .map(Some)
            .map_err(|error| format!("{error}, or none")),
    }
}

pub(crate) fn optional_duration(raw: &Raw) -> Result<Option<Duration>, String> {
    match raw.text()? {
        text if text.eq_ignore_ascii_case("none") => Ok(None),
        _ => positive_duration(raw)
            .map(Some)
            .map_err(|error| format!("{error}, or none")),
    }
}

pub(crate) fn positive_duration(raw: &Raw) -> Result<Duration, String> {
    match duration(raw)? {
        Duration::ZERO => Err("expected more than 0 seconds".to_owned()),
        duration => Ok(duration),
    }
}

pub(crate) fn slot_grace(raw: &Raw) -> Result<Duration, String> {
    let grace = duration(raw)?;
    // A stock worker waits this long for an answer before it abandons a transfer.
    if grace < Duration::from_secs(10) {
        return Err("expected at least 10 seconds, the timeout of an engine's copies".to_owned());
    }
    Ok(grace)
}

pub(crate) fn reap_timeout(raw: &Raw) -> Result<Duration, String> {
    let timeout = duration(raw)?;
    // Engines ping every 10 s; less than three pings would reap live workers.
    if timeout != Duration::ZERO && timeout < Duration::from_secs(30) {
        return Err(
            "expected 0 (never) or at least 30 seconds, three of the engine's heartbeats"
                .to_owned(),
        );
    }
    Ok(timeout)
}

/// Parses salts separated by commas; `all` returns `None`.
pub(crate) fn salts(raw: &Raw) -> Result<Option<Vec<Salt>>, String> {
    let text = raw.text()?;
    if text == "all" {
        return Ok(None);
    }
    let salt = |(index, text): (usize, &str)| {
        salt_of(text.trim()).ok_or_else(|| {
            let number = index + 1;
            format!("expected salts separated by commas, or all; number {number} is not a salt")
        })
    };
    let salts = text.split(',').enumerate().map(salt);
    salts.collect::<Result<_, _>>().map(Some)
}

pub(crate) fn quotas(raw: &Raw) -> Result<Vec<(Salt, u64)>, String> {
    const EXPECTED: &str = "expected SALT=SIZE, such as tenant-a=20GiB";
    let pairs = raw.pairs().ok_or(EXPECTED)?;
    let quota = |(index, (salt, size)): (usize, (String, String))| {
        let number = index + 1;
        let salt = salt_of(&salt).ok_or_else(|| {
            format!(
                "{EXPECTED}; quota {number} has no salt that engines can send: 1 to 128 characters \
                 without @, / and \\; traffic without a salt is called _default"
            )
        })?;
        let bytes = size::parse_bytes(&size, GIB).map_err(|e| format!("quota {number}: {e}"))?;
        Ok((salt, bytes))
    };
    pairs.into_iter().enumerate().map(quota).collect()
}

/// Returns the salt that a text names. The caller's error does not repeat the text.
fn salt_of(text: &str) -> Option<Salt> {
    salts::parse(text).ok().filter(|_| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trusted_users_are_names_and_uids() {
        let passwd = || "root:x:0:0::/:/bin/sh\nvllm:x:997:990::/:/bin/false\n".to_owned();
        let parse = |text| users_of(text, passwd);
        assert_eq!(parse("own"), Ok(TrustedUsers::OwnAnd(vec![])));
        assert_eq!(parse("all"), Ok(TrustedUsers::All));
        let both = Ok(TrustedUsers::OwnAnd(vec![1000, 997]));
        assert_eq!(parse("1000, vllm"), both);
        for wrong in ["", "1000,", "vll", "-1", "own,1000", "vllm:x"] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_collector_is_a_url_whose_path_may_be_left_out() {
        let parse = |text: &str| {
            let url = collector(&Raw::Text(text.to_owned()))?;
            Ok::<_, String>(url.map(|url| url.to_string()))
        };
        let at = |url: &str| Ok(Some(url.to_owned()));
        assert_eq!(parse("http://c:4318"), at("http://c:4318/v1/traces"));
        assert_eq!(parse("http://c:4318/"), at("http://c:4318/v1/traces"));
        assert_eq!(parse("http://[::1]:1/otlp"), at("http://[::1]:1/otlp"));
        assert_eq!(parse("none"), Ok(None));
        let grpc = parse("http://c:4317").expect_err("it speaks gRPC");
        assert!(grpc.contains("4318"), "{grpc}");
        for wrong in [
            "c:4318",
            "https://c:4318",
            "http://u:p@c:1",
            "http://c:1/?key=s",
            "http://c",
        ] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }
}
