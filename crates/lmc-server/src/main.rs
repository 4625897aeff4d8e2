//! The `lmc` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    lmc_server::cli::run(std::env::args_os())
}
