//! The listening side: accepts connections, counts them, ends them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{debug, warn};

use crate::service::{ClientId, ConnectionEnd, Service};
use crate::transport::connection::{Connection, outlast};
use crate::transport::peer;
use crate::transport::zmtp::Limits;

/// Time between signs of the process's own life.
const BEAT: Duration = Duration::from_millis(500);

/// How the server listens and what it grants to each peer.
#[derive(Debug, Clone)]
pub struct ZmqConfig {
    /// Host name or address. Default: `127.0.0.1`.
    pub host: String,
    /// TCP port; 0 takes any that is free. Default: 5555.
    pub port: u16,
    /// What one message may hold. Default: [`Limits::default`].
    pub limits: Limits,
    /// Connections at a time; more are closed at once and counted. Default: 1024.
    pub max_connections: usize,
    /// Requests of one connection that may be under way. Beyond it copies are declined at once;
    /// at twice as many the connection is not read until one is answered. Default: 1024.
    pub max_in_flight: usize,
    /// Bytes of answers that one connection may leave unread before it is not read any more.
    /// Default: 16 MiB.
    pub max_unread: usize,
    /// Longest handshake, longest message from first to last byte, and longest time that a
    /// peer may take to accept a byte of an answer. Default: 30 s.
    pub peer_timeout: Duration,
    /// Longest time that a stop waits for answers under way. Default: 5 s.
    pub stop_timeout: Duration,
}

impl Default for ZmqConfig {
    fn default() -> Self {
        Self {
            host: "127.0.0.1".to_owned(),
            port: 5555,
            limits: Limits::default(),
            max_connections: 1024,
            max_in_flight: 1024,
            max_unread: 16 << 20,
            peer_timeout: Duration::from_secs(30),
            stop_timeout: Duration::from_secs(5),
        }
    }
}

impl ZmqConfig {
    /// Requests of one connection that are ever under way, of whatever kind.
    pub(super) fn most_in_flight(&self) -> usize {
        self.max_in_flight.saturating_mul(2)
    }
}

/// The socket cannot be opened.
#[derive(Debug, Error)]
#[error("cannot listen on tcp://{host}:{port}: {source}")]
pub struct BindError {
    /// Host that was asked for.
    pub host: String,
    /// Port that was asked for.
    pub port: u16,
    /// What the system says.
    pub source: std::io::Error,
}

/// A listening ROUTER socket in front of a [`Service`].
#[derive(Debug)]
pub struct ZmqServer {
    listener: TcpListener,
    address: SocketAddr,
    config: ZmqConfig,
    service: Service,
}

impl ZmqServer {
    /// Opens the socket. Peers may connect from now on; they are served once [`Self::run`] runs.
    ///
    /// # Errors
    /// [`BindError`] when the address is taken or cannot be resolved.
    pub async fn bind(config: ZmqConfig, service: Service) -> Result<Self, BindError> {
        let failed = |source| BindError {
            host: config.host.clone(),
            port: config.port,
            source,
        };
        let listener = TcpListener::bind((config.host.as_str(), config.port))
            .await
            .map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        // The timer's first beat comes late enough to be outrun by a request.
        service.beat(Instant::now());
        Ok(Self {
            listener,
            address,
            config,
            service,
        })
    }

    /// Where the socket listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop` turns true, then answers what is under way and returns.
    pub async fn run(self, mut stop: watch::Receiver<bool>) {
        static NEXT_CLIENT: AtomicU64 = AtomicU64::new(1);
        let config = Arc::new(self.config);
        let open = Arc::new(AtomicUsize::new(0));
        let mut connections = JoinSet::new();
        let mut beats = tokio::time::interval(BEAT);
        loop {
            let accepted = tokio::select! {
                _ = beats.tick() => {
                    self.service.beat(Instant::now());
                    continue;
                }
                accepted = self.listener.accept() => accepted,
                Some(_) = connections.join_next() => continue,
                _ = stop.wait_for(|&stop| stop) => break,
            };
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of file descriptors, most likely: waiting is all that can help.
                    warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let counters = self.service.transport_counters();
            if open.load(Ordering::Relaxed) >= config.max_connections {
                counters.connections_refused.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            counters
                .connections_accepted
                .fetch_add(1, Ordering::Relaxed);
            let client = ClientId::new(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
            self.service.connected(client, peer::of_tcp(&stream));
            let place = Place::take(client, self.service.clone(), Arc::clone(&open));
            connections.spawn(serve(stream, place, Arc::clone(&config), stop.clone()));
        }
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(config.stop_timeout, drained)
            .await
            .is_err()
        {
            warn!("connections with unanswered requests were closed at the stop deadline");
        }
    }
}

/// The place of a connection among those that are open. Its end is reported and counted when
/// this is dropped, also by a panic or by the stop's deadline.
struct Place {
    client: ClientId,
    service: Service,
    taken: Arc<AtomicUsize>,
    end: ConnectionEnd,
}

impl Place {
    fn take(client: ClientId, service: Service, taken: Arc<AtomicUsize>) -> Self {
        taken.fetch_add(1, Ordering::Relaxed);
        let counters = service.transport_counters();
        counters.connections_open.fetch_add(1, Ordering::Relaxed);
        Self {
            client,
            service,
            taken,
            // What has not ended by itself was ended by this side.
            end: ConnectionEnd::Closed,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let (client, end) = (self.client, self.end);
        debug!(%client, ?end, "connection ended");
        self.service.client_gone(client, end, Instant::now());
        let counters = self.service.transport_counters();
        counters.connections_open.fetch_sub(1, Ordering::Relaxed);
        self.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

async fn serve(
    stream: TcpStream,
    mut place: Place,
    config: Arc<ZmqConfig>,
    stop: watch::Receiver<bool>,
) {
    // Answers are small and awaited; waiting to fill a segment would only delay them.
    let _ = stream.set_nodelay(true);
    let (client, service) = (place.client, place.service.clone());
    let connection = Connection::new(&stream, client, service.clone(), config, stop.clone());
    place.end = match connection.run().await {
        // Its end is the proof that its slots may be given to others, so it is waited for.
        ConnectionEnd::Closed if service.holds_slots(client) => {
            debug!(%client, "waiting for the end of a peer that holds slots");
            service.client_gone(client, ConnectionEnd::Closed, Instant::now());
            outlast(stream, &service, stop).await
        }
        end => end,
    };
}
