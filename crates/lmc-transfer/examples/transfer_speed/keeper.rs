//! The other process: how it is started, its orders, and what it keeps.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use lmc_memory::{ReservedSlot, SealedSlot, WrittenSlot};

use crate::memory::{self, Memory};
use crate::{Failure, Shape, Way};

/// The other process, which ends with this one.
pub(crate) struct Other {
    child: Child,
    /// Standard input of the process; `None` once the process is to end.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Other {
    /// Starts it; what it says first.
    pub(crate) fn start(who: &str) -> Result<(Self, String), Failure> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["serve", who])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("it is piped")?);
        let mut other = Self {
            child,
            input,
            output,
        };
        let first = other.hear()?;
        Ok((other, first))
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn say(&mut self, line: &str) -> Result<(), Failure> {
        let input = self.input.as_mut().ok_or("it was asked to end")?;
        writeln!(input, "{line}")?;
        Ok(input.flush()?)
    }

    pub(crate) fn hear(&mut self) -> Result<String, Failure> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err("the other process has ended".into());
        }
        let line = line.trim_end();
        match line.strip_prefix("failed ") {
            Some(why) => Err(format!("the other process: {why}").into()),
            None => Ok(line.to_owned()),
        }
    }

    pub(crate) fn ask(&mut self, line: &str) -> Result<String, Failure> {
        self.say(line)?;
        self.hear()
    }

    /// Has it lay out what a batch needs there; offsets of its objects in its arena, in bytes.
    pub(crate) fn lay_out(
        &mut self,
        way: Way,
        Shape { count, len }: Shape,
        seed: u64,
    ) -> Result<Vec<u64>, Failure> {
        let line = match way {
            Way::Write => format!("targets {seed} {count} {len}"),
            Way::Read => format!("objects {seed} {count} {len}"),
            Way::Send => format!("receive {seed} {count} {len}"),
        };
        let offsets = self.ask(&line)?;
        let offset = |text: &str| Ok(text.parse()?);
        offsets.split_whitespace().map(offset).collect()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Obeys words that are not of every keeper.
type Own<'a> = dyn FnMut(&mut Keeper, &[&str]) -> Result<String, Failure> + 'a;

/// Memory of the other process, and the objects in it.
pub(crate) struct Keeper {
    pub(crate) memory: Memory,
    pub(crate) shape: Shape,
    seed: u64,
    targets: Vec<ReservedSlot>,
    objects: Vec<SealedSlot>,
    /// The batch that was received last.
    pub(crate) received: Vec<WrittenSlot>,
}

impl Keeper {
    pub(crate) fn new() -> Result<Self, Failure> {
        Ok(Self {
            memory: Memory::new()?,
            shape: Shape { count: 0, len: 0 },
            seed: 0,
            targets: Vec::new(),
            objects: Vec::new(),
            received: Vec::new(),
        })
    }

    /// Obeys lines until there are no more; those that are no word of its own are for `own`.
    pub(crate) fn serve(&mut self, first: &str, own: &mut Own<'_>) -> Result<(), Failure> {
        println!("{first}");
        for line in std::io::stdin().lock().lines() {
            let line = line?;
            let words: Vec<&str> = line.split_whitespace().collect();
            match self.obey(&words, own) {
                Ok(answer) => println!("{answer}"),
                Err(error) => println!("failed {error}"),
            }
        }
        Ok(())
    }

    fn obey(&mut self, words: &[&str], own: &mut Own<'_>) -> Result<String, Failure> {
        match *words {
            ["verify"] => {
                let targets = std::mem::take(&mut self.targets).into_iter();
                let written: Vec<WrittenSlot> = targets.map(ReservedSlot::written).collect();
                let arrived = written.iter().chain(&self.received);
                memory::verify(arrived.map(WrittenSlot::bytes), self.seed)?;
                Ok(String::new())
            }
            [what @ ("targets" | "objects" | "receive"), seed, count, len] => {
                self.targets.clear();
                self.objects.clear();
                self.received.clear();
                self.memory.begin();
                let (count, len) = (count.parse()?, len.parse()?);
                self.shape = Shape { count, len };
                self.seed = seed.parse()?;
                let offsets: Vec<u64> = match what {
                    "targets" => {
                        self.targets = self.memory.targets(self.shape)?;
                        self.targets.iter().map(ReservedSlot::offset).collect()
                    }
                    "objects" => {
                        self.objects = self.memory.objects(self.shape, self.seed)?;
                        self.objects.iter().map(SealedSlot::offset).collect()
                    }
                    _ => {
                        drop(self.memory.targets(self.shape)?);
                        Vec::new()
                    }
                };
                let offsets: Vec<String> = offsets.iter().map(u64::to_string).collect();
                Ok(offsets.join(" "))
            }
            _ => own(self, words),
        }
    }
}
