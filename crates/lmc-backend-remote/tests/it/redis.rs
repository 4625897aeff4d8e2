//! The tier over real Redis servers: one, a cluster, a master that a Sentinel names; killed,
//! stopped, full, and with wrong passwords. Run by `cargo xtask test-remote`.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lmc_backend::conformance::{lens_of, test_key};
use lmc_backend::{Backend, BackendError, Health, Stored};
use lmc_backend_remote::conformance::{check_replaced_values, check_store, check_swaps};
use lmc_backend_remote::format::{ChunkFolder, Generation, Name, Scope};
use lmc_backend_remote::redis::{RedisConfig, RedisStore, Topology};
use lmc_backend_remote::{GetItem, Store, StoreError};
use lmc_key::{ClearsId, SpaceId};
use lmc_testkit::{DEADLINE, Folder, Process, free_port, own_test, soon, until};
use parking_lot::Mutex;

use crate::common::{clears_object, passes_the_kit, passes_the_lossy_kit, runtime};

mod distant;

const SECRET: &str = "marked-secret-7c1f";

/// A server with a folder of its own.
struct Server {
    port: u16,
    folder: Folder,
    options: Vec<String>,
    process: Process,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        let (port, folder) = (free_port(), Folder::temporary());
        let process = launch("redis-server", port, &folder, &options);
        let this = Self {
            port,
            folder,
            options,
            process,
        };
        until("the server answers", || {
            this.cli(&["PING"]).contains("PONG")
        });
        this
    }

    /// Kills the server and starts it again, without its content.
    fn kill(&mut self) {
        self.process.kill();
    }

    fn start_again(&mut self) {
        self.process = launch("redis-server", self.port, &self.folder, &self.options);
        until("the server answers", || {
            self.cli(&["PING"]).contains("PONG")
        });
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    fn cli(&self, args: &[&str]) -> String {
        let port = self.port.to_string();
        let mut command = Command::new("redis-cli");
        command.args(["-p", &port, "--no-auth-warning"]).args(args);
        if self.options.iter().any(|option| option == "--requirepass") {
            command.env("REDISCLI_AUTH", SECRET);
        }
        let said = command.output().expect("redis-cli runs");
        String::from_utf8_lossy(&said.stdout).into_owned()
    }
}

fn launch(program: &str, port: u16, folder: &Folder, options: &[String]) -> Process {
    let mut command = Command::new(program);
    command.args(["--port", &port.to_string(), "--bind", "127.0.0.1"]);
    command.args(["--dir", folder.text(), "--save", "", "--appendonly", "no"]);
    Process::spawn(command.args(options).stdout(Stdio::null()))
}

type Rig = crate::common::Rig<RedisStore>;

/// Lengths of chunks: larger than any buffer on the way, too.
const LENS: [u64; 5] = [1, 255, 4096, 70_000, 300_001];

fn rig_with(url: &str, change: impl FnOnce(&mut RedisConfig)) -> Rig {
    let mut config = RedisConfig::new(url.parse().unwrap());
    change(&mut config);
    Rig::over(Arc::new(config.open().unwrap()), LENS, |_| {})
}

fn rig(url: &str) -> Rig {
    rig_with(url, |_| {}).used()
}

fn passes_the_kit_of_stores(url: &str) {
    let store = || Arc::new(RedisConfig::new(url.parse().unwrap()).open().unwrap());
    let clients: Vec<Arc<dyn Store>> = (0..4).map(|_| store() as _).collect();
    let runtime = runtime();
    runtime.block_on(check_swaps(&clients, DEADLINE));
    runtime.block_on(check_store(store(), DEADLINE));
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn one_server_passes_the_kits_of_stores_and_of_tiers() {
    let server = Server::start(&[]);
    passes_the_kit_of_stores(&server.url());
    server.cli(&["FLUSHALL"]);
    passes_the_kit(&rig(&server.url()).tier);
    for seed in 1..=2 {
        server.cli(&["FLUSHALL"]);
        let config = RedisConfig::new(server.url().parse().unwrap());
        passes_the_lossy_kit(Arc::new(config.open().unwrap()), seed);
    }
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn readers_never_see_half_of_a_value_that_is_replaced() {
    let server = Server::start(&[]);
    let store = || {
        let config = RedisConfig::new(server.url().parse().unwrap());
        Arc::new(config.open().unwrap())
    };
    runtime().block_on(check_replaced_values(store(), store(), DEADLINE));
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn values_of_all_sizes_come_back_and_are_listed_once() {
    let server = Server::start(&[]);
    let (rig, other) = (rig(&server.url()), rig(&server.url()));
    rig.write(0..40);
    assert_eq!(other.hits(0..40), 40);
    for stored in other.store(0..40) {
        assert!(matches!(stored, Ok(Stored::Present)), "{stored:?}");
    }
    rig.refuses_other_lengths(0..40);
    // Values that are cut off, too short or of another program.
    for (number, bytes) in [(0, ""), (1, "x"), (2, "not a value of lmc")] {
        let key = format!("lmc/{}", rig.name(number));
        server.cli(&["SET", &key, bytes]);
    }
    let key = format!("lmc/{}", rig.name(3));
    server.cli(&["SETRANGE", &key, "5000", "damaged"]);
    assert_eq!(rig.hits(0..40), 36);
    // What Redis has of others is not listed, and pages may be small.
    server.cli(&["SET", "lmc/v2/of/others", "x"]);
    // An empty string is no value, but a name.
    rig.lists_once(40);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn passwords_are_used_and_shown_nowhere() {
    let server = Server::start(&["--requirepass", SECRET]);
    let url = |password| format!("redis://:{password}@127.0.0.1:{}/2", server.port);
    let rig = rig(&url(SECRET));
    rig.write(0..5);
    assert_eq!(rig.hits(0..5), 5);
    assert!(
        server.cli(&["-n", "2", "DBSIZE"]).trim() != "0",
        "another database"
    );
    for password in ["marked-secret-wrong", ""] {
        let refused = rig_with(&url(password), |_| {});
        until("the tier is out", || {
            matches!(refused.tier.health(), Health::Down { .. })
        });
        let stored = refused.store(0..1).pop().unwrap();
        let shown = format!("{:?} {stored:?} {:?}", refused.tier.health(), refused.tier);
        assert!(
            stored.is_err() && !shown.contains("marked-secret"),
            "{shown}"
        );
    }
    assert!(!format!("{:?} {:?}", rig.tier, rig.store).contains(SECRET));
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_full_server_refuses_writes_and_is_read_on() {
    let server = Server::start(&["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]);
    let rig = rig(&server.url());
    let stored = rig.store(0..60);
    let written = stored.iter().filter(|stored| stored.is_ok()).count();
    let full =
        |stored: &Result<_, _>| matches!(stored, Err(BackendError::Full { needed }) if *needed > 0);
    assert_eq!(
        stored.iter().filter(|stored| full(stored)).count(),
        60 - written
    );
    assert!((1..60).contains(&written), "{written} of 60");
    assert_eq!(rig.hits(0..60), written);
    let refused = stored.iter().position(full).expect("some were refused") as u64;
    assert!(rig.store(refused..refused + 1)[0].is_err());
    let health = rig.tier.health();
    assert!(
        matches!(&health, Health::Degraded { reason } if reason.contains("maxmemory")),
        "{health:?}"
    );
    let memory = rig.runtime.block_on(rig.store.memory(soon())).unwrap();
    assert_eq!(memory[0].max, Some(4 << 20));
    assert!(memory[0].used > Some(1 << 20), "{memory:?}");
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn values_expire_unless_they_are_used() {
    let server = Server::start(&[]);
    let rig = rig_with(&server.url(), |config| {
        config.ttl = Some(Duration::from_secs(1000))
    });
    let rig = rig.used();
    rig.write(0..2);
    let keys = [0, 1, 9].map(|number| rig.folder().value(test_key(number)));
    let name = |number| format!("lmc/{}", rig.name(number));
    let left = |number| {
        server
            .cli(&["TTL", &name(number)])
            .trim()
            .parse::<i64>()
            .unwrap()
    };
    assert!((900..=1000).contains(&left(0)));
    server.cli(&["EXPIRE", &name(0), "300"]);
    server.cli(&["PERSIST", &name(1)]);
    let heads = rig.runtime.block_on(rig.store.heads(&keys, soon()));
    let ages: Vec<_> = heads
        .into_iter()
        .map(|head| head.unwrap().and_then(|head| head.age))
        .collect();
    assert!(ages[0].is_some_and(|age| age.as_secs() >= 700), "{ages:?}");
    assert_eq!(ages[1..], [None, None]);
    let touched = rig.runtime.block_on(rig.store.touch(&keys, soon()));
    let touched: Vec<bool> = touched.into_iter().map(Result::unwrap).collect();
    assert_eq!(touched, [true, true, false]);
    assert!(left(0) > 900 && left(1) > 900);
    // The clears have no end.
    let clears = format!("lmc/{}", Name::Clears);
    assert_eq!(server.cli(&["TTL", &clears]).trim(), "-1");
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_hit_on_an_old_value_makes_it_young() {
    let server = Server::start(&[]);
    let rig = rig_with(&server.url(), |config| {
        config.ttl = Some(Duration::from_secs(1000))
    });
    let rig = rig.used();
    rig.write(0..3);
    let name = |number| format!("lmc/{}", rig.name(number));
    let left = |number| {
        let said = server.cli(&["TTL", &name(number)]);
        said.trim().parse::<i64>().unwrap()
    };
    server.cli(&["EXPIRE", &name(0), "300"]);
    server.cli(&["EXPIRE", &name(1), "700"]);
    server.cli(&["PERSIST", &name(2)]);
    assert_eq!(rig.hits(0..3), 3);
    until("the old one is touched", || left(0) > 900);
    assert!(left(1) <= 700 && left(2) == -1);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_key_of_another_program_fails_no_other_lookup_and_is_replaced() {
    let server = Server::start(&[]);
    let rig = rig(&server.url());
    rig.write(0..20);
    let foreign = format!("lmc/{}", rig.name(3));
    server.cli(&["DEL", &foreign]);
    server.cli(&["RPUSH", &foreign, "x"]);
    let keys: Vec<_> = (0..20).map(test_key).collect();
    let located = lens_of(&rig.tier, &keys, soon());
    for (n, located) in located.into_iter().enumerate() {
        assert_eq!(located.unwrap().is_none(), n == 3, "{n}");
    }
    assert_eq!(rig.hits(0..20), 19);
    rig.write(3..4);
    assert_eq!(rig.hits(0..20), 20);
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_server_that_is_killed_or_stopped_costs_hits_and_is_taken_back() {
    let mut server = Server::start(&[]);
    let rig = rig(&server.url());
    rig.write(0..20);
    server.kill();
    assert_eq!(rig.hits(0..20), 0);
    until("the tier is out", || {
        rig.hits(0..1) == 0 && rig.tier.health() != Health::Ready
    });
    server.start_again();
    until("the tier is back", || rig.is_back());
    assert_eq!(rig.hits(0..20), 0, "it forgot them");
    rig.write_after_loss(0..20);
    assert_eq!(rig.hits(0..20), 20);
    // In the midst of transfers, and for longer than any deadline.
    server.process.signal(libc::SIGSTOP);
    let deadline = Instant::now() + Duration::from_millis(200);
    assert_eq!(rig.hits_by(0..20, deadline), 0);
    until("the tier is out", || {
        rig.hits_by(0..1, Instant::now() + Duration::from_millis(50));
        rig.tier.health() != Health::Ready
    });
    assert_eq!(rig.pool.usage().used, 0, "no slot is kept");
    server.process.signal(libc::SIGCONT);
    until("the tier is back", || rig.is_back());
    assert_eq!(rig.hits(0..20), 20);
}

/// Three nodes of a cluster.
fn cluster() -> Vec<Server> {
    let options = [
        "--cluster-enabled",
        "yes",
        "--cluster-node-timeout",
        "60000",
    ];
    let start = |_| {
        // Redis would take its port plus 10,000, which a client of another test may have.
        let bus = free_port().to_string();
        Server::start(&[&options[..], &["--cluster-port", &bus]].concat())
    };
    let nodes: Vec<Server> = (0..3).map(start).collect();
    let addresses: Vec<String> = nodes
        .iter()
        .map(|node| format!("127.0.0.1:{}", node.port))
        .collect();
    let mut create = vec!["--cluster", "create"];
    create.extend(addresses.iter().map(String::as_str));
    create.push("--cluster-yes");
    let said = nodes[0].cli(&create);
    assert!(said.contains("All 16384 slots covered"), "{said}");
    for node in &nodes {
        until("the node knows the cluster", || {
            node.cli(&["CLUSTER", "INFO"]).contains("cluster_state:ok")
        });
    }
    nodes
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_cluster_passes_the_kits_and_slots_may_move() {
    let nodes = cluster();
    let url = format!("redis-cluster://127.0.0.1:{}", nodes[1].port);
    passes_the_kit_of_stores(&url);
    nodes.iter().for_each(|node| drop(node.cli(&["FLUSHALL"])));
    passes_the_kit(&rig(&url).tier);
    let rig = rig(&url);
    rig.write(1000..1060);
    for node in &nodes {
        assert!(
            node.cli(&["DBSIZE"]).trim().parse::<u64>().unwrap() > 5,
            "a share on each node"
        );
    }
    // Slots move while the tier still has the old map.
    let id = |node: &Server| node.cli(&["CLUSTER", "MYID"]).trim().to_owned();
    let (from, to) = (id(&nodes[0]), id(&nodes[2]));
    let address = format!("127.0.0.1:{}", nodes[0].port);
    let said = nodes[0].cli(&[
        "--cluster",
        "reshard",
        &address,
        "--cluster-from",
        &from,
        "--cluster-to",
        &to,
        "--cluster-slots",
        "3000",
        "--cluster-yes",
    ]);
    assert!(!said.contains("ERR"), "{said}");
    assert_eq!(rig.hits(1000..1060), 60);
    assert_eq!(rig.hits(1000..1060), 60, "by the new map");
    rig.write(2000..2060);
    let named = |scope| rig.listed(scope, 50).len();
    let values = |fanout, space| Scope::Values {
        folder: None,
        fanout,
        space,
    };
    let all = named(Scope::VALUES);
    assert!(all >= 120, "{all}");
    let of_fanouts = (0..=255).map(|fanout| named(values(Some(fanout), None)));
    assert_eq!(of_fanouts.sum::<usize>(), all);
    let of_space = named(values(None, Some(test_key(0).space)));
    assert!((1..all).contains(&of_space), "{of_space} of {all}");
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn chunks_of_a_slot_on_its_way_are_read_and_written_where_they_are() {
    let nodes = cluster();
    let url = format!("redis-cluster://127.0.0.1:{}", nodes[0].port);
    let rig = rig(&url);
    rig.write(0..10);
    let (asked, new) = (0, 10);
    // A chunk that moves, and one that is new in a slot which moves.
    for number in [asked, new] {
        let key = format!("lmc/{}", rig.name(number));
        let slot = nodes[0]
            .cli(&["CLUSTER", "KEYSLOT", &key])
            .trim()
            .to_owned();
        let number: usize = slot.parse().unwrap();
        let id = |node: &Server| node.cli(&["CLUSTER", "MYID"]).trim().to_owned();
        // The nodes have equal shares, in their order.
        let from = nodes.iter().find(|node| {
            let count = node.cli(&["CLUSTER", "COUNTKEYSINSLOT", &slot]);
            let ranges = node.cli(&["CLUSTER", "NODES"]);
            let own = ranges.lines().find(|line| line.contains("myself")).unwrap();
            let range = own.split(' ').nth(8).unwrap();
            let (first, last) = range.split_once('-').unwrap();
            let covers = first.parse::<usize>().unwrap()..=last.parse::<usize>().unwrap();
            assert!(!count.is_empty());
            covers.contains(&number)
        });
        let from = from.unwrap();
        let to = nodes.iter().find(|node| node.port != from.port).unwrap();
        to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &id(from)]);
        from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &id(to)]);
        let said = from.cli(&[
            "MIGRATE",
            "127.0.0.1",
            &to.port.to_string(),
            &key,
            "0",
            "5000",
        ]);
        assert!(said.contains("OK") || said.contains("NOKEY"), "{said}");
    }
    assert_eq!(rig.hits(0..10), 10);
    rig.write(new..new + 1);
    assert_eq!(rig.hits(new..new + 1), 1);
    let keys: Vec<_> = (0..11).map(test_key).collect();
    for located in lens_of(&rig.tier, &keys, soon()) {
        assert!(located.unwrap().is_some());
    }
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_master_that_a_sentinel_names_passes_the_kits_and_may_change() {
    let master = Server::start(&[]);
    let port = master.port.to_string();
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port]);
    let (sentinel_port, folder) = (free_port(), Folder::temporary());
    let settings = format!(
        "port {sentinel_port}\nbind 127.0.0.1\ndir {}\nsentinel monitor main 127.0.0.1 {port} 1\n\
         sentinel down-after-milliseconds main 60000\nsentinel failover-timeout main 60000\n",
        folder.text()
    );
    let file = folder.join("sentinel.conf");
    std::fs::write(&file, settings).unwrap();
    let mut command = Command::new("redis-server");
    let _sentinel = Process::spawn(command.arg(&file).arg("--sentinel").stdout(Stdio::null()));
    let asked = |args: &[&str]| {
        let port = sentinel_port.to_string();
        let said = Command::new("redis-cli")
            .args(["-p", &port])
            .args(args)
            .output();
        String::from_utf8_lossy(&said.unwrap().stdout).into_owned()
    };
    until("the sentinel knows the replica", || {
        asked(&["SENTINEL", "REPLICAS", "main"]).contains(&replica.port.to_string())
    });
    let url = format!("redis-sentinel://127.0.0.1:{sentinel_port}/main");
    passes_the_kit_of_stores(&url);
    master.cli(&["FLUSHALL"]);
    passes_the_kit(&rig(&url).tier);
    master.cli(&["FLUSHALL"]);
    let rig = rig(&url);
    rig.write(0..20);
    until("the replica has them", || {
        replica.cli(&["DBSIZE"]) == master.cli(&["DBSIZE"])
    });
    until("the sentinel lets the replica take over", || {
        asked(&["SENTINEL", "FAILOVER", "main"]).contains("OK")
            || asked(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main"])
                .contains(&replica.port.to_string())
    });
    until("the replica is the master", || {
        replica.cli(&["ROLE"]).contains("master")
    });
    until("the old master follows", || {
        master.cli(&["ROLE"]).contains("slave")
    });
    until("the new master is written", || {
        rig.store(20..40).iter().all(Result::is_ok)
    });
    assert!(rig.hits(0..40) == 40);
    assert_eq!(
        replica.cli(&["DBSIZE"]).trim(),
        "42",
        "clears and a map, too"
    );
}

#[test]
#[ignore = "needs redis-server: cargo xtask test-remote"]
fn a_stranger_that_is_no_redis_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            // It ends the connection after any bytes.
            let _ = (&stream).write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let rig = rig_with(&format!("redis://127.0.0.1:{port}"), |_| {});
    let runtime = &rig.runtime;
    let read = runtime.block_on(rig.store.read(Name::Clears, 100, soon()));
    assert!(
        matches!(
            read,
            Err(StoreError::Unavailable { .. } | StoreError::Io(_))
        ),
        "{read:?}"
    );
    assert!(lens_of(&rig.tier, &[test_key(1)], soon())[0].is_err());
}

/// Has the URL of the server in the process that trusts its certificate.
const TLS_URL: &str = "LMC_TEST_TLS_URL";

fn openssl(folder: &Folder, line: &str) {
    let mut command = Command::new("openssl");
    command.current_dir(&**folder).args(line.split_whitespace());
    let done = command.output().expect("openssl runs");
    assert!(done.status.success(), "{done:?}");
}

#[test]
#[ignore = "needs redis-server and openssl: cargo xtask test-remote"]
fn the_kits_pass_over_tls_to_servers_whose_certificate_is_trusted() {
    if let Ok(url) = std::env::var(TLS_URL) {
        passes_the_kit_of_stores(&url);
        passes_the_kit(&rig(&format!("{url}/1")).tier);
        return;
    }
    let folder = Folder::temporary();
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(
        &folder,
        &format!("req -x509 {key} -keyout ca.key -out ca.crt -subj /CN=lmc -days 2"),
    );
    openssl(
        &folder,
        &format!("req {key} -keyout server.key -out server.csr -subj /CN=localhost"),
    );
    std::fs::write(folder.join("names"), "subjectAltName=DNS:localhost\n").unwrap();
    openssl(
        &folder,
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile names",
    );
    let file = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let (cert, server_key, authority) = (file("server.crt"), file("server.key"), file("ca.crt"));
    let port = free_port();
    let options = [
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &cert,
        "--tls-key-file",
        &server_key,
        "--tls-ca-cert-file",
        &authority,
        "--tls-auth-clients",
        "no",
    ];
    let _server = Server::start(&options);
    let url = format!("rediss://localhost:{port}");
    let trusting = own_test(the_kits_pass_over_tls_to_servers_whose_certificate_is_trusted)
        .env(TLS_URL, &url)
        .env("SSL_CERT_FILE", &authority)
        .output()
        .unwrap();
    assert!(trusting.status.success(), "{trusting:?}");
    // Here it is a stranger's.
    let rig = rig_with(&url, |_| {});
    until("the tier is out", || {
        matches!(rig.tier.health(), Health::Down { .. })
    });
    assert!(rig.store(0..1)[0].is_err());
}

/// A server that answers each command by a function, and the commands that it got.
struct Fake {
    port: u16,
    commands: Arc<Mutex<Vec<Vec<String>>>>,
}

impl Fake {
    fn start<A: AsRef<[u8]>>(answer: impl Fn(&[String]) -> A + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let commands: Arc<Mutex<Vec<Vec<String>>>> = Arc::default();
        let (answer, log) = (Arc::new(answer), Arc::clone(&commands));
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (answer, log) = (Arc::clone(&answer), Arc::clone(&log));
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(&stream);
                    while let Some(command) = command_of(&mut reader) {
                        let answered = answer(&command);
                        log.lock().push(command);
                        if (&stream).write_all(answered.as_ref()).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { port, commands }
    }

    fn count(&self, command: &str) -> usize {
        let commands = self.commands.lock();
        commands.iter().filter(|it| it[0] == command).count()
    }
}

/// Reads a command; bytes that are no text are replaced.
fn command_of(reader: &mut impl BufRead) -> Option<Vec<String>> {
    let number = |kind: char, reader: &mut dyn BufRead| {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        line.trim().strip_prefix(kind)?.parse::<usize>().ok()
    };
    let parts = number('*', reader)?;
    let part = |_| {
        let mut bytes = vec![0; number('$', reader)? + 2];
        reader.read_exact(&mut bytes).ok()?;
        bytes.truncate(bytes.len() - 2);
        Some(String::from_utf8_lossy(&bytes).into_owned())
    };
    (0..parts).map(part).collect()
}

#[test]
fn a_server_that_repeats_the_password_does_not_have_it_shown() {
    for accepted in [0, 1] {
        let logins = AtomicUsize::new(0);
        let fake = Fake::start(move |command| {
            let is_login = command[0] == "AUTH";
            if is_login && logins.fetch_add(1, Ordering::Relaxed) < accepted {
                return "+OK\r\n".to_owned();
            }
            let args = format!("'default' '{SECRET}'");
            let text = format!(
                "unknown command '{}', with args beginning with: {args}",
                command[0]
            );
            format!("-ERR {text}\r\n")
        });
        let rig = rig_with(
            &format!("redis://:{SECRET}@127.0.0.1:{}", fake.port),
            |_| {},
        );
        let slot = rig.pool.reserve(rig.len(0)).unwrap();
        let folder = ChunkFolder {
            generation: Generation::new([1; 8]),
            clears: ClearsId::NONE,
        };
        let name = folder.value(test_key(0));
        let item = GetItem { name, slot };
        let got = rig.runtime.block_on(async {
            let got: Vec<_> = rig.store.get(vec![item], soon()).collect().await;
            let read = rig.store.read(Name::Clears, 100, soon()).await;
            let heads = rig.store.heads(&[name], soon()).await;
            format!("{got:?} {read:?} {heads:?}")
        });
        let shown = format!("{got} {:?}", rig.tier.health());
        assert!(!shown.contains("marked-secret"), "{shown}");
        assert!(fake.count("AUTH") > accepted, "a login is refused");
        assert!(shown.contains("Failed"), "{shown}");
    }
}

/// Returns the answer to a question for the object of clears.
fn of_clears(command: &[String], object: Vec<u8>) -> Option<Vec<u8>> {
    let is_of_clears = command.get(1).is_some_and(|key| key == "lmc/v2/clears");
    let len = object.len();
    match command[0].as_str() {
        "STRLEN" if is_of_clears => Some(format!(":{len}\r\n").into_bytes()),
        "GETRANGE" if is_of_clears => {
            let head = format!("${len}\r\n").into_bytes();
            Some([head, object, b"\r\n".to_vec()].concat())
        }
        _ => None,
    }
}

/// A master that a failover has made a replica refused every write until its connections broke.
#[test]
fn a_server_that_became_a_replica_is_looked_for_again() {
    let fake = Fake::start(|command| {
        if let Some(answer) = of_clears(command, clears_object()) {
            return answer;
        }
        let answer = match command[0].as_str() {
            "SET" if command[1].ends_with("/map") => "+OK\r\n",
            "SET" => "-READONLY You can't write against a read only replica.\r\n",
            "SELECT" => "+OK\r\n",
            "STRLEN" => ":0\r\n",
            "PTTL" => ":-2\r\n",
            _ => "$0\r\n\r\n",
        };
        answer.as_bytes().to_vec()
    });
    // Each connection selects its database.
    let url = format!("redis://127.0.0.1:{}/1", fake.port);
    let store = RedisConfig::new(url.parse().unwrap()).open().unwrap();
    let rig = Rig::over(Arc::new(store), LENS, |config| {
        // No connection but those of the stores.
        config.clears_interval = Duration::from_secs(3600);
    });
    let rig = rig.used();
    let before = fake.count("SELECT");
    assert!(rig.store(0..1)[0].is_err());
    let after = fake.count("SELECT");
    assert!(rig.store(0..1)[0].is_err());
    assert!(fake.count("SELECT") > after, "{before} {after}");
}

/// Redis before 6, Envoy and twemproxy know no HELLO: they could not be used.
#[test]
fn a_server_without_hello_is_used() {
    let values: Mutex<HashMap<String, String>> = Mutex::default();
    let answer = move |command: &[String]| match command[0].as_str() {
        "STRLEN" => {
            let len = values.lock().get(&command[1]).map_or(0, String::len);
            format!(":{len}\r\n")
        }
        "GETRANGE" | "GET" => {
            let value = values.lock().get(&command[1]).cloned().unwrap_or_default();
            format!("${}\r\n{value}\r\n", value.len())
        }
        "SET" => {
            let value = command[2].clone();
            values.lock().insert(command[1].clone(), value);
            "+OK\r\n".to_owned()
        }
        "PTTL" => ":-1\r\n".to_owned(),
        other => format!("-ERR unknown command `{other}`\r\n"),
    };
    let fake = Fake::start(move |command| {
        let of_clears = of_clears(command, clears_object());
        of_clears.unwrap_or_else(|| answer(command).into_bytes())
    });
    let rig = rig_with(&format!("redis://127.0.0.1:{}", fake.port), |_| {}).used();
    let name = Name::Space(rig.folder(), SpaceId::new([1; 16]));
    rig.runtime.block_on(async {
        let written = rig.store.write(name, "text".into(), soon()).await;
        written.expect("a small object is written");
        let read = rig.store.read(name, 100, soon()).await;
        assert_eq!(read.expect("and read").as_deref(), Some(&b"text"[..]));
    });
    // A proxy may close the connection for what it does not know.
    let asked = ["HELLO", "CLIENT"].map(|command| fake.count(command));
    assert_eq!(asked, [0, 0]);
}

/// Redis before 6 knows passwords and no users, and refused the login of the connections for values.
#[test]
fn a_password_without_a_user_is_sent_as_servers_before_redis_6_know_it() {
    let fake = Fake::start(|command| match (command[0].as_str(), command.len()) {
        ("AUTH", 2) => "+OK\r\n",
        ("AUTH", _) => "-ERR wrong number of arguments for 'auth' command\r\n",
        ("STRLEN", _) => ":0\r\n",
        _ => "$0\r\n\r\n",
    });
    let url = format!("redis://:{SECRET}@127.0.0.1:{}", fake.port);
    let rig = rig_with(&url, |_| {});
    let read = rig.store.read(Name::Clears, 100, soon());
    assert!(matches!(rig.runtime.block_on(read), Ok(None)));
    assert!(fake.count("AUTH") > 0);
}

/// Bytes that a server sends in answer to one command, unless it is stopped.
const FLOOD: usize = 128 << 20;

/// A server that answers one command with a flood, and all others as a Redis without keys does.
struct Flooding {
    port: u16,
    /// Bytes of the flood that were sent, once for each that has ended.
    floods: mpsc::Receiver<usize>,
}

impl Flooding {
    /// `flood`: the start of the answer, and what is repeated after it.
    fn start(command: &'static str, flood: (&'static str, &'static str)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, floods) = mpsc::channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let sender = sender.clone();
                // Answers are sent one by one, without a pause between them.
                stream.set_nodelay(true).unwrap();
                std::thread::spawn(move || {
                    let mut reader = BufReader::new(&stream);
                    while let Some(asked) = command_of(&mut reader) {
                        if asked[0] == command {
                            let _ = sender.send(send_flood(&stream, flood));
                            return;
                        }
                        let answer = sound_answer(&asked, port);
                        if (&stream).write_all(answer.as_bytes()).is_err() {
                            return;
                        }
                    }
                });
            }
        });
        Self { port, floods }
    }
}

/// Returns how many bytes were taken.
fn send_flood(mut stream: &TcpStream, (start, repeated): (&str, &str)) -> usize {
    let block = repeated.repeat((64 << 10) / repeated.len());
    let mut sent = 0;
    let mut part = start.as_bytes();
    while sent < FLOOD {
        match stream.write(part) {
            Ok(0) | Err(_) => break,
            Ok(len) => {
                sent += len;
                part = &part[len..];
            }
        }
        if part.is_empty() {
            part = block.as_bytes();
        }
    }
    sent
}

fn sound_answer(command: &[String], port: u16) -> String {
    let host = "$9\r\n127.0.0.1\r\n";
    match command[0].as_str() {
        "STRLEN" => ":4\r\n".to_owned(),
        "UNLINK" | "PEXPIRE" => ":0\r\n".to_owned(),
        "PTTL" => ":-2\r\n".to_owned(),
        "GET" => "$-1\r\n".to_owned(),
        "GETRANGE" => "$4\r\nread\r\n".to_owned(),
        "CLUSTER" => format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n{host}:{port}\r\n"),
        "SENTINEL" => format!("*2\r\n{host}${}\r\n{port}\r\n", port.to_string().len()),
        "ROLE" => "*1\r\n$6\r\nmaster\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    }
}

/// The question for the header of a value was answered with a string of 8 GiB, which filled the
/// memory until the deadline.
#[test]
fn a_server_that_floods_is_dropped_at_the_bound_of_what_it_was_asked() {
    use Topology::{Cluster, Sentinel, Single};
    let floods = [
        ("$8589934592\r\n", "x"),
        ("*8589934592\r\n", ":1\r\n"),
        ("*1\r\n", "*1\r\n"),
        ("-", "x"),
    ];
    let runtime = runtime();
    for (command, topology) in [
        ("AUTH", Single),
        ("SELECT", Single),
        ("GETRANGE", Single),
        ("STRLEN", Single),
        ("PTTL", Single),
        ("SET", Single),
        ("UNLINK", Single),
        ("PEXPIRE", Single),
        ("SCAN", Single),
        ("INFO", Single),
        ("TIME", Single),
        ("WATCH", Single),
        ("MULTI", Single),
        ("EXEC", Single),
        ("CLUSTER", Cluster),
        ("GETRANGE", Cluster),
        ("SCAN", Cluster),
        ("SENTINEL", Sentinel),
        ("ROLE", Sentinel),
        ("GETRANGE", Sentinel),
    ] {
        for flood in floods {
            let flooding = Flooding::start(command, flood);
            let address = format!("127.0.0.1:{}", flooding.port);
            let url = match topology {
                Single => format!("redis://:{SECRET}@{address}/1"),
                Cluster => format!("redis-cluster://{address}"),
                Sentinel => format!("redis-sentinel://{address}/main"),
            };
            let mut config = RedisConfig::new(url.parse().unwrap());
            config.ttl = Some(Duration::from_secs(1000));
            let store = config.open().unwrap();
            runtime.block_on(ask_everything(&store));
            // The other side's buffers are a part of it.
            let bound = FLOOD / 2;
            let taken = flooding.floods.recv_timeout(DEADLINE);
            let taken = taken.unwrap_or_else(|_| panic!("{command} {flood:?} was asked for"));
            assert!(taken < bound, "{command} {flood:?}: {taken}");
        }
    }
}

/// Does each operation of a store once.
async fn ask_everything(store: &RedisStore) {
    let folder = ChunkFolder {
        generation: Generation::new([1; 8]),
        clears: ClearsId::NONE,
    };
    let value = folder.value(test_key(0));
    let object = Name::Space(folder, SpaceId::new([1; 16]));
    let version = store.read_clears(4, soon()).await;
    let _ = store.heads(&[value], soon()).await;
    let _ = store.read(object, 100, soon()).await;
    let _ = store.write(object, "text".into(), soon()).await;
    let _ = store.remove(&[object], soon()).await;
    let _ = store.touch(&[value], soon()).await;
    let _ = store.list(Scope::VALUES, None, 100, soon()).await;
    let _ = store.old_chunks(soon()).await;
    let _ = store.memory(soon()).await;
    let _ = store.clock_ahead_ms(soon()).await;
    let _ = store.swap_clears("text".into(), None, soon()).await;
    if let Ok(Some((_, version))) = version {
        let swap = store.swap_clears("text".into(), Some(version), soon());
        let _ = swap.await;
    }
}

/// The longest answers that a sound server gives: the slots of a cluster in as many ranges as slots,
/// and a page of keys that is longer than was asked for.
#[test]
fn the_longest_sound_answers_are_taken() {
    let fake = Fake::start(|command| {
        let host = "0123:4567:89ab:cdef:0123:4567:89ab:cdef";
        let node = format!(
            "*4\r\n${}\r\n{host}\r\n:6379\r\n$40\r\n{}\r\n*2\r\n$8\r\nhostname\r\n$64\r\n{}\r\n",
            host.len(),
            "i".repeat(40),
            "h".repeat(64)
        );
        let range = |slot| format!("*4\r\n:{slot}\r\n:{slot}\r\n{node}{node}");
        match command[0].as_str() {
            "CLUSTER" => {
                let ranges: String = (0..16384).map(range).collect();
                format!("*16384\r\n{ranges}")
            }
            "SCAN" => {
                let key = "k".repeat(200);
                let keys = format!("$200\r\n{key}\r\n").repeat(10_000);
                format!("*2\r\n$1\r\n0\r\n*10000\r\n{keys}")
            }
            _ => "+OK\r\n".to_owned(),
        }
    });
    let runtime = runtime();
    let store = |scheme: &str| {
        let url = format!("{scheme}://127.0.0.1:{}", fake.port);
        RedisConfig::new(url.parse().unwrap()).open().unwrap()
    };
    let list = |store: RedisStore| {
        runtime.block_on(async move { store.list(Scope::VALUES, None, 1000, soon()).await })
    };
    assert!(list(store("redis")).expect("a page").next.is_none());
    // The nodes that the answer names are not there.
    let cluster = list(store("redis-cluster")).expect_err("no such node");
    assert!(
        cluster.to_string().contains("cannot connect to 0123:"),
        "{cluster}"
    );
}
