//! Several daemons that read each other's chunks.

use std::thread;
use std::time::{Duration, Instant};

use lmc_backend_p2p::message::VERSION;
use lmc_testkit::{Folder, free_port, in_lab, until, write_secret};
use lmc_vllm_adapter::{Client, Reply, Request, RequestConfigs, Sources};

use crate::common::prompt::{
    CHUNKS, Prompt, await_hits, end, hits_so_far, look_up, read_found, register, register_wide,
    retrieve, store,
};
use crate::common::{Server, drive_flags};

/// Starts a daemon that listens for peers at `port`, and connects to others.
fn start(port: u16, peers: &[u16], flags: &[&str]) -> Server {
    let at = |port: &u16| format!("127.0.0.1:{port}");
    let peers: Vec<String> = peers.iter().map(at).collect();
    let (listen, peers) = (at(&port), peers.join(","));
    let mut args = vec!["--l1-size-gb", "64MiB", "--p2p-listen", &listen];
    if !peers.is_empty() {
        args.extend(["--p2p-peer", &peers]);
    }
    if !flags.contains(&"--p2p-locate-timeout") {
        // The machine may be busy.
        args.extend(["--p2p-locate-timeout", "10s"]);
    }
    args.extend(flags);
    Server::start(&args)
}

fn tier_counter(server: &Server, name: &str) -> f64 {
    server.metric(&format!(
        "lmc_tier_events_total{{tier=\"peers\",what=\"{name}\"}}"
    ))
}

/// Connects a client to a daemon, and registers a worker.
fn worker(server: &Server) -> (Client, String) {
    let mut client = server.client();
    let shm_name = register(&mut client);
    (client, shm_name)
}

/// Looks the prompt up until all of it is found: the peers may not have met yet.
fn until_found(server: &Server) {
    let (mut client, shm_name) = worker(server);
    let mut request = 0;
    until("the peer's chunks are found", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("request-{request}")) == CHUNKS as u64
    });
}

/// Starts two daemons, of which the first has stored the prompt and the second has read it.
fn two_daemons() -> (Server, Server) {
    let one = free_port();
    let first = start(one, &[], &[]);
    let second = start(free_port(), &[one], &[]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
    (first, second)
}

#[test]
fn a_daemon_reads_what_another_has_stored() {
    let (first, second) = two_daemons();
    assert_eq!(tier_counter(&second, "read"), CHUNKS as f64);
    // More where a read was late, and was asked for again.
    assert!(tier_counter(&first, "served") >= CHUNKS as f64);
    // From now on it has them itself.
    drop(first);
    until_found(&second);
}

#[test]
fn what_another_has_on_disk_is_promoted_there_and_read() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let (one, two) = (free_port(), free_port());
    let disk = drive_flags(&folder, "512MiB");
    let flags = [&disk[..], &["--state-dir", "none"]].concat();
    let first = start(one, &[], &flags);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until("all chunks are on disk", || {
        first.metric("lmc_tier_chunks{tier=\"disk\"}") == CHUNKS as f64
    });
    drop((client, first));
    let first = start(one, &[], &flags);
    let second = start(two, &[one], &[]);
    until_found(&second);
    assert!(tier_counter(&first, "served") >= CHUNKS as f64);
}

#[test]
fn peers_with_another_key_are_strangers() {
    let folder = Folder::temporary();
    let file = |name: &str, key: &str| {
        let path = folder.join(name);
        write_secret(&path, &key.repeat(8));
        path.to_str().expect("text").to_owned()
    };
    let (right, wrong) = (
        file("right", "0123456789abcdef"),
        file("wrong", "fedcba9876543210"),
    );
    let (one, two, three) = (free_port(), free_port(), free_port());
    let first = start(one, &[], &["--p2p-key", &right]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    let stranger = start(two, &[one], &["--p2p-key", &wrong]);
    stranger.line("a peer cannot be connected to");
    until("the stranger is counted", || {
        tier_counter(&first, "refused_handshakes") > 0.0
    });
    let (mut client, shm_name) = worker(&stranger);
    assert_eq!(retrieve(&mut client, &shm_name, "request"), 0);
    let friend = start(three, &[one], &["--p2p-key", &right]);
    until_found(&friend);
    // The variable names the file as the flag does.
    let (listen, peer) = (free_port(), format!("127.0.0.1:{one}"));
    let listen = format!("127.0.0.1:{listen}");
    let mut command = crate::common::lmc();
    command.env("LMC_P2P_KEY", &right);
    let by_variable = Server::start_by(
        command,
        &[
            "--p2p-listen",
            &listen,
            "--p2p-peer",
            &peer,
            "--l1-size-gb",
            "64MiB",
        ],
    );
    until_found(&by_variable);
}

/// Returns what `lmc peers --json` prints about a server.
fn peers_status(server: &Server) -> serde_json::Value {
    lmc_peers(server, &["--json"]).parse().expect("JSON")
}

/// Waits until a server has accepted the hellos of this number of peers.
fn until_connected(server: &Server, peers: usize) {
    until("the peers are connected", || {
        let status = peers_status(server);
        let known = status["peers"].as_array().expect("a list");
        known
            .iter()
            .filter(|peer| peer["version"] == VERSION)
            .count()
            == peers
    });
}

#[test]
fn a_daemon_ignores_itself_among_the_peers_that_are_named() {
    let ports = [free_port(), free_port()];
    // All hosts have the same list.
    let daemons = ports.map(|port| start(port, &ports, &[]));
    for (number, daemon) in daemons.iter().enumerate() {
        until_connected(daemon, 1);
        let named = |port: u16| {
            let status = peers_status(daemon);
            let name = format!("127.0.0.1:{port}");
            let mut all = status["named"].as_array().expect("a list").iter();
            let found = all.find(|one| one["name"] == name.as_str());
            found.expect("it is named").clone()
        };
        // It connects by itself, or the other has done so.
        let other = ports[1 - number];
        until("both addresses were connected to", || {
            named(ports[number])["id"].is_string() && named(other)["id"].is_string()
        });
        let (own, other) = (named(ports[number]), named(other));
        assert_eq!(
            (&own["itself"], &other["itself"]),
            (&true.into(), &false.into())
        );
        assert!(own["failure"].is_null(), "{own}");
        let status = peers_status(daemon);
        assert_eq!(own["id"], status["id"]);
        assert_eq!(other["id"], status["peers"][0]["id"]);
        let shown = lmc_peers(daemon, &[]);
        assert!(!shown.contains("not connected"), "{shown}");
    }
    let [first, second] = daemons;
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
}

#[test]
fn more_than_eight_named_peers_are_warned_about() {
    let ports: Vec<u16> = (0..9).map(|_| free_port()).collect();
    let warning = "lookups slow down with more than 8 peers";
    let many = start(free_port(), &ports, &[]);
    let line = many.line(warning);
    assert!(line.contains("peers=9"), "{line}");
    let few = start(free_port(), &ports[1..], &[]);
    let log = few.log();
    assert!(!log.iter().any(|line| line.contains(warning)), "{log:#?}");
}

#[test]
fn a_lookup_waits_for_a_store_that_a_peers_engine_has_prepared() {
    let one = free_port();
    let first = start(one, &[], &[]);
    let reader = |pending: &str| {
        // The machine may be busy.
        let flags = [
            "--p2p-locate-timeout",
            "10s",
            "--p2p-pending-timeout",
            pending,
        ];
        let server = start(free_port(), &[one], &flags);
        until_connected(&server, 1);
        let (client, shm_name) = worker(&server);
        (server, client, shm_name)
    };
    let (patient, mut waiting, waiting_shm) = reader("60s");
    let (_impatient, mut leaving, leaving_shm) = reader("50ms");
    let (mut writer, shm_name) = worker(&first);
    // On a busy machine the read of a chunk may be late: another prompt is tried.
    let mut prompts = (10..).map(Prompt);
    let mut prompt = Prompt::default();
    until("a lookup finds all that it has waited for", || {
        prompt = prompts.next().expect("there are many");
        let early = format!("early-{}", prompt.0);
        prompt.prepare_store(&mut writer, &shm_name);
        prompt.begin_lookup(&mut waiting, &early);
        prompt.begin_lookup(&mut leaving, &early);
        until("the lookup ends that waits for 50 ms", || {
            hits_so_far(&mut leaving, &early).is_some_and(|hits| {
                assert_eq!(hits, 0, "nothing is committed");
                true
            })
        });
        // The other goes on, and later ones, which find nothing, end before it.
        for number in 1..4 {
            let request = format!("absent-{number}-{}", prompt.0);
            let found = Prompt(number).retrieve(&mut waiting, &waiting_shm, &request);
            assert_eq!(found, 0);
        }
        assert_eq!(hits_so_far(&mut waiting, &early), None);
        prompt.commit_store(&mut writer);
        let hits = await_hits(&mut waiting, &early);
        prompt.read_back(&mut waiting, &waiting_shm, &early, hits);
        hits == CHUNKS as u64
    });
    assert!(tier_counter(&patient, "read") >= CHUNKS as f64);
    let mut tries = 0;
    until("the other finds the prompt as well", || {
        tries += 1;
        let request = format!("late-{tries}");
        prompt.retrieve(&mut leaving, &leaving_shm, &request) == CHUNKS as u64
    });
}

/// At two chunks a second, six chunks take a second and a half: two are lent at once, and the
/// third goes into debt.
#[test]
fn what_a_daemon_serves_stays_within_its_rate() {
    let one = free_port();
    let first = start(one, &[], &["--p2p-serve-rate", "64KiB"]);
    let second = start(free_port(), &[one], &["--p2p-locate-timeout", "10s"]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_connected(&second, 1);
    let begun = Instant::now();
    until_found(&second);
    // No bound from above: a busy machine takes longer.
    assert!(begun.elapsed() > Duration::from_millis(1400));
    assert!(tier_counter(&second, "busy") > 0.0);
    assert_eq!(tier_counter(&second, "read"), CHUNKS as f64);
}

#[test]
fn a_clear_at_one_daemon_reaches_its_peers() {
    let (first, second) = two_daemons();
    let clear = Request::Clear { force: true };
    first.client().ask(&clear).expect("an answer");
    let (mut client, shm_name) = worker(&second);
    let mut request = 0;
    until("the clear has reached the peer", || {
        request += 1;
        retrieve(&mut client, &shm_name, &format!("after-{request}")) == 0
    });
}

/// Runs `lmc clear`. Returns its exit code, and its output.
fn clear(server: &Server) -> (Option<i32>, String) {
    let url = format!("127.0.0.1:{}", server.http);
    let mut command = crate::common::lmc();
    let output = command.args(["clear", "--url", &url]).output();
    let output = output.expect("the binary runs");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.code(), said)
}

#[test]
fn a_clear_names_a_peer_whose_state_folder_cannot_be_written() {
    let (one, state) = (free_port(), Folder::temporary());
    let first = start(one, &[], &[]);
    let second = start(free_port(), &[one], &["--state-dir", state.text()]);
    until_connected(&first, 1);
    let in_the_way = state.join("clears");
    std::fs::write(&in_the_way, b"a file").expect("written");
    let (code, said) = clear(&first);
    assert_eq!(code, Some(4), "{said}");
    assert!(
        said.contains("(carried out; its restart may undo it)"),
        "{said}"
    );
    assert_eq!(second.metric("lmc_clears_total{from=\"elsewhere\"}"), 1.0);
    std::fs::remove_file(&in_the_way).expect("removed");
    let (code, said) = clear(&first);
    assert_eq!(code, Some(0), "{said}");
    assert!(in_the_way.is_dir(), "its state file is there");
}

#[test]
fn a_clear_names_a_peer_that_was_connected_and_is_gone() {
    let (first, second) = two_daemons();
    let (code, said) = clear(&first);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("durable in state file"), "{said}");
    drop(second);
    until("the peer is gone", || {
        let (code, said) = clear(&first);
        code == Some(4) && said.contains("NOT confirmed by peers: ")
    });
}

#[test]
fn a_peer_with_another_layout_serves_nothing_and_is_warned_about() {
    if !in_lab("peers tell each other of new engines every 5 s") {
        return;
    }
    let one = free_port();
    let first = start(one, &[], &[]);
    let second = start(free_port(), &[one], &[]);
    // Engines register later than their servers meet.
    second.line("peer connected");
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    let mut other = second.client();
    let shm_name = register_wide(&mut other, 16);
    let line = second.line("serves this model in another space");
    assert!(line.contains("layout"), "{line}");
    let shown = lmc_peers(&second, &[]);
    assert!(
        shown.contains("shares no chunks of model, because these fields differ: layout"),
        "{shown}"
    );
    assert_eq!(retrieve(&mut other, &shm_name, "request"), 0);
    drop(client);
}

/// Runs `lmc peers` for a server. Returns its output, or what it says to standard error.
fn run_peers(server: &Server, args: &[&str]) -> Result<String, String> {
    let url = format!("127.0.0.1:{}", server.http);
    let out = crate::common::lmc()
        .arg("peers")
        .args(args)
        .args(["--url", &url])
        .output();
    let out = out.expect("the binary runs");
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    match out.status.success() {
        true => Ok(text(out.stdout)),
        false => Err(text(out.stderr)),
    }
}

/// Returns what `lmc peers` prints about a server.
fn lmc_peers(server: &Server, args: &[&str]) -> String {
    run_peers(server, args).expect("the command succeeds")
}

#[test]
fn lmc_peers_shows_who_is_there_and_why_others_are_not() {
    let (one, absent) = (free_port(), free_port());
    let first = start(one, &[], &["--p2p-name", "alpha"]);
    let second = start(free_port(), &[one, absent], &[]);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    until_found(&second);
    let shown = lmc_peers(&second, &[]);
    let row = shown.lines().find(|line| line.starts_with("alpha"));
    let row = row.unwrap_or_else(|| panic!("no line of alpha in {shown}"));
    let address = format!("127.0.0.1:{one}");
    let bytes = CHUNKS as u64 * 256 * 2 * 2 * 8 * 4;
    let moved = format!("{CHUNKS} ({} KiB)", bytes / 1024);
    assert!(row.contains(&address) && row.contains(&moved), "{shown}");
    let missing = format!("127.0.0.1:{absent}: the connection failed");
    until("the address without a daemon is named", || {
        lmc_peers(&second, &[]).contains(&missing)
    });
    let json: serde_json::Value = lmc_peers(&second, &["--json"]).parse().expect("JSON");
    let peer = &json["peers"][0];
    assert_eq!(peer["counters"]["read"], CHUNKS);
    assert_eq!(peer["counters"]["read_bytes"], bytes);
    assert_eq!(json["named"].as_array().map(Vec::len), Some(2));
    assert_eq!(json["named"][0]["id"], peer["id"]);
    let served: serde_json::Value = lmc_peers(&first, &["--json"]).parse().expect("JSON");
    let served = served["peers"][0]["counters"]["served"].as_u64();
    assert!(served >= Some(CHUNKS as u64), "{served:?}");
    // One that disconnects is named until it is back.
    drop(first);
    until("the peer is gone", || {
        lmc_peers(&second, &[]).contains(&format!("alpha at {address}: disconnected"))
    });
    let first = start(one, &[], &["--p2p-name", "alpha"]);
    until("the peer is back", || {
        let shown = lmc_peers(&second, &[]);
        shown.lines().any(|line| line.starts_with("alpha")) && !shown.contains("disconnected")
    });
    drop(first);
}

/// Returns the settings of a request that names peers.
fn named(sources: &str) -> RequestConfigs {
    let mut configs = RequestConfigs::default();
    configs.sources = Sources::parse(sources);
    configs
}

#[test]
fn a_request_is_read_from_the_peer_that_it_names() {
    let owners = [free_port(), free_port()];
    let names = ["alpha", "beta"];
    let owners: Vec<(Server, u16)> = (owners.into_iter().zip(names))
        .map(|(port, name)| (start(port, &[], &["--p2p-name", name]), port))
        .collect();
    for (owner, _) in &owners {
        let (mut client, shm_name) = worker(owner);
        store(&mut client, &shm_name);
    }
    let ports: Vec<u16> = owners.iter().map(|(_, port)| *port).collect();
    let by_address = format!("stranger,127.0.0.1:{}", ports[0]);
    for (sources, owner) in [("alpha", 0), ("beta", 1), (&*by_address, 0)] {
        let (other, _) = &owners[1 - owner];
        until("all is read", || {
            // A new reader: what another has read is in its memory. On a loaded machine an answer
            // takes longer than half of the default.
            let reader = start(free_port(), &ports, &["--p2p-locate-timeout", "10s"]);
            until_connected(&reader, 2);
            let before = tier_counter(other, "served");
            let (mut client, shm_name) = worker(&reader);
            let reply = look_up(&mut client, "request", named(sources));
            assert_eq!(reply.expect("an answer"), Reply::None);
            let found = read_found(&mut client, &shm_name, "request");
            let by_other = tier_counter(other, "served") - before;
            assert_eq!(by_other, 0.0, "{sources}: read from {}", names[1 - owner]);
            found == CHUNKS as u64
        });
    }
}

/// Returns the settings of a request that waits for a peer.
fn awaiting(source: &str) -> RequestConfigs {
    let mut configs = named(source);
    configs.wait = Duration::from_secs(3600);
    configs
}

#[test]
fn a_request_waits_for_the_peer_that_computes_its_prompt() {
    let at = free_port();
    let prefill = start(at, &[], &["--p2p-name", "alpha"]);
    let decode = start(free_port(), &[at], &["--p2p-max-wait", "5m"]);
    until_connected(&decode, 1);
    let (mut client, shm_name) = worker(&decode);
    let reply = look_up(&mut client, "request", awaiting("alpha"));
    assert_eq!(reply.expect("an answer"), Reply::None);
    assert_eq!(
        hits_so_far(&mut client, "request"),
        None,
        "not computed yet"
    );
    let (mut computing, its_shm_name) = worker(&prefill);
    store(&mut computing, &its_shm_name);
    assert_eq!(read_found(&mut client, &shm_name, "request"), CHUNKS as u64);
    assert_eq!(decode.metric("lmc_source_waits_total"), 1.0);

    // Another prompt, whose engine goes with its daemon.
    let reply = Prompt(1).look_up(&mut client, "other", awaiting("alpha"));
    assert_eq!(reply.expect("an answer"), Reply::None);
    assert_eq!(hits_so_far(&mut client, "other"), None);
    drop(prefill);
    assert_eq!(await_hits(&mut client, "other"), 0);
    // There is nothing to wait for any more.
    let reply = Prompt(1).look_up(&mut client, "third", awaiting("alpha"));
    assert_eq!(reply.expect("an answer"), Reply::None);
    assert_eq!(await_hits(&mut client, "third"), 0);
}

/// A prefill that fails, or whose server has no memory for its chunks, costs no wait to its end.
#[test]
fn a_prefill_that_has_ended_is_waited_for_no_longer() {
    let at = free_port();
    let prefill = start(at, &[], &["--p2p-name", "alpha"]);
    let decode = start(free_port(), &[at], &["--p2p-max-wait", "5m"]);
    until_connected(&decode, 1);
    let (mut client, _) = worker(&decode);
    let mut waits = awaiting("alpha");
    waits.awaited = "a1b2".to_owned();
    let reply = look_up(&mut client, "early", waits.clone());
    assert_eq!(reply.expect("an answer"), Reply::None);
    let hits = await_hits(&mut client, "early");
    assert_eq!(hits, 0, "the peer has no engine");
    let (mut computing, _) = worker(&prefill);
    let reply = look_up(&mut client, "answer", waits.clone());
    assert_eq!(reply.expect("an answer"), Reply::None);
    let mut computes = RequestConfigs::default();
    computes.awaited = "a1b2".to_owned();
    // One request with two prompts.
    for name in ["prefill-0", "prefill-1"] {
        let reply = look_up(&mut computing, name, computes.clone());
        assert_eq!(reply.expect("an answer"), Reply::None);
    }
    end(&mut computing, "prefill-0");
    thread::sleep(Duration::from_secs(1));
    assert_eq!(hits_so_far(&mut client, "answer"), None, "one goes on");
    end(&mut computing, "prefill-1");
    assert_eq!(await_hits(&mut client, "answer"), 0);
    // It is looked up once more, as after a preemption.
    let reply = look_up(&mut client, "answer", waits);
    assert_eq!(reply.expect("an answer"), Reply::None);
    assert_eq!(await_hits(&mut client, "answer"), 0);
    assert_eq!(decode.metric("lmc_source_waits_total"), 2.0);
}

#[test]
fn chunks_are_pushed_to_the_peer_that_a_request_names() {
    let at = free_port();
    let prefill = start(at, &[], &[]);
    let decode = ["beta", "gamma"].map(|name| start(free_port(), &[at], &["--p2p-name", name]));
    until_connected(&prefill, 2);
    let pushing = |to: &str| {
        let mut configs = RequestConfigs::default();
        configs.push_to = to.to_owned();
        configs
    };
    let (mut computing, shm_name) = worker(&prefill);
    let mut engines = decode.each_ref().map(worker);
    let look_up = |client: &mut Client, to: &str| {
        let reply = look_up(client, to, pushing(to));
        assert_eq!(reply.expect("an answer"), Reply::None);
        await_hits(client, to)
    };
    assert_eq!(look_up(&mut computing, "beta"), 0);
    let prompt = Prompt::default();
    prompt.store_with(&mut computing, &shm_name, pushing("beta"));
    // What a lookup finds is not computed again, and is pushed as well.
    assert_eq!(look_up(&mut computing, "gamma"), CHUNKS as u64);
    let all = CHUNKS as f64;
    until("all are there", || {
        tier_counter(&prefill, "pushed") == 2.0 * all
    });
    for (server, (client, shm_name)) in decode.iter().zip(&mut engines) {
        assert_eq!(tier_counter(server, "read"), all);
        let found = retrieve(client, shm_name, "answer");
        assert_eq!(found, CHUNKS as u64);
        assert_eq!(tier_counter(server, "read"), all, "none is read again");
    }
    // A request that no engine there could make leaves nothing there.
    let other = register_wide(&mut computing, 16);
    prompt.store_with(&mut computing, &other, pushing("beta"));
    until("it is dropped", || {
        tier_counter(&prefill, "push_dropped") == all
    });
    assert_eq!(tier_counter(&decode[0], "read"), all);
    register(&mut computing);
    // Nothing is lost where no such peer is connected.
    assert_eq!(look_up(&mut computing, "stranger"), CHUNKS as u64);
    assert_eq!(prefill.metric("lmc_pushes_unknown_total"), 1.0);
    prefill.line("no peer of the name or address stranger is connected");
}

#[test]
fn a_server_waits_for_a_peer_no_longer_than_its_operator_allows() {
    let at = free_port();
    let _prefill = start(at, &[], &["--p2p-name", "alpha"]);
    for (limit, waits) in [("0", 0.0), ("0.05", 1.0)] {
        let decode = start(free_port(), &[at], &["--p2p-max-wait", limit]);
        until_connected(&decode, 1);
        let (mut client, _) = worker(&decode);
        let reply = look_up(&mut client, "request", awaiting("alpha"));
        assert_eq!(reply.expect("an answer"), Reply::None);
        assert_eq!(await_hits(&mut client, "request"), 0);
        assert_eq!(decode.metric("lmc_source_waits_total"), waits);
    }
}

#[test]
fn a_lookup_that_names_peers_in_a_wrong_way_is_refused_with_the_reason() {
    let server = start(free_port(), &[], &[]);
    let (mut client, shm_name) = worker(&server);
    store(&mut client, &shm_name);
    // It is sent as an empty text.
    let reply = look_up(&mut client, "request", named("a,,b"));
    let refusal = reply.expect_err("a refusal").to_string();
    assert!(refusal.contains("lmcache.p2p.source"), "{refusal}");
    assert_eq!(read_found(&mut client, &shm_name, "request"), 0);
    server.line("lookup of request refused");
    assert_eq!(retrieve(&mut client, &shm_name, "other"), CHUNKS as u64);
}

#[test]
fn a_peer_reads_on_order_what_a_daemon_has_in_memory() {
    let one = free_port();
    let first = start(one, &[], &[]);
    // The machine may be busy.
    let patient = ["--p2p-name", "beta", "--p2p-locate-timeout", "10s"];
    let second = start(free_port(), &[one], &patient);
    let (mut client, shm_name) = worker(&first);
    store(&mut client, &shm_name);
    let unknown = run_peers(&first, &["copy", "gamma"]).expect_err("no such peer");
    assert!(
        unknown.contains("no connected peer is named \"gamma\""),
        "{unknown}"
    );
    until("the peer is connected", || {
        lmc_peers(&first, &[]).contains("\nbeta ")
    });
    let other =
        run_peers(&first, &["copy", "beta", "--model", "other"]).expect_err("no such model");
    assert!(other.contains("no live space"), "{other}");
    let two = format!("{}", 2 * 256 * 2 * 2 * 8 * 4);
    // On a busy machine a read may be late.
    until("two chunks are copied", || {
        let copied = lmc_peers(&first, &["copy", "beta", "--limit", &two]);
        copied.starts_with("beta now has 2 of 2 chunks")
    });
    let all = format!("beta now has {CHUNKS} of {CHUNKS} chunks");
    until("all chunks are copied", || {
        let copied = lmc_peers(&first, &["copy", "beta", "--model", "model"]);
        copied.starts_with(&all)
    });
    // Those that were there were not read again.
    assert_eq!(tier_counter(&second, "read"), CHUNKS as f64);
    drop(first);
    until_found(&second);
}

#[test]
fn peers_with_another_chunk_size_name_both_sides() {
    let (one, two) = (free_port(), free_port());
    let first = start(one, &[], &[]);
    let second = start(two, &[one], &["--chunk-size", "512"]);
    let (of_first, of_second) = (
        "this side has 256 tokens, the peer 512",
        "this side has 512 tokens, the peer 256",
    );
    first.line(of_first);
    second.line(of_second);
    let shown = lmc_peers(&second, &[]);
    assert!(
        shown.contains("NOT USED") && shown.contains(of_second),
        "{shown}"
    );
}

#[test]
fn flags_that_do_not_go_together_are_refused_with_what_to_do() {
    let refused = |flags: &[&str], parts: &[&str]| {
        let mut serve = crate::common::lmc();
        serve.args(["serve", "--port", "0", "--http-port", "0"]);
        let out = serve.args(flags).output();
        let out = out.expect("the binary starts");
        let text = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(!out.status.success(), "{text}");
        for part in parts {
            assert!(text.contains(part), "{part}: {text}");
        }
    };
    refused(&["--p2p-listen", "10.0.0.1:7700"], &["p2p-key", "openssl"]);
    refused(
        &["--p2p-listen", "0.0.0.0:7700", "--p2p-key", "/nowhere"],
        &["p2p-advertise", "wildcard"],
    );
    refused(
        &["--p2p-listen", "0.0.0.0:7700"],
        &["p2p-advertise", "p2p-key"],
    );
    refused(&["--p2p-peer", "host-b:7700"], &["requires --p2p-listen"]);
    refused(&["--p2p-listen", "10.0.0.1"], &["HOST:PORT"]);
    let listen = ["--p2p-listen", "127.0.0.1:0", "--p2p-transport", "nixl"];
    refused(&listen, &["p2p-transport", "--p2p-key"]);
    refused(&["--p2p-interfaces", "eth0;rm"], &["network devices"]);
    let directory = ["--p2p-directory", "lmc://host-b:7800"];
    refused(&directory, &["p2p-directory", "requires --p2p-listen"]);
    refused(&["--p2p-directory", "host-b:7800"], &["lmc://HOST:PORT"]);
    refused(
        &["--p2p-directory-listen", "10.0.0.1:7800"],
        &["p2p-key", "--p2p-directory-listen", "openssl"],
    );
    refused(
        &["--p2p-listen", "127.0.0.1:0", "--p2p-key", "/nowhere"],
        &["/nowhere"],
    );
}

/// Both took until the next listing, five minutes later.
#[test]
fn a_directory_learns_what_a_drive_has_evicted_and_what_it_has_kept() {
    let folder = Folder::inside(env!("CARGO_TARGET_TMPDIR"));
    let at = format!("127.0.0.1:{}", free_port());
    let host = Server::start(&["--l1-size-gb", "64MiB", "--p2p-directory-listen", &at]);
    let directory = format!("lmc://{at}");
    let disk = drive_flags(&folder, "64MiB");
    let other = ["--state-dir", "none", "--p2p-directory", &directory];
    let low = ["--eviction-trigger-watermark", "0.2"];
    let member = || start(free_port(), &[], &[&disk[..], &other, &low].concat());
    let metric =
        |server: &Server, name: &str| server.metric(&format!("lmc_tier_{name}{{tier=\"disk\"}}"));
    let server = member();
    let mut client = server.client();
    // 1 MiB a chunk: 64 fit on the drive at most, and 12 into memory below the watermark.
    let shm_name = register_wide(&mut client, 256);
    for number in 0..16 {
        Prompt(number).store(&mut client, &shm_name);
        until("each of its chunks was written, or never will be", || {
            let ends = [
                "copied_chunks",
                "copies_dropped",
                "copies_declined",
                "copies_failed",
            ];
            let ended = ends.map(|end| metric(&server, &format!("{end}_total")));
            ended.iter().sum::<f64>() as usize >= CHUNKS * (number as usize + 1)
        });
    }
    until("the directory has only what is there", || {
        let entries = host.metric("lmc_directory_entries");
        let there = metric(&server, "chunks");
        there <= 64.0 && (there..there + 13.0).contains(&entries)
    });
    drop((client, server));
    // Those of the killed one, for some seconds more.
    let mut before = host.metric("lmc_directory_entries");
    let server = member();
    until("the directory has what the drive has kept", || {
        let entries = host.metric("lmc_directory_entries");
        if entries == 0.0 {
            before = 0.0;
        }
        let there = metric(&server, "chunks");
        there > 0.0 && entries == before + there
    });
}

/// Starts a daemon that announces to directories, and finds peers through them alone.
fn member(directories: &str) -> Server {
    let port = free_port();
    // A loaded machine answers late.
    let timeout = ["--p2p-locate-timeout", "200ms"];
    start(
        port,
        &[],
        &[&timeout[..], &["--p2p-directory", directories]].concat(),
    )
}

#[test]
fn daemons_find_each_other_through_directories_that_come_and_go() {
    let ports = [free_port(), free_port()];
    let at = ports.map(|port| format!("127.0.0.1:{port}"));
    let host = |at: &str| Server::start(&["--l1-size-gb", "64MiB", "--p2p-directory-listen", at]);
    let directories = at.each_ref().map(|at| format!("lmc://{at}")).join(",");
    let first = host(&at[0]);
    // The second hosts a directory and is a member itself.
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let second = Server::start(&[
        "--l1-size-gb",
        "64MiB",
        "--p2p-listen",
        &listen,
        "--p2p-directory",
        &directories,
        "--p2p-directory-listen",
        &at[1],
    ]);
    let (mut client, shm_name) = worker(&second);
    store(&mut client, &shm_name);
    let entries = |server: &Server| server.metric("lmc_directory_entries");
    until("both directories know the chunks", || {
        entries(&first) == CHUNKS as f64 && entries(&second) == CHUNKS as f64
    });
    let third = member(&directories);
    until_found(&third);
    assert_eq!(tier_counter(&third, "read"), CHUNKS as f64);
    until("both know that the third has them, too", || {
        entries(&first) == 2.0 * CHUNKS as f64 && entries(&second) == 2.0 * CHUNKS as f64
    });
    until(
        "the third shows which directory it asks, and that it knows all",
        || {
            let shown = lmc_peers(&third, &[]);
            let asked = format!("at {}: asked, knows {CHUNKS} chunks of this side", at[0]);
            let other = format!("at {}: not asked now, knows {CHUNKS} chunks", at[1]);
            shown.contains(&asked) && shown.contains(&other)
        },
    );
    let hosted = lmc_peers(&first, &[]);
    let entries_there = format!("2 members, {} of at most", 2 * CHUNKS);
    assert!(hosted.contains(&entries_there), "{hosted}");
    // The first directory is killed: the second answers.
    drop(first);
    let fourth = member(&directories);
    until_found(&fourth);
    // It comes back with nothing, and its members announce everything again.
    let first = host(&at[0]);
    until("the directory knows everything again", || {
        entries(&first) == 3.0 * CHUNKS as f64
    });
    // A member that is killed is not named any more: the others have its chunks.
    drop((client, second));
    until_found(&member(&format!("lmc://{}", at[0])));
}
