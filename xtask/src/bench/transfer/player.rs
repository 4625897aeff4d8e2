//! Players, which move batches: programs that are asked for one measurement after another.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;

use super::BatchShape;
use crate::ucx::{self, Nixl};
use crate::{ports, shown, two_sides};

const GIB: f64 = (1 << 30) as f64;
/// Longest silence of a player beyond the time that it was asked to take.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Time that a player has to end.
const GRACE: Duration = Duration::from_secs(10);

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(in crate::bench) struct Sample {
    pub(in crate::bench) gib_per_s: f64,
    /// CPU seconds per GiB of the side that drives and of the other.
    pub(in crate::bench) cpu_s_per_gib: (f64, f64),
    /// Seconds that a batch took; `None` where batches are not measured apart.
    pub(in crate::bench) p50: Option<f64>,
    pub(in crate::bench) p99: Option<f64>,
}

impl Sample {
    /// Returns the speed in GB/s.
    pub(in crate::bench) fn gb_per_s(&self) -> f64 {
        self.gib_per_s * GIB / 1e9
    }

    fn new(bytes: f64, seconds: f64, cpu: (f64, f64)) -> Self {
        let gib = bytes / GIB;
        Self {
            gib_per_s: gib / seconds,
            cpu_s_per_gib: (cpu.0 / gib, cpu.1 / gib),
            p50: None,
            p99: None,
        }
    }
}

/// The example `transfer_speed` as one of its kinds, with its other process.
pub(in crate::bench) struct Player {
    child: Child,
    /// Standard input of the process; `None` once the process is to end.
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    who: String,
}

impl Player {
    pub(in crate::bench) fn start(
        program: &Path,
        who: &str,
        variables: &[(String, String)],
    ) -> Result<Self> {
        let mut command = Command::new(program);
        command.args(["drive", who]);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        Self::run(command, who)
    }

    /// Starts a program that obeys lines as the example does.
    pub(in crate::bench) fn run(mut command: Command, who: &str) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().with_context(|| format!("{command:?}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().context("it is piped")?;
        let mut player = Self {
            child,
            input,
            lines: two_sides::lines(output, io::sink()),
            who: who.to_owned(),
        };
        player.hear(0.0)?;
        Ok(player)
    }

    /// The next line of one that was asked to take so many seconds.
    fn hear(&mut self, seconds: f64) -> Result<Value> {
        let limit = limit(seconds);
        let line = match self.lines.recv_timeout(limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) => bail!("{} has ended: see above", self.who),
            Err(RecvTimeoutError::Timeout) => {
                shown::end(&mut self.child);
                bail!("{} said nothing for {limit:?}, and was killed", self.who);
            }
        };
        serde_json::from_str(&line).with_context(|| format!("{} said {line:?}", self.who))
    }

    /// Asks it to do something that takes about `seconds`. Returns its answer.
    pub(in crate::bench) fn ask(&mut self, line: &str, seconds: f64) -> Result<Value> {
        let input = self.input.as_mut().context("it was asked to end")?;
        writeln!(input, "{line}")?;
        let answer = self.hear(seconds);
        answer.with_context(|| format!("{} was asked to {line}", self.who))
    }

    pub(in crate::bench) fn measure(
        &mut self,
        way: &str,
        batch: BatchShape,
        seconds: f64,
    ) -> Result<Sample> {
        let BatchShape { count, len } = batch;
        let found = self.ask(&format!("move {way} {count} {len} {seconds}"), seconds)?;
        let number = |name: &str| found[name].as_f64().with_context(|| name.to_owned());
        let cpu = (number("cpu_here")?, number("cpu_there")?);
        Ok(Sample {
            p50: Some(number("p50")?),
            p99: Some(number("p99")?),
            ..Sample::new(number("bytes")?, number("seconds")?, cpu)
        })
    }

    /// The share of a core that each side uses while nothing is asked of it.
    pub(in crate::bench) fn idle(&mut self, seconds: f64) -> Result<(f64, f64)> {
        let found = self.ask(&format!("idle {seconds}"), seconds)?;
        let number = |name: &str| found[name].as_f64().with_context(|| name.to_owned());
        let seconds = number("seconds")?;
        Ok((
            number("cpu_here")? / seconds,
            number("cpu_there")? / seconds,
        ))
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        // The end of its input is what tells it to end.
        drop(self.input.take());
        let _ = shown::wait(&mut self.child, GRACE);
    }
}

/// The environment of players over NIXL. UCX logs to files of this folder.
pub(in crate::bench) fn nixl_variables(
    nixl: &Nixl,
    tls: &str,
    logs: &Path,
) -> Vec<(String, String)> {
    // `%p` is the number of the process to UCX.
    let mut variables = nixl.variables(tls, Some("lo"), logs, "%p");
    // The bare player has nothing that looks for the library.
    let folder = nixl.library().parent().map(|f| f.display().to_string());
    variables.push(("LD_LIBRARY_PATH".to_owned(), folder.unwrap_or_default()));
    variables
}

/// Checks that UCX used the transport that was meant, by what it logged.
pub(in crate::bench) fn expect_transport(logs: &Path, transport: &str) -> Result<()> {
    let mut said = 0;
    for entry in fs::read_dir(logs)? {
        let log = fs::read_to_string(entry?.path())?;
        if !ucx::configurations(&log).is_empty() {
            ucx::expect(&log, transport)?;
            said += 1;
        }
    }
    ensure!(said > 0, "UCX does not say how it reached any peer");
    Ok(())
}

/// Longest silence of who was asked to take so many seconds.
fn limit(seconds: f64) -> Duration {
    TIMEOUT + Duration::from_secs_f64(seconds)
}

/// iperf3 with so many streams, each write of it as long as an object, 1 MiB at most.
pub(in crate::bench) fn iperf(
    streams: u32,
    way: &str,
    batch: BatchShape,
    seconds: f64,
) -> Result<Sample> {
    let port = ports::free()?.to_string();
    let server = Command::new("iperf3")
        .args(["-s", "-1", "-p", &port])
        .stdout(Stdio::null())
        .spawn()
        .context("iperf3")?;
    let _server = Ended(server);
    let mut client = Command::new("iperf3");
    client.args(["-c", "127.0.0.1", "-p", &port, "-J"]);
    client.args(["-P", &streams.to_string()]);
    client.args(["-l", &batch.len.min(1 << 20).to_string()]);
    // It takes whole seconds.
    client.args(["-t", &seconds.ceil().to_string()]);
    if way == "read" {
        client.arg("-R");
    }
    for _ in 0..50 {
        let why = match shown::capture(&mut client, limit(seconds)) {
            Ok(text) => {
                let found: Value = serde_json::from_str(&text).context("iperf3 printed no JSON")?;
                // Some versions end well with an error.
                match found["error"].as_str() {
                    None => return parse_iperf(&found),
                    Some(error) => anyhow!("iperf3: {error}"),
                }
            }
            Err(why) => why,
        };
        if !format!("{why:#}").contains("refused") {
            return Err(why);
        }
        thread::sleep(Duration::from_millis(100));
    }
    bail!("iperf3's server does not listen")
}

fn parse_iperf(found: &Value) -> Result<Sample> {
    let number = |path: &str| {
        let number = found.pointer(path).and_then(Value::as_f64);
        number.with_context(|| format!("iperf3 tells no {path}"))
    };
    let seconds = number("/end/sum_received/seconds")?;
    let share = |side: &str| number(&format!("/end/cpu_utilization_percent/{side}_total"));
    let cpu = |side: &str| Ok::<f64, anyhow::Error>(share(side)? / 100.0 * seconds);
    let bytes = number("/end/sum_received/bytes")?;
    Ok(Sample::new(bytes, seconds, (cpu("host")?, cpu("remote")?)))
}

/// A process that ends with the measurement.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        shown::end(&mut self.0);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_iperf3_prints_is_read() {
        let printed = json!({"end": {
            "sum_received": {"bytes": 4294967296.0, "seconds": 2.0},
            "cpu_utilization_percent": {"host_total": 50.0, "remote_total": 100.0},
        }});
        let sample = parse_iperf(&printed).expect("all of it is there");
        assert_eq!(sample.gib_per_s, 2.0);
        assert_eq!(sample.cpu_s_per_gib, (0.25, 0.5));
        assert!(parse_iperf(&json!({"end": {}})).is_err());
    }
}
