//! Daemons on several hosts, which are network namespaces: `cargo xtask test-multinode`.
//!
//! In each case an owner and a reader are peers, and something befalls the owner or the link while
//! the reader looks a prompt up. Every byte that is read back is compared, every lookup ends, what
//! was leased and reserved comes back, and afterwards chunks are found at the peer again.

mod common;
#[path = "multinode/network.rs"]
mod network;

use std::thread;
use std::time::Duration;

use common::Server;
use common::prompt::{CHUNKS, Prompt, await_hits, register_wide};
use lmc_testkit::{Folder, until};
use lmc_vllm_adapter::Client;
use network::{Network, v4, v6};

/// Host that stores prompts.
const OWNER: usize = 0;
/// Host that looks them up.
const READER: usize = 1;
/// Port for peers on each host.
const PORT: u16 = 7700;
/// Values for each token of prompts that cross a link at once: 32 KiB a chunk.
const SMALL: u32 = 8;
/// Values for each token of prompts that cross a slow link for seconds: 2 MiB a chunk.
const LARGE: u32 = 512;
/// Rate of a slow link, at which a large prompt takes three seconds.
const SLOW: &str = "32mbit";
/// Bytes that have crossed a slow link when a read is in its middle.
const MIDDLE: u64 = 4 << 20;
/// Duration of a lease.
const LEASE: Duration = Duration::from_secs(2);

/// Transports of bytes between peers.
const SOCKETS: &str = "sockets";
const NIXL: &str = "nixl";

const WHOLE: u64 = CHUNKS as u64;

/// A daemon on a host.
struct Daemon<'a> {
    network: &'a Network,
    host: usize,
    server: Server,
}

impl<'a> Daemon<'a> {
    /// Starts a daemon whose peers are at these addresses.
    fn start(network: &'a Network, host: usize, listen: &str, peers: &str, key: &Folder) -> Self {
        Self::start_by(network, host, listen, peers, key, SOCKETS)
    }

    /// Starts one whose bytes go over a transport.
    fn start_by(
        network: &'a Network,
        host: usize,
        listen: &str,
        peers: &str,
        key: &Folder,
        transport: &str,
    ) -> Self {
        let key = key.join("key");
        if !key.exists() {
            std::fs::write(&key, "0123456789abcdef".repeat(4)).expect("the folder can be written");
        }
        let key = key.to_str().expect("text");
        // A pool of five large prompts, of which a peer may lease one.
        let mut args = vec!["--l1-size-gb", "128MiB", "--p2p-key", key];
        // The machine may be busy.
        args.extend(["--p2p-locate-timeout", "1s"]);
        args.extend(["--p2p-listen", listen, "--p2p-transport", transport]);
        args.extend(["--p2p-interfaces", network::DEVICE]);
        let advertised = v4(host + 1) + &format!(":{PORT}");
        if listen.starts_with("0.0.0.0") {
            args.extend(["--p2p-advertise", &advertised]);
        }
        if !peers.is_empty() {
            args.extend(["--p2p-peer", peers]);
        }
        let mut command = network.command(host, env!("CARGO_BIN_EXE_lmc"));
        command.env("UCX_TLS", "tcp");
        Self {
            network,
            host,
            server: Server::start_by(command, &args),
        }
    }

    /// Connects a worker.
    fn worker(&self, width: u32) -> Worker {
        let mut client = self.network.on(self.host, || self.server.client());
        let shm_name = register_wide(&mut client, width);
        Worker { client, shm_name }
    }

    fn metric(&self, series: &str) -> f64 {
        self.network.on(self.host, || self.server.metric(series))
    }

    /// Returns a counter of its tier of peers.
    fn counter(&self, what: &str) -> f64 {
        self.metric(&format!(
            "lmc_tier_events_total{{tier=\"peers\",what=\"{what}\"}}"
        ))
    }

    /// Waits until nothing is leased or reserved any more, and no memory is taken but by chunks.
    fn until_nothing_is_held(&self) {
        let held = [
            "lmc_leases",
            "lmc_reserved_slots",
            "lmc_quarantined_slots",
            "lmc_sessions",
            "lmc_pending_stores",
            "lmc_pending_retrieves",
        ];
        for series in held {
            until(series, || self.metric(series) == 0.0);
        }
        until("the pool holds chunks only", || {
            self.metric("lmcache_mp_l1_memory_usage_bytes") == self.metric("lmc_chunk_bytes")
        });
    }
}

/// A worker of an engine beside a daemon.
struct Worker {
    client: Client,
    shm_name: String,
}

impl Worker {
    fn store(&mut self, prompt: Prompt) {
        // A daemon that was stopped takes no stores for a while.
        until("the daemon takes the prompt", || {
            prompt.try_store(&mut self.client, &self.shm_name)
        });
    }

    /// Sends a lookup, whose search goes on meanwhile.
    fn begin(&mut self, prompt: Prompt, request: &str) {
        prompt.begin_lookup(&mut self.client, request);
    }

    /// Waits for the lookup's end, and reads back what was found.
    fn finish(&mut self, prompt: Prompt, request: &str) -> u64 {
        let hits = await_hits(&mut self.client, request);
        prompt.read_back(&mut self.client, &self.shm_name, request, hits);
        hits
    }

    /// Looks a prompt up until all of it is found: the peers may not have met yet.
    fn until_found(&mut self, prompt: Prompt) {
        let mut attempt = 0;
        until("the peer's chunks are found", || {
            attempt += 1;
            let request = format!("found-{}-{attempt}", prompt.0);
            self.begin(prompt, &request);
            self.finish(prompt, &request) == WHOLE
        });
    }
}

/// Returns `ADDRESS:PORT`.
fn at(address: &str) -> String {
    match address.contains(':') {
        true => format!("[{address}]:{PORT}"),
        false => format!("{address}:{PORT}"),
    }
}

/// An owner that has stored prompt 0, and a reader that has read it, over a slow link from now on.
struct Pair<'a> {
    owner: Daemon<'a>,
    reader: Daemon<'a>,
    at_owner: Worker,
    at_reader: Worker,
    key: Folder,
    transport: &'static str,
}

impl<'a> Pair<'a> {
    fn start(network: &'a Network) -> Self {
        Self::start_by(network, SOCKETS)
    }

    fn start_by(network: &'a Network, transport: &'static str) -> Self {
        let key = Folder::temporary();
        let (one, other) = (at(&v4(OWNER + 1)), at(&v4(READER + 1)));
        let owner = Daemon::start_by(network, OWNER, &one, "", &key, transport);
        let reader = Daemon::start_by(network, READER, &other, &one, &key, transport);
        let mut at_owner = owner.worker(LARGE);
        let mut at_reader = reader.worker(LARGE);
        at_owner.store(Prompt(0));
        at_reader.until_found(Prompt(0));
        if transport == NIXL {
            let mut prompts = (100..).map(Prompt);
            until("a prompt is read over NIXL", || {
                let prompt = prompts.next().expect("there are many");
                at_owner.store(prompt);
                at_reader.until_found(prompt);
                reader.counter("read_nixl_bytes") > 0.0
            });
        }
        network.slow_down(OWNER, SLOW);
        Self {
            owner,
            reader,
            at_owner,
            at_reader,
            key,
            transport,
        }
    }

    /// Stores prompt 1 at the owner, and begins to read it: returns when bytes cross the link.
    fn begin_to_read(&mut self) {
        self.at_owner.store(Prompt(1));
        let network = self.owner.network;
        let before = network.received(READER);
        self.at_reader.begin(Prompt(1), "cut short");
        until("the reader reads", || {
            network.received(READER) - before > MIDDLE
        });
    }

    /// Awaits the read that [`Self::begin_to_read`] began, which something has ended early.
    fn is_cut_short(&mut self) {
        let hits = self.at_reader.finish(Prompt(1), "cut short");
        assert!(hits < WHOLE, "nothing has disturbed the read");
        self.reader.until_nothing_is_held();
    }

    /// Stores another prompt at the owner, and reads it.
    fn goes_on(&mut self) {
        self.owner.network.speed_up(OWNER);
        self.at_owner.store(Prompt(2));
        self.at_reader.until_found(Prompt(2));
        self.owner.until_nothing_is_held();
        self.reader.until_nothing_is_held();
    }

    /// Starts the owner again, after its end.
    fn restart(&mut self) {
        self.owner.server.process.kill();
        let (network, listen) = (self.owner.network, at(&v4(OWNER + 1)));
        let again = Daemon::start_by(network, OWNER, &listen, "", &self.key, self.transport);
        self.owner = again;
        self.at_owner = self.owner.worker(LARGE);
    }
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn daemons_read_each_other_over_ipv4_ipv6_and_behind_a_wildcard() {
    let network = Network::new();
    let key = Folder::temporary();
    let families = [
        [v4(1), v4(2)],
        [v6(1), v6(2)],
        ["0.0.0.0".to_owned(), "0.0.0.0".to_owned()],
    ];
    for [one, other] in families {
        let named = match one.starts_with("0.") {
            true => at(&v4(1)),
            false => at(&one),
        };
        let owner = Daemon::start(&network, OWNER, &at(&one), "", &key);
        let reader = Daemon::start(&network, READER, &at(&other), &named, &key);
        let (mut at_owner, mut at_reader) = (owner.worker(SMALL), reader.worker(SMALL));
        at_owner.store(Prompt(0));
        at_reader.until_found(Prompt(0));
        assert_eq!(owner.counter("served"), CHUNKS as f64, "{named}");
        // One of two that names the other is enough.
        at_reader.store(Prompt(1));
        at_owner.until_found(Prompt(1));
        assert_eq!(reader.counter("served"), CHUNKS as f64, "{named}");
        owner.until_nothing_is_held();
        reader.until_nothing_is_held();
    }
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_peer_is_found_again_under_another_address() {
    let network = Network::new();
    let key = Folder::temporary();
    network.resolve(READER, &v4(1), "owner");
    let listen = at(&v4(2));
    let reader = Daemon::start(&network, READER, &listen, &at("owner"), &key);
    let mut at_reader = reader.worker(SMALL);
    for (number, prompt) in [(1, Prompt(0)), (7, Prompt(1))] {
        network.change_addresses(OWNER, number);
        network.resolve(READER, &v4(number), "owner");
        let owner = Daemon::start(&network, OWNER, &at(&v4(number)), "", &key);
        owner.worker(SMALL).store(prompt);
        at_reader.until_found(prompt);
        assert_eq!(owner.counter("served"), CHUNKS as f64);
    }
    reader.until_nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_link_that_delays_and_drops_frames_costs_time_only() {
    let mut network = Network::new();
    network.degrade(OWNER, 5, 20);
    let key = Folder::temporary();
    let (one, other) = (at(&v4(1)), at(&v4(2)));
    let owner = Daemon::start(&network, OWNER, &one, "", &key);
    let reader = Daemon::start(&network, READER, &other, &one, &key);
    let (mut at_owner, mut at_reader) = (owner.worker(SMALL), reader.worker(SMALL));
    for prompt in 0..8 {
        at_owner.store(Prompt(prompt));
        at_reader.until_found(Prompt(prompt));
    }
    owner.until_nothing_is_held();
    reader.until_nothing_is_held();
    assert_eq!(reader.counter("corrupt"), 0.0);
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_link_that_is_cut_while_peers_are_asked_is_a_miss() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.at_owner.store(Prompt(1));
    network.cut(READER, true);
    pair.at_reader.begin(Prompt(1), "cut off");
    assert_eq!(pair.at_reader.finish(Prompt(1), "cut off"), 0);
    assert!(pair.reader.counter("failed") > 0.0);
    pair.reader.until_nothing_is_held();
    network.cut(READER, false);
    pair.goes_on();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_link_that_is_cut_in_mid_read_is_a_miss() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.begin_to_read();
    network.cut(READER, true);
    pair.is_cut_short();
    // Its peer is silent: the lease is over by time.
    pair.owner.until_nothing_is_held();
    network.cut(READER, false);
    pair.goes_on();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn an_owner_that_is_killed_between_lookup_and_retrieve_is_a_miss() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.at_owner.store(Prompt(1));
    pair.at_reader.begin(Prompt(1), "cut short");
    pair.owner.server.process.kill();
    pair.is_cut_short();
    // What the lookup has brought here is read, whatever becomes of its owner.
    pair.restart();
    network.speed_up(OWNER);
    pair.at_owner.store(Prompt(1));
    let (mut attempt, mut request) = (0, String::new());
    until("the peer's chunks are here", || {
        attempt += 1;
        request = format!("here-{attempt}");
        pair.at_reader.begin(Prompt(1), &request);
        let hits = await_hits(&mut pair.at_reader.client, &request);
        let whole = hits == WHOLE;
        if !whole {
            let Worker { client, shm_name } = &mut pair.at_reader;
            Prompt(1).read_back(client, shm_name, &request, hits);
        }
        whole
    });
    pair.owner.server.process.kill();
    let Worker { client, shm_name } = &mut pair.at_reader;
    Prompt(1).read_back(client, shm_name, &request, WHOLE);
    pair.reader.until_nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn an_owner_that_is_killed_in_mid_read_is_a_miss() {
    let network = Network::new();
    let pair = Pair::start(&network);
    an_owner_is_killed_in_mid_read(pair);
}

fn an_owner_is_killed_in_mid_read(mut pair: Pair<'_>) {
    pair.begin_to_read();
    pair.owner.server.process.kill();
    pair.is_cut_short();
    pair.restart();
    pair.owner.network.slow_down(OWNER, SLOW);
    pair.goes_on();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn an_owner_that_stops_between_lookup_and_retrieve_is_a_miss() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.at_owner.store(Prompt(1));
    pair.at_reader.begin(Prompt(1), "cut short");
    pair.owner.server.process.stop();
    pair.is_cut_short();
    pair.owner.server.signal(libc::SIGCONT);
    pair.goes_on();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn an_owner_that_stops_in_mid_read_and_evicts_later_gives_no_wrong_byte() {
    let network = Network::new();
    an_owner_stops_in_mid_read(Pair::start(&network));
}

fn an_owner_stops_in_mid_read(mut pair: Pair<'_>) {
    pair.begin_to_read();
    pair.owner.server.process.stop();
    // A stopped owner shows nothing of the end of its lease.
    thread::sleep(LEASE);
    pair.owner.server.signal(libc::SIGCONT);
    // The bytes that the reader waits for are overwritten at once: the pool holds ten prompts.
    (10..22).for_each(|prompt| pair.at_owner.store(Prompt(prompt)));
    let evicted = "lmc_evicted_chunks_total{reason=\"room\"}";
    assert!(pair.owner.metric(evicted) > 0.0);
    pair.is_cut_short();
    pair.goes_on();
}

/// With NIXL's library, which `LMC_NIXL_LIBRARY` names.
#[cfg(feature = "nixl")]
mod over_nixl {
    use super::*;

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn an_owner_that_is_killed_in_mid_read_is_a_miss() {
        let network = Network::new();
        an_owner_is_killed_in_mid_read(Pair::start_by(&network, NIXL));
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn an_owner_that_stops_in_mid_read_and_evicts_later_gives_no_wrong_byte() {
        let network = Network::new();
        an_owner_stops_in_mid_read(Pair::start_by(&network, NIXL));
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn a_link_that_is_cut_in_mid_read_is_a_miss() {
        let network = Network::new();
        let mut pair = Pair::start_by(&network, NIXL);
        pair.begin_to_read();
        network.cut(READER, true);
        // Memory that the owner may still write to stays in quarantine while the link is cut.
        let hits = pair.at_reader.finish(Prompt(1), "cut short");
        assert!(hits < WHOLE, "nothing has disturbed the read");
        network.cut(READER, false);
        pair.goes_on();
    }
}
