//! `cargo xtask test-alerts`: the alert rules and boards, by Prometheus' own tool on pages of real
//! servers.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use crate::built::Built;
use crate::outcomes::Outcomes;
use crate::scripts::{self, NotToBeHad};
use crate::shown;

/// Time for all tests: each causes a fault and waits for the server to see it.
const LIMIT: Duration = Duration::from_secs(600);

/// Runs the tests. Returns true if all is well.
pub(crate) fn run() -> Result<bool> {
    let folder = match scripts::set_up("xtask/python/prometheus.sh", &[]) {
        Ok(folder) => folder,
        Err(why) if why.is::<NotToBeHad>() => return Ok(scripts::skipped("alerts", &why)),
        Err(fault) => return Err(fault),
    };
    let built = Built::workspace()?;
    let mut outcomes = Outcomes::default();
    outcomes.ran("alerts", tests(&built, Path::new(&folder)));
    Ok(outcomes.finish())
}

fn tests(built: &Built, folder: &Path) -> Result<String> {
    let mut tests = built.tests("lmc-server", "it")?;
    tests
        .env("LMC_PROMTOOL", folder.join("promtool"))
        .env("LMC_LMCACHE_BOARD", folder.join("lmcache.json"))
        .args(["--ignored", "alerts::"]);
    let passed = shown::passed(&shown::output(&mut tests, LIMIT)?)?;
    Ok(format!("{passed} cases"))
}
