//! A test in a process of its own.

use std::any;
use std::process::Command;

/// Returns the name by which the runner of this test program knows a test. The argument is the
/// test's function, so that a test that is moved or renamed is still found, or does not compile.
///
/// ```
/// # mod it { pub mod folder { pub fn peer() {} } }
/// assert_eq!(lmc_testkit::test_name(it::folder::peer).split("it::").last(), Some("folder::peer"));
/// ```
pub fn test_name<F: Fn()>(_: F) -> &'static str {
    let path = any::type_name::<F>();
    path.split_once("::").map_or(path, |(_, name)| name)
}

/// Returns the command that runs one test of this program, also an ignored one, and shows the
/// test's output.
///
/// # Panics
/// If this program has no path.
pub fn own_test(test: impl Fn()) -> Command {
    let program = std::env::current_exe().expect("a test has a path");
    let mut command = Command::new(program);
    command.args(test_arguments(test));
    command
}

/// Returns the arguments by which this program, or a copy, runs one test as [`own_test`] does.
pub fn test_arguments(test: impl Fn()) -> [&'static str; 5] {
    let name = test_name(test);
    [
        "--exact",
        name,
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ]
}
