//! CPU time, memory and open files of a process, from `/proc`.

use std::fs;

use rustix::process::{Resource, getrlimit};

/// Ticks of `utime` and `stime` a second; fixed at 100 for user space on Linux.
const TICKS: f64 = 100.0;

/// Resources that a process has used.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Usage {
    pub(crate) cpu_seconds: f64,
    /// Resident bytes of its own, without files and shared memory, so without the pool.
    pub(crate) anonymous_bytes: u64,
}

/// Returns the resources that process `pid` has used; `None` if this user cannot see the process.
pub(crate) fn usage(pid: u32) -> Option<Usage> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(Usage {
        cpu_seconds: cpu_seconds(&stat)?,
        anonymous_bytes: bytes_of(&status, "RssAnon:")?,
    })
}

/// State of this process.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct OwnProcess {
    pub(crate) cpu_seconds: f64,
    /// Resident bytes, with the pages of the pool.
    pub(crate) resident_bytes: u64,
    /// Time of the start in seconds since 1970.
    pub(crate) start_seconds: f64,
    pub(crate) open_files: u64,
    /// Limit on the open files.
    pub(crate) max_files: u64,
}

/// Returns the state of this process; `None` if `/proc` is not mounted.
pub(crate) fn own() -> Option<OwnProcess> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let of_host = fs::read_to_string("/proc/stat").ok()?;
    // The folder is open while it is read.
    let open_files = fs::read_dir("/proc/self/fd")
        .ok()?
        .count()
        .saturating_sub(1);
    Some(OwnProcess {
        cpu_seconds: cpu_seconds(&stat)?,
        resident_bytes: bytes_of(&status, "VmRSS:")?,
        start_seconds: start_seconds(&stat, &of_host)?,
        open_files: open_files as u64,
        max_files: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
    })
}

/// Returns the time of a process's start; `of_host` is `/proc/stat`.
fn start_seconds(stat: &str, of_host: &str) -> Option<f64> {
    let boot = of_host
        .lines()
        .find_map(|line| line.strip_prefix("btime "))?;
    let boot: f64 = boot.trim().parse().ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks: f64 = fields.split_whitespace().nth(19)?.parse().ok()?;
    Some(boot + ticks / TICKS)
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    // The name in parentheses may hold spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS)
}

/// Returns a size in `/proc/PID/status`.
fn bytes_of(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_proc_are_read() {
        let stat = "1 (a) b) S 1 1 1 0 -1 4194560 1 2 3 4 250 50 0 0 20 0 7 0 1250 99";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(start_seconds(stat, "cpu 1 2\nbtime 1000\n"), Some(1012.5));
        assert_eq!(
            bytes_of("RssAnon:\t    12 kB\n", "RssAnon:"),
            Some(12 << 10)
        );
        assert_eq!(cpu_seconds(""), None);
        let own = usage(std::process::id()).expect("this process can be seen");
        assert!(own.anonymous_bytes > 0);
        assert_eq!(usage(u32::MAX), None);
        let own = super::own().expect("/proc is mounted");
        assert!(own.resident_bytes > 0 && own.open_files >= 3);
        assert!(own.max_files >= own.open_files);
    }
}
