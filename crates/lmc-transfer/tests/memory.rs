//! The suite over channels of one process, and what is theirs alone.

mod support;
use support::MemoryRig;

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ArenaConfig, Pool, PoolConfig};
use lmc_transfer::conformance::{check_value, fill_value};
use lmc_transfer::{
    Blocking, ChannelConfig, MemoryChannel, MemoryError, MemoryHub, TransferChannel,
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

/// Two at different addresses call themselves the same: the name means who connected last.
#[test]
fn a_name_means_the_newest() {
    let hub = MemoryHub::new().expect("a thread");
    let open = |name, id| open(&hub, name, id).expect("the name is free");
    let (a, old, new) = (open("a", "a"), open("old", "b"), open("new", "b"));
    let deadline = Instant::now() + Duration::from_secs(10);
    for b in [&old, &new] {
        let connected = Blocking::new(b).connect(a.id(), a.address(), None, deadline);
        connected.expect("a is there");
        assert!(b.is_connected(a.id()) && a.is_connected(b.id()));
    }
    assert!(!old.is_connected(a.id()));
    drop(old);
    assert!(
        a.is_connected(new.id()),
        "the end of the old one is not that of the new one"
    );
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
    let config = ChannelConfig::new(id, arena);
    let a = hub.channel("a", config).expect("the name is free");
    let itself = Blocking::new(&a);
    let deadline = Instant::now() + Duration::from_secs(10);
    let connected = itself.connect(a.id(), a.address(), None, deadline);
    connected.expect("it is there");
    let mut slot = pool.reserve(300_000).expect("room");
    fill_value(1, 0, slot.bytes_mut());
    let place = pool.reserve(300_000).expect("room");
    let index = a.indices(&[&place]).expect("an index");
    let sent = itself.write(vec![slot.written().seal()], a.id(), &index, deadline);
    assert_eq!(sent.into_result(), Ok(1));
    assert_eq!(check_value(1, 0, place.written().bytes()), Ok(()));
    let copy = pool.reserve(300_000).expect("room");
    let read = itself.read(vec![copy], a.id(), &index, deadline);
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
