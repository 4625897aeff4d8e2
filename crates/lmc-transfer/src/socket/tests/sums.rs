//! Checksums of objects: of pieces on their way, and of whole objects that a read leaves with them.

use lmc_memory::WrittenSlot;

use super::*;

fn without_sums(config: &mut SocketConfig) {
    config.channel.object_checksums = false;
}

/// Reads objects of these lengths over one stream, and returns those whose slots have a checksum.
#[track_caller]
fn summed(lens: &[u64], change: fn(&mut SocketConfig)) -> Vec<bool> {
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
    let lease = owner.channel.grant_read(&name("reader"), objects);
    let lease = lease.expect("it is connected");
    let slots = lens.iter().map(|len| reader.slot(0, *len)).collect();
    let read = block_on(reader.channel.read(slots, &to, lease.indices(), soon()));
    let read = read.into_result().expect("it is read");
    let summed = |(byte, slot): (u8, &WrittenSlot)| {
        assert!(slot.bytes().iter().all(|&found| found == byte));
        let sum = slot.known_checksum();
        if let Some(sum) = sum {
            assert_eq!(sum, checksum(slot.bytes()));
        }
        sum.is_some()
    };
    (3..).zip(&read).map(summed).collect()
}

#[test]
fn a_read_without_sums_on_the_way_leaves_those_of_whole_objects() {
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
    assert_eq!(summed(&lens, without_sums), all_but_one);
    assert_eq!(summed(&lens, |_| {}), [false; 6]);
    let sealed = |config: &mut SocketConfig| {
        without_sums(config);
        config.channel.encrypt_objects = true;
    };
    assert_eq!(summed(&lens, sealed), [false; 6]);
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
