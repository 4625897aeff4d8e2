//! `cargo xtask test-multinode`: channels and daemons between network namespaces, as between hosts.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::built::Built;
use crate::janitor::Janitor;
use crate::outcomes::{Outcomes, Wrong};
use crate::two_sides::{self, End, Report, TwoSides};
use crate::ucx::{self, Nixl};
use crate::{packages, shown};

const HOSTS: [&str; 2] = ["10.231.7.1", "10.231.7.2"];
/// Rate of the slowed link, in bytes a second (`tc` writes `1gbit`).
const RATE: (&str, f64) = ("1gbit", 125e6);
/// Factor by which a link may seem faster than its rate: a bucket of tokens is full when a batch begins.
const SLACK: f64 = 1.25;
const COMMAND: Duration = Duration::from_secs(20);
const LIMIT: Duration = Duration::from_secs(120);
/// Time for the tests of daemons.
const DAEMONS: Duration = Duration::from_secs(900);

pub(crate) fn run() -> Result<bool> {
    let mut outcomes = Outcomes::default();
    match possible().and_then(|()| prepare()) {
        Err(why) => outcomes.skip("namespaces", &why),
        Ok(()) => {
            let nixl = Nixl::find();
            let built = Built::workspace()?;
            let program = built.program("lmc-transfer", "two_sides")?;
            channels(program, &nixl, &mut outcomes, None);
            println!("\n==> daemons between namespaces");
            match packages::install("python3", "python3") {
                Ok(()) => outcomes.ran("daemons between namespaces", daemons(&built, &nixl)),
                Err(why) => outcomes.skip("daemons between namespaces", &why),
            }
            if let Err(error) = &nixl {
                outcomes.no_nixl("daemons over NIXL between namespaces", error);
            }
        }
    }
    Ok(outcomes.finish())
}

/// Returns whether namespaces can be laid here.
pub(crate) fn possible() -> Result<()> {
    ensure!(packages::is_root(), "network namespaces need root");
    packages::obtainable("ip", "iproute2")?;
    packages::obtainable("tc", "iproute2")
}

/// Installs what is missing, and lays a namespace to see whether the kernel and the container around
/// it allow that.
pub(crate) fn prepare() -> Result<()> {
    packages::install("ip", "iproute2")?;
    packages::install("tc", "iproute2")?;
    Namespaces::lay(None)
        .context("no network namespaces here")
        .map(drop)
}

/// Runs the tests of daemons that are peers on several hosts.
fn daemons(built: &Built, nixl: &Result<Nixl>) -> Result<String> {
    let mut tests = built.tests("lmc-server", "it")?;
    let mut transports = "sockets";
    if let Ok(nixl) = nixl {
        tests.env("LMC_NIXL_LIBRARY", nixl.library());
        transports = "sockets and NIXL";
    }
    tests
        .args(["multinode::", "--ignored"])
        // Most of them wait for a slow link or a silent peer.
        .args(["--test-threads", "12"]);
    let said = shown::output(&mut tests, DAEMONS)?;
    let passed = shown::passed(&said)?;
    Ok(format!("{passed} cases over {transports}"))
}

/// The socket channel and NIXL over TCP, each on a quick and on a slowed link. A run ends
/// with an error where it is not done by `until`.
pub(crate) fn channels(
    program: &Path,
    nixl: &Result<Nixl>,
    outcomes: &mut Outcomes,
    until: Option<Instant>,
) {
    let mut each = |kind: &str, rate: Option<(&str, f64)>, nixl: Option<&Nixl>| {
        let link = rate.map_or("a veth".to_owned(), |(rate, _)| format!("a veth of {rate}"));
        let name = format!("{kind} between namespaces over {link}");
        println!("\n==> {name}");
        let limit = two_sides::within(LIMIT, until);
        let ran = limit.and_then(|limit| between(program, rate, nixl, limit));
        outcomes.ran(&name, ran);
    };
    for rate in [None, Some(RATE)] {
        each("socket", rate, None);
        if let Ok(nixl) = nixl {
            each("NIXL (UCX tcp)", rate, Some(nixl));
        }
    }
    if let Err(error) = nixl {
        outcomes.no_nixl("NIXL between namespaces", error);
    }
}

/// Lays two namespaces, runs a side in each, and takes them away.
fn between(
    program: &Path,
    rate: Option<(&str, f64)>,
    nixl: Option<&Nixl>,
    limit: Duration,
) -> Result<String> {
    let namespaces = Namespaces::lay(rate.map(|(rate, _)| rate))?;
    let kind = if nixl.is_some() { "nixl" } else { "socket" };
    let name = format!("{kind}-{}", rate.map_or("quick", |(rate, _)| rate));
    let logs = Path::new("target/test-multinode").join(name);
    two_sides::fresh(&logs)?;
    let end = |at: usize, side: &str| {
        let mut end = End {
            within: namespaces.within(at),
            ..End::default()
        };
        if let Some(nixl) = nixl {
            let device = namespaces.device(at);
            end.variables = nixl.variables("tcp", Some(device), &logs, side);
        }
        end
    };
    let flags = format!("--channel {kind} --sweep-kib 16384 --arena-mib 96");
    let sides = TwoSides {
        program,
        host: HOSTS[0],
        flags: flags.split(' ').map(str::to_owned).collect(),
        server: end(0, "serve"),
        driver: end(1, "drive"),
        logs: &logs,
        limit,
    };
    let before = namespaces.crossed()?;
    let report = sides.run()?;
    let after = namespaces.crossed()?;
    print!("{}", report.table());
    report.verdict()?;
    let crossed = (after.0 - before.0, after.1 - before.1);
    if nixl.is_some() {
        ucx::expect(&std::fs::read_to_string(logs.join("drive.ucx"))?, "tcp/")?;
    }
    proven(&report, crossed, rate.map(|(_, bytes)| bytes))
}

/// Returns whether the counters of the link, and its rate, bear out that the bytes crossed it.
fn proven(report: &Report, crossed: (u64, u64), rate: Option<f64>) -> Result<String> {
    let moved = report.moved();
    ensure!(moved.0 > 0 && moved.1 > 0, "the sweep moved nothing");
    if crossed.0 < moved.0 || crossed.1 < moved.1 {
        bail!(Wrong(format!(
            "{moved:?} bytes were moved, to the server and from it, and {crossed:?} crossed the \
             veth: they went another way"
        )));
    }
    let checks = report.passed.len();
    let [there, back] = [crossed.0, crossed.1].map(|bytes| bytes >> 20);
    let mut how = format!("{checks} checks; {there} MiB and {back} MiB crossed the veth");
    if let Some(rate) = rate {
        let large = report.cells.iter();
        let large = large.filter(|cell| cell.bytes * cell.batch >= 4 << 20);
        let quickest = large.map(|cell| cell.gib_per_s * (1u64 << 30) as f64);
        let quickest = quickest.fold(0.0, f64::max);
        ensure!(quickest > 0.0, "no batch was large enough to tell the rate");
        ensure!(
            quickest <= rate * SLACK,
            "a batch moved at {quickest:.3e} B/s over a link of {rate:.3e} B/s: it went another way"
        );
        how += &format!("; none quicker than {:.0} MB/s", quickest / 1e6);
    }
    Ok(how)
}

/// Two namespaces with a link between them. They go with this.
struct Namespaces {
    names: [String; 2],
    devices: [String; 2],
    _janitor: Janitor,
}

impl Namespaces {
    fn lay(rate: Option<&str>) -> Result<Self> {
        let own = std::process::id();
        let names = ["a", "b"].map(|side| format!("lmc{own}{side}"));
        let devices = ["a", "b"].map(|side| format!("lv{own}{side}"));
        let mut janitor = Janitor::new()?;
        for name in &names {
            janitor.in_the_end(&format!("ip netns del {name}"))?;
            janitor.in_the_end(&format!("ip netns pids {name} | xargs -r kill -9"))?;
            ip(&format!("netns add {name}"))?;
        }
        let [a, b] = [0, 1].map(|at| (names[at].as_str(), devices[at].as_str()));
        ip(&format!(
            "link add {} netns {} type veth peer name {} netns {}",
            a.1, a.0, b.1, b.0
        ))?;
        for ((name, device), host) in [a, b].into_iter().zip(HOSTS) {
            ip(&format!("-n {name} addr add {host}/24 dev {device}"))?;
            ip(&format!("-n {name} link set lo up"))?;
            ip(&format!("-n {name} link set {device} up"))?;
            if let Some(rate) = rate {
                let limit = format!("tbf rate {rate} burst 256kb latency 50ms");
                ip(&format!(
                    "netns exec {name} tc qdisc add dev {device} root {limit}"
                ))?;
            }
        }
        let namespaces = Self {
            names,
            devices,
            _janitor: janitor,
        };
        // UCX lists interfaces once, when its backend is made.
        let begun = Instant::now();
        while !(namespaces.is_up(0)? && namespaces.is_up(1)?) {
            ensure!(begun.elapsed() < COMMAND, "the veth is not up in time");
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(namespaces)
    }

    fn within(&self, at: usize) -> Vec<String> {
        let words = ["ip", "netns", "exec", &self.names[at]];
        words.map(str::to_owned).to_vec()
    }

    fn device(&self, at: usize) -> &str {
        &self.devices[at]
    }

    fn link(&self, at: usize) -> Result<Value> {
        let mut command = Command::new("ip");
        command.args(["-n", &self.names[at], "-s", "-j", "link", "show"]);
        let text = shown::capture(command.arg(&self.devices[at]), COMMAND)?;
        let links: Value = serde_json::from_str(&text).context("ip -j speaks JSON")?;
        Ok(links[0].clone())
    }

    fn is_up(&self, at: usize) -> Result<bool> {
        Ok(self.link(at)?["operstate"] == "UP")
    }

    /// Bytes that came to the server's side of the link, and to the driver's.
    fn crossed(&self) -> Result<(u64, u64)> {
        let received = |at| {
            let bytes = self.link(at)?["stats64"]["rx"]["bytes"].as_u64();
            bytes.context("ip says nothing of bytes")
        };
        Ok((received(0)?, received(1)?))
    }
}

fn ip(words: &str) -> Result<()> {
    let mut command = Command::new("ip");
    shown::output(command.args(words.split(' ')), COMMAND).map(drop)
}
