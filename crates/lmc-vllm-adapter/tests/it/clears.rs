//! Requests that a clear overtakes.

use std::time::Duration;

use lmc_backend::{Clears, StartId};
use lmc_engine::EngineHost;
use lmc_vllm_adapter::{Client, Reply, Request};

use crate::common::{Answer, CHUNK, Server, Worker, end_session, lookup, prompt};

const FORCE: Request = Request::Clear { force: true };
const KEEP_LEASED: Request = Request::Clear { force: false };

/// A server with a worker, and a connection for a scheduler.
fn engine(server: &Server) -> (Worker, Client) {
    (Worker::register(server, 1), server.client())
}

#[test]
fn what_a_request_computed_before_a_clear_is_not_stored_after_it() {
    let server = Server::start();
    let (mut worker, mut scheduler) = engine(&server);
    let tokens = prompt(1, 4 * CHUNK);
    let first = worker.key("a", &tokens, 0..2);
    assert_eq!(lookup(&mut scheduler, &first), 0);
    assert_eq!(worker.store(&first), 2);
    assert_eq!(scheduler.answer(&FORCE), Reply::None);
    // The request goes on with what it computed from the old weights, and looks up once more.
    assert_eq!(worker.store(&worker.key("a", &tokens, 2..4)), 0);
    assert_eq!(lookup(&mut scheduler, &first), 0);
    assert_eq!(worker.store(&worker.key("a", &tokens, 0..4)), 0);
    end_session(&mut scheduler, "a");
    // What it stores late is dropped, also where its name is used again by then.
    assert_eq!(worker.store(&first), 0);
    assert_eq!(lookup(&mut scheduler, &first), 0);
    assert_eq!(worker.store(&first), 0);
    end_session(&mut scheduler, "a");
    // One that begins now is stored.
    let second = worker.key("b", &tokens, 0..2);
    assert_eq!(lookup(&mut scheduler, &second), 0);
    assert_eq!(worker.store(&second), 2);
    assert_eq!(lookup(&mut scheduler, &worker.key("c", &tokens, 0..4)), 2);
    end_session(&mut scheduler, "b");
    end_session(&mut scheduler, "c");
    assert_eq!(server.status().counts.chunks_outdated, 10);
    server.assert_idle();
}

#[test]
fn what_a_request_found_before_a_clear_is_found_by_no_other() {
    let server = Server::start();
    let (mut worker, mut scheduler) = engine(&server);
    let tokens = prompt(1, 2 * CHUNK);
    let key = |name: &str| worker.key(name, &tokens, 0..2);
    let (before, after) = (key("before"), key("after"));
    assert_eq!(lookup(&mut scheduler, &before), 0);
    assert_eq!(worker.store(&before), 2);
    assert_eq!(lookup(&mut scheduler, &before), 2);
    assert_eq!(scheduler.answer(&KEEP_LEASED), Reply::None);
    assert_eq!(lookup(&mut scheduler, &after), 0);
    assert_eq!(worker.prepare_retrieve(&after), None);
    assert!(worker.retrieve(&before), "it was promised");
    // With its last reader its memory goes.
    end_session(&mut scheduler, "before");
    server.eventually("the memory is given back", |s| s.usage.used_bytes == 0);
    assert_eq!(worker.prepare_retrieve(&before), None);
    end_session(&mut scheduler, "after");
    server.assert_idle();
}

/// The request may have begun before: its session is over, or was one of a server before this.
#[test]
fn a_request_that_was_not_looked_up_is_not_stored_for_a_while_after_a_clear() {
    let server = Server::start();
    let (mut worker, mut scheduler) = engine(&server);
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(worker.store(&key), 2, "nothing was ever cleared");
    assert_eq!(scheduler.answer(&FORCE), Reply::None);
    assert_eq!(worker.store(&key), 0);
    // That the scheduler has gone says nothing.
    drop(scheduler);
    server.eventually("the scheduler is gone", |status| {
        status.transport.connections_open == 1
    });
    assert_eq!(worker.store(&key), 0);
    // A later clear makes it no newer.
    assert_eq!(worker.client.answer(&FORCE), Reply::None);
    assert_eq!(worker.store(&key), 0);
    server.assert_idle();
    // A worker beside which there was no scheduler since before the first clear.
    let server = Server::start();
    let mut worker = Worker::register(&server, 1);
    (0..2).for_each(|_| assert_eq!(worker.client.answer(&FORCE), Reply::None));
    assert_eq!(worker.store(&key), 2);
    // What it looked up itself before a clear is known, although that is over.
    let late = worker.key("b", &prompt(2, 2 * CHUNK), 0..2);
    assert_eq!(lookup(&mut worker.client, &late), 0);
    end_session(&mut worker.client, "b");
    assert_eq!(worker.client.answer(&FORCE), Reply::None);
    assert_eq!(worker.store(&late), 0);
    server.assert_idle();
    // A server that starts with clears: the one before it may have looked the request up.
    let host = EngineHost::default();
    let mut before = Clears::default();
    before
        .count(StartId::new([1; 16]))
        .expect("the first clear");
    host.clear_log().learn(&before, "its file").expect("few");
    let server = Server::with_host(host, Vec::new());
    let mut worker = Worker::register(&server, 1);
    assert_eq!(worker.store(&key), 0);
    assert_eq!(worker.client.answer(&FORCE), Reply::None);
    assert_eq!(worker.store(&key), 0);
    server.assert_idle();
    // Until the longest time that a request takes is over.
    let server = Server::with(
        1 << 20,
        |config| config.session_ttl = Duration::ZERO,
        |_| {},
    );
    let (mut worker, mut scheduler) = engine(&server);
    assert_eq!(scheduler.answer(&FORCE), Reply::None);
    assert_eq!(worker.store(&key), 2);
    server.assert_idle();
}

/// Two engines give two requests one name: it is not known whose the worker's is.
#[test]
fn of_several_requests_of_a_name_the_oldest_counts_for_what_is_stored() {
    let server = Server::start();
    let (mut worker, mut one) = engine(&server);
    let mut other = server.client();
    let key = worker.key("a", &prompt(1, 2 * CHUNK), 0..2);
    assert_eq!(lookup(&mut one, &key), 0);
    assert_eq!(one.answer(&FORCE), Reply::None);
    assert_eq!(lookup(&mut other, &key), 0);
    assert_eq!(worker.store(&key), 0);
    end_session(&mut one, "a");
    assert_eq!(worker.store(&key), 0);
    end_session(&mut other, "a");
    server.assert_idle();
}

/// The last lookup counts for what is read, in whatever order they were seen.
#[test]
fn of_several_requests_of_a_name_the_last_lookup_counts_for_what_is_read() {
    let server = Server::start();
    let (mut worker, mut one) = engine(&server);
    let mut other = server.client();
    let tokens = prompt(1, 2 * CHUNK);
    let key = worker.key("a", &tokens, 0..2);
    assert_eq!(worker.store(&key), 2);
    assert_eq!(lookup(&mut one, &key), 2);
    assert_eq!(lookup(&mut other, &key), 2);
    assert_eq!(one.answer(&KEEP_LEASED), Reply::None);
    assert_eq!(lookup(&mut one, &key), 0);
    assert_eq!(worker.prepare_retrieve(&key), None, "it began before");
    end_session(&mut one, "a");
    end_session(&mut other, "a");
    server.assert_idle();
}
