//! The suite over channels of one process, and what is theirs alone.

mod support;
use support::MemoryRig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ArenaConfig, Pool, PoolConfig};
use lmc_transfer::conformance::{check_value, fill_value};
use lmc_transfer::{
    Blocking, ChannelConfig, ConnectError, MemoryChannel, MemoryError, MemoryHub, Rights,
    TransferChannel, block_on,
};

lmc_transfer::conformance!(MemoryRig::new());

fn arena() -> Arc<Arena> {
    let arena = ArenaConfig::anonymous(1 << 20).build();
    Arc::new(arena.expect("a test machine has 1 MiB"))
}

fn open(hub: &MemoryHub, name: &str, id: &str) -> Result<MemoryChannel, MemoryError> {
    let id = id.parse().expect("a name");
    hub.channel(name, ChannelConfig::new(id, arena()))
}

/// Two channels at different addresses have one name: it means the first, as long as that is there.
#[test]
fn a_name_in_use_is_not_taken_over() {
    let hub = MemoryHub::new().expect("a thread");
    let open = |name, id| open(&hub, name, id).expect("the name is free");
    let (a, old, new) = (open("a", "a"), open("old", "b"), open("new", "b"));
    let deadline = Instant::now() + Duration::from_secs(10);
    let connect = |b: &MemoryChannel| Blocking::new(b).connect(a.id(), a.address(), None, deadline);
    connect(&old).expect("a is there");
    let refused = connect(&new);
    assert!(
        matches!(refused, Err(ConnectError::Refused(_))),
        "{refused:?}"
    );
    assert_eq!(a.peer_incarnation(old.id()), Some(old.incarnation()));
    drop(old);
    connect(&new).expect("the name is free");
    assert_eq!(a.peer_incarnation(new.id()), Some(new.incarnation()));
    drop(new);
    assert!(!a.is_connected(&"b".parse().expect("a name")));
}

/// A channel may be connected to itself.
#[test]
fn a_channel_is_its_own_peer() {
    let hub = MemoryHub::new().expect("a thread");
    let arena = arena();
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).expect("a pool");
    let id = "a".parse().expect("a name");
    let mut config = ChannelConfig::new(id, arena);
    config.rights = Rights::ReadWrite;
    let a = hub.channel("a", config).expect("the name is free");
    let itself = Blocking::new(&a);
    let deadline = Instant::now() + Duration::from_secs(10);
    let connected = itself.connect(a.id(), a.address(), None, deadline);
    connected.expect("it is there");
    let mut slot = pool.reserve(300_000).expect("capacity");
    fill_value(1, 0, slot.bytes_mut());
    let target = pool.reserve(300_000).expect("capacity");
    let lease = a
        .grant_write(a.id(), vec![target])
        .expect("it is connected");
    let written = vec![slot.written().seal()];
    let sent = itself.write(written, a.id(), lease.indices(), deadline);
    assert_eq!(sent.into_result(), Ok(1));
    let target = block_on(lease.revoke()).remove(0).written().seal();
    assert_eq!(check_value(1, 0, target.bytes()), Ok(()));
    let lease = a.grant_read(a.id(), vec![target]).expect("it is connected");
    let copy = pool.reserve(300_000).expect("capacity");
    let read = itself.read(vec![copy], a.id(), lease.indices(), deadline);
    let read = read.into_result().expect("it is there");
    assert_eq!(check_value(1, 0, read[0].bytes()), Ok(()));
    assert_eq!(itself.close(deadline), Ok(()));
}

#[test]
fn names_and_units_are_checked() {
    let hub = MemoryHub::new().expect("a thread");
    let first = open(&hub, "x", "a").expect("the name is free");
    assert!(matches!(open(&hub, "x", "b"), Err(MemoryError::Taken(name)) if name == "x"));
    drop(first);
    let again = open(&hub, "x", "b").expect("the name is free again");
    drop(again);
    let mut config = ChannelConfig::new("a".parse().expect("a name"), arena());
    for unit in [0, 3, 4097] {
        config.unit = unit;
        let refused = hub.channel("y", config.clone());
        assert!(matches!(refused, Err(MemoryError::Config(error)) if error.name == "unit"));
    }
}

/// The hub's thread ends with the last that needs it.
#[test]
fn a_hub_ends_with_its_channels() {
    let hub = MemoryHub::new().expect("a thread");
    let a = open(&hub, "a", "a").expect("the name is free");
    let arena = arena();
    let config = ChannelConfig::new("b".parse().expect("a name"), Arc::clone(&arena));
    let b = hub.channel("b", config).expect("the name is free");
    drop(hub);
    let deadline = Instant::now() + Duration::from_secs(10);
    let connected = Blocking::new(&a).connect(b.id(), b.address(), None, deadline);
    connected.expect("the hub lives on in its channels");
    drop((a, b));
    assert_eq!(Arc::strong_count(&arena), 1, "nothing holds the arena");
}
