//! Two processes at the two ends of a channel: every operation, checked byte for byte, then how
//! fast each is.
//!
//! ```text
//! two_sides serve HOST:PORT [FLAGS]   obeys a driver that connects there; port 0 for a free one
//! two_sides drive HOST:PORT [FLAGS]   checks the channel to the server there
//!   --channel socket|nixl             default socket
//!   --backend NAME                    NIXL's, default UCX; its settings come from UCX_… variables
//!   --at ADDRESS                      where the channel listens; a free port unless given
//!   --arena-mib N                     each side's memory, default 256
//!   --sweep-kib N                     the largest batch of the sweep, default 65536; 0 for none
//!   --timeout SECONDS                for one operation, default 20
//!   --limit SECONDS                   for all of it, default 300; then the process ends with 3
//! ```
//!
//! Each result is a line of JSON: `ready` of a server, then `check`, `sweep` and `done` of a
//! driver. A driver ends with 0 when all checks passed. The last of them ends the server.

mod control;
mod drive;
mod pattern;
mod serve;
mod side;
mod sweep;

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use side::{Failure, Flags};

const USAGE: &str = "two_sides serve|drive HOST:PORT [FLAGS]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("two_sides: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<bool, Failure> {
    let [verb, address, rest @ ..] = args else {
        return Err(USAGE.into());
    };
    let flags = Flags::parse(address, rest)?;
    end_after(flags.limit);
    match verb.as_str() {
        "serve" => serve::serve(&flags).map(|()| true),
        "drive" => drive::drive(&flags),
        _ => Err(USAGE.into()),
    }
}

/// Whatever hangs, the process does not.
fn end_after(limit: Duration) {
    thread::spawn(move || {
        thread::sleep(limit);
        eprintln!("two_sides: not done after {limit:?}");
        std::process::exit(3);
    });
}
