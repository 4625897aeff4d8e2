//! Tests of real servers that need a program which is fetched first: `cargo xtask test-alerts` and
//! `cargo xtask test-page`.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::built::Built;
use crate::outcomes::Outcomes;
use crate::scripts::{self, NotToBeHad};
use crate::shown;

/// Time for the tests of one kind: each starts servers and waits for what they see.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs the tests of the alert rules and boards, by Prometheus' own tool. Returns true if all is well.
pub(crate) fn run_alerts() -> Result<bool> {
    run("alerts", "xtask/python/prometheus.sh", |folder| {
        vec![
            ("LMC_PROMTOOL", folder.join("promtool")),
            ("LMC_LMCACHE_BOARD", folder.join("lmcache.json")),
        ]
    })
}

/// Runs the tests of the page, in Chromium. Returns true if all is well.
pub(crate) fn run_page() -> Result<bool> {
    run("browser", "xtask/python/browser.sh", |folder| {
        vec![("LMC_TEST_BROWSER", folder.to_owned())]
    })
}

/// Runs the ignored tests of a module, with variables for what a script has set up.
fn run(
    module: &str,
    script: &str,
    variables: impl Fn(&Path) -> Vec<(&'static str, std::path::PathBuf)>,
) -> Result<bool> {
    let folder = match scripts::set_up(script, &[]) {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped(module, &why)),
        Err(fault) => return Err(fault),
    };
    let built = Built::workspace()?;
    let mut outcomes = Outcomes::default();
    let tests = || {
        let mut tests = built.tests("lmc-server", "it")?;
        tests.envs(variables(Path::new(&folder)));
        tests.args(["--ignored", &format!("{module}::")]);
        let passed = shown::passed(&shown::output(&mut tests, LIMIT)?)?;
        Ok(format!("{passed} cases"))
    };
    outcomes.ran(module, tests());
    Ok(outcomes.finish())
}
