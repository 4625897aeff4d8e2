//! The engine's side through a proxy that meddles with the server's answers: late, twice, in another
//! order, changed, cut off, or drowned in others.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::engine::{BLOCK, BLOCKS, Engine, blocks, engine, hashes, op, tokens, until};
use crate::common::{CHUNK, Server};
use lmc_engine::InUse;
use lmc_testkit::rounds;
use lmc_vllm_adapter::RequestConfigs;
use lmc_vllm_adapter::adapters::{Endpoint, SchedulerAdapter, Timeouts};

/// Bytes of a ZMTP greeting.
const GREETING: usize = 64;
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// For engines of which some answers are lost, and no request must succeed.
const SHORT_ANSWERS: Timeouts = Timeouts {
    start: Duration::from_secs(5),
    answer: Duration::from_millis(500),
    ping: Duration::from_secs(2),
};

/// Operations, by their numbers in the protocol.
const PREPARE_STORE: u8 = 16;
const PREPARE_RETRIEVE: u8 = 18;
const GET_EXPERIMENTAL: u8 = 32;

/// An answer of the server, frame by frame: number of the request, operation, value.
#[derive(Debug, Clone)]
struct Message(Vec<Vec<u8>>);

impl Message {
    fn is_to(&self, operation: u8) -> bool {
        self.0.get(1).is_some_and(|frame| frame == &[operation])
    }

    /// Returns the message under a number that no request has.
    fn unasked(&self) -> Self {
        let mut frames = self.0.clone();
        frames[0] = vec![0xcf, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        Self(frames)
    }

    fn encoded(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (index, frame) in self.0.iter().enumerate() {
            let more = u8::from(index + 1 < self.0.len()) * MORE;
            bytes.push(more | LONG);
            bytes.extend_from_slice(&(frame.len() as u64).to_be_bytes());
            bytes.extend_from_slice(frame);
        }
        bytes
    }
}

/// Action of the proxy on an answer.
enum Act {
    Send(Vec<Message>),
    /// Ends the connection after these bytes.
    Cut(Vec<u8>),
    /// Sends a message again and again until the connection ends.
    Flood(Message),
}

type Meddle = Box<dyn FnMut(Message) -> Act + Send>;

/// A piece of what the server sends.
enum Piece {
    /// The greeting, or a command.
    Other(Vec<u8>),
    Message(Message),
}

/// Takes whole pieces off the front of `bytes`.
#[derive(Default)]
struct Pieces {
    bytes: Vec<u8>,
    is_greeted: bool,
    frames: Vec<Vec<u8>>,
}

impl Pieces {
    fn next(&mut self) -> Option<Piece> {
        if !self.is_greeted {
            let whole = self.bytes.len() >= GREETING;
            self.is_greeted = whole;
            return whole.then(|| Piece::Other(self.bytes.drain(..GREETING).collect()));
        }
        loop {
            let flags = *self.bytes.first()?;
            let (head, len) = match flags & LONG != 0 {
                true => (
                    9,
                    u64::from_be_bytes(*self.bytes[1..].first_chunk()?) as usize,
                ),
                false => (2, usize::from(*self.bytes.get(1)?)),
            };
            if self.bytes.len() < head + len {
                return None;
            }
            let frame: Vec<u8> = self.bytes.drain(..head + len).collect();
            if flags & COMMAND != 0 {
                return Some(Piece::Other(frame));
            }
            self.frames.push(frame[head..].to_vec());
            if flags & MORE == 0 {
                return Some(Piece::Message(Message(std::mem::take(&mut self.frames))));
            }
        }
    }
}

/// Starts a proxy, and returns its address. Each connection's answers go through what `meddle`
/// returns for its number, which counts from 0.
fn proxy(server: &Server, mut meddle: impl FnMut(usize) -> Meddle + Send + 'static) -> Endpoint {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let to = server.address;
    thread::spawn(move || {
        for (number, near) in listener.incoming().enumerate() {
            let near = near.expect("a connection");
            // The server may be gone at the end of the test.
            let Ok(far) = TcpStream::connect(to) else {
                return;
            };
            let (mut requests, mut requests_to) = (
                near.try_clone().expect("a handle"),
                far.try_clone().expect("a handle"),
            );
            thread::spawn(move || {
                let _ = std::io::copy(&mut requests, &mut requests_to);
                let _ = requests_to.shutdown(Shutdown::Both);
            });
            let meddle = meddle(number);
            thread::spawn(move || {
                pass_answers(&far, &near, meddle);
                let _ = near.shutdown(Shutdown::Both);
                let _ = far.shutdown(Shutdown::Both);
            });
        }
    });
    format!("tcp://{address}").parse().expect("an address")
}

/// Passes answers on until the connection ends.
fn pass_answers(mut from: &TcpStream, mut to: &TcpStream, mut meddle: Meddle) {
    let mut pieces = Pieces::default();
    let mut bytes = [0; 4096];
    while let Ok(read @ 1..) = from.read(&mut bytes) {
        pieces.bytes.extend_from_slice(&bytes[..read]);
        while let Some(piece) = pieces.next() {
            let out = match piece {
                Piece::Other(bytes) => bytes,
                Piece::Message(message) => match meddle(message) {
                    Act::Send(messages) => messages.iter().flat_map(Message::encoded).collect(),
                    Act::Cut(bytes) => {
                        let _ = to.write_all(&bytes);
                        return;
                    }
                    Act::Flood(message) => {
                        let many = message.encoded().repeat(1000);
                        while to.write_all(&many).is_ok() {}
                        return;
                    }
                },
            };
            if to.write_all(&out).is_err() {
                return;
            }
        }
    }
}

/// Stores by one engine, and loads by another that was there before: byte for byte.
fn stores_and_loads(first: &mut Engine, second: &mut Engine, seed: u8) {
    let prompt = hashes(seed, 4);
    let content = u32::from(seed);
    first.store(&format!("s{seed}"), content, &prompt, 0..4, 0);
    let request = format!("l{seed}");
    assert_eq!(second.lookup(&request, &prompt), 4 * CHUNK as u64);
    assert!(second.load(&request, &prompt, 0..4, 5));
    assert!(second.content(content, &blocks(4, 5), 0, true));
    second.scheduler.end_session(&request);
}

#[test]
fn answers_that_come_twice_and_in_another_order_change_nothing() {
    let server = Server::start();
    // Each answer waits for the one after it, at least for that to a ping.
    let twisted = |_| -> Meddle {
        let (mut held, mut count) = (Vec::new(), 0);
        Box::new(move |message: Message| {
            count += 1;
            held.extend([message.clone(), message.unasked(), message]);
            // The setup asks one request after the other.
            match count <= 6 || held.len() > 3 {
                true => Act::Send(held.drain(..).rev().collect()),
                false => Act::Send(Vec::new()),
            }
        })
    };
    let through = proxy(&server, twisted);
    let mut first = Engine::at(&through, engine("i", true));
    let mut second = Engine::at(&through, engine("i", true));
    for seed in 1..=rounds(1, 3) as u8 {
        stores_and_loads(&mut first, &mut second, seed);
    }
    for stats in [first.worker.stats(), second.worker.stats()] {
        assert_eq!((stats.stores_failed, stats.retrieves_failed), (0, 0));
        assert_eq!(stats.connections_lost, 0);
    }
    drop((first, second));
    server.assert_idle();
}

/// The answer to a preparation comes after the engine's side has given it up, over a connection that
/// lives. The server would hold its slots for as long as that does.
#[test]
fn slots_whose_answer_comes_too_late_are_given_back() {
    let server = Server::start();
    let mut direct = Engine::start(&server, "i", true);
    let prompt = hashes(1, 2);
    direct.store("a", 1, &prompt, 0..2, 0);
    thread::scope(|scope| {
        for operation in [PREPARE_STORE, PREPARE_RETRIEVE] {
            let (server, prompt) = (&server, &prompt);
            scope.spawn(move || {
                let is_late = Arc::new(AtomicBool::new(false));
                let for_proxy = Arc::clone(&is_late);
                let through = proxy(server, move |_| {
                    let (mut held, is_late) = (Vec::new(), Arc::clone(&for_proxy));
                    Box::new(move |message| {
                        if message.is_to(operation) && !is_late.load(Ordering::Relaxed) {
                            held.push(message);
                            return Act::Send(Vec::new());
                        }
                        let mut now = vec![message];
                        if is_late.load(Ordering::Relaxed) {
                            now.append(&mut held);
                        }
                        Act::Send(now)
                    })
                });
                let timeouts = Timeouts {
                    answer: Duration::from_millis(1200),
                    ..Timeouts::default()
                };
                let mut engine = Engine::with(&through, engine("i", true), timeouts);
                let finished = match operation {
                    PREPARE_STORE => {
                        let other = op("b", &hashes(operation, 2), 0..2, 0);
                        engine.worker.submit_store_request(other);
                        engine.finished(&["b"]).stores
                    }
                    _ => {
                        (engine.worker).submit_retrieve_request(op("b", prompt, 0..2, 0));
                        engine.finished(&[]).retrieves
                    }
                };
                assert_eq!(finished, HashSet::from(["b".to_owned()]));
                is_late.store(true, Ordering::Relaxed);
                let stats = engine.worker.stats();
                assert_eq!(stats.stores_failed + stats.retrieves_failed, 1);
                let failed = engine.worker.get_block_ids_with_load_errors();
                assert_eq!(failed.is_empty(), operation == PREPARE_STORE);
                server.eventually("nothing is held", |status| {
                    status.usage.leases == 0 && status.usage.reserved_slots == 0
                });
                assert_eq!(engine.worker.stats().connections_lost, 0);
                // The same again is a transfer like any other.
                let other = hashes(operation, 2);
                engine.store("b", 2, &other, 0..2, 0);
                assert!(engine.load("c", &other, 0..2, 20));
                assert!(engine.content(2, &blocks(2, 20), 0, true));
            });
        }
    });
    server.assert_idle();
}

/// The server gives equal requests equal slots, which the first commit gives back: others may have
/// them by the time of the second copy.
#[test]
fn a_store_that_is_submitted_twice_writes_no_slot_that_is_not_its_own() {
    let server = Server::start();
    let mut engine = Engine::start(&server, "i", true);
    let prompt = hashes(1, 2);
    let (once, twice) = (op("a", &prompt, 0..2, 0), op("a", &prompt, 0..2, 30));
    engine.content(1, &once.block_ids[0], 0, false);
    engine.content(2, &twice.block_ids[0], 0, false);
    engine
        .worker
        .batched_submit_store_requests(vec![once, twice], None);
    assert_eq!(engine.finished(&["a"]).stores.len(), 1);
    let stats = engine.worker.stats();
    assert_eq!((stats.stored_chunks, stats.stores_failed), (2, 0));
    assert!(engine.load("b", &prompt, 0..2, 1));
    assert!(
        engine.content(1, &blocks(2, 1), 0, true),
        "the bytes that were committed"
    );
    // Two loads of one range read what they leased, each.
    let loads = vec![op("c", &prompt, 0..2, 2), op("c", &prompt, 0..2, 33)];
    engine.worker.batched_submit_retrieve_requests(loads, None);
    assert_eq!(engine.finished(&[]).retrieves.len(), 1);
    assert_eq!(engine.worker.stats().retrieves_failed, 0);
    assert!(engine.content(1, &blocks(2, 33), 0, true));
    server.assert_idle();
}

/// A store that was dropped by a deadline while the server kept its answer back is counted once.
#[test]
fn a_dropped_store_is_counted_once() {
    let server = Server::start();
    let (is_held, released) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let for_proxy = (Arc::clone(&is_held), Arc::clone(&released));
    let through = proxy(&server, move |_| {
        let (mut held, (is_held, released)) = (Vec::new(), for_proxy.clone());
        Box::new(move |mut message: Message| {
            if message.is_to(PREPARE_STORE) {
                // Refused, as far as the engine's side can see.
                message.0[1] = b"\xa2no".to_vec();
                held.push(message);
                is_held.store(true, Ordering::Relaxed);
                return Act::Send(Vec::new());
            }
            let mut now = vec![message];
            if released.load(Ordering::Relaxed) {
                now.append(&mut held);
            }
            Act::Send(now)
        })
    });
    let mut engine = Engine::at(&through, engine("i", true));
    let lost = op("a", &hashes(1, 2), 0..2, 0);
    engine.worker.submit_store_request(lost);
    until(|| is_held.load(Ordering::Relaxed).then_some(()));
    let named = ["a".to_owned()];
    assert!(!engine.worker.wait_for_stores(&named, Duration::ZERO));
    assert_eq!(engine.finished(&["a"]).stores.len(), 1);
    released.store(true, Ordering::Relaxed);
    // The next load is carried out after the answer.
    assert!(!engine.load("b", &hashes(3, 2), 0..2, 0));
    assert_eq!(engine.worker.stats().stores_failed, 1);
}

/// Answers without end, to requests that were never sent.
#[test]
fn a_flood_of_answers_hides_no_deadline_and_no_order_to_stop() {
    let server = Server::start();
    let floods = Arc::new(AtomicBool::new(false));
    let for_proxy = Arc::clone(&floods);
    let through = proxy(&server, move |_| {
        let floods = Arc::clone(&for_proxy);
        Box::new(move |message| match floods.load(Ordering::Relaxed) {
            true => Act::Flood(message.unasked()),
            false => Act::Send(vec![message]),
        })
    });
    let timeouts = Timeouts {
        ping: Duration::from_millis(300),
        ..Timeouts::default()
    };
    let engine = Engine::with(&through, engine("i", true), timeouts);
    floods.store(true, Ordering::Relaxed);
    assert_eq!(engine.lookup("a", &hashes(1, 2)), 0);
    until(|| (engine.scheduler.stats().connections_lost > 0).then_some(()));
    until(|| (engine.worker.stats().connections_lost > 0).then_some(()));
    floods.store(false, Ordering::Relaxed);
    until(|| engine.worker.server().is_healthy.then_some(()));
    floods.store(true, Ordering::Relaxed);
    let stopped = thread::spawn(move || {
        engine.scheduler.shutdown();
        engine.worker.shutdown();
        engine
    });
    until(|| stopped.is_finished().then_some(()));
    stopped.join().expect("it does not panic");
}

/// The flood began during the setup of a connection: the thread of the link read on for ever, and
/// the thread that stopped it waited for it.
#[test]
fn a_flood_during_the_setup_hides_no_order_to_stop() {
    let server = Server::start();
    let through = proxy(&server, move |_| {
        Box::new(|message| Act::Flood(message.unasked()))
    });
    let timeouts = Timeouts {
        start: Duration::from_millis(200),
        ..Timeouts::default()
    };
    let scheduler = SchedulerAdapter::start_with(through, engine("i", true), timeouts);
    let scheduler = scheduler.expect("a scheduler");
    assert!(!scheduler.server().is_healthy);
    let stopped = thread::spawn(move || scheduler.shutdown());
    until(|| stopped.is_finished().then_some(()));
    stopped.join().expect("it does not panic");
}

/// A server that dies at each point of its answers, and is back.
#[test]
fn an_answer_that_is_cut_off_anywhere_loses_no_request_and_leaves_nothing_held() {
    let server = Server::start();
    // Number of the next answer to cut, and bytes of it that arrive.
    let cuts: Vec<(usize, usize)> = (0..10)
        .flat_map(|answer| {
            let cut = move |n| (answer, [0, 1, 9, 12, 30][(answer + n) % 5]);
            (0..rounds(1, 5)).map(cut)
        })
        .collect();
    let next: Arc<Mutex<Option<(usize, usize)>>> = Arc::default();
    let for_proxy = Arc::clone(&next);
    let through = proxy(&server, move |_| {
        let next = Arc::clone(&for_proxy);
        Box::new(move |message| {
            let mut next = next.lock().expect("not poisoned");
            match &mut *next {
                Some((0, bytes)) => {
                    let mut encoded = message.encoded();
                    encoded.truncate(*bytes);
                    *next = None;
                    Act::Cut(encoded)
                }
                Some((answers, _)) => {
                    *answers -= 1;
                    Act::Send(vec![message])
                }
                None => Act::Send(vec![message]),
            }
        })
    });
    let [mut engine, mut reader] = [(); 2].map(|()| Engine::at(&through, engine("i", false)));
    for (number, cut) in cuts.into_iter().enumerate() {
        *next.lock().expect("not poisoned") = Some(cut);
        let prompt = tokens(number as u32, 2);
        let (store, load) = (format!("s{number}"), format!("l{number}"));
        let stored = op(&store, &prompt, 0..2, 0);
        engine.content(number as u32, &stored.block_ids[0], 0, false);
        engine.worker.submit_store_request(stored);
        assert_eq!(engine.finished(&[&store]).stores, HashSet::from([store]));
        let found = reader.lookup(&load, &prompt);
        assert!(found == 0 || found == 2 * CHUNK as u64, "{found}");
        // Whatever the lookup found, bytes that are said to be loaded are those that were stored.
        if reader.load(&load, &prompt, 0..2, 7) {
            assert!(reader.content(number as u32, &blocks(2, 7), 0, true));
        }
        reader.scheduler.end_session(&load);
        // The rest of a cut meets pings.
        until(|| {
            let cut = next.lock().expect("not poisoned").is_none();
            let is_up = [&engine, &reader].iter().all(|engine| {
                engine.worker.server().is_healthy && engine.scheduler.server().is_healthy
            });
            (cut && is_up).then_some(())
        });
    }
    drop((engine, reader));
    server.assert_idle();
}

/// Returns numbers that look random.
fn xorshift(mut state: u64) -> impl FnMut(u64) -> u64 {
    move |bound| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % bound
    }
}

/// Lies of every kind: bytes of the answers' values are changed, cut off and added.
#[test]
fn no_lie_of_a_server_ends_or_hangs_the_engine() {
    let description = engine("i", true);
    for seed in 1..=rounds(2, 8) as u64 {
        let server = Server::start();
        let through = proxy(&server, move |number| {
            let mut random = xorshift(seed * 1_000_003 + number as u64 * 7919);
            let mut count = 0;
            Box::new(move |mut message: Message| {
                count += 1;
                // The setup passes mostly, so that there is something to lie about.
                let lies = match count < 6 {
                    true => random(64) == 0,
                    false => random(2) == 0,
                };
                let value = message.0.len() - 1;
                let frame = &mut message.0[value];
                if lies && value > 1 && !frame.is_empty() {
                    for _ in 0..=random(3) {
                        let at = random(frame.len() as u64) as usize;
                        match random(4) {
                            0 => frame[at] = random(256) as u8,
                            1 => frame[at] = frame[at].wrapping_add(1),
                            2 => frame[at] ^= 1 << random(8),
                            _ => frame.insert(at, random(256) as u8),
                        }
                    }
                }
                Act::Send(vec![message])
            })
        });
        let engine = Engine::with(&through, description.clone(), SHORT_ANSWERS);
        for number in 0..24_u8 {
            let (store, load) = (format!("s{number}"), format!("l{number}"));
            let prompt = hashes(number % 5, 3);
            let stored = op(&store, &prompt, 0..3, u32::from(number));
            engine.worker.submit_store_request(stored);
            let found = engine.lookup(&load, &prompt);
            assert!(found <= 3 * CHUNK as u64, "seed {seed}");
            let loaded = op(&load, &prompt, 0..3, u32::from(number));
            engine.worker.submit_retrieve_request(loaded);
            let mut finished = engine.finished(&[&store]);
            while (finished.stores.len(), finished.retrieves.len()) != (1, 1) {
                let more = engine.finished(&[]);
                finished.stores.extend(more.stores);
                finished.retrieves.extend(more.retrieves);
                finished.failed.extend(more.failed);
            }
            let failed = engine.worker.get_block_ids_with_load_errors();
            assert!(failed.len() <= 3 * CHUNK / BLOCK, "seed {seed}");
            assert_eq!(failed.is_empty(), finished.failed.is_empty(), "seed {seed}");
            engine.scheduler.end_session(&load);
        }
    }
}

/// A server that knows no block hashes comes after one that does: a key without tokens would
/// be the same for all prompts.
#[test]
fn block_hashes_are_not_sent_to_a_server_that_does_not_know_them() {
    let server = Server::start();
    let prepared = Arc::<AtomicBool>::default();
    let for_proxy = Arc::clone(&prepared);
    let through = proxy(&server, move |_| {
        let prepared = Arc::clone(&for_proxy);
        Box::new(move |mut message| {
            if message.is_to(GET_EXPERIMENTAL) {
                // No capability.
                message.0[2] = vec![0x90];
            }
            if [PREPARE_STORE, PREPARE_RETRIEVE].map(|o| message.is_to(o)) != [false; 2] {
                prepared.store(true, Ordering::Relaxed);
            }
            Act::Send(vec![message])
        })
    });
    let mut engine = Engine::at(&through, engine("i", true));
    assert!(engine.worker.server().is_healthy && !engine.worker.server().hash_mode);
    assert_eq!(engine.lookup("a", &hashes(1, 2)), 0);
    assert_eq!(engine.scheduler.stats().lookups, 0);
    assert!(!engine.load("b", &hashes(1, 2), 0..2, 0));
    (engine.worker).submit_store_request(op("c", &hashes(1, 2), 0..2, 0));
    assert_eq!(engine.finished(&["c"]).stores.len(), 1);
    assert!(!prepared.load(Ordering::Relaxed));
    // Tokens name a prompt for any server.
    engine.store("d", 3, &tokens(1, 2), 0..2, 0);
    assert_eq!(engine.lookup("e", &tokens(1, 2)), 2 * CHUNK as u64);
}

/// Blocks of each request in a simulated schedule: two chunks.
const REQUEST_BLOCKS: u32 = 8;

/// State of a request of a simulated engine.
#[derive(Clone, Copy, PartialEq)]
enum Phase {
    /// Number of its prompt, and of its blocks unless it has lost them.
    Stores(u32, Option<u32>),
    Loads(u32, u32),
}

/// An engine that calls its adapters in any order, and checks what they promise.
struct Schedule {
    engine: Engine,
    random: Box<dyn FnMut(u64) -> u64>,
    requests: HashMap<String, Phase>,
    /// Requests that are named finished in the next call.
    named: Vec<String>,
    /// Ranges of blocks that no request has, with the content that vLLM left in them.
    free: HashMap<u32, u32>,
    /// Blocks that failed, of loads that were not reported yet.
    failed: HashSet<u32>,
    /// Requests whose lookup was submitted and not cleaned up.
    lookups: Vec<String>,
    submitted: u64,
    next: u32,
    /// Prompt of the last store that was reported.
    stored: u32,
    loaded: u32,
}

impl Schedule {
    fn new(through: &Endpoint, seed: u64) -> Self {
        let mut schedule = Self {
            engine: Engine::with(through, engine("i", false), SHORT_ANSWERS),
            random: Box::new(xorshift(seed)),
            requests: HashMap::new(),
            named: Vec::new(),
            free: HashMap::new(),
            failed: HashSet::new(),
            lookups: Vec::new(),
            submitted: 0,
            next: 0,
            stored: 0,
            loaded: 0,
        };
        (0..BLOCKS as u32 / REQUEST_BLOCKS).for_each(|range| schedule.give_back(range));
        schedule
    }

    fn one_of(&mut self, count: usize) -> usize {
        (self.random)(count as u64) as usize
    }

    fn blocks(range: u32) -> Vec<u32> {
        (range * REQUEST_BLOCKS..(range + 1) * REQUEST_BLOCKS).collect()
    }

    /// Fills blocks with content that no prompt has.
    fn give_back(&mut self, range: u32) {
        self.next += 1;
        let poison = 100 + self.next;
        (self.engine).content(poison, &Self::blocks(range), 0, false);
        self.free.insert(range, poison);
    }

    /// Takes blocks that were not written since they were given back.
    fn take(&mut self) -> Option<u32> {
        let ranges: Vec<u32> = self.free.keys().copied().collect();
        let range = match ranges.len() {
            0 => return None,
            count => ranges[self.one_of(count)],
        };
        let poison = self.free.remove(&range).expect("it is free");
        let same = (self.engine).content(poison, &Self::blocks(range), 0, true);
        assert!(same, "blocks were written that no request has");
        Some(range)
    }

    fn submit(&mut self) {
        // Without a server all fails at once, and would use up the schedule.
        if !self.engine.worker.server().is_healthy && self.one_of(16) > 0 {
            return;
        }
        let Some(range) = self.take() else {
            return;
        };
        self.next += 1;
        let (request, prompt) = (format!("r{}", self.next), self.one_of(12) as u32);
        let mut op = op(&request, &tokens(prompt, 2), 0..2, 0);
        op.block_ids = vec![Self::blocks(range)];
        if self.one_of(2) == 0 {
            (self.engine).content(prompt, &op.block_ids[0], 0, false);
            // The same twice is one store.
            let ops = vec![op; 1 + self.one_of(2)];
            self.engine.worker.batched_submit_store_requests(ops, None);
            (self.requests).insert(request.clone(), Phase::Stores(prompt, Some(range)));
            if self.one_of(3) == 0 {
                // The store gets to any point meanwhile.
                let moment = Instant::now() + Duration::from_micros((self.random)(400));
                while Instant::now() < moment {
                    std::hint::spin_loop();
                }
                self.preempt(request);
            }
        } else {
            // Mostly found, unless it was cleared.
            op.prompt = tokens(self.stored, 2);
            self.engine.worker.submit_retrieve_request(op);
            (self.requests).insert(request, Phase::Loads(self.stored, range));
        }
    }

    /// Names a storing request finished, or preempts it.
    fn finish_or_preempt(&mut self) {
        let storing = |(id, phase): (&String, &Phase)| match phase {
            Phase::Stores(..) if !self.named.contains(id) => Some(id.clone()),
            _ => None,
        };
        let mut storing: Vec<String> = self.requests.iter().filter_map(storing).collect();
        storing.sort_unstable();
        if storing.is_empty() {
            return;
        }
        let id = storing.swap_remove(self.one_of(storing.len()));
        match self.one_of(2) {
            0 => self.named.push(id),
            _ => self.preempt(id),
        }
    }

    /// Takes its blocks from a storing request.
    fn preempt(&mut self, id: String) {
        let ids = [id];
        (self.engine.worker).wait_for_stores(&ids, Duration::ZERO);
        assert!(!self.engine.worker.has_stores(&ids[0]));
        if let Some(Phase::Stores(_, range)) = self.requests.get_mut(&ids[0])
            && let Some(range) = range.take()
        {
            self.give_back(range);
        }
    }

    fn look_up(&mut self) {
        let prompt = tokens(self.one_of(12) as u32, 2);
        if self.one_of(2) == 0 || self.lookups.is_empty() {
            self.next += 1;
            let id = format!("l{}", self.next);
            let configs = RequestConfigs::default();
            for _ in 0..2 {
                (self.engine.scheduler).maybe_submit_lookup_request(&id, &prompt, "", &configs);
            }
            self.submitted += 1;
            return self.lookups.push(id);
        }
        let at = self.one_of(self.lookups.len());
        let found = self.engine.scheduler.check_lookup_result(&self.lookups[at]);
        assert!(found.is_none_or(|tokens| tokens == 0 || tokens.is_multiple_of(CHUNK as u64)));
        // Also before there is a result.
        if found.is_some() || self.one_of(4) == 0 {
            let id = self.lookups.swap_remove(at);
            self.engine.scheduler.cleanup_lookup_result(&id);
            self.engine.scheduler.end_session(&id);
        }
    }

    fn report(&mut self) {
        let named: Vec<String> = self.named.clone();
        let finished = self.engine.worker.get_finished(named);
        // Blocks fail in the pass that reports their load, or in one before.
        let failed = self.engine.worker.get_block_ids_with_load_errors();
        self.failed.extend(failed);
        for id in finished.stores {
            let at = self.named.iter().position(|named| *named == id);
            self.named.swap_remove(at.expect("it was named"));
            match self.requests.remove(&id) {
                Some(Phase::Stores(prompt, range)) => {
                    self.stored = prompt;
                    range.into_iter().for_each(|range| self.give_back(range));
                }
                _ => panic!("{id} has no store to report"),
            }
        }
        for id in finished.retrieves {
            let Some(Phase::Loads(prompt, range)) = self.requests.remove(&id) else {
                panic!("{id} has no load to report");
            };
            let blocks = Self::blocks(range);
            match blocks
                .iter()
                .filter(|block| self.failed.remove(block))
                .count()
            {
                count @ 1.. => assert_eq!(count, blocks.len()),
                0 => {
                    self.loaded += 1;
                    assert!(self.engine.content(prompt, &blocks, 0, true), "{id}");
                }
            }
            self.give_back(range);
        }
    }

    fn step(&mut self) {
        match self.one_of(8) {
            0..3 => self.submit(),
            3 | 4 => self.finish_or_preempt(),
            5 => self.look_up(),
            _ => self.report(),
        }
    }

    /// Lets all requests end, and returns the number of loads that were not failed.
    fn end(mut self) -> u32 {
        let is_stored = |phase: &Phase| matches!(phase, Phase::Stores(..));
        let stored = self.requests.iter().filter(|(_, phase)| is_stored(phase));
        self.named = stored.map(|(id, _)| id.clone()).collect();
        until(|| {
            self.report();
            self.requests.is_empty().then_some(())
        });
        for id in std::mem::take(&mut self.lookups) {
            until(|| self.engine.scheduler.check_lookup_result(&id));
            self.engine.scheduler.end_session(&id);
        }
        assert!(self.engine.scheduler.stats().lookups <= self.submitted);
        while self.take().is_some() {}
        self.loaded
    }
}

/// Random calls of an engine over answers that come late, twice, as refusals, or not at all: every
/// transfer is reported once, when it may be; loads return the stored bytes; no block is written after
/// it was released; and the server holds nothing at the end.
///
/// Slow: timeouts of the schedules have to pass.
#[test]
fn no_schedule_of_calls_and_answers_breaks_a_promise() {
    let seeds = match std::env::var("LMC_TEST_SEED") {
        Ok(seed) => vec![seed.parse().expect("a number")],
        Err(_) => (1..=rounds(2, 6) as u64).collect(),
    };
    let mut loaded = 0;
    for seed in seeds {
        println!("LMC_TEST_SEED={seed}");
        let server = Server::start();
        let through = proxy(&server, move |number| {
            let mut random = xorshift(seed * 7_368_787 + number as u64 * 104_729 + 1);
            let (mut held, mut count) = (Vec::new(), 0);
            Box::new(move |mut message: Message| {
                count += 1;
                let chance = if count <= 6 { 99 } else { random(100) };
                match chance {
                    0..10 => {
                        held.push(message);
                        return Act::Send(Vec::new());
                    }
                    10..20 => held.push(message.clone()),
                    20..24 => {
                        message.0.truncate(1);
                        message.0.push(b"\xa2no".to_vec());
                    }
                    24 => return Act::Cut(message.encoded()[..5].to_vec()),
                    _ => {}
                }
                let mut now = vec![message];
                now.append(&mut held);
                Act::Send(now)
            })
        });
        let mut schedule = Schedule::new(&through, seed);
        let mut before = 0;
        until(|| {
            schedule.step();
            // As often as requests come, not as time passes: on a busy machine nothing would be
            // there long enough to be loaded.
            if schedule.next > before && schedule.one_of(25) == 0 {
                server.service.engine().clear_dram(InUse::Keep);
            }
            before = schedule.next;
            let found = loaded + schedule.loaded > 0;
            (found && schedule.next >= rounds(60, 250) as u32).then_some(())
        });
        loaded += schedule.end();
        server.assert_idle();
    }
    println!("{loaded} loads found their chunks");
    assert!(loaded > 0, "no load found anything");
}
