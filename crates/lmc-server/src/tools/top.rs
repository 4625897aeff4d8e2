//! `lmc top`: a server's state in a terminal, drawn again every two seconds.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table};
use serde_json::Value;

use super::format::{bytes, duration, number, percent, text, took};
use super::http::{Call, HttpUrl};
use super::status::{health, reasons_missed};

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Keys: q quits, space pauses the screen, r refreshes at once. `lmc status` prints the same once; a browser
at the server's HTTP address shows more.";

/// Time between two questions to the server.
const EVERY: Duration = Duration::from_secs(2);

pub(super) fn run(url: &HttpUrl) -> Result<()> {
    ensure!(
        std::io::stdout().is_terminal(),
        "lmc top requires a terminal: use `lmc status` to print the state once, or `lmc status --json` in programs"
    );
    // Asks before the terminal changes, so that an error of the server is printed as usual.
    let mut screen = Screen {
        address: url.to_string(),
        ..Screen::default()
    };
    screen.ask(url)?;
    let mut terminal = ratatui::try_init()?;
    let ended = follow(&mut terminal, &mut screen, url);
    ratatui::restore();
    ended
}

fn follow(
    terminal: &mut ratatui::DefaultTerminal,
    screen: &mut Screen,
    url: &HttpUrl,
) -> Result<()> {
    let (mut next, mut is_held) = (Instant::now() + EVERY, false);
    loop {
        terminal.draw(|frame| screen.draw(frame))?;
        if event::poll(next.saturating_duration_since(Instant::now()))? {
            let Event::Key(key) = event::read()? else {
                continue;
            };
            let is_end =
                key.modifiers.contains(KeyModifiers::CONTROL) && key.code == KeyCode::Char('c');
            match key.code {
                _ if key.kind != KeyEventKind::Press => {}
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                _ if is_end => return Ok(()),
                KeyCode::Char(' ') => is_held = !is_held,
                KeyCode::Char('r') => next = Instant::now(),
                _ => {}
            }
        }
        if Instant::now() >= next {
            next = Instant::now() + EVERY;
            if !is_held {
                screen.fault = screen.ask(url).err().map(|error| error.to_string());
            }
        }
    }
}

/// The content of the screen.
#[derive(Debug, Default)]
struct Screen {
    address: String,
    status: Value,
    /// Shares of tokens that were found in each step of the last hour, in percent.
    found: Vec<u64>,
    /// The reason why the last request had no answer.
    fault: Option<String>,
}

impl Screen {
    fn ask(&mut self, url: &HttpUrl) -> Result<()> {
        self.status = Call::get("/status").send(url)?;
        let history = Call::get("/history").send(url)?;
        self.found = found(
            history["samples"]
                .as_array()
                .map(Vec::as_slice)
                .unwrap_or_default(),
        );
        Ok(())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let status = &self.status["lmc"];
        let list = |field: &str| status[field].as_array().cloned().unwrap_or_default();
        let (tiers, workers) = (list("lower"), list("instances"));
        let faults: Vec<Line<'_>> = list("tiers")
            .iter()
            .filter_map(|tier| {
                Some(format!(
                    "{}: {}",
                    text(&tier["tier"]),
                    tier["fault"].as_str()?
                ))
            })
            .chain(self.fault.iter().map(|fault| format!("no answer: {fault}")))
            .map(|fault| Line::from(fault).bold())
            .collect();
        let heights = [
            Constraint::Length(1),
            Constraint::Length(faults.len() as u16),
            Constraint::Length(tiers.len() as u16 + 3),
            Constraint::Length(6),
            Constraint::Min(6),
            Constraint::Length((workers.len() as u16 + 3).min(10)),
            Constraint::Length(1),
        ];
        let [head, troubles, fills, hits, middle, engines, foot] =
            Layout::vertical(heights).areas(frame.area());
        frame.render_widget(self.head(status), head);
        frame.render_widget(Paragraph::new(faults), troubles);
        draw_fills(frame, fills, status, &tiers);
        self.draw_hits(frame, hits, status);
        let [left, right] =
            Layout::horizontal([Constraint::Percentage(40), Constraint::Percentage(60)])
                .areas(middle);
        frame.render_widget(missed(status), left);
        frame.render_widget(operations(&list("operations")), right);
        frame.render_widget(engines_of(&workers), engines);
        frame.render_widget(
            Line::from("q quits, space pauses the screen, r refreshes at once").dim(),
            foot,
        );
    }

    fn head(&self, status: &Value) -> Line<'_> {
        let up = duration(number(&status["uptime_seconds"]));
        let chunk = &status["chunk_size"];
        Line::from(format!(
            "lmc {}, {}, up {up}, chunks of {chunk} tokens",
            self.address,
            health(&self.status)
        ))
        .bold()
    }

    fn draw_hits(&self, frame: &mut Frame<'_>, area: Rect, status: &Value) {
        let counts = &status["counts"];
        let all = percent(
            number(&counts["hit_tokens"]),
            number(&counts["lookup_tokens"]),
        );
        let now = self
            .found
            .last()
            .map_or_else(String::new, |now| format!(", {now} % now"));
        let title = format!(
            "share of the requested tokens that were found, last hour: {all} since the start{now}"
        );
        let block = Block::bordered().title(title);
        let inner = usize::from(block.inner(area).width);
        let shown = &self.found[self.found.len().saturating_sub(inner)..];
        frame.render_widget(Sparkline::default().block(block).max(100).data(shown), area);
    }
}

/// Returns the shares of tokens that were found between each two samples, without steps in which no tokens
/// were requested.
fn found(samples: &[Value]) -> Vec<u64> {
    let steps = samples.windows(2).filter_map(|pair| {
        let grown = |field: &str| number(&pair[1][field]) - number(&pair[0][field]);
        let asked = grown("asked_tokens");
        let found = grown("found_dram_tokens") + grown("found_lower_tokens");
        (asked > 0.0).then_some((100.0 * found / asked).round().max(0.0) as u64)
    });
    steps.collect()
}

/// Draws gauges of memory and of each lower tier.
fn draw_fills(frame: &mut Frame<'_>, area: Rect, status: &Value, tiers: &[Value]) {
    let block = Block::bordered().title("memory and tiers");
    let rows =
        Layout::vertical(vec![Constraint::Length(1); tiers.len() + 1]).split(block.inner(area));
    frame.render_widget(block, area);
    let usage = &status["usage"];
    let memory = (
        "memory".to_owned(),
        &usage["used_bytes"],
        &usage["pool_bytes"],
        &usage["chunks"],
    );
    let tiers = tiers.iter().map(|tier| {
        (
            text(&tier["tier"]),
            &tier["bytes"],
            &tier["capacity"],
            &tier["chunks"],
        )
    });
    for ((name, used, most, chunks), row) in std::iter::once(memory).chain(tiers).zip(rows.iter()) {
        let ratio = match number(most) {
            0.0 => 0.0,
            most => (number(used) / most).clamp(0.0, 1.0),
        };
        let of = match number(most) {
            0.0 => String::new(),
            _ => format!(" of {}", bytes(most)),
        };
        let label = format!("{name}: {}{of}, {chunks} chunks", bytes(used));
        frame.render_widget(Gauge::default().ratio(ratio).label(label), *row);
    }
}

fn table<'a>(
    title: &'a str,
    heads: &[&'a str],
    widths: &[Constraint],
    rows: Vec<Vec<String>>,
) -> Table<'a> {
    let head = heads.iter().map(|head| Cell::from(*head));
    let head = Row::new(head).style(Style::new().add_modifier(Modifier::BOLD));
    let rows = rows.into_iter().map(Row::new);
    Table::new(rows, widths.iter().copied())
        .header(head)
        .block(Block::bordered().title(title))
}

fn missed(status: &Value) -> Table<'static> {
    let reasons = reasons_missed(status).into_iter();
    let rows = reasons.map(|(share, name)| vec![share, name]);
    table(
        "not found, since the start",
        &["share", "reason"],
        &[Constraint::Length(8), Constraint::Min(10)],
        rows.collect(),
    )
}

fn operations(operations: &[Value]) -> Table<'static> {
    let used = operations
        .iter()
        .filter(|one| number(&one["answered"]) > 0.0);
    let rows = used.map(|one| {
        vec![
            text(&one["operation"]),
            one["answered"].to_string(),
            took(&one["p50_seconds"]),
            took(&one["p99_seconds"]),
        ]
    });
    table(
        "requests of engines",
        &["operation", "answered", "p50", "p99"],
        &[
            Constraint::Min(16),
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(8),
        ],
        rows.collect(),
    )
}

fn engines_of(workers: &[Value]) -> Table<'static> {
    let rows = workers.iter().map(|one| {
        vec![
            text(&one["model"]),
            one["world_size"].to_string(),
            text(&one["mode"]),
            bytes(&one["chunk_bytes"]),
            duration(number(&one["silent_seconds"])),
            if one["connected"] == true {
                "open"
            } else {
                "ended"
            }
            .to_owned(),
        ]
    });
    table(
        "engines",
        &["model", "ranks", "copies", "chunk", "silent", "connection"],
        &[
            Constraint::Min(16),
            Constraint::Length(6),
            Constraint::Length(16),
            Constraint::Length(10),
            Constraint::Length(8),
            Constraint::Length(10),
        ],
        rows.collect(),
    )
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn drawn(screen: &Screen, columns: u16, lines: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, lines)).expect("a screen");
        terminal
            .draw(|frame| screen.draw(frame))
            .expect("it is drawn");
        terminal.backend().to_string()
    }

    #[test]
    fn a_screen_has_all_parts_and_a_small_one_is_drawn_too() {
        let status = json!({"status": "degraded", "lmc": {
            "uptime_seconds": 90, "chunk_size": 256,
            "usage": {"used_bytes": 1 << 30, "pool_bytes": 4u64 << 30, "chunks": 512},
            "lower": [{"tier": "disk", "bytes": 5u64 << 30, "capacity": 10u64 << 30, "chunks": 9}],
            "tiers": [{"tier": "dram", "fault": null}, {"tier": "disk", "fault": "no answer"}],
            "counts": {"hit_tokens": 3, "lookup_tokens": 4, "missed_evicted": 1, "missed_limit": 0},
            "operations": [{"operation": "lookup", "answered": 7, "p50_seconds": 0.001, "p99_seconds": null}],
            "instances": [{"model": "m", "world_size": 2, "mode": "engine_driven", "chunk_bytes": 2 << 20,
                "silent_seconds": 1, "connected": false}],
        }});
        let sample = |asked: u64, found: u64| json!({"asked_tokens": asked, "found_dram_tokens": found, "found_lower_tokens": 0});
        let samples = [sample(0, 0), sample(10, 5), sample(10, 5), sample(20, 15)];
        let mut screen = Screen {
            address: "http://host:8080".to_owned(),
            status,
            found: found(&samples),
            fault: None,
        };
        assert_eq!(screen.found, [50, 100]);
        let text = drawn(&screen, 120, 40);
        for part in [
            "http://host:8080",
            "DEGRADED",
            "disk: no answer",
            "memory: 1.00 GiB of 4.00 GiB, 512 chunks",
            "75.0 % since the start, 100 % now",
            "25.0 %",
            "probably evicted",
            "lookup",
            "1.0 ms",
            "ended",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        screen.fault = Some("refused".to_owned());
        assert!(drawn(&screen, 120, 40).contains("no answer: refused"));
        for (columns, lines) in [(1, 1), (20, 5), (300, 100)] {
            drawn(&screen, columns, lines);
        }
    }
}
