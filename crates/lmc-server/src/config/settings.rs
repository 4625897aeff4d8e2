//! Every setting of `lmc serve`, declared once.
//!
//! Names are the names of `lmcache server` where the meaning is the same. A bare number for a size
//! "in GB" counts in GiB, because LMCache's "GB" means GiB.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use lmc_backend_disk::DiskIo;
use lmc_engine::{Admission, PolicyKind, WritePolicy};
use lmc_key::{HashAlgorithm, IdentityText, Salt};
use lmc_memory::Demand;
use lmc_vllm_adapter::{RequestLog, TrustedUsers};

use super::layers::Layers;
use super::log_level;
use super::parse::{
    self, HostPort, LogFormat, NoticeTarget, PeerTransport, PoolSize, RemoteUrl, SegmentName,
    StateDir, TransferMode,
};
use super::setting::{Group, Info, Shape};
use super::tiers::Kind;

/// Declares the settings: for each a field of its owner and an entry of [`ALL`].
macro_rules! settings {
    ($(
        $(#[doc = $owner_doc:literal])+ $owner:ident
        $(with $(#[doc = $extra_doc:literal])+ $extra:ident: $extra_ty:ty)? {
            $($group:ident { $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $name:literal, $shape:ident $placeholder:literal, $default:literal, $parse:expr; )+ })+
        }
    )+) => {
        $(
            $(#[doc = $owner_doc])+
            #[derive(Debug, Clone, PartialEq)]
            pub struct $owner {
                $($( $(#[doc = $doc])+ pub $field: $ty, )+)+
                $( $(#[doc = $extra_doc])+ pub $extra: $extra_ty, )?
            }

            impl $owner {
                /// Takes every value from the layer that wins.
                pub(crate) fn take(layers: &mut Layers) -> Self {
                    Self {
                        $($( $field: layers.take(info($name), $parse), )+)+
                        $( $extra: Default::default(), )?
                    }
                }
            }
        )+

        /// Every setting, in the order in which they are printed.
        pub static ALL: &[Info] = &[
            $($($( Info {
                name: $name,
                group: Group::$group,
                placeholder: $placeholder,
                shape: Shape::$shape,
                default: $default,
                help: concat!($($doc),+),
            }, )+)+)+
        ];
    };
}

/// The settings of one lower tier.
#[derive(Debug, Clone, PartialEq)]
pub enum TierSettings {
    /// Drives of this host.
    Disk(DiskSettings),
    /// Other daemons.
    Peers(PeersSettings),
    /// A store that daemons share.
    Remote(RemoteSettings),
}

impl TierSettings {
    /// Returns the name of the kind of the tier.
    pub fn name(&self) -> &'static str {
        self.kind().name()
    }

    /// Returns the kind of the tier.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Self::Disk(_) => Kind::Disk,
            Self::Peers(_) => Kind::Peers,
            Self::Remote(_) => Kind::Remote,
        }
    }
}

/// Returns the entry of a setting.
fn info(name: &str) -> &'static Info {
    let found = ALL.iter().find(|info| info.name == name);
    found.expect("an entry for each field")
}

settings! {
    /// Configuration of `lmc serve`.
    ServeConfig
    with
    /// The lower tiers, in the order in which they are asked.
    tiers: Vec<TierSettings> {
        Listening {
            /// Address that engines connect to.
            host: String = "host", Value "ADDR", "127.0.0.1", parse::host;
            /// TCP port that engines connect to; 0 lets the system choose.
            port: u16 = "port", Value "PORT", "5555", parse::port;
            /// Unix socket that engines reach as ipc://PATH, in addition to TCP; none listens on TCP only. lmc's own connector looks at /run/lmc/lmc.sock, and gets the pool over it. Only the same user and root can connect, or everyone that --trusted-users names.
            ipc_path: Option<PathBuf> = "ipc-path", Value "PATH", "none", parse::ipc_path;
            /// Users of this host that may use the server, in addition to its own user and root: names or uids separated by commas; own adds no user, all adds every user. Each of these users can store chunks that other users' requests then hit. For a client on another host or in another network namespace the kernel shows no uid; such a client is served.
            trusted_users: TrustedUsers = "trusted-users", Value "USERS", "own", parse::trusted_users;
            /// Stores and retrieves that the server carries out at the same time; further ones wait.
            max_workers: usize = "max-workers", Value "N", "2", |raw| parse::count(raw, 1, 1024);
        }
        Http {
            /// Address of the HTTP side (health, metrics, status, tools).
            http_host: String = "http-host", Value "ADDR", "127.0.0.1", parse::host;
            /// TCP port of the HTTP side; 0 lets the system choose.
            http_port: u16 = "http-port", Value "PORT", "8080", parse::port;
            /// Host names that requests to the HTTP side may use in their Host header, separated by commas, such as the name of a Kubernetes Service; IP addresses, localhost and the name in --http-host are always allowed. Requests with other names are refused, because a web page could have sent them (DNS rebinding).
            http_allowed_hosts: Vec<String> = "http-allowed-host", Value "NAMES", "none", parse::host_names;
            /// File with a token of at least 16 characters on its first line. Requests to the HTTP side then need this token (Authorization: Bearer TOKEN), except requests of trusted users of this host (--trusted-users) and requests for /livez, /readyz and /healthz. A file that other users may read is refused, as for --p2p-key.
            http_token_file: Option<PathBuf> = "http-token-file", Value "FILE", "none", parse::optional_path;
            /// PEM file with the certificate of the HTTP side and the certificates that signed it. The port then speaks TLS only. Needs --http-tls-key.
            http_tls_cert: Option<PathBuf> = "http-tls-cert", Value "FILE", "none", parse::optional_path;
            /// PEM file with the private key of --http-tls-cert. A file that other users may read is refused, as for --p2p-key.
            http_tls_key: Option<PathBuf> = "http-tls-key", Value "FILE", "none", parse::optional_path;
            /// Port at the address of --host that answers GET /metrics and nothing else, for scrapers beyond this host; 0 lets the system choose, none opens no such port. LMCache's Kubernetes operator passes this flag and scrapes the port. Token, TLS and host names are those of the HTTP side. Without --http-token-file, everyone who reaches the port can read the metrics, with the names of models.
            prometheus_port: Option<u16> = "prometheus-port", Value "PORT", "none", parse::optional_port;
            /// Do not open the port of --prometheus-port. LMCache's Kubernetes operator passes this flag if its metrics are turned off.
            disable_prometheus: bool = "disable-prometheus", Switch "BOOL", "false", parse::switch;
            /// Number of pairs of model and tenant that have series of their own in /metrics (lmc_tenant_*), in the order of their first use; all further pairs together are `other`. A new pair replaces a pair that has had no request for 10 minutes and has no chunks in memory, whose counts then belong to `other`. A tenant is named by the first 12 digits of its salt's digest, which changes with each start unless --p2p-key or --remote-key names a key. With 0 there are no such series.
            metrics_tenants: usize = "metrics-tenants", Value "N", "64", |raw| parse::count(raw, 0, 10_000);
        }
        Identity {
            /// Tokens in a chunk, the unit of caching.
            chunk_size: usize = "chunk-size", Value "TOKENS", "256", |raw| parse::count(raw, 1, 65_536);
            /// Hash that identifies prefixes: blake3 (as LMCache), sha256_cbor (as vLLM) or xxhash_cbor (fast; one trusted tenant only).
            hash_algorithm: HashAlgorithm = "hash-algorithm", Value "NAME", "blake3", parse::hash_algorithm;
            /// Text that becomes part of every chunk's key and stands for properties that engines do not send: change it when you change the weights, their revision or quantisation, rope overrides or the KV cache's format under one model name. Chunks stored under another text are never found; an empty text adds nothing. For LoRA adapters, use one cache_salt each instead.
            identity: IdentityText = "identity", Value "TEXT", "", parse::identity;
            /// Memory for the hashes of earlier prompts, so that a repeated prompt is compared instead of hashed again; 0 remembers none.
            hash_memo_size: u64 = "hash-memo-size", Value "SIZE", "64MiB", parse::memo_size;
            /// Side that copies between engine and pool: lmcache_driven (the server), engine_driven (the worker, through shared memory) or auto (each engine chooses).
            transfer_mode: TransferMode = "supported-transfer-mode", Value "MODE", "auto", |raw| parse::choice(raw, parse::TRANSFER_MODES);
            /// Block id by which an engine marks absent KV data; -1 when every block is valid.
            null_block_id: Option<u32> = "null-block-id", Value "ID", "0", parse::block_id;
            /// Open GPU memory also for engines whose user this server cannot see, such as engines in separate containers (lmcache.mp.isolated_ipc at the engine). Every client that reaches the port can then make the server read and overwrite memory of any process on its GPUs.
            isolated_ipc: bool = "isolated-ipc", Switch "BOOL", "false", parse::switch;
        }
        Pool {
            /// Size of the pool, e.g. 500GiB or 20 (a bare number is GiB); auto takes a quarter of the free memory.
            pool_size: PoolSize = "l1-size-gb", Value "SIZE", "auto", parse::pool_size;
            /// Alignment of every slot in the pool, a power of two.
            align_bytes: u64 = "l1-align-bytes", Value "BYTES", "4096", parse::alignment;
            /// Back the pool with 2 MiB huge pages (on shared memory after mount -o remount,huge=advise /dev/shm). true: the start fails without huge pages. auto: the server continues without them and logs the reason.
            huge_pages: Demand = "l1-use-hugepages", Switch "BOOL", "auto", parse::demand;
            /// Name of the shared-memory segment. auto: lmc_PORT_ and 16 digits that other users cannot predict; engines learn the name when they register. sealed: memory without a name, outside /dev/shm, which only lmc's own connector gets, over --ipc-path. none: the pool is private to the server (no engine-driven transfers).
            shm_name: SegmentName = "shm-name", Value "NAME", "auto", parse::segment_name;
            /// Bind the pool to a NUMA node; none leaves the placement to the system.
            numa_node: Option<u32> = "numa-node", Value "NODE", "none", parse::numa_node;
            /// Lock the pool into memory, so that it is never swapped out. true: the start fails when the memlock limit forbids it. auto: the server continues without the lock.
            lock_memory: Demand = "lock-memory", Switch "BOOL", "false", parse::demand;
            /// Touch every page of the pool in the background after start, so that no request pays for it.
            prefault: bool = "prefault", Switch "BOOL", "true", parse::switch;
            /// Threads that help each copy between an engine and the pool; auto takes one less than the number of cores.
            copy_threads: Option<usize> = "copy-threads", Value "N", "auto", parse::threads;
        }
        Eviction {
            /// Policy that chooses the chunks to evict: LRU, S3FIFO, ARC, or noop (no eviction; a full pool refuses stores).
            eviction_policy: PolicyKind = "eviction-policy", Value "NAME", "LRU", parse::eviction_policy;
            /// Share of the pool in use at which eviction starts.
            eviction_watermark: f64 = "eviction-trigger-watermark", Value "SHARE", "0.95", parse::share;
            /// Share of the pool by which eviction lowers the use below the watermark before it stops.
            eviction_ratio: f64 = "eviction-ratio", Value "SHARE", "0.05", parse::share;
            /// Limit on the bytes of one cache_salt in the pool, as SALT=SIZE, repeatable; _default is traffic without a salt.
            quotas: Vec<(Salt, u64)> = "quota", Pairs "SALT=SIZE", "", parse::quotas;
            /// File with quotas, one SALT=SIZE on each line as for --quota: use it for salts that other users must not see on the command line. If --quota names the same salt, --quota wins. Lines that begin with # are ignored. A file that other users may read is refused, as for --p2p-key.
            quota_file: Option<PathBuf> = "quota-file", Value "FILE", "none", parse::optional_path;
        }
        Lifetimes {
            /// Longest time for which the chunks that a lookup found stay leased to its engine.
            read_ttl: Duration = "l1-read-ttl-seconds", Value "SECONDS", "300", parse::positive_duration;
            /// Report a store or retrieve as overdue if the worker has not finished after this time. Other workers may then store the same chunks. The memory of the overdue transfer is freed only once its worker is known to have stopped.
            write_ttl: Duration = "l1-write-ttl-seconds", Value "SECONDS", "600", parse::positive_duration;
            /// A request's session ends after this long without a message.
            session_ttl: Duration = "session-ttl-seconds", Value "SECONDS", "600", parse::positive_duration;
            /// A worker that has pinged before is removed after this long without a message; 0 never removes it.
            reap_timeout: Duration = "worker-reap-timeout-seconds", Value "SECONDS", "120", parse::reap_timeout;
            /// A worker that registered but never pinged is removed after this long.
            registration_grace: Duration = "worker-registration-grace-seconds", Value "SECONDS", "3600", parse::positive_duration;
            /// A worker whose connection ended may come back within this long before it is removed.
            orphan_grace: Duration = "worker-orphan-grace-seconds", Value "SECONDS", "30", parse::duration;
            /// Time after the end of a worker's connection for which the server keeps memory that the worker may still be copying to or from. The memory is released earlier if the worker commits or its process is known to be dead. Must be longer than the longest copy of a worker.
            slot_grace: Duration = "slot-grace-seconds", Value "SECONDS", "120", parse::slot_grace;
            /// Time that running requests have to finish after SIGTERM. Pending disk writes get 5 s more; with --disk-write back, allow enough time for the drive to write the whole pool. A second SIGTERM or SIGINT, one second or more after the first, stops the server at once.
            shutdown_timeout: Duration = "shutdown-timeout-seconds", Value "SECONDS", "10", parse::duration;
            /// Stop the server, as SIGTERM does, once no engine has been connected for this long; none never stops it. `lmc start` starts a server with 600.
            exit_when_idle: Option<Duration> = "exit-when-idle-seconds", Value "SECONDS", "none", parse::optional_duration;
        }
        Events {
            /// Store and eviction records kept for subscribers of KV events; 0 turns the stream off.
            kv_event_log_size: usize = "kv-event-log-size", Value "N", "32768", |raw| parse::count(raw, 0, 1 << 24);
            /// Proxies to notify of each request, separated by commas. The notice is sent when all ranks have stored the request's chunks, or when the request has failed. http://HOST:PORT/PATH gets a POST as LMCache's connector sends it, tcp://HOST:PORT a ZeroMQ message. For a server of a prefill engine whose proxy waits for such notices; `lmc proxy` does not wait for them.
            pd_notify: Vec<NoticeTarget> = "pd-notify", Value "URLS", "none", parse::notice_targets;
        }
        Log {
            /// Level of the log: off, error, warn, info, debug, trace, or a level followed by levels of single modules, such as info,lmc_engine=debug.
            log_level: String = "log-level", Value "LEVEL", "info", log_level::parse;
            /// Format of log lines: text for people, json for programs.
            log_format: LogFormat = "log-format", Value "FORMAT", "text", |raw| parse::choice(raw, parse::LOG_FORMATS);
            /// Requests that get a log line at level info, with request id, tokens found in memory and in each lower tier, tokens missed with the reason, and time. all: every request with a lookup; further lines have the bytes of its stores and retrieves. slow: requests whose lookup takes 100 ms or longer, without the time for which it may wait for a peer to compute; at most one line a second, with the number of slow requests that got no line. off: none.
            request_log: RequestLog = "request-log", Value "WHICH", "slow", |raw| parse::choice(raw, parse::REQUEST_LOGS);
            /// OpenTelemetry collector that gets a span for each lookup, store and retrieve, over HTTP (OTLP in JSON), such as http://localhost:4318; a URL without a path means /v1/traces there. The spans of a request belong to the trace of its traceparent; they are not sent if the caller does not record that trace. A request without a traceparent gets a trace of its own. none sends no spans.
            otlp_endpoint: Option<Uri> = "otlp-endpoint", Value "URL", "none", parse::collector;
        }
        Lower {
            /// Timeout of reads from disk and from peers, and of all reads of one lookup together. A chunk that arrives later is a miss, and the engine computes it. A chunk that has not arrived after half of this time is also read from the next tier that has it.
            read_timeout: Duration = "disk-read-timeout-seconds", Value "SECONDS", "10", parse::positive_duration;
            /// Tokens that an engine recomputes in a second. Chunks are read from disk, peers and the store of --remote only if the read is estimated to take less time than recomputing; none always reads them.
            recompute_rate: Option<usize> = "recompute-rate", Value "TOKENS", "none", parse::rate;
            /// Folder, not on the drives, in which the server records clears, so that cleared chunks are not served after a restart or from a drive restored from an older copy. auto takes the first writable of $XDG_STATE_HOME/lmc, /var/lib/lmc and ~/.local/state/lmc; none records nothing.
            state_dir: StateDir = "state-dir", Value "PATH", "auto", parse::state_dir;
        }
        Links {
            /// Name of this server among its peers; auto is the name of the host.
            p2p_name: Option<String> = "p2p-name", Value "NAME", "auto", parse::peer_name;
            /// File with the key that all peers share: one line of 32 or more random characters, or two lines while the key is changed (the first is used, both are accepted). A peer that has the key can read every tenant's chunks. Required if --p2p-listen or --p2p-directory-listen is not a loopback address.
            p2p_key: Option<PathBuf> = "p2p-key", Value "FILE", "none", parse::optional_path;
            /// Encrypt the bytes of chunks between this server and its peers. Questions and answers are always encrypted. The bytes are encrypted if either side has this flag; a peer without the flag may pass on in clear the chunks that it has read. NIXL cannot encrypt, so a server with this flag reads and lends over sockets only.
            p2p_encrypt: bool = "p2p-encrypt", Switch "BOOL", "false", parse::switch;
            /// Address and port at which this server hosts a directory, e.g. 0.0.0.0:7800; none hosts no directory.
            p2p_directory_listen: Option<HostPort> = "p2p-directory-listen", Value "ADDR:PORT", "none", parse::listen_at;
            /// Limit on the entries in the directory of this server, one for each chunk of each member; 100 million entries take about 1 GB.
            p2p_directory_entries: usize = "p2p-directory-entries", Value "N", "64000000", |raw| parse::count(raw, 1000, 4_000_000_000);
        }
    }
    /// A tier of drives.
    DiskSettings {
        Disk {
            /// Folder for chunks on an NVMe drive; the chunks are found again after a restart. Folders of several drives are separated by commas; none uses no drive.
            folders: Vec<PathBuf> = "disk", Value "PATH", "none", parse::folders;
            /// Create a drive in each folder of --disk that holds none, and create missing folders. Without this flag such a folder is refused: it may be the mount point of a drive that is not mounted. Use the flag for the first start, not in a unit file.
            create: bool = "disk-create", Switch "BOOL", "false", parse::switch;
            /// Bytes on all drives together, e.g. 500GiB; auto takes half of the free space of each.
            size: PoolSize = "disk-size", Value "SIZE", "auto", parse::pool_size;
            /// Bytes that each drive's file system keeps free.
            keep_free: u64 = "disk-keep-free", Value "SIZE", "1GiB", parse::memo_size;
            /// Time at which chunks are written to disk. through: every chunk at once. back: a chunk only when it is evicted from memory; a clean shutdown also writes the chunks that are still in memory, the first chunks of each prompt first, for at most --shutdown-timeout-seconds and 5 s more.
            write: WritePolicy = "disk-write", Value "WHEN", "through", |raw| parse::choice(raw, parse::WRITES);
            /// Chunks that are written to disk. always: every chunk. second: a chunk only when it is used a second time, which means fewer writes and a longer drive life. A number up to 14: a chunk only when it was found that many times after it was computed.
            admit: Admission = "disk-admit", Value "WHICH", "always", parse::admission;
            /// Also write chunks to disk that were read from peers or from the store of --remote.
            fill: bool = "disk-fill", Switch "BOOL", "false", parse::switch;
            /// I/O engine for the drives: auto (io_uring, or threads where io_uring is forbidden), uring or threads.
            io: DiskIo = "disk-io", Value "HOW", "auto", |raw| parse::choice(raw, parse::IO_ENGINES);
            /// Reads and writes that each drive has in flight at the same time.
            depth: u32 = "disk-depth", Value "N", "64", |raw| parse::count(raw, 1, 4096);
        }
    }
    /// A tier of peers.
    PeersSettings {
        Peers {
            /// Address and port at which peers connect, e.g. 10.0.0.1:7700; with none, the server lends no chunks to other hosts and reads none from them.
            listen: Option<HostPort> = "p2p-listen", Value "ADDR:PORT", "none", parse::listen_at;
            /// Address and port under which peers reach this server; required if --p2p-listen is a wildcard, such as 0.0.0.0.
            advertise: Option<HostPort> = "p2p-advertise", Value "ADDR:PORT", "none", parse::reached_at;
            /// Peers to connect to, as `HOST:PORT` or `[IPv6]:PORT`, separated by commas. A name may have several addresses; each address is a peer. Names are resolved again every 30 s, and a server ignores its own address. For up to about 8 peers: for each prompt that this server does not have, it asks all of them.
            peers: Vec<HostPort> = "p2p-peer", Value "PEERS", "none", parse::peers;
            /// Directories, as `lmc://HOST:PORT`, separated by commas. A directory knows which chunks each of its members has, also members that --p2p-peer does not name. This server announces its chunks to all directories, and asks the first that answers. Requires --p2p-listen.
            directories: Vec<HostPort> = "p2p-directory", Value "DIRECTORIES", "none", parse::directories;
            /// Transport of the bytes that peers read from each other. auto: NIXL between hosts with RDMA that have NIXL's library, sockets between others. sockets: sockets only. nixl: NIXL wherever the peer has it, also over TCP and shared memory; the start fails without the library. Needs a build with the feature nixl and --p2p-key.
            transport: PeerTransport = "p2p-transport", Value "NAME", "auto", |raw| parse::choice(raw, parse::PEER_TRANSPORTS);
            /// Network devices that NIXL may use, as UCX names them, separated by commas, such as mlx5_0:1,eth0; all leaves the choice to UCX. This flag sets the variable UCX_NET_DEVICES.
            interfaces: Option<String> = "p2p-interfaces", Value "DEVICES", "all", parse::interfaces;
            /// Time that peers have to answer which chunks they hold: the delay of a prompt that no peer has.
            locate_timeout: Duration = "p2p-locate-timeout", Value "SECONDS", "5ms", parse::positive_duration;
            /// Longest wait for chunks that an engine of a peer is writing, or that a peer is pushing.
            pending_timeout: Duration = "p2p-pending-timeout", Value "SECONDS", "500ms", parse::duration;
            /// Longest time for which a request waits for a peer whose engine computes its prompt (lmcache.pd.source and lmcache.pd.wait_ms of its kv_transfer_params), at most 300; 0 never waits.
            max_wait: Duration = "p2p-max-wait", Value "SECONDS", "30", parse::wait;
            /// Bytes that peers may read from this server in a second; none sets no limit.
            serve_rate: Option<u64> = "p2p-serve-rate", Value "SIZE", "none", parse::bound;
        }
    }
    /// A tier of a shared store.
    RemoteSettings {
        Remote {
            /// Store that several daemons share and that outlives this host, asked after memory and disk. file:///FOLDER is an existing folder of a shared file system (NFS, Lustre, Weka): name a folder below its mount point, which is missing while nothing is mounted. redis://HOST:PORT is a Redis server (rediss for TLS, redis-cluster://HOST:PORT,HOST:PORT, redis-sentinel://HOST:PORT/SERVICE). s3://BUCKET/PREFIX is a bucket, with endpoint, region and credentials as the AWS tools take them, from variables and ~/.aws. none uses no store.
            url: Option<RemoteUrl> = "remote", Value "URL", "none", parse::remote_url;
            /// Limit on the bytes of the chunks of all daemons in a shared folder; above it, the chunks that were used longest ago are removed. Give all daemons the same size. Not for Redis and S3, which maxmemory and lifecycle rules limit. none sets no limit.
            size: Option<u64> = "remote-size", Value "SIZE", "none", parse::bound;
            /// Age at which a chunk in the store is removed. A chunk that is read at more than half of this age counts as new again, so that prefixes in use stay. none removes no chunks by age.
            ttl: Option<Duration> = "remote-ttl", Value "SECONDS", "none", parse::optional_duration;
            /// Time at which chunks are written to the store. through: every chunk at once. back: a chunk only when it is evicted from memory, and at a clean shutdown.
            write: WritePolicy = "remote-write", Value "WHEN", "through", |raw| parse::choice(raw, parse::WRITES);
            /// Chunks that are written to the store: always, second, or a number of uses, as for --disk-admit.
            admit: Admission = "remote-admit", Value "WHICH", "always", parse::admission;
            /// Values of cache_salt whose chunks are written to the store, separated by commas; _default is traffic without a salt. all writes the chunks of every salt.
            salts: Option<Vec<Salt>> = "remote-salts", Value "SALTS", "all", parse::salts;
            /// File with a key, as for --p2p-key. The store's descriptions of spaces contain a digest of each cache_salt under this key, so that `lmc remote du` tells tenants apart. Give all daemons of a store the same key. none takes the key of --p2p-key; without either key the descriptions say only that there is a salt.
            key: Option<PathBuf> = "remote-key", Value "FILE", "none", parse::optional_path;
            /// Also write chunks to the store that were read from tiers after it, which are the tiers of later tables in the configuration file.
            fill: bool = "remote-fill", Switch "BOOL", "false", parse::switch;
            /// Time that the store has to answer which chunks it has: the delay of a prompt that no tier has.
            locate_timeout: Duration = "remote-locate-timeout", Value "SECONDS", "50ms", parse::positive_duration;
            /// Timeout of reads from the store; chunks that arrive later are misses. A lookup that the store does not answer in this time counts as a failure; after five failures lookups leave the store out until it answers again.
            timeout: Duration = "remote-timeout-seconds", Value "SECONDS", "5", parse::positive_duration;
            /// Time for which the server does not ask the store again for a chunk that the store did not have; 0 asks each time. If another daemon stores the chunk meanwhile, an engine here computes it nevertheless.
            negative_ttl: Duration = "remote-negative-ttl", Value "SECONDS", "2", parse::duration;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_are_unique_and_kebab_case() {
        let mut seen = HashSet::new();
        for info in ALL {
            assert!(seen.insert(info.name), "{} is declared twice", info.name);
            assert!(
                info.name
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
                "{} is not kebab case",
                info.name
            );
            assert!(
                info.help.trim().ends_with('.'),
                "the help of {} is not a sentence",
                info.name
            );
        }
    }
}
