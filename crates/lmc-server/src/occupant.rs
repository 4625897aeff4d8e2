//! Finds the process that listens on a TCP port, for the error of a second server.

use std::fs;
use std::path::Path;

use lmc_key::Printable;

/// A process that listens.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Occupant {
    pid: u32,
    command: String,
}

impl Occupant {
    /// Returns true if the process is a server of lmc.
    pub(crate) fn is_lmc(&self) -> bool {
        let mut words = self.command.split(' ');
        let program = words.next().and_then(|path| path.rsplit('/').next());
        program == Some("lmc")
            && words
                .next()
                .is_some_and(|word| ["serve", "server"].contains(&word))
    }

    /// Returns the process id.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }
}

impl std::fmt::Display for Occupant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "process {} ({})", self.pid, self.command)
    }
}

/// Returns the process that listens on a TCP port of this host, if this user can see it.
pub(crate) fn of_port(port: u16) -> Option<Occupant> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"]
        .iter()
        .find_map(|table| listener(&fs::read_to_string(table).unwrap_or_default(), port))?;
    let wanted = format!("socket:[{inode}]");
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok())
        else {
            continue;
        };
        let holds = |fd: fs::DirEntry| {
            fs::read_link(fd.path()).is_ok_and(|target| target == Path::new(&wanted))
        };
        let fds = fs::read_dir(entry.path().join("fd"));
        if fds.is_ok_and(|fds| fds.flatten().any(holds)) {
            return Some(Occupant {
                pid,
                command: command(pid),
            });
        }
    }
    None
}

/// Returns the process that an owner's record such as `pid 1234` names.
pub(crate) fn of_pid_text(owner: &str) -> Option<Occupant> {
    let pid = owner.strip_prefix("pid ")?.parse().ok()?;
    let command = command(pid);
    (!command.is_empty()).then_some(Occupant { pid, command })
}

fn command(pid: u32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    let text: String = text.trim().chars().take(120).collect();
    // The name of a process may hold any character.
    Printable(&text).to_string()
}

/// Returns the inode of the socket in state LISTEN (0A) on this port.
fn listener(table: &str, port: u16) -> Option<u64> {
    table.lines().skip(1).find_map(|line| {
        let columns: Vec<&str> = line.split_whitespace().collect();
        let local = columns.get(1)?.rsplit(':').next()?;
        let listens = columns.get(3) == Some(&"0A");
        let same = u16::from_str_radix(local, 16) == Ok(port);
        if listens && same {
            columns.get(9)?.parse().ok()
        } else {
            None
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_found_behind_its_port() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let found = of_port(socket.local_addr().unwrap().port()).expect("a listener");
        assert_eq!(found.pid, std::process::id());
        assert!(!found.command.is_empty());
    }
}
