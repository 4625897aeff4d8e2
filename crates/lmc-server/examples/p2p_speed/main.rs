//! Measures prefixes that one daemon reads from another: what `cargo xtask bench p2p` runs.
//!
//! `p2p_speed drive TRANSPORT` reads, over `sockets` or `nixl`. It starts the owner of the chunks,
//! `p2p_speed own TRANSPORT`, as a process of its own, and obeys lines on its standard input, with a line of JSON for each:
//!
//! - `prefixes CHUNKS BYTES PROMPTS AGAIN`: the owner stores PROMPTS prompts of CHUNKS chunks, each of BYTES bytes;
//!   each is read by a first lease, and then, AGAIN times, by a later lease and over a bare channel
//!   from the same slots.
//!
//! A read by a lease is a lookup of the engine: locate, lease, read, release, verify, commit.

mod cpu;
mod daemon;
mod owner;

use std::io::BufRead;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lmc_backend::conformance::check_value;
use lmc_engine::{LookupRequest, OwnerId, Rank};
use lmc_key::ChunkKey;
use lmc_memory::{Pool, PoolConfig, ReservedSlot};
use lmc_transfer::{Index, PeerId, TransferChannel, block_on};
use serde_json::{Value, json};

use daemon::{BARE_OWNER, Daemon, SPACE, Transport, arena, prompt};
use owner::Owner;

/// Bytes of the reader's pool, and of the memory that the bare channel reads into.
const POOL: usize = 1 << 30;
/// Time within which the first prefix must be read.
const STARTING: Duration = Duration::from_secs(20);
/// Time that one bare read may take.
const READING: Duration = Duration::from_secs(20);
/// Pause after a lookup that found less than all.
const BACK_OFF: Duration = Duration::from_millis(300);
/// Lookups that may find less than all before the measurement fails.
const MAX_MISSED: usize = 20;

/// Times of one kind of read, and the CPU seconds of both processes.
#[derive(Default)]
struct Samples {
    seconds: Vec<f64>,
    cpu: [f64; 2],
}

impl Samples {
    fn json(&self) -> Value {
        json!({"seconds": self.seconds, "cpu_reader": self.cpu[0], "cpu_owner": self.cpu[1]})
    }
}

struct Reader {
    daemon: Daemon,
    owner: Owner,
    bare: Arc<dyn TransferChannel>,
    bare_pool: Pool,
    bare_owner: PeerId,
    /// Number of the next prompt; none is stored twice.
    next: u64,
    missed: usize,
}

impl Reader {
    fn start(transport: Transport) -> Result<Self> {
        let owner = Owner::start(transport)?;
        let peers = vec![owner.address.clone()];
        let daemon = Daemon::start("reader", POOL, peers, transport)?;
        let memory = arena(POOL)?;
        let bare = transport.bare_channel("bare-reader", &memory)?;
        let bare_owner: PeerId = BARE_OWNER.parse()?;
        let deadline = Instant::now() + STARTING;
        let address = owner.bare_address.parse()?;
        block_on(bare.connect(&bare_owner, &address, None, deadline))?;
        let mut this = Self {
            daemon,
            owner,
            bare,
            bare_pool: Pool::new(memory, PoolConfig::default())?,
            bare_owner,
            next: 0,
            missed: 0,
        };
        // Until the peers have exchanged their hellos.
        this.owner.store(1, 4096, 0..1)?;
        let mut samples = Samples::default();
        while !this.look_up(0, 1, &mut samples)? || !this.reads_by(transport) {
            ensure!(Instant::now() < deadline, "the peers do not connect");
        }
        this.next = 1;
        Ok(this)
    }

    /// Returns true if bytes have come from the peer over the transport.
    fn reads_by(&self, transport: Transport) -> bool {
        transport == Transport::Sockets || self.daemon.tier.node().counters().read_nixl_bytes > 0
    }

    /// Looks a prompt up and removes it again. Returns false if less than all of it was found.
    fn look_up(&self, number: u64, chunks: usize, samples: &mut Samples) -> Result<bool> {
        let keys = prompt(number, chunks);
        let hashes = keys.iter().map(|key| key.hash).collect();
        let rank = Rank {
            space: SPACE,
            kv_rank: 0,
            chunk_bytes: None,
        };
        let request = LookupRequest::new(OwnerId(1), hashes, vec![rank]);
        let before = self.cpu()?;
        let begun = Instant::now();
        let found = self.daemon.engine.lookup(request).wait_blocking();
        let took = begun.elapsed().as_secs_f64();
        ensure!(found.resident == 0, "chunks of prompt {number} stayed");
        let whole = found.hits == chunks;
        if whole {
            samples.seconds.push(took);
            self.add_cpu(before, samples)?;
        }
        if let Some(leases) = found.into_leases().filter(|_| whole) {
            for (key, slot) in keys.iter().zip(leases.iter()) {
                check_value(key, slot.bytes())?;
            }
        }
        self.daemon.engine.remove(&keys);
        Ok(whole)
    }

    /// Reads a prompt by leases into `samples`.
    fn by_lease(&mut self, number: u64, chunks: usize, samples: &mut Samples) -> Result<()> {
        while !self.look_up(number, chunks, samples)? {
            self.missed += 1;
            if self.missed > MAX_MISSED {
                let status = self.daemon.engine.lower_status();
                bail!("{} lookups found less than all: {status:?}", self.missed);
            }
            // A peer that did not answer in time is not asked for a while.
            thread::sleep(BACK_OFF);
        }
        Ok(())
    }

    /// Reads slots of the owner over the bare channel, and compares what was read as after a lookup:
    /// caches are as warm for the next read.
    fn by_channel(
        &mut self,
        keys: &[ChunkKey],
        indices: &[Index],
        len: u64,
        samples: &mut Samples,
    ) -> Result<()> {
        let reserve = |_: &Index| self.bare_pool.reserve(len);
        let slots: Option<Vec<ReservedSlot>> = indices.iter().map(reserve).collect();
        let slots = slots.context("no memory for a bare read")?;
        let before = self.cpu()?;
        let begun = Instant::now();
        let deadline = begun + READING;
        let filled = block_on(self.bare.read(slots, &self.bare_owner, indices, deadline));
        samples.seconds.push(begun.elapsed().as_secs_f64());
        self.add_cpu(before, samples)?;
        let read = filled.into_result()?;
        ensure!(read.len() == indices.len(), "a bare read missed slots");
        for (key, slot) in keys.iter().zip(&read) {
            check_value(key, slot.bytes())?;
        }
        Ok(())
    }

    fn cpu(&self) -> Result<[f64; 2]> {
        Ok([cpu::of(std::process::id())?, cpu::of(self.owner.id())?])
    }

    fn add_cpu(&self, before: [f64; 2], samples: &mut Samples) -> Result<()> {
        let after = self.cpu()?;
        for (sum, (after, before)) in samples.cpu.iter_mut().zip(after.into_iter().zip(before)) {
            *sum += (after - before).max(0.0);
        }
        Ok(())
    }

    fn prefixes(&mut self, chunks: usize, len: u64, prompts: u64, again: usize) -> Result<Value> {
        let numbers = self.next..self.next + prompts;
        self.next = numbers.end;
        self.missed = 0;
        let offsets = self.owner.store(chunks, len, numbers.clone())?;
        let incarnation = self.bare.peer_incarnation(&self.bare_owner);
        let incarnation = incarnation.context("the owner is gone")?;
        let unit = self.bare.unit();
        let mut offsets = offsets.chunks(chunks);
        let [mut first, mut later, mut bare] = [(); 3].map(|()| Samples::default());
        for number in numbers {
            let offsets = offsets.next().context("too few offsets")?;
            let index = |offset: &u64| Index::arena(incarnation, offset / unit);
            let indices: Vec<Index> = offsets.iter().map(index).collect();
            let keys = prompt(number, chunks);
            self.by_lease(number, chunks, &mut first)?;
            for turn in 0..again {
                let turn = number + turn as u64;
                if turn.is_multiple_of(2) {
                    self.by_lease(number, chunks, &mut later)?;
                    self.by_channel(&keys, &indices, len, &mut bare)?;
                } else {
                    self.by_channel(&keys, &indices, len, &mut bare)?;
                    self.by_lease(number, chunks, &mut later)?;
                }
            }
        }
        Ok(json!({
            "first": first.json(),
            "later": later.json(),
            "bare": bare.json(),
            "missed": self.missed,
        }))
    }
}

fn drive(transport: Transport) -> Result<()> {
    let mut reader = Reader::start(transport)?;
    println!("{}", json!({"ready": transport.name()}));
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["prefixes", chunks, bytes, prompts, again] = words[..] else {
            bail!("no such command: {line:?}");
        };
        let found = reader.prefixes(
            chunks.parse()?,
            bytes.parse()?,
            prompts.parse()?,
            again.parse()?,
        )?;
        println!("{found}");
    }
    Ok(())
}

fn main() -> Result<()> {
    let transport = Transport::named(std::env::args().nth(2).as_deref())?;
    match std::env::args().nth(1).as_deref() {
        Some("drive") => drive(transport),
        Some("own") => owner::serve(transport),
        _ => bail!("expected `drive`"),
    }
}
