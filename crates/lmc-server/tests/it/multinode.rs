//! Daemons on several hosts, which are network namespaces: `cargo xtask test-multinode`.
//!
//! In each case an owner and a reader are peers, and something befalls the owner or the link while
//! the reader looks a prompt up. Every byte that is read back is compared, every lookup ends, what
//! was leased and reserved comes back, and afterwards chunks are found at the peer again.

mod network;
mod pd;

use std::thread;
use std::time::Duration;

use crate::common::Server;
use crate::common::prompt::{CHUNKS, Prompt, await_hits, register_wide};
use lmc_testkit::{Folder, until, write_secret};
use lmc_vllm_adapter::{Client, Request};
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
/// Rate of a slow link, at which a large prompt takes six seconds.
const SLOW: &str = "16mbit";
/// Bytes that have crossed a slow link when a read is under way.
const MIDDLE: u64 = 1 << 20;
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
            write_secret(&key, &"0123456789abcdef".repeat(4));
        }
        let key = key.to_str().expect("text");
        // A pool of five large prompts, of which a peer may lease one.
        let mut args = vec!["--l1-size-gb", "128MiB", "--p2p-key", key];
        // The machine may be busy.
        args.extend(["--p2p-locate-timeout", "1s"]);
        // No wait of a request ends by its time.
        args.extend(["--p2p-max-wait", "5m"]);
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

/// Stores prompts at the owner until one of them was read over NIXL.
fn until_read_over_nixl(at_owner: &mut Worker, reader: &Daemon<'_>, at_reader: &mut Worker) {
    let over_nixl = "lmc_tier_event_bytes_total{tier=\"peers\",what=\"read_nixl\"}";
    let before = reader.metric(over_nixl);
    // Those of another host are others.
    let mut prompts = (100 * (reader.host as u32 + 1)..).map(Prompt);
    until("a prompt is read over NIXL", || {
        let prompt = prompts.next().expect("there are many");
        at_owner.store(prompt);
        at_reader.until_found(prompt);
        reader.metric(over_nixl) > before
    });
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
            until_read_over_nixl(&mut at_owner, &reader, &mut at_reader);
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
        self.ends_early();
        self.reader.until_nothing_is_held();
    }

    /// As [`Self::is_cut_short`], where memory may stay in quarantine.
    fn ends_early(&mut self) {
        let hits = self.at_reader.finish(Prompt(1), "cut short");
        assert!(hits < WHOLE, "nothing has disturbed the read");
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
    daemons_read_each_other(SOCKETS);
}

fn daemons_read_each_other(transport: &'static str) {
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
        let owner = Daemon::start_by(&network, OWNER, &at(&one), "", &key, transport);
        let reader = Daemon::start_by(&network, READER, &at(&other), &named, &key, transport);
        let (mut at_owner, mut at_reader) = (owner.worker(SMALL), reader.worker(SMALL));
        at_owner.store(Prompt(0));
        at_reader.until_found(Prompt(0));
        // More where a read was late, and was asked for again.
        assert!(owner.counter("served") >= CHUNKS as f64, "{named}");
        // One of two that names the other is enough.
        at_reader.store(Prompt(1));
        at_owner.until_found(Prompt(1));
        assert!(reader.counter("served") >= CHUNKS as f64, "{named}");
        if transport == NIXL {
            until_read_over_nixl(&mut at_owner, &reader, &mut at_reader);
            until_read_over_nixl(&mut at_reader, &owner, &mut at_owner);
        }
        owner.until_nothing_is_held();
        reader.until_nothing_is_held();
    }
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_peer_is_found_again_under_another_address() {
    a_peer_comes_back(SOCKETS);
}

fn a_peer_comes_back(transport: &'static str) {
    let network = Network::new();
    let key = Folder::temporary();
    network.resolve(READER, &[v4(1)], "owner");
    let listen = at(&v4(2));
    let reader = Daemon::start_by(&network, READER, &listen, &at("owner"), &key, transport);
    let mut at_reader = reader.worker(SMALL);
    for (number, prompt) in [(1, Prompt(0)), (7, Prompt(1))] {
        network.change_addresses(OWNER, number);
        network.resolve(READER, &[v4(number)], "owner");
        let listen = at(&v4(number));
        let owner = Daemon::start_by(&network, OWNER, &listen, "", &key, transport);
        let mut at_owner = owner.worker(SMALL);
        at_owner.store(prompt);
        at_reader.until_found(prompt);
        // More where a read was late, as on a loaded machine, and was asked for again.
        assert!(owner.counter("served") >= CHUNKS as f64);
        if transport == NIXL {
            until_read_over_nixl(&mut at_owner, &reader, &mut at_reader);
        }
    }
    reader.until_nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn each_address_of_a_name_is_a_peer() {
    let network = Network::new();
    let key = Folder::temporary();
    network.resolve(READER, &[v4(1), v6(1)], "owners");
    let listen = at(&v4(2));
    let reader = Daemon::start(&network, READER, &listen, &at("owners"), &key);
    let mut at_reader = reader.worker(SMALL);
    let owners = [v4(1), v6(1)].map(|at| Daemon::start(&network, OWNER, &self::at(&at), "", &key));
    for (prompt, owner) in (0..).map(Prompt).zip(&owners) {
        owner.worker(SMALL).store(prompt);
        at_reader.until_found(prompt);
        // More where a read was late, as on a loaded machine, and was asked for again.
        assert!(owner.counter("served") >= CHUNKS as f64, "{prompt:?}");
    }
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_link_that_delays_and_drops_frames_costs_time_only() {
    a_link_delays_and_drops_frames(SOCKETS);
}

fn a_link_delays_and_drops_frames(transport: &'static str) {
    let mut network = Network::new();
    network.degrade(OWNER, 5, 20);
    let key = Folder::temporary();
    let (one, other) = (at(&v4(1)), at(&v4(2)));
    let owner = Daemon::start_by(&network, OWNER, &one, "", &key, transport);
    let reader = Daemon::start_by(&network, READER, &other, &one, &key, transport);
    let (mut at_owner, mut at_reader) = (owner.worker(SMALL), reader.worker(SMALL));
    if transport == NIXL {
        until_read_over_nixl(&mut at_owner, &reader, &mut at_reader);
    }
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
fn chunks_from_before_a_clear_are_served_by_neither_side_of_a_cut() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    network.speed_up(OWNER);
    network.cut(READER, true);
    // The owner has prompt 0 as well.
    pair.at_reader.store(Prompt(1));
    let clear = Request::Clear { force: true };
    let error = pair.at_owner.client.ask(&clear).expect_err("it is cut off");
    let text = error.to_string();
    assert!(
        text.contains("cleared here; not confirmed by peers"),
        "{text}"
    );
    let look_up = |at: &mut Worker, prompt: u32, attempt: usize| {
        let request = format!("old-{prompt}-{attempt}");
        at.begin(Prompt(prompt), &request);
        at.finish(Prompt(prompt), &request)
    };
    for prompt in 0..2 {
        assert_eq!(look_up(&mut pair.at_owner, prompt, 0), 0);
        // The reader has not heard of it, and has its own.
        assert_eq!(look_up(&mut pair.at_reader, prompt, 0), WHOLE);
    }
    let read = pair.owner.counter("read");
    network.cut(READER, false);
    let mut attempt = 0;
    until("the reader has heard of the clear", || {
        attempt += 1;
        let prompts = [0, 1];
        for prompt in prompts {
            assert_eq!(look_up(&mut pair.at_owner, prompt, attempt), 0);
        }
        let found = prompts.map(|prompt| look_up(&mut pair.at_reader, prompt, attempt));
        found == [0, 0]
    });
    for prompt in 0..2 {
        assert_eq!(look_up(&mut pair.at_owner, prompt, attempt + 1), 0);
    }
    assert_eq!(pair.owner.counter("read"), read);
    // What is computed from then on is read in both directions.
    for prompt in 0..2 {
        pair.at_owner.store(Prompt(prompt));
        pair.at_reader.until_found(Prompt(prompt));
    }
    pair.at_reader.store(Prompt(3));
    pair.at_owner.until_found(Prompt(3));
    pair.owner.until_nothing_is_held();
    pair.reader.until_nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn an_owner_that_is_killed_between_lookup_and_retrieve_is_a_miss() {
    let network = Network::new();
    an_owner_is_killed_before_the_retrieve(Pair::start(&network));
}

fn an_owner_is_killed_before_the_retrieve(mut pair: Pair<'_>) {
    let network = pair.owner.network;
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
    an_owner_stops_before_the_retrieve(Pair::start(&network));
}

fn an_owner_stops_before_the_retrieve(mut pair: Pair<'_>) {
    pair.at_owner.store(Prompt(1));
    pair.at_reader.begin(Prompt(1), "cut short");
    pair.owner.server.process.stop();
    match pair.transport {
        // Memory that the owner may still write to stays in quarantine while it is stopped.
        NIXL => pair.ends_early(),
        _ => pair.is_cut_short(),
    }
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
    fn daemons_read_each_other_over_ipv4_ipv6_and_behind_a_wildcard() {
        daemons_read_each_other(NIXL);
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn a_peer_is_found_again_under_another_address() {
        a_peer_comes_back(NIXL);
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn a_link_that_delays_and_drops_frames_costs_time_only() {
        a_link_delays_and_drops_frames(NIXL);
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn an_owner_that_is_killed_between_lookup_and_retrieve_is_a_miss() {
        let network = Network::new();
        an_owner_is_killed_before_the_retrieve(Pair::start_by(&network, NIXL));
    }

    #[test]
    #[ignore = "needs root, namespaces and NIXL: cargo xtask test-multinode"]
    fn an_owner_that_stops_between_lookup_and_retrieve_is_a_miss() {
        let network = Network::new();
        an_owner_stops_before_the_retrieve(Pair::start_by(&network, NIXL));
    }

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
        pair.ends_early();
        network.cut(READER, false);
        pair.goes_on();
    }
}
