//! Notices to the service manager that started this process (`sd_notify` of systemd): start, stop, a line
//! of state, and pings of the watchdog.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use lmc_key::Printable;
use tokio::sync::watch;
use tracing::warn;

/// Longest wait for a service manager that does not read notices.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// A service manager. If the environment names none, every notice is dropped.
#[derive(Debug, Default)]
pub(crate) struct Supervisor {
    socket: Option<(UnixDatagram, SocketAddr)>,
    /// Time without a ping after which the manager kills this process.
    watchdog: Option<Duration>,
}

impl Supervisor {
    /// Returns the service manager that this process's environment names. Warns of a name that cannot be
    /// used: the server works without a manager.
    pub(crate) fn of_environment() -> Self {
        let variable = |name: &str| std::env::var_os(name);
        match Self::of(variable, std::process::id()) {
            Ok(supervisor) => supervisor,
            Err((name, error)) => {
                warn!(
                    "NOTIFY_SOCKET={} cannot be used: {error}; the service manager is not notified \
                     that this server is ready",
                    Printable(&name.to_string_lossy())
                );
                Self::default()
            }
        }
    }

    fn of(
        variable: impl Fn(&str) -> Option<OsString>,
        process: u32,
    ) -> Result<Self, (OsString, io::Error)> {
        let Some(name) = variable("NOTIFY_SOCKET").filter(|name| !name.is_empty()) else {
            return Ok(Self::default());
        };
        let number = |name: &str| variable(name)?.to_str()?.parse::<u64>().ok();
        // Without WATCHDOG_PID, the variables are for every process of the service.
        let is_ours = variable("WATCHDOG_PID").is_none()
            || number("WATCHDOG_PID") == Some(u64::from(process));
        let watchdog = number("WATCHDOG_USEC").filter(|&micros| is_ours && micros > 0);
        let socket = open(&name).map_err(|error| (name, error))?;
        Ok(Self {
            socket: Some(socket),
            watchdog: watchdog.map(Duration::from_micros),
        })
    }

    /// Reports that engines are served.
    pub(crate) fn ready(&self) {
        self.send("READY=1\nSTATUS=serving engines");
    }

    /// Reports that the start goes on, and asks the manager to wait for it for `extension`.
    pub(crate) fn starting(&self, what: &str, extension: Duration) {
        self.send(&format!("STATUS={what}\n{}", extended(extension)));
    }

    /// Reports that this process stops, and asks the manager not to kill it for `timeout`.
    pub(crate) fn stopping(&self, timeout: Duration) {
        self.send(&format!(
            "STOPPING=1\nSTATUS=stopping\n{}",
            extended(timeout)
        ));
    }

    /// Pings the watchdog, if there is one, after each `probe` that shows that engines are answered,
    /// until `stopped` turns true. The manager kills a server whose probes fail or do not return.
    pub(crate) async fn watch<F>(&self, probe: impl Fn() -> F, mut stopped: watch::Receiver<bool>)
    where
        F: Future<Output = Result<&'static str, String>>,
    {
        let Some(watchdog) = self.watchdog else {
            return;
        };
        // A probe takes up to four seconds on a server that is hardly alive.
        let mut every = tokio::time::interval(watchdog / 6);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut warned = false;
        loop {
            tokio::select! {
                _ = every.tick() => {}
                _ = stopped.wait_for(|&stop| stop) => return,
            }
            let probed = tokio::select! {
                probed = probe() => probed,
                _ = stopped.wait_for(|&stop| stop) => return,
            };
            match probed {
                Ok(condition) => {
                    warned = false;
                    self.send(&format!("WATCHDOG=1\nSTATUS=serving engines: {condition}"));
                }
                Err(reason) => {
                    self.send(&format!("STATUS=stuck: {}", Printable(&reason)));
                    if !std::mem::replace(&mut warned, true) {
                        warn!(
                            "the watchdog gets no ping: {reason}; the service manager kills this \
                             server after {} s without a ping, and starts it again",
                            watchdog.as_secs_f64()
                        );
                    }
                }
            }
        }
    }

    fn send(&self, notice: &str) {
        let Some((socket, address)) = &self.socket else {
            return;
        };
        if let Err(error) = socket.send_to_addr(notice.as_bytes(), address) {
            warn!("the service manager did not take a notice: {error}");
        }
    }
}

/// Opens the socket of a service manager: a path, or an abstract name after `@`.
fn open(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(name)?,
        _ => {
            let text = "expected a path that begins with /, or a name after @";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
    };
    let socket = UnixDatagram::unbound()?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    Ok((socket, address))
}

fn extended(time: Duration) -> String {
    format!("EXTEND_TIMEOUT_USEC={}", time.as_micros())
}

#[cfg(test)]
mod tests {
    use lmc_testkit::{DEADLINE, Folder};

    use super::*;

    /// A service manager's end of the socket.
    fn manager(address: &SocketAddr) -> UnixDatagram {
        let manager = UnixDatagram::bind_addr(address).expect("a free name");
        manager.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        manager
    }

    fn heard(manager: &UnixDatagram) -> String {
        let mut bytes = [0; 4096];
        let length = manager.recv(&mut bytes).expect("a notice");
        String::from_utf8_lossy(&bytes[..length]).into_owned()
    }

    /// The supervisor that variables name, in process 7.
    fn supervisor(variables: &[(&str, &str)]) -> Result<Supervisor, (OsString, io::Error)> {
        let variable = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| OsString::from(value))
        };
        Supervisor::of(variable, 7)
    }

    #[test]
    fn notices_reach_a_socket_with_a_path_and_one_without() {
        let folder = Folder::temporary();
        let path = folder.join("notify");
        let name = format!("lmc-supervisor-{}", std::process::id());
        let pathname = SocketAddr::from_pathname(&path).expect("a path");
        let unnamed = SocketAddr::from_abstract_name(&name).expect("a name");
        for (address, variable) in [
            (pathname, path.display().to_string()),
            (unnamed, format!("@{name}")),
        ] {
            let manager = manager(&address);
            let supervisor = supervisor(&[("NOTIFY_SOCKET", &variable)]).expect("a socket");
            supervisor.ready();
            assert_eq!(heard(&manager), "READY=1\nSTATUS=serving engines");
            supervisor.stopping(Duration::from_secs(15));
            assert_eq!(
                heard(&manager),
                "STOPPING=1\nSTATUS=stopping\nEXTEND_TIMEOUT_USEC=15000000"
            );
        }
    }

    #[test]
    fn variables_of_another_process_set_no_watchdog() {
        let watchdog = |process: &str, micros: &str| {
            let found = supervisor(&[
                ("NOTIFY_SOCKET", "/nowhere"),
                ("WATCHDOG_PID", process),
                ("WATCHDOG_USEC", micros),
            ]);
            found.expect("a name that can be used").watchdog
        };
        assert_eq!(watchdog("7", "30000000"), Some(Duration::from_secs(30)));
        assert_eq!(watchdog("8", "30000000"), None);
        assert_eq!(watchdog("7", "0"), None);
        assert_eq!(watchdog("7", "soon"), None);
        assert!(supervisor(&[]).expect("none").socket.is_none());
        let refused = supervisor(&[("NOTIFY_SOCKET", "vsock:2:1234")]);
        assert!(refused.is_err(), "{refused:?}");
    }

    /// Pings by the clock would keep a server alive that answers no engine.
    #[tokio::test(start_paused = true)]
    async fn the_watchdog_gets_no_ping_from_a_server_that_is_stuck() {
        let folder = Folder::temporary();
        let path = folder.join("notify");
        let manager = manager(&SocketAddr::from_pathname(&path).expect("a path"));
        let supervisor = supervisor(&[
            ("NOTIFY_SOCKET", path.to_str().expect("UTF-8")),
            ("WATCHDOG_USEC", "30000000"),
        ]);
        let supervisor = supervisor.expect("a socket");
        let (stop, stopped) = watch::channel(false);
        let probes = std::cell::Cell::new(0);
        let probe = || {
            probes.set(probes.get() + 1);
            let (number, stop) = (probes.get(), stop.clone());
            async move {
                match number {
                    1 => Ok("ok"),
                    2 => Err("no\nanswer".to_owned()),
                    _ => {
                        stop.send_replace(true);
                        std::future::pending().await
                    }
                }
            }
        };
        supervisor.watch(probe, stopped).await;
        assert_eq!(heard(&manager), "WATCHDOG=1\nSTATUS=serving engines: ok");
        let stuck = heard(&manager);
        assert!(stuck.starts_with("STATUS=stuck: no"), "{stuck}");
        assert_eq!(stuck.lines().count(), 1, "{stuck}");
        manager.set_nonblocking(true).expect("a socket");
        assert!(manager.recv(&mut [0; 10]).is_err(), "a notice too many");
    }
}
