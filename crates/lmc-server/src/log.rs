//! Log lines on stderr, as text or JSON.
//!
//! **Invariant:** an event is one line, whatever is in it. Names and ids come from peers, and from
//! the users of those peers; none of them can end a line and begin a false one, or send a terminal
//! a command. This is the only way to stderr for events of all crates.

use std::fmt;
use std::io::{self, IsTerminal, Write};

use lmc_key::Printable;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

use crate::config::{LogFormat, ServeConfig, filter_of};

/// Sends events to stderr from here on.
pub(crate) fn to_stderr(config: &ServeConfig) {
    let filter = EnvFilter::try_new(filter_of(&config.log_level));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new("info")))
        // It would panic where stderr is closed: at the end of an ssh session, of a pipe's reader.
        .log_internal_errors(false);
    // Another subscriber is there only in tests, and serves as well.
    let _ = match config.log_format {
        LogFormat::Text => lines
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .fmt_fields(PrintableFields)
            .with_writer(io::stderr)
            .try_init(),
        LogFormat::Json => lines
            .json()
            .with_writer(|| PrintableLine(io::stderr()))
            .try_init(),
    };
}

/// Message and fields of a text line.
struct PrintableFields;

impl<'writer> FormatFields<'writer> for PrintableFields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let mut text = String::new();
        DefaultFields::new().format_fields(Writer::new(&mut text), fields)?;
        write!(writer, "{}", Printable(&text))
    }
}

/// A writer of whole JSON lines. JSON escapes what ends a line, and leaves other control characters
/// that terminals obey.
struct PrintableLine<W>(W);

impl<W: Write> Write for PrintableLine<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = text.strip_suffix('\n').unwrap_or(&text);
        self.0
            .write_all(format!("{}\n", Printable(text)).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}
