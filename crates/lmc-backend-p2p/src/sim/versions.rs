//! Peers of other versions of the protocol.

use std::time::Duration;

use lmc_key::{ChunkHash, ChunkKey};

use super::net::{Faults, Net};
use super::{run, space};
use crate::message::{ChunkLease, OLDEST_VERSION, Refusal, Released, Reply, Request, VERSION};

/// A hello of version 1, which was never released. Its body is not one of version 2.
const HELLO_OF_VERSION_1: &str = concat!(
    "01009f00000001010001610d31302e302e302e313a37373030800206626c616b6533030505050505",
    "05050505050505050505050201070707070707070707070707070707070103020202020202020202",
    "02020202020202020001010707070707070707070707070707070701090909090909090909090909",
    "09090909016d02040404040404040404040404040404040462663136000000000000000000000000",
    "0000000000",
);

#[test]
fn a_hello_of_another_version_is_refused_with_the_versions() {
    run(async {
        let net = Net::new(21, Faults::none());
        net.start(0, 64, |_| ());
        net.start(1, 64, |_| ());
        net.start_directory(2, crate::directory::TableLimits::default());
        assert!(net.link(0, 1));
        let (peer, hello) = (net.session(1), from_hex(HELLO_OF_VERSION_1));
        let directory = net.directory(2).expect("a directory");
        let replies = [
            net.node(0).serve(&peer, &hello).await,
            directory.serve(&peer, &hello),
        ];
        let refusal = Refusal::Version {
            oldest: OLDEST_VERSION,
            newest: VERSION,
        };
        for reply in replies {
            let refused = Ok(Reply::Refused(refusal.clone()));
            assert_eq!(Reply::from_bytes(&reply), refused);
        }
    });
}

/// The chunks that the committed frames name.
fn named() -> [ChunkKey; 2] {
    [1, 2].map(|n| ChunkKey {
        space: space(),
        kv_rank: 1,
        group: 2,
        hash: ChunkHash::new([n; 32]),
    })
}

fn from_hex(hex: &str) -> Vec<u8> {
    let digit = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(digit).collect()
}

/// Positions of the number of a lease: in a request, and in the answer that grants the lease.
const LEASE_AT: (usize, usize) = (6, 22);

/// Replaces the number of a lease, which its owner chooses.
fn with_lease(mut frame: Vec<u8>, at: usize, number: u8) -> Vec<u8> {
    // In one byte.
    assert!(frame[at] < 0x80);
    frame[at] = number;
    frame
}

/// A peer of version 2 sends the frames of the committed file, one after the other, and compares
/// the replies with the committed conversation. A reply may have grown at its end.
#[test]
fn a_recorded_conversation_of_version_2_keeps_its_meaning() {
    const FRAMES: &str = include_str!("../../tests/data/version-2.txt");
    let frames: Vec<Vec<u8>> = FRAMES.lines().map(from_hex).collect();
    let [hello, locate, lease, renew, release, holds, _copy, clears] = &frames[..8] else {
        unreachable!("a slice of eight")
    };
    let replies = run(async {
        let net = Net::new(23, Faults::none());
        let Ok(Request::Clears(page)) = Request::from_bytes(clears) else {
            panic!("not a page of clears");
        };
        net.note_clears(0, page.entries);
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
        let number = leased[LEASE_AT.1];
        replies.push(with_lease(leased, LEASE_AT.1, 7));
        tokio::time::sleep(Duration::from_secs(1)).await;
        replies.push(serve(&with_lease(renew.clone(), LEASE_AT.0, number)).await);
        tokio::time::sleep(Duration::from_millis(1500)).await;
        replies.push(serve(&with_lease(release.clone(), LEASE_AT.0, number)).await);
        // A lease is released once.
        replies.push(serve(&with_lease(release.clone(), LEASE_AT.0, number)).await);
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
    assert!(hello.oldest <= 2 && hello.newest >= 2);
    let (located, leased) = (&located.message, &leased.message);
    assert!(located.has_all() && located.states.len() == 2);
    let granted = |chunk: &ChunkLease| matches!(chunk, ChunkLease::Granted { .. });
    assert!(leased.chunks.len() == 2 && leased.chunks.iter().all(granted));
    // Its leases have brought the digests.
    assert_eq!(
        (&released.held[..], &released.digests[..]),
        (&[true, true][..], &[][..])
    );
    assert_eq!(again, &Released::default());
    // A reader of version 2 finds its fields where they were.
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/conversation-2.txt");
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
    // The frames of the file are requests of version 2 still.
    for frame in &frames[..8] {
        assert!(Request::from_bytes(frame).is_ok());
    }
}
