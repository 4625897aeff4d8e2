//! Peers that hold the key and break the protocol: counted, bounded, and never fatal.
//!
//! Each test has three peers: a real daemon, an honest one whose chunks it reads, and one that lies.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use lmc_backend_p2p::chunk_digest;
use lmc_backend_p2p::message::{
    ChunkLease, ChunkState, Hello, KeyBatch, LATE_DIGEST, Lease, Leased, Located, OLDEST_VERSION,
    Released, Reply, Request, Stamped, VERSION,
};
use lmc_key::{ChunkKey, ClearsId};
use lmc_memory::{ArenaConfig, Pool, PoolConfig, checksum};
use lmc_testkit::{free_port, soon, until};
use lmc_transfer::{
    Address, ChannelConfig, Index, PeerEvent, PeerId, ReadLease, SocketChannel, SocketConfig,
    TransferChannel,
};
use lmc_vllm_adapter::Client;
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::common::Server;
use crate::common::prompt::{CHUNKS, Prompt, register};

/// Payload bytes of a chunk of the tests' prompts.
const LEN: u64 = 32 << 10;

/// The answer of a peer; `None` for none at all.
type Answer = Option<Vec<u8>>;

/// A peer made of a channel alone.
struct Liar {
    channel: Arc<SocketChannel>,
    runtime: Runtime,
    port: u16,
    /// Requests of the daemon that were answered by the test.
    asked: Arc<AtomicUsize>,
    /// The daemon's name on the channel.
    daemon: Arc<OnceLock<PeerId>>,
}

/// The memory of a liar, and what it granted of it.
struct Memory {
    pool: Pool,
    granted: Mutex<Vec<ReadLease>>,
}

impl Memory {
    /// Lets a peer read as many chunks as it asked for, of any bytes.
    fn grant(&self, channel: &SocketChannel, to: &PeerId, count: usize) -> Vec<(Index, u64)> {
        self.grant_of(channel, to, count, LEN)
    }

    /// As [`Self::grant`], of chunks of `len` bytes.
    fn grant_of(
        &self,
        channel: &SocketChannel,
        to: &PeerId,
        count: usize,
        len: u64,
    ) -> Vec<(Index, u64)> {
        let chunk = |_| {
            let mut slot = self.pool.reserve(len).expect("the pool is large");
            slot.bytes_mut().fill(0x5a);
            slot.written().seal()
        };
        let slots: Vec<_> = (0..count).map(chunk).collect();
        let sums: Vec<u64> = slots.iter().map(|slot| checksum(slot.bytes())).collect();
        let lease = channel.grant_read(to, slots).expect("the peer is there");
        let indices = lease.indices().to_vec();
        self.granted.lock().push(lease);
        indices.into_iter().zip(sums).collect()
    }
}

impl Liar {
    /// Starts a peer that says hello as the daemon does, and answers all else by `answer`.
    fn start(
        answer: impl Fn(&SocketChannel, &Memory, &PeerId, Request) -> Answer + Send + Sync + 'static,
    ) -> Self {
        let port = free_port();
        let arena = Arc::new(ArenaConfig::anonymous(8 << 20).build().expect("memory"));
        let pool = Pool::new(Arc::clone(&arena), PoolConfig::default()).expect("a pool");
        let memory = Arc::new(Memory {
            pool,
            granted: Mutex::default(),
        });
        // The channel owns what answers, which must not own the channel.
        let channel: Arc<OnceLock<Weak<SocketChannel>>> = Arc::default();
        let mut config = ChannelConfig::new("liar".parse().expect("a name"), arena);
        let (answer, asked) = (Arc::new(answer), Arc::new(AtomicUsize::new(0)));
        let (at, count) = (Arc::clone(&channel), Arc::clone(&asked));
        config.on_ask = Some(Arc::new(move |peer, _, question| {
            let request = Request::from_bytes(&question).expect("the daemon keeps to the protocol");
            let reply = match (request, at.get().and_then(Weak::upgrade)) {
                (Request::Hello(hello), _) => {
                    Some(Reply::Hello(hello).to_bytes().expect("it fits"))
                }
                (request, Some(channel)) => {
                    count.fetch_add(1, Ordering::Relaxed);
                    answer(&channel, &memory, peer, request)
                }
                _ => None,
            };
            Box::pin(async move {
                match reply {
                    Some(reply) => reply.into(),
                    None => std::future::pending().await,
                }
            })
        }));
        let daemon: Arc<OnceLock<PeerId>> = Arc::default();
        let name = Arc::clone(&daemon);
        config.on_peer = Some(Arc::new(move |peer, event| {
            if matches!(event, PeerEvent::Connected { .. }) {
                // Only the first counts.
                let _ = name.set(peer.clone());
            }
        }));
        let listen = Address::Tcp {
            host: "127.0.0.1".to_owned(),
            port,
        };
        let built = SocketConfig::new(config, listen).build();
        let built = Arc::new(built.expect("a channel"));
        let _ = channel.set(Arc::downgrade(&built));
        Self {
            channel: built,
            runtime: Runtime::new().expect("a runtime"),
            port,
            asked,
            daemon,
        }
    }

    /// Asks the daemon, and returns the reply.
    async fn ask(channel: &SocketChannel, daemon: &PeerId, request: Vec<u8>) -> Option<Reply> {
        let reply = channel.ask(daemon, request.into(), soon()).await.ok()?;
        Some(Reply::from_bytes(&reply).expect("the daemon keeps to the protocol"))
    }

    /// Returns the daemon's name, once it has connected.
    fn daemon(&self) -> PeerId {
        until("the daemon has connected", || self.daemon.get().is_some());
        self.daemon.get().expect("it has").clone()
    }
}

/// A daemon between an honest peer and a liar.
struct Daemon {
    server: Server,
    client: Client,
    shm_name: String,
    honest: Server,
    at_honest: Client,
    honest_shm: String,
    requests: usize,
}

impl Daemon {
    fn start(liar: u16) -> Self {
        let port = free_port();
        let at = |port: u16| format!("127.0.0.1:{port}");
        let serve = |listen: u16, peers: &str| {
            let listen = at(listen);
            let mut args = vec!["--l1-size-gb", "64MiB", "--p2p-listen", &listen];
            // The machine may be busy.
            args.extend(["--p2p-locate-timeout", "500ms"]);
            // A peer that does not serve a chunk costs no more than this.
            args.extend(["--disk-read-timeout-seconds", "5"]);
            if !peers.is_empty() {
                args.extend(["--p2p-peer", peers]);
            }
            Server::start(&args)
        };
        let honest = serve(port, "");
        let server = serve(free_port(), &format!("{},{}", at(liar), at(port)));
        let mut client = server.client();
        let shm_name = register(&mut client);
        let mut at_honest = honest.client();
        let honest_shm = register(&mut at_honest);
        Prompt(1).store(&mut client, &shm_name);
        Self {
            server,
            client,
            shm_name,
            honest,
            at_honest,
            honest_shm,
            requests: 0,
        }
    }

    fn retrieve(&mut self, prompt: Prompt) -> usize {
        self.requests += 1;
        let request = format!("request-{}", self.requests);
        prompt.retrieve(&mut self.client, &self.shm_name, &request) as usize
    }

    fn counter(&self, what: &str) -> f64 {
        let series = format!("lmc_tier_events_total{{tier=\"peers\",what=\"{what}\"}}");
        self.server.metric(&series)
    }

    /// Looks up what no honest peer has until the liar has been counted.
    fn until_counted(&mut self, what: &str) {
        until(what, || {
            assert_eq!(self.retrieve(Prompt(2)), 0, "there is no such chunk");
            self.counter(what) > 0.0
        });
    }

    /// As [`Self::serves`], and asserts that nothing is held afterwards.
    fn goes_on(&mut self) {
        self.serves(3);
        for server in [&self.server, &self.honest] {
            for held in ["lmc_leases", "lmc_reserved_slots", "lmc_quarantined_slots"] {
                until(held, || server.metric(held) == 0.0);
            }
        }
    }

    /// Asserts that it serves what it has, and what its honest peer has.
    fn serves(&mut self, prompt: u32) {
        assert_eq!(self.retrieve(Prompt(1)), CHUNKS, "its own chunks");
        Prompt(prompt).store(&mut self.at_honest, &self.honest_shm);
        until("the honest peer's chunks are found", || {
            self.retrieve(Prompt(prompt)) == CHUNKS
        });
    }
}

/// A message of a side that has carried out no clear.
fn stamped<T>(message: T) -> Stamped<T> {
    Stamped {
        clears: ClearsId::NONE,
        message,
    }
}

/// Claims to have every chunk of a request, of this length.
fn located(locate: &Stamped<KeyBatch>, len: u64) -> Answer {
    let states = vec![ChunkState::Memory { len }; locate.message.len()];
    let located = Located {
        states,
        ..Located::default()
    };
    Reply::Located(Stamped {
        clears: locate.clears,
        message: located,
    })
    .to_bytes()
    .ok()
}

fn leased(lease: &Lease, chunks: Vec<ChunkLease>) -> Answer {
    assert_eq!(chunks.len(), lease.keys.len());
    let leased = Leased {
        lease: 7,
        duration_ms: 2000,
        chunks,
        holders: Vec::new(),
    };
    Reply::Leased(stamped(leased)).to_bytes().ok()
}

/// Answers that all of a lease's chunks were leased without a gap, without their digests.
fn held(chunks: usize) -> Released {
    Released {
        held: vec![true; chunks],
        ..Released::default()
    }
}

/// Answers as a peer that has every chunk, whose leases are `lease`'s.
fn has_everything(
    len: u64,
    lease: impl Fn(&SocketChannel, &Memory, &PeerId, &Lease) -> Vec<ChunkLease> + Send + Sync + 'static,
) -> Liar {
    Liar::start(move |channel, memory, peer, request| match request {
        Request::Locate(locate) => located(&locate, len),
        Request::Lease(Stamped { message: asked, .. }) => {
            leased(&asked, lease(channel, memory, peer, &asked))
        }
        Request::Renew(_) => Reply::Renewed(true).to_bytes().ok(),
        Request::Release(_) => Reply::Released(held(64)).to_bytes().ok(),
        Request::Clears(clears) => Reply::Cleared(clears).to_bytes().ok(),
        _ => Reply::Noted(()).to_bytes().ok(),
    })
}

#[test]
fn a_peer_that_answers_nonsense_is_counted_and_others_are_read() {
    let liar = Liar::start(|_, _, _, _| Some(b"nonsense".to_vec()));
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("malformed");
    daemon.goes_on();
}

#[test]
fn a_peer_that_never_answers_is_counted_and_others_are_read() {
    let liar = Liar::start(|_, _, _, _| None);
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("failed");
    assert!(liar.asked.load(Ordering::Relaxed) > 0);
    daemon.goes_on();
}

/// Other kinds of replies than were asked for, and answers for other numbers of chunks.
#[test]
fn a_peer_that_answers_something_else_is_a_miss() {
    let liar = Liar::start(|_, _, _, request| match request {
        Request::Locate(_) => Reply::Released(held(1)).to_bytes().ok(),
        _ => Reply::Renewed(true).to_bytes().ok(),
    });
    let mut daemon = Daemon::start(liar.port);
    until("it was asked", || {
        daemon.retrieve(Prompt(2)) == 0 && liar.asked.load(Ordering::Relaxed) > 3
    });
    daemon.goes_on();
}

#[test]
fn indices_that_lie_are_no_hits() {
    let liar = has_everything(LEN, |_, _, _, lease| {
        let lie = |at: usize| ChunkLease::Granted {
            index: match at % 2 {
                0 => Index::arena(u64::MAX, at as u64),
                _ => Index::from_bytes([at as u8; 24]),
            },
            len: LEN,
            digest: 1,
        };
        (0..lease.keys.len()).map(lie).collect()
    });
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("failed");
    daemon.goes_on();
}

#[test]
fn digests_that_lie_are_no_hits() {
    let liar = has_everything(LEN, |channel, memory, peer, lease| {
        let granted = memory.grant(channel, peer, lease.keys.len());
        let chunk = |(index, sum): (Index, u64)| ChunkLease::Granted {
            index,
            len: LEN,
            // The checksum of the bytes, without the key.
            digest: sum,
        };
        granted.into_iter().map(chunk).collect()
    });
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("corrupt");
    daemon.goes_on();
}

#[test]
fn digests_that_never_come_are_no_hits() {
    let liar = has_everything(LEN, |channel, memory, peer, lease| {
        let granted = memory.grant(channel, peer, lease.keys.len());
        let chunk = |(index, _): (Index, u64)| ChunkLease::Granted {
            index,
            len: LEN,
            digest: LATE_DIGEST,
        };
        granted.into_iter().map(chunk).collect()
    });
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("corrupt");
    daemon.goes_on();
}

#[test]
fn lengths_that_lie_are_no_hits() {
    // Longer at the lease than at the lookup.
    let liar = has_everything(LEN, |channel, memory, peer, lease| {
        let granted = memory.grant(channel, peer, lease.keys.len());
        let keys = lease.keys.keys();
        let chunk = |((index, sum), key): ((Index, u64), &ChunkKey)| ChunkLease::Granted {
            index,
            len: LEN + 1,
            digest: chunk_digest(key, sum),
        };
        granted.into_iter().zip(&keys).map(chunk).collect()
    });
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("missed");
    daemon.goes_on();
}

/// A false length at the lookup and at the lease, with digests of the bytes that are granted: they
/// were once committed, and then failed at each retrieve.
#[test]
fn chunks_of_another_length_than_their_space_has_are_no_hits() {
    let len = LEN / 2;
    let liar = has_everything(len, move |channel, memory, peer, lease| {
        let granted = memory.grant_of(channel, peer, lease.keys.len(), len);
        let keys = lease.keys.keys();
        let chunk = |((index, sum), key): ((Index, u64), &ChunkKey)| ChunkLease::Granted {
            index,
            len,
            digest: chunk_digest(key, sum),
        };
        granted.into_iter().zip(&keys).map(chunk).collect()
    });
    let mut daemon = Daemon::start(liar.port);
    daemon.until_counted("missed");
    assert_eq!(daemon.counter("read"), 0.0);
    daemon.goes_on();
}

/// A false length, at the lookup and at the lease.
#[test]
fn lengths_that_no_memory_has_are_no_hits() {
    for len in [1, LEN - 1, u64::MAX] {
        let liar = has_everything(len, move |channel, memory, peer, lease| {
            let granted = memory.grant(channel, peer, lease.keys.len());
            let chunk = |(index, sum): (Index, u64)| ChunkLease::Granted {
                index,
                len,
                digest: sum,
            };
            granted.into_iter().map(chunk).collect()
        });
        let mut daemon = Daemon::start(liar.port);
        daemon.until_counted("missed");
        assert_eq!(daemon.counter("read"), 0.0);
        daemon.goes_on();
    }
}

/// Returns the most memory that a process has had, in bytes.
fn peak(server: &Server) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.process.id()));
    let status = status.expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.expect("the kernel counts it") << 10
}

/// A peer that leases the same chunks again and again for as long as it may, and releases nothing.
#[test]
fn a_flood_of_requests_is_bounded_and_others_are_served() {
    const REQUESTS: usize = 800;
    let seen: Arc<Mutex<Option<KeyBatch>>> = Arc::default();
    let keys = Arc::clone(&seen);
    let liar = Liar::start(move |_, _, _, request| {
        if let Request::Locate(locate) = request
            && locate.message.len() > 1
        {
            *keys.lock() = Some(locate.message);
        }
        Reply::Noted(()).to_bytes().ok()
    });
    let mut daemon = Daemon::start(liar.port);
    let mut prompt = 3;
    // It may have been left out of a lookup for its lies.
    until("the liar knows keys of chunks that are here", || {
        daemon.serves(prompt);
        prompt += 1;
        seen.lock().is_some()
    });
    let before = peak(&daemon.server);
    let keys = seen.lock().clone().expect("it knows them");
    let (channel, name) = (Arc::clone(&liar.channel), liar.daemon());
    let flood = liar.runtime.spawn(async move {
        let hello = Hello {
            oldest: OLDEST_VERSION,
            newest: VERSION,
            features: 0,
            name: "liar".into(),
            address: "127.0.0.1:1".into(),
            chunk_size: 256,
            algorithm: "blake3".into(),
            clears: ClearsId::NONE,
            spaces: Vec::new(),
            is_draining: false,
        };
        let hello = Request::Hello(hello).to_bytes().expect("it fits");
        let reply = Liar::ask(&channel, &name, hello).await;
        assert!(matches!(reply, Some(Reply::Hello(_))), "{reply:?}");
        let lease = Request::Lease(stamped(Lease {
            keys,
            duration_ms: u32::MAX,
            wait_ms: u32::MAX,
        }));
        let lease = lease.to_bytes().expect("it fits");
        let mut tasks = tokio::task::JoinSet::new();
        let (mut granted, mut refused) = (0, 0);
        for _ in 0..REQUESTS {
            let (channel, name, lease) = (Arc::clone(&channel), name.clone(), lease.clone());
            tasks.spawn(async move { Liar::ask(&channel, &name, lease).await });
            while tasks.len() >= 512 {
                match tasks.join_next().await.expect("there are some") {
                    Ok(Some(Reply::Leased(leased))) => {
                        granted += u64::from(leased.message.lease > 0)
                    }
                    Ok(Some(Reply::Refused(_))) => refused += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
        (granted, refused)
    });
    while !flood.is_finished() {
        daemon.serves(prompt);
        prompt += 1;
    }
    let (granted, refused) = liar.runtime.block_on(flood).expect("no panic");
    assert!(
        granted > 0 && refused > 0,
        "{granted} granted, {refused} refused"
    );
    assert!(daemon.counter("refused") > 0.0);
    let grown = peak(&daemon.server) - before;
    assert!(grown < 128 << 20, "{grown} bytes more");
    // Its leases end with its connection.
    drop(liar);
    until("the leases end", || {
        daemon.server.metric("lmc_leases") == 0.0
    });
}
