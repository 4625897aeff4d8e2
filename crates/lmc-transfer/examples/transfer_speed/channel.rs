//! A channel of ours.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, SealedSlot, WrittenSlot};
use lmc_transfer::{
    Address, ChannelConfig, DataPlane, Index, Key, PeerId, Rights, SocketConfig, TransferChannel,
    block_on,
};

use crate::keeper::{Keeper, Other};
use crate::memory::{self, Memory};
use crate::{Failure, Mover, Shape, Way};

const HERE: &str = "here";
const THERE: &str = "there";

fn open(who: &str, id: &str, arena: &Arc<Arena>) -> Result<Arc<dyn TransferChannel>, Failure> {
    let mut config = ChannelConfig::new(id.parse()?, Arc::clone(arena));
    config.open_arena = true;
    config.rights = Rights::ReadWrite;
    config.keys = Some(Key::new(b"the two sides of one measurement")?.into());
    let tcp: Address = "tcp://127.0.0.1:0".parse()?;
    match who.split(':').collect::<Vec<_>>()[..] {
        ["socket", kind, streams] => {
            let folder = std::env::temp_dir();
            let address = match kind {
                "unix" => Address::Unix(folder.join(format!("lmc-speed-{}", std::process::id()))),
                _ => tcp,
            };
            let mut config = SocketConfig::new(config, address);
            config.streams = streams.parse()?;
            Ok(Arc::new(config.build()?))
        }
        #[cfg(feature = "nixl")]
        ["nixl"] => {
            let mut config = SocketConfig::new(config, tcp);
            config.nixl = Some(lmc_transfer::NixlConfig::default().open(&config.channel)?);
            Ok(Arc::new(config.build()?))
        }
        _ => Err(format!("no channel {who:?}").into()),
    }
}

/// The longest that one batch is waited for.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn serve(who: &str) -> Result<(), Failure> {
    let mut keeper = Keeper::new()?;
    let channel = open(who, THERE, keeper.memory.arena())?;
    let first = channel.address().to_string();
    keeper.serve(&first, &mut |keeper, words| match *words {
        ["tags", from, to] => {
            receive(keeper, &*channel, from.parse()?, to.parse()?)?;
            Ok(String::new())
        }
        _ => Err("no such word".into()),
    })?;
    Ok(block_on(channel.close(soon()))?)
}

/// Receives a batch under each tag, in the same slots.
fn receive(
    keeper: &mut Keeper,
    channel: &dyn TransferChannel,
    from: u64,
    to: u64,
) -> Result<(), Failure> {
    let here: PeerId = HERE.parse()?;
    for tag in from..to {
        keeper.received.clear();
        let slots = keeper.memory.again(keeper.shape)?;
        let filled = block_on(channel.receive(slots, &here, tag, soon()));
        keeper.received = filled.into_result()?;
    }
    Ok(())
}

pub(crate) struct Driver {
    other: Other,
    channel: Arc<dyn TransferChannel>,
    there: PeerId,
    memory: Memory,
    way: Way,
    shape: Shape,
    seed: u64,
    objects: Vec<SealedSlot>,
    indices: Vec<Index>,
    last_read: Vec<WrittenSlot>,
    tag: u64,
}

impl Driver {
    pub(crate) fn start(who: &str) -> Result<Self, Failure> {
        let (other, address) = Other::start(who)?;
        let memory = Memory::new()?;
        let channel = open(who, HERE, memory.arena())?;
        let there: PeerId = THERE.parse()?;
        block_on(channel.connect(&there, &address.parse()?, None, soon()))?;
        let over_nixl = || channel.data_plane(&there) == Some(DataPlane::Nixl);
        let deadline = soon();
        while who == "nixl" && !over_nixl() {
            if Instant::now() > deadline {
                return Err("bytes do not go over NIXL".into());
            }
            std::thread::yield_now();
        }
        Ok(Self {
            other,
            channel,
            there,
            memory,
            way: Way::Write,
            shape: Shape { count: 0, len: 0 },
            seed: 0,
            objects: Vec::new(),
            indices: Vec::new(),
            last_read: Vec::new(),
            tag: 0,
        })
    }

    fn write(&self) -> Result<Duration, Failure> {
        let objects = self.objects.clone();
        let started = Instant::now();
        let sent = block_on(
            self.channel
                .write(objects, &self.there, &self.indices, soon()),
        );
        let time = started.elapsed();
        sent.into_result()?;
        Ok(time)
    }

    fn read(&mut self) -> Result<Duration, Failure> {
        self.last_read.clear();
        let slots = self.memory.again(self.shape)?;
        let started = Instant::now();
        let filled = block_on(self.channel.read(slots, &self.there, &self.indices, soon()));
        let time = started.elapsed();
        self.last_read = filled.into_result()?;
        Ok(time)
    }

    fn send(&mut self) -> Result<Duration, Failure> {
        let objects = self.objects.clone();
        let started = Instant::now();
        let sent = block_on(self.channel.send(objects, &self.there, self.tag, soon()));
        let time = started.elapsed();
        self.tag += 1;
        sent.into_result()?;
        Ok(time)
    }
}

impl Mover for Driver {
    fn prepare(&mut self, way: Way, shape: Shape, seed: u64) -> Result<(), Failure> {
        (self.way, self.shape, self.seed) = (way, shape, seed);
        self.objects.clear();
        self.last_read.clear();
        self.memory.begin();
        match way {
            Way::Write | Way::Send => self.objects = self.memory.objects(shape, seed)?,
            Way::Read => drop(self.memory.targets(shape)?),
        }
        let unit = self.channel.unit();
        let offsets = self.other.lay_out(way, shape, seed)?;
        let incarnation = self.channel.peer_incarnation(&self.there);
        let incarnation = incarnation.ok_or("the other side is gone")?;
        let index = |offset: &u64| Index::arena(incarnation, offset / unit);
        self.indices = offsets.iter().map(index).collect();
        Ok(())
    }

    fn run(&mut self, batches: usize) -> Result<Vec<Duration>, Failure> {
        match self.way {
            Way::Write => (0..batches).map(|_| self.write()).collect(),
            Way::Read => (0..batches).map(|_| self.read()).collect(),
            Way::Send => {
                let to = self.tag + batches as u64;
                self.other.say(&format!("tags {} {to}", self.tag))?;
                let times: Result<_, _> = (0..batches).map(|_| self.send()).collect();
                self.other.hear()?;
                times
            }
        }
    }

    fn verify(&mut self) -> Result<(), Failure> {
        match self.way {
            Way::Read => {
                if self.last_read.len() != self.shape.count {
                    return Err("too few objects were read".into());
                }
                memory::verify(self.last_read.iter().map(WrittenSlot::bytes), self.seed)
            }
            Way::Write | Way::Send => self.other.ask("verify").map(drop),
        }
    }

    fn other(&self) -> Option<u32> {
        Some(self.other.id())
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = block_on(self.channel.close(soon()));
    }
}
