//! The listening sockets: accepts connections, limits their number, and serves each in a task.

use std::io;
use std::net::SocketAddr;
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
use crate::transport::serving::{Serving, ZmqConfig};
use crate::transport::stream::Stream;
use crate::transport::trust::Untrusted;

/// Time between two calls of [`Service::beat`], which shows that this process runs.
const BEAT_INTERVAL: Duration = Duration::from_millis(500);

/// A listening socket cannot be opened.
#[derive(Clone, Debug, Error)]
#[error("cannot listen on {address}: {source}")]
pub struct BindError {
    /// Address of the socket: `tcp://HOST:PORT` or `ipc://PATH`.
    pub address: String,
    /// Error of the operating system.
    pub source: Arc<io::Error>,
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

impl ZmqConfig {
    /// Opens the sockets. Clients can connect from now on; [`ZmqServer::run`] serves them.
    ///
    /// # Errors
    /// [`BindError`] when an address is taken or cannot be resolved.
    pub async fn bind(self, service: Service) -> Result<ZmqServer, BindError> {
        let failed = |source: io::Error| BindError {
            address: format!("tcp://{}:{}", self.host, self.port),
            source: source.into(),
        };
        let listener = TcpListener::bind((self.host.as_str(), self.port))
            .await
            .map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let ipc = self.ipc_path.as_deref().map(|path| {
            IpcListener::bind(path, self.trusted_users.socket_mode()).map_err(|source| BindError {
                address: format!("ipc://{}", path.display()),
                source: source.into(),
            })
        });
        let ipc = ipc.transpose()?;
        // A request may arrive before the timer's first tick.
        service.beat(Instant::now());
        Ok(ZmqServer {
            listener,
            ipc,
            address,
            config: self,
            service,
        })
    }
}

impl ZmqServer {
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
                    // The usual cause is the limit of open files; only the end of a connection
                    // helps then.
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
        // A client that looks for a server from now on does not find this one.
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
