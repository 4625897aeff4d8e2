//! Every developer action of lmc, in plain Rust: `cargo xtask --help`.

mod bench;
mod build;
mod crash_loop;
mod fuzz;
mod janitor;
mod multinode;
mod nixl;
mod outcomes;
mod output;
mod packages;
mod ports;
mod rdma;
mod scripts;
mod shown;
mod steps;
mod test;
mod tidy;
mod toolchain;
mod two_sides;
mod ucx;
mod vllm;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

const HELP: &str = "\
Every developer action of lmc.

  cargo xtask test [STEP...]       all there is to check; sets up what it needs, says what it does
      --list                       the steps and their commands, without running them
  cargo xtask ci                   the same (CI runs `cargo xtask test`)
  cargo xtask tidy                 layering, file sizes, links, invariants, unsafe code
  cargo xtask test-build           what a newcomer builds, without a warning
  cargo xtask test-vllm [ARGS]     real vLLM on CPU against `lmc serve`
      --only NAME...               some scenarios only
      --peer lmcache               the same scenarios against LMCache's own server
  cargo xtask test-cli             LMCache's command-line tools and benchmark against `lmc serve`
  cargo xtask test-nixl            NIXL channels on the real library, which it fetches from PyPI
      --require                    fails where that cannot be had, instead of skipping
  cargo xtask test-multinode       channels between network namespaces; as root
  cargo xtask test-rdma [FLAGS]    NIXL over the best RDMA there is, down to soft-RoCE in a guest
      --level NAME                 one level only; may be given again
      --list                       the levels, and which of them can be had here
  cargo xtask fuzz [TARGET...]     zmtp, request, service, transfer; all of them unless some are named
      --seconds N                  for each target, 30 unless given
      --stable                     the seeded mutator, even where libFuzzer is at hand
      --seed N                     with --stable: repeat the run that printed this seed
  cargo xtask crash-loop           kills the disk tier at random instants, checks what is left
      --rounds N                   kills, 100 unless given
      --seed N                     the instants of the run that printed this seed
      --dir PATH                   a folder on the drive to use, target unless given
  cargo xtask bench serve          lmc against LMCache's server; writes docs/benchmarks.md
      --rounds N --duration S      3 rounds, 1.5 seconds a cell unless given
      --lmcache PROGRAM            LMCache's `lmcache`, fetched from PyPI unless given
      --before PROGRAM             an earlier lmc in the place of LMCache's server; writes nothing
      --dry-run                    writes nothing
  cargo xtask bench disk           the disk tier beside fio and LMCache's adapters; the same page
      --rounds N --seconds S       3 rounds, 2 seconds a cell unless given
      --dir PATH                   a folder on the drive to use, target/bench-disk unless given
      --quick                      a few cells, under a minute; writes nothing
      --dry-run                    writes nothing
  cargo xtask bench transfer       channels beside iperf3, bare sockets and bare NIXL; the same page
      --help                       its flags
";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    std::env::set_current_dir(root()).expect("the workspace's folder exists");
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs one action. Whether all is well.
fn run(args: &[String]) -> Result<bool> {
    let Some((command, rest)) = args.split_first() else {
        print!("{HELP}");
        return Ok(true);
    };
    // What has no page of its own is on this one.
    let transfer = rest.first().is_some_and(|what| what == "transfer");
    let own_page = command == "test-rdma" || (command == "bench" && transfer);
    if !own_page && rest.iter().any(|arg| arg == "--help" || arg == "-h") {
        print!("{HELP}");
        return Ok(true);
    }
    match command.as_str() {
        "test" | "ci" => test::run(rest),
        "tidy" => tidy::run(),
        "test-build" => build::run(rest),
        "test-vllm" => vllm::run(rest),
        "test-cli" => vllm::run_cli(rest),
        "test-nixl" => nixl::run(rest),
        "test-multinode" => multinode::run(rest),
        "test-rdma" => rdma::run(rest),
        "fuzz" => fuzz::run(rest),
        "crash-loop" => crash_loop::run(rest),
        "bench" => bench::run(rest),
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(true)
        }
        other => bail!("unknown command {other:?}; `cargo xtask --help` lists them"),
    }
}

/// The folder that cargo builds into.
fn target_dir() -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    // …/target/debug/xtask
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
