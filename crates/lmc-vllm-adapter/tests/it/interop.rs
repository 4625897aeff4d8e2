//! Clients of the `zeromq` crate, an independent implementation of ZeroMQ.

use std::time::Duration;

use crate::common::Server;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

async fn exchange(endpoint: String, payload: usize) {
    let mut dealer = DealerSocket::new();
    dealer.connect(&endpoint).await.expect("a connection");
    for uid in 0..20u8 {
        // An unknown operation with a payload: small and large frames, both ways.
        let mut message = ZmqMessage::from(vec![uid]);
        message.push_back(vec![0x18].into());
        dealer.send(message).await.expect("sent");
        let answer = dealer.recv().await.expect("an answer").into_vec();
        assert_eq!(answer[0][..], [uid]);
        assert_eq!(answer[2][..], *b"\xa2OK");
        let mut message = ZmqMessage::from(vec![uid]);
        message.push_back(b"\xa4nope".to_vec().into());
        message.push_back(vec![7; payload].into());
        dealer.send(message).await.expect("sent");
        let answer = dealer.recv().await.expect("an answer").into_vec();
        assert_eq!(answer.len(), 2);
        assert!(String::from_utf8_lossy(&answer[1]).contains("unknown operation \"nope\""));
    }
}

#[test]
fn a_dealer_of_the_zeromq_crate_is_served() {
    let server = Server::start();
    serve_dealers(&format!("tcp://{}", server.address));
}

/// The socket has mode 0600, so that only the same user can connect.
#[test]
fn a_dealer_is_served_on_a_unix_socket() {
    let path = std::env::temp_dir().join(format!("lmc_interop_{}.sock", std::process::id()));
    let listening = path.clone();
    let server = Server::with(1 << 20, |_| {}, |zmq| zmq.ipc_path = Some(listening));
    let mode = std::fs::metadata(&path).expect("it listens").permissions();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777,
        0o600
    );
    serve_dealers(&format!("ipc://{}", path.display()));
    assert!(
        server
            .client()
            .ask(&lmc_vllm_adapter::Request::Noop)
            .is_ok()
    );
    drop(server);
    assert!(!path.exists(), "the socket is removed with the server");
}

fn serve_dealers(endpoint: &str) {
    let endpoint = endpoint.to_owned();
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async move {
        let peer = |peer: usize| tokio::spawn(exchange(endpoint.clone(), 10usize << (2 * peer)));
        let peers = (0..8).map(peer);
        for peer in peers.collect::<Vec<_>>() {
            let ended = tokio::time::timeout(Duration::from_secs(60), peer).await;
            ended.expect("in time").expect("served");
        }
    });
}
