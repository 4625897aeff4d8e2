//! Hosts of a test: network namespaces on one bridge, each with addresses of its own.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Hosts of each network.
pub(crate) const HOSTS: usize = 2;
/// Link of each host.
pub(crate) const DEVICE: &str = "eth0";

/// Namespaces with a bridge between them. They end with this, and with the test's process.
#[derive(Debug)]
pub(crate) struct Network {
    hosts: Vec<String>,
    bridge: String,
    relay: Option<Child>,
    janitor: Child,
}

impl Network {
    /// Makes the hosts. Host `n` has the addresses [`v4`]`(n + 1)` and [`v6`]`(n + 1)`.
    pub(crate) fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = |part: &str| format!("lmc{}-{count}-{part}", std::process::id());
        let hosts: Vec<String> = (0..HOSTS).map(|host| name(&host.to_string())).collect();
        let bridge = name("b");
        let network = Self {
            janitor: janitor(&format!("{} {bridge}", hosts.join(" "))),
            hosts,
            bridge,
            relay: None,
        };
        let bridge = &network.bridge;
        ip(&format!("netns add {bridge}"));
        ip(&format!("-n {bridge} link add br0 type bridge"));
        ip(&format!("-n {bridge} link set br0 up"));
        for (number, host) in network.hosts.iter().enumerate() {
            ip(&format!("netns add {host}"));
            let port = format!("type veth peer name {DEVICE} netns {host}");
            ip(&format!("link add port{number} netns {bridge} {port}"));
            ip(&format!(
                "-n {bridge} link set port{number} master br0 mtu 9000 up"
            ));
            ip(&format!("-n {host} link set lo up"));
            network.bring_up(number);
        }
        network
    }

    fn bring_up(&self, host: usize) {
        let name = &self.hosts[host];
        ip(&format!("-n {name} link set {DEVICE} mtu 9000 up"));
        self.add_addresses(host, host + 1);
    }

    /// Gives a host the addresses [`v4`]`(number)` and [`v6`]`(number)`.
    fn add_addresses(&self, host: usize, number: usize) {
        for (address, option) in [(v4(number) + "/24", ""), (v6(number) + "/64", " nodad")] {
            let name = &self.hosts[host];
            ip(&format!(
                "-n {name} addr add {address} dev {DEVICE}{option}"
            ));
        }
    }

    /// Takes a host's addresses away, and gives it others.
    pub(crate) fn change_addresses(&self, host: usize, number: usize) {
        ip(&format!("-n {} addr flush dev {DEVICE}", self.hosts[host]));
        self.add_addresses(host, number);
    }

    /// Bounds the rate at which a host sends, for `tc`: `40mbit`.
    pub(crate) fn slow_down(&self, host: usize, rate: &str) {
        let name = &self.hosts[host];
        run(
            "ip",
            &format!(
                "netns exec {name} tc qdisc replace dev {DEVICE} root tbf rate {rate} burst 256kb latency 400ms"
            ),
        );
    }

    /// Lets a host send at full speed again.
    pub(crate) fn speed_up(&self, host: usize) {
        let name = &self.hosts[host];
        ip(&format!("netns exec {name} tc qdisc del dev {DEVICE} root"));
    }

    /// Cuts a host off from all others, or joins it again. Frames are dropped: neither side is
    /// sent anything, and both links stay up.
    pub(crate) fn cut(&self, host: usize, cut: bool) {
        let state = if cut { 0 } else { 3 };
        let bridge = &self.bridge;
        run(
            "bridge",
            &format!("-n {bridge} link set dev port{host} state {state}"),
        );
    }

    /// Replaces a host's link by one that delays each frame, and drops some.
    pub(crate) fn degrade(&mut self, host: usize, delay_ms: u32, lost_per_mille: u32) {
        let (name, bridge) = (&self.hosts[host], &self.bridge);
        ip(&format!("-n {bridge} link del port{host}"));
        let mut relay = Command::new("ip")
            .args(["netns", "exec", bridge, "python3"])
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/tests/it/multinode/relay.py"
            ))
            .args([&format!("port{host}"), "tap"])
            .args([delay_ms, lost_per_mille].map(|number| number.to_string()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("ip can be run");
        let output = relay.stdout.take().expect("it is piped");
        let up = BufReader::new(output).lines().next();
        assert_eq!(up.expect("a line").expect("text"), "up");
        self.relay = Some(relay);
        ip(&format!(
            "-n {bridge} link set port{host} master br0 mtu 9000 up"
        ));
        ip(&format!(
            "-n {bridge} link set tap netns {name} name {DEVICE}"
        ));
        self.bring_up(host);
    }

    /// Returns a command that runs a program on a host.
    pub(crate) fn command(&self, host: usize, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts[host], program]);
        command
    }

    /// Writes the file by which a host resolves names: addresses and their name. Programs that run there
    /// see it if there was one when they began.
    pub(crate) fn resolve(&self, host: usize, addresses: &[String], name: &str) {
        let folder = format!("/etc/netns/{}", self.hosts[host]);
        std::fs::create_dir_all(&folder).expect("root may");
        // The same file is written again, because running programs have it mounted.
        let mut lines = "127.0.0.1 localhost\n".to_owned();
        for address in addresses {
            lines += &format!("{address} {name}\n");
        }
        std::fs::write(folder + "/hosts", lines).expect("root may");
    }

    /// Calls `f` on a thread that is on a host: its sockets belong there.
    pub(crate) fn on<T: Send>(&self, host: usize, f: impl FnOnce() -> T + Send) -> T {
        let name = &self.hosts[host];
        let inside = move || {
            let namespace = File::open(format!("/run/netns/{name}")).expect("it is laid");
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root may enter");
            f()
        };
        std::thread::scope(|scope| match scope.spawn(inside).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }

    /// Returns the bytes that a host has received over its link.
    pub(crate) fn received(&self, host: usize) -> u64 {
        let table = self.on(host, || {
            std::fs::read_to_string("/proc/thread-self/net/dev")
        });
        let table = table.expect("proc is mounted");
        let bytes = |line: &str| {
            let numbers = line.trim().strip_prefix(DEVICE)?.strip_prefix(':')?;
            numbers.split_whitespace().next()?.parse().ok()
        };
        table.lines().find_map(bytes).expect("the host has a link")
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let _ = self.janitor.wait();
        if let Some(relay) = &mut self.relay {
            let _ = relay.wait();
        }
    }
}

/// Returns an IPv4 address of the network.
pub(crate) fn v4(number: usize) -> String {
    format!("10.231.8.{number}")
}

/// Returns an IPv6 address of the network.
pub(crate) fn v6(number: usize) -> String {
    format!("fd00:231::{number}")
}

/// Starts a shell that removes namespaces once its input ends, also when this process is killed.
fn janitor(names: &str) -> Child {
    let script = format!(
        "read -r _; for name in {names}; do ip netns pids $name | xargs -r kill -9; \
         ip netns del $name; rm -rf /etc/netns/$name; done"
    );
    Command::new("sh")
        .args(["-c", &script])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .expect("sh can be run")
}

fn ip(words: &str) {
    run("ip", words);
}

fn run(program: &str, words: &str) {
    let out = Command::new(program).args(words.split(' ')).output();
    let out = out.unwrap_or_else(|error| panic!("{program}: {error}"));
    let error = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "{program} {words}: {error}");
}
