//! CPU time and memory of a process, from `/proc`.

use std::fs;

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
        anonymous_bytes: anonymous_bytes(&status)?,
    })
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    // The name in parentheses may hold spaces and parentheses.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut fields = fields.split_whitespace().skip(11);
    let user: f64 = fields.next()?.parse().ok()?;
    let system: f64 = fields.next()?.parse().ok()?;
    Some((user + system) / TICKS)
}

fn anonymous_bytes(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_proc_are_read() {
        let stat = "1 (a) b) S 1 1 1 0 -1 4194560 1 2 3 4 250 50 0 0 20 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(anonymous_bytes("RssAnon:\t    12 kB\n"), Some(12 << 10));
        assert_eq!(cpu_seconds(""), None);
        let own = usage(std::process::id()).expect("this process can be seen");
        assert!(own.anonymous_bytes > 0);
        assert_eq!(usage(u32::MAX), None);
    }
}
