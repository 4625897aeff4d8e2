//! CPU time of processes.

use std::fs;

use crate::Failure;

/// Seconds of CPU of this process so far.
pub(crate) fn own() -> Result<f64, Failure> {
    of(Some(std::process::id()))
}

/// Returns the CPU seconds of a process; 0 for none.
pub(crate) fn of(process: Option<u32>) -> Result<f64, Failure> {
    let Some(process) = process else {
        return Ok(0.0);
    };
    let text = fs::read_to_string(format!("/proc/{process}/stat"))?;
    // After the name, which may hold anything: fields 14 and 15, in 1/100 s.
    let (_, fields) = text.rsplit_once(") ").ok_or("a name in brackets")?;
    let mut fields = fields.split(' ').skip(14 - 3);
    let mut next = || -> Result<f64, Failure> { Ok(fields.next().ok_or("52 fields")?.parse()?) };
    Ok((next()? + next()?) / 100.0)
}
