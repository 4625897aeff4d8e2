//! `lmc top`: a server's state in a terminal, drawn again every two seconds.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style, Stylize as _};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Gauge, Paragraph, Row, Sparkline, Table, Wrap};
use serde_json::Value;

use super::format::{bytes, duration, list, number, percent, text, took};
use super::http::{Call, HttpUrl};
use super::status::{found_by_tier, health, reasons_missed};
use crate::config::human_bytes;

/// Text after the help of the command.
pub(super) const HELP: &str = "\
Keys: q quits, space pauses the screen, r refreshes at once. `lmc status` prints the same once; a browser
at the server's HTTP address shows more.";

/// Time between two questions to the server.
const EVERY: Duration = Duration::from_secs(2);
/// Width in columns at which tables show every column.
const WIDE: u16 = 110;

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
    /// Bytes evicted in each second between the last two samples.
    evicted: f64,
    tenants: Value,
    peers: Value,
    /// The reason why the last request had no answer.
    fault: Option<String>,
}

impl Screen {
    fn ask(&mut self, url: &HttpUrl) -> Result<()> {
        self.status = Call::get("/status").send(url)?;
        let history = Call::get("/history").send(url)?;
        let samples = list(&history["samples"]);
        (self.found, self.evicted) = (found(samples), evicted(samples));
        // A server without these paths has a status all the same.
        self.tenants = Call::get("/tenants").send(url).unwrap_or_default();
        let lower = list(&self.status["lmc"]["lower"]);
        self.peers = match lower.iter().any(|tier| tier["tier"] == "peers") {
            true => Call::get("/peers").send(url).unwrap_or_default(),
            false => Value::Null,
        };
        Ok(())
    }

    fn draw(&self, frame: &mut Frame<'_>) {
        let status = &self.status["lmc"];
        let (tiers, workers) = (list(&status["lower"]), list(&status["instances"]));
        let faults: Vec<String> = list(&status["tiers"])
            .iter()
            .filter_map(|tier| {
                Some(format!(
                    "{}: {}",
                    text(&tier["tier"]),
                    tier["fault"].as_str()?
                ))
            })
            .chain(self.fault.iter().map(|fault| format!("no answer: {fault}")))
            .collect();
        // Words that do not fit continue on the next line, which takes some of the width.
        let width = usize::from(frame.area().width.max(20) - 10);
        let lines = faults.iter().map(|fault| fault.len().div_ceil(width));
        let (tenants, peers) = (tenants(&self.tenants), peers(&self.peers));
        let users = match tenants.len().max(peers.len()) as u16 {
            0 => 0,
            users => (users + 3).min(8),
        };
        let is_wide = frame.area().width >= WIDE;
        let heights = [
            Constraint::Length(1),
            Constraint::Length(lines.sum::<usize>() as u16),
            Constraint::Length(tiers.len() as u16 + 3),
            Constraint::Length(5),
            Constraint::Min(5),
            Constraint::Length(users),
            Constraint::Length((workers.len() as u16 + 3).min(10)),
            Constraint::Length(1),
        ];
        let [head, troubles, fills, hits, middle, shared, engines, foot] =
            Layout::vertical(heights).areas(frame.area());
        frame.render_widget(self.head(status), head);
        let faults = Paragraph::new(faults.join("\n")).bold();
        frame.render_widget(faults.wrap(Wrap { trim: true }), troubles);
        self.draw_fills(frame, fills, status, tiers);
        self.draw_hits(frame, hits, status);
        let [left, right] =
            Layout::horizontal([Constraint::Percentage(40), Constraint::Percentage(60)])
                .areas(middle);
        frame.render_widget(missed(status), left);
        frame.render_widget(operations(list(&status["operations"]), is_wide), right);
        let [left, right] =
            Layout::horizontal([Constraint::Percentage(40), Constraint::Percentage(60)])
                .areas(shared);
        let rows = usize::from(shared.height.saturating_sub(3));
        let title = |what: &str, all: usize| match all.saturating_sub(rows) {
            0 => what.to_owned(),
            more => format!("{what}, and {more} more"),
        };
        let of_tenants = title(
            "tenants",
            tenants.len() + number(&self.tenants["more"]) as usize,
        );
        let of_peers = title("peers", peers.len());
        let heads = ["tenant", "in memory", "quota"];
        let widths = [
            Constraint::Min(9),
            Constraint::Length(9),
            Constraint::Length(9),
        ];
        frame.render_widget(table(of_tenants, &heads, &widths, tenants), left);
        let heads = ["peer", "connected", "read", "served", "holds"];
        let widths = [
            Constraint::Min(9),
            Constraint::Length(13),
            Constraint::Length(10),
            Constraint::Length(10),
            Constraint::Length(10),
        ];
        let shown = if is_wide { 5 } else { 4 };
        let of_peers = table(of_peers, &heads[..shown], &widths[..shown], peers);
        frame.render_widget(of_peers, right);
        frame.render_widget(engines_of(workers), engines);
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

    /// Draws gauges of memory and of each lower tier.
    fn draw_fills(&self, frame: &mut Frame<'_>, area: Rect, status: &Value, tiers: &[Value]) {
        let all = bytes(&status["engine"]["evicted_bytes"]);
        let now = human_bytes(self.evicted as u64);
        let title = format!("memory and tiers, {all} evicted since the start, {now}/s now");
        let block = Block::bordered().title(title);
        let rows =
            Layout::vertical(vec![Constraint::Length(1); tiers.len() + 1]).split(block.inner(area));
        frame.render_widget(block, area);
        let moved = |tier: &Value| {
            format!(
                ", {} read in {}, {} written",
                bytes(&tier["promoted_bytes"]),
                quantiles(&tier["read_time"]),
                bytes(&tier["written_bytes"])
            )
        };
        let usage = &status["usage"];
        let memory = (
            "memory".to_owned(),
            &usage["used_bytes"],
            &usage["pool_bytes"],
            &usage["chunks"],
            String::new(),
        );
        let tiers = tiers.iter().map(|tier| {
            (
                text(&tier["tier"]),
                &tier["bytes"],
                &tier["capacity"],
                &tier["chunks"],
                moved(tier),
            )
        });
        for ((name, used, most, chunks, moved), row) in
            std::iter::once(memory).chain(tiers).zip(rows.iter())
        {
            let ratio = match number(most) {
                0.0 => 0.0,
                most => (number(used) / most).clamp(0.0, 1.0),
            };
            let of = match number(most) {
                0.0 => String::new(),
                _ => format!(" of {}", bytes(most)),
            };
            let label = format!("{name}: {}{of}, {chunks} chunks{moved}", bytes(used));
            frame.render_widget(Gauge::default().ratio(ratio).label(label), *row);
        }
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
        let tiers = found_by_tier(status);
        let title = format!("tokens found, last hour{now}; since the start {all}: {tiers}");
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

/// Returns the bytes that were evicted in each second between the last two samples.
fn evicted(samples: &[Value]) -> f64 {
    let [.., before, last] = samples else {
        return 0.0;
    };
    let grown = |field: &str| number(&last[field]) - number(&before[field]);
    (grown("evicted_bytes") / grown("time").max(1.0)).max(0.0)
}

/// Returns the quantiles of durations; `-` if nothing was counted.
fn quantiles(times: &Value) -> String {
    format!(
        "{} / {}",
        took(&times["p50_seconds"]),
        took(&times["p99_seconds"])
    )
}

fn tenants(answer: &Value) -> Vec<Vec<String>> {
    let quota = |quota: &Value| quota.as_u64().map_or_else(|| "-".to_owned(), human_bytes);
    let tenants = list(&answer["tenants"]).iter();
    let row = |one: &Value| {
        vec![
            text(&one["tenant"]),
            bytes(&one["bytes"]),
            quota(&one["quota_bytes"]),
        ]
    };
    tenants.map(row).collect()
}

fn peers(answer: &Value) -> Vec<Vec<String>> {
    let peers = list(&answer["peers"]);
    let here = |id: &Value| peers.iter().any(|peer| peer["id"] == *id);
    let absent = list(&answer["named"]).iter();
    let absent = absent.filter(|named| named["itself"] != true && !here(&named["id"]));
    let absent = absent.map(|named| vec![text(&named["name"]), "not connected".to_owned()]);
    let connected = peers.iter().map(|peer| {
        let name = if peer["name"].is_string() {
            "name"
        } else {
            "id"
        };
        vec![
            text(&peer[name]),
            duration(number(&peer["connected_seconds"])),
            bytes(&peer["counters"]["read_bytes"]),
            bytes(&peer["counters"]["served_bytes"]),
            bytes(&peer["holds"]["bytes"]),
        ]
    });
    connected.chain(absent).collect()
}

fn table<'a>(
    title: impl Into<Line<'a>>,
    heads: &[&'a str],
    widths: &[Constraint],
    rows: Vec<Vec<String>>,
) -> Table<'a> {
    let head = heads.iter().map(|head| Cell::from(*head));
    let head = Row::new(head).style(Style::new().add_modifier(Modifier::BOLD));
    let rows = rows.into_iter().map(Row::new);
    Table::new(rows, widths.iter().copied())
        .header(head)
        .block(Block::bordered().title(title.into()))
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

fn operations(operations: &[Value], is_wide: bool) -> Table<'static> {
    let shown = if is_wide { 4 } else { 3 };
    let used = operations
        .iter()
        .filter(|one| number(&one["answered"]) > 0.0);
    let rows = used.map(|one| {
        vec![
            text(&one["operation"]),
            one["answered"].to_string(),
            quantiles(&one["last_minute"]),
            quantiles(one),
        ]
    });
    table(
        "requests of engines",
        &[
            "operation",
            "answered",
            "p50 / p99, minute",
            "since the start",
        ][..shown],
        &[
            Constraint::Min(12),
            Constraint::Length(8),
            Constraint::Length(19),
            Constraint::Length(19),
        ][..shown],
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

    fn shows(screen: &Screen, (columns, lines): (u16, u16), parts: &[&str]) {
        let text = drawn(screen, columns, lines);
        for part in parts {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn a_screen_has_all_parts_and_a_small_one_is_drawn_too() {
        let status = json!({"status": "degraded", "lmc": {
            "uptime_seconds": 90, "chunk_size": 256,
            "usage": {"used_bytes": 1 << 30, "pool_bytes": 4u64 << 30, "chunks": 512},
            "lower": [
                {"tier": "disk", "bytes": 5u64 << 30, "capacity": 10u64 << 30, "chunks": 9, "hit_tokens": 1,
                    "promoted_bytes": 3 << 20, "read_time": {"p50_seconds": 0.002, "p99_seconds": 0.5}},
                {"tier": "peers"},
            ],
            "engine": {"evicted_bytes": 7u64 << 30},
            "tiers": [{"tier": "dram", "fault": null}, {"tier": "disk", "fault": "no answer"}],
            "counts": {"hit_tokens": 3, "hit_tokens_dram": 2, "lookup_tokens": 4, "missed_evicted": 1, "missed_limit": 0},
            "operations": [{"operation": "lookup", "answered": 7, "p50_seconds": 0.001, "p99_seconds": null,
                "last_minute": {"p50_seconds": 0.003, "p99_seconds": 0.004}}],
            "instances": [{"model": "m", "world_size": 2, "mode": "engine_driven", "chunk_bytes": 2 << 20,
                "silent_seconds": 1, "connected": false}],
        }});
        let sample = |asked: u64, found: u64| json!({"asked_tokens": asked, "found_dram_tokens": found, "found_lower_tokens": 0});
        let samples = [sample(0, 0), sample(10, 5), sample(10, 5), sample(20, 15)];
        let mut screen = Screen {
            address: "http://host:8080".to_owned(),
            status,
            found: found(&samples),
            evicted: evicted(&[
                json!({"time": 10, "evicted_bytes": 0}),
                json!({"time": 20, "evicted_bytes": 10 << 20}),
            ]),
            tenants: json!({"more": 3, "tenants": [
                {"tenant": "0123456789ab", "bytes": 6 << 20, "quota_bytes": 8 << 20},
                {"tenant": "_default", "bytes": 1 << 20, "quota_bytes": null},
            ]}),
            peers: json!({
                "peers": [{"id": "b-1", "name": "b", "connected_seconds": 5.0, "holds": {"bytes": 9 << 20}}],
                "named": [{"id": "b-1", "name": "b"}, {"id": null, "name": "c:7700"}],
            }),
            fault: None,
        };
        assert_eq!(screen.found, [50, 100]);
        let parts = [
            "http://host:8080",
            "DEGRADED",
            "disk: no answer",
            "memory: 1.00 GiB of 4.00 GiB, 512 chunks",
            "100 % now; since the start 75.0 %: memory 50.0 %, disk 25.0 %, peers 0.0 %",
            "3.00 MiB read in 2.0 ms / 500.0 ms",
            "7.00 GiB evicted since the start, 1.00 MiB/s now",
            "tenants, and 3 more",
            "0123456789ab",
            "8.00 MiB",
            "9.00 MiB",
            "c:7700",
            "not connected",
            "3.0 ms / 4.0 ms",
            "25.0 %",
            "probably evicted",
            "lookup",
            "1.0 ms / -",
            "ended",
        ];
        shows(&screen, (120, 40), &parts);
        let in_few_columns = [
            "3.0 ms / 4.0 ms",
            "8.00 MiB",
            "not connected",
            "tenants, and 3 more",
            "ended",
        ];
        shows(&screen, (80, 24), &in_few_columns);
        screen.tenants["tenants"] = json!(vec![json!({"tenant": "t", "bytes": 1}); 40]);
        let cut = drawn(&screen, 80, 24);
        let more = cut
            .split("tenants, and ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next());
        let more = more.and_then(|more| more.parse().ok());
        // The tenants that the server leaves out, and the tenants without a row.
        assert!(
            more.is_some_and(|more: u64| (35..43).contains(&more)),
            "{cut}"
        );
        screen.fault = Some("refused".to_owned());
        assert!(drawn(&screen, 120, 40).contains("no answer: refused"));
        for (columns, lines) in [(1, 1), (20, 5), (300, 100)] {
            drawn(&screen, columns, lines);
        }
    }
}
