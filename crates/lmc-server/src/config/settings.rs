//! Every setting of `lmc serve`, once.
//!
//! Names are those of `lmcache server` where the meaning is the same. A bare number for a size
//! "in GB" counts in GiB, because that is what LMCache means by it.

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
            /// Users of this host that may use the server beside its own user and root: names or uids separated by commas, own for no others, or all. Each of them can store chunks that others then hit. A peer on another host or in another network namespace has no uid that the kernel shows, and is served.
            trusted_users: TrustedUsers = "trusted-users", Value "USERS", "own", parse::trusted_users;
            /// Stores and retrieves that the server carries out at a time; others wait their turn.
            max_workers: usize = "max-workers", Value "N", "2", |raw| parse::count(raw, 1, 1024);
        }
        Http {
            /// Address of the HTTP side (health, metrics, status, tools).
            http_host: String = "http-host", Value "ADDR", "127.0.0.1", parse::host;
            /// TCP port of the HTTP side; 0 lets the system choose.
            http_port: u16 = "http-port", Value "PORT", "8080", parse::port;
            /// Host names under which the HTTP side may be asked, separated by commas, such as the name of a Kubernetes Service; IP addresses, localhost and the name in --http-host always may. Requests under other names are refused, because a web page could have sent them (DNS rebinding).
            http_allowed_hosts: Vec<String> = "http-allowed-host", Value "NAMES", "none", parse::host_names;
            /// File with a token on its first line, of at least 16 characters. Requests to the HTTP side then have to show it (Authorization: Bearer TOKEN), but for those of trusted users of this host (--trusted-users) and for /livez, /readyz and /healthz. A file that other users may read is refused, as for --p2p-key.
            http_token_file: Option<PathBuf> = "http-token-file", Value "FILE", "none", parse::optional_path;
            /// File with the certificate of the HTTP side in PEM, and those that it is signed by. The port then speaks TLS only. Needs --http-tls-key.
            http_tls_cert: Option<PathBuf> = "http-tls-cert", Value "FILE", "none", parse::optional_path;
            /// File with the private key of --http-tls-cert in PEM. A file that other users may read is refused, as for --p2p-key.
            http_tls_key: Option<PathBuf> = "http-tls-key", Value "FILE", "none", parse::optional_path;
            /// Pairs of model and tenant that /metrics has series of their own for (lmc_tenant_*), in the order in which they were first used; all further ones together are `other`. A tenant is named by the first 12 digits of its salt's digest, which changes with each start unless --p2p-key or --remote-key names a key. 0 has no such series.
            metrics_tenants: usize = "metrics-tenants", Value "N", "64", |raw| parse::count(raw, 0, 10_000);
        }
        Identity {
            /// Tokens in a chunk, the unit of caching.
            chunk_size: usize = "chunk-size", Value "TOKENS", "256", |raw| parse::count(raw, 1, 65_536);
            /// Hash that identifies prefixes: blake3 (as LMCache), sha256_cbor (as vLLM) or xxhash_cbor (fast; one trusted tenant only).
            hash_algorithm: HashAlgorithm = "hash-algorithm", Value "NAME", "blake3", parse::hash_algorithm;
            /// Text that becomes part of every chunk's key, for what engines do not send: change it when you change the weights, their revision or quantisation, rope overrides or the KV cache's format under one model name. Chunks stored under another text are never found; empty adds nothing. LoRA adapters need one cache_salt each instead.
            identity: IdentityText = "identity", Value "TEXT", "", parse::identity;
            /// Memory for hashes of prompts that were seen, so that they are compared instead of hashed again; 0 remembers none.
            hash_memo_size: u64 = "hash-memo-size", Value "SIZE", "64MiB", parse::memo_size;
            /// Side that copies between engine and pool: lmcache_driven (the server), engine_driven (the worker, through shared memory) or auto (each engine chooses).
            transfer_mode: TransferMode = "supported-transfer-mode", Value "MODE", "auto", |raw| parse::choice(raw, parse::TRANSFER_MODES);
            /// Block id by which an engine marks absent KV data; -1 when every block is valid.
            null_block_id: Option<u32> = "null-block-id", Value "ID", "0", parse::block_id;
            /// Open memory on GPUs for engines whose user this server cannot see, in containers of their own (lmcache.mp.isolated_ipc at the engine): every client that reaches the port can then have it read and overwrite memory of any process on its GPUs.
            isolated_ipc: bool = "isolated-ipc", Switch "BOOL", "false", parse::switch;
        }
        Pool {
            /// Size of the pool, e.g. 500GiB or 20 (a bare number is GiB); auto takes a quarter of the memory that is free.
            pool_size: PoolSize = "l1-size-gb", Value "SIZE", "auto", parse::pool_size;
            /// Alignment of every slot in the pool, a power of two.
            align_bytes: u64 = "l1-align-bytes", Value "BYTES", "4096", parse::alignment;
            /// Back the pool with 2 MiB huge pages (on shared memory after mount -o remount,huge=advise /dev/shm): true fails without them, auto goes on and says why not.
            huge_pages: Demand = "l1-use-hugepages", Switch "BOOL", "auto", parse::demand;
            /// Name of the shared-memory segment; auto is lmc_PORT_ and 16 digits that other users cannot predict (engines learn it when they register), sealed is memory without a name, outside of /dev/shm, that only lmc's own connector gets, over --ipc-path, none keeps the pool private (no engine-driven transfers).
            shm_name: SegmentName = "shm-name", Value "NAME", "auto", parse::segment_name;
            /// Bind the pool to a NUMA node; none leaves the placement to the system.
            numa_node: Option<u32> = "numa-node", Value "NODE", "none", parse::numa_node;
            /// Lock the pool into memory, so that it never swaps: true fails when the memlock limit forbids it, auto goes on.
            lock_memory: Demand = "lock-memory", Switch "BOOL", "false", parse::demand;
            /// Touch every page of the pool in the background after start, so that no request pays for it.
            prefault: bool = "prefault", Switch "BOOL", "true", parse::switch;
            /// Threads that help each copy between an engine and the pool; auto takes one less than there are cores.
            copy_threads: Option<usize> = "copy-threads", Value "N", "auto", parse::threads;
        }
        Eviction {
            /// Policy that chooses the chunks to evict: LRU, S3FIFO, ARC, or noop (no eviction; a full pool refuses stores).
            eviction_policy: PolicyKind = "eviction-policy", Value "NAME", "LRU", parse::eviction_policy;
            /// Share of the pool in use at which eviction starts.
            eviction_watermark: f64 = "eviction-trigger-watermark", Value "SHARE", "0.95", parse::share;
            /// Share of the pool that eviction frees below the watermark before it stops.
            eviction_ratio: f64 = "eviction-ratio", Value "SHARE", "0.05", parse::share;
            /// Most bytes of one cache_salt in the pool, as SALT=SIZE, repeatable; _default is traffic without a salt.
            quotas: Vec<(Salt, u64)> = "quota", Pairs "SALT=SIZE", "", parse::quotas;
            /// File with quotas, for salts that the command line must not show to other users: SALT=SIZE on each line, as for --quota, whose quota of the same salt wins. Lines that begin with # are ignored. A file that other users may read is refused, as for --p2p-key.
            quota_file: Option<PathBuf> = "quota-file", Value "FILE", "none", parse::optional_path;
        }
        Lifetimes {
            /// Time for which the chunks that a lookup found stay leased for its engine at most.
            read_ttl: Duration = "l1-read-ttl-seconds", Value "SECONDS", "300", parse::positive_duration;
            /// Report a store or retrieve as overdue if the worker has not finished after this time. Others may store the same chunks then; its memory is freed only once the worker is known to have stopped.
            write_ttl: Duration = "l1-write-ttl-seconds", Value "SECONDS", "600", parse::positive_duration;
            /// A request's session ends after this long without a message.
            session_ttl: Duration = "session-ttl-seconds", Value "SECONDS", "600", parse::positive_duration;
            /// A worker that has pinged before is removed after this long in silence; 0 never removes it.
            reap_timeout: Duration = "worker-reap-timeout-seconds", Value "SECONDS", "120", parse::reap_timeout;
            /// A worker that registered but never pinged is removed after this long.
            registration_grace: Duration = "worker-registration-grace-seconds", Value "SECONDS", "3600", parse::positive_duration;
            /// A worker whose connection ended may come back within this long before it is removed.
            orphan_grace: Duration = "worker-orphan-grace-seconds", Value "SECONDS", "30", parse::duration;
            /// Time for which memory that a worker may still be copying to or from stays held after its connection ended, unless the worker commits or its process is known to be dead before. Must be longer than any copy of a worker takes.
            slot_grace: Duration = "slot-grace-seconds", Value "SECONDS", "120", parse::slot_grace;
            /// Time for running requests to finish after SIGTERM. Pending disk writes get 5 s more; with --disk-write back, allow for the time in which the drive writes the whole pool. A second SIGTERM or SIGINT, a second or more after the first, stops at once.
            shutdown_timeout: Duration = "shutdown-timeout-seconds", Value "SECONDS", "10", parse::duration;
            /// End the server, as SIGTERM does, once no engine has been connected for this long. none never ends it. A server that `lmc start` starts has 600.
            exit_when_idle: Option<Duration> = "exit-when-idle-seconds", Value "SECONDS", "none", parse::optional_duration;
        }
        Events {
            /// Store and eviction records kept for subscribers of KV events; 0 turns the stream off.
            kv_event_log_size: usize = "kv-event-log-size", Value "N", "32768", |raw| parse::count(raw, 0, 1 << 24);
            /// Proxies that are sent a notice for each request, as soon as all ranks have stored its chunks or when it has failed, separated by commas: http://HOST:PORT/PATH is sent a POST as LMCache's connector sends it, tcp://HOST:PORT a ZeroMQ message. For a server beside a prefill engine whose proxy waits for such notices; `lmc proxy` does not.
            pd_notify: Vec<NoticeTarget> = "pd-notify", Value "URLS", "none", parse::notice_targets;
        }
        Log {
            /// Level of the log: off, error, warn, info, debug, trace, or a level and levels of single modules, such as info,lmc_engine=debug.
            log_level: String = "log-level", Value "LEVEL", "info", log_level::parse;
            /// Log lines for people (text) or for machines (json).
            log_format: LogFormat = "log-format", Value "FORMAT", "text", |raw| parse::choice(raw, parse::LOG_FORMATS);
            /// Requests of which the log has a line at level info: request id, tokens found in memory and in lower tiers, tokens missed with the reason, and time. all: every request that looks up. slow: those whose lookup takes 100 ms or longer, without the time for which it may wait for a peer to compute; one line a second at most, with the number of those between. off: none.
            request_log: RequestLog = "request-log", Value "WHICH", "slow", |raw| parse::choice(raw, parse::REQUEST_LOGS);
            /// Collector of OpenTelemetry that is sent a span for each lookup, store and retrieve, over HTTP (OTLP in JSON), such as http://localhost:4318; a URL without a path means /v1/traces there. The spans of a request are in the trace of its traceparent, and not sent where its caller does not record that, or else in a trace of their own. none sends none.
            otlp_endpoint: Option<Uri> = "otlp-endpoint", Value "URL", "none", parse::collector;
        }
        Lower {
            /// Timeout of reads from disk and from peers, and of all reads of one lookup together. A chunk that is later is a miss, and the engine computes it. A chunk that has not arrived after half of the time is also read from the next tier that has it.
            read_timeout: Duration = "disk-read-timeout-seconds", Value "SECONDS", "10", parse::positive_duration;
            /// Tokens that an engine recomputes in a second. Chunks are read from disk, peers and the store of --remote only where that is estimated to take less time; none always reads them.
            recompute_rate: Option<usize> = "recompute-rate", Value "TOKENS", "none", parse::rate;
            /// Folder, not on the drives, that remembers what was cleared, so that no restart and no drive restored from an older copy serves it; auto takes the first writable of $XDG_STATE_HOME/lmc, /var/lib/lmc and ~/.local/state/lmc; none remembers nothing.
            state_dir: StateDir = "state-dir", Value "PATH", "auto", parse::state_dir;
        }
        Links {
            /// Name of this server among its peers; auto is the name of the host.
            p2p_name: Option<String> = "p2p-name", Value "NAME", "auto", parse::peer_name;
            /// File with the key that all peers share: one line of 32 or more random characters, or two lines while the key is changed (the first is used, both are accepted). A peer that holds the key can read every tenant's chunks. Required where --p2p-listen or --p2p-directory-listen is not a loopback address.
            p2p_key: Option<PathBuf> = "p2p-key", Value "FILE", "none", parse::optional_path;
            /// Encrypts the bytes of chunks between this server and its peers. Questions and answers are encrypted in any case. A connection is encrypted if either side asks for it, and a peer without the flag passes on in clear what it has read; NIXL cannot encrypt, so this server reads and lends over sockets only.
            p2p_encrypt: bool = "p2p-encrypt", Switch "BOOL", "false", parse::switch;
            /// Address and port at which this server hosts a directory, e.g. 0.0.0.0:7800; none hosts no directory.
            p2p_directory_listen: Option<HostPort> = "p2p-directory-listen", Value "ADDR:PORT", "none", parse::listen_at;
            /// Entries that the directory of this server keeps at most, one for each chunk of each member; 100 million take about 1 GB.
            p2p_directory_entries: usize = "p2p-directory-entries", Value "N", "64000000", |raw| parse::count(raw, 1000, 4_000_000_000);
        }
    }
    /// A tier of drives.
    DiskSettings {
        Disk {
            /// Folder for chunks on an NVMe drive, found again after a restart; several drives with commas; none keeps all in memory.
            folders: Vec<PathBuf> = "disk", Value "PATH", "none", parse::folders;
            /// Make a new drive of each folder in --disk that holds none, and the folder where it is missing. Without it such a folder is refused: it may be the mount point of a drive that is not mounted. For the first start, not for a unit file.
            create: bool = "disk-create", Switch "BOOL", "false", parse::switch;
            /// Bytes on all drives together, e.g. 500GiB; auto takes half of what is free on each.
            size: PoolSize = "disk-size", Value "SIZE", "auto", parse::pool_size;
            /// Bytes that each drive's file system keeps free.
            keep_free: u64 = "disk-keep-free", Value "SIZE", "1GiB", parse::memo_size;
            /// Time at which chunks are written to disk. through: every chunk at once. back: a chunk only when it is evicted from memory; a clean shutdown also writes what is still in memory, first chunks of each prompt first, until --shutdown-timeout-seconds and 5 s more are over.
            write: WritePolicy = "disk-write", Value "WHEN", "through", |raw| parse::choice(raw, parse::WRITES);
            /// Chunks that are written to disk. always: every chunk. second: a chunk only when it is used a second time, which means fewer writes and a longer drive life. A number up to 14: a chunk only when it was found that many times after it was computed.
            admit: Admission = "disk-admit", Value "WHICH", "always", parse::admission;
            /// Write chunks to disk that are read from peers or from the store of --remote, too.
            fill: bool = "disk-fill", Switch "BOOL", "false", parse::switch;
            /// I/O engine for the drives: auto (io_uring, or threads where that is forbidden), uring or threads.
            io: DiskIo = "disk-io", Value "HOW", "auto", |raw| parse::choice(raw, parse::IO_ENGINES);
            /// Reads and writes that each drive is given at a time.
            depth: u32 = "disk-depth", Value "N", "64", |raw| parse::count(raw, 1, 4096);
        }
    }
    /// A tier of peers.
    PeersSettings {
        Peers {
            /// Address and port at which peers connect, e.g. 10.0.0.1:7700; none lends nothing to other hosts and reads nothing from them.
            listen: Option<HostPort> = "p2p-listen", Value "ADDR:PORT", "none", parse::listen_at;
            /// Address and port under which peers reach this server; required where --p2p-listen is a wildcard, such as 0.0.0.0.
            advertise: Option<HostPort> = "p2p-advertise", Value "ADDR:PORT", "none", parse::reached_at;
            /// Peers to connect to, as `HOST:PORT` or `[IPv6]:PORT`, separated by commas. A name may have several addresses, each of which is a peer; names are resolved again every 30 s, and a server that finds itself among them ignores that. For up to about 8 peers: each prompt that is not here asks all of them.
            peers: Vec<HostPort> = "p2p-peer", Value "PEERS", "none", parse::peers;
            /// Directories, which know what daemons that are not named here have: `lmc://HOST:PORT`, separated by commas. Chunks are announced to all of them, and the first that answers is asked. Requires --p2p-listen.
            directories: Vec<HostPort> = "p2p-directory", Value "DIRECTORIES", "none", parse::directories;
            /// Transport of the bytes that peers read from each other. auto: NIXL between hosts with RDMA that have NIXL's library, sockets between others. sockets: sockets only. nixl: NIXL wherever the peer has it, also over TCP and shared memory; the start fails without the library. Needs a build with the feature nixl and --p2p-key.
            transport: PeerTransport = "p2p-transport", Value "NAME", "auto", |raw| parse::choice(raw, parse::PEER_TRANSPORTS);
            /// Network devices that NIXL may use, as UCX names them, separated by commas, such as mlx5_0:1,eth0; all leaves the choice to UCX. It is the variable UCX_NET_DEVICES.
            interfaces: Option<String> = "p2p-interfaces", Value "DEVICES", "all", parse::interfaces;
            /// Time that peers have to say which chunks they hold: the delay of a prompt that no peer has.
            locate_timeout: Duration = "p2p-locate-timeout", Value "SECONDS", "5ms", parse::positive_duration;
            /// Longest wait for chunks that an engine of a peer is writing, or that a peer is pushing.
            pending_timeout: Duration = "p2p-pending-timeout", Value "SECONDS", "500ms", parse::duration;
            /// Longest time for which a request waits for a peer whose engine computes its prompt (lmcache.pd.source and lmcache.pd.wait_ms of its kv_transfer_params), at most 300; 0 waits for none.
            max_wait: Duration = "p2p-max-wait", Value "SECONDS", "30", parse::wait;
            /// Bytes that peers may read from this server in a second; none sets no bound.
            serve_rate: Option<u64> = "p2p-serve-rate", Value "SIZE", "none", parse::bound;
        }
    }
    /// A tier of a shared store.
    RemoteSettings {
        Remote {
            /// Store that several daemons share and that outlives this host, asked after memory and disk: file:///FOLDER is a folder of a shared file system (NFS, Lustre, Weka), which has to be there: name one below its mount point, which is missing while nothing is mounted; redis://HOST:PORT is a Redis (rediss for TLS, redis-cluster://HOST:PORT,HOST:PORT, redis-sentinel://HOST:PORT/SERVICE); s3://BUCKET/PREFIX is a bucket, with endpoint, region and credentials as the AWS tools take them, from variables and ~/.aws; none uses no store.
            url: Option<RemoteUrl> = "remote", Value "URL", "none", parse::remote_url;
            /// Most bytes of the chunks in a shared folder, those of all daemons together; those that were used longest ago are removed. Give all daemons the same size. Redis and S3 take none: maxmemory and lifecycle rules bound them. none sets no bound.
            size: Option<u64> = "remote-size", Value "SIZE", "none", parse::bound;
            /// Age at which a chunk in the store is removed. A chunk that is read at more than half of it becomes as young as a new one, so that prefixes in use stay. none removes none by age.
            ttl: Option<Duration> = "remote-ttl", Value "SECONDS", "none", parse::optional_duration;
            /// Time at which chunks are written to the store. through: every chunk at once. back: a chunk only when it is evicted from memory, and at a clean shutdown.
            write: WritePolicy = "remote-write", Value "WHEN", "through", |raw| parse::choice(raw, parse::WRITES);
            /// Chunks that are written to the store: always, second, or a number of uses, as for --disk-admit.
            admit: Admission = "remote-admit", Value "WHICH", "always", parse::admission;
            /// Values of cache_salt whose chunks are written to the store, separated by commas; _default is traffic without a salt. all writes those of every salt.
            salts: Option<Vec<Salt>> = "remote-salts", Value "SALTS", "all", parse::salts;
            /// File with a key, as for --p2p-key, under which a digest of each cache_salt stands in the store's descriptions of spaces, so that `lmc remote du` tells tenants apart. Give all daemons of a store the same key. none takes the key of --p2p-key; without either the descriptions say only that there is a salt.
            key: Option<PathBuf> = "remote-key", Value "FILE", "none", parse::optional_path;
            /// Write chunks to the store that are read from tiers after it, too: those of later tables in the configuration file.
            fill: bool = "remote-fill", Switch "BOOL", "false", parse::switch;
            /// Time that the store has to say which chunks it has: the delay of a prompt that no tier has.
            locate_timeout: Duration = "remote-locate-timeout", Value "SECONDS", "50ms", parse::positive_duration;
            /// Timeout of reads from the store; later chunks are misses. A store that takes longer to answer a lookup counts as failed, and is left out after five failures until it answers again.
            timeout: Duration = "remote-timeout-seconds", Value "SECONDS", "5", parse::positive_duration;
            /// Time for which a chunk that the store does not have is not asked for again; 0 asks each time. A chunk that another daemon stores meanwhile is computed here, too.
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
