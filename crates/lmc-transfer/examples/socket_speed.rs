//! How fast a socket channel is beside bare sockets over loopback, each in two processes:
//! `cargo run --release --example socket_speed [tcp|unix]`.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lmc_memory::{ArenaConfig, Pool, PoolConfig};
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerId, SocketChannel, SocketConfig, TransferChannel, block_on,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const STREAMS: usize = 4;
const ARENA: usize = 128 << 20;
/// Length of one measurement; both kinds take turns, since other work on the host disturbs.
const TIME: Duration = Duration::from_millis(300);
const TURNS: usize = 7;

fn side(id: &str, listen: &str) -> Result<(SocketChannel, Pool)> {
    let arena = Arc::new(ArenaConfig::anonymous(ARENA).build()?);
    let pool = Pool::new(Arc::clone(&arena), PoolConfig::default())?;
    let mut whole = pool.reserve(ARENA as u64).ok_or("an empty pool has room")?;
    whole.bytes_mut().fill(1);
    let config = ChannelConfig::new(id.parse()?, arena);
    let mut config = SocketConfig::new(config, listen.parse()?);
    config.streams = STREAMS;
    Ok((config.build()?, pool))
}

/// The other process: a channel, and bare sockets that send to whoever connects.
fn peer(listen: &str) -> Result<()> {
    let (channel, _pool) = side("peer", listen)?;
    let bare = TcpListener::bind("127.0.0.1:0")?;
    println!("{} {}", channel.address(), bare.local_addr()?);
    loop {
        let (mut stream, _) = bare.accept()?;
        thread::spawn(move || {
            let bytes = vec![1; 128 << 10];
            while stream.write_all(&bytes).is_ok() {}
        });
    }
}

struct Kill(Child);

impl Drop for Kill {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// GiB in a second, and seconds of CPU for a GiB.
struct Rate {
    gib: f64,
    cpu: f64,
}

impl Rate {
    fn new(bytes: u64, time: Duration, cpu: f64) -> Self {
        let gib = bytes as f64 / f64::from(1 << 30);
        Self {
            gib: gib / time.as_secs_f64(),
            cpu: cpu / gib,
        }
    }

    fn median(mut rates: Vec<Self>) -> Self {
        let middle = rates.len() / 2;
        rates.sort_by(|a, b| a.cpu.total_cmp(&b.cpu));
        let cpu = rates[middle].cpu;
        rates.sort_by(|a, b| a.gib.total_cmp(&b.gib));
        let gib = rates[middle].gib;
        Self { gib, cpu }
    }
}

/// What a process has used so far, from `/proc`: fields 14 and 15, in 1/100 s.
fn cpu_seconds(pid: &str) -> Result<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = text.rsplit_once(") ").ok_or("a name in brackets")?;
    let field = |n: usize| -> Result<f64> {
        let field = fields.split(' ').nth(n - 3).ok_or("52 fields")?;
        Ok(field.parse()?)
    };
    Ok((field(14)? + field(15)?) / 100.0)
}

/// Bytes received over bare sockets, as iperf3 does it: one buffer for each stream.
fn bare(address: &str) -> Result<u64> {
    let start = Instant::now();
    let receive = |address: &str| -> std::io::Result<u64> {
        let mut stream = TcpStream::connect(address)?;
        let mut bytes = vec![0; 128 << 10];
        let mut total = 0;
        while start.elapsed() < TIME {
            total += stream.read(&mut bytes)? as u64;
        }
        Ok(total)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..STREAMS)
            .map(|_| scope.spawn(|| receive(address)))
            .collect();
        let totals = threads.into_iter().map(|t| t.join().expect("no panic"));
        Ok(totals.sum::<std::io::Result<u64>>()?)
    })
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [word, listen] = &arguments[..]
        && word == "peer"
    {
        return peer(listen);
    }
    let listen = match arguments.first().map(String::as_str) {
        Some("unix") => format!("unix:/tmp/lmc-speed-{}", std::process::id()),
        _ => "tcp://127.0.0.1:0".to_owned(),
    };
    let mut child = Command::new(std::env::current_exe()?)
        .args(["peer", &listen])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    let output = child.stdout.take().ok_or("piped")?;
    let pid = child.id().to_string();
    let _kill = Kill(child);
    BufReader::new(output).read_line(&mut line)?;
    let (address, bare_address) = line.trim().split_once(' ').ok_or("two words")?;
    let (channel, pool) = side("here", "tcp://127.0.0.1:0")?;
    let (id, address): (PeerId, Address) = ("peer".parse()?, address.parse()?);
    let soon = || Instant::now() + Duration::from_secs(20);
    block_on(channel.connect(&id, &address, None, soon()))?;

    let cpu = || -> Result<f64> { Ok(cpu_seconds("self")? + cpu_seconds(&pid)?) };
    for (count, len) in [(64, 1 << 20), (16, 4 << 20), (1024, 64 << 10), (1, 4096)] {
        let step = len / 4096;
        let indices: Vec<Index> = (0..count).map(|n| Index(n * step)).collect();
        let batch = |write: bool| -> Result<()> {
            let slots = (0..count).map(|_| pool.reserve(len).ok_or("room"));
            let slots = slots.collect::<std::result::Result<Vec<_>, _>>()?;
            if write {
                let objects = slots.into_iter().map(|slot| slot.written().seal());
                let write = channel.write(objects.collect(), &id, &indices, soon());
                block_on(write).into_result()?;
            } else {
                block_on(channel.read(slots, &id, &indices, soon())).into_result()?;
            }
            Ok(())
        };
        for (what, write) in [("read", false), ("write", true)] {
            let (mut ours, mut bares) = (Vec::new(), Vec::new());
            for _ in 0..TURNS {
                let before = cpu()?;
                let start = Instant::now();
                let bytes = bare(bare_address)?;
                bares.push(Rate::new(bytes, start.elapsed(), cpu()? - before));
                let before = cpu()?;
                let (start, mut bytes) = (Instant::now(), 0);
                while start.elapsed() < TIME {
                    batch(write)?;
                    bytes += count * len;
                }
                ours.push(Rate::new(bytes, start.elapsed(), cpu()? - before));
            }
            let (ours, bare) = (Rate::median(ours), Rate::median(bares));
            let micros = 1e6 * (count * len) as f64 / (ours.gib * f64::from(1 << 30));
            println!(
                "{what:5} {count:4} x {len:7} bytes: {:5.2} GiB/s, {:.2} s of CPU per GiB, \
                 {micros:6.0} us each; bare TCP {:5.2} GiB/s, {:.2} s; ratio {:.2}",
                ours.gib,
                ours.cpu,
                bare.gib,
                bare.cpu,
                ours.gib / bare.gib
            );
        }
    }
    block_on(channel.close(soon()))?;
    Ok(())
}
