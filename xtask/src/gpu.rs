//! `cargo xtask test-gpu` and `ptx`: what needs a GPU or its compiler.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::built::Built;
use crate::outcomes::{Outcomes, Wrong};
use crate::scripts::{self, NotToBeHad};
use crate::{packages, target, vllm};

/// Prove on a GPU what needs one: LMCache's client and lmc's own on tensors there, byte by byte
///
/// Puts the program, lmc's Python package, the wheels that LMCache's client needs, a test of the driver
/// and the scripts into target/test-gpu. A machine with a GPU needs only this folder, Python and
/// torch: copy the folder there and run its run.sh. Where this machine has a GPU, that is run here.
/// Without one, the checks of lmc's own client that need no GPU are run on tensors in host memory.
#[derive(Debug, clap::Args)]
pub(crate) struct GpuArgs {
    /// Version of Python on the machine with the GPU
    #[arg(long, default_value = "3.12", value_name = "VERSION")]
    python: String,
}

/// Measures on a GPU: rates of copies, and what they cost the engine's own work
///
/// Makes the folder of `cargo xtask test-gpu` and runs `run.sh figures` in it; on a machine without a
/// GPU it says how to do that elsewhere.
#[derive(Debug, clap::Args)]
pub(crate) struct FiguresArgs {
    #[command(flatten)]
    gpu: GpuArgs,
}

const SCRIPTS: [&str; 4] = ["run.sh", "client.py", "load.py", "own.py"];

/// Makes the folder, and runs its checks: on a GPU where there is one, else in host memory. Returns
/// true if nothing failed.
pub(crate) fn run(args: &GpuArgs) -> Result<bool> {
    let folder = match pack(&args.python) {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("gpu", &why)),
        Err(fault) => return Err(fault),
    };
    let mut outcomes = Outcomes::new(false);
    let name = "checks on a GPU";
    if let Some(why) = no_gpu(&folder, "tests") {
        outcomes.skip(name, &why.into());
        let name = "lmc's own client on tensors in host memory";
        match vllm::environment() {
            Ok(environment) => outcomes.ran(name, run_part(&folder, "cpu", Some(&environment))),
            Err(why) => outcomes.cannot(name, why),
        }
    } else {
        outcomes.ran(name, run_part(&folder, "tests", None));
    }
    Ok(outcomes.finish())
}

/// Makes the folder, and measures where there is a GPU. Returns true if nothing failed.
pub(crate) fn figures(args: &FiguresArgs) -> Result<bool> {
    let folder = pack(&args.gpu.python)?;
    match no_gpu(&folder, "figures") {
        Some(why) => println!("{why}"),
        None => drop(run_part(&folder, "figures", None)?),
    }
    Ok(true)
}

/// Says what to do where this machine has no GPU.
fn no_gpu(folder: &Path, part: &str) -> Option<NotToBeHad> {
    let there = folder.display();
    (!packages::found("nvidia-smi")).then(|| {
        NotToBeHad(format!(
            "no GPU here: copy {there} to a machine that has one and run its run.sh {part}"
        ))
    })
}

/// Runs a part of the script, with the Python of an environment or the machine's own.
fn run_part(folder: &Path, part: &str, environment: Option<&str>) -> Result<String> {
    let mut script = Command::new("bash");
    script.arg(folder.join("run.sh")).arg(part);
    if let Some(environment) = environment {
        script.env("PYTHON", format!("{environment}/bin/python"));
    }
    let status = script.stdin(Stdio::null()).status();
    let passed = status.context("cannot run bash")?.success();
    ensure!(passed, Wrong("see the lines with FAILED above".to_owned()));
    Ok(format!("run.sh {part}"))
}

fn pack(python: &str) -> Result<PathBuf> {
    let wheels = scripts::set_up("xtask/python/gpu.sh", &[python])?;
    let program = vllm::build_server()?;
    let folder = target()?.join("test-gpu");
    let _ = fs::remove_dir_all(&folder);
    let into = folder.join("wheels");
    fs::create_dir_all(&into)?;
    for entry in fs::read_dir(&wheels)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "whl") {
            copy(&path, &into)?;
        }
    }
    for script in SCRIPTS {
        copy(&Path::new("xtask/python/gpu").join(script), &folder)?;
    }
    copy(&program, &folder)?;
    let module = crate::build_release("--package lmc-python")?.join("lib_native.so");
    let package = folder.join("package/lmc");
    copy_package(Path::new("python/lmc"), &package)?;
    fs::copy(module, package.join("_native.abi3.so")).context("no module of Python was built")?;
    let driver = Built::of_driver()?;
    fs::copy(
        driver.program("lmc-fake-cuda", "it")?,
        folder.join("driver"),
    )?;
    Ok(folder)
}

/// Copies the files of a Python package, without the module.
fn copy_package(from: &Path, into: &Path) -> Result<()> {
    fs::create_dir_all(into)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        let name = path.file_name().context("a file has a name")?;
        if path.is_dir() {
            copy_package(&path, &into.join(name))?;
        } else if path
            .extension()
            .is_some_and(|it| it == "py" || it == "json")
        {
            copy(&path, into)?;
        }
    }
    Ok(())
}

fn copy(from: &Path, into: &Path) -> Result<()> {
    let name = from.file_name().context("a file has a name")?;
    fs::copy(from, into.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Compile the kernels to PTX, with NVIDIA's compiler from PyPI
#[derive(Debug, clap::Args)]
pub(crate) struct PtxArgs {
    /// Write nothing: fail where the files in the tree are not what the sources compile to
    #[arg(long)]
    check: bool,
}

/// The kernels, without their extensions.
const KERNELS: [&str; 1] = ["crates/lmc-memory/src/cuda/copy_runs"];

/// Compiles the kernels. Returns true if all is well.
pub(crate) fn ptx(args: &PtxArgs) -> Result<bool> {
    let environment = match scripts::set_up("xtask/python/ptx.sh", &[]) {
        Ok(folder) => PathBuf::from(folder),
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("ptx", &why)),
        Err(fault) => return Err(fault),
    };
    let mut is_well = true;
    for kernel in KERNELS {
        let mut compiler = Command::new(environment.join("bin/python"));
        compiler.args(["xtask/python/ptx.py", &format!("{kernel}.cu")]);
        compiler.arg(format!("{kernel}.ptx"));
        compiler.args(args.check.then_some("--check"));
        let status = compiler.stdin(Stdio::null()).status();
        is_well &= status.context("cannot run the compiler")?.success();
    }
    Ok(is_well)
}
