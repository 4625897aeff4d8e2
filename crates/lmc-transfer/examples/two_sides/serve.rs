//! The side that obeys.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use lmc_memory::{ReservedSlot, SealedSlot};
use lmc_transfer::conformance::check_value;
use lmc_transfer::{InArena, Index, OnConnect, PeerId, TransferChannel, block_on};
use serde_json::json;

use crate::control::Control;
use crate::pattern;
use crate::side::{Failure, Flags, SERVER, Side};

/// Returns the server's answer to the message of a peer that connects.
pub(crate) fn greeting(message: &[u8]) -> Vec<u8> {
    [b"heard: ", message].concat()
}

/// Serves one driver, to its end.
pub(crate) fn serve(flags: &Flags) -> Result<(), Failure> {
    let listener = TcpListener::bind(&flags.address)?;
    let local = listener.local_addr()?;
    let on_connect: OnConnect =
        Arc::new(|_, message| message.map(|message| Bytes::from(greeting(&message))));
    let side = Side::open(flags, SERVER, local.ip(), Some(on_connect))?;
    println!("{}", json!({"ready": local.to_string()}));
    let (stream, _) = listener.accept()?;
    // After a restart no peer may connect to the process that was before.
    drop(listener);
    let mut control = Control::new(stream)?;
    let mut held = Held::default();
    while let Some(line) = control.hear()? {
        if line == "restart" {
            control.say("ok")?;
            return Err(restart(flags, &local.to_string(), &side));
        }
        let answer = match held.obey(&side, flags.timeout, &line) {
            Ok(answer) => format!("ok {answer}"),
            Err(error) => format!("failed {error}").replace('\n', " "),
        };
        control.say(&answer)?;
    }
    drop(held);
    block_on(side.channel.close(Instant::now() + flags.timeout))?;
    Ok(())
}

/// Becomes a new process at the same addresses, as after a crash. Returns only a failure.
fn restart(flags: &Flags, control: &str, side: &Side) -> Failure {
    let Ok(program) = std::env::current_exe() else {
        return "the program does not know its own file".into();
    };
    let mut command = Command::new(program);
    command
        .args(["serve", control])
        .args(flags.typed())
        .args(["--at", &side.channel.address().to_string()]);
    command.exec().into()
}

/// Slots that lie ready for the driver.
#[derive(Default)]
struct Held {
    offered: Vec<SealedSlot>,
    targets: Vec<ReservedSlot>,
}

impl Held {
    fn obey(&mut self, side: &Side, timeout: Duration, line: &str) -> Result<String, Failure> {
        let words: Vec<&str> = line.split(' ').collect();
        let channel = &*side.channel;
        let deadline = Instant::now() + timeout;
        match words[..] {
            ["address"] => Ok(channel.address().to_string()),
            ["knows", peer] => Ok(channel.is_connected(&peer.parse()?).to_string()),
            ["offer", seed, sizes] => {
                self.offered.clear();
                self.offered = side.objects(&pattern::sizes(sizes)?, seed.parse()?)?;
                indices(channel, &self.offered)
            }
            ["targets", sizes] => {
                self.targets.clear();
                self.targets = side.targets(&pattern::sizes(sizes)?)?;
                indices(channel, &self.targets)
            }
            ["verify", seed] => {
                let seed = seed.parse()?;
                for (number, slot) in self.targets.drain(..).enumerate() {
                    check_value(seed, number, slot.written().bytes())?;
                }
                Ok(String::new())
            }
            ["forget"] => {
                *self = Self::default();
                Ok(side.pool.usage().slots.to_string())
            }
            ["send", peer, tag] => {
                let peer: PeerId = peer.parse()?;
                let objects = self.offered.clone();
                let sent = block_on(channel.send(objects, &peer, tag.parse()?, deadline));
                Ok(sent.into_result()?.to_string())
            }
            ["receive", peer, tag, sizes, seed] => {
                let peer: PeerId = peer.parse()?;
                let slots = side.targets(&pattern::sizes(sizes)?)?;
                let filled = block_on(channel.receive(slots, &peer, tag.parse()?, deadline));
                let written = filled.into_result()?;
                let seed = seed.parse()?;
                for (number, slot) in written.iter().enumerate() {
                    check_value(seed, number, slot.bytes())?;
                }
                Ok(written.len().to_string())
            }
            ["abort-in", ms] => {
                let life = Duration::from_millis(ms.parse()?);
                thread::spawn(move || {
                    thread::sleep(life);
                    std::process::abort();
                });
                Ok(String::new())
            }
            _ => Err("no such command".into()),
        }
    }
}

fn indices<S: InArena>(channel: &dyn TransferChannel, slots: &[S]) -> Result<String, Failure> {
    let slots: Vec<&dyn InArena> = slots.iter().map(|slot| slot as &dyn InArena).collect();
    let indices = channel.arena_indices(&slots)?;
    let hex = |index: &Index| -> String {
        let bytes = index.to_bytes();
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    };
    let indices: Vec<String> = indices.iter().map(hex).collect();
    Ok(indices.join(","))
}
