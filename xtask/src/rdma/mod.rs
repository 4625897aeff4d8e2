//! `cargo xtask test-rdma`: the NIXL channel over the best transport that the machine has, with
//! proof that it was that one.

mod devices;
mod guest;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow, bail, ensure};

use crate::built::Built;
use crate::janitor::Janitor;
use crate::outcomes::{Outcomes, Wrong};
use crate::two_sides::{self, End, Report, Suite, TwoSides};
use crate::ucx::{self, Nixl};
use crate::{multinode, packages, shown};
use devices::Port;
use guest::{Guest, Layout};

/// Transports that can be tested, the best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Device,
    Rxe,
    Guest,
    Guests,
    Suite,
    Namespaces,
    Tcp,
    Cma,
}

const LEVELS: [Level; 8] = [
    Level::Device,
    Level::Rxe,
    Level::Guest,
    Level::Guests,
    Level::Suite,
    Level::Namespaces,
    Level::Tcp,
    Level::Cma,
];

/// Transport that makes no stop in a kernel: reads and writes of the memory of a peer.
const RDMA: &str = "rma(rc_";
const LIMIT: Duration = Duration::from_secs(150);
const SUITE_LIMIT: Duration = Duration::from_secs(600);
const COMMAND: Duration = Duration::from_secs(20);
const LOGS: &str = "target/test-rdma";
/// Address of a soft-RoCE device of our own.
const RXE_ADDRESS: &str = "10.231.8.1/24";
/// Folders in which distributions keep verbs of devices.
const PROVIDERS: [&str; 2] = [
    "/usr/lib/x86_64-linux-gnu/libibverbs",
    "/usr/lib64/libibverbs",
];

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Rxe => "rxe",
            Self::Guest => "guest",
            Self::Guests => "guests",
            Self::Suite => "suite",
            Self::Namespaces => "namespaces",
            Self::Tcp => "tcp",
            Self::Cma => "cma",
        }
    }

    fn described(self) -> &'static str {
        match self {
            Self::Device => "an RDMA device of this host",
            Self::Rxe => "soft-RoCE on this host",
            Self::Guest => "soft-RoCE in a QEMU guest, two processes",
            Self::Guests => "soft-RoCE between two QEMU guests",
            Self::Suite => "soft-RoCE in a QEMU guest, the whole channel suite",
            Self::Namespaces => "no RDMA: TCP between network namespaces",
            Self::Tcp => "no RDMA: UCX over TCP, two processes here",
            Self::Cma => "no RDMA: UCX over memory of the other process, two processes here",
        }
    }

    /// Returns whether it can be had here, as far as that shows.
    fn possible(self) -> Result<()> {
        match self {
            Self::Device => active_port().map(drop),
            Self::Rxe => rxe_possible(),
            Self::Guest | Self::Guests | Self::Suite => guest::possible(),
            Self::Namespaces => multinode::possible(),
            Self::Tcp | Self::Cma => Ok(()),
        }
    }

    /// Gets what is missing. The error says what cannot be had.
    fn prepare(self) -> Result<()> {
        self.possible()?;
        match self {
            Self::Rxe => rxe_prepare(),
            Self::Guest | Self::Guests | Self::Suite => guest::prepare(),
            Self::Namespaces => multinode::prepare(),
            Self::Device | Self::Tcp | Self::Cma => Ok(()),
        }
    }
}

/// Runs the NIXL channel between two processes over the best RDMA that the machine has.
///
/// Every operation is checked byte for byte, with a sweep of sizes and batches, and the suite that
/// every channel passes. Without --level: the best level of RDMA that the machine has (the first
/// that can be had of device, rxe, and guest with guests), then namespaces, tcp and cma. A guest
/// runs a part of the suite; --level suite runs all of it there, in about five minutes. Logs lie in
/// target/test-rdma.
#[derive(Debug, Clone, PartialEq, Eq, clap::Args)]
pub(crate) struct RdmaArgs {
    /// Run this level only; may be repeated
    #[arg(long = "level", value_name = "NAME", value_parser = NAMES)]
    levels: Vec<String>,
    /// Fail where a level cannot be had; of best, where none can
    #[arg(long)]
    require: bool,
    /// Run for N minutes at most, after what is built, installed and downloaded: what is not done by
    /// then, or cannot be done, is skipped, and only a wrong result is a failure
    #[arg(long, value_name = "N", conflicts_with = "require")]
    minutes: Option<u64>,
    /// Print the levels, and which of them can be had here
    #[arg(long)]
    list: bool,
}

/// Names of the levels, and of the best of RDMA.
const NAMES: [&str; 9] = [
    "best",
    "device",
    "rxe",
    "guest",
    "guests",
    "suite",
    "namespaces",
    "tcp",
    "cma",
];

impl RdmaArgs {
    /// The best of RDMA, and the levels after it.
    fn plan(&self) -> (bool, Vec<Level>) {
        if self.levels.is_empty() {
            return (true, vec![Level::Namespaces, Level::Tcp, Level::Cma]);
        }
        let named = |name: &String| LEVELS.into_iter().find(|level| level.name() == name);
        let levels = self.levels.iter().filter_map(named).collect();
        (self.levels.iter().any(|name| name == "best"), levels)
    }
}

pub(crate) fn run(args: &RdmaArgs) -> Result<bool> {
    if args.list {
        print_found();
        for level in LEVELS {
            let can = match level.possible() {
                Ok(()) => "yes".to_owned(),
                Err(why) => format!("no: {why:#}"),
            };
            println!("{:<11} {}: {can}", level.name(), level.described());
        }
        return Ok(true);
    }
    print_found();
    std::fs::create_dir_all(LOGS)?;
    let mut outcomes = match args.minutes {
        Some(_) => Outcomes::lenient(),
        None => Outcomes::new(args.require),
    };
    if let Err(error) = run_levels(args, &mut outcomes) {
        outcomes.ran("test-rdma", Err(error));
    }
    Ok(outcomes.finish())
}

/// Runs what is asked for. The error says why none of it could be.
fn run_levels(args: &RdmaArgs, outcomes: &mut Outcomes) -> Result<()> {
    let (best, chosen) = args.plan();
    let mut levels = Vec::new();
    if best {
        levels = best_of_rdma(outcomes);
        if levels.is_empty() && args.require {
            let none = anyhow!("no level of RDMA can be had here");
            outcomes.cannot("best", none);
        }
        outcomes.skip("gpu", &no_gpu_level());
    }
    levels.extend(chosen);
    if args.minutes.is_some() {
        // What takes seconds comes first, so that a guest cannot take its time.
        levels.sort_by_key(|level| !matches!(level, Level::Tcp | Level::Cma));
    }
    let nixl = Nixl::find();
    let built = Built::channels(nixl.is_ok())?;
    let [program, suite] = ["two_sides", "it"].map(|name| built.program("lmc-transfer", name));
    let [program, suite] = [program?, suite?];
    let minutes = |minutes: u64| Instant::now() + Duration::from_secs(60 * minutes);
    let until = args.minutes.map(minutes);
    for level in levels {
        let (name, described) = (level.name(), level.described());
        println!("\n==> {name}: {described}");
        let time = two_sides::within(LIMIT, until);
        if let Err(why) = time.and_then(|_| level.prepare()) {
            outcomes.cannot(name, why);
            continue;
        }
        if level == Level::Namespaces {
            // The socket channel needs no NIXL.
            multinode::channels(program, &nixl, outcomes, until);
            continue;
        }
        let logs = &Path::new(LOGS).join(name);
        let run = |nixl| Run {
            program,
            suite,
            nixl,
            logs,
            until,
        };
        match &nixl {
            Ok(nixl) => outcomes.ran(name, run(nixl).level(level)),
            Err(error) => outcomes.no_nixl(name, error),
        }
    }
    Ok(())
}

/// Prints the devices of the machine.
fn print_found() {
    let ports = devices::ports();
    match ports.is_empty() {
        true => println!("RDMA devices: none in /sys/class/infiniband"),
        false => {
            for port in &ports {
                println!("RDMA device: {}", port.described());
            }
        }
    }
    let gpus = devices::gpus();
    match gpus.is_empty() {
        true => println!("GPUs: none of which a driver knows"),
        false => gpus.iter().for_each(|gpu| println!("GPU: {gpu}")),
    }
}

/// Why no memory of a GPU is moved.
fn no_gpu_level() -> Error {
    match devices::gpus().is_empty() {
        true => anyhow!("no GPU of which a driver knows"),
        false => anyhow!("there is a GPU, and no level moves its memory yet"),
    }
}

/// The best levels of RDMA that can be had; why not, for those that are better.
fn best_of_rdma(outcomes: &mut Outcomes) -> Vec<Level> {
    for levels in [
        &[Level::Device][..],
        &[Level::Rxe],
        &[Level::Guest, Level::Guests],
    ] {
        match levels[0].prepare() {
            Ok(()) => return levels.to_vec(),
            Err(why) => levels
                .iter()
                .for_each(|level| outcomes.skip(level.name(), &why)),
        }
    }
    Vec::new()
}

fn active_port() -> Result<Port> {
    let ports = devices::ports();
    let active = ports.into_iter().find(Port::is_active);
    active.context("no RDMA device with an active port in /sys/class/infiniband")
}

fn rxe_possible() -> Result<()> {
    ensure!(packages::is_root(), "a soft-RoCE device needs root");
    packages::obtainable("rdma", "iproute2")?;
    // Asked without loading it.
    let mut ask = Command::new("modprobe");
    ask.args(["--dry-run", "rdma_rxe"]);
    shown::capture(&mut ask, COMMAND).context("the kernel has no soft-RoCE")?;
    let verbs = providers()
        .iter()
        .any(|path| path.to_string_lossy().contains("/librxe-"));
    ensure!(
        verbs,
        "no verbs of soft-RoCE: apt-get install ibverbs-providers"
    );
    Ok(())
}

fn rxe_prepare() -> Result<()> {
    packages::install("rdma", "iproute2")?;
    let mut load = Command::new("modprobe");
    shown::output(load.arg("rdma_rxe"), COMMAND).map(drop)
}

/// Programs that levels run, and until when.
struct Run<'a> {
    program: &'a Path,
    suite: &'a Path,
    nixl: &'a Nixl,
    /// The level's own folder.
    logs: &'a Path,
    until: Option<Instant>,
}

impl Run<'_> {
    /// Runs both sides and proves how the bytes went. What it found comes back.
    fn level(&self, level: Level) -> Result<String> {
        two_sides::fresh(self.logs)?;
        match level {
            Level::Device => self.on_port(&active_port()?),
            Level::Rxe => {
                let (port, _janitor) = lay_rxe()?;
                self.on_port(&port)
            }
            Level::Guest => self.in_guests(Layout::One),
            Level::Guests => self.in_guests(Layout::Two),
            Level::Suite => self.in_guests(Layout::Suite),
            Level::Tcp => self.here("tcp", "tcp/lo"),
            Level::Cma => self.here("tcp,cma,self", "cma/memory"),
            Level::Namespaces => bail!("namespaces are laid by test-multinode"),
        }
    }

    /// Two processes of this host over its loopback device or none.
    fn here(&self, tls: &str, shows: &str) -> Result<String> {
        let report = self.sides(&|side| self.nixl.variables(tls, Some("lo"), self.logs, side))?;
        let configuration = self.configuration(shows)?;
        Ok(format!(
            "{} checks; no RDMA; {configuration}",
            report.passed.len()
        ))
    }

    /// Runs both sides on this host, and looks whether all went well.
    fn sides(&self, variables: &dyn Fn(&str) -> Vec<(String, String)>) -> Result<Report> {
        let end = |side: &str| End {
            variables: variables(side),
            ..End::default()
        };
        let sides = TwoSides {
            program: self.program,
            host: "127.0.0.1",
            flags: ["--channel", "nixl"].map(str::to_owned).to_vec(),
            server: end("serve"),
            driver: end("drive"),
            logs: self.logs,
            limit: two_sides::within(LIMIT, self.until)?,
        };
        let report = sides.run()?;
        print!("{}", report.table());
        report.verdict()?;
        Ok(report)
    }

    /// Returns the transport that the driver's log of UCX names; an error if it is another than this.
    fn configuration(&self, shows: &str) -> Result<String> {
        let log = std::fs::read_to_string(self.logs.join("drive.ucx"))?;
        ucx::expect(&log, shows)
    }

    /// Two processes of this host over one of its RDMA ports.
    fn on_port(&self, port: &Port) -> Result<String> {
        let verbs = verbs(self.nixl, self.logs)?;
        let variables = |side: &str| {
            let device = port.name();
            let mut variables = self
                .nixl
                .variables("rc,self", Some(&device), self.logs, side);
            variables.extend(verbs.iter().cloned());
            variables
        };
        let before = port.counters();
        let report = self.sides(&variables)?;
        let after = port.counters();
        let configuration = self.configuration(RDMA)?;
        let moved = report.moved();
        let carried = after.carried(&before, moved);
        let carried = carried.with_context(|| not_carried(moved))?;
        let suite = suite_held(&self.suite_here(variables("suite"))?)?;
        let checks = report.passed.len();
        Ok(format!(
            "{checks} checks over {}; {configuration}; {carried}{suite}",
            port.described()
        ))
    }

    fn in_guests(&self, layout: Layout) -> Result<String> {
        let guest = Guest::make(self.program, self.suite, self.nixl, Path::new(LOGS))?;
        let output = guest.run(layout, self.logs, self.until)?;
        let mut how = format!("over {}", output.device());
        let mut moved = (0, 0);
        if layout != Layout::Suite {
            print!("{}", output.report.table());
            let problems = || output.problems().join("; ");
            output.report.verdict().with_context(problems)?;
            let checks = output.report.passed.len();
            let configuration = ucx::expect(&output.ucx, RDMA)?;
            how = format!("{checks} checks {how}; {configuration}");
            moved = output.report.moved();
        }
        let carried = output.after.carried(&output.before, moved);
        let carried = carried.with_context(|| not_carried(moved))?;
        let held = match layout {
            Layout::Two => String::new(),
            Layout::One | Layout::Suite => suite_held(&output.suite)?,
        };
        Ok(format!("{how}; {carried}{held}"))
    }

    /// Runs the suite in a process of this host.
    fn suite_here(&self, variables: Vec<(String, String)>) -> Result<Suite> {
        let mut command = Command::new(self.suite);
        command
            .args([
                "--exact",
                "nixl::scenario",
                "--nocapture",
                "--test-threads=1",
            ])
            .env("LMC_NIXL_SCENARIO", "suite:all")
            .envs(variables);
        let mut suite = Suite::default();
        let said = shown::output(&mut command, two_sides::within(SUITE_LIMIT, self.until)?)?;
        said.lines().for_each(|line| suite.line(line));
        suite.ucx = std::fs::read_to_string(self.logs.join("suite.ucx"))?;
        Ok(suite)
    }
}

fn not_carried(moved: (u64, u64)) -> Wrong {
    Wrong(format!(
        "{moved:?} bytes were moved, and the device's counters do not show them: no RDMA"
    ))
}

/// Returns whether the suite ran over RDMA, and passed; how many properties held.
fn suite_held(suite: &Suite) -> Result<String> {
    suite.verdict()?;
    ucx::expect(&suite.ucx, RDMA).context("the suite")?;
    Ok(format!("; {} properties of the suite hold", suite.held))
}

/// Makes a soft-RoCE device over a device that carries nothing else.
fn lay_rxe() -> Result<(Port, Janitor)> {
    let own = std::process::id();
    let (rxe, under) = (format!("lmcr{own}"), format!("lmcd{own}"));
    let mut janitor = Janitor::new()?;
    janitor.in_the_end(&format!("ip link del {under}"))?;
    janitor.in_the_end(&format!("rdma link delete {rxe}"))?;
    for line in [
        format!("ip link add {under} type dummy"),
        format!("ip addr add {RXE_ADDRESS} dev {under}"),
        format!("ip link set {under} up"),
        format!("rdma link add {rxe} type rxe netdev {under}"),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        shown::output(Command::new(words[0]).args(&words[1..]), COMMAND)?;
    }
    let begins = format!("{rxe}:");
    let port = devices::ports()
        .into_iter()
        .find(|port| port.name().starts_with(&begins));
    Ok((port.context("the new device has no port")?, janitor))
}

/// Verbs of the distribution, without those that the wheel brings and those that break it.
fn providers() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in PROVIDERS {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        found.extend(entries.map(|entry| entry.path()).filter(|path| {
            let path = path.to_string_lossy();
            path.ends_with("-rdmav34.so") && !path.contains("libmlx5-") && !path.contains("libefa-")
        }));
    }
    found
}

/// Lets the wheel's libibverbs find verbs of the distribution, which it looks for where Red Hat
/// keeps them: a variable names them; and what they link to as `libibverbs.so.1` is the wheel's own copy.
fn verbs(nixl: &Nixl, logs: &Path) -> Result<Vec<(String, String)>> {
    let drivers: Vec<String> = providers()
        .iter()
        .filter_map(|path| Some(path.to_str()?.strip_suffix("-rdmav34.so")?.to_owned()))
        .collect();
    if drivers.is_empty() {
        return Ok(Vec::new());
    }
    let folder = std::path::absolute(logs.join("verbs"))?;
    std::fs::create_dir_all(&folder)?;
    let link = folder.join("libibverbs.so.1");
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(nixl.bundled("libibverbs-")?.canonicalize()?, &link)
        .map_err(Error::from)
        .with_context(|| link.display().to_string())?;
    Ok(vec![
        ("IBV_DRIVERS".to_owned(), drivers.join(":")),
        ("LD_LIBRARY_PATH".to_owned(), folder.display().to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_chosen_by_name() {
        let all = [Level::Namespaces, Level::Tcp, Level::Cma];
        let cases: [(&[&str], bool, &[Level]); 3] = [
            (&[], true, &all),
            (&["best", "cma"], true, &[Level::Cma]),
            (&["guests"], false, &[Level::Guests]),
        ];
        for (levels, best, expected) in cases {
            let args = RdmaArgs {
                levels: levels.iter().map(ToString::to_string).collect(),
                require: false,
                minutes: None,
                list: false,
            };
            assert_eq!(args.plan(), (best, expected.to_vec()));
        }
        let known = LEVELS.map(Level::name);
        assert!(NAMES[1..] == known && NAMES[0] == "best");
        let parse = crate::parse_action;
        assert!(parse("test-rdma --level best --level cma --require").is_ok());
        assert!(parse("test-rdma --minutes 3").is_ok());
        for wrong in ["--minutes 3 --require", "--level", "--level hca", "tcp"] {
            assert!(parse(&format!("test-rdma {wrong}")).is_err(), "{wrong}");
        }
    }
}
