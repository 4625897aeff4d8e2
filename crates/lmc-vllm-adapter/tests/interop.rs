//! The `zeromq` crate, which shares no code with us, as a peer.

mod common;

use std::time::Duration;

use common::Server;
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

async fn exchange(address: std::net::SocketAddr, payload: usize) {
    let mut dealer = DealerSocket::new();
    dealer
        .connect(&format!("tcp://{address}"))
        .await
        .expect("a connection");
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
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let address = server.address;
    runtime.block_on(async move {
        let peers = (0..8).map(|peer| tokio::spawn(exchange(address, 10 << (2 * peer))));
        for peer in peers.collect::<Vec<_>>() {
            let ended = tokio::time::timeout(Duration::from_secs(20), peer).await;
            ended.expect("in time").expect("served");
        }
    });
}
