//! Conditions of a measurement: machine, versions, time.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

/// Pairs of what and its value, for the page and the JSON, with LMCache's version.
pub(crate) fn list(lmcache: &str) -> Vec<(&'static str, String)> {
    let mut list = machine();
    list.insert(list.len() - 1, ("LMCache", version(lmcache)));
    list
}

/// Returns the conditions without LMCache.
pub(crate) fn machine() -> Vec<(&'static str, String)> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpus = read("/proc/cpuinfo");
    let field = |name: &str| {
        let line = cpus.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':')).map_or_else(
            || "unknown".to_owned(),
            |(_, value)| value.trim().to_owned(),
        )
    };
    let cores = cpus
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let memory = read("/proc/meminfo");
    let memory = memory.split_whitespace().nth(1).unwrap_or("0").to_owned();
    let gib = memory.parse::<f64>().unwrap_or_default() / f64::from(1 << 20);
    vec![
        ("date", output("date", &["-u", "+%Y-%m-%d %H:%M UTC"])),
        (
            "cpu",
            format!("{} (model {})", field("model name"), field("model\t")),
        ),
        ("cores", cores.to_string()),
        ("memory", format!("{gib:.0} GiB")),
        ("kernel", output("uname", &["-r"])),
        (
            "load before the run",
            read("/proc/loadavg")
                .split(' ')
                .next()
                .unwrap_or("")
                .to_owned(),
        ),
        ("lmc", output("git", &["describe", "--always", "--dirty"])),
        ("rustc", output("rustc", &["--version"])),
    ]
}

/// Returns the conditions as lines of a list.
pub(crate) fn lines(conditions: &[(&str, String)]) -> String {
    let line = |(what, value): &(&str, String)| format!("- {what}: {value}\n");
    conditions.iter().map(line).collect()
}

/// Returns the conditions as JSON, in their order.
pub(crate) fn json(conditions: &[(&str, String)]) -> Value {
    let pair = |(what, value): &(&str, String)| json!([what, value]);
    conditions.iter().map(pair).collect()
}

/// LMCache's version, from the environment that its program lies in.
fn version(lmcache: &str) -> String {
    let python = lmcache.replace("/lmcache", "/python");
    let code = "import importlib.metadata as m; print(m.version('lmcache'))";
    output(&python, &["-c", code])
}

pub(crate) fn output(program: &str, args: &[&str]) -> String {
    let text = Command::new(program).args(args).output();
    let text = text.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    text.ok()
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| "unknown".to_owned())
}
