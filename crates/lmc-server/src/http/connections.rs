//! Connections of the HTTP side: bounded in number, and in the time that each may take.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use lmc_vllm_adapter::TrustedUsers;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tracing::{debug, warn};

use super::guard::ConnectionUser;

/// Connections at a time; more are closed at once.
const MAX_CONNECTIONS: usize = 128;
/// Longest time from the start of a connection, or the end of an answer, to the end of the next
/// request's head.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// Longest life of a connection; a client that wants more connects again.
const LIFE: Duration = Duration::from_secs(300);
/// Longest time to end a connection: for the answer under way, and for the client to take it.
const END_DEADLINE: Duration = Duration::from_secs(12);
/// Bytes of a request's head.
const MAX_HEAD: usize = 16 << 10;

/// Answers until `stopped` turns true, then lets answers under way end.
pub(super) async fn serve(
    socket: TcpListener,
    router: Router,
    trusted_users: TrustedUsers,
    mut stopped: watch::Receiver<bool>,
) {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
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
        let Ok(permit) = Arc::clone(&free).try_acquire_owned() else {
            continue;
        };
        let user = ConnectionUser(trusted_users.check(&stream));
        let connection = connection(stream, user, router.clone(), stopped.clone());
        connections.spawn(async move {
            connection.await;
            drop(permit);
        });
    }
    while connections.join_next().await.is_some() {}
}

async fn connection(
    stream: TcpStream,
    user: ConnectionUser,
    router: Router,
    mut stopped: watch::Receiver<bool>,
) {
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(user);
        router.call(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let first = tokio::select! {
        ended = connection.as_mut() => Some(ended),
        _ = stopped.wait_for(|&stop| stop) => None,
        () = tokio::time::sleep(LIFE) => None,
    };
    let ended = match first {
        Some(ended) => Ok(ended),
        None => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(END_DEADLINE, connection).await
        }
    };
    match ended {
        Ok(Ok(())) => {}
        Ok(Err(error)) => debug!(%error, "an HTTP connection broke"),
        Err(_) => debug!("an HTTP client does not take its answer"),
    }
}
