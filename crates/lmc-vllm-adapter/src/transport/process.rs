//! Finds the processes that have the other end of a connection open and map the pool.
//!
//! The end of a connection does not prove that its process is dead: a proxy may have ended, or a
//! firewall may have closed the connection. The death of every process that has the socket at the
//! other end open *and* maps the pool is proof. A proxy (docker-proxy, ssh) has the socket open but
//! never maps the pool, so it does not count. If the kernel does not show the processes (another
//! pid namespace, user or host), there is no proof.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::net::UnixStream;

use super::peer;
use super::pidfd::PidFd;
use crate::peer::{Life, Witness};

/// A mapped file, by device and inode as in `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MappedFile {
    device: String,
    inode: String,
}

impl MappedFile {
    /// Returns the file that this process maps at an address.
    pub(super) fn at(address: usize) -> Option<Self> {
        let maps = fs::read_to_string("/proc/self/maps").ok()?;
        maps.lines().find_map(|line| {
            let (from, to) = line.split_whitespace().next()?.split_once('-')?;
            let from = usize::from_str_radix(from, 16).ok()?;
            let to = usize::from_str_radix(to, 16).ok()?;
            (from..to).contains(&address).then(|| Self::of(line))?
        })
    }

    /// Parses the file of one line; `None` for memory without a file.
    fn of(line: &str) -> Option<Self> {
        let mut fields = line.split_whitespace().skip(3);
        let (device, inode) = (fields.next()?, fields.next()?);
        (inode != "0").then(|| Self {
            device: device.to_owned(),
            inode: inode.to_owned(),
        })
    }

    /// Returns true if a process maps the file.
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

/// The process that connected a Unix socket and was passed the pool over it.
///
/// The socket alone identifies the process (`SO_PEERPIDFD`), so it is known in another PID
/// namespace too, which `/proc` does not show. Only lmc's own client takes the pool; it maps the
/// pool and copies in the process that connected. A proxy does not pass descriptors on: a client
/// behind one connects again and does not take the pool. Threads that copy do not survive a fork.
#[derive(Debug)]
pub(super) struct PoolTaker {
    /// `None` in another PID namespace.
    pid: Option<u32>,
    handle: PidFd,
}

impl PoolTaker {
    /// Returns the process; `None` if the kernel does not identify it (before Linux 6.5).
    pub(super) fn of(stream: &UnixStream) -> Option<Self> {
        Some(Self {
            handle: PidFd::of_peer(stream).ok()?,
            pid: peer::pid_of(stream),
        })
    }
}

impl Witness for PoolTaker {
    fn life(&self) -> Life {
        // The id may be used again once the process is dead.
        let stopped = self.pid.is_some_and(is_stopped);
        match self.handle.is_dead() {
            true => Life::Dead,
            false if stopped => Life::Stopped,
            false => Life::Running,
        }
    }

    fn pids(&self) -> Vec<u32> {
        self.pid.into_iter().collect()
    }
}

/// All processes that have one socket open and map the pool.
#[derive(Debug)]
pub(super) struct Holders {
    /// Inode of the socket.
    socket: u64,
    pool: MappedFile,
    known: Mutex<KnownProcesses>,
}

#[derive(Debug)]
struct KnownProcesses {
    processes: Vec<Process>,
    /// Time at which all processes were first seen dead.
    dead: Option<Instant>,
}

impl KnownProcesses {
    /// Returns the time at which all processes were first seen dead.
    fn dead(&mut self) -> Option<Instant> {
        if self.dead.is_none()
            && self
                .processes
                .iter()
                .all(|process| process.handle.is_dead())
        {
            self.dead = Some(Instant::now());
        }
        self.dead
    }
}

impl Holders {
    /// Searches for the processes; `None` if none is visible. Blocks for milliseconds, because it
    /// reads `/proc` of every process.
    pub(super) fn find(socket: u64, pool: MappedFile) -> Option<Self> {
        let processes = find(socket, &pool, Instant::now());
        let known = KnownProcesses {
            processes,
            dead: None,
        };
        (!known.processes.is_empty()).then_some(Self {
            socket,
            pool,
            known: Mutex::new(known),
        })
    }
}

impl Witness for Holders {
    fn look(&self) {
        self.known.lock().dead();
    }

    fn life(&self) -> Life {
        let dead = self.known.lock().dead();
        if let Some(dead) = dead {
            // A child that was forked after the search has the socket and the pool too. The lock is
            // not held during the scan, so that status requests do not wait for it.
            let others = find(self.socket, &self.pool, dead);
            if others.is_empty() {
                return Life::Dead;
            }
            *self.known.lock() = KnownProcesses {
                processes: others,
                dead: None,
            };
        }
        let known = self.known.lock();
        let mut living = known.processes.iter().filter(|p| !p.handle.is_dead());
        match living.any(|process| is_stopped(process.pid)) {
            true => Life::Stopped,
            false => Life::Running,
        }
    }

    fn pids(&self) -> Vec<u32> {
        let known = self.known.lock();
        known.processes.iter().map(|process| process.pid).collect()
    }
}

/// Finds the processes that have a socket open and map the pool, with a scan that began after
/// `after`.
fn find(socket: u64, pool: &MappedFile, after: Instant) -> Vec<Process> {
    let open = |pid: u32| {
        if !pool.is_mapped_by(pid) {
            return None;
        }
        let handle = PidFd::open(pid).ok()?;
        // The id may have been reused before the handle was opened, so the socket is checked again.
        let holds = sockets_of(pid).any(|held| held == socket);
        (holds && !handle.is_dead()).then_some(Process { pid, handle })
    };
    let pids = Scan::begun_after(after, |scan| scan.holders.get(&socket).cloned());
    pids.into_iter().flatten().filter_map(open).collect()
}

/// Result of one scan of `/proc`: the sockets of all processes that the kernel shows.
///
/// A scan takes milliseconds to seconds, and an engine that dies ends many connections at once, so
/// all callers that asked before a scan began share its result.
#[derive(Debug)]
struct Scan {
    began: Instant,
    /// Ids of the processes that have a socket open, by the socket's inode.
    holders: HashMap<u64, Vec<u32>>,
}

static LAST_SCAN: Mutex<Option<Scan>> = Mutex::new(None);

impl Scan {
    fn begun_after<T>(after: Instant, read: impl FnOnce(&Self) -> T) -> T {
        let mut last = LAST_SCAN.lock();
        let fresh = last.take().filter(|scan| scan.began > after);
        read(last.insert(fresh.unwrap_or_else(Self::now)))
    }

    fn now() -> Self {
        let began = Instant::now();
        let mut holders: HashMap<u64, Vec<u32>> = HashMap::new();
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for pid in pids {
            for socket in sockets_of(pid) {
                let of_socket = holders.entry(socket).or_default();
                if of_socket.last() != Some(&pid) {
                    of_socket.push(pid);
                }
            }
        }
        Self { began, holders }
    }
}

/// Returns the inodes of the sockets that a process has open.
fn sockets_of(pid: u32) -> impl Iterator<Item = u64> {
    let open = fs::read_dir(format!("/proc/{pid}/fd"));
    let open = open.into_iter().flatten().flatten();
    open.filter_map(|entry| {
        let link = fs::read_link(entry.path()).ok()?;
        let inode = link.to_str()?.strip_prefix("socket:[")?;
        inode.strip_suffix(']')?.parse().ok()
    })
}

/// Returns true if a process is stopped by a signal or a debugger, or frozen with its control
/// group (`docker pause`).
fn is_stopped(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the command's name, which may contain any character.
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
            // Control groups version 2, at either usual mount point.
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
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn lines_of_proc_maps_are_parsed() {
        let line = "7f1c2a000000-7f1c6a000000 rw-s 00000000 00:1a 12345    /dev/shm/lmc_5555";
        let file = MappedFile::of(line).expect("a file");
        assert_eq!((&*file.device, &*file.inode), ("00:1a", "12345"));
        let anonymous = "7ffd0000-7ffe0000 rw-p 00000000 00:00 0    [stack]";
        assert_eq!(MappedFile::of(anonymous), None);
    }

    #[test]
    fn callers_that_asked_before_a_scan_began_share_it() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let link =
            fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).expect("its link");
        let link = link.to_str().expect("text");
        let digits = link.chars().filter(char::is_ascii_digit);
        let inode: u64 = digits.collect::<String>().parse().expect("an inode");
        let asked = Instant::now();
        let (first, pids) = Scan::begun_after(asked, |w| (w.began, w.holders[&inode].clone()));
        assert_eq!(pids, [std::process::id()]);
        assert_eq!(Scan::begun_after(asked, |scan| scan.began), first);
        assert_ne!(Scan::begun_after(first, |scan| scan.began), first);
    }

    #[test]
    fn memory_without_a_file_is_no_mapped_file() {
        let on_the_heap = Box::new(1);
        let address = std::ptr::from_ref(&*on_the_heap).addr();
        assert_eq!(MappedFile::at(address), None);
        assert_eq!(MappedFile::at(0), None);
    }
}
