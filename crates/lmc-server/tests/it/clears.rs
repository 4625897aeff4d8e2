//! Clears over real daemons with drives, peers and a shared store, which are killed, stopped and cut
//! off: what a daemon finds was computed after every clear that had reached it.
//!
//! The same model as `lmc-engine::clears`, which has thousands of seeds, over processes.

use std::thread;
use std::time::Duration;

use lmc_backend::Clears;
use lmc_backend::conformance::Rng;
use lmc_engine::ClearLog;
use lmc_testkit::{Folder, free_port, in_lab, until};
use lmc_vllm_adapter::{Client, Request};

use crate::common::Server;
use crate::common::prompt::{CHUNKS, Prompt, end, register};
use crate::common::relay::Relay;

const HOSTS: usize = 3;
const SEEDS: u64 = 20;
const STEPS: usize = 80;
const PROMPTS: u64 = 2;
/// Requests that an engine computes at a time.
const OPEN: usize = 4;

/// A request that was looked up at a host, and is stored later.
struct Open {
    request: String,
    prompt: Prompt,
    /// Number of its chunks' bytes, by which they are known.
    number: u32,
}

struct Host {
    name: String,
    flags: Vec<String>,
    folder: Folder,
    /// Peers reach the host by this.
    relay: Option<Relay>,
    running: Option<(Server, Client, String)>,
    open: Vec<Open>,
}

impl Host {
    fn start(&mut self) {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        let server = Server::start(&flags);
        let mut client = server.client();
        let shm_name = register(&mut client);
        self.running = Some((server, client, shm_name));
    }

    fn running(&mut self) -> (&Server, &mut Client, &str) {
        let (server, client, shm_name) = self.running.as_mut().expect("it was started");
        (server, client, shm_name)
    }

    /// Returns the clears that have reached the host, as its state file has them once they are in
    /// use.
    fn reached(&self) -> Clears {
        let folder = self.folder.join("state");
        let (server, ..) = self.running.as_ref().expect("it was started");
        let mut clears = Clears::default();
        until("the clears of the state file are in use", || {
            let log = ClearLog::read(&self.name, std::slice::from_ref(&folder));
            clears = Clears::clone(&log.expect("a sound state file").clears());
            let status = server.get("/status");
            let (_, body) = status.split_once("\r\n\r\n").expect("a body");
            let status: serde_json::Value = serde_json::from_str(body).expect("JSON");
            status["lmc"]["engine"]["clears_known"] == clears.total()
        });
        clears
    }
}

struct Fleet {
    rng: Rng,
    hosts: Vec<Host>,
    _store: Folder,
    /// Clears that had reached the host of each request when it was looked up.
    began: Vec<Clears>,
    hits: usize,
}

impl Fleet {
    fn new(seed: u64) -> Self {
        let inside = || Folder::inside(env!("CARGO_TARGET_TMPDIR"));
        let (has_peers, has_store) = match seed % 3 {
            0 => (true, false),
            1 => (false, true),
            _ => (true, true),
        };
        let store = inside();
        let ports = [(); HOSTS].map(|()| free_port());
        let relays = ports.map(|port| has_peers.then(|| Relay::start(port)));
        let at = |relay: &Option<Relay>| Some(format!("127.0.0.1:{}", relay.as_ref()?.port));
        let addresses: Vec<Option<String>> = relays.iter().map(at).collect();
        let host = |(index, relay): (usize, Option<Relay>)| {
            let folder = inside();
            let path = |name: &str| folder.join(name).to_str().expect("text").to_owned();
            let name = format!("host-{index}");
            let mut flags: Vec<String> = [
                "--l1-size-gb 64MiB --disk-create --disk-size 128MiB --disk-keep-free 0",
                "--remote-negative-ttl 0",
            ]
            .iter()
            .flat_map(|flags| flags.split(' '))
            .map(str::to_owned)
            .collect();
            let mut add = |flag: &str, value: String| flags.extend([flag.to_owned(), value]);
            add("--state-dir", path("state"));
            add("--disk", path("drive"));
            add("--p2p-name", name.clone());
            if has_peers {
                let others = addresses.iter().enumerate();
                let others = others.filter(|(other, _)| *other != index);
                let others: Vec<String> = others.filter_map(|(_, at)| at.clone()).collect();
                add("--p2p-listen", format!("127.0.0.1:{}", ports[index]));
                add("--p2p-peer", others.join(","));
            }
            if has_store {
                add("--remote", format!("file://{}", store.text()));
            }
            std::fs::create_dir(folder.join("drive")).expect("space");
            let mut host = Host {
                name,
                flags,
                folder,
                relay,
                running: None,
                open: Vec::new(),
            };
            host.start();
            host
        };
        Self {
            rng: Rng::new(seed),
            hosts: relays.into_iter().enumerate().map(host).collect(),
            _store: store,
            began: Vec::new(),
            hits: 0,
        }
    }

    fn some_host(&mut self) -> usize {
        self.rng.below(HOSTS as u64) as usize
    }

    /// An engine looks a prompt up, reads what is found, and computes the rest.
    fn look_up(&mut self) {
        let at = self.some_host();
        let prompt = Prompt(self.rng.below(PROMPTS) as u32);
        let number = self.began.len() as u32;
        let request = format!("request-{number}");
        let host = &mut self.hosts[at];
        let before = host.reached();
        let (_, client, shm_name) = host.running();
        let found = prompt.look_up_stamps(client, shm_name, &request);
        println!("look up {number} at {at}, which knows {before:?}: found {found:?}");
        for number in &found {
            let began = &self.began[*number as usize];
            assert!(
                began.contains(&before),
                "{} knows {before:?} and found what began after {began:?}",
                host.name
            );
        }
        self.hits += found.len();
        // What came between counts as known: it makes the check weaker, and never wrong.
        self.began.push(host.reached());
        if found.len() == CHUNKS {
            end(host.running().1, &request);
            return;
        }
        host.open.push(Open {
            request,
            prompt,
            number,
        });
        if host.open.len() > OPEN {
            self.store(at);
        }
    }

    /// An engine stores what it has computed.
    fn store(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        if host.open.is_empty() {
            return;
        }
        let which = self.rng.below(host.open.len() as u64) as usize;
        let open = host.open.swap_remove(which);
        let (_, client, shm_name) = host.running();
        println!("store {} at {at}", open.number);
        open.prompt
            .store_stamped(open.number, client, shm_name, &open.request);
    }

    fn clear(&mut self) {
        let at = self.some_host();
        let force = self.rng.chance(500);
        println!("clear at {at}");
        // One that is not confirmed by all is refused with a sentence, and carried out here.
        let _ = self.hosts[at].running().1.ask(&Request::Clear { force });
        let reached = self.hosts[at].reached();
        assert!(!reached.is_empty(), "no clear is in the state file");
    }

    fn restart(&mut self) {
        let at = self.some_host();
        let is_killed = self.rng.chance(500);
        println!("restart {at}, killed: {is_killed}");
        let host = &mut self.hosts[at];
        let has_cleared = !host.reached().is_empty();
        let (mut server, ..) = host.running.take().expect("it runs");
        match is_killed {
            true => server.process.kill(),
            false => server.terminate(),
        }
        host.start();
        // Its engine starts again with it, or goes on with what it has begun; docs/clears.md says where
        // that ends, for a server that has never cleared.
        if self.rng.chance(500) || !has_cleared {
            host.open.clear();
        }
    }

    fn cut(&mut self) {
        let (at, is_cut) = (self.some_host(), self.rng.chance(500));
        if let Some(relay) = &self.hosts[at].relay {
            relay.cut(is_cut);
        }
    }

    fn step(&mut self) {
        match self.rng.below(100) {
            0..45 => self.look_up(),
            45..75 => {
                let at = self.some_host();
                self.store(at);
            }
            75..82 => self.clear(),
            82..86 => self.restart(),
            86..90 => self.cut(),
            // Time for writes, and for clears to arrive.
            _ => thread::sleep(Duration::from_millis(100 * self.rng.below(8))),
        }
    }
}

#[test]
fn what_a_daemon_finds_was_computed_after_every_clear_that_had_reached_it() {
    if !in_lab("20 seeds of three daemons that are killed, cut off and cleared, 5 s each") {
        return;
    }
    let mut hits = 0;
    for seed in 0..SEEDS {
        let mut fleet = Fleet::new(seed);
        println!("seed {seed}");
        (0..STEPS).for_each(|_| fleet.step());
        hits += fleet.hits;
    }
    assert!(hits > 20 * CHUNKS, "{hits} hits prove little");
}
