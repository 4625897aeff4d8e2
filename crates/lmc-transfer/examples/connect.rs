//! A program that moves chunks by itself: two sides over TCP, here in one process.
//!
//! `cargo run -p lmc-transfer --example connect`

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ArenaConfig, Pool, PoolConfig, SealedSlot};
use lmc_transfer::{
    Address, ChannelConfig, Key, Slot, SocketChannel, SocketConfig, TransferChannel, block_on,
};

const CHUNK: u64 = 1 << 20;

/// Memory, slots of it, and a channel over it that listens on a free port.
fn side(name: &str) -> Result<(Pool, SocketChannel), Box<dyn Error>> {
    let arena = Arc::new(ArenaConfig::anonymous(16 << 20).build()?);
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
    let mut config = ChannelConfig::new(name.parse()?, arena);
    config.keys = Some(Key::new(b"32 random bytes that both sides know")?.into());
    // Answers the message of a peer that connects, for instance with an address to ask for chunks.
    config.on_connect = Some(Arc::new(|peer, message| {
        println!("{peer} connects and says {message:?}");
        Some(Bytes::from_static(b"welcome"))
    }));
    let listen: Address = "tcp://127.0.0.1:0".parse()?;
    Ok((pool, SocketConfig::new(config, listen).build()?))
}

/// A chunk that can be found and read, and no longer changed.
fn chunk(pool: &Pool, byte: u8) -> Result<SealedSlot, Box<dyn Error>> {
    let mut slot = pool.reserve(CHUNK).ok_or("the pool is full")?;
    slot.bytes_mut().fill(byte);
    Ok(slot.written().seal())
}

fn main() -> Result<(), Box<dyn Error>> {
    let ((a_pool, a), (b_pool, b)) = (side("a")?, side("b")?);
    // Every call ends by its deadline. Each is a future for any runtime; `block_on` needs none.
    let soon = || Instant::now() + Duration::from_secs(10);
    let hello = Some(Bytes::from_static(b"hello"));
    let answer = block_on(a.connect(b.id(), b.address(), hello, soon()))?;
    println!("connected; b answers {answer:?}");

    // One-sided: b leases chunks to a, and tells it the indices by whatever protocol the two have;
    // a reads them alone.
    let lease = b.grant_read(a.id(), vec![chunk(&b_pool, 1)?, chunk(&b_pool, 2)?])?;
    let slots = [a_pool.reserve(CHUNK), a_pool.reserve(CHUNK)];
    let slots = slots.into_iter().flatten().collect();
    let read = block_on(a.read(slots, b.id(), lease.indices(), soon()));
    if let Some(error) = &read.error {
        println!("not all could be read: {error}");
    }
    for slot in read.slots {
        match slot {
            Slot::Written(slot) => println!("a has a chunk of {}s", slot.bytes()[0]),
            Slot::Idle(slot) => println!("{} bytes can be used for something else", slot.len()),
            Slot::Quarantined => {
                println!("the channel returns it to the pool when that is safe")
            }
        }
    }
    // From here on a reads them no more, and b may evict them.
    block_on(lease.revoke());

    // Paired: one sends and the other receives, under a tag that both know.
    let objects = vec![chunk(&a_pool, 3)?];
    let slots = b_pool.reserve(CHUNK).into_iter().collect();
    let tag = 7;
    std::thread::scope(|scope| {
        let receives = || block_on(b.receive(slots, a.id(), tag, soon()));
        let receiver = scope.spawn(receives);
        let sent = block_on(a.send(objects, b.id(), tag, soon())).into_result()?;
        let received = receiver.join().map_err(|_| "the receiver panicked")?;
        let received = received.into_result()?;
        println!("{sent} sent, b has a chunk of {}s", received[0].bytes()[0]);
        Ok::<(), Box<dyn Error>>(())
    })?;

    // Nothing is left running, and no peer reaches the memory any more.
    block_on(a.close(soon()))?;
    block_on(b.close(soon()))?;
    Ok(())
}
