//! NIXL without a layer of ours: the same agents, memory, descriptors and requests by nixl-sys,
//! one request for a batch, and a thread that does nothing but ask whether it is done.
//!
//! The loader finds the library: `LD_LIBRARY_PATH`. NIXL knows no send: here it is a notification
//! each way, as a sender must learn where the receiver has targets, and a write that notifies.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{Arena, ReservedSlot, SealedSlot};
use nixl_sys::{
    Agent, AgentConfig, Backend, MemType, MemoryRegion, NixlDescriptor, NotificationMap, OptArgs,
    RegistrationHandle, ThreadSync, XferDescList, XferOp, XferStatus,
};

use crate::keeper::{Keeper, Other};
use crate::memory::{self, Memory};
use crate::{Failure, Mover, Shape, Way};

/// As in a channel of ours: the side that is written to has a progress thread, which sleeps.
const PROGRESS_DELAY_US: u64 = 1000;

#[derive(Debug)]
struct Region(Arc<Arena>);

impl MemoryRegion for Region {
    // SAFETY: the agent that registers the region keeps it.
    unsafe fn as_ptr(&self) -> *const u8 {
        self.0.base_ptr().as_ptr()
    }

    fn size(&self) -> usize {
        self.0.len()
    }
}

impl NixlDescriptor for Region {
    fn mem_type(&self) -> MemType {
        MemType::Dram
    }

    fn device_id(&self) -> u64 {
        0
    }
}

struct Registered {
    // In the order in which they must go.
    _registration: RegistrationHandle,
    agent: Agent,
    _backend: Backend,
    region: Region,
}

impl Registered {
    fn new(name: &str, arena: &Arc<Arena>, progress: bool) -> Result<Self, Failure> {
        if nixl_sys::is_stub() {
            return Err("no libnixl_capi.so where LD_LIBRARY_PATH says".into());
        }
        let config = AgentConfig {
            enable_prog_thread: progress,
            pthr_delay_us: PROGRESS_DELAY_US,
            thread_sync: ThreadSync::Rw,
            ..AgentConfig::default()
        };
        let agent = Agent::new_configured(name, &config)?;
        let (_, parameters) = agent.get_plugin_params("UCX")?;
        let backend = agent.create_backend("UCX", &parameters)?;
        let region = Region(Arc::clone(arena));
        Ok(Self {
            _registration: agent.register_memory(&region, None)?,
            agent,
            _backend: backend,
            region,
        })
    }

    fn base(&self) -> usize {
        self.region.0.base_ptr().as_ptr() as usize
    }

    /// Returns the metadata that others need to reach this agent, in hexadecimal digits.
    fn metadata(&self) -> Result<String, Failure> {
        let metadata = self.agent.get_local_md()?;
        Ok(metadata.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    fn load(&self, metadata: &str) -> Result<(), Failure> {
        let byte = |at| u8::from_str_radix(&metadata[at..at + 2], 16);
        let metadata: Result<Vec<u8>, _> = (0..metadata.len()).step_by(2).map(byte).collect();
        self.agent.load_remote_md(&metadata?)?;
        Ok(())
    }

    /// Waits for a notification of the other side. `unread` counts notifications that came together with an earlier one.
    fn notified(&self, from: &str, unread: &mut usize) -> Result<(), Failure> {
        let begun = Instant::now();
        while *unread == 0 {
            if begun.elapsed() > Duration::from_secs(60) {
                return Err("no notification came".into());
            }
            // What comes is added to a map, so that each look takes a new one.
            let mut map = NotificationMap::new()?;
            self.agent.get_notifications(&mut map, None)?;
            if map.is_empty()? {
                thread::yield_now();
            } else {
                *unread = map.get_notifications_size(from)?;
            }
        }
        *unread -= 1;
        Ok(())
    }
}

pub(crate) fn serve() -> Result<(), Failure> {
    let mut keeper = Keeper::new()?;
    let registered = Registered::new("there", keeper.memory.arena(), true)?;
    let first = format!("{} {}", registered.base(), registered.metadata()?);
    keeper.serve(&first, &mut |_, words| match *words {
        ["know", metadata] => registered.load(metadata).map(|()| String::new()),
        ["receive", batches] => {
            let mut unread = 0;
            for _ in 0..batches.parse()? {
                registered.notified("here", &mut unread)?;
                registered
                    .agent
                    .send_notification("here", b"number", None)?;
                registered.notified("here", &mut unread)?;
            }
            Ok(String::new())
        }
        _ => Err("no such word".into()),
    })
}

pub(crate) struct Driver {
    registered: Registered,
    other: Other,
    /// Address of the other side's arena.
    there: usize,
    memory: Memory,
    way: Way,
    shape: Shape,
    seed: u64,
    objects: Vec<SealedSlot>,
    targets: Vec<ReservedSlot>,
    /// Offsets of each object in the arenas, here and there.
    pairs: Vec<(usize, usize)>,
}

impl Driver {
    pub(crate) fn start() -> Result<Self, Failure> {
        let (mut other, first) = Other::start("bare-nixl")?;
        let (there, metadata) = first.split_once(' ').ok_or("two words")?;
        let memory = Memory::new()?;
        let registered = Registered::new("here", memory.arena(), false)?;
        registered.load(metadata)?;
        other.ask(&format!("know {}", registered.metadata()?))?;
        Ok(Self {
            registered,
            other,
            there: there.parse()?,
            memory,
            way: Way::Write,
            shape: Shape { count: 0, len: 0 },
            seed: 0,
            objects: Vec::new(),
            targets: Vec::new(),
            pairs: Vec::new(),
        })
    }

    fn move_once(&self) -> Result<(), Failure> {
        let mut local = XferDescList::new(MemType::Dram)?;
        let mut far = XferDescList::new(MemType::Dram)?;
        let base = self.registered.base();
        for (here, there) in &self.pairs {
            local.add_desc(base + here, self.shape.len, 0);
            far.add_desc(self.there + there, self.shape.len, 0);
        }
        let operation = match self.way {
            Way::Read => XferOp::Read,
            Way::Write | Way::Send => XferOp::Write,
        };
        let agent = &self.registered.agent;
        let mut options = OptArgs::new()?;
        if self.way == Way::Send {
            agent.send_notification("there", b"offer", None)?;
            self.registered.notified("there", &mut 0)?;
            options.set_has_notification(true)?;
            options.set_notification_message(b"over")?;
        }
        let request = agent.create_xfer_req(operation, &local, &far, "there", Some(&options))?;
        let mut going = agent.post_xfer_req(&request, Some(&options))?;
        while going {
            going = agent.get_xfer_status(&request)? != XferStatus::Success;
        }
        Ok(())
    }
}

impl Mover for Driver {
    fn prepare(&mut self, way: Way, shape: Shape, seed: u64) -> Result<(), Failure> {
        (self.way, self.shape, self.seed) = (way, shape, seed);
        self.objects.clear();
        self.targets.clear();
        self.memory.begin();
        let here: Vec<u64> = match way {
            Way::Write | Way::Send => {
                self.objects = self.memory.objects(shape, seed)?;
                self.objects.iter().map(SealedSlot::offset).collect()
            }
            Way::Read => {
                self.targets = self.memory.targets(shape)?;
                self.targets.iter().map(ReservedSlot::offset).collect()
            }
        };
        let there = match way {
            Way::Send => Way::Write,
            way => way,
        };
        let there = self.other.lay_out(there, shape, seed)?;
        let pairs = here.into_iter().zip(there);
        self.pairs = pairs
            .map(|(here, there)| (here as usize, there as usize))
            .collect();
        Ok(())
    }

    fn run(&mut self, batches: usize) -> Result<Vec<Duration>, Failure> {
        if self.way == Way::Send {
            self.other.say(&format!("receive {batches}"))?;
        }
        let timed = |_| {
            let started = Instant::now();
            self.move_once()?;
            Ok(started.elapsed())
        };
        let times = (0..batches).map(timed).collect();
        if self.way == Way::Send {
            self.other.hear()?;
        }
        times
    }

    fn verify(&mut self) -> Result<(), Failure> {
        match self.way {
            Way::Read => {
                let targets = std::mem::take(&mut self.targets).into_iter();
                let written: Vec<_> = targets.map(ReservedSlot::written).collect();
                memory::verify(written.iter().map(|slot| slot.bytes()), self.seed)
            }
            Way::Write | Way::Send => self.other.ask("verify").map(drop),
        }
    }

    fn other(&self) -> Option<u32> {
        Some(self.other.id())
    }
}
