//! Checksums of objects: of pieces on their way, and of whole objects that a read leaves with them.

use lmc_memory::{SealedSlot, WrittenSlot};

use super::*;

fn without_sums(config: &mut SocketConfig) {
    config.channel.object_checksums = false;
}

/// Reads objects of these lengths over one stream, and returns those whose slots have a checksum,
/// at the reader and at the owner.
#[track_caller]
fn summed(lens: &[u64], change: fn(&mut SocketConfig)) -> [Vec<bool>; 2] {
    let owner = Victim::new(change);
    let reader = Victim::new(|config| {
        config.channel.id = name("reader");
        config.streams = 1;
        change(config);
    });
    let to = name("victim");
    let at = local(owner.port());
    let connected = reader.channel.connect(&to, &at, None, soon());
    block_on(connected).expect("it listens");
    let objects: Vec<_> = (3..)
        .zip(lens)
        .map(|(byte, len)| owner.object(byte, *len))
        .collect();
    let lease = owner.channel.grant_read(&name("reader"), objects.clone());
    let lease = lease.expect("it is connected");
    let slots = lens.iter().map(|len| reader.slot(0, *len)).collect();
    let read = block_on(reader.channel.read(slots, &to, lease.indices(), soon()));
    let read = read.into_result().expect("it is read");
    let is_right = |bytes: &[u8], sum: Option<u64>| {
        assert!(sum.is_none_or(|sum| sum == checksum(bytes)));
        sum.is_some()
    };
    let summed = |(byte, slot): (u8, &WrittenSlot)| {
        assert!(slot.bytes().iter().all(|&found| found == byte));
        is_right(slot.bytes(), slot.known_checksum())
    };
    let sent = |slot: &SealedSlot| is_right(slot.bytes(), slot.known_checksum());
    [
        (3..).zip(&read).map(summed).collect(),
        objects.iter().map(sent).collect(),
    ]
}

#[test]
fn a_read_without_sums_on_the_way_leaves_those_of_whole_objects_at_both_sides() {
    // A last piece that is too short to be added is left to the reader of the slot.
    let lens = [
        1,
        4096,
        256 << 10,
        (256 << 10) + 500,
        (512 << 10) + 1024,
        1 << 20,
    ];
    let all_but_one = [true, true, true, false, true, true];
    assert_eq!(summed(&lens, without_sums), [all_but_one; 2]);
    assert_eq!(summed(&lens, |_| {}), [[false; 6]; 2]);
    let sealed = |config: &mut SocketConfig| {
        without_sums(config);
        config.channel.encrypt_objects = true;
    };
    assert_eq!(summed(&lens, sealed), [[false; 6], all_but_one]);
}

/// A peer may read any ranges of what it leases.
#[test]
fn parts_of_an_object_leave_no_sum() {
    let owner = Victim::new(without_sums);
    let mut raw = Raw::connect_without_sums(&owner, 1);
    let len = 512 << 10;
    let object = owner.object(7, len);
    let lease = owner.channel.grant_read(&name("raw"), vec![object.clone()]);
    let lease = lease.expect("it is connected");
    let part = |offset, len| Range {
        region: Region::Lease(lease.indices()[0].lease),
        slot: 0,
        offset,
        len,
    };
    let parts = [
        part(0, 1000),
        part(0, 1024),
        part(1024, 2048),
        part(2048, len - 2048),
    ];
    let ranges = parts.to_vec();
    raw.send(&Frame::Read { id: 1, ranges });
    assert_eq!(raw.frame(), Frame::Data { id: 1 });
    // Two pieces are the longest part.
    for piece in [1000, 1024, 2048, 256 << 10, (256 << 10) - 2048] {
        let head = raw.bytes(PieceHead::LEN).try_into().expect("a head");
        assert_eq!(PieceHead::decode(head).len as usize, piece);
        assert_eq!(raw.bytes(piece), vec![7; piece]);
    }
    assert_eq!(object.known_checksum(), None);
    drop((lease, object, raw));
    owner.ends();
}

#[test]
fn pieces_have_checksums_where_one_side_wants_them() {
    let victim = Victim::new(without_sums);
    // It wants them.
    let mut raw = Raw::connect(&victim, 1);
    let good = [7; 4096];
    let filled = reading(&victim, &mut raw, soon(), |raw, id| {
        raw.send(&Frame::Data { id });
        raw.pay(&good, checksum(&good));
        raw.pay(&good, 0);
    });
    assert_eq!(filled.error, Some(TransferError::Corrupt { object: 1 }));
    drop(filled);
    victim.ends();
}
