//! A hand-made peer that keeps no rules of the other plane, with NIXL's real library.

use super::*;
use crate::nixl::{BLOCK, NixlBatch, Remote, Sources, TransferPart};
use crate::socket::announcement::Announcement;
use crate::{DataPlane, Keys, NixlConfig};

const LEN: u64 = 100_000;

/// Returns whether there is no library; says so where that is.
fn skipped() -> bool {
    if std::env::var_os("LMC_NIXL_LIBRARY").is_some() {
        return false;
    }
    println!("skipped: LMC_NIXL_LIBRARY names no library of NIXL; `cargo xtask test-nixl` gets it");
    true
}

/// A victim with NIXL.
fn victim() -> Victim {
    victim_with(|_| ())
}

fn victim_with(change: impl FnOnce(&mut SocketConfig)) -> Victim {
    Victim::new(|config| {
        config.channel.keys = Some(keys());
        let nixl = NixlConfig::default().open(&config.channel);
        config.nixl = Some(nixl.expect("NIXL's library"));
        change(config);
    })
}

fn keys() -> Keys {
    key().into()
}

impl Raw {
    /// Connects as a peer with NIXL, and takes the victim's announcement.
    fn with_nixl(victim: &Victim, incarnation: u64) -> (Self, Announcement) {
        Self::with_nixl_and(victim, incarnation, true)
    }

    fn with_nixl_and(victim: &Victim, incarnation: u64, summed: bool) -> (Self, Announcement) {
        let side = Side {
            nixl: true,
            summed,
            keepalive: 60_000,
            ..side()
        };
        let session = Self::handshake_by(victim, incarnation, &side, Some(&key()));
        let mut raw = Self::welcomed(session, victim, incarnation);
        let Frame::Plane(announcement) = raw.frame() else {
            panic!("its memory is registered");
        };
        (raw, announcement)
    }
}

fn key() -> Key {
    Key::new(&[1; 32]).expect("32 bytes")
}

/// Memory of the raw peer: that of a plane under the peer's name.
struct Memory(crate::NixlPlane, Pool);

impl Memory {
    fn new() -> Self {
        let arena = ArenaConfig::anonymous(8 << 20).build().expect("8 MiB");
        let arena = Arc::new(arena);
        let mut channel = ChannelConfig::new(name("raw"), Arc::clone(&arena));
        channel.keys = Some(keys());
        let nixl = NixlConfig::default().open(&channel);
        let pool = Pool::new(arena, PoolConfig::default()).expect("a pool");
        Self(nixl.expect("NIXL's library"), pool)
    }

    fn announcement(&self) -> Announcement {
        block_on(self.0.plane().registered()).into()
    }

    /// Writes bytes of its arena to where a fetch wants them, as an owner does.
    fn write(&self, victim: &Announcement, bytes: &[u8], offset: u64) {
        let plane = self.0.plane();
        let remote = Arc::new(Remote {
            agent: victim.agent.clone(),
            metadata: victim.metadata.clone(),
            base: victim.base,
            len: victim.len,
        });
        let mut slot = self.1.reserve(bytes.len() as u64).expect("capacity");
        slot.bytes_mut().copy_from_slice(bytes);
        let part = TransferPart {
            local: slot.offset(),
            remote: offset,
            len: slot.len(),
        };
        let number = plane.next_number();
        let (done, is_done) = std::sync::mpsc::channel();
        plane.begin(NixlBatch {
            connection: number,
            remote,
            parts: vec![part],
            sources: Sources::default(),
            stopped: Arc::default(),
            report: Box::new(move |report| drop(done.send(report))),
            deadline: soon(),
        });
        let report = is_done.recv().expect("a report");
        assert_eq!((report.error, report.idle), (None, true));
        plane.gone(number);
    }
}

/// Each breaks the protocol, ends that session, and no other.
#[test]
fn false_descriptions_of_memory_end_the_session() {
    if skipped() {
        return;
    }
    let victim = victim();
    let memory = Memory::new();
    let right = memory.announcement();
    let change = |change: fn(&mut Announcement)| {
        let mut announcement = right.clone();
        change(&mut announcement);
        announcement
    };
    let wrong = [
        change(|one| one.agent = "other@0123456789abcdef".to_owned()),
        change(|one| one.agent = "raw@1".to_owned()),
        change(|one| one.metadata = vec![0; crate::nixl::MAX_METADATA + 1]),
        change(|one| one.base = u64::MAX),
    ];
    let count = wrong.len() as u64 + 2;
    for (incarnation, announcement) in (1..).zip(wrong) {
        let (mut raw, _) = Raw::with_nixl(&victim, incarnation);
        raw.send(&Frame::Plane(announcement));
        assert!(raw.finds_it_closed());
    }
    // Twice, and where it was not agreed on.
    let (mut raw, _) = Raw::with_nixl(&victim, 20);
    raw.send(&Frame::Plane(right.clone()));
    raw.send(&Frame::Plane(right.clone()));
    assert!(raw.finds_it_closed());
    let session = Raw::handshake_by(&victim, 21, &side(), Some(&key()));
    let mut raw = Raw::welcomed(session, &victim, 21);
    raw.send(&Frame::Plane(right));
    assert!(raw.finds_it_closed());
    victim.eventually("all are counted", |v| v.channel.stats().broken == count);
    victim.ends();
    drop(memory);
}

/// Metadata that NIXL refuses leaves the session on its streams, and is no hindrance to the right
/// one over a later connection.
#[test]
fn metadata_that_nixl_refuses_leaves_the_sockets() {
    if skipped() {
        return;
    }
    let victim = victim();
    let memory = Memory::new();
    let peer = name("raw");
    let garbage = [vec![], vec![0xff; 100], b"nixlSerDes|".to_vec()];
    let right = memory.announcement().metadata;
    for metadata in garbage.into_iter().chain([right.clone()]) {
        let (mut raw, _) = Raw::with_nixl(&victim, 1);
        let sound = metadata == right;
        raw.send(&Frame::Plane(Announcement {
            metadata,
            ..memory.announcement()
        }));
        let lease = victim
            .channel
            .grant_read(&peer, vec![victim.object(1, LEN)]);
        let lease = lease.expect("it is connected");
        let range = range_of(lease.indices()[0], 0, LEN);
        for id in 1..4 {
            raw.send(&fetch(id, range, 0));
            // The peer's metadata is loaded once.
            match (raw.frame(), sound) {
                (Frame::Unmoved { idle: true, .. }, false) if id == 1 => {}
                (
                    Frame::Answer {
                        outcome: FrameOutcome::NoPlane,
                        ..
                    },
                    false,
                ) if id > 1 => {}
                (Frame::Moved { .. }, true) => {}
                (other, _) => panic!("{other:?}"),
            }
        }
        let ranges = vec![range];
        raw.send(&Frame::Read { id: 9, ranges });
        assert_eq!(raw.frame(), Frame::Data { id: 9 });
        drop(raw);
        block_on(lease.revoke());
        victim.eventually("it is gone", |v| !v.channel.is_connected(&peer));
    }
    victim.ends();
}

/// A victim, and a peer whose memory it knows; `None` where there is no library.
fn reached() -> Option<(Victim, Memory, Raw)> {
    if skipped() {
        return None;
    }
    let (victim, memory) = (victim(), Memory::new());
    let raw = known(&victim, &memory, 1);
    Some((victim, memory, raw))
}

/// Connects as a peer whose memory the victim knows.
fn known(victim: &Victim, memory: &Memory, incarnation: u64) -> Raw {
    let (mut raw, _) = Raw::with_nixl(victim, incarnation);
    raw.send(&Frame::Plane(memory.announcement()));
    victim.eventually("it is reached", is_reached);
    raw
}

fn fetch(id: u64, range: Range, offset: u64) -> Frame {
    Frame::Fetch {
        id,
        ranges: vec![range],
        offset,
        millis: 60_000,
    }
}

/// Ranges that are not leased are refused, whichever plane is asked for; what exceeds the memory that
/// was announced, or a block, ends the session.
#[test]
fn rights_are_those_of_the_session() {
    let Some((victim, memory, mut raw)) = reached() else {
        return;
    };
    let len = (8 << 20) - 4096;
    let lease = victim
        .channel
        .grant_read(&name("raw"), vec![victim.object(1, len)]);
    let lease = lease.expect("it is connected");
    let index = lease.indices()[0];
    let mut other = index;
    other.lease += 1;
    for (id, range) in [(1, range_of(other, 0, LEN)), (2, range_of(index, len, LEN))] {
        raw.send(&fetch(id, range, 0));
        let outcome = FrameOutcome::NotLeased(0);
        assert_eq!(raw.frame(), Frame::Answer { id, outcome });
    }
    // What is leased is written to the peer, with its checksum.
    raw.send(&fetch(3, range_of(index, 0, LEN), 4096));
    let sums = vec![checksum(&vec![1; LEN as usize])];
    assert_eq!(raw.frame(), Frame::Moved { id: 3, sums });
    let last = memory.announcement().len - LEN;
    raw.send(&fetch(4, range_of(index, 0, LEN), last));
    assert!(matches!(raw.frame(), Frame::Moved { id: 4, .. }));
    // Of one that is over, or that never was, nothing is said.
    raw.send(&Frame::Stop { id: 4 });
    raw.send(&Frame::Stop { id: 9 });
    for (incarnation, bytes, offset) in [(2, LEN, last + 1), (3, BLOCK + 1, 0), (4, 1, u64::MAX)] {
        raw.send(&fetch(5, range_of(index, 0, bytes), offset));
        assert!(raw.finds_it_closed());
        victim.eventually("it is counted", |v| {
            v.channel.stats().broken + 1 == incarnation
        });
        raw = known(&victim, &memory, incarnation);
    }
    drop(raw);
    block_on(lease.revoke());
    victim.ends();
}

/// Reads objects of [`LEN`] bytes of the raw peer; `then` answers the fetch, whose number and offset it
/// is given.
fn reads(
    victim: &Victim,
    raw: &mut Raw,
    (objects, millis): (u64, u64),
    then: impl FnOnce(&mut Raw, u64, u64),
) -> Filled {
    let slots = (0..objects).map(|_| victim.slot(0, LEN)).collect();
    let index = |object| Index::arena(raw.incarnation, 100 * object);
    let indices: Vec<Index> = (0..objects).map(index).collect();
    let peer = name("raw");
    thread::scope(|scope| {
        let reading = victim.channel.read(slots, &peer, &indices, after(millis));
        let reading = scope.spawn(|| block_on(reading));
        let Frame::Fetch { id, offset, .. } = raw.frame() else {
            panic!("it asks for a read");
        };
        then(raw, id, offset);
        reading.join().expect("no panic")
    })
}

/// Answers a read of this number of objects over the streams.
fn serve(raw: &mut Raw, objects: usize, byte: u8) {
    let Frame::Read { id, ranges } = raw.frame() else {
        panic!("it reads over the streams");
    };
    assert_eq!(ranges.len(), objects);
    raw.send(&Frame::Data { id });
    let bytes = vec![byte; LEN as usize];
    for _ in ranges {
        raw.pay(&bytes, checksum(&bytes));
    }
}

fn check(filled: Filled, by: DataPlane, expected: &[u8]) {
    assert_eq!(filled.by, by);
    let slots = filled.into_result().expect("all of it came");
    assert_eq!(slots.len(), expected.len());
    for (slot, byte) in slots.iter().zip(expected) {
        assert!(slot.bytes().iter().all(|one| one == byte));
    }
}

/// Answers of a peer that keeps no rules: each ends the session, and the call with all its slots.
#[test]
fn answers_that_break_the_protocol_end_the_session() {
    if skipped() {
        return;
    }
    let victim = victim();
    let memory = Memory::new();
    let moved = |id, sums: &[u64]| Frame::Moved {
        id,
        sums: sums.to_vec(),
    };
    let answer = |id, outcome| Frame::Answer { id, outcome };
    let answers: [&dyn Fn(u64) -> Frame; 8] = [
        &|id| moved(id, &[]),
        &|id| moved(id, &[1, 2]),
        &|id| moved(id + 1, &[1]),
        &|id| Frame::Data { id },
        &|id| Frame::Unmoved {
            id: id + 1,
            idle: true,
            reason: String::new(),
        },
        &|id| {
            Frame::Plane(Announcement {
                agent: format!("raw@{id:016x}"),
                ..memory.announcement()
            })
        },
        &|id| answer(id, FrameOutcome::Done),
        &|id| answer(id + 1, FrameOutcome::NoPlane),
    ];
    for (incarnation, answer) in (1..).zip(answers) {
        let mut raw = known(&victim, &memory, incarnation);
        let filled = reads(&victim, &mut raw, (1, 60_000), |raw, id, _| {
            raw.send(&answer(id));
            assert!(finds_it_closed(&mut raw.stream));
        });
        let gone = matches!(filled.error, Some(TransferError::PeerGone { .. }));
        assert!(gone, "{filled:?}");
        assert!(matches!(filled.slots[..], [Slot::Idle(_)]));
        drop(filled);
        let peer = name("raw");
        victim.eventually("it is gone", |v| !v.channel.is_connected(&peer));
    }
    victim.ends();
}

/// Bytes that a peer has written are copied and checked; where they are not what the peer says, they
/// are read again over the streams.
#[test]
fn what_a_peer_writes_is_checked_when_it_is_copied() {
    if skipped() {
        return;
    }
    for summed in [true, false] {
        let victim = victim_with(|config| config.channel.object_checksums = summed);
        let memory = Memory::new();
        let (mut raw, there) = Raw::with_nixl_and(&victim, 1, summed);
        raw.send(&Frame::Plane(memory.announcement()));
        victim.eventually("it is reached", is_reached);
        let bytes = [vec![7; LEN as usize], vec![9; LEN as usize]];
        let sums = bytes.each_ref().map(|bytes| checksum(bytes));
        let moved = |id, sums: &[u64]| Frame::Moved {
            id,
            sums: if summed { sums.to_vec() } else { Vec::new() },
        };
        let filled = reads(&victim, &mut raw, (2, 60_000), |raw, id, offset| {
            memory.write(&there, &bytes.concat(), offset);
            raw.send(&moved(id, &sums));
        });
        check(filled, DataPlane::Nixl, &[7, 9]);
        if summed {
            let filled = reads(&victim, &mut raw, (2, 60_000), |raw, id, offset| {
                memory.write(&there, &vec![7; 2 * LEN as usize], offset);
                raw.send(&moved(id, &sums));
                serve(raw, 2, 5);
            });
            check(filled, DataPlane::Sockets, &[5, 5]);
            assert_eq!(victim.channel.stats().corrupt, 1);
        }
        drop(raw);
        victim.ends();
    }
}

fn is_reached(victim: &Victim) -> bool {
    victim.channel.data_plane(&name("raw")) == Some(DataPlane::Nixl)
}

/// Number of blocks that the peer may be asked to write to.
fn blocks(victim: &Victim) -> usize {
    let plane = victim.channel.shared.plane().expect("it has NIXL");
    let take = || plane.blocks().take(&name("raw")).ok();
    std::iter::from_fn(take).collect::<Vec<_>>().len()
}

/// A peer that writes after its read was given up: no slot of a read is ever in its reach, and what it
/// may write to rests until the peer has said that it writes no more.
#[test]
fn a_late_write_changes_nothing() {
    if skipped() {
        return;
    }
    late_write(true);
    late_write(false);
}

fn late_write(idle: bool) {
    let victim = victim();
    let memory = Memory::new();
    let (mut raw, there) = Raw::with_nixl(&victim, 1);
    raw.send(&Frame::Plane(memory.announcement()));
    victim.eventually("it is reached", is_reached);
    let all = blocks(&victim);
    let mut late = None;
    let filled = reads(&victim, &mut raw, (1, 400), |raw, id, offset| {
        assert_eq!(raw.frame(), Frame::Stop { id });
        let Frame::Read { .. } = raw.frame() else {
            panic!("it reads over the streams");
        };
        late = Some((id, offset));
    });
    assert_eq!(filled.error, Some(TransferError::Deadline));
    assert!(matches!(filled.slots[..], [Slot::Idle(_)]));
    drop(filled);
    assert_eq!(victim.pool.usage().slots, 0);
    let (id, offset) = late.expect("it was asked");
    let whole = victim.slot(3, victim.pool.usage().largest_free);
    memory.write(&there, &vec![6; LEN as usize], offset);
    let whole = whole.written();
    assert!(whole.bytes().iter().all(|byte| *byte == 3));
    drop(whole);
    // The peer has not answered: the block is the request's.
    assert_eq!(blocks(&victim), all - 1);
    raw.send(&Frame::Unmoved {
        id,
        idle,
        reason: "late".to_owned(),
    });
    let free = if idle { all } else { all - 1 };
    raw.send(&Frame::Ping(7));
    while raw.any_frame() != Frame::Pong(7) {}
    assert_eq!(
        blocks(&victim),
        free,
        "it rests where the peer may still write"
    );
    drop(raw);
    victim.ends();
}

/// A call whose fetch is not answered has the time left that the streams need.
#[test]
fn a_plane_that_hangs_leaves_time_for_the_streams() {
    let Some((victim, _memory, mut raw)) = reached() else {
        return;
    };
    let filled = reads(&victim, &mut raw, (2, 20_000), |raw, id, _| {
        assert_eq!(raw.frame(), Frame::Stop { id });
        serve(raw, 2, 4);
    });
    check(filled, DataPlane::Sockets, &[4, 4]);
    drop(raw);
    victim.ends();
}

/// A peer that has no plane, or whose NIXL fails: what it has not written is read over the streams, in
/// the same call and under the same lease.
#[test]
fn a_read_goes_on_over_the_streams() {
    let Some((victim, _memory, mut raw)) = reached() else {
        return;
    };
    let filled = reads(&victim, &mut raw, (2, 60_000), |raw, id, _| {
        let outcome = FrameOutcome::NoPlane;
        raw.send(&Frame::Answer { id, outcome });
        serve(raw, 2, 9);
    });
    check(filled, DataPlane::Sockets, &[9, 9]);
    // It may have it a moment later.
    victim.eventually("it is asked again", is_reached);
    let filled = reads(&victim, &mut raw, (2, 60_000), |raw, id, _| {
        raw.send(&Frame::Unmoved {
            id,
            idle: true,
            reason: "it failed".to_owned(),
        });
        serve(raw, 2, 8);
    });
    check(filled, DataPlane::Sockets, &[8, 8]);
    assert!(!is_reached(&victim));
    drop(raw);
    victim.ends();
}

/// A read that its owner refuses is not tried over the streams.
#[test]
fn a_refusal_ends_a_read_on_either_plane() {
    let Some((victim, _memory, mut raw)) = reached() else {
        return;
    };
    let filled = reads(&victim, &mut raw, (2, 60_000), |raw, id, _| {
        let outcome = FrameOutcome::NotLeased(1);
        raw.send(&Frame::Answer { id, outcome });
    });
    let error = Some(TransferError::NotLeased { object: 1 });
    assert_eq!(filled.error, error);
    assert!(
        filled
            .slots
            .iter()
            .all(|slot| matches!(slot, Slot::Idle(_)))
    );
    drop(filled);
    assert!(is_reached(&victim));
    drop(raw);
    victim.ends();
}

/// A fetch has one answer, also where it is given up while it is served.
#[test]
fn each_fetch_has_one_answer() {
    let Some((victim, _memory, mut raw)) = reached() else {
        return;
    };
    let len = 4 << 20;
    let lease = victim
        .channel
        .grant_read(&name("raw"), vec![victim.object(1, len)]);
    let lease = lease.expect("it is connected");
    let range = range_of(lease.indices()[0], 0, len);
    for id in 1..50 {
        let both = [
            raw.bytes_of(&fetch(id, range, 0)),
            raw.bytes_of(&Frame::Stop { id }),
            raw.bytes_of(&Frame::Ping(id)),
        ];
        raw.stream.write_all(&both.concat()).expect("sent");
        let (mut answers, mut ponged) = (0, false);
        while answers == 0 || !ponged {
            match raw.any_frame() {
                Frame::Moved { id: of, .. } | Frame::Unmoved { id: of, .. } => {
                    assert_eq!(of, id);
                    answers += 1;
                }
                Frame::Pong(of) => ponged |= of == id,
                Frame::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(answers, 1);
    }
    drop(raw);
    block_on(lease.revoke());
    victim.ends();
}

/// A side that encrypts objects never announces memory.
#[test]
fn encrypted_objects_have_no_other_plane() {
    if skipped() {
        return;
    }
    let victim = victim();
    let side = Side {
        nixl: true,
        sealed: true,
        ..side()
    };
    let session = Raw::handshake_by(&victim, 1, &side, Some(&key()));
    let mut raw = Raw::welcomed(session, &victim, 1);
    raw.send(&Frame::Read {
        id: 1,
        ranges: vec![range(1 << 40, 1)],
    });
    let outcome = FrameOutcome::NotLeased(0);
    assert_eq!(raw.frame(), Frame::Answer { id: 1, outcome });
    assert!(!is_reached(&victim));
    raw.send(&Frame::Plane(Memory::new().announcement()));
    assert!(raw.finds_it_closed());
    victim.ends();
}
