//! The side that asks, and checks every byte.

use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ReservedSlot, WrittenSlot};
use lmc_transfer::conformance::{Mismatch, check_value};
use lmc_transfer::{
    Address, ConnectError, DataPlane, Filled, Index, PeerId, Slot, TransferError, block_on,
};
use serde_json::json;

use crate::control::Control;
use crate::pattern::sizes;
use crate::serve::greeting;
use crate::side::{Failure, Flags, SERVER, Side};
use crate::sweep;

/// Objects of many sizes: one byte, odd ones, whole pages, and one larger than any segment.
const MIXED: &str = "1,4096,4097*3,65536*4,100000,8,1048576,777777";
const MESSAGE: &[u8] = b"who is there?";

/// The driver's side, with all that it needs to know of the server.
pub(crate) struct Drive {
    pub(crate) flags: Flags,
    pub(crate) control: Control,
    pub(crate) side: Side,
    pub(crate) server: PeerId,
    address: Address,
}

type Check = (&'static str, fn(&mut Drive) -> Result<(), Failure>);

/// Checks in order: each begins with what the one before it left.
const CHECKS: [Check; 9] = [
    ("connect, with a message each way", Drive::connect),
    ("write, mixed sizes", Drive::write),
    ("read, mixed sizes", Drive::read),
    ("read, in another order", Drive::read_in_another_order),
    ("send and receive, mixed sizes", Drive::paired),
    ("a thousand small objects", Drive::many),
    ("mistakes are named, and harm nothing", Drive::mistakes),
    ("a wrong key is refused", Drive::wrong_key),
    ("no peer sends: the deadline ends it", Drive::no_peer_sends),
];

/// After the sweep, as they end the server.
const ENDS: [Check; 2] = [
    ("the peer starts again at its address", Drive::restart),
    ("the peer ends in mid-transfer", Drive::end),
];

/// Runs all checks and the sweep, and prints a line for each. Whether all went well.
pub(crate) fn drive(flags: &Flags) -> Result<bool, Failure> {
    let mut control = Control::connect(&flags.address, flags.timeout)?;
    control.set_timeout(flags.timeout * 2)?;
    let name = format!("drive-{}", std::process::id());
    let side = Side::open(flags, &name, control.local()?.ip(), None)?;
    let address = control.ask("address")?.parse()?;
    let mut drive = Drive {
        flags: flags.clone(),
        control,
        side,
        server: SERVER.parse()?,
        address,
    };
    let (mut passed, mut failed) = (0, 0);
    let mut check = |drive: &mut Drive, (name, check): Check| {
        let begun = Instant::now();
        let outcome = check(drive);
        let took = begun.elapsed();
        let ms = took.as_millis() as u64;
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("{}", json!({"check": name, "ok": true, "ms": ms}));
            }
            Err(error) => {
                failed += 1;
                // A check that fails when its time is over may be a slow machine's fault; a wrong byte
                // never is.
                let late = took >= drive.flags.timeout && !error.is::<Mismatch>();
                let error = error.to_string();
                println!(
                    "{}",
                    json!({"check": name, "ok": false, "ms": ms, "error": error, "late": late})
                );
            }
        }
        failed == 0
    };
    // What follows a failure would only repeat it.
    let _ = CHECKS.iter().all(|&each| check(&mut drive, each))
        && (flags.sweep == 0 || check(&mut drive, ("sweep", sweep::sweep)))
        && ENDS.iter().all(|&each| check(&mut drive, each))
        && check(&mut drive, ("close gives everything back", Drive::close));
    println!(
        "{}",
        json!({"done": true, "passed": passed, "failed": failed})
    );
    Ok(failed == 0)
}

/// A key that the server does not have.
const OTHER_KEY: &[u8] = b"a key that only an intruder knows";

fn ensure(holds: bool, or: &str) -> Result<(), Failure> {
    holds.then_some(()).ok_or_else(|| or.into())
}

fn indices(text: &str) -> Result<Vec<Index>, Failure> {
    let byte = |at: usize, text: &str| {
        let digits = text.get(2 * at..2 * at + 2).ok_or("a short index")?;
        Ok(u8::from_str_radix(digits, 16)?)
    };
    let index = |text: &str| {
        let bytes: Result<Vec<u8>, Failure> = (0..24).map(|at| byte(at, text)).collect();
        let bytes = bytes?.try_into().map_err(|_| "a short index")?;
        Ok(Index::from_bytes(bytes))
    };
    text.split(',').map(index).collect()
}

fn verify(slots: &[WrittenSlot], seed: u64) -> Result<(), Failure> {
    for (number, slot) in slots.iter().enumerate() {
        check_value(seed, number, slot.bytes())?;
    }
    Ok(())
}

impl Drive {
    pub(crate) fn deadline(&self) -> Instant {
        Instant::now() + self.flags.timeout
    }

    fn own_name(&self) -> &str {
        self.side.channel.id().as_str()
    }

    /// Has the server lay out objects; returns their indices.
    pub(crate) fn offer(&mut self, seed: u64, sizes: &str) -> Result<Vec<Index>, Failure> {
        indices(&self.control.ask(&format!("offer {seed} {sizes}"))?)
    }

    /// Has the server reserve slots; returns their indices.
    pub(crate) fn targets(&mut self, sizes: &str) -> Result<Vec<Index>, Failure> {
        indices(&self.control.ask(&format!("targets {sizes}"))?)
    }

    /// Reads into these slots and wants them all written.
    pub(crate) fn fetch(
        &self,
        slots: Vec<ReservedSlot>,
        from: &[Index],
    ) -> Result<Vec<WrittenSlot>, Failure> {
        let filled = block_on(
            self.side
                .channel
                .read(slots, &self.server, from, self.deadline()),
        );
        Ok(filled.into_result()?)
    }

    fn connect(&mut self) -> Result<(), Failure> {
        let before = self.side.channel.is_connected(&self.server);
        ensure(!before, "connected before anybody connected")?;
        let message = Some(Bytes::from_static(MESSAGE));
        let answer = self.try_connect(message.clone())?;
        let wanted = Some(Bytes::from(greeting(MESSAGE)));
        ensure(answer == wanted, "another answer than that to the message")?;
        ensure(
            self.side.channel.is_connected(&self.server),
            "not connected",
        )?;
        let knows = self.control.ask(&format!("knows {}", self.own_name()))?;
        ensure(knows == "true", "the server does not know this side")?;
        // From here on bytes go over NIXL, where both sides are to have it.
        let over_nixl = || self.side.channel.data_plane(&self.server) == Some(DataPlane::Nixl);
        let deadline = self.deadline();
        while self.flags.kind == "nixl" && !over_nixl() {
            ensure(Instant::now() < deadline, "bytes do not go over NIXL")?;
            std::thread::sleep(Duration::from_millis(1));
        }
        let again = self.try_connect(message)?;
        ensure(again.is_none(), "connected twice")
    }

    fn try_connect(&self, message: Option<Bytes>) -> Result<Option<Bytes>, ConnectError> {
        block_on(
            self.side
                .channel
                .connect(&self.server, &self.address, message, self.deadline()),
        )
    }

    fn write(&mut self) -> Result<(), Failure> {
        let targets = self.targets(MIXED)?;
        let objects = self.side.objects(&sizes(MIXED)?, 1)?;
        let sent = block_on(self.side.channel.write(
            objects,
            &self.server,
            &targets,
            self.deadline(),
        ));
        ensure(sent.into_result()? == targets.len(), "too few were written")?;
        self.control.ask("verify 1")?;
        // An empty batch moves nothing.
        let sent = block_on(self.side.channel.write(
            Vec::new(),
            &self.server,
            &[],
            self.deadline(),
        ));
        ensure(sent.into_result()? == 0, "an empty batch moved something")
    }

    fn read(&mut self) -> Result<(), Failure> {
        let offered = self.offer(2, MIXED)?;
        let slots = self.side.targets(&sizes(MIXED)?)?;
        let written = self.fetch(slots, &offered)?;
        ensure(written.len() == offered.len(), "too few were read")?;
        verify(&written, 2)
    }

    fn read_in_another_order(&mut self) -> Result<(), Failure> {
        let lens = sizes(MIXED)?;
        let offered = self.offer(3, MIXED)?;
        let order: Vec<usize> = (0..lens.len()).rev().step_by(2).collect();
        let from: Vec<Index> = order.iter().map(|&number| offered[number]).collect();
        let wanted: Vec<u64> = order.iter().map(|&number| lens[number]).collect();
        let written = self.fetch(self.side.targets(&wanted)?, &from)?;
        for (slot, &number) in written.iter().zip(&order) {
            check_value(3, number, slot.bytes())?;
        }
        Ok(())
    }

    fn paired(&mut self) -> Result<(), Failure> {
        let name = self.own_name().to_owned();
        let lens = sizes(MIXED)?;
        self.control.say(&format!("receive {name} 41 {MIXED} 4"))?;
        let objects = self.side.objects(&lens, 4)?;
        let sent = block_on(
            self.side
                .channel
                .send(objects, &self.server, 41, self.deadline()),
        );
        ensure(sent.into_result()? == lens.len(), "too few were sent")?;
        let received: usize = self.control.answer()?.parse()?;
        ensure(received == lens.len(), "too few were received")?;
        // The other way, with more slots than there are objects.
        self.offer(5, MIXED)?;
        self.control.say(&format!("send {name} 42"))?;
        let mut targets = lens.clone();
        targets.extend([4096, 4096]);
        let slots = self.side.targets(&targets)?;
        let Filled { slots, error, .. } = block_on(self.side.channel.receive(
            slots,
            &self.server,
            42,
            self.deadline(),
        ));
        if let Some(error) = error {
            return Err(error.into());
        }
        let (mut written, mut idle) = (Vec::new(), 0);
        for slot in slots {
            match slot {
                Slot::Written(slot) => written.push(slot),
                Slot::Idle(_) => idle += 1,
                Slot::Quarantined => return Err("quarantined without an error".into()),
            }
        }
        ensure(
            (written.len(), idle) == (lens.len(), 2),
            "other slots are written than were sent",
        )?;
        verify(&written, 5)?;
        let sent: usize = self.control.answer()?.parse()?;
        ensure(sent == lens.len(), "the server sent too few")
    }

    fn many(&mut self) -> Result<(), Failure> {
        let many = "4096*1000";
        let targets = self.targets(many)?;
        let objects = self.side.objects(&sizes(many)?, 6)?;
        let sent = block_on(self.side.channel.write(
            objects,
            &self.server,
            &targets,
            self.deadline(),
        ));
        ensure(sent.into_result()? == 1000, "too few were written")?;
        self.control.ask("verify 6")?;
        let offered = self.offer(7, many)?;
        let slots = self.side.targets(&sizes(many)?)?;
        verify(&self.fetch(slots, &offered)?, 7)
    }

    fn mistakes(&mut self) -> Result<(), Failure> {
        let targets = self.targets("8192*2")?;
        let deadline = self.deadline();
        let at = |unit| Index::arena(targets[0].incarnation(), unit);
        let far = at(self.flags.arena as u64 / self.side.channel.unit());
        let stranger: PeerId = "stranger".parse()?;
        let write = |peer: &PeerId, indices: &[Index]| -> Result<_, Failure> {
            let objects = self.side.objects(&[8192, 8192], 8)?;
            let sent = block_on(self.side.channel.write(objects, peer, indices, deadline));
            Ok((sent.done, sent.error))
        };
        for index in [far, at(u64::MAX)] {
            let outcome = write(&self.server, &[targets[0], index])?;
            let named = matches!(
                outcome,
                (0, Some(TransferError::OutOfRange { object: 1, .. }))
            );
            ensure(named, &format!("beyond the arena: {outcome:?}"))?;
        }
        let outcome = write(&self.server, &targets[..1])?;
        let named = matches!(outcome, (0, Some(TransferError::Indices { .. })));
        ensure(named, &format!("an index too few: {outcome:?}"))?;
        let outcome = write(&stranger, &targets)?;
        let named = matches!(outcome, (0, Some(TransferError::UnknownPeer { .. })));
        ensure(named, &format!("an unknown peer: {outcome:?}"))?;
        // None of these moved a byte, and the channel goes on.
        let written = self.fetch(self.side.targets(&[8192])?, &targets[..1])?;
        ensure(
            check_value(8, 0, written[0].bytes()).is_err(),
            "a refused write moved bytes",
        )?;
        let outcome = write(&self.server, &targets)?;
        ensure(
            matches!(outcome, (2, None)),
            &format!("after mistakes: {outcome:?}"),
        )?;
        self.control.ask("verify 8").map(drop)
    }

    fn wrong_key(&mut self) -> Result<(), Failure> {
        let host = self.control.local()?.ip();
        let mut flags = self.flags.clone();
        flags.arena = 1 << 20;
        let other = Side::open_with_key(&flags, "intruder", host, None, OTHER_KEY)?;
        let outcome = block_on(other.channel.connect(
            &self.server,
            &self.address,
            None,
            self.deadline(),
        ));
        let refused = matches!(outcome, Err(ConnectError::Key | ConnectError::Refused(_)));
        ensure(refused, &format!("with a wrong key: {outcome:?}"))?;
        block_on(other.channel.close(self.deadline()))?;
        let knows = self.control.ask("knows intruder")?;
        ensure(knows == "false", "the server knows who it refused")
    }

    fn deadline_passes(&self) -> Result<Filled, Failure> {
        let begun = Instant::now();
        let deadline = begun + Duration::from_millis(300);
        let slots = self.side.targets(&[4096])?;
        let filled = block_on(self.side.channel.receive(slots, &self.server, 99, deadline));
        let took = begun.elapsed();
        ensure(
            took < self.flags.timeout,
            &format!("a deadline of 300 ms ended after {took:?}"),
        )?;
        Ok(filled)
    }

    fn no_peer_sends(&mut self) -> Result<(), Failure> {
        let filled = self.deadline_passes()?;
        let named = matches!(filled.error, Some(TransferError::Deadline));
        ensure(named && filled.done() == 0, &format!("{filled:?}"))
    }

    fn restart(&mut self) -> Result<(), Failure> {
        let offered = self.offer(9, "65536*4")?;
        self.control.ask("restart")?;
        self.control = Control::connect(&self.flags.address, self.flags.timeout)?;
        self.control.set_timeout(self.flags.timeout * 2)?;
        let address = self.control.ask("address")?.parse()?;
        ensure(self.address == address, "it listens elsewhere")?;
        // A transfer finds out, if nothing else has: what was before is gone.
        let begun = Instant::now();
        while self.side.channel.is_connected(&self.server) {
            ensure(
                begun.elapsed() < self.flags.timeout,
                "the restart is not noticed",
            )?;
            let slots = self.side.targets(&[65536; 4])?;
            let filled = block_on(self.side.channel.read(
                slots,
                &self.server,
                &offered,
                self.deadline(),
            ));
            ensure(
                filled.error.is_some(),
                "the new process served the old one's objects",
            )?;
        }
        let message = Some(Bytes::from_static(MESSAGE));
        let answer = self.try_connect(message)?;
        ensure(answer.is_some(), "the new process did not answer")?;
        self.read()?;
        self.write()
    }

    fn end(&mut self) -> Result<(), Failure> {
        let lens = vec![1 << 20; 8];
        let offered = self.offer(10, "1048576*8")?;
        self.control.ask("abort-in 100")?;
        let begun = Instant::now();
        loop {
            let slots = self.side.targets(&lens)?;
            let deadline = self.deadline();
            let filled = block_on(
                self.side
                    .channel
                    .read(slots, &self.server, &offered, deadline),
            );
            ensure(filled.slots.len() == lens.len(), "slots were lost")?;
            for (number, slot) in filled.slots.iter().enumerate() {
                if let Slot::Written(slot) = slot {
                    check_value(10, number, slot.bytes())?;
                }
            }
            if filled.error.is_some() {
                break;
            }
            ensure(
                begun.elapsed() < self.flags.timeout,
                "reads from a process that ended go on",
            )?;
        }
        let begun = Instant::now();
        while self.side.channel.is_connected(&self.server) {
            ensure(
                begun.elapsed() < self.flags.timeout,
                "the end is not noticed",
            )?;
            std::thread::sleep(Duration::from_millis(10));
        }
        let sent = block_on(self.side.channel.write(
            self.side.objects(&[4096], 11)?,
            &self.server,
            &offered[..1],
            self.deadline(),
        ));
        ensure(sent.error.is_some(), "a write to no peer went well")
    }

    fn close(&mut self) -> Result<(), Failure> {
        block_on(self.side.channel.close(self.deadline()))?;
        let usage = self.side.pool.usage();
        ensure(usage.slots == 0, &format!("slots are left: {usage:?}"))
    }
}
