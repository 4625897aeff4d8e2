//! Connections that end while the worker's process still runs, dies, or is stopped.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::common::engine::{LAYER, PATIENT, engine, hashes, layers, op};
use crate::common::{Answer as _, CHUNK, Server, Worker, chunk_bytes, lookup, prompt};
use lmc_testkit::{in_lab, own_test, rounds, test_arguments};
use lmc_vllm_adapter::adapters::WorkerAdapter;
use lmc_vllm_adapter::{CacheKey, Client, Keepalive, Reply, Request, ServiceConfig};

const HOUR: Duration = Duration::from_secs(3600);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Header of a frame of 1 GiB, which is above the limit: the server closes the connection.
const TOO_LONG: [u8; 9] = [2, 0, 0, 0, 0, 0x40, 0, 0, 0];

fn holding_for_an_hour(config: &mut ServiceConfig) {
    config.slot_grace = HOUR;
}

/// Way in which the proxy ends a connection.
#[derive(Debug, Clone, Copy)]
enum Cut {
    /// Both sides are closed, as when a proxy ends.
    Fin,
    /// Both sides are reset, as by a firewall.
    Reset,
    /// Only bytes from the worker no longer arrive.
    Half,
}

/// A TCP proxy for one connection, which the test can cut.
struct Proxy {
    address: SocketAddr,
    cut: mpsc::Sender<Cut>,
}

impl Proxy {
    fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("bound");
        let (cut, cuts) = mpsc::channel();
        std::thread::spawn(move || {
            let (near, _) = listener.accept().expect("the worker connects");
            let far = TcpStream::connect(server).expect("the server listens");
            forward(&near, &far);
            forward(&far, &near);
            let Ok(cut) = cuts.recv() else { return };
            if let Cut::Half = cut {
                far.shutdown(Shutdown::Write).expect("open");
                // The other direction stays open.
                std::thread::sleep(TIMEOUT);
                return;
            }
            for side in [&near, &far] {
                match cut {
                    Cut::Fin | Cut::Half => side.shutdown(Shutdown::Both).expect("open"),
                    Cut::Reset => {
                        let socket = socket2::SockRef::from(side);
                        socket.set_linger(Some(Duration::ZERO)).expect("open");
                        // A blocked read keeps the socket open; this ends the read.
                        side.shutdown(Shutdown::Read).expect("open");
                    }
                }
            }
        });
        Self { address, cut }
    }
}

/// Forwards bytes until either side ends. A socket closes with its last handle.
fn forward(from: &TcpStream, to: &TcpStream) {
    let (mut from, mut to) = (
        from.try_clone().expect("a handle"),
        to.try_clone().expect("a handle"),
    );
    std::thread::spawn(move || {
        let mut bytes = [0; 1 << 16];
        while let Ok(read @ 1..) = from.read(&mut bytes) {
            if to.write_all(&bytes[..read]).is_err() {
                return;
            }
        }
    });
}

/// A worker in its own process, which runs one order per line of its standard input.
struct Process {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(server: SocketAddr) -> Self {
        Self::launch(own_test(a_worker_process), server)
    }

    fn launch(mut command: Command, server: SocketAddr) -> Self {
        let mut child = command
            .env(AS_PROCESS, server.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let orders = child.stdin.take().expect("piped");
        let answers = BufReader::new(child.stdout.take().expect("piped"));
        Self {
            child,
            orders,
            answers,
        }
    }

    /// Sends an order and waits until it is done.
    fn run(&mut self, order: &str) {
        writeln!(self.orders, "{order}").expect("it lives");
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.answers.read_line(&mut line).expect("it lives");
            assert!(read > 0, "the process ended at {order:?}");
            // The test harness prints lines too.
            if line.trim_end() == format!("done {order}") {
                return;
            }
        }
    }

    fn signal(&self, signal: &str) {
        let pid = self.child.id().to_string();
        let sent = Command::new("kill").args([signal, &pid]).status();
        assert!(sent.expect("kill runs").success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Environment variable that makes a test process a worker and contains the server's address.
const AS_PROCESS: &str = "LMC_TEST_AS_PROCESS";

/// Main function of a [`Process`]. Run as a test, it does nothing.
#[test]
fn a_worker_process() {
    let Ok(address) = std::env::var(AS_PROCESS) else {
        return;
    };
    let address: SocketAddr = address.parse().expect("an address");
    let mut worker = None;
    for order in std::io::stdin().lines() {
        let order = order.expect("a line");
        match order.as_str() {
            "register" => {
                let client = Client::connect(address, TIMEOUT).expect("a connection");
                worker = Some(Worker::register_on(client, 77, 0, 1, "float32"));
            }
            "prepare" => {
                let worker = worker.as_mut().expect("registered");
                let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
                assert_eq!(worker.prepare_store(&key).0.len(), 2);
            }
            "break" => {
                let worker = worker.as_mut().expect("registered");
                worker.client.send_encoded(&TOO_LONG).expect("sent");
            }
            // Starts a proxy and prints its port.
            "proxy" => {
                let proxy = Proxy::start(address);
                println!("\nport {}", proxy.address.port());
                // Dropping the proxy would end it.
                std::thread::spawn(move || {
                    let _proxy = proxy;
                    std::thread::sleep(HOUR);
                });
            }
            other => panic!("unknown order {other:?}"),
        }
        println!("\ndone {order}");
    }
}

/// Waits until the server has this number of open connections.
fn wait_for_open_connections(server: &Server, open: u64) {
    server.eventually("the connection has ended", |status| {
        status.transport.connections_open == open
    });
}

/// The server took the end of a connection for the death of its process. The slots of a worker that
/// was still copying were given to another worker, whose chunk then had the first one's bytes.
#[test]
fn a_writer_whose_connection_is_cut_writes_into_no_slot_of_another() {
    for cut in [Cut::Fin, Cut::Reset, Cut::Half] {
        let server = Server::with(8 * 4096, holding_for_an_hour, |_| {});
        let proxy = Proxy::start(server.address);
        let through = Client::connect(proxy.address, TIMEOUT).expect("a connection");
        let mut a = Worker::register_on(through, 1, 0, 1, "float32");
        let of_a = a.key("a", &prompt(1, 2 * CHUNK), 0..2);
        let (slots, indices) = a.prepare_store(&of_a);
        proxy.cut.send(cut).expect("it runs");
        wait_for_open_connections(&server, 0);
        let mut b = Worker::register(&server, 2);
        let of_b = b.key("b", &prompt(2, 2 * CHUNK), 0..2);
        let (others, _) = b.prepare_store(&of_b);
        assert!(others.iter().all(|slot| !slots.contains(slot)), "{cut:?}");
        let more = b.key("c", &prompt(3, 2 * CHUNK), 0..2);
        assert_eq!(b.store(&more), 1, "its share");
        let (again, at) = b.prepare_store(&of_b);
        b.fill(&of_b, &again, &at);
        assert!(b.commit_store(&of_b));
        // A's copy continues, and its client reconnects.
        a.fill(&of_a, &slots, &indices);
        assert!(b.retrieve(&of_b), "byte for byte");
        a.client = server.client();
        assert!(
            a.commit_store(&of_a),
            "any connection may commit after its own has ended"
        );
        assert!(b.retrieve(&CacheKey {
            request_id: "d".to_owned(),
            ..of_a
        }));
        let counts = server.status().counts;
        assert_eq!((counts.slots_orphaned, counts.stores_abandoned), (2, 0));
    }
}

/// A process that registered the id of a worker whose connection was cut, and prepared the same
/// store, got the first worker's slots. When it died, the slots went to a third worker while the
/// first was still copying.
#[test]
fn slots_of_a_cut_writer_are_given_to_no_other_connection() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut a = Worker::register(&server, 1);
    let key = a.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let (slots, indices) = a.prepare_store(&key);
    let _cut = std::mem::replace(&mut a.client, server.client());
    drop(_cut);
    wait_for_open_connections(&server, 1);
    let mut other = Worker::register(&server, 1);
    let (of_other, at) = other.prepare_store(&key);
    assert_eq!(of_other.len(), 2);
    assert!(of_other.iter().all(|slot| !slots.contains(slot)));
    let (again, _) = other.prepare_store(&key);
    assert_eq!(again, of_other, "on its own connection");
    assert_eq!(server.status().usage.reserved_slots, 4);
    other.fill(&key, &of_other, &at);
    assert!(other.commit_store(&key));
    // The first worker still writes.
    for slot in &slots {
        a.pool.write(slot, &vec![0xEE; slot.length as usize]);
    }
    assert_eq!(indices, at);
    assert!(other.retrieve(&key), "byte for byte");
    drop(other);
    wait_for_open_connections(&server, 1);
    assert_eq!(
        server.status().usage.reserved_slots,
        2,
        "slots of the first worker"
    );
    server.service.tick(Instant::now() + HOUR);
    assert_eq!(server.status().usage.reserved_slots, 0);
}

/// Returns the slots that a worker's earlier connections left and that it gives back.
fn abandon_earlier(client: &mut Client, instance_id: u64) -> Reply {
    client.answer(&Request::AbandonEarlier { instance_id })
}

#[test]
fn a_worker_that_is_connected_again_gives_back_what_its_ended_connections_left() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut a = Worker::register(&server, 1);
    let mut b = Worker::register(&server, 2);
    let stored = a.key("stored", &prompt(3, 3 * CHUNK), 0..3);
    assert_eq!(a.store(&stored), 3);
    let first = a.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let of_b = b.key("b", &prompt(2, CHUNK), 0..1);
    assert_eq!(a.prepare_store(&first).0.len(), 2);
    assert!(a.prepare_retrieve(&stored).is_some());
    assert_eq!(b.prepare_store(&of_b).0.len(), 1);
    a.client = server.client();
    wait_for_open_connections(&server, 2);
    let held = |server: &Server| {
        let usage = server.status().usage;
        (usage.reserved_slots, usage.leases)
    };
    assert_eq!(
        abandon_earlier(&mut a.client, 1),
        Reply::Int(0),
        "not registered"
    );
    let mut a = Worker::register_on(a.client, 1, 0, 1, "float32");
    let second = a.key("again", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(a.prepare_store(&second).0.len(), 2);
    assert_eq!(held(&server), (5, 3));
    assert_eq!(
        abandon_earlier(&mut b.client, 1),
        Reply::Int(0),
        "another's"
    );
    assert_eq!(held(&server), (5, 3));
    assert_eq!(abandon_earlier(&mut a.client, 1), Reply::Int(5));
    assert_eq!(held(&server), (3, 0), "those of open connections stay");
    assert_eq!(abandon_earlier(&mut a.client, 1), Reply::Int(0));
    assert!(server.status().held.is_empty());
    a.client = server.client();
    drop(b);
    wait_for_open_connections(&server, 1);
}

/// A proxy that ends a connection, once, at the answer that names slots, before a worker has it.
fn proxy_that_loses_slots(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound");
    let loses = Arc::new(AtomicBool::new(true));
    std::thread::spawn(move || {
        while let (Ok((near, _)), Ok(far)) = (listener.accept(), TcpStream::connect(server)) {
            let (asking, asked) = [&near, &far]
                .map(|side| side.try_clone().expect("a handle"))
                .into();
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut &asking, &mut &asked);
                let _ = asked.shutdown(Shutdown::Both);
            });
            let loses = Arc::clone(&loses);
            std::thread::spawn(move || {
                let mut bytes = [0; 1 << 16];
                while let Ok(read @ 1..) = (&far).read(&mut bytes) {
                    let names_slots = bytes[..read].windows(6).any(|part| part == b"offset");
                    let is_lost = names_slots && loses.swap(false, Ordering::Relaxed);
                    if is_lost || (&near).write_all(&bytes[..read]).is_err() {
                        break;
                    }
                }
                let _ = near.shutdown(Shutdown::Both);
                let _ = far.shutdown(Shutdown::Both);
            });
        }
    });
    address
}

/// The engine's side reconnected at once, and its slots stayed held for the grace time.
#[test]
fn what_a_lost_connection_held_comes_back_when_the_engine_is_connected_again() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let through = proxy_that_loses_slots(server.address);
    let endpoint = format!("tcp://{through}").parse().expect("an address");
    let worker = WorkerAdapter::start_with(endpoint, engine("i", true), 0, 1, PATIENT);
    let worker = worker.expect("a worker");
    let mut memory = vec![vec![0.0; LAYER]];
    worker
        .register_kv_caches(layers(&mut memory))
        .expect("a known layout");
    worker.submit_store_request(op("a", &hashes(1, 4), 0..4, 7));
    server.eventually("the slots are back", |status| {
        status.counts.slots_orphaned == 4 && status.usage.reserved_slots == 0
    });
    assert_eq!(worker.stats().connections_lost, 1);
    worker.shutdown();
}

/// The lease of a reader ended with its connection, and other chunks were written to the slot.
/// LMCache's client ignores a failed commit and used their bytes.
#[test]
fn a_reader_whose_connection_is_cut_keeps_its_bytes() {
    for cut in [Cut::Fin, Cut::Reset, Cut::Half] {
        let server = Server::with(4 * 4096, holding_for_an_hour, |_| {});
        let mut b = Worker::register(&server, 2);
        let tokens = prompt(1, 2 * CHUNK);
        assert_eq!(b.store(&b.key("b", &tokens, 0..2)), 2);
        let proxy = Proxy::start(server.address);
        let through = Client::connect(proxy.address, TIMEOUT).expect("a connection");
        let mut a = Worker::register_on(through, 1, 0, 1, "float32");
        let key = a.key("a", &tokens, 0..2);
        let slots = a.prepare_retrieve(&key).expect("a hit");
        proxy.cut.send(cut).expect("it runs");
        wait_for_open_connections(&server, 1);
        let clear = Request::Clear { force: true };
        assert_eq!(b.client.answer(&clear), Reply::None);
        for round in 2..6 {
            b.store(&b.key("c", &prompt(round, 2 * CHUNK), 0..2));
        }
        for (chunk, slot) in slots.iter().enumerate() {
            assert!(
                a.pool.read(slot) == chunk_bytes(&tokens, chunk, a.seed(&key)),
                "{cut:?}"
            );
        }
        assert_eq!(server.status().usage.leases, 2);
        server.service.tick(Instant::now() + HOUR);
        assert_eq!(server.status().usage.leases, 0);
    }
}

/// A cut or late writer prevented others from storing the same chunks, without a time limit.
#[test]
fn others_store_the_same_chunks_while_the_first_writers_slots_are_held() {
    let config = |config: &mut ServiceConfig| {
        holding_for_an_hour(config);
        // Its requests are not looked up, and are taken for new all the same.
        config.session_ttl = Duration::ZERO;
    };
    let server = Server::with(1 << 20, config, |_| {});
    let tokens = prompt(1, 2 * CHUNK);
    let mut b = Worker::register(&server, 2);
    for cleared in [false, true] {
        let mut a = Worker::register(&server, 1);
        let key = a.key("a", &tokens, 0..2);
        let (slots, indices) = a.prepare_store(&key);
        assert_eq!(slots.len(), 2);
        a.client = server.client();
        wait_for_open_connections(&server, 2);
        let mut store = |name: &str| b.store(&b.key(name, &tokens, 0..2));
        assert_eq!(store("b"), 2, "in slots of its own");
        if cleared {
            let clear = Request::Clear { force: true };
            assert_eq!(a.client.answer(&clear), Reply::None);
        }
        a.fill(&key, &slots, &indices);
        assert!(a.commit_store(&key));
        let hits = lookup(
            &mut a.client,
            &CacheKey {
                request_id: "l".to_owned(),
                ..key
            },
        );
        assert_eq!(hits, if cleared { 0 } else { 2 });
        crate::common::end_session(&mut a.client, "l");
        // One copy of the chunks is left, or none after the clear.
        let used = if cleared { 0 } else { 2 * 4096 };
        assert_eq!(server.status().usage.used_bytes, used);
        let clear = Request::Clear { force: true };
        assert_eq!(a.client.answer(&clear), Reply::None);
        drop(a);
        wait_for_open_connections(&server, 1);
    }
    // A writer that is late on an open connection.
    let mut a = Worker::register(&server, 1);
    let key = a.key("a", &tokens, 0..2);
    let (slots, indices) = a.prepare_store(&key);
    assert_eq!(b.store(&b.key("b", &tokens, 0..2)), 0, "not yet");
    let overdue = server.service.config().transfer_deadline;
    server.service.tick(Instant::now() + overdue);
    let mut b = Worker::register(&server, 3);
    assert_eq!(b.store(&b.key("b", &tokens, 0..2)), 2);
    a.fill(&key, &slots, &indices);
    assert!(a.commit_store(&key));
    assert!(b.retrieve(&b.key("c", &tokens, 0..2)));
}

/// Slots are released without grace time when the kernel shows that the process is dead.
#[test]
fn slots_of_a_killed_worker_are_released_at_once() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut process = Process::start(server.address);
    process.run("register");
    process.run("prepare");
    assert_eq!(server.status().usage.reserved_slots, 2);
    wait_for_the_process(&server, &process);
    process.signal("-KILL");
    server.assert_idle();
    let counts = server.status().counts;
    assert_eq!(
        (counts.slots_released_by_death, counts.stores_abandoned),
        (2, 1)
    );
    // Half-written chunks never become findable, and the keys are free again.
    let mut next = Worker::register(&server, 2);
    let key = next.key("b", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(lookup(&mut next.client, &key), 0);
    assert_eq!(next.store(&key), 2);
    assert!(next.retrieve(&key));
}

/// Waits until the server knows a worker's process.
fn wait_for_the_process(server: &Server, process: &Process) {
    let pid = process.child.id();
    server.eventually("the process is known", |status| {
        status.instances.iter().any(|worker| worker.pids == [pid])
    });
}

/// A stopped process (SIGSTOP, `docker pause`) may continue in the middle of its copy.
#[test]
fn slots_of_a_stopped_worker_are_held_until_it_continues_or_dies() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut process = Process::start(server.address);
    process.run("register");
    process.run("prepare");
    wait_for_the_process(&server, &process);
    process.run("break");
    wait_for_open_connections(&server, 0);
    process.signal("-STOP");
    let begin = Instant::now();
    let reserved_after = |time: Duration| {
        server.service.tick(begin + time);
        server.status().usage.reserved_slots
    };
    let stopped = |status: &lmc_vllm_adapter::ServiceStatus| {
        server.service.tick(begin);
        status
            .held
            .first()
            .is_some_and(|held| held.waits_for == "stopped")
    };
    server.eventually("the process is seen stopped", stopped);
    for hours in 1..5 {
        assert_eq!(reserved_after(HOUR * hours), 2, "after {hours} h");
    }
    // The process continues, and the whole grace time begins again.
    process.signal("-CONT");
    server.eventually("the process is seen running", |status| {
        server.service.tick(begin + HOUR * 4);
        status.held[0].waits_for == "grace"
    });
    assert_eq!(reserved_after(HOUR * 4 + HOUR / 2), 2);
    process.signal("-STOP");
    server.eventually("the process is seen stopped again", stopped);
    assert_eq!(reserved_after(HOUR * 9), 2);
    process.signal("-KILL");
    server.eventually("its slots are released", |status| {
        server.service.tick(begin + HOUR * 9);
        status.usage.reserved_slots == 0
    });
    assert_eq!(server.status().counts.slots_released_by_death, 2);
}

/// The dead process had the socket open but never mapped the pool, so the worker may be alive.
#[test]
fn a_proxy_that_dies_proves_nothing() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut process = Process::start(server.address);
    writeln!(process.orders, "proxy").expect("it lives");
    let mut line = String::new();
    let port: u16 = loop {
        line.clear();
        assert!(process.answers.read_line(&mut line).expect("it lives") > 0);
        if let Some(port) = line.strip_prefix("port ") {
            break port.trim().parse().expect("a port");
        }
    };
    let through = Client::connect(("127.0.0.1", port), TIMEOUT).expect("a connection");
    let mut a = Worker::register_on(through, 1, 0, 1, "float32");
    let key = a.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let (slots, indices) = a.prepare_store(&key);
    process.signal("-KILL");
    wait_for_open_connections(&server, 0);
    for _ in 0..rounds(4, 30) {
        server.tick();
        assert_eq!(server.status().usage.reserved_slots, 2);
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(server.status().held[0].pids.is_empty());
    a.client = server.client();
    a.fill(&key, &slots, &indices);
    assert!(a.commit_store(&key));
    assert!(a.retrieve(&key));
}

/// Any connection could commit a worker's incomplete store, or unregister the worker.
#[test]
fn only_its_own_connection_commits_or_unregisters() {
    let server = Server::with(1 << 20, holding_for_an_hour, |_| {});
    let mut a = Worker::register(&server, 1);
    let mut b = Worker::register(&server, 2);
    let tokens = prompt(1, 2 * CHUNK);
    let key = a.key("a", &tokens, 0..2);
    let (slots, indices) = a.prepare_store(&key);
    let commit = Request::CommitStore {
        key: key.clone(),
        instance_id: 1,
        pickled: 0,
    };
    assert_eq!(b.client.answer(&commit), Reply::Bool(false));
    let unregister = Request::Unregister {
        instance_id: 1,
        engine_driven: true,
    };
    let refused = b.client.call(&unregister).expect("an answer");
    assert!(matches!(refused, Reply::Error(_)), "{refused:?}");
    let status = server.status();
    assert_eq!(status.counts.commits_foreign, 2);
    assert_eq!((status.instances.len(), status.transfers.stores), (2, 1));
    assert!(
        !b.retrieve(&b.key("b", &tokens, 0..2)),
        "it is half-written"
    );
    a.fill(&key, &slots, &indices);
    assert!(a.commit_store(&key));
    let slots = a.prepare_retrieve(&key).expect("a hit");
    let commit = Request::CommitRetrieve {
        key: key.clone(),
        instance_id: 1,
    };
    assert_eq!(b.client.answer(&commit), Reply::Bool(false));
    assert_eq!(server.status().usage.leases, slots.len() as u64);
    assert_eq!(a.client.answer(&commit), Reply::Bool(true));
    assert_eq!(a.client.answer(&unregister), Reply::None);
}

/// Only the end of its connection released the slots of such a worker.
#[test]
fn a_worker_that_registers_another_layout_commits_what_it_had_prepared() {
    let server = Server::start();
    let mut a = Worker::register(&server, 1);
    let key = a.key("a", &prompt(1, 2 * CHUNK), 0..2);
    let (slots, indices) = a.prepare_store(&key);
    a.fill(&key, &slots, &indices);
    let client = std::mem::replace(&mut a.client, server.client());
    let mut again = Worker::register_on(client, 1, 0, 1, "bfloat16");
    let commit = Request::CommitStore {
        key: key.clone(),
        instance_id: 1,
        pickled: 0,
    };
    assert_eq!(again.client.answer(&commit), Reply::Bool(true));
    assert_eq!(server.status().usage.reserved_slots, 0);
    let mut b = Worker::register(&server, 2);
    assert!(
        b.retrieve(&b.key("b", &key.token_ids, 0..2)),
        "in the layout of the prepared store"
    );
}

/// Leases of a lookup in the middle of a prompt were numbered from the lookup's first chunk, but
/// readers count from the prompt's first chunk, so the leases stayed until the session ended.
#[test]
fn leases_of_a_lookup_in_the_middle_of_a_prompt_are_released_by_its_reader() {
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    let tokens = prompt(1, 6 * CHUNK);
    worker.store(&worker.key("a", &tokens, 0..6));
    let mut scheduler = server.client();
    let middle = worker.key("b", &tokens, 2..6);
    assert_eq!(lookup(&mut scheduler, &middle), 4);
    assert_eq!(server.status().usage.leases, 4);
    assert!(worker.retrieve(&worker.key("b", &tokens, 2..4)));
    assert_eq!(server.status().usage.leases, 2);
    assert!(worker.retrieve(&worker.key("b", &tokens, 4..6)));
    assert_eq!(server.status().usage.leases, 0);
}

/// A network namespace with one link to the current namespace.
struct Network {
    name: String,
    link: String,
    address: String,
}

impl Network {
    /// Creates a network namespace, or returns the reason why that is not possible.
    fn create() -> Result<Self, String> {
        let pid = std::process::id();
        let subnet = format!("10.213.{}", pid % 250);
        let network = Self {
            name: format!("lmc{pid}"),
            link: format!("lmc{}", pid % 1_000_000),
            address: format!("{subnet}.1"),
        };
        let (name, link) = (&network.name, &network.link);
        let there = format!("{link}b");
        for command in [
            format!("netns add {name}"),
            format!("link add {link} type veth peer name {there} netns {name}"),
            format!("addr add {subnet}.1/24 dev {link}"),
            format!("link set {link} up"),
            format!("-n {name} addr add {subnet}.2/24 dev {there}"),
            format!("-n {name} link set {there} up"),
        ] {
            Self::ip(&command)?;
        }
        Ok(network)
    }

    fn ip(command: &str) -> Result<(), String> {
        let done = Command::new("ip").args(command.split(' ')).output();
        let done = done.map_err(|error| format!("ip cannot be run: {error}"))?;
        let said = String::from_utf8_lossy(&done.stderr);
        match done.status.success() {
            true => Ok(()),
            false => Err(format!("ip {command}: {}", said.trim())),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        let _ = Self::ip(&format!("link del {}", self.link));
        let _ = Self::ip(&format!("netns del {}", self.name));
    }
}

/// A host, virtual machine or container network that vanishes sends no FIN. Its slots, keys and
/// connection were held until the server was restarted.
#[test]
fn slots_of_a_host_that_vanishes_are_released() {
    if !in_lab("waits 7 s for keepalives that are not answered") {
        return;
    }
    let network = match Network::create() {
        Ok(network) => network,
        Err(why) => return println!("skipped: cannot create a network namespace ({why})"),
    };
    let server = Server::with(
        1 << 20,
        |_| {},
        |zmq| {
            zmq.host.clone_from(&network.address);
            zmq.keepalive = Keepalive {
                idle: Duration::from_secs(1),
                interval: Duration::from_secs(1),
                probes: 2,
            };
        },
    );
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &network.name]);
    command.arg(std::env::current_exe().expect("this test"));
    command.args(test_arguments(a_worker_process));
    let mut process = Process::launch(command, server.address);
    process.run("register");
    process.run("prepare");
    // The kernel of an idle client answers the probes, so its connection stays open. Time itself is
    // what is tested: unanswered probes would end it after 3 s, by the kernel's clock.
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(server.status().transport.connections_open, 1);
    assert_eq!(server.status().usage.reserved_slots, 2);
    Network::ip(&format!("link set {} down", network.link)).expect("the link is there");
    wait_for_open_connections(&server, 0);
    server.assert_idle();
    assert_eq!(server.status().counts.slots_released_by_grace, 2);
}
