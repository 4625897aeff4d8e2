//! Measures a directory: bytes of an entry, time of a look-up, and the messages of many members.
//!
//! `cargo run --release -p lmc-backend-p2p --example directory_scale [ENTRIES]`

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lmc_backend::conformance::Rng;
use lmc_backend_p2p::Session;
use lmc_backend_p2p::directory::{
    Announce, Announced, DirectoryHost, DirectoryServer, Find, Fingerprint, MAX_ANNOUNCED,
    TableLimits,
};
use lmc_backend_p2p::message::{Hello, OLDEST_VERSION, Reply, Request, Stamped, VERSION};
use lmc_key::ClearsId;
use lmc_memory::ArenaConfig;
use lmc_transfer::{ChannelConfig, SocketChannel, SocketConfig, TransferChannel, block_on};
use tokio::runtime::{Builder, Handle};

/// Chunks of a prompt.
const PROMPT: u64 = 512;

fn fingerprint(n: u64) -> Fingerprint {
    let [a, b, c, d, e, f, ..] = Rng::new(n).next_u64().to_le_bytes();
    Fingerprint::from_bytes([a, b, c, d, e, f])
}

/// Members and directory have carried out no clears.
fn stamped<T>(message: T) -> Stamped<T> {
    Stamped::new(ClearsId::NONE, message)
}

fn hello(name: &str) -> Request {
    Request::Hello(Hello {
        oldest: OLDEST_VERSION,
        newest: VERSION,
        features: 0,
        name: name.to_owned(),
        address: "10.0.0.1:7700".to_owned(),
        chunk_size: 256,
        algorithm: "blake3".to_owned(),
        clears: ClearsId::NONE,
        spaces: Vec::new(),
        is_draining: false,
    })
}

/// A member that is connected to its directory over loopback.
struct Connected {
    channel: SocketChannel,
    /// Listens until it is dropped.
    _directory: DirectoryServer,
}

impl Connected {
    fn new(host: &Arc<DirectoryHost>, runtime: &Handle) -> Self {
        let config = |name: &str| {
            let arena = ArenaConfig::anonymous(1 << 20).build().expect("1 MiB");
            let channel = ChannelConfig::new(name.parse().expect("a name"), Arc::new(arena));
            SocketConfig::new(channel, "tcp://127.0.0.1:0".parse().expect("an address"))
        };
        let host = Arc::clone(host);
        let directory = DirectoryServer::start(host, config("directory"), runtime.clone())
            .expect("loopback has free ports");
        let channel = config("asker").build().expect("loopback has free ports");
        let to = "directory".parse().expect("a name");
        let at = directory.address();
        block_on(channel.connect(&to, at, None, soon())).expect("it listens");
        let this = Self {
            channel,
            _directory: directory,
        };
        let hello = hello("asker").to_bytes().expect("it fits");
        let reply = Reply::from_bytes(&this.ask(hello)).expect("a reply");
        assert!(matches!(reply, Reply::Hello(_)));
        this
    }

    fn ask(&self, request: Vec<u8>) -> Vec<u8> {
        let to = "directory".parse().expect("a name");
        let asked = self.channel.ask(&to, request.into(), soon());
        // Tokio would let a task that never yields wait for no more than 128 answers.
        let answer = block_on(tokio::task::unconstrained(asked));
        answer.expect("an answer").to_vec()
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

/// A member as its directory sees it: messages as bytes.
struct Member {
    session: Session,
    directory: Arc<DirectoryHost>,
    sequence: u64,
    messages: u64,
    bytes: u64,
}

impl Member {
    fn new(directory: &Arc<DirectoryHost>, number: u64) -> Self {
        let mut this = Self {
            session: Session {
                peer: format!("member-{number:016x}").parse().expect("a name"),
                incarnation: number,
            },
            directory: Arc::clone(directory),
            sequence: 0,
            messages: 0,
            bytes: 0,
        };
        let hello = hello(&format!("member-{number}"));
        assert!(matches!(this.ask(&hello), Reply::Hello(_)));
        this
    }

    fn ask(&mut self, request: &Request) -> Reply {
        let request = request.to_bytes().expect("it fits");
        let reply = self.directory.serve(&self.session, &request);
        self.messages += 1;
        self.bytes += (request.len() + reply.len()) as u64;
        Reply::from_bytes(&reply).expect("a reply")
    }

    fn announce(
        &mut self,
        added: impl Iterator<Item = u64>,
        removed: impl Iterator<Item = u64>,
    ) -> Reply {
        self.sequence += 1;
        self.ask(&Request::Announce(stamped(Announce {
            generation: 1,
            sequence: self.sequence,
            added: added.map(fingerprint).collect(),
            removed: removed.map(fingerprint).collect(),
            digest: None,
        })))
    }
}

fn main() {
    let entries = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let mut sockets = Builder::new_multi_thread();
    let sockets = sockets.worker_threads(2).enable_all().build();
    let sockets = sockets.expect("threads");
    let runtime = Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without IO can be built");
    runtime.block_on(async {
        one_table(entries.unwrap_or(10_000_000), sockets.handle()).await;
        many_members(1000, 1000).await;
    });
}

/// Fills one directory by few members, and looks prompts up.
async fn one_table(entries: u64, sockets: &Handle) {
    const MEMBERS: u64 = 10;
    let directory = host(entries as usize);
    let chunks = entries / MEMBERS;
    let begun = Instant::now();
    let mut members: Vec<Member> = (0..MEMBERS).map(|n| Member::new(&directory, n)).collect();
    for first in (0..chunks).step_by(MAX_ANNOUNCED) {
        for (number, member) in members.iter_mut().enumerate() {
            let offset = number as u64 * chunks;
            let end = (first + MAX_ANNOUNCED as u64).min(chunks);
            let reply = member.announce(offset + first..offset + end, 0..0);
            assert_eq!(reply, Reply::Announced(stamped(Announced::Applied)));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let filled = begun.elapsed();
    let status = directory.status();
    assert!(status.entries as u64 > entries / 100 * 99);
    let each = status.bytes as f64 / status.entries as f64;
    println!(
        "one directory of {} entries: {:.2} bytes an entry, {:.0} ns to announce one",
        status.entries,
        each,
        filled.as_nanos() as f64 / entries as f64
    );
    assert!(each <= 24.0);
    let mut rng = Rng::new(1);
    let asker = members[0].session.clone();
    let here = |find: Vec<u8>| directory.serve(&asker, &find);
    let connected = Connected::new(&directory, sockets);
    let there = |find: Vec<u8>| connected.ask(find);
    type Ask<'a> = &'a dyn Fn(Vec<u8>) -> Vec<u8>;
    let times = |what: &str, ask: Ask<'_>, first: &mut dyn FnMut() -> u64| {
        let mut times: Vec<Duration> = Vec::new();
        for _ in 0..1000 {
            let first = first();
            let keys: Vec<Fingerprint> = (first..first + PROMPT).map(fingerprint).collect();
            let find = Request::Find(stamped(Find {
                keys: keys.into_iter().collect(),
            }));
            let find = find.to_bytes().expect("it fits");
            let begun = Instant::now();
            black_box(ask(black_box(find)));
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        println!(
            "  look-up of {PROMPT} keys, {what}: p50 {:?}, p99 {:?}",
            times[500], times[990]
        );
    };
    let mut anywhere = || chunks + rng.below(entries - chunks - PROMPT);
    times("all at one member", &here, &mut anywhere);
    times("the same, asked over loopback", &there, &mut anywhere);
    tokio::time::sleep(Duration::from_secs(1)).await;
    times("none there", &here, &mut || u64::MAX / 2);
    tokio::time::sleep(Duration::from_secs(1)).await;
    // A system prompt that all members have.
    for member in &mut members {
        member.announce(u64::MAX / 3..u64::MAX / 3 + PROMPT, 0..0);
    }
    times("all at each member", &here, &mut || u64::MAX / 3);
}

fn host(entries: usize) -> Arc<DirectoryHost> {
    let mut limits = TableLimits::for_entries(entries + entries / 8);
    limits.member_entries = limits.entries;
    DirectoryHost::new("directory".to_owned(), limits).expect("random numbers")
}

/// Simulates a minute of members that announce in steps of 100 ms, each of which replaces one in a
/// hundred of its chunks in a second, look prompts up, and share a tenth of their chunks.
async fn many_members(count: u64, chunks: u64) {
    const SECONDS: u64 = 60;
    const STEPS: u64 = 10;
    let directory = host((count * chunks) as usize);
    let house = Arc::clone(&directory);
    let house = tokio::spawn(async move { house.keep_house().await });
    let shared = chunks / 10;
    let mut members: Vec<Member> = (0..count).map(|n| Member::new(&directory, n)).collect();
    // First and next chunk of each.
    let own = |number: u64| (number + 1) << 32;
    let mut ranges: Vec<(u64, u64)> = (0..count)
        .map(|n| (own(n), own(n) + chunks - shared))
        .collect();
    let mut filled = Duration::ZERO;
    for (member, &(first, next)) in members.iter_mut().zip(&ranges) {
        let begun = Instant::now();
        let reply = member.announce((0..shared).chain(first..next), 0..0);
        assert_eq!(reply, Reply::Announced(stamped(Announced::Applied)));
        filled += begun.elapsed();
    }
    let said = |members: &[Member]| {
        let messages: u64 = members.iter().map(|member| member.messages).sum();
        (
            messages,
            members.iter().map(|member| member.bytes).sum::<u64>(),
        )
    };
    let before = said(&members);
    let (mut rng, mut busy, mut found) = (Rng::new(3), Duration::ZERO, 0);
    for step in 0..SECONDS * STEPS {
        for (number, member) in members.iter_mut().enumerate() {
            let range = &mut ranges[number];
            let replaced = (chunks / 100 / STEPS).max(1);
            let begun = Instant::now();
            member.announce(range.1..range.1 + replaced, range.0..range.0 + replaced);
            *range = (range.0 + replaced, range.1 + replaced);
            // Each looks one prompt of 32 chunks up in a second.
            if step % STEPS == number as u64 % STEPS {
                let other = own(rng.below(count));
                let first = other + (step * replaced) + rng.below(chunks / 2);
                let keys = (0..8).chain(first..first + 24).map(fingerprint);
                let find = Request::Find(stamped(Find {
                    keys: keys.collect(),
                }));
                if let Reply::Found(answer) = member.ask(&find) {
                    found += u64::from(answer.message.candidates.len() > 1);
                }
            }
            busy += begun.elapsed();
        }
        tokio::time::sleep(Duration::from_secs(1) / STEPS as u32).await;
    }
    house.abort();
    let after = said(&members);
    let status = directory.status();
    assert_eq!(
        (status.members as u64, status.entries as u64),
        (count, count * chunks)
    );
    let each = status.bytes as f64 / status.entries as f64;
    let messages = (after.0 - before.0) as f64 / SECONDS as f64;
    let bytes = (after.1 - before.1) as f64 / SECONDS as f64;
    println!(
        "{count} members of {chunks} chunks under a virtual clock, 1 % of them replaced and a \
         prompt looked up by each in a second:"
    );
    println!(
        "  {:.2} bytes an entry; first announcements {:.0} ms in all",
        each,
        filled.as_secs_f64() * 1e3
    );
    println!(
        "  {messages:.0} messages a second ({:.1} of each member), {:.2} MB/s, {:.0} % of a core \
         with both sides; {found} prompts found",
        messages / count as f64,
        bytes / 1e6,
        busy.as_secs_f64() / SECONDS as f64 * 100.0
    );
    assert!(each <= 24.0 && found > count);
}
