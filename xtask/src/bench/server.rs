//! A server under measurement: started, waited for, stopped.

use std::fs::File;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::{ports, shown};

/// One of the two servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Lmc,
    Baseline,
}

impl Kind {
    pub(crate) const BOTH: [Self; 2] = [Self::Lmc, Self::Baseline];
}

/// The server that lmc is compared with, and the path of its program.
#[derive(Debug, Clone)]
pub(crate) enum Baseline {
    LmCache(String),
    /// An lmc of an earlier commit.
    Earlier(String),
}

impl Baseline {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::LmCache(_) => "LMCache",
            Self::Earlier(_) => "earlier lmc",
        }
    }
}

/// Paths of the programs.
#[derive(Debug, Clone)]
pub(crate) struct Programs {
    pub(crate) lmc: String,
    pub(crate) baseline: Baseline,
}

impl Programs {
    pub(crate) fn name(&self, kind: Kind) -> &'static str {
        match kind {
            Kind::Lmc => "lmc",
            Kind::Baseline => self.baseline.name(),
        }
    }
}

/// A running server.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    pub(crate) http: u16,
    /// Time from the start of the process to the first connection that was accepted.
    pub(crate) start: Duration,
}

const START_DEADLINE: Duration = Duration::from_secs(120);
const STOP_DEADLINE: Duration = Duration::from_secs(15);

impl Server {
    pub(crate) fn start(kind: Kind, programs: &Programs, log: &str) -> Result<Self> {
        Self::start_with(kind, programs, log, &[])
    }

    /// Starts it with further flags.
    pub(crate) fn start_with(
        kind: Kind,
        programs: &Programs,
        log: &str,
        flags: &[&str],
    ) -> Result<Self> {
        let (port, http) = (ports::free()?, ports::free()?);
        let mut command = match (kind, &programs.baseline) {
            (Kind::Lmc, _) => {
                let mut command = Command::new(&programs.lmc);
                command.arg("serve");
                command
            }
            (Kind::Baseline, Baseline::Earlier(program)) => {
                let mut command = Command::new(program);
                command.arg("serve");
                command
            }
            (Kind::Baseline, Baseline::LmCache(program)) => {
                let mut command = Command::new(program);
                command.arg("server");
                command.args(["--eviction-policy", "LRU", "--no-l1-use-lazy"]);
                // Its default serves lmcache_driven workers only.
                command.args(["--supported-transfer-mode", "auto"]);
                // Without these it never answers an engine-driven registration.
                command.args(["--supported-transfer-mode", "auto"]);
                command.args(["--shm-name", &format!("lmc_bench_peer_{port}")]);
                command
            }
        };
        command
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--http-port", &http.to_string()])
            .args(["--l1-size-gb", "2", "--chunk-size", "256"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(File::create(log)?)
            .stderr(File::options().append(true).open(log)?);
        let name = programs.name(kind);
        let started = Instant::now();
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name}"))?;
        let mut server = Self {
            child,
            port,
            http,
            start: Duration::ZERO,
        };
        server.await_port(name, port, started, log)?;
        server.start = started.elapsed();
        // LMCache's HTTP side comes later than its engines' side.
        server.await_port(name, http, started, log)?;
        Ok(server)
    }

    fn await_port(&mut self, name: &str, port: u16, started: Instant, log: &str) -> Result<()> {
        let listening = listens(&mut self.child, port, started + START_DEADLINE);
        listening.with_context(|| format!("{name}, whose log is {log}"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to stop, and waits.
    pub(crate) fn stop(mut self) -> Result<()> {
        let pid = self.child.id().to_string();
        Command::new("kill").args(["-TERM", &pid]).status()?;
        let _ = shown::wait(&mut self.child, STOP_DEADLINE);
        Ok(())
    }
}

/// Waits until a server accepts connections at a port.
pub(crate) fn listens(child: &mut Child, port: u16, deadline: Instant) -> Result<()> {
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        if let Some(status) = child.try_wait()? {
            bail!("ended with {status}");
        }
        ensure!(Instant::now() < deadline, "does not listen at port {port}");
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

impl Drop for Server {
    fn drop(&mut self) {
        shown::end(&mut self.child);
    }
}
