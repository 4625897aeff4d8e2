//! Log lines on stderr, as text or JSON.
//!
//! **Invariant:** an event is one line, whatever it contains. Names and ids come from clients, peers and
//! their users; no name can end a line and begin a false one, or send a command to a terminal. Events of
//! all crates reach stderr only through this module.
//!
//! **Invariant:** no thread of the server waits for stderr, which may be a pipe without a reader. A
//! separate thread writes the lines, see [`queue`].

mod queue;

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::time::Duration;

use lmc_key::Printable;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

use crate::config::{LogFormat, filter_of};
use queue::{LineQueue, LineWriter};

static QUEUE: LineQueue = LineQueue::new();
/// Replaces the filter of the subscriber.
static FILTER: OnceLock<Box<dyn Fn(EnvFilter) + Send + Sync>> = OnceLock::new();
/// Longest time that the process waits at its end for its last lines to be written.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Sends events to stderr from now on.
///
/// # Errors
/// An I/O error if the thread that writes lines cannot be started.
pub(crate) fn to_stderr(level: &str, format: LogFormat) -> io::Result<()> {
    std::thread::Builder::new()
        .name("lmc-log".to_owned())
        .spawn(|| QUEUE.write_to(io::stderr()))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter(level))
        // With it, the subscriber would panic if stderr is closed, as at the end of an ssh session.
        .log_internal_errors(false);
    // Only tests have another subscriber, which serves as well.
    let replace: Box<dyn Fn(EnvFilter) + Send + Sync> = match format {
        LogFormat::Text => {
            let lines = lines
                .with_target(false)
                .with_ansi(io::stderr().is_terminal())
                .fmt_fields(PrintableFields)
                .with_writer(|| LineWriter(&QUEUE))
                .with_filter_reloading();
            let handle = lines.reload_handle();
            let _ = lines.try_init();
            // An error means that the subscriber is gone.
            Box::new(move |filter| drop(handle.reload(filter)))
        }
        LogFormat::Json => {
            let lines = lines
                .json()
                .flatten_event(true)
                .with_writer(|| PrintableLine(LineWriter(&QUEUE)))
                .with_filter_reloading();
            let handle = lines.reload_handle();
            let _ = lines.try_init();
            Box::new(move |filter| drop(handle.reload(filter)))
        }
    };
    let _ = FILTER.set(replace);
    Ok(())
}

/// Changes the level from now on.
pub(crate) fn set_level(level: &str) {
    if let Some(replace) = FILTER.get() {
        replace(filter(level));
    }
}

fn filter(level: &str) -> EnvFilter {
    EnvFilter::try_new(filter_of(level)).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Prints a line that is not an event.
pub(crate) fn print(text: &str) {
    QUEUE.push(format!("{text}\n").as_bytes());
}

/// Waits until the lines so far are written, at most [`FLUSH_TIMEOUT`]. Must be called before every end of
/// the process.
pub(crate) fn flush() {
    QUEUE.flush(FLUSH_TIMEOUT);
}

/// Returns the number of log lines since the start that were not written.
pub(crate) fn dropped_lines() -> u64 {
    QUEUE.dropped()
}

/// Formats the message and the fields of a text line, without control characters.
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

/// A writer of whole JSON lines. JSON escapes line ends, but not all other control characters that
/// terminals obey.
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
