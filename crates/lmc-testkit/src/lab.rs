//! Tests that only the lab has the time for.

use std::env;

/// Environment variable that is set where `cargo xtask lab` runs the tests.
const LAB: &str = "LMC_TEST_LAB";

/// Returns true in the lab. Elsewhere it prints that the test is left to the lab, with the reason
/// `why`; the caller then returns at once.
///
/// For a test that needs more than a second or two of real time, or the machine for itself.
pub fn in_lab(why: &str) -> bool {
    let lab = is_lab();
    if !lab {
        println!("skipped: left to the lab: {why}");
    }
    lab
}

/// Returns the number of rounds of a test: `gate`, or in the lab `lab`.
pub fn rounds(gate: usize, lab: usize) -> usize {
    match is_lab() {
        true => lab,
        false => gate,
    }
}

fn is_lab() -> bool {
    env::var_os(LAB).is_some()
}
