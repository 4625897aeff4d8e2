//! The signals that end the server, and signals that must not end it.

use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::Notify;
use tracing::info;

/// Signals that follow the first one within this time belong to it: `timeout` of coreutils sends
/// its own twice, a closed terminal sends SIGHUP to its shell's jobs and to its process group, and
/// systemd may send SIGHUP after SIGTERM.
const TOGETHER: Duration = Duration::from_secs(1);

/// The signals of this process, received from the start on.
///
/// SIGTERM and SIGINT end the server in order. If the server was started in a terminal, so does SIGHUP,
/// which means that the terminal is lost; elsewhere SIGHUP reads the settings again. SIGUSR1 and SIGUSR2
/// would kill the process by default and are ignored. SIGQUIT keeps its meaning, to end at once with a core
/// dump; Rust ignores SIGPIPE.
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// `None` if the parent process ignores SIGHUP, as `nohup` does.
    hang_up: Option<Signal>,
    has_terminal: bool,
    reload: Arc<Notify>,
    user: [Signal; 2],
    first: Option<Instant>,
}

impl Signals {
    pub(crate) fn new() -> Result<Self> {
        let on = |kind: SignalKind, name: &str| {
            signal(kind).with_context(|| format!("cannot wait for {name}"))
        };
        let hang_up = match is_ignored(libc::SIGHUP) {
            true => None,
            false => Some(on(SignalKind::hangup(), "SIGHUP")?),
        };
        Ok(Self {
            terminate: on(SignalKind::terminate(), "SIGTERM")?,
            interrupt: on(SignalKind::interrupt(), "SIGINT")?,
            hang_up,
            // Checked now: later the terminal may be gone.
            has_terminal: File::open("/dev/tty").is_ok(),
            reload: Arc::default(),
            user: [
                on(SignalKind::user_defined1(), "SIGUSR1")?,
                on(SignalKind::user_defined2(), "SIGUSR2")?,
            ],
            first: None,
        })
    }

    /// Returns the notification to read the settings again.
    pub(crate) fn reload(&self) -> Arc<Notify> {
        Arc::clone(&self.reload)
    }

    /// Waits for the signal that ends the server, and returns its name.
    pub(crate) async fn first(&mut self) -> &'static str {
        loop {
            match self.any().await {
                "SIGHUP" if !self.has_terminal => self.reload.notify_one(),
                name if name.starts_with("SIGUSR") => {}
                name => {
                    self.first = Some(Instant::now());
                    return name;
                }
            }
        }
    }

    /// Waits after the first signal for another one that ends the server at once: SIGTERM or SIGINT, at
    /// least [`TOGETHER`] after the first.
    pub(crate) async fn second(&mut self) -> &'static str {
        loop {
            let name = self.any().await;
            let apart = self.first.is_none_or(|first| first.elapsed() >= TOGETHER);
            if apart && matches!(name, "SIGTERM" | "SIGINT") {
                return name;
            }
        }
    }

    async fn any(&mut self) -> &'static str {
        let hang_up = async {
            match &mut self.hang_up {
                Some(signal) => signal.recv().await,
                None => std::future::pending().await,
            }
        };
        let [one, two] = &mut self.user;
        let name = tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
            _ = hang_up => "SIGHUP",
            _ = one.recv() => "SIGUSR1",
            _ = two.recv() => "SIGUSR2",
        };
        if name.starts_with("SIGUSR") {
            info!("{name} ignored: it has no meaning for this server");
        }
        name
    }
}

/// Returns true if this process was started with a signal ignored.
fn is_ignored(signal: libc::c_int) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
