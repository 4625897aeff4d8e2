//! `cargo xtask wheel`: the Python package with the program in it, for glibc 2.28 and later.
//!
//! The glibc that a program needs is settled when it is linked. So the crates are those of the
//! ordinary release build, and zig links the program and the module for the older glibc. The C code
//! of the crates `blake3` and `ring` is compiled against this machine's headers;
//! `wheel_check.py` reads from the files in the wheel what they need. The program has NIXL, which it
//! loads where it finds it. zig compiles the C++ code of the crate `nixl-sys`, and links zig's own
//! C++ library into the program.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs, iter};

use anyhow::{Context, Result, ensure};

use crate::scripts::{self, NotToBeHad};
use crate::{nixl, shown, target};

/// Oldest glibc that the wheel and the packages run with: that of manylinux_2_28.
pub(crate) const GLIBC: &str = "2.28";
/// Folder of the program in the wheel: `data` in python/pyproject.toml, with `scripts`.
const SCRIPTS: &str = "python/lmc.data/scripts";

/// Builds the wheel and checks it. Whether all is well.
pub(crate) fn run() -> Result<bool> {
    let tools = match tools() {
        Ok(tools) => tools,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("wheel", &why)),
        Err(fault) => return Err(fault),
    };
    let wheel = build(&tools)?;
    let mut check = Command::new(tools.join("python"));
    check
        .args(["xtask/python/wheel_check.py", GLIBC])
        .arg(&wheel);
    let status = check.stdin(Stdio::null()).status();
    Ok(status.context("cannot run the checks")?.success())
}

/// Builds the wheel and installs it into a folder of its own, which is for PYTHONPATH and has the
/// program in `bin`.
///
/// # Errors
/// [`NotToBeHad`] where the tools cannot be had on this machine.
pub(crate) fn installed() -> Result<PathBuf> {
    let tools = tools()?;
    let wheel = build(&tools)?;
    let folder = target()?.join("python");
    let _ = fs::remove_dir_all(&folder);
    let mut pip = Command::new(tools.join("python"));
    pip.args(["-m", "pip", "--disable-pip-version-check", "install"])
        .args(["--quiet", "--no-index", "--target"])
        .args([&folder, &wheel]);
    shows(&mut pip)?;
    Ok(folder)
}

/// The folder of the programs that build the wheel, made when it is not there.
///
/// # Errors
/// [`NotToBeHad`] where they cannot be had on this machine.
pub(crate) fn tools() -> Result<PathBuf> {
    nixl::build_tools()?;
    let folder = scripts::set_up("xtask/python/wheel.sh", &[GLIBC])?;
    Ok(PathBuf::from(folder).join("bin"))
}

/// Builds the program for [`GLIBC`] and later. Returns its path.
pub(crate) fn program(tools: &Path) -> Result<PathBuf> {
    program_with(tools, &[])?;
    Ok(target()?.join("release/lmc"))
}

/// Builds the program from the same sources without optimization, for checks of an upgrade to a program
/// with other machine code. Returns its path.
pub(crate) fn other_program(tools: &Path) -> Result<PathBuf> {
    program_with(tools, &["-C", "opt-level=0"])?;
    let other = target()?.join("lmc-other");
    fs::copy(target()?.join("release/lmc"), &other)?;
    Ok(other)
}

/// Builds the program at target/release/lmc with further flags of rustc.
fn program_with(tools: &Path, flags: &[&str]) -> Result<()> {
    let mut program = Command::new("cargo");
    program
        .args(["rustc", "--release", "--locked"])
        .args([
            "--package",
            "lmc-server",
            "--bin",
            "lmc",
            "--features",
            "nixl",
        ])
        .args(["--", "-C", &linker(tools)])
        .args(flags)
        .env("PATH", compilers(tools)?)
        // Cargo compiles C++ code again when this changes, and not when `g++` does.
        .env("CXXFLAGS", "-DLMC_PACKAGE");
    shows(&mut program)
}

/// Returns the variable PATH with a `g++` that is zig: `nixl-sys` takes no other name.
fn compilers(tools: &Path) -> Result<OsString> {
    let path = env::var_os("PATH").unwrap_or_default();
    let folders = iter::once(tools.join("cxx")).chain(env::split_paths(&path));
    Ok(env::join_paths(folders)?)
}

/// Returns the flag of rustc by which it links for [`GLIBC`].
fn linker(tools: &Path) -> String {
    format!("linker={}", tools.join("zigcc").display())
}

/// Builds the wheel and returns its path.
pub(crate) fn build(tools: &Path) -> Result<PathBuf> {
    let built = program(tools)?;
    fs::create_dir_all(SCRIPTS)?;
    fs::copy(&built, Path::new(SCRIPTS).join("lmc"))
        .with_context(|| format!("no program at {}", built.display()))?;
    let wheels = target()?.join("wheels");
    let _ = fs::remove_dir_all(&wheels);
    let manylinux = format!("manylinux_{}", GLIBC.replace('.', "_"));
    let mut wheel = Command::new(tools.join("maturin"));
    wheel
        .args(["build", "--release", "--locked"])
        .args(["--manifest-path", "python/Cargo.toml"])
        .args(["--compatibility", &manylinux, "--interpreter"])
        .arg(tools.join("python"))
        .arg("--out")
        .arg(&wheels)
        .args(["--", "-C", &linker(tools)]);
    shows(&mut wheel)?;
    let found = fs::read_dir(&wheels)?
        .next()
        .context("maturin built no wheel")?;
    Ok(found?.path())
}

/// Shows a command and runs it to its end, with its output.
fn shows(command: &mut Command) -> Result<()> {
    let typed = shown::typed(command);
    println!("$ {typed}");
    let status = command.stdin(Stdio::null()).status();
    let status = status.with_context(|| format!("cannot run {typed}"))?;
    ensure!(status.success(), "{typed} failed: see above");
    Ok(())
}
