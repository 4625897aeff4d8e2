//! The owner of the chunks, in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use lmc_backend::conformance::fill_value;
use lmc_engine::{CacheEngine, OwnerId, StoreRequest, StoreStart, TenantId};
use lmc_key::ChunkKey;
use serde_json::{Value, json};

use crate::daemon::{BARE_OWNER, Daemon, Transport, prompt};

/// Bytes of the owner's pool, an eighth of which one peer may lease.
const POOL: usize = 3 << 30;

/// The owner's process, as the reader sees it.
pub(crate) struct Owner {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    pub(crate) address: String,
    pub(crate) bare_address: String,
}

impl Owner {
    pub(crate) fn start(transport: Transport) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["own", transport.name()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().context("it is piped")?;
        let mut this = Self {
            input: child.stdin.take(),
            output: BufReader::new(output),
            child,
            address: String::new(),
            bare_address: String::new(),
        };
        let ready = this.answer()?;
        let text = |name: &str| ready[name].as_str().map(str::to_owned);
        this.address = text("address").context("an address")?;
        this.bare_address = text("bare").context("an address of the bare channel")?;
        Ok(this)
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    fn answer(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        serde_json::from_str(&line).with_context(|| format!("the owner said {line:?}"))
    }

    /// Stores prompts in place of those before. Returns the offset of each chunk, in order.
    pub(crate) fn store(
        &mut self,
        chunks: usize,
        len: u64,
        numbers: Range<u64>,
    ) -> Result<Vec<u64>> {
        let input = self.input.as_mut().context("it is piped")?;
        writeln!(input, "{chunks} {len} {} {}", numbers.start, numbers.end)?;
        let offsets = self.answer()?;
        Ok(serde_json::from_value(offsets)?)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The end of its input ends it.
        drop(self.input.take());
        let _ = self.child.wait();
    }
}

/// Serves as the owner until its input ends.
pub(crate) fn serve(transport: Transport) -> Result<()> {
    let daemon = Daemon::start("owner", POOL, Vec::new(), transport)?;
    let bare = transport.bare_channel(BARE_OWNER, &daemon.memory)?;
    let ready = json!({"address": daemon.address, "bare": bare.address().to_string()});
    println!("{ready}");
    let mut stored: Vec<ChunkKey> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let numbers: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
        let [chunks, len, first, end] = numbers?[..] else {
            anyhow::bail!("no such command: {line:?}");
        };
        daemon.engine.remove(&std::mem::take(&mut stored));
        let mut offsets = Vec::new();
        for number in first..end {
            let keys = prompt(number, chunks as usize);
            store(&daemon.engine, &keys, len)?;
            let leases = (daemon.engine).acquire(OwnerId(1), daemon.engine.clears_id(), &keys);
            let leases = leases.context("a chunk left memory")?;
            offsets.extend(leases.iter().map(|slot| slot.offset()));
            stored.extend(keys);
        }
        println!("{}", json!(offsets));
    }
    Ok(())
}

fn store(engine: &CacheEngine, keys: &[ChunkKey], len: u64) -> Result<()> {
    let request = |index: usize| StoreRequest {
        key: keys[index],
        parent: index.checked_sub(1).map(|before| keys[before]),
        tenant: TenantId(0),
        len,
    };
    let requests: Vec<_> = (0..keys.len()).map(request).collect();
    let mut tickets = Vec::new();
    for start in engine.store(OwnerId(1), engine.clears_id(), &requests) {
        if let StoreStart::Reserved(mut ticket) = start {
            let key = ticket.key();
            fill_value(&key, ticket.bytes_mut());
            tickets.push(ticket);
        }
    }
    ensure!(tickets.len() == keys.len(), "no memory for a prompt");
    engine.commit(tickets);
    Ok(())
}
