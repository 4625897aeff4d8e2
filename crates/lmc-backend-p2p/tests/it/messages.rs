//! The peer protocol's bytes: committed ones stay readable, others are refused.

use lmc_backend::{Clears, StartId};
use lmc_backend_p2p::directory::{
    Announce, Announced, Candidate, Find, Fingerprint, Found, MAX_ANNOUNCED, SetDigest,
};
use lmc_backend_p2p::message::{
    ChunkLease, ChunkState, ClearsPage, Describe, Described, Hello, Holder, KeyBatch, Lease,
    Leased, Located, MAX_BODY, MAX_KEYS, MAX_PAGES, MessageError, OLDEST_VERSION, PAGE_ENTRIES,
    Push, Pushed, Refusal, Release, Released, Renew, Reply, Request, SpaceNote, Stamped, VERSION,
};
use lmc_key::{ChunkHash, ChunkKey, ClearsId, SpaceId};
use lmc_transfer::Index;
use proptest::prelude::*;

fn key(n: u8) -> ChunkKey {
    ChunkKey {
        space: SpaceId::new([7; 16]).after(clears()),
        kv_rank: 1,
        group: 2,
        hash: ChunkHash::new([n; 32]),
    }
}

fn batch() -> KeyBatch {
    let (batch, len) = KeyBatch::leading(&[key(1), key(2)]).expect("there are keys");
    assert_eq!(len, 2);
    batch
}

fn clears() -> ClearsId {
    map(0..2).id()
}

fn stamped<T>(message: T) -> Stamped<T> {
    Stamped::new(clears(), message)
}

/// Returns a map in which each of these numbers names a process with one clear more than the number.
fn map(processes: std::ops::Range<u64>) -> Clears {
    let entry = |n: u64| {
        let mut id = [7; 16];
        id[..8].copy_from_slice(&n.to_be_bytes());
        (StartId::new(id), n + 1)
    };
    Clears::from_entries(processes.map(entry)).expect("numbered once")
}

fn page() -> ClearsPage {
    ClearsPage::of(&map(0..2), clears(), 0)
}

fn hello() -> Hello {
    Hello {
        oldest: OLDEST_VERSION,
        newest: VERSION,
        features: 0,
        name: "a".into(),
        address: "10.0.0.1:7700".into(),
        chunk_size: 256,
        algorithm: "blake3".into(),
        clears: clears(),
        spaces: vec![SpaceNote {
            space: [9; 16],
            model: "m".into(),
            world_size: 2,
            layout: [4; 16],
            dtype: "bf16".into(),
            salt: [0; 16],
            identity: String::new(),
        }],
        is_draining: false,
    }
}

fn lease() -> Lease {
    Lease {
        keys: batch(),
        duration_ms: 2000,
        wait_ms: 200,
    }
}

fn leased() -> Leased {
    Leased {
        lease: 7,
        duration_ms: 2000,
        chunks: vec![
            ChunkLease::Absent,
            ChunkLease::Busy,
            ChunkLease::Granted {
                index: Index::arena(11, 12),
                len: 300,
                digest: 0x0123_4567_89ab_cdef,
            },
        ],
        holders: vec![Holder {
            address: "10.0.0.2:7700".into(),
        }],
    }
}

fn announce() -> Announce {
    let fingerprint = |n| Fingerprint::of(&key(n));
    Announce {
        generation: 2,
        sequence: 3,
        added: [1, 2].map(fingerprint).into_iter().collect(),
        removed: [3].map(fingerprint).into_iter().collect(),
        digest: Some(SetDigest { count: 2, xor: 5 }),
    }
}

fn requests() -> Vec<Request> {
    vec![
        Request::Hello(hello()),
        Request::Locate(stamped(batch())),
        Request::Lease(stamped(lease())),
        Request::Renew(Renew {
            lease: 7,
            duration_ms: 2000,
        }),
        Request::Release(Release { lease: 7 }),
        Request::Holds(stamped(batch())),
        Request::Copy(stamped(batch())),
        Request::Clears(page()),
        Request::Announce(stamped(announce())),
        Request::Find(stamped(Find {
            keys: announce().added,
        })),
        Request::Describe(Describe { digest: 300 }),
        Request::Locate(stamped(awaiting())),
        Request::Push(stamped(Push {
            keys: batch(),
            chunk_bytes: 300,
            parent: None,
        })),
        Request::Push(stamped(Push {
            keys: batch(),
            chunk_bytes: 300,
            parent: Some([3; 32]),
        })),
    ]
}

fn awaiting() -> KeyBatch {
    let mut batch = batch();
    batch.awaited = Some("request".into());
    batch
}

fn replies() -> Vec<Reply> {
    vec![
        Reply::Hello(hello()),
        Reply::Located(stamped(Located {
            states: vec![
                ChunkState::Absent,
                ChunkState::Writing,
                ChunkState::Memory { len: 300 },
                ChunkState::Disk { len: 5 },
            ],
            load: 17,
            is_over: false,
        })),
        Reply::Leased(stamped(leased())),
        Reply::Renewed(true),
        Reply::Released(Released {
            held: vec![true, false],
            digests: Vec::new(),
        }),
        Reply::Noted(()),
        Reply::Copying(2),
        Reply::Cleared(page()),
        Reply::Announced(stamped(Announced::Applied)),
        Reply::Announced(stamped(Announced::Restart { known: 7 })),
        Reply::Announced(stamped(Announced::Busy)),
        Reply::Announced(stamped(Announced::Full { limit: 300 })),
        Reply::Found(stamped(Found {
            settled: true,
            candidates: vec![Candidate {
                peer: "a-1".into(),
                address: "10.0.0.1:7700".into(),
            }],
        })),
        Reply::Described(Described {
            digest: 300,
            chunks: 5,
            bytes: 301,
            pool: 302,
            spaces: hello().spaces,
            is_draining: false,
        }),
        Reply::Refused(Refusal::Version {
            oldest: 1,
            newest: 2,
        }),
        Reply::Refused(Refusal::ChunkSize(256)),
        Reply::Refused(Refusal::Algorithm("blake3".into())),
        Reply::Refused(Refusal::NoHello),
        Reply::Refused(Refusal::Malformed),
        Reply::Refused(Refusal::TooMany),
        Reply::Refused(Refusal::Closing),
        Reply::Unsupported(99),
        Reply::Released(Released {
            held: vec![true, false],
            digests: vec![300, u64::MAX],
        }),
        Reply::Located(stamped(Located {
            states: vec![ChunkState::Absent],
            load: 0,
            is_over: true,
        })),
        Reply::Pushed(Pushed {
            chunks: 2,
            is_wanted: true,
        }),
        Reply::Hello(Hello {
            is_draining: true,
            ..hello()
        }),
        Reply::Described(Described {
            digest: 1,
            is_draining: true,
            ..Described::default()
        }),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// One line for each message of version 2. A change of this file is a change of the protocol.
#[test]
fn the_bytes_of_version_2_stay_as_they_are() {
    let requests = requests();
    let replies = replies();
    let asked = requests.iter().map(|m| m.to_bytes().expect("it fits"));
    let answered = replies.iter().map(|m| m.to_bytes().expect("it fits"));
    let lines: String = asked
        .chain(answered)
        .map(|bytes| hex(&bytes) + "\n")
        .collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/version-2.txt");
    if std::env::var_os("LMC_WRITE_GOLDEN").is_some() {
        std::fs::write(path, &lines).expect("the folder can be written");
    }
    let golden = std::fs::read_to_string(path).expect("the file is committed");
    assert_eq!(lines, golden);
    for request in requests {
        let bytes = request.to_bytes().expect("it fits");
        assert_eq!(Request::from_bytes(&bytes), Ok(request));
    }
    for reply in replies {
        let bytes = reply.to_bytes().expect("it fits");
        assert_eq!(Reply::from_bytes(&bytes), Ok(reply));
    }
}

/// Returns the frame with more at the end of its body, as a newer peer would send it.
fn longer(frame: &[u8], more: &[u8]) -> Vec<u8> {
    let mut frame = [frame, more].concat();
    let len = (frame.len() - 6) as u32;
    frame[2..6].copy_from_slice(&len.to_le_bytes());
    frame
}

#[test]
fn what_a_newer_peer_adds_at_the_end_is_ignored() {
    for request in requests() {
        let bytes = request.to_bytes().expect("it fits");
        let found = Request::from_bytes(&longer(&bytes, b"a field of version 3"));
        assert_eq!(found, Ok(request));
    }
    for reply in replies() {
        let bytes = reply.to_bytes().expect("it fits");
        assert_eq!(Reply::from_bytes(&longer(&bytes, &[0xff; 9])), Ok(reply));
    }
}

#[test]
fn a_kind_of_a_newer_peer_is_named() {
    let frame = [99, 0, 1, 0, 0, 0, 5];
    assert_eq!(Request::from_bytes(&frame), Err(MessageError::Kind(99)));
    // A reply is no request, and the other way round.
    let reply = Reply::Renewed(true).to_bytes().expect("it fits");
    assert!(matches!(
        Request::from_bytes(&reply),
        Err(MessageError::Kind(_))
    ));
    let request = Request::Release(Release { lease: 1 }).to_bytes();
    let found = Reply::from_bytes(&request.expect("it fits"));
    assert!(matches!(found, Err(MessageError::Kind(_))));
}

#[test]
fn what_exceeds_a_bound_is_refused() {
    let keys: Vec<ChunkKey> = (0..=MAX_KEYS).map(|n| key(n as u8)).collect();
    let (batch, len) = KeyBatch::leading(&keys).expect("there are keys");
    assert_eq!((batch.len(), len), (MAX_KEYS, MAX_KEYS));
    let holds = Request::Holds(stamped(batch));
    let most = holds.to_bytes().expect("it fits");
    assert!(most.len() < MAX_BODY);
    assert_eq!(Request::from_bytes(&most), Ok(holds));
    let other = ChunkKey { group: 3, ..key(3) };
    let (_, len) = KeyBatch::leading(&[key(1), other]).expect("there are keys");
    assert_eq!(len, 1, "one batch has one group");
    let states = vec![ChunkState::Absent; MAX_KEYS + 1];
    let located = stamped(Located {
        states,
        load: 0,
        is_over: false,
    });
    let bytes = Reply::Located(located).to_bytes().expect("it fits");
    assert_eq!(
        Reply::from_bytes(&bytes),
        Err(MessageError::Bounds("states"))
    );
    let mut long = hello();
    long.name = "n".repeat(257);
    let bytes = Request::Hello(long).to_bytes().expect("it fits");
    assert_eq!(
        Request::from_bytes(&bytes),
        Err(MessageError::Bounds("text"))
    );
    let many = |n: usize| (0..n).map(|n| Fingerprint::of(&key(n as u8))).collect();
    let most = Request::Announce(stamped(Announce {
        added: many(MAX_ANNOUNCED),
        removed: many(MAX_ANNOUNCED),
        ..announce()
    }));
    let bytes = most.to_bytes().expect("it fits");
    assert_eq!(Request::from_bytes(&bytes), Ok(most));
    for more in [
        Request::Announce(stamped(Announce {
            added: many(MAX_ANNOUNCED + 1),
            ..announce()
        })),
        Request::Find(stamped(Find {
            keys: many(MAX_KEYS + 1),
        })),
    ] {
        let bytes = more.to_bytes().expect("it fits");
        let refused = Err(MessageError::Bounds("fingerprints"));
        assert_eq!(Request::from_bytes(&bytes), refused);
    }
    let giant = [1, 0, 0xff, 0xff, 0xff, 0xff];
    assert!(matches!(
        Request::from_bytes(&giant),
        Err(MessageError::TooLong(_))
    ));
}

#[test]
fn the_largest_map_of_clears_fits_into_its_pages() {
    let most = Clears::MAX_STARTS as u64;
    let most = map(u64::MAX - most - 1..u64::MAX - 1);
    let id = most.id();
    let mut joined = Clears::default();
    for number in 0..MAX_PAGES {
        let page = Request::Clears(ClearsPage::of(&most, id, number));
        let bytes = page.to_bytes().expect("it fits");
        assert_eq!(Request::from_bytes(&bytes), Ok(page));
        let Ok(Request::Clears(page)) = Request::from_bytes(&bytes) else {
            unreachable!("it was compared");
        };
        assert_eq!((page.page, page.pages), (number, MAX_PAGES));
        joined.join(&page.entries).expect("no more than the map");
    }
    assert_eq!(joined, most);
}

#[test]
fn a_page_of_clears_says_that_they_are_not_noted_and_else_nothing() {
    let volatile = Reply::Cleared(ClearsPage {
        is_volatile: true,
        ..page()
    });
    let noted = Reply::Cleared(page()).to_bytes().expect("it fits");
    let bytes = volatile.to_bytes().expect("it fits");
    assert_eq!(bytes, longer(&noted, &[1]));
    assert_eq!(Reply::from_bytes(&bytes), Ok(volatile));
}

#[test]
fn pages_of_clears_that_contradict_themselves_are_refused() {
    let full = ClearsPage::of(&map(0..PAGE_ENTRIES as u64), clears(), 0);
    let none = ClearsPage::of(&Clears::default(), ClearsId::NONE, 0);
    let cases = [
        // Behind the last page that a map can have.
        ClearsPage {
            page: MAX_PAGES,
            pages: MAX_PAGES,
            ..none.clone()
        },
        ClearsPage {
            pages: MAX_PAGES + 1,
            ..full.clone()
        },
        // Entries behind the last page, and a page without any.
        ClearsPage {
            page: 1,
            ..full.clone()
        },
        ClearsPage {
            pages: 0,
            ..full.clone()
        },
        ClearsPage { pages: 1, ..none },
        ClearsPage {
            entries: map(0..PAGE_ENTRIES as u64 + 1),
            ..full
        },
    ];
    for page in cases {
        let bytes = Request::Clears(page).to_bytes().expect("it fits");
        let refused = Err(MessageError::Bounds("clears"));
        assert_eq!(Request::from_bytes(&bytes), refused);
    }
    // No clears of a process, and a process twice.
    let bytes = Request::Clears(page()).to_bytes().expect("it fits");
    let entry = 16 + 1;
    let first = bytes.len() - 2 * entry;
    let mut zero = bytes.clone();
    zero[first + 16] = 0;
    let twice = [&bytes[..first + entry], &bytes[first..first + entry]].concat();
    for bytes in [zero, twice] {
        assert_eq!(Request::from_bytes(&bytes), Err(MessageError::Body(8)));
    }
}

proptest! {
    #[test]
    fn any_bytes_are_parsed_or_refused(
        kind in 0u16..12,
        reply in any::<bool>(),
        body in proptest::collection::vec(any::<u8>(), 0..300),
    ) {
        let kind = if reply { kind | 0x8000 } else { kind };
        let mut frame = kind.to_le_bytes().to_vec();
        frame.extend((body.len() as u32).to_le_bytes());
        frame.extend(body);
        if let Ok(request) = Request::from_bytes(&frame) {
            let again = Request::from_bytes(&request.to_bytes().expect("it fits"));
            prop_assert_eq!(again, Ok(request));
        }
        if let Ok(reply) = Reply::from_bytes(&frame) {
            let again = Reply::from_bytes(&reply.to_bytes().expect("it fits"));
            prop_assert_eq!(again, Ok(reply));
        }
    }
}
