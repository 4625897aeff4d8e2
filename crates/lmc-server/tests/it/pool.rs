//! The pool's memory at start, with the real binary: its name, its size, what limits it, and what
//! killed servers left.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Server, registration, segment};
use lmc_testkit::{DEADLINE, free_port, is_root, test_arguments, until, with_own_shm};
use lmc_vllm_adapter::{Client, ClientError, Reply};

/// Waits for the first line of the log that holds `part`, and returns all lines up to it.
fn lines_to(server: &Server, part: &str) -> Vec<String> {
    server.line(part);
    let mut log = server.log();
    let last = log.iter().position(|line| line.contains(part));
    log.truncate(last.expect("it was seen") + 1);
    log
}

/// Bytes of the one segment that a server has.
fn segment_bytes() -> u64 {
    let entries = fs::read_dir("/dev/shm").expect("it is there").flatten();
    let paths = entries.map(|entry| entry.path());
    let pools: Vec<PathBuf> = paths
        .filter(|path| path.extension().is_none() && path.to_string_lossy().contains("lmc_"))
        .collect();
    assert_eq!(pools.len(), 1, "{pools:?}");
    fs::metadata(&pools[0]).expect("it is there").len()
}

/// Finding 3 of the review: an unprivileged user let root's server overwrite any file by a link
/// at the name that its record was going to have.
#[test]
fn a_link_at_a_name_of_the_pool_is_not_followed() {
    with_own_shm(
        "size=64m",
        a_link_at_a_name_of_the_pool_is_not_followed,
        || {
            let victim = Path::new("/dev/shm/victim");
            fs::write(victim, "secret").expect("space");
            let port = free_port();
            for end in ["", ".lmc-owner"] {
                symlink(victim, format!("/dev/shm/lmc_{port}{end}")).expect("the name is free");
            }
            let args = ["--port", &port.to_string(), "--l1-size-gb", "16MiB"];
            let _server = Server::start(&args);
            assert_eq!(fs::read(victim).expect("it is there"), b"secret");
            let name = segment(port).expect("the pool has a name");
            let suffix = name.to_string_lossy().rsplit('_').next().map(str::len);
            assert_eq!(suffix, Some(16), "{name:?} can be predicted");
            // A name that was given in full and is taken is an error.
            let name = format!("lmc_{port}");
            let mut second = Server::spawn(&["--shm-name", &name, "--l1-size-gb", "16MiB"]);
            assert_eq!(second.process.wait().code(), Some(1));
            assert_eq!(fs::read(victim).expect("it is there"), b"secret");
        },
    );
}

/// D15: the segment of another user's dead server said "held by a running process"; now it
/// does not keep a server from starting.
#[test]
fn what_another_users_killed_server_left_is_not_in_the_way() {
    with_own_shm(
        "size=512m",
        what_another_users_killed_server_left_is_not_in_the_way,
        || {
            if !is_root() {
                return println!("skipped: not root");
            }
            let port = free_port().to_string();
            let args = ["--port", &port, "--l1-size-gb", "16MiB"];
            // Readable by everybody, unlike the folder that cargo builds in.
            let binary = Path::new("/dev/shm/binary");
            fs::copy(env!("CARGO_BIN_EXE_lmc"), binary).expect("space");
            let of_user = |uid: &str| {
                let mut command = Command::new("setpriv");
                command.args(["--reuid", uid, "--regid", uid, "--clear-groups"]);
                command.arg(binary);
                Server::start_by(command, &args)
            };
            let mut first = of_user("65534");
            first.process.kill();
            of_user("65533");
        },
    );
}

/// D3: `auto` took 64 MiB of a container's default /dev/shm, which has a page less, and failed.
#[test]
fn auto_starts_in_the_default_shared_memory_of_a_container() {
    with_own_shm(
        "size=64m",
        auto_starts_in_the_default_shared_memory_of_a_container,
        || {
            fs::write("/dev/shm/other", "a page").expect("space");
            let server = Server::start(&["--l1-size-gb", "auto"]);
            let log = lines_to(&server, "listening for engines");
            assert_eq!(segment_bytes(), 56 << 20, "{log:#?}");
            assert!(
                log.iter().any(|line| line.contains("--shm-size")),
                "{log:#?}"
            );
        },
    );
}

/// D8 and D16: each `auto` after a kill was smaller than the one before, and what a server on
/// another port left stayed for ever.
#[test]
fn what_killed_servers_left_is_reclaimed_before_the_size_is_chosen() {
    with_own_shm(
        "size=128m",
        what_killed_servers_left_is_reclaimed_before_the_size_is_chosen,
        || {
            let start = || {
                let server = Server::start(&["--l1-size-gb", "auto"]);
                let log = lines_to(&server, "are present");
                (server, log, segment_bytes())
            };
            let (mut first, _, bytes) = start();
            let pid = first.id();
            first.process.kill();
            // On another port.
            let (mut second, log, again) = start();
            assert_eq!(again, bytes);
            let reclaimed = format!("(pid {pid})");
            assert!(log.iter().any(|line| line.contains(&reclaimed)), "{log:#?}");
            second.process.kill();
            // The size is given, and only fits when the old segment is gone.
            let server = Server::start(&["--l1-size-gb", "100MiB"]);
            lines_to(&server, "are present");
            assert_eq!(segment_bytes(), 100 << 20);
        },
    );
}

/// A control group with a memory limit, for the servers of one test.
struct Cgroup(PathBuf);

impl Cgroup {
    /// `None`, with the reason printed, where none can be made.
    fn new(limit: u64) -> Option<Self> {
        let name = format!("lmc_test_{}", std::process::id());
        let made = |root: &str, limit_file: &str| {
            let folder = Path::new(root).join(&name);
            fs::create_dir(&folder).ok()?;
            let group = Self(folder);
            fs::write(group.0.join(limit_file), limit.to_string()).ok()?;
            Some(group)
        };
        let group = made("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            .or_else(|| made("/sys/fs/cgroup", "memory.max"));
        if group.is_none() {
            println!("skipped: no memory cgroup can be made here");
        }
        group
    }

    fn start(&self, args: &[&str]) -> Server {
        let procs = self.0.join("cgroup.procs");
        let script = format!("echo $$ > {} && exec \"$@\"", procs.display());
        let mut command = Command::new("sh");
        command.args(["-c", &script, "sh", env!("CARGO_BIN_EXE_lmc")]);
        Server::spawn_by(command, "serve", args)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// D7: a pool beyond the limit of the cgroup was a warning, and then the kernel killed the server;
/// `auto` after it as well, because what the first had left was still charged.
#[test]
fn a_pool_beyond_the_limit_of_the_cgroup_is_refused_and_auto_stays_below_it() {
    with_own_shm(
        "size=1g",
        a_pool_beyond_the_limit_of_the_cgroup_is_refused_and_auto_stays_below_it,
        || {
            let Some(group) = Cgroup::new(200 << 20) else {
                return;
            };
            let mut refused = group.start(&["--l1-size-gb", "400MiB"]);
            refused.line("--l1-size-gb to ");
            assert_eq!(refused.process.wait().code(), Some(1));
            // What a killed server left is its successor's to reclaim.
            let mut killed = Vec::new();
            for _ in 0..2 {
                let mut server = group.start(&["--l1-size-gb", "120MiB"]);
                lines_to(&server, "are present");
                assert_eq!(segment_bytes(), 120 << 20);
                server.process.kill();
                killed.push(server);
                let mut server = group.start(&["--l1-size-gb", "auto"]);
                lines_to(&server, "are present");
                assert!(segment_bytes() <= 64 << 20, "{}", segment_bytes());
                server.process.kill();
                killed.push(server);
            }
            reclaim();
        },
    );
}

/// Lets go of what the last killed server left, so that the cgroup can be removed.
fn reclaim() {
    drop(lmc_memory::reclaim_stale_segments());
}

/// A pool that no model fits into, and a quota beyond the pool, started without a word.
#[test]
fn sizes_that_cannot_be_meant_are_warned_of() {
    with_own_shm(
        "size=256m",
        sizes_that_cannot_be_meant_are_warned_of,
        || {
            let warnings = |args: &[&str]| {
                let server = Server::start(args);
                let mut log = lines_to(&server, "listening for engines");
                log.retain(|line| line.contains("WARN"));
                log
            };
            let few = warnings(&["--l1-size-gb", "1MiB", "--quota", "a=1GiB"]);
            assert_eq!(few.len(), 2, "{few:#?}");
            assert!(
                few[0].contains("32.0 MiB per chunk") && few[1].contains("1.00 GiB"),
                "{few:#?}"
            );
            let none = warnings(&["--l1-size-gb", "64MiB", "--quota", "a=32MiB"]);
            assert!(none.is_empty(), "{none:#?}");
        },
    );
}

const PORT_VARIABLE: &str = "LMC_TEST_REGISTER_ON";

/// Registers 4 KiB of a segment as the memory of an engine.
fn register(port: u16, shm_name: &str) -> Result<Reply, ClientError> {
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    let mut client = Client::connect(address, DEADLINE).expect("a connection");
    client.ask(&registration(1, "m", shm_name, ("float32", 4), [1, 256, 4]))
}

/// The process of the other user. Runs nothing when the test suite calls it by itself.
#[test]
fn other_user() {
    let Ok(port) = std::env::var(PORT_VARIABLE) else {
        return;
    };
    let port = port.parse().expect("a port");
    fs::write("/dev/shm/own", vec![1; 4096]).expect("space");
    assert!(fs::read("/dev/shm/secret").is_err(), "root's alone");
    let refused = register(port, "secret");
    assert!(
        matches!(refused, Err(ClientError::Refused { .. })),
        "{refused:?}"
    );
    assert_eq!(register(port, "own").expect("an answer"), Reply::None);
}

/// Finding 10 of the review: a user registered root's memory through root's server, and read it.
#[test]
fn another_users_memory_is_not_mapped() {
    with_own_shm("size=1g", another_users_memory_is_not_mapped, || {
        if !is_root() {
            return println!("skipped: not root");
        }
        let port = free_port();
        let _server = Server::start(&[
            "--port",
            &port.to_string(),
            "--l1-size-gb",
            "64MiB",
            "--trusted-users",
            "65534",
        ]);
        fs::write("/dev/shm/secret", vec![1; 4096]).expect("space");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions("/dev/shm/secret", mode).expect("it is ours");
        let this = std::env::current_exe().expect("a test has a path");
        fs::copy(this, "/dev/shm/test").expect("space");
        let other = Command::new("setpriv")
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
            .arg("/dev/shm/test")
            .args(test_arguments(other_user))
            .env(PORT_VARIABLE, port.to_string())
            .status();
        assert!(other.expect("util-linux is there").success());
        // Root itself may name any segment, once the other connection under this id has ended.
        until("root's memory is registered", || {
            matches!(register(port, "secret"), Ok(Reply::None))
        });
        fs::remove_file("/dev/shm/test").expect("it was copied");
    });
}
