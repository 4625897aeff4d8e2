//! Peers of other versions of the protocol.

use std::time::Duration;

use lmc_key::{ChunkHash, ChunkKey, SpaceId};

use super::net::{Faults, Net};
use super::run;
use super::schedules::{fetch, prompt};
use crate::message::{ChunkLease, OLDEST_VERSION, Released, Reply, Request, VERSION};

#[test]
fn a_peer_of_version_1_and_the_current_one_read_each_other() {
    run(async {
        let net = Net::new(21, Faults::none());
        net.start(0, 64, |config| {
            assert_eq!(config.versions, (OLDEST_VERSION, VERSION));
        });
        net.start(1, 64, |config| config.versions = (1, 1));
        assert!(net.connect(0, 1).await);
        for (owner, reader) in [(0, 1), (1, 0)] {
            let keys = prompt(owner as u64, 4);
            let chunks = net.chunks(owner);
            keys.iter().for_each(|&key| chunks.store(key, 0));
            assert_eq!(fetch(&net, reader, &keys).await.hits, 4);
        }
    });
}

/// The chunks that the committed frames of version 1 name.
fn named() -> [ChunkKey; 2] {
    [1, 2].map(|n| ChunkKey {
        space: SpaceId::new([9; 16]),
        kv_rank: 1,
        group: 2,
        hash: ChunkHash::new([n; 32]),
    })
}

fn from_hex(hex: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(digit).collect()
}

/// Replaces the number of a lease, which its owner chooses, by `number`.
fn with_lease(mut frame: Vec<u8>, number: u8) -> Vec<u8> {
    // Its first field, in one byte.
    assert!(frame[6] < 0x80);
    frame[6] = number;
    frame
}

/// A peer of version 1 sends the frames of the committed file, one after the other, and compares
/// the replies with the committed conversation. A reply may have grown at its end.
#[test]
fn a_recorded_conversation_of_version_1_keeps_its_meaning() {
    const FRAMES: &str = include_str!("../../tests/data/version-1.txt");
    let frames: Vec<Vec<u8>> = FRAMES.lines().map(from_hex).collect();
    let [hello, locate, lease, renew, release, holds, _copy, clears] = &frames[..8] else {
        unreachable!("a slice of eight")
    };
    let replies = run(async {
        let net = Net::new(23, Faults::none());
        (0..2).for_each(|host| net.start(host, 64, |_| ()));
        assert!(net.link(0, 1));
        let peer = net.session(1);
        let node = net.node(0);
        let serve = async |frame: &[u8]| node.serve(&peer, frame).await;
        let mut replies = vec![serve(hello).await];
        for key in named() {
            net.chunks(0).store(key, 0);
        }
        replies.push(serve(locate).await);
        let leased = serve(lease).await;
        let number = leased[6];
        replies.push(with_lease(leased, 7));
        tokio::time::sleep(Duration::from_secs(1)).await;
        replies.push(serve(&with_lease(renew.clone(), number)).await);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        replies.push(serve(&with_lease(release.clone(), number)).await);
        // A lease is released once.
        replies.push(serve(&with_lease(release.clone(), number)).await);
        replies.push(serve(holds).await);
        replies.push(serve(clears).await);
        replies
    });
    let parsed: Vec<Reply> = replies
        .iter()
        .map(|reply| Reply::from_bytes(reply).expect("a reply"))
        .collect();
    let [
        Reply::Hello(hello),
        Reply::Located(located),
        Reply::Leased(leased),
        Reply::Renewed(true),
        Reply::Released(released),
        Reply::Released(again),
        Reply::Noted(()),
        Reply::Cleared(_),
    ] = &parsed[..]
    else {
        panic!("{parsed:?}");
    };
    assert!(hello.oldest <= 1 && hello.newest >= 1);
    assert!(located.has_all() && located.states.len() == 2);
    let granted = |chunk: &ChunkLease| matches!(chunk, ChunkLease::Granted { .. });
    assert!(leased.chunks.len() == 2 && leased.chunks.iter().all(granted));
    // Its leases have brought the digests.
    assert_eq!(
        (&released.held[..], &released.digests[..]),
        (&[true, true][..], &[][..])
    );
    assert_eq!(again, &Released::default());
    // A reader of version 1 finds its fields where they were.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/conversation-1.txt");
    if std::env::var_os("LMC_WRITE_GOLDEN").is_some() && !std::path::Path::new(path).exists() {
        let hex = |bytes: &Vec<u8>| bytes.iter().map(|b| format!("{b:02x}")).collect();
        let lines: Vec<String> = replies.iter().map(hex).collect();
        std::fs::write(path, lines.join("\n") + "\n").expect("the folder can be written");
    }
    let recorded = std::fs::read_to_string(path).expect("the file is committed");
    let recorded: Vec<Vec<u8>> = recorded.lines().map(from_hex).collect();
    assert_eq!(recorded.len(), replies.len());
    for (recorded, reply) in recorded.iter().zip(&replies) {
        assert_eq!(recorded[..2], reply[..2], "another kind");
        // Versions and features of a hello say what the side speaks now.
        let from = match Reply::from_bytes(reply) {
            Ok(Reply::Hello(_)) => 9,
            _ => 6,
        };
        let kept = reply[from..].starts_with(&recorded[from..]);
        assert!(kept, "{recorded:x?} became {reply:x?}");
    }
    // The frames of the file are requests of version 1 still.
    for frame in &frames[..8] {
        assert!(Request::from_bytes(frame).is_ok());
    }
}
