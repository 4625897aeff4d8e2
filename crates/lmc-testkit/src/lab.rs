//! Tests that only the lab has the time for.

use std::env;

/// Environment variable that is set where `cargo xtask lab` runs the tests.
const LAB: &str = "LMC_TEST_LAB";

/// Returns true in the lab. Elsewhere it prints that the test is left to the lab, and why: the
/// caller returns at once.
///
/// For a test that needs more than a second or two of real time, or the machine for itself.
pub fn in_lab(why: &str) -> bool {
    let lab = is_lab();
    if !lab {
        println!("skipped: left to the lab: {why}");
    }
    lab
}

/// Returns how often a test repeats what it does: `gate` times, and in the lab `lab` times.
pub fn rounds(gate: usize, lab: usize) -> usize {
    match is_lab() {
        true => lab,
        false => gate,
    }
}

fn is_lab() -> bool {
    env::var_os(LAB).is_some()
}
