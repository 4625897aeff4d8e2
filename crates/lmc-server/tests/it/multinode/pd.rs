//! A prefill host hands prompts over to a decode host, and something befalls the link or the prefill
//! host: every byte that is read back is compared, and no request waits in vain.

use std::time::{Duration, Instant};

use lmc_testkit::{Folder, until};
use lmc_vllm_adapter::{Reply, RequestConfigs, Sources};

use super::network::{Network, v4};
use super::{Daemon, OWNER, READER, SMALL, WHOLE, Worker, at};
use crate::common::prompt::{CHUNKS, Prompt, end};

/// Time that a request allows for its wait, longer than any of these tests takes.
const WAIT: Duration = Duration::from_secs(200);

struct Pair<'a> {
    prefill: Daemon<'a>,
    decode: Daemon<'a>,
    at_prefill: Worker,
    at_decode: Worker,
    _key: Folder,
}

impl<'a> Pair<'a> {
    fn start(network: &'a Network) -> Self {
        let key = Folder::temporary();
        let (one, other) = (at(&v4(OWNER + 1)), at(&v4(READER + 1)));
        let prefill = Daemon::start(network, OWNER, &one, "", &key);
        let decode = Daemon::start(network, READER, &other, &one, &key);
        let (mut at_prefill, mut at_decode) = (prefill.worker(SMALL), decode.worker(SMALL));
        at_prefill.store(Prompt(0));
        at_decode.until_found(Prompt(0));
        Self {
            prefill,
            decode,
            at_prefill,
            at_decode,
            _key: key,
        }
    }

    /// Begins a prompt at the decode host, which waits for the prefill host.
    fn decode_waits(&mut self, prompt: Prompt, request: &str) {
        let mut configs = RequestConfigs::default();
        configs.sources = Sources::parse(&at(&v4(OWNER + 1)));
        configs.wait = WAIT;
        configs.awaited = request.to_owned();
        self.at_decode.begin_with(prompt, request, configs);
    }

    /// Begins the same prompt at the prefill host.
    fn prefill_begins(&mut self, prompt: Prompt, request: &str) {
        let mut configs = RequestConfigs::default();
        configs.awaited = request.to_owned();
        self.at_prefill.begin_with(prompt, request, configs);
    }

    fn nothing_is_held(&self) {
        self.prefill.until_nothing_is_held();
        self.decode.until_nothing_is_held();
        for daemon in [&self.prefill, &self.decode] {
            assert_eq!(daemon.counter("corrupt"), 0.0);
        }
    }
}

impl Worker {
    fn begin_with(&mut self, prompt: Prompt, request: &str, configs: RequestConfigs) {
        let reply = prompt.look_up(&mut self.client, request, configs);
        assert_eq!(reply.expect("an answer"), Reply::None);
    }
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_link_that_delays_and_drops_frames_costs_a_hand_over_time_only() {
    let mut network = Network::new();
    network.degrade(OWNER, 5, 20);
    let mut pair = Pair::start(&network);
    for number in 1..6 {
        let (prompt, request) = (Prompt(number), format!("waits-{number}"));
        pair.decode_waits(prompt, &request);
        pair.prefill_begins(prompt, &request);
        pair.at_prefill.store(prompt);
        end(&mut pair.at_prefill.client, &request);
        assert_eq!(pair.at_decode.finish(prompt, &request), WHOLE);
    }
    let mut pushing = RequestConfigs::default();
    pushing.push_to = at(&v4(READER + 1));
    for number in 6..11 {
        let Worker { client, shm_name } = &mut pair.at_prefill;
        Prompt(number).store_with(client, shm_name, pushing.clone());
    }
    until("all are pushed", || {
        pair.prefill.counter("pushed") == 5.0 * CHUNKS as f64
    });
    let read = pair.decode.counter("read");
    for number in 6..11 {
        let request = format!("pushed-{number}");
        pair.at_decode.begin(Prompt(number), &request);
        assert_eq!(pair.at_decode.finish(Prompt(number), &request), WHOLE);
    }
    assert_eq!(pair.decode.counter("read"), read, "they were there");
    pair.nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_request_does_not_wait_for_a_prefill_host_that_is_cut_off() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.decode_waits(Prompt(1), "cut off");
    pair.prefill_begins(Prompt(1), "cut off");
    let began = Instant::now();
    network.cut(READER, true);
    pair.at_prefill.store(Prompt(1));
    assert_eq!(pair.at_decode.finish(Prompt(1), "cut off"), 0);
    assert!(began.elapsed() < WAIT, "until the end of its time");
    network.cut(READER, false);
    end(&mut pair.at_prefill.client, "cut off");
    pair.at_decode.until_found(Prompt(1));
    pair.nothing_is_held();
}

#[test]
#[ignore = "needs root and namespaces: cargo xtask test-multinode"]
fn a_request_does_not_wait_for_a_prefill_host_that_dies() {
    let network = Network::new();
    let mut pair = Pair::start(&network);
    pair.decode_waits(Prompt(1), "dies");
    pair.prefill_begins(Prompt(1), "dies");
    let began = Instant::now();
    pair.prefill.server.process.kill();
    assert_eq!(pair.at_decode.finish(Prompt(1), "dies"), 0);
    assert!(began.elapsed() < WAIT, "until the end of its time");
    pair.decode.until_nothing_is_held();
}
