//! Hosts without a driver, or with an old one.

use std::fs;

use lmc_testkit::{Folder, Process};

use super::*;

const VARIABLE: &str = "LMC_TEST_CUDA_LIBRARY";

/// Runs a test in a process that looks for the driver in `folder` first.
fn run_with(folder: &Folder, test: impl Fn()) {
    let mut command = own_test(test);
    command.env("LD_LIBRARY_PATH", &**folder).env(VARIABLE, "1");
    let mut process = Process::spawn(&mut command);
    let status = process.wait();
    assert!(status.success(), "{status}");
}

fn opened() -> super::super::driver::Result<()> {
    Gpus::new(arena()).open(UUIDS[0]).map(drop)
}

#[test]
fn a_host_without_a_driver_says_so() {
    if std::env::var_os(VARIABLE).is_none() {
        return run_with(&Folder::temporary(), a_host_without_a_driver_says_so);
    }
    let opened = opened();
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    match maps.contains("/libcuda.so") {
        true => println!("skipped: this host has a driver"),
        false => assert_eq!(opened, Err(CudaError::NoDriver)),
    }
}

/// The fake without one of its functions: another name lies where that of the function did.
#[test]
fn a_driver_that_is_too_old_is_refused() {
    const MISSING: &str = "cuIpcOpenEventHandle";
    if std::env::var_os(VARIABLE).is_some() {
        let old = CudaError::Old { function: MISSING };
        assert_eq!(opened(), Err(old));
        return;
    }
    let machine = Machine::new();
    let [.., (_, path)] = machine.envs();
    let mut folders = std::env::split_paths(&path);
    let fake = folders.next().unwrap().join("libcuda.so");
    let mut library = fs::read(fake).unwrap();
    let name = [b"\0", MISSING.as_bytes(), b"\0"].concat();
    let mut windows = library.windows(name.len());
    let found = windows.position(|window| window == name).unwrap();
    library[found + 1] = b'_';
    let folder = Folder::temporary();
    fs::write(folder.join("libcuda.so"), library).unwrap();
    run_with(&folder, a_driver_that_is_too_old_is_refused);
}
