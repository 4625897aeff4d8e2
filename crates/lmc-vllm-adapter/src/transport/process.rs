//! The processes that hold the other end of a connection and map the pool.
//!
//! The end of a connection says nothing of the process behind it: a proxy may have ended, or a
//! firewall cut in. The death of every process that holds the socket at the other end *and* has
//! the pool in its memory is proof. A proxy (docker-proxy, ssh) holds the socket and never maps
//! the pool, so it is no witness; where the kernel does not show the processes (another pid
//! namespace, another user, another host) there is none.

use std::fs;
use std::path::Path;

use super::pidfd::PidFd;
use crate::service::{Life, Witness};

/// A file that is mapped, as `/proc/PID/maps` names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MappedFile {
    device: String,
    inode: String,
}

impl MappedFile {
    /// The file that this process has mapped at an address.
    pub(super) fn at(address: usize) -> Option<Self> {
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines().find_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            let from = usize::from_str_radix(from, 16).ok()?;
            let to = usize::from_str_radix(to, 16).ok()?;
            (from..to).contains(&address).then(|| Self::of(line))?
        })
    }

    /// The file of one line; `None` for memory without one.
    fn of(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace().skip(3);
        let (device, inode) = (fields.next()?, fields.next()?);
        (inode != "0").then(|| Self {
            device: device.to_owned(),
            inode: inode.to_owned(),
        })
    }

    /// Returns true if a process has it mapped.
    fn is_mapped_by(&self, pid: u32) -> bool {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps"));
        let maps = maps.unwrap_or_default();
        maps.lines()
            .any(|line| Self::of(line).as_ref() == Some(self))
    }
}

#[derive(Debug)]
struct Process {
    pid: u32,
    handle: PidFd,
}

/// All processes that hold one socket and map the pool.
#[derive(Debug)]
pub(super) struct Holders {
    /// Inode of the socket.
    socket: u64,
    pool: MappedFile,
    processes: Vec<Process>,
}

impl Holders {
    /// Searches for them. `None` when none is visible. Reads `/proc` of every process,
    /// which takes milliseconds: for a thread that may wait.
    pub(super) fn find(socket: u64, pool: MappedFile) -> Option<Self> {
        let processes = find(socket, &pool);
        (!processes.is_empty()).then_some(Self {
            socket,
            pool,
            processes,
        })
    }
}

impl Witness for Holders {
    fn life(&self) -> Life {
        let living = |process: &&Process| !process.handle.is_dead();
        let mut living = self.processes.iter().filter(living).peekable();
        if living.peek().is_none() {
            // A child that was forked after the search has the socket and the pool, too.
            return match find(self.socket, &self.pool).is_empty() {
                true => Life::Dead,
                false => Life::Running,
            };
        }
        match living.any(|process| is_stopped(process.pid)) {
            true => Life::Stopped,
            false => Life::Running,
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(|process| process.pid).collect()
    }
}

fn find(socket: u64, pool: &MappedFile) -> Vec<Process> {
    let held = format!("socket:[{socket}]");
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let open = |pid: u32| {
        if !holds(pid, &held) || !pool.is_mapped_by(pid) {
            return None;
        }
        let handle = PidFd::open(pid).ok()?;
        // Its number may have gone to another process before it was opened.
        (holds(pid, &held) && !handle.is_dead()).then_some(Process { pid, handle })
    };
    pids.filter_map(open).collect()
}

/// Returns true if a process holds a socket open.
fn holds(pid: u32, socket: &str) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd"));
    let mut open = open.into_iter().flatten().flatten();
    open.any(|entry| fs::read_link(entry.path()).is_ok_and(|link| link == Path::new(socket)))
}

/// Returns true if a process is stopped by a signal or a debugger, or frozen with its control
/// group, as by `docker pause`.
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the command's name, which may hold anything.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't')) || is_frozen(pid)
}

fn is_frozen(pid: u32) -> bool {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    groups.lines().any(|line| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next(), fields.next(), fields.next());
        let path = path.unwrap_or_default();
        let read = |file: String| fs::read_to_string(file).unwrap_or_default();
        match controllers {
            // The hierarchy of version 2, wherever it is mounted.
            Some("") => ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                .iter()
                .any(|root| read(format!("{root}{path}/cgroup.events")).contains("frozen 1")),
            Some("freezer") => {
                let state = read(format!("/sys/fs/cgroup/freezer{path}/freezer.state"));
                matches!(state.trim(), "FROZEN" | "FREEZING")
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f1c2a000000-7f1c6a000000 rw-s 00000000 00:1a 12345    /dev/shm/lmc_5555";
        let file = MappedFile::of(line).expect("a file");
        assert_eq!((&*file.device, &*file.inode), ("00:1a", "12345"));
        let anonymous = "7ffd0000-7ffe0000 rw-p 00000000 00:00 0    [stack]";
        assert_eq!(MappedFile::of(anonymous), None);
    }

    #[test]
    fn memory_without_a_file_has_no_witness() {
        let on_the_heap = Box::new(1);
        let address = std::ptr::from_ref(&*on_the_heap).addr();
        assert_eq!(MappedFile::at(address), None);
        assert_eq!(MappedFile::at(0), None);
    }
}
