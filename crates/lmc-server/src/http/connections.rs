//! HTTP connections, limited in number and in the time that each may take.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{Request, Response};
use hyper::body::{Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use parking_lot::Mutex;
use rustix::net::sockopt::set_tcp_user_timeout;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, warn};

use super::access::LiveAccess;
use super::guard::ConnectionUser;

/// Longest time from the start of a connection, or the end of an answer, to the end of the next
/// request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// Longest time of a TLS handshake.
const HANDSHAKE_DEADLINE: Duration = Duration::from_secs(10);
/// Time that a stop gives a connection without a request under way: at most the last bytes of an answer
/// are still in flight.
const IDLE_END_DEADLINE: Duration = Duration::from_secs(1);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// Bounds of a server's connections.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    /// Connections at a time. A further connection replaces the connection that has waited longest for
    /// a request's head; if none waits, the further connection is closed at once.
    pub(crate) connections: usize,
    /// Longest life of a connection.
    pub(crate) life: Option<Duration>,
    /// Longest time to end a connection: to finish the answer under way, and for the client to read it.
    pub(crate) end: Duration,
    /// Longest time for a client to read what was sent to it.
    pub(crate) unread: Option<Duration>,
}

/// Answers until `stopped` turns true, then lets answers under way end. With `access`, each request
/// carries the trust in its connection's user, and connections speak TLS if `access` has TLS.
pub(crate) async fn serve(
    socket: TcpListener,
    router: Router,
    access: Option<LiveAccess>,
    mut stopped: watch::Receiver<bool>,
    bounds: Bounds,
) {
    let seats = Seats::new(bounds.connections);
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = socket.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            // An error means that the sender is gone, which ends the server as well.
            _ = stopped.wait_for(|&stop| stop) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Most likely out of file descriptors, and only waiting can help.
                warn!(%error, "cannot accept an HTTP connection; tries again in 100 ms");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(seat) = seats.take(Instant::now()) else {
            continue;
        };
        if let Some(unread) = bounds.unread
            && let Err(error) = set_tcp_user_timeout(&stream, unread.as_millis() as u32)
        {
            debug!(%error, "cannot set a timeout for unread data; a client that reads nothing may keep its connection");
        }
        let access = access.as_ref().map(LiveAccess::now);
        let (user, tls) = access.map_or((None, None), |access| {
            let user = ConnectionUser(access.trusted_users.check(&stream));
            (Some(user), access.tls.clone())
        });
        let (router, stopped, seats) = (router.clone(), stopped.clone(), seats.clone());
        connections.spawn(async move {
            match tls {
                None => connection(stream, user, &seat, router, stopped, bounds).await,
                Some(tls) => {
                    if let Some(stream) = encrypted(&tls, stream, &seat, stopped.clone()).await {
                        connection(stream, user, &seat, router, stopped, bounds).await;
                    }
                }
            }
            seats.leave(&seat);
        });
    }
    drop(socket);
    while connections.join_next().await.is_some() {}
}

/// The seats of open connections. Clones share them.
#[derive(Debug, Clone)]
struct Seats {
    taken: Arc<Mutex<Vec<Arc<Seat>>>>,
    most: usize,
}

/// The seat of one open connection.
#[derive(Debug)]
struct Seat {
    /// Time since which it waits for a request's head; `None` while a request is answered.
    idle_since: Mutex<Option<Instant>>,
    evicted: Notify,
}

impl Seats {
    fn new(most: usize) -> Self {
        Self {
            taken: Arc::default(),
            most,
        }
    }

    /// Returns a seat for a new connection. If all seats are taken, evicts the connection that has
    /// waited longest for a head; returns `None` if none waits.
    fn take(&self, now: Instant) -> Option<Arc<Seat>> {
        let mut seats = self.taken.lock();
        if seats.len() >= self.most {
            let idle = seats.iter().enumerate();
            let idle = idle.filter_map(|(at, seat)| Some(((*seat.idle_since.lock())?, at)));
            let (_, longest) = idle.min()?;
            seats.swap_remove(longest).evicted.notify_one();
        }
        let seat = Arc::new(Seat {
            idle_since: Mutex::new(Some(now)),
            evicted: Notify::new(),
        });
        seats.push(Arc::clone(&seat));
        Some(seat)
    }

    fn leave(&self, seat: &Arc<Seat>) {
        self.taken.lock().retain(|other| !Arc::ptr_eq(other, seat));
    }
}

impl Seat {
    fn request_began(&self) {
        *self.idle_since.lock() = None;
    }

    fn answer_ended(&self) {
        *self.idle_since.lock() = Some(Instant::now());
    }

    fn is_idle(&self) -> bool {
        self.idle_since.lock().is_some()
    }
}

/// The body of an answer. Its connection is at work until the body ends.
struct Answer {
    body: Body,
    _at_work: AtWork,
}

struct AtWork(Arc<Seat>);

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.answer_ended();
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Makes the TLS session of a connection. Returns `None` if the handshake fails or is late, or if
/// another connection needs the seat.
async fn encrypted(
    tls: &TlsAcceptor,
    stream: TcpStream,
    seat: &Seat,
    mut stopped: watch::Receiver<bool>,
) -> Option<TlsStream<TcpStream>> {
    let accepted = tokio::select! {
        accepted = tokio::time::timeout(HANDSHAKE_DEADLINE, tls.accept(stream)) => accepted,
        () = seat.evicted.notified() => return None,
        _ = stopped.wait_for(|&stop| stop) => return None,
    };
    match accepted {
        Ok(Ok(stream)) => Some(stream),
        Ok(Err(error)) => {
            debug!(%error, "TLS handshake failed");
            None
        }
        Err(_) => None,
    }
}

async fn connection(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    user: Option<ConnectionUser>,
    seat: &Arc<Seat>,
    router: Router,
    mut stopped: watch::Receiver<bool>,
    bounds: Bounds,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        if let Some(user) = user {
            request.extensions_mut().insert(user);
        }
        seat.request_began();
        let (answer, at_work) = (router.call(request), AtWork(Arc::clone(seat)));
        async move {
            let answer: Response<Body> = answer.await?;
            Ok::<_, Infallible>(answer.map(|body| Answer {
                body,
                _at_work: at_work,
            }))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let life_is_over = async {
        match bounds.life {
            Some(life) => tokio::time::sleep(life).await,
            None => std::future::pending().await,
        }
    };
    let first = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = seat.evicted.notified() => return,
        _ = stopped.wait_for(|&stop| stop) => None,
        () = life_is_over => None,
    };
    let ended = match first {
        Some(ended) => Ok(ended),
        None => {
            connection.as_mut().graceful_shutdown();
            let deadline = match seat.is_idle() {
                true => IDLE_END_DEADLINE,
                false => bounds.end,
            };
            tokio::time::timeout(deadline, connection).await
        }
    };
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "HTTP connection failed"),
        Err(_) => debug!("HTTP client did not read its answer in time"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_with_a_late_first_request_ends() {
        let socket = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = socket.local_addr().expect("an address");
        let (_stop, stopped) = watch::channel(false);
        let bounds = Bounds {
            connections: 2,
            life: None,
            end: Duration::from_secs(1),
            unread: None,
        };
        tokio::spawn(serve(socket, Router::new(), None, stopped, bounds));
        let mut client = TcpStream::connect(address).await.expect("it listens");
        let begun = tokio::time::Instant::now();
        let half = client.write_all(b"GET /healthz HTTP/1.1\r\n").await;
        half.expect("half a head");
        let ended = client.read_to_end(&mut Vec::new()).await;
        ended.expect("an end");
        assert!(begun.elapsed() >= HEAD_DEADLINE);
    }

    #[test]
    fn a_connection_is_at_work_until_its_answer_has_ended() {
        let seats = Seats::new(1);
        let seat = seats.take(Instant::now()).expect("there are seats");
        seat.request_began();
        let answer = Answer {
            body: Body::from("text"),
            _at_work: AtWork(Arc::clone(&seat)),
        };
        assert!(!seat.is_idle());
        assert!(
            seats.take(Instant::now()).is_none(),
            "it is not evicted for another connection"
        );
        drop(answer);
        assert!(seat.is_idle());
        assert!(seats.take(Instant::now()).is_some());
    }
}
