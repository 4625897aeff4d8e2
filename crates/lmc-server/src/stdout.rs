//! Standard output of the commands. Its reader may close the pipe early: `lmc status | head -1`.

use std::fmt;
use std::io::{self, ErrorKind, Write as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Prints as `print!` does.
macro_rules! out {
    ($($text:tt)*) => {
        $crate::stdout::print(format_args!($($text)*))
    };
}

/// Prints as `println!` does.
macro_rules! outln {
    ($($text:tt)*) => {
        $crate::stdout::print(format_args!("{}\n", format_args!($($text)*)))
    };
}

pub(crate) use {out, outln};

/// Set once output could not be printed.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Returns true once output could not be printed: the command has then failed.
pub(crate) fn has_failed() -> bool {
    FAILED.load(Ordering::Relaxed)
}

/// Prints a text.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    bytes(fmt::format(text).as_bytes());
}

/// Prints bytes. A reader that closes the pipe is no error; other errors are shown, and the command fails
/// at its end.
pub(crate) fn bytes(bytes: &[u8]) {
    let mut stdout = io::stdout().lock();
    let written = stdout.write_all(bytes).and_then(|()| stdout.flush());
    if let Err(error) = written
        && error.kind() != ErrorKind::BrokenPipe
    {
        FAILED.store(true, Ordering::Relaxed);
        eprintln!("lmc: cannot print: {error}");
    }
}
