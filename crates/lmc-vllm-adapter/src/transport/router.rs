//! The listening sockets: accepts connections, limits their number, and serves each in a task.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use crate::service::{ClientId, Service, Throttle};
use crate::transport::admission::{Admission, Permit};
use crate::transport::connection::Connection;
use crate::transport::ipc::IpcListener;
use crate::transport::process::MappedFile;
use crate::transport::search::Search;
use crate::transport::stream::Stream;
use crate::transport::trust::{TrustedUsers, Untrusted};
use crate::transport::zmtp::Limits;

/// Time between two calls of [`Service::beat`], which shows that this process runs.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);

/// Keepalive timeouts of TCP: a connection whose host or network is gone is closed after them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe. Default: 30 s.
    pub idle: Duration,
    /// Time between two probes. Default: 10 s.
    pub interval: Duration,
    /// Number of unanswered probes after which the connection is closed. Default: 3.
    pub probes: u32,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            probes: 3,
        }
    }
}

impl Keepalive {
    /// Returns the time from the last received packet to the end of the connection.
    pub(super) fn total(&self) -> Duration {
        self.idle + self.interval * self.probes
    }
}

/// Configuration of a [`ZmqServer`]: addresses, limits and timeouts.
#[derive(Debug, Clone)]
pub struct ZmqConfig {
    /// Host name or address to listen on. Default: `127.0.0.1`.
    pub host: String,
    /// TCP port to listen on; 0 means any free port. Default: 5555.
    pub port: u16,
    /// Path of an additional Unix socket, which clients reach as `ipc://PATH`. Its mode is 0600, or
    /// 0666 where other users are trusted too. Default: `None`.
    pub ipc_path: Option<PathBuf>,
    /// Users of this host that are served. Default: the server's own user and root.
    pub trusted_users: TrustedUsers,
    /// Size limits of one message. Default: [`Limits::default`].
    pub limits: Limits,
    /// Most open connections; one user may have three quarters of them. A new connection beyond the
    /// limit replaces the one that has been idle for longest and owns nothing; if there is none,
    /// the new one is closed and counted. Default: 1024.
    pub max_connections: usize,
    /// Requests of one connection that may be in flight. Beyond this number copies are declined at
    /// once; at twice this number the connection is not read until a reply is sent. Default: 1024.
    pub max_in_flight: usize,
    /// Bytes of unread replies at which the server stops reading from a connection. Default: 16
    /// MiB.
    pub max_unread: usize,
    /// Timeout of the handshake, of one message from its first to its last byte, and of the
    /// acceptance of any byte of a reply. Default: 30 s.
    pub peer_timeout: Duration,
    /// Timeout from the start of a connection to its first request. Default: 60 s.
    pub first_request_timeout: Duration,
    /// Keepalive timeouts of TCP connections. Default: [`Keepalive::default`].
    pub keepalive: Keepalive,
    /// Longest time for which a stop waits for requests in flight. Default: 5 s.
    pub stop_timeout: Duration,
}

impl Default for ZmqConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 5555,
            ipc_path: None,
            trusted_users: TrustedUsers::default(),
            limits: Limits::default(),
            max_connections: 1024,
            max_in_flight: 1024,
            max_unread: 16 << 20,
            peer_timeout: Duration::from_secs(30),
            first_request_timeout: Duration::from_secs(60),
            keepalive: Keepalive::default(),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

impl ZmqConfig {
    /// Returns the number of requests in flight, of any kind, at which a connection is not read.
    pub(super) fn hard_in_flight_limit(&self) -> usize {
        self.max_in_flight.saturating_mul(2)
    }
}

/// A listening socket cannot be opened.
#[derive(Debug, Error)]
#[error("cannot listen on {address}: {source}")]
pub struct BindError {
    /// Address of the socket: `tcp://HOST:PORT` or `ipc://PATH`.
    pub address: String,
    /// Error of the operating system.
    pub source: io::Error,
}

/// A listening ROUTER socket in front of a [`Service`].
#[derive(Debug)]
pub struct ZmqServer {
    listener: TcpListener,
    ipc: Option<IpcListener>,
    address: SocketAddr,
    config: ZmqConfig,
    service: Service,
}

/// Values shared by all connections.
#[derive(Debug)]
pub(super) struct Serving {
    pub(super) config: ZmqConfig,
    /// File of the pool, as in the memory maps of processes.
    pool: Option<MappedFile>,
    /// Connections that may still begin to poll: one for each thread of the runtime, since more
    /// only take time from the requests of others.
    polls: AtomicUsize,
}

impl Serving {
    /// Permits one connection more to poll, or none where each thread has one that does.
    pub(super) fn poll(&self) -> Option<Polling<'_>> {
        let take = |left: usize| left.checked_sub(1);
        self.polls
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, take)
            .ok()
            .map(|_| Polling(&self.polls))
    }
}

/// Permission to poll, given back on drop.
#[derive(Debug)]
pub(super) struct Polling<'a>(&'a AtomicUsize);

impl Drop for Polling<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl ZmqServer {
    /// Opens the sockets. Clients can connect from now on; [`Self::run`] serves them.
    ///
    /// # Errors
    /// [`BindError`] when an address is taken or cannot be resolved.
    pub async fn bind(config: ZmqConfig, service: Service) -> Result<Self, BindError> {
        let failed = |source| BindError {
            address: format!("tcp://{}:{}", config.host, config.port),
            source,
        };
        let listener = TcpListener::bind((config.host.as_str(), config.port))
            .await
            .map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let ipc = config.ipc_path.as_deref().map(|path| {
            IpcListener::bind(path, config.trusted_users.socket_mode()).map_err(|source| {
                BindError {
                    address: format!("ipc://{}", path.display()),
                    source,
                }
            })
        });
        let ipc = ipc.transpose()?;
        // A request may arrive before the timer's first tick.
        service.beat(Instant::now());
        Ok(Self {
            listener,
            ipc,
            address,
            config,
            service,
        })
    }

    /// Returns the address of the TCP socket.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the next connection of either socket.
    async fn accept(&self) -> io::Result<Stream> {
        let ipc = async {
            match &self.ipc {
                Some(ipc) => ipc.listener().accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = self.listener.accept() => Ok(Stream::Tcp(accepted?.0)),
            accepted = ipc => Ok(Stream::Unix(accepted?.0)),
        }
    }

    /// Serves until `stop` turns true, then finishes the requests in flight and returns.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        static NEXT_CLIENT: AtomicU64 = AtomicU64::new(1);
        let serving = Arc::new(Serving {
            pool: MappedFile::at(self.service.engine().arena().base_ptr().addr().get()),
            config: self.config.clone(),
            polls: AtomicUsize::new(Handle::current().metrics().num_workers()),
        });
        let admission = Admission::new(serving.config.max_connections);
        let mut connections = JoinSet::new();
        let mut beats = tokio::time::interval(BEAT_INTERVAL);
        let (began, refusals) = (Instant::now(), Throttle::default());
        loop {
            let accepted = tokio::select! {
                _ = beats.tick() => {
                    self.service.beat(Instant::now());
                    continue;
                }
                accepted = self.accept() => accepted,
                Some(_) = connections.join_next() => continue,
                _ = stop.wait_for(|&stop| stop) => break,
            };
            let stream = match accepted {
                Ok(stream) => stream,
                Err(error) => {
                    // Usually the limit of open files; only the end of a connection helps.
                    warn!(%error, "accept failed; retrying in 100 ms");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let counters = self.service.transport_counters();
            let client = ClientId::new(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
            let peer = stream.peer();
            if let Err(untrusted) = self.config.trusted_users.check_peer(&stream, &peer) {
                counters.untrusted.fetch_add(1, Ordering::Relaxed);
                log_refusal(untrusted, &refusals, began.elapsed());
                continue;
            }
            let Some(permit) = admission.admit(&self.service, client, peer.uid, Instant::now())
            else {
                counters.connections_refused.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            counters
                .connections_accepted
                .fetch_add(1, Ordering::Relaxed);
            let search = Search::new(peer.inode, serving.pool.clone());
            self.service.connected(client, peer);
            let guard = ConnectionGuard::new(permit, self.service.clone(), admission.clone());
            let serving = Arc::clone(&serving);
            connections.spawn(serve(stream, guard, serving, search, stop.clone()));
        }
        // Who looks for a server from now on does not find this one.
        drop((self.listener, self.ipc));
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(self.config.stop_timeout, drained)
            .await
            .is_err()
        {
            warn!("stop timeout reached; connections with requests in flight were closed");
        }
    }
}

fn log_refusal(untrusted: Untrusted, throttle: &Throttle, now: Duration) {
    match untrusted {
        // Port scans and health checks close at once, so this is no warning.
        Untrusted::Closed => debug!("connection closed: {untrusted}"),
        Untrusted::User(_) => {
            if let Some(suppressed) = throttle.pass(now) {
                warn!(suppressed, "connection closed: {untrusted}");
            }
        }
    }
}

/// Guard of an open connection. Dropping it, also by a panic or at the stop timeout, reports the
/// end of the connection and releases its permit.
struct ConnectionGuard {
    permit: Arc<Permit>,
    service: Service,
    admission: Admission,
}

impl ConnectionGuard {
    fn new(permit: Arc<Permit>, service: Service, admission: Admission) -> Self {
        let counters = service.transport_counters();
        counters.connections_open.fetch_add(1, Ordering::Relaxed);
        Self {
            permit,
            service,
            admission,
        }
    }
}

impl Drop for ConnectionGuard {
    fn drop(&mut self) {
        let client = self.permit.client();
        debug!(%client, "connection ended");
        self.service.client_gone(client, Instant::now());
        let counters = self.service.transport_counters();
        counters.connections_open.fetch_sub(1, Ordering::Relaxed);
        self.admission.release(client);
    }
}

async fn serve(
    stream: Stream,
    guard: ConnectionGuard,
    serving: Arc<Serving>,
    search: Search,
    stop: watch::Receiver<bool>,
) {
    if let Err(error) = stream.prepare(&serving.config.keepalive) {
        debug!(client = %guard.permit.client(), %error, "setting socket options failed");
    }
    let (service, client) = (guard.service.clone(), guard.permit.client());
    let permit = Arc::clone(&guard.permit);
    let connection = Connection::new(
        stream,
        service.clone(),
        serving,
        permit,
        search,
        stop.clone(),
    );
    connection.run().await;
    drop(guard);
    wait_for_process_exit(service, client, stop).await;
}

/// Waits up to a second for the exit of a client's process after its connection ended with slots
/// held, and releases them. A killed process closes its sockets a moment before the kernel reports
/// it dead. [`Service::tick`] does the same later.
async fn wait_for_process_exit(
    service: Service,
    client: ClientId,
    mut stop: watch::Receiver<bool>,
) {
    let mut pause = Duration::from_millis(1);
    while pause < Duration::from_secs(1) && service.holds_slots(client) {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = stop.wait_for(|&stop| stop) => return,
        }
        pause *= 2;
        let for_check = service.clone();
        let check = move || for_check.release_dead(Instant::now());
        if tokio::task::spawn_blocking(check).await.is_err() {
            return;
        }
    }
}
