//! Spaces of engines, as peers learn of them.

use std::time::Duration;

use lmc_backend::{Host as _, HostSpace};
use lmc_key::{HashAlgorithm, KeySpace, LayoutFingerprint};

use super::net::{Faults, Net};
use super::{LEN, key, run};
use crate::exchange::IN_STEP_PAUSE;
use crate::spaces::note;

/// Returns the space of an engine with this number of ranks.
fn space(world_size: u32) -> HostSpace {
    let description = KeySpace {
        algorithm: HashAlgorithm::Blake3,
        chunk_size: 256,
        model: "m".parse().expect("a name"),
        world_size,
        layout: LayoutFingerprint::of(b"any"),
        dtype: "bfloat16".parse().expect("a name"),
        salt: "tenant".parse().expect("a salt"),
        identity: "".parse().expect("no text"),
        tags: None,
    };
    let id = description.id();
    HostSpace { id, description }
}

/// A decode engine that asked within five seconds of the start of a prefill engine with more ranks found
/// nothing.
#[test]
fn the_space_of_a_new_engine_is_known_to_peers_at_once() {
    run(async {
        let net = Net::with_daemons(22, Faults::none(), 3).await;
        let knows = |host: usize, ranks| {
            let layout = (LayoutFingerprint::of(b"any"), ranks);
            let node = net.node(host);
            let peers = node.sessions.peers.lock();
            peers.have_layouts(&[layout], &["host-0".to_owned()]) == [true]
        };
        for ranks in [1, 2] {
            net.chunks(0).add_space(space(ranks));
            net.chunks(0).events().report_host();
            tokio::time::sleep(2 * IN_STEP_PAUSE).await;
            assert!(knows(1, ranks) && knows(2, ranks), "{ranks}");
        }
        assert!(!knows(1, 3));
    });
}

#[test]
fn spaces_that_appear_after_the_connect_are_described() {
    let note = |world_size| note(&space(world_size), None);
    run(async {
        let net = Net::with_daemons(21, Faults::none(), 2).await;
        let holds = |net: &Net| {
            let (node, peer) = (net.node(1), net.session(0));
            let mut peers = node.sessions.peers.lock();
            peers.of_session(&peer).expect("connected").holds.clone()
        };
        assert_eq!(holds(&net).spaces, []);
        net.chunks(0).add_space(space(1));
        net.chunks(1).add_space(space(2));
        net.chunks(0).store(key(0, 0), 0);
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!((holds(&net).chunks, holds(&net).bytes), (1, LEN));
        assert_eq!(holds(&net).spaces, [note(1)]);
        // Neither is lost while nothing changes, nor kept when it does.
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(holds(&net).spaces, [note(1)]);
        net.chunks(0).add_space(space(2));
        tokio::time::sleep(Duration::from_secs(6)).await;
        assert_eq!(holds(&net).spaces, [note(1), note(2)]);
    });
}
