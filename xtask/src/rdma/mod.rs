//! `cargo xtask test-rdma`: the NIXL channel over the best transport that the machine has, with
//! proof that it was that one.

mod devices;
mod guest;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};

use crate::janitor::Janitor;
use crate::outcomes::Outcomes;
use crate::two_sides::{self, End, Suite, TwoSides};
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
    let (best, chosen) = args.plan();
    print_found();
    std::fs::create_dir_all(LOGS)?;
    let mut outcomes = Outcomes::new(args.require);
    let mut levels = Vec::new();
    if best {
        levels = best_of_rdma(&mut outcomes);
        if levels.is_empty() && args.require {
            let none = anyhow!("no level of RDMA can be had here");
            outcomes.cannot("best", none);
        }
        outcomes.skip("gpu", &no_gpu_level());
    }
    levels.extend(chosen);
    let nixl = Nixl::find();
    let program = two_sides::build(nixl.is_ok())?;
    for level in levels {
        let (name, described) = (level.name(), level.described());
        println!("\n==> {name}: {described}");
        if let Err(why) = level.prepare() {
            outcomes.cannot(name, why);
            continue;
        }
        if level == Level::Namespaces {
            // The socket channel needs no NIXL.
            multinode::channels(&program, &nixl, &mut outcomes);
            continue;
        }
        match &nixl {
            Ok(nixl) => outcomes.ran(name, level.run(&program, nixl)),
            Err(error) => outcomes.no_nixl(name, error),
        }
    }
    Ok(outcomes.finish())
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

impl Level {
    /// Runs both sides and proves how the bytes went. What it found comes back.
    fn run(self, program: &Path, nixl: &Nixl) -> Result<String> {
        let logs = Path::new(LOGS).join(self.name());
        two_sides::fresh(&logs)?;
        match self {
            Self::Device => on_port(&active_port()?, program, nixl, &logs),
            Self::Rxe => {
                let (port, _janitor) = lay_rxe()?;
                on_port(&port, program, nixl, &logs)
            }
            Self::Guest => in_guests(Layout::One, program, nixl, &logs),
            Self::Guests => in_guests(Layout::Two, program, nixl, &logs),
            Self::Suite => in_guests(Layout::Suite, program, nixl, &logs),
            Self::Tcp => here("tcp", "tcp/lo", program, nixl, &logs),
            Self::Cma => here("tcp,cma,self", "cma/memory", program, nixl, &logs),
            Self::Namespaces => bail!("namespaces are laid by test-multinode"),
        }
    }
}

/// Two processes of this host over its loopback device or none.
fn here(tls: &str, shows: &str, program: &Path, nixl: &Nixl, logs: &Path) -> Result<String> {
    let variables = |side: &str| nixl.variables(tls, Some("lo"), logs, side);
    let report = sides(program, logs, &variables).run()?;
    print!("{}", report.table());
    report.verdict()?;
    let log = std::fs::read_to_string(logs.join("drive.ucx"))?;
    let configuration = ucx::expect(&log, shows)?;
    Ok(format!(
        "{} checks; no RDMA; {configuration}",
        report.passed.len()
    ))
}

fn sides<'a>(
    program: &'a Path,
    logs: &'a Path,
    variables: &dyn Fn(&str) -> Vec<(String, String)>,
) -> TwoSides<'a> {
    let end = |side: &str| End {
        variables: variables(side),
        ..End::default()
    };
    TwoSides {
        program,
        host: "127.0.0.1",
        flags: ["--channel", "nixl"].map(str::to_owned).to_vec(),
        server: end("serve"),
        driver: end("drive"),
        logs,
        limit: LIMIT,
    }
}

/// Two processes of this host over one of its RDMA ports.
fn on_port(port: &Port, program: &Path, nixl: &Nixl, logs: &Path) -> Result<String> {
    let verbs = verbs(nixl, logs)?;
    let variables = |side: &str| {
        let mut variables = nixl.variables("rc,self", Some(&port.name()), logs, side);
        variables.extend(verbs.iter().cloned());
        variables
    };
    let before = port.counters();
    let report = sides(program, logs, &variables).run()?;
    let after = port.counters();
    print!("{}", report.table());
    report.verdict()?;
    let log = std::fs::read_to_string(logs.join("drive.ucx"))?;
    let configuration = ucx::expect(&log, RDMA)?;
    let moved = report.moved();
    let carried = after.carried(&before, moved);
    let carried = carried.with_context(|| not_carried(moved))?;
    let suite = suite_held(&suite_here(variables("suite"), logs)?)?;
    let checks = report.passed.len();
    Ok(format!(
        "{checks} checks over {}; {configuration}; {carried}{suite}",
        port.described()
    ))
}

fn not_carried(moved: (u64, u64)) -> String {
    format!("{moved:?} bytes were moved, and the device's counters do not show them: no RDMA")
}

fn in_guests(layout: Layout, program: &Path, nixl: &Nixl, logs: &Path) -> Result<String> {
    let suite = two_sides::build_suite()?;
    let output = Guest::make(program, &suite, nixl, Path::new(LOGS))?.run(layout, logs)?;
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

/// Returns whether the suite ran over RDMA, and passed; how many properties held.
fn suite_held(suite: &Suite) -> Result<String> {
    suite.verdict()?;
    ucx::expect(&suite.ucx, RDMA).context("the suite")?;
    Ok(format!("; {} properties of the suite hold", suite.held))
}

/// Runs the suite in a process of this host.
fn suite_here(variables: Vec<(String, String)>, logs: &Path) -> Result<Suite> {
    let mut command = Command::new(two_sides::build_suite()?);
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
    let said = shown::output(&mut command, SUITE_LIMIT)?;
    said.lines().for_each(|line| suite.line(line));
    suite.ucx = std::fs::read_to_string(logs.join("suite.ucx"))?;
    Ok(suite)
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
                list: false,
            };
            assert_eq!(args.plan(), (best, expected.to_vec()));
        }
        let known = LEVELS.map(Level::name);
        assert!(NAMES[1..] == known && NAMES[0] == "best");
        let parse = crate::parse_action;
        assert!(parse("test-rdma --level best --level cma --require").is_ok());
        for wrong in ["--level", "--level hca", "tcp"] {
            assert!(parse(&format!("test-rdma {wrong}")).is_err(), "{wrong}");
        }
    }
}
