//! Connections of the HTTP side: bounded in number, and in the time that each may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use lmc_vllm_adapter::TrustedUsers;
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::guard::ConnectionUser;

/// Connections at a time. Beyond that, a new one replaces the one that has waited longest for a
/// request's head, or is closed at once if there is none.
pub(super) const MAX_CONNECTIONS: usize = 128;
/// Longest time from the start of a connection to the end of its first request's head.
const FIRST_HEAD_DEADLINE: Duration = Duration::from_secs(5);
/// Longest time from the end of an answer to the end of the next request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// Longest life of a connection; a client that wants more connects again.
const LIFE: Duration = Duration::from_secs(300);
/// Longest time to end a connection: for the answer under way, and for the client to take it.
const END_DEADLINE: Duration = Duration::from_secs(12);
/// Time that a stop gives a connection that waits for a request: only the last bytes of an answer
/// may be in flight.
const IDLE_END_DEADLINE: Duration = Duration::from_secs(1);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// Answers until `stopped` turns true, then lets answers under way end.
pub(super) async fn serve(
    socket: TcpListener,
    router: Router,
    trusted_users: TrustedUsers,
    mut stopped: watch::Receiver<bool>,
) {
    let seats = Seats::default();
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
                // Out of file descriptors, most likely: waiting is all that can help.
                warn!(%error, "cannot accept an HTTP connection");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(seat) = seats.take(Instant::now()) else {
            continue;
        };
        let user = ConnectionUser(trusted_users.check(&stream));
        let connection = connection(
            stream,
            user,
            Arc::clone(&seat),
            router.clone(),
            stopped.clone(),
        );
        let seats = seats.clone();
        connections.spawn(async move {
            connection.await;
            seats.leave(&seat);
        });
    }
    while connections.join_next().await.is_some() {}
}

/// The seats of open connections. Clones share them.
#[derive(Debug, Clone, Default)]
struct Seats(Arc<Mutex<Vec<Arc<Seat>>>>);

/// The seat of one open connection.
#[derive(Debug)]
struct Seat {
    /// Time since which it waits for a request's head; `None` while a request is answered.
    idle_since: Mutex<Option<Instant>>,
    has_asked: AtomicBool,
    evicted: Notify,
}

impl Seats {
    /// A seat for a new connection. Evicts the connection that waits for a head for longest if all
    /// seats are taken; `None` if none waits.
    fn take(&self, now: Instant) -> Option<Arc<Seat>> {
        let mut seats = self.0.lock();
        if seats.len() >= MAX_CONNECTIONS {
            let idle = seats.iter().enumerate();
            let idle = idle.filter_map(|(at, seat)| Some(((*seat.idle_since.lock())?, at)));
            let (_, longest) = idle.min()?;
            seats.swap_remove(longest).evicted.notify_one();
        }
        let seat = Arc::new(Seat {
            idle_since: Mutex::new(Some(now)),
            has_asked: AtomicBool::new(false),
            evicted: Notify::new(),
        });
        seats.push(Arc::clone(&seat));
        Some(seat)
    }

    fn leave(&self, seat: &Arc<Seat>) {
        self.0.lock().retain(|other| !Arc::ptr_eq(other, seat));
    }
}

impl Seat {
    fn request_began(&self) {
        self.has_asked.store(true, Ordering::Relaxed);
        *self.idle_since.lock() = None;
    }

    fn request_ended(&self) {
        *self.idle_since.lock() = Some(Instant::now());
    }

    fn is_idle(&self) -> bool {
        self.idle_since.lock().is_some()
    }

    /// Waits until the connection is to be closed: for another one, or because its first request
    /// is late.
    async fn must_go(&self) {
        let first_head_is_late = async {
            tokio::time::sleep(FIRST_HEAD_DEADLINE).await;
            if self.has_asked.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = self.evicted.notified() => {}
            () = first_head_is_late => {}
        }
    }
}

async fn connection(
    stream: TcpStream,
    user: ConnectionUser,
    seat: Arc<Seat>,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(user);
        seat.request_began();
        let (answer, seat) = (router.call(request), &seat);
        async move {
            let answer = answer.await;
            seat.request_ended();
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let first = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        () = seat.must_go() => return,
        _ = stopped.wait_for(|&stop| stop) => None,
        () = tokio::time::sleep(LIFE) => None,
    };
    let ended = match first {
        Some(ended) => Ok(ended),
        None => {
            connection.as_mut().graceful_shutdown();
            let deadline = match seat.is_idle() {
                true => IDLE_END_DEADLINE,
                false => END_DEADLINE,
            };
            tokio::time::timeout(deadline, connection).await
        }
    };
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "HTTP connection failed"),
        Err(_) => debug!("HTTP client does not read its answer"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_connection_goes_when_its_first_request_is_late() {
        let seats = Seats::default();
        let seat = || seats.take(Instant::now()).expect("there are seats");
        let begun = tokio::time::Instant::now();
        seat().must_go().await;
        assert!(begun.elapsed() >= FIRST_HEAD_DEADLINE);
        let asked = seat();
        asked.request_began();
        let gone = tokio::time::timeout(2 * FIRST_HEAD_DEADLINE, asked.must_go());
        gone.await.expect_err("it has asked in time");
    }
}
