//! CPU time of processes.

use std::fs;

use anyhow::{Context, Result};

/// Seconds of CPU that the threads of a process have used, those that have ended left out.
pub(crate) fn of(process: u32) -> Result<f64> {
    let mut nanos = 0;
    for task in fs::read_dir(format!("/proc/{process}/task"))? {
        // A thread may end meanwhile.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else {
            continue;
        };
        let first = text.split(' ').next().context("three numbers")?;
        nanos += first.parse::<u64>()?;
    }
    Ok(nanos as f64 / 1e9)
}
