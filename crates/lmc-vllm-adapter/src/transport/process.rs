//! The processes that hold the other end of a connection and map the pool.
//!
//! The end of a connection says nothing of the process behind it: a proxy may have ended, or a
//! firewall cut in. The death of every process that holds the socket at the other end *and* has
//! the pool in its memory is proof. A proxy (docker-proxy, ssh) holds the socket and never maps
//! the pool, so it is no witness; where the kernel does not show the processes (another pid
//! namespace, another user, another host) there is none.

use std::collections::HashMap;
use std::fs;
use std::time::Instant;

use parking_lot::Mutex;

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
    known: Mutex<KnownProcesses>,
}

#[derive(Debug)]
struct KnownProcesses {
    processes: Vec<Process>,
    /// Time at which all of them were first seen dead.
    dead: Option<Instant>,
}

impl KnownProcesses {
    /// Returns the time at which all of them were first seen dead.
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
    /// Searches for them. `None` when none is visible. Reads `/proc` of every process,
    /// which takes milliseconds: for a thread that may wait.
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
            // A child that was forked after the search has the socket and the pool, too. Requests
            // that ask for the pids do not wait for the walk.
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

/// Finds the processes that hold a socket and map the pool, in a walk that began after `after`.
fn find(socket: u64, pool: &MappedFile, after: Instant) -> Vec<Process> {
    let open = |pid: u32| {
        if !pool.is_mapped_by(pid) {
            return None;
        }
        let handle = PidFd::open(pid).ok()?;
        // Its number may have gone to another process before it was opened.
        let holds = sockets_of(pid).any(|held| held == socket);
        (holds && !handle.is_dead()).then_some(Process { pid, handle })
    };
    let pids = Walk::begun_after(after, |walk| walk.holders.get(&socket).cloned());
    pids.into_iter().flatten().filter_map(open).collect()
}

/// The sockets of all processes that the kernel shows, as one walk over `/proc` found them.
///
/// A walk takes milliseconds to seconds, and an engine that dies ends many connections at once, so
/// one walk answers all who asked before it began.
#[derive(Debug)]
struct Walk {
    began: Instant,
    /// Processes that hold each socket, by the socket's inode.
    holders: HashMap<u64, Vec<u32>>,
}

static LAST_WALK: Mutex<Option<Walk>> = Mutex::new(None);

impl Walk {
    fn begun_after<T>(after: Instant, read: impl FnOnce(&Self) -> T) -> T {
        let mut last = LAST_WALK.lock();
        let fresh = last.take().filter(|walk| walk.began > after);
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

/// Returns the inodes of the sockets that a process holds open.
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
    use std::net::UdpSocket;
    use std::os::fd::AsRawFd;

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
    fn one_walk_answers_all_who_asked_before_it_began() {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let link =
            fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).expect("its link");
        let link = link.to_str().expect("text");
        let digits = link.chars().filter(char::is_ascii_digit);
        let inode: u64 = digits.collect::<String>().parse().expect("an inode");
        let asked = Instant::now();
        let (first, pids) = Walk::begun_after(asked, |w| (w.began, w.holders[&inode].clone()));
        assert_eq!(pids, [std::process::id()]);
        assert_eq!(Walk::begun_after(asked, |walk| walk.began), first);
        assert_ne!(Walk::begun_after(first, |walk| walk.began), first);
    }

    #[test]
    fn memory_without_a_file_has_no_witness() {
        let on_the_heap = Box::new(1);
        let address = std::ptr::from_ref(&*on_the_heap).addr();
        assert_eq!(MappedFile::at(address), None);
        assert_eq!(MappedFile::at(0), None);
    }
}
