//! Every developer action of lmc: `cargo xtask --help`.

mod bench;
mod book;
mod build;
mod built;
mod crash_loop;
mod fuzz;
mod gpu;
mod janitor;
mod lab;
mod multinode;
mod nixl;
mod outcomes;
mod output;
mod package;
mod packages;
mod ports;
mod rdma;
mod remote;
mod repeat;
mod scripts;
mod server_tests;
mod shown;
mod slow;
mod steps;
mod test;
mod tidy;
mod toolchain;
mod two_sides;
mod ucx;
mod vllm;
mod wheel;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Parser;

/// Every developer action of lmc.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    arg_required_else_help = true
)]
struct Cli {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    Test(test::TestArgs),
    Lab(lab::LabArgs),
    Tidy(tidy::TidyArgs),
    /// Build what a newcomer builds, without a warning
    TestBuild,
    /// Build every library alone, with none of its features and with each
    TestFeatures,
    /// Run real vLLM on CPU against `lmc serve`: --only NAME..., --peer lmcache
    TestVllm(vllm::ScriptArgs),
    /// Run vLLM's own schedulers with lmc's connector and a worker without a model: --seeds N
    TestScheduler(vllm::ScriptArgs),
    /// Run LMCache's command-line tools and benchmark against `lmc serve`
    TestCli(vllm::ScriptArgs),
    /// Test the logic of lmc's Python package, without vLLM and without a server
    TestPython,
    /// Compare what lmc's connector uses of vLLM with the next version's wheel on PyPI
    TestInterface(vllm::InterfaceArgs),
    /// Build the Python wheel, which holds the program, and check it
    Wheel,
    Package(package::PackageArgs),
    /// Test NIXL channels on the real library, which it fetches from PyPI
    TestNixl {
        /// Fail where the library cannot be had
        #[arg(long)]
        require: bool,
    },
    /// Test channels and daemons between network namespaces; as root
    TestMultinode,
    /// Test the tier of shared stores over real servers
    TestRemote,
    /// Test the alert rules and boards with Prometheus' own tool on real servers
    TestAlerts,
    /// Test the page in a browser with Chromium, and its accessibility
    TestPage,
    /// Build a site of the documents with mdBook, and follow its links
    Book,
    TestRdma(rdma::RdmaArgs),
    TestGpu(gpu::GpuArgs),
    Ptx(gpu::PtxArgs),
    Fuzz(fuzz::FuzzArgs),
    CrashLoop(crash_loop::CrashLoopArgs),
    #[command(subcommand)]
    Bench(bench::BenchAction),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    std::env::set_current_dir(root()).expect("the workspace's folder exists");
    match run(&cli.action) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one action. Returns true if all is well.
fn run(action: &Action) -> Result<bool> {
    match action {
        Action::Test(args) => test::run(args),
        Action::Lab(args) => lab::run(args),
        Action::Tidy(args) => tidy::run(args),
        Action::TestBuild => build::run(),
        Action::TestFeatures => build::run_features(),
        Action::TestVllm(args) => vllm::run(args),
        Action::TestScheduler(args) => vllm::run_scheduler(args),
        Action::TestCli(args) => vllm::run_cli(args),
        Action::TestPython => vllm::run_python(),
        Action::TestInterface(args) => vllm::run_interface(args),
        Action::Wheel => wheel::run(),
        Action::Package(args) => package::run(args),
        Action::TestNixl { require } => nixl::run(*require),
        Action::TestMultinode => multinode::run(),
        Action::TestRemote => remote::run(),
        Action::TestAlerts => server_tests::run_alerts(),
        Action::TestPage => server_tests::run_page(),
        Action::Book => book::run(),
        Action::TestRdma(args) => rdma::run(args),
        Action::TestGpu(args) => gpu::run(args),
        Action::Ptx(args) => gpu::ptx(args),
        Action::Fuzz(args) => fuzz::run(args),
        Action::CrashLoop(args) => crash_loop::run(args),
        Action::Bench(action) => bench::run(action),
    }
}

/// Parses a line of arguments, as a test gives them.
#[cfg(test)]
fn parse_action(line: &str) -> Result<(), clap::Error> {
    let words = std::iter::once("xtask").chain(line.split_whitespace());
    Cli::try_parse_from(words).map(drop)
}

/// Builds as users do, with these flags of cargo, which hold no spaces. Returns the folder of the
/// programs.
fn build_release(flags: &str) -> Result<PathBuf> {
    let mut build = Command::new("cargo");
    build.args(["build", "--release", "--locked"]);
    build.args(flags.split_whitespace());
    let typed = shown::typed(&build);
    println!("$ {typed}");
    let built = build.stdin(Stdio::null()).status();
    let built = built.context("cannot run cargo")?;
    ensure!(built.success(), "{typed} failed: see above");
    Ok(target()?.join("release"))
}

/// Returns the folder that cargo builds into: this program is …/target/debug/xtask.
fn target() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let target = own.parent().and_then(Path::parent);
    Ok(target.context("xtask lies in a target folder")?.to_owned())
}

/// The folder of the workspace.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent()
        .expect("xtask lies in the workspace")
        .to_owned()
}
